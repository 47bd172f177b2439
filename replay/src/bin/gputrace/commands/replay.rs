//! `gputrace replay`: what another allocator would have made of the same requests.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{anyhow, bail};
use clap::{ArgMatches, Args};
use gputrace_replay::answers::replay::{Answer, Outcome, replay};
use gputrace_replay::answers::whatif::{Figures, Machine};
use gputrace_replay::answers::{Answers, Reply};
use gputrace_replay::import::{self, Trace};
use gputrace_replay::report::model::Report;
use gputrace_replay::story::Story;
use gputrace_replay::trace::torch_release;
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::Screen;
use gputrace_sim::bytes;
use gputrace_sim::policies::{POLICIES, by_name};
use gputrace_sim::whatif::Confidence;

use super::Verb;
use crate::show::{self, FILES, Gate, Named, ShowArgs, TRACES, complain};

pub(super) const VERB: Verb = Verb::new::<ReplayArgs>("replay", run).of_replays();

/// Replay a trace in simulated allocators
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace replay train.gtr
  gputrace replay --policy torch --policy torch:expandable_segments:True train.gtr
  gputrace replay --limit 40GiB train.gtr
  gputrace replay --limit 24GiB --error-on-oom train.gtr
  gputrace replay --limit 24GiB --other 1.5GiB snapshot.pickle.gz

How sure (docs/VERDICTS.md): exact, to the byte; interval, depends on unrecorded addresses; bound, the best case; guess, the \
replay of the recorded setting differs from the run.")]
pub(super) struct ReplayArgs {
    #[arg(required_unless_present = "policy", value_name = "TRACE|DIR", value_hint = FILES, help = TRACES)]
    traces: Vec<Named>,

    /// Allocator to simulate (repeatable); `help` lists all, and OPTIONS of `torch` are those of PYTORCH_CUDA_ALLOC_CONF
    /// [default: torch as recorded]
    #[arg(long, value_name = "NAME[:OPTIONS]")]
    policy: Vec<String>,

    #[command(flatten)]
    machine: MachineArgs,

    /// Exit with status 1 if memory runs out under any allocator, such as within --limit
    #[arg(long)]
    error_on_oom: bool,

    #[command(flatten)]
    show: ShowArgs,
}

/// What the trace may not say about the machine.
#[derive(Args)]
pub(super) struct MachineArgs {
    /// PyTorch release to imitate [default: the best match]
    #[arg(long, value_name = "X.Y", value_parser = version)]
    torch_version: Option<(u8, u8)>,

    /// Memory of the device [default: as recorded, or unlimited]
    #[arg(long, value_name = "BYTES", value_parser = capacity)]
    device_memory: Option<u64>,

    /// Memory limit of the process, such as 40GB, including --other
    #[arg(long, value_name = "BYTES", value_parser = capacity)]
    limit: Option<u64>,

    /// Part of the limit for contexts, code and libraries [default: as recorded over time; unknown for snapshots]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    other: Option<u64>,
}

impl MachineArgs {
    pub(super) fn machine(&self) -> Machine {
        Machine {
            torch_version: self.torch_version,
            device_memory: self.device_memory.map(Bytes),
            limit: self.limit.map(Bytes),
            other: self.other.map(Bytes),
        }
    }
}

/// An amount that a program could run in: who writes `10` means no ten bytes.
fn capacity(text: &str) -> Result<u64, String> {
    const LEAST: u64 = 1 << 20;
    match bytes::parse(text)? {
        amount if amount < LEAST => Err(format!("`{text}` is {amount} bytes; write a unit, such as 10GB")),
        amount => Ok(amount),
    }
}

pub(super) fn version(text: &str) -> Result<(u8, u8), String> {
    torch_release(text).ok_or_else(|| format!("`{text}` is not a release; write X.Y, such as 2.11"))
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ReplayArgs = super::parsed(matches)?;
    if args.policy.iter().any(|policy| policy == "help") {
        return list_policies(out);
    }
    if args.traces.is_empty() {
        bail!("name a trace to replay; `--policy help` alone needs none");
    }
    for policy in &args.policy {
        by_name(policy.split(':').next().unwrap_or_default())
            .map_err(|error| anyhow!("--policy: {}", error.0))?;
    }
    let machine = args.machine.machine();
    let replay = |path: &str, trace: &Trace| replay(path, trace, machine, &args.policy);
    let paths = show::paths(&args.traces)?;
    let (report, answers, all_read) = replies("replay", &paths, replay);
    let gate = match args.error_on_oom {
        true => answers.iter().map(fits).chain(paths.iter().map(|path| is_whole(path))).max(),
        false => None,
    };
    let gate = gate.unwrap_or(Gate::Passes);
    if !report.parts.is_empty() {
        let answers = Answers::of(answers, paths.len(), "gputrace.replay/1");
        show::unless_closed(args.show.write_answer(&report, &answers, out))?;
    }
    Ok(gate.exit_code(all_read))
}

/// Whether a trace has all that was asked for: what is lost may be what does not fit.
fn is_whole(path: &Path) -> Gate {
    let doubts = Story::read(path).ok().and_then(|story| story.caveats());
    doubts.map_or(Gate::Passes, |doubts| Gate::cannot_know(&path.display().to_string(), &doubts))
}

/// Whether memory suffices for a trace, of its answer: a guess is no answer, nor is what hangs on addresses, nor a run that would
/// have gone another way.
fn fits(Answer { trace, outcomes, .. }: &Answer) -> Gate {
    let one = |Outcome { simulated, warnings, .. }: &Outcome| {
        let Figures { fits, n_guesses, n_guesses_out_of_memory: n_out, .. } = simulated.figures;
        match (fits, simulated.confidence) {
            (_, Confidence::Guess) => Gate::cannot_know(trace, "the replay is a guess"),
            (false, _) if simulated.figures.workspaces_missing.is_some() => {
                Gate::cannot_know(trace, "it fits without the workspaces of some convolutions")
            }
            (false, Confidence::Bound) => Gate::Refuses,
            (false, _) if n_out == n_guesses => Gate::Refuses,
            (true, Confidence::Bound) => Gate::cannot_know(trace, "it fits only in the best case"),
            (true, _) if n_out == 0 && !warnings.is_empty() => {
                Gate::cannot_know(trace, "the program would behave differently if its requests did not fail")
            }
            (true, _) if n_out == 0 => Gate::Passes,
            (_, Confidence::Exact | Confidence::Interval) => {
                Gate::cannot_know(trace, "whether it fits depends on addresses that are not in the trace")
            }
        }
    };
    outcomes.iter().map(one).max().unwrap_or_else(|| Gate::cannot_know(trace, "nothing was replayed"))
}

/// What `reply` says about the requests of each trace. Notes about them go to stderr.
pub(super) fn replies<T>(
    verb: &'static str,
    paths: &[PathBuf],
    reply: impl Fn(&str, &Trace) -> Result<Reply<T>, String>,
) -> (Report, Vec<T>, bool) {
    let mut answers = vec![];
    let (report, all_read) = show::parts(verb, paths, |path| {
        let (shown, trace) = (path.display().to_string(), import::load(path)?);
        trace.notes.iter().for_each(|note| complain!("{shown}: {note}"));
        if trace.devices.is_empty() {
            bail!("{shown}: it holds no device memory");
        }
        let reply = reply(&shown, &trace).map_err(|why| anyhow!("{shown}: {why}"))?;
        answers.push(reply.answer);
        Ok(reply.part)
    });
    (report, answers, all_read)
}

fn list_policies(out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    for entry in POLICIES {
        writeln!(out, "{:<12} {}", entry.name, entry.summary)?;
        writeln!(out, "{:<12}   options: {}", "", entry.options)?;
    }
    Ok(ExitCode::SUCCESS)
}
