//! Every export is opened by programs that people open it with (tests/consumers), and its numbers are those of
//! `gputrace summary --json`. What is not installed and cannot be fetched is skipped, and said.

use gputrace_skip::skip;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;

use gputrace_tests::recorded::{self, Folder};

/// Format, consumer, and which of the two scripts has it.
const CONSUMERS: &[(&str, &str, &str)] = &[
    ("folded", "folded", "check.py"),
    ("svg", "svg", "check.py"),
    ("speedscope", "speedscope_schema", "check.py"),
    ("speedscope", "speedscope_importer", "check.mjs"),
    ("pprof", "pprof_format", "check.mjs"),
    ("pprof", "go_pprof", "check.py"),
    ("firefox", "firefox_schema", "check.py"),
    ("firefox", "firefox_profiler", "check.mjs"),
    ("perfetto", "perfetto", "check.py"),
    ("csv", "duckdb_csv", "check.py"),
    ("jsonl", "duckdb_jsonl", "check.py"),
    ("parquet", "duckdb_parquet", "check.py"),
    ("parquet", "pandas_parquet", "check.py"),
    ("nccl", "duckdb_nccl", "check.py"),
    ("torch-pickle", "torch_memory_viz", "check.py"),
    ("torch-pickle", "memory_viz", "check.mjs"),
];
/// Consumers that open something at the same time.
const AT_ONCE: usize = 3;
/// What a consumer that is not there exits with.
const SKIPPED: i32 = 77;

#[test]
fn every_export_is_opened_by_its_consumers_and_has_the_figures_of_the_summary() {
    let scripts = tests().join("consumers");
    let installed = tests().join("../target/consumers");
    let setup = output(Command::new(scripts.join("setup.sh")).arg(&installed));
    say(&String::from_utf8_lossy(&setup.stderr));
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "exports");
    let trace = tests().join("golden/version1.gtr");
    let summary = gputrace(&["summary", "--json"], &trace);
    std::fs::write(folder.path().join("summary.json"), summary).expect("a file of our own");
    let formats: BTreeSet<&str> = CONSUMERS.iter().map(|(format, ..)| *format).collect();
    for format in formats {
        let exported = gputrace(&["export", "--format", format], &trace);
        std::fs::write(folder.path().join(format), exported).expect("a file of our own");
    }
    // Most of the time is that of interpreters and browsers that start.
    let (next, wrong) = (Mutex::new(CONSUMERS.iter()), Mutex::new(vec![]));
    let work = || {
        loop {
            let Some((format, consumer, script)) = next.lock().expect("no panic").next() else { return };
            let file = folder.path().join(format);
            let problem = opened(format, consumer, script, &file, &installed);
            wrong.lock().expect("no panic").extend(problem);
        }
    };
    std::thread::scope(|scope| (0..AT_ONCE).for_each(|_| _ = scope.spawn(work)));
    let wrong = wrong.into_inner().expect("no panic");
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

/// Has a consumer open a file, beside which the summary lies; what was wrong.
fn opened(format: &str, consumer: &str, script: &str, file: &Path, installed: &Path) -> Option<String> {
    let scripts = tests().join("consumers");
    let interpreter = match script {
        "check.py" => python(installed),
        _ => PathBuf::from("node"),
    };
    let mut command = Command::new(interpreter);
    command.arg(scripts.join(script)).arg(consumer).arg(file);
    command.arg(file.with_file_name("summary.json")).arg(installed);
    let told = match command.output() {
        Ok(told) => told,
        Err(error) => {
            skip(&format!("{consumer} of {format}"), format!("{script} cannot be started: {error}"));
            return None;
        }
    };
    let text = [told.stdout, told.stderr].map(|text| String::from_utf8_lossy(&text).trim().to_owned());
    match told.status.code() {
        Some(0) => None,
        Some(SKIPPED) => {
            skip(&format!("{consumer} of {format}"), &text[0]);
            None
        }
        _ => Some(format!("{consumer} of {format}: {}", text.join("\n"))),
    }
}

#[test]
fn the_queries_of_the_documentation_run_in_duckdb() {
    let (scripts, installed) = (tests().join("consumers"), tests().join("../target/consumers"));
    say(&String::from_utf8_lossy(&output(Command::new(scripts.join("setup.sh")).arg(&installed)).stderr));
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "sql");
    let golden = tests().join("golden");
    let summaries = folder.path().join("summaries").display().to_string();
    gputrace(&["reduce", "-o", &summaries], &golden);
    std::fs::write(folder.path().join("summary.json"), gputrace(&["summary", "--json"], &golden))
        .expect("a file");
    let rows = gputrace(&["export", "-f", "parquet"], &golden.join("varying-lengths.gtr"));
    std::fs::write(folder.path().join("rows.parquet"), rows).expect("a file of our own");
    let mut command = Command::new(python(&installed));
    command.arg(scripts.join("sql.py")).arg(folder.path());
    let told = output(command.arg(tests().join("../docs/SQL.md")));
    let text = [told.stdout, told.stderr].map(|text| String::from_utf8_lossy(&text).trim().to_owned());
    match told.status.code() {
        Some(SKIPPED) => skip("the queries of docs/SQL.md", &text[0]),
        status => assert_eq!(status, Some(0), "{}", text.join("\n")),
    }
}

#[test]
fn every_format_has_a_consumer_and_is_explained() {
    let listed =
        output(Command::new(recorded::built().join("gputrace")).args(["export", "--format", "?", "x"]));
    let text = String::from_utf8_lossy(&listed.stderr).into_owned();
    let (_, list) = text.split_once("[possible values: ").expect("clap lists the formats");
    let formats: BTreeSet<&str> = list.split(']').next().unwrap_or_default().split(", ").collect();
    let opened: BTreeSet<&str> = CONSUMERS.iter().map(|(format, _, _)| *format).collect();
    assert_eq!(opened, formats, "a format without a line in CONSUMERS, or the other way round");
    let page = std::fs::read_to_string(tests().join("../docs/EXPORTS.md")).expect("docs/EXPORTS.md");
    let rows: String = page.lines().filter(|line| line.starts_with("| `")).collect();
    let unexplained: Vec<_> =
        formats.iter().filter(|format| !rows.contains(&format!("`{format}`"))).collect();
    assert!(unexplained.is_empty(), "docs/EXPORTS.md: its table lacks {unexplained:?}");
}

fn tests() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The environment of the consumers, else whatever Python there is: some need nothing.
fn python(installed: &Path) -> PathBuf {
    let own = installed.join("bin/python");
    if own.exists() { own } else { PathBuf::from("python3") }
}

fn gputrace(arguments: &[&str], trace: &Path) -> Vec<u8> {
    let told = output(Command::new(recorded::built().join("gputrace")).args(arguments).arg(trace));
    assert!(told.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&told.stderr));
    told.stdout
}

fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Also where the test passes.
fn say(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}
