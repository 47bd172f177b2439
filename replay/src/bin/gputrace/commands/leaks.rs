//! `gputrace leaks`: what was never given back, and what keeps growing.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::{ArgMatches, Args, ValueEnum};
use gputrace_replay::analyse::growth::Growth;
use gputrace_replay::analyse::live::When;
use gputrace_replay::answers::leaks::{Leaks, Suppressions, Wanted};
use gputrace_replay::reduce::{Summary, is_summary};
use gputrace_replay::report;
use gputrace_replay::report::model::{Mood, Part, Section};
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_replay::trace::words;
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::Screen;
use gputrace_sim::bytes;

use super::Verb;
use crate::show::{self, Gate, ShowArgs, TraceArgs, WhenArgs, complain};

pub(super) const VERB: Verb = Verb::new::<LeaksArgs>("leaks", run).of_summaries();

/// Show memory that was never freed or keeps growing, by call site, owner and device
///
/// Growth is a rise, after the warm-up, of the least that a call site holds per window. Memory that each step
/// allocates and frees does not count.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace leaks train.gtr
  gputrace leaks --error-on-leak=growth --suppressions leaks.txt train.gtr
  gputrace leaks --range 60s..120s train.gtr
  gputrace leaks --steps 1000 --min-bytes 1MiB snapshot.pickle.gz

A suppressions file has one rule per line; # begins a comment, * matches anything:
  owner=cuBLAS*
  owner=NCCL site=*init_process_group*

--at T answers as if the program had ended at T, --range A..B as if at B, with growth from A on. To compare steps, use \
`gputrace diff --from step:3 --to step:90 train.gtr`.")]
pub(super) struct LeaksArgs {
    #[command(flatten)]
    traces: TraceArgs,

    /// Exit with status 1 if there is a leak, 2 if unknown: losses, damage, too short to show growth
    #[arg(long, value_enum, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "any")]
    error_on_leak: Option<Which>,

    /// File of known, accepted leaks
    #[arg(long, value_name = "FILE")]
    suppressions: Option<PathBuf>,

    /// Omit smaller call sites
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse, default_value = "0")]
    min_bytes: u64,

    /// Steps that the program made [default: guessed from the allocations]
    #[arg(long, value_name = "N")]
    steps: Option<u64>,

    #[command(flatten)]
    when: WhenArgs,

    /// Rows per table
    #[arg(long, value_name = "N", default_value = "20")]
    rows: usize,

    #[command(flatten)]
    show: ShowArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Which {
    /// Anything that is shown
    Any,
    /// Memory that keeps growing
    Growth,
    /// Memory not freed at the end
    NotFreed,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: LeaksArgs = super::parsed(matches)?;
    let when = args.when.asked().unwrap_or(When::End);
    if matches!(when, When::Step(_) | When::Peak) {
        bail!(
            "leaks needs a period of time: give --at T or --range A..B; for steps, use `gputrace diff --from step:3 --to step:90 TRACE`, for the peak `gputrace tree TRACE`"
        );
    }
    let mut suppressions = match &args.suppressions {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            Suppressions::parse(&text).map_err(|what| anyhow!("{}: {what}", path.display()))?
        }
        None => Suppressions::default(),
    };
    let wanted = Wanted { least: Bytes(args.min_bytes), n_steps: args.steps, n_rows: args.rows };
    let mut gate = Gate::Passes;
    let paths = args.traces.paths()?;
    if when != When::End {
        show::needs_traces(&paths, "a moment")?;
    }
    let (report, all_read) = show::parts("leaks", &paths, |path| {
        if is_summary(path) {
            let summary = Summary::open(path)?;
            let leaks = Leaks::of(summary.leaks()?, &wanted, &mut suppressions);
            if let Some(which) = args.error_on_leak {
                gate = gate.max(which.judge(&path.display().to_string(), &leaks));
            }
            // A summary of a long trace may have none.
            let report = if leaks.growing.is_empty() { None } else { summary.answer("report").ok() };
            let verdict = report.and_then(|report| report.verdict).map(super::report::as_of_evidence);
            return Ok(Part { verdict, sections: leaks.sections(), ..summary.answer("stats")? });
        }
        let source = Source::open(path)?;
        let mut growth = Growth::default();
        let story = Story::within(&source, when.since(source.start()), &mut growth);
        let leaks = Leaks::find(&story, source.definitions(), &growth, &wanted, &mut suppressions);
        if let Some(which) = args.error_on_leak {
            gate = gate.max(which.judge(&story.path, &leaks));
        }
        let mut sections = leaks.sections();
        if when != When::End {
            let end = words::time(story.since_start(story.ledger.run.last));
            let line = format!("as if the program had ended then: the last included event is at {end}");
            sections.insert(0, Section::new("time", "Part of the trace").line(Mood::Note, line));
        }
        // Of a part of the trace, `report` has none.
        let has_verdict = when == When::End && !leaks.growing.is_empty();
        let part = report::part(&story, sections);
        Ok(if has_verdict { super::report::below_verdict(part, &source) } else { part })
    });
    for line in suppressions.unused() {
        let path = args.suppressions.as_deref().unwrap_or_else(|| "".as_ref());
        complain!("{}: nothing matches line {line}", path.display());
    }
    if !report.parts.is_empty() || args.show.json {
        show::unless_closed(args.show.write(&report, out))?;
    }
    Ok(gate.exit_code(all_read))
}

impl Which {
    /// Growth that is seen is there, whatever was lost; that nothing leaks, and that something was not freed, only a whole trace
    /// shows.
    fn judge(self, path: &str, leaks: &Leaks) -> Gate {
        let (grows, stays) =
            (!leaks.growing.is_empty(), !leaks.not_freed.is_empty() || !leaks.abandoned.is_empty());
        let (of_growth, of_rest) = (self != Which::NotFreed, self != Which::Growth);
        if of_growth && grows {
            return Gate::Refuses;
        }
        match &leaks.found.doubts {
            Some(doubts) => Gate::cannot_know(path, doubts),
            None if of_rest && stays => Gate::Refuses,
            None if !leaks.found.asked_for_memory => {
                Gate::cannot_know(path, "it requested no memory during the recording")
            }
            None if self == Which::Growth && !leaks.can_tell() => Gate::cannot_know(
                path,
                "the trace is too short, or has too few frees, to tell growth from warm-up",
            ),
            None => Gate::Passes,
        }
    }
}
