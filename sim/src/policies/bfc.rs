//! TensorFlow's and XLA's best-fit-with-coalescing allocator (xla/tsl/framework/bfc_allocator.cc): 256-byte units, 21 bins by
//! power of two, a region that doubles with every extension.

use crate::device::{Device, Placement};
use crate::policies::{Fidelity, OutOfMemory, Policy, PolicyEntry, Request, amount, key_values};
use crate::ranges::{Fit, Ranges, Segments, range_of};
use crate::skip::State;

/// kMinAllocationSize.
const UNIT: u64 = 256;
/// A chunk this much larger than the request is always split.
const MOST_WASTE: u64 = 128 << 20;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "bfc",
    summary: "TensorFlow and XLA (JAX): best fit with coalescing, regions that double",
    options: "preallocate=BYTES (one region of that size and no growth), first_region=BYTES (2MiB)",
    fidelity: Fidelity::Model,
    build: |build| {
        let mut policy = Bfc {
            ranges: Ranges::default(),
            segments: Segments::default(),
            next_region: 2 << 20,
            preallocate: None,
        };
        for (key, value) in key_values(build.options, &["preallocate", "first_region"])? {
            match key {
                "preallocate" => policy.preallocate = Some(amount(key, value)?),
                _ => policy.next_region = amount(key, value)?.max(UNIT),
            }
        }
        Ok(Box::new(policy))
    },
};

struct Bfc {
    ranges: Ranges,
    segments: Segments,
    next_region: u64,
    preallocate: Option<u64>,
}

impl Bfc {
    /// Splits if the chunk is at least twice the request, or the waste would be too large.
    fn place(&mut self, wanted: u64) -> Option<Placement> {
        let range = self.ranges.take(wanted, Fit::Best)?;
        let splits = range.bytes >= wanted * 2 || range.bytes - wanted >= MOST_WASTE;
        Some(if splits { self.ranges.split(range, wanted) } else { range.front(range.bytes) })
    }

    /// A region of the planned size, or the largest of ever smaller ones that the device still gives.
    fn extend(&mut self, device: &mut Device, wanted: u64) -> bool {
        if let Some(bytes) = self.preallocate.take() {
            self.next_region = 0;
            let region = self.segments.map(device, bytes.max(wanted).next_multiple_of(UNIT));
            return region.map(|region| self.ranges.give(region)).is_some();
        }
        if self.next_region == 0 {
            return false;
        }
        let mut grew_for_request = false;
        while self.next_region < wanted {
            self.next_region *= 2;
            grew_for_request = true;
        }
        let mut bytes = self.next_region;
        loop {
            if let Some(region) = self.segments.map(device, bytes) {
                self.ranges.give(region);
                if !grew_for_request {
                    self.next_region *= 2;
                }
                return true;
            }
            // Rounded up, as there, a small region would never get smaller.
            bytes = (bytes / 10 * 9).next_multiple_of(UNIT).min(bytes.saturating_sub(UNIT));
            if bytes <= wanted {
                break;
            }
        }
        self.segments.map(device, wanted).map(|region| self.ranges.give(region)).is_some()
    }
}

impl Policy for Bfc {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let wanted = request.bytes.next_multiple_of(UNIT);
        if let Some(placement) = self.place(wanted) {
            return Ok(placement);
        }
        if self.extend(device, wanted)
            && let Some(placement) = self.place(wanted)
        {
            return Ok(placement);
        }
        // TF_ENABLE_GPU_GARBAGE_COLLECTION, on by default: idle regions go, and the region is asked for again.
        self.trim(device);
        if let Some(placement) = self.place(wanted) {
            return Ok(placement);
        }
        let extended = self.extend(device, wanted);
        let placement = if extended { self.place(wanted) } else { None };
        placement.ok_or_else(|| OutOfMemory::plain(wanted))
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

    fn write(&self, to: &mut State, live: &[Placement]) -> bool {
        let _ = live;
        self.ranges.write(to);
        self.segments.write(to);
        to.put(self.next_region);
        to.put_option(self.preallocate);
        true
    }
}
