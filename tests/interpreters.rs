//! Python on the fake device: each request is told with the interpreter's own frames, or the report says why it has none. On
//! `python3` and on the interpreters that `GPUTRACE_TEST_PYTHONS` lists, separated by colons.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_schemas::event::{Action, EventKind, Frame};
use gputrace_schemas::reader::Trace;
use gputrace_tests::recorded::{self, Folder};

#[test]
fn requests_have_the_frames_of_the_interpreter_or_the_report_says_why_not() {
    let listed = std::env::var_os("GPUTRACE_TEST_PYTHONS").unwrap_or_default();
    let mut pythons = vec![PathBuf::from("python3")];
    pythons.extend(std::env::split_paths(&listed).filter(|path| path.exists()));
    for (at, python) in pythons.iter().enumerate() {
        let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &format!("interpreter-{at}"));
        check(python, &folder);
    }
}

fn check(python: &Path, folder: &Folder) {
    let mut command = Command::new(python);
    command
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("programs/ctypes_blocks.py"))
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir());
    recorded::preload(&mut command, folder);
    let output = command.output().unwrap_or_else(|error| panic!("{}: {error}", python.display()));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !errors.contains("gputrace:"), "{}: {errors}", python.display());
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let minor = said["minor"].as_u64().expect("a number");
    let is_free_threaded = said["is_free_threaded"] == true;
    let trace = &folder.traces(1)[0];
    let told = requests(trace);
    let stacks = told.iter().map(|(bytes, python, _)| (bytes.to_string(), serde_json::json!(python)));
    let told_python: serde_json::Map<_, _> = stacks.collect();
    let _ = writeln!(io::stderr(), "{}: Python 3.{minor}, {} requests", python.display(), told.len());

    let why = match (minor, is_free_threaded) {
        (_, true) => "this CPython is a free-threaded build",
        (9..=15, false) => {
            assert_eq!(serde_json::Value::Object(told_python), said["said"], "{}", python.display());
            return;
        }
        _ => "this is not CPython 3.9 to 3.15",
    };
    assert_eq!(told.len(), said["said"].as_object().expect("an object").len());
    assert!(told.iter().all(|(_, python, n_native)| python.is_empty() && *n_native > 5), "{told:?}");
    let report = Command::new(recorded::built().join("gputrace")).arg("report").arg(folder.path()).output();
    let report = String::from_utf8_lossy(&report.expect("gputrace runs").stdout).into_owned();
    assert!(report.contains(&format!("no stack has Python frames: {why}")), "{report}");
}

/// File, line and function.
type PythonFrame = (String, u32, String);

/// Of each request: its bytes, its Python frames, and how many native ones it has.
fn requests(trace: &Trace) -> Vec<(u64, Vec<PythonFrame>, usize)> {
    let asks = trace.events().filter_map(|event| match event.kind {
        EventKind::Call(call) if call.action == Action::Alloc => Some((call.bytes.0, event.stack)),
        _ => None,
    });
    asks.map(|(bytes, stack)| {
        let mut n_native = 0;
        let python = trace.stack_frames(stack).filter_map(|frame| match frame {
            Frame::Python { function, file, line } => Some((file.clone(), *line, function.clone())),
            Frame::Native { .. } => {
                n_native += 1;
                None
            }
        });
        let python = python.collect();
        (bytes, python, n_native)
    })
    .collect()
}
