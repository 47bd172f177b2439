//! Who waits for whom at the end of a job, and for whom all wait.
//!
//! A rank that has called something which another has not waits for that other, sooner or later: calls return before they
//! are done. A rank that waits for no other while others wait for it is where to look (`sinks.rs`). Ranks that wait for each other in
//! a circle never go on (`circles.rs`).

mod absent;
mod circles;
mod errors;
mod patience;
mod sinks;
mod standings;

use std::collections::BTreeSet;

use gputrace_schemas::event::{Nanos, NcclOp};

use self::circles::{circles, is_inside};
use self::patience::Grade;
use self::sinks::with_those_ahead;
pub use self::standings::Standing;
use super::align::{Alignment, Spot};
use super::calls::{CallKind, Ending, Lane, Participant};
use super::clocks::Clocks;
use super::findings::{CallText, Finding, Place, Severity};
use super::jobs::{Job, Member};
use super::tracks::Calls;

/// A rank, with or without a trace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Who {
    /// Index of an actor.
    Actor(usize),
    /// A rank of the job without a trace.
    Rank(u32),
    /// A rank of this communicator; which of the job is not known.
    Member(usize, u32),
}

/// What a rank waits in.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum At {
    /// The making of a communicator from a unique id.
    Making,
    /// A call of a lane, and its number.
    Call(Lane, u64),
}

/// One rank waits for another.
#[derive(Clone, Debug)]
struct Edge {
    from: usize,
    to: Who,
    communicator: usize,
    at: At,
    /// Since when, on the common scale; `None`: longer than is remembered.
    since: Option<i128>,
    /// Waiting that is not longer than this does not count.
    usual: i128,
    /// What it waits in, as one of the ranks called it.
    call: Option<(Member, Lane, usize)>,
    /// Calls that it has made there and the other has not.
    ahead: u64,
    /// Whether the wait may be a healthy one.
    grade: Grade,
}

/// Least time that is called waiting: what a healthy job that was stopped has in flight is shorter, also where ranks share
/// processors (223 ms were seen with sixteen ranks on two).
const LEAST_WAIT: i128 = 500_000_000;
/// How many times the usual time between calls a wait must last.
const UNUSUAL: i128 = 3;
/// Calls from which the usual time is taken.
const RECENT: usize = 1000;

/// A process that was killed so long before those who wait for it did not just go down with its job: launchers, busy machines
/// and the recorder's own look (0.1 s) spread the ends of a job.
const EARLY: i128 = 1_000_000_000;

/// Gathers who waits for whom.
pub(super) struct Waits<'a> {
    participants: &'a [Participant],
    job: &'a Job,
    clocks: &'a Clocks,
    edges: Vec<Edge>,
}

impl<'a> Waits<'a> {
    pub(super) fn new(participants: &'a [Participant], job: &'a Job, clocks: &'a Clocks) -> Waits<'a> {
        Waits { participants, job, clocks, edges: vec![] }
    }

    fn participant(&self, actor: usize) -> &'a Participant {
        &self.participants[self.job.actors[actor].participant]
    }

    fn time(&self, member: Member, time: Nanos) -> i128 {
        self.clocks.time(member.participant, time)
    }

    fn end(&self, actor: usize) -> i128 {
        let participant = self.job.actors[actor].participant;
        self.clocks.time(participant, self.participants[participant].end)
    }

    /// When a rank was certainly still alive.
    fn alive_at(&self, actor: usize) -> i128 {
        let participant = self.job.actors[actor].participant;
        self.clocks.time(participant, self.participants[participant].alive_at)
    }

    /// Ranks that are ahead wait for those that are behind.
    pub(super) fn lane(&mut self, idx: usize, lane: Lane, tracks: &[Calls<'_>], alignment: &Alignment) {
        let reached = &alignment.reached;
        let mut behind: Vec<usize> =
            (0..tracks.len()).filter(|track| reached[*track] < alignment.n_columns).collect();
        if lane == Lane::Management {
            let open = |track: &Calls<'_>| {
                self.participants[track.member.participant].open_calls.iter().any(|open| {
                    open.membership == Some(track.member.membership)
                        && open.spot.is_some_and(|(lane, _)| lane == Lane::Management)
                })
            };
            // Not every rank must end a communicator, or need wait for the others to do so.
            if !tracks.iter().any(open) {
                return;
            }
            self.leave_out(&mut behind, tracks, alignment);
        }
        for track in behind {
            let column = reached[track];
            let spot = alignment.spot(column).or_else(|| before(alignment, tracks, column));
            let Some(target) = self.job.actor(tracks[track].member) else { continue };
            for other in (0..tracks.len()).filter(|other| reached[*other] > column) {
                let ahead = reached[other] - column;
                self.edge(idx, lane, tracks, (other, target), (column, ahead), spot);
            }
        }
    }

    /// A shrink leaves out as many ranks as it says; the trace does not say which, but those that ended first are the likely ones.
    fn leave_out(&self, behind: &mut Vec<usize>, tracks: &[Calls<'_>], alignment: &Alignment) {
        let Some(spot) = alignment.tail.last() else { return };
        let track = &tracks[spot.track];
        let Some((kind, _)) = track.membership.call(Lane::Management, spot.position) else { return };
        if kind.signature.op == NcclOp::CommShrink {
            let end = |track: &usize| self.job.actor(tracks[*track].member).map(|actor| self.end(actor));
            behind.sort_by_key(end);
            let n_out = usize::try_from(kind.signature.count).unwrap_or(usize::MAX).min(behind.len());
            behind.drain(..n_out);
        }
    }

    fn edge(
        &mut self,
        idx: usize,
        lane: Lane,
        tracks: &[Calls<'_>],
        (from, target): (usize, usize),
        (column, ahead): (u64, u64),
        spot: Option<Spot>,
    ) {
        let Some(from_actor) = self.job.actor(tracks[from].member) else { return };
        if from_actor == target {
            return;
        }
        let member = spot.map(|spot| tracks[spot.track].member);
        let call = spot.zip(member).map(|(spot, member)| (member, lane, spot.position));
        let since = call.and_then(|(member, lane, position)| {
            let (_, time) = self.called(member, lane, position)?;
            Some(self.time(member, time))
        });
        let since = since.or_else(|| self.begins(tracks[from].member));
        self.edges.push(Edge {
            from: from_actor,
            to: Who::Actor(target),
            communicator: idx,
            at: At::Call(lane, spot.map_or(column, |spot| spot.position as u64)),
            since,
            usual: usual(tracks[from].membership.lane(lane).map_or(&[][..], |sequence| &sequence.enters)),
            call,
            ahead,
            grade: Grade::Hang,
        });
    }

    fn called(&self, member: Member, lane: Lane, position: usize) -> Option<(CallKind, Nanos)> {
        self.participants[member.participant].memberships[member.membership].call(lane, position)
    }

    /// When a trace begins that was not kept from the beginning: what it does not have was done by then.
    fn begins(&self, member: Member) -> Option<i128> {
        let since = self.participants[member.participant].process.since;
        (since.0 > 0).then(|| self.time(member, since))
    }

    /// Nothing came after a column in which some called something else: the others wait for these.
    pub(super) fn mismatch(
        &mut self,
        idx: usize,
        lane: Lane,
        tracks: &[Calls<'_>],
        column: u64,
        who: &[usize],
        spot: Option<Spot>,
    ) {
        for track in who {
            let Some(target) = self.job.actor(tracks[*track].member) else { continue };
            for other in (0..tracks.len()).filter(|other| !who.contains(other)) {
                self.edge(idx, lane, tracks, (other, target), (column, 0), spot);
            }
        }
    }

    /// A send or receive without counterpart.
    pub(super) fn peer(&mut self, idx: usize, waiter: Member, lane: Lane, position: usize, target: Member) {
        let (Some(from), Some(to)) = (self.job.actor(waiter), self.job.actor(target)) else { return };
        let since = self.called(waiter, lane, position).map(|(_, time)| self.time(waiter, time));
        let since = since.or_else(|| self.begins(waiter));
        let at = At::Call(lane, position as u64);
        let call = Some((waiter, lane, position));
        if from != to {
            let (to, usual, ahead, grade) = (Who::Actor(to), 0, 0, Grade::Hang);
            self.edges.push(Edge { from, to, communicator: idx, at, since, usual, call, ahead, grade });
        }
    }

    /// The wait lasts longer than what goes on in a job that was stopped while all was well.
    fn lasts(&self, edge: &Edge) -> bool {
        let waited = |until: i128| match edge.since {
            None => true,
            Some(since) => until - since > LEAST_WAIT.max(UNUSUAL * edge.usual),
        };
        match edge.to {
            Who::Actor(target) => {
                let exited = self.participant(target).ending == Ending::Exit;
                // What died with its job kept no rank waiting while it was alive, nor long after.
                let killed_early = self.alive_at(edge.from) - self.end(target) > EARLY;
                exited || waited(self.alive_at(target)) || (killed_early && waited(self.alive_at(edge.from)))
            }
            Who::Rank(_) | Who::Member(..) => waited(self.alive_at(edge.from)),
        }
    }

    /// Findings that follow from who waits for whom, and where each rank was at the end.
    pub(super) fn resolve(mut self, known: &mut [Finding]) -> (Vec<Finding>, Vec<Standing>) {
        let edges = std::mem::take(&mut self.edges);
        let lasting = |edge: Edge| Some(Edge { grade: self.grade(&edge)?, ..edge });
        let every: Vec<Edge> = edges.into_iter().filter_map(lasting).collect();
        let lasting: Vec<Edge> = every.iter().filter(|edge| edge.grade != Grade::Usual).cloned().collect();
        for finding in known.iter_mut() {
            let because = |edge: &&Edge| {
                self.is_explained(edge, std::slice::from_ref(finding), None)
                    && match edge.to {
                        Who::Actor(actor) => finding.ranks.contains(&self.rank(actor)),
                        Who::Rank(_) | Who::Member(..) => false,
                    }
            };
            let edges: Vec<&Edge> = lasting.iter().filter(because).collect();
            finding.waiting = self.ranks(edges.iter().map(|edge| edge.from));
            finding.for_ns = self.so_far(&edges);
        }
        let known: &[Finding] = known;
        let mut findings = vec![];
        let circles = circles(self.job.actors.len(), &lasting);
        for circle in &circles {
            let inner: Vec<&Edge> = lasting.iter().filter(|edge| is_inside(edge, circle)).collect();
            let explained = inner.iter().any(|edge| self.is_explained(edge, known, None));
            if !explained {
                let finding = self.circle(circle, &inner);
                findings.push(self.graded(finding, &inner));
            }
        }
        let in_circle = |actor: usize| circles.iter().any(|circle| circle.contains(&actor));
        let waits = |actor: usize| lasting.iter().any(|edge| edge.from == actor);
        let targets: BTreeSet<Who> = lasting.iter().map(|edge| edge.to).collect();
        for target in targets {
            let into: Vec<&Edge> = lasting.iter().filter(|edge| edge.to == target).collect();
            let is_known = |actor| into.iter().any(|edge| self.is_explained(edge, known, Some(actor)));
            if matches!(target, Who::Actor(actor) if waits(actor) || in_circle(actor) || is_known(actor)) {
                continue;
            }
            let finding = self.sink(target, &into);
            findings.push(self.graded(finding, &into));
        }
        let mut findings = with_those_ahead(findings);
        findings.extend(self.errors(known, &findings));
        let standings = (0..self.job.actors.len()).map(|actor| self.standing(actor, &every)).collect();
        (findings, standings)
    }

    /// A finding already says why this edge is there; with `actor`, only one that names it does.
    fn is_explained(&self, edge: &Edge, known: &[Finding], actor: Option<usize>) -> bool {
        let label = &self.job.communicators[edge.communicator].label;
        let At::Call(lane, _) = edge.at else { return false };
        known.iter().any(|finding| {
            finding.severity == Severity::Error
                && finding.communicator.as_ref() == Some(label)
                && finding.lane == Some(lane.name())
                && actor.is_none_or(|actor| finding.ranks.contains(&self.job.actors[actor].rank))
        })
    }

    fn rank(&self, actor: usize) -> u32 {
        self.job.actors[actor].rank
    }

    fn ranks(&self, actors: impl IntoIterator<Item = usize>) -> Vec<u32> {
        let ranks: BTreeSet<u32> = actors.into_iter().map(|actor| self.rank(actor)).collect();
        ranks.into_iter().collect()
    }

    fn text_of(&self, member: Member, lane: Lane, position: usize) -> Option<CallText> {
        let (kind, time) = self.called(member, lane, position)?;
        Some(CallText::of(self.job.rank(member), &self.participants[member.participant], &kind, time))
    }

    /// What an edge's rank waits in: as it called it itself, where that is known.
    fn edge_text(&self, edge: &Edge) -> Option<CallText> {
        match (edge.at, edge.call) {
            (At::Making, _) => {
                let joined = &self.job.communicators[edge.communicator];
                let (_, member) =
                    joined.all().find(|(_, member)| self.job.actor(*member) == Some(edge.from))?;
                let participant = &self.participants[member.participant];
                let membership = &participant.memberships[member.membership];
                Some(CallText {
                    rank: self.rank(edge.from),
                    call: membership.facts.origin?.to_string(),
                    place: Place::of(participant, membership.place),
                    time_ns: membership.created.0.unwrap_or_default().0,
                })
            }
            (At::Call(..), Some((member, lane, position))) => self.text_of(member, lane, position),
            (At::Call(..), None) => None,
        }
    }

    fn own_stack(&self, actor: usize) -> Vec<String> {
        let participant = self.participant(actor);
        let open = participant.open_calls.last().map(|open| &open.stack);
        open.or(participant.last_call.as_ref().map(|call| &call.stack)).cloned().unwrap_or_default()
    }

    /// What the rank of an edge waits in, as it called it.
    fn own_text(&self, edge: &Edge) -> Option<CallText> {
        let At::Call(lane, n) = edge.at else { return self.edge_text(edge) };
        let joined = &self.job.communicators[edge.communicator];
        let (_, member) = joined.all().find(|(_, member)| self.job.actor(*member) == Some(edge.from))?;
        self.text_of(member, lane, usize::try_from(n).ok()?).or_else(|| self.edge_text(edge))
    }

    /// The rank that an edge leads to.
    fn awaited(&self, edge: &Edge) -> Option<u32> {
        match edge.to {
            Who::Actor(actor) => Some(self.rank(actor)),
            Who::Rank(rank) => Some(rank),
            Who::Member(..) => None,
        }
    }
}

/// The 99th percentile of the last intervals.
fn usual(enters: &[Nanos]) -> i128 {
    let recent = &enters[enters.len().saturating_sub(RECENT)..];
    let mut intervals: Vec<u64> = recent.windows(2).map(|pair| pair[1].0.saturating_sub(pair[0].0)).collect();
    intervals.sort_unstable();
    let idx = intervals.len().saturating_sub(1) * 99 / 100;
    intervals.get(idx).map_or(0, |interval| i128::from(*interval))
}

/// A call from before those that all tracks know, as one of them made it.
fn before(alignment: &Alignment, tracks: &[Calls<'_>], column: u64) -> Option<Spot> {
    let position = usize::try_from(column).ok().filter(|_| column < alignment.start)?;
    let knows = |calls: &Calls<'_>| calls.kind(position).is_some();
    Some(Spot { track: tracks.iter().position(knows)?, position })
}
