//! The progress of a thread that reads a trace, for a progress display.

use std::cell::RefCell;
use std::sync::Arc;

/// Gets the blocks of events that were read, and how many there are.
pub type Told = Arc<dyn Fn(usize, usize) + Send + Sync>;

thread_local! {
    static TOLD: RefCell<Option<Told>> = const { RefCell::new(None) };
}

/// From now on tells `told` how far this thread is in each pass over a trace; returns who was told before.
pub fn tell(told: Option<Told>) -> Option<Told> {
    TOLD.replace(told)
}

pub(super) fn is_at(block: usize, n_blocks: usize) {
    TOLD.with_borrow(|told| {
        if let Some(told) = told {
            told(block, n_blocks);
        }
    });
}
