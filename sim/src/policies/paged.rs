//! Virtual memory without contiguity: every request gets its own addresses and whole pages behind them, taken from any
//! that are cached. Shows what paging could gain at most, as GMLake, vAttention or a driver pool that remaps would.
//!
//! Requests smaller than a page share pages by best fit. Moving a page is counted as a driver call each way.

use std::collections::BTreeSet;

use crate::device::{Device, PAGE, Placement, SegmentId};
use crate::policies::{
    Build, Fidelity, OptionError, OutOfMemory, Policy, PolicyEntry, Request, amount, key_values,
};
use crate::ranges::{Fit, Ranges, Segments, range_of};

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "paged",
    summary: "pages of 2 MiB at any address: an upper bound of what virtual memory could gain",
    options: "page=BYTES (2MiB)",
    fidelity: Fidelity::Model,
    build: |build| Ok(Box::new(paged(build, Contiguous::Never)?)),
};

/// Requests of at least this many bytes may be stitched together from several cached runs.
pub(super) enum Contiguous {
    /// All requests may.
    Never,
    /// Smaller ones need one run, as in GMLake.
    Below(u64),
}

pub(super) fn paged(build: Build, contiguous: Contiguous) -> Result<Paged, OptionError> {
    let mut page = PAGE;
    let mut contiguous = contiguous;
    for (key, value) in key_values(
        build.options,
        if matches!(contiguous, Contiguous::Never) { &["page"] } else { &["frag_limit"] },
    )? {
        match key {
            "page" => page = amount(key, value)?.max(PAGE).next_multiple_of(PAGE),
            _ => contiguous = Contiguous::Below(amount(key, value)?),
        }
    }
    Ok(Paged {
        page,
        contiguous,
        small: Ranges::default(),
        small_segments: Segments::default(),
        cached: BTreeSet::new(),
    })
}

pub(super) struct Paged {
    page: u64,
    contiguous: Contiguous,
    /// Free parts of pages that hold requests smaller than a page.
    small: Ranges,
    small_segments: Segments,
    /// Mapped runs that nobody uses: bytes, address, reservation.
    cached: BTreeSet<(u64, u64, SegmentId)>,
}

impl Paged {
    fn alloc_small(&mut self, device: &mut Device, wanted: u64) -> Option<Placement> {
        if let Some(placement) = self.small.place(wanted, Fit::Best) {
            return Some(placement);
        }
        if self.small_segments_may_grow(device) {
            let range = self.small_segments.map(device, self.page)?;
            return Some(self.small.split(range, wanted));
        }
        None
    }

    /// Makes room for one more page, out of the cache if need be.
    fn small_segments_may_grow(&mut self, device: &mut Device) -> bool {
        if let Some((bytes, address, segment)) = self.cached.pop_first() {
            device.decommit(address, bytes);
            if bytes > self.page {
                self.recommit(device, bytes - self.page, address, segment);
            }
        }
        device.is_within_limit(self.page)
    }

    fn recommit(&mut self, device: &mut Device, bytes: u64, address: u64, segment: SegmentId) {
        if device.commit(address, bytes) {
            self.cached.insert((bytes, address, segment));
        }
    }

    fn alloc_large(&mut self, device: &mut Device, wanted: u64) -> Option<Placement> {
        // One cached run of exactly that size needs no remapping.
        if let Some((bytes, address, segment)) = self
            .cached
            .range((wanted, 0, SegmentId(0))..)
            .next()
            .copied()
            .filter(|(bytes, ..)| *bytes == wanted)
        {
            self.cached.remove(&(bytes, address, segment));
            return Some(Placement { address, bytes, segment, handle: 0 });
        }
        let mut taken = 0;
        let may_stitch = match self.contiguous {
            Contiguous::Never => true,
            Contiguous::Below(limit) => wanted >= limit,
        };
        while taken < wanted {
            let run = if may_stitch {
                self.cached.last()
            } else {
                self.cached.range((wanted, 0, SegmentId(0))..).next()
            };
            let Some((bytes, address, segment)) = run.copied() else { break };
            self.cached.remove(&(bytes, address, segment));
            device.decommit(address, bytes);
            let used = bytes.min(wanted - taken);
            taken += used;
            if used < bytes {
                self.recommit(device, bytes - used, address, segment);
            }
        }
        if !device.is_within_limit(wanted) {
            return None;
        }
        let reservation = device.reserve(wanted);
        if !device.commit(reservation.address, wanted) {
            return None;
        }
        Some(Placement { address: reservation.address, bytes: wanted, segment: reservation.id, handle: 1 })
    }
}

impl Policy for Paged {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let is_small = request.bytes < self.page;
        let wanted = request.bytes.next_multiple_of(if is_small { 512 } else { self.page });
        let attempt = |policy: &mut Paged, device: &mut Device| {
            if wanted < policy.page {
                policy.alloc_small(device, wanted)
            } else {
                policy.alloc_large(device, wanted.next_multiple_of(policy.page))
            }
        };
        if let Some(placement) = attempt(self, device) {
            return Ok(placement);
        }
        self.trim(device);
        attempt(self, device).ok_or_else(|| OutOfMemory::plain(wanted))
    }

    fn free(&mut self, _device: &mut Device, placement: Placement) {
        if placement.bytes < self.page {
            self.small.give(range_of(placement));
        } else {
            self.cached.insert((placement.bytes, placement.address, placement.segment));
        }
    }

    fn trim(&mut self, device: &mut Device) {
        for placement in device.synchronize() {
            self.free(device, placement);
        }
        for (bytes, address, _) in std::mem::take(&mut self.cached) {
            device.decommit(address, bytes);
        }
        self.small_segments.unmap_whole(device, &mut self.small);
    }
}
