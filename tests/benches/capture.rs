//! What an allocation and its free cost more under the library: `make bench`, on the stand-in for PyTorch's allocator.
//!
//! Ratios within one run, best of three in turn, so that a machine's mood counts for all of them alike.

use std::io::{self, Write};
use std::path::Path;
use std::process::Command;

use gputrace_tests::recorded::{self, Folder};

fn main() -> io::Result<()> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let fake = fake_cuda::library_dir();
    let libraries = std::env::join_paths([fake, &fake_cuda::torch_dir()]).map_err(io::Error::other)?;
    let program = target.join("blocks");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/blocks.c");
    let compiled = Command::new("cc")
        .args(["-O2", "-o"])
        .arg(&program)
        .arg(source)
        .args(["libc10_cuda.so", "libc10.so"].map(|library| fake_cuda::torch_dir().join(library)))
        .arg(format!("-Wl,-rpath-link,{}", fake.display()))
        .status()?;
    assert!(compiled.success(), "benches/blocks.c does not compile");

    let modes = [None, Some("none"), Some("python"), Some("all")];
    let mut best = [f64::INFINITY; 4];
    for _ in 0..3 {
        for (mode, best) in modes.iter().zip(&mut best) {
            let folder = Folder::new(target, "bench");
            let mut command = Command::new(&program);
            command.env("LD_LIBRARY_PATH", &libraries);
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
