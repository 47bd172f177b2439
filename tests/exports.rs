//! Every export is opened by programs that people open it with (tests/consumers), and its numbers are those of
//! `gputrace summary --json`. What is not installed and cannot be fetched is skipped, and said.

use gputrace_skip::skip;
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

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
    ("chrome", "chrome", "check.py"),
    ("perfetto", "perfetto", "check.py"),
    ("csv", "duckdb_csv", "check.py"),
    ("jsonl", "duckdb_jsonl", "check.py"),
    ("parquet", "duckdb_parquet", "check.py"),
    ("parquet", "pandas_parquet", "check.py"),
    ("sqlite", "sqlite", "check.py"),
    ("sqlite", "sqlite3_program", "check.py"),
    ("nccl", "duckdb_nccl", "check.py"),
    ("torch-pickle", "torch_memory_viz", "check.py"),
    ("torch-pickle", "memory_viz", "check.mjs"),
];
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
    let mut wrong = vec![];
    for (format, consumer, script) in CONSUMERS {
        let file = folder.path().join(format);
        std::fs::write(&file, gputrace(&["export", "--format", format], &trace)).expect("a file of our own");
        let interpreter = match *script {
            "check.py" => python(&installed),
            _ => PathBuf::from("node"),
        };
        let mut command = Command::new(interpreter);
        command.arg(scripts.join(script)).arg(consumer).arg(&file);
        command.arg(folder.path().join("summary.json")).arg(&installed);
        let told = match command.output() {
            Ok(told) => told,
            Err(error) => {
                skip(&format!("{consumer} of {format}"), format!("{script} cannot be started: {error}"));
                continue;
            }
        };
        let text = [told.stdout, told.stderr].map(|text| String::from_utf8_lossy(&text).trim().to_owned());
        match told.status.code() {
            Some(0) => {}
            Some(SKIPPED) => skip(&format!("{consumer} of {format}"), &text[0]),
            _ => wrong.push(format!("{consumer} of {format}: {}", text.join("\n"))),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
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
