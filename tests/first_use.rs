//! What a new user met, point for point: `first_use.py` types each command and looks at what is said.

use std::path::Path;
use std::process::Command;

use gputrace_skip::skip;
use gputrace_tests::recorded;

#[test]
fn what_a_new_user_met_is_mended() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let python = root.join("target/python/bin/python");
    if !python.exists() {
        return skip("the Python package", "no pytest in target/python (tests/setup.sh installs it)");
    }
    let output = Command::new(&python)
        .arg(root.join("tests/first_use.py"))
        .arg(recorded::built())
        .arg(fake_cuda::library_dir())
        .arg(&python)
        .output()
        .expect("Python can be run");
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{table}\n{}", String::from_utf8_lossy(&output.stderr));
}
