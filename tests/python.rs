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
        .env("GPUTRACE_LIBRARY", recorded::built().join("libgputrace.so"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("GPUTRACE", recorded::built().join("gputrace"))
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .output()
        .expect("Python can be run");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// What `make wheel` makes, of the release build as it is; `make wheel` itself refuses what needs a newer C library.
#[test]
fn the_wheel_can_be_installed_and_used() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let python = root.join("target/python/bin/python");
    if !python.exists() {
        return skip("the Python package", "no pytest in target/python (tests/setup.sh installs it)");
    }
    let built = recorded::built();
    let out = recorded::Folder::new(&std::env::temp_dir(), "gputrace-wheel");
    let run = |command: &mut Command| {
        let output = command.current_dir(&root).output().expect("Python can be run");
        let (said, wrong) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{said}\n{wrong}");
        said.into_owned()
    };
    let pack = |what: &str| {
        let mut command = Command::new(&python);
        command.args(["packaging/pack.py", what, "--any-glibc", "--program"]).arg(built.join("gputrace"));
        command.arg("--library").arg(built.join("libgputrace.so")).arg("--out").arg(out.path());
        run(&mut command)
    };
    for what in ["wheel", "tarball"] {
        assert_eq!(pack(what), pack(what), "other bytes of the same files");
    }
    let wheel = out.files("whl").pop().expect("a wheel");
    let mut check = Command::new(&python);
    check.arg("packaging/check.py").arg(wheel).arg("--driver").arg(fake_cuda::library_dir());
    run(check.arg("--demo").arg(built.join("fake-cuda")).arg("demo"));
}
