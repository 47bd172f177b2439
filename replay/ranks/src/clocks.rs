//! The clocks of a job's hosts, put on one scale.
//!
//! Processes of one boot share `CLOCK_MONOTONIC`. Another host's clock is set by the wall clock that both recorded, and
//! narrowed by calls that no rank leaves before all have entered:
//!
//! ```text
//!  host a   enter ────────── exit          enter_b <= exit_a   and   enter_a <= exit_b
//!  host b          enter ────── exit       so: enter_a - exit_b <= b's offset to a <= exit_a - enter_b
//! ```

use std::collections::BTreeMap;

use gputrace_schemas::event::Nanos;

use super::calls::Participant;
use super::jobs::Job;

/// How one participant's clock stands to that of the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Clock {
    /// Nanoseconds to add to its times.
    pub offset: i64,
    /// How far that may be off, either way; `None` is not known.
    pub uncertainty: Option<u64>,
}

/// The clock of every participant, by its index.
#[derive(Clone, Debug, Default)]
pub struct Clocks(BTreeMap<usize, Clock>);

impl Clocks {
    /// Of the participants of a job.
    #[must_use]
    pub fn of(participants: &[Participant], job: &Job) -> Clocks {
        let mut clocks = Clocks::default();
        let Some(first) = job.actors.first().map(|actor| actor.participant) else { return clocks };
        let boot = |idx: usize| participants[idx].process.boot.as_str();
        for actor in &job.actors {
            let idx = actor.participant;
            let clock = if boot(idx) == boot(first) {
                Clock { offset: 0, uncertainty: Some(0) }
            } else {
                between(participants, job, first, boot(idx))
            };
            clocks.0.insert(idx, clock);
        }
        clocks
    }

    /// A participant's time on the common scale.
    #[must_use]
    pub fn time(&self, participant: usize, time: Nanos) -> i128 {
        i128::from(time.0) + i128::from(self.get(participant).offset)
    }

    /// The clock of a participant.
    #[must_use]
    pub fn get(&self, participant: usize) -> Clock {
        self.0.get(&participant).copied().unwrap_or_default()
    }

    /// The largest uncertainty; `None` if one is not known.
    #[must_use]
    pub fn uncertainty(&self) -> Option<u64> {
        self.0.values().map(|clock| clock.uncertainty).try_fold(0, |most, next| Some(most.max(next?)))
    }
}

/// The clock of a boot against that of participant `first`.
fn between(participants: &[Participant], job: &Job, first: usize, boot: &str) -> Clock {
    let reference = participants[first].process.boot.as_str();
    let (mut least, mut most) = (i128::MIN, i128::MAX);
    for communicator in &job.communicators {
        let times = communicator.all().filter_map(|(_, member)| {
            let participant = &participants[member.participant];
            let membership = &participant.memberships[member.membership];
            // A communicator that does not block returns before the others are there.
            let blocks = membership.facts.config.blocking != Some(0) && membership.created.2 == Some(0);
            let (enter, exit) = (membership.created.0?, membership.created.1?);
            blocks.then_some((participant.process.boot.as_str(), i128::from(enter.0), i128::from(exit.0)))
        });
        let times: Vec<_> = times.collect();
        for (_, enter_a, exit_a) in times.iter().filter(|(name, ..)| *name == reference) {
            for (_, enter_b, exit_b) in times.iter().filter(|(name, ..)| *name == boot) {
                least = least.max(enter_a - exit_b);
                most = most.min(exit_a - enter_b);
            }
        }
    }
    let other = job
        .actors
        .iter()
        .map(|actor| &participants[actor.participant])
        .find(|other| other.process.boot == boot);
    let wall = other.and_then(|other| {
        let (a, b) = (&participants[first].process, &other.process);
        let known = a.start_realtime > 0 && b.start_realtime > 0;
        let age = |process: &gputrace_schemas::event::Process| {
            i128::from(process.start_realtime) - i128::from(process.start.0)
        };
        known.then(|| age(b) - age(a))
    });
    if least <= most && least > i128::MIN && most < i128::MAX {
        let middle = (least + most) / 2;
        let offset = wall.filter(|wall| (least..=most).contains(wall)).unwrap_or(middle);
        let uncertainty = (most - offset).max(offset - least);
        return Clock { offset: offset as i64, uncertainty: u64::try_from(uncertainty).ok() };
    }
    Clock { offset: wall.unwrap_or(0) as i64, uncertainty: None }
}
