//! The buddy system: blocks of powers of two that split into halves and join with their other half.

use std::collections::{BTreeSet, HashMap};

use crate::device::{Device, Placement, SegmentId};
use crate::policies::{Fidelity, OutOfMemory, Policy, PolicyEntry, Request, amount, key_values};
use crate::skip::State;

const SMALLEST: u64 = 512;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "buddy",
    summary: "buddy system: powers of two",
    options: "segment=BYTES (32MiB; the smallest segment, rounded up to a power of two)",
    fidelity: Fidelity::Exact,
    build: |build| {
        let mut policy =
            Buddy { segment: 32 << 20, free: vec![BTreeSet::new(); 64], segments: HashMap::new() };
        for (key, value) in key_values(build.options, &["segment"])? {
            policy.segment = amount(key, value)?.clamp(SMALLEST, 1 << 62).next_power_of_two();
        }
        Ok(Box::new(policy))
    },
};

struct Buddy {
    segment: u64,
    /// By order (log2 of the bytes): address and segment.
    free: Vec<BTreeSet<(u64, SegmentId)>>,
    /// Start and bytes.
    segments: HashMap<SegmentId, (u64, u64)>,
}

impl Buddy {
    fn take(&mut self, order: usize) -> Option<(u64, SegmentId)> {
        let from = (order..64).find(|order| !self.free[*order].is_empty())?;
        let (address, segment) = self.free[from].pop_first()?;
        for half in (order..from).rev() {
            self.free[half].insert((address + (1 << half), segment));
        }
        Some((address, segment))
    }

    fn give(&mut self, mut address: u64, segment: SegmentId, mut order: usize) {
        let Some(&(start, bytes)) = self.segments.get(&segment) else { return };
        while (1u64 << order) < bytes {
            let buddy = start + ((address - start) ^ (1 << order));
            if !self.free[order].remove(&(buddy, segment)) {
                break;
            }
            address = address.min(buddy);
            order += 1;
        }
        self.free[order].insert((address, segment));
    }

    fn grow(&mut self, device: &mut Device, bytes: u64) -> bool {
        let bytes = bytes.max(self.segment);
        if !device.is_within_limit(bytes) {
            return false;
        }
        let Some(segment) = device.map(bytes) else { return false };
        self.segments.insert(segment.id, (segment.address, bytes));
        self.free[bytes.ilog2() as usize].insert((segment.address, segment.id));
        true
    }
}

impl Policy for Buddy {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        if request.bytes > 1 << 62 {
            return Err(OutOfMemory::plain(request.bytes));
        }
        let bytes = request.bytes.max(SMALLEST).next_power_of_two();
        let order = bytes.ilog2() as usize;
        let mut found = self.take(order);
        if found.is_none() {
            if !self.grow(device, bytes) {
                self.trim(device);
                // The flush may have made room in what stayed; if not, on the device.
                if (order..64).all(|order| self.free[order].is_empty()) {
                    self.grow(device, bytes);
                }
            }
            found = self.take(order);
        }
        let (address, segment) = found.ok_or_else(|| OutOfMemory::plain(bytes.max(self.segment)))?;
        Ok(Placement { address, bytes, segment, handle: 0 })
    }

    fn free(&mut self, _device: &mut Device, placement: Placement) {
        self.give(placement.address, placement.segment, placement.bytes.ilog2() as usize);
    }

    fn trim(&mut self, device: &mut Device) {
        for placement in device.synchronize() {
            self.free(device, placement);
        }
        let mut whole: Vec<SegmentId> = self.segments.keys().copied().collect();
        whole.sort_unstable();
        whole.retain(|segment| {
            let (start, bytes) = self.segments[segment];
            self.free[bytes.ilog2() as usize].remove(&(start, *segment))
        });
        for segment in whole {
            self.segments.remove(&segment);
            device.unmap(segment);
        }
    }

    fn write(&self, to: &mut State, live: &[Placement]) -> bool {
        let _ = live;
        for free in &self.free {
            to.put_all(free.iter().map(|(address, _)| *address));
        }
        true
    }
}
