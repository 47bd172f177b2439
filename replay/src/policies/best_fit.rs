//! The textbook allocator: one address-ordered free list, immediate joining, everything is split. Streams are ignored.
//! Segments are made in steps of `segment`; cached ones go back when memory runs out.

use crate::device::{Device, PAGE, Placement};
use crate::policies::{Fidelity, OptionError, OutOfMemory, Policy, PolicyEntry, Request, amount, key_values};
use crate::ranges::{Fit, Ranges, Segments, range_of};

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "best_fit",
    summary: "textbook allocator: one free list, everything is split and joined",
    options: "fit=best|first|worst, segment=BYTES (2MiB)",
    fidelity: Fidelity::Exact,
    build: |build| {
        let mut policy = BestFit {
            fit: Fit::Best,
            segment: PAGE,
            ranges: Ranges::default(),
            segments: Segments::default(),
        };
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

struct BestFit {
    fit: Fit,
    segment: u64,
    ranges: Ranges,
    segments: Segments,
}

impl Policy for BestFit {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let wanted = request.bytes.next_multiple_of(512);
        if let Some(placement) = self.ranges.place(wanted, self.fit) {
            return Ok(placement);
        }
        let segment = wanted.next_multiple_of(self.segment);
        let mut range = self.segments.map(device, segment);
        if range.is_none() {
            self.trim(device);
            range = self.segments.map(device, segment);
        }
        match range {
            Some(range) => Ok(self.ranges.split(range, wanted)),
            // The flush waited for the streams: something may fit now.
            None => self.ranges.place(wanted, self.fit).ok_or_else(|| OutOfMemory::plain(segment)),
        }
    }

    fn free(&mut self, _device: &mut Device, placement: Placement) {
        self.ranges.give(range_of(placement));
    }

    fn trim(&mut self, device: &mut Device) {
        for placement in device.synchronize() {
            self.ranges.give(range_of(placement));
        }
        self.segments.unmap_whole(device, &mut self.ranges);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![("largest_free_bytes", self.ranges.iter().map(|range| range.bytes).max().unwrap_or(0))]
    }
}
