//! How often which function was called, for how much, and how long it took.

use gputrace_schemas::event::{Bytes, Call, Event, Nanos, ThreadId};
use rustc_hash::FxHashMap;

use super::sites::{NameId, SiteId};

/// `CUDA_ERROR_DEINITIALIZED`, cuda.h.
const DEINITIALIZED: i32 = 4;

/// Values by their order of magnitude: bucket `n` holds values from 2^(n-1) to 2^n - 1, bucket 0 holds 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Histogram {
    buckets: [u64; 65],
    sum: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: [0; 65], sum: 0, max: 0 }
    }
}

impl Histogram {
    fn add(&mut self, value: u64) {
        self.buckets[64 - value.leading_zeros() as usize] += 1;
        self.sum = self.sum.saturating_add(value);
        self.max = self.max.max(value);
    }

    /// Number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Sum of the values.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// The largest value.
    #[must_use]
    pub fn max(&self) -> u64 {
        self.max
    }

    /// A bound that `share` (0 to 1) of the values do not exceed, at most twice the true quantile.
    #[must_use]
    pub fn quantile_bound(&self, share: f64) -> u64 {
        let wanted = (self.count() as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (idx, n) in self.buckets.iter().enumerate() {
            seen += n;
            if seen >= wanted && seen > 0 {
                return upper(idx).min(self.max);
            }
        }
        self.max
    }

    /// Buckets that hold anything: smallest and largest value that would fall into it, and how many did.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64, u64)> {
        let buckets = self.buckets.iter().enumerate().filter(|(_, n)| **n > 0);
        buckets.map(|(idx, n)| (upper(idx) / 2 + u64::from(idx > 0), upper(idx), *n))
    }
}

fn upper(bucket: usize) -> u64 {
    if bucket == 0 { 0 } else { u64::MAX >> (64 - bucket) }
}

/// The calls of one function.
#[derive(Clone, Debug, Default)]
pub struct CallCounts {
    /// How many.
    pub calls: u64,
    /// How many the driver refused.
    pub failed: u64,
    /// Bytes of each that allocates memory.
    pub sizes: Histogram,
    /// Nanoseconds that each took.
    pub durations: Histogram,
}

impl CallCounts {
    /// Time spent in the function by all threads together.
    #[must_use]
    pub fn time(&self) -> Nanos {
        Nanos(self.durations.sum())
    }
}

/// A call that had not returned when the process ended.
#[derive(Clone, Copy, Debug)]
pub struct OpenCall {
    /// When it began.
    pub time: Nanos,
    /// Which.
    pub name: NameId,
    /// On which thread.
    pub thread: ThreadId,
    /// From where.
    pub site: SiteId,
}

/// All counts of a process.
#[derive(Debug, Default)]
pub struct Counts {
    calls: FxHashMap<NameId, CallCounts>,
    blocks: Histogram,
    /// Calls that the process ended in.
    pub open_calls: Vec<OpenCall>,
    /// Frees that the driver refused because it was shutting down.
    pub n_after_shutdown: u64,
}

impl Counts {
    pub(super) fn call(&mut self, (name, site): (NameId, SiteId), event: &Event, call: &Call) {
        match call.result {
            None => self.open_calls.push(OpenCall { time: event.time, name, thread: event.thread, site }),
            Some(_) => self.n_after_shutdown += u64::from(is_after_shutdown(call)),
        }
        let counts = self.calls.entry(name).or_default();
        counts.calls += 1;
        counts.failed += u64::from(call.result.is_some_and(|result| result != 0));
        counts.durations.add(call.duration.0);
        if call.action.gives() && call.result == Some(0) {
            counts.sizes.add(call.bytes.0);
        }
    }

    /// Calls and sizes are counted from here on.
    pub(super) fn begin_anew(&mut self) {
        (self.calls, self.blocks) = Default::default();
    }

    pub(super) fn block(&mut self, bytes: Bytes) {
        self.blocks.add(bytes.0);
    }

    /// Calls by function.
    pub fn calls(&self) -> impl Iterator<Item = (NameId, &CallCounts)> {
        self.calls.iter().map(|(name, counts)| (*name, counts))
    }

    /// Sizes of PyTorch's blocks.
    #[must_use]
    pub fn blocks(&self) -> &Histogram {
        &self.blocks
    }
}

/// The driver took nothing back because it was shutting down: every library that frees in a destructor sees it.
pub(super) fn is_after_shutdown(call: &Call) -> bool {
    call.result == Some(DEINITIALIZED) && !call.action.gives()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_powers_of_two() {
        let mut sizes = Histogram::default();
        for value in [0, 1, 512, 513, 1023, 1024, u64::MAX] {
            sizes.add(value);
        }
        let buckets: Vec<_> = sizes.buckets().collect();
        assert_eq!(buckets, [(0, 0, 1), (1, 1, 1), (512, 1023, 3), (1024, 2047, 1), (1 << 63, u64::MAX, 1)]);
        assert_eq!((sizes.count(), sizes.max()), (7, u64::MAX));
        assert_eq!((sizes.quantile_bound(0.5), sizes.quantile_bound(1.0)), (1023, u64::MAX));
    }
}
