//! The `gputrace` program: parses, dispatches, prints the error, sets the exit status.
#![forbid(unsafe_code)]
#![warn(clippy::print_stderr, reason = "`complain!` keeps terminals from obeying names")]

use std::io::Write;
use std::process::ExitCode;

use gputrace_schemas::printable::Screen;

mod commands;
mod elf;
mod show;

fn main() -> ExitCode {
    let stdout = std::io::stdout();
    let mut out = std::io::BufWriter::new(stdout.lock());
    let mut out = Screen::new(&mut out);
    let result = commands::run(&mut out).and_then(|status| {
        out.flush()?;
        Ok(status)
    });
    match result {
        Ok(status) => status,
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            show::complain!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether the reader of our output went away (`gputrace … | head`): nothing that we should complain about.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}
