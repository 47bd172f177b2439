//! What the open group of a thread will launch, and the events that stand around it. `timing.rs` fills it.

use core::num::NonZeroU32;

/// Communicators and streams of one group.
pub(super) const MOST_NOTED: usize = 64;

/// A pair of events in a thread's hands: never 0, so that all zeros are no pair where a thread keeps them.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Taken(pub(super) NonZeroU32);

/// What the thread's open group will launch.
pub(crate) struct Noted {
    pub(super) n: usize,
    pub(super) is_full: bool,
    pub(super) places: [(u32, u64); MOST_NOTED],
    pub(super) taken: [Option<Taken>; MOST_NOTED],
}

impl Noted {
    /// Nothing is noted: another thread's groups are its own.
    pub(crate) fn clear(&mut self) {
        (self.n, self.is_full) = (0, false);
        self.taken.fill(None);
    }
}
