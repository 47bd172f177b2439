//! CuPy's `MemoryPool` (cupy/cuda/memory.pyx @ 6b6d9563): an arena a stream, best fit in steps of 512 bytes, everything is
//! split, a miss is a `cudaMalloc` of exactly the rounded size. Equal chunks are told apart by Python object
//! addresses, which nobody can repeat: the lowest device address stands in for them.

use crate::device::{Device, Placement};
use crate::policies::{Fidelity, OutOfMemory, Policy, PolicyEntry, Request, key_values};
use crate::ranges::{Fit, Ranges, Segments, range_of};
use crate::skip::State;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "cupy",
    summary: "CuPy's memory pool",
    options: "none",
    fidelity: Fidelity::Model,
    build: |build| {
        key_values(build.options, &[])?;
        Ok(Box::new(Cupy {
            arenas: vec![Ranges::default(); build.n_streams.max(1)],
            arena_of: Default::default(),
            segments: Segments::default(),
        }))
    },
};

struct Cupy {
    /// By stream.
    arenas: Vec<Ranges>,
    arena_of: std::collections::HashMap<crate::device::SegmentId, usize>,
    segments: Segments,
}

impl Policy for Cupy {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let wanted = request.bytes.next_multiple_of(512);
        let arena = usize::from(request.stream.0);
        if let Some(placement) = self.arenas[arena].place(wanted, Fit::Best) {
            return Ok(placement);
        }
        let mut range = self.segments.map(device, wanted);
        if range.is_none() {
            // free_all_blocks, and again after Python's collector ran: the second finds nothing more.
            self.trim(device);
            range = self.segments.map(device, wanted);
        }
        let range = range.ok_or_else(|| OutOfMemory::plain(wanted))?;
        self.arena_of.insert(range.segment, arena);
        Ok(range.front(wanted))
    }

    fn free(&mut self, _device: &mut Device, placement: Placement) {
        if let Some(arena) = self.arena_of.get(&placement.segment) {
            self.arenas[*arena].give(range_of(placement));
        }
    }

    fn trim(&mut self, device: &mut Device) {
        for placement in device.synchronize() {
            self.free(device, placement);
        }
        for arena in &mut self.arenas {
            self.segments.unmap_whole(device, arena);
        }
    }

    fn write(&self, to: &mut State, live: &[Placement]) -> bool {
        let _ = live;
        self.arenas.iter().for_each(|arena| arena.write(to));
        self.segments.write(to);
        to.put_all(
            self.segments.ids().map(|id| self.arena_of.get(&id).map_or(u64::MAX, |arena| *arena as u64)),
        );
        true
    }
}
