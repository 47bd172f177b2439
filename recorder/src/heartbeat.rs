//! The heartbeat of a recording ([`Alive`]): that the process lives, since when nothing came of it, and whether it works all the same.
//!
//! Written about every ten seconds, also while nothing happens: a block of 256 bytes then, 2.2 MB a day, else 20 bytes among
//! others. It costs the process nothing. The recorder reads three small files of `/proc` for each process of its family and one for
//! each of its threads: under a millisecond in ten seconds for a process with a hundred threads.

use crate::drain::{Happened, Stamped};
use crate::opened::{of_proc, text_of_proc};
use crate::process::{self, Target};
use crate::ticks::Timeline;
use gputrace_schemas::event::{Alive, Bytes, Nanos};
use std::collections::HashSet;
use std::fs;
use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_nanos(Alive::EVERY.0);
/// `USER_HZ` (`sysconf(_SC_CLK_TCK)`): clock ticks a second in `/proc/PID/stat`, 100 on x86-64 and aarch64.
const NANOS_PER_TICK: u64 = 10_000_000;
/// Processes of the family that are looked at, and threads of each whose children are looked for.
const MOST_PROCESSES: usize = 64;
const MOST_THREADS: usize = 256;

/// Counts what happens between two heartbeats.
pub(crate) struct Heartbeat {
    due: Instant,
    events: u64,
    /// Ticks of the newest; 0 before the first.
    last: u64,
    used: Option<Used>,
}

/// What a process and those it started have used since they began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Used {
    cpu: u64,
    /// Nanoseconds that main threads of processes which live waited for a processor.
    starved: u64,
    /// `None` where the kernel does not show it.
    moved: Option<u64>,
}

impl Heartbeat {
    pub(crate) fn new() -> Heartbeat {
        Heartbeat { due: Instant::now() + EVERY, events: 0, last: 0, used: None }
    }

    /// Something happened in the process.
    pub(crate) fn event(&mut self, stamped: &Stamped) {
        if !matches!(stamped.what, Happened::Backward(_)) {
            self.events += 1;
            self.last = self.last.max(stamped.ticks);
        }
    }

    /// The process was just seen alive: what there is to say of it, if it is time.
    pub(crate) fn beat(&mut self, target: &Target, timeline: &Timeline) -> Option<Alive> {
        let now = Instant::now();
        if now < self.due {
            return None;
        }
        self.due = now + EVERY;
        let used = target.in_proc().and_then(Used::of);
        let since = self.used.zip(used);
        self.used = used;
        let moved = since.and_then(|(before, now)| Some(now.moved?.saturating_sub(before.moved?)));
        Some(Alive {
            events: std::mem::take(&mut self.events),
            last: Nanos(if self.last == 0 { 0 } else { timeline.nanos(self.last) }),
            cpu: since.map(|(before, now)| Nanos(now.cpu.saturating_sub(before.cpu))),
            // A child that has ended no longer counts, so the sum may be too low, never too high.
            starved: since.map(|(before, now)| Nanos(now.starved.saturating_sub(before.starved))),
            moved: moved.map(Bytes),
        })
    }
}

impl Used {
    /// Of a process, by its number in the `/proc` that we see, and of those it started; `None` where it is not to be seen.
    fn of(process: u32) -> Option<Used> {
        let mut family = vec![process];
        let mut known: HashSet<u32> = HashSet::from([process, std::process::id()]);
        let mut used = None;
        let mut at = 0;
        while let Some(one) = family.get(at).copied() {
            at += 1;
            // Children that have ended are in their parent's sums.
            if let Some(own) = Used::alone(one) {
                let sum = used.get_or_insert(Used { cpu: 0, starved: 0, moved: Some(0) });
                sum.cpu = sum.cpu.saturating_add(own.cpu);
                sum.starved = sum.starved.saturating_add(starved(one));
                sum.moved = sum.moved.zip(own.moved).map(|(sum, own)| sum.saturating_add(own));
            }
            for child in children(one) {
                if family.len() < MOST_PROCESSES && known.insert(child) {
                    family.push(child);
                }
            }
        }
        used
    }

    fn alone(process: u32) -> Option<Used> {
        let stat = text_of_proc(format!("/proc/{process}/stat")).ok()?;
        let ticks = process::cpu_ticks(&stat)?;
        let moved = text_of_proc(format!("/proc/{process}/io")).ok();
        let moved = moved.and_then(|text| moved_bytes(&text));
        Some(Used { cpu: ticks.saturating_mul(NANOS_PER_TICK), starved: 0, moved })
    }
}

/// Of the main thread, the second number of `/proc/PID/schedstat`: nanoseconds on a run queue (Documentation/scheduler/sched-stats.rst).
/// Other threads wake up for a moment now and then, and on a busy machine wait each time.
fn starved(process: u32) -> u64 {
    let text = text_of_proc(format!("/proc/{process}/schedstat")).unwrap_or_default();
    text.split_ascii_whitespace().nth(1).and_then(|nanos| nanos.parse().ok()).unwrap_or(0)
}

/// `rchar` and `wchar` of `/proc/PID/io`: what went through reads and writes, whatever they were of.
fn moved_bytes(text: &str) -> Option<u64> {
    let number = |name| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
    Some(number("rchar:")?.saturating_add(number("wchar:")?))
}

/// Processes that a process started and that have not ended (`CONFIG_PROC_CHILDREN`; none without it).
fn children(process: u32) -> Vec<u32> {
    let Ok(threads) = fs::read_dir(format!("/proc/{process}/task")) else { return vec![] };
    let mut children = vec![];
    for thread in threads.flatten().take(MOST_THREADS) {
        let Ok(text) = of_proc(thread.path().join("children")) else { continue };
        let text = String::from_utf8_lossy(&text);
        children.extend(text.split_ascii_whitespace().filter_map(|number| number.parse::<u32>().ok()));
    }
    children
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_and_its_children_use_is_counted_once_and_stays_when_they_end() {
        let me = std::process::id();
        let before = Used::of(me).expect("we are there");
        // Runs until it has used three ticks of processor time, so the test does not depend on how busy the machine is.
        let script = "while [ $(cut -d' ' -f14 /proc/$$/stat) -lt 3 ]; do :; done; head -c 2000000 /dev/zero | cat >/dev/null";
        let status = std::process::Command::new("sh").args(["-c", script]).status().expect("sh runs");
        assert!(status.success());
        let after = Used::of(me).expect("we are there");
        assert!(after.cpu >= before.cpu + 3 * NANOS_PER_TICK, "{before:?} {after:?}");
        if let (Some(before), Some(after)) = (before.moved, after.moved) {
            assert!(after >= before + 4_000_000, "{before} {after}");
        }
    }

    #[test]
    fn files_of_proc_are_read_as_the_kernel_writes_them() {
        assert_eq!(moved_bytes("rchar: 4292\nwchar: 8\nsyscr: 12\nsyscw: 0\nread_bytes: 0\n"), Some(4300));
        assert_eq!(moved_bytes("rchar: 4292\n"), None);
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 100 20 3 1 20 0 1 0 99 1 1";
        assert_eq!(process::cpu_ticks(stat), Some(124));
    }
}
