//! `gputrace summary`: the figures, one row a device.

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::report;
use gputrace_replay::report::sections::FIGURES;
use gputrace_replay::summary::Summary;

use super::Verb;
use crate::show::{self, ShowArgs, Stories, TraceArgs};

pub(super) const VERB: Verb = Verb::new::<SummaryArgs>("summary", run);

/// Shows the figures of each process and device: what the driver, PyTorch and each owner held
#[derive(Args)]
pub(super) struct SummaryArgs {
    #[command(flatten)]
    traces: TraceArgs,
    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let args: SummaryArgs = super::parsed(matches)?;
    let read = Stories::read(&args.traces);
    if args.show.json {
        show::write_json(&Summary::of(&read.stories), out)?;
    } else if !read.stories.is_empty() {
        args.show.write(&report::about("summary", FIGURES, &read.stories), out)?;
    }
    Ok(read.exit_code())
}
