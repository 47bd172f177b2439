//! Rings of sessions that are over: unmapped once no thread can write to them any more.
//!
//! A thread writes to a ring only behind a mark: its line's (`lanes`), and before it has a line, [`session::Coming`]. It looks at the
//! generation again when the mark is set. Who ends a session does both the other way round:
//!
//! ```text
//! a thread                              who ends the session
//! its mark is set                       the generation is OFF
//! (the compiler keeps the order)        membarrier: every processor that runs one of our threads orders its accesses
//! the generation is another: no write   a mark is set: the ring stays for now
//! ```
//!
//! So one of the two sees the other, and the fast path has no barrier. What cannot be unmapped is tried again when somebody next
//! attaches or detaches; the recorder has given its memory back by then, so that it takes addresses alone.

use crate::kernel;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use gputrace_ring::map::Map;

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED` and its registration (linux/membarrier.h, Linux 4.14).
const BARRIER: usize = 1 << 3;
const REGISTER: usize = 1 << 4;
/// Rings that wait to be unmapped. More stay mapped: that many threads would have been torn away in the middle of an event, each
/// in another session, and be idle since.
const MOST: usize = 8;

/// A ring that is still mapped; all 0 is none. Only who holds the session's state word reads and writes these.
struct Left {
    at: AtomicUsize,
    bytes: AtomicUsize,
    /// Its session.
    generation: AtomicU64,
}

static LEFT: [Left; MOST] =
    [const { Left { at: AtomicUsize::new(0), bytes: AtomicUsize::new(0), generation: AtomicU64::new(0) } };
        MOST];

/// Before a ring is used that may be given back: the barrier asks for it.
pub(crate) fn prepare() {
    barrier(REGISTER);
}

/// The session of this ring is over. Only for who holds the session's state word.
pub(crate) fn leave(map: Map, generation: u64) {
    let (base, bytes) = map.extent();
    if let Some(free) = LEFT.iter().find(|left| left.at.load(Ordering::Relaxed) == 0) {
        free.bytes.store(bytes, Ordering::Relaxed);
        free.generation.store(generation, Ordering::Relaxed);
        free.at.store(base as usize, Ordering::Relaxed);
    }
}

/// Unmaps the rings to which nobody can write any more; how many bytes stay. No session is on, the caller holds the session's state
/// word. `is_alone` says whether no other thread is on its way to a line, and `is_writing` whether one is in the middle of an event of
/// that session.
pub(crate) fn give_back(is_alone: impl Fn() -> bool, is_writing: fn(u64) -> bool) -> usize {
    let wait = || LEFT.iter().filter(|left| left.at.load(Ordering::Relaxed) != 0);
    if wait().next().is_some() && barrier(BARRIER) && is_alone() {
        for left in wait().filter(|left| !is_writing(left.generation.load(Ordering::Relaxed))) {
            let at = left.at.swap(0, Ordering::Relaxed) as *mut u8;
            // SAFETY: the mapping is ours, and the marks say that nobody is in it, nor comes again: its session is over.
            unsafe { kernel::unmap(at, left.bytes.load(Ordering::Relaxed)) };
        }
    }
    wait().map(|left| left.bytes.load(Ordering::Relaxed)).sum()
}

/// False where the kernel does not have it, or may not be asked.
fn barrier(command: usize) -> bool {
    // SAFETY: takes numbers.
    kernel::may_use_rare_calls()
        && unsafe { kernel::call(libc::SYS_membarrier, [command, 0, 0, 0, 0, 0]) }.is_ok()
}
