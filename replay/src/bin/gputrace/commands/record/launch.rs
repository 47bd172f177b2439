//! How the program of `gputrace record` is started, and who stays to say what was recorded.
//!
//! Mostly the program takes gputrace's place, so that number, exit code, signals and job control are its own, and a process that
//! is nobody's child waits for its end. But a shell shows its prompt when the program ends, and who sits there reads what
//! comes before it. So where a person started gputrace by itself from a terminal, gputrace stays between the two. There every
//! signal comes from the terminal, which sends it to both, or to gputrace alone, which hands it on.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, Signal};
use signal_hook::consts::signal::{SIGALRM, SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::low_level::siginfo::Cause;

/// What is handed on, unless gputrace was started to ignore it (`nohup`).
const HANDED_ON: [i32; 7] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM];

/// Whether gputrace is a job of its own of somebody who sits at a terminal.
pub(crate) fn is_started_by_hand() -> bool {
    let is_leader = rustix::process::getpgrp() == rustix::process::getpid();
    is_leader && rustix::process::getppid().is_some() && std::io::stderr().is_terminal()
}

/// Runs the program as a child, hands signals on, calls `at_end` with its number and with what says whether somebody wants this
/// process to end, and ends as the program did.
///
/// # Errors
/// It cannot be run.
pub(crate) fn run(
    mut command: Command,
    at_end: impl FnOnce(u32, &mut dyn FnMut() -> bool),
) -> std::io::Result<ExitCode> {
    let ignored = ignored_signals();
    let caught = HANDED_ON.into_iter().filter(|signal| ignored & (1 << (signal - 1)) == 0);
    // Before the program is there: none may end us and leave it. It begins with what we began with.
    let mut signals = SignalsInfo::<WithOrigin>::new(caught.chain([SIGCHLD]))?;
    gputrace_recorder::end_with_us(&mut command);
    let mut child = command.spawn()?;
    let pid = child.id();
    drop(command);
    // Who reads what the program writes waits for its end, not for ours.
    if let Ok(null) = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
    }
    let status = wait(&mut child, &mut signals)?;
    // From here on, who asks for an end means us.
    // What ended the program may have been sent to both.
    signals.pending().for_each(drop);
    let is_asked = |signal: i32| HANDED_ON[..4].contains(&signal);
    at_end(pid, &mut || signals.pending().any(|origin| is_asked(origin.signal)));
    Ok(end_as(status))
}

fn wait(child: &mut Child, signals: &mut SignalsInfo<WithOrigin>) -> std::io::Result<ExitStatus> {
    let number = rustix::process::Pid::from_child(child);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        for origin in signals.wait() {
            // The terminal sends its signals to every process of the job.
            let is_the_kernels = matches!(origin.cause, Cause::Kernel | Cause::Unknown | Cause::Chld(_));
            if origin.signal != SIGCHLD
                && !is_the_kernels
                && let Some(signal) = Signal::from_named_raw(origin.signal)
            {
                // It is a child that nobody has waited for: the number is its own.
                let _ = rustix::process::kill_process(number, signal);
            }
        }
    }
}

/// A bit for each signal that was ignored when gputrace began.
fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}

/// Who waits for us shall see what they would see of the program.
fn end_as(status: ExitStatus) -> ExitCode {
    if let Some(signal) = status.signal() {
        // The program's core is enough.
        let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
        let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
        let _ = signal_hook::low_level::emulate_default_handler(signal);
        // Where that did not end us.
        return ExitCode::from(u8::try_from(128 + signal).unwrap_or(u8::MAX));
    }
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

/// Starts `gputrace WORDS`, which is to wait for the end of this process, whatever program it is by then. It is nobody's
/// child: the program may wait for all of its own.
///
/// # Errors
/// It cannot be started, or the kernel knows no descriptors of processes (Linux before 5.3).
pub(crate) fn start_witness(words: &[impl AsRef<OsStr>]) -> anyhow::Result<()> {
    let us = rustix::process::getpid();
    // As process 1, or where orphans come to us, it would be the program's child all the same.
    let is_heir = us.is_init() || rustix::process::child_subreaper().is_ok_and(|is_set| is_set.is_some());
    anyhow::ensure!(!is_heir, "orphans would become the program's children");
    let process = rustix::process::pidfd_open(us, PidfdFlags::empty())?;
    let mut between = Command::new(std::env::current_exe()?);
    between.args(words).arg("--detach").stdin(Stdio::from(process)).stdout(Stdio::null());
    gputrace_recorder::with_standard_files_only(&mut between);
    anyhow::ensure!(between.status()?.success(), "it did not start");
    Ok(())
}

/// In the process between: starts the same again and ends, so that it gets another parent.
///
/// # Errors
/// It cannot be started.
pub(crate) fn detach(words: &[impl AsRef<OsStr>]) -> anyhow::Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(words).stdout(Stdio::null());
    command.spawn().context("cannot start the waiting process")?;
    Ok(())
}

/// Whether the process whose descriptor the standard input is has ended, or does within that time.
///
/// # Errors
/// It is not one.
pub(crate) fn has_ended_by(patience: Duration) -> anyhow::Result<bool> {
    let input = std::io::stdin();
    let patience = Timespec::try_from(patience).context("too long a time")?;
    match poll(&mut [PollFd::from_borrowed_fd(input.as_fd(), PollFlags::IN)], Some(&patience)) {
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
        Ok(n) => Ok(n > 0),
    }
}

/// Waits for the process whose descriptor the standard input is.
///
/// # Errors
/// It is not one.
pub(crate) fn wait_for_standard_input() -> anyhow::Result<()> {
    // What is sent to the job is for the program.
    let _ = rustix::process::setsid();
    let input = std::io::stdin();
    loop {
        match poll(&mut [PollFd::from_borrowed_fd(input.as_fd(), PollFlags::IN)], None) {
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            Ok(_) => return Ok(()),
        }
    }
}
