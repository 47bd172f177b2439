//! Skips what a replay has simulated before, by proof.
//!
//! A training step is the same thing ten thousand times. `repeats` finds where the requests repeat, op by op. At the beginnings of
//! such windows the whole state of the replay is written down (`state`): what the policy, the device, the model of the driver and the live
//! allocations are. Where it is, word for word, what it was some windows before, and the windows ahead ask for what those between asked for,
//! then what comes of them is known: the state comes back again and again. So they are skipped: what is counted is counted as often as it
//! would have been, peaks stand, and the allocations that are live get the names that they would have had.
//!
//! ```text
//!   ops    | A B C | A B C | A B C | A B C | A B C | A B D ...
//!   state  s0      s1      s2      s1      ^ skipped       ^ goes on in the state s1 or s2
//! ```
//!
//! No hash decides anything here: requests and states are compared as they are. Why equal states with equal requests have equal futures:
//!
//! - Ids. A window names an allocation by an id that is `Repeat::shift` above that of the window before. Live allocations that the windows
//!   ahead may name, from `Repeat::oldest_at` on, are written relative to the window; older ones are never named, and are written as they
//!   are. So each request and free of a window concerns what it concerned in the window before.
//! - Names. Numbers of blocks and segments only name, or order: their order is written.
//! - Time. What depends on the index of an op ends a skip: the next change of what others hold, the next fact about the driver, and what an
//!   observer waits for.
//! - Whoever does not write its state ([`Policy::write`], [`AddressSpace::write`]), or watches each request ([`Observer::edge`]), is never
//!   skipped. So is everything that the auditor watches.
//!
//! [`Policy::write`]: crate::policies::Policy::write
//! [`AddressSpace::write`]: crate::addresses::AddressSpace::write
//! [`Observer::edge`]: crate::simulator::Observer::edge

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

mod repeats;
mod state;
#[cfg(test)]
pub(crate) mod tests;
mod tracker;

pub(crate) use repeats::Repeats;
pub use state::State;
pub(crate) use tracker::{Edge, Seen, Tracked, Trackers};

static IS_OFF: AtomicBool = AtomicBool::new(false);
static N_OPS: AtomicU64 = AtomicU64::new(0);
static N_SKIPPED: AtomicU64 = AtomicU64::new(0);

/// From here on every op of every replay of this process is simulated. The results are the same, later.
pub fn never() {
    IS_OFF.store(true, Ordering::Relaxed);
}

pub(crate) fn is_on() -> bool {
    !IS_OFF.load(Ordering::Relaxed)
}

/// How much of the replays of this process was known before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Requests and frees that were replayed, in all replays together.
    pub n_ops: u64,
    /// Those of them that needed no simulation.
    pub n_skipped: u64,
}

/// How much of the replays so far was known before.
#[must_use]
pub fn share() -> Share {
    Share { n_ops: N_OPS.load(Ordering::Relaxed), n_skipped: N_SKIPPED.load(Ordering::Relaxed) }
}

/// A replay is over.
pub(crate) fn count(n_ops: u64, n_skipped: u64) {
    N_OPS.fetch_add(n_ops, Ordering::Relaxed);
    N_SKIPPED.fetch_add(n_skipped, Ordering::Relaxed);
}
