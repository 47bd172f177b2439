//! What each verb shows in terminals of 60, 80, 120 and 200 columns: nothing is wider, and no call site loses its line.
//!
//! The screens are files, `tests/screens/TRACE-WIDTH.txt`; `UPDATE_EXPECT=1` writes them, to be read.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Verbs with what they need beside the trace.
const SCREENS: [&[&str]; 11] = [
    &["report", "--all"],
    &["summary"],
    &["stats"],
    &["leaks"],
    &["oom"],
    &["tree"],
    &["tune"],
    &["replay", "--policy", "torch", "--policy", "torch:expandable_segments:True"],
    &["diff", "empty-cache-loop.gtr"],
    &["ranks"],
    &["doctor"],
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).to_owned()
}

fn screen(arguments: &[&str], trace: &str, width: usize) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_gputrace"))
        .args(arguments)
        .arg(trace)
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
    format!("$ gputrace {} {trace}\n{shown}{errors}\n", arguments.join(" "))
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
