//! `fake-cuda PROGRAM [ARGS...]` runs a program on the fake CUDA, `fake-cuda demo` the built-in one; `fake-cuda --dir` prints where the
//! libraries are.

use std::env;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let mut args = env::args_os().skip(1);
    let Some(mut program) = args.next() else {
        eprintln!("usage: fake-cuda PROGRAM [ARGS...] | fake-cuda demo | fake-cuda --dir");
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
    let mut command = if program == "demo" {
        program = fake_cuda::demo().into();
        let mut demo = Command::new(&program);
        // So small that the end of the demo does not fit.
        demo.env("FAKE_CUDA_MEMORY", "2GiB");
        demo
    } else {
        Command::new(&program)
    };
    let error = command.args(args).env("LD_LIBRARY_PATH", path).exec();
    eprintln!("fake-cuda: cannot run {}: {error}", program.to_string_lossy());
    ExitCode::from(127)
}
