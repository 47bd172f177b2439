//! The Python package: its own tests, on the fake device.

use std::path::Path;
use std::process::Command;

use gputrace_skip::skip;
use gputrace_tests::recorded;

#[test]
fn the_tests_of_the_python_package_pass() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let python = root.join("target/python/bin/python");
    if !python.exists() {
        return skip("the Python package", "no pytest in target/python (tests/setup.sh installs it)");
    }
    let output = Command::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "python/tests"])
        .current_dir(&root)
        .env("PYTHONPATH", root.join("python/src"))
        .env("PYTEST_PLUGINS", "gputrace.pytest_plugin")
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("GPUTRACE", recorded::built().join("gputrace"))
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .output()
        .expect("Python can be run");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
}
