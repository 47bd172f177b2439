//! What later decisions of the allocator depend on: what a replay compares to know what it has simulated before.

use super::stats::{Stat, Stats};
use super::{Block, BlockId, Tie, Torch};
use crate::device::Placement;
use crate::skip::State;

impl Torch {
    /// Writes the whole state but for what only counts ([`Torch::each_tally`]) or rises (`hinges`, peaks): of blocks where they lie, how they are
    /// ordered among those of their size, and how old they are. Neighbours in a segment are neighbours in their addresses, and the blocks that
    /// are in use are those that are live. Options and release never change.
    pub(super) fn write_state(&self, to: &mut State, live: &[Placement]) {
        let Torch {
            profile,
            options: _,
            blocks: _,
            vacant: _,
            pools,
            owners,
            released,
            overflow,
            reservations: _,
            n_blocks_made: _,
            total,
            limit,
            limit_is_set,
            n_address_ties: _,
            n_pools_lost: _,
            n_assertions: _,
            hinges: _,
            stats: _,
        } = self;
        to.put(*total);
        to.put(u64::from(*limit_is_set));
        to.put_option(*limit);
        for owner in owners {
            let flags = [owner.is_released, owner.is_gone, owner.is_whole].map(u64::from);
            to.put_all([owner.n_segments as u64, flags[0] | flags[1] << 1 | flags[2] << 2]);
        }
        to.put_all(released.iter().chain(overflow).map(|pool| u64::from(pool.0)));
        to.put(released.len() as u64);
        let ages = self.collects();
        let place = |id: BlockId| [self.block(id).address, self.block(id).bytes];
        for pool in pools {
            let age = |block: &Block| if ages { pool.lookups - block.free_since } else { 0 };
            for set in &pool.free {
                let word = |id: BlockId| [self.block(id).address, self.block(id).bytes, age(self.block(id))];
                to.put_all(set.iter().flat_map(|(_, _, id)| word(*id)));
            }
            for set in &pool.unmapped {
                to.put_all(set.iter().flat_map(|(_, id)| place(*id)));
            }
        }
        if profile.tie == Tie::BlockNumber {
            self.write_order(to, live);
        }
    }

    /// Writes the order in which all blocks were made: ties go to the oldest.
    fn write_order(&self, to: &mut State, live: &[Placement]) {
        let free = self.pools.iter().flat_map(|pool| pool.free.iter().flatten()).map(|(_, _, id)| *id);
        let unmapped = self.pools.iter().flat_map(|pool| pool.unmapped.iter().flatten()).map(|(_, id)| *id);
        let live = live.iter().map(|placement| placement.handle);
        let all = free.chain(unmapped).chain(live);
        let mut numbers: Vec<(u64, u32)> = all.zip(0..).map(|(id, at)| (self.block(id).number, at)).collect();
        numbers.sort_unstable();
        to.put_all(numbers.into_iter().map(|(_, at)| u64::from(at)));
    }

    /// Shows what only counts.
    pub(super) fn each_tally(&mut self, see: &mut dyn FnMut(&mut u64)) {
        let Stats {
            arrays,
            oversize_allocations,
            oversize_segments,
            num_alloc_retries,
            num_ooms,
            num_device_alloc,
            num_device_free,
            num_sync_all_streams,
            num_oom_rejections,
        } = &mut self.stats;
        for Stat { current: _, peak: _, allocated, freed } in
            arrays.iter_mut().flatten().chain([oversize_allocations, oversize_segments])
        {
            for sum in [allocated, freed] {
                let mut bits = *sum as u64;
                see(&mut bits);
                *sum = bits as i64;
            }
        }
        let counts = [
            num_alloc_retries,
            num_ooms,
            num_device_alloc,
            num_device_free,
            num_sync_all_streams,
            num_oom_rejections,
            &mut self.n_address_ties,
            &mut self.n_pools_lost,
            &mut self.n_assertions,
            &mut self.hinges.n_rooms,
        ];
        counts.into_iter().for_each(see);
    }
}
