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
    screen_and_verdict(path).0
}

/// The same, with the name of the cause, the call site and the kind.
fn screen_and_verdict(path: &Path) -> (Vec<String>, [String; 3]) {
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
    let site = verdict.section.items.iter().find_map(|item| match item {
        Item::Fact { name, value: Value::Text(text), .. } if *name == "call_site" => Some(text.clone()),
        _ => None,
    });
    // Of what grows, the line that calls the model is named with the rate.
    let calls = verdict.section.items.iter().find_map(|item| match item {
        Item::Fact { name, value: Value::Text(text), .. } if *name == "what" => {
            text.split_once("per call of ")
        }
        _ => None,
    });
    let called = calls.map_or_else(String::new, |(_, rest)| {
        format!("; called at {}", rest.split(',').next().unwrap_or_default())
    });
    let facts = [verdict.cause.clone(), site.unwrap_or_default() + &called, verdict.kind.to_owned()];
    (std::iter::once(verdict.section.title.clone()).chain(parts).collect(), facts)
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

/// A line of `tests/causes/cases.jsonl`.
struct Public {
    case: String,
    program: String,
    truth: String,
    /// The name of the cause; empty for a healthy program.
    cause: String,
    lines: Vec<u64>,
    is_tuned: bool,
}

fn public_cases(folder: &Path) -> Vec<Public> {
    let table = std::fs::read_to_string(folder.join("cases.jsonl")).expect("the table of cases");
    let case = |line: &str| {
        let known: serde_json::Value = serde_json::from_str(line).expect("JSON");
        let text = |name: &str| known[name].as_str().unwrap_or_default().to_owned();
        Public {
            case: text("case"),
            program: text("program"),
            truth: text("truth"),
            cause: text("cause"),
            lines: known["lines"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(serde_json::Value::as_u64)
                .collect(),
            is_tuned: known["tuned"].as_bool().expect("whether the rules were made with it"),
        }
    };
    table.lines().filter(|line| !line.is_empty()).map(case).collect()
}

/// Strictly: the cause by its name, and one of the lines where the verdict points. Without the line it is partly right.
fn judge_public(case: &Public, [cause, site, kind]: &[String; 3]) -> Judged {
    if case.cause.is_empty() {
        return if kind == "nothing_wrong" { Judged::Right } else { Judged::Wrong };
    }
    let is_there = |line: &u64| {
        let place = format!("{}:{line}", case.program);
        site.match_indices(&place)
            .any(|(at, _)| !site[at + place.len()..].starts_with(|next: char| next.is_ascii_digit()))
    };
    match (*cause == case.cause, case.lines.iter().any(is_there)) {
        (true, true) => Judged::Right,
        (true, false) => Judged::Partly,
        (false, _) => Judged::Wrong,
    }
}

#[test]
fn the_first_screen_names_cause_and_line_of_each_public_case() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/causes");
    let (mut worse, mut counts) = (vec![], [[0; 3]; 2]);
    println!("case | truth | first screen | judged | used for tuning");
    for case in public_cases(&folder) {
        let (screen, facts) = screen_and_verdict(&folder.join(format!("{}.gtr", case.case)));
        let judged = judge_public(&case, &facts);
        counts[usize::from(case.is_tuned)][judged as usize] += 1;
        let tuned = if case.is_tuned { "tuned" } else { "never tuned" };
        println!("{} | {} | {} | {judged:?} | {tuned}", case.case, case.truth, screen[0]);
        println!("      where: {}", facts[1]);
        if judged != Judged::Right {
            worse.push((case.case, screen));
        }
    }
    for ([wrong, partly, right], which) in counts.into_iter().zip(["never tuned", "tuned"]) {
        println!("{which}: right {right}, partly {partly}, wrong {wrong}");
    }
    assert!(worse.is_empty(), "not right: {worse:#?}");
}
