//! Ranks that wait for each other.

use std::collections::{BTreeMap, BTreeSet};

use super::sinks::management;
use super::{At, Edge, Waits, Who};
use crate::calls::Lane;
use crate::findings::{CallText, Finding, Kind, Severity, rank_names, ranks_wait};

impl Waits<'_> {
    /// Ranks that wait for each other.
    pub(super) fn circle(&self, circle: &BTreeSet<usize>, inner: &[&Edge]) -> Finding {
        let is_peer = |edge: &&&Edge| matches!(edge.at, At::Call(Lane::Send(_) | Lane::Receive(_), _));
        let peers: Vec<&Edge> = inner.iter().filter(is_peer).copied().collect();
        if !peers.is_empty() && peers.len() < inner.len() {
            return self.half_circle(&peers, inner);
        }
        // By what they wait in: the fewest are those that are out of step.
        let mut groups: BTreeMap<(usize, At), BTreeSet<usize>> = BTreeMap::new();
        inner.iter().for_each(|edge| {
            groups.entry((edge.communicator, edge.at)).or_default().insert(edge.from);
        });
        let fewest = groups.values().map(BTreeSet::len).min().unwrap_or(0);
        let most = groups.values().map(BTreeSet::len).max().unwrap_or(0);
        let collective = peers.is_empty() && groups.len() == 2;
        let is_management = |at: &(usize, At)| matches!(at.1, At::Call(Lane::Management, _));
        let making = groups.keys().find(|at| collective && is_management(at)).copied();
        let minority: Vec<_> = groups.iter().filter(|(_, who)| who.len() == fewest).collect();
        let (at, culprits) = match minority.as_slice() {
            // Those who make a communicator wait for those who do something else.
            _ if making.is_some() => {
                let others = groups.iter().filter(|(at, _)| !is_management(at)).flat_map(|(_, who)| who);
                (making.unwrap_or((0, At::Making)), others.copied().collect())
            }
            [(at, who)] if collective && fewest < most => (**at, (*who).clone()),
            _ => (groups.keys().next().copied().unwrap_or((0, At::Making)), circle.clone()),
        };
        let edge_at = |at: (usize, At)| inner.iter().find(|edge| (edge.communicator, edge.at) == at).copied();
        let own_edge = edge_at(at);
        let other_at = groups.keys().copied().find(|other| *other != at).unwrap_or(at);
        let other_edge = edge_at(other_at);
        let mut own = own_edge.and_then(|edge| self.own_text(edge));
        let mut others = other_edge.and_then(|edge| self.own_text(edge));
        if making.is_some() {
            std::mem::swap(&mut own, &mut others);
        }
        let same_call = own.as_ref().zip(others.as_ref()).is_some_and(|(own, others)| {
            own.call == others.call && own.place == others.place && own.place.is_some()
        });
        let kind = match (collective, same_call) {
            _ if making.is_some() => own_edge.map_or(Kind::DeadlockCycle, |edge| management(edge, self)),
            (true, true) if fewest < most => Kind::WrongCommunicator,
            (true, _) => Kind::SwappedCommunicators,
            (false, _) => Kind::DeadlockCycle,
        };
        let ranks = self.ranks(culprits.iter().copied());
        let steps: Vec<String> = groups.iter().filter_map(|(at, who)| self.step(*at, who, inner)).collect();
        let mut finding = Finding::new(kind, Severity::Error, ranks);
        finding.undecided = fewest == most;
        finding.communicator = Some(self.job.communicators[at.0].label.clone());
        if let At::Call(lane, n) = at.1 {
            (finding.lane, finding.sequence) = (Some(lane.name()), Some(n));
        }
        finding.stack = culprits.first().map(|actor| self.own_stack(*actor)).unwrap_or_default();
        (finding.own, finding.others) = (own, others);
        finding.waiting = self.ranks(circle.iter().copied());
        let beginning = match kind {
            Kind::WrongCommunicator => {
                format!("{} made the call of the others on another communicator", rank_names(&finding.ranks))
            }
            Kind::MissingInShrink | Kind::MissingInSplit => {
                format!("{} never came", rank_names(&finding.ranks))
            }
            _ => format!("{} for each other", ranks_wait(&finding.waiting)),
        };
        finding.text = format!("{beginning}: {}", steps.join("; "));
        finding
    }

    /// Point-to-point calls that wait for a rank which waits in a collective for them.
    fn half_circle(&self, peers: &[&Edge], inner: &[&Edge]) -> Finding {
        let edge = peers.iter().min_by_key(|edge| edge.since).copied().unwrap_or(inner[0]);
        let label = &self.job.communicators[edge.communicator].label;
        let own = self.own_text(edge);
        let (kind, what) = match edge.at {
            At::Call(Lane::Send(_), _) => (Kind::UnmatchedSend, "receive"),
            _ => (Kind::UnmatchedRecv, "send"),
        };
        let back = inner.iter().find(|other| Who::Actor(other.from) == edge.to);
        let others = back.and_then(|back| self.own_text(back));
        let target = match edge.to {
            Who::Actor(actor) => rank_names(&self.ranks([actor])),
            Who::Rank(rank) | Who::Member(_, rank) => rank_names(&[rank]),
        };
        let text = |call: &Option<CallText>| call.as_ref().map_or_else(String::new, CallText::text);
        let mut finding = Finding::new(kind, Severity::Error, self.ranks([edge.from]));
        finding.communicator = Some(label.clone());
        if let At::Call(lane, n) = edge.at {
            (finding.lane, finding.sequence) = (Some(lane.name()), Some(n));
        }
        finding.text = format!(
            "{} called {} on {label} and {target} never called the {what}: it waits in {} for the others",
            rank_names(&finding.ranks),
            text(&own),
            text(&others)
        );
        (finding.own, finding.others) = (own, others);
        finding.waiting = self.ranks(inner.iter().map(|edge| edge.from));
        finding.stack = self.own_stack(edge.from);
        finding
    }

    /// Who waits at one place of a circle, and for whom.
    fn step(&self, at: (usize, At), who: &BTreeSet<usize>, inner: &[&Edge]) -> Option<String> {
        let label = &self.job.communicators[at.0].label;
        let edges = || inner.iter().filter(|edge| (edge.communicator, edge.at) == at);
        let call = self.own_text(edges().next()?)?.text();
        let targets: BTreeSet<u32> = edges().filter_map(|edge| self.awaited(edge)).collect();
        let names = rank_names(&self.ranks(who.iter().copied()));
        let targets: Vec<u32> = targets.into_iter().collect();
        let number = match at.1 {
            At::Call(_, n) => format!(", call {n}"),
            At::Making => String::new(),
        };
        Some(format!("{names} in {call} on {label}{number}, for {}", rank_names(&targets)))
    }
}

pub(super) fn is_inside(edge: &Edge, circle: &BTreeSet<usize>) -> bool {
    circle.contains(&edge.from) && matches!(edge.to, Who::Actor(to) if circle.contains(&to))
}

/// Groups of actors each of which waits, perhaps through others, for every other of its group.
pub(super) fn circles(n_actors: usize, edges: &[Edge]) -> Vec<BTreeSet<usize>> {
    let mut next: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); n_actors];
    let mut before: Vec<BTreeSet<usize>> = vec![BTreeSet::new(); n_actors];
    for edge in edges {
        if let Who::Actor(to) = edge.to {
            next[edge.from].insert(to);
            before[to].insert(edge.from);
        }
    }
    // Kosaraju: in the order in which a search leaves them, backwards, what reaches each is one group.
    let mut left = vec![];
    let mut seen = vec![false; n_actors];
    for start in 0..n_actors {
        let mut path = vec![(start, false)];
        while let Some((actor, is_done)) = path.pop() {
            if is_done {
                left.push(actor);
            } else if !std::mem::replace(&mut seen[actor], true) {
                path.push((actor, true));
                path.extend(next[actor].iter().filter(|other| !seen[**other]).map(|other| (*other, false)));
            }
        }
    }
    let mut groups = vec![];
    let mut taken = vec![false; n_actors];
    for start in left.into_iter().rev() {
        let (mut group, mut path) = (BTreeSet::new(), vec![start]);
        while let Some(actor) = path.pop() {
            if !std::mem::replace(&mut taken[actor], true) {
                group.insert(actor);
                path.extend(before[actor].iter().copied());
            }
        }
        if group.len() > 1 {
            groups.push(group);
        }
    }
    groups
}
