//! What the program prints: the string literals of its sources, without tests, and the recorded screens. They follow the rules of the
//! pages, and [`JARGON`].

use std::fs;
use std::path::Path;

use super::{
    CODE, Complaint, Judgement, PHRASES, Phrase, WORDS_PER_OPENING, Word, phrases, read, root, sentences,
};

/// Words of a printed sentence, on average over a crate: a message is shorter than a page's sentence.
const MOST_WORDS: usize = 12;

/// The folders of the sources that are judged together.
const CRATES: &[&str] = &[
    "objects",
    "recorder",
    "replay/analyse",
    "replay/answers",
    "replay/exports",
    "replay/page",
    "replay/ranks",
    "replay/reduce",
    "replay/report",
    "replay/src",
    "replay/trace",
    "ring",
    "schemas",
    "shim",
    "sim",
];

/// Sources whose literals nobody reads: assembly, and the programs that other languages run.
const CODE_FILES: &[&str] = &["shim/src/arch", "shim/src/tls.rs", "recorder/src/arch/x86_64/ptrace.rs"];

/// Folders and files that hold tests.
const TESTS: &[&str] = &["tests", "tests.rs", "benches", "examples", "oracle", "target", "build.rs"];

/// Words of this project that users do not know, with the field's word. Pages may explain them; messages cannot.
const JARGON: &[Phrase] = &[
    ("asked for", "requested", &[]),
    ("asks for", "requests", &[]),
    ("given back", "freed, or: released", &[]),
    ("give back", "free", &[]),
    ("gives back", "frees", &[]),
    ("gave back", "freed", &[]),
    ("gives * back", "frees *", &[]),
    ("bought", "reserved", &[]),
    ("goes on", "continues", &[]),
    ("went on", "continued", &[]),
    ("going on", "continuing", &[]),
    ("made anew", "created again", &[]),
    ("the books", "the accounts", &[]),
    ("stands in", "is in", &[]),
    ("for want of", "for lack of", &[]),
    ("lies over", "overlaps", &[]),
    ("not heeded", "ignored", &[]),
    ("let go of", "freed", &[]),
];

#[test]
fn printed_texts_are_plain_english() {
    let mut wrong: Vec<String> = vec![];
    let mut n_messages = 0;
    for folder in CRATES {
        let mut printed = vec![];
        collect(&root().join(folder), folder, &mut printed);
        n_messages += printed.iter().map(|file| file.n_messages).sum::<usize>();
        wrong.extend(judge(folder, &printed));
    }
    assert!(n_messages > 3000, "only {n_messages} messages were found");
    wrong.extend(screens());
    assert!(wrong.is_empty(), "\n{}\n\nThe rules: STYLE.md, Plain English.", wrong.join("\n"));
}

/// The messages of one source file.
struct Printed {
    file: String,
    n_messages: usize,
    words: Vec<Word>,
}

/// The messages of a folder, file by file.
fn collect(path: &Path, name: &str, found: &mut Vec<Printed>) {
    let last = name.rsplit('/').next().unwrap_or(name);
    if TESTS.contains(&last) || CODE_FILES.contains(&name) {
        return;
    }
    if path.is_dir() {
        let mut entries: Vec<_> = fs::read_dir(path).expect("a folder").flatten().collect();
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            collect(&entry.path(), &format!("{name}/{}", entry.file_name().to_string_lossy()), found);
        }
    } else if last.ends_with(".rs") {
        let source = fs::read_to_string(path).expect("a source");
        let messages = messages(&source);
        let mut words = vec![];
        for (line, text) in &messages {
            let mut read = read(text);
            // A literal is a text of its own, wherever in it a line ends.
            read.iter_mut().for_each(|word| word.line += line - 1);
            words.append(&mut read);
        }
        found.push(Printed { file: name.to_owned(), n_messages: messages.len(), words });
    }
}

fn judge(folder: &str, printed: &[Printed]) -> Vec<String> {
    let mut wrong = vec![];
    let mut openings: Vec<String> = vec![];
    let (mut n_words, mut n_sentences) = (0, 0);
    let mut longest: Vec<(usize, String)> = vec![];
    for Printed { file, words, .. } in printed {
        let judgement = Judgement::of(words);
        let at = |(line, what): &Complaint| format!("{file}:{line}: {what}");
        openings.extend(judgement.openings.iter().map(at));
        wrong.extend(phrases(words, &[PHRASES, JARGON].concat()).iter().map(at));
        let all = sentences(words);
        n_words += judgement.n_words;
        n_sentences += all.len();
        longest.extend(all.iter().map(|(_, words)| words.len()).max().zip(judgement.longest.first().map(at)));
    }
    if openings.len() > n_words.div_ceil(WORDS_PER_OPENING) {
        wrong.push(format!(
            "{folder}: headless openings: {}, 1 may be per {WORDS_PER_OPENING} words",
            openings.len()
        ));
        wrong.extend(openings);
    }
    let average = n_words.div_ceil(n_sentences.max(1));
    if average > MOST_WORDS {
        wrong.push(format!("{folder}: words of a sentence, on average: {average}, {MOST_WORDS} may be"));
        longest.sort();
        wrong.extend(longest.into_iter().rev().take(5).map(|(_, what)| what));
    }
    wrong
}

/// What the recorded screens say that no literal does by itself.
fn screens() -> Vec<String> {
    let folder = root().join("replay/tests/screens");
    let mut wrong = vec![];
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.ends_with("-200.txt") {
            continue;
        }
        for (line, text) in (1..).zip(fs::read_to_string(entry.path()).expect("a screen").lines()) {
            let found = phrases(&read(text.trim_start()), &[PHRASES, JARGON].concat());
            wrong.extend(found.iter().map(|(_, what)| format!("replay/tests/screens/{name}:{line}: {what}")));
        }
    }
    wrong
}

/// Literals of two words and more, by their lines, up to the first module of tests. What a format fills in is one word.
fn messages(source: &str) -> Vec<(usize, String)> {
    let end = source.find("#[cfg(test)]\nmod ").unwrap_or(source.len());
    let texts = literals(&source[..end]).into_iter().map(|(line, text)| (line, filled(&text)));
    texts.filter(|(_, text)| text.split_whitespace().filter(|word| is_word(word)).count() > 1).collect()
}

fn is_word(word: &str) -> bool {
    word.chars().filter(|one| one.is_alphabetic()).count() > 1
}

/// A format's text with a span of code in place of each value.
fn filled(text: &str) -> String {
    let mut clean = String::new();
    let mut rest = text.chars().peekable();
    while let Some(one) = rest.next() {
        match one {
            '{' if rest.peek() != Some(&'{') => {
                let _value = rest.by_ref().find(|one| *one == '}');
                clean.extend([CODE, CODE]);
            }
            '{' | '}' => {
                rest.next_if_eq(&one);
                clean.push(one);
            }
            _ => clean.push(one),
        }
    }
    clean
}

/// The string literals of a source in Rust, by the lines on which they begin.
fn literals(source: &str) -> Vec<(usize, String)> {
    let mut found = vec![];
    let (mut rest, mut line, mut seen) = (source, 1, 0);
    while let Some(one) = rest.chars().next() {
        let at = source.len() - rest.len();
        line += source[seen..at].matches('\n').count();
        seen = at;
        let raw = raw_string(rest);
        if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        } else if rest.starts_with("/*") {
            rest = rest.find("*/").map_or("", |end| &rest[end + 2..]);
        } else if let Some((text, length)) = raw {
            found.push((line, text.to_owned()));
            rest = &rest[length..];
        } else if one == '"' {
            let (text, length) = string(rest);
            found.push((line, text));
            rest = &rest[length..];
        } else if one == '\'' {
            rest = &rest[character(rest)..];
        } else if one.is_alphanumeric() || one == '_' {
            let end = rest.find(|it: char| !it.is_alphanumeric() && it != '_').unwrap_or(rest.len());
            // The prefix of a string is not a name.
            let is_prefix = matches!(&rest[..end], "b" | "c") && rest[end..].starts_with(['"', 'r', '\'']);
            rest = &rest[if is_prefix { 1 } else { end }..];
        } else {
            rest = &rest[one.len_utf8()..];
        }
    }
    found
}

/// The text of a raw string at the start, and the bytes that it takes.
fn raw_string(rest: &str) -> Option<(&str, usize)> {
    let after = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r'))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let text = after[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = text.find(&end)?;
    Some((&text[..length], rest.len() - text.len() + length + end.len()))
}

/// The text of a string at the start, and the bytes that it takes.
fn string(rest: &str) -> (String, usize) {
    let mut text = String::new();
    let mut chars = rest.char_indices().skip(1).peekable();
    while let Some((at, one)) = chars.next() {
        match one {
            '"' => return (text, at + 1),
            '\\' => match chars.next() {
                // The line goes on after the next one's indent.
                Some((_, '\n')) => while chars.next_if(|(_, it)| it.is_whitespace()).is_some() {},
                Some((_, 'n')) => text.push('\n'),
                Some((_, 't')) => text.push(' '),
                Some((_, it)) => text.push(it),
                None => {}
            },
            _ => text.push(one),
        }
    }
    (text, rest.len())
}

/// The bytes of a character at the start, or of the quote of a lifetime.
fn character(rest: &str) -> usize {
    let mut inside = rest[1..].char_indices();
    match (inside.next(), inside.next()) {
        (Some((_, '\\')), Some((escaped, _))) => {
            let after = &rest[1 + escaped..];
            let skipped = 1 + escaped + after.chars().next().map_or(0, char::len_utf8);
            rest[skipped..].find('\'').map_or(1, |end| skipped + end + 1)
        }
        (Some(_), Some((end, '\''))) => 1 + end + 1,
        _ => 1,
    }
}

#[cfg(test)]
mod rules {
    use super::{Printed, judge, literals, messages, read};

    fn texts(source: &str) -> Vec<String> {
        literals(source).into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn literals_are_found_in_all_their_forms() {
        let source = r####"f("a \"b\" c", 'x', '"', '\'', '\u{1b}', r#"d "e""#, b"g", &'a str); // "no"
            /* "no" */ let for_r = "over \
                two lines";"####;
        assert_eq!(texts(source), ["a \"b\" c", "d \"e\"", "g", "over two lines"]);
    }

    #[test]
    fn messages_have_two_words_and_are_not_in_tests() {
        let source =
            "a(\"one\");\nb(\"two {} words {{x}}\");\n#[cfg(test)]\nmod tests { c(\"not this one\"); }";
        assert_eq!(messages(source), [(2, "two `` words {x}".to_owned())]);
    }

    fn judged(text: &str) -> Vec<String> {
        judge("a", &[Printed { file: "a/b.rs".into(), n_messages: 1, words: read(text) }])
    }

    #[test]
    fn a_planted_sentence_is_reported_with_its_file_and_line() {
        assert_eq!(judged("the card has no room"), [""; 0]);
        assert_eq!(judged("it hangs on the limit"), ["a/b.rs:1: \"hangs on\": write \"depends on\""]);
        assert_eq!(judged("\nmemory was asked for"), ["a/b.rs:2: \"asked for\": write \"requested\""]);
    }

    #[test]
    fn openings_and_lengths_are_judged_over_a_crate() {
        let found = judged("What is larger stays.\n\nWhere it fails, it waits.");
        assert!(found[0].starts_with("a: headless openings: 2, 1 may be per"), "{found:?}");
        assert!(found[1].starts_with("a/b.rs:1: \"What is ...\""), "{found:?}");
        let found = judged("one two three four five six seven eight nine ten eleven twelve thirteen");
        assert!(found[0].starts_with("a: words of a sentence, on average: 13,"), "{found:?}");
    }
}
