//! A PyTorch snapshot as events, as if gputrace had recorded them: for everything that reads traces.
//!
//! A snapshot records what was requested, not how large the blocks were that served it. Their sizes follow from a replay
//! of the recorded settings wherever it puts a request at the recorded address (nearly always), else from the layout at
//! the end, else from rounding to 512 bytes.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::path::Path;

use gputrace_schemas::event::{
    Action, Api, ApiId, BlockAlloc, BlockFree, BlockOom, Bytes, Call, CommId, Device as EventDevice, Event,
    EventKind, Frame, FrameId, HOST, Nanos, Process, Stack, StackId, Thread, ThreadId, Wait, WaitAction,
};
use gputrace_sim::addresses::Recorded;
use gputrace_sim::device::{Device, PAGE, Placement};
use gputrace_sim::ops::{self, AllocId, DriverCall, DriverEvent, History, Op, OpStream, Pool, PoolIdx};
use gputrace_sim::policies::torch::{NEWEST, Torch, parse, profile};
use gputrace_sim::simulator::{Observer, run};

use super::Trace;
use super::host::{HostAction, HostEvent};
use super::snapshot::{Extras, ImportError, Snapshot, read_with_extras};
use crate::{Before, Recording};

/// `cudaErrorNotReady`, cuda.h.
const NOT_READY: i32 = 600;
/// Pages of an expandable segment's large half: `kLargeBuffer`, CUDACachingAllocator.cpp 2.1 to 2.15.
const LARGE_PAGE: u64 = 20 << 20;
/// The functions behind the driver calls of a snapshot, by their [`ApiId`].
const APIS: [(&str, &str); 13] = [
    ("cuMemAlloc_v2", "cudaMalloc"),
    ("cuMemFree_v2", "cudaFree"),
    ("cuMemCreate", ""),
    ("cuMemRelease", ""),
    ("cuMemMap", ""),
    ("cuMemUnmap", ""),
    ("cuMemGetInfo_v2", "cudaMemGetInfo"),
    ("beginAllocateToPool", ""),
    ("endAllocateToPool", ""),
    ("cuMemHostAlloc", "cudaHostAlloc"),
    ("cuMemFreeHost", "cudaFreeHost"),
    ("CachingHostAllocator::allocate", ""),
    ("CachingHostAllocator::free", ""),
];

/// Reads a snapshot (plain or gzip) once, as a recording and as requests.
///
/// # Errors
/// When the file cannot be opened, is damaged, is hostile, or is not a snapshot.
pub(crate) fn snapshot(path: &Path) -> Result<(Recording, Trace), ImportError> {
    let read = read_with_extras(path)?;
    Ok((record(&read), read.requests()))
}

/// A snapshot's uncompressed bytes as a recording.
///
/// # Errors
/// They are damaged, hostile, or not a snapshot.
pub fn recording_of(pickle: &[u8]) -> Result<Recording, ImportError> {
    Ok(record(&super::snapshot::with_extras(pickle, Path::new("(memory)"))?))
}

fn record(Snapshot { trace, extras, host, stacks: known }: &Snapshot) -> Recording {
    let mut recording = Recording::default();
    stacks(&mut recording, known);
    for (id, (name, runtime_name)) in (0..).map(ApiId).zip(APIS) {
        recording.apis.insert(id, Api { name: name.into(), runtime_name: runtime_name.into() });
    }
    for (stream, extras) in trace.devices.iter().zip(extras) {
        let thread = ThreadId(stream.device);
        recording.threads.insert(thread, Thread { tid: 0, name: format!("cuda:{}", stream.device) });
        recording.devices.push(EventDevice { ordinal: stream.device as i16, ..EventDevice::default() });
        let events = Teller::new(stream, thread).tell(stream, extras);
        recording.events.extend(events);
    }
    if !host.events.is_empty() {
        let thread = ThreadId(trace.devices.iter().map(|stream| stream.device + 1).max().unwrap_or(0));
        recording.threads.insert(thread, Thread { tid: 0, name: "host".into() });
        recording.events.extend(of_host(&host.events, thread));
    }
    recording.events.sort_by_key(|event| event.time);
    let start = recording.events.first().map_or(Nanos(0), |event| event.time);
    let options = trace.devices.iter().find_map(|stream| stream.settings.options.clone());
    let environment = options.map(|options| ("PYTORCH_CUDA_ALLOC_CONF".to_owned(), options));
    recording.process = Process {
        executable: "PyTorch memory snapshot".into(),
        environment: environment.into_iter().collect(),
        start,
        start_realtime: start.0,
        ..Process::default()
    };
    let thread = ThreadId(0);
    let before: Vec<String> = trace.devices.iter().filter_map(before).collect();
    for note in trace.notes.iter().chain(&before) {
        let kind = EventKind::Note(note.clone());
        recording.events.insert(0, Event { time: start, thread, stack: StackId(0), kind });
    }
    recording
}

/// What a device's history does not hold, as a note that [`crate::Before`] reads.
fn before(stream: &OpStream) -> Option<String> {
    let n_before = stream.initial_allocs.len() as u64;
    // What was only given back says nothing of who asked.
    let has_history = stream.ops.iter().any(|op| matches!(op, Op::Alloc(_) | Op::Oom(_)));
    let before = Before { device: stream.device as i16, n_blocks: n_before, has_history };
    (n_before > 0 || !has_history).then(|| before.note())
}

fn stacks(recording: &mut Recording, stacks: &ops::Stacks) {
    for (id, frame) in (0..).map(FrameId).zip(&stacks.frames) {
        let (function, file, line) = (frame.name.to_string(), frame.file.to_string(), frame.line);
        let is_python = file.ends_with(".py") || file.starts_with('<') || file.contains(".py:");
        let frame = if is_python {
            Frame::Python { function, file, line }
        } else {
            let file = if file == "??" { String::new() } else { file };
            Frame::Native { address: 0, module: None, function, file, line, inlined: false }
        };
        recording.frames.insert(id, frame);
    }
    for (idx, list) in stacks.lists.iter().enumerate() {
        let frames = list.iter().map(|frame| FrameId(*frame)).collect();
        recording.stacks.insert(StackId(idx as u32 + 1), Stack { frames, ..Stack::default() });
    }
}

fn stack(id: ops::StackId) -> StackId {
    if id == ops::StackId::NONE { StackId(0) } else { StackId(id.0 + 1) }
}

/// Pinned memory of the host: segments are what the driver pinned, blocks what PyTorch handed out of them.
fn of_host(events: &[HostEvent], thread: ThreadId) -> impl Iterator<Item = Event> {
    let mut now = 0;
    events.iter().map(move |event| {
        now = now.max(event.time_us.max(0) as u64 * 1000);
        let (action, api) = match event.what {
            HostAction::Pin => (Action::AllocHost, 9),
            HostAction::Unpin => (Action::FreeHost, 10),
            HostAction::Alloc => (Action::HeapAlloc, 11),
            HostAction::Free => (Action::HeapFree, 12),
        };
        let bytes = if action.gives() || action == Action::HeapAlloc { event.bytes } else { 0 };
        let call = succeeded(action, api, HOST, (event.address, bytes, 0));
        Event { time: Nanos(now), thread, stack: stack(event.stack), kind: EventKind::Call(call) }
    })
}

fn succeeded(action: Action, api: u32, device: i16, (addr, bytes, handle): (u64, u64, u64)) -> Call {
    Call {
        api: ApiId(api),
        action,
        device,
        result: Some(0),
        addr,
        bytes: Bytes(bytes),
        stream: 0,
        handle,
        extra: 0,
        duration: Nanos(0),
        captured: false,
        in_allocate: true,
        comm: CommId(0),
        nccl_call: 0,
        nccl_thread: false,
    }
}

/// Writes one device's history as events.
struct Teller {
    device: i16,
    thread: ThreadId,
    sizes: Vec<u64>,
    allocated: u64,
    reserved: u64,
    now: u64,
    /// Mapped pieces of expandable segments: start to (length, handle).
    pieces: BTreeMap<u64, (u64, u64)>,
    n_handles: u64,
    /// The private pool that requests are served from.
    pool: PoolIdx,
    /// Frees that streams hold up: the event that they wait for.
    waits: HashMap<AllocId, u64>,
    events: Vec<Event>,
}

impl Teller {
    fn new(stream: &OpStream, thread: ThreadId) -> Teller {
        Teller {
            device: stream.device as i16,
            thread,
            sizes: sizes(stream),
            allocated: 0,
            reserved: 0,
            now: 0,
            pieces: BTreeMap::new(),
            n_handles: 0,
            pool: PoolIdx::DEFAULT,
            waits: HashMap::new(),
            events: Vec::new(),
        }
    }

    fn tell(mut self, stream: &OpStream, extras: &Extras) -> Vec<Event> {
        // Snapshots before PyTorch 2.2 have no times: each event takes a microsecond then.
        let is_timed = extras.op_times.iter().chain(&extras.driver_times).any(|time| *time > 0);
        let nanos =
            |time: i64, idx: usize| if is_timed { time.max(0) as u64 * 1000 } else { idx as u64 * 1000 };
        let first = extras.op_times.first().into_iter().chain(extras.driver_times.first()).min();
        self.now = nanos(first.copied().unwrap_or(0), 0);
        for segment in stream.initial.iter().filter(|segment| !segment.expandable) {
            self.segment_alloc(segment.address, segment.bytes, StackId(0));
        }
        for (from, to) in mapped_at_start(stream) {
            self.map(from, to - from, StackId(0));
        }
        for id in &stream.initial_allocs {
            self.alloc(stream, *id);
        }
        let mut driver = stream.driver.iter().enumerate().peekable();
        let mut n_rows = 0;
        for (index, op) in stream.ops.iter().enumerate() {
            self.opens(stream, *op);
            while let Some((n, event)) = driver.next_if(|(_, event)| event.before_op as usize <= index) {
                let time = extras.driver_times.get(n).copied().unwrap_or(0);
                self.at(nanos(time, index));
                self.driver(event, stack(extras.driver_stacks.get(n).copied().unwrap_or(ops::StackId::NONE)));
            }
            if matches!(op, Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..)) {
                continue;
            }
            self.at(nanos(extras.op_times.get(n_rows).copied().unwrap_or(0), index));
            n_rows += 1;
            self.op(stream, index, *op);
        }
        for (n, event) in driver {
            self.at(nanos(extras.driver_times.get(n).copied().unwrap_or(0), stream.ops.len()));
            self.driver(event, stack(extras.driver_stacks.get(n).copied().unwrap_or(ops::StackId::NONE)));
        }
        let mut unfinished: Vec<u64> = self.waits.values().copied().collect();
        unfinished.sort_unstable();
        for event in unfinished {
            self.wait(event, WaitAction::Query, NOT_READY);
        }
        self.events
    }

    fn at(&mut self, nanos: u64) {
        self.now = self.now.max(nanos);
    }

    /// A snapshot names the private pools of segments that are there at its end: requests that these serve come while their pool is open.
    fn opens(&mut self, stream: &OpStream, op: Op) {
        let asked = match op {
            Op::Alloc(id) => stream.allocation(id).pool,
            Op::Oom(idx) => stream.ooms[idx as usize].pool,
            Op::FreeRequested(_)
            | Op::FreeCompleted(_)
            | Op::Trim
            | Op::ReleasePool(_)
            | Op::ChangePool(..) => {
                return;
            }
        };
        let is_named = !stream.pool(asked).is_guessed();
        let wanted = if is_named { asked } else { PoolIdx::DEFAULT };
        if wanted == self.pool {
            return;
        }
        if self.pool != PoolIdx::DEFAULT {
            self.of_pool(Action::TorchPoolEnd, 8, stream.pool(self.pool));
        }
        if wanted != PoolIdx::DEFAULT {
            self.of_pool(Action::TorchPoolBegin, 7, stream.pool(wanted));
        }
        self.pool = wanted;
    }

    fn of_pool(&mut self, action: Action, api: u32, pool: Pool) {
        self.call(action, api, 0, 0, pool.id.0, StackId(0));
        if let Some(Event { kind: EventKind::Call(call), .. }) = self.events.last_mut() {
            call.extra = pool.id.1;
        }
    }

    fn op(&mut self, stream: &OpStream, index: usize, op: Op) {
        match op {
            Op::Alloc(id) => self.alloc(stream, id),
            Op::FreeRequested(id) => {
                if stream.ops.get(index + 1) != Some(&Op::FreeCompleted(id)) {
                    let event = 1 + index as u64 + ((self.device as u64) << 48);
                    self.waits.insert(id, event);
                    self.wait(event, WaitAction::Record, 0);
                }
                let bytes = self.sizes[id.0 as usize];
                self.allocated = self.allocated.saturating_sub(bytes);
                let free = BlockFree {
                    device: self.device,
                    addr: stream.allocation(id).address,
                    bytes: Bytes(bytes),
                    allocated: Bytes(self.allocated),
                    reserved: Bytes(self.reserved),
                    collecting: false,
                };
                self.push(StackId(0), EventKind::BlockFree(free));
            }
            Op::FreeCompleted(id) => {
                if let Some(event) = self.waits.remove(&id) {
                    self.wait(event, WaitAction::Query, 0);
                }
            }
            Op::Oom(idx) => {
                let oom = stream.ooms[idx as usize];
                let stack = stack(oom.stack);
                let of_stream = oom.stream.and_then(|at| stream.streams.get(usize::from(at.0)).copied());
                self.call(Action::MemInfo, 6, 0, oom.device_free, 0, stack);
                let oom = BlockOom {
                    device: self.device,
                    bytes: Bytes(oom.rounded),
                    requested: None,
                    stream: of_stream,
                    allocated: Bytes(self.allocated),
                    reserved: Bytes(self.reserved),
                };
                self.push(stack, EventKind::BlockOom(oom));
            }
            Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) => {}
        }
    }

    fn alloc(&mut self, stream: &OpStream, id: AllocId) {
        let allocation = stream.allocation(id);
        let bytes = self.sizes[id.0 as usize];
        self.allocated += bytes;
        let block = BlockAlloc {
            device: self.device,
            addr: allocation.address,
            bytes: Bytes(bytes),
            requested: Some(Bytes(allocation.requested)),
            stream: stream.streams.get(usize::from(allocation.stream.0)).copied(),
            allocated: Bytes(self.allocated),
            reserved: Bytes(self.reserved),
        };
        self.push(stack(allocation.stack), EventKind::BlockAlloc(block));
    }

    fn driver(&mut self, event: &DriverEvent, stack: StackId) {
        match event.call {
            DriverCall::Alloc => self.segment_alloc(event.address, event.bytes, stack),
            DriverCall::Free => {
                self.reserved = self.reserved.saturating_sub(event.bytes);
                self.call(Action::Free, 1, event.address, 0, 0, stack);
            }
            DriverCall::Map => self.map(event.address, event.bytes, stack),
            DriverCall::Unmap => self.unmap(event.address, event.bytes, stack),
        }
    }

    fn segment_alloc(&mut self, address: u64, bytes: u64, stack: StackId) {
        self.reserved = self.reserved.saturating_add(bytes);
        self.call(Action::Alloc, 0, address, bytes, 0, stack);
    }

    fn map(&mut self, address: u64, bytes: u64, stack: StackId) {
        let page = if bytes.is_multiple_of(LARGE_PAGE) { LARGE_PAGE } else { PAGE };
        let mut at = address;
        let end = address.saturating_add(bytes);
        while at < end {
            let piece = page.min(end - at);
            self.map_piece(at, piece, stack);
            at += piece;
        }
        self.reserved = self.reserved.saturating_add(bytes);
        self.call(Action::SetAccess, 4, address, bytes, 0, stack);
    }

    fn map_piece(&mut self, address: u64, bytes: u64, stack: StackId) {
        self.n_handles += 1;
        let handle = self.n_handles + ((self.device as u64) << 48);
        self.call(Action::Create, 2, 0, bytes, handle, stack);
        self.call(Action::Map, 4, address, bytes, handle, stack);
        self.pieces.insert(address, (bytes, handle));
    }

    /// What a range cuts in two is mapped again beside it: a snapshot does not say how large the pieces were.
    fn unmap(&mut self, address: u64, bytes: u64, stack: StackId) {
        let end = address.saturating_add(bytes);
        let inside =
            self.pieces.range(..end).rev().take_while(|(start, (length, _))| *start + length > address);
        let inside: Vec<(u64, u64, u64)> =
            inside.map(|(start, (length, handle))| (*start, *length, *handle)).collect();
        for (start, length, handle) in inside.into_iter().rev() {
            self.pieces.remove(&start);
            self.call(Action::Unmap, 5, start, length, handle, stack);
            self.call(Action::Release, 3, 0, 0, handle, stack);
            if start < address {
                self.map_piece(start, address - start, stack);
            }
            if start + length > end {
                self.map_piece(end, start + length - end, stack);
            }
        }
        self.reserved = self.reserved.saturating_sub(bytes);
    }

    fn call(&mut self, action: Action, api: u32, addr: u64, bytes: u64, handle: u64, stack: StackId) {
        let call = succeeded(action, api, self.device, (addr, bytes, handle));
        self.push(stack, EventKind::Call(call));
    }

    fn wait(&mut self, event: u64, action: WaitAction, result: i32) {
        self.push(StackId(0), EventKind::Wait(Wait { event, stream: 0, action, result }));
    }

    fn push(&mut self, stack: StackId, kind: EventKind) {
        self.events.push(Event { time: Nanos(self.now), thread: self.thread, stack, kind });
    }
}

/// How large each block was.
fn sizes(stream: &OpStream) -> Vec<u64> {
    let rounded = |requested: u64| requested.next_multiple_of(512).max(512);
    let mut sizes: Vec<u64> =
        stream.allocations.iter().map(|allocation| rounded(allocation.requested)).collect();
    if !matches!(stream.history, History::Broken(_)) {
        let oldest = stream.settings.torch_version.or(stream.settings.torch_at_least);
        let mut best = replayed(stream, NEWEST);
        if let Some(oldest) = oldest.filter(|version| *version != NEWEST) {
            let other = replayed(stream, oldest);
            if other.len() > best.len() {
                best = other;
            }
        }
        for (id, bytes) in best {
            sizes[id.0 as usize] = bytes;
        }
    }
    for segment in stream.initial.iter().chain(&stream.final_layout) {
        for block in &segment.blocks {
            if let Some(id) = block.alloc {
                sizes[id.0 as usize] = block.bytes;
            }
        }
    }
    sizes
}

/// The sizes of the blocks that a replay puts where they really were.
fn replayed(stream: &OpStream, version: (u8, u8)) -> Vec<(AllocId, u64)> {
    struct Sizes<'a> {
        stream: &'a OpStream,
        found: Vec<(AllocId, u64)>,
    }
    impl Observer for Sizes<'_> {
        fn placed(&mut self, _op: usize, id: AllocId, placement: Placement, _: &Device) -> ControlFlow<()> {
            if placement.address == self.stream.allocation(id).address {
                self.found.push((id, placement.bytes));
            }
            ControlFlow::Continue(())
        }
    }
    let Some(profile) = profile(version) else { return vec![] };
    let options = parse(stream.settings.options.as_deref().unwrap_or(""), profile).unwrap_or_default();
    let mut policy = Torch::new(options, *profile, stream.streams.len(), stream.pools.len());
    let mut device = Device::new(u64::MAX, None, Box::new(Recorded::new(&stream.driver)));
    let mut sizes = Sizes { stream, found: vec![] };
    run(stream, &mut policy, &mut device, &mut sizes);
    sizes.found
}

/// What of expandable segments was mapped before the history: the end, with every call undone.
fn mapped_at_start(stream: &OpStream) -> Vec<(u64, u64)> {
    let mut mapped = Ranges::default();
    for segment in stream.final_layout.iter().filter(|segment| segment.expandable) {
        mapped.add(segment.address, segment.address.saturating_add(segment.bytes));
    }
    for event in stream.driver.iter().rev() {
        let end = event.address.saturating_add(event.bytes);
        match event.call {
            DriverCall::Map => mapped.remove(event.address, end),
            DriverCall::Unmap => mapped.add(event.address, end),
            DriverCall::Alloc | DriverCall::Free => {}
        }
    }
    mapped.0.into_iter().collect()
}

/// Disjoint ranges: start to end.
#[derive(Default)]
struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    fn add(&mut self, from: u64, to: u64) {
        self.remove(from, to);
        self.0.insert(from, to);
    }

    fn remove(&mut self, from: u64, to: u64) {
        let overlapping = self.0.range(..to).rev().take_while(|(_, end)| **end > from);
        let overlapping: Vec<(u64, u64)> = overlapping.map(|(start, end)| (*start, *end)).collect();
        for (start, end) in overlapping {
            self.0.remove(&start);
            if start < from {
                self.0.insert(start, from);
            }
            if end > to {
                self.0.insert(to, end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Ranges;

    #[test]
    fn ranges_are_cut_and_joined_by_nothing_else() {
        let mut ranges = Ranges::default();
        ranges.add(0, 10);
        ranges.add(20, 30);
        ranges.remove(5, 25);
        assert_eq!(ranges.0.into_iter().collect::<Vec<_>>(), [(0, 5), (25, 30)]);
    }
}
