//! What each verb shows in terminals of 60, 80, 120 and 200 columns: nothing is wider, and no call site loses its line.
//!
//! The screens are files, `tests/screens/TRACE-WIDTH.txt`; `UPDATE_EXPECT=1` writes them, to be read. A new verb gets a row in
//! [`SCREENS`], or a reason in [`WITHOUT`].

use std::path::{Path, PathBuf};
use std::process::Command;

/// Verbs with what they need beside the trace, which comes last.
const SCREENS: &[&[&str]] = &[
    &["report", "--all"],
    &["summary"],
    &["stats"],
    &["leaks"],
    &["oom"],
    &["tree"],
    &["tune"],
    &["replay", "--policy", "torch", "--policy", "torch:expandable_segments:True"],
    &["whatif", "--set-to-none", "no"],
    &["diff", "empty-cache-loop.gtr"],
    &["ranks"],
    &["doctor"],
    &["budget"],
    &["predict", "batch=4:predict/gpt.batch4.gtr", "batch=8:predict/gpt.batch8.gtr", "--at", "batch=32"],
    &["help"],
];
/// Verbs whose screen is not gputrace's answer about a trace, and why.
const WITHOUT: &[(&str, &str)] = &[
    ("record", "its screen is the program's; what it says is held by tests/record.rs"),
    ("html", "writes a file, whose page is held by page/test"),
    ("export", "writes what other programs read"),
    ("reproduce", "writes a program; held by tests/reproduce.rs"),
    ("layers", "takes a training run with layers that repeat; held by tests/whatif.rs"),
    ("who", "is asked of an address; held by tests/who.rs"),
    ("reduce", "writes what other verbs read; held by replay/src/reduce/tests.rs"),
    ("map", "says one line; what it writes is held by tests/cli/files.rs and tests/executors"),
    ("mcp", "answers a client; held by tests/mcp.rs"),
    ("upload", "needs a store; held by tests/objects"),
    ("recover", "needs a ring"),
    ("attach", "needs a process; held by tests/attach.rs"),
    ("detach", "needs a process; held by tests/attach.rs"),
    ("ps", "lists what runs now; held by tests/attach.rs"),
    ("stacks", "reads what runs now; held by tests/running.rs and its own tests"),
    ("symbolise", "writes a trace"),
    ("library", "prints a path; held by tests/first_use.py"),
    ("top", "shows what runs now; held by tests/live.rs"),
    ("metrics", "serves what runs now; held by tests/live.rs"),
    (
        "serve",
        "says one line, with a number of its own each time; held by page/test/served.mjs and replay/tests",
    ),
];
/// Those that take no trace.
const ALONE: [&str; 2] = ["predict", "help"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn screen(arguments: &[&str], trace: &str, width: usize) -> String {
    let trace = if ALONE.contains(&arguments[0]) { None } else { Some(trace) };
    let output = Command::new(env!("CARGO_BIN_EXE_gputrace"))
        .args(arguments)
        .args(trace)
        .current_dir(folder().join("../tests/golden"))
        .env("COLUMNS", width.to_string())
        .env("NO_COLOR", "1")
        .output()
        .expect("gputrace can be run");
    // Where the library lay on the machine that recorded is nobody's concern.
    let is_shown = |line: &&str| !line.contains("NVTX_INJECTION64_PATH");
    let shown = String::from_utf8(output.stdout).expect("text");
    let shown: String = shown.lines().filter(is_shown).map(|line| format!("{line}\n")).collect();
    let errors = String::from_utf8_lossy(&output.stderr);
    let typed = [arguments, trace.as_slice()].concat().join(" ");
    format!("$ gputrace {typed}\n{shown}{errors}\n")
}

/// The lines of the terminal that are wider than it, but for what is to be copied, and words that are longer than a line.
fn too_wide(screen: &str, width: usize) -> Vec<&str> {
    let is_to_copy =
        |line: &str| ["gputrace ", "export ", "$ ", "PYTORCH_CUDA"].iter().any(|it| line.contains(it));
    let is_one_word = |line: &str| line.trim().chars().filter(|c| *c == ' ').count() == 0;
    screen
        .lines()
        .filter(|line| line.chars().count() > width && !is_to_copy(line) && !is_one_word(line))
        .collect()
}

fn check(name: &str) {
    for width in [60, 80, 120, 200] {
        let screens: String =
            SCREENS.iter().map(|arguments| screen(arguments, &format!("{name}.gtr"), width)).collect();
        assert!(too_wide(&screens, width).is_empty(), "{width} columns: {:#?}", too_wide(&screens, width));
        for line in screens.lines() {
            let cut =
                line.split(' ').any(|word| word.contains('…') && word.trim_end_matches(')').ends_with(".p"));
            assert!(!cut, "a line of the program is cut: {line}");
        }
        let file = folder().join(format!("tests/screens/{name}-{width}.txt"));
        expect_test::expect_file![file].assert_eq(&screens);
    }
}

#[test]
fn every_verb_has_a_screen_or_a_reason_for_none() {
    let help = screen(&["help"], "", 100);
    let (_, commands) = help.split_once("Commands:\n").expect("a list of commands");
    let (commands, _) = commands.split_once("\n\n").expect("its end");
    let names = commands.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let verbs: Vec<&str> = names.filter_map(|line| line.split_whitespace().next()).collect();
    assert!(verbs.len() > 10, "{help}");
    let shown: Vec<&str> = SCREENS.iter().map(|arguments| arguments[0]).collect();
    let without: Vec<&str> = WITHOUT.iter().map(|(verb, _)| *verb).collect();
    for verb in &verbs {
        let n = usize::from(shown.contains(verb)) + usize::from(without.contains(verb));
        assert_eq!(
            n, 1,
            "`{verb}`: a row in SCREENS (UPDATE_EXPECT=1 writes its screens: read them), or a reason in WITHOUT"
        );
    }
    for verb in shown.iter().chain(&without) {
        assert!(verbs.contains(verb), "`{verb}` is not a verb any more");
    }
}

#[test]
fn screens_of_a_run_that_ran_out_of_memory() {
    check("caught-oom");
}

#[test]
fn screens_of_a_run_on_two_devices() {
    check("dataparallel");
}

#[test]
fn screens_of_a_run_that_fragments() {
    check("varying-lengths");
}
