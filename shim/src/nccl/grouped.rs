//! Numbers that the calls of an open group took, to be given back when it is only simulated.

use core::sync::atomic::{AtomicU64, Ordering};

/// Calls of one group whose numbers can be given back when it is only simulated.
const MOST_GROUPED: usize = 1024;

/// Numbers that the calls of an open group took.
pub(crate) struct Grouped {
    n: usize,
    counters: [Option<&'static AtomicU64>; MOST_GROUPED],
}

impl Grouped {
    /// A call took one.
    #[inline]
    pub(crate) fn push(&mut self, counter: &'static AtomicU64) {
        if let Some(slot) = self.counters.get_mut(self.n) {
            *slot = Some(counter);
            self.n += 1;
        }
    }

    /// The group is over.
    #[inline]
    pub(crate) fn close(&mut self, simulated: bool) {
        if simulated {
            for counter in self.counters.iter().take(self.n).flatten() {
                counter.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.n = 0;
    }
}
