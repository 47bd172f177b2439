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

fn main() -> ExitCode {
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
            show::complain!("{error:#}");
            ExitCode::from(show::CANNOT_KNOW)
        }
    }
}
