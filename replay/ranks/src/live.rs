//! A job that is still running, as far as its traces go: who is alive, and whether a rank that others wait for works or stands still.
//!
//! A hang and a slow step look alike in the calls: one rank has not come yet. Four things tell them apart, all in the traces:
//!
//! - Its own history. A rank that took 30 s from this call to the next before (a checkpoint, an evaluation) may do so again.
//! - Its events. Who asks for memory or launches through the driver is at work elsewhere.
//! - Its processor time and its I/O, which the recorder's heartbeats have: a compilation uses the first, a save the second.
//! - Time. What is none of these and lasts [`HANG_AFTER`] is called a hang; until then it is called a wait.
//!
//! A rank that uses a processor for long without an event is called a hang in the end, too ([`BUSY_TOO_LONG`], `Participant::stays_in`).

use gputrace_analyse::story::NO_END;
use gputrace_schemas::event::{Alive, Nanos};

use super::calls::{Ending, Participant, ReadStack, SameFunction, Sequence};
use super::findings::Place;
use super::show;

/// A rank that shows no sign of work for so long while others wait for it hangs, nanoseconds. NCCL's own watchdog in PyTorch gives up
/// after 600 s.
pub const HANG_AFTER: u64 = 30_000_000_000;
/// A rank that works and shows no event for so long while others wait for it hangs, wherever its thread is, nanoseconds.
pub const BUSY_TOO_LONG: u64 = 30 * 60 * 1_000_000_000;
/// So often must a main thread have been in the same function, and so many times longer must its process have been silent at the last reading
/// than at the first: with `--hang-after 60`, readings after 1, 4 and 10 minutes. NCCL's own watchdog in PyTorch gives up after 10.
const SAME_READINGS: (u32, u64) = (3, 8);
/// Least time that is called waiting while the job runs: what has happened meanwhile may not be in every trace yet.
pub(super) const LEAST_WAIT: i128 = 3_000_000_000;
/// A heartbeat that is older than this when others have newer ones is the last of its recorder: two were missed.
const SILENT: u64 = 2 * Alive::EVERY.0 + 5_000_000_000;
/// Who uses this part of a processor or more works: what watches a process in its own threads (PyTorch's and NCCL's watchdogs, loggers)
/// uses some hundredths; who computes on a machine with ten times as many threads as processors gets a tenth.
const BUSY_SHARE: f64 = 0.1;
/// A process whose main thread is ready to run for this part of the time, or that runs, wants to work, whether or not a busy machine lets it.
const STARVED_SHARE: f64 = 0.5;
/// Who moves so many bytes or more in ten seconds works; loggers and keep-alives move some thousand.
const BUSY_BYTES: u64 = 1 << 20;
/// The first times that a call was followed by another are not held for usual: programs compile and warm up then.
const WARM_UP: usize = 3;

/// What a process does, as its heartbeats say.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Work {
    /// No heartbeat covers that time yet, or none says.
    Unknown,
    /// Nothing that could be seen.
    Idle,
    /// Part of a processor that it uses, and bytes that it moves each second.
    Busy { share: f64, bytes_per_s: u64 },
}

impl Participant {
    /// Whether it was alive when its trace was read: it is not said that it ended, and its recorder writes heartbeats or holds the trace.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.ending == Ending::Unknown && (self.is_written || !self.beats.is_empty())
    }

    /// Its recorder held the trace at `now`, on the trace's clock. Unless it is late, it has written all that happened until then.
    pub fn is_written_until(&mut self, now: Nanos) {
        if self.ending != Ending::Unknown {
            return;
        }
        let newest = self.beats.last().map_or(self.first, |(time, _)| *time);
        self.is_written = true;
        self.recorder_is_late = now.0.saturating_sub(newest.0) > SILENT;
        if self.recorder_is_late {
            return;
        }
        self.end = self.end.max(now);
        self.alive_at = self.alive_at.max(now);
    }

    /// Why its trace may say less than happened. That of a process that runs has no end yet, which is no reason.
    #[must_use]
    pub fn doubts_so_far(&self) -> Option<String> {
        let doubts = self.doubts.clone()?;
        if !self.is_alive() {
            return Some(doubts);
        }
        let rest = doubts.strip_suffix(NO_END).map_or(doubts.as_str(), |rest| rest.trim_end_matches("; "));
        let rest = rest.trim_end_matches("numbers may be wrong: ").trim_end_matches("; ");
        (!rest.is_empty()).then(|| rest.to_owned())
    }

    /// Where its main thread stood still at its end, as its recorder read from outside after all else that is known of it.
    pub(super) fn stands_at(&self) -> Option<&ReadStack> {
        if self.ending == Ending::Exit {
            return None;
        }
        let main = self.read_stacks.first().filter(|read| read.tid == self.process.pid)?;
        (main.time > self.last_seen()).then_some(main)
    }

    /// That in words: the innermost function, and the program's line: `Condition.wait (threading.py:327), called at load (train.py:89)`.
    pub(super) fn stands_in(&self) -> Option<String> {
        let read = self.stands_at()?;
        let innermost = show::frame(read.stack.first()?);
        let called =
            Place::of(self, read.place).map(|place| format!("{} ({})", place.function, place.line_text()));
        let called = called.filter(|called| *called != innermost && !called.starts_with(&innermost));
        Some(match called {
            Some(called) => format!("{innermost}, called at {called}"),
            None => innermost,
        })
    }

    /// The function in which its main thread was each time that its recorder read it in this silence, often enough to say that it stays there.
    pub(super) fn stays_in(&self) -> Option<&SameFunction> {
        let same = self.same_function.as_ref()?;
        let (least, times) = SAME_READINGS;
        let is_long = same.n_readings >= least && same.last.0 / times >= same.first.0;
        // Read after all else that is known of it.
        (is_long && self.stands_at().is_some()).then_some(same)
    }

    /// What it did lately, looking at heartbeats that cover nothing from before `since`.
    pub(super) fn work_since(&self, since: Nanos) -> Work {
        let whole = self.beats.windows(2).rev().find(|pair| pair[0].0 >= since);
        whole.map_or(Work::Unknown, |pair| self.work_in(pair))
    }

    /// What it did between two heartbeats.
    pub(super) fn work_in(&self, pair: &[(Nanos, Alive)]) -> Work {
        let [(begin, _), (end, alive)] = pair else { return Work::Unknown };
        let Some(cpu) = alive.cpu else { return Work::Unknown };
        let nanos = end.0.saturating_sub(begin.0).max(1);
        let share = cpu.0 as f64 / nanos as f64;
        let moved = alive.moved.map_or(0, |moved| moved.0);
        let per = |nanos_of: u64| (u128::from(moved) * u128::from(nanos_of) / u128::from(nanos)) as u64;
        let (bytes_per_s, in_one) = (per(1_000_000_000), per(Alive::EVERY.0));
        let wanted = share + alive.starved.map_or(0.0, |starved| starved.0 as f64 / nanos as f64);
        match share >= BUSY_SHARE || wanted >= STARVED_SHARE || in_one >= BUSY_BYTES {
            true => Work::Busy { share, bytes_per_s },
            false => Work::Idle,
        }
    }

    /// When it last did something that its trace shows.
    pub(super) fn last_seen(&self) -> Nanos {
        let seen = [&self.last_call, &self.last_event].into_iter().flatten().map(|seen| seen.time);
        let counted = self.beats.last().map(|(_, alive)| alive.last);
        seen.chain(counted).max().unwrap_or_default()
    }
}

/// The recorder of this process, or its machine, stopped before the others: how long before. `None` of one that goes on or has ended.
pub(super) fn stopped_before(one: &Participant, others: &[Participant]) -> Option<u64> {
    if one.ending != Ending::Unknown || one.beats.is_empty() {
        return None;
    }
    let same_clock = others.iter().filter(|other| other.process.boot == one.process.boot);
    let newest = same_clock.filter(|other| other.is_alive()).map(|other| other.end.0).max()?;
    newest.checked_sub(one.end.0).filter(|silent| *silent > SILENT)
}

/// The longest that it took from a call of this kind to the next, once the program had warmed up; `None` where that is not known.
pub(super) fn longest_after(sequence: &Sequence, kind: u32) -> Option<u64> {
    let kinds = sequence.kinds.iter().zip(sequence.enters.windows(2));
    let after = kinds.filter(|(it, _)| **it == kind).skip(WARM_UP);
    after.map(|(_, pair)| pair[1].0.saturating_sub(pair[0].0)).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_schemas::event::Bytes;

    #[test]
    fn the_longest_pause_after_a_call_leaves_out_the_warm_up() {
        let mut calls = Sequence::default();
        let mut now = 0;
        for (n, pause) in [90, 1, 1, 2, 30, 2].into_iter().enumerate() {
            calls.set(2 * n as u64, 0, Nanos(now));
            calls.set(2 * n as u64 + 1, 1, Nanos(now + 1));
            now += 1 + pause;
        }
        assert_eq!(longest_after(&calls, 1), Some(30));
        assert_eq!(longest_after(&calls, 0), Some(1));
        assert_eq!(longest_after(&calls, 7), None);
    }

    #[test]
    fn only_heartbeats_that_lie_within_a_wait_say_what_is_done_in_it() {
        let beat = |seconds: u64, cpu_ms: u64, moved: u64| {
            let cpu = Some(Nanos(cpu_ms * 1_000_000));
            (Nanos(seconds * 1_000_000_000), Alive { cpu, moved: Some(Bytes(moved)), ..Alive::default() })
        };
        let mut one = crate::tests::participants(&["init:w AR8@10"]).remove(0);
        // Ready to run for most of the time, on a machine that has no processor for it.
        one.beats = vec![beat(10, 100, 0), beat(20, 100, 0)];
        one.beats[1].1.starved = Some(Nanos(8_000_000_000));
        assert!(matches!(one.work_since(Nanos(0)), Work::Busy { share: 0.01, .. }));
        one.beats = vec![beat(10, 9000, 0), beat(20, 9000, 0), beat(30, 100, 4000), beat(40, 100, 2 << 20)];
        let since = |seconds: u64| one.work_since(Nanos(seconds * 1_000_000_000));
        assert!(matches!(since(15), Work::Busy { bytes_per_s: 209_715, .. }), "{:?}", since(15));
        one.beats.pop();
        let since = |seconds: u64| one.work_since(Nanos(seconds * 1_000_000_000));
        assert_eq!(since(15), Work::Idle);
        assert_eq!(since(25), Work::Unknown);
        one.beats.pop();
        assert!(matches!(one.work_since(Nanos(0)), Work::Busy { share, .. } if share == 0.9));
    }
}
