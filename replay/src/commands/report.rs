//! `gputrace report`: where the memory went.

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::report::sections::SECTIONS;

use super::Verb;
use crate::show::{self, ShowArgs, TraceArgs};

pub(super) const VERB: Verb = Verb::new::<ReportArgs>("report", run);

/// Shows where the memory went: the peak, its owners and call sites, and what ran out
#[derive(Args)]
pub(super) struct ReportArgs {
    #[command(flatten)]
    traces: TraceArgs,
    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let args: ReportArgs = super::parsed(matches)?;
    show::sections("report", SECTIONS, &args.traces, &args.show, out)
}
