//! What the library does when a process starts and when it ends. Nobody calls this but the C library.

use crate::hooks::loader;
use crate::nccl::threads;
use crate::session::{self, Start};
use crate::sys::{self, KeepErrno, Text, say};
use crate::{config, environment, kernel, lanes, launch, ring_file};
use core::ffi::{c_char, c_int};
use core::sync::atomic::Ordering;
use gputrace_ring::clock::Clock;
use gputrace_ring::map;

/// How long a process waits at its end for its trace, in milliseconds.
const EXIT_PATIENCE: u64 = 5_000;
/// The same for the first process of a PID namespace that has other threads.
const INIT_PATIENCE: u64 = 1_000;

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
    loader::find_real_dlsym();
    threads::find_real_create();
}

/// After `main`: tells the recorder, and waits for the trace so that the next command of a script finds it.
///
/// Not where other threads run: what they use is being taken down, and would be used for as long as we wait. (Threads that
/// come back into CPython 3.10 after its end crash; so do those that use a destroyed object of C++.) `gputrace` waits
/// for the recorder of a trace that it is given. Only the first process of a PID namespace waits in any case, though not
/// for long: with it the kernel kills the recorder.
extern "C" fn destruct() {
    let _errno = KeepErrno::new();
    session::keep_ring();
    let Some(map) = session::map() else { return };
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        loader::describe_bypasses(lane.producer());
    }
    let header = map.header();
    header.process.value.store(map::EXITING, Ordering::Release);
    let is_init = kernel::process_id() == 1;
    let is_alone = !has_other_threads();
    let usual = match (is_alone, is_init) {
        (true, _) => EXIT_PATIENCE,
        (false, true) => INIT_PATIENCE,
        // What the others do until the process is gone is recorded: nobody has called the trace finished.
        (false, false) => return,
    };
    let patience = config::EXIT_WAIT.number().unwrap_or(usual).min(600_000);
    for waited in 0..patience {
        match header.recorder.value.load(Ordering::Acquire) {
            map::COMPLETE => {
                session::end();
                // The recorder has it mapped, and would do so: unless it ends with our PID namespace, whose /dev/shm may be
                // the host's, and the memory in it would stay taken. Others that run may still have something to say.
                if is_alone {
                    session::remove_ring();
                }
                return;
            }
            map::FAILED => return session::end(),
            map::NO_RECORDER if waited % 50 == 49 && session::recorder_has_ended() => {
                session::end();
                let (path, _) = session::ring();
                let why = b"the recorder ended before it had read anything";
                return session::say_unrecorded(why, 0, path.to_bytes());
            }
            // A recorder that never came is no reason to wait for long.
            map::NO_RECORDER if waited > 1_000 => return session::end(),
            map::RECORDING if waited % 50 == 49 && recorder_is_gone() => {
                session::end();
                return say_recorder_is_gone();
            }
            _ => kernel::sleep(1_000_000),
        }
    }
    session::end();
    if is_init {
        say_recorder_ends()
    } else {
        say(b"the recorder is still busy; the trace will be complete a little later")
    }
}

/// Whether threads run that are not the driver's or ours. In doubt they do.
fn has_other_threads() -> bool {
    let (process, own, mut has_others) = (kernel::process_id(), kernel::thread_id(), false);
    let is_listed = kernel::list_numbers(c"/proc/self/task", |thread, _| {
        let thread = thread as u32;
        has_others |= thread != own && !is_servant(thread) && !sys::is_thread_over(process, thread);
    });
    has_others || !is_listed
}

/// Whether the thread is one that CUDA's driver made for itself (`cuda-EvtHandlr` and others), or our own.
fn is_servant(thread: u32) -> bool {
    let path = Text::<64>::new().add(b"/proc/self/task/").number(thread.into()).add(b"/comm");
    let mut name = [0_u8; 16];
    let n = sys::read_file(path.as_c_str(), &mut name);
    let name = name.get(..n).unwrap_or_default();
    name.starts_with(b"cuda") || name.starts_with(b"gputrace-")
}

/// A recorder holds the lock of the ring's file for as long as it lives.
fn recorder_is_gone() -> bool {
    let (path, identity) = session::ring();
    ring_file::is_unlocked(path, identity)
}

fn say_recorder_is_gone() {
    let (path, _) = session::ring();
    let message = Text::<480>::new()
        .add(b"the recorder was killed; its trace ends there, and the events since then are in ")
        .add(path.to_bytes())
        .add(b": `gputrace recover` makes a trace of them");
    say(message.as_bytes());
}

/// With the first process of a PID namespace the kernel ends all others of it.
fn say_recorder_ends() {
    let (path, _) = session::ring();
    let message = Text::<480>::new()
        .add(b"the recorder is still busy, and ends with this process, the first of its namespace: what is not in the trace is in ")
        .add(path.to_bytes())
        .add(b", of which `gputrace recover` makes one; GPUTRACE_EXIT_WAIT=60000 waits longer");
    say(message.as_bytes());
}

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCT: extern "C" fn(c_int, *const *const c_char) = construct;

#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCT: extern "C" fn() = destruct;
