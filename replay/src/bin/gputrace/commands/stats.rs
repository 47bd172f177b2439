//! `gputrace stats`: counts, sizes and durations.

use std::process::ExitCode;

use anyhow::{anyhow, bail};
use clap::{ArgMatches, Args};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::analyse::live::{Parts, When, span};
use gputrace_replay::answers::moment;
use gputrace_replay::ledger::Unwatched;
use gputrace_replay::reduce::{Head, Summary, is_summary};
use gputrace_replay::report;
use gputrace_replay::report::model::{Part, Report};
use gputrace_replay::report::sections::{COUNTS, STANDING, STATISTICS};
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::{self, ShowArgs, TraceArgs, WhenArgs};

pub(super) const VERB: Verb = Verb::new::<StatsArgs>("stats", run).of_summaries();

/// Show counts, sizes and durations of calls and PyTorch blocks
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace stats train.gtr
  gputrace stats --range 10s..20s train.gtr
  gputrace stats --step 3 --json train.gtr
  gputrace stats --at 12.5s train.gtr

--range and --step count calls and sizes in that time, and show what was held at its peak. --at shows what each kind of \
memory and PyTorch's pools held then.")]
pub(super) struct StatsArgs {
    #[command(flatten)]
    traces: TraceArgs,
    #[command(flatten)]
    when: WhenArgs,
    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: StatsArgs = super::parsed(matches)?;
    if args.when.asked().is_some() {
        show::needs_traces(&args.traces.paths()?, "a moment")?;
    }
    match args.when.asked() {
        None => {}
        Some(when @ (When::Within(..) | When::Step(_))) => {
            return show::each("stats", &args.traces, &args.show, out, |source| counted(source, when));
        }
        Some(when @ When::At(_)) => {
            return show::each("stats", &args.traces, &args.show, out, |source| Ok(standing(source, when)));
        }
        Some(When::Peak | When::End) => bail!(
            "stats covers a period: give --range A..B or --step N; for memory held at a moment, use `gputrace report`"
        ),
    }
    let (read, all_read) = show::read_all(&args.traces.paths()?, |path| {
        if is_summary(path) {
            let summary = Summary::open(path)?;
            return Ok((summary.head()?, summary.answer("stats")?));
        }
        let story = Story::read(path)?;
        let sections = STATISTICS.iter().flat_map(|entry| entry.of(&story)).collect();
        Ok((Head::of(&story), report::part(&story, sections)))
    });
    let (heads, mut parts): (Vec<Head>, Vec<Part>) = read.into_iter().unzip();
    if !args.show.json {
        let traced: Vec<_> = heads.iter().map(Head::traced).collect();
        parts.splice(0..0, show::family(&traced));
    }
    if !parts.is_empty() || args.show.json {
        args.show.write(&Report { verb: "stats", parts }, out)?;
    }
    Ok(show::exit_code(all_read))
}

/// What memory of each kind and PyTorch's pools held at a time.
fn standing(source: &Source, when: When) -> Part {
    let start = source.definitions().process().start;
    let story = Story::within(source, when.since(start), &mut Unwatched);
    let sections = STANDING.iter().flat_map(|entry| entry.of(&story)).collect();
    report::part(&story, sections)
}

/// What happened in a time, and what was held when it held most.
fn counted(source: &Source, when: When) -> anyhow::Result<Part> {
    let view = show::view_of(source, when, Parts::None, &Categories::default())?;
    let time = span(&view.story, when).map_err(|why| anyhow!("{}: {why}", source.path()))?;
    let story = Story::within(source, time, &mut Unwatched);
    let mut sections: Vec<_> = COUNTS.iter().flat_map(|entry| entry.of(&story)).collect();
    sections.extend(moment::sections(&view, when, Parts::None));
    Ok(report::part(&view.story, sections))
}
