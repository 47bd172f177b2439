//! RAPIDS' `arena_memory_resource` (rmm @ 5d50a37b), simplified: a global arena of half the device, an arena a stream on top of
//! it. Requests above 1 MiB are served by the global arena; smaller ones from superblocks of at least 1 MiB, which go
//! back when they are empty. First fit by address everywhere.

use std::collections::HashMap;

use crate::device::{Device, Placement};
use crate::policies::{Fidelity, OutOfMemory, Policy, PolicyEntry, Request, amount, key_values};
use crate::ranges::{Fit, Range, Ranges, Segments, range_of};
use crate::skip::State;

const UNIT: u64 = 256;
/// superblock::minimum_size.
const SUPERBLOCK: u64 = 1 << 20;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "rmm_arena",
    summary: "RAPIDS memory manager, arenas: a preallocated arena, superblocks for each stream",
    options: "size=BYTES (half the device)",
    fidelity: Fidelity::Model,
    build: |build| {
        let mut policy = RmmArena {
            size: None,
            global: None,
            arenas: vec![Ranges::default(); build.n_streams.max(1)],
            superblocks: HashMap::new(),
            segments: Segments::default(),
        };
        for (key, value) in key_values(build.options, &["size"])? {
            policy.size = Some(amount(key, value)?);
        }
        Ok(Box::new(policy))
    },
};

struct RmmArena {
    size: Option<u64>,
    global: Option<Ranges>,
    /// By stream: free parts of its superblocks.
    arenas: Vec<Ranges>,
    /// By start: bytes and stream.
    superblocks: HashMap<u64, (u64, usize)>,
    segments: Segments,
}

impl RmmArena {
    fn global(&mut self, device: &mut Device) -> &mut Ranges {
        let (size, segments) = (self.size, &mut self.segments);
        self.global.get_or_insert_with(|| {
            let limit = device.limit().unwrap_or(u64::MAX);
            // A device of unknown size has 80 GiB.
            let half = device.free().min(160 << 30) / 2;
            let bytes = size.unwrap_or(half).min(limit) / UNIT * UNIT;
            let mut ranges = Ranges::default();
            if let Some(range) = segments.map(device, bytes) {
                ranges.give(range);
            }
            ranges
        })
    }

    fn serve_small(&mut self, device: &mut Device, stream: usize, wanted: u64) -> Option<Placement> {
        if let Some(placement) = self.arenas[stream].place(wanted, Fit::First) {
            return Some(placement);
        }
        let block = self.global(device).place(SUPERBLOCK, Fit::First)?;
        self.superblocks.insert(block.address, (block.bytes, stream));
        let range = range_of(block);
        self.arenas[stream].give(Range {
            address: range.address + wanted,
            bytes: range.bytes - wanted,
            ..range
        });
        Some(range.front(wanted))
    }
}

impl Policy for RmmArena {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let wanted = request.bytes.next_multiple_of(UNIT);
        let found = if wanted >= SUPERBLOCK {
            self.global(device).place(wanted, Fit::First)
        } else {
            self.serve_small(device, usize::from(request.stream.0), wanted)
        };
        // Handle 1: lies in a superblock.
        let found = found.map(|placement| Placement { handle: u32::from(wanted < SUPERBLOCK), ..placement });
        found.ok_or_else(|| OutOfMemory::plain(wanted))
    }

    fn free(&mut self, device: &mut Device, placement: Placement) {
        if placement.handle == 0 {
            self.global(device).give(range_of(placement));
            return;
        }
        // Superblocks are aligned to nothing: look for the one below.
        let start = (0..SUPERBLOCK / UNIT)
            .map(|step| placement.address - step * UNIT)
            .find(|start| self.superblocks.contains_key(start));
        let Some((start, (bytes, stream))) = start.map(|start| (start, self.superblocks[&start])) else {
            return;
        };
        // Neighbouring superblocks join in the free list, so cut the whole one out of what it became.
        let joined = self.arenas[stream].give(range_of(placement));
        if joined.address <= start && joined.address + joined.bytes >= start + bytes {
            self.arenas[stream].remove(joined.address);
            let end = joined.address + joined.bytes;
            for (from, to) in [(joined.address, start), (start + bytes, end)] {
                if from < to {
                    self.arenas[stream].give(Range { address: from, bytes: to - from, ..joined });
                }
            }
            self.superblocks.remove(&start);
            self.global(device).give(Range { address: start, bytes, ..joined });
        }
    }

    fn trim(&mut self, _device: &mut Device) {}

    fn write(&self, to: &mut State, live: &[Placement]) -> bool {
        to.put_all(live.iter().map(|placement| u64::from(placement.handle)));
        to.put(u64::from(self.global.is_some()));
        self.global.iter().chain(&self.arenas).for_each(|ranges| ranges.write(to));
        let mut blocks: Vec<(u64, (u64, usize))> =
            self.superblocks.iter().map(|(at, it)| (*at, *it)).collect();
        blocks.sort_unstable();
        to.put_all(blocks.into_iter().flat_map(|(at, (bytes, stream))| [at, bytes, stream as u64]));
        self.segments.write(to);
        true
    }
}
