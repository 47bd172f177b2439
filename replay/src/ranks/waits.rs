//! Who waits for whom at the end of a job, and for whom all wait.
//!
//! A rank that has called something which another has not waits for that other, sooner or later: calls return before they
//! are done. A rank that waits for nobody while others wait for it is where to look. Ranks that wait for each other in
//! a circle never go on.

use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::{Nanos, NcclOp};
use serde::Serialize;

use super::align::{Alignment, Spot};
use super::calls::{CallKind, Ending, FailedCall, Lane, LastSeen, Participant};
use super::clocks::Clocks;
use super::findings::{CallText, Finding, Kind, Place, Severity, rank_names, ranks_wait};
use super::jobs::{Job, Joined, Member};
use super::show;
use super::tracks::Calls;
use crate::report::words;

/// A rank, with or without a trace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Who {
    /// Index of an actor.
    Actor(usize),
    /// A rank of the job without a trace.
    Rank(u32),
    /// A rank of this communicator; nobody knows which of the job.
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
    /// Waiting that is no longer than this is nothing.
    usual: i128,
    /// What it waits in, as somebody called it.
    call: Option<(Member, Lane, usize)>,
}

/// Where a rank was at the end.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Standing {
    /// Rank in the job.
    pub rank: u32,
    /// How its process ended.
    pub ending: Ending,
    /// In words: in a call, after a call, ended.
    pub state: String,
    /// The last call into NCCL.
    pub last_call: Option<CallText>,
    /// Calls of the largest communicator that it made.
    pub collectives: u64,
    /// From then to the end.
    pub idle_ns: Option<u64>,
    /// The newest event of any kind.
    pub last_event: Option<CallText>,
    /// Ranks that it waits for.
    pub waits_for: Vec<u32>,
    /// The stack of what it is in, else of the last call, innermost first.
    pub stack: Vec<String>,
}

/// Least time that is called waiting: what a healthy job that was stopped has in flight is shorter, also where ranks share
/// processors (223 ms were seen with sixteen ranks on two).
const LEAST_WAIT: i128 = 500_000_000;
/// How many times the usual time between calls a wait must last.
const UNUSUAL: i128 = 3;
/// Calls from which the usual time is taken.
const RECENT: usize = 1000;
/// Where most ranks ended by themselves and the few others wait for them in a call, it is these that made one too many: one
/// finding about them, in the place of one about each of the many.
fn with_those_ahead(findings: Vec<Finding>) -> Vec<Finding> {
    let call = |finding: &Finding| {
        (finding.communicator.clone(), finding.lane, finding.sequence, finding.waiting.clone())
    };
    let mut ended: BTreeMap<_, Vec<u32>> = BTreeMap::new();
    for finding in findings.iter().filter(|finding| finding.kind == Kind::RankExited) {
        ended.entry(call(finding)).or_default().extend(&finding.ranks);
    }
    ended.retain(|(.., waiting), ended| !waiting.is_empty() && ended.len() > waiting.len());
    let (mut kept, mut told) = (vec![], BTreeSet::new());
    for finding in findings {
        let Some(others) = ended.get(&call(&finding)).filter(|_| finding.kind == Kind::RankExited) else {
            kept.push(finding);
            continue;
        };
        if told.insert(call(&finding)) {
            let (ranks, label) = (finding.waiting, finding.communicator.clone().unwrap_or_default());
            let (number, own) = (finding.sequence.unwrap_or_default(), finding.others);
            let what = own.as_ref().map_or_else(String::new, |own| format!(", {}", own.text()));
            let text = format!(
                "{} in call {number} on {label}{what}, which {} never made: they ended by themselves",
                ranks_wait(&ranks),
                rank_names(others)
            );
            kept.push(Finding {
                communicator: finding.communicator,
                lane: finding.lane,
                sequence: finding.sequence,
                own,
                others: finding.own,
                text,
                ..Finding::new(Kind::ExtraCall, Severity::Error, ranks)
            });
        }
    }
    kept
}

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

    /// Who of the ranks outside of a communicator would have been this rank of it: communicators number their ranks as the job
    /// does, whoever waits in NCCL itself is busy with another one, and whoever has fewer communicators than the others is behind.
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

    /// Why a rank of a communicator does not come of which nobody knows which rank of the job it is.
    fn reason_of_member(&self, communicator: usize, rank: u32) -> String {
        let joined = &self.job.communicators[communicator];
        let members: BTreeSet<usize> =
            joined.all().filter_map(|(_, member)| self.job.actor(member)).collect();
        let outside: Vec<usize> =
            (0..self.job.actors.len()).filter(|actor| !members.contains(actor)).collect();
        match self.candidates(joined, &outside, rank) {
            candidates if self.job.missing().is_empty() && !candidates.is_empty() => {
                let names: Vec<String> = self.ranks(candidates).iter().map(u32::to_string).collect();
                format!("is one of ranks {}, which did not call it", names.join(", "))
            }
            _ => "has no trace".to_owned(),
        }
    }

    /// Ranks that are inside the making of a communicator wait for those who never began.
    pub(super) fn making(&mut self, idx: usize) {
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
            // Which rank of the job it would have been is known only if there is no choice.
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
                let at = At::Making;
                self.edges.push(Edge { from, to, communicator: idx, at, since, usual: 0, call: None });
            }
        }
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
            let spot = alignment.spot(column);
            let Some(target) = self.job.actor(tracks[track].member) else { continue };
            for other in (0..tracks.len()).filter(|other| reached[*other] > column) {
                self.edge(idx, lane, tracks, (other, target), column, spot);
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
        column: u64,
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
        self.edges.push(Edge {
            from: from_actor,
            to: Who::Actor(target),
            communicator: idx,
            at: At::Call(lane, spot.map_or(column, |spot| spot.position as u64)),
            since,
            usual: usual(tracks[from].membership.lane(lane).map_or(&[][..], |sequence| &sequence.enters)),
            call,
        });
    }

    fn called(&self, member: Member, lane: Lane, position: usize) -> Option<(CallKind, Nanos)> {
        self.participants[member.participant].memberships[member.membership].call(lane, position)
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
                self.edge(idx, lane, tracks, (other, target), column, spot);
            }
        }
    }

    /// A send or receive without counterpart.
    pub(super) fn peer(&mut self, idx: usize, waiter: Member, lane: Lane, position: usize, target: Member) {
        let (Some(from), Some(to)) = (self.job.actor(waiter), self.job.actor(target)) else { return };
        let since = self.called(waiter, lane, position).map(|(_, time)| self.time(waiter, time));
        let at = At::Call(lane, position as u64);
        let call = Some((waiter, lane, position));
        if from != to {
            self.edges.push(Edge { from, to: Who::Actor(to), communicator: idx, at, since, usual: 0, call });
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
                // What died with its job kept nobody waiting while it was alive, nor long after.
                let killed_early = self.end(edge.from) - self.end(target) > EARLY;
                exited || waited(self.end(target)) || (killed_early && waited(self.end(edge.from)))
            }
            Who::Rank(_) | Who::Member(..) => waited(self.end(edge.from)),
        }
    }

    /// Findings that follow from who waits for whom, and where each rank was at the end.
    pub(super) fn resolve(mut self, known: &mut [Finding]) -> (Vec<Finding>, Vec<Standing>) {
        let edges = std::mem::take(&mut self.edges);
        let lasting: Vec<Edge> = edges.into_iter().filter(|edge| self.lasts(edge)).collect();
        for finding in known.iter_mut() {
            let because = |edge: &&Edge| {
                self.is_explained(edge, std::slice::from_ref(finding), None)
                    && match edge.to {
                        Who::Actor(actor) => finding.ranks.contains(&self.rank(actor)),
                        Who::Rank(_) | Who::Member(..) => false,
                    }
            };
            let waiting = self.ranks(lasting.iter().filter(because).map(|edge| edge.from));
            finding.waiting = waiting;
        }
        let known: &[Finding] = known;
        let mut findings = vec![];
        let circles = circles(self.job.actors.len(), &lasting);
        for circle in &circles {
            let inner: Vec<&Edge> = lasting.iter().filter(|edge| is_inside(edge, circle)).collect();
            let explained = inner.iter().any(|edge| self.is_explained(edge, known, None));
            if !explained {
                findings.push(self.circle(circle, &inner));
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
            findings.push(self.sink(target, &into));
        }
        let mut findings = with_those_ahead(findings);
        findings.extend(self.errors(known, &findings));
        let standings = (0..self.job.actors.len()).map(|actor| self.standing(actor, &lasting)).collect();
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

    /// A rank that others wait for, and that waits for nobody.
    fn sink(&self, target: Who, into: &[&Edge]) -> Finding {
        // The call that most wait in, and of these the one they wait in longest.
        let mut votes: BTreeMap<(usize, At), usize> = BTreeMap::new();
        into.iter().for_each(|edge| *votes.entry((edge.communicator, edge.at)).or_default() += 1);
        let weight = |edge: &&&Edge| (votes[&(edge.communicator, edge.at)], std::cmp::Reverse(edge.since));
        let Some(main) = into.iter().max_by_key(weight) else {
            return Finding::new(Kind::RankStuck, Severity::Error, vec![]);
        };
        let label = &self.job.communicators[main.communicator].label;
        let others = self.edge_text(main);
        let waiting = self.ranks(into.iter().map(|edge| edge.from));
        let (mut kind, reason, mut own, mut stack) = match target {
            Who::Actor(actor) => self.reason(actor, main),
            Who::Rank(_) => (Kind::RankStuck, "has no trace".to_owned(), None, vec![]),
            Who::Member(communicator, rank) => {
                (Kind::RankStuck, self.reason_of_member(communicator, rank), None, vec![])
            }
        };
        let who = match target {
            Who::Actor(actor) => vec![self.rank(actor)],
            Who::Rank(rank) => vec![rank],
            Who::Member(..) => vec![],
        };
        let name = match target {
            Who::Member(_, rank) => format!("rank {rank} of {label}"),
            Who::Actor(_) | Who::Rank(_) => rank_names(&who),
        };
        let mut ranks = who;
        let awaited = others.as_ref().map_or_else(|| "a call".to_owned(), CallText::text);
        let text = match main.at {
            At::Making => {
                kind = Kind::MissingAtInit;
                format!(
                    "{} in {awaited} of {label} for {name}, which never came: it {reason}",
                    ranks_wait(&waiting)
                )
            }
            At::Call(Lane::Management, n) => {
                if kind == Kind::RankStuck || kind == Kind::RankExited {
                    kind = management(main, self);
                }
                format!(
                    "{} in {awaited} on {label} for {name}, which never made its call {n} there: it {reason}",
                    ranks_wait(&waiting)
                )
            }
            At::Call(Lane::Collective | Lane::OneSided, n) => format!(
                "{} in call {n} on {label}, {awaited}, for {name}, which never made it: it {reason}",
                ranks_wait(&waiting)
            ),
            At::Call(Lane::Send(_), n) => {
                if matches!(kind, Kind::RankStuck | Kind::RankExited) {
                    (kind, ranks) = (Kind::UnmatchedSend, self.ranks([main.from]));
                    (own, stack) = (others.clone(), self.own_stack(main.from));
                }
                let from = rank_names(&self.ranks([main.from]));
                format!(
                    "{from} called {awaited} to {name} on {label}, number {n}, and {name} never called the receive: it {reason}"
                )
            }
            At::Call(Lane::Receive(_), n) => {
                if matches!(kind, Kind::RankStuck | Kind::RankExited) {
                    (kind, ranks) = (Kind::UnmatchedRecv, self.ranks([main.from]));
                    (own, stack) = (others.clone(), self.own_stack(main.from));
                }
                let from = rank_names(&self.ranks([main.from]));
                format!(
                    "{from} called {awaited} from {name} on {label}, number {n}, and {name} never called the send: it {reason}"
                )
            }
        };
        let mut finding = Finding::new(kind, Severity::Error, ranks);
        finding.communicator = Some(label.clone());
        if let At::Call(lane, n) = main.at {
            (finding.lane, finding.sequence) = (Some(lane.name()), Some(n));
        }
        (finding.own, finding.others, finding.stack) = (own, others, stack);
        (finding.waiting, finding.text) = (waiting, text);
        finding
    }

    fn own_stack(&self, actor: usize) -> Vec<String> {
        let participant = self.participant(actor);
        let open = participant.open_calls.last().map(|open| &open.stack);
        open.or(participant.last_call.as_ref().map(|call| &call.stack)).cloned().unwrap_or_default()
    }

    /// Why a rank does not come, as far as its trace tells: the kind, in words, its call, and its stack.
    fn reason(&self, actor: usize, edge: &Edge) -> (Kind, String, Option<CallText>, Vec<String>) {
        let participant = self.participant(actor);
        let rank = self.rank(actor);
        let seen = |last: &LastSeen| CallText {
            rank,
            call: last.what.clone(),
            place: Place::of(participant, last.place),
            time_ns: last.time.0,
        };
        let open_text = |op: NcclOp, place: u32, since: Nanos| CallText {
            rank,
            call: op.to_string(),
            place: Place::of(participant, place),
            time_ns: since.0,
        };
        let ago = |time: Nanos| show::nanos(participant.end.0.saturating_sub(time.0) as i64);
        if let Some(group) = participant.open_groups.first().filter(|group| !group.group.is_empty()) {
            let own = open_text(NcclOp::GroupStart, group.place, group.since);
            let text = format!(
                "opened a group at {} and never closed it, so that its {} calls were never started",
                participant.place(group.place),
                group.group.len()
            );
            return (Kind::GroupIncomplete, text, Some(own), group.stack.clone());
        }
        let member = self.job.communicators[edge.communicator]
            .all()
            .find(|(_, member)| self.job.actor(*member) == Some(actor))
            .map(|(_, member)| &participant.memberships[member.membership]);
        let gave_up = |op: NcclOp| matches!(op, NcclOp::CommAbort | NcclOp::CommRevoke);
        let closing = member.and_then(|membership| membership.closing);
        if let Some(closing) = closing.filter(|closing| gave_up(closing.op)) {
            let own = open_text(closing.op, closing.place, closing.time);
            let text = format!("gave the communicator up by {}", own.text());
            return (Kind::Abort, text, Some(own), vec![participant.place(closing.place)]);
        }
        if let Some(failed) = participant.failed_calls.last() {
            let own = open_text(failed.op, failed.place, failed.time);
            let (kind, text) = failure(failed, &own);
            return (kind, text, Some(own), vec![participant.place(failed.place)]);
        }
        if let Some(memory) = &participant.out_of_memory {
            let own = seen(memory);
            let text = format!("ran {} at {}", memory.what, participant.place(memory.place));
            return (Kind::OutOfMemory, text, Some(own), memory.stack.clone());
        }
        let last = participant.last_call.as_ref().or(participant.last_event.as_ref());
        let own = last.map(seen);
        let stack = last.map(|last| last.stack.clone()).unwrap_or_default();
        let last_text = last.map_or_else(
            || "nothing of it was seen in NCCL".to_owned(),
            |last| format!("its last call was {}, {} before its end", seen(last).text(), ago(last.time)),
        );
        if participant.ending == Ending::Exit {
            return (Kind::RankExited, format!("{}; {last_text}", participant.ended), own, stack);
        }
        let latest = (0..self.job.actors.len()).map(|actor| self.end(actor)).max().unwrap_or(0);
        let after = latest - self.end(actor);
        // Others waited longer for the dead than for the living.
        let before = edge.since.map_or(0, |since| self.end(actor) - since);
        if participant.ending == Ending::Killed && after > EARLY && after > before {
            let before = show::nanos(after as i64);
            return (
                Kind::RankKilled,
                format!("{}, {before} before the last; {last_text}", participant.ended),
                own,
                stack,
            );
        }
        let newest =
            participant.last_event.as_ref().filter(|event| last.is_none_or(|last| event.time > last.time));
        let text = match newest {
            Some(event) => format!(
                "is elsewhere; {last_text}, and its newest event {}, {} before its end",
                seen(event).text(),
                ago(event.time)
            ),
            None => format!("is elsewhere; {last_text}"),
        };
        let (own, stack) = match newest {
            Some(event) => (Some(seen(event)), event.stack.clone()),
            None => (own, stack),
        };
        (Kind::RankStuck, text, own, stack)
    }

    /// Ranks that wait for each other.
    fn circle(&self, circle: &BTreeSet<usize>, inner: &[&Edge]) -> Finding {
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
                format!(
                    "{} made on another communicator the call that the others made",
                    rank_names(&finding.ranks)
                )
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

    /// What the rank of an edge waits in, as it called it.
    fn own_text(&self, edge: &Edge) -> Option<CallText> {
        let At::Call(lane, n) = edge.at else { return self.edge_text(edge) };
        let joined = &self.job.communicators[edge.communicator];
        let (_, member) = joined.all().find(|(_, member)| self.job.actor(*member) == Some(edge.from))?;
        self.text_of(member, lane, usize::try_from(n).ok()?).or_else(|| self.edge_text(edge))
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

    /// The rank that an edge leads to.
    fn awaited(&self, edge: &Edge) -> Option<u32> {
        match edge.to {
            Who::Actor(actor) => Some(self.rank(actor)),
            Who::Rank(rank) => Some(rank),
            Who::Member(..) => None,
        }
    }

    /// Errors that NCCL told, whether or not anybody waits.
    fn errors(&self, known: &[Finding], new: &[Finding]) -> Vec<Finding> {
        let mut findings = vec![];
        for (idx, joined) in self.job.communicators.iter().enumerate() {
            for (_, member) in joined.all() {
                let participant = &self.participants[member.participant];
                let membership = &participant.memberships[member.membership];
                let rank = self.job.rank(member);
                if let Some((time, error, place)) = membership.async_error {
                    let n = membership.lane(Lane::Collective).map_or(0, |sequence| sequence.len() as u64);
                    let last = n.saturating_sub(1);
                    let mut finding = Finding::new(Kind::AsyncError, Severity::Error, vec![rank]).on(
                        &self.job.communicators[idx].label,
                        Lane::Collective,
                        last,
                    );
                    finding.own = self.text_of(member, Lane::Collective, last as usize);
                    finding.text = format!(
                        "NCCL reported {} of {} to rank {rank} {} before its end{}; the newest of its {n} collectives there: {}",
                        result_name(error),
                        joined.label,
                        show::nanos(participant.end.0.saturating_sub(time.0) as i64),
                        Place::of(participant, place)
                            .map_or_else(String::new, |place| format!(", asked at {}", place.text)),
                        finding.own.as_ref().map_or_else(|| "none".to_owned(), CallText::text),
                    );
                    findings.push(finding);
                }
            }
        }
        for (idx, actor) in self.job.actors.iter().enumerate() {
            let participant = self.participant(idx);
            for failed in &participant.failed_calls {
                let kind = failed.refused.map_or(Kind::FailedCall, |_| Kind::OutOfMemory);
                let already = |finding: &Finding| finding.kind == kind && finding.ranks == [actor.rank];
                if known.iter().chain(new).any(already) {
                    continue;
                }
                let mut finding = Finding::new(kind, Severity::Error, vec![actor.rank]);
                let joined = failed.membership.and_then(|membership| {
                    let member = Member { participant: actor.participant, membership };
                    self.job
                        .communicators
                        .iter()
                        .find(|joined| joined.all().any(|(_, other)| other == member))
                });
                finding.communicator = joined.map(|joined| joined.label.clone());
                if let Some((lane, n)) = failed.spot {
                    (finding.lane, finding.sequence) = (Some(lane.name()), Some(n));
                }
                let own = CallText {
                    rank: actor.rank,
                    call: failed.op.to_string(),
                    place: Place::of(participant, failed.place),
                    time_ns: failed.time.0,
                };
                finding.text = format!("rank {} {}", actor.rank, failure(failed, &own).1);
                finding.own = Some(own);
                findings.push(finding);
            }
        }
        findings
    }

    fn standing(&self, actor: usize, edges: &[Edge]) -> Standing {
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
        let state = match (open, participant.ending) {
            (Some(open), _) => format!("inside {}", open.op),
            (None, Ending::Exit) => "ended by itself".into(),
            (None, Ending::Killed) => "outside of NCCL when killed".into(),
            (None, Ending::Unknown) => "outside of NCCL".into(),
        };
        let mut waits_for: BTreeSet<u32> = BTreeSet::new();
        for edge in edges.iter().filter(|edge| edge.from == actor) {
            waits_for.extend(self.awaited(edge));
        }
        let world = self.job.world.map(|world| &self.job.communicators[world]);
        let member =
            world.and_then(|world| world.all().find(|(_, member)| self.job.actor(*member) == Some(actor)));
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
            stack: stack.unwrap_or_default(),
        }
    }
}

fn management(edge: &Edge, waits: &Waits<'_>) -> Kind {
    let op = edge.call.and_then(|(member, lane, position)| waits.called(member, lane, position));
    match op.map(|(kind, _)| kind.signature.op) {
        Some(NcclOp::CommSplit) => Kind::MissingInSplit,
        Some(NcclOp::CommShrink) => Kind::MissingInShrink,
        _ => Kind::MissingCall,
    }
}

/// What became of a call that failed: the kind of finding, and in words.
fn failure(failed: &FailedCall, own: &CallText) -> (Kind, String) {
    let result = result_name(failed.result);
    match failed.refused {
        Some(refused) => {
            let (bytes, own) = (words::bytes(refused), own.text());
            (
                Kind::OutOfMemory,
                format!("ran out of memory in {own}: NCCL was refused {bytes} there, and calls it {result}"),
            )
        }
        None => (Kind::FailedCall, format!("got {result} from {}", own.text())),
    }
}

/// `ncclResult_t` (nccl.h 2.32).
fn result_name(result: i32) -> String {
    const NAMES: [&str; 9] = [
        "success",
        "unhandled CUDA error",
        "system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote error",
        "in progress",
        "timeout",
    ];
    let name = usize::try_from(result).ok().and_then(|result| NAMES.get(result));
    name.map_or_else(|| format!("error {result}"), |name| format!("'{name}' ({result})"))
}

/// The 99th percentile of the last intervals.
fn usual(enters: &[Nanos]) -> i128 {
    let recent = &enters[enters.len().saturating_sub(RECENT)..];
    let mut intervals: Vec<u64> = recent.windows(2).map(|pair| pair[1].0.saturating_sub(pair[0].0)).collect();
    intervals.sort_unstable();
    let idx = intervals.len().saturating_sub(1) * 99 / 100;
    intervals.get(idx).map_or(0, |interval| i128::from(*interval))
}

fn is_inside(edge: &Edge, circle: &BTreeSet<usize>) -> bool {
    circle.contains(&edge.from) && matches!(edge.to, Who::Actor(to) if circle.contains(&to))
}

/// Groups of actors each of which waits, perhaps through others, for every other of its group.
fn circles(n_actors: usize, edges: &[Edge]) -> Vec<BTreeSet<usize>> {
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
