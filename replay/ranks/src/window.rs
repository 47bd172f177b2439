//! From when on the calls of a job are compared, where recordings keep only their newest part (`gputrace record --keep`, `--max-size`).
//!
//! ```text
//!  rank 0   . . . 3 4 5 6 7 8      calls are numbered from the beginning of their communicator, so what is left still fits;
//!  rank 1   . . . . . 5 6 7 8      5 is the first that both know. What is before it is neither compared nor missing
//! ```

use gputrace_schemas::event::Nanos;
use gputrace_trace::{faults, words};
use serde::Serialize;

use super::align::{Difference, Kind, Track};
use super::calls::{Lane, Participant};
use super::clocks::Clocks;
use super::findings::rank_names;
use super::jobs::{Job, Joined};
use super::tracks::Calls;

/// From when on calls were compared.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Window {
    /// The rank whose trace begins last.
    pub rank: u32,
    /// When it begins, on the clock of its host.
    pub since_ns: u64,
    /// The same as a time of day.
    pub since: String,
    /// The first call that was compared, where that is not the first that was made.
    pub first_calls: Vec<FirstCall>,
}

/// The first call that was compared of an order of calls.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct FirstCall {
    /// The communicator.
    pub communicator: String,
    /// Which order of calls.
    pub order: &'static str,
    /// Its number, from 0.
    pub sequence: u64,
}

impl Window {
    /// Of a job; `None` where every trace has its process from the beginning.
    pub(super) fn of(participants: &[Participant], job: &Job, clocks: &Clocks) -> Option<Window> {
        let begins = |idx: usize| participants[idx].process.since;
        let bounded = job.actors.iter().filter(|actor| begins(actor.participant) > Nanos(0));
        let last = bounded.max_by_key(|actor| clocks.time(actor.participant, begins(actor.participant)))?;
        let (process, since) = (&participants[last.participant].process, begins(last.participant));
        let rank = last.rank;
        Some(Window { rank, since_ns: since.0, since: faults::clock(process, since), first_calls: vec![] })
    }

    /// Calls of this order were compared from there on.
    pub(super) fn lane(&mut self, communicator: &str, lane: Lane, sequence: u64) {
        if sequence > 0 {
            let (communicator, order) = (communicator.to_owned(), lane.name());
            self.first_calls.push(FirstCall { communicator, order, sequence });
        }
    }
}

/// What is to be known of the comparison, and of communicators that a trace may no longer have.
pub(super) fn notes(participants: &[Participant], job: &Job, window: Option<&Window>) -> Vec<String> {
    let Some(window) = window else { return vec![] };
    let first = window.first_calls.iter().find(|first| first.order == Lane::Collective.name());
    let from = first.map_or_else(String::new, |first| {
        format!(", on {} from call {}", first.communicator, words::count(first.sequence))
    });
    let mut notes = vec![format!(
        "calls are compared since {}, when the trace of rank {} begins (--keep, --max-size){from}",
        window.since, window.rank
    )];
    notes.extend(job.communicators.iter().filter_map(|joined| closed_before(participants, job, joined)));
    notes
}

/// Ranks whose traces begin later than a communicator was made, and do not have it.
fn closed_before(participants: &[Participant], job: &Job, joined: &Joined) -> Option<String> {
    let inside: Vec<usize> = joined.all().filter_map(|(_, member)| job.actor(member)).collect();
    let is_outside = |actor: &usize| !inside.contains(actor);
    let is_bounded = |actor: &usize| participants[job.actors[*actor].participant].process.since > Nanos(0);
    let outside: Vec<usize> = (0..job.actors.len()).filter(is_outside).filter(is_bounded).collect();
    // Which rank of the job a missing one is, is known if it can be no other.
    let is_certain = joined.missing().len() == outside.len() && !outside.is_empty();
    is_certain.then(|| {
        let mut ranks: Vec<u32> = outside.iter().map(|actor| job.actors[*actor].rank).collect();
        ranks.sort_unstable();
        format!(
            "{} of {} may have closed it before their traces begin: its calls there are not compared",
            rank_names(&ranks),
            joined.label
        )
    })
}

/// A call more or fewer right where the comparison begins may be older: what came before is not known of all ranks. The same holds after
/// nothing but identical calls.
pub(super) fn may_be_older(tracks: &[Calls<'_>], difference: &Difference) -> Option<String> {
    let spot = difference.majority?;
    let track = &tracks[spot.track];
    let call = track.token(spot.position).call;
    let alike = (track.from..spot.position).all(|position| track.token(position).call == call);
    let shifts = matches!(difference.kind, Kind::Missing | Kind::Extra | Kind::Changed);
    (track.from > 0 && alike && shifts).then(|| {
        format!(
            "Calls before {} are not compared, because not all traces have them: the difference may be older",
            words::count(track.from as u64)
        )
    })
}
