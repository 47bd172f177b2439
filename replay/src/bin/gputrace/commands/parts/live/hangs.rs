//! Which jobs hang, of the processes that are followed: `gputrace ranks` of their traces, asked again and again beside the picture.
//!
//! Traces are read from their beginning for that, so it is done only when a process with communicators has been silent for
//! a while, on a thread of its own, and for at most a twentieth of the time.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use gputrace_replay::ranks::report::{JobReport, Ranks, Verdict};
use gputrace_replay::ranks::verdict::headline;
use gputrace_schemas::event::Nanos;
use serde::Serialize;

use super::find::Which;
use crate::commands::ranks;

/// A process that has been silent for so long may hang, or wait for one that does.
pub(super) const SILENT: Nanos = Nanos(5_000_000_000);
/// Between two looks, at least; and so many times as long as the last one took.
const LEAST: Duration = Duration::from_secs(2);
const PART: u32 = 20;

/// A job that hangs or waits.
#[derive(Clone, Serialize, Debug, PartialEq)]
pub(crate) struct HangFigures {
    /// It is a hang; else a rank is awaited that may still come.
    pub(crate) hangs: bool,
    /// For how long ranks have waited.
    pub(crate) for_ns: u64,
    /// Who did not come, or called something else: ranks in the job.
    pub(crate) ranks: Vec<u32>,
    /// Who waits for them.
    pub(crate) waiting: Vec<u32>,
    /// What is wrong, in a line.
    pub(crate) what: String,
    /// The trace of the first of `ranks` that has one, else of the first that waits.
    pub(crate) trace: String,
}

/// Asks for it.
#[derive(Default)]
pub(super) struct Hangs {
    last: Vec<HangFigures>,
    asked: Option<Receiver<(Vec<HangFigures>, Duration)>>,
    not_before: Option<Instant>,
}

impl Hangs {
    /// Finds out, and waits for that.
    pub(super) fn find(&mut self, traces: &[PathBuf]) {
        self.last = if traces.is_empty() { vec![] } else { found(traces) };
        self.not_before = Some(Instant::now() + LEAST);
    }

    /// What is known now. `traces` are those that may hang; none where all go on.
    pub(super) fn look(&mut self, traces: Vec<PathBuf>) -> Vec<HangFigures> {
        if let Some(answer) = self.asked.as_ref().and_then(|asked| asked.try_recv().ok()) {
            self.asked = None;
            self.last = answer.0;
            self.not_before = Some(Instant::now() + LEAST.max(answer.1 * PART));
        }
        if traces.is_empty() {
            self.last.clear();
        } else if self.asked.is_none() && self.not_before.is_none_or(|due| Instant::now() >= due) {
            let (answer, asked) = channel();
            let ask = move || {
                let began = Instant::now();
                let found = found(&traces);
                let _ = answer.send((found, began.elapsed()));
            };
            if std::thread::Builder::new().name("gputrace-hangs".to_owned()).spawn(ask).is_ok() {
                self.asked = Some(asked);
            }
        }
        self.last.clone()
    }
}

fn found(traces: &[PathBuf]) -> Vec<HangFigures> {
    let participants = ranks::running(&with_neighbours(traces));
    let ranks = Ranks::of(&participants, &|_| None);
    ranks.jobs.iter().filter_map(of).collect()
}

/// These traces, and others of their folders that are being written: the ranks of a job may be recorded each by a `gputrace record`
/// of its own.
fn with_neighbours(traces: &[PathBuf]) -> Vec<PathBuf> {
    let mut all = traces.to_vec();
    let folders: BTreeSet<&Path> = traces.iter().filter_map(|trace| trace.parent()).collect();
    let real = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    let mut known: BTreeSet<PathBuf> = traces.iter().map(real).collect();
    // Where only a descriptor of the recorder leads to the trace, its neighbours are not known.
    for folder in folders.into_iter().filter(|folder| !folder.starts_with("/proc")) {
        let places = Which::Folder(folder.to_owned()).find().into_iter().map(|place| place.open);
        all.extend(places.filter(|place| known.insert(real(place))));
    }
    all
}

fn of(job: &JobReport) -> Option<HangFigures> {
    let hangs = match job.verdict {
        Verdict::Hangs => true,
        Verdict::Inconsistent => job.running,
        Verdict::Waits => false,
        Verdict::Consistent | Verdict::Incomplete | Verdict::NoCalls => return None,
    };
    let (finding, for_ns) = job.findings.iter().find_map(|finding| Some((finding, finding.for_ns?)))?;
    let trace = |rank: &u32| job.ranks.iter().find(|it| it.rank == *rank).map(|it| it.trace.clone());
    Some(HangFigures {
        hangs,
        for_ns,
        ranks: finding.ranks.clone(),
        waiting: finding.waiting.clone(),
        what: headline(finding),
        trace: finding.ranks.iter().chain(&finding.waiting).find_map(trace)?,
    })
}
