//! `gputrace summary`: the figures, one row per device.

use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::analyse::live::Parts;
use gputrace_replay::reduce::{Head, Summary as Reduced, is_summary};
use gputrace_replay::report;
use gputrace_replay::report::model::Report;
use gputrace_replay::report::sections::FIGURES;
use gputrace_replay::report::summary::{ProcessSummary, Summary};
use gputrace_replay::story::Story;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::{self, ShowArgs, TraceArgs, WhenArgs};

pub(super) const VERB: Verb = Verb::new::<SummaryArgs>("summary", run).of_summaries();

/// Show what the driver, PyTorch and each owner held, per process and device
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace summary train.gtr
  gputrace summary --json job/*.gtr
  gputrace summary --at 12.5s train.gtr

With a moment (--peak, --at, --range, --step, --end), `summary` shows what was held then, by owner and call site, and --json \
has the shape of `report --json`.")]
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
    let paths = args.traces.paths()?;
    if let Some(when) = args.when.asked() {
        show::needs_traces(&paths, "a moment")?;
        let parts = (Parts::None, &Categories::default());
        return show::moment_of("summary", &args.traces, when, parts, &args.show, out);
    }
    let (read, all_read) = show::read_all(&paths, |path| {
        if is_summary(path) {
            let reduced = Reduced::open(path)?;
            return Ok((reduced.head()?, reduced.answer("summary")?, reduced.figures()?));
        }
        let story = Story::read(path)?;
        let sections = FIGURES.iter().flat_map(|entry| entry.of(&story)).collect();
        Ok((Head::of(&story), report::part(&story, sections), ProcessSummary::of(&story)))
    });
    let (mut heads, mut parts, mut processes) = (vec![], vec![], vec![]);
    for (head, part, process) in read {
        heads.push(head);
        parts.push(part);
        processes.push(process);
    }
    let traced: Vec<_> = heads.iter().map(Head::traced).collect();
    parts.splice(0..0, show::family(&traced));
    if !parts.is_empty() || args.show.json {
        args.show.write_as(&Report { verb: "summary", parts }, &Summary::new(processes, &traced), out)?;
    }
    Ok(show::exit_code(all_read))
}
