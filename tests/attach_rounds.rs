//! `attach/rounds.py` and `attach/as_before.py`, a few rounds with each program; `make attach` asks for as many as it is worth
//! (`GPUTRACE_ATTACH_ROUNDS`).
#![cfg(target_arch = "x86_64")]

use std::path::Path;
use std::process::Command;

use gputrace_tests::recorded;

#[test]
fn programs_of_all_kinds_compute_what_they_compute_alone() {
    let rounds = std::env::var("GPUTRACE_ATTACH_ROUNDS").unwrap_or_else(|_| "2".into());
    let built = recorded::built();
    let mut command = Command::new("python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("attach/rounds.py")).arg(built);
    // However long they take.
    let output = command.args([&rounds, "100000"]).env("PYTHONDONTWRITEBYTECODE", "1");
    let output = output.env("FAKE_CUDA", fake_cuda::library_dir()).output().expect("python3");
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    println!("{said}");
    assert!(output.status.success(), "{said}");
    // Those that need nothing but a compiler and Python.
    for name in ["driver, threads come and go", "NCCL job of four", "Python 3."] {
        let n_passed = said.lines().filter(|line| line.starts_with(&format!("PASS {name}"))).count();
        assert!(n_passed >= 2, "{name}: {said}");
    }
}

#[test]
fn a_process_is_as_it_was_before_somebody_attached() {
    let mut command = Command::new("python3");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("attach/as_before.py")).arg(recorded::built());
    let output = command.arg("5").env("FAKE_CUDA", fake_cuda::library_dir()).output().expect("python3");
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.matches("PASS").count() == 2, "{said}");
}
