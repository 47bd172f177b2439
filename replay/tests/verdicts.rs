//! The verdicts on the solved examples: each names the fault of its program, in eight lines of a terminal.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn report(trace: &str, arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_gputrace"))
        .arg("report")
        .args(arguments)
        .arg(trace)
        .current_dir(root().join("tests/golden"))
        .env("COLUMNS", "80")
        .env("NO_COLOR", "1")
        .output()
        .expect("gputrace can be run");
    assert!(output.status.success(), "{trace}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// What is said first: the verdict, without the line that names the trace.
fn verdict(trace: &str) -> Vec<String> {
    report(trace, &[]).lines().skip(1).take_while(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// The program's lines that are marked as faults, as `train.py:12`.
fn faults(example: &str) -> Vec<String> {
    let folder = root().join("examples").join(example);
    let files = std::fs::read_dir(&folder).expect("an example").filter_map(|entry| Some(entry.ok()?.path()));
    let mut faults = vec![];
    for file in files.filter(|path| path.extension().is_some_and(|extension| extension == "py")) {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&file).expect("a program");
        let marked = text.lines().zip(1..).filter(|(line, _)| line.contains("# <- fault"));
        faults.extend(marked.map(|(_, number)| format!("{name}:{number}")));
    }
    faults
}

#[test]
fn each_example_is_told_by_its_kind_and_its_faulty_line() {
    let kinds = [
        ("caught-oom", "out_of_memory"),
        ("dataparallel", "uneven"),
        ("empty-cache-loop", "churned"),
        ("evaluation-with-graph", "grew"),
        ("kept-losses", "grew"),
        ("reference-cycle", "kept"),
        ("running-total", "grew"),
        ("varying-lengths", "wasted"),
    ];
    let n_examples = std::fs::read_dir(root().join("examples")).expect("a folder").count();
    assert_eq!(n_examples, kinds.len(), "each example has its verdict here");
    for (example, kind) in kinds {
        let trace = format!("{example}.gtr");
        let json: Value = serde_json::from_str(&report(&trace, &["--json"])).expect("JSON");
        let told = &json["processes"][0]["verdict"];
        assert_eq!(told["kind"], kind, "{example}");
        let site = told["call_site"].as_str().unwrap_or_default();
        let faults = faults(example);
        assert!(faults.iter().any(|fault| site.contains(fault)), "{example}: {site}, and not {faults:?}");
        let lines = verdict(&trace);
        assert!(lines.len() <= 9, "{example}: {lines:#?}");
        assert!(lines.iter().all(|line| line.chars().count() <= 80), "{example}: {lines:#?}");
    }
}

#[test]
fn of_several_processes_the_one_that_failed_comes_first() {
    let healthy = "running-total.gtr";
    let text = report("caught-oom.gtr", &[healthy]);
    let at = |word: &str| text.find(word).unwrap_or_else(|| panic!("{word}: {text}"));
    assert!(at("\nVerdict: out of memory") < at("\nVerdict: memory grows"), "{text}");
    // Programs get what they named in its order.
    let json: Value = serde_json::from_str(&report("caught-oom.gtr", &["--json", healthy])).expect("JSON");
    let kinds: Vec<&str> =
        [0, 1].iter().filter_map(|at| json["processes"][at]["verdict"]["kind"].as_str()).collect();
    assert_eq!(kinds, ["grew", "out_of_memory"]);
}

#[test]
fn the_verdict_on_a_fragmented_run_has_the_line_to_paste() {
    expect_test::expect![[r#"
        Verdict: memory was reserved and not used: external fragmentation
          what   cuda:0: PyTorch reserved up to 1.23 GiB for at most 524.55 MiB in use
          where  <module> (/job/varying-lengths/train.py:12) in Linear.forward (backward
                 of AddmmBackward0)
          sure   exact: the run's 760 requests were replayed with it
          fix    export PYTORCH_ALLOC_CONF=expandable_segments:True
                 reserves 568.00 MiB instead of 1.23 GiB
          next   gputrace tune varying-lengths.gtr"#]]
    .assert_eq(&verdict("varying-lengths.gtr").join("\n"));
}

#[test]
fn the_verdict_on_an_error_that_was_caught_says_where_and_what_to_do() {
    expect_test::expect![[r#"
        Verdict: out of memory: tensors kept by a caught exception
          what   PyTorch could not get 32.00 MiB on cuda:0 at 175.7 ms: an attempt
                 failed at 175.3 ms, its error was caught, and it still held 192.00 MiB
          where  train_step (/job/caught-oom/train.py:20)
          sure   certain: the blocks of that attempt were still allocated
          fix    leave the `except` block before you try again, and keep no more of the
                 error than its text (`str(error)`)
          next   gputrace oom caught-oom.gtr"#]]
    .assert_eq(&verdict("caught-oom.gtr").join("\n"));
}

/// Programs of one fault or none (tests/golden/verdicts), recorded on a GPU: the first line of each says which kind of verdict is right, and with
/// what setting if one mends it; its faulty line is marked.
#[test]
fn each_program_of_one_fault_is_told_by_its_kind_and_its_faulty_line_and_healthy_ones_are_called_so() {
    let folder = root().join("tests/golden/verdicts");
    let (mut wrong, mut n_faults, mut n_healthy) = (vec![], 0, 0);
    for program in std::fs::read_dir(&folder).expect("a folder").map(|entry| entry.expect("an entry").path())
    {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_source = |path: &PathBuf| path.extension().is_some_and(|it| it == "py" || it == "cu");
        let mut files =
            std::fs::read_dir(&program).expect("a folder").map(|entry| entry.expect("an entry").path());
        let source = files.find(is_source).unwrap_or_else(|| panic!("{name}: no program"));
        let text = std::fs::read_to_string(&source).expect("a program");
        let said = text.lines().next().unwrap_or_default().trim_start_matches(['#', '/', ' ']);
        let (said, _) = said.split_once(':').unwrap_or_else(|| panic!("{name}: no kind of verdict"));
        let (kind, setting) = said.split_once(" with ").unwrap_or((said, ""));
        let file = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let lines = text.lines().zip(1..).filter(|(line, _)| line.ends_with("<- fault"));
        let faults: Vec<String> = lines.map(|(_, number)| format!("{file}:{number})")).collect();
        assert_eq!(faults.is_empty(), kind == "nothing_wrong", "{name}: a fault has its line");
        *(if faults.is_empty() { &mut n_healthy } else { &mut n_faults }) += 1;

        let trace = format!("verdicts/{name}/{name}.gtr");
        let json: Value = serde_json::from_str(&report(&trace, &["--json"])).expect("JSON");
        let told = &json["processes"][0]["verdict"];
        let site = told["call_site"].as_str().unwrap_or_default();
        let is_right = told["kind"] == kind
            && faults.iter().all(|fault| site.contains(fault))
            && told["fix"].to_string().contains(setting);
        if !is_right {
            wrong.push(format!("{name}: {kind} {faults:?} {setting}, and not {told}"));
        }
        let lines = verdict(&trace);
        assert!(lines.len() <= 9, "{name}: {lines:#?}");
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(n_faults >= 10 && n_healthy >= 5, "{n_faults} with a fault, {n_healthy} without");
}
