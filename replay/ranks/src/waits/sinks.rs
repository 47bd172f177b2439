//! A rank that others wait for, and that waits for no other: where to look.

use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::{Nanos, NcclOp};

use super::errors::failure;
use super::{At, EARLY, Edge, Waits, Who};
use crate::calls::{Ending, FailedCall, Lane, LastSeen, Membership};
use crate::findings::{CallText, Finding, Kind, Place, Severity, rank_names, ranks_wait};
use crate::show;

impl Waits<'_> {
    /// A rank that others wait for, and that waits for no other.
    pub(super) fn sink(&self, target: Who, into: &[&Edge]) -> Finding {
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
            Who::Member(_, rank) => format!("its rank {rank}"),
            Who::Actor(_) | Who::Rank(_) => rank_names(&who),
        };
        let is_running = match target {
            Who::Actor(actor) => self.participant(actor).is_alive(),
            Who::Rank(_) | Who::Member(..) => self.participant(main.from).is_alive(),
        };
        let (never_came, never_made) = match is_running {
            true => ("has not joined", "has not made"),
            false => ("never joined", "never made"),
        };
        let mut ranks = who;
        let awaited = others.as_ref().map_or_else(|| "a call".to_owned(), CallText::text);
        let text = match main.at {
            At::Making => {
                kind = Kind::MissingAtInit;
                format!(
                    "{} in {awaited} of {label} for {name}, which {never_came}: it {reason}",
                    ranks_wait(&waiting)
                )
            }
            At::Call(Lane::Management, n) => {
                if kind == Kind::RankStuck || kind == Kind::RankExited {
                    kind = management(main, self);
                }
                format!(
                    "{} in {awaited} on {label} for {name}, which {never_made} its call {n} there: it {reason}",
                    ranks_wait(&waiting)
                )
            }
            At::Call(Lane::Collective | Lane::OneSided, n) => {
                let what = others.as_ref().map_or_else(String::new, |call| format!(", {},", call.text()));
                let waiting = ranks_wait(&waiting);
                format!(
                    "{waiting} in call {n} on {label}{what} for {name}, which {never_made} it: it {reason}"
                )
            }
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
        let caught = match target {
            Who::Actor(actor) if kind == Kind::RankStuck && main.ahead > 1 => self.caught(actor),
            Who::Actor(_) | Who::Rank(_) | Who::Member(..) => None,
        };
        let text = caught.map_or_else(|| text.clone(), |caught| format!("{text}. {caught}"));
        let mut finding = Finding::new(kind, Severity::Error, ranks);
        finding.communicator = Some(label.clone());
        if let At::Call(lane, n) = main.at {
            (finding.lane, finding.sequence) = (Some(lane.name()), Some(n));
        }
        (finding.own, finding.others, finding.stack) = (own, others, stack);
        (finding.waiting, finding.text) = (waiting, text);
        finding
    }

    /// The last error that a rank caught, after which it may have left calls out, in a sentence.
    fn caught(&self, actor: usize) -> Option<String> {
        let participant = self.participant(actor);
        let oom = participant.ooms.last()?;
        let at =
            Place::of(participant, oom.place).map_or_else(String::new, |place| format!(" at {}", place.text));
        Some(format!(
            "Before that it ran {}{at} and continued: it may have skipped calls then, which identical calls hide",
            oom.what
        ))
    }

    /// Why a rank does not come, as far as its trace says: the kind, in words, its call, and its stack.
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
        let at = |place: u32| Place::of(participant, place).map_or_else(String::new, |place| place.text);
        let ago = |time: Nanos| {
            let past = show::nanos(participant.end.0.saturating_sub(time.0) as i64);
            format!("{past} {}", if participant.is_alive() { "ago" } else { "before its end" })
        };
        if let Some(group) = participant.open_groups.first().filter(|group| !group.group.is_empty()) {
            let own = open_text(NcclOp::GroupStart, group.place, group.since);
            let text = format!(
                "opened a group at {} and never closed it: the {} in it never started",
                at(group.place),
                if group.group.len() == 1 {
                    "call".to_owned()
                } else {
                    format!("{} calls", group.group.len())
                }
            );
            return (Kind::GroupIncomplete, text, Some(own), group.stack.clone());
        }
        let member = self.job.communicators[edge.communicator]
            .all()
            .find(|(_, member)| self.job.actor(*member) == Some(actor))
            .map(|(_, member)| &participant.memberships[member.membership]);
        let failed_call = |failed: &FailedCall| {
            let own = open_text(failed.op, failed.place, failed.time);
            let (kind, text) = failure(failed, &own);
            (kind, text, Some(own), vec![participant.place(failed.place)])
        };
        if let Some(failed) = participant.failed_calls.last().filter(|failed| failed.refused.is_some()) {
            return failed_call(failed);
        }
        // What it caught and went on after explains nothing.
        let newest = member.and_then(Membership::newest_call).unwrap_or_default();
        if let Some(memory) = participant.out_of_memory.as_ref().filter(|memory| memory.time > newest) {
            let own = seen(memory);
            let text = format!("ran {} at {}", memory.what, at(memory.place));
            return (Kind::OutOfMemory, text, Some(own), memory.stack.clone());
        }
        let gave_up = |op: NcclOp| matches!(op, NcclOp::CommAbort | NcclOp::CommRevoke);
        let closing = member.and_then(|membership| membership.closing);
        if let Some(closing) = closing.filter(|closing| gave_up(closing.op)) {
            let own = open_text(closing.op, closing.place, closing.time);
            let text = format!("aborted the communicator with {}", own.text());
            return (Kind::Abort, text, Some(own), vec![participant.place(closing.place)]);
        }
        if let Some(failed) = participant.failed_calls.last() {
            return failed_call(failed);
        }
        let last = participant.last_call.as_ref().or(participant.last_event.as_ref());
        let own = last.map(seen);
        let stack = last.map(|last| last.stack.clone()).unwrap_or_default();
        let last_text = last.map_or_else(
            || "no NCCL call of it was seen".to_owned(),
            |last| format!("its last call was {}, {}", seen(last).text(), ago(last.time)),
        );
        if participant.ending == Ending::Exit {
            return (Kind::RankExited, format!("{}; {last_text}", participant.ended), own, stack);
        }
        if let Some(closing) = closing {
            let own = open_text(closing.op, closing.place, closing.time);
            let text = format!("closed the communicator without it, with {}", own.text());
            return (Kind::MissingCall, text, Some(own), vec![participant.place(closing.place)]);
        }
        let latest = (0..self.job.actors.len()).map(|actor| self.alive_at(actor)).max().unwrap_or(0);
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
                "is elsewhere; {last_text}, and its latest event {}, {}",
                seen(event).text(),
                ago(event.time)
            ),
            None => format!("is elsewhere; {last_text}"),
        };
        let (own, stack) = match newest {
            Some(event) => (Some(seen(event)), event.stack.clone()),
            None => (own, stack),
        };
        let Some(stands) = participant.stands_at() else { return (Kind::RankStuck, text, own, stack) };
        let text = format!(
            "{text}. Its main thread is in {}: read from outside{}, {} after its last event",
            participant.stands_in().unwrap_or_default(),
            if stands.is_torn { " while it changed" } else { "" },
            show::nanos(i64::try_from(stands.silent.0).unwrap_or(i64::MAX)),
        );
        let stack = stands.stack.clone();
        (Kind::RankStuck, text, own, stack)
    }
}

pub(super) fn management(edge: &Edge, waits: &Waits<'_>) -> Kind {
    let op = edge.call.and_then(|(member, lane, position)| waits.called(member, lane, position));
    match op.map(|(kind, _)| kind.signature.op) {
        Some(NcclOp::CommSplit) => Kind::MissingInSplit,
        Some(NcclOp::CommShrink) => Kind::MissingInShrink,
        _ => Kind::MissingCall,
    }
}

/// Where most ranks ended by themselves, or closed the communicator, and the few others wait for them in a call, it is these that made one too many: one
/// finding about them, in the place of one about each of the many.
pub(super) fn with_those_ahead(findings: Vec<Finding>) -> Vec<Finding> {
    let call = |finding: &Finding| {
        (finding.communicator.clone(), finding.lane, finding.sequence, finding.waiting.clone())
    };
    let is_over = |finding: &Finding| {
        finding.kind == Kind::RankExited
            || finding.kind == Kind::MissingCall && finding.lane != Some(Lane::Management.name())
    };
    let mut ended: BTreeMap<_, Vec<u32>> = BTreeMap::new();
    for finding in findings.iter().filter(|finding| is_over(finding)) {
        ended.entry(call(finding)).or_default().extend(&finding.ranks);
    }
    ended.retain(|(.., waiting), ended| !waiting.is_empty() && ended.len() >= waiting.len());
    let (mut kept, mut said) = (vec![], BTreeSet::new());
    for mut finding in findings {
        let is_tie = ended.get(&call(&finding)).is_some_and(|ended| ended.len() == finding.waiting.len());
        if is_tie && is_over(&finding) {
            finding.undecided = true;
            let ahead = rank_names(&finding.waiting);
            finding.text += &format!("; or {ahead} made one call too many, which cannot be determined");
            kept.push(finding);
            continue;
        }
        let Some(others) = ended.get(&call(&finding)).filter(|_| is_over(&finding)) else {
            kept.push(finding);
            continue;
        };
        if said.insert(call(&finding)) {
            let (ranks, label) = (finding.waiting, finding.communicator.clone().unwrap_or_default());
            let (number, own) = (finding.sequence.unwrap_or_default(), finding.others);
            let what = own.as_ref().map_or_else(String::new, |own| format!(", {}", own.text()));
            let text = format!(
                "{} in call {number} on {label}{what}, which {} never made: they {}",
                ranks_wait(&ranks),
                rank_names(others),
                if finding.kind == Kind::RankExited {
                    "exited by themselves"
                } else {
                    "closed the communicator without it"
                }
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
