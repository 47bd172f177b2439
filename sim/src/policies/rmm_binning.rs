//! RAPIDS' `binning_memory_resource` as its benchmark sets it up: pools of fixed-size blocks from 256 KiB to 4 MiB, 128 blocks
//! at a time; larger requests are a `cudaMalloc` each.

use std::collections::BTreeSet;

use crate::device::{Device, Placement, SegmentId};
use crate::policies::{Fidelity, OutOfMemory, Policy, PolicyEntry, Request, key_values};
use crate::skip::State;

/// log2 of the smallest and largest bin.
const BINS: std::ops::RangeInclusive<u32> = 18..=22;
/// Blocks that a pool is extended by.
const BLOCKS: u64 = 128;
const DIRECT: u32 = u32::MAX - 1;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "rmm_binning",
    summary: "RAPIDS memory manager, bins of fixed sizes up to 4 MiB",
    options: "none",
    fidelity: Fidelity::Model,
    build: |build| {
        key_values(build.options, &[])?;
        Ok(Box::new(RmmBinning { bins: vec![BTreeSet::new(); BINS.clone().count()] }))
    },
};

struct RmmBinning {
    /// Free blocks of each bin.
    bins: Vec<BTreeSet<(u64, SegmentId)>>,
}

impl Policy for RmmBinning {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let Some(bin) = BINS.clone().position(|log2| request.bytes <= 1 << log2) else {
            let segment = device.is_within_limit(request.bytes).then(|| device.map(request.bytes)).flatten();
            let segment = segment.ok_or_else(|| OutOfMemory::plain(request.bytes))?;
            let bytes = request.bytes;
            return Ok(Placement { address: segment.address, bytes, segment: segment.id, handle: DIRECT });
        };
        let bytes = 1u64 << (BINS.start() + bin as u32);
        if self.bins[bin].is_empty()
            && device.is_within_limit(bytes * BLOCKS)
            && let Some(segment) = device.map(bytes * BLOCKS)
        {
            let blocks = (0..BLOCKS).map(|index| (segment.address + index * bytes, segment.id));
            self.bins[bin].extend(blocks);
        }
        let (address, segment) =
            self.bins[bin].pop_first().ok_or_else(|| OutOfMemory::plain(bytes * BLOCKS))?;
        Ok(Placement { address, bytes, segment, handle: bin as u32 })
    }

    fn free(&mut self, device: &mut Device, placement: Placement) {
        match self.bins.get_mut(placement.handle as usize) {
            Some(bin) => {
                bin.insert((placement.address, placement.segment));
            }
            None => device.unmap(placement.segment),
        }
    }

    fn trim(&mut self, _device: &mut Device) {}

    fn write(&self, to: &mut State, live: &[Placement]) -> bool {
        to.put_all(live.iter().map(|placement| u64::from(placement.handle)));
        for bin in &self.bins {
            to.put_all(bin.iter().map(|(address, _)| *address));
        }
        true
    }
}
