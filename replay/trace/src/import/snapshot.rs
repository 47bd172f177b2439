//! PyTorch memory snapshots (`torch.cuda.memory._dump_snapshot`), plain or gzip.
//!
//! The rows of the pickle become ops. What a snapshot does not say is worked out: which pool a request went to follows
//! from the segment that its address lies in, `empty_cache` from segments that were given back without need, and
//! the state at the start from running the history backwards.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gputrace_schemas::reader::looks_like_a_trace;
use gputrace_sim::ops::{
    AllocId, Allocation, Builder, DriverCall, Frame, History, LayoutBlock, LayoutSegment, Op, OpStream,
    PoolIdx, RecordedOom, RecordedSettings, StackId, Stacks, StreamIdx, TooMany,
};
use rustc_hash::FxHashMap;

use super::host::{self, Host};
use super::pickle::{self, Heap, MISSING, PickleError, RawEntry, Value};
use super::{HIGHEST, LARGEST, LARGEST_REFUSED, LARGEST_SUM, Trace};
use crate::files;

/// Why a snapshot could not be imported.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file could not be opened.
    #[error("{path}: {cause}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        cause: std::io::Error,
    },
    /// The file is not a pickle that can be read.
    #[error("{path} {cause}")]
    Pickle {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        cause: PickleError,
    },
    /// The pickle is not a snapshot.
    #[error("{path} is a pickle, but not a PyTorch memory snapshot: {what}")]
    NotASnapshot {
        /// The file.
        path: PathBuf,
        /// What is missing.
        what: String,
    },
    /// The file is a trace of ours that cannot be read.
    #[error(transparent)]
    Trace {
        /// Why not.
        source: gputrace_schemas::reader::Error,
    },
    /// A line of a log is not an event.
    #[error("{path} line {number}: `{text}` is not an event of an RMM log")]
    Line {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        number: u64,
        /// Its beginning.
        text: String,
    },
    /// The snapshot cannot be numbered.
    #[error("{path}: {source}")]
    TooMany {
        /// The file.
        path: PathBuf,
        /// What there is too much of.
        source: TooMany,
    },
}

/// What a snapshot is that says who holds what, and not how it came to that.
const NO_HISTORY: &str = "it has no history: call torch.cuda.memory._record_memory_history() before the program allocates, \
     and torch.cuda.memory._dump_snapshot(\"snapshot.pickle\") at the end";

/// Reads a snapshot file.
///
/// # Errors
/// When the file cannot be opened, is damaged, is hostile, or is not a snapshot.
pub fn read_snapshot(path: &Path) -> Result<Trace, ImportError> {
    from_reader(uncompressed(path)?, path)
}

/// Whether times and stacks of everything are wanted, which a simulation does not need.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Ops,
    Extras,
}

fn uncompressed(path: &Path) -> Result<Box<dyn Read>, ImportError> {
    let open = |cause| ImportError::Open { path: path.into(), cause };
    let mut file = BufReader::new(files::open(path).map_err(open)?);
    let is_gzip = file.fill_buf().map_err(open)?.starts_with(&[0x1f, 0x8b]);
    if !is_gzip {
        return Ok(Box::new(file));
    }
    if is_zipped_trace(path) {
        return Err(open(io::Error::other("a gputrace trace in gzip: gunzip it first")));
    }
    Ok(Box::new(flate2::bufread::MultiGzDecoder::new(file)))
}

/// Whether a trace was compressed. Damage is reported where the file is read.
fn is_zipped_trace(path: &Path) -> bool {
    let mut first = [0; 8];
    let read = files::open(path)
        .and_then(|file| flate2::bufread::MultiGzDecoder::new(BufReader::new(file)).read_exact(&mut first));
    read.is_ok() && looks_like_a_trace(&first)
}

/// Reads a snapshot from uncompressed bytes; `path` is for messages.
///
/// # Errors
/// As [`read_snapshot`].
fn from_reader(source: impl Read, path: &Path) -> Result<Trace, ImportError> {
    Ok(wanted(source, path, Wanted::Ops)?.requests())
}

/// Reads a snapshot file, with what a simulation does not need too.
///
/// # Errors
/// As [`read_snapshot`].
pub(super) fn read_with_extras(path: &Path) -> Result<Snapshot, ImportError> {
    with_extras(uncompressed(path)?, path)
}

/// What a simulation does not need of a device's rows: when, and from where.
#[derive(Default)]
pub(super) struct Extras {
    /// For each op that a row made (not those that were inferred), microseconds since 1970; 0 where not recorded.
    pub(super) op_times: Vec<i64>,
    /// The same for each driver call.
    pub(super) driver_times: Vec<i64>,
    /// For each driver call.
    pub(super) driver_stacks: Vec<StackId>,
}

/// All that is in a snapshot.
pub(super) struct Snapshot {
    pub(super) trace: Trace,
    /// One for each of the trace's devices.
    pub(super) extras: Vec<Extras>,
    /// Pinned memory of the host.
    pub(super) host: Host,
    pub(super) stacks: Arc<Stacks>,
}

impl Snapshot {
    /// What the devices were asked.
    pub(super) fn requests(mut self) -> Trace {
        self.trace.notes.splice(0..0, self.host.left_out());
        self.trace
    }
}

pub(super) fn with_extras(source: impl Read, path: &Path) -> Result<Snapshot, ImportError> {
    wanted(source, path, Wanted::Extras)
}

fn wanted(source: impl Read, path: &Path, wanted: Wanted) -> Result<Snapshot, ImportError> {
    let file_bytes =
        files::open(path).and_then(|file| file.metadata()).map_or(u64::MAX, |metadata| metadata.len());
    let (mut heap, root) =
        pickle::read(source, file_bytes).map_err(|cause| ImportError::Pickle { path: path.into(), cause })?;
    let not = |what: &str| ImportError::NotASnapshot { path: path.into(), what: what.into() };
    let segments = heap.get(root, "segments").ok_or_else(|| not("it has no `segments`"))?;
    let segments = heap.elements(segments).ok_or_else(|| not("`segments` is not a list"))?.to_vec();
    let traces = match heap.get(root, "device_traces") {
        Some(traces) => heap.elements(traces).ok_or_else(|| not("`device_traces` is not a list"))?.to_vec(),
        None => Vec::new(),
    };
    let (stacks, stack_of_list) = stacks(&heap);
    let stacks = Arc::new(stacks);
    let settings = settings(&heap, root);

    let mut segments_of: BTreeMap<u32, Vec<RawSegment>> = BTreeMap::new();
    for segment in segments {
        let segment = RawSegment::read(&heap, segment)
            .ok_or_else(|| not("a segment has no address or size, or one that no device has"))?;
        segments_of.entry(segment.device).or_default().push(segment);
    }
    let n_devices = traces.len().max(segments_of.keys().last().map_or(0, |last| *last as usize + 1));
    if n_devices > 4096 {
        return Err(not("it has more than 4,096 devices"));
    }
    let rows_of = |trace: &Value| -> Vec<u32> {
        let elements = heap.elements(*trace).unwrap_or(&[]);
        elements.iter().filter_map(|value| heap.entry_index(*value)).collect()
    };
    let mut rows_of: Vec<Vec<u32>> = traces.iter().map(rows_of).collect();
    let overflowed = overflowed(&heap, root);
    let stack = |frames: Value| stack_of(&stack_of_list, frames);
    let of_host = host::Keys::read(&heap, root, &stack).map_err(not)?;
    heap.forget_ways();
    let entries = std::mem::take(&mut heap.entries);
    let host = of_host.events(&heap, &entries, &stack);
    let actions = Actions::of(&heap);
    let mut snapshot = Trace { devices: Vec::new(), notes: host.notes.clone() };
    let mut extras = Vec::new();
    for device in 0..n_devices as u32 {
        let rows = rows_of.get_mut(device as usize).map(std::mem::take).unwrap_or_default();
        let segments = segments_of.remove(&device).unwrap_or_default();
        if rows.is_empty() && segments.is_empty() {
            continue;
        }
        let source = Source { heap: &heap, actions: &actions, entries: &entries, stacks: &stack_of_list };
        let mut importer = Importer::new(source, device, overflowed, wanted);
        importer.builder.stream_mut().settings = settings.clone();
        let (mut stream, notes, extra) = importer
            .import(&rows, &segments)
            .map_err(|source| ImportError::TooMany { path: path.into(), source })?;
        stream.stacks = stacks.clone();
        snapshot.notes.extend(notes.into_iter().map(|note| format!("device {device}: {note}")));
        snapshot.devices.push(stream);
        extras.push(extra);
    }
    Ok(Snapshot { trace: snapshot, extras, host, stacks })
}

fn overflowed(heap: &Heap, root: Value) -> bool {
    let settings = heap.get(root, "allocator_settings");
    let flag = settings.and_then(|settings| heap.get(settings, "trace_alloc_overflowed"));
    flag.and_then(|flag| heap.int(flag)) == Some(1)
}

/// Frames and stacks, each once, and which stack each list of the pickle is.
fn stacks(heap: &Heap) -> (Stacks, FxHashMap<u32, StackId>) {
    let text: Vec<Arc<str>> = heap.strings.iter().map(|text| Arc::from(&**text)).collect();
    let named = |index: u32| text.get(index as usize).cloned().unwrap_or_else(|| Arc::from("?"));
    let mut stacks = Stacks::default();
    let mut known_frames: FxHashMap<(u32, u32, i64), u32> = FxHashMap::default();
    let frame_ids: Vec<u32> = heap
        .frames
        .iter()
        .map(|frame| {
            *known_frames.entry((frame.name, frame.file, frame.line)).or_insert_with(|| {
                let line = u32::try_from(frame.line).unwrap_or(0);
                stacks.frames.push(Frame { name: named(frame.name), file: named(frame.file), line });
                stacks.frames.len() as u32 - 1
            })
        })
        .collect();
    let mut known_lists: FxHashMap<Box<[u32]>, StackId> = FxHashMap::default();
    let mut of_list = FxHashMap::default();
    for (index, list) in heap.lists.iter().enumerate() {
        let frames: Option<Box<[u32]>> = list
            .iter()
            .map(|value| heap.frame_index(*value).map(|frame| frame_ids[frame as usize]))
            .collect();
        let Some(frames) = frames.filter(|frames| !frames.is_empty()) else { continue };
        let id = *known_lists.entry(frames).or_insert_with_key(|frames| {
            stacks.lists.push(frames.clone());
            StackId(stacks.lists.len() as u32 - 1)
        });
        of_list.insert(index as u32, id);
    }
    (stacks, of_list)
}

/// What `allocator_settings` and the presence of keys say. Measured on the wheels of all releases.
fn settings(heap: &Heap, root: Value) -> RecordedSettings {
    let mut settings = RecordedSettings::default();
    let recorded = heap.get(root, "allocator_settings");
    if let Some(recorded) = recorded {
        settings.torch_at_least = Some((2, 3));
        let options = heap.get(recorded, "PYTORCH_CUDA_ALLOC_CONF").and_then(|text| heap.text(text));
        settings.options = options.map(str::to_string);
        if heap.get(recorded, "graph_capture_record_stream_reuse").is_some() {
            settings.torch_at_least = Some((2, 9));
        }
    }
    if heap.get(root, "external_annotations").is_some() {
        settings.torch_at_least = settings.torch_at_least.max(Some((2, 5)));
    }
    for (key, version) in [("compile_context", (2, 8)), ("user_metadata", (2, 10)), ("annotate", (2, 14))] {
        if heap.strings.iter().any(|text| &**text == key) {
            settings.torch_at_least = settings.torch_at_least.max(Some(version));
        }
    }
    settings
}

/// A segment as the snapshot lists it.
struct RawSegment {
    device: u32,
    address: u64,
    bytes: u64,
    stream: u64,
    pool: (u64, u64),
    small: bool,
    expandable: bool,
    blocks: Vec<RawBlock>,
}

struct RawBlock {
    address: u64,
    bytes: u64,
    requested: u64,
    active: bool,
    pending: bool,
    frames: Value,
}

impl RawSegment {
    fn read(heap: &Heap, value: Value) -> Option<RawSegment> {
        let number =
            |value, key| heap.get(value, key).and_then(|found| heap.int(found)).map(|int| int as u64);
        let address = number(value, "address")?;
        let mut at = address;
        let blocks = heap.get(value, "blocks").and_then(|blocks| heap.elements(blocks)).unwrap_or(&[]);
        let blocks = blocks
            .iter()
            .filter_map(|block| {
                let bytes = number(*block, "size")?;
                let start = number(*block, "address").unwrap_or(at);
                at = start.checked_add(bytes).filter(|end| *end <= HIGHEST && bytes <= LARGEST)?;
                let state =
                    heap.get(*block, "state").and_then(|state| heap.text(state)).unwrap_or("inactive");
                Some(RawBlock {
                    address: start,
                    bytes,
                    requested: number(*block, "requested_size").unwrap_or(bytes).min(bytes),
                    active: state.starts_with("active"),
                    pending: state.starts_with("active") && state != "active_allocated",
                    frames: frames_of(heap, *block),
                })
            })
            .collect();
        let total = number(value, "total_size")?;
        address.checked_add(total).filter(|end| *end <= HIGHEST && total <= LARGEST)?;
        let kind = heap.get(value, "segment_type").and_then(|kind| heap.text(kind));
        Some(RawSegment {
            device: u32::try_from(number(value, "device").unwrap_or(0))
                .ok()
                .filter(|device| *device < 4096)?,
            address,
            bytes: total,
            stream: number(value, "stream").unwrap_or(0),
            pool: heap.get(value, "segment_pool_id").and_then(|pool| pair(heap, pool)).unwrap_or((0, 0)),
            small: kind == Some("small"),
            expandable: number(value, "is_expandable") == Some(1),
            blocks,
        })
    }
}

/// From where a block was asked for: in its `frames`, or until PyTorch 2.0 in those of its `history`, whose newest entry is the first.
fn frames_of(heap: &Heap, block: Value) -> Value {
    let frames = |of: Value| {
        let frames = heap.get(of, "frames")?;
        heap.elements(frames).is_some_and(|all| !all.is_empty()).then_some(frames)
    };
    let of_history = || {
        let history = heap.elements(heap.get(block, "history")?)?;
        history.iter().find_map(|entry| frames(*entry))
    };
    frames(block).or_else(of_history).unwrap_or(Value::None)
}

fn pair(heap: &Heap, value: Value) -> Option<(u64, u64)> {
    match heap.elements(value)? {
        [first, second] => Some((heap.int(*first)? as u64, heap.int(*second)? as u64)),
        _ => None,
    }
}

/// The action strings of this pickle.
struct Actions(FxHashMap<u32, Action>);

#[derive(Clone, Copy, PartialEq)]
enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    Driver(DriverCall),
    Oom,
}

impl Actions {
    fn of(heap: &Heap) -> Actions {
        let named = |text: &str| match text {
            "alloc" => Some(Action::Alloc),
            "free_requested" => Some(Action::FreeRequested),
            "free_completed" => Some(Action::FreeCompleted),
            "segment_alloc" => Some(Action::Driver(DriverCall::Alloc)),
            "segment_free" => Some(Action::Driver(DriverCall::Free)),
            "segment_map" => Some(Action::Driver(DriverCall::Map)),
            "segment_unmap" => Some(Action::Driver(DriverCall::Unmap)),
            "oom" => Some(Action::Oom),
            _ => None, // snapshot, annotate: nothing that the allocator did.
        };
        let strings = heap.strings.iter().enumerate();
        Actions(strings.filter_map(|(index, text)| Some((index as u32, named(text)?))).collect())
    }
}

struct Source<'a> {
    heap: &'a Heap,
    actions: &'a Actions,
    entries: &'a [RawEntry],
    stacks: &'a FxHashMap<u32, StackId>,
}

impl Source<'_> {
    fn stack(&self, frames: Value) -> StackId {
        stack_of(self.stacks, frames)
    }
}

fn stack_of(stacks: &FxHashMap<u32, StackId>, frames: Value) -> StackId {
    match frames {
        Value::List(list) => stacks.get(&list).copied().unwrap_or(StackId::NONE),
        _ => StackId::NONE,
    }
}

/// Turns the rows of one device into ops.
struct Importer<'a> {
    source: Source<'a>,
    builder: Builder,
    overflowed: bool,
    wanted: Wanted,
    live: FxHashMap<u64, AllocId>,
    pending: FxHashMap<u64, AllocId>,
    at_start: Vec<AllocId>,
    /// What is mapped now: start to (end, segment).
    mapped: BTreeMap<u64, (u64, u32)>,
    /// Everything that was ever mapped of an expandable reservation: start to (end, segment).
    envelopes: BTreeMap<u64, (u64, u32)>,
    contradictions: Vec<String>,
    n_contradictions: usize,
    /// Bytes of all rows so far.
    sum: u64,
    extras: Extras,
}

impl<'a> Importer<'a> {
    fn new(source: Source<'a>, device: u32, overflowed: bool, wanted: Wanted) -> Importer<'a> {
        Importer {
            source,
            builder: Builder::new(device),
            overflowed,
            wanted,
            live: FxHashMap::default(),
            pending: FxHashMap::default(),
            at_start: Vec::new(),
            mapped: BTreeMap::new(),
            envelopes: BTreeMap::new(),
            contradictions: Vec::new(),
            n_contradictions: 0,
            sum: 0,
            extras: Extras::default(),
        }
    }

    fn import(
        mut self,
        rows: &[u32],
        segments: &[RawSegment],
    ) -> Result<(OpStream, Vec<String>, Extras), TooMany> {
        let n_at_start = self.segments_at_start(rows, segments)?;
        for row in rows {
            let entry = self.source.entries[*row as usize];
            self.row(*row, entry)?;
            if self.wanted == Wanted::Extras {
                self.note_extras(entry);
            }
        }
        self.pools_of_segments(segments)?;
        self.layout_at_end(segments)?;
        self.layout_at_start(n_at_start);
        let extras = std::mem::take(&mut self.extras);
        // Rows that say nothing, as the `snapshot` of PyTorch 2.0, are no history.
        let is_empty = self.builder.stream_mut().ops.is_empty();
        let (stream, notes) = self.finish(is_empty, n_at_start);
        Ok((stream, notes, extras))
    }

    fn contradiction(&mut self, what: String) {
        self.n_contradictions += 1;
        if self.contradictions.len() < 3 {
            self.contradictions.push(what);
        }
    }

    fn segment(&mut self, address: u64, bytes: u64, stream: StreamIdx) -> u32 {
        let segments = &mut self.builder.stream_mut().segments;
        segments.push(gputrace_sim::ops::RecordedSegment { address, bytes, stream, pool: None });
        segments.len() as u32 - 1
    }

    /// Segments that were there before the history: given back without having been obtained, or still there
    /// without having been obtained.
    fn segments_at_start(&mut self, rows: &[u32], segments: &[RawSegment]) -> Result<u32, TooMany> {
        let mut obtained: FxHashMap<u64, ()> = FxHashMap::default();
        let mut before: Vec<(u64, u64, u64)> = Vec::new();
        for row in rows {
            let entry = &self.source.entries[*row as usize];
            match self.source.actions.0.get(&entry.action) {
                Some(Action::Driver(DriverCall::Alloc)) => {
                    obtained.insert(entry.address as u64, ());
                }
                Some(Action::Driver(DriverCall::Free))
                    if obtained.remove(&(entry.address as u64)).is_none() =>
                {
                    let (address, bytes) = (entry.address as u64, entry.bytes.max(0) as u64);
                    if address <= HIGHEST && bytes <= LARGEST {
                        before.push((address, bytes, self.source.heap.stream(*entry)));
                    }
                }
                _ => {}
            }
        }
        let still_there = segments.iter().filter(|segment| !segment.expandable);
        for segment in still_there.filter(|segment| !obtained.contains_key(&segment.address)) {
            before.push((segment.address, segment.bytes, segment.stream));
        }
        before.sort_unstable();
        for (address, bytes, stream) in before {
            let stream = self.builder.stream(stream)?;
            let index = self.segment(address, bytes, stream);
            self.mapped.insert(address, (address.saturating_add(bytes), index));
        }
        Ok(self.mapped.len() as u32)
    }

    fn row(&mut self, row: u32, entry: RawEntry) -> Result<(), TooMany> {
        let Some(action) = self.source.actions.0.get(&entry.action).copied() else { return Ok(()) };
        let address = entry.address as u64;
        let bytes = if entry.bytes == MISSING { 0 } else { entry.bytes.max(0) as u64 };
        let stream = self.builder.stream(self.source.heap.stream(entry))?;
        let largest = if action == Action::Oom { LARGEST_REFUSED } else { LARGEST };
        self.sum = self.sum.saturating_add(bytes);
        if bytes > largest || self.sum > LARGEST_SUM || (action != Action::Oom && address > HIGHEST) {
            self.contradiction(format!("{bytes} bytes at address {address:#x}, which no device has"));
            return Ok(());
        }
        match action {
            Action::Alloc => {
                if let Some(overwritten) =
                    self.live.remove(&address).or_else(|| self.pending.remove(&address))
                {
                    self.contradiction(format!("address {address:#x} is allocated twice"));
                    self.builder.op(Op::FreeRequested(overwritten));
                    self.builder.op(Op::FreeCompleted(overwritten));
                }
                let allocation = self.allocation(entry, address, bytes, stream);
                let id = self.builder.alloc(allocation);
                self.live.insert(address, id);
                self.note_segment(address, entry.pool())?;
            }
            Action::FreeRequested => {
                let id = match self.live.remove(&address) {
                    Some(id) => id,
                    None => self.live_before(entry, address, bytes, stream)?,
                };
                self.builder.op(Op::FreeRequested(id));
                self.pending.insert(address, id);
            }
            Action::FreeCompleted => {
                let id = match self.pending.remove(&address) {
                    Some(id) => id,
                    None => {
                        let id = match self.live.remove(&address) {
                            Some(id) => id,
                            None => self.live_before(entry, address, bytes, stream)?,
                        };
                        self.builder.op(Op::FreeRequested(id));
                        id
                    }
                };
                self.builder.op(Op::FreeCompleted(id));
            }
            Action::Driver(call) => self.driver(call, address, bytes, stream),
            Action::Oom => {
                let device_free = self.source.heap.device_free(row).unwrap_or(0);
                let stack = self.source.stack(entry.frames());
                self.builder.oom(RecordedOom {
                    rounded: bytes,
                    device_free,
                    stream: Some(stream),
                    pool: PoolIdx::DEFAULT,
                    stack,
                });
            }
        }
        Ok(())
    }

    fn note_extras(&mut self, entry: RawEntry) {
        let time = if entry.time_us == MISSING { 0 } else { entry.time_us };
        let stack = self.source.stack(entry.frames());
        let (stream, extras) = (self.builder.stream_mut(), &mut self.extras);
        extras.op_times.resize(stream.ops.len(), time);
        extras.driver_times.resize(stream.driver.len(), time);
        extras.driver_stacks.resize(stream.driver.len(), stack);
    }

    fn allocation(&self, entry: RawEntry, address: u64, bytes: u64, stream: StreamIdx) -> Allocation {
        let stack = self.source.stack(entry.frames());
        Allocation { requested: bytes, address, stack, stream, pool: PoolIdx::DEFAULT }
    }

    /// An allocation that was live when the history began.
    fn live_before(
        &mut self,
        entry: RawEntry,
        address: u64,
        bytes: u64,
        stream: StreamIdx,
    ) -> Result<AllocId, TooMany> {
        let allocation = self.allocation(entry, address, bytes, stream);
        let id = self.builder.allocation(Allocation { stack: StackId::NONE, ..allocation });
        self.note_segment(address, entry.pool())?;
        self.at_start.push(id);
        Ok(id)
    }

    /// Which segment the newest allocation lies in, and which pool that is where the entry says so.
    fn note_segment(&mut self, address: u64, pool: Value) -> Result<(), TooMany> {
        let within = |map: &BTreeMap<u64, (u64, u32)>| {
            let (_, (end, segment)) = map.range(..=address).next_back()?;
            (*end > address).then_some(*segment)
        };
        let segment = within(&self.mapped).or_else(|| within(&self.envelopes));
        let pool = match pair(self.source.heap, pool) {
            Some(pool) => Some(self.builder.pool(pool)?),
            None => None,
        };
        let stream = self.builder.stream_mut();
        stream.segment_of.push(segment.unwrap_or(gputrace_sim::ops::NO_SEGMENT));
        if let (Some(pool), Some(segment)) = (pool, segment) {
            stream.segments[segment as usize].pool = Some(pool);
        }
        Ok(())
    }

    fn driver(&mut self, call: DriverCall, address: u64, bytes: u64, stream: StreamIdx) {
        let end = address.saturating_add(bytes);
        let segment = match call {
            DriverCall::Alloc => {
                let segment = self.segment(address, bytes, stream);
                self.mapped.insert(address, (end, segment));
                segment
            }
            DriverCall::Free => match self.mapped.remove(&address) {
                Some((_, segment)) => segment,
                None => {
                    self.contradiction(format!("segment {address:#x} is released twice"));
                    return;
                }
            },
            DriverCall::Map | DriverCall::Unmap => self.reservation(address, end, stream),
        };
        self.builder.driver(call, address, bytes, segment);
    }

    /// The expandable segment that a mapped range belongs to: the one that it touches or lies in.
    fn reservation(&mut self, address: u64, end: u64, stream: StreamIdx) -> u32 {
        let mut below = self.envelopes.range(..=address).rev();
        let touching = below.find(|(_, (stop, _))| *stop >= address).map(|(start, found)| (*start, *found));
        let (start, (stop, segment)) = match touching {
            Some(touching) => touching,
            None => (address, (end, self.segment(address, 0, stream))),
        };
        let stop = stop.max(end);
        self.envelopes.insert(start, (stop, segment));
        self.builder.stream_mut().segments[segment as usize].bytes = stop - start;
        segment
    }

    /// The snapshot names the pools of the segments that are there at the end.
    fn pools_of_segments(&mut self, segments: &[RawSegment]) -> Result<(), TooMany> {
        for segment in segments {
            let pool = self.builder.pool(segment.pool)?;
            let known = if segment.expandable {
                let below = self.envelopes.range(..=segment.address).next_back();
                below.filter(|(_, (end, _))| *end > segment.address).map(|(_, (_, index))| *index)
            } else {
                self.mapped.get(&segment.address).map(|(_, index)| *index)
            };
            if let Some(index) = known {
                self.builder.stream_mut().segments[index as usize].pool = Some(pool);
            }
        }
        Ok(())
    }

    fn layout_at_end(&mut self, segments: &[RawSegment]) -> Result<(), TooMany> {
        let mut layout = Vec::new();
        for segment in segments {
            let stream = self.builder.stream(segment.stream)?;
            let pool = self.builder.pool(segment.pool)?;
            let mut blocks = Vec::new();
            for block in &segment.blocks {
                let known =
                    self.live.get(&block.address).or_else(|| self.pending.get(&block.address)).copied();
                let alloc = match known {
                    None if block.active => {
                        let allocation = Allocation {
                            requested: block.requested,
                            address: block.address,
                            stack: self.source.stack(block.frames),
                            stream,
                            pool,
                        };
                        let id = self.builder.allocation(allocation);
                        self.note_segment(block.address, Value::None)?;
                        self.at_start.push(id);
                        if block.pending {
                            self.pending.insert(block.address, id);
                        } else {
                            self.live.insert(block.address, id);
                        }
                        Some(id)
                    }
                    known => known.filter(|_| block.active),
                };
                blocks.push(LayoutBlock { address: block.address, bytes: block.bytes, alloc });
            }
            layout.push(LayoutSegment {
                address: segment.address,
                bytes: segment.bytes,
                stream,
                pool,
                small: segment.small,
                expandable: segment.expandable,
                blocks,
            });
        }
        self.builder.stream_mut().final_layout = layout;
        Ok(())
    }

    /// The history run backwards: what was live at its start, in the segments that were there then.
    fn layout_at_start(&mut self, n_segments: u32) {
        let at_start = std::mem::take(&mut self.at_start);
        let stream = self.builder.stream_mut();
        let mut by_address: Vec<(u64, AllocId)> =
            at_start.iter().map(|id| (stream.allocation(*id).address, *id)).collect();
        by_address.sort_unstable();
        let sizes_at_end: FxHashMap<AllocId, u64> = stream
            .final_layout
            .iter()
            .flat_map(|segment| &segment.blocks)
            .filter_map(|block| Some((block.alloc?, block.bytes)))
            .collect();
        let sizes_shown = sizes_shown_by_others(stream, &by_address);
        let mut layout = Vec::new();
        for segment in stream.segments.iter().take(n_segments as usize).copied() {
            let end = segment.address.saturating_add(segment.bytes);
            let from = by_address.partition_point(|(address, _)| *address < segment.address);
            let to = by_address.partition_point(|(address, _)| *address < end);
            let small = segment.bytes == gputrace_sim::device::PAGE;
            let mut blocks = Vec::new();
            let mut at = segment.address;
            for (index, (address, id)) in by_address[from..to].iter().enumerate() {
                if *address > at {
                    blocks.push(LayoutBlock { address: at, bytes: address - at, alloc: None });
                }
                let next = by_address[from..to].get(index + 1).map_or(end, |(next, _)| *next);
                let rounded = stream.allocation(*id).requested.next_multiple_of(512).max(512);
                let room = next - address;
                // What is too little to be split off belongs to the block.
                let splits =
                    if small { room - rounded.min(room) >= 512 } else { room - rounded.min(room) > 1 << 20 };
                let guess = if splits { rounded.min(room) } else { room };
                let known = sizes_at_end.get(id).or_else(|| sizes_shown.get(id)).copied();
                let bytes = known.unwrap_or(guess).min(room);
                blocks.push(LayoutBlock { address: *address, bytes, alloc: Some(*id) });
                at = address + bytes;
            }
            if at < end {
                blocks.push(LayoutBlock { address: at, bytes: end - at, alloc: None });
            }
            layout.push(LayoutSegment {
                address: segment.address,
                bytes: segment.bytes,
                stream: segment.stream,
                pool: segment.pool.unwrap_or(PoolIdx::DEFAULT),
                small,
                expandable: false,
                blocks,
            });
        }
        stream.initial = layout;
        stream.initial_allocs = by_address.into_iter().map(|(_, id)| id).collect();
    }

    fn finish(mut self, is_empty: bool, n_at_start: u32) -> (OpStream, Vec<String>) {
        let mut notes = Vec::new();
        let starts_late = n_at_start > 0 || !self.builder.stream_mut().initial_allocs.is_empty();
        let history = if is_empty {
            History::Broken(NO_HISTORY.into())
        } else if self.n_contradictions > 0 {
            History::Broken(format!(
                "{} events contradict each other ({}): events are missing (skip_actions?)",
                self.n_contradictions,
                self.contradictions.join("; ")
            ))
        } else if starts_late {
            History::StartsLate
        } else {
            History::Complete
        };
        if self.overflowed {
            notes.push("its ring was full and the oldest events are lost: raise max_entries".into());
        }
        self.builder.stream_mut().history = history;
        let mut stream = self.builder.finish();
        super::trims::insert_trims(&mut stream);
        if !matches!(stream.history, History::Broken(_)) {
            notes.extend(super::pools::infer(&mut stream));
        }
        (stream, notes)
    }
}

/// Bytes of blocks that were in use at the start, where others were placed behind them while they were: there they end.
/// Less than a MiB of a block is more than was asked for.
fn sizes_shown_by_others(stream: &OpStream, at_start: &[(u64, AllocId)]) -> FxHashMap<AllocId, u64> {
    const MOST_SURPLUS: u64 = 1 << 20;
    let mut live: BTreeMap<u64, AllocId> = at_start.iter().copied().collect();
    let mut shown = FxHashMap::default();
    for op in &stream.ops {
        match *op {
            Op::Alloc(id) => {
                let address = stream.allocation(id).address;
                let Some((start, before)) =
                    live.range(..address).next_back().map(|(start, id)| (*start, *id))
                else {
                    continue;
                };
                let bytes = address - start;
                let least = stream.allocation(before).requested;
                if (least..=least.saturating_add(MOST_SURPLUS)).contains(&bytes)
                    && shown.get(&before).is_none_or(|known| bytes < *known)
                    && is_of_one_segment(stream, start, address)
                {
                    shown.insert(before, bytes);
                }
            }
            Op::FreeCompleted(id) => drop(live.remove(&stream.allocation(id).address)),
            Op::FreeRequested(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
        }
    }
    shown
}

fn is_of_one_segment(stream: &OpStream, one: u64, other: u64) -> bool {
    let mut segments = stream.segments.iter();
    segments.any(|segment| {
        let range = segment.address..segment.address.saturating_add(segment.bytes);
        range.contains(&one) && range.contains(&other)
    })
}
