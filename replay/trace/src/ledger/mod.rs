//! What really happened: who held which memory when.
//!
//! A [`Ledger`] is fed one event after the other and keeps what is alive and the totals, never the events. Nothing is
//! counted twice: physical memory by [`MemoryKind`], address ranges and mappings beside it, and PyTorch's blocks as a
//! level of their own inside PyTorch's segments. What does not add up is a [`Finding`], never an error.

mod amounts;
pub mod books_audit;
mod cache;
mod communicators;
mod contexts;
mod counts;
mod driver;
mod findings;
mod graphs;
mod health;
mod heaps;
mod hidden;
mod loops;
mod phases;
mod pjrt;
pub mod pools;
mod since;
mod sites;
mod torch;
mod training;
mod watch;

use std::collections::BTreeMap;

use gputrace_schemas::event::{
    Action, Alive, Bytes, Call, CommId, Event, EventKind, HOST, LostCause, NO_DEVICE, Nanos, OutOfMemory,
    Pjrt, PjrtAction, Sample, StackId, ThreadId,
};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};

#[cfg(test)]
mod tests;

pub use amounts::{Books, Held, Meter, Moment, Part};
pub use cache::{CacheBooks, Misfits, Traffic, Trims};
pub use communicators::{CommBooks, GpuTimed};
pub use contexts::Context;
pub use counts::{CallCounts, Histogram};
pub use driver::{Mapped, MemoryKind, Object};
pub use findings::{Finding, Findings, Found};
pub use heaps::{HeapBlock, HeapBooks};
pub use heaps::{is_arena, is_heap, is_pinned_cache};
pub use hidden::{Cause, HiddenStep, Pages, Sampled, Samples};
pub use phases::{PhaseId, Phases};
pub use pjrt::{Buffer, Executable, Need, PjrtBooks, PjrtOom};
pub use sites::{Line, ModelCall, NameId, OwnerId, Site, SiteId, Sites, call_site};
pub use torch::{Block, Step, Stranger, TorchBooks, TorchOom, Wall, asked_about};
pub use training::{StepSource, Training, TrainingStep, is_in_module};
pub use watch::{Unwatched, Watch};

use crate::Definitions;
use crate::owners::{JAX, TORCH, TORCH_ELSEWHERE, TORCH_PINNED};
use communicators::Communicators;
use contexts::Contexts;
use counts::Counts;
use driver::{Change, Driver, Shelf};
use graphs::Graphs;
pub use health::{Health, Suspension};
use heaps::Heaps;
use hidden::Span;
use pjrt::Buffers;
use pools::Pools;
use sites::Origin;
use torch::Torch;
use training::Change::{Asked, GivenBack};
use training::StepFinder;

/// `CUDA_ERROR_DEINITIALIZED`, cuda.h: the driver is shutting down. Every library that frees in a destructor sees it.
const DEINITIALIZED: i32 = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH`, cuda.h.
const POOL_RESERVED_HIGH: u64 = 6;
/// Most refused requests kept whole; all are counted.
const MAX_REFUSALS: usize = 64;

/// The books of one process.
#[derive(Default)]
pub struct Ledger {
    /// Places that the numbers below refer to.
    pub sites: Sites,
    /// One entry for each device that anything concerned; [`NO_DEVICE`] where it is not known.
    pub devices: BTreeMap<i16, DeviceBooks>,
    /// Host memory: pinned, registered, or made by `cuMemCreate`.
    pub host: Books,
    /// Events that were lost, by cause.
    pub lost: BTreeMap<LostCause, u64>,
    /// Facts in words, oldest first.
    pub notes: Vec<(Nanos, String)>,
    /// The newest heartbeat: when the recorder last saw the process alive, and what it saw.
    pub alive: Option<(Nanos, Alive)>,
    /// Faults of GPUs, and times in which the process was suspended.
    pub health: Health,
    /// What does not add up.
    pub findings: Findings,
    /// Calls that the process ended in.
    pub open_calls: Vec<OpenCall>,
    /// Frees that the driver refused because it was shutting down.
    pub n_after_shutdown: u64,
    /// Requests that the driver refused, newest last.
    pub refusals: Vec<Refusal>,
    ran_out: Option<OutOfMemory>,
    is_by_torch: bool,
    /// Number of events.
    pub n_events: u64,
    /// From when on the trace has every event; 0 from its beginning. Counts begin there (`since.rs`).
    pub since: Nanos,
    counts_anew: bool,
    /// Time of the first event.
    pub first: Option<Nanos>,
    /// Time of the last event.
    pub last: Nanos,
    /// The parts of itself that the program named.
    pub phases: Phases,
    /// The turns of its training loop, once all events are booked.
    pub training: Option<Training>,
    /// Where these are not known: turns of the loops that were seen, any of which may be it.
    pub loops: Vec<u64>,
    finder: StepFinder,
    contexts: Contexts,
    graph_memory: Graphs,
    /// Whose memory a stream-ordered pool gives out.
    pools: FxHashMap<u64, i16>,
    /// Private pools of PyTorch's allocator.
    pub torch_pools: Pools,
    counts: Counts,
    driver: Driver,
    nccl: Communicators,
    torch: Torch,
    buffers: Buffers,
    heaps: Heaps,
}

/// The books of one device.
#[derive(Clone, Debug, Default)]
pub struct DeviceBooks {
    /// Memory of the device: linear, virtual memory management, stream-ordered in use, and arrays as estimated.
    pub physical: Books,
    /// The same by phase of the program: owners are [`PhaseId`]s.
    pub phases: Books,
    /// The same by kind, and the kinds that are not in [`DeviceBooks::physical`].
    pub kinds: BTreeMap<MemoryKind, Meter>,
    /// Managed memory: may be here or on the host.
    pub managed: Books,
    /// Memory that belongs to CUDA graphs: here while the graph runs.
    pub graphs: Books,
    /// Memory of other processes, or of graphics, that is open here: mappings, each counted as one byte, because the
    /// owner of the memory counts it.
    pub imported: Books,
    /// What graphs keep of the device: from the first launch until it is trimmed.
    pub graphs_kept: Meter,
    /// Address ranges reserved.
    pub reserved_addresses: Meter,
    /// Address ranges with memory behind them.
    pub mapped: Meter,
    /// Objects that the driver allocated.
    pub allocs: u64,
    /// Objects that the program freed.
    pub frees: u64,
    /// Objects that went away with their context.
    pub dropped: Held,
    /// Calls that hand out or take back memory and that the driver refused.
    pub failed: u64,
    /// Memory that libraries allocated from memory that they have: inside what the driver allocated to them.
    pub heap: HeapBooks,
    /// PyTorch's books, if it used the device.
    pub torch: Option<TorchBooks>,
    /// Buffers of JAX and others that use PJRT.
    pub pjrt: Option<PjrtBooks>,
    /// The driver's own figures.
    pub samples: Samples,
    /// The driver's pages of linear memory.
    pub pages: Pages,
}

impl DeviceBooks {
    /// What the driver should have charged for what it handed out.
    fn charged(&self) -> u64 {
        self.handed_out().0.saturating_add(self.pages.rounding().0)
    }

    /// Memory of the device that was handed out, graphs' included.
    fn handed_out(&self) -> Bytes {
        Bytes(self.physical.now().bytes.0.saturating_add(self.graphs_kept.now.0))
    }
}

/// Which [`Books`] of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize, Serialize)]
pub enum Account {
    /// What the driver handed out.
    Driver,
    /// Managed memory.
    Managed,
    /// Memory of CUDA graphs.
    Graphs,
    /// Mappings of what others own: a number, not bytes.
    Imported,
    /// PyTorch's blocks.
    Blocks,
    /// Buffers of JAX.
    Buffers,
    /// Blocks of libraries' own heaps.
    Heap,
}

/// A call that had not returned when the process ended.
#[derive(Clone, Copy, Debug)]
pub struct OpenCall {
    /// When it began.
    pub time: Nanos,
    /// Which.
    pub name: NameId,
    /// On which thread.
    pub thread: ThreadId,
    /// From where.
    pub site: SiteId,
}

/// A request that the driver refused.
#[derive(Clone, Copy, Debug)]
pub struct Refusal {
    /// When.
    pub time: Nanos,
    /// Objects allocated on this device before it: whether the program continued.
    pub allocs_before: u64,
    /// Which function.
    pub name: NameId,
    /// What it answered: `CUresult`.
    pub result: i32,
    /// On which device.
    pub device: i16,
    /// Bytes requested.
    pub bytes: Bytes,
    /// The call stack of the request.
    pub owner: OwnerId,
    /// From where.
    pub site: SiteId,
    /// From where, in full.
    pub stack: StackId,
    /// No memory was left, and the request was not repeated ([`Event::out_of_memory`]).
    pub is_final: bool,
    /// Memory that the driver had allocated to the process on this device.
    pub tracked: Bytes,
}

impl Ledger {
    /// Books a whole trace. `feed` gives every event to the ledger; it is called a second time where the first
    /// showed which stream events are PyTorch's only after they had mattered.
    ///
    /// # Errors
    /// Those of `feed`.
    pub fn of<E>(mut feed: impl FnMut(&mut Ledger) -> Result<(), E>) -> Result<Ledger, E> {
        let mut ledger = Ledger::default();
        feed(&mut ledger)?;
        if ledger.torch.mistaken {
            ledger = ledger.known();
            feed(&mut ledger)?;
        }
        ledger.finish();
        Ok(ledger)
    }

    /// Empty books, where it is known already which stream events are PyTorch's: those it ever queries or waits for.
    #[must_use]
    pub fn knowing(own_events: FxHashSet<u64>) -> Ledger {
        Ledger { torch: Torch::with_own_events(own_events), ..Ledger::default() }
    }

    /// Some events were booked before it was known which stream events are PyTorch's: `requested` is too large. Booking all
    /// of them again, with what [`Ledger::known`] gives, mends it; [`Ledger::of`] does.
    #[must_use]
    pub fn is_mistaken(&self) -> bool {
        self.torch.mistaken
    }

    /// Empty books that know what these have learned.
    #[must_use]
    pub fn known(mut self) -> Ledger {
        Ledger::knowing(self.torch.take_own_events())
    }

    /// The turns of the training loop as far as events were booked, while [`Ledger::training`] is not known yet. Takes time.
    #[must_use]
    pub fn training_now(&self) -> Option<Training> {
        self.finder.found().training
    }

    /// Books one event. Events come in the order of their times. To know who held what at some instant, feed the
    /// events up to it, and ask [`Ledger::live`], [`Ledger::live_blocks`] and the parts of the [`Books`].
    pub fn event(&mut self, definitions: &dyn Definitions, event: &Event) {
        self.torch.steps.list.clear();
        self.ran_out = None;
        self.count_event(definitions, event.time);
        self.first.get_or_insert(event.time);
        self.last = self.last.max(event.time);
        match &event.kind {
            EventKind::Call(call) => self.call(definitions, event, call),
            EventKind::BlockAlloc(block) => {
                let origin = self.sites.origin(definitions, event.stack, event.thread);
                let Ledger { findings, torch, .. } = self;
                let mut found = |finding| findings.add(finding, event.time, event.thread, event.stack);
                let place = (origin.site, self.phases.now(event.thread));
                torch.alloc(event, block, place, &mut found);
                self.counts.block(block.bytes);
                self.found_memory(definitions, event, &Asked(block.device, origin.site));
                let physical = self.devices.get(&block.device).map(|device| &device.physical);
                if physical.is_some_and(|books| books.now().bytes == books.peak()) {
                    self.torch_at_peak(block.device);
                }
            }
            EventKind::BlockFree(block) => {
                let Ledger { findings, torch, .. } = self;
                let mut found = |finding| findings.add(finding, event.time, event.thread, event.stack);
                let known = torch.free(event, block, &mut found);
                let known = known.filter(|block| !self.is_before_that(block.since));
                let change = GivenBack(known.map(|block| (block.device, block.site)));
                self.found_memory(definitions, event, &change);
            }
            EventKind::BlockOom(oom) => {
                self.ran_out = event.out_of_memory();
                let origin = self.sites.origin(definitions, event.stack, event.thread);
                let device = self.devices.entry(oom.device).or_default();
                device.physical.remember();
                let (tracked, allocs) = (device.physical.now().bytes, device.allocs);
                let sites = &self.sites;
                let is_its = |it: &&Refusal| {
                    (it.device, it.allocs_before) == (oom.device, allocs) && sites.owner(it.owner) == TORCH
                };
                let refused = self.refusals.iter().rev().find(is_its).map(|refusal| refusal.bytes);
                self.torch.oom(event, oom, origin.site, tracked, refused);
            }
            EventKind::Wait(wait) => self.torch.wait(event, wait),
            EventKind::Sample(sample) => self.sample(event.time, sample),
            EventKind::Mark(mark) => {
                self.phases.mark(definitions, event, mark);
                self.found_mark(definitions, event, mark);
            }
            EventKind::NcclEnter(enter) => {
                let origin = self.sites.origin(definitions, event.stack, event.thread);
                self.nccl.enter(enter, event.time, origin.site, definitions.communicator(enter.comm));
            }
            EventKind::NcclExit(exit) => self.nccl.exit(exit),
            EventKind::NcclTiming(timing) => self.nccl.ran(timing),
            EventKind::Pjrt(pjrt) => self.pjrt(definitions, event, pjrt),
            EventKind::PjrtExecutable(made) => {
                self.buffers.compiled(made, definitions.text(made.name).unwrap_or_default());
            }
            EventKind::Lost(lost) => {
                let n = self.lost.entry(lost.cause).or_default();
                *n = n.saturating_add(lost.events);
            }
            EventKind::Note(text) => self.note(event.time, text),
        }
        let Ledger { torch_pools, torch, driver, .. } = self;
        if !torch_pools.is_idle() {
            torch_pools.steps(event, &torch.steps.list, |addr| driver.reservation(addr));
        }
    }

    fn pjrt(&mut self, definitions: &dyn Definitions, event: &Event, pjrt: &Pjrt) {
        let site = self.sites.origin(definitions, event.stack, event.thread).site;
        if pjrt.action != PjrtAction::Failed {
            return self.buffers.event(event, pjrt, site, &mut self.devices);
        }
        let device = self.buffers.device_of(pjrt);
        self.ran_out = event.out_of_memory().map(|oom| OutOfMemory { device, ..oom });
        let failed = self.buffers.unserved(pjrt, &mut self.devices).unwrap_or(pjrt.executable);
        let books = self.devices.entry(device).or_default();
        books.physical.remember();
        let tracked = books.physical.now().bytes;
        let books = books.pjrt.get_or_insert_default();
        books.ran_out(PjrtOom {
            time: event.time,
            bytes: Some(pjrt.bytes).filter(|bytes| bytes.0 > 0),
            origin: pjrt.origin,
            executable: self.buffers.executable_at(failed),
            buffers: books.buffers.now().bytes,
            tracked,
            said: definitions.text(pjrt.text).unwrap_or_default().to_owned(),
            site,
            stack: event.stack,
            made_before: books.n_made(),
        });
    }

    /// The request for memory that the event just booked says has failed for good.
    #[must_use]
    pub fn ran_out(&self) -> Option<OutOfMemory> {
        self.ran_out
    }

    /// PyTorch's caching allocator made the call that was booked last.
    #[must_use]
    pub fn is_by_torch(&self) -> bool {
        self.is_by_torch
    }

    /// The contexts that the process made, in order.
    pub fn contexts(&self) -> impl Iterator<Item = &Context> {
        self.contexts.iter()
    }

    /// Communicators of NCCL: what they hold, and what they were used for.
    pub fn communicators(&self) -> impl Iterator<Item = (CommId, &CommBooks)> {
        self.nccl.books.iter().map(|(id, books)| (*id, books))
    }

    /// Launches of NCCL whose time on the GPU was to be measured.
    pub fn gpu_timed(&self) -> &GpuTimed {
        &self.nccl.timed
    }

    /// Calls by function.
    pub fn calls(&self) -> impl Iterator<Item = (NameId, &CallCounts)> {
        self.counts.calls()
    }

    /// Sizes of PyTorch's blocks.
    #[must_use]
    pub fn block_sizes(&self) -> &Histogram {
        self.counts.blocks()
    }

    /// Memory that the driver allocated and the program still holds, or held when its context went away, if it allocated nothing
    /// on that device after that.
    pub fn live(&self) -> impl Iterator<Item = &Object> {
        self.driver.live()
    }

    /// The object of the driver at an address.
    #[must_use]
    pub fn object_at(&self, addr: u64) -> Option<&Object> {
        self.driver.object_at(addr)
    }

    /// The physical memory behind a handle.
    #[must_use]
    pub fn object_of(&self, handle: u64) -> Option<&Object> {
        self.driver.object_of(handle)
    }

    /// PyTorch's blocks that are allocated: address and block.
    pub fn live_blocks(&self) -> impl Iterator<Item = (u64, &Block)> {
        self.torch.blocks.iter().map(|(addr, block)| (*addr, block))
    }

    /// Buffers of JAX that are there: address and buffer.
    pub fn live_buffers(&self) -> impl Iterator<Item = (u64, &Buffer)> {
        self.buffers.live.iter().map(|(address, buffer)| (*address, buffer))
    }

    /// Blocks of libraries' own heaps that are allocated: address and block.
    pub fn live_heap_blocks(&self) -> impl Iterator<Item = (u64, &HeapBlock)> {
        self.heaps.live.iter().map(|(address, block)| (*address, block))
    }

    /// What of the host's pinned memory PyTorch allocated, where a snapshot says so: inside [`Ledger::host`].
    #[must_use]
    pub fn host_blocks(&self) -> &Books {
        &self.heaps.host.blocks
    }

    /// The buffer of JAX at an address of PJRT's.
    #[must_use]
    pub fn buffer(&self, address: u64) -> Option<&Buffer> {
        self.buffers.live.get(&address)
    }

    /// Executables of PJRT, in the order in which they came.
    #[must_use]
    pub fn executables(&self) -> &[Executable] {
        &self.buffers.executables
    }

    /// From now on, [`Ledger::steps`] says what each event did.
    pub fn keep_steps(&mut self) {
        self.torch.steps.wanted = true;
    }

    /// Steps of training are not looked for: [`Ledger::training`] and [`Ledger::loops`] stay empty, and events are booked faster.
    pub fn skip_training(&mut self) {
        self.finder.is_off = true;
    }

    /// What the newest event did, in order; empty unless [`Ledger::keep_steps`] was called.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.torch.steps.list
    }

    /// PyTorch's books of a device, while events are fed; later they are in [`DeviceBooks::torch`].
    #[must_use]
    pub fn torch(&self, device: i16) -> Option<&TorchBooks> {
        self.torch.devices.get(device).or_else(|| self.devices.get(&device)?.torch.as_ref())
    }

    /// Where PyTorch's memory of a device is visible, ascending: start, length, and whether it is a mapped part of an
    /// expandable segment instead of a segment.
    #[must_use]
    pub fn torch_ranges(&self, device: i16) -> Vec<(u64, Bytes, bool)> {
        self.driver.torch_ranges(device)
    }

    /// The reserved address range that `addr` lies in: its start and length.
    #[must_use]
    pub fn reservation(&self, addr: u64) -> Option<(u64, Bytes)> {
        self.driver.reservation(addr)
    }

    /// The books of call sites: of which device, on which account, and the books.
    pub fn shelves(&mut self) -> impl Iterator<Item = (i16, Account, &mut Books)> {
        let driver = self.devices.iter_mut().flat_map(|(device, books)| {
            [
                (*device, Account::Driver, &mut books.physical),
                (*device, Account::Managed, &mut books.managed),
                (*device, Account::Graphs, &mut books.graphs),
                (*device, Account::Imported, &mut books.imported),
                (*device, Account::Heap, &mut books.heap.blocks),
            ]
            .into_iter()
            .chain(books.pjrt.as_mut().map(|pjrt| (*device, Account::Buffers, &mut pjrt.buffers)))
        });
        let blocks =
            self.torch.devices.iter_mut().map(|(device, books)| (device, Account::Blocks, &mut books.blocks));
        let pinned = &mut self.heaps.host.blocks;
        let host = [(HOST, Account::Driver, &mut self.host), (HOST, Account::Heap, pinned)];
        driver.chain(host).chain(blocks)
    }

    /// Number of lost events.
    #[must_use]
    pub fn n_lost(&self) -> u64 {
        self.lost.values().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// No event follows.
    pub fn finish(&mut self) {
        self.devices.values_mut().for_each(|books| books.samples.settle());
        let found = std::mem::take(&mut self.finder).found();
        (self.training, self.loops) = (found.training, found.perhaps);
        for (device, books) in std::mem::take(&mut self.torch.devices) {
            self.devices.entry(device).or_default().torch = Some(books);
        }
    }

    fn call(&mut self, definitions: &dyn Definitions, event: &Event, call: &Call) {
        let call = &self.placed(call);
        let origin = self.sites.origin(definitions, event.stack, event.thread);
        let origin = self.sharpen(origin, call);
        self.is_by_torch = origin.torch;
        let name = self.sites.call_name(definitions, call.api, event.stack, origin);
        self.counts.call(name, call);
        if call.action == Action::Checkpoint {
            self.checkpoint(event.time, call, definitions.process().pid);
        }
        self.pool_call(definitions, event, call, origin.site);
        match call.result {
            None => self.open_calls.push(OpenCall {
                time: event.time,
                name,
                thread: event.thread,
                site: origin.site,
            }),
            Some(0) => {
                if call.action.gives() {
                    self.found_memory(definitions, event, &Asked(call.device, origin.site));
                } else if call.action.takes() {
                    self.found_memory(definitions, event, &GivenBack(None));
                }
                let origin = Origin { phase: self.phases.now(event.thread), ..origin };
                self.booked(definitions, event, call, origin);
            }
            Some(DEINITIALIZED) if !call.action.gives() => self.n_after_shutdown += 1,
            Some(result) => self.refused(event, call, origin, name, result),
        }
    }

    /// What a pool hands out lies where the pool was made for, whatever the current device is: it may be one of the host.
    fn placed(&self, call: &Call) -> Call {
        let pool = match call.action {
            Action::AllocAsync if call.handle != 0 => self.pools.get(&call.handle).copied(),
            _ => None,
        };
        Call { device: pool.filter(|device| *device != NO_DEVICE).unwrap_or(call.device), ..*call }
    }

    /// Without native frames, a request made inside PyTorch's `allocate` is PyTorch's. What PyTorch pins is its cache of pinned memory.
    fn sharpen(&mut self, origin: Origin, call: &Call) -> Origin {
        let is_within = call.in_allocate && !origin.native;
        let pins = matches!(call.action, Action::AllocHost | Action::HostRegister)
            || (call.action, call.device) == (Action::HeapAlloc, HOST);
        if pins && (is_within || self.sites.owner(origin.owner) == TORCH_ELSEWHERE) {
            return self.sites.owned_by(origin, TORCH_PINNED);
        }
        if is_within { self.sites.torch_at(origin) } else { origin }
    }

    fn booked(&mut self, definitions: &dyn Definitions, event: &Event, call: &Call, origin: Origin) {
        let Ledger { driver, nccl, devices, host, torch, findings, .. } = self;
        let span = Span::of(event.time, call, call.action.gives());
        // All but frees are stamped when they have returned.
        let whole = Span::of(event.time, call, !call.action.takes());
        // Addresses may be reserved for host memory, which nobody samples.
        let is_sampled = |device: i16| device != HOST && hidden::concerns(call, device);
        for (_, books) in devices.iter_mut().filter(|(device, _)| is_sampled(**device)) {
            books.samples.call(whole, call, origin.owner, origin.site);
        }
        self.contexts.call(event, call, origin.owner, origin.site);
        if let Some((device, kept)) = self.graph_memory.call(event, call) {
            let books = devices.entry(device).or_default();
            let before = books.charged();
            books.graphs_kept.set(event.time, kept);
            books.samples.changed(whole, before, books.charged());
        }
        let mut peaked = None;
        let mut unmapped = Vec::new();
        let (mut bought, mut given) = (None, None);
        driver.call(event, call, origin, &mut |change| match change {
            Change::Gained(object) => {
                torch.steps.push(Step::Gained(object));
                nccl.gained(event.time, call, &object, definitions);
                if gain(devices, host, event.time, span, &object) {
                    peaked = Some(object.device);
                }
                match object.kind {
                    MemoryKind::Linear if object.torch => {
                        torch.books(object.device).device_allocs += 1;
                        bought = Some((object.device, object.bytes));
                    }
                    MemoryKind::Async if object.torch => {
                        let books = torch.books(object.device);
                        books.n_pool_allocations += 1;
                        books.pool_used.gain(event.time, object.bytes);
                    }
                    _ => {}
                }
            }
            Change::Freed(object) => {
                torch.steps.push(Step::Lost(object));
                lose(devices, host, span, &object, Books::lose);
                nccl.lost(&object);
                if let Some(device) = device_of(devices, &object) {
                    device.frees += 1;
                }
                match object.kind {
                    MemoryKind::Linear if object.torch => {
                        torch.books(object.device).gave_back(object.bytes);
                        given = Some((object.device, object.bytes));
                    }
                    MemoryKind::Async if object.torch => {
                        torch.books(object.device).pool_used.lose(object.bytes);
                    }
                    _ => {}
                }
            }
            Change::Dropped(object) => {
                torch.steps.push(Step::Lost(object));
                if let Some(device) = device_of(devices, &object) {
                    device.dropped.add(object.bytes);
                }
                lose(devices, host, span, &object, Books::drop_from);
            }
            Change::Reserved(device, bytes) => {
                devices.entry(device).or_default().reserved_addresses.gain(event.time, bytes);
            }
            Change::Unreserved(device, bytes) => {
                devices.entry(device).or_default().reserved_addresses.lose(bytes);
            }
            Change::Mapped(range) => {
                torch.steps.push(Step::Mapped(range));
                devices.entry(range.device).or_default().mapped.gain(event.time, range.bytes);
                if range.torch {
                    bought = Some((range.device, range.bytes));
                    torch.mapped(event.thread, range);
                }
            }
            Change::Unmapped(range) => {
                torch.steps.push(Step::Unmapped(range));
                devices.entry(range.device).or_default().mapped.lose(range.bytes);
                if range.torch {
                    given = Some((range.device, range.bytes));
                    unmapped.push(range);
                }
            }
            Change::Found(finding) => findings.add(finding, event.time, event.thread, event.stack),
        });
        if let Some((device, bytes)) = bought {
            self.torch.buys(device, bytes, call.duration);
        }
        if let Some((device, bytes)) = given {
            self.torch.gives_back(device, origin.site, bytes, call);
        }
        for range in unmapped {
            let reservation = self.driver.reservation(range.addr).map(|(start, _)| start);
            self.torch.unmapped(event.thread, range, reservation);
        }
        self.heaps.call(event, call, origin.site, &mut self.devices, &mut self.torch.steps);
        self.told(event, call);
        if let Some(device) = peaked {
            self.torch_at_peak(device);
        }
    }

    /// Calls that change no memory but say something about it.
    fn told(&mut self, event: &Event, call: &Call) {
        match call.action {
            Action::SetAccess => self.torch.set_access(event),
            Action::MemInfo => self.torch.mem_info(event.thread, call.bytes, Bytes(call.extra)),
            Action::PoolCreate | Action::PoolOf | Action::PoolSelect => {
                self.pools.insert(call.handle, call.device);
            }
            Action::PoolGet if call.extra == POOL_RESERVED_HIGH => self.pool_reserved_high(call),
            Action::CaptureBegin => self.torch.n_captures += 1,
            Action::CaptureEnd => self.torch.n_captures = self.torch.n_captures.saturating_sub(1),
            _ => {}
        }
    }

    /// The program asked a pool how much it kept at most.
    fn pool_reserved_high(&mut self, call: &Call) {
        let known = self.pools.get(&call.handle).copied().filter(|device| *device >= 0);
        let device = match known.unwrap_or(call.device) {
            NO_DEVICE => {
                self.torch.devices.iter().find(|(_, books)| books.is_pool_backend()).map(|(id, _)| id)
            }
            device => Some(device),
        };
        let Some(books) = device.and_then(|device| self.torch.devices.get_mut(device)) else { return };
        books.pool_reserved_high = books.pool_reserved_high.max(Some(call.bytes));
    }

    fn torch_at_peak(&mut self, device: i16) {
        if let Some(books) = self.torch.devices.get_mut(device) {
            books.at_device_peak = (books.allocated.now, books.reserved.now);
        }
    }

    fn refused(&mut self, event: &Event, call: &Call, origin: Origin, name: NameId, result: i32) {
        Heaps::refused(event, call, origin.site, &mut self.devices);
        if !call.action.gives() && !call.action.takes() {
            return;
        }
        let device = self.driver.device_of(call);
        let books = self.devices.entry(device).or_default();
        books.failed += 1;
        if call.action.takes() {
            let finding = match self.driver.was_freed(call.addr) && call.addr != 0 {
                true => Finding::DoubleFree(call.addr),
                false => Finding::FreeFailed(if call.addr == 0 { call.handle } else { call.addr }),
            };
            return self.findings.add(finding, event.time, event.thread, event.stack);
        }
        let torch = origin.torch || call.in_allocate;
        // JAX's allocator asks again for less, and says so itself where that does not help.
        let jax = books.pjrt.is_some() && self.sites.owner(origin.owner) == JAX;
        let ran_out = event.out_of_memory().filter(|_| !torch && !jax);
        if let Some(oom) = ran_out {
            self.ran_out = Some(OutOfMemory { device, ..oom });
            books.physical.remember();
            // Who held it, where a library is refused, is PyTorch as often as not.
            if let Some(torch) = self.torch.devices.get_mut(device) {
                torch.blocks.remember();
            }
        }
        if self.refusals.len() == MAX_REFUSALS {
            self.refusals.remove(0);
        }
        self.refusals.push(Refusal {
            time: event.time,
            allocs_before: books.allocs,
            name,
            result,
            device,
            bytes: call.bytes,
            owner: origin.owner,
            site: origin.site,
            stack: event.stack,
            is_final: ran_out.is_some(),
            tracked: books.physical.now().bytes,
        });
    }

    fn sample(&mut self, time: Nanos, sample: &Sample) {
        let books = self.devices.entry(sample.device).or_default();
        let (tracked, rounding) = (books.handed_out(), books.pages.rounding());
        books.samples.sample(time, sample, tracked, rounding);
    }
}

type Devices = BTreeMap<i16, DeviceBooks>;

/// Books an object; says whether the device never held as much before.
fn gain(devices: &mut Devices, host: &mut Books, time: Nanos, span: Span, object: &Object) -> bool {
    if let Some(device) = device_of(devices, object) {
        device.allocs += 1;
        device.kinds.entry(object.kind).or_default().gain(time, object.bytes);
    }
    charge(devices, span, object, |devices| {
        if object.kind == MemoryKind::Linear && object.device != HOST {
            devices.entry(object.device).or_default().pages.gain(object.addr, object.bytes);
        }
        if let Some(books) = phases_of(devices, object) {
            books.gain(time, OwnerId(object.phase.0), SiteId(0), object.bytes);
        }
        let Some(books) = books_of(devices, host, object) else { return false };
        let before = books.peak();
        books.gain(time, object.owner, object.site, object.booked());
        books.peak() > before && object.kind.is_physical()
    })
}

/// Books that an object is gone; `take` is what that does to books.
fn lose(
    devices: &mut Devices,
    host: &mut Books,
    span: Span,
    object: &Object,
    take: fn(&mut Books, OwnerId, SiteId, Bytes),
) {
    if let Some(device) = device_of(devices, object) {
        device.kinds.entry(object.kind).or_default().lose(object.bytes);
    }
    charge(devices, span, object, |devices| {
        if let Some(books) = books_of(devices, host, object) {
            take(books, object.owner, object.site, object.booked());
        }
        if let Some(books) = phases_of(devices, object) {
            take(books, OwnerId(object.phase.0), SiteId(0), object.bytes);
        }
        if object.kind == MemoryKind::Linear && object.device != HOST {
            devices.entry(object.device).or_default().pages.lose(object.addr, object.bytes);
        }
    });
}

/// Changes what a device is charged for, also where that is compared with the driver's own figures.
fn charge<T>(
    devices: &mut Devices,
    span: Span,
    object: &Object,
    change: impl FnOnce(&mut Devices) -> T,
) -> T {
    let charged = |devices: &Devices| devices.get(&object.device).map_or(0, DeviceBooks::charged);
    let before = charged(devices);
    let result = change(devices);
    let after = charged(devices);
    if before != after
        && let Some(books) = devices.get_mut(&object.device)
    {
        books.samples.changed(span, before, after);
    }
    result
}

/// The device whose objects are counted with this one: imports are not counted, because they own nothing.
fn device_of<'a>(
    devices: &'a mut BTreeMap<i16, DeviceBooks>,
    object: &Object,
) -> Option<&'a mut DeviceBooks> {
    let counts = object.device != HOST && object.kind != MemoryKind::Imported;
    counts.then(|| devices.entry(object.device).or_default())
}

fn books_of<'a>(
    devices: &'a mut BTreeMap<i16, DeviceBooks>,
    host: &'a mut Books,
    object: &Object,
) -> Option<&'a mut Books> {
    match object.shelf() {
        Shelf::Physical(device) => Some(&mut devices.entry(device).or_default().physical),
        Shelf::Managed(device) => Some(&mut devices.entry(device).or_default().managed),
        Shelf::Graphs(device) => Some(&mut devices.entry(device).or_default().graphs),
        Shelf::Host => Some(host),
        Shelf::Imported(device) => (device >= 0).then(|| &mut devices.entry(device).or_default().imported),
    }
}

/// The books by phase, for memory of a device.
fn phases_of<'a>(devices: &'a mut Devices, object: &Object) -> Option<&'a mut Books> {
    match object.shelf() {
        Shelf::Physical(device) => Some(&mut devices.entry(device).or_default().phases),
        Shelf::Managed(_) | Shelf::Graphs(_) | Shelf::Host | Shelf::Imported(_) => None,
    }
}
