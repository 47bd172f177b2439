//! Two-level segregated fit (Masmano and others, 2004): lists by power of two and 32 steps within it. A request is rounded
//! up to the next list, whose first block then fits without looking; blocks join at once.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::device::{Device, PAGE, Placement, SegmentId};
use crate::policies::{Fidelity, OutOfMemory, Policy, PolicyEntry, Request, amount, key_values};

const UNIT: u64 = 512;
/// log2 of the lists in each power of two.
const STEPS: u32 = 5;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "tlsf",
    summary: "two-level segregated fit: constant-time good fit",
    options: "segment=BYTES (32MiB; the smallest segment)",
    fidelity: Fidelity::Exact,
    build: |build| {
        let mut policy = Tlsf {
            segment: 32 << 20,
            lists: BTreeMap::new(),
            free: BTreeMap::new(),
            segments: HashMap::new(),
        };
        for (key, value) in key_values(build.options, &["segment"])? {
            policy.segment = amount(key, value)?.max(PAGE).next_multiple_of(PAGE);
        }
        Ok(Box::new(policy))
    },
};

struct Tlsf {
    segment: u64,
    /// By list: the blocks, the most recently freed first (a stamp that falls).
    lists: BTreeMap<u32, BTreeSet<(u64, u64)>>,
    /// By address: bytes, segment, stamp.
    free: BTreeMap<u64, (u64, SegmentId, u64)>,
    segments: HashMap<SegmentId, u64>,
}

/// The list that a block of so many bytes belongs to.
fn list(bytes: u64) -> u32 {
    let units = bytes / UNIT;
    if units < 1 << STEPS {
        return units as u32;
    }
    let level = units.ilog2();
    ((level - STEPS + 1) << STEPS) + ((units >> (level - STEPS)) as u32 & ((1 << STEPS) - 1))
}

/// The smallest size such that every block of its list fits the request.
fn searched(bytes: u64) -> u64 {
    let units = bytes / UNIT;
    if units < 1 << STEPS { bytes } else { units.next_multiple_of(1 << (units.ilog2() - STEPS)) * UNIT }
}

impl Tlsf {
    fn insert(&mut self, mut address: u64, mut bytes: u64, segment: SegmentId, stamp: u64) {
        if let Some((&before, &(size, owner, _))) = self.free.range(..address).next_back()
            && owner == segment
            && before + size == address
        {
            self.remove(before);
            address = before;
            bytes += size;
        }
        if let Some(&(size, owner, _)) = self.free.get(&(address + bytes))
            && owner == segment
        {
            self.remove(address + bytes);
            bytes += size;
        }
        self.free.insert(address, (bytes, segment, stamp));
        self.lists.entry(list(bytes)).or_default().insert((stamp, address));
    }

    fn remove(&mut self, address: u64) -> Option<(u64, SegmentId)> {
        let (bytes, segment, stamp) = self.free.remove(&address)?;
        let index = list(bytes);
        if let Some(blocks) = self.lists.get_mut(&index) {
            blocks.remove(&(stamp, address));
            if blocks.is_empty() {
                self.lists.remove(&index);
            }
        }
        Some((bytes, segment))
    }

    fn stamp(&self, device: &Device) -> u64 {
        u64::MAX - device.books.n_allocs
    }

    fn take(&mut self, device: &Device, wanted: u64) -> Option<Placement> {
        let (_, blocks) = self.lists.range(list(searched(wanted))..).next()?;
        let address = blocks.first()?.1;
        let (bytes, segment) = self.remove(address)?;
        if bytes > wanted {
            self.insert(address + wanted, bytes - wanted, segment, self.stamp(device));
        }
        Some(Placement { address, bytes: wanted, segment, handle: 0 })
    }

    fn grow(&mut self, device: &mut Device, wanted: u64) -> bool {
        let bytes = searched(wanted).max(self.segment).next_multiple_of(PAGE);
        if !device.is_within_limit(bytes) {
            return false;
        }
        let Some(segment) = device.map(bytes) else { return false };
        self.segments.insert(segment.id, bytes);
        self.insert(segment.address, bytes, segment.id, self.stamp(device));
        true
    }
}

impl Policy for Tlsf {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let wanted = request.bytes.next_multiple_of(UNIT);
        if let Some(placement) = self.take(device, wanted) {
            return Ok(placement);
        }
        if !self.grow(device, wanted) {
            self.trim(device);
            if let Some(placement) = self.take(device, wanted) {
                return Ok(placement);
            }
            self.grow(device, wanted);
        }
        self.take(device, wanted).ok_or_else(|| OutOfMemory::plain(wanted))
    }

    fn free(&mut self, device: &mut Device, placement: Placement) {
        self.insert(placement.address, placement.bytes, placement.segment, self.stamp(device));
    }

    fn trim(&mut self, device: &mut Device) {
        for placement in device.synchronize() {
            self.free(device, placement);
        }
        let is_whole = |(_, (bytes, segment, _)): &(&u64, &(u64, SegmentId, u64))| {
            self.segments.get(segment) == Some(bytes)
        };
        let whole: Vec<u64> = self.free.iter().filter(is_whole).map(|(address, _)| *address).collect();
        for address in whole {
            if let Some((_, segment)) = self.remove(address) {
                self.segments.remove(&segment);
                device.unmap(segment);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_of_a_searched_list_fits() {
        for units in 1..5000u64 {
            let bytes = units * UNIT;
            assert!(searched(bytes) >= bytes);
            // Nothing smaller than the request is in that list.
            assert!(list(bytes - UNIT) < list(searched(bytes)), "{units} units");
        }
    }
}
