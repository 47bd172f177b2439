//! Python frames are the interpreter's own, on every CPython of this machine: `python3` on the PATH, those of pyenv, the one
//! that `tests/setup.sh` prepares with greenlet, and the ones that `GPUTRACE_TEST_PYTHONS` lists, separated by colons.

mod common;

use gputrace_skip::skip;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Minor versions whose frames are read.
const SUPPORTED: RangeInclusive<u32> = 9..=15;

struct Python {
    path: PathBuf,
    minor: u32,
    is_free_threaded: bool,
}

fn pythons() -> Vec<Python> {
    let listed = std::env::var_os("GPUTRACE_TEST_PYTHONS").unwrap_or_default();
    let mut paths: BTreeSet<PathBuf> = std::env::split_paths(&listed).filter(|path| path.exists()).collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let names = ["python3".to_string()].into_iter().chain((6..20).map(|minor| format!("python3.{minor}")));
    for name in names {
        paths
            .extend(std::env::split_paths(&path).map(|folder| folder.join(&name)).find(|path| path.exists()));
    }
    paths.insert(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/python/bin/python"));
    let pyenv = PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".pyenv/versions");
    let versions = std::fs::read_dir(pyenv).into_iter().flatten().flatten();
    paths.extend(versions.map(|version| version.path().join("bin/python3")).filter(|path| path.exists()));
    paths.into_iter().filter_map(Python::at).collect()
}

impl Python {
    fn at(path: PathBuf) -> Option<Python> {
        // The interpreter itself: what stands on the PATH may be a script that starts it.
        let program = "import sys, sysconfig; print(sys.version_info[1]); print(sys.executable); \
                       print(sysconfig.get_config_var('Py_GIL_DISABLED'))";
        let output = Command::new(&path).args(["-c", program]).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        let mut lines = text.lines();
        let minor = lines.next()?.parse().ok()?;
        let path = PathBuf::from(lines.next()?);
        Some(Python { path, minor, is_free_threaded: lines.next() == Some("1") })
    }

    fn is_supported(&self) -> bool {
        SUPPORTED.contains(&self.minor) && !self.is_free_threaded
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("programs").join(arguments[0]);
        Command::new(&self.path)
            .arg(program)
            .args(&arguments[1..])
            .env("LD_PRELOAD", common::library())
            .output()
            .unwrap_or_else(|error| panic!("cannot run {}: {error}", self.path.display()))
    }

    fn check(&self, arguments: &[&str]) {
        let output = self.run(arguments);
        let text = String::from_utf8_lossy(&output.stdout);
        if !text.is_empty() {
            eprintln!("{}: {}", self.path.display(), text.trim_end());
        }
        assert!(
            output.status.success(),
            "{} {arguments:?}: {}\n{text}{}",
            self.path.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

/// The interpreters whose frames are captured.
fn supported() -> Vec<Python> {
    let found: Vec<_> = pythons().into_iter().filter(Python::is_supported).collect();
    if found.is_empty() {
        skip("CPython 3.9 to 3.15", "none here; GPUTRACE_TEST_PYTHONS names some");
    }
    found
}

#[test]
fn every_frame_is_the_one_that_the_interpreter_reports() {
    supported().iter().for_each(|python| python.check(&["python_frames.py", "1000"]));
}

#[test]
fn frames_stay_right_while_signals_threads_and_libraries_come_and_go() {
    supported().iter().for_each(|python| python.check(&["python_storm.py"]));
}

#[test]
fn native_frames_of_pytorch_are_those_of_libgcc() {
    let Some(path) = std::env::var_os("GPUTRACE_TEST_TORCH_PYTHON") else {
        return skip("native frames of PyTorch", "GPUTRACE_TEST_TORCH_PYTHON names no Python with it");
    };
    let python = Python::at(PathBuf::from(&path)).expect("GPUTRACE_TEST_TORCH_PYTHON is a Python");
    python.check(&["torch_native.py", "31"]);
    python.check(&["torch_native.py", "31", "signals"]);
    python.check(&["torch_native.py", "31", "old-glibc"]);
}

#[test]
fn threads_that_capture_while_the_interpreter_ends_do_no_harm() {
    for python in pythons().into_iter().filter(|python| python.minor >= 6) {
        for _ in 0..5 {
            python.check(&["python_exit.py"]);
        }
    }
}

#[test]
fn a_forked_child_has_its_own_frames() {
    supported().iter().for_each(|python| python.check(&["python_fork.py"]));
}

#[test]
fn an_interpreter_whose_frames_are_not_read_is_left_alone() {
    for python in pythons().iter().filter(|python| !python.is_supported() && python.minor >= 6) {
        let status = if python.is_free_threaded { "3" } else { "4" };
        python.check(&["python_declined.py", status]);
    }
}

#[test]
fn the_collector_of_reference_cycles_is_noticed() {
    supported().iter().for_each(|python| python.check(&["python_collects.py"]));
}
