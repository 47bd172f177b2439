//! The traces of jobs: which trace of one run is of the same rank as which of another.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::bail;
use gputrace_replay::answers::predict::Values;
use gputrace_replay::ranks::calls::Participant;
use gputrace_replay::ranks::jobs::{RankSource, jobs};

use super::super::ranks;
use crate::show::{complain, paths, shown};

/// Runs of a job.
pub(super) struct Job {
    /// For each rank of which every run has a trace: the traces.
    pub(super) ranks: BTreeMap<u32, Vec<(Values, PathBuf)>>,
    /// Which ranks lack a trace of which run.
    pub(super) missing: Vec<(String, Vec<u32>)>,
}

impl Job {
    /// Reads who is which rank; each run is a folder.
    pub(super) fn of(runs: &[(Values, PathBuf)]) -> anyhow::Result<Job> {
        let traces = runs.iter().map(|(_, folder)| by_rank(folder)).collect::<anyhow::Result<Vec<_>>>()?;
        let all: BTreeSet<u32> = traces.iter().flat_map(|it| it.ranks()).collect();
        let missing = runs.iter().zip(&traces).filter_map(|((_, folder), traces)| {
            let missing: Vec<u32> =
                all.iter().copied().filter(|rank| !traces.by_rank.contains_key(rank)).collect();
            (!missing.is_empty()).then(|| (folder.display().to_string(), missing))
        });
        let missing = missing.collect();
        let of_all = |rank: u32| -> Option<(u32, Vec<(Values, PathBuf)>)> {
            let one = |((values, _), traces): (&(Values, PathBuf), &Traces)| {
                Some((values.clone(), traces.by_rank.get(&rank)?.clone()))
            };
            Some((rank, runs.iter().zip(&traces).map(one).collect::<Option<_>>()?))
        };
        Ok(Job { ranks: all.iter().copied().filter_map(of_all).collect(), missing })
    }
}

/// The traces of one run of a job.
struct Traces {
    by_rank: BTreeMap<u32, PathBuf>,
    /// Ranks that there should be.
    missing: Vec<u32>,
}

impl Traces {
    fn ranks(&self) -> impl Iterator<Item = u32> + '_ {
        self.by_rank.keys().chain(&self.missing).copied()
    }
}

fn by_rank(folder: &Path) -> anyhow::Result<Traces> {
    let (participants, _) = ranks::read(&paths(&[folder.to_path_buf()])?);
    let (jobs, alone) = jobs(&participants);
    let job = match &jobs[..] {
        [job] => job,
        [] if participants.len() == 1 => {
            let by_rank = BTreeMap::from([(0, PathBuf::from(&participants[0].path))]);
            return Ok(Traces { by_rank, missing: vec![] });
        }
        [] => bail!(
            "{}: the ranks of its {} processes are not known; name one trace per run",
            shown(folder),
            participants.len()
        ),
        several => bail!(
            "{} holds {} jobs or restarts; give each its own folder ({} {})",
            shown(folder),
            several.len(),
            "gputrace ranks",
            shown(folder)
        ),
    };
    let is_guessed = job.actors.iter().any(|actor| actor.source == RankSource::Guessed);
    if is_guessed {
        complain!("{}: ranks are counted in the order of hosts and process ids", folder.display());
    }
    let others = names(&participants, &alone);
    if !others.is_empty() {
        complain!("{}: without a rank, and left out: {others}", folder.display());
    }
    let mut by_rank: BTreeMap<u32, PathBuf> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for actor in &job.actors {
        // A process with several ranks is predicted as a whole, as the first of them.
        if seen.insert(actor.participant) {
            by_rank.entry(actor.rank).or_insert_with(|| participants[actor.participant].path.clone().into());
        }
    }
    Ok(Traces { by_rank, missing: job.missing() })
}

fn names(participants: &[Participant], which: &[usize]) -> String {
    which.iter().map(|index| &*participants[*index].path).collect::<Vec<_>>().join(", ")
}
