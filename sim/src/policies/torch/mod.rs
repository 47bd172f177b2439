//! PyTorch's native CUDA caching allocator, byte for byte, of every release that `profile.rs` has a row for.
//!
//! Blocks live in a slab and are linked to their neighbours; the free blocks of a pool are ordered sets, one for each
//! stream. `expandable.rs` has the segments that grow, `release.rs` how memory goes back to the driver, `profile.rs` what
//! the releases do differently, `options.rs` what the user can set. The original is c10/cuda/CUDACachingAllocator.cpp;
//! `tests/oracle/` holds this against the compiled original.

mod expandable;
mod latitude;
mod oom;
mod options;
#[cfg(test)]
mod oracle;
mod profile;
mod release;
mod state;
mod stats;

use std::collections::BTreeSet;

use latitude::Hinges;
pub use latitude::Latitude;
pub use options::{LARGE_SEGMENT, Options, parse};
pub use profile::{NEWEST, OomText, PROFILES, Profile, Tie, VARIABLES, profile, variable_to_set, variables};
pub use stats::{NAMES, Name, Stat, Stats};

use crate::device::{Device, Placement, SegmentId};
use crate::ops::{PoolChange, PoolIdx, StreamIdx};
use crate::policies::{
    ADDRESS_TIES, Build, Capture, Fidelity, OptionError, OutOfMemory, Policy, PolicyEntry, Request,
    StandingSegment,
};

/// kMinBlockSize: every request is rounded to this.
pub const MIN_BLOCK: u64 = 512;
/// kSmallSize: rounded requests up to this are served by the small pool.
pub const SMALL_REQUEST: u64 = 1 << 20;
/// kSmallBuffer: segment size of the small pool, and page size of its expandable segments.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// kMinLargeAlloc: from here on a segment is made to measure.
const MADE_TO_MEASURE: u64 = 10 << 20;
/// kRoundLarge: granularity of made-to-measure segments.
const MEASURE: u64 = 2 << 20;

/// What PyTorch asks the driver for to serve a rounded request, bytes (`get_allocation_size`,
/// c10/cuda/CUDACachingAllocator.cpp, 2.0 to 2.15); `large_segment` is `large_segment_size_mb`, see [`LARGE_SEGMENT`].
pub fn segment_bytes(rounded: u64, large_segment: u64) -> u64 {
    if rounded <= SMALL_REQUEST {
        SMALL_SEGMENT
    } else if rounded < MADE_TO_MEASURE {
        large_segment
    } else {
        rounded.next_multiple_of(MEASURE)
    }
}

/// What `--policy` and [`RecordedSettings`](crate::ops::RecordedSettings) call it.
pub const NAME: &str = crate::ops::TORCH;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: NAME,
    summary: "PyTorch's caching allocator of the release given by --torch-version",
    options: "the value of PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True,max_split_size_mb:128",
    fidelity: Fidelity::Exact,
    build: |build| Ok(Box::new(Torch::build(build)?)),
};

type BlockId = u32;
/// No block.
const NONE: BlockId = BlockId::MAX;

/// Free blocks of one stream by (bytes, tie-break).
type FreeSet = BTreeSet<(u64, u64, BlockId)>;

#[derive(Clone, Copy, Debug)]
struct Block {
    address: u64,
    bytes: u64,
    requested: u64,
    /// Number of this object, counted over all that were ever made: the tie-break of 2.12.
    number: u64,
    /// `lookups` of the pool when the block became free.
    free_since: u64,
    prev: BlockId,
    next: BlockId,
    segment: SegmentId,
    pool: u32,
    stream: StreamIdx,
    state: State,
    expandable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In its pool's free set.
    Free,
    /// In use, or waiting for streams.
    Taken,
    /// Addresses without memory.
    Unmapped,
}

impl Block {
    fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }
}

#[derive(Clone, Debug, Default)]
struct Pool {
    /// By stream.
    free: Vec<FreeSet>,
    /// Unmapped blocks by stream, then address.
    unmapped: Vec<BTreeSet<(u64, BlockId)>>,
    /// Look-ups while collection is armed: the clock of its ages.
    lookups: u64,
}

/// The small and large pool behind one pool id are pools `2 * id` and `2 * id + 1`.
#[derive(Clone, Copy, Debug, Default)]
struct Owner {
    /// Segments obtained and not given back; of expandable ones, calls.
    n_segments: i64,
    is_released: bool,
    /// Deleted by PyTorch: see `n_pools_lost`.
    is_gone: bool,
    /// `torch.cuda.MemPool(no_split=True)`: its blocks are handed out whole.
    is_whole: bool,
}

#[derive(Clone, Copy, Debug)]
struct Reservation {
    address: u64,
    page: u64,
}

/// The allocator of one device.
#[derive(Clone)]
pub struct Torch {
    profile: Profile,
    options: Options,
    blocks: Vec<Block>,
    vacant: Vec<BlockId>,
    pools: Vec<Pool>,
    owners: Vec<Owner>,
    /// Private pools that may be emptied, in the order of their release.
    released: Vec<PoolIdx>,
    /// Private pools that requests of others may use before anything is flushed (`use_on_oom`).
    overflow: Vec<PoolIdx>,
    /// By segment id; only expandable ones are filled in.
    reservations: Vec<Option<Reservation>>,
    n_blocks_made: u64,
    /// Everything obtained from the driver and not given back, bytes.
    total: u64,
    limit: Option<u64>,
    limit_is_set: bool,
    /// Choices that addresses decided.
    n_address_ties: u64,
    /// Pools that PyTorch deleted although blocks of them were left. It reads them again when such a block is freed, and
    /// what it then does is undefined. From 2.5: `cudaMalloc_count` of a PrivatePool rises by one for each request that
    /// maps memory (alloc_block), but falls by one for each run of pages that goes back (unmap_block), and at zero
    /// release_cached_blocks deletes the pool.
    n_pools_lost: u64,
    /// Assertions of PyTorch that failed, for the same reason: `cudaMalloc_count > 0` in unmap_block.
    n_assertions: u64,
    hinges: Hinges,
    stats: Stats,
}

/// Why memory could not be obtained.
enum Refusal {
    Full,
    Rejected,
}

impl Torch {
    /// An empty allocator.
    pub fn new(options: Options, profile: Profile, n_streams: usize, n_pools: usize) -> Torch {
        let pool = Pool {
            free: vec![FreeSet::new(); n_streams.max(1)],
            unmapped: vec![BTreeSet::new(); n_streams.max(1)],
            lookups: 0,
        };
        let n_pools = n_pools.max(1);
        Torch {
            profile,
            options,
            blocks: Vec::new(),
            vacant: Vec::new(),
            pools: vec![pool; 2 * n_pools],
            owners: vec![Owner::default(); n_pools],
            released: Vec::new(),
            overflow: Vec::new(),
            reservations: Vec::new(),
            n_blocks_made: 0,
            total: 0,
            limit: None,
            limit_is_set: false,
            n_address_ties: 0,
            n_pools_lost: 0,
            n_assertions: 0,
            hinges: Hinges::default(),
            stats: Stats::default(),
        }
    }

    fn build(build: Build) -> Result<Torch, OptionError> {
        let profile = profile(build.torch_version).ok_or_else(|| {
            let (major, minor) = build.torch_version;
            let newest = NEWEST;
            OptionError(format!(
                "PyTorch {major}.{minor} was not measured; 2.0 to {}.{} were (the newest known is the best guess)",
                newest.0, newest.1
            ))
        })?;
        Ok(Torch::new(parse(build.options, profile)?, *profile, build.n_streams, build.n_pools))
    }

    /// What `torch.cuda.memory_stats()` would say.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// `torch.cuda.set_per_process_memory_fraction`.
    pub fn set_memory_fraction(&mut self, fraction: f64, device_total: u64) {
        self.limit_is_set = true;
        self.limit = if fraction < 1.0 || self.profile.full_fraction_is_a_limit() {
            Some((fraction * device_total as f64) as u64)
        } else {
            None
        };
    }

    /// `torch.cuda.MemPool(use_on_oom=True)`: other requests may use its free blocks before anything is flushed.
    pub fn use_on_oom(&mut self, pool: PoolIdx) {
        if !self.overflow.contains(&pool) {
            self.overflow.push(pool);
        }
    }

    /// `torch.cuda.MemPool(no_split=True)`.
    pub fn never_split(&mut self, pool: PoolIdx) {
        self.owners[usize::from(pool.0)].is_whole = true;
    }

    /// `torch.cuda.reset_peak_memory_stats`.
    pub fn reset_peaks(&mut self) {
        self.stats.reset_peaks();
    }

    /// Rounds a request up to what is allocated.
    pub fn rounded(&self, bytes: u64) -> u64 {
        if bytes < MIN_BLOCK {
            return MIN_BLOCK;
        }
        let index = (bytes.ilog2() as usize).saturating_sub(20).min(15);
        let divisions = self.options.roundup_divisions[index];
        if divisions > 1 && bytes > MIN_BLOCK * divisions {
            if bytes.is_power_of_two() {
                return bytes;
            }
            let floor = 1u64 << bytes.ilog2();
            let step = floor >> divisions.ilog2();
            return if step == 0 { floor << 1 } else { bytes.next_multiple_of(step) };
        }
        if divisions == 1 && self.profile.one_division_keeps_size() {
            return bytes;
        }
        bytes.next_multiple_of(MIN_BLOCK)
    }

    fn segment_bytes(&self, rounded: u64) -> u64 {
        segment_bytes(rounded, self.options.large_segment)
    }

    /// Takes the limit from the device on first use, as `set_per_process_memory_fraction(limit / total)` would set it.
    fn adopt_limit(&mut self, device: &Device) {
        if self.limit_is_set {
            return;
        }
        self.limit_is_set = true;
        let total = device.total();
        if let Some(limit) = device.limit() {
            if limit < total && total != u64::MAX {
                self.set_memory_fraction(limit as f64 / total as f64, total);
            } else {
                self.limit = Some(limit);
            }
        } else if self.options.memory_fraction < 1.0 {
            self.set_memory_fraction(self.options.memory_fraction, total);
        }
    }

    fn collects(&self) -> bool {
        self.limit.is_some() && self.options.gc_threshold > 0.0
    }

    fn is_small(pool: u32) -> bool {
        pool.is_multiple_of(2)
    }

    fn expands(&self, pool: PoolIdx) -> bool {
        self.options.expandable_segments && (pool == PoolIdx::DEFAULT || self.profile.expands_private_pools())
    }

    // Blocks and free sets.

    fn make(&mut self, block: Block) -> BlockId {
        let block = Block { number: self.n_blocks_made, ..block };
        self.n_blocks_made += 1;
        match self.vacant.pop() {
            Some(id) => {
                self.blocks[id as usize] = block;
                id
            }
            None => {
                self.blocks.push(block);
                self.blocks.len() as BlockId - 1
            }
        }
    }

    fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id as usize]
    }

    fn key(&self, id: BlockId) -> (u64, u64, BlockId) {
        let block = self.block(id);
        let tie = match self.profile.tie {
            Tie::Address => block.address,
            Tie::BlockNumber => block.number,
            // The address of a segment's block grows with its offset; all offsets are multiples of 512. The low
            // 34 bits hold 8 TiB of them.
            Tie::SegmentOrder => {
                (u64::from(block.segment.0) << 34) | ((block.address >> 9) & ((1 << 34) - 1))
            }
        };
        (block.bytes, tie, id)
    }

    fn insert_free(&mut self, id: BlockId) {
        let key = self.key(id);
        let block = &mut self.blocks[id as usize];
        block.state = State::Free;
        let pool = &mut self.pools[block.pool as usize];
        block.free_since = pool.lookups;
        pool.free[usize::from(block.stream.0)].insert(key);
    }

    fn remove_free(&mut self, id: BlockId) {
        let key = self.key(id);
        let block = &self.blocks[id as usize];
        let was_there = self.pools[block.pool as usize].free[usize::from(block.stream.0)].remove(&key);
        debug_assert!(was_there, "a free block is missing from its set");
    }

    fn insert_unmapped(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        block.state = State::Unmapped;
        let set = &mut self.pools[block.pool as usize].unmapped[usize::from(block.stream.0)];
        set.insert((block.address, id));
    }

    fn remove_unmapped(&mut self, id: BlockId) {
        let block = &self.blocks[id as usize];
        let set = &mut self.pools[block.pool as usize].unmapped[usize::from(block.stream.0)];
        let was_there = set.remove(&(block.address, id));
        debug_assert!(was_there, "an unmapped block is missing from its set");
    }

    /// Best fit with PyTorch's exceptions. A block that fails the split rules ends the search.
    fn take_free(&mut self, pool: u32, rounded: u64, stream: StreamIdx) -> Option<BlockId> {
        if self.collects() {
            self.pools[pool as usize].lookups += 1;
        }
        let set = &self.pools[pool as usize].free[usize::from(stream.0)];
        let mut fits = set.range((rounded, 0, 0)..).map(|(_, _, id)| *id);
        let mut found = fits.next()?;
        let mut may_tie = self.profile.tie == Tie::Address;
        if self.block(found).expandable {
            if self.options.expandable_segments {
                // The growing tail counts with all the addresses behind it, so that interior holes go first.
                for next in fits {
                    if !(self.block(found).expandable && self.room(next) < self.room(found)) {
                        break;
                    }
                    found = next;
                }
            } else {
                while self.block(found).expandable {
                    found = fits.next()?;
                }
            }
        } else if may_tie {
            may_tie = fits.next().is_some_and(|next| self.block(next).bytes == self.block(found).bytes);
        }
        let bytes = self.block(found).bytes;
        if may_tie {
            self.n_address_ties += u64::from(self.is_tied(set, found));
        }
        self.hinges.block = self.hinges.block.max(bytes);
        let max_split = self.options.max_split;
        if rounded < max_split && bytes >= max_split {
            return None;
        }
        if rounded >= max_split && bytes >= rounded.saturating_add(self.options.max_non_split_rounding) {
            return None;
        }
        self.remove_free(found);
        Some(found)
    }

    /// The free block at an address, of whichever half of the pool.
    fn take_at(&mut self, request: Request, address: u64, rounded: u64) -> Option<BlockId> {
        let halves = [0, 1].map(|half| 2 * u32::from(request.pool.0) + half);
        let stream = usize::from(request.stream.0);
        let mut free = halves.into_iter().flat_map(|pool| self.pools[pool as usize].free[stream].iter());
        let (.., found) =
            *free.find(|(bytes, _, id)| *bytes >= rounded && self.block(*id).address == address)?;
        self.remove_free(found);
        Some(found)
    }

    /// Whether an equal block lies in another segment, so that only addresses decide.
    fn is_tied(&self, set: &FreeSet, found: BlockId) -> bool {
        let (bytes, segment) = (self.block(found).bytes, self.block(found).segment);
        // Blocks of one segment lie together: the first and the last of the equals tell.
        let mut equals =
            set.range((bytes, 0, 0)..(bytes + 1, 0, 0)).map(|(_, _, id)| self.block(*id).segment);
        equals.next().is_some_and(|first| first != segment)
            || equals.next_back().is_some_and(|last| last != segment)
    }

    fn room(&self, id: BlockId) -> u64 {
        let block = self.block(id);
        let behind = match block.next {
            NONE => 0,
            next if self.block(next).state == State::Unmapped => self.block(next).bytes,
            _ => 0,
        };
        block.bytes + behind
    }

    // Obtaining memory.

    fn obtain(
        &mut self,
        device: &mut Device,
        request: Request,
        pool: u32,
        rounded: u64,
        is_retry: bool,
    ) -> Result<BlockId, Refusal> {
        let bytes = self.segment_bytes(rounded);
        if is_retry {
            self.stats.num_alloc_retries += 1;
        }
        self.hinges_on_segment(rounded, self.expands(request.pool));
        if self.limit.is_some_and(|limit| self.total + bytes > limit) {
            return Err(Refusal::Full);
        }
        self.hinges.within_limit = self.hinges.within_limit.max(self.total + bytes);
        if self.options.throw_on_cudamalloc_oom {
            let ceiling = (self.options.memory_fraction * device.total() as f64) as u64;
            if self.total + bytes > ceiling {
                return Err(Refusal::Rejected);
            }
        }
        let owner = usize::from(request.pool.0);
        if self.expands(request.pool) {
            let block = self.grow(device, pool, rounded, request.stream).ok_or(Refusal::Full)?;
            self.owners[owner].n_segments += 1;
            return Ok(block);
        }
        let segment = device.map(bytes).ok_or(Refusal::Full)?;
        self.book_segment(pool, bytes);
        self.stats.num_device_alloc += 1;
        Ok(self.make(Block {
            address: segment.address,
            bytes,
            segment: segment.id,
            pool,
            stream: request.stream,
            state: State::Taken,
            ..EMPTY
        }))
    }

    /// Books of a segment that came to be.
    fn book_segment(&mut self, pool: u32, bytes: u64) {
        self.owners[pool as usize / 2].n_segments += 1;
        self.total += bytes;
        let small = Self::is_small(pool);
        self.stats.increase(Name::Segment, small, 1);
        self.stats.increase(Name::ReservedBytes, small, bytes);
        if bytes >= self.options.max_split {
            self.stats.oversize_segments.increase(1);
        }
    }

    /// Lets `id` absorb a neighbour of the same kind. Returns the bytes gained.
    fn merge(&mut self, id: BlockId, neighbour: BlockId) -> u64 {
        if neighbour == NONE {
            return 0;
        }
        let is_mapped = self.block(id).state != State::Unmapped;
        match self.block(neighbour).state {
            State::Taken => return 0,
            State::Free if is_mapped => self.remove_free(neighbour),
            State::Unmapped if !is_mapped => self.remove_unmapped(neighbour),
            State::Free | State::Unmapped => return 0,
        }
        let absorbed = *self.block(neighbour);
        let block = &mut self.blocks[id as usize];
        block.bytes += absorbed.bytes;
        if block.prev == neighbour {
            block.address = absorbed.address;
            block.prev = absorbed.prev;
            if absorbed.prev != NONE {
                self.blocks[absorbed.prev as usize].next = id;
            }
        } else {
            block.next = absorbed.next;
            if absorbed.next != NONE {
                self.blocks[absorbed.next as usize].prev = id;
            }
        }
        self.vacant.push(neighbour);
        absorbed.bytes
    }

    fn count_return(&mut self, pool: u32) {
        let owner = &mut self.owners[pool as usize / 2];
        self.n_assertions += u64::from(pool > 1 && owner.n_segments <= 0);
        owner.n_segments -= 1;
    }

    /// A block that nobody uses any more goes back to its pool.
    fn complete(&mut self, id: BlockId) {
        let freed = *self.block(id);
        let small = Self::is_small(freed.pool);
        let (mut n_split, mut split_bytes) = (0i64, 0i64);
        for neighbour in [freed.prev, freed.next] {
            let gained = self.merge(id, neighbour);
            if gained > 0 {
                n_split -= 1;
                split_bytes -= gained as i64;
            }
        }
        self.insert_free(id);
        if !freed.expandable {
            let block = self.block(id);
            if block.is_split() {
                n_split += 1;
                split_bytes += block.bytes as i64;
            }
            self.change(Name::InactiveSplit, small, n_split);
            self.change(Name::InactiveSplitBytes, small, split_bytes);
        }
        self.stats.decrease(Name::Active, small, 1);
        self.stats.decrease(Name::ActiveBytes, small, freed.bytes);
        self.stats.decrease(Name::RequestedBytes, small, freed.requested);
    }

    fn change(&mut self, name: Name, small: bool, amount: i64) {
        match amount {
            1.. => self.stats.increase(name, small, amount.unsigned_abs()),
            0 => {}
            _ => self.stats.decrease(name, small, amount.unsigned_abs()),
        }
    }

    // Handing out.

    /// Splits off what is not needed and books the rest.
    fn hand_out(&mut self, found: BlockId, rounded: u64, request: Request) -> Placement {
        let whole = *self.block(found);
        let small = Self::is_small(whole.pool);
        let rest = whole.bytes - rounded;
        // It is the option that counts here, also for blocks of ordinary segments.
        if !small && rest > SMALL_REQUEST {
            self.hinges.block = self.hinges.block.max(rounded);
        }
        let splits = if request.at == Some(whole.address) {
            rest > 0
        } else if self.owners[whole.pool as usize / 2].is_whole {
            false
        } else if small || self.options.expandable_segments {
            rest >= MIN_BLOCK
        } else {
            rounded < self.options.max_split && rest > SMALL_REQUEST
        };
        let mut id = found;
        if splits {
            // The front is a new object; the remainder keeps the old one.
            id = self.make(Block { bytes: rounded, next: found, state: State::Taken, ..whole });
            if whole.prev != NONE {
                self.blocks[whole.prev as usize].next = id;
            }
            let remainder = &mut self.blocks[found as usize];
            remainder.prev = id;
            remainder.address += rounded;
            remainder.bytes = rest;
            self.insert_free(found);
        }
        if !whole.expandable {
            let split_bytes = Name::InactiveSplitBytes;
            match (splits, whole.is_split()) {
                (true, true) => self.stats.decrease(split_bytes, small, rounded),
                (true, false) => {
                    self.stats.increase(split_bytes, small, rest);
                    self.stats.increase(Name::InactiveSplit, small, 1);
                }
                (false, true) => {
                    self.stats.decrease(split_bytes, small, whole.bytes);
                    self.stats.decrease(Name::InactiveSplit, small, 1);
                }
                (false, false) => {}
            }
        }
        self.blocks[id as usize].requested = request.bytes;
        self.book_block(id)
    }

    /// Books of a block that is now in use.
    fn book_block(&mut self, id: BlockId) -> Placement {
        let block = &mut self.blocks[id as usize];
        block.state = State::Taken;
        let block = *block;
        let small = Self::is_small(block.pool);
        self.stats.increase(Name::Allocation, small, 1);
        self.stats.increase(Name::AllocatedBytes, small, block.bytes);
        self.stats.increase(Name::Active, small, 1);
        self.stats.increase(Name::ActiveBytes, small, block.bytes);
        self.stats.increase(Name::RequestedBytes, small, block.requested);
        if block.bytes >= self.options.max_split {
            self.stats.oversize_allocations.increase(1);
        }
        Placement { address: block.address, bytes: block.bytes, segment: block.segment, handle: id }
    }

    /// Everything after a miss, in PyTorch's order.
    fn obtain_somehow(
        &mut self,
        device: &mut Device,
        request: Request,
        pool: u32,
        rounded: u64,
    ) -> Result<BlockId, Refusal> {
        self.hinges.at_a_miss = self.hinges.at_a_miss.max(self.total);
        if self.collects() {
            self.collect_garbage(device);
        }
        match self.obtain(device, request, pool, rounded, false) {
            Ok(block) => return Ok(block),
            Err(Refusal::Rejected) => return Err(Refusal::Rejected),
            Err(Refusal::Full) => {}
        }
        if self.profile.overflows_before_flush()
            && let Some(block) = self.take_overflow(request, rounded)
        {
            return Ok(block);
        }
        if self.release_available(device, pool, rounded, request.stream)
            && let Ok(block) = self.obtain(device, request, pool, rounded, false)
        {
            return Ok(block);
        }
        let is_capturing = match request.capture {
            Capture::No => false,
            Capture::Graph => true,
            Capture::MemPool => self.profile.mem_pool_is_capture(),
        };
        if !is_capturing {
            self.release_cached(device);
            // The free blocks are not searched again, although the flush may have made one that fits (pytorch#189504).
            if let Ok(block) = self.obtain(device, request, pool, rounded, true) {
                return Ok(block);
            }
        }
        if self.profile.overflows_before_flush() {
            return Err(Refusal::Full);
        }
        self.take_overflow(request, rounded).ok_or(Refusal::Full)
    }

    /// A free block of a pool that was made with `use_on_oom`. Inside a pool PyTorch looks in that pool again instead.
    fn take_overflow(&mut self, request: Request, rounded: u64) -> Option<BlockId> {
        let expands = self.options.expandable_segments;
        if request.pool != PoolIdx::DEFAULT || (expands && !self.profile.overflow_may_be_expandable()) {
            return None;
        }
        let half = u32::from(rounded > SMALL_REQUEST);
        let pools = self.overflow.clone();
        pools
            .into_iter()
            .find_map(|pool| self.take_free(2 * u32::from(pool.0) + half, rounded, request.stream))
    }

    /// Free bytes in private pools, which the out-of-memory text reports.
    fn private_free(&self) -> u64 {
        let pools = self.pools.chunks_exact(2).zip(&self.owners).skip(1);
        let private = pools.filter(|(_, owner)| !owner.is_gone).flat_map(|(halves, _)| halves);
        private.flat_map(|pool| pool.free.iter().flatten()).map(|(bytes, _, _)| bytes).sum()
    }
}

const EMPTY: Block = Block {
    address: 0,
    bytes: 0,
    requested: 0,
    number: 0,
    free_since: 0,
    prev: NONE,
    next: NONE,
    segment: SegmentId(0),
    pool: 0,
    stream: StreamIdx(0),
    state: State::Unmapped,
    expandable: false,
};

impl Policy for Torch {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        self.adopt_limit(device);
        let rounded = self.rounded(request.bytes);
        let half = if rounded <= SMALL_REQUEST { 0 } else { 1 };
        let pool = 2 * u32::from(request.pool.0) + half;
        let found = request.at.and_then(|address| self.take_at(request, address, rounded));
        let found = match found.or_else(|| self.take_free(pool, rounded, request.stream)) {
            Some(found) => Ok(found),
            None => self.obtain_somehow(device, request, pool, rounded),
        };
        match found {
            Ok(found) => Ok(self.hand_out(found, rounded, request)),
            Err(refusal) => {
                match refusal {
                    Refusal::Full => self.stats.num_ooms += 1,
                    Refusal::Rejected => self.stats.num_oom_rejections += 1,
                }
                Err(self.out_of_memory(device, request.bytes, &refusal))
            }
        }
    }

    fn free_requested(&mut self, placement: Placement) {
        let block = *self.block(placement.handle);
        let small = Self::is_small(block.pool);
        self.stats.decrease(Name::Allocation, small, 1);
        self.stats.decrease(Name::AllocatedBytes, small, block.bytes);
        if block.bytes >= self.options.max_split {
            self.stats.oversize_allocations.decrease(1);
        }
    }

    fn free(&mut self, _device: &mut Device, placement: Placement) {
        self.complete(placement.handle);
    }

    fn trim(&mut self, device: &mut Device) {
        self.release_cached(device);
    }

    fn adopt(&mut self, device: &mut Device, standing: &StandingSegment) -> Option<Vec<(usize, Placement)>> {
        self.adopt_limit(device);
        let pool = 2 * u32::from(standing.pool.0) + u32::from(!standing.small);
        let segment = device.adopt(standing.address, standing.bytes).id;
        self.book_segment(pool, standing.bytes);
        let (mut address, mut prev) = (standing.address, NONE);
        let mut placements = Vec::new();
        let mut free = Vec::new();
        for (index, (bytes, requested)) in standing.blocks.iter().enumerate() {
            let block =
                Block { address, bytes: *bytes, prev, segment, pool, stream: standing.stream, ..EMPTY };
            let id = self.make(Block { requested: requested.unwrap_or(0), ..block });
            if prev != NONE {
                self.blocks[prev as usize].next = id;
            }
            match requested {
                Some(_) => placements.push((index, self.book_block(id))),
                None => free.push(id),
            }
            (address, prev) = (address + bytes, id);
        }
        for id in free {
            self.insert_free(id);
            if self.block(id).is_split() {
                self.stats.increase(Name::InactiveSplit, standing.small, 1);
                self.stats.increase(Name::InactiveSplitBytes, standing.small, self.block(id).bytes);
            }
        }
        Some(placements)
    }

    fn rounded(&self, bytes: u64) -> Option<u64> {
        Some(Torch::rounded(self, bytes))
    }

    fn release_pool(&mut self, pool: PoolIdx) {
        let owner = &mut self.owners[usize::from(pool.0)];
        if pool != PoolIdx::DEFAULT && !owner.is_released {
            owner.is_released = true;
            self.released.push(pool);
        }
    }

    fn change_pool(&mut self, device: &mut Device, pool: PoolIdx, change: PoolChange) {
        match change {
            PoolChange::Trim => self.empty_released(device, pool),
            PoolChange::ServeOthers => self.use_on_oom(pool),
            PoolChange::ServeNoOthers => self.overflow.retain(|other| *other != pool),
            PoolChange::KeepWhole => self.never_split(pool),
        }
    }

    fn hangs_on_limit(&self, bytes: u64, limit: u64) -> bool {
        let rounded = Torch::rounded(self, bytes);
        // Collection counts look-ups from the first request on, where there is a limit at all.
        let may_collect = self.options.gc_threshold > 0.0
            && (self.limit.is_none() || self.total > (self.options.gc_threshold * limit as f64) as u64);
        may_collect
            || self.options.memory_fraction < 1.0
            || self.total.saturating_add(self.segment_bytes(rounded)) > limit
    }

    fn under_limit(&self, limit: u64) -> Option<Box<dyn Policy>> {
        Some(Box::new(Torch { limit: Some(limit), limit_is_set: true, ..self.clone() }))
    }

    fn latitude(&self) -> Option<Latitude> {
        Some(self.latitude_so_far())
    }

    fn write(&self, to: &mut crate::skip::State, live: &[Placement]) -> bool {
        self.write_state(to, live);
        true
    }

    fn tallies(&mut self, see: &mut dyn FnMut(&mut u64)) {
        self.each_tally(see);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("num_alloc_retries", self.stats.num_alloc_retries),
            ("num_ooms", self.stats.num_ooms),
            ("num_sync_all_streams", self.stats.num_sync_all_streams),
            ("num_oom_rejections", self.stats.num_oom_rejections),
            ("pools_lost", self.n_pools_lost),
            ("failed_assertions", self.n_assertions),
            (ADDRESS_TIES, self.n_address_ties),
        ]
    }
}
