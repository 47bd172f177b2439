//! `gputrace stats`: counts, sizes and durations.

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::report::sections::STATISTICS;

use super::Verb;
use crate::show::{self, ShowArgs, TraceArgs};

pub(super) const VERB: Verb = Verb::new::<StatsArgs>("stats", run);

/// Shows counts, sizes and durations of calls and PyTorch blocks
#[derive(Args)]
pub(super) struct StatsArgs {
    #[command(flatten)]
    traces: TraceArgs,
    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let args: StatsArgs = super::parsed(matches)?;
    show::sections("stats", STATISTICS, &args.traces, &args.show, out)
}
