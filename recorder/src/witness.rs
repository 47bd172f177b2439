//! Answers questions that the traced process cannot ask for itself: a sandbox that it put on itself may forbid the calls.
//!
//! The recorder is outside of any sandbox that came after it was started. A thread of it looks at the process every few
//! milliseconds, so that a long pass over the ring holds up no answer; where no thread can be started, the recording loop looks.

use crate::growth::Growth;
use crate::guarded;
use crate::map_file::MapFile;
use crate::opened::text_of_proc;
use crate::{memory, pidfd, process};
use gputrace_ring::map::{
    ACCOMPANIED, ALONE, COMPLETE, EXITING, ExitLine, FAILED, Header, LEAVE, MAX_THREADS, Map, N_EXTENTS,
    RUNNING, SANDBOXED, STRANGER, UNDECIDED,
};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::thread::futex;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Scope;
use std::time::{Duration, Instant};

/// Between two looks, up to an age of the recording: a process at its end waits for the answer with a busy processor.
const PAUSES: [(Duration, Duration); 2] = [
    // What a short program waits at its end is most of its time.
    (Duration::from_millis(25), Duration::from_micros(200)),
    (Duration::from_secs(2), Duration::from_millis(2)),
];
/// The same later: a process ends once, and hundreds of looks a second are a cost on machines with many ranks.
const LATER_PAUSE: Duration = Duration::from_millis(8);
/// The same while threads ask what they may do: each waits for its answer with a busy processor.
const ASKED_PAUSE: Duration = Duration::from_micros(50);
/// For how long after a question more of them are expected.
const ASKED_FOR: Duration = Duration::from_millis(100);

/// How often the filters of one thread are read, for the trace: its `status` takes about 40 µs to read. A thread that wants to make a
/// call asks for itself.
const SANDBOX_EVERY: Duration = Duration::from_millis(50);
/// How often mappings that the process was told of are looked at again, and the part of the witness's time that this may take.
const EXTENTS_EVERY: Duration = Duration::from_millis(20);
const EXTENTS_PART: u32 = 20;
/// Bytes of `maps` that are read at most.
const MOST_MAPS: u64 = 64 << 20;
/// For how long they are after a thread has used one.
const EXTENTS_USED_FOR: Duration = Duration::from_secs(1);
/// How often holders of thread lines are looked for where no line has changed hands since the last time.
const HOLDERS_EVERY: Duration = Duration::from_millis(100);
/// Looking for them takes at most this part of the witness's time.
const HOLDERS_PART: u32 = 20;

/// What the kernel shows about one process.
pub(crate) struct Witness {
    map: Map,
    /// The process's number in its own PID namespace.
    pid: u32,
    /// Its number in the `/proc` that we see.
    in_proc: u32,
    /// Its folder in `/proc`, open: it never leads to another process. `None` where the process is not to be seen.
    folder: Option<File>,
    /// What a thread was allowed when the session began: we were started then, and have it from the process.
    at_start: Option<Sandbox>,
    is_over: AtomicBool,
    looks: Mutex<Looks>,
    growth: Mutex<Growth>,
}

/// What was seen, and what is to be looked at when.
struct Looks {
    holders_at: Instant,
    sandbox_at: Instant,
    /// More questions are expected until then.
    asked_until: Instant,
    extents_at: Instant,
    /// The process is told of mappings until then.
    extents_used_until: Instant,
    /// What can be written in the process, as far as it was seen.
    extents: Vec<(u64, u64)>,
    /// The address whose mapping was wanted last.
    extent_wanted: u64,
    /// Sum of the words of all lines when their holders were looked for.
    words: u64,
    /// By line: word of the claim, and when its thread began.
    holders: HashMap<u32, (u32, Option<u64>)>,
    /// Threads that are looked at for a sandbox, one after the other.
    threads: Vec<u32>,
    is_leaders_turn: bool,
}

impl Witness {
    /// Of the process that writes this ring. `has_its_rights` where the process itself has started us.
    pub(crate) fn new(map: Map, in_proc: Option<u32>, has_its_rights: bool) -> Witness {
        let pid = map.header().pid.load(Ordering::Relaxed);
        let folder = in_proc.and_then(|number| File::open(format!("/proc/{number}")).ok());
        let start_time = map.header().start_time.load(Ordering::Relaxed);
        let is_it = |number| {
            let began = process::stat(number).map(|stat| stat.start_time);
            began.is_some_and(|began| start_time == 0 || began == start_time)
        };
        let own = || text_of_proc("/proc/self/status").ok();
        Witness {
            map,
            pid,
            in_proc: in_proc.unwrap_or(0),
            // Opened first: what is compared is what the descriptor leads to, or a later process.
            folder: folder.filter(|_| in_proc.is_some_and(is_it)),
            at_start: if has_its_rights {
                own().as_deref().and_then(Sandbox::parse)
            } else {
                Some(Sandbox::NONE)
            },
            is_over: AtomicBool::new(false),
            growth: Mutex::new(Growth::new()),
            looks: Mutex::new(Looks {
                holders_at: Instant::now(),
                sandbox_at: Instant::now(),
                asked_until: Instant::now(),
                extents_at: Instant::now(),
                extents_used_until: Instant::now(),
                extents: Vec::new(),
                extent_wanted: 0,
                words: 0,
                holders: HashMap::new(),
                threads: Vec::new(),
                is_leaders_turn: true,
            }),
        }
    }

    /// Looks until [`Watch`] is dropped, by a thread of its own if one can be started.
    pub(crate) fn watch<'scope, 'a: 'scope>(
        &'a self,
        scope: &'scope Scope<'scope, 'a>,
        ring: &'a MapFile,
    ) -> Watch<'a> {
        let recording = std::thread::current();
        let watching = move || {
            let word = &self.map.header().recorder_thread.value;
            memory::mark_end_of_thread(word);
            // A seccomp filter may kill a process for a system call that it does not list.
            if self.at_start.is_some_and(|sandbox| sandbox.mode == 0) {
                pidfd::take_short_turns();
            }
            let began = Instant::now();
            while !self.is_over.load(Ordering::Relaxed) {
                if self.look() == Seen::Exit {
                    // The process sleeps until the trace is complete.
                    recording.unpark();
                }
                // Threads that come and go can use all memory of the ring before the recording loop has begun.
                self.grow(ring);
                let now = Instant::now();
                let is_asked = self.looks.try_lock().is_ok_and(|looks| now < looks.asked_until);
                let by_age = PAUSES.iter().find(|(age, _)| now - began < *age);
                std::thread::sleep(match by_age {
                    _ if is_asked => ASKED_PAUSE,
                    Some((_, pause)) => *pause,
                    None => LATER_PAUSE,
                });
            }
            word.store(0, Ordering::Relaxed);
        };
        // Where it is refused, the recording loop looks, though less often.
        let _ = guarded::spawn_scoped(scope, "gputrace-witness", watching);
        Watch(self)
    }

    /// Gives the ring of a process that runs more memory, if it is time for that, and looks after each piece of it.
    pub(crate) fn grow(&self, ring: &MapFile) {
        while self.folder.is_some()
            && self.map.header().process.value.load(Ordering::Acquire) == RUNNING
            && self.growth.try_lock().is_ok_and(|mut growth| growth.step(ring))
        {
            self.look();
        }
    }

    /// Answers what was asked, and looks at what is due.
    pub(crate) fn look(&self) -> Seen {
        let seen = self.answer_exit();
        // Whoever looks already does so for all.
        let Ok(mut looks) = self.looks.try_lock() else { return seen };
        let now = Instant::now();
        let has_asked = self.answer_question();
        if self.answer_stack(&mut looks) || has_asked {
            looks.asked_until = now + ASKED_FOR;
        }
        if now >= looks.sandbox_at {
            looks.sandbox_at = now + SANDBOX_EVERY;
            self.look_for_sandbox(&mut looks);
        }
        self.look_for_extents(&mut looks, now);
        self.look_for_holders(&mut looks, now);
        seen
    }

    /// Whether one of the threads may not do any more what it might when the session began.
    fn look_for_sandbox(&self, looks: &mut Looks) {
        let line = &self.map.header().sandbox;
        if line.state.load(Ordering::Relaxed) == SANDBOXED {
            return;
        }
        // A filter is put on by the first thread mostly, and reaches all of them, or those that it starts afterwards.
        let next = if looks.is_leaders_turn { None } else { looks.threads.pop() };
        looks.is_leaders_turn = !looks.is_leaders_turn;
        if looks.threads.is_empty() {
            looks.threads = self.threads().unwrap_or_default();
        }
        if self.is_as_before(next.unwrap_or(self.in_proc)) == Some(false) {
            line.state.store(SANDBOXED, Ordering::Release);
        }
    }

    /// Whether the thread may do what it might when the session began; `None` for one that is gone, or that nothing is known of.
    fn is_as_before(&self, thread: u32) -> Option<bool> {
        let now = Sandbox::parse(&self.status(thread)?)?;
        Some(now.allows_what(self.at_start?))
    }

    /// Tells the thread that asks whether it may make a call; whether there was a question.
    fn answer_question(&self) -> bool {
        let line = &self.map.header().sandbox;
        let looks = line.looks.load(Ordering::Relaxed).wrapping_add(1).max(1);
        line.looks.store(looks, Ordering::Relaxed);
        // SYNC: what the thread did to itself before it asked shows in its status.
        let question = line.question.load(Ordering::Acquire);
        let answered =
            [&line.allowed, &line.forbidden, &line.unknown].map(|answered| answered.load(Ordering::Relaxed));
        if question == 0 || answered.contains(&question) {
            return false;
        }
        let own_number = (question >> 32) as u32;
        let thread = if self.in_proc == self.pid {
            Some(own_number)
        } else {
            let threads = self.threads().unwrap_or_default();
            threads.into_iter().find(|thread| self.own_number(*thread) == Some(own_number))
        };
        match thread.and_then(|thread| self.is_as_before(thread)) {
            Some(true) => line.allowed.store(question, Ordering::Release),
            Some(false) => line.state.store(SANDBOXED, Ordering::Release),
            None => match self.is_child_as_before(own_number) {
                Some(true) => line.allowed.store(question, Ordering::Release),
                Some(false) => line.forbidden.store(question, Ordering::Relaxed),
                None => line.unknown.store(question, Ordering::Relaxed),
            },
        }
        true
    }

    /// As [`Self::is_as_before`], for a number that is no thread's of this process: a child asks that has no recorder yet, or that shares
    /// the process's memory.
    fn is_child_as_before(&self, number: u32) -> Option<bool> {
        let path = format!("/proc/{number}/status");
        let status = (self.in_proc == self.pid).then(|| text_of_proc(&path).ok()).flatten()?;
        Some(Sandbox::parse(&status)?.allows_what(self.at_start?))
    }

    /// Names the mapping of a stack to the thread that waits for it; whether there was one.
    fn answer_stack(&self, looks: &mut Looks) -> bool {
        let line = &self.map.header().sandbox;
        // SYNC: the stack is mapped.
        let wanted = line.stack_at.load(Ordering::Acquire);
        if wanted == 0 {
            return false;
        }
        looks.extent_wanted = wanted;
        looks.extents_used_until = Instant::now() + EXTENTS_USED_FOR;
        // New mappings mostly have lower addresses than all before. What lies above is as it was.
        let mut extents = self.writable_mappings(wanted);
        let end = extents.last().map_or(0, |(_, end)| *end);
        extents.extend(looks.extents.iter().filter(|(start, _)| *start >= end));
        self.name_extents(looks, extents);
        // SYNC: a thread that sees this count also sees the ranges.
        line.stacks_sought.fetch_add(1, Ordering::Release);
        line.stack_at.store(0, Ordering::Release);
        true
    }

    /// Looks again at what the process was told of mappings, as long as threads use that.
    fn look_for_extents(&self, looks: &mut Looks, now: Instant) {
        if now < looks.extents_at {
            return;
        }
        if self.map.header().extents.take_use() {
            looks.extents_used_until = now + EXTENTS_USED_FOR;
        }
        // Nobody looks after the end whether they are still there.
        let is_used = now < looks.extents_used_until;
        let extents = if is_used { self.writable_mappings(u64::MAX) } else { Vec::new() };
        self.name_extents(looks, extents);
        looks.extents_at = Instant::now() + EXTENTS_EVERY.max(now.elapsed() * EXTENTS_PART);
    }

    fn name_extents(&self, looks: &mut Looks, extents: Vec<(u64, u64)>) {
        // Where there is no room for all: the kernel puts new ones beside the others.
        let last = extents.partition_point(|(start, _)| *start <= looks.extent_wanted);
        let first = last.saturating_sub(N_EXTENTS / 2).min(extents.len().saturating_sub(N_EXTENTS));
        self.map.header().extents.set(extents.get(first..).unwrap_or_default());
        looks.extents = extents;
    }

    /// What can be written in the process, up to the mapping that holds this address.
    fn writable_mappings(&self, until: u64) -> Vec<(u64, u64)> {
        let maps = self.file("maps").and_then(|path| File::open(path).ok());
        maps.map(|maps| writable_mappings(BufReader::new(maps.take(MOST_MAPS)), until)).unwrap_or_default()
    }

    /// Tells the process which holders of thread lines are gone.
    fn look_for_holders(&self, looks: &mut Looks, now: Instant) {
        if now < looks.holders_at {
            return;
        }
        let lines = (0..MAX_THREADS as u32).map(|line| (line, self.map.tenure(line)));
        let words = lines.clone().fold(0_u64, |sum, (_, tenure)| {
            sum.wrapping_mul(31).wrapping_add(tenure.word.load(Ordering::Relaxed).into())
        });
        let is_due = now >= looks.holders_at + HOLDERS_EVERY;
        if words == looks.words && !is_due {
            return;
        }
        // The claims are read before the threads are listed: a thread of a claim that is not listed had ended, or had not begun.
        let claims: Vec<(u32, u32, u32)> =
            lines.filter_map(|(line, tenure)| tenure.claim().map(|(word, tid)| (line, word, tid))).collect();
        looks.words = words;
        if !claims.is_empty()
            && let Some(threads) = self.threads()
        {
            let own: HashSet<u32> = if self.in_proc == self.pid {
                threads.into_iter().collect()
            } else {
                threads.into_iter().filter_map(|thread| self.own_number(thread)).collect()
            };
            looks
                .holders
                .retain(|line, (word, _)| self.map.tenure(*line).word.load(Ordering::Relaxed) == *word);
            for (line, word, tid) in claims {
                let known = looks.holders.get(&line).and_then(|(_, began)| *began);
                let holder = if own.contains(&tid) { Holder::Thread } else { self.elsewhere(tid) };
                // A number that was given to another thread shows in when that began.
                let is_asked = self.in_proc == self.pid && (known.is_none() || is_due);
                let began = is_asked.then(|| process::stat(tid)).flatten().map(|stat| stat.start_time);
                let is_another = known.is_some() && began.is_some() && known != began;
                if holder == Holder::None || is_another {
                    self.map.tenure(line).note_gone(word);
                    looks.holders.remove(&line);
                } else if known.is_none() {
                    looks.holders.insert(line, (word, began));
                }
            }
        }
        looks.holders_at = Instant::now() + now.elapsed() * HOLDERS_PART;
    }

    /// Whether another process has this number, which may share the process's memory. In doubt it has.
    fn elsewhere(&self, tid: u32) -> Holder {
        if self.in_proc != self.pid {
            return Holder::Unknown;
        }
        // Threads of other processes are not listed there, and are found by their number all the same.
        let is_hidden = fs::metadata(format!("/proc/{tid}"))
            .is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound);
        let number = i32::try_from(tid).ok().and_then(Pid::from_raw);
        let is_free = number.is_some_and(|number| test_kill_process(number) == Err(Errno::SRCH));
        if is_hidden && is_free { Holder::None } else { Holder::Unknown }
    }

    fn answer_exit(&self) -> Seen {
        let header = self.map.header();
        // SYNC: the thread's number is there for whoever sees that the process exits.
        if header.process.value.load(Ordering::Acquire) == EXITING
            && header.exit.verdict.load(Ordering::Acquire) == UNDECIDED
        {
            let verdict = self.judge(&header.exit);
            // The recording loop may have come first.
            let _ =
                header.exit.verdict.compare_exchange(UNDECIDED, verdict, Ordering::AcqRel, Ordering::Relaxed);
            return Seen::Exit;
        }
        Seen::Nothing
    }

    /// Whether the exiting thread is the last one, and still has the rights that it had when the session began. In doubt it has not.
    fn judge(&self, exit: &ExitLine) -> u32 {
        let exiting = exit.tid.load(Ordering::Relaxed);
        let Some(threads) = self.threads().filter(|_| exiting != 0) else {
            // Without `/proc`. The end of a namespace's first process is ours as well: the trace would be lost.
            return if self.pid == 1 { ACCOMPANIED } else { LEAVE };
        };
        let Some(it) = threads.iter().find(|thread| self.own_number(**thread) == Some(exiting)) else {
            return STRANGER;
        };
        let now = self.status(*it).as_deref().and_then(Sandbox::parse);
        if !now.zip(self.at_start).is_some_and(|(now, at_start)| now.allows_what(at_start)) {
            return LEAVE;
        }
        let is_other = |thread: &u32| thread != it && !self.is_servant(*thread) && !self.is_over(*thread);
        if threads.iter().any(is_other) { ACCOMPANIED } else { ALONE }
    }

    /// Numbers of the process's threads, as `/proc` has them.
    fn threads(&self) -> Option<Vec<u32>> {
        let folder = fs::read_dir(self.file("task")?).ok()?;
        folder.map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
    }

    /// A thread's number in the process's own PID namespace.
    fn own_number(&self, thread: u32) -> Option<u32> {
        if self.in_proc == self.pid {
            return Some(thread);
        }
        process::numbers(&self.status(thread)?)?.last().copied()
    }

    fn status(&self, thread: u32) -> Option<String> {
        text_of_proc(self.file(&format!("task/{thread}/status"))?).ok()
    }

    fn file(&self, name: &str) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?.as_raw_fd();
        Some(PathBuf::from(format!("/proc/self/fd/{folder}/{name}")))
    }

    /// Whether the thread is one that CUDA's driver made for itself (`cuda-EvtHandlr` and others), or the library's own.
    fn is_servant(&self, thread: u32) -> bool {
        let name = self.file(&format!("task/{thread}/comm")).and_then(|file| fs::read(file).ok());
        name.is_some_and(|name| name.starts_with(b"cuda") || name.starts_with(b"gputrace-"))
    }

    /// Whether the thread will never run a line of the program again: it is gone, or the kernel is taking it down, which on a busy
    /// machine takes longer than its `pthread_join`. In doubt it will.
    fn is_over(&self, thread: u32) -> bool {
        let stat = self.file(&format!("task/{thread}/stat")).map(text_of_proc);
        match stat {
            Some(Ok(stat)) => process::is_ending(&stat),
            Some(Err(error)) => {
                error.kind() == std::io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(Errno::SRCH.raw_os_error())
            }
            None => false,
        }
    }
}

/// What a look has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Seen {
    /// The process has come to its end, and was told what it may do there.
    Exit,
    /// Nothing that the recording loop should hear of.
    Nothing,
}

/// Who has a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Holder {
    /// A thread of the process.
    Thread,
    /// Nobody.
    None,
    /// A thread of another process, or who is not known.
    Unknown,
}

/// The looks go on until this is dropped.
pub(crate) struct Watch<'a>(&'a Witness);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }
}

/// What the trace's state is from now on, for a process that may sleep until then.
pub(crate) fn tell_state(header: &Header, state: u32) {
    header.recorder.value.store(state, Ordering::Release);
    if state == COMPLETE || state == FAILED {
        wake_process(header);
    }
}

/// Wakes whoever sleeps until the recorder's state is another.
pub(crate) fn wake_process(header: &Header) {
    let _ = futex::wake(&header.recorder.value, futex::Flags::empty(), i32::MAX.cast_unsigned());
}

/// What can be read and written, by `/proc/PID/maps`: first byte of each range and the one after the last, up to the range that holds
/// `until`. Mappings that touch are one range.
fn writable_mappings(mut maps: impl BufRead, until: u64) -> Vec<(u64, u64)> {
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    let mut line = Vec::new();
    while maps.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        let text = String::from_utf8_lossy(&line);
        let mapping = text.split_once(' ').and_then(|(range, rest)| {
            let (start, end) = range.split_once('-')?;
            Some((number(start)?, number(end)?, rest.starts_with("rw")))
        });
        if let Some((start, end, is_writable)) = mapping {
            let last = ranges.last_mut().filter(|(_, last)| is_writable && *last == start);
            match last {
                Some((_, last)) => *last = end,
                None if start > until => break,
                None if is_writable => ranges.push((start, end)),
                None => {}
            }
        }
        line.clear();
    }
    ranges
}

/// What `/proc/PID/status` says about filters of system calls (proc(5)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sandbox {
    /// `Seccomp:`, Linux 3.8: 0 none, 1 strict, 2 filters.
    mode: u32,
    /// `Seccomp_filters:`, Linux 5.9.
    n_filters: Option<u32>,
    /// `NoNewPrivs:`, Linux 4.10: who has no privilege needs it to add a filter. In doubt it is set.
    no_new_privileges: bool,
}

impl Sandbox {
    const NONE: Sandbox = Sandbox { mode: 0, n_filters: Some(0), no_new_privileges: false };

    fn parse(status: &str) -> Option<Sandbox> {
        let number = |name: &str| -> Option<u32> {
            status.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok()
        };
        Some(Sandbox {
            mode: number("Seccomp:")?,
            n_filters: number("Seccomp_filters:"),
            no_new_privileges: number("NoNewPrivs:") != Some(0),
        })
    }

    /// Whether a thread with this sandbox may still call what one with the other could. Containers have filters from the start, so that
    /// only those count that came since.
    fn allows_what(self, before: Sandbox) -> bool {
        match (self.n_filters, before.n_filters) {
            _ if self.mode == 0 => true,
            _ if self.mode != before.mode => false,
            (Some(now), Some(before)) => now <= before,
            // Without a count, a new filter of an unprivileged program shows in this alone.
            _ => !self.no_new_privileges,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(mode: u32, n_filters: Option<u32>, no_new_privileges: bool) -> Sandbox {
        Sandbox { mode, n_filters, no_new_privileges }
    }

    #[test]
    fn what_a_container_forbids_from_the_start_is_no_new_sandbox() {
        let none = Sandbox::NONE;
        let docker = sandbox(2, Some(1), false);
        assert!(none.allows_what(none) && docker.allows_what(docker) && none.allows_what(docker));
        assert!(!docker.allows_what(none), "the first filter");
        assert!(!sandbox(2, Some(2), true).allows_what(docker), "a second filter");
        assert!(!sandbox(1, Some(0), false).allows_what(none), "read, write, exit and no more");
    }

    #[test]
    fn before_linux_5_9_a_second_filter_shows_in_the_flag_that_it_needs() {
        let docker = sandbox(2, None, false);
        assert!(docker.allows_what(docker));
        assert!(!sandbox(2, None, true).allows_what(docker));
        assert!(!sandbox(2, None, true).allows_what(sandbox(2, None, true)), "it may have been added since");
    }

    #[test]
    fn memory_that_touches_is_one_range() {
        let maps = "1000-3000 rw-p 00000000 00:00 0 \n3000-4000 rw-s 00000000 00:01 7   /memfd:x\n\
            4000-5000 ---p 00000000 00:00 0 \n5000-6000 rw-p 00000000 00:00 0   [heap]\n\
            6000-7000 r--p 00000000 08:01 12   /lib/x\nnothing\n7f12a000-7f12c000\n";
        assert_eq!(writable_mappings(maps.as_bytes(), u64::MAX), [(0x1000, 0x4000), (0x5000, 0x6000)]);
        assert_eq!(writable_mappings(maps.as_bytes(), 0x1800), [(0x1000, 0x4000)]);
        assert_eq!(writable_mappings(maps.as_bytes(), 0x800), []);
    }

    #[test]
    fn a_status_is_read_by_its_names() {
        let status = "Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\n";
        assert_eq!(Sandbox::parse(status), Some(sandbox(2, Some(3), true)));
        assert_eq!(Sandbox::parse("Name:\tx\nSeccomp:\t0\n"), Some(sandbox(0, None, true)));
        assert_eq!(Sandbox::parse("Name:\tSeccomp:\n"), None, "a kernel without filters says nothing");
    }
}
