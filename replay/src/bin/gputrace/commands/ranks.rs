//! `gputrace ranks`: all processes of a job side by side.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Mutex;

use clap::{ArgMatches, Args};
use gputrace_replay::ranks::calls::Participant;
use gputrace_replay::ranks::collect::collect;
use gputrace_replay::ranks::report::{Ranks, Verdict};
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::complain;
use crate::show::{self, ShowArgs};

pub(super) const VERB: Verb = Verb::new::<RanksArgs>("ranks", run);

/// Exit status when calls do not fit together and `--error-on-inconsistent` was given.
const INCONSISTENT: u8 = 3;

/// Shows all ranks of a job side by side: who waits for whom in NCCL and why, and who holds more memory than the others
///
/// Ranks and communicators are found by NCCL's own records; several jobs and restarts in one folder are kept apart. Traces of
/// processes that were killed while they hung are as good as others.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace record -o 'job/%h.r%r.%p.gtr' -- torchrun --nproc-per-node 8 train.py
  gputrace ranks job/
  gputrace ranks --json job/*.gtr

Exit status: 3 if calls do not fit together and --error-on-inconsistent was given.")]
pub(super) struct RanksArgs {
    /// Traces of the processes of a job, or folders with them
    #[arg(required = true, value_name = "TRACE|DIR")]
    traces: Vec<PathBuf>,

    /// Exit with status 3 if calls of the ranks do not fit together
    #[arg(long)]
    error_on_inconsistent: bool,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: RanksArgs = super::parsed(matches)?;
    let paths = show::paths(&args.traces)?;
    let (participants, all_read) = read(&paths);
    let ranks = Ranks::of(&participants, &|path| Source::open(Path::new(path)).ok());
    args.show.write_as(&ranks.report(), &ranks, out)?;
    let is_inconsistent = ranks.jobs.iter().any(|job| job.verdict == Verdict::Inconsistent);
    Ok(match (all_read, args.error_on_inconsistent && is_inconsistent) {
        (false, _) => ExitCode::FAILURE,
        (true, true) => ExitCode::from(INCONSISTENT),
        (true, false) => ExitCode::SUCCESS,
    })
}

/// Reads traces, as many at a time as there are processors; each is reduced to what `ranks` needs before the next is read.
fn read(paths: &[PathBuf]) -> (Vec<Participant>, bool) {
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let next = Mutex::new(paths.iter().enumerate());
    let done = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for _ in 0..n_threads.min(paths.len()) {
            scope.spawn(|| {
                while let Some((idx, path)) = take(&next) {
                    let result = Source::open(path).map(|source| collect(&source));
                    if let Ok(mut done) = done.lock() {
                        done.push((idx, result));
                    }
                }
            });
        }
    });
    let mut results = done.into_inner().unwrap_or_default();
    results.sort_by_key(|(idx, _)| *idx);
    let mut all_read = results.len() == paths.len();
    let mut participants = vec![];
    for (_, result) in results {
        match result {
            Ok(participant) => participants.push(participant),
            Err(error) => {
                all_read = false;
                complain!("{:#}", anyhow::Error::from(error));
            }
        }
    }
    (participants, all_read)
}

fn take<'a>(
    next: &Mutex<std::iter::Enumerate<std::slice::Iter<'a, PathBuf>>>,
) -> Option<(usize, &'a PathBuf)> {
    next.lock().ok()?.next()
}
