//! Whether a wait in a job that still runs is a hang, or may be a healthy one ([`crate::live`]).

use gputrace_schemas::event::Nanos;
use gputrace_trace::{faults, words};

use super::{At, Edge, UNUSUAL, Waits, Who};
use crate::findings::{Finding, Severity, rank_names};
use crate::live::{self, HANG_AFTER, LEAST_WAIT, Work};
use crate::show;

/// How many times longer than any before a wait must be for a rank that is busy to be called one that hangs.
const FAR_BEYOND: i128 = 3;

/// How bad a wait is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Grade {
    /// It took as long before: no finding.
    Usual,
    /// The rank that is waited for works, or has not been away for long: it may come.
    Slow,
    /// Nothing that is known explains it.
    Hang,
}

impl Waits<'_> {
    /// How bad the wait is; `None` where it is none.
    pub(super) fn grade(&self, edge: &Edge) -> Option<Grade> {
        let target = match edge.to {
            Who::Actor(actor) => Some(actor),
            Who::Rank(_) | Who::Member(..) => None,
        };
        let is_running = |actor: usize| self.participant(actor).is_alive();
        if !is_running(edge.from) || !target.is_none_or(is_running) {
            return self.lasts(edge).then_some(Grade::Hang);
        }
        let (since, waited) = self.waited(edge)?;
        if waited <= LEAST_WAIT {
            return None;
        }
        let usual =
            self.longest_before(edge).map_or(UNUSUAL * edge.usual, |longest| i128::from(longest) * 3 / 2);
        if waited <= usual {
            return Some(Grade::Usual);
        }
        // A recorder that does not get to write has seen nothing of what its process did.
        let is_late = |actor: usize| self.participant(actor).recorder_is_late;
        if is_late(edge.from) || target.is_some_and(is_late) {
            return Some(Grade::Slow);
        }
        let idle = waited.min(target.map_or(waited, |target| self.idle(target, since)));
        let is_hang = idle > i128::from(HANG_AFTER)
            || target.is_some_and(|target| self.is_busy_without_progress(target, since, waited, usual));
        Some(if is_hang { Grade::Hang } else { Grade::Slow })
    }

    /// Since when it waits, as far as that is known, and for how long at the moment to which both traces go.
    fn waited(&self, edge: &Edge) -> Option<(i128, i128)> {
        let mut now = self.alive_at(edge.from);
        if let Who::Actor(target) = edge.to {
            now = now.min(self.alive_at(target));
        }
        let since = edge.since.unwrap_or(0);
        (now > since).then_some((since, now - since))
    }

    /// For how long a rank was idle at its newest heartbeat, of the time since then: of what came after it, nothing is known. Where no
    /// heartbeat says what the process used, that is [`Waits::quiet`].
    fn idle(&self, actor: usize, since: i128) -> i128 {
        let participant = self.participant(actor);
        let quiet = self.quiet(actor, since);
        match participant.beats.last() {
            Some((time, beat)) if beat.cpu.is_some() => {
                let unknown =
                    self.alive_at(actor) - self.clocks.time(self.job.actors[actor].participant, *time);
                quiet - unknown.max(0)
            }
            // The first heartbeat cannot say what the process used: that takes a second one.
            Some(_) if participant.beats.len() == 1 => 0,
            _ => quiet,
        }
    }

    /// For how long a rank has shown no sign of work, of the time since then.
    fn quiet(&self, actor: usize, since: i128) -> i128 {
        let participant = self.participant(actor);
        let index = self.job.actors[actor].participant;
        let seen = self.clocks.time(index, participant.last_seen());
        // On an overloaded machine heartbeats are far apart: work that one of them shows may have gone on after the silence began.
        let busy =
            participant.beats.windows(2).rev().take_while(|pair| self.clocks.time(index, pair[1].0) > since);
        let busy = busy.into_iter().find(|pair| matches!(participant.work_in(pair), Work::Busy { .. }));
        let busy = busy.map_or(since, |pair| self.clocks.time(index, pair[1].0));
        self.alive_at(actor) - since.max(seen).max(busy)
    }

    /// A rank uses a processor and gets nowhere, as `while True: pass` does: it has shown no event since then, the wait is far longer than
    /// any before, and its main thread was in the same Python function at each of several readings, or the wait is longer than any
    /// work would explain ([`live::BUSY_TOO_LONG`]).
    fn is_busy_without_progress(&self, actor: usize, since: i128, waited: i128, usual: i128) -> bool {
        let participant = self.participant(actor);
        let seen = self.clocks.time(self.job.actors[actor].participant, participant.last_seen());
        let is_silent = seen <= since + LEAST_WAIT;
        let is_unusual = waited > FAR_BEYOND * usual / 3 * 2;
        let is_same = participant.stays_in().is_some();
        is_silent && is_unusual && (is_same || waited > i128::from(live::BUSY_TOO_LONG))
    }

    /// The longest that it took from the call that it made last to the one after.
    fn longest_before(&self, edge: &Edge) -> Option<u64> {
        let (Who::Actor(target), At::Call(lane, _)) = (edge.to, edge.at) else { return None };
        let joined = &self.job.communicators[edge.communicator];
        let (_, member) = joined.all().find(|(_, member)| self.job.actor(*member) == Some(target))?;
        let calls = self.participants[member.participant].memberships[member.membership].lane(lane)?;
        live::longest_after(calls, *calls.kinds.last()?)
    }

    /// Where the trace of the rank that is waited for has not been kept from the beginning: since when it has, in words.
    fn kept(&self, edge: &Edge) -> Option<String> {
        let Who::Actor(target) = edge.to else { return None };
        let process = &self.participant(target).process;
        (process.since.0 > 0).then(|| format!("since {}", faults::clock(process, process.since)))
    }

    /// For how long the longest of these waits has lasted, in a job that runs.
    pub(super) fn so_far(&self, edges: &[&Edge]) -> Option<u64> {
        let running = edges.iter().filter(|edge| self.participant(edge.from).is_alive());
        let longest = running.filter_map(|edge| Some(self.waited(edge)?.1)).max();
        longest.and_then(|longest| u64::try_from(longest).ok())
    }

    /// A finding about a wait in a job that runs: how bad it is, for how long, and what the rank does meanwhile.
    pub(super) fn graded(&self, mut finding: Finding, edges: &[&Edge]) -> Finding {
        let is_running = edges.iter().all(|edge| self.participant(edge.from).is_alive());
        let longest = edges.iter().filter_map(|edge| Some((self.waited(edge)?, *edge)));
        let Some(((since, waited), edge)) = longest.max_by_key(|((_, waited), _)| *waited) else {
            return finding;
        };
        if !is_running {
            return finding;
        }
        if edges.iter().all(|edge| edge.grade == Grade::Slow) {
            finding.severity = Severity::Warning;
        }
        finding.for_ns = u64::try_from(waited).ok();
        finding.ahead = edges.iter().map(|edge| edge.ahead).max().filter(|ahead| *ahead > 0);
        let so_far = show::nanos(i64::try_from(waited).unwrap_or(i64::MAX));
        finding.text += &match finding.ahead {
            Some(1) => format!(". It is 1 call behind, for {so_far} so far"),
            Some(ahead) => format!(". It is up to {} calls behind, for {so_far} so far", words::count(ahead)),
            None => format!(", for {so_far} so far"),
        };
        if let Some(longest) = self.longest_before(edge) {
            let kept = self.kept(edge).unwrap_or_else(|| "until now".to_owned());
            finding.text += &format!(
                "; {kept} it took at most {} from that call to the next",
                words::time(Nanos(longest))
            );
        }
        if let Who::Actor(target) = edge.to {
            finding.text += &format!(". {}", self.doing(target, since, edge.grade));
        }
        finding
    }

    /// What a rank does while others wait for it, in a sentence.
    fn doing(&self, actor: usize, since: i128, grade: Grade) -> String {
        let participant = self.participant(actor);
        let who = show::capital(&rank_names(&[self.rank(actor)]));
        let quiet = self.quiet(actor, since);
        let seen = self.clocks.time(self.job.actors[actor].participant, participant.last_seen());
        let silent = self.alive_at(actor) - seen;
        let offset = self.clocks.get(self.job.actors[actor].participant).offset;
        let since = Nanos(u64::try_from(since - i128::from(offset)).unwrap_or(0));
        let quiet = show::nanos(i64::try_from(quiet).unwrap_or(i64::MAX));
        if participant.recorder_is_late {
            return format!(
                "The recorder of {} has written nothing lately: it is not known whether the rank works",
                who.to_lowercase()
            );
        }
        match participant.work_since(since) {
            Work::Busy { share, .. } if grade == Grade::Hang => {
                let same = participant.stays_in().map_or_else(String::new, |same| {
                    format!(
                        ", and its main thread was in {} at each of {} readings",
                        same.function, same.n_readings
                    )
                });
                format!(
                    "{who} is busy without progress: {:.0} % of a processor, no event for {}{same}",
                    share * 100.0,
                    show::nanos(i64::try_from(silent).unwrap_or(i64::MAX)),
                )
            }
            Work::Busy { share, bytes_per_s } => format!(
                "{who} is working: {:.0} % of a processor, {} per second read and written by its process and its child processes",
                share * 100.0,
                words::bytes(gputrace_schemas::event::Bytes(bytes_per_s)),
            ),
            Work::Idle => format!(
                "{who} is idle: for {quiet} no event, little processor time, and almost nothing read or written"
            ),
            Work::Unknown => format!("{who} has shown no event for {quiet}"),
        }
    }
}
