//! What the process knows about itself without a system call: its number, and whether it may make calls.
//!
//! A program may put itself under a sandbox at any time, which may kill whoever makes a call that the program does not make. Only
//! the recorder, outside of the sandbox, can see that happen. So what a thread needs is learnt when the session begins. The few questions
//! that remain (memory of a coroutine's stack or of a library that was loaded later) are asked only while the recorder says that no
//! filter has been added ([`map::SandboxLine`]). Between a filter and the recorder's next look some milliseconds may pass, in
//! which such a question could still be asked.

use crate::kernel;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
use gputrace_ring::clock;
use gputrace_ring::map::{self, SandboxLine};

/// Lies on the page that the kernel empties in a forked child.
pub(crate) struct Own {
    /// Number of the process; 0 not asked yet.
    process: AtomicU32,
    /// What the session's recorder says; null before the first session.
    sandbox: AtomicPtr<SandboxLine>,
    /// When the session began, in nanoseconds of `CLOCK_MONOTONIC`.
    began: AtomicU64,
    /// Threads that read there now: the ring stays mapped meanwhile ([`crate::rings`]).
    readers: AtomicU32,
    /// A filter had been added when the last session ended.
    was_sandboxed: AtomicU32,
}

static OWN: AtomicPtr<Own> = AtomicPtr::new(null_mut());

/// How old the recorder's last look may be. It looks every few milliseconds; one that is stopped, or was killed, says nothing any more.
const FRESH: u64 = 5_000_000_000;
/// How long a recorder may take to its first look. With eighty processes on two processors, 1 s was too little now and then, and stacks
/// lacked their Python frames.
const STARTING: u64 = FRESH;

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

/// A session begins, in which the recorder says here what it sees.
pub(crate) fn begin(sandbox: &'static SandboxLine) {
    if let Some(own) = own() {
        process();
        own.began.store(clock::nanos(libc::CLOCK_MONOTONIC_COARSE), Ordering::Relaxed);
        own.sandbox.store(core::ptr::from_ref(sandbox).cast_mut(), Ordering::SeqCst);
    }
}

/// The session is over, and with it what its recorder says. A filter is never taken off again.
pub(crate) fn end() {
    if let Some(own) = own() {
        own.was_sandboxed.store(u32::from(!may_ask()), Ordering::Relaxed);
        own.sandbox.store(null_mut(), Ordering::SeqCst);
    }
}

/// Whether a thread reads what the recorder says. Once the session is over, none begins to.
pub(crate) fn is_read() -> bool {
    own().is_some_and(|own| own.readers.load(Ordering::SeqCst) != 0)
}

/// Whether the kernel may be asked what it could be asked when the session began. Without a session it may.
pub(crate) fn may_ask() -> bool {
    let Some(own) = own() else { return true };
    // Counted before the pointer is read: whoever ends the session takes the pointer away, and then looks at the count.
    own.readers.fetch_add(1, Ordering::SeqCst);
    let may = is_allowed(own);
    own.readers.fetch_sub(1, Ordering::SeqCst);
    may
}

fn is_allowed(own: &Own) -> bool {
    // SAFETY: null, or what `begin` was given; its ring is not unmapped while we are counted.
    let Some(sandbox) = (unsafe { own.sandbox.load(Ordering::SeqCst).cast_const().as_ref() }) else {
        return own.was_sandboxed.load(Ordering::Relaxed) == 0;
    };
    let since = |then: &AtomicU64| {
        clock::nanos(libc::CLOCK_MONOTONIC_COARSE).saturating_sub(then.load(Ordering::Relaxed))
    };
    if sandbox.relied.load(Ordering::Relaxed) == 0 {
        sandbox.relied.store(1, Ordering::Relaxed);
    }
    match sandbox.state.load(Ordering::Acquire) {
        map::AS_BEFORE => since(&sandbox.looked) < FRESH,
        map::NOT_LOOKED => since(&own.began) < STARTING,
        _ => false,
    }
}
