//! What PyTorch's cache cost: memory given back only to be bought again, and bought although as much lay unused.
//!
//! ```text
//!   empty_cache()   gives back  | a trim: frees outside `allocate`
//!   allocate        cudaMalloc  | bought again, up to what trims gave back
//!   allocate        cudaMalloc  | a misfit, if the cache had as much, in pieces too small or of other streams
//! ```
//! Segments are `cudaMalloc`s; the pages of an expandable segment count one by one.

use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_sim::policies::torch::SMALL_SEGMENT;

use super::sites::SiteId;

/// Most sizes kept of one call site.
const MAX_SIZES: usize = 1000;
/// Most misfits of which it is kept when.
const MAX_MISFITS: usize = 4096;

/// What PyTorch's cache on one device bought and freed.
#[derive(Clone, Debug, Default)]
pub struct CacheBooks {
    /// Given back outside `allocate` (`empty_cache`), by call site.
    pub trims: BTreeMap<SiteId, Trims>,
    /// Bought to replace what trims freed.
    pub bought_again: Traffic,
    /// Bought although the cache had as much, by the call site that asked.
    pub misfits: BTreeMap<SiteId, Misfits>,
    /// Segments bought in all.
    pub bought: Traffic,
    /// The first thousands of misfits: after how many requests each was bought, and how large.
    pub misfits_over_time: Vec<(u64, Bytes)>,
    held: u64,
    missing: u64,
    last_trim: Option<(SiteId, u64)>,
    /// Bought for the next block, though the cache had as much.
    misfit: Option<(Bytes, Nanos)>,
}

/// Segments that changed hands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Traffic {
    /// How many.
    pub segments: u64,
    /// How large together.
    pub bytes: Bytes,
    /// How long the driver's functions took.
    pub time: Nanos,
}

/// What one call site freed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Trims {
    /// How often it gave something back, with blocks allocated or taken back in between.
    pub times: u64,
    /// What it freed.
    pub given: Traffic,
}

/// What was bought for one call site although the cache had as much.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Misfits {
    /// What was bought.
    pub bought: Traffic,
    /// The different sizes of what was bought; the first thousand.
    pub sizes: BTreeSet<Bytes>,
}

impl Traffic {
    fn add(&mut self, bytes: Bytes, time: Nanos) {
        self.segments += 1;
        self.bytes.0 = self.bytes.0.saturating_add(bytes.0);
        self.time.0 = self.time.0.saturating_add(time.0);
    }
}

impl CacheBooks {
    /// A segment was bought, while blocks of `allocated` bytes were handed out.
    pub(super) fn buys(&mut self, bytes: Bytes, allocated: Bytes, time: Nanos) {
        self.bought.add(bytes, time);
        let again = self.missing.min(bytes.0);
        if again > 0 {
            self.missing -= again;
            self.bought_again.add(Bytes(again), time);
        }
        // What is free in the small pool's segments does not serve large requests.
        let fits = bytes.0 != SMALL_SEGMENT && self.held.saturating_sub(allocated.0) >= bytes.0;
        self.misfit = fits.then_some((bytes, time));
        self.held = self.held.saturating_add(bytes.0);
    }

    /// The `now`th block was handed out, from what was bought just before if anything was.
    pub(super) fn serves(&mut self, now: u64, site: SiteId) {
        let Some((bytes, time)) = self.misfit.take() else { return };
        let misfits = self.misfits.entry(site).or_default();
        misfits.bought.add(bytes, time);
        if self.misfits_over_time.len() < MAX_MISFITS {
            self.misfits_over_time.push((now, bytes));
        }
        if misfits.sizes.len() < MAX_SIZES {
            misfits.sizes.insert(bytes);
        }
    }

    /// A segment was given back to serve a request: to make room for it.
    pub(super) fn makes_room(&mut self, bytes: Bytes) {
        self.held = self.held.saturating_sub(bytes.0);
    }

    /// A segment was given back by itself, after blocks had changed hands `n_changes` times.
    pub(super) fn trims(&mut self, site: SiteId, bytes: Bytes, n_changes: u64, time: Nanos) {
        self.makes_room(bytes);
        self.missing = self.missing.saturating_add(bytes.0);
        let trims = self.trims.entry(site).or_default();
        trims.given.add(bytes, time);
        if self.last_trim.replace((site, n_changes)) != Some((site, n_changes)) {
            trims.times += 1;
        }
    }
}
