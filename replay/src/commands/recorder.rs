//! `gputrace recorder`: what libgputrace.so starts for each traced process.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Args};

use super::Verb;

pub(super) const VERB: Verb = Verb::new::<RecorderArgs>("recorder", run);

/// Drains a ring into a trace; started by libgputrace.so
#[derive(Args)]
#[command(hide = true)]
pub(super) struct RecorderArgs {
    /// The ring
    #[arg(long, value_name = "PATH")]
    ring: OsString,
}

fn run(matches: &ArgMatches, _out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let args: RecorderArgs = super::parsed(matches)?;
    Ok(gputrace_recorder::daemon_main(["--ring".into(), args.ring]))
}
