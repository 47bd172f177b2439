//! `gputrace predict` with a command: it makes the runs that it needs, on the fake device.

use std::path::Path;
use std::process::{Command, Output};

use gputrace_tests::recorded::{self, Folder};
use serde_json::Value;

/// Runs `gputrace predict` with these arguments before `--`, and these after the program and the batch.
fn predict(folder: &Folder, arguments: &[&str], more: &[&str]) -> Output {
    let built = recorded::built();
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/batches.py");
    let mut command = Command::new(built.join("fake-cuda"));
    command.arg(built.join("gputrace")).args(["predict", "--json"]).args(arguments);
    command.arg("--traces").arg(folder.path().join("runs"));
    command.args(["--", "python3"]).arg(program).arg("{batch}").args(more);
    command.env("FAKE_CUDA_MEMORY", "2GiB").output().expect("gputrace predict")
}

fn fit(output: &Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let mut json: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    json["fits"][0].take()
}

/// The values that were run or recorded, and whether they fit.
fn ran(fit: &Value) -> Vec<(u64, bool)> {
    let ran = fit["ran"].as_array().expect("what was run").iter();
    ran.map(|it| (it["value"].as_u64().unwrap(), it["fits"].as_bool().unwrap())).collect()
}

fn folder(name: &str) -> Folder {
    Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &format!("predict-{name}"))
}

#[test]
fn the_largest_value_is_proved_by_running_it_and_the_next() {
    let folder = folder("proved");
    let output = predict(&folder, &["batch=4", "batch=8", "--fit", "batch"], &[]);
    let fit = fit(&output);
    // 64 MiB, and 12 for each of 165, are 2044.
    assert_eq!(fit["largest"], 165);
    assert_eq!((&fit["checked"], &fit["certain"]), (&Value::Bool(true), &Value::Bool(true)));
    assert_eq!(ran(&fit), [(8, true), (165, true), (166, false)]);
    let said = |batch: u64| folder.path().join(format!("runs/batch={batch}.log"));
    assert!([4, 8, 165, 166].into_iter().all(|batch| said(batch).exists()));
    assert!(std::fs::read_to_string(said(166)).unwrap().contains("out of memory"));
}

#[test]
fn a_limit_below_the_card_is_held_by_replaying_what_ran() {
    let folder = folder("limit");
    let output =
        predict(&folder, &["batch=4", "batch=8", "--fit", "batch", "--limit", "1GiB", "--other", "0"], &[]);
    let fit = fit(&output);
    assert_eq!((&fit["largest"], &fit["checked"]), (&Value::from(80), &Value::Bool(true)));
    assert_eq!(ran(&fit), [(8, true), (80, true), (81, false)]);
}

#[test]
fn runs_that_were_not_made_are_told() {
    let folder = folder("few");
    let output = predict(&folder, &["batch=4", "batch=8", "--fit", "batch", "--most-runs", "1"], &[]);
    let fit = fit(&output);
    assert_eq!((&fit["largest"], &fit["checked"]), (&Value::from(165), &Value::Bool(false)));
    assert_eq!(ran(&fit), [(8, true), (165, true)]);
}

#[test]
fn a_program_that_fails_for_another_reason_ends_the_search() {
    let folder = folder("failed");
    let output = predict(&folder, &["batch=4", "batch=8", "--fit", "batch"], &["fail"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("batch=4 failed, but not for lack of memory: exit status: 3"), "{said}");
    assert!(said.contains("its output: done\n"), "{said}");
}

#[test]
fn a_start_that_is_too_large_is_told() {
    let folder = folder("large");
    let output = predict(&folder, &["batch=400", "batch=800", "--fit", "batch"], &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("batch=400 ran out of memory: start with smaller values"), "{said}");
}
