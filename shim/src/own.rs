//! What the process knows about itself without a system call: its number, and whether it may make calls.
//!
//! A program may put itself under a sandbox at any time, which may kill whoever makes a call that the program does not make. Only
//! the recorder, outside of the sandbox, can see that happen. So what a thread needs is learnt when the session begins. The few questions
//! that remain are asked only after the recorder has looked at the thread in the middle of the same event ([`map::SandboxLine`]): no
//! look, no call. While it looks the thread keeps its processor busy, for [`PATIENCE`] at most, at the session's start [`FIRST_PATIENCE`].
//!
//! What is left: between the look and the call, some microseconds later, another thread may put a filter on all threads
//! (`SECCOMP_FILTER_FLAG_TSYNC`), and so may a signal handler of this thread.

use crate::{kernel, thread_id, tls};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use gputrace_ring::clock;
use gputrace_ring::map::{self, Header, SandboxLine};

/// Lies on the page that the kernel empties in a forked child.
pub(crate) struct Own {
    /// Number of the process; 0 not asked yet.
    process: AtomicU32,
    /// Where the session's recorder says what it sees; null before the first session.
    header: AtomicPtr<Header>,
    /// Threads that read there now: the ring stays mapped meanwhile ([`crate::rings`]).
    readers: AtomicU32,
    /// [`NONE_YET`], or how the last session ended.
    before: AtomicU32,
    /// Number of the last question.
    questions: AtomicU32,
    /// The recorder found no answer: until then, in nanoseconds of `CLOCK_MONOTONIC`, nobody asks.
    silent_until: AtomicU64,
    /// How often the recorder had looked when it left a question unanswered, and one more; 0 if it never did. Nobody asks until it looks again.
    silent_since: AtomicU64,
}

/// No session has ended.
const NONE_YET: u32 = 0;
/// One has.
const OVER: u32 = 1;
/// One has, and a filter had been added.
const SANDBOXED: u32 = 2;

static OWN: AtomicPtr<Own> = AtomicPtr::new(null_mut());

/// How long a thread waits for an answer, in nanoseconds. The recorder looks every few milliseconds, if it gets a processor.
const PATIENCE: u64 = 200_000_000;
/// The same while the recorder starts.
const FIRST_PATIENCE: u64 = 2_000_000_000;
/// How long nobody asks a recorder that cannot see the thread.
const SILENCE: u64 = 1_000_000_000;
/// Reads of the answer between two of the clock.
const READS: u32 = 64;

/// In [`tls::Tls::busy`], which is an address of a stack and so even: the thread may make calls until its event is over.
const LEAVE: usize = 1;

/// Says where it lies.
pub(crate) fn remember(own: &'static Own) {
    OWN.store(core::ptr::from_ref(own).cast_mut(), Ordering::Release);
}

fn own() -> Option<&'static Own> {
    // SAFETY: null, or what `remember` was given.
    unsafe { OWN.load(Ordering::Acquire).cast_const().as_ref() }
}

/// The process's number. Asks the kernel once; a forked child asks again.
pub(crate) fn process() -> u32 {
    let Some(own) = own() else { return kernel::process_id() };
    match own.process.load(Ordering::Relaxed) {
        0 => {
            let number = kernel::process_id();
            own.process.store(number, Ordering::Relaxed);
            number
        }
        number => number,
    }
}

/// A session begins, in which the recorder says here what it sees. The calling thread has just found out what it may do.
pub(crate) fn begin(header: &'static Header) {
    if let Some(own) = own() {
        process();
        own.silent_until.store(0, Ordering::Relaxed);
        own.silent_since.store(0, Ordering::Relaxed);
        own.header.store(core::ptr::from_ref(header).cast_mut(), Ordering::SeqCst);
        give_leave();
    }
}

/// The session has no recorder: nobody waits for one.
pub(crate) fn note_unrecorded() {
    if let Some(own) = own() {
        own.silent_since.store(1, Ordering::Relaxed);
    }
}

/// The session is over, and with it what its recorder says. A filter is never taken off again.
pub(crate) fn end() {
    if let Some(own) = own() {
        let is_sandboxed = read(own, |line| line.state.load(Ordering::Acquire) != map::AS_BEFORE);
        let how = if is_sandboxed == Some(true) { SANDBOXED } else { OVER };
        own.before.store(how, Ordering::Relaxed);
        own.header.store(null_mut(), Ordering::SeqCst);
    }
}

/// Whether a thread reads what the recorder says. Once the session is over, none begins to.
pub(crate) fn is_read() -> bool {
    own().is_some_and(|own| own.readers.load(Ordering::SeqCst) != 0)
}

/// Reads what the session's recorder says about sandboxes; `None` without a session.
fn read<T>(own: &Own, what: impl FnOnce(&SandboxLine) -> T) -> Option<T> {
    read_header(own, |header| what(&header.sandbox))
}

fn read_header<T>(own: &Own, what: impl FnOnce(&Header) -> T) -> Option<T> {
    // Counted before the pointer is read: whoever ends the session takes the pointer away, and then looks at the count.
    own.readers.fetch_add(1, Ordering::SeqCst);
    // SAFETY: null, or what `begin` was given; its ring is not unmapped while we are counted.
    let header = unsafe { own.header.load(Ordering::SeqCst).cast_const().as_ref() };
    let read = header.map(what);
    own.readers.fetch_sub(1, Ordering::SeqCst);
    read
}

/// Whether this thread may ask the kernel, until its event is over, what it could ask when the session began. Before the first session
/// it may.
pub(crate) fn may_ask() -> bool {
    let Some(own) = own() else { return true };
    if tls::here().busy.get() & LEAVE != 0 {
        return true;
    }
    let may = match read(own, |line| line.state.load(Ordering::Acquire)) {
        None => own.before.load(Ordering::Relaxed) == NONE_YET,
        Some(map::AS_BEFORE) => ask(own),
        Some(_) => false,
    };
    if may {
        give_leave();
    }
    may
}

/// Whether a session may be begun or ended, for somebody outside who has looked at the process before he asked for that.
pub(crate) fn may_obey() -> bool {
    let Some(own) = own() else { return true };
    // A recorder that is stopped or was killed answers nobody, and can be detached from all the same.
    match read(own, |line| line.state.load(Ordering::Acquire)) {
        Some(state) => state == map::AS_BEFORE,
        None => own.before.load(Ordering::Relaxed) != SANDBOXED,
    }
}

/// Until the event is over in which the thread is, if it is in one.
fn give_leave() {
    let busy = &tls::here().busy;
    if busy.get() != 0 {
        busy.set(busy.get() | LEAVE);
    }
}

/// What follows is not the event any more in which the thread was given leave.
pub(crate) fn take_leave() {
    let busy = &tls::here().busy;
    busy.set(busy.get() & !LEAVE);
}

/// Has the recorder look at the calling thread.
#[cold]
#[inline(never)]
fn ask(own: &Own) -> bool {
    let now = || clock::nanos(libc::CLOCK_MONOTONIC);
    let began = now();
    let Some(thread) = thread_id::known() else { return false };
    let Some(looks) = read(own, |line| line.looks.load(Ordering::Relaxed)) else { return false };
    let is_silent = own.silent_since.load(Ordering::Relaxed) == u64::from(looks) + 1;
    if is_silent || began < own.silent_until.load(Ordering::Relaxed) {
        return false;
    }
    let number = own.questions.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
    let question = u64::from(thread) << 32 | u64::from(number);
    let look = |line: &SandboxLine| {
        for _ in 0..READS {
            if line.state.load(Ordering::Relaxed) != map::AS_BEFORE {
                return Some(Answer::No);
            }
            // SYNC: nothing that follows was done before the recorder looked.
            if line.allowed.load(Ordering::Acquire) == question {
                return Some(Answer::Yes);
            }
            if line.unknown.load(Ordering::Relaxed) == question {
                return Some(Answer::Unknown);
            }
            core::hint::spin_loop();
        }
        // There is room for one question: it stands there until the recorder has seen it, or another thread has asked.
        line.question.store(question, Ordering::Release);
        None
    };
    let patience = if looks == 0 { FIRST_PATIENCE } else { PATIENCE };
    while now().saturating_sub(began) < patience {
        match read(own, look) {
            Some(None) => {}
            Some(Some(Answer::Yes)) => return true,
            Some(Some(Answer::Unknown)) => {
                own.silent_until.store(now().saturating_add(SILENCE), Ordering::Relaxed);
                return false;
            }
            // A session that is over has no recorder.
            Some(Some(Answer::No)) | None => return false,
        }
    }
    // It is stopped, or was killed, or gets no processor.
    if let Some(looks) = read(own, |line| line.looks.load(Ordering::Relaxed)) {
        own.silent_since.store(u64::from(looks) + 1, Ordering::Relaxed);
    }
    false
}

/// What the recorder says about the calling thread.
enum Answer {
    Yes,
    No,
    /// It cannot see the thread.
    Unknown,
}

/// Byte after the last of the mapping that holds this address, if the recorder has found it; else it will look for it. The address is one
/// of a stack on which the calling thread runs, so that the mapping is there.
pub(crate) fn end_of_mapping(at: u64) -> Option<u64> {
    let find = |header: &Header| {
        let found = header.extents.find(at);
        let wanted = &header.sandbox.stack_at;
        if found.is_none() && wanted.load(Ordering::Relaxed) == 0 {
            wanted.store(at, Ordering::Relaxed);
        }
        found.map(|(_, end)| end)
    };
    read_header(own()?, find).flatten()
}
