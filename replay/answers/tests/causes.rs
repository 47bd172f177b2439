//! The first screen, held against what is known of each case: `make causes` prints the table.
//!
//! A case is a trace or a snapshot, its truth in a few words, and the words that the first screen must and must not have. Cases of
//! other people are read where they are (`GPUTRACE_CASES`, else `../shared/findings/reports`), and left out elsewhere.

use std::path::{Path, PathBuf};

use gputrace_analyse::categories::Categories;
use gputrace_analyse::growth::Growth;
use gputrace_analyse::story::Story;
use gputrace_answers::postmortem::Postmortem;
use gputrace_answers::verdict::verdict;
use gputrace_report::model::{Item, Value};
use gputrace_trace::source::Source;

struct Case {
    /// Below the folder of cases, or of the golden traces.
    file: &'static str,
    truth: &'static str,
    /// Groups of words: one word of each group must be there. Without one of the first group it is wrong.
    says: &'static [&'static [&'static str]],
    never: &'static [&'static str],
}

include!("causes/cases.rs");

/// The lines of the first screen.
fn first_screen(path: &Path) -> Vec<String> {
    let source = Source::open(path).unwrap_or_else(|error| panic!("{error}"));
    let mut growth = Growth::default();
    let story = Story::with_lifetimes_and(&source, &Categories::default(), &mut growth);
    let found = Postmortem::of_story(story, &source, &growth);
    let verdict = verdict(&found, &source);
    let parts = verdict.section.items.iter().map(|item| match item {
        Item::Fact { label, value: Value::Text(text) | Value::Command(text), remark, .. } => {
            format!("{label}: {text}{}{remark}", if remark.is_empty() { "" } else { "; " })
        }
        Item::Line(_, text) => text.clone(),
        other => panic!("{other:?}"),
    });
    std::iter::once(verdict.section.title.clone()).chain(parts).collect()
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Judged {
    Wrong,
    Partly,
    Right,
}

fn judge(case: &Case, screen: &[String]) -> Judged {
    let text = screen.join("\n");
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    let n = case.says.iter().filter(|words| has(words)).count();
    if has(case.never) || !has(case.says[0]) {
        return Judged::Wrong;
    }
    if n == case.says.len() { Judged::Right } else { Judged::Partly }
}

fn folder(of: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match of.split_once(':') {
        Some(("golden", file)) => root.join("tests/golden").join(file),
        _ => match std::env::var_os("GPUTRACE_CASES") {
            Some(folder) => PathBuf::from(folder).join(of),
            None => root.join("../shared/findings/reports").join(of),
        },
    }
}

#[test]
fn the_first_screen_names_the_cause_of_each_case() {
    let (mut worse, mut counts, mut n_missing) = (vec![], [0; 3], 0);
    for case in CASES {
        let path = folder(case.file);
        if !path.exists() {
            n_missing += 1;
            continue;
        }
        let screen = first_screen(&path);
        let judged = judge(case, &screen);
        counts[judged as usize] += 1;
        println!("{judged:?} | {} | {}", case.file, case.truth);
        for line in &screen {
            println!("      {}", line.chars().take(300).collect::<String>());
        }
        if judged != Judged::Right {
            worse.push(case.file);
        }
    }
    let [wrong, partly, right] = counts;
    println!("right {right}, partly {partly}, wrong {wrong}; not here: {n_missing}");
    assert!(worse.is_empty(), "not right: {worse:?}");
}
