//! The NCCL jobs of `tests/nccl`, which run on the fake device.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A file of `tests/nccl`.
#[must_use]
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("nccl").join(name)
}

/// The interpreter itself: `python3` on `PATH` may be a script that looks for it at each start.
///
/// # Panics
/// There is no `python3`.
pub fn python() -> &'static Path {
    static PYTHON: OnceLock<PathBuf> = OnceLock::new();
    PYTHON.get_or_init(|| {
        let output = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
        PathBuf::from(String::from_utf8_lossy(&output.expect("python3 runs").stdout).trim())
    })
}

/// The scenarios that a file of `tests/nccl` lists.
///
/// # Panics
/// The file does not list them.
#[must_use]
pub fn list(file: &str) -> Vec<Value> {
    let output = Command::new(python()).arg(source(file)).arg("--list").output().expect("python3 runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("a list")
}
