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
/// As [`Own::header`], but a forked child finds its parent's here: that recorder can look at the child, too.
static LAST: AtomicPtr<Header> = AtomicPtr::new(null_mut());

/// How long a thread waits for an answer, in nanoseconds. The recorder looks every few milliseconds, if it gets a processor. One that was
/// stopped costs this once.
const PATIENCE: u64 = 1_000_000_000;
/// The same while the recorder starts. With eighty processes on two processors, 1 s was too little now and then.
const FIRST_PATIENCE: u64 = 5_000_000_000;
/// How long nobody asks a recorder that cannot see the thread.
const SILENCE: u64 = 1_000_000_000;
/// Reads of the answer between two of the clock.
const READS: u32 = 64;

/// In the number of a question: a forked child asks.
const CHILD: u32 = 1 << 31;

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
        LAST.store(core::ptr::from_ref(header).cast_mut(), Ordering::Release);
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
        LAST.store(null_mut(), Ordering::Release);
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
        None => own.before.load(Ordering::Relaxed) == NONE_YET && may_begin(),
        Some(map::AS_BEFORE) => ask(own),
        Some(_) => false,
    };
    if may {
        give_leave();
    }
    may
}

/// Whether the process may begin its first session. A child that was forked under a filter may not: its parent's recorder looks at it.
pub(crate) fn may_begin() -> bool {
    let Some(own) = own() else { return true };
    if own.before.load(Ordering::Relaxed) == SANDBOXED {
        return false;
    }
    if own.before.load(Ordering::Relaxed) != NONE_YET || !own.header.load(Ordering::SeqCst).is_null() {
        return true;
    }
    // SAFETY: null, or the ring of a process that this one was forked from: the copy of its mapping stays.
    let Some(parent) = (unsafe { LAST.load(Ordering::Acquire).cast_const().as_ref() }) else { return true };
    let answer = match thread_id::known() {
        Some(thread) => {
            // Children that were made past the C library all have their parent's number there.
            let number = now() as u32 | CHILD;
            ask_for(thread, number, &|what| {
                what(parent);
                true
            })
        }
        None => Answer::None,
    };
    // Whoever cannot be told begins: a parent is often gone before its child comes to CUDA.
    let may = match answer {
        Answer::No => false,
        Answer::Yes => true,
        _ => parent.sandbox.state.load(Ordering::Acquire) == map::AS_BEFORE,
    };
    if !may {
        own.before.store(SANDBOXED, Ordering::Relaxed);
    }
    may
}

/// Whether a session may be begun or ended, for somebody outside who has looked at the process before he asked for that.
pub(crate) fn may_obey() -> bool {
    is_as_before()
}

/// Whether nobody has seen a sandbox that came after the session began.
pub(crate) fn is_as_before() -> bool {
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

/// What the recorder says about a thread.
enum Answer {
    Yes,
    No,
    /// It cannot see the thread.
    Unknown,
    /// It is stopped, or was killed, or gets no processor.
    None,
}

/// Shows the words of a session's recorder; false where there is no session any more.
type Show<'a> = &'a dyn Fn(&mut dyn FnMut(&Header)) -> bool;

/// Has the recorder look at the calling thread.
#[cold]
#[inline(never)]
fn ask(own: &Own) -> bool {
    let Some(thread) = thread_id::known().filter(|_| is_answering(own)) else { return false };
    let number = own.questions.fetch_add(1, Ordering::Relaxed).wrapping_add(1) & !CHILD;
    match ask_for(thread, number, &|what| read_header(own, what).is_some()) {
        Answer::Yes => return true,
        Answer::No => {}
        Answer::Unknown => own.silent_until.store(now().saturating_add(SILENCE), Ordering::Relaxed),
        Answer::None => note_silence(own),
    }
    false
}

fn ask_for(thread: u32, number: u32, show: Show) -> Answer {
    let question = u64::from(thread) << 32 | u64::from(number);
    let mut answer = Answer::None;
    // There is room for one question: it stands there until the recorder has seen it, or another thread has asked.
    let put = |header: &Header| header.sandbox.question.store(question, Ordering::Release);
    let look = |header: &Header| {
        let line = &header.sandbox;
        // SYNC: nothing that follows was done before the recorder looked.
        if line.allowed.load(Ordering::Acquire) == question {
            answer = Answer::Yes;
        } else if line.state.load(Ordering::Relaxed) != map::AS_BEFORE
            || line.forbidden.load(Ordering::Relaxed) == question
        {
            answer = Answer::No;
        } else if line.unknown.load(Ordering::Relaxed) == question {
            answer = Answer::Unknown;
        } else {
            return false;
        }
        true
    };
    wait(show, put, look);
    answer
}

/// Looks again and again: `put` first, then `look` until it says that there is an answer, the recorder takes too long, or there is no
/// session any more. Whether there is an answer.
fn wait(show: Show, mut put: impl FnMut(&Header), mut look: impl FnMut(&Header) -> bool) -> bool {
    let began = now();
    loop {
        let (mut is_answered, mut patience) = (false, PATIENCE);
        let is_there = show(&mut |header| {
            let is_dead = header.recorder_thread.value.load(Ordering::Relaxed) & map::DIED != 0;
            if is_dead || matches!(header.recorder.value.load(Ordering::Relaxed), map::COMPLETE | map::FAILED)
            {
                patience = 0;
            } else if header.sandbox.looks.load(Ordering::Relaxed) == 0 {
                patience = FIRST_PATIENCE;
            }
            put(header);
            is_answered = (0..READS).any(|_| {
                core::hint::spin_loop();
                look(header)
            });
        });
        if is_answered {
            return true;
        }
        if !is_there || now().saturating_sub(began) >= patience {
            return false;
        }
    }
}

fn now() -> u64 {
    clock::nanos(libc::CLOCK_MONOTONIC)
}

/// Whether there is any use in asking the recorder.
fn is_answering(own: &Own) -> bool {
    let looks = read(own, |line| line.looks.load(Ordering::Relaxed));
    let is_there =
        looks.is_some_and(|looks| own.silent_since.load(Ordering::Relaxed) != u64::from(looks) + 1);
    is_there && now() >= own.silent_until.load(Ordering::Relaxed)
}

/// Nobody asks until the recorder looks again.
fn note_silence(own: &Own) {
    if let Some(looks) = read(own, |line| line.looks.load(Ordering::Relaxed)) {
        own.silent_since.store(u64::from(looks) + 1, Ordering::Relaxed);
    }
}

/// Byte after the last of the mapping that holds this address, if the recorder has found it. The address is one of a stack on which the
/// calling thread runs, so that the mapping is there.
pub(crate) fn end_of_mapping(at: u64) -> Option<u64> {
    let found = read_header(own()?, |header| header.extents.find(at).ok().flatten());
    found.flatten().map(|(_, end)| end)
}

/// As [`end_of_mapping`], and has the recorder look for it. `None` if it takes too long, or cannot see the process's mappings.
#[cold]
#[inline(never)]
pub(crate) fn find_end_of_mapping(at: u64) -> Option<u64> {
    let own = own()?;
    if !is_answering(own) {
        return None;
    }
    let sought = core::cell::Cell::new(None);
    let mut found = None;
    let put = |header: &Header| {
        let line = &header.sandbox;
        // SYNC: what was sought until then was not this.
        if line.stack_at.compare_exchange(0, at, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            sought.set(Some(line.stacks_sought.load(Ordering::Relaxed)));
        }
    };
    let look = |header: &Header| {
        // SYNC: what the recorder has found.
        let n = header.sandbox.stacks_sought.load(Ordering::Acquire);
        // While ranges change, one that is there may not be found.
        let Ok(range) = header.extents.find(at) else { return false };
        found = range;
        found.is_some() || sought.get().is_some_and(|before| before != n)
    };
    if !wait(&|what| read_header(own, what).is_some(), put, look) {
        note_silence(own);
    }
    found.map(|(_, end)| end)
}
