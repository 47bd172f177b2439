//! Giving cached memory back to the driver: because it is old, because a request needs it, or because the program says so.

use std::collections::HashSet;

use super::stats::Name;
use super::{BlockId, State, Tie, Torch};
use crate::device::{Device, Placement};
use crate::ops::{PoolIdx, StreamIdx};

impl Torch {
    /// Frees the cached segments that have not been used for long, until the limit's fraction is kept.
    pub(super) fn collect_garbage(&mut self, device: &mut Device) {
        let Some(limit) = self.limit else { return };
        let threshold = (self.options.gc_threshold * limit as f64) as u64;
        if self.total <= threshold {
            return;
        }
        let target = self.total - threshold;
        const LARGE: usize = 1;
        let lookups = self.pools[LARGE].lookups;
        let whole = |torch: &Torch| -> Vec<BlockId> {
            let ids = torch.pools[LARGE].free.iter().flatten().map(|(_, _, id)| *id);
            ids.filter(|id| !torch.block(*id).is_split()).collect()
        };
        let candidates = whole(self);
        let mut n_left = candidates.len() as u64;
        let mut ages: u64 = candidates.iter().map(|id| lookups - self.block(*id).free_since).sum();
        let (mut reclaimed, mut freed_one) = (0, true);
        while reclaimed < target && freed_one && n_left > 0 {
            let threshold = ages as f64 / n_left as f64;
            freed_one = false;
            for id in whole(self) {
                let block = *self.block(id);
                let age = lookups - block.free_since;
                if !block.expandable && age as f64 >= threshold {
                    freed_one = true;
                    reclaimed += block.bytes;
                    ages -= age;
                    n_left -= 1;
                    self.release_segment(device, id);
                }
            }
        }
    }

    /// Frees cached oversize segments that together make room. Whether they did.
    pub(super) fn release_available(
        &mut self,
        device: &mut Device,
        pool: u32,
        rounded: u64,
        stream: StreamIdx,
    ) -> bool {
        let set = &self.pools[pool as usize].free[usize::from(stream.0)];
        let largest = set.last().map_or(0, |(bytes, ..)| *bytes);
        self.hinges.n_rooms += 1;
        self.hinges.block = self.hinges.block.max(largest);
        if self.options.max_split == u64::MAX {
            return false;
        }
        let wanted = rounded.max(self.options.max_split);
        let fit = set.range((wanted, 0, 0)..).next().map(|(_, _, id)| *id);
        if let Some(fit) = fit.filter(|fit| !self.block(*fit).expandable) {
            self.release_segment(device, fit);
            return true;
        }
        self.n_address_ties += u64::from(self.profile.tie == Tie::Address);
        // The element before the first fit, or before the end where there is none; an expandable fit counts as none.
        let before = set.range(..(wanted, 0, 0)).rev().map(|(_, _, id)| *id);
        let max_split = self.options.max_split;
        let (mut sum, mut chosen) = (0, Vec::new());
        for id in before {
            if sum >= wanted || self.block(id).bytes < max_split {
                break;
            }
            if !self.block(id).expandable {
                sum += self.block(id).bytes;
                chosen.push(id);
            }
        }
        for id in chosen {
            self.release_segment(device, id);
        }
        sum >= wanted
    }

    /// Waits for all streams and gives back every segment that is one free block.
    pub(super) fn release_cached(&mut self, device: &mut Device) {
        self.stats.num_sync_all_streams += 1;
        for placement in device.synchronize() {
            self.complete(placement.handle);
        }
        self.release_blocks(device, 1);
        self.release_blocks(device, 0);
        for pool in std::mem::take(&mut self.released) {
            self.empty(device, pool);
        }
    }

    /// `emptyCache` of one pool (from 2.8): of one that is still used, nothing. Only what is freed in it is waited for.
    pub(super) fn empty_released(&mut self, device: &mut Device, pool: PoolIdx) {
        let Some(at) = self.released.iter().position(|released| *released == pool) else { return };
        let blocks = &self.blocks;
        let is_in = |placement: &Placement| blocks[placement.handle as usize].pool / 2 == u32::from(pool.0);
        for placement in device.synchronize_those(is_in) {
            self.complete(placement.handle);
        }
        self.released.remove(at);
        self.empty(device, pool);
    }

    /// Gives back what a released pool has cached, and deletes it if nothing is left.
    fn empty(&mut self, device: &mut Device, pool: PoolIdx) {
        let small = 2 * u32::from(pool.0);
        self.release_blocks(device, small);
        self.release_blocks(device, small + 1);
        if self.owners[usize::from(pool.0)].n_segments == 0 {
            self.owners[usize::from(pool.0)].is_gone = true;
            self.n_pools_lost += u64::from(self.has_blocks(pool));
        } else {
            self.released.push(pool);
        }
    }

    fn has_blocks(&self, pool: PoolIdx) -> bool {
        let vacant: HashSet<BlockId> = self.vacant.iter().copied().collect();
        let blocks = (0..).zip(&self.blocks);
        let mut of_pool = blocks.filter(|(_, block)| block.pool / 2 == u32::from(pool.0));
        of_pool.any(|(id, block)| !vacant.contains(&id) && block.state != State::Unmapped)
    }

    fn release_blocks(&mut self, device: &mut Device, pool: u32) {
        let free: Vec<BlockId> =
            self.pools[pool as usize].free.iter().flatten().map(|(_, _, id)| *id).collect();
        let mut to_unmap = Vec::new();
        for id in free {
            if self.block(id).expandable {
                to_unmap.push(id);
            } else if !self.block(id).is_split() {
                self.release_segment(device, id);
            }
        }
        for id in to_unmap {
            self.unmap(device, id);
            let block = *self.block(id);
            if block.state == State::Unmapped && !block.is_split() {
                self.remove_unmapped(id);
                self.vacant.push(id);
                device.unreserve(block.segment);
                self.reservations[block.segment.0 as usize] = None;
            }
        }
    }

    fn release_segment(&mut self, device: &mut Device, id: BlockId) {
        let block = *self.block(id);
        let small = Self::is_small(block.pool);
        self.stats.num_device_free += 1;
        self.total -= block.bytes;
        self.stats.decrease(Name::Segment, small, 1);
        self.stats.decrease(Name::ReservedBytes, small, block.bytes);
        if block.bytes >= self.options.max_split {
            self.stats.oversize_segments.decrease(1);
        }
        self.remove_free(id);
        self.vacant.push(id);
        self.count_return(block.pool);
        device.unmap(block.segment);
    }
}
