//! The textbook allocator: one address-ordered free list, immediate joining, everything is split. Streams are ignored.
//! Segments are made in steps of `segment`; cached ones go back when memory runs out.

use crate::device::{Device, PAGE, Placement};
use crate::policies::{Fidelity, OptionError, OutOfMemory, Policy, PolicyEntry, Request, amount, key_values};
use crate::ranges::{Fit, Ranges, Segments, range_of};
use crate::skip::State;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "best_fit",
    summary: "textbook allocator: one free list, everything is split and joined",
    options: "fit=best|first|worst, segment=BYTES (2MiB)",
    fidelity: Fidelity::Exact,
    build: |build| {
        let mut policy = BestFit::default();
        for (key, value) in key_values(build.options, &["fit", "segment"])? {
            match (key, value) {
                ("fit", "best") => policy.fit = Fit::Best,
                ("fit", "first") => policy.fit = Fit::First,
                ("fit", "worst") => policy.fit = Fit::Worst,
                ("fit", other) => {
                    return Err(OptionError(format!("fit={other}: it is best, first or worst")));
                }
                _ => policy.segment = amount(key, value)?.max(PAGE).next_multiple_of(PAGE),
            }
        }
        Ok(Box::new(policy))
    },
};

pub(super) struct BestFit {
    fit: Fit,
    segment: u64,
    ranges: Ranges,
    segments: Segments,
}

impl Default for BestFit {
    fn default() -> BestFit {
        BestFit { fit: Fit::Best, segment: PAGE, ranges: Ranges::default(), segments: Segments::default() }
    }
}

impl BestFit {
    /// Serves a request from what is cached, or else from a new segment.
    pub(super) fn serve(&mut self, device: &mut Device, bytes: u64) -> Option<Placement> {
        self.cached(bytes).or_else(|| self.obtained(device, bytes))
    }

    /// The same when everything cached was given back: the flush waited for the streams, so something may fit now.
    pub(super) fn serve_after_trim(&mut self, device: &mut Device, bytes: u64) -> Option<Placement> {
        self.obtained(device, bytes).or_else(|| self.cached(bytes))
    }

    fn cached(&mut self, bytes: u64) -> Option<Placement> {
        self.ranges.place(bytes.next_multiple_of(512), self.fit)
    }

    fn obtained(&mut self, device: &mut Device, bytes: u64) -> Option<Placement> {
        let wanted = bytes.next_multiple_of(512);
        let range = self.segments.map(device, wanted.next_multiple_of(self.segment))?;
        Some(self.ranges.split(range, wanted))
    }

    /// Takes memory back.
    pub(super) fn give(&mut self, placement: Placement) {
        self.ranges.give(range_of(placement));
    }

    /// Gives every whole free segment back.
    pub(super) fn give_back(&mut self, device: &mut Device) {
        self.segments.unmap_whole(device, &mut self.ranges);
    }
}

impl Policy for BestFit {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        if let Some(placement) = self.serve(device, request.bytes) {
            return Ok(placement);
        }
        self.trim(device);
        let served = self.serve_after_trim(device, request.bytes);
        served.ok_or_else(|| {
            OutOfMemory::plain(request.bytes.next_multiple_of(512).next_multiple_of(self.segment))
        })
    }

    fn free(&mut self, _device: &mut Device, placement: Placement) {
        self.give(placement);
    }

    fn trim(&mut self, device: &mut Device) {
        device.synchronize().into_iter().for_each(|placement| self.give(placement));
        self.give_back(device);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("largest_free_bytes", self.ranges.iter().map(|range| range.bytes).max().unwrap_or(0))]
    }

    fn write(&self, to: &mut State, live: &[Placement]) -> bool {
        let _ = live;
        self.ranges.write(to);
        self.segments.write(to);
        true
    }
}
