//! Code that is on a device already. From CUDA 12 on, the runtime asks the driver for a kernel's function at every launch;
//! only the first time is code brought to the device, and memory taken for it.

use crate::session;
use crate::stack::mix;
use core::sync::atomic::{AtomicU64, Ordering};
use gputrace_ring::record::Action;

/// Functions that are remembered, one a slot: a program has a few hundred. Of two in one slot, each is told again
/// whenever the other was.
const SLOTS: usize = 4096;

static KNOWN: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];
/// How often code or what holds it went: handles known before may be given to others.
static GONE: AtomicU64 = AtomicU64::new(0);

/// A function or module whose code a session was told of: the mark is no address, and never 0.
#[derive(Clone, Copy)]
pub(crate) struct Told {
    slot: usize,
    mark: u64,
}

impl Told {
    /// By the row of the hook and the handle that it gave or was given.
    #[inline]
    pub(crate) fn of(row: u16, handle: u64) -> Told {
        let age = session::generation() ^ GONE.load(Ordering::Relaxed).rotate_left(48) ^ u64::from(row) << 32;
        let mark = mix(mix(0, age), handle) | 1;
        Told { slot: (mark >> 32) as usize % SLOTS, mark }
    }

    /// Whether the session was told already.
    #[inline]
    pub(crate) fn is_known(self) -> bool {
        KNOWN.get(self.slot).is_some_and(|slot| slot.load(Ordering::Relaxed) == self.mark)
    }

    /// The session was told.
    pub(crate) fn remember(self) {
        if let Some(slot) = KNOWN.get(self.slot) {
            slot.store(self.mark, Ordering::Relaxed);
        }
    }
}

/// To be called before and after a recorded call: forgets all functions where one of them may be gone.
#[inline]
pub(crate) fn note(action: Action) {
    if matches!(
        action,
        Action::CodeUnload | Action::ContextDestroy | Action::PrimaryRelease | Action::PrimaryReset
    ) {
        GONE.fetch_add(1, Ordering::Relaxed);
    }
}

/// Forgets all functions.
pub(crate) fn forget() {
    GONE.fetch_add(1, Ordering::Relaxed);
}
