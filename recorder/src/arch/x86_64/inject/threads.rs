//! Which thread of the other process can be borrowed for a moment, and when: one that is at a call into the kernel, and not inside of
//! the loader, of an allocator, of `fork` or of a signal handler, so that what it is given to do meets nothing half done.

use super::super::ptrace::{Held, Registers, Stop, Urgent};
use super::chain::Pieces;
use super::image::{Image, bytes, word};
use super::maps::{Map, Maps};
use super::waits::{Call, Effect, Sleep};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::ops::Range;
use std::time::{Duration, Instant};

/// What the kernel answers itself when a call was interrupted and is to be made again (linux/errno.h).
const AGAIN: [i64; 3] = [-512, -513, -514];
/// The same, for calls that then wait for the rest of their time.
const AGAIN_FOR_THE_REST: i64 = -516;
const INTERRUPTED: i64 = -(libc::EINTR as i64);
/// What stands for the answer where a call begins.
const BEGINS: i64 = -(libc::ENOSYS as i64);
/// How long it may take to stop: it may have to wait for a processor.
const STOPS: Duration = Duration::from_secs(1);
/// A call that began after the look before this one has only just begun, if that is no longer ago.
pub(super) const JUST: Duration = Duration::from_millis(10);
/// Looks at a thread that runs, before it is stopped, the pause between two, and the time for all.
const LOOKS: u32 = 30;
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);
const LOOKS_WITHIN: Duration = Duration::from_millis(500);
/// How much room the stack must have, for what the thread is given to do.
const ROOM: u64 = 64 << 10;
/// How many words of the stack are looked at for frames that must not be there.
const LOOKED_AT: usize = 128;
/// What a thread has had of a processor once it has certainly made the few calls that it was given, or has begun: these take some
/// tenths of a millisecond.
const ENOUGH: Duration = Duration::from_millis(20);
/// Bytes of a stack in which a chain, and what a thread that has not begun knows of its begin, certainly lie: a new thread's stack.
const WHOLE: u64 = super::STACK;

/// Calls at whose begin a thread may be borrowed: none that allocators, the loader or threads at their begin and end make.
const BEGINNINGS: [i64; 35] = [
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_stat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_lseek,
    libc::SYS_access,
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_ioctl,
    libc::SYS_fcntl,
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_getrusage,
    libc::SYS_gettimeofday,
    libc::SYS_clock_gettime,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_futex,
    libc::SYS_wait4,
    libc::SYS_epoll_wait,
];
/// Functions of the C library inside of which a thread is not borrowed.
const NEVER_INSIDE: [&str; 26] = [
    "malloc",
    "free",
    "calloc",
    "realloc",
    "reallocarray",
    "memalign",
    "aligned_alloc",
    "posix_memalign",
    "valloc",
    "pvalloc",
    "malloc_trim",
    "mallopt",
    "fork",
    "_Fork",
    "vfork",
    "posix_spawn",
    "posix_spawnp",
    "pthread_create",
    "pthread_exit",
    "exit",
    "_exit",
    "dlopen",
    "dlclose",
    "dlsym",
    "dl_iterate_phdr",
    "__tls_get_addr",
];
/// Calls that wait for what comes from outside. No allocator makes them, nor does the loader but where it lets a library begin, and then it
/// holds nothing that a new thread needs: what looks like a frame of these was left on the stack by an earlier call.
const WAITS_FOR_OTHERS: [i64; 7] = [
    libc::SYS_read,
    libc::SYS_poll,
    libc::SYS_select,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_recvmsg,
    libc::SYS_epoll_wait,
];
/// Of [`NEVER_INSIDE`], those inside of which a program may wait for others all the same.
const NEVER_WAITING_INSIDE: [&str; 6] = ["fork", "_Fork", "vfork", "exit", "_exit", "pthread_exit"];
/// Functions of the C library that wait for other threads, and hold nothing meanwhile.
const WAITING: [&str; 9] = [
    "pthread_cond_wait",
    "pthread_cond_timedwait",
    "pthread_cond_clockwait",
    "sem_wait",
    "sem_timedwait",
    "sem_clockwait",
    "pthread_join",
    "pthread_barrier_wait",
    "syscall",
];

/// A thread that stands still at a call into the kernel, and the registers with which it makes that call.
pub(super) struct Borrowed {
    pub(super) held: Held,
    pub(super) registers: Registers,
    /// Since when: a moment before.
    pub(super) since: Instant,
}

/// What is known of the process in which threads are looked for.
pub(super) struct Ground<'a> {
    pub(super) pid: u32,
    pub(super) memory: &'a File,
    pub(super) c_library: &'a Image,
    pub(super) pieces: Pieces,
}

/// What came of one thread.
pub(super) enum Found {
    Yes(Box<Borrowed>),
    /// It may be at another place soon.
    NotNow,
    /// The kernel does not let us.
    Refused(rustix::io::Errno),
}

/// The threads of a process.
pub(super) fn listed(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

/// Why a thread may be stopped.
#[derive(Clone, Copy)]
pub(super) struct Chosen {
    /// What that does to the call in which it sleeps; `None` for one that runs.
    pub(super) effect: Option<Effect>,
    /// When that is over.
    pub(super) until: Option<Instant>,
}

/// Threads by when they may be borrowed.
#[derive(Default)]
pub(super) struct Sorted {
    /// At any time: those first that wait in a call that can be made again.
    pub(super) waiting: Vec<(u32, Chosen)>,
    /// They run, in the kernel or outside.
    pub(super) running: Vec<u32>,
    /// Only when they have just begun to wait.
    pub(super) anew: Vec<u32>,
}

impl Sorted {
    pub(super) fn of(pid: u32) -> Sorted {
        let (mut sorted, mut resumed) = (Sorted::default(), Vec::new());
        for thread in listed(pid) {
            match effect_on(pid, thread) {
                effect @ Some(Effect::Same) => sorted.waiting.push((thread, Chosen { effect, until: None })),
                effect @ Some(Effect::Resumed) => resumed.push((thread, Chosen { effect, until: None })),
                None => sorted.running.push(thread),
                Some(Effect::Anew) => sorted.anew.push(thread),
                Some(Effect::Parts | Effect::Ends) => {}
            }
        }
        sorted.waiting.append(&mut resumed);
        sorted
    }
}

/// Those of the running threads that work on, and are not seen to wait in calls that a stop would end: nobody can see that a thread which runs
/// is in the middle of such a call, as one that writes to a full pipe. `writers` are those that were ever seen in a call that works in parts.
pub(super) fn without_writers(pid: u32, running: Vec<u32>, writers: &mut BTreeSet<u32>) -> Vec<u32> {
    let ran = |thread: u32| ran(pid, thread);
    let mut looked: Vec<_> = running.into_iter().map(|thread| (thread, ran(thread), 0)).collect();
    let until = Instant::now() + LOOKS_WITHIN;
    while looked.iter().any(|(_, _, n)| *n < LOOKS) && Instant::now() < until {
        std::thread::sleep(BETWEEN_LOOKS);
        looked.retain(|(thread, ..)| match effect_on(pid, *thread) {
            Some(Effect::Parts) => {
                writers.insert(*thread);
                false
            }
            effect => effect != Some(Effect::Ends) && !writers.contains(thread),
        });
        for (thread, before, n) in &mut looked {
            // One that got no processor meanwhile has shown nothing.
            let now = ran(*thread);
            if now.is_none() || now != *before {
                (*before, *n) = (now, *n + 1);
            }
        }
    }
    looked.into_iter().filter(|(_, _, n)| *n >= LOOKS).map(|(thread, ..)| thread).collect()
}

/// What the thread has had of a processor, in nanoseconds.
fn ran(pid: u32, thread: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{thread}/schedstat")).unwrap_or_default();
    text.split_whitespace().next().and_then(|time| time.parse().ok())
}

/// Which threads cannot be about to do what an attacher gave them, because they wait elsewhere or have run for long enough since. Only for
/// who knows that no attacher is at work.
#[derive(Default)]
pub(super) struct Settling {
    settled: BTreeSet<u32>,
    /// What the others had had of a processor at the first look.
    ran: BTreeMap<u32, u64>,
}

impl Settling {
    /// Looks once more; whether that is all of them. A thread that begins meanwhile is looked at, too: one that is settled may have
    /// made it before it was. `pages` is code that threads were to begin in.
    pub(super) fn look(&mut self, ground: &Ground<'_>, maps: &Maps, pages: &[Range<u64>]) -> bool {
        let mut are_all = true;
        for thread in listed(ground.pid) {
            if self.settled.contains(&thread) {
                continue;
            }
            let now = ran(ground.pid, thread).unwrap_or(0);
            let before = *self.ran.entry(thread).or_insert(now);
            let has_run = Duration::from_nanos(now.saturating_sub(before)) >= ENOUGH;
            if has_run || crate::process::is_going(thread) || ground.waits_elsewhere(thread, maps, pages) {
                self.settled.insert(thread);
            } else {
                are_all = false;
            }
        }
        // Threads that were made since the list was.
        are_all && listed(ground.pid).iter().all(|thread| self.settled.contains(thread))
    }
}

/// What a stop does to the call in which the thread sleeps; `None` for one that does not sleep.
fn effect_on(pid: u32, thread: u32) -> Option<Effect> {
    let sleep = Sleep::of(pid, thread)?;
    if sleep.is_deep {
        return Some(Effect::Ends);
    }
    let call = Call::of(pid, thread).filter(|call| sleep.is_asleep && call.number >= 0)?;
    Some(call.when_stopped(pid))
}

/// Waits until one of these threads has just begun another call, whose time may begin anew.
pub(super) fn just_begun(
    pid: u32,
    threads: &[u32],
    patience: Duration,
    every: Duration,
) -> Option<(u32, Chosen)> {
    let until = Instant::now() + patience;
    let look = || threads.iter().map(|thread| Sleep::of(pid, *thread)).collect::<Vec<_>>();
    let mut before = (Instant::now(), look());
    while Instant::now() < until {
        std::thread::sleep(every);
        let now = (Instant::now(), look());
        let begun = before.1.iter().zip(&now.1).zip(threads).find(|((before, now), thread)| {
            matches!((before, now), (Some(before), Some(now)) if now.times != before.times)
                && effect_on(pid, **thread) == Some(Effect::Anew)
        });
        if let Some((_, thread)) = begun
            && before.0.elapsed() < JUST
        {
            return Some((*thread, Chosen { effect: Some(Effect::Anew), until: Some(before.0 + JUST) }));
        }
        before = now;
    }
    None
}

impl Ground<'_> {
    /// Borrows the thread if it is, or soon comes, where that does no harm. It has been chosen by [`Sorted`] or [`just_begun`]. The caller's
    /// thread ends soon ([`apart`](super::super::ptrace::apart)).
    pub(super) fn borrow(&self, thread: u32, chosen: Chosen, maps: &Maps, patience: Duration) -> Found {
        // Nobody comes between the last look and the stop.
        let urgent = Urgent::begin();
        let mut held = match Held::seize(thread) {
            Ok(held) => held,
            Err(rustix::io::Errno::SRCH) => return Found::NotNow,
            Err(error) => return Found::Refused(error),
        };
        let since = Instant::now();
        // Its number may be another process's by now; from here on it stays whose it is.
        if !is_thread_of(self.pid, thread) {
            held.leave();
            return Found::NotNow;
        }
        let is_late = chosen.until.is_some_and(|until| Instant::now() > until);
        if is_late || effect_on(self.pid, thread) != chosen.effect {
            held.leave();
            return Found::NotNow;
        }
        if held.interrupt().is_err() {
            return Found::NotNow;
        }
        drop(urgent);
        let Some(stop) = held.wait(Instant::now() + STOPS) else {
            // The end of its tracer takes the wish back.
            held.leave();
            return Found::NotNow;
        };
        let Ok(mut registers) = held.registers() else { return Found::NotNow };
        if stop == Stop::Group {
            return Found::NotNow;
        }
        if stop == Stop::Asked && self.was_interrupted(thread, &mut registers) {
            if self.is_safe(thread, &registers, maps) {
                return Found::Yes(Box::new(Borrowed { held, registers, since }));
            }
            // A call that ends early because of us is made again.
            if registers.orig_rax == u64::MAX {
                let _ = held.set_registers(&registers);
            }
            return Found::NotNow;
        }
        self.at_next_call(held, thread, maps, patience)
    }

    /// Whether it was in a call that is to be made again. If the kernel does so, and the call would not be the same, it is not.
    fn was_interrupted(&self, thread: u32, registers: &mut Registers) -> bool {
        let (number, answer) = (registers.orig_rax as i64, registers.rax as i64);
        let r = &registers;
        let call = Call { number, arguments: [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9] };
        let is_again = AGAIN.contains(&answer) || answer == AGAIN_FOR_THE_REST;
        // Some calls say that they were interrupted where no handler ran (signal(7)): that was our doing.
        let is_ours = answer == INTERRUPTED && number >= 0 && !has_signals(self.pid, thread);
        if !(is_again && call.is_same(self.pid) || is_ours) {
            return false;
        }
        registers.rip -= 2;
        registers.rax = number as u64;
        registers.orig_rax = u64::MAX;
        true
    }

    /// Where it runs: at the next call that it begins.
    fn at_next_call(&self, mut held: Held, thread: u32, maps: &Maps, patience: Duration) -> Found {
        let until = Instant::now() + patience;
        while Instant::now() < until && held.go_on_to_call().is_ok() {
            match held.wait(until) {
                Some(Stop::Call) => {}
                Some(Stop::Asked | Stop::Signal) => continue,
                Some(Stop::Over | Stop::Group) => return Found::NotNow,
                None => break,
            }
            let since = Instant::now();
            let Ok(mut registers) = held.registers() else { return Found::NotNow };
            if registers.rax as i64 != BEGINS || !BEGINNINGS.contains(&(registers.orig_rax as i64)) {
                continue;
            }
            // Made again, it is as it would have been.
            registers.rip -= 2;
            registers.rax = registers.orig_rax;
            if self.is_safe(thread, &registers, maps) {
                return Found::Yes(Box::new(Borrowed { held, registers, since }));
            }
        }
        held.leave();
        Found::NotNow
    }

    /// Whether the thread, which is about to make a call into the kernel, can be given something else to do.
    fn is_safe(&self, thread: u32, registers: &Registers, maps: &Maps) -> bool {
        let at = |address: u64| maps.at(address);
        let is_call = bytes(self.memory, registers.rip, 2).is_some_and(|code| code == [0x0f, 0x05]);
        let (Some(code), Some(stack)) = (at(registers.rip), at(registers.rsp)) else { return false };
        // Where signals wait, a handler would run in between.
        if !is_call || is_forbidden(code) || !stack.is_writable() || has_signals(self.pid, thread) {
            return false;
        }
        // It may have come since the last look, and end the process for our calls.
        if is_filtered(self.pid, thread) {
            return false;
        }
        if !self.has_room(thread, registers, stack) {
            return false;
        }
        let n = usize::try_from((stack.end - registers.rsp) / 8).unwrap_or(0).min(LOOKED_AT);
        let Some(words) = bytes(self.memory, registers.rsp, n * 8) else { return false };
        let words: Vec<u64> = words.chunks_exact(8).filter_map(|it| word(it, 0)).collect();
        let is_inside = |names: &[&str], address: u64| {
            names.iter().any(|name| {
                self.c_library.function(name).is_some_and(|code| code.start < address && address <= code.end)
            })
        };
        let returns =
            |address: u64| maps.at(address).is_some_and(Map::is_code) && self.follows_a_call(address);
        let waits = WAITS_FOR_OTHERS.contains(&(registers.rax as i64));
        let never: &[&str] = if waits { &NEVER_WAITING_INSIDE } else { &NEVER_INSIDE };
        let is_bad = |address: &u64| {
            // The frame of a signal handler: it may have interrupted anything.
            *address == self.pieces.restore
                || (!waits && at(*address).is_some_and(is_loader) && returns(*address))
                || (is_inside(never, *address) && returns(*address))
        };
        if words.iter().any(is_bad) || is_inside(&NEVER_INSIDE, registers.rip) {
            return false;
        }
        // A lock that is waited for, or given back, may be one of an allocator's.
        let in_c_library = self.c_library.code.iter().any(|code| code.contains(&registers.rip));
        registers.rax as i64 != libc::SYS_futex
            || !in_c_library
            || is_inside(&WAITING, registers.rip)
            || words.iter().any(|address| is_inside(&WAITING, *address) && returns(*address))
    }

    /// Whether the thread sleeps, and nothing on its stack leads back to a chain of calls or to these pages. A frame of a signal handler looks as
    /// a chain does, and what an earlier one has left on a stack as one that goes on: then it does not.
    fn waits_elsewhere(&self, thread: u32, maps: &Maps, pages: &[Range<u64>]) -> bool {
        let before = Sleep::of(self.pid, thread).filter(|sleep| sleep.is_asleep);
        let Some((stack, at)) = place(self.pid, thread) else { return false };
        let Some(map) = maps.at(stack) else { return false };
        let n = usize::try_from((map.end - stack).min(WHOLE) / 8).unwrap_or(0) * 8;
        let Some(words) = bytes(self.memory, stack, n) else { return false };
        let leads_back = |address: u64| {
            address == self.pieces.restore || pages.iter().any(|pages| pages.contains(&address))
        };
        let mut words = words.chunks_exact(8).filter_map(|it| word(it, 0));
        // It has slept all the time.
        !leads_back(at) && !words.any(leads_back) && before.is_some() && before == Sleep::of(self.pid, thread)
    }

    /// Whether the stack pointer is in the thread's own stack, and that has room below.
    fn has_room(&self, thread: u32, registers: &Registers, stack: &Map) -> bool {
        if registers.rsp - stack.start < ROOM / 2 {
            return false;
        }
        if thread == self.pid {
            // The kernel makes this one larger.
            return stack.path == "[stack]";
        }
        // What the C library keeps of a thread lies at the top of its stack. A coroutine's is elsewhere.
        registers.rsp - stack.start >= ROOM
            && registers.fs_base > registers.rsp
            && stack.contains(registers.fs_base)
    }

    /// Whether the instruction before is a call: what else leads there is not where a function returns to.
    fn follows_a_call(&self, address: u64) -> bool {
        let Some(code) = address.checked_sub(7).and_then(|at| bytes(self.memory, at, 7)) else {
            return false;
        };
        // E8 and four bytes, or FF /2 with its two to seven (Intel SDM 2A, CALL).
        code[2] == 0xe8 || (0..6).any(|at| code[at] == 0xff && code[at + 1] & 0x38 == 0x10)
    }
}

/// The loader's code, and our own.
fn is_forbidden(map: &Map) -> bool {
    is_loader(map) || is_of(map, &["libgputrace.so", "memfd:gputrace"])
}

/// The loader's code. Our own does not matter further up: it holds no lock while others work for it, and what an earlier call has left on a
/// stack looks as one that goes on.
fn is_loader(map: &Map) -> bool {
    is_of(map, &["ld-linux", "ld-2.", "ld.so"])
}

fn is_of(map: &Map, names: &[&str]) -> bool {
    let name = map.path.rsplit('/').next().unwrap_or_default();
    names.iter().any(|it| name.starts_with(it))
}

/// Where the stack and the code of a thread are that does not run, by the last two words of what the kernel says (proc(5)).
fn place(pid: u32, thread: u32) -> Option<(u64, u64)> {
    let line = fs::read_to_string(format!("/proc/{pid}/task/{thread}/syscall")).ok()?;
    let mut words = line.split_whitespace().rev();
    let mut next = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let (code, stack) = (next()?, next()?);
    Some((stack, code))
}

/// Whether a thread is one of this process.
fn is_thread_of(pid: u32, thread: u32) -> bool {
    fs::exists(format!("/proc/{pid}/task/{thread}")).unwrap_or(false)
}

/// Whether a thread is under a filter of system calls (seccomp(2)).
pub(super) fn is_filtered(pid: u32, thread: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default();
    status.lines().find_map(|line| line.strip_prefix("Seccomp:")).is_some_and(|mode| mode.trim() != "0")
}

/// Whether a signal waits to be taken. In doubt one does.
fn has_signals(pid: u32, thread: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).unwrap_or_default();
    let set = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    match (set("SigPnd:"), set("ShdPnd:"), set("SigBlk:")) {
        (Some(own), Some(shared), Some(blocked)) => (own | shared) & !blocked != 0,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::ptrace::apart;
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_thread_whose_number_is_another_processs_by_now_is_not_interrupted() {
        let mut other = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat");
        let thread = other.id();
        let sleep = || Sleep::of(thread, thread).expect("it lives");
        while Call::of(thread, thread).is_none_or(|call| call.number != libc::SYS_read) || !sleep().is_asleep
        {
            std::thread::yield_now();
        }
        let before = sleep();
        let pid = std::process::id();
        let memory = File::open("/proc/self/mem").expect("our own");
        let maps = Maps::of(pid).expect("our own");
        let c_library = maps.base("libc.so.6").and_then(|base| Image::read(&memory, base));
        let c_library = c_library.expect("this program's");
        let ground =
            Ground { pid, memory: &memory, c_library: &c_library, pieces: Pieces { restore: 0, call: 0 } };
        // As it is chosen while it is one of the process's, and runs.
        let chosen = Chosen { effect: None, until: None };
        let borrowed = || matches!(ground.borrow(thread, chosen, &maps, Duration::ZERO), Found::NotNow);
        assert!(apart(borrowed).expect("a thread"));
        // One that was stopped would have begun to wait once more.
        assert_eq!(sleep(), before);
        other.kill().and_then(|()| other.wait()).expect("its end");
    }

    #[test]
    fn a_process_is_not_settled_while_a_thread_of_it_may_come_back_to_a_chain() {
        // As the address to which each call of a chain returns; no other stack of this process has it.
        let restore = 0x5eed_0000_0000_0000 | u64::from(std::process::id());
        let (memory, pid) = (File::open("/proc/self/mem").expect("our own"), std::process::id());
        let maps = || Maps::of(pid).expect("our own");
        let c_library = maps().base("libc.so.6").and_then(|base| Image::read(&memory, base));
        let c_library = c_library.expect("this program's");
        let ground =
            Ground { pid, memory: &memory, c_library: &c_library, pieces: Pieces { restore, call: 0 } };
        let (tells, told) = std::sync::mpsc::channel();
        let (begins, begun) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let words = std::hint::black_box([restore; 64]);
            begins
                .send(rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned())
                .expect("it is waited for");
            let _: Result<(), _> = told.recv();
            std::hint::black_box(words);
        });
        let waits = begun.recv().expect("it begins");
        while Call::of(pid, waits).is_none_or(|call| call.number != libc::SYS_futex) {
            std::thread::yield_now();
        }
        let mut settling = Settling::default();
        // This thread has had its share of a processor by then, and all the others wait or have, too.
        let begin = Instant::now();
        while !settling.settled.contains(&rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned()) {
            assert!(!settling.look(&ground, &maps(), &[]));
            assert!(begin.elapsed() < Duration::from_secs(600), "it never had a processor");
        }
        assert!(!settling.settled.contains(&waits));
        tells.send(()).expect("it waits");
        thread.join().expect("its end");
        while !settling.look(&ground, &maps(), &[]) {
            assert!(begin.elapsed() < Duration::from_secs(600), "somebody never settles");
        }
    }
}
