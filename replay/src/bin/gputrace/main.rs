//! The `gputrace` program: parses, dispatches, prints the error, sets the exit status.
#![forbid(unsafe_code)]
#![warn(clippy::print_stderr, reason = "`complain!` keeps terminals from obeying names")]

use std::io::Write;
use std::process::ExitCode;

use gputrace_schemas::printable::Screen;

mod commands;
mod elf;
mod http;
mod objects;
mod show;
mod working;

/// Bytes of stack that every command gets by with, and those that it gets where the limit (`ulimit -s`) allows fewer.
const ENOUGH_STACK: u64 = 1 << 20;
const USUAL_STACK: usize = 8 << 20;

fn main() -> ExitCode {
    // The limit is of the first thread's stack alone. A recorder has its program's.
    let limit = rustix::process::getrlimit(rustix::process::Resource::Stack).current;
    if limit.is_some_and(|bytes| bytes < ENOUGH_STACK)
        && let Ok(thread) = std::thread::Builder::new().stack_size(USUAL_STACK).spawn(command)
    {
        return thread.join().unwrap_or(ExitCode::from(show::CANNOT_KNOW));
    }
    command()
}

fn command() -> ExitCode {
    let stdout = std::io::stdout();
    let mut out = std::io::BufWriter::new(stdout.lock());
    let mut out = Screen::new(&mut out);
    let result = commands::run(&mut out).and_then(|status| {
        show::unless_closed(out.flush().map_err(Into::into))?;
        Ok(status)
    });
    match result {
        Ok(status) => status,
        Err(error) if show::is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            match is_full(&error) {
                true => show::complain!("cannot write standard output: {error}"),
                false => show::complain!("{error:#}"),
            }
            ExitCode::from(show::CANNOT_KNOW)
        }
    }
}

/// Standard output has no room left: the error of a file has its name around it.
fn is_full(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<std::io::Error>();
    error.chain().len() == 1 && cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::StorageFull)
}
