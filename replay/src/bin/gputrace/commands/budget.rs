//! `gputrace budget`: what a server's memory goes to, and the largest cache that would still fit.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow};
use clap::{ArgMatches, Args};
use gputrace_replay::analyse::budget::{Instant, budgets};
use gputrace_replay::analyse::categories::Categories;
use gputrace_replay::answers::budget::reply;
use gputrace_replay::answers::whatif::Machine;
use gputrace_replay::import::Requests;
use gputrace_replay::reduce::{Summary, is_summary};
use gputrace_replay::report::model::Report;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Nanos;
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::replay::MachineArgs;
use crate::show::{self, FILES, Named, ShowArgs};
use crate::working::Working;

pub(super) const VERB: Verb = Verb::new::<BudgetArgs>("budget", run).of_summaries().of_replays();

/// Split a server's memory into weights, KV cache, graphs and the rest, in rows that sum to the driver's figure
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace budget server.gtr
  gputrace budget --limit 70GiB --utilization 0.9 server.gtr
  gputrace budget --between sleep,wake server.gtr
  gputrace budget --between 10s,20s --json server.gtr

Columns: ready (weights, caches and graphs exist), peak, end. To find the largest KV cache that fits, `budget` replays the \
run with larger ones.")]
pub(super) struct BudgetArgs {
    /// Trace or PyTorch snapshot (plain or .gz), or the summary of a server from `gputrace reduce`
    #[arg(value_name = "TRACE|DIR", value_hint = FILES)]
    trace: Named,

    /// Show what was not freed between two NVTX marks (or starts of ranges), or two times after the start
    #[arg(long, value_name = "A,B", value_parser = instants)]
    between: Option<[Instant; 2]>,

    /// Find the largest KV cache for this share of the card, vLLM's --gpu-memory-utilization (repeatable)
    #[arg(long, value_name = "SHARE", value_parser = share)]
    utilization: Vec<f64>,

    /// Your own names for memory: `KV cache: stack=*make_cache*`; see docs/ROLES.md
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,

    #[command(flatten)]
    machine: MachineArgs,

    #[command(flatten)]
    show: ShowArgs,
}

fn instants(text: &str) -> Result<[Instant; 2], String> {
    let (from, to) =
        text.split_once(',').ok_or_else(|| format!("`{text}` is not two instants; write A,B"))?;
    if from.is_empty() || to.is_empty() {
        return Err(format!("`{text}` is not two instants; write A,B"));
    }
    let instant = |text: &str| match text.starts_with(|c: char| c.is_ascii_digit()) {
        true => show::time(text).map(|time| Instant::After(Nanos(time))),
        false => Ok(Instant::Mark(text.to_owned())),
    };
    Ok([instant(from)?, instant(to)?])
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok().filter(|share| *share > 0.0 && *share <= 1.0);
    share.ok_or_else(|| format!("`{text}` is not a share of the card; write 0.9"))
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: BudgetArgs = super::parsed(matches)?;
    let path = show::only(&args.trace)?;
    if is_summary(&path) {
        return of_summary(&args, &path, out);
    }
    let categories = match &args.rules {
        Some(path) => {
            let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
            Categories::parse(&text).map_err(|why| anyhow!("{}: {why}", path.display()))?
        }
        None => Categories::default(),
    };
    let working = Working::on(&path);
    let source = Source::open(&path)?;
    let found = budgets(&source, &categories, args.between.as_ref())
        .map_err(|why| anyhow!("{}: {why}", source.path()))?;
    let trace = source.requests().map_err(ToString::to_string);
    let reply = reply(&found, &trace, args.machine.machine(), &args.utilization);
    drop(working);
    args.show.write_answer(&Report { verb: "budget", parts: vec![reply.part] }, &reply.answer, out)?;
    Ok(ExitCode::SUCCESS)
}

/// What was said of the trace when it was reduced, without wishes.
fn of_summary(args: &BudgetArgs, path: &Path, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let summary = Summary::open(path)?;
    let asks_for_more = args.between.is_some()
        || !args.utilization.is_empty()
        || args.rules.is_some()
        || args.machine.machine() != Machine::default();
    if asks_for_more {
        return Err(summary.lacks("budget with --between, --utilization, --rules or a machine").into());
    }
    let reply = summary.budget()?;
    args.show.write_answer(&Report { verb: "budget", parts: vec![reply.part] }, &reply.answer, out)?;
    Ok(ExitCode::SUCCESS)
}
