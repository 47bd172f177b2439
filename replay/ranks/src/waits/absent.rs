//! Who never came to the making of a communicator.

use std::collections::BTreeSet;

use super::patience::Grade;
use super::{At, Edge, Waits, Who};
use crate::findings::rank_names;
use crate::jobs::{Joined, Member};

impl Waits<'_> {
    /// Who of the ranks outside of a communicator would have been this rank of it: communicators number their ranks as the job
    /// does, a rank that waits in NCCL itself is busy with another one, and one that has fewer communicators than the others is behind.
    fn only_candidate(&self, joined: &Joined, outside: &[usize], rank: u32) -> Option<usize> {
        let candidates = self.candidates(joined, outside, rank);
        let is_idle = |actor: &&usize| self.participant(**actor).open_calls.is_empty();
        let n_made = |actor: usize| self.participant(actor).memberships.len();
        let idle: Vec<usize> = candidates.iter().filter(is_idle).copied().collect();
        let fewest = idle.iter().map(|actor| n_made(*actor)).min();
        let behind: Vec<usize> =
            idle.iter().filter(|actor| Some(n_made(**actor)) == fewest).copied().collect();
        match (&candidates[..], &behind[..]) {
            ([only], _) => Some(*only),
            // A rank without a trace may be the one.
            (_, [only]) if self.job.missing().is_empty() => Some(*only),
            _ => None,
        }
    }

    /// Ranks between those that stand before and after this one in the communicator.
    fn candidates(&self, joined: &Joined, outside: &[usize], rank: u32) -> Vec<usize> {
        let in_job = |(_, member): (&u32, &Member)| self.job.actor(*member).map(|actor| self.rank(actor));
        let before = joined.members.range(..rank).next_back().and_then(in_job);
        let after = joined.members.range(rank..).next().and_then(in_job);
        let is_between = |actor: &&usize| {
            let rank = self.rank(**actor);
            before.is_none_or(|before| rank > before) && after.is_none_or(|after| rank < after)
        };
        outside.iter().filter(is_between).copied().collect()
    }

    /// Why a rank of a communicator does not come, where it is not known which rank of the job it is.
    pub(super) fn reason_of_member(&self, communicator: usize, rank: u32) -> String {
        let joined = &self.job.communicators[communicator];
        let members: BTreeSet<usize> =
            joined.all().filter_map(|(_, member)| self.job.actor(member)).collect();
        let outside: Vec<usize> =
            (0..self.job.actors.len()).filter(|actor| !members.contains(actor)).collect();
        match self.candidates(joined, &outside, rank) {
            candidates if self.job.missing().is_empty() && !candidates.is_empty() => {
                format!("is one of {}, which did not call it", rank_names(&self.ranks(candidates)))
            }
            _ => "has no trace".to_owned(),
        }
    }

    /// Ranks that are inside the making of a communicator wait for those who never began.
    pub(crate) fn making(&mut self, idx: usize) {
        let joined = &self.job.communicators[idx];
        let inside = joined.all().filter(|(_, member)| {
            let created = self.participants[member.participant].memberships[member.membership].created;
            created.0.is_some() && created.1.is_none()
        });
        let inside: Vec<Member> = inside.map(|(_, member)| member).collect();
        let missing = joined.missing();
        if inside.is_empty() || missing.is_empty() {
            return;
        }
        let members: BTreeSet<usize> =
            joined.all().filter_map(|(_, member)| self.job.actor(member)).collect();
        let outside: Vec<usize> =
            (0..self.job.actors.len()).filter(|actor| !members.contains(actor)).collect();
        let who = |(n, rank): (usize, &u32)| {
            let named = outside.iter().find(|actor| self.job.actors[**actor].rank == *rank);
            if Some(idx) == self.job.world {
                return named.map_or(Who::Rank(*rank), |actor| Who::Actor(*actor));
            }
            // Which rank of the job it would have been is known only if one is left.
            match outside.len() == missing.len() {
                true => Who::Actor(outside[n]),
                false => {
                    self.only_candidate(joined, &outside, *rank).map_or(Who::Member(idx, *rank), Who::Actor)
                }
            }
        };
        let targets: Vec<Who> = missing.iter().enumerate().map(who).collect();
        for member in inside {
            let created = self.participants[member.participant].memberships[member.membership].created.0;
            let since = created.map(|time| self.time(member, time));
            let Some(from) = self.job.actor(member) else { continue };
            for to in targets.iter().copied() {
                let (at, usual, call, ahead, grade) = (At::Making, 0, None, 0, Grade::Hang);
                self.edges.push(Edge { from, to, communicator: idx, at, since, usual, call, ahead, grade });
            }
        }
    }
}
