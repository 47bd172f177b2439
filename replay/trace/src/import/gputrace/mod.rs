//! gputrace's own traces, as [`OpStream`](gputrace_sim::ops::OpStream)s.
//!
//! Where PyTorch's blocks were recorded, they are the requests; segments and pages of its allocator are what it asked of
//! the driver. On a device without them (plain CUDA programs, JAX, CuPy, `backend:cudaMallocAsync`) the requests are what
//! the driver was asked.
//!
//! What the events do not say in so many words:
//! - When the free of a block completes that other streams use: the books say so. Those that a failed request waited for
//!   complete after that request: its flush waits for them itself.
//! - `empty_cache` shows as PyTorch's segments given back, or its stream events waited for, outside of `allocate`. One that
//!   had nothing to give back is not seen.
//! - A segment obtained while a stream was captured belongs to a private pool. Captures that use the same segment share
//!   their pool. Pools of `use_mem_pool` are found by `../pools.rs`.

mod device;
mod pools;
mod segments;
mod settings;
mod stacks;
mod surroundings;
mod survey;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use gputrace_schemas::event::{
    Action, BlockAlloc, BlockOom, Call, Event, EventKind, Frame as TraceFrame, Mapping, Mappings, Nanos,
    StackId as TraceStackId, ThreadId, Wait, WaitAction,
};
use gputrace_schemas::reader;
use gputrace_sim::ops::{
    Allocation, DriverCall, History, Nearby, PoolIdx, Query, RecordedOom, StackId, TooMany,
};
use rustc_hash::FxHashMap;

use self::device::{Device, private_pools};
use self::pools::Pools;
use self::settings::{grows, settings};
use self::stacks::StackTable;
use self::surroundings::without;
use self::survey::{Survey, is_failed, plausible_bytes};
use super::others::Bystanders;
use super::{ImportError, LARGEST_SUM, LEFT, Trace};
use crate::files;
use crate::ledger::{Fate, Ledger, MemoryKind, Object, Paging, Step, Watch};
use crate::owners;
use crate::words::time;
use crate::{Definitions, Recording};

/// Most devices of one process.
const MAX_DEVICES: i16 = 4096;

/// Reads a trace file.
///
/// # Errors
/// When it cannot be opened, is not a trace or is one of another version, or has too many streams.
pub(super) fn read(path: &Path) -> Result<Trace, ImportError> {
    let trace = files::trace(path).map_err(|source| ImportError::Trace { source })?;
    of_open(path, &trace, !trace.is_complete())
}

/// Reads a trace that is open; one that has no end though it should is said to.
///
/// # Errors
/// It has too many streams.
pub(crate) fn of_open(path: &Path, trace: &reader::Trace, is_cut: bool) -> Result<Trace, ImportError> {
    with_notes(import(trace, &|see| each(trace, see), trace.mappings()), path, trace, is_cut)
}

/// What was gathered from a trace, with what is to be known of the trace.
pub(crate) fn with_notes(
    gathered: Result<Trace, TooMany>,
    path: &Path,
    trace: &reader::Trace,
    is_cut: bool,
) -> Result<Trace, ImportError> {
    let mut imported = gathered.map_err(|source| ImportError::TooMany { path: path.into(), source })?;
    let mut notes = Vec::new();
    if is_cut {
        notes.push("it has no end: its recorder was killed, or is still writing".to_owned());
    }
    if let Some(since) = trace.since() {
        let since = time(Nanos(since.0.saturating_sub(trace.process().start.0)));
        let why = match trace.process().is_rest() {
            true => {
                "its recorder was killed, and this is what that had not read; what was held then is not known"
            }
            _ => {
                "older segments were removed (--keep, --max-size); memory that was held then stands for them"
            }
        };
        notes.push(format!("{LEFT}{since}: {why}"));
    }
    notes.extend(trace.damages().iter().map(ToString::to_string));
    if !trace.damages().is_empty() {
        for stream in &mut imported.devices {
            stream.history = History::Broken("part of the trace cannot be read".into());
        }
    }
    notes.append(&mut imported.notes);
    Ok(Trace { notes, ..imported })
}

/// Shows a caller the events of a trace in the order of their times, until it breaks.
pub(crate) type Each<'a> = dyn Fn(&mut dyn FnMut(&Event) -> ControlFlow<()>) + 'a;

/// The events of a trace that is open, each as [`Each`] shows it.
pub(crate) fn each(trace: &reader::Trace, see: &mut dyn FnMut(&Event) -> ControlFlow<()>) {
    let mut events = trace.events();
    while let Some(next) = events.lend() {
        if next.iter().try_for_each(&mut *see).is_break() {
            return;
        }
    }
}

/// Turns the events of a trace into ops, device by device.
fn import(
    definitions: &dyn Definitions,
    each: &Each<'_>,
    mappings: impl Iterator<Item = Mappings>,
) -> Result<Trace, TooMany> {
    let mut gathering = Gathering::new(definitions, each, mappings);
    let mut ledger = gathering.books();
    gathering.begin(&mut ledger);
    ledger.skip_training();
    each(&mut |event| {
        match gathering.worth(event) {
            Worth::Booking => {
                ledger.event(definitions, event);
                gathering.importer.event(&ledger, event);
            }
            Worth::Nothing => {}
            Worth::End => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    });
    ledger.finish();
    gathering.importer.finish(&ledger)
}

/// Gathers the requests of a trace while somebody books its events.
pub(crate) struct Gathering<'a, M: Iterator<Item = Mappings>> {
    importer: Importer<'a>,
    mappings: Peekable<M>,
    /// The books have an event that cannot be true: the requests must be gathered with books of their own.
    is_off: bool,
}

/// What an event is worth for the requests.
enum Worth {
    Booking,
    /// It cannot be true.
    Nothing,
    /// Nor can any that follows.
    End,
}

impl<'a, M: Iterator<Item = Mappings>> Gathering<'a, M> {
    /// Looks through all events once, for what must be known before the first of them.
    pub(crate) fn new(definitions: &'a dyn Definitions, each: &Each<'_>, mappings: M) -> Gathering<'a, M> {
        let mut mappings = mappings.peekable();
        let first_read = mappings.peek().map(|mappings| mappings.time);
        let mut survey = Survey { first_read, ..Survey::default() };
        each(&mut |event| {
            if plausible_bytes(&event.kind).is_some() {
                survey.event(event);
            }
            ControlFlow::Continue(())
        });
        let devices = survey.devices.iter().map(|ordinal| (*ordinal, Device::new(*ordinal))).collect();
        let importer = Importer {
            definitions,
            survey,
            devices,
            mapped: Vec::new(),
            threads: FxHashMap::default(),
            stacks: StackTable::default(),
            bystanders: Bystanders::default(),
            n_lost: 0,
            n_implausible: 0,
            sum: 0,
            n_captures: 0,
            pools: Pools::default(),
            too_many: None,
        };
        let mut gathering = Gathering { importer, mappings, is_off: false };
        if let Some(first) = gathering.mappings.next() {
            // Read when some memory had been handed out: what is left without that was there before it.
            let before = without(&first.mapped, &gathering.importer.survey.regions);
            gathering.importer.mappings(before);
        }
        gathering
    }

    /// Empty books that know what was found so far.
    pub(crate) fn books(&mut self) -> Ledger {
        let mut ledger = Ledger::knowing(std::mem::take(&mut self.importer.survey.own_events));
        if self.importer.survey.knows_pools {
            let before = self.importer.survey.pools_before();
            before.iter().for_each(|(_, call)| self.importer.pool_before(call));
            ledger.pools_before(self.importer.definitions, &before);
        }
        ledger
    }

    /// What was gathered, where the books had what this would have booked; they are finished.
    pub(crate) fn finish(self, ledger: &Ledger) -> Option<Result<Trace, TooMany>> {
        (!self.is_off).then(|| self.importer.finish(ledger))
    }

    fn worth(&mut self, event: &Event) -> Worth {
        let Gathering { importer, mappings, .. } = self;
        while let Some(mappings) = mappings.next_if(|mappings| mappings.time <= event.time) {
            importer.mappings(mappings.mapped);
        }
        let Some(bytes) = plausible_bytes(&event.kind) else {
            importer.n_implausible += u64::from(!is_failed(&event.kind));
            return Worth::Nothing;
        };
        importer.sum = importer.sum.saturating_add(bytes);
        if importer.sum > LARGEST_SUM {
            importer.n_implausible += 1;
            return Worth::End;
        }
        Worth::Booking
    }
}

impl<M: Iterator<Item = Mappings>> Watch for Gathering<'_, M> {
    fn begin(&mut self, ledger: &mut Ledger) {
        ledger.keep_steps();
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        if self.is_off {
            return;
        }
        match self.worth(event) {
            Worth::Booking => self.importer.event(ledger, event),
            Worth::Nothing | Worth::End => self.is_off = true,
        }
    }
}

/// What a thread did since its last block.
#[derive(Default)]
struct ThreadState {
    /// Blocks whose frees a `cuEventSynchronize` completed: of a failed request's flush, or of `empty_cache`.
    synchronized: Vec<(i16, u64)>,
    /// PyTorch asked the driver for memory inside `allocate` since then.
    asked: bool,
    /// Segments obtained for the request that follows.
    obtained: Vec<(i16, u32)>,
    /// The number of the capture that it began and did not end.
    capture: Option<u64>,
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

struct Importer<'a> {
    definitions: &'a dyn Definitions,
    survey: Survey,
    devices: BTreeMap<i16, Device>,
    /// The address space when it was last read.
    mapped: Vec<Mapping>,
    threads: FxHashMap<ThreadId, ThreadState>,
    stacks: StackTable,
    bystanders: Bystanders,
    n_lost: u64,
    /// Events that cannot be true.
    n_implausible: u64,
    /// Bytes of all events so far.
    sum: u64,
    /// Captures that began.
    n_captures: u64,
    /// Those of PyTorch's allocator, where the trace says.
    pools: Pools,
    /// Ops cannot be numbered: what follows is not looked at.
    too_many: Option<TooMany>,
}

impl Importer<'_> {
    /// `event` has been booked.
    fn event(&mut self, ledger: &Ledger, event: &Event) {
        if self.too_many.is_none() {
            self.too_many = self.booked(ledger, event).err();
        }
    }
}

impl Importer<'_> {
    fn booked(&mut self, ledger: &Ledger, event: &Event) -> Result<(), TooMany> {
        if matches!(event.kind, EventKind::Call(_) | EventKind::Sample(_)) {
            let Importer { bystanders, devices, survey, .. } = self;
            bystanders.event(ledger, event, |device| {
                let n_ops = devices.get(&device).map_or(0, |device| device.builder.n_ops());
                (n_ops, survey.torch.contains(&device))
            });
        }
        match &event.kind {
            EventKind::Call(call) => self.call(ledger, event, call)?,
            EventKind::BlockAlloc(block) => self.block_alloc(ledger, event, block)?,
            EventKind::BlockFree(_) => self.block_free(ledger, event.thread),
            EventKind::BlockOom(oom) => self.block_oom(ledger, event, oom)?,
            EventKind::Wait(wait) => self.wait(ledger, event.thread, wait),
            EventKind::Lost(lost) => self.n_lost = self.n_lost.saturating_add(lost.events),
            EventKind::Sample(_) | EventKind::Mark(_) | EventKind::Note(_) => {}
            EventKind::NcclEnter(_) | EventKind::NcclExit(_) | EventKind::NcclTiming(_) => {}
            EventKind::Pjrt(_) | EventKind::PjrtExecutable(_) => {}
        }
        Ok(())
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

    fn block_alloc(&mut self, ledger: &Ledger, event: &Event, block: &BlockAlloc) -> Result<(), TooMany> {
        self.answer_question(event.thread);
        let asked = self.thread(event.thread).asked;
        if !asked {
            self.flush_synchronized(event.thread);
        }
        let stack = self.stack(event.stack);
        let obtained = std::mem::take(&mut self.thread(event.thread).obtained);
        let asked = self.pool_of_request(ledger, block.device, event.thread, block.stream)?;
        let Some(device) = self.device(block.device) else { return Ok(()) };
        let stream = device.builder.stream(block.stream.unwrap_or(0))?;
        for (_, segment) in obtained.iter().filter(|(owner, _)| *owner == block.device) {
            device.builder.stream_mut().segments[*segment as usize].stream = stream;
        }
        let segment = device.segment_at(block.addr);
        self.pools_of_segments(obtained, asked);
        let pool = match self.survey.knows_pools {
            true => self.pool_of_block(block.device, segment, asked),
            false => PoolIdx::DEFAULT,
        };
        // Nobody asked for it: a graph's pool is put back into an earlier state.
        let is_restored = self.survey.knows_pools && block.requested.is_none() && pool != PoolIdx::DEFAULT;
        let Some(device) = self.device(block.device) else { return Ok(()) };
        let of_segment = device.builder.stream_mut().segments.get(segment as usize).map(|it| it.stream);
        let stream = of_segment.filter(|_| is_restored).unwrap_or(stream);
        let requested = block.requested.map(|requested| requested.0);
        let requested = requested.filter(|requested| (1..=block.bytes.0).contains(requested));
        let is_unseen = requested.is_none();
        let requested = requested.unwrap_or(block.bytes.0).max(1);
        device.n_requests_unseen += u64::from(is_unseen && !is_restored);
        let allocation = Allocation { requested, address: block.addr, stack, stream, pool };
        for step in ledger.steps() {
            match step {
                Step::BlockFreed(_, missed) => {
                    if let Some(device) = self.device(missed.device) {
                        device.n_twice += 1;
                        device.block_freed(missed.serial);
                    }
                }
                Step::Block(_, block) => {
                    if let Some(device) = self.device(block.device) {
                        let segment = device.segment_at(allocation.address);
                        device.handed_out(block.serial, allocation, segment);
                        if is_restored {
                            device.restored();
                        }
                    }
                }
                _ => self.done(step),
            }
        }
        let capture = self.thread(event.thread).capture;
        if let (Some(device), Some(capture)) = (self.device(block.device), capture) {
            device.used_in(device.segment_at(block.addr), capture);
        }
        self.complete_synchronized(event.thread);
        self.thread(event.thread).asked = false;
        Ok(())
    }

    fn block_free(&mut self, ledger: &Ledger, thread: ThreadId) {
        self.answer_question(thread);
        self.flush_synchronized(thread);
        for step in ledger.steps() {
            match step {
                Step::BlockFreed(_, block) => {
                    if let Some(device) = self.device(block.device) {
                        device.block_freed(block.serial);
                    }
                }
                Step::Stranger(Fate::Freed, stranger) => {
                    if let Some(device) = self.device(stranger.device) {
                        device.was_there(stranger);
                        device.block_freed(stranger.serial);
                    }
                }
                _ => self.done(step),
            }
        }
    }

    /// If `step` completes a free, so does the op.
    fn done(&mut self, step: &Step) {
        if let Some((device, serial)) = completed(step)
            && let Some(device) = self.device(device)
        {
            device.block_done(serial);
        }
    }

    fn block_oom(&mut self, ledger: &Ledger, event: &Event, oom: &BlockOom) -> Result<(), TooMany> {
        if !self.survey.knows_allocate {
            self.thread(event.thread).question.take_if(|question| question.by_allocator);
        }
        self.answer_question(event.thread);
        let stack = self.stack(event.stack);
        let told = ledger.torch(oom.device).and_then(|torch| torch.ooms.last()?.device);
        let device_free = told.map_or(0, |(free, _)| free.0);
        let capture = self.thread(event.thread).capture;
        let pool = self.pool_of_request(ledger, oom.device, event.thread, oom.stream)?;
        let obtained = std::mem::take(&mut self.thread(event.thread).obtained);
        self.pools_of_segments(obtained, pool);
        if let Some(device) = self.device(oom.device) {
            let rounded = oom.requested.filter(|bytes| bytes.0 > 0).unwrap_or(oom.bytes).0;
            let stream = oom.stream.map(|stream| device.builder.stream(stream)).transpose()?;
            let failed = RecordedOom { rounded, device_free, stream, pool, stack };
            device.failed(failed, capture);
        }
        self.complete_synchronized(event.thread);
        let thread = self.thread(event.thread);
        thread.asked = false;
        Ok(())
    }

    fn wait(&mut self, ledger: &Ledger, thread: ThreadId, wait: &Wait) {
        match wait.action {
            WaitAction::Synchronize => {
                let completed = ledger.steps().iter().filter_map(completed);
                self.thread(thread).synchronized.extend(completed);
            }
            WaitAction::Record | WaitAction::Query => {
                ledger.steps().iter().for_each(|step| self.done(step));
            }
        }
    }

    /// What a thread waited for was waited for by `empty_cache`: nothing that it did since needed it.
    fn flush_synchronized(&mut self, thread: ThreadId) {
        let completed = std::mem::take(&mut self.thread(thread).synchronized);
        let mut by_device: BTreeMap<i16, Vec<u64>> = BTreeMap::new();
        for (device, serial) in completed {
            by_device.entry(device).or_default().push(serial);
        }
        for (device, serials) in by_device {
            let knows_trims = self.survey.knows_pools;
            match self.device(device) {
                // The trim is an op of its own.
                Some(device) if knows_trims => serials.iter().for_each(|serial| device.block_done(*serial)),
                Some(device) => device.trim(&serials),
                None => {}
            }
        }
    }

    /// What a thread waited for was waited for by the request that was just served or refused.
    fn complete_synchronized(&mut self, thread: ThreadId) {
        for (device, serial) in std::mem::take(&mut self.thread(thread).synchronized) {
            if let Some(device) = self.device(device) {
                device.block_done(serial);
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
        let is_told = self.survey.knows_pools;
        if let Some(device) = self.device(device).filter(|_| !is_told) {
            device.trim(&[]);
        }
    }

    fn call(&mut self, ledger: &Ledger, event: &Event, call: &Call) -> Result<(), TooMany> {
        let Some(result) = call.result else { return Ok(()) };
        let is_by_torch = ledger.is_by_torch();
        if is_by_torch && call.in_allocate && call.action.gives() {
            self.thread(event.thread).asked = true;
        }
        if call.action == Action::CaptureEnd {
            self.thread(event.thread).capture = None;
        }
        if result != 0 {
            let has_torch = self.survey.torch.contains(&call.device);
            if event.out_of_memory().is_some() && !has_torch && is_request(call.action) {
                self.refused(event, call)?;
            }
            return Ok(());
        }
        for step in ledger.steps() {
            match step {
                Step::Gained(object) => self.gained((event, call), object)?,
                Step::Lost(object) => self.lost((event, call), object),
                Step::Pages(Paging::Grown, pages) if self.survey.torch.contains(&pages.device) => {
                    self.grown(event, pages);
                }
                Step::Pages(Paging::Shrunk(continues), page) if self.survey.torch.contains(&page.device) => {
                    self.shrunk(event, call, (page, *continues));
                }
                _ => {}
            }
        }
        match call.action {
            Action::MemInfo => self.mem_info(event, call, is_by_torch),
            Action::CaptureBegin => {
                self.n_captures += 1;
                self.thread(event.thread).capture = Some(self.n_captures);
            }
            Action::TorchPoolBegin
            | Action::TorchPoolEnd
            | Action::TorchPoolRelease
            | Action::TorchPoolCreate
            | Action::TorchPoolUseOnOom
            | Action::TorchPoolNoSplit
            | Action::TorchTrim => self.pool_call(ledger, call)?,
            Action::Unreserve => self.unreserved(call.addr),
            _ => {}
        }
        Ok(())
    }

    /// The driver handed this out: on a device with PyTorch's blocks a segment or a neighbour of segments, elsewhere
    /// what the program asked for.
    fn gained(&mut self, (event, call): (&Event, &Call), object: &Object) -> Result<(), TooMany> {
        match (self.survey.torch.contains(&object.device), object.kind, object.torch) {
            (false, ..) if is_request(call.action) => self.requested(event, call, object)?,
            (true, MemoryKind::Linear, true) => self.segment_alloc(event, call),
            (true, MemoryKind::Linear, false) => {
                let what = Nearby::Allocated { address: object.addr, bytes: object.bytes.0 };
                self.nearby(object.device, what);
            }
            _ => {}
        }
        Ok(())
    }

    /// The same was given back, or went away with its context.
    fn lost(&mut self, (event, call): (&Event, &Call), object: &Object) {
        match (self.survey.torch.contains(&object.device), object.kind, object.torch) {
            (false, ..) => {
                if let Some(device) = self.devices.get_mut(&object.device) {
                    let was_requested = device.given_back(object.serial);
                    device.n_twice += u64::from(was_requested && is_request(call.action));
                }
            }
            // What went away with its context was not given back by PyTorch.
            (true, MemoryKind::Linear, true) if call.action == Action::Free => {
                self.segment_freed(event, call, object);
            }
            (true, MemoryKind::Linear, false) => {
                self.nearby(object.device, Nearby::Freed { address: object.addr });
            }
            _ => {}
        }
    }

    fn mem_info(&mut self, event: &Event, call: &Call, by_allocator: bool) {
        self.answer_question(event.thread);
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

    /// On a device that PyTorch's caching allocator does not use, what the driver was asked is what the program asked.
    fn requested(&mut self, event: &Event, call: &Call, object: &Object) -> Result<(), TooMany> {
        let requested = object.bytes.0;
        let stack = self.stack(event.stack);
        let Some(device) = self.device(object.device).filter(|_| requested > 0) else { return Ok(()) };
        let stream = if call.action == Action::AllocAsync { call.stream } else { 0 };
        let stream = device.builder.stream(stream)?;
        // Physical memory has no address; its handle stands for one.
        let address = if call.action == Action::Create { call.handle } else { object.addr };
        let segment = device.new_segment(address, requested);
        device.builder.driver(DriverCall::Alloc, address, requested, segment);
        let allocation = Allocation { requested, address, stack, stream, pool: PoolIdx::DEFAULT };
        device.handed_out(object.serial, allocation, segment);
        Ok(())
    }

    fn refused(&mut self, event: &Event, call: &Call) -> Result<(), TooMany> {
        let stack = self.stack(event.stack);
        let Some(device) = self.device(call.device) else { return Ok(()) };
        let stream = device.builder.stream(call.stream)?;
        device.builder.oom(RecordedOom {
            rounded: call.bytes.0,
            device_free: 0,
            stream: Some(stream),
            pool: PoolIdx::DEFAULT,
            stack,
        });
        Ok(())
    }

    fn finish(mut self, ledger: &Ledger) -> Result<Trace, TooMany> {
        if let Some(too_many) = self.too_many {
            return Err(too_many);
        }
        for thread in self.threads.keys().copied().collect::<Vec<_>>() {
            self.flush_synchronized(thread);
            self.answer_question(thread);
        }
        let mut others = self.bystanders.finish(ledger);
        let stacks = Arc::new(self.stacks.stacks);
        let mut trace = Trace { devices: Vec::new(), notes: Vec::new() };
        trace.notes.extend(self.survey.is_attached.then(|| super::ATTACHED.to_owned()));
        for (ordinal, mut device) in self.devices {
            let has_torch = self.survey.torch.contains(&ordinal);
            let mut notes = Vec::new();
            if !self.survey.knows_pools {
                private_pools(&mut device)?;
            }
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
                    "{} addresses were allocated twice: frees are missing from the trace",
                    device.n_twice
                )),
                0 if n_unknown > 0 => History::StartsLate,
                0 => History::Complete,
                n => History::Broken(format!("{n} events were lost; record again with a larger --ring-size")),
            };
            stream.knows_pools = self.survey.knows_pools && has_torch;
            stream.settings = settings(self.definitions, ordinal, has_torch);
            stream.stacks = stacks.clone();
            stream.others = Some(others.remove(&ordinal).unwrap_or_default());
            let queries = device.queries.into_iter();
            stream.queries =
                queries.map(|((stack, is_autotune), times)| Query { stack, times, is_autotune }).collect();
            stream.queries.sort_by_key(|query| (std::cmp::Reverse(query.times), query.stack));
            if n_unknown > 0 {
                notes.push(format!("{n_unknown} blocks were freed whose allocation was not seen"));
            }
            if has_torch && device.n_requests_unseen > 0 {
                notes.push(format!(
                    "{} requests were not seen; their blocks' sizes are used instead",
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
                    super::trims::insert_trims(&mut stream);
                }
                if !matches!(stream.history, History::Broken(_)) && !self.survey.knows_pools {
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

/// The block whose free this completes: its device and serial.
fn completed(step: &Step) -> Option<(i16, u64)> {
    match step {
        Step::BlockDone(_, block) => Some((block.device, block.serial)),
        Step::Stranger(Fate::Done, stranger) => Some((stranger.device, stranger.serial)),
        _ => None,
    }
}

/// Memory of the device, of any kind.
fn is_request(action: Action) -> bool {
    matches!(action, Action::Alloc | Action::AllocAsync | Action::AllocManaged | Action::Create)
}

/// A trace in memory as requests.
///
/// # Errors
/// It has too many streams.
pub fn of_recording(recording: &Recording) -> Result<Trace, TooMany> {
    let each = |see: &mut dyn FnMut(&Event) -> ControlFlow<()>| {
        let _ = recording.events.iter().try_for_each(see);
    };
    import(recording, &each, std::iter::empty())
}
