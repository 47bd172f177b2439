//! Segments that grow: address space is reserved once, and pages are mapped where blocks need them (`expandable_segments`).

use super::stats::Name;
use super::{Block, BlockId, EMPTY, NONE, Reservation, SMALL_SEGMENT, State, Torch};
use crate::device::{Device, SegmentId};
use crate::ops::StreamIdx;

impl Torch {
    /// Serves a request from an expandable segment, mapping the pages that it lacks.
    pub(super) fn grow(
        &mut self,
        device: &mut Device,
        pool: u32,
        rounded: u64,
        stream: StreamIdx,
    ) -> Option<BlockId> {
        let mut block = match self.growable(pool, rounded, stream) {
            Some(block) => block,
            None if rounded > self.reservation_bytes(device, pool) => {
                // PyTorch makes a segment before it finds that it is too small.
                let segment = device.reserve(self.reservation_bytes(device, pool));
                device.unreserve(segment.id);
                return None;
            }
            None => self.reserve(device, pool, stream),
        };
        if self.block(block).state == State::Unmapped {
            let bytes = self.block(block).bytes.min(rounded);
            self.map(device, block, bytes)?;
        }
        while self.block(block).bytes < rounded {
            let next = self.block(block).next;
            let bytes = (rounded - self.block(block).bytes).min(self.block(next).bytes);
            self.map(device, next, bytes)?;
            block = next;
        }
        self.remove_free(block);
        Some(block)
    }

    /// The lowest run of free and unmapped blocks that is long enough.
    fn growable(&self, pool: u32, rounded: u64, stream: StreamIdx) -> Option<BlockId> {
        let idle = |id: BlockId| id != NONE && self.block(id).state != State::Taken;
        let unmapped = &self.pools[pool as usize].unmapped[usize::from(stream.0)];
        unmapped.iter().find_map(|(_, unmapped)| {
            let prev = self.block(*unmapped).prev;
            let start = if idle(prev) { prev } else { *unmapped };
            let (mut total, mut at) = (0, start);
            while total < rounded && idle(at) {
                total += self.block(at).bytes;
                at = self.block(at).next;
            }
            (total >= rounded).then_some(start)
        })
    }

    fn page(&self, pool: u32) -> u64 {
        if Self::is_small(pool) { SMALL_SEGMENT } else { self.options.large_segment }
    }

    /// What an expandable segment reserves: an eighth more than the device has, or what the user wants, if that is less.
    fn reservation_bytes(&self, device: &Device, pool: u32) -> u64 {
        // A device of unknown size is taken for one that is larger than any.
        let total = device.total().min(1 << 42);
        let most = total + total / 8;
        let wanted = self.options.expandable_reserve.map_or(most, |reserve| reserve.bytes(total));
        wanted.min(most).next_multiple_of(self.page(pool))
    }

    /// One reservation a stream and pool, unless the user wants small ones.
    fn reserve(&mut self, device: &mut Device, pool: u32, stream: StreamIdx) -> BlockId {
        let page = self.page(pool);
        let bytes = self.reservation_bytes(device, pool);
        let segment = device.reserve(bytes);
        let index = segment.id.0 as usize;
        if self.reservations.len() <= index {
            self.reservations.resize(index + 1, None);
        }
        self.reservations[index] = Some(Reservation { address: segment.address, page });
        let block = self.make(Block {
            address: segment.address,
            bytes,
            segment: segment.id,
            pool,
            stream,
            expandable: true,
            ..EMPTY
        });
        self.insert_unmapped(block);
        block
    }

    fn reservation(&self, segment: SegmentId) -> Reservation {
        let found = self.reservations.get(segment.0 as usize).copied().flatten();
        found.expect("every expandable block belongs to a reservation")
    }

    pub(super) fn map(&mut self, device: &mut Device, id: BlockId, wanted: u64) -> Option<()> {
        let block = *self.block(id);
        let reservation = self.reservation(block.segment);
        let end = (block.address + wanted - reservation.address).next_multiple_of(reservation.page);
        let mapped = end - (block.address - reservation.address);
        if !device.commit(block.address, mapped) {
            return None;
        }
        self.remove_unmapped(id);
        self.blocks[id as usize].state = State::Free;
        if mapped < block.bytes {
            let rest = self.make(Block {
                address: block.address + mapped,
                bytes: block.bytes - mapped,
                prev: id,
                ..block
            });
            if block.next != NONE {
                self.blocks[block.next as usize].prev = rest;
            }
            self.blocks[id as usize].next = rest;
            self.insert_unmapped(rest);
            self.blocks[id as usize].bytes = mapped;
        }
        self.merge(id, self.block(id).prev);
        self.merge(id, self.block(id).next);
        self.insert_free(id);
        self.total += mapped;
        self.stats.increase(Name::ReservedBytes, Self::is_small(block.pool), mapped);
        self.stats.num_device_alloc += 1;
        Some(())
    }

    /// Takes the whole pages of a free block away.
    pub(super) fn unmap(&mut self, device: &mut Device, id: BlockId) {
        let block = *self.block(id);
        let Reservation { address: base, page } = self.reservation(block.segment);
        let start = base + (block.address - base).next_multiple_of(page);
        let end = base + (block.address + block.bytes - base) / page * page;
        if start >= end {
            return;
        }
        let bytes = end - start;
        self.remove_free(id);
        let before = start - block.address;
        if before > 0 {
            let front = self.make(Block { bytes: before, next: id, ..block });
            if block.prev != NONE {
                self.blocks[block.prev as usize].next = front;
            }
            self.blocks[id as usize].prev = front;
            self.insert_free(front);
        }
        let after = block.address + block.bytes - end;
        if after > 0 {
            let back = self.make(Block { address: end, bytes: after, prev: id, ..block });
            if block.next != NONE {
                self.blocks[block.next as usize].prev = back;
            }
            self.blocks[id as usize].next = back;
            self.insert_free(back);
        }
        let middle = &mut self.blocks[id as usize];
        middle.address = start;
        middle.bytes = bytes;
        middle.state = State::Unmapped;
        self.merge(id, self.block(id).prev);
        self.merge(id, self.block(id).next);
        self.insert_unmapped(id);
        self.total -= bytes;
        self.stats.decrease(Name::ReservedBytes, Self::is_small(block.pool), bytes);
        self.stats.num_device_free += 1;
        self.count_return(block.pool);
        device.decommit(start, bytes);
    }
}
