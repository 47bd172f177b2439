//! What an allocation and its free cost more under the library: `make bench`, on the stand-in for PyTorch's allocator; and what they
//! and other calls of the driver cost while the library sleeps.
//!
//! Ratios within one run, best of three in turn, so that a machine's mood counts for all of them alike.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use gputrace_tests::recorded::{self, Folder};

fn main() -> io::Result<()> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    stacks(target)?;
    asleep(target)
}

/// Compiles a program of `benches`, linked to the stand-ins for PyTorch and the driver.
fn compiled(target: &Path, name: &str) -> io::Result<PathBuf> {
    let fake = fake_cuda::library_dir();
    let program = target.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches").join(name).with_extension("c");
    let compiled = Command::new("cc")
        .args(["-O2", "-o"])
        .arg(&program)
        .arg(source)
        .args(["libc10_cuda.so", "libc10.so"].map(|library| fake_cuda::torch_dir().join(library)))
        .arg(fake.join("libcuda.so.1"))
        .arg(format!("-Wl,-rpath-link,{}", fake.display()))
        .status()?;
    assert!(compiled.success(), "benches/{name}.c does not compile");
    Ok(program)
}

fn libraries() -> io::Result<OsString> {
    let folders = [fake_cuda::library_dir(), &fake_cuda::torch_dir()];
    std::env::join_paths(folders).map_err(io::Error::other)
}

/// What a library that sleeps costs, beside none at all and one that records.
fn asleep(target: &Path) -> io::Result<()> {
    const WHAT: [&str; 3] =
        ["call that gives nothing out", "pair of allocation and free", "pair in PyTorch's allocator"];
    let program = compiled(target, "asleep")?;
    let mut best = [[f64::INFINITY; 3]; 3];
    for _ in 0..3 {
        for (mode, best) in ["alone", "asleep", "recorded"].iter().zip(&mut best) {
            let folder = Folder::new(target, "bench");
            let mut command = Command::new(&program);
            command.env("LD_LIBRARY_PATH", libraries()?);
            match *mode {
                "asleep" => {
                    command.env("LD_PRELOAD", recorded::built().join("libgputrace.so"));
                    command.env("GPUTRACE", "dormant");
                }
                "recorded" => recorded::preload(&mut command, &folder),
                _ => {}
            }
            let output = command.output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let figures: Vec<f64> =
                text.split_whitespace().filter_map(|figure| figure.parse().ok()).collect();
            if figures.len() != best.len() {
                return Err(io::Error::other(format!("asleep: {output:?}")));
            }
            for (best, ns) in best.iter_mut().zip(figures) {
                *best = best.min(ns);
            }
        }
    }
    let [alone, asleep, recorded] = best;
    let mut out = io::stdout();
    writeln!(out, "a library that sleeps (GPUTRACE=dormant), and one that records, on the fake driver")?;
    for (at, what) in WHAT.iter().enumerate() {
        let [alone, asleep, recorded] = [alone, asleep, recorded].map(|figures| figures[at]);
        writeln!(
            out,
            "  {what:28} {alone:7.1} ns   asleep {:+7.1} ns {:5.2} x   recorded {:+7.1} ns {:5.2} x",
            asleep - alone,
            asleep / alone,
            recorded - alone,
            recorded / alone
        )?;
    }
    Ok(())
}

/// What stacks of each kind cost.
fn stacks(target: &Path) -> io::Result<()> {
    let program = compiled(target, "blocks")?;
    let modes = [None, Some("none"), Some("python"), Some("all")];
    let mut best = [f64::INFINITY; 4];
    for _ in 0..3 {
        for (mode, best) in modes.iter().zip(&mut best) {
            let folder = Folder::new(target, "bench");
            let mut command = Command::new(&program);
            command.env("LD_LIBRARY_PATH", libraries()?);
            if let Some(mode) = mode {
                recorded::preload(&mut command, &folder);
                command.env("GPUTRACE_STACKS", mode);
            }
            let output = command.output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let ns: f64 = text.trim().parse().map_err(|_| io::Error::other(format!("blocks: {output:?}")))?;
            *best = best.min(ns);
        }
    }
    let [alone, ..] = best;
    let mut out = io::stdout();
    writeln!(out, "pair of allocation and free, 25 native frames deep")?;
    for (mode, ns) in modes.iter().zip(best) {
        let mode = mode.map_or("alone".to_owned(), |mode| format!("--stacks {mode}"));
        writeln!(out, "  {mode:16} {ns:7.1} ns   {:+7.1} ns   {:5.2} x", ns - alone, ns / alone)?;
    }
    Ok(())
}
