//! `gputrace summary`: the figures, one row per device.

use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::analyse::live::Parts;
use gputrace_replay::analyse::summary::Summary;
use gputrace_replay::answers::processes::Traced;
use gputrace_replay::report;
use gputrace_replay::report::sections::FIGURES;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::{self, ShowArgs, Stories, TraceArgs, WhenArgs};

pub(super) const VERB: Verb = Verb::new::<SummaryArgs>("summary", run);

/// Shows the figures of each process and device: what the driver, PyTorch and each owner held
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace summary train.gtr
  gputrace summary --json job/*.gtr
  gputrace summary --at 12.5s train.gtr

With a moment (--peak, --at, --range, --step, --end), what was held then is shown by owner and call site; --json then has \
the shape of `report --json`.")]
pub(super) struct SummaryArgs {
    #[command(flatten)]
    traces: TraceArgs,
    #[command(flatten)]
    when: WhenArgs,
    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: SummaryArgs = super::parsed(matches)?;
    if let Some(when) = args.when.asked() {
        let parts = (Parts::None, &Categories::default());
        return show::moment_of("summary", &args.traces, when, parts, &args.show, out);
    }
    let read = Stories::read(&args.traces)?;
    let mut report = report::about("summary", FIGURES, &read.stories);
    let traced: Vec<_> = read.stories.iter().map(Traced::of).collect();
    report.parts.splice(0..0, show::family(&traced));
    if !report.parts.is_empty() || args.show.json {
        args.show.write_as(&report, &Summary::of(&read.stories), out)?;
    }
    Ok(read.exit_code())
}
