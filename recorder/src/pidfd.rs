//! Ends of processes: what a descriptor of one knows of it, also after its parent has waited (`PIDFD_GET_INFO`, linux/pidfd.h of
//! Linux 6.15), a child that does not outlive us, one that inherits no descriptors, and the scheduling of the calling thread.
#![allow(unsafe_code)]

use rustix::io::Errno;
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// `PIDFD_INFO_EXIT`: the status is asked for, or told.
const EXIT: u64 = 1 << 3;

/// `struct pidfd_info` as it was first published, 64 bytes; the kernel fills in as much as it is given room for.
#[repr(C)]
#[derive(Default)]
struct Info {
    mask: u64,
    cgroup: u64,
    numbers_and_owners: [u32; 11],
    exit_code: i32,
}
const _: () = assert!(size_of::<Info>() == 64);

/// With what the process ended, as `waitpid(2)` gives it. `None` where it has not, where its parent has not asked yet, and
/// where the kernel is older.
pub(crate) fn wait_status(descriptor: &OwnedFd) -> Option<i32> {
    const GET_INFO: u32 = opcode::read_write::<Info>(0xff, 11);
    let mut info = Info { mask: EXIT, ..Info::default() };
    // SAFETY: the number says what is read and written: one `Info`. A descriptor of something else refuses it.
    let answer = unsafe { ioctl(descriptor, Updater::<GET_INFO, Info>::new(&mut info)) };
    (answer.is_ok() && info.mask & EXIT != 0).then_some(info.exit_code)
}

/// `struct sched_attr` as it was first published (linux/sched/types.h).
#[repr(C)]
#[derive(Default)]
struct Turns {
    bytes: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}
const _: () = assert!(size_of::<Turns>() == 48);

/// The calling thread works for microseconds each time, and a thread of the program may be waiting for it with a busy processor: the
/// kernel lets those run first that want a processor for less (Linux 6.12). It gets no more of it than before.
pub(crate) fn take_short_turns() {
    /// Nanoseconds; the shortest that the kernel knows (`__setparam_fair`, kernel/sched/syscalls.c).
    const SHORTEST: u64 = 100_000;
    let bytes = size_of::<Turns>();
    let mut turns = Turns::default();
    // SAFETY: of the calling thread; the kernel writes as many bytes as we say.
    let is_known = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut turns, bytes, 0) } == 0;
    if is_known && turns.policy == libc::SCHED_OTHER.cast_unsigned() {
        turns.runtime = SHORTEST;
        // SAFETY: of the calling thread; the kernel reads one structure. A refusal changes nothing.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const turns, 0) };
    }
}

/// The kernel kills the command's process when the thread ends that starts it.
pub fn end_with_us(command: &mut Command) {
    end_with(command, getpid());
}

fn end_with(command: &mut Command, parent: Pid) {
    let end = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // It may have ended before that. In another PID namespace the child cannot know.
        if getppid().is_some_and(|now| now != parent) { Err(Errno::SRCH.into()) } else { Ok(()) }
    };
    // SAFETY: between fork and exec it makes two calls to the kernel, and allocates nothing.
    unsafe { command.pre_exec(end) };
}

/// Lets the command inherit standard input, output and error only. Any other descriptor would keep a pipe open, or a file locked, for
/// as long as the command runs.
pub fn with_standard_files_only(command: &mut Command) {
    /// `CLOSE_RANGE_CLOEXEC` (linux/close_range.h, Linux 5.11): what the standard library still needs before `exec` stays until then.
    const CLOEXEC: libc::c_uint = 1 << 2;
    /// Descriptors that are looked at one by one where the kernel is older.
    const MOST: libc::c_int = 65_536;
    let close = || {
        let first: libc::c_uint = 3;
        // SAFETY: it takes three numbers, and touches no memory.
        if unsafe { libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, CLOEXEC) } != 0 {
            for descriptor in 3..MOST {
                // SAFETY: as above; one that is not open is refused.
                unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes calls to the kernel, and allocates nothing.
    unsafe { command.pre_exec(close) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_whose_parent_is_gone_before_it_asks_for_its_end_begins_nothing() {
        let mut ours = Command::new("true");
        end_with_us(&mut ours);
        assert!(ours.status().expect("it starts").success());
        // A child whose parent has ended is another's: it finds one that it does not expect.
        let mut orphan = Command::new("true");
        end_with(&mut orphan, getppid().unwrap_or(Pid::INIT));
        let refused = orphan.spawn().expect_err("it does not start");
        assert_eq!(refused.raw_os_error(), Some(libc::ESRCH));
    }
}
