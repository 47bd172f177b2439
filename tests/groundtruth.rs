//! What real PyTorch 2.11 reported of real runs on an H200 (`tests/groundtruth`), and what a replay of each workload's default
//! run says that it would be: one question for each setting that was really run.
//!
//! `WORKLOAD.TAG.json` is what PyTorch said at the end, with its options (`env`), the limit that
//! `set_per_process_memory_fraction` gave it (0: none) and a hash of the requests (`seq`); `WORKLOAD.default.pickle.gz` is
//! the history that the replays are made from.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_tests::recorded;
use serde_json::Value;

/// A field of an outcome, and PyTorch's name for it.
const FIELDS: &[(&str, &str)] = &[
    ("peak_reserved_bytes", "reserved_bytes.all.peak"),
    ("peak_allocated_bytes", "allocated_bytes.all.peak"),
    ("peak_requested_bytes", "requested_bytes.all.peak"),
    ("num_device_alloc", "num_device_alloc"),
    ("num_device_free", "num_device_free"),
    ("num_alloc_retries", "num_alloc_retries"),
    ("num_ooms", "num_ooms"),
];
/// Its run set the peaks back half-way.
const RESETS_PEAKS: &str = "empty_cache";
/// Rows that no replay can know exactly, because addresses decide between equal blocks: the real figure lies in the range
/// that the replay gives.
const WITHIN_THEIR_RANGE: &[&str] =
    &["resnet_multires.tight", "resnet_multires.tight_gc80", "vit_eval_train.tight_gc60"];
/// The widest range that says something, as a part of its lower end.
const WIDEST: f64 = 1.03;

struct Row {
    name: String,
    truth: Value,
}

#[test]
fn every_row_is_what_pytorch_reported() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("groundtruth");
    let mut workloads: BTreeMap<String, Vec<Row>> = BTreeMap::new();
    for path in std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_none_or(|it| it != "json") {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let truth = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let workload = name.split('.').next().unwrap().to_owned();
        workloads.entry(workload).or_default().push(Row { name, truth });
    }
    assert!(workloads.len() >= 8, "{:?}", workloads.keys());
    let (mut n_rows, mut inexact) = (0, vec![]);
    for (workload, mut rows) in workloads {
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        let seq = |row: &Row| row.truth["seq"].clone();
        let default = rows.iter().find(|row| row.name.ends_with(".default")).map(seq);
        // Others made other requests, unless they ended early.
        rows.retain(|row| Some(seq(row)) == default || !row.truth["oom"].is_null());
        n_rows += rows.len();
        let history = folder.join(format!("{workload}.default.pickle.gz"));
        let mut by_limit: BTreeMap<u64, Vec<Row>> = BTreeMap::new();
        for row in rows {
            by_limit.entry(row.truth["limit"].as_u64().unwrap_or(0)).or_default().push(row);
        }
        for (limit, rows) in by_limit {
            let outcomes = replay(&history, limit, &rows);
            inexact.extend(
                rows.iter().zip(&outcomes).filter_map(|(row, outcome)| problem(&workload, row, outcome)),
            );
        }
    }
    assert!(n_rows >= 70, "{n_rows} rows");
    let names: Vec<&str> = inexact.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, WITHIN_THEIR_RANGE, "{inexact:#?}");
}

fn replay(history: &PathBuf, limit: u64, rows: &[Row]) -> Vec<Value> {
    let mut command = Command::new(recorded::built().join("gputrace"));
    command.arg("replay").arg(history).args(["--torch-version", "2.11", "--json"]);
    command.args(["--device-memory", &rows[0].truth["total_memory"].to_string()]);
    if limit > 0 {
        command.args(["--limit", &limit.to_string()]);
    }
    for row in rows {
        let options = row.truth["env"].as_str().unwrap();
        command.args(["--policy", &format!("torch{}{options}", if options.is_empty() { "" } else { ":" })]);
    }
    let output = command.output().unwrap();
    let said: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    let outcomes = said["outcomes"].as_array().unwrap().clone();
    assert_eq!(outcomes.len(), rows.len());
    outcomes
}

/// How the row differs from the truth; fails where the replay claims what is not so.
fn problem(workload: &str, row: &Row, outcome: &Value) -> Option<(String, String)> {
    let stats = &row.truth["stats"];
    let is_kept = |field: &str| workload != RESETS_PEAKS || !field.starts_with("peak_");
    let differ = FIELDS.iter().filter(|(field, name)| is_kept(field) && outcome[field] != stats[name]);
    let said: Vec<String> =
        differ.map(|(field, name)| format!("{field} {} real {}", outcome[field], stats[name])).collect();
    if said.is_empty() {
        return None;
    }
    let real = stats["reserved_bytes.all.peak"].as_u64().unwrap();
    let range: Vec<u64> =
        outcome["peak_reserved_range"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    let is_within = matches!(range[..], [low, high] if (low..=high).contains(&real) && high as f64 <= low as f64 * WIDEST);
    assert!(
        outcome["confidence"] == "interval" && is_within,
        "{}: {}, said to be {}: {range:?}",
        row.name,
        said.join("; "),
        outcome["confidence"]
    );
    Some((row.name.clone(), said.join("; ")))
}
