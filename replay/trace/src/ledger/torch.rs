//! What PyTorch's caching allocator did inside its segments.
//!
//! Its own totals come with every block. What it counts beyond them is reconstructed:
//!
//! - *requested* bytes fall when a free is completed. A block that other streams use is freed with stream events, recorded
//!   just before on the same thread, and completed when a later `allocate` or trim saw all of them done.
//! - *device allocs* are `cudaMalloc`s of segments, or calls of an expandable segment's `map`: any number of pages, then
//!   one `cuMemSetAccess` for the own device. *Device frees* are `cudaFree`s, or runs of neighbouring unmapped pages.
//!
//! (`c10/cuda/CUDACachingAllocator.cpp`, 2.1 to 2.15.)

use gputrace_schemas::event::{
    Action, BlockAlloc, BlockFree, BlockOom, Bytes, Call, Event, NO_DEVICE, Nanos, StackId, ThreadId, Wait,
    WaitAction,
};
use gputrace_sim::policies::torch;
use rustc_hash::{FxHashMap, FxHashSet};

use super::amounts::{Books, Meter};
use super::cache::CacheBooks;
use super::driver::{Change, Mapped, MemoryKind};
use super::findings::Finding;
use super::phases::PhaseId;
use super::sites::{OwnerId, SiteId};
use super::{Effect, Fate, Paging, Step, Steps, Stranger};
use crate::newest::Newest;

/// `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH`, cuda.h.
const POOL_RESERVED_HIGH: u64 = 6;
/// Most stream events kept for one free: one for each stream that used the block.
const MAX_EVENTS_OF_A_FREE: usize = 1024;
/// Most out-of-memory errors kept whole; all are counted.
const MAX_OOMS: usize = 64;

/// PyTorch's books of one device.
#[derive(Clone, Debug, Default)]
pub struct TorchBooks {
    /// Blocks allocated (`allocation.all.allocated`).
    pub allocations: u64,
    /// Blocks taken back.
    pub frees: u64,
    /// `OutOfMemoryError`s (`num_ooms`).
    pub n_ooms: u64,
    /// The newest of them, oldest first.
    pub ooms: Vec<TorchOom>,
    /// `allocated_bytes.all`: PyTorch's own total.
    pub allocated: Meter,
    /// `reserved_bytes.all`: PyTorch's own total, which comes with each block and each error; until the next, without segments that
    /// were freed, and with pages that were mapped.
    pub reserved: Meter,
    /// Blocks that were taken back and that streams still use: they are *active*, and not *allocated*.
    pub pending: Bytes,
    /// `requested_bytes.all`.
    pub requested: Meter,
    /// Blocks whose request was not seen: *requested* counts them as large as they are.
    pub n_unknown_requests: u64,
    /// Blocks freed while a stream was captured. Those that other streams use stay *requested* until the capture is over,
    /// and which these are is not seen.
    pub n_frees_in_capture: u64,
    /// `num_device_alloc`.
    pub device_allocs: u64,
    /// `num_device_free`.
    pub device_frees: u64,
    /// Blocks by call site.
    pub blocks: Books,
    /// Blocks by phase of the program: owners are [`PhaseId`]s.
    pub phases: Books,
    /// *Allocated* and *reserved* when the device held most.
    pub at_device_peak: (Bytes, Bytes),
    /// What PyTorch has in use of the stream-ordered pool (`backend:cudaMallocAsync`).
    pub pool_used: Meter,
    /// Allocations from the stream-ordered pool.
    pub n_pool_allocations: u64,
    /// `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH`, as the driver answered the program.
    pub pool_reserved_high: Option<Bytes>,
    /// What its cache bought and freed.
    pub cache: CacheBooks,
}

impl TorchBooks {
    /// PyTorch says its totals, with each block and each error.
    fn says(&mut self, time: Nanos, allocated: Bytes, reserved: Bytes) {
        self.allocated.set(time, allocated);
        self.reserved.set(time, reserved);
    }

    /// A segment was given back.
    pub(super) fn gave_back(&mut self, bytes: Bytes) {
        self.device_frees += 1;
        self.reserved.lose(bytes);
    }

    fn lose_block(&mut self, block: &Block) {
        self.blocks.lose(OwnerId(0), block.site, block.bytes);
        self.phases.lose(OwnerId(block.phase.0), SiteId(0), block.bytes);
    }

    /// PyTorch used the driver's pool instead of its own cache.
    #[must_use]
    pub fn is_pool_backend(&self) -> bool {
        self.allocations == 0 && self.n_pool_allocations > 0
    }
}

/// PyTorch gave up on a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TorchOom {
    /// When.
    pub time: Nanos,
    /// Bytes that PyTorch wanted.
    pub bytes: Bytes,
    /// Bytes that the program requested.
    pub requested: Option<Bytes>,
    /// Allocated at that moment.
    pub allocated: Bytes,
    /// Reserved at that moment.
    pub reserved: Bytes,
    /// Free and total bytes of the device, as the driver answered PyTorch just before.
    pub device: Option<(Bytes, Bytes)>,
    /// Memory that the driver had allocated to the process on this device.
    pub tracked: Bytes,
    /// What the driver had just refused PyTorch; none if it was not asked, or the call was not seen.
    pub refused: Option<Bytes>,
    /// On which thread.
    pub thread: ThreadId,
    /// From where.
    pub stack: StackId,
    /// From where, in short.
    pub site: SiteId,
    /// Blocks allocated before it: whether the program continued.
    pub allocations_before: u64,
}

/// What kept PyTorch from a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wall {
    /// The device had no room for it.
    Device,
    /// A limit of PyTorch's own (`set_per_process_memory_fraction`): the device had room.
    Limit,
    /// How much was free was not seen.
    Unknown,
}

impl TorchOom {
    /// The segment that PyTorch needed, as far as its usual sizes hold: small requests need much more than themselves.
    #[must_use]
    pub fn segment(&self) -> Bytes {
        self.refused.unwrap_or_else(|| Bytes(torch::segment_bytes(self.bytes.0, torch::LARGE_SEGMENT)))
    }

    /// What kept PyTorch from it: that the driver refused, or else how much was free.
    #[must_use]
    pub fn wall(&self) -> Wall {
        match (self.refused, self.device) {
            (Some(_), _) => Wall::Device,
            (None, Some((free, _))) if free < self.segment() => Wall::Device,
            (None, Some(_)) => Wall::Limit,
            (None, None) => Wall::Unknown,
        }
    }
}

/// A block that is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Block {
    /// On which device.
    pub device: i16,
    /// How large.
    pub bytes: Bytes,
    /// The amount that the program requested; the block's size where that was not seen.
    pub requested: Bytes,
    /// Asked for from where.
    pub site: SiteId,
    /// In which phase of the program.
    pub phase: PhaseId,
    /// From where, in full.
    pub stack: StackId,
    /// Since when.
    pub since: Nanos,
    /// The stream of the request, where it was seen.
    pub stream: Option<u64>,
    /// Its number among all blocks: no two of a process have the same, strangers included.
    pub serial: u64,
}

/// The stream event that PyTorch's allocator asks about here. The program never shows that it asks about its own, so
/// those that are ever asked about are the allocator's ([`super::Ledger::knowing`]).
#[must_use]
pub fn asked_about(wait: &Wait) -> Option<u64> {
    (wait.action != WaitAction::Record).then_some(wait.event)
}

/// What is known of PyTorch's allocators of all devices.
#[derive(Default)]
pub(super) struct Torch {
    pub(super) devices: Newest<i16, TorchBooks>,
    pub(super) blocks: FxHashMap<u64, Block>,
    n_blocks: u64,
    threads: Newest<ThreadId, ThreadState>,
    pending: FxHashMap<u64, PendingFree>,
    n_pending: u64,
    waiting: FxHashMap<u64, u64>,
    /// Captures of streams that are going on.
    n_captures: u64,
    own_events: FxHashSet<u64>,
    dismissed: FxHashSet<u64>,
    /// A stream event turned out to be the allocator's after it had been taken for the program's.
    pub(super) mistaken: bool,
}

#[derive(Default)]
struct ThreadState {
    recorded: Vec<u64>,
    run: Run,
    mem_info: Option<(Bytes, Bytes)>,
}

/// Calls on neighbouring pages that belong together.
#[derive(Clone, Copy, Default)]
enum Run {
    #[default]
    None,
    Mapping(Mapped),
    Unmapping {
        end: u64,
        reservation: Option<u64>,
    },
}

struct PendingFree {
    freed: Freed,
    n_events: usize,
}

/// What was taken back.
#[derive(Clone, Copy)]
enum Freed {
    Block(u64, Block),
    Stranger(Stranger),
}

impl Torch {
    /// With the stream events that are known to be the allocator's.
    pub(super) fn with_own_events(own_events: FxHashSet<u64>) -> Torch {
        Torch { own_events, ..Torch::default() }
    }

    pub(super) fn books(&mut self, device: i16) -> &mut TorchBooks {
        self.devices.of(device)
    }

    pub(super) fn take_own_events(&mut self) -> FxHashSet<u64> {
        std::mem::take(&mut self.own_events)
    }

    pub(super) fn alloc(
        &mut self,
        event: &Event,
        block: &BlockAlloc,
        (site, phase): (SiteId, PhaseId),
        is_at_peak: bool,
        effect: &mut Effect,
    ) {
        self.begin_step(event.thread).recorded.clear();
        let books = self.books(block.device);
        books.allocations += 1;
        books.cache.serves(books.allocations, site);
        books.says(event.time, block.allocated, block.reserved);
        let requested = block.requested.unwrap_or_else(|| {
            books.n_unknown_requests += 1;
            block.bytes
        });
        books.requested.gain(event.time, requested);
        books.blocks.gain(event.time, OwnerId(0), site, block.bytes);
        books.phases.gain(event.time, OwnerId(phase.0), SiteId(0), block.bytes);
        let serial = self.new_serial();
        let new = Block {
            device: block.device,
            bytes: block.bytes,
            requested,
            site,
            phase,
            stack: event.stack,
            since: event.time,
            stream: block.stream,
            serial,
        };
        if let Some(before) = self.blocks.insert(block.addr, new) {
            effect.found.push(Finding::BlockTwice(block.addr));
            let books = self.books(before.device);
            books.requested.lose(before.requested);
            books.lose_block(&before);
            effect.steps.push(Step::BlockFreed(block.addr, before));
            effect.steps.push(Step::BlockDone(block.addr, before));
        }
        effect.steps.push(Step::Block(block.addr, new));
        if is_at_peak {
            self.device_peaked(block.device);
        }
    }

    /// The block that is freed, if it was seen allocated.
    pub(super) fn free(&mut self, event: &Event, block: &BlockFree, effect: &mut Effect) -> Option<Block> {
        let recorded = &mut self.begin_step(event.thread).recorded;
        let mut waits_for = if recorded.is_empty() { vec![] } else { std::mem::take(recorded) };
        let is_capturing = self.n_captures > 0;
        let books = self.books(block.device);
        books.frees += 1;
        books.n_frees_in_capture += u64::from(is_capturing);
        books.says(event.time, block.allocated, block.reserved);
        let known = self.blocks.remove(&block.addr);
        let freed = match known {
            Some(known) => {
                let books = self.books(known.device);
                books.lose_block(&known);
                books.pending.0 = books.pending.0.saturating_add(known.bytes.0);
                effect.steps.push(Step::BlockFreed(block.addr, known));
                Freed::Block(block.addr, known)
            }
            None => {
                effect.found.push(Finding::UnknownBlock(block.addr));
                let BlockFree { device, addr, bytes, .. } = *block;
                let stranger = Stranger { device, addr, bytes, serial: self.new_serial() };
                effect.steps.push(Step::Stranger(Fate::Freed, stranger));
                Freed::Stranger(stranger)
            }
        };
        if waits_for.is_empty() {
            self.completed(&freed, &mut effect.steps);
            return known;
        }
        waits_for.retain(|handle| {
            let own = self.own_events.contains(handle);
            if !own {
                self.dismissed.insert(*handle);
            }
            own
        });
        self.complete_after(freed, &waits_for, &mut effect.steps);
        waits_for.clear();
        self.threads.of(event.thread).recorded = waits_for;
        known
    }

    pub(super) fn oom(
        &mut self,
        event: &Event,
        oom: &BlockOom,
        site: SiteId,
        tracked: Bytes,
        refused: Option<Bytes>,
    ) {
        let thread = self.begin_step(event.thread);
        thread.recorded.clear();
        let device = thread.mem_info.take();
        let books = self.books(oom.device);
        books.n_ooms += 1;
        books.says(event.time, oom.allocated, oom.reserved);
        books.blocks.remember();
        if books.ooms.len() == MAX_OOMS {
            books.ooms.remove(0);
        }
        books.ooms.push(TorchOom {
            time: event.time,
            bytes: oom.bytes,
            requested: oom.requested,
            allocated: oom.allocated,
            reserved: oom.reserved,
            device,
            tracked,
            refused,
            thread: event.thread,
            stack: event.stack,
            site,
            allocations_before: books.allocations,
        });
    }

    pub(super) fn wait(&mut self, event: &Event, wait: &Wait, steps: &mut Steps) {
        match wait.action {
            WaitAction::Record if wait.result == 0 => {
                let recorded = &mut self.threads.of(event.thread).recorded;
                if recorded.len() < MAX_EVENTS_OF_A_FREE {
                    recorded.push(wait.event);
                } else {
                    // A thread that only records never frees; what it recorded last is what counts.
                    recorded.rotate_left(1);
                    recorded[MAX_EVENTS_OF_A_FREE - 1] = wait.event;
                }
            }
            WaitAction::Record => {}
            WaitAction::Query | WaitAction::Synchronize => {
                if self.own_events.insert(wait.event) {
                    self.mistaken |= self.dismissed.contains(&wait.event);
                }
                if wait.result == 0 {
                    self.seen_done(wait.event, steps);
                }
            }
        }
    }

    /// Books a call that succeeded, and what it changed.
    pub(super) fn call(&mut self, event: &Event, call: &Call, site: SiteId, effect: &mut Effect) {
        let Effect { changes, steps, peaked, .. } = effect;
        let (mut bought, mut given) = (None, None);
        for change in &*changes {
            match change {
                Change::Gained(object) if object.torch && object.kind == MemoryKind::Linear => {
                    self.books(object.device).device_allocs += 1;
                    bought = Some((object.device, object.bytes));
                }
                Change::Gained(object) if object.torch && object.kind == MemoryKind::Async => {
                    let books = self.books(object.device);
                    books.n_pool_allocations += 1;
                    books.pool_used.gain(event.time, object.bytes);
                }
                Change::Freed(object) if object.torch && object.kind == MemoryKind::Linear => {
                    self.books(object.device).gave_back(object.bytes);
                    given = Some((object.device, object.bytes));
                }
                Change::Freed(object) if object.torch && object.kind == MemoryKind::Async => {
                    self.books(object.device).pool_used.lose(object.bytes);
                }
                Change::Mapped(range) if range.torch => {
                    bought = Some((range.device, range.bytes));
                    self.mapped(event.thread, *range);
                }
                Change::Unmapped(range) if range.torch => given = Some((range.device, range.bytes)),
                _ => {}
            }
        }
        if let Some((device, bytes)) = bought {
            self.buys(device, bytes, call.duration);
        }
        if let Some((device, bytes)) = given {
            self.gives_back(device, site, bytes, call);
        }
        for change in &*changes {
            if let Change::Unmapped(range) = change
                && range.torch
            {
                self.unmapped(event.thread, range, steps);
            }
        }
        match call.action {
            Action::SetAccess => self.set_access(event, steps),
            Action::MemInfo => {
                self.threads.of(event.thread).mem_info = Some((call.bytes, Bytes(call.extra)));
            }
            Action::PoolGet if call.extra == POOL_RESERVED_HIGH => self.pool_reserved_high(call),
            Action::CaptureBegin => self.n_captures += 1,
            Action::CaptureEnd => self.n_captures = self.n_captures.saturating_sub(1),
            _ => {}
        }
        if let Some(device) = *peaked {
            self.device_peaked(device);
        }
    }

    /// The program asked a pool how much it kept at most.
    fn pool_reserved_high(&mut self, call: &Call) {
        let device = match call.device {
            NO_DEVICE => self.devices.iter().find(|(_, books)| books.is_pool_backend()).map(|(id, _)| id),
            device => Some(device),
        };
        let Some(books) = device.and_then(|device| self.devices.get_mut(device)) else { return };
        books.pool_reserved_high = books.pool_reserved_high.max(Some(call.bytes));
    }

    /// The device holds more than ever.
    fn device_peaked(&mut self, device: i16) {
        if let Some(books) = self.devices.get_mut(device) {
            books.at_device_peak = (books.allocated.now, books.reserved.now);
        }
    }

    /// PyTorch bought a segment, or a page of one.
    fn buys(&mut self, device: i16, bytes: Bytes, time: Nanos) {
        let books = self.books(device);
        books.cache.buys(bytes, books.allocated.now, time);
    }

    /// PyTorch gave a segment back, or a page of one.
    fn gives_back(&mut self, device: i16, site: SiteId, bytes: Bytes, call: &Call) {
        let books = self.books(device);
        match call.in_allocate {
            true => books.cache.makes_room(bytes),
            false => books.cache.trims(site, bytes, books.allocations + books.frees, call.duration),
        }
    }

    /// PyTorch made a page of an expandable segment accessible; [`Torch::set_access`] ends the run.
    fn mapped(&mut self, thread: ThreadId, page: Mapped) {
        let state = self.threads.of(thread);
        state.run = Run::Mapping(match state.run {
            Run::Mapping(before) if before.device == page.device => {
                Mapped { bytes: Bytes(before.bytes.0.saturating_add(page.bytes.0)), ..before }
            }
            Run::Mapping(_) | Run::Unmapping { .. } | Run::None => page,
        });
    }

    /// The first `cuMemSetAccess` after a run of maps is for the segment's own device; those of peers follow.
    fn set_access(&mut self, event: &Event, steps: &mut Steps) {
        let state = self.threads.of(event.thread);
        if let Run::Mapping(pages) = state.run {
            state.run = Run::None;
            let books = self.books(pages.device);
            books.device_allocs += 1;
            books.reserved.gain(event.time, pages.bytes);
            steps.push(Step::Pages(Paging::Grown, pages));
        }
    }

    /// PyTorch unmapped a page of an expandable segment.
    fn unmapped(&mut self, thread: ThreadId, page: &Mapped, steps: &mut Steps) {
        let reservation = page.reservation.map(|(start, _)| start);
        let state = self.threads.of(thread);
        let continues = matches!(
            state.run,
            Run::Unmapping { end, reservation: before } if end == page.addr && before == reservation
        );
        state.run = Run::Unmapping { end: page.addr.saturating_add(page.bytes.0), reservation };
        let books = self.books(page.device);
        books.device_frees += u64::from(!continues);
        books.reserved.lose(page.bytes);
        steps.push(Step::Pages(Paging::Shrunk(continues), *page));
    }

    /// An event of PyTorch ends what its thread did for the one before.
    fn begin_step(&mut self, thread: ThreadId) -> &mut ThreadState {
        let state = self.threads.of(thread);
        state.run = Run::None;
        state
    }

    fn new_serial(&mut self) -> u64 {
        self.n_blocks += 1;
        self.n_blocks
    }

    fn complete_after(&mut self, freed: Freed, events: &[u64], steps: &mut Steps) {
        if events.is_empty() {
            return self.completed(&freed, steps);
        }
        let id = self.n_pending;
        self.n_pending += 1;
        self.pending.insert(id, PendingFree { freed, n_events: events.len() });
        for event in events {
            if let Some(before) = self.waiting.insert(*event, id) {
                // Recorded again: the allocator had seen it done, in events that were lost.
                self.one_done(before, steps);
            }
        }
    }

    fn seen_done(&mut self, event: u64, steps: &mut Steps) {
        if let Some(id) = self.waiting.remove(&event) {
            self.one_done(id, steps);
        }
    }

    fn one_done(&mut self, id: u64, steps: &mut Steps) {
        let Some(pending) = self.pending.get_mut(&id) else { return };
        pending.n_events -= 1;
        if pending.n_events == 0 {
            let freed = pending.freed;
            self.pending.remove(&id);
            self.completed(&freed, steps);
        }
    }

    fn completed(&mut self, freed: &Freed, steps: &mut Steps) {
        match freed {
            Freed::Block(addr, block) => {
                let books = self.books(block.device);
                books.requested.lose(block.requested);
                books.pending.0 = books.pending.0.saturating_sub(block.bytes.0);
                steps.push(Step::BlockDone(*addr, *block));
            }
            Freed::Stranger(stranger) => steps.push(Step::Stranger(Fate::Done, *stranger)),
        }
    }
}
