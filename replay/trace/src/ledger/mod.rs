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
mod devices;
mod driver;
mod effect;
mod findings;
mod graphs;
mod health;
mod heaps;
mod hidden;
mod loops;
mod phases;
mod pjrt;
pub mod pools;
mod run;
mod sites;
mod torch;
mod training;
mod watch;

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Call, CommId, Event, EventKind, HOST, OutOfMemory, Pjrt, PjrtAction};
use rustc_hash::FxHashSet;

#[cfg(test)]
mod tests;

pub use amounts::{Books, Held, Meter, Moment, Part};
pub use cache::{CacheBooks, Misfits, Traffic, Trims};
pub use communicators::{CommBooks, GpuTimed};
pub use contexts::Context;
pub use counts::{CallCounts, Counts, Histogram, OpenCall};
pub use devices::{Account, DeviceBooks, Refusal};
pub use driver::{Mapped, MemoryKind, Object};
pub use effect::{Fate, Paging, Step, Stranger};
pub use findings::{Finding, Findings, Found};
pub use health::{Health, Suspension};
pub use heaps::{HeapBlock, HeapBooks, is_arena, is_heap, is_pinned_cache};
pub use hidden::{Cause, HiddenStep, Pages, Sampled, Samples};
pub use phases::{PhaseId, Phases};
pub use pjrt::{Buffer, Executable, Need, PjrtBooks, PjrtOom};
pub use run::Run;
pub use sites::{Line, ModelCall, NameId, OwnerId, Site, SiteId, Sites, call_site};
pub use torch::{Block, TorchBooks, TorchOom, Wall, asked_about};
pub use training::{StepSource, Training, TrainingStep, is_in_module};
pub use watch::{Unwatched, Watch};

use crate::Definitions;
use crate::owners::TORCH;
use communicators::Communicators;
use devices::{Devices, Memory};
use driver::Driver;
use effect::{Effect, Steps};
use heaps::Heaps;
use pjrt::Buffers;
use pools::Pools;
use sites::Origin;
use torch::Torch;
use training::Change::{Asked, GivenBack};
use training::StepFinder;

/// Most refused requests kept whole; all are counted.
const MAX_REFUSALS: usize = 64;

/// The books of one process. [`Ledger::event`] shows which of them an event goes through; it goes through each once.
#[derive(Default)]
pub struct Ledger {
    /// Places that the numbers below refer to.
    pub sites: Sites,
    /// The parts of itself that the program named.
    pub phases: Phases,
    /// When its events were.
    pub run: Run,
    /// How often it called what.
    pub counts: Counts,
    /// What the recorder says of it: losses, notes, faults of GPUs, and times in which it was suspended.
    pub health: Health,
    /// What the driver handed out.
    driver: Driver,
    /// Who holds that, by device.
    memory: Memory,
    /// Requests that the driver refused, newest last.
    pub refusals: Vec<Refusal>,
    nccl: Communicators,
    torch: Torch,
    /// Private pools of PyTorch's allocator.
    pub torch_pools: Pools,
    buffers: Buffers,
    heaps: Heaps,
    /// Steps of training.
    finder: StepFinder,
    /// What does not add up.
    pub findings: Findings,
    /// What the newest event did.
    effect: Effect,
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
        self.effect.begin();
        if self.run.event(definitions, event.time) {
            self.counts.begin_anew();
        }
        match &event.kind {
            EventKind::Call(call) => self.call(definitions, event, call),
            EventKind::BlockAlloc(block) => {
                let site = self.sites.origin(definitions, event.stack, event.thread).site;
                let place = (site, self.phases.now(event.thread));
                self.counts.block(block.bytes);
                let is_at_peak = self.memory.is_at_peak(block.device);
                self.torch.alloc(event, block, place, is_at_peak, &mut self.effect);
                self.finder.memory(definitions, event, &Asked(block.device, site), &self.run);
            }
            EventKind::BlockFree(block) => {
                let known = self.torch.free(event, block, &mut self.effect);
                let known = known.filter(|block| !self.run.is_before(block.since));
                let change = GivenBack(known.map(|block| (block.device, block.site)));
                self.finder.memory(definitions, event, &change, &self.run);
            }
            EventKind::BlockOom(oom) => {
                self.effect.ran_out = event.out_of_memory();
                let site = self.sites.origin(definitions, event.stack, event.thread).site;
                let (allocs, tracked) = self.memory.ran_out(oom.device);
                let is_its = |it: &&Refusal| {
                    (it.device, it.allocs_before) == (oom.device, allocs)
                        && self.sites.owner(it.owner) == TORCH
                };
                let refused = self.refusals.iter().rev().find(is_its).map(|refusal| refusal.bytes);
                self.torch.oom(event, oom, site, tracked, refused);
            }
            EventKind::Wait(wait) => self.torch.wait(event, wait, &mut self.effect.steps),
            EventKind::Sample(sample) => self.memory.sample(event.time, sample),
            EventKind::Mark(mark) => {
                self.phases.mark(definitions, event, mark);
                self.finder.mark(definitions, event, mark, &self.run);
            }
            EventKind::NcclEnter(enter) => {
                let site = self.sites.origin(definitions, event.stack, event.thread).site;
                self.nccl.enter(enter, event.time, site, definitions.communicator(enter.comm));
            }
            EventKind::NcclExit(exit) => self.nccl.exit(exit),
            EventKind::NcclTiming(timing) => self.nccl.ran(timing),
            EventKind::Pjrt(pjrt) => self.pjrt(definitions, event, pjrt),
            EventKind::PjrtExecutable(made) => {
                self.buffers.compiled(made, definitions.text(made.name).unwrap_or_default());
            }
            EventKind::Lost(lost) => self.health.lost(lost),
            EventKind::Note(text) => self.health.note(event.time, text, &self.memory),
        }
        if self.torch_pools.are_concerned(event) {
            self.torch_pools.event(definitions, event, &mut self.effect);
        }
        if !self.effect.found.is_empty() {
            self.findings.event(event, &mut self.effect.found);
        }
    }

    fn call(&mut self, definitions: &dyn Definitions, event: &Event, call: &Call) {
        let (origin, name) = self.sites.of_call(definitions, event, call);
        (self.effect.site, self.effect.is_by_torch) = (origin.site, origin.torch);
        self.counts.call((name, origin.site), event, call);
        self.health.call(definitions, event.time, call);
        match call.result {
            None => {}
            Some(0) => {
                let origin = Origin { phase: self.phases.now(event.thread), ..origin };
                self.booked(definitions, event, call, &origin);
            }
            Some(_) if counts::is_after_shutdown(call) => {}
            Some(_) => self.refused(event, call, (&origin, name)),
        }
    }

    /// A call that succeeded.
    fn booked(&mut self, definitions: &dyn Definitions, event: &Event, call: &Call, origin: &Origin) {
        let Ledger { driver, memory, nccl, torch, heaps, effect, .. } = self;
        let call = &driver.call(event, call, origin, effect);
        memory.call(event, call, origin, effect);
        nccl.call(definitions, event.time, call, effect);
        torch.call(event, call, origin.site, effect);
        heaps.call(event, call, origin.site, &mut memory.devices, &mut effect.steps);
        let asked = call.action.gives().then_some(Asked(call.device, origin.site));
        if let Some(change) = asked.or(call.action.takes().then_some(GivenBack(None))) {
            self.finder.memory(definitions, event, &change, &self.run);
        }
    }

    /// A call that the driver refused.
    fn refused(&mut self, event: &Event, call: &Call, of: (&Origin, NameId)) {
        let call = &self.driver.refused(call, &mut self.effect);
        let Some(refusal) = self.memory.refused(event, call, of, &mut self.effect) else { return };
        if let Some(torch) = self.torch.devices.get_mut(refusal.device).filter(|_| refusal.is_final) {
            // Who holds it, where a library is refused, is PyTorch as often as not.
            torch.blocks.remember();
        }
        if self.refusals.len() == MAX_REFUSALS {
            self.refusals.remove(0);
        }
        self.refusals.push(refusal);
    }

    fn pjrt(&mut self, definitions: &dyn Definitions, event: &Event, pjrt: &Pjrt) {
        let site = self.sites.origin(definitions, event.stack, event.thread).site;
        let devices = &mut self.memory.devices;
        match pjrt.action {
            PjrtAction::Failed => {
                self.buffers.failed(definitions, event, (pjrt, site), devices, &mut self.effect);
            }
            _ => self.buffers.event(event, pjrt, site, devices),
        }
    }

    /// The request for memory that the event just booked says has failed for good.
    #[must_use]
    pub fn ran_out(&self) -> Option<OutOfMemory> {
        self.effect.ran_out
    }

    /// PyTorch's caching allocator made the call that was booked last.
    #[must_use]
    pub fn is_by_torch(&self) -> bool {
        self.effect.is_by_torch
    }

    /// One entry for each device that anything concerned; [`NO_DEVICE`](gputrace_schemas::event::NO_DEVICE) where it is not known.
    #[must_use]
    pub fn devices(&self) -> &BTreeMap<i16, DeviceBooks> {
        &self.memory.devices
    }

    /// Host memory: pinned, registered, or made by `cuMemCreate`.
    #[must_use]
    pub fn host(&self) -> &Books {
        &self.memory.host
    }

    /// The turns of its training loop, once all events are booked.
    #[must_use]
    pub fn training(&self) -> Option<&Training> {
        self.finder.result.training.as_ref()
    }

    /// Where these are not known: turns of the loops that were seen, any of which may be it.
    #[must_use]
    pub fn loops(&self) -> &[u64] {
        &self.finder.result.perhaps
    }

    /// Calls and sizes are counted from here on; the books stay.
    pub fn count_anew(&mut self) {
        self.counts.begin_anew();
        self.run.n_events = 0;
    }

    /// The contexts that the process made, in order.
    pub fn contexts(&self) -> impl Iterator<Item = &Context> {
        self.driver.contexts.iter()
    }

    /// Communicators of NCCL: what they hold, and what they were used for.
    pub fn communicators(&self) -> impl Iterator<Item = (CommId, &CommBooks)> {
        self.nccl.books.iter().map(|(id, books)| (*id, books))
    }

    /// Launches of NCCL whose time on the GPU was to be measured.
    pub fn gpu_timed(&self) -> &GpuTimed {
        &self.nccl.timed
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
        self.effect.steps.wanted = true;
    }

    /// Steps of training are not looked for: [`Ledger::training`] and [`Ledger::loops`] stay empty, and events are booked faster.
    pub fn skip_training(&mut self) {
        self.finder.is_off = true;
    }

    /// What the newest event did, in order; empty unless [`Ledger::keep_steps`] was called.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.effect.steps.list
    }

    /// PyTorch's books of a device, while events are fed; later they are in [`DeviceBooks::torch`].
    #[must_use]
    pub fn torch(&self, device: i16) -> Option<&TorchBooks> {
        self.torch.devices.get(device).or_else(|| self.memory.devices.get(&device)?.torch.as_ref())
    }

    /// Where PyTorch's memory of a device is visible, ascending: start, length, and whether it is a mapped part of an
    /// expandable segment instead of a segment.
    #[must_use]
    pub fn torch_ranges(&self, device: i16) -> Vec<(u64, Bytes, bool)> {
        self.driver.torch_ranges(device)
    }

    /// The books of call sites: of which device, on which account, and the books.
    pub fn shelves(&mut self) -> impl Iterator<Item = (i16, Account, &mut Books)> {
        let driver = self.memory.devices.iter_mut().flat_map(|(device, books)| {
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
        let host = [(HOST, Account::Driver, &mut self.memory.host), (HOST, Account::Heap, pinned)];
        driver.chain(host).chain(blocks)
    }

    /// No event follows.
    pub fn finish(&mut self) {
        self.finder.finish();
        let devices = &mut self.memory.devices;
        devices.values_mut().for_each(|books| books.samples.settle());
        for (device, books) in std::mem::take(&mut self.torch.devices) {
            devices.entry(device).or_default().torch = Some(books);
        }
    }
}
