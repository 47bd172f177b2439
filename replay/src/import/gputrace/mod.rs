//! gputrace's own traces, as [`OpStream`]s.
//!
//! Where PyTorch's blocks were recorded, they are the requests; segments and pages of its allocator are what it asked of
//! the driver. On a device without them (plain CUDA programs, JAX, CuPy, `backend:cudaMallocAsync`) the requests are what
//! the driver was asked.
//!
//! What the events do not say in so many words:
//! - A free of a block that other streams use completes when the stream events recorded just before it on the same
//!   thread were seen done; see `ledger/torch.rs`. Those that a failed request waited for complete after that request:
//!   its flush waits for them itself.
//! - `empty_cache` shows as PyTorch's segments given back, or its stream events waited for, outside of `allocate`. One that
//!   had nothing to give back is not seen.
//! - A segment obtained while a stream was captured belongs to a private pool. Captures that use the same segment share
//!   their pool. Pools of `use_mem_pool` are found by `pools.rs`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use gputrace_schemas::event::{
    Action, BlockAlloc, BlockFree, BlockOom, Bytes, Call, Event, EventKind, Frame as TraceFrame, Mapping,
    Mappings, Nanos, StackId as TraceStackId, ThreadId, Wait, WaitAction,
};
use gputrace_schemas::reader;
use gputrace_sim::driver::REGION;
use gputrace_sim::ops::{
    AllocId, Allocation, Builder, DriverCall, Frame, History, NO_SEGMENT, Nearby, Op, OpStream, PoolIdx,
    Query, RecordedOom, RecordedSegment, RecordedSettings, StackId, Stacks, StreamIdx, TooMany,
};
use gputrace_sim::policies::torch::{self, variables};
use rustc_hash::{FxHashMap, FxHashSet};

use super::others::Bystanders;
use super::{HIGHEST, ImportError, LARGEST, LARGEST_REFUSED, LARGEST_SUM, Trace};
use crate::trace::Definitions;
use crate::trace::backward::place;
use crate::trace::owners;

/// Most devices of one process.
const MAX_DEVICES: i16 = 4096;
/// The gap below everything that the kernel maps from the top down is wider than this.
const WIDE: u64 = 1 << 40;
/// Nothing of the process's own is above this (x86-64).
const KERNEL: u64 = 1 << 63;
/// Most stream events kept for one free: one for each stream that used the block.
const MAX_EVENTS_OF_A_FREE: usize = 1024;

/// Reads a trace file.
///
/// # Errors
/// When it cannot be opened, is no trace or one of another version, or has too many streams.
pub(super) fn read(path: &Path) -> Result<Trace, ImportError> {
    let trace = reader::Trace::open(path).map_err(|source| ImportError::Trace { source })?;
    let mut notes = Vec::new();
    if !trace.is_complete() {
        notes.push("it has no end: its recorder was killed, or is still writing".to_owned());
    }
    of(path, &trace, notes)
}

/// Reads the first `length` bytes of a trace file that may still be growing.
///
/// # Errors
/// As [`read`].
pub(super) fn read_prefix(path: &Path, length: u64) -> Result<Trace, ImportError> {
    let trace = reader::Trace::open_prefix(path, length).map_err(|source| ImportError::Trace { source })?;
    of(path, &trace, vec![])
}

fn of(path: &Path, trace: &reader::Trace, mut notes: Vec<String>) -> Result<Trace, ImportError> {
    let mut imported = import(trace, || trace.events(), trace.mappings())
        .map_err(|source| ImportError::TooMany { path: path.into(), source })?;
    notes.extend(trace.damages().iter().map(ToString::to_string));
    if !trace.damages().is_empty() {
        for stream in &mut imported.devices {
            stream.history = History::Broken("a part of the trace cannot be read".into());
        }
    }
    notes.append(&mut imported.notes);
    Ok(Trace { notes, ..imported })
}

/// Turns the events of a trace into ops, device by device. `events` is called twice.
fn import<I: Iterator<Item = Event>>(
    definitions: &dyn Definitions,
    events: impl Fn() -> I,
    mappings: impl Iterator<Item = Mappings>,
) -> Result<Trace, TooMany> {
    let mut mappings = mappings.peekable();
    let first_read = mappings.peek().map(|mappings| mappings.time);
    let mut survey = Survey { first_read, ..Survey::default() };
    events().filter(|event| plausible_bytes(&event.kind).is_some()).for_each(|event| survey.event(&event));
    let devices = survey.devices.iter().map(|ordinal| (*ordinal, Device::new(*ordinal))).collect();
    let mut importer = Importer {
        definitions,
        survey,
        devices,
        mapped: Vec::new(),
        threads: FxHashMap::default(),
        pending: FxHashMap::default(),
        n_pending: 0,
        waiting: FxHashMap::default(),
        torch_memory: FxHashMap::default(),
        reservations: BTreeMap::new(),
        maps: BTreeMap::new(),
        callers: FxHashMap::default(),
        stacks: StackTable::default(),
        bystanders: Bystanders::default(),
        n_captures: 0,
        n_lost: 0,
        n_implausible: 0,
        sum: 0,
    };
    if let Some(first) = mappings.next() {
        // Read when some memory had been handed out: what is left without that was there before it.
        let before = without(&first.mapped, &importer.survey.regions);
        importer.mappings(before);
    }
    for event in events() {
        while let Some(mappings) = mappings.next_if(|mappings| mappings.time <= event.time) {
            importer.mappings(mappings.mapped);
        }
        let Some(bytes) = plausible_bytes(&event.kind) else {
            importer.n_implausible += u64::from(!is_failed(&event.kind));
            continue;
        };
        importer.sum = importer.sum.saturating_add(bytes);
        if importer.sum > LARGEST_SUM {
            importer.n_implausible += 1;
            break;
        }
        importer.event(&event)?;
    }
    importer.finish()
}

/// What must be known before the first event is understood.
#[derive(Default)]
struct Survey {
    /// The stream events that the allocator asked about. The program's own are not among them.
    own_events: FxHashSet<u64>,
    /// Devices with blocks of PyTorch's allocator.
    torch: FxHashSet<i16>,
    /// Devices that anything was asked of.
    devices: BTreeSet<i16>,
    /// Address space that was reserved at any time, from start to end. PyTorch's segments that grow take terabytes of
    /// it, which another setting would not have taken.
    reserved: Vec<Mapping>,
    /// When the address space was read for the first time.
    first_read: Option<Nanos>,
    /// The driver's regions of memory that was handed out before that.
    regions: Vec<Mapping>,
    /// PyTorch's `allocate` was seen: [`Call::in_allocate`] means something.
    knows_allocate: bool,
}

impl Survey {
    fn event(&mut self, event: &Event) {
        match &event.kind {
            EventKind::Wait(Wait { event, action: WaitAction::Query | WaitAction::Synchronize, .. }) => {
                self.own_events.insert(*event);
            }
            EventKind::Call(call) if call.result == Some(0) && call.action.gives() => {
                if call.action == Action::Reserve {
                    let end = call.addr.saturating_add(call.bytes.0);
                    self.reserved.push(Mapping { start: call.addr, end });
                }
                if call.action == Action::Alloc && self.first_read.is_some_and(|read| event.time <= read) {
                    let end = call.addr.saturating_add(call.bytes.0);
                    let end = end.checked_next_multiple_of(REGION).unwrap_or(end);
                    self.regions.push(Mapping { start: call.addr / REGION * REGION, end });
                }
                self.devices.extend(Some(call.device).filter(|device| (0..MAX_DEVICES).contains(device)));
            }
            EventKind::BlockAlloc(block) => {
                self.torch.insert(block.device);
                self.knows_allocate |= block.requested.is_some();
            }
            EventKind::BlockOom(oom) => {
                self.torch.insert(oom.device);
            }
            _ => {}
        }
    }
}

/// What a thread did since its last block.
#[derive(Default)]
struct ThreadState {
    /// Stream events recorded: those of the free that follows.
    recorded: Vec<u64>,
    /// Frees that a `cuEventSynchronize` completed: of a failed request's flush, or of `empty_cache`.
    synchronized: Vec<(i16, AllocId)>,
    /// PyTorch asked the driver for memory inside `allocate` since then.
    asked: bool,
    /// Segments obtained for the request that follows.
    obtained: Vec<(i16, u32)>,
    run: Run,
    device_free: u64,
    is_capturing: bool,
    /// Free memory was asked for, perhaps by PyTorch for the text of an error that follows.
    question: Option<Question>,
}

/// Free memory was asked for.
#[derive(Clone, Copy)]
struct Question {
    device: i16,
    stack: StackId,
    is_autotune: bool,
    by_allocator: bool,
}

/// Calls on neighbouring pages that belong together.
#[derive(Clone, Copy, Default)]
enum Run {
    #[default]
    None,
    Mapping {
        device: i16,
        start: u64,
        end: u64,
    },
    Unmapping {
        device: i16,
        start: u64,
        end: u64,
        reservation: u64,
    },
}

struct PendingFree {
    device: i16,
    alloc: AllocId,
    n_events: usize,
    /// Its events were done when a thread waited for them.
    synchronized_by: Option<ThreadId>,
}

/// Memory of PyTorch's allocator.
#[derive(Clone, Copy)]
struct TorchMemory {
    device: i16,
    bytes: u64,
}

/// Address space reserved by PyTorch's allocator.
#[derive(Clone, Copy)]
struct Reservation {
    end: u64,
    /// The segment of [`OpStream::segments`], once something is mapped.
    segment: Option<u32>,
}

struct Importer<'a> {
    definitions: &'a dyn Definitions,
    survey: Survey,
    devices: BTreeMap<i16, Device>,
    /// The address space when it was last read.
    mapped: Vec<Mapping>,
    threads: FxHashMap<ThreadId, ThreadState>,
    pending: FxHashMap<u64, PendingFree>,
    n_pending: u64,
    waiting: FxHashMap<u64, u64>,
    /// Physical memory of PyTorch's allocator: by address (`cudaMalloc`) or handle (`cuMemCreate`).
    torch_memory: FxHashMap<u64, TorchMemory>,
    reservations: BTreeMap<u64, Reservation>,
    /// Pages of PyTorch's expandable segments.
    maps: BTreeMap<u64, TorchMemory>,
    callers: FxHashMap<TraceStackId, Caller>,
    stacks: StackTable,
    bystanders: Bystanders,
    n_captures: u64,
    n_lost: u64,
    /// Events that cannot be true.
    n_implausible: u64,
    /// Bytes of all events so far.
    sum: u64,
}

/// Who made a call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caller {
    Torch,
    Other,
    /// No native frame tells.
    Unknown,
}

/// One device's ops so far.
struct Device {
    builder: Builder,
    live: FxHashMap<u64, AllocId>,
    /// Segments of PyTorch that are there now: start to end and index.
    segments: BTreeMap<u64, (u64, u32)>,
    /// Segments obtained while a stream was captured, and the capture.
    captured: Vec<(u32, u64)>,
    at_start: Vec<(u64, AllocId)>,
    /// Who asked for free memory, whether to choose an algorithm, and how often.
    queries: FxHashMap<(StackId, bool), u64>,
    /// Number of ops when `empty_cache` was last seen: what follows without another op belongs to it.
    trimmed_at: Option<usize>,
    n_twice: u64,
    n_requests_unseen: u64,
    n_frees_in_capture: u64,
}

impl Device {
    fn new(ordinal: i16) -> Device {
        Device {
            builder: Builder::new(u32::from(ordinal.unsigned_abs())),
            live: FxHashMap::default(),
            segments: BTreeMap::new(),
            captured: Vec::new(),
            at_start: Vec::new(),
            queries: FxHashMap::default(),
            trimmed_at: None,
            n_twice: 0,
            n_requests_unseen: 0,
            n_frees_in_capture: 0,
        }
    }

    fn segment_at(&self, address: u64) -> u32 {
        let below = self.segments.range(..=address).next_back();
        below.filter(|(_, (end, _))| *end > address).map_or(NO_SEGMENT, |(_, (_, index))| *index)
    }

    fn new_segment(&mut self, address: u64, bytes: u64) -> u32 {
        let segments = &mut self.builder.stream_mut().segments;
        segments.push(RecordedSegment { address, bytes, stream: StreamIdx(0), pool: None });
        segments.len() as u32 - 1
    }

    fn handed_out(&mut self, allocation: Allocation) -> AllocId {
        let address = allocation.address;
        if let Some(missed) = self.live.remove(&address) {
            self.n_twice += 1;
            self.builder.op(Op::FreeRequested(missed));
            self.builder.op(Op::FreeCompleted(missed));
        }
        let segment = self.segment_at(address);
        let id = self.builder.alloc(allocation);
        self.builder.stream_mut().segment_of.push(segment);
        self.live.insert(address, id);
        id
    }

    fn taken_back(&mut self, address: u64, bytes: u64) -> AllocId {
        let id = self.live.remove(&address).unwrap_or_else(|| {
            let id = self.builder.allocation(Allocation {
                requested: bytes.max(1),
                address,
                stack: StackId::NONE,
                stream: StreamIdx(0),
                pool: PoolIdx::DEFAULT,
            });
            let segment = self.segment_at(address);
            self.builder.stream_mut().segment_of.push(segment);
            self.at_start.push((address, id));
            id
        });
        self.builder.op(Op::FreeRequested(id));
        id
    }

    /// The program called `empty_cache`; `completed` is what it waited for.
    fn trim(&mut self, completed: &[AllocId]) {
        for id in completed {
            self.builder.op(Op::FreeCompleted(*id));
        }
        let n_ops = self.builder.stream_mut().ops.len();
        if self.trimmed_at != Some(n_ops) {
            self.builder.op(Op::Trim);
            self.trimmed_at = Some(n_ops + 1);
        }
    }
}

impl Importer<'_> {
    fn event(&mut self, event: &Event) -> Result<(), TooMany> {
        if matches!(event.kind, EventKind::Call(_) | EventKind::Sample(_)) {
            let Importer { bystanders, devices, survey, definitions, .. } = self;
            bystanders.event(*definitions, event, |device| {
                let n_ops = devices.get(&device).map_or(0, |device| device.builder.n_ops());
                (n_ops, survey.torch.contains(&device))
            });
        }
        match &event.kind {
            EventKind::Call(call) => self.call(event, call)?,
            EventKind::BlockAlloc(block) => self.block_alloc(event, block)?,
            EventKind::BlockFree(block) => self.block_free(event, block),
            EventKind::BlockOom(oom) => self.block_oom(event, oom),
            EventKind::Wait(wait) => self.wait(event, wait),
            EventKind::Lost(lost) => self.n_lost = self.n_lost.saturating_add(lost.events),
            EventKind::Sample(_)
            | EventKind::Mark(_)
            | EventKind::Note(_)
            | EventKind::NcclEnter(_)
            | EventKind::NcclExit(_)
            | EventKind::NcclTiming(_) => {}
        }
        Ok(())
    }

    /// The process's address space as it was read now.
    fn mappings(&mut self, mut mapped: Vec<Mapping>) {
        // The kernel's page for old system calls.
        mapped.retain(|mapping| mapping.start < KERNEL);
        let mapped = without(&mapped, &self.survey.reserved);
        let is_first = self.mapped.is_empty();
        let gone = without(&self.mapped, &mapped);
        let new = without(&mapped, &self.mapped);
        let widest = mapped.windows(2).rev().find(|pair| pair[1].start - pair[0].end >= WIDE);
        let ceiling = widest.map(|pair| pair[1].start);
        for device in self.devices.values_mut() {
            if is_first {
                let Some(ceiling) = ceiling else { continue };
                device.builder.stream_mut().surroundings.get_or_insert_default().ceiling = ceiling;
            }
            if device.builder.stream_mut().surroundings.is_none() {
                continue;
            }
            for Mapping { start, end } in &gone {
                device.builder.nearby(Nearby::Unmapped { start: *start, end: *end });
            }
            for Mapping { start, end } in &new {
                device.builder.nearby(Nearby::Mapped { start: *start, end: *end });
            }
        }
        self.mapped = mapped;
    }

    /// Memory that PyTorch's allocator on `device` has no part in; all devices where that is not known.
    fn nearby(&mut self, device: Option<i16>, what: Nearby) {
        for (ordinal, other) in &mut self.devices {
            if device.is_none_or(|device| device == *ordinal)
                && other.builder.stream_mut().surroundings.is_some()
            {
                other.builder.nearby(what);
            }
        }
    }

    fn device(&mut self, ordinal: i16) -> Option<&mut Device> {
        let is_real = (0..MAX_DEVICES).contains(&ordinal);
        is_real.then(|| self.devices.entry(ordinal).or_insert_with(|| Device::new(ordinal)))
    }

    fn thread(&mut self, thread: ThreadId) -> &mut ThreadState {
        self.threads.entry(thread).or_default()
    }

    fn stack(&mut self, stack: TraceStackId) -> StackId {
        self.stacks.id(self.definitions, stack)
    }

    fn block_alloc(&mut self, event: &Event, block: &BlockAlloc) -> Result<(), TooMany> {
        self.answer_question(event.thread);
        let asked = self.thread(event.thread).asked;
        if !asked {
            self.flush_synchronized(event.thread);
        }
        self.end_run(event.thread);
        let stack = self.stack(event.stack);
        let obtained = std::mem::take(&mut self.thread(event.thread).obtained);
        let Some(device) = self.device(block.device) else { return Ok(()) };
        let stream = device.builder.stream(block.stream.unwrap_or(0))?;
        for (_, segment) in obtained.iter().filter(|(owner, _)| *owner == block.device) {
            device.builder.stream_mut().segments[*segment as usize].stream = stream;
        }
        let requested = block.requested.map(|requested| requested.0);
        let requested = requested.filter(|requested| (1..=block.bytes.0).contains(requested));
        device.n_requests_unseen += u64::from(requested.is_none());
        let requested = requested.unwrap_or(block.bytes.0).max(1);
        device.handed_out(Allocation {
            requested,
            address: block.addr,
            stack,
            stream,
            pool: PoolIdx::DEFAULT,
        });
        self.complete_synchronized(event.thread);
        let thread = self.thread(event.thread);
        thread.recorded.clear();
        thread.asked = false;
        Ok(())
    }

    fn block_free(&mut self, event: &Event, block: &BlockFree) {
        self.answer_question(event.thread);
        self.flush_synchronized(event.thread);
        self.end_run(event.thread);
        let is_captured = self.n_captures > 0;
        let mut events = std::mem::take(&mut self.thread(event.thread).recorded);
        events.retain(|handle| self.survey.own_events.contains(handle));
        let Some(device) = self.device(block.device) else { return };
        device.n_frees_in_capture += u64::from(is_captured);
        let alloc = device.taken_back(block.addr, block.bytes.0);
        if events.is_empty() {
            device.builder.op(Op::FreeCompleted(alloc));
        } else {
            let id = self.n_pending;
            self.n_pending += 1;
            let free =
                PendingFree { device: block.device, alloc, n_events: events.len(), synchronized_by: None };
            self.pending.insert(id, free);
            for handle in &events {
                if let Some(before) = self.waiting.insert(*handle, id) {
                    self.one_done(before, None);
                }
            }
        }
        events.clear();
        self.thread(event.thread).recorded = events;
    }

    fn block_oom(&mut self, event: &Event, oom: &BlockOom) {
        self.end_run(event.thread);
        if !self.survey.knows_allocate {
            self.thread(event.thread).question.take_if(|question| question.by_allocator);
        }
        self.answer_question(event.thread);
        let stack = self.stack(event.stack);
        let device_free = self.thread(event.thread).device_free;
        if let Some(device) = self.device(oom.device) {
            let rounded = oom.requested.filter(|bytes| bytes.0 > 0).unwrap_or(oom.bytes).0;
            device.builder.oom(RecordedOom { rounded, device_free, stream: StreamIdx(0), stack });
        }
        self.complete_synchronized(event.thread);
        let thread = self.thread(event.thread);
        thread.recorded.clear();
        thread.obtained.clear();
        thread.asked = false;
    }

    fn wait(&mut self, event: &Event, wait: &Wait) {
        match wait.action {
            WaitAction::Record if wait.result == 0 => {
                let recorded = &mut self.thread(event.thread).recorded;
                if recorded.len() == MAX_EVENTS_OF_A_FREE {
                    recorded.remove(0);
                }
                recorded.push(wait.event);
            }
            WaitAction::Query | WaitAction::Synchronize if wait.result == 0 => {
                if let Some(id) = self.waiting.remove(&wait.event) {
                    let by = (wait.action == WaitAction::Synchronize).then_some(event.thread);
                    self.one_done(id, by);
                }
            }
            WaitAction::Record | WaitAction::Query | WaitAction::Synchronize => {}
        }
    }

    fn one_done(&mut self, id: u64, synchronized_by: Option<ThreadId>) {
        let Some(free) = self.pending.get_mut(&id) else { return };
        free.n_events -= 1;
        free.synchronized_by = free.synchronized_by.or(synchronized_by);
        if free.n_events > 0 {
            return;
        }
        let PendingFree { device, alloc, synchronized_by, .. } = *free;
        self.pending.remove(&id);
        match synchronized_by {
            Some(thread) => self.thread(thread).synchronized.push((device, alloc)),
            None => {
                if let Some(device) = self.device(device) {
                    device.builder.op(Op::FreeCompleted(alloc));
                }
            }
        }
    }

    /// What a thread waited for was waited for by `empty_cache`: nothing that it did since needed it.
    fn flush_synchronized(&mut self, thread: ThreadId) {
        let completed = std::mem::take(&mut self.thread(thread).synchronized);
        let mut by_device: BTreeMap<i16, Vec<AllocId>> = BTreeMap::new();
        for (device, alloc) in completed {
            by_device.entry(device).or_default().push(alloc);
        }
        for (device, allocs) in by_device {
            if let Some(device) = self.device(device) {
                device.trim(&allocs);
            }
        }
    }

    /// What a thread waited for was waited for by the request that was just served or refused.
    fn complete_synchronized(&mut self, thread: ThreadId) {
        for (device, alloc) in std::mem::take(&mut self.thread(thread).synchronized) {
            if let Some(device) = self.device(device) {
                device.builder.op(Op::FreeCompleted(alloc));
            }
        }
    }

    /// PyTorch's allocator gave memory back outside of `allocate`.
    fn gives_back(&mut self, thread: ThreadId, device: i16, in_allocate: bool) {
        if in_allocate || !self.survey.knows_allocate {
            self.thread(thread).asked = true;
            return;
        }
        self.flush_synchronized(thread);
        if let Some(device) = self.device(device) {
            device.trim(&[]);
        }
    }

    fn call(&mut self, event: &Event, call: &Call) -> Result<(), TooMany> {
        let Some(result) = call.result else { return Ok(()) };
        let caller = self.caller(event.stack);
        let by_torch = caller == Caller::Torch || (call.in_allocate && caller == Caller::Unknown);
        if by_torch && call.in_allocate && call.action.gives() {
            self.thread(event.thread).asked = true;
        }
        let is_torch_device = self.survey.torch.contains(&call.device);
        if result != 0 {
            if event.out_of_memory().is_some() && !is_torch_device && is_request(call.action) {
                self.refused(event, call)?;
            }
            return Ok(());
        }
        match call.action {
            Action::MemInfo => self.mem_info(event, call),
            Action::CaptureBegin => {
                self.n_captures += 1;
                self.thread(event.thread).is_capturing = true;
            }
            Action::CaptureEnd => {
                self.n_captures = self.n_captures.saturating_sub(1);
                self.thread(event.thread).is_capturing = false;
            }
            Action::Alloc if by_torch && is_torch_device => {
                let memory = TorchMemory { device: call.device, bytes: call.bytes.0 };
                self.torch_memory.insert(call.addr, memory);
                self.segment_alloc(event, call);
            }
            Action::Create if by_torch && is_torch_device => {
                let memory = TorchMemory { device: call.device, bytes: call.bytes.0 };
                self.torch_memory.insert(call.handle, memory);
            }
            Action::Free if self.torch_memory.contains_key(&call.addr) => self.segment_free(event, call),
            Action::Reserve if by_torch => {
                let end = call.addr.saturating_add(call.bytes.0);
                self.reservations.insert(call.addr, Reservation { end, segment: None });
            }
            Action::Unreserve => {
                self.reservations.remove(&call.addr);
            }
            Action::Map => self.page_mapped(event, call),
            Action::Unmap => self.page_unmapped(event, call),
            Action::SetAccess => self.end_mapping(event),
            Action::Alloc if is_torch_device => {
                let what = Nearby::Allocated { address: call.addr, bytes: call.bytes.0 };
                self.nearby(Some(call.device), what);
            }
            Action::Free if self.is_nearby(call.addr) => {
                self.nearby(None, Nearby::Freed { address: call.addr });
            }
            _ if !is_torch_device => self.without_torch(event, call)?,
            _ => {}
        }
        Ok(())
    }

    fn mem_info(&mut self, event: &Event, call: &Call) {
        self.answer_question(event.thread);
        self.thread(event.thread).device_free = call.bytes.0;
        let by_allocator = self.caller(event.stack) == Caller::Torch;
        if call.in_allocate {
            return;
        }
        if let Some(is_autotune) = asks_for_itself(self.definitions, event.stack, by_allocator) {
            let question =
                Question { device: call.device, stack: self.stack(event.stack), is_autotune, by_allocator };
            self.thread(event.thread).question = Some(question);
        }
    }

    /// Nothing that followed shows that the last question for free memory was for the text of an error.
    fn answer_question(&mut self, thread: ThreadId) {
        let Some(question) = self.thread(thread).question.take() else { return };
        let Some(device) = self.devices.get_mut(&question.device) else { return };
        *device.queries.entry((question.stack, question.is_autotune)).or_default() += 1;
    }

    /// Whether nobody whose requests are replayed holds this address.
    fn is_nearby(&self, address: u64) -> bool {
        !self.devices.values().any(|device| device.live.contains_key(&address))
    }

    fn caller(&mut self, stack: TraceStackId) -> Caller {
        if let Some(known) = self.callers.get(&stack) {
            return *known;
        }
        let owner = owners::owner(self.definitions, self.definitions.stack(stack), "");
        let caller = match owner.frame {
            _ if owner.name == owners::TORCH => Caller::Torch,
            Some(_) => Caller::Other,
            None => Caller::Unknown,
        };
        self.callers.insert(stack, caller);
        caller
    }

    fn segment_alloc(&mut self, event: &Event, call: &Call) {
        let captured_by = self.n_captures;
        let thread = self.thread(event.thread);
        let is_captured = call.captured || thread.is_capturing;
        let Some(device) = self.device(call.device) else { return };
        let end = call.addr.saturating_add(call.bytes.0);
        let index = device.new_segment(call.addr, call.bytes.0);
        device.segments.insert(call.addr, (end, index));
        if is_captured {
            device.captured.push((index, captured_by));
        }
        device.builder.driver(DriverCall::Alloc, call.addr, call.bytes.0, index);
        self.thread(event.thread).obtained.push((call.device, index));
    }

    fn segment_free(&mut self, event: &Event, call: &Call) {
        let Some(memory) = self.torch_memory.remove(&call.addr) else { return };
        self.gives_back(event.thread, memory.device, call.in_allocate);
        let Some(device) = self.device(memory.device) else { return };
        if let Some((_, index)) = device.segments.remove(&call.addr) {
            device.builder.driver(DriverCall::Free, call.addr, memory.bytes, index);
        }
    }

    fn reservation(&self, address: u64) -> Option<(u64, Reservation)> {
        let (start, reservation) = self.reservations.range(..=address).next_back()?;
        (address < reservation.end).then_some((*start, *reservation))
    }

    fn page_mapped(&mut self, event: &Event, call: &Call) {
        let Some(memory) = self.torch_memory.get(&call.handle).copied() else { return };
        if self.reservation(call.addr).is_none() {
            return;
        }
        self.maps.insert(call.addr, TorchMemory { bytes: call.bytes.0, ..memory });
        let end = call.addr.saturating_add(call.bytes.0);
        let thread = self.thread(event.thread);
        let start = match thread.run {
            Run::Mapping { device, start, end } if device == memory.device && end == call.addr => start,
            Run::Mapping { .. } | Run::Unmapping { .. } | Run::None => call.addr,
        };
        thread.run = Run::Mapping { device: memory.device, start, end };
    }

    /// The first `cuMemSetAccess` after a run of maps is for the segment's own device; those of peers follow.
    fn end_mapping(&mut self, event: &Event) {
        let Run::Mapping { device: ordinal, start, end } = self.thread(event.thread).run else { return };
        self.thread(event.thread).run = Run::None;
        let Some((reserved, reservation)) = self.reservation(start) else { return };
        let captured_by = self.n_captures;
        let is_captured = self.thread(event.thread).is_capturing;
        let Some(device) = self.device(ordinal) else { return };
        let index = reservation.segment.unwrap_or_else(|| {
            let index = device.new_segment(reserved, 0);
            device.segments.insert(reserved, (reservation.end, index));
            if is_captured {
                device.captured.push((index, captured_by));
            }
            index
        });
        let segment = &mut device.builder.stream_mut().segments[index as usize];
        segment.bytes = segment.bytes.max(end - reserved);
        device.builder.driver(DriverCall::Map, start, end - start, index);
        if let Some(known) = self.reservations.get_mut(&reserved) {
            known.segment = Some(index);
        }
        self.thread(event.thread).obtained.push((ordinal, index));
    }

    fn page_unmapped(&mut self, event: &Event, call: &Call) {
        let Some(page) = self.maps.remove(&call.addr) else { return };
        let Some((reserved, _)) = self.reservation(call.addr) else { return };
        let end = call.addr.saturating_add(page.bytes);
        let (run, begins) = match self.thread(event.thread).run {
            Run::Unmapping { device, start, end: before, reservation }
                if device == page.device && before == call.addr && reservation == reserved =>
            {
                (Run::Unmapping { device, start, end, reservation }, false)
            }
            Run::Mapping { .. } | Run::Unmapping { .. } | Run::None => {
                let (device, start) = (page.device, call.addr);
                (Run::Unmapping { device, start, end, reservation: reserved }, true)
            }
        };
        if begins {
            self.end_run(event.thread);
            self.gives_back(event.thread, page.device, call.in_allocate);
        }
        self.thread(event.thread).run = run;
    }

    /// Books a run of unmapped pages.
    fn end_run(&mut self, thread: ThreadId) {
        let Run::Unmapping { device: ordinal, start, end, reservation } = self.thread(thread).run else {
            return;
        };
        self.thread(thread).run = Run::None;
        let segment = self.reservations.get(&reservation).and_then(|reservation| reservation.segment);
        if let (Some(device), Some(segment)) = (self.device(ordinal), segment) {
            device.builder.driver(DriverCall::Unmap, start, end - start, segment);
        }
    }

    /// A device that PyTorch's caching allocator does not use: what the driver was asked is what the program asked.
    fn without_torch(&mut self, event: &Event, call: &Call) -> Result<(), TooMany> {
        let stack = self.stack(event.stack);
        let address = match call.action {
            Action::Create | Action::Release => call.handle,
            _ => call.addr,
        };
        if is_request(call.action) && call.bytes.0 > 0 {
            let Some(device) = self.device(call.device) else { return Ok(()) };
            let stream = if call.action == Action::AllocAsync { call.stream } else { 0 };
            let stream = device.builder.stream(stream)?;
            let index = device.new_segment(address, call.bytes.0);
            device.segments.insert(address, (address.saturating_add(call.bytes.0), index));
            device.builder.driver(DriverCall::Alloc, address, call.bytes.0, index);
            let allocation =
                Allocation { requested: call.bytes.0, address, stack, stream, pool: PoolIdx::DEFAULT };
            device.handed_out(allocation);
        } else if matches!(call.action, Action::Free | Action::FreeAsync | Action::Release) {
            // The free may name no device, or another one than the memory's.
            let holder = self.devices.iter_mut().find(|(_, device)| device.live.contains_key(&address));
            let Some((_, device)) = holder else { return Ok(()) };
            let id = device.taken_back(address, 0);
            device.builder.op(Op::FreeCompleted(id));
            if let Some((end, index)) = device.segments.remove(&address) {
                device.builder.driver(DriverCall::Free, address, end - address, index);
            }
        }
        Ok(())
    }

    fn refused(&mut self, event: &Event, call: &Call) -> Result<(), TooMany> {
        let stack = self.stack(event.stack);
        let Some(device) = self.device(call.device) else { return Ok(()) };
        let stream = device.builder.stream(call.stream)?;
        device.builder.oom(RecordedOom { rounded: call.bytes.0, device_free: 0, stream, stack });
        Ok(())
    }

    fn finish(mut self) -> Result<Trace, TooMany> {
        for thread in self.threads.keys().copied().collect::<Vec<_>>() {
            self.flush_synchronized(thread);
            self.end_run(thread);
            self.answer_question(thread);
        }
        let mut others = self.bystanders.finish();
        let stacks = Arc::new(self.stacks.stacks);
        let mut trace = Trace { devices: Vec::new(), notes: Vec::new() };
        for (ordinal, mut device) in self.devices {
            let has_torch = self.survey.torch.contains(&ordinal);
            let mut notes = Vec::new();
            private_pools(&mut device)?;
            let n_unknown = device.at_start.len();
            device.at_start.sort_unstable();
            let n_requests = device.builder.stream_mut().ops.len();
            if n_requests == 0 {
                continue;
            }
            let stream = device.builder.stream_mut();
            stream.initial_allocs = device.at_start.iter().map(|(_, id)| *id).collect();
            stream.history = match self.n_lost {
                _ if self.n_implausible > 0 => History::Broken(format!(
                    "{} events have addresses or sizes that no device has: the trace is damaged",
                    self.n_implausible
                )),
                0 if device.n_twice > 0 => History::Broken(format!(
                    "{} addresses were handed out twice: frees are missing from the trace",
                    device.n_twice
                )),
                0 if n_unknown > 0 => History::StartsLate,
                0 => History::Complete,
                n => History::Broken(format!("{n} events were lost; record again with a larger --ring-size")),
            };
            stream.settings = settings(self.definitions, ordinal, has_torch);
            stream.stacks = stacks.clone();
            stream.others = Some(others.remove(&ordinal).unwrap_or_default());
            let queries = device.queries.into_iter();
            stream.queries =
                queries.map(|((stack, is_autotune), times)| Query { stack, times, is_autotune }).collect();
            stream.queries.sort_by_key(|query| (std::cmp::Reverse(query.times), query.stack));
            if n_unknown > 0 {
                notes.push(format!("{n_unknown} blocks were taken back that were not seen handed out"));
            }
            if has_torch && device.n_requests_unseen > 0 {
                notes.push(format!(
                    "{} requests were not seen; their blocks' sizes stand for them",
                    device.n_requests_unseen
                ));
            }
            let mut stream = device.builder.finish();
            if has_torch && grows(&mut stream) {
                notes.push(
                    "the program itself set expandable_segments:True: its allocator mapped pages".into(),
                );
            }
            if has_torch {
                if !self.survey.knows_allocate {
                    super::snapshot::insert_trims(&mut stream);
                }
                if !matches!(stream.history, History::Broken(_)) {
                    notes.extend(super::pools::infer(&mut stream));
                }
            }
            stream.segment_of = Vec::new();
            trace.notes.extend(notes.into_iter().map(|note| format!("device {ordinal}: {note}")));
            trace.devices.push(stream);
        }
        Ok(trace)
    }
}

/// Whether the program or a library asked for free memory to act on the answer, and whether to choose an algorithm by
/// the workspace that it needs. The allocator itself asks when it sets a limit, and for cuDNN (`cacheInfo`).
fn asks_for_itself(definitions: &dyn Definitions, stack: TraceStackId, by_allocator: bool) -> Option<bool> {
    let frames = definitions.stack(stack).map_or(&[][..], |stack| &stack.frames);
    let is_called = |parts: &[&str]| {
        frames.iter().filter_map(|id| definitions.frame(*id)).any(|frame| {
            let (TraceFrame::Python { function, .. } | TraceFrame::Native { function, .. }) = frame;
            parts.iter().any(|part| function.contains(part))
        })
    };
    if by_allocator && is_called(&["cudnn", "Cudnn", "onvolution"]) {
        return Some(true);
    }
    if by_allocator && !is_called(&["mem_get_info", "memory_info", "MemoryInfo"]) {
        return None;
    }
    let owner = owners::owner(definitions, definitions.stack(stack), "");
    (owner.name != owners::NCCL).then_some(false)
}

fn is_failed(kind: &EventKind) -> bool {
    matches!(kind, EventKind::Call(call) if call.result != Some(0))
}

/// The bytes that an event is about, if a device can have them at that address.
fn plausible_bytes(kind: &EventKind) -> Option<u64> {
    let (address, bytes) = match kind {
        // Elsewhere they are no memory: a pool's release threshold is often the largest number there is.
        EventKind::Call(call) if !call.action.gives() && !call.action.takes() => (0, 0),
        EventKind::Call(call) => (call.addr, call.bytes.0),
        EventKind::BlockAlloc(block) => {
            (block.addr, block.bytes.0.max(block.requested.map_or(0, |requested| requested.0)))
        }
        EventKind::BlockFree(block) => (block.addr, block.bytes.0),
        EventKind::BlockOom(oom) => return Some(oom.bytes.0).filter(|bytes| *bytes <= LARGEST_REFUSED),
        _ => (0, 0),
    };
    let largest = if is_failed(kind) { LARGEST_REFUSED } else { LARGEST };
    (address <= HIGHEST && bytes <= largest).then_some(bytes)
}

/// What of `these` lies in none of `others`, joined and ascending. Both may overlap and be in any order.
fn without(these: &[Mapping], others: &[Mapping]) -> Vec<Mapping> {
    let mut edges: Vec<(u64, i32, i32)> = Vec::with_capacity(2 * (these.len() + others.len()));
    edges.extend(these.iter().flat_map(|it| [(it.start, 1, 0), (it.end, -1, 0)]));
    edges.extend(others.iter().flat_map(|it| [(it.start, 0, 1), (it.end, 0, -1)]));
    edges.sort_unstable_by_key(|(at, ..)| *at);
    let (mut n_these, mut n_others) = (0, 0);
    let mut left: Vec<Mapping> = Vec::new();
    let mut since = None;
    for (index, (at, of_these, of_others)) in edges.iter().enumerate() {
        n_these += of_these;
        n_others += of_others;
        if edges.get(index + 1).is_some_and(|(next, ..)| next == at) {
            continue;
        }
        match (since, n_these > 0 && n_others == 0) {
            (None, true) => since = Some(*at),
            (Some(start), false) => {
                left.push(Mapping { start, end: *at });
                since = None;
            }
            (None, false) | (Some(_), true) => {}
        }
    }
    left
}

/// Memory of the device, of any kind.
fn is_request(action: Action) -> bool {
    matches!(action, Action::Alloc | Action::AllocAsync | Action::AllocManaged | Action::Create)
}

/// Gives the segments of captures their pools.
fn private_pools(device: &mut Device) -> Result<(), TooMany> {
    for (segment, capture) in std::mem::take(&mut device.captured) {
        let pool = device.builder.pool((capture.max(1), 0))?;
        device.builder.stream_mut().segments[segment as usize].pool = Some(pool);
    }
    Ok(())
}

fn settings(definitions: &dyn Definitions, ordinal: i16, has_torch: bool) -> RecordedSettings {
    let process = definitions.process();
    let variable = |name: &str| {
        process
            .environment
            .iter()
            .find(|(key, value)| key == name && !value.is_empty())
            .map(|(_, value)| value)
    };
    let torch_version = process.torch_version.as_deref().and_then(release);
    let options =
        variables(torch_version).iter().find_map(|name| variable(name)).cloned().unwrap_or_default();
    let device_memory = definitions
        .devices()
        .iter()
        .find(|device| device.ordinal == ordinal)
        .map(|device| device.total)
        .filter(|total| *total > Bytes(0));
    let is_pool_backend = options.contains("cudaMallocAsync");
    RecordedSettings {
        policy: match (has_torch, is_pool_backend) {
            (true, _) => torch::NAME,
            (false, true) => "cuda_async",
            (false, false) => "direct",
        },
        options: has_torch.then_some(options),
        torch_version: torch_version.filter(|_| has_torch),
        torch_at_least: None,
        device_memory: device_memory.map(|total| total.0),
    }
}

/// Whether the allocator's segments grew although no variable told them to; the settings then say so.
fn grows(stream: &mut OpStream) -> bool {
    let options = stream.settings.options.get_or_insert_default();
    let is_told = options.contains("expandable_segments:True");
    if is_told || !stream.driver.iter().any(|event| event.call == DriverCall::Map) {
        return false;
    }
    let comma = if options.is_empty() { "" } else { "," };
    options.push_str(comma);
    options.push_str("expandable_segments:True");
    true
}

fn release(version: &str) -> Option<(u8, u8)> {
    let mut parts = version.split(['.', '+']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The stacks that ops name, each once.
#[derive(Default)]
struct StackTable {
    stacks: Stacks,
    known: FxHashMap<TraceStackId, StackId>,
    frames: FxHashMap<u32, u32>,
    words: HashMap<String, Arc<str>>,
}

impl StackTable {
    fn id(&mut self, definitions: &dyn Definitions, stack: TraceStackId) -> StackId {
        if let Some(known) = self.known.get(&stack) {
            return *known;
        }
        let Some(listed) = definitions.stack(stack) else { return StackId::NONE };
        let listed = place(definitions, listed).stack;
        let mut list = Vec::with_capacity(listed.frames.len());
        for id in &listed.frames {
            if let Some(known) = self.frames.get(&id.0) {
                list.push(*known);
                continue;
            }
            let Some(frame) = definitions.frame(*id) else { continue };
            let frame = self.frame(definitions, frame);
            self.stacks.frames.push(frame);
            let index = self.stacks.frames.len() as u32 - 1;
            self.frames.insert(id.0, index);
            list.push(index);
        }
        self.stacks.lists.push(list.into());
        let id = StackId(self.stacks.lists.len() as u32 - 1);
        self.known.insert(stack, id);
        id
    }

    fn frame(&mut self, definitions: &dyn Definitions, frame: &TraceFrame) -> Frame {
        match frame {
            TraceFrame::Python { function, file, line } => {
                Frame { name: self.word(function), file: self.word(file), line: *line }
            }
            TraceFrame::Native { address, module, function, file, line, .. } => {
                let module = module.and_then(|id| definitions.module(id));
                let path = module.map_or("", |module| &module.path);
                let name = if function.is_empty() { format!("{address:#x}") } else { function.clone() };
                let file = if file.is_empty() { path } else { file };
                Frame { name: self.word(&name), file: self.word(file), line: *line }
            }
        }
    }

    fn word(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.words.get(text) {
            return known.clone();
        }
        let word: Arc<str> = text.into();
        self.words.insert(text.to_owned(), word.clone());
        word
    }
}

/// The ops of a scene.
#[cfg(test)]
pub(crate) fn imported(scene: &str) -> Trace {
    let recording = crate::scene::recording(scene);
    import(&recording, || recording.events.iter().cloned(), std::iter::empty()).unwrap()
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use gputrace_sim::whatif::Laboratory;

    use super::*;
    use crate::scene::recording;

    const SEGMENT: &str = "Alloc addr=0x40000000 bytes=2M by=libcudart.so,libc10_cuda.so in_allocate=1\n";

    /// The ops and driver calls of a scene's first device, one a line.
    fn check(scene: &str, expected: Expect) {
        let trace = imported(scene);
        let mut text = String::new();
        for stream in trace.devices.iter().take(1) {
            let mut driver = stream.driver.iter().peekable();
            for index in 0..=stream.ops.len() {
                while let Some(call) = driver.next_if(|call| call.before_op as usize == index) {
                    text += &format!("  {:?} {:#x}+{}K\n", call.call, call.address, call.bytes >> 10);
                }
                let Some(op) = stream.ops.get(index) else { break };
                match op {
                    Op::Alloc(id) => {
                        let it = stream.allocation(*id);
                        let handle = stream.streams[usize::from(it.stream.0)];
                        text += &format!("Alloc({}) {} on {handle}\n", id.0, it.requested);
                    }
                    op => text += &format!("{op:?}\n"),
                }
            }
            text += &format!("{:?}\n", stream.history);
        }
        trace.notes.iter().for_each(|note| text += &format!("{note}\n"));
        expected.assert_eq(&text);
    }

    #[test]
    fn blocks_are_requests_and_their_segments_driver_calls() {
        check(
            &format!(
                "{SEGMENT}
                block addr=0x40000000 bytes=512 requested=400 stream=7
                free addr=0x40000000 bytes=512"
            ),
            expect![[r#"
                  Alloc 0x40000000+2048K
                Alloc(0) 400 on 7
                FreeRequested(AllocId(0))
                FreeCompleted(AllocId(0))
                Complete
            "#]],
        );
    }

    #[test]
    fn the_largest_number_as_a_pools_threshold_is_no_memory() {
        let trace = imported(&format!(
            "{SEGMENT}
            PoolSet handle=p bytes=0xffffffffffffffff by=libnccl.so.2
            block addr=0x40000000 bytes=512 requested=512"
        ));
        assert_eq!(trace.devices[0].history, History::Complete);
    }

    #[test]
    fn what_others_hold_is_known_at_each_op() {
        let trace = imported(&format!(
            "{SEGMENT}
            PrimaryRetain handle=c by=libc10_cuda.so
            sample used=502M
            wait ms=100
            block addr=0x40000000 bytes=512 requested=512
            Create handle=n bytes=8M by=libnccl.so.2
            Alloc addr=0x50000000 bytes=1M by=libcublas.so.13
            block addr=0x40000200 bytes=512 requested=512
            Release handle=n by=libnccl.so.2
            wait ms=100
            sample used=504M
            wait ms=100
            block addr=0x40000400 bytes=512 requested=512"
        ));
        let others = trace.devices[0].others.as_ref().unwrap();
        let at = |op: usize| {
            let held = others.names.iter().zip(others.at(op)).filter(|(_, bytes)| *bytes > 0);
            let mut held: Vec<String> =
                held.map(|(name, bytes)| format!("{name} {}M", bytes >> 20)).collect();
            held.sort();
            held.join(", ")
        };
        assert!(others.is_charge_known);
        assert_eq!(at(0), "CUDA context 500M");
        assert_eq!(at(1), "CUDA context 500M, NCCL 8M, cuBLAS 1M, page rounding 1M");
        assert_eq!(at(2), "CUDA context 500M, cuBLAS 1M, page rounding 1M");
    }

    #[test]
    fn a_free_completes_when_its_stream_event_was_seen_done() {
        check(
            &format!(
                "{SEGMENT}
                block addr=0x40000000 bytes=512 requested=512
                record event=1
                free addr=0x40000000 bytes=512
                query event=1 result=600
                block addr=0x40000200 bytes=512 requested=512
                query event=1
                block addr=0x40000000 bytes=512 requested=512"
            ),
            expect![[r#"
                  Alloc 0x40000000+2048K
                Alloc(0) 512 on 0
                FreeRequested(AllocId(0))
                Alloc(1) 512 on 0
                FreeCompleted(AllocId(0))
                Alloc(2) 512 on 0
                Complete
            "#]],
        );
    }

    #[test]
    fn a_stream_event_of_the_program_delays_nothing() {
        check(
            &format!(
                "{SEGMENT}
                block addr=0x40000000 bytes=512 requested=512
                record event=9
                free addr=0x40000000 bytes=512"
            ),
            expect![[r#"
                  Alloc 0x40000000+2048K
                Alloc(0) 512 on 0
                FreeRequested(AllocId(0))
                FreeCompleted(AllocId(0))
                Complete
            "#]],
        );
    }

    #[test]
    fn segments_given_back_outside_of_allocate_are_a_trim_and_those_within_are_not() {
        let scene = |how: &str| {
            format!(
                "{SEGMENT}
                block addr=0x40000000 bytes=512 requested=512
                free addr=0x40000000 bytes=512
                Free addr=0x40000000 by=libcudart.so,libc10_cuda.so {how}
                Alloc addr=0x50000000 bytes=20M by=libcudart.so,libc10_cuda.so in_allocate=1
                block addr=0x50000000 bytes=2M requested=2M"
            )
        };
        check(
            &scene(""),
            expect![[r#"
                  Alloc 0x40000000+2048K
                Alloc(0) 512 on 0
                FreeRequested(AllocId(0))
                FreeCompleted(AllocId(0))
                Trim
                  Free 0x40000000+2048K
                  Alloc 0x50000000+20480K
                Alloc(1) 2097152 on 0
                Complete
            "#]],
        );
        assert!(!imported(&scene("in_allocate=1")).devices[0].ops.contains(&Op::Trim));
    }

    #[test]
    fn what_a_failed_request_waited_for_completes_after_it() {
        check(
            &format!(
                "{SEGMENT}
                block addr=0x40000000 bytes=512 requested=512
                record event=1
                free addr=0x40000000 bytes=512
                Alloc result=2 bytes=20M by=libcudart.so,libc10_cuda.so in_allocate=1
                sync event=1
                oom bytes=2M requested=2M"
            ),
            expect![[r#"
                  Alloc 0x40000000+2048K
                Alloc(0) 512 on 0
                FreeRequested(AllocId(0))
                Oom(0)
                FreeCompleted(AllocId(0))
                Complete
            "#]],
        );
    }

    #[test]
    fn pages_of_a_growing_segment_are_one_call() {
        check(
            "Reserve addr=0x100000000 bytes=1G by=libc10_cuda.so
            Create handle=1 bytes=2M by=libc10_cuda.so in_allocate=1
            Create handle=2 bytes=2M by=libc10_cuda.so in_allocate=1
            Map addr=0x100000000 bytes=2M handle=1 by=libc10_cuda.so in_allocate=1
            Map addr=0x100200000 bytes=2M handle=2 by=libc10_cuda.so in_allocate=1
            SetAccess addr=0x100000000 bytes=4M by=libc10_cuda.so in_allocate=1
            block addr=0x100000000 bytes=3M requested=3M
            free addr=0x100000000 bytes=3M
            Unmap addr=0x100000000 bytes=2M by=libc10_cuda.so
            Unmap addr=0x100200000 bytes=2M by=libc10_cuda.so",
            expect![[r#"
                  Map 0x100000000+4096K
                Alloc(0) 3145728 on 0
                FreeRequested(AllocId(0))
                FreeCompleted(AllocId(0))
                Trim
                  Unmap 0x100000000+4096K
                Complete
                device 0: the program itself set expandable_segments:True: its allocator mapped pages
            "#]],
        );
    }

    #[test]
    fn without_pytorch_the_driver_calls_are_the_requests() {
        let scene = "Alloc addr=0x40000000 bytes=3M by=plain
            Free addr=0x40000000 by=plain
            AllocAsync addr=0x50000000 bytes=1M stream=4 by=plain";
        check(
            scene,
            expect![[r#"
                  Alloc 0x40000000+3072K
                Alloc(0) 3145728 on 0
                FreeRequested(AllocId(0))
                FreeCompleted(AllocId(0))
                  Free 0x40000000+3072K
                  Alloc 0x50000000+1024K
                Alloc(1) 1048576 on 4
                Complete
            "#]],
        );
        let trace = imported(scene);
        assert_eq!(trace.devices[0].settings.policy, "direct");
        assert!(Laboratory::new(&trace.devices[0]).unwrap().self_check(None).is_perfect());
    }

    #[test]
    fn a_trace_with_lost_events_is_not_replayed() {
        check(
            "block addr=0x40000000 bytes=512 requested=512
            lost events=3",
            expect![[r#"
                Alloc(0) 512 on 0
                Broken("3 events were lost; record again with a larger --ring-size")
            "#]],
        );
    }

    #[test]
    fn what_is_mapped_without_others_is_what_is_left_of_it() {
        let map = |ranges: &[(u64, u64)]| -> Vec<Mapping> {
            ranges.iter().map(|(start, end)| Mapping { start: *start, end: *end }).collect()
        };
        assert_eq!(
            without(&map(&[(0, 10), (20, 30)]), &map(&[(5, 22), (25, 26)])),
            map(&[(0, 5), (22, 25), (26, 30)])
        );
        assert_eq!(without(&map(&[(0, 10), (10, 12)]), &[]), map(&[(0, 12)]));
        assert_eq!(without(&[], &map(&[(1, 2)])), []);
    }

    #[test]
    fn memory_of_others_and_mappings_are_kept_for_the_addresses() {
        let recording = recording(&format!(
            "{SEGMENT}
            block addr=0x40000000 bytes=512 requested=512
            Alloc addr=0x7f0010000000 bytes=8M by=libnccl.so.2!
            Free addr=0x7f0010000000 by=libnccl.so.2!"
        ));
        let mapped = vec![
            Mapping { start: 0x1000, end: 0x2000 },
            Mapping { start: 0x7f00_2000_0000, end: 0x7f00_3000_0000 },
        ];
        let read = Mappings { time: Nanos(0), mapped };
        let trace = import(&recording, || recording.events.iter().cloned(), std::iter::once(read)).unwrap();
        let surroundings = trace.devices[0].surroundings.clone().unwrap();
        assert_eq!(surroundings.ceiling, 0x7f00_2000_0000);
        let kinds: Vec<Nearby> = surroundings.events.iter().map(|event| event.what).collect();
        assert_eq!(
            kinds,
            [
                Nearby::Mapped { start: 0x1000, end: 0x2000 },
                Nearby::Mapped { start: 0x7f00_2000_0000, end: 0x7f00_3000_0000 },
                Nearby::Allocated { address: 0x7f00_1000_0000, bytes: 8 << 20 },
                Nearby::Freed { address: 0x7f00_1000_0000 },
            ]
        );
    }
}
