//! What the library does when a process starts and when it ends. Nobody calls this but the C library.

use crate::hooks::loader;
use crate::nccl::threads;
use crate::session::{self, Start, say};
use crate::sys::{KeepErrno, Text};
use crate::{config, environment, kernel, lanes, launch, messages, ring_file, thread_id};
use core::ffi::{c_char, c_int};
use core::sync::atomic::Ordering;
use gputrace_ring::clock::Clock;
use gputrace_ring::map;

/// How long a process waits at its end for its trace, in milliseconds.
const EXIT_PATIENCE: u64 = 5_000;
/// The same for the first process of a PID namespace that has other threads.
const INIT_PATIENCE: u64 = 1_000;
/// How long it waits for the recorder to say whether it may wait, in milliseconds. A processor is busy with that, about as long as the
/// recorder needs one: where both want the same processor, they have equal shares of it. So only a recorder that was stopped
/// costs all of this; on a machine with seven times as many runnable threads as processors, 25 ms were too few in one of five programs.
const VERDICT_PATIENCE: u64 = 500;
/// The longest that a user can have the process wait for that answer.
const MOST_VERDICT_PATIENCE: u64 = 5_000;
/// Milliseconds between two looks whether the recorder still lives.
const LOOK_EVERY: u64 = 50;

/// Before `main`: only what needs no memory, no file and no thread. The arguments are those that the C library gives to
/// constructors.
extern "C" fn construct(argc: c_int, argv: *const *const c_char) {
    // SAFETY: passed on as they came.
    unsafe { environment::read_auxiliary(argc, argv) };
    let clock = Clock::of_this_machine();
    if clock == Clock::Monotonic {
        environment::find_clock();
    }
    session::choose_clock(clock);
    launch::remember_processors();
    messages::remember_stderr();
    loader::find_real_dlsym();
    threads::find_real_create();
}

/// After `main`: tells the recorder, and waits for the trace so that the next command of a script finds it.
///
/// Not where other threads run: what they use is being taken down, and would be used for as long as we wait. (Threads that
/// come back into CPython 3.10 after its end crash; so do those that use a destroyed object of C++.) `gputrace` waits
/// for the recorder of a trace that it is given. Only the first process of a PID namespace waits in any case, though not
/// for long: with it the kernel kills the recorder.
///
/// Nor under a sandbox that came after the session began, which may kill the process for any call. The recorder looks for both
/// and says what to do ([`map::ExitLine`]); until then nothing is called here.
extern "C" fn destruct() {
    let _errno = KeepErrno::new();
    session::keep_ring();
    let Some(map) = session::map() else { return };
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        loader::describe_bypasses(lane.producer());
    }
    let header = map.header();
    header.exit.tid.store(thread_id::own(), Ordering::Relaxed);
    header.exit.verdict.store(map::UNDECIDED, Ordering::Relaxed);
    header.process.value.store(map::EXITING, Ordering::Release);
    let is_init = header.pid.load(Ordering::Relaxed) == 1;
    let usual = match (await_verdict(header), is_init) {
        (map::ALONE, _) => EXIT_PATIENCE,
        (map::ACCOMPANIED, true) => INIT_PATIENCE,
        // A process that shares our memory came to its end: the program goes on.
        (map::STRANGER, _) => return header.process.value.store(map::RUNNING, Ordering::Release),
        // Nothing is known of sandboxes any more. To write to standard error is what even strict mode leaves (seccomp(2)).
        (RECORDER_DIED, _) => return say_recorder_is_gone(),
        // What others do until the process is gone is recorded: nobody has called the trace finished.
        _ => return,
    };
    let patience = config::EXIT_WAIT.number().unwrap_or(usual).min(600_000);
    wait_for_trace(header, patience, is_init);
}

/// What no recorder answers: the kernel says that it was killed.
const RECORDER_DIED: u32 = u32::MAX;

/// The recorder's answer, or [`RECORDER_DIED`]; [`map::UNDECIDED`] if it does not come. The kernel is not called meanwhile.
fn await_verdict(header: &map::Header) -> u32 {
    let wanted = config::EXIT_WAIT.number().map(|wait| wait.min(MOST_VERDICT_PATIENCE));
    let began = now();
    loop {
        let verdict = header.exit.verdict.load(Ordering::Acquire);
        if verdict != map::UNDECIDED {
            return verdict;
        }
        if header.recorder_thread.value.load(Ordering::Relaxed) & map::DIED != 0 {
            return RECORDER_DIED;
        }
        match header.recorder.value.load(Ordering::Acquire) {
            // It reads the program's mappings first, which are gone with the program.
            map::NO_RECORDER if session::has_recorder() => {}
            map::RECORDING => {}
            _ => return map::UNDECIDED,
        }
        if now().saturating_sub(began) >= wanted.unwrap_or(VERDICT_PATIENCE) {
            return map::UNDECIDED;
        }
        for _ in 0..64 {
            core::hint::spin_loop();
        }
    }
}

/// Milliseconds of a clock that is read without a call.
fn now() -> u64 {
    gputrace_ring::clock::nanos(libc::CLOCK_MONOTONIC_COARSE) / 1_000_000
}

/// The recorder has said that calls are safe.
fn wait_for_trace(header: &map::Header, patience: u64, is_init: bool) {
    // A child that shares our memory (`vfork`) also has our thread's number as the C library knows it.
    if kernel::process_id() != header.pid.load(Ordering::Relaxed) {
        return header.process.value.store(map::RUNNING, Ordering::Release);
    }
    let began = now();
    loop {
        let state = header.recorder.value.load(Ordering::Acquire);
        match state {
            map::COMPLETE | map::FAILED => return session::end(),
            map::RECORDING => {}
            _ => return,
        }
        let waited = now().saturating_sub(began);
        if waited >= patience {
            break;
        }
        kernel::wait_while(&header.recorder.value, state, LOOK_EVERY.min(patience - waited) as u32);
        if now().saturating_sub(began) >= LOOK_EVERY && recorder_is_gone() {
            session::end();
            return say_recorder_is_gone();
        }
    }
    session::end();
    if is_init {
        say_recorder_ends()
    } else {
        say(b"the recorder is still busy; the trace will be complete a little later")
    }
}

/// A recorder holds the lock of the ring's file for as long as it lives.
fn recorder_is_gone() -> bool {
    let (path, identity) = session::ring();
    ring_file::is_unlocked(path, identity)
}

fn say_recorder_is_gone() {
    let (path, _) = session::ring();
    let message = Text::<480>::new()
        .add(b"the recorder was killed; its trace ends there, and later events are in ")
        .add(path.to_bytes())
        .add(b": `gputrace recover` makes a trace of them");
    say(message.as_bytes());
}

/// With the first process of a PID namespace the kernel ends all others of it.
fn say_recorder_ends() {
    let (path, _) = session::ring();
    let message = Text::<480>::new()
        .add(b"the recorder is still busy, and ends with this process, the first of its namespace: events that are not in the trace are in ")
        .add(path.to_bytes())
        .add(b": `gputrace recover` makes a trace of them; GPUTRACE_EXIT_WAIT=60000 waits longer");
    say(message.as_bytes());
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCT: extern "C" fn(c_int, *const *const c_char) = construct;

#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCT: extern "C" fn() = destruct;
