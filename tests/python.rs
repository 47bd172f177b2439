//! The Python package: its own tests, on the fake device.

use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_skip::skip;
use gputrace_tests::recorded;

#[test]
fn the_tests_of_the_python_package_pass() {
    let Some(python) = python() else { return };
    let apart = ["--ignore=python/tests/test_types.py", "--ignore=python/tests/test_notebook.py"];
    pytest(&python, &[&apart[..], &["python/tests"]].concat());
}

#[test]
fn the_python_package_is_typed_strictly() {
    let Some(python) = python_with("mypy", "types of the Python package") else { return };
    pytest(&python, &["python/tests/test_types.py"]);
}

#[test]
fn a_notebook_shows_reports_tables_and_pictures() {
    let Some(python) = python_with("nbclient, nbconvert, ipykernel", "notebooks") else { return };
    pytest(&python, &["python/tests/test_notebook.py"]);
}

/// The environment that tests/setup.sh makes.
fn python() -> Option<PathBuf> {
    let python = root().join("target/python/bin/python");
    if !python.exists() {
        skip("the Python package", "no pytest in target/python (tests/setup.sh installs it)");
        return None;
    }
    Some(python)
}

/// The same, where it has what else a test needs.
fn python_with(modules: &str, what: &str) -> Option<PathBuf> {
    let python = python()?;
    let import = Command::new(&python).args(["-c", &format!("import {modules}")]).output();
    if !import.expect("Python can be run").status.success() {
        skip(what, format!("no {modules} in target/python (tests/setup.sh installs it from PyPI)"));
        return None;
    }
    Some(python)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the sources are there")
}

fn pytest(python: &Path, arguments: &[&str]) {
    let root = root();
    let output = Command::new(python)
        .args(["-m", "pytest", "-q", "-p", "no:cacheprovider"])
        .args(arguments)
        .current_dir(&root)
        .env("PYTHONPATH", root.join("python/src"))
        .env("PYTEST_PLUGINS", "gputrace.pytest_plugin")
        .env("GPUTRACE_LIBRARY", recorded::built().join("libgputrace.so"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("GPUTRACE_PROGRAM", recorded::built().join("gputrace"))
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .output()
        .expect("Python can be run");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
}

/// What `make wheel` makes, of the release build as it is; `make wheel` itself refuses what needs a newer C library.
#[test]
fn the_wheel_can_be_installed_and_used() {
    let Some(python) = python() else { return };
    let root = root();
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
    check.arg("packaging/check.py").arg(&wheel).arg("--driver").arg(fake_cuda::library_dir());
    run(check.arg("--demo").arg(built.join("fake-cuda")).arg("demo"));
    if let Some(python) = python_with("twine, build, flit_core, trove_classifiers", "metadata of the wheel") {
        run(Command::new(python).arg("packaging/metadata.py").arg(wheel));
    }
}
