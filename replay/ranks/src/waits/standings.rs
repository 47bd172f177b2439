//! Where each rank was at the end.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{Edge, Waits};
use crate::calls::{Ending, Lane, LastSeen};
use crate::findings::{CallText, Place};
use crate::jobs::Joined;

/// The position of a rank at the end.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Standing {
    /// Rank in the job.
    pub rank: u32,
    /// How its process ended.
    pub ending: Ending,
    /// In words: in a call, after a call, ended.
    pub state: String,
    /// The last call into NCCL.
    pub last_call: Option<CallText>,
    /// Collectives that it called on the largest communicator that it is in.
    pub collectives: u64,
    /// From then to the end.
    pub idle_ns: Option<u64>,
    /// The newest event of any kind.
    pub last_event: Option<CallText>,
    /// Ranks that it waits for.
    pub waits_for: Vec<u32>,
    /// Where its main thread stands still, as its recorder read from outside after a silence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stands_in: Option<String>,
    /// The stack of what it is in, else of the last call, innermost first.
    pub stack: Vec<String>,
}

impl Waits<'_> {
    pub(super) fn standing(&self, actor: usize, edges: &[Edge]) -> Standing {
        let participant = self.participant(actor);
        let rank = self.rank(actor);
        let text = |last: &LastSeen| CallText {
            rank,
            call: last.what.clone(),
            place: Place::of(participant, last.place),
            time_ns: last.time.0,
        };
        let mine = |membership: Option<usize>| {
            let device = membership.map(|idx| participant.memberships[idx].facts.device);
            let several = self
                .job
                .actors
                .iter()
                .filter(|other| other.participant == self.job.actors[actor].participant);
            several.count() == 1 || device.is_none() || device == self.job.actors[actor].device
        };
        let open = participant.open_calls.iter().rev().find(|open| mine(open.membership));
        let mut waits_for: BTreeSet<u32> = BTreeSet::new();
        for edge in edges.iter().filter(|edge| edge.from == actor) {
            waits_for.extend(self.awaited(edge));
        }
        let state = match (open, participant.ending) {
            (Some(open), _) => format!("in {}", open.op),
            (None, Ending::Exit) => "ended".into(),
            // Its calls have returned, and their work is not done: it waits on the GPU, or will where it next needs a result.
            (None, _) if !waits_for.is_empty() => "waits, calls given".into(),
            // The job was killed because it hung: that is not about one rank.
            (None, Ending::Killed | Ending::Unknown) => "outside NCCL".into(),
        };
        // The largest comes first.
        let mut members = self.job.communicators.iter().flat_map(Joined::all);
        let member = members.find(|(_, member)| self.job.actor(*member) == Some(actor));
        let collectives = member.map_or(0, |(_, member)| {
            let membership = &participant.memberships[member.membership];
            membership.lane(Lane::Collective).map_or(0, |sequence| sequence.len() as u64)
        });
        let last = participant.last_call.as_ref();
        let stack = open.map(|open| open.stack.clone()).or_else(|| last.map(|last| last.stack.clone()));
        Standing {
            rank,
            ending: participant.ending,
            state,
            last_call: last.map(text),
            collectives,
            idle_ns: last.map(|last| participant.end.0.saturating_sub(last.time.0)),
            last_event: participant.last_event.as_ref().map(text),
            waits_for: waits_for.into_iter().collect(),
            stands_in: participant.stands_in(),
            stack: stack.unwrap_or_default(),
        }
    }
}
