//! Starting `gputrace recorder`, so that the program does not notice: no child that `wait` could return or wait for, no
//! SIGCHLD, none of the program's descriptors, signals, limits or scheduling.
//!
//! The recorder is a grandchild. The child between us is a `clone` without exit signal that never execs (exec would give
//! it one), which only `__WCLONE` and `__WALL` can wait for. No debugger of the program's follows either
//! (`CLONE_UNTRACED`). Both share our memory until the recorder has its own: a `fork` would copy the page tables of a
//! process that may be hundreds of gigabytes large. They call the kernel and nothing else: other libraries stand in for
//! the C library's functions, and their books would be the program's.
//!
//! Mostly the child between us ends at once, and the recorder gets init for a parent. Where the program is that init, or
//! asked for orphans (`PR_SET_CHILD_SUBREAPER`), the recorder would become the program's own child. There the child between
//! us stays until the recorder or the program ends. It holds no descriptor; it does hold our memory,
//! which so outlives an `exec` of the program for as long as the recorder then takes to end, about a second.

use crate::kernel::{self, Answer, File};
use crate::sys::Text;
use crate::{config, elf, environment, messages, ring_file, valgrind};
use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr::{null, null_mut};
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicUsize, Ordering};

const STACK: usize = 32 << 10;
/// Of the child between us, which may have more to do.
const OUTER_STACK: usize = 256 << 10;
/// Where the recorder finds the ring and the process.
const RING: c_int = 3;
const PROCESS: c_int = 4;
/// How long we wait for a recorder that the child between us starts, in steps of 100 µs.
const PATIENCE: u32 = 50_000;
/// A user who may have fewer is left those there are: the recorder has 4 threads, under a filter 8.
const FEW_PROCESSES: u64 = 64;
/// Milliseconds between two looks of the child between us.
const LOOK_EVERY: usize = 500;
/// Soft limit of the recorder's stack, in bytes: the default of Linux (`_STK_LIM`).
const STACK_OF_RECORDER: u64 = 8 << 20;
/// ioprio_set(2): the calling process, and no class of its own.
const IOPRIO_WHO_PROCESS: usize = 1;
/// `prctl(2)`: what the kernel gives a process by default.
const TIMER_SLACK: usize = 50_000;
/// `F_DUPFD_CLOEXEC` finds a number from here on that is none of ours.
const SPARE: usize = 5;

/// What the children share with us.
struct Launch {
    arguments: [*const c_char; 9],
    environment: *const *const c_char,
    programs: [Text<1024>; 4],
    /// One of the folders of `PATH` with the program's name.
    candidate: Text<1024>,
    search_path: &'static [u8],
    ring: c_int,
    /// The program's number, as it and its children see it.
    program: usize,
    process: c_int,
    /// Of the process, not of the thread that starts the recorder.
    nice: usize,
    inner_stack: *mut u8,
    stays: bool,
    /// Of a helper, what it does before and after.
    work: Option<(Prepare, Done)>,
    /// How far the children came.
    state: AtomicU32,
    /// What the kernel said about what failed.
    error: AtomicI32,
    /// The recorder's process.
    recorder: AtomicU32,
}

/// States of a launch.
const STARTED: u32 = 1;
const NO_CLONE: u32 = 2;
const NOT_FOUND: u32 = 3;
const NOT_RUN: u32 = 4;

/// Processors that the process might use when it began.
struct Processors {
    words: [AtomicUsize; 128],
    bytes: AtomicUsize,
}

static PROCESSORS: Processors =
    Processors { words: [const { AtomicUsize::new(0) }; 128], bytes: AtomicUsize::new(0) };

/// Remembers which processors the process was given, before one of its threads chooses among them.
pub(crate) fn remember_processors() {
    let words = &PROCESSORS.words;
    // Those of the first thread: a library that comes late is loaded by another.
    let process = kernel::process_id() as usize;
    let arguments = [process, size_of_val(words), words.as_ptr() as usize, 0, 0, 0];
    // SAFETY: the kernel writes at most so many bytes, before any other thread reads them.
    let answer = unsafe { kernel::call(libc::SYS_sched_getaffinity, arguments) };
    PROCESSORS.bytes.store(answer.unwrap_or(0), Ordering::Relaxed);
}

/// Starts the recorder. The caller has blocked [`kernel::MOST_SIGNALS`], and the children block the last: no handler of the program may
/// run in a child that shares our memory.
pub(crate) fn start_recorder(path: &'static CStr, file: Option<&File>) -> Outcome {
    let prepared = match Prepared::new() {
        Ok(prepared) => prepared,
        Err(why) => return Outcome::Failed(why, 0),
    };
    let launch = prepared.launch;
    // SAFETY: nobody else looks at it yet.
    unsafe { (*launch).take_ring(path, file) };
    // SAFETY: as above.
    let stays = unsafe { (*launch).stays };
    // Where the child between us stays, we do not stand still until it ends.
    let flags = libc::CLONE_VM | if stays { 0 } else { libc::CLONE_VFORK };
    // SAFETY: the child runs on its own stack and touches only `launch`, which stay until it is gone, or for ever.
    let mut child = unsafe { spawn_untraced(flags, prepared.outer_stack, detach, launch.cast()) };
    // QEMU's emulation of programs refuses what Linux never does, a child that ends without a signal, and makes a copy of one that
    // would share our memory. There, the program may see one SIGCHLD.
    let is_emulated = child == Err(libc::EINVAL);
    if is_emulated {
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        // SAFETY: there is no child.
        unsafe { (*launch).stays = false };
        // SAFETY: as above.
        child = unsafe { kernel::spawn(flags, prepared.outer_stack, detach, launch.cast()) };
    }
    let stays = stays && !is_emulated;
    // SAFETY: the children write atomics only, once they run.
    let (state, error, recorder) = unsafe { (&(*launch).state, &(*launch).error, &(*launch).recorder) };
    let result = match child {
        Err(error) => outcome(NO_CLONE, error, 0),
        Ok(child) => {
            for _ in 0..if stays { PATIENCE } else { 0 } {
                if state.load(Ordering::Acquire) != 0 {
                    break;
                }
                kernel::sleep(100_000);
            }
            // Nobody else can wait for it.
            let ended_with = if stays { None } else { exit_code(child) };
            // Valgrind and QEMU make a fork of this: what the child stored, we do not see.
            let state = match state.load(Ordering::Acquire) {
                0 if valgrind::is_on() || is_emulated => ended_with.unwrap_or(0),
                state => state,
            };
            outcome(state, error.load(Ordering::Relaxed), recorder.load(Ordering::Relaxed))
        }
    };
    match child {
        Ok(child) if stays => STAYING.note(child as u32, prepared.scratch),
        // SAFETY: both children are gone or have their own memory.
        Ok(_) | Err(_) => unsafe { prepared.give_back() },
    }
    result
}

/// Children that stay between the program and its recorders, and the memory that each stands on.
struct Staying([(AtomicU32, AtomicPtr<u8>); 16]);

static STAYING: Staying = Staying([const { (AtomicU32::new(0), AtomicPtr::new(null_mut())) }; 16]);

impl Staying {
    /// A child whose memory is being written down.
    const TAKEN: u32 = u32::MAX;

    /// Where more stay than anybody attaches, the memory of the others stays too.
    fn note(&self, child: u32, scratch: *mut u8) {
        let free = |slot: &&(AtomicU32, AtomicPtr<u8>)| {
            slot.0.compare_exchange(0, Self::TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        if let Some((pid, memory)) = self.0.iter().find(free) {
            memory.store(scratch, Ordering::Relaxed);
            pid.store(child, Ordering::Release);
        }
    }

    /// Gives back the numbers and the memory of those that have ended.
    fn reap(&self) {
        for (pid, memory) in &self.0 {
            let child = pid.load(Ordering::Acquire);
            if matches!(child, 0 | Self::TAKEN) {
                continue;
            }
            // Somebody else may have waited for it: then it is no child of ours any more.
            let is_over =
                matches!(wait(child as usize, libc::__WCLONE | libc::WNOHANG), Ok(1..) | Err(libc::ECHILD));
            // One thread gives it back.
            if !is_over
                || pid.compare_exchange(child, Self::TAKEN, Ordering::AcqRel, Ordering::Relaxed).is_err()
            {
                continue;
            }
            // SAFETY: the child was the last that stood on it.
            unsafe { kernel::unmap(memory.load(Ordering::Relaxed), Prepared::BYTES) };
            pid.store(0, Ordering::Release);
        }
    }
}

/// Memory for the children, with what only a thread of the program can find out.
pub(crate) struct Prepared {
    scratch: *mut u8,
    outer_stack: *mut u8,
    launch: *mut Launch,
}

impl Prepared {
    const BYTES: usize = (OUTER_STACK + STACK + size_of::<Launch>()).next_multiple_of(4096);

    /// Or why no recorder can be started.
    pub(crate) fn new() -> Result<Prepared, &'static [u8]> {
        STAYING.reap();
        if ring_file::has_namespace_for_children() {
            // Its first child is that namespace's init, whose end ends it: that is for the program's own.
            return Err(
                b"the recorder was not started: children of this process are in a separate PID namespace (unshare)",
            );
        }
        if is_short_of_processes() {
            return Err(
                b"the recorder was not started: the limit of processes (ulimit -u) is below 64, and its threads count for this user; raise it",
            );
        }
        let Some(scratch) = kernel::map_private(Self::BYTES) else {
            return Err(b"there is no memory to start the recorder");
        };
        let outer_stack = scratch.wrapping_add(OUTER_STACK);
        let inner_stack = outer_stack.wrapping_add(STACK);
        let launch = inner_stack.cast::<Launch>();
        // SAFETY: the mapping is new, long enough, and aligned by its stacks.
        unsafe { fill(launch, inner_stack, is_heir_of_orphans()) };
        Ok(Prepared { scratch, outer_stack, launch })
    }

    /// # Safety
    /// The children are gone or have their own memory.
    unsafe fn give_back(self) {
        // SAFETY: the caller's promise.
        unsafe { kernel::unmap(self.scratch, Self::BYTES) };
    }
}

/// What a child does for us beside the program's threads: it makes the ring; `None` if it cannot, which it has said.
pub(crate) type Prepare = fn() -> Option<(&'static CStr, File)>;
/// What it does when it knows what became of the recorder.
pub(crate) type Done = fn(&Outcome);

/// A child that makes the ring, and starts the recorder, while the program's threads go on.
#[derive(Clone, Copy)]
pub(crate) struct Helper {
    pub(crate) pid: u32,
    /// To be given back when it is gone; null of one that stays between the program and the recorder until either ends, and that nobody
    /// waits for.
    pub(crate) scratch: *mut u8,
}

impl Helper {
    /// Starts it. The caller has blocked all signals, and comes here once at a time. As for [`start_recorder`]: what it runs touches no
    /// thread-local word, and calls the kernel and nothing else.
    pub(crate) fn start(prepare: Prepare, done: Done) -> Result<Helper, Outcome> {
        let prepared = Prepared::new().map_err(|why| Outcome::Failed(why, 0))?;
        let launch = prepared.launch;
        // SAFETY: nobody else looks at it yet.
        unsafe { (*launch).work = Some((prepare, done)) };
        // SAFETY: as above.
        let stays = unsafe { (*launch).stays };
        // SAFETY: the child runs on its own stack in memory that stays until it is gone; what it shares with us are atomics.
        match unsafe { spawn_untraced(libc::CLONE_VM, prepared.outer_stack, help, launch.cast()) } {
            Ok(child) if stays => {
                STAYING.note(child as u32, prepared.scratch);
                Ok(Helper { pid: child as u32, scratch: null_mut() })
            }
            Ok(child) => Ok(Helper { pid: child as u32, scratch: prepared.scratch }),
            Err(error) => {
                // SAFETY: there is no child.
                unsafe { prepared.give_back() };
                Err(outcome(NO_CLONE, error, 0))
            }
        }
    }

    /// Looks, and does not wait, whether it is gone; once it is, its number may be anybody's.
    pub(crate) fn is_gone(self) -> bool {
        if wait(self.pid as usize, libc::__WCLONE | libc::WNOHANG) == Ok(0) {
            return false;
        }
        if !self.scratch.is_null() {
            // SAFETY: it is gone, and the recorder has its own memory or is gone too: the helper stood still until then.
            unsafe { kernel::unmap(self.scratch, Prepared::BYTES) };
        }
        true
    }
}

/// Whether the process may be meant to use up its user's processes. How many there are, only a look at all of `/proc` would tell. Root
/// has no such limit (setrlimit(2), `RLIMIT_NPROC`).
fn is_short_of_processes() -> bool {
    kernel::limit(libc::RLIMIT_NPROC) < FEW_PROCESSES && number(libc::SYS_getuid) != 0
}

/// Whether orphans of this PID namespace, or of this process's descendants, become its children.
fn is_heir_of_orphans() -> bool {
    let mut is_reaper: c_int = 0;
    let arguments = [libc::PR_GET_CHILD_SUBREAPER as usize, (&raw mut is_reaper) as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes the number.
    let answer = unsafe { kernel::call(libc::SYS_prctl, arguments) };
    kernel::process_id() == 1 || (answer.is_ok() && is_reaper != 0)
}

/// # Safety
/// `launch` is room for one, aligned and all zero.
unsafe fn fill(launch: *mut Launch, inner_stack: *mut u8, stays: bool) {
    // SAFETY: the caller's promise; all zeros are a value of everything in it but the reference, which is written first.
    unsafe { (&raw mut (*launch).search_path).write(&[]) };
    // SAFETY: as above.
    let launch = unsafe { &mut *launch };
    let words = [c"gputrace", c"recorder", c"--ring", c"", c"--ring-fd", c"3", c"--process-fd", c"4"];
    for (to, from) in launch.arguments.iter_mut().zip(words) {
        *to = from.as_ptr();
    }
    launch.environment = environment::for_recorder();
    name_candidates(&mut launch.programs);
    launch.search_path = environment::value(c"PATH").map_or(&[], CStr::to_bytes);
    launch.ring = -1;
    launch.program = kernel::process_id() as usize;
    launch.process = -1;
    launch.inner_stack = inner_stack;
    launch.stays = stays;
}

impl Launch {
    fn take_ring(&mut self, path: &'static CStr, file: Option<&File>) {
        if let Some(place) = self.arguments.get_mut(3) {
            *place = path.as_ptr();
        }
        self.ring = file.map_or(-1, File::number);
    }
}

fn name_candidates(candidates: &mut [Text<1024>; 4]) {
    let [named, beside, installed, shared] = candidates;
    if let Some(path) = config::RECORDER.value() {
        named.append(path.to_bytes());
    }
    if let Some(library) = elf::by_address(name_candidates as *const () as usize) {
        let path = library.path();
        let folder = path
            .iter()
            .rposition(|byte| *byte == b'/')
            .map_or(b".".as_slice(), |at| path.get(..at).unwrap_or_default());
        // The last of a distribution that has a folder of libraries for each processor, /usr/lib/x86_64-linux-gnu.
        let places: [(_, &[u8]); 3] =
            [(beside, b"/gputrace"), (installed, b"/../bin/gputrace"), (shared, b"/../../bin/gputrace")];
        for (candidate, place) in places {
            candidate.append(folder);
            candidate.append(place);
        }
    }
}

/// What became of it.
pub(crate) enum Outcome {
    /// And its process.
    Started(u32),
    /// Why not, and the kernel's error; 0 where there is none, or it says no more.
    Failed(&'static [u8], c_int),
}

fn outcome(state: u32, error: c_int, recorder: u32) -> Outcome {
    match state {
        STARTED => Outcome::Started(recorder),
        // RLIMIT_NPROC, or pids.max of a control group (clone(2)).
        NO_CLONE if error == libc::EAGAIN => Outcome::Failed(
            b"the recorder could not be started: the limit of processes is reached (`ulimit -u`, or the container's)",
            0,
        ),
        NO_CLONE => Outcome::Failed(b"the recorder could not be started: clone failed", error),
        NOT_FOUND => Outcome::Failed(
            b"the program `gputrace` was found neither beside libgputrace.so nor on PATH (set GPUTRACE_RECORDER to its path)",
            0,
        ),
        NOT_RUN if error == libc::EACCES => {
            Outcome::Failed(b"the program `gputrace` was found, but is not executable", 0)
        }
        NOT_RUN => Outcome::Failed(b"the program `gputrace` was found, but could not be executed", error),
        _ => Outcome::Failed(b"the recorder could not be started: the process that should start it was ended", 0),
    }
}

// From here on, code of the children: no thread-local words, no function of the C library.

/// A child that makes the ring first: the program's descriptors must close when it closes them.
extern "C" fn help(launch: *mut c_void) -> c_int {
    kernel::block_signals(kernel::ALL_SIGNALS);
    close_all_but([2, -1, -1]);
    let launch: *mut Launch = launch.cast();
    // SAFETY: `Helper::start` passes its `launch`, which outlives us. Only one of us at a time looks at it.
    let Some((prepare, done)) = (unsafe { (*launch).work }) else { return 0 };
    let Some((path, file)) = prepare() else { return 0 };
    // SAFETY: as above.
    unsafe { (*launch).take_ring(path, Some(&file)) };
    // SAFETY: as above.
    let started = start_between(unsafe { &mut *launch });
    drop(file);
    // SAFETY: as above.
    let launch = unsafe { &*launch };
    let (state, error) = (launch.state.load(Ordering::Acquire), launch.error.load(Ordering::Relaxed));
    done(&outcome(state, error, launch.recorder.load(Ordering::Relaxed)));
    if launch.stays
        && let Some((recorder, process)) = started
    {
        stand_between(recorder, launch.program, process);
    }
    0
}

/// The child between the program and the recorder.
extern "C" fn detach(launch: *mut c_void) -> c_int {
    // The program's handler of SIGSYS, too, would take us for the program.
    kernel::block_signals(kernel::ALL_SIGNALS);
    // SAFETY: `start_recorder` passes its `launch`, which outlives us. Only one of us at a time looks at it.
    let launch = unsafe { &mut *launch.cast::<Launch>() };
    let (program, stays) = (launch.program, launch.stays);
    // From here on nothing of `launch` is looked at.
    let started = start_between(launch);
    match started {
        Some((recorder, process)) if stays => {
            stand_between(recorder, program, process);
            0
        }
        Some(_) => STARTED as c_int,
        None => NO_CLONE as c_int,
    }
}

/// Waits for the child between us; the state that it ended with.
fn exit_code(child: usize) -> Option<u32> {
    let mut status: c_int = 0;
    loop {
        let arguments = [child, (&raw mut status) as usize, libc::__WALL as usize, 0, 0, 0];
        // SAFETY: the kernel writes the number.
        match unsafe { kernel::call(libc::SYS_wait4, arguments) } {
            Err(libc::EINTR) => {}
            Ok(_) if status & 0x7f == 0 => return Some((status >> 8 & 0xff) as u32),
            _ => return None,
        }
    }
}

/// As [`kernel::spawn`], a child that no debugger of the program's follows. QEMU's emulation of programs does not know the flag.
///
/// # Safety
/// As [`kernel::spawn`].
unsafe fn spawn_untraced(
    flags: c_int,
    stack: *mut u8,
    function: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> Answer {
    // SAFETY: the caller's promise.
    match unsafe { kernel::spawn(flags | libc::CLONE_UNTRACED, stack, function, argument) } {
        // SAFETY: there is no child, and the caller's promise.
        Err(libc::EINVAL) => unsafe { kernel::spawn(flags, stack, function, argument) },
        answer => answer,
    }
}

/// Starts the recorder; its number, and our descriptor of the program: what `launch` says of that afterwards is the recorder's.
fn start_between(launch: &mut Launch) -> Option<(usize, c_int)> {
    let program = launch.program;
    // Valgrind complains about calls that it does not know.
    if kernel::may_use_rare_calls() && !valgrind::is_on() {
        // SAFETY: takes numbers.
        let answer = unsafe { kernel::call(libc::SYS_pidfd_open, [program, 0, 0, 0, 0, 0]) };
        // Its number was its own for as long as we are its child. Killed before (by SIGKILL: it stands still meanwhile), it may
        // have left it to another process, which the recorder would wait for; without a descriptor, it finds out by itself.
        let is_it = number(libc::SYS_getppid) == program;
        match answer {
            Ok(file) if is_it => launch.process = file as c_int,
            Ok(file) => close(file),
            Err(_) => {}
        }
    }
    // SAFETY: takes numbers.
    let niceness =
        unsafe { kernel::call(libc::SYS_getpriority, [libc::PRIO_PROCESS as usize, program, 0, 0, 0, 0]) };
    // The kernel answers 20 - nice (getpriority(2)).
    launch.nice = 20_usize.wrapping_sub(niceness.unwrap_or(20));
    if launch.stays {
        number(libc::SYS_setsid);
    }
    let (process, stack) = (launch.process, launch.inner_stack);
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    let shared: *mut Launch = launch;
    // SAFETY: as in `start_recorder`; we stand still until it has its own memory or is gone.
    let child = unsafe { spawn_untraced(flags, stack, become_recorder, shared.cast()) };
    // SAFETY: as above.
    let launch = unsafe { &*shared };
    match child {
        Err(error) => {
            launch.error.store(error, Ordering::Relaxed);
            launch.state.store(NO_CLONE, Ordering::Release);
        }
        // The recorder's own words, if it failed.
        Ok(child) => {
            launch.recorder.store(child as u32, Ordering::Relaxed);
            let _ = launch.state.compare_exchange(0, STARTED, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
    Some((child.ok()?, process))
}

/// Stays the recorder's parent until it or the program ends. The program's memory, and what a driver mapped into it, must
/// not wait for the recorder longer than that.
fn stand_between(recorder: usize, program: usize, process: c_int) {
    close_all_but([process, -1, -1]);
    if kernel::may_use_rare_calls() {
        // Else the program could not unmount its folder.
        // SAFETY: the path ends with a zero. The folder is not shared with the program (`CLONE_FS`).
        let _ = unsafe { kernel::call(libc::SYS_chdir, [c"/".as_ptr() as usize, 0, 0, 0, 0, 0]) };
    }
    let name = c"gputrace";
    // SAFETY: the name ends with a zero and has fewer than 16 bytes.
    let _ = unsafe {
        kernel::call(libc::SYS_prctl, [libc::PR_SET_NAME as usize, name.as_ptr() as usize, 0, 0, 0, 0])
    };
    loop {
        if process < 0 {
            kernel::sleep(100_000_000);
        } else if poll(process) {
            return;
        }
        if number(libc::SYS_getppid) != program || wait(recorder, libc::WNOHANG) != Ok(0) {
            return;
        }
    }
}

/// Waits a little; whether the process of this pidfd is gone.
fn poll(process: c_int) -> bool {
    let mut wanted = libc::pollfd { fd: process, events: libc::POLLIN, revents: 0 };
    let pause = libc::timespec { tv_sec: 0, tv_nsec: (LOOK_EVERY * 1_000_000) as i64 };
    let arguments = [(&raw mut wanted) as usize, 1, (&raw const pause) as usize, 0, 0, 0];
    // SAFETY: one structure, and a time to wait.
    match unsafe { kernel::call(libc::SYS_ppoll, arguments) } {
        Ok(n) => n != 0,
        Err(_) => {
            kernel::sleep(100_000_000);
            false
        }
    }
}

extern "C" fn become_recorder(launch: *mut c_void) -> c_int {
    // SAFETY: `start_recorder` passes its `launch`; the others stand still.
    let launch = unsafe { &mut *launch.cast::<Launch>() };
    number(libc::SYS_setsid);
    forget_signals();
    if kernel::may_use_rare_calls() {
        forget_scheduling(launch.nice);
    }
    forget_limits();
    settle_files(launch);
    let mut error = libc::ENOENT;
    for program in &launch.programs {
        execute(program, launch, &mut error);
    }
    for folder in launch.search_path.split(|byte| *byte == b':') {
        launch.candidate.clear();
        launch.candidate.append(folder);
        launch.candidate.append(b"/gputrace");
        execute(&launch.candidate, launch, &mut error);
    }
    launch.error.store(error, Ordering::Relaxed);
    let state = if error == libc::ENOENT { NOT_FOUND } else { NOT_RUN };
    launch.state.store(state, Ordering::Release);
    127
}

/// Comes back only if that fails.
fn execute(program: &Text<1024>, launch: &Launch, error: &mut c_int) {
    if program.as_bytes().is_empty() || program.is_full() {
        return;
    }
    let path = program.as_c_str().as_ptr() as usize;
    let arguments = [path, launch.arguments.as_ptr() as usize, launch.environment as usize, 0, 0, 0];
    // SAFETY: all three end as execve wants.
    match unsafe { kernel::call(libc::SYS_execve, arguments) } {
        Ok(_) | Err(libc::ENOENT | libc::ENOTDIR) => {}
        Err(why) => *error = why,
    }
}

/// No handler of the program's, nothing ignored, nothing blocked. Our table is a copy.
fn forget_signals() {
    // The kernel's own structure (asm-generic/signal.h): handler, flags, restorer, mask. Zeros are the default.
    let default = [0_usize; 4];
    for signal in 1..=64 {
        let arguments = [signal, default.as_ptr() as usize, 0, size_of::<kernel::SignalSet>(), 0, 0];
        // SAFETY: the kernel reads the structure. SIGKILL and SIGSTOP refuse, and keep the default anyway.
        let _ = unsafe { kernel::call(libc::SYS_rt_sigaction, arguments) };
    }
    kernel::block_signals(0);
}

/// The calling thread's priorities and its choice of processors are its own; the recorder works as the process does.
fn forget_scheduling(nice: usize) {
    let parameters: c_int = 0;
    let wishes: [(libc::c_long, [usize; 6]); 5] = [
        (
            libc::SYS_sched_setscheduler,
            [0, libc::SCHED_OTHER as usize, (&raw const parameters) as usize, 0, 0, 0],
        ),
        (
            libc::SYS_sched_setaffinity,
            [0, PROCESSORS.bytes.load(Ordering::Relaxed), PROCESSORS.words.as_ptr() as usize, 0, 0, 0],
        ),
        (libc::SYS_setpriority, [libc::PRIO_PROCESS as usize, 0, nice, 0, 0, 0]),
        (libc::SYS_ioprio_set, [IOPRIO_WHO_PROCESS, 0, 0, 0, 0, 0]),
        (libc::SYS_prctl, [libc::PR_SET_TIMERSLACK as usize, TIMER_SLACK, 0, 0, 0, 0]),
    ];
    for (number, arguments) in wishes {
        // SAFETY: the kernel reads a number and a set of processors, and changes what holds for this process.
        let _ = unsafe { kernel::call(number, arguments) };
    }
}

/// What the program allowed itself is not meant for the recorder.
fn forget_limits() {
    for resource in [
        libc::RLIMIT_AS,
        libc::RLIMIT_CORE,
        libc::RLIMIT_CPU,
        libc::RLIMIT_DATA,
        libc::RLIMIT_NOFILE,
        libc::RLIMIT_FSIZE,
        libc::RLIMIT_STACK,
    ] {
        let mut limits = MaybeUninit::<libc::rlimit64>::zeroed();
        let at = limits.as_mut_ptr() as usize;
        // SAFETY: the kernel writes one structure.
        if unsafe { kernel::call(libc::SYS_prlimit64, [0, resource as usize, 0, at, 0, 0]) }.is_ok() {
            // SAFETY: the kernel has just written it.
            let limits = unsafe { limits.assume_init_mut() };
            limits.rlim_cur = match resource {
                // A core file in the program's folder would be taken for the program's.
                libc::RLIMIT_CORE => 0,
                // Threads get as much by default, so that all of it would be too much.
                libc::RLIMIT_STACK => limits.rlim_cur.max(STACK_OF_RECORDER).min(limits.rlim_max),
                _ => limits.rlim_max,
            };
            // SAFETY: the kernel reads one structure.
            let _ = unsafe { kernel::call(libc::SYS_prlimit64, [0, resource as usize, at, 0, 0, 0]) };
        }
    }
}

/// Leaves stderr, for what must be said, if it still is the program's, the ring and the process; the program's pipes must close when it closes them. Our
/// table of descriptors is a copy.
fn settle_files(launch: &mut Launch) {
    // What has number 2 by now may be the program's data.
    let stderr = if messages::has_stderr() { 2 } else { -1 };
    close_all_but([stderr, launch.ring, launch.process]);
    let placed = place(&mut launch.process, &mut launch.ring);
    let n_arguments = match (placed, launch.process) {
        (true, PROCESS) => 8,
        (true, _) => 6,
        (false, _) => 4,
    };
    if let Some(end) = launch.arguments.get_mut(n_arguments) {
        *end = null();
    }
    let Some(nowhere) = nowhere() else { return };
    let closed = [0, 1, 2].into_iter().filter(|stream| *stream != nowhere && *stream != stderr as usize);
    for stream in closed {
        let _ = move_file(nowhere as c_int, stream, 0);
    }
    if nowhere > 2 {
        close(nowhere);
    }
}

/// A file that nothing is read from or written to. A program of Rust's that finds a standard stream closed, and cannot open /dev/null,
/// ends itself (`sanitize_standard_fds` of std's runtime), so in a sandbox without that file (Landlock) a pipe without a writer stands
/// in for it.
fn nowhere() -> Option<usize> {
    for access in [libc::O_RDWR, libc::O_RDONLY] {
        let path = c"/dev/null".as_ptr() as usize;
        // SAFETY: the path ends with a zero.
        let file = unsafe {
            kernel::call(libc::SYS_openat, [libc::AT_FDCWD as usize, path, access as usize, 0, 0, 0])
        };
        if let Ok(file) = file {
            return Some(file);
        }
    }
    let mut ends: [c_int; 2] = [-1; 2];
    // SAFETY: the kernel writes two numbers.
    unsafe { kernel::call(libc::SYS_pipe2, [ends.as_mut_ptr() as usize, 0, 0, 0, 0, 0]) }.ok()?;
    let [reader, writer] = ends;
    close(writer as usize);
    Some(reader as usize)
}

/// Moves both to where the recorder looks for them; false if it must look by name.
fn place(process: &mut c_int, ring: &mut c_int) -> bool {
    if *ring < 0 {
        return false;
    }
    // Out of each other's way first.
    let arguments = [*ring as usize, libc::F_DUPFD as usize, SPARE, 0, 0, 0];
    // SAFETY: takes numbers.
    let Ok(spare) = (unsafe { kernel::call(libc::SYS_fcntl, arguments) }) else { return false };
    close(*ring as usize);
    if *process >= 0 && *process != PROCESS {
        let from = *process;
        *process = if move_file(from, PROCESS as usize, 0).is_ok() { PROCESS } else { -1 };
        close(from as usize);
    } else if *process == PROCESS {
        // It was opened to be closed by exec.
        // SAFETY: takes numbers.
        let _ =
            unsafe { kernel::call(libc::SYS_fcntl, [PROCESS as usize, libc::F_SETFD as usize, 0, 0, 0, 0]) };
    }
    let is_placed = move_file(spare as c_int, RING as usize, 0).is_ok();
    close(spare);
    is_placed
}

fn move_file(from: c_int, to: usize, flags: usize) -> Answer {
    // SAFETY: takes numbers; whatever had this one was the program's, and this table is a copy.
    unsafe { kernel::call(libc::SYS_dup3, [from as usize, to, flags, 0, 0, 0]) }
}

fn close(file: usize) {
    // SAFETY: this table of descriptors is a copy.
    let _ = unsafe { kernel::call(libc::SYS_close, [file, 0, 0, 0, 0, 0]) };
}

/// Closes every other descriptor.
fn close_all_but(mut kept: [c_int; 3]) {
    kept.sort_unstable();
    if !close_ranges(kept) && !close_listed(kept) {
        let most = kernel::limit(libc::RLIMIT_NOFILE).min(1 << 20) as c_int;
        for file in (0..most).filter(|file| !kept.contains(file)) {
            close(file as usize);
        }
    }
}

/// By ranges (Linux 5.9).
fn close_ranges(kept: [c_int; 3]) -> bool {
    if !kernel::may_use_rare_calls() {
        return false;
    }
    let mut from = 0;
    for file in kept.into_iter().chain([c_int::MAX]) {
        if file > from {
            // SAFETY: this table of descriptors is a copy.
            let answer = unsafe {
                kernel::call(libc::SYS_close_range, [from as usize, file as usize - 1, 0, 0, 0, 0])
            };
            if answer.is_err() {
                return false;
            }
        }
        from = from.max(file.saturating_add(1));
    }
    true
}

/// As `/proc` lists them; false if there is no such list.
fn close_listed(kept: [c_int; 3]) -> bool {
    loop {
        let mut n_closed = 0;
        let is_listed = kernel::list_numbers(c"/proc/self/fd", |file, folder| {
            if file != folder && !kept.contains(&file) {
                close(file as usize);
                n_closed += 1;
            }
        });
        // A list that changes while it is read may leave some out.
        if !is_listed || n_closed == 0 {
            return is_listed;
        }
    }
}

/// A call that takes nothing and cannot fail in a way that matters.
fn number(call: libc::c_long) -> usize {
    // SAFETY: takes nothing.
    unsafe { kernel::call(call, [0; 6]) }.unwrap_or(0)
}

/// `wait4(2)` for one process.
fn wait(process: usize, options: c_int) -> Answer {
    loop {
        // SAFETY: no result is written anywhere.
        match unsafe { kernel::call(libc::SYS_wait4, [process, 0, options as usize, 0, 0, 0]) } {
            Err(libc::EINTR) => {}
            answer => return answer,
        }
    }
}
