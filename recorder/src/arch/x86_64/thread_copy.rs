//! A thread of another process at one moment: its registers and a copy of its stack, to be unwound afterwards.
//!
//! **A thread that waits is not stopped.** `/proc/PID/task/TID/syscall` has its stack pointer and where it is; its stack is read
//! from `/proc/PID/mem`. The kernel counts how often it has switched away from a thread: while that number stays the same, and the thread
//! waits before and after, it did not run in between, and what was read is of one moment.
//!
//! **A thread that runs is stopped** (ptrace(2): seized, without a signal) for as long as it takes to read its registers and at most
//! [`MOST_STACK`] of its stack. It is let go before anything else is done. If we are killed in between, the kernel lets it go. A waiting thread is stopped only
//! if its stack cannot be followed without its registers, and only in a call that the kernel takes up again by itself ([`RESUMED`]).
//!
//! Not stopped: a thread that another tracer has, one that is stopped (`SIGSTOP`), one that waits in the kernel and cannot be
//! interrupted (`D`: also the parent of `vfork`).

use super::foreign::Foreign;
use super::ptrace::{Held, Stop, Urgent};
use super::unwind::{Moment, RBP, RBX, RIP, RSP, Registers};
use crate::opened::text_of_proc;
use crate::thread_stack::How;
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// Bytes of a stack that are copied at most. Stacks of PyTorch with 60 frames take some 20 KiB.
const MOST_STACK: usize = 128 << 10;
/// Readings of a thread that waits before it is taken for one that runs.
const MOST_READINGS: u32 = 4;
/// How long a thread is waited for that was asked to stop, and how long what else is read of it may take then.
const STOPS_WITHIN: Duration = Duration::from_millis(20);
const READ_WITHIN: Duration = Duration::from_micros(500);
/// The code segment of 64-bit code (`__USER_CS`, arch/x86/include/asm/segment.h).
const CODE_64: u64 = 0x33;

/// Calls that the kernel takes up again after a stop as if it had not been (signal(7)): poll, nanosleep, select, wait4, futex, clock_nanosleep,
/// waitid, pselect6, ppoll.
const RESUMED: [i64; 9] = [7, 35, 23, 61, 202, 230, 247, 270, 271];
/// Calls that end with `EINTR` after a stop, even without a signal, and that did nothing then (signal(7)): read, accept, sendto, recvfrom,
/// sendmsg, recvmsg, semop, msgsnd, msgrcv, rt_sigtimedwait, io_getevents, semtimedop, epoll_wait, epoll_pwait, accept4, recvmmsg,
/// epoll_pwait2. They are begun again.
const BEGUN_AGAIN: [u64; 17] = [0, 43, 44, 45, 46, 47, 65, 69, 70, 128, 208, 220, 232, 281, 288, 299, 441];
/// Calls that return a part of their work if they are interrupted in the middle: write, pwrite64, writev, sendfile, sendto, sendmsg, splice,
/// pwritev, sendmmsg, copy_file_range, pwritev2.
const IN_PARTS: [i64; 11] = [1, 18, 20, 40, 44, 46, 275, 296, 307, 326, 328];
/// Looks at a thread that runs, before it is stopped.
const LOOKS: u32 = 20;
const BETWEEN_LOOKS: Duration = Duration::from_millis(1);
/// What the kernel itself leaves for a call that begins again unless a handler runs (`ERESTARTNOHAND`, linux/errno.h).
const BEGIN_AGAIN: u64 = -514_i64 as u64;
/// `EINTR`, and `ERESTART_RESTARTBLOCK`: goes on by `restart_syscall`, which a sandbox may not know.
const INTERRUPTED: u64 = -4_i64 as u64;
const BY_ANOTHER_CALL: u64 = -516_i64 as u64;

/// What `/proc/PID/task/TID/status` says of a thread.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Status {
    /// `R` runs, `S` waits, `D` waits and cannot be interrupted, `T` is stopped, `t` is stopped by a tracer.
    pub(crate) state: char,
    /// As its own namespace numbers it; 0 not known.
    pub(crate) tid: u32,
    /// The kernel's name of it.
    pub(crate) name: String,
    tracer: u32,
    is_filtered: bool,
    switches: u64,
}

impl Status {
    pub(crate) fn of(pid: u32, thread: u32) -> Option<Status> {
        Some(Status::parse(&text_of_proc(format!("/proc/{pid}/task/{thread}/status")).ok()?))
    }

    fn parse(text: &str) -> Status {
        let mut status = Status { state: '?', ..Status::default() };
        for line in text.lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let value = value.trim();
            let number = || value.parse::<u64>().unwrap_or(0);
            match name {
                "Name" => value.clone_into(&mut status.name),
                "State" => status.state = value.chars().next().unwrap_or('?'),
                "TracerPid" => status.tracer = number() as u32,
                "NSpid" => {
                    let inner = value.split_ascii_whitespace().next_back();
                    status.tid = inner.and_then(|it| it.parse().ok()).unwrap_or(0);
                }
                "Seccomp" => status.is_filtered = number() != 0,
                "voluntary_ctxt_switches" | "nonvoluntary_ctxt_switches" => status.switches += number(),
                _ => {}
            }
        }
        status
    }
}

/// A thread at one moment, with what else was read of it then.
pub(crate) struct Copied<T> {
    pub(crate) moment: Moment,
    pub(crate) also: T,
    pub(crate) how: How,
}

/// A call that a thread waits in.
struct Waits {
    /// Its number; -1 in no call.
    call: i64,
    registers: Registers,
}

impl Waits {
    /// `NUMBER ARGUMENTS... STACK PLACE`, `-1 STACK PLACE`, or `running` (proc(5)).
    fn parse(text: &str) -> Option<Waits> {
        let mut words = text.split_ascii_whitespace();
        let call = words.next()?.parse().ok()?;
        let mut hex = words.rev().map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
        let (place, stack) = (hex.next()??, hex.next()??);
        let mut registers: Registers = [None; 17];
        (registers[RSP], registers[RIP]) = (Some(stack), Some(place));
        Some(Waits { call, registers })
    }
}

/// Copies a thread that waits, without stopping it; `None` if it runs, or the kernel does not say. `also` is read at the same moment.
pub(crate) fn waiting<T>(
    pid: u32,
    thread: u32,
    foreign: &Foreign,
    mut also: impl FnMut(Instant) -> T,
) -> Option<Copied<T>> {
    for _ in 0..MOST_READINGS {
        let before = Status::of(pid, thread)?;
        let path = format!("/proc/{pid}/task/{thread}/syscall");
        let text = text_of_proc(&path).ok()?;
        let registers = Waits::parse(&text)?.registers;
        let moment = copy(foreign, registers);
        let also = also(Instant::now() + Duration::from_secs(1));
        let is_same = text_of_proc(&path).is_ok_and(|again| again == text);
        if is_same && before.state != 'R' && Status::of(pid, thread).as_ref() == Some(&before) {
            return Some(Copied { moment, also, how: How::Waiting });
        }
    }
    None
}

/// Stops a thread for a moment, if that harms nobody, and copies it.
///
/// # Errors
/// Why it was not stopped.
pub(crate) fn stopped<T>(
    pid: u32,
    thread: u32,
    foreign: &Foreign,
    mut also: impl FnMut(Instant) -> T,
) -> Result<Copied<T>, String> {
    let status = Status::of(pid, thread).ok_or("it has ended")?;
    may_stop(pid, thread, &status)?;
    if status.state == 'R' {
        works_in_one_piece(pid, thread)?;
    }
    let urgent = Urgent::begin();
    let mut held = Held::seize(thread).map_err(|why| match why {
        Errno::PERM => "the kernel does not allow stopping it (ptrace)".to_owned(),
        Errno::SRCH => "it has ended".to_owned(),
        why => format!("it cannot be stopped: {why}"),
    })?;
    held.interrupt().map_err(|why| format!("it cannot be stopped: {why}"))?;
    match held.wait(Instant::now() + STOPS_WITHIN) {
        Some(Stop::Asked | Stop::Call | Stop::Signal | Stop::Group) => {}
        Some(Stop::Over) => return Err("it has ended".to_owned()),
        None => return Err("it did not stop in time".to_owned()),
    }
    let read = held.registers();
    let Ok(read) = read else { return Err("its registers cannot be read".to_owned()) };
    let is_64 = read.cs == CODE_64;
    let moment = copy(foreign, registers(&read));
    let also = also(Instant::now() + READ_WITHIN);
    if is_64 && is_to_begin_again(read.orig_rax, read.rax, status.is_filtered) {
        let _ = held.set_registers(&libc::user_regs_struct { rax: BEGIN_AGAIN, ..read });
    }
    let began = held.ran_at();
    drop(held);
    // Before others get the processor.
    let stood = began.elapsed();
    drop(urgent);
    match is_64 {
        true => Ok(Copied { moment, also, how: How::Stopped(stood) }),
        false => Err("it runs 32-bit code".to_owned()),
    }
}

/// Whether it harms nobody that a thread is stopped.
fn may_stop(pid: u32, thread: u32, status: &Status) -> Result<(), String> {
    if status.tracer != 0 {
        return Err(format!("process {} traces it (a debugger?)", status.tracer));
    }
    match status.state {
        'R' => return Ok(()),
        'S' => {}
        'T' | 't' => return Err("it is stopped, and is left stopped".to_owned()),
        'D' => return Err("it waits in the kernel and cannot be interrupted".to_owned()),
        'Z' | 'X' => return Err("it has ended".to_owned()),
        other => return Err(format!("it is in state {other}")),
    }
    let text = text_of_proc(format!("/proc/{pid}/task/{thread}/syscall")).unwrap_or_default();
    match Waits::parse(&text) {
        Some(Waits { call, .. }) if !RESUMED.contains(&call) => {
            Err(format!("it waits in system call {call}, which a stop could interrupt"))
        }
        // `restart_syscall` would be called, which its filter may not know.
        Some(_) if status.is_filtered => Err("it waits under a filter of system calls".to_owned()),
        _ => Ok(()),
    }
}

/// Whether a thread that runs is not seen to wait in a call that works in parts. Nobody can see that it is in the middle of one while it runs, as
/// one that writes to a pipe which somebody empties.
fn works_in_one_piece(pid: u32, thread: u32) -> Result<(), String> {
    for _ in 0..LOOKS {
        std::thread::sleep(BETWEEN_LOOKS);
        let text = text_of_proc(format!("/proc/{pid}/task/{thread}/syscall")).unwrap_or_default();
        if let Some(Waits { call, .. }) = Waits::parse(&text)
            && IN_PARTS.contains(&call)
        {
            return Err(format!(
                "it repeatedly waits in system call {call}, which a stop could end with a partial result"
            ));
        }
    }
    Ok(())
}

/// Whether a call was ended by our stop, and would not have been otherwise.
fn is_to_begin_again(call: u64, result: u64, is_filtered: bool) -> bool {
    (result == INTERRUPTED && BEGUN_AGAIN.contains(&call))
        || (result == BY_ANOTHER_CALL && is_filtered && (call as i64) >= 0)
}

fn copy(foreign: &Foreign, registers: Registers) -> Moment {
    let base = registers[RSP].unwrap_or(0);
    // What a leaf function keeps below its stack pointer is of no use: no caller's value lies there.
    Moment { registers, base, stack: foreign.up_to(base, MOST_STACK) }
}

fn registers(from: &libc::user_regs_struct) -> Registers {
    let mut to: Registers = [None; 17];
    (to[0], to[1], to[2], to[RBX]) = (Some(from.rax), Some(from.rdx), Some(from.rcx), Some(from.rbx));
    (to[4], to[5], to[RBP], to[RSP]) = (Some(from.rsi), Some(from.rdi), Some(from.rbp), Some(from.rsp));
    (to[8], to[9], to[10], to[11]) = (Some(from.r8), Some(from.r9), Some(from.r10), Some(from.r11));
    (to[12], to[13], to[14], to[15]) = (Some(from.r12), Some(from.r13), Some(from.r14), Some(from.r15));
    to[RIP] = Some(from.rip);
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_read_as_the_kernel_writes_it() {
        let text = "202 0x7f 0x189 0x0 0x0 0x0 0xffffffff 0x7ffe5ca3bb10 0x7f3c7a3f2117\n";
        let waits = Waits::parse(text).expect("it waits");
        assert_eq!((waits.call, waits.registers[RSP]), (202, Some(0x7ffe_5ca3_bb10)));
        assert_eq!(waits.registers[RIP], Some(0x7f3c_7a3f_2117));
        assert_eq!(Waits::parse("-1 0x10 0x20\n").map(|waits| waits.call), Some(-1));
        assert!(Waits::parse("running\n").is_none());
        assert!(Waits::parse("").is_none());
    }

    #[test]
    fn a_thread_is_stopped_only_where_that_harms_nobody() {
        let text = "Name:\ta thread\nState:\tS (sleeping)\nNSpid:\t9\t7\nTracerPid:\t12\nSeccomp:\t2\n\
                    voluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t4\n";
        let status = Status::parse(text);
        let expected = (("a thread", 'S', 7), (12, true, 7));
        assert_eq!(
            (
                (status.name.as_str(), status.state, status.tid),
                (status.tracer, status.is_filtered, status.switches)
            ),
            expected
        );
        assert!(may_stop(0, 0, &status).is_err_and(|why| why.contains("process 12 traces it")));
        for state in ['D', 'T', 't', 'Z', '?'] {
            assert!(may_stop(0, 0, &Status { state, ..Status::default() }).is_err(), "{state}");
        }
        assert!(may_stop(0, 0, &Status { state: 'R', is_filtered: true, ..Status::default() }).is_ok());
    }

    #[test]
    fn only_calls_that_did_nothing_are_begun_again() {
        let (epoll_wait, close, nanosleep) = (232, 3, 35);
        assert!(is_to_begin_again(epoll_wait, INTERRUPTED, false));
        assert!(!is_to_begin_again(epoll_wait, 1, false) && !is_to_begin_again(close, INTERRUPTED, true));
        assert!(is_to_begin_again(nanosleep, BY_ANOTHER_CALL, true));
        assert!(!is_to_begin_again(nanosleep, BY_ANOTHER_CALL, false));
        assert!(!is_to_begin_again(u64::MAX, BY_ANOTHER_CALL, true));
    }
}
