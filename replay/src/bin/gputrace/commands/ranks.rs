//! `gputrace ranks`: all processes of a job side by side.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;

use clap::{ArgMatches, Args};
use gputrace_recorder::opened::text_of_proc;
use gputrace_replay::ranks::calls::Participant;
use gputrace_replay::ranks::collect::collect;
use gputrace_replay::ranks::report::{Ranks, Verdict};
use gputrace_replay::reduce::{Summary, again, is_summary};
use gputrace_replay::report::model::Section;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Nanos;
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::parts::live::find::{self, Which};
use super::parts::live::follow::WRITTEN;
use crate::show::complain;
use crate::show::{self, FILES, Gate, Named, ShowArgs};
use crate::working::Working;

pub(super) const VERB: Verb = Verb::new::<RanksArgs>("ranks", run).of_summaries();

/// Compare the ranks of a job: which waits for which in NCCL and why, and which holds most memory
///
/// Ranks and communicators come from NCCL's own records. Several jobs and restarts in one folder are kept apart. While a job
/// hangs, `ranks` reports the missing rank, and for how long. Traces of processes that were killed in a hang work too.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace record -o 'job/%h.r%r.%p.gtr' -- torchrun --nproc-per-node 8 train.py
  gputrace ranks job/             # during or after the run
  gputrace ranks --error-on-inconsistent job/ || echo 'hangs or does not fit'
  gputrace ranks --json job/*.gtr")]
pub(super) struct RanksArgs {
    /// Traces of a job, their summaries from `gputrace reduce`, or folders of them
    #[arg(required = true, value_name = "TRACE|DIR", value_hint = FILES)]
    traces: Vec<Named>,

    /// Exit with status 1 if the calls of the ranks do not match or the job hangs, 2 if unknown: losses, damage, ranks without
    /// a trace, a rank that may still come
    #[arg(long)]
    error_on_inconsistent: bool,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: RanksArgs = super::parsed(matches)?;
    let paths = show::paths(&args.traces)?;
    // What recorders have written until two seconds ago is in their traces.
    let written = being_written(&paths);
    let (mut participants, all_read) = read(&paths);
    go_on_until(&mut participants, &written);
    let ranks = Ranks::of(&participants, &again);
    show::unless_closed(args.show.write_as(&ranks.report(), &ranks, out))?;
    let gate = if args.error_on_inconsistent { gate(&participants, &ranks) } else { Gate::Passes };
    Ok(gate.exit_code(all_read))
}

/// What does not fit together is seen in what there is; that all fits, only in whole traces of all ranks.
fn gate(participants: &[Participant], ranks: &Ranks) -> Gate {
    let is = |verdict: Verdict| ranks.jobs.iter().any(|job| job.verdict == verdict);
    let doubt = participants.iter().find_map(|it| Some((&*it.path, it.doubts_so_far()?)));
    match doubt {
        _ if is(Verdict::Inconsistent) || is(Verdict::Hangs) => Gate::Refuses,
        Some((path, doubts)) => Gate::cannot_know(path, &doubts),
        None if is(Verdict::Waits) => Gate::cannot_know("the job", "ranks wait for one that may still come"),
        None if is(Verdict::Incomplete) => Gate::cannot_know("the job", "not all ranks have a trace"),
        None if !is(Verdict::Consistent) => Gate::cannot_know("the job", "there are no NCCL calls"),
        None => Gate::Passes,
    }
}

/// Participants of a job that runs, as far as their traces can be read.
pub(super) fn running(paths: &[PathBuf]) -> Vec<Participant> {
    let written = being_written(paths);
    let mut participants: Vec<Participant> = paths.iter().filter_map(|path| participant(path).ok()).collect();
    go_on_until(&mut participants, &written);
    participants
}

/// What `ranks` says first of each job that these traces are of and whose ranks call NCCL.
pub(super) fn verdicts(paths: &[PathBuf]) -> Vec<Section> {
    let ranks = Ranks::of(&running(paths), &again);
    let parts = ranks.report().parts;
    let of_jobs = ranks.jobs.iter().zip(parts).filter(|(job, _)| job.verdict != Verdict::NoCalls);
    of_jobs.filter_map(|(_, part)| part.sections.into_iter().next()).collect()
}

/// Has the traces that are being written go on until what is certainly in them.
fn go_on_until(participants: &mut [Participant], written: &HashMap<String, Nanos>) {
    // Other machines count time from another moment.
    let boot = text_of_proc("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    for participant in participants {
        let until = written.get(&participant.path).filter(|_| participant.process.boot == boot.trim());
        if let Some(until) = until {
            participant.is_written_until(*until);
        }
    }
}

/// Traces that recorders are writing, and until when what happened is in them.
fn being_written(paths: &[PathBuf]) -> HashMap<String, Nanos> {
    let now = find::now();
    let places = Which::Traces(paths.to_vec()).find().into_iter().filter(|place| place.is_written);
    let until = Nanos(now.0.saturating_sub(WRITTEN));
    places.map(|place| (place.shown.display().to_string(), until)).collect()
}

/// Reads traces, as many at a time as there are processors; each is reduced to what `ranks` needs before the next is read.
pub(super) fn read(paths: &[PathBuf]) -> (Vec<Participant>, bool) {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let next = Mutex::new(paths.iter().enumerate());
    let done = Mutex::new(vec![]);
    let working = Working::on(Path::new(&format!("{} traces", paths.len())));
    std::thread::scope(|scope| {
        for _ in 0..n_threads.min(paths.len()) {
            scope.spawn(|| {
                while let Some((idx, path)) = take(&next) {
                    let result = participant(path);
                    if let Ok(mut done) = done.lock() {
                        done.push((idx, result));
                    }
                }
            });
        }
    });
    drop(working);
    let mut results = done.into_inner().unwrap_or_default();
    results.sort_by_key(|(idx, _)| *idx);
    let mut all_read = results.len() == paths.len();
    let mut participants = vec![];
    for (_, result) in results {
        match result {
            Ok(participant) => participants.push(participant),
            Err(error) => {
                all_read = false;
                complain!("{error:#}");
            }
        }
    }
    // Names of summaries are made of what they say: the order is that of the traces.
    if paths.iter().any(|path| is_summary(path)) {
        participants.sort_by(|a, b| Path::new(&a.path).cmp(Path::new(&b.path)));
    }
    (participants, all_read)
}

/// What `ranks` needs of a process, from its trace or its summary.
fn participant(path: &Path) -> anyhow::Result<Participant> {
    match is_summary(path) {
        true => Ok(Summary::open(path)?.participant()?),
        false => Ok(collect(&Source::open(path)?)),
    }
}

fn take<'a>(
    next: &Mutex<std::iter::Enumerate<std::slice::Iter<'a, PathBuf>>>,
) -> Option<(usize, &'a PathBuf)> {
    next.lock().ok()?.next()
}
