//! `fake-cuda PROGRAM [ARGS...]` runs a program on the fake CUDA; `fake-cuda --dir` prints where it is.

use std::env;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let mut args = env::args_os().skip(1);
    let Some(program) = args.next() else {
        eprintln!("usage: fake-cuda PROGRAM [ARGS...] | fake-cuda --dir");
        return ExitCode::from(2);
    };
    if program == "--dir" {
        return match writeln!(io::stdout(), "{}", fake_cuda::library_dir().display()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let mut path = fake_cuda::library_dir().as_os_str().to_owned();
    if let Some(old) = env::var_os("LD_LIBRARY_PATH").filter(|old| !old.is_empty()) {
        path.push(":");
        path.push(old);
    }
    let error = Command::new(&program).args(args).env("LD_LIBRARY_PATH", path).exec();
    eprintln!("fake-cuda: cannot run {}: {error}", program.to_string_lossy());
    ExitCode::from(127)
}
