//! The texts of the project are plain English: short sentences, few that begin with a headless "what" or "where", and none of the phrases
//! of [`PHRASES`]. STYLE.md has the rules, and [`EXCEPTIONS`] the files that break them today. That table may only shrink.
//! `english/printed.rs` checks what the program prints.

use std::fs;
use std::path::{Path, PathBuf};

#[path = "english/printed.rs"]
mod printed;

/// Words of a sentence, on average over a file.
const MOST_WORDS: usize = 20;
/// So many words allow one opening of [`OPENINGS`]; a shorter file may have one, too.
const WORDS_PER_OPENING: usize = 1000;
/// Words that open a sentence without a noun, as in "What is larger stays" or "Where it fails, it waits".
const OPENINGS: [&str; 5] = ["what", "who", "where", "whose", "whatever"];

/// See [`PHRASES`].
type Phrase = (&'static str, &'static str, &'static [&'static str]);

/// A phrase, the better version, and words that excuse it, before the phrase or in place of its `*`. `*` is any one word, and `^` the
/// beginning of a sentence.
const PHRASES: &[Phrase] = &[
    // Verbs.
    ("hangs on", "depends on", &[]),
    ("hang on", "depend on", &[]),
    ("is said", "is reported", &[]),
    ("are said", "are reported", &[]),
    ("was said", "was reported", &[]),
    ("is told", "is reported", &[]),
    ("are told", "are reported", &[]),
    ("tells *", "reports *", &["the", "a", "you", "it", "them", "us", "your"]),
    ("told from", "distinguished from", &[]),
    ("can be told", "can be known", &[]),
    ("cannot be told", "cannot be known", &[]),
    ("goes up and down", "fluctuates", &[]),
    ("comes to rest", "settles", &[]),
    ("stands first", "comes first", &[]),
    ("held against", "compared with", &[]),
    ("holds * against", "compares * with", &[]),
    ("hold * against", "compare * with", &[]),
    ("the wish", "the request", &[]),
    ("a wish", "a request", &[]),
    ("wishes", "requests", &[]),
    ("re-run", "replay", &[]),
    ("simulate again", "replay", &[]),
    // A noun that is denied.
    ("is no *", "is not a *", &["there", "longer", "larger", "more", "less", "such", "further"]),
    ("are no *", "are not *", &["there", "longer", "larger", "more", "less", "such", "further"]),
    ("was no *", "was not a *", &["there", "longer", "more", "less", "such", "further"]),
    ("means no *", "does not mean *", &[]),
    ("that is there", "that exists", &[]),
    ("that are there", "that exist", &[]),
    ("is not there", "does not exist", &[]),
    ("are not there", "do not exist", &[]),
    // Whose, and how many for each.
    ("of ours", "our ...", &[]),
    ("of theirs", "their ...", &[]),
    ("of before", "the earlier ...", &[]),
    ("a * a rank", "one * per rank", &[]),
    ("one * a rank", "one * per rank", &[]),
    ("a * a process", "one * per process", &[]),
    ("one * a process", "one * per process", &[]),
    ("a row a", "one row per", &[]),
    ("a line a", "one line per", &[]),
    ("a row each", "one row each", &[]),
    // Words that join.
    ("^so", "therefore", &[]),
    ("so that", "so, or: to", &[]),
    ("which is what", "which", &[]),
    ("that is what", "this", &[]),
    ("whoever", "anyone who", &[]),
    ("inside of", "inside", &[]),
    ("outside of", "outside", &[]),
    // Time and number.
    ("in that moment", "at that moment", &[]),
    ("for ever", "forever", &[]),
    ("anew", "again", &[]),
    ("once more", "again", &[]),
    ("as ever", "as usual", &[]),
    ("some hundred", "a few hundred", &[]),
    ("with its own words", "verbatim", &[]),
];

/// A file that is not plain English yet: the average words of its sentences (rounded up), its openings, its phrases. 0 is the limit that
/// every file has.
type Exception = (&'static str, usize, usize, usize);

/// Lower a number when you have mended a file, and remove the row of one that needs none. Add none.
const EXCEPTIONS: &[Exception] = &[];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The texts that this test reads, by their paths in the repository. The book's table of contents has no sentences.
fn files() -> Vec<String> {
    let mut found: Vec<String> = ["README", "ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY", "STYLE"]
        .map(|name| format!("{name}.md"))
        .into();
    let docs = fs::read_dir(root().join("docs")).expect("a folder").flatten();
    let docs = docs.map(|entry| format!("docs/{}", entry.file_name().to_string_lossy()));
    found.extend(docs.filter(|file| file.ends_with(".md") && file != "docs/SUMMARY.md"));
    found.sort();
    found
}

#[test]
fn texts_are_plain_english() {
    let known = files();
    let mut wrong: Vec<String> = vec![];
    for (file, ..) in EXCEPTIONS {
        if !known.iter().any(|it| it == file) {
            wrong.push(format!("{file}: there is no such file: remove its exception"));
        }
    }
    for file in known {
        let text = fs::read_to_string(root().join(&file)).expect("a text");
        let excused = EXCEPTIONS.iter().find(|row| row.0 == file).map_or([0; 3], |row| [row.1, row.2, row.3]);
        wrong.extend(Judgement::of(&read(&text)).against(&file, excused));
    }
    assert!(wrong.is_empty(), "\n{}\n\nThe rules: STYLE.md, Plain English.", wrong.join("\n"));
}

/// One word of a text.
struct Word {
    line: usize,
    /// Lower case, without punctuation. A code span is one word.
    key: String,
    /// As it is written.
    raw: String,
    /// A sentence begins here.
    begins: bool,
    /// No phrase goes from the word before to this one.
    apart: bool,
    /// Part of a sentence, and not of a table or a heading.
    in_prose: bool,
}

/// The words of a text in Markdown, without its blocks of code.
fn read(text: &str) -> Vec<Word> {
    let mut words: Vec<Word> = vec![];
    let (mut fenced, mut listed, mut in_code_span, mut begins, mut bad_examples) =
        (false, false, false, true, false);
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        if trimmed.starts_with("```") {
            fenced = !fenced;
            begins = true;
            continue;
        }
        let is_item = is_item(trimmed);
        let is_row = trimmed.starts_with('|');
        let is_heading = line.starts_with('#');
        // STYLE.md shows what not to write.
        bad_examples = is_row && (bad_examples || trimmed.starts_with("| write | not |"));
        if trimmed.is_empty() || is_heading || is_row {
            listed = false;
            in_code_span = false;
        }
        listed |= is_item;
        let is_code = fenced || (line.starts_with("    ") && !listed);
        begins |= trimmed.is_empty() || is_item || is_row || is_heading || is_code;
        if is_code || bad_examples {
            continue;
        }
        let text = if is_item { trimmed.split_once(' ').map_or("", |(_, rest)| rest) } else { trimmed };
        for cell in text.split(if is_row { '|' } else { '\n' }) {
            begins |= is_row;
            for raw in without_markup(cell, &mut in_code_span).split_whitespace() {
                begins = push(&mut words, raw, number + 1, begins, !is_row && !is_heading);
            }
        }
        begins |= is_row || is_heading;
    }
    words
}

/// Adds a word; whether a sentence ends with it.
fn push(words: &mut Vec<Word>, raw: &str, line: usize, begins: bool, in_prose: bool) -> bool {
    let key = raw.trim_matches(|one: char| !one.is_alphanumeric() && one != CODE).to_lowercase();
    if key.is_empty() {
        // A dash, an arrow, an ellipsis.
        return begins;
    }
    let before_it = words.last().is_none_or(|last| last.raw.ends_with(['.', ',', ';', ':', '!', '?', ')']));
    let apart = begins || before_it || raw.starts_with(['(', '"']);
    words.push(Word { line, key, raw: raw.to_owned(), begins, apart, in_prose });
    let is_short_form = ["e.g.", "i.e.", "vs."].iter().any(|form| raw.ends_with(form));
    raw.trim_end_matches([')', '"', '\'']).ends_with(['.', '!', '?'])
        && !is_short_form
        && !raw.ends_with("...")
}

fn is_item(line: &str) -> bool {
    let digits = line.trim_start_matches(|one: char| one.is_ascii_digit());
    line.starts_with("- ")
        || line.starts_with("* ")
        || (digits.len() < line.len() && digits.starts_with(". "))
}

/// What stands for a code span.
const CODE: char = '`';

/// A line without emphasis and the addresses of links, each code span as one character.
fn without_markup(line: &str, in_code_span: &mut bool) -> String {
    let mut clean = String::new();
    let mut rest = line.chars().peekable();
    while let Some(one) = rest.next() {
        match one {
            '`' => {
                *in_code_span = !*in_code_span;
                if *in_code_span {
                    clean.push(CODE);
                }
            }
            _ if *in_code_span => {}
            '*' | '[' => {}
            ']' if rest.peek() == Some(&'(') => {
                let _address = rest.by_ref().find(|one| *one == ')');
            }
            ']' => {}
            _ => clean.push(one),
        }
    }
    clean
}

/// A sentence of prose: its line, and its words.
type Sentence<'a> = (usize, &'a [Word]);

fn sentences(words: &[Word]) -> Vec<Sentence<'_>> {
    let parts = words.chunk_by(|_, next| !next.begins);
    // Two words are a label.
    parts.filter(|part| part[0].in_prose && part.len() > 2).map(|part| (part[0].line, part)).collect()
}

/// A complaint: the line, and what to do.
type Complaint = (usize, String);

struct Judgement {
    n_words: usize,
    /// Average words of a sentence, rounded up.
    average: usize,
    longest: Vec<Complaint>,
    openings: Vec<Complaint>,
    phrases: Vec<Complaint>,
}

impl Judgement {
    fn of(words: &[Word]) -> Judgement {
        let mut sentences = sentences(words);
        let n_words = sentences.iter().map(|(_, words)| words.len()).sum::<usize>();
        let average = n_words.div_ceil(sentences.len().max(1));
        let opens = |(_, words): &&Sentence<'_>| {
            let is_question = words.last().is_some_and(|last| last.raw.contains('?'));
            OPENINGS.contains(&&*words[0].key) && !is_question
        };
        let opening = |(line, words): &Sentence<'_>| {
            let better = "name the thing, or write \"if\", \"when\" or \"the ... that\"";
            (*line, format!("\"{} {} ...\" opens a sentence: {better}", words[0].raw, words[1].raw))
        };
        let openings = sentences.iter().filter(opens).map(opening).collect();
        sentences.sort_by_key(|(_, words)| std::cmp::Reverse(words.len()));
        let long = |(line, words): &Sentence<'_>| {
            let begin: Vec<&str> = words.iter().take(6).map(|word| &*word.raw).collect();
            (*line, format!("a sentence of {} words, \"{} ...\": make it two", words.len(), begin.join(" ")))
        };
        let longest = sentences.iter().take(5).map(long).collect();
        Judgement { n_words, average, longest, openings, phrases: phrases(words, PHRASES) }
    }

    /// How far each number goes beyond its limit; 0 within it.
    fn beyond(&self) -> [usize; 3] {
        let most_openings = self.n_words.div_ceil(WORDS_PER_OPENING);
        let beyond = |n: usize, most: usize| if n > most { n } else { 0 };
        [
            beyond(self.average, MOST_WORDS),
            beyond(self.openings.len(), most_openings),
            beyond(self.phrases.len(), 0),
        ]
    }

    /// What is wrong with a file that has this exception.
    fn against(&self, file: &str, excused: [usize; 3]) -> Vec<String> {
        let beyond = self.beyond();
        let parts = [
            (
                &self.longest,
                format!("words of a sentence, on average: {}, {MOST_WORDS} may be", self.average),
            ),
            (
                &self.openings,
                format!("headless openings: {}, 1 may be per {WORDS_PER_OPENING} words", self.openings.len()),
            ),
            (&self.phrases, format!("phrases that are not plain English: {}", self.phrases.len())),
        ];
        let mut wrong = vec![];
        for (at, (complaints, summary)) in parts.into_iter().enumerate() {
            if beyond[at] > excused[at] {
                let but = if excused[at] == 0 {
                    String::new()
                } else {
                    format!(" (its exception: {})", excused[at])
                };
                wrong.push(format!("{file}: {summary}{but}"));
                wrong.extend(complaints.iter().map(|(line, what)| format!("{file}:{line}: {what}")));
            }
        }
        let is_better = (0..3).any(|at| beyond[at] < excused[at]);
        if is_better && wrong.is_empty() {
            let [average, openings, phrases] = beyond;
            let now = format!("(\"{file}\", {average}, {openings}, {phrases})");
            wrong.push(match beyond {
                [0, 0, 0] => format!("{file}: it got better: remove its exception from EXCEPTIONS"),
                _ => format!("{file}: it got better: lower the exception to {now}"),
            });
        }
        wrong
    }
}

/// Every phrase of the list in a text, in tables and headings, too.
fn phrases(words: &[Word], list: &[Phrase]) -> Vec<Complaint> {
    let mut found = vec![];
    for (phrase, better, excuses) in list {
        let at_start = phrase.starts_with('^');
        let pattern: Vec<&str> = phrase.trim_start_matches('^').split(' ').collect();
        for (at, here) in words.windows(pattern.len()).enumerate() {
            let fits = here.iter().zip(&pattern).all(|(word, wanted)| *wanted == "*" || word.key == *wanted);
            let is_one = here[1..].iter().all(|word| !word.apart);
            if !fits || !is_one || (at_start && !here[0].begins) {
                continue;
            }
            let before = at.checked_sub(1).map(|at| &*words[at].key);
            let wild = here.iter().zip(&pattern).filter(|(_, wanted)| **wanted == "*");
            let mut around = wild.map(|(word, _)| &*word.key).chain(before);
            if around.any(|word| excuses.contains(&word)) {
                continue;
            }
            let is_wild = |(word, wanted): (&Word, &&str)| (*wanted == "*").then(|| word.key.clone());
            let better =
                better.replace('*', &here.iter().zip(&pattern).find_map(is_wild).unwrap_or_default());
            let said: Vec<&str> = here.iter().map(|word| &*word.raw).collect();
            found.push((here[0].line, format!("\"{}\": write \"{better}\"", said.join(" "))));
        }
    }
    found.sort();
    found
}

#[cfg(test)]
mod rules {
    use super::{Judgement, read, sentences};

    /// The lengths of the sentences in a text.
    fn lengths(text: &str) -> Vec<usize> {
        sentences(&read(text)).into_iter().map(|(_, words)| words.len()).collect()
    }

    fn complaints(text: &str) -> Vec<String> {
        let found = Judgement::of(&read(text));
        let all = found.openings.into_iter().chain(found.phrases);
        all.map(|(line, what)| format!("{line}: {what}")).collect()
    }

    #[test]
    fn a_sentence_goes_over_lines_and_not_over_items() {
        assert_eq!(lengths("One two\nthree four. Five\nsix seven, e.g. eight."), [4, 5]);
        assert_eq!(lengths("- one two three\n- four five\n  six seven\n\n1. eight nine ten"), [3, 4, 3]);
    }

    #[test]
    fn code_tables_and_headings_are_no_sentences() {
        let text = "# One two three\n\n| one two three | four five six |\n\n```\none two three\n```\n\n    one two three\n";
        assert_eq!(lengths(text), []);
        assert_eq!(lengths("Run `a b c\nd e` with [a page](http://x.y/a b)."), [5]);
        assert_eq!(lengths("- one\n  two:\n    three four"), [4]);
    }

    #[test]
    fn a_phrase_is_found_over_the_end_of_a_line_and_in_tables() {
        assert_eq!(complaints("It hangs\non the host."), ["1: \"hangs on\": write \"depends on\""]);
        assert_eq!(complaints("| it is said |"), ["1: \"is said\": write \"is reported\""]);
        assert_eq!(complaints("It `hangs on` the host. It hangs. On Linux, (hang) on."), [""; 0]);
        assert_eq!(complaints("| write | not |\n|---|---|\n| depends on | hangs on |\n"), [""; 0]);
    }

    #[test]
    fn a_word_beside_a_phrase_may_excuse_it() {
        assert_eq!(complaints("This is no ring."), ["1: \"is no ring.\": write \"is not a ring\""]);
        assert_eq!(complaints("There is no ring. It is no longer one."), [""; 0]);
    }

    #[test]
    fn headless_openings_are_no_questions() {
        let found = complaints("Which one? What is larger? What is larger stays.\n\n- whatever it is");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("1: \"What is ...\" opens a sentence"), "{found:?}");
        assert!(found[1].starts_with("3: "), "{found:?}");
    }

    #[test]
    fn an_exception_may_only_shrink() {
        let found = Judgement::of(&read("It hangs on this. It hangs on that."));
        let judged = |excused| found.against("a.md", excused).join("\n");
        assert!(judged([0, 0, 0]).contains("a.md:1: \"hangs on\": write \"depends on\""));
        assert_eq!(judged([0, 0, 2]), "");
        assert!(judged([0, 0, 1]).contains("a.md: phrases that are not plain English: 2 (its exception: 1)"));
        assert_eq!(judged([0, 0, 3]), "a.md: it got better: lower the exception to (\"a.md\", 0, 0, 2)");
        let found = Judgement::of(&read("It depends on this."));
        assert_eq!(
            found.against("a.md", [0, 0, 3]),
            ["a.md: it got better: remove its exception from EXCEPTIONS"]
        );
    }
}
