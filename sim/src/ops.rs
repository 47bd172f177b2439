//! The simulator's input: what the program asked of its allocator, in order.
//!
//! An [`OpStream`] is made with a [`Builder`], from a recording or by hand; nothing here knows a file format.
//! Requests are the program's; addresses are kept only to check a simulation against what really happened.
//! Eight bytes for an op and 24 for an allocation, so that ten million events stay far below a gigabyte.

use std::collections::HashMap;
use std::sync::Arc;

pub use crate::stacks::{Frame, StackId, Stacks};

/// Index of an [`Allocation`] of an [`OpStream`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AllocId(pub u32);

/// Index into [`OpStream::streams`], which is sorted: comparing indices compares the handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamIdx(pub u16);

/// Index into [`OpStream::pools`]; 0 is the default pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolIdx(pub u16);

impl PoolIdx {
    /// The pool of everything that requests no pool of its own.
    pub const DEFAULT: PoolIdx = PoolIdx(0);
}

/// One thing that happened at the allocator, as seen under its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// The program asked for memory and got it.
    Alloc(AllocId),
    /// The program gave it back. Other streams may still use it.
    FreeRequested(AllocId),
    /// No stream uses it any more: it can be reused. When this happens is a fact of the GPU's timing.
    FreeCompleted(AllocId),
    /// The program asked to give cached memory back (`torch.cuda.empty_cache`).
    Trim,
    /// The program dropped a private pool (a CUDA graph, a `MemPool`): its cached segments may go at the next trim.
    ReleasePool(PoolIdx),
    /// The program changed how a private pool is used.
    ChangePool(PoolIdx, PoolChange),
    /// The program asked for memory and got an out-of-memory error: index into [`OpStream::ooms`].
    Oom(u32),
}

/// What a program may do with a private pool beside asking for memory and dropping it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolChange {
    /// Its cached segments are given back, if it was dropped (`emptyCache` of one pool, as a `MemPool` does at its end).
    Trim,
    /// Requests of others may use it before they fail (`use_on_oom`).
    ServeOthers,
    /// They no longer may.
    ServeNoOthers,
    /// Its blocks are handed out whole (`no_split`).
    KeepWhole,
}

/// One request that was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// The amount that the program requested, bytes, before any rounding.
    pub requested: u64,
    /// Where it really was.
    pub address: u64,
    /// The call stack of the request.
    pub stack: StackId,
    /// The stream that it may be used on without synchronisation.
    pub stream: StreamIdx,
    /// The pool that it was to come from.
    pub pool: PoolIdx,
}

/// One request that failed when it was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedOom {
    /// Bytes requested. PyTorch records them after rounding.
    pub rounded: u64,
    /// Bytes free on the device at that moment.
    pub device_free: u64,
    /// The stream of the request; none where nobody told.
    pub stream: Option<StreamIdx>,
    /// The pool of the request.
    pub pool: PoolIdx,
    /// The call stack of the request.
    pub stack: StackId,
}

/// The program asked how much memory of the device is free: what it did then may depend on the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    /// The call stack of the request.
    pub stack: StackId,
    /// How often.
    pub times: u64,
    /// A library asked, to choose an algorithm by the workspace that it needs.
    pub is_autotune: bool,
}

/// Memory of the device that the recorded allocator had no part in: contexts, code, other libraries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// Its owners.
    pub names: Vec<String>,
    /// In order.
    pub changes: Vec<OtherChange>,
    /// The driver told what it charged: contexts and code are among the names.
    pub is_charge_known: bool,
}

/// Somebody of [`Others`] held another amount than before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherChange {
    /// It happened after the op before this index and before (or within) the op at it.
    pub before_op: u32,
    /// Index into [`Others::names`].
    pub name: u32,
    /// Memory that it held from then on, bytes.
    pub bytes: u64,
}

impl Others {
    /// Who held what when an op was done: index into [`Others::names`], and bytes.
    pub fn at(&self, op: usize) -> Vec<u64> {
        let mut held = vec![0; self.names.len()];
        for change in self.changes.iter().take_while(|change| change.before_op as usize <= op) {
            held[change.name as usize] = change.bytes;
        }
        held
    }
}

/// A memory pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// PyTorch's id: (made for a CUDA graph, made by the user). (0, 0) is the default pool.
    pub id: (u64, u64),
}

impl Pool {
    /// A pool of which nothing is known but that its segments cannot have been of another: `number` tells several apart.
    pub fn guessed(number: u16) -> Pool {
        Pool { id: (0, u64::MAX - u64::from(number)) }
    }

    /// Whether nothing but addresses says that there was such a pool.
    pub fn is_guessed(self) -> bool {
        self.id.0 == 0 && self.id.1 >= u64::MAX - u64::from(u16::MAX)
    }

    /// Whether requests go to it because a stream is being captured into a CUDA graph.
    pub fn is_capture(self) -> bool {
        self.id.0 != 0
    }
}

/// What the allocator asked of the driver when the trace was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverCall {
    /// `cudaMalloc`.
    Alloc,
    /// `cudaFree`.
    Free,
    /// Pages mapped into an expandable segment.
    Map,
    /// Pages unmapped from an expandable segment.
    Unmap,
}

/// One [`DriverCall`] with its place in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverEvent {
    /// It happened after the op before this index and before (or within) the op at it.
    pub before_op: u32,
    /// What was called.
    pub call: DriverCall,
    /// Start of the segment or of the pages.
    pub address: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// The segment that it concerns: index into [`OpStream::segments`].
    pub segment: u32,
}

/// Something in the process's address space that the recorded allocator had no part in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nearby {
    /// Somebody else got device memory.
    Allocated {
        /// Where.
        address: u64,
        /// Length, bytes.
        bytes: u64,
    },
    /// Somebody else gave device memory back.
    Freed {
        /// Where.
        address: u64,
    },
    /// Something is mapped here: code, host memory, or regions of the driver, our own among them.
    Mapped {
        /// First byte.
        start: u64,
        /// Byte after the last.
        end: u64,
    },
    /// It no longer is.
    Unmapped {
        /// First byte.
        start: u64,
        /// Byte after the last.
        end: u64,
    },
}

/// One [`Nearby`] with its place in the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NearbyEvent {
    /// It happened after the op before this index and before (or within) the op at it.
    pub before_op: u32,
    /// It happened before the [`OpStream::driver`] call at this index.
    pub before_call: u32,
    /// The events.
    pub what: Nearby,
}

/// The process's address space beside the recorded allocator.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Surroundings {
    /// The driver places nothing above: the end of the widest gap when the trace began.
    pub ceiling: u64,
    /// In order.
    pub events: Vec<NearbyEvent>,
}

/// A segment of the recorded allocator, from its creation to its end. For an expandable one, everything that was
/// ever mapped of one reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordedSegment {
    /// Start.
    pub address: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// The stream that owns it.
    pub stream: StreamIdx,
    /// The pool that owns it, where the trace says so.
    pub pool: Option<PoolIdx>,
}

/// Index of no [`RecordedSegment`].
pub const NO_SEGMENT: u32 = u32::MAX;

/// A block of a segment at the start or end of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayoutBlock {
    /// Start.
    pub address: u64,
    /// Length including rounding, bytes.
    pub bytes: u64,
    /// The allocation in it, if it is live or waits for a stream.
    pub alloc: Option<AllocId>,
}

/// A segment at the start or end of the history. The blocks tile it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutSegment {
    /// Start.
    pub address: u64,
    /// Length, bytes.
    pub bytes: u64,
    /// The stream that owns it.
    pub stream: StreamIdx,
    /// The pool that owns it.
    pub pool: PoolIdx,
    /// PyTorch's small or large half of the pool.
    pub small: bool,
    /// Whether pages are mapped into a larger reservation.
    pub expandable: bool,
    /// From low to high addresses.
    pub blocks: Vec<LayoutBlock>,
}

/// How much of the program's life the ops cover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum History {
    /// From the first allocation to the end, nothing missing.
    Complete,
    /// Recording began when memory was already in use; [`OpStream::initial`] says which.
    StartsLate,
    /// Events are missing in between, so that the ops cannot be replayed. The text says why.
    Broken(String),
}

/// The name of the policy that does what PyTorch's allocator does.
pub const TORCH: &str = "torch";

/// The settings that the recorded allocator ran under, as far as the trace tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedSettings {
    /// The policy that does what the recorded allocator did: `torch` wherever PyTorch's blocks were recorded.
    pub policy: &'static str,
    /// The option string (`PYTORCH_ALLOC_CONF`), where the trace holds it.
    pub options: Option<String>,
    /// The environment variable that set the options, where the trace holds it.
    pub variable: Option<&'static str>,
    /// (major, minor), where the trace holds it.
    pub torch_version: Option<(u8, u8)>,
    /// The oldest release that writes such a trace, where only that can be said.
    pub torch_at_least: Option<(u8, u8)>,
    /// Memory of the device, bytes.
    pub device_memory: Option<u64>,
}

impl RecordedSettings {
    /// PyTorch's allocator was recorded.
    pub fn is_torch(&self) -> bool {
        self.policy == TORCH
    }
}

impl Default for RecordedSettings {
    fn default() -> RecordedSettings {
        RecordedSettings {
            policy: TORCH,
            options: None,
            variable: None,
            torch_version: None,
            torch_at_least: None,
            device_memory: None,
        }
    }
}

/// Everything that one device's allocator was asked, ready to be simulated.
#[derive(Clone, Debug)]
pub struct OpStream {
    /// Device ordinal.
    pub device: u32,
    /// In the order of the allocator's lock.
    pub ops: Vec<Op>,
    /// Indexed by [`AllocId`].
    pub allocations: Vec<Allocation>,
    /// Ascending: those that were no request, but put a block back where it had been (`setCheckpointPoolState`).
    pub restored: Vec<AllocId>,
    /// Stream handles, ascending; 0 is the default stream.
    pub streams: Vec<u64>,
    /// The pools; the default pool first.
    pub pools: Vec<Pool>,
    /// The recording says of each request which pool it was for: none of them is inferred.
    pub knows_pools: bool,
    /// Indexed by [`Op::Oom`].
    pub ooms: Vec<RecordedOom>,
    /// What the recorded allocator did with the driver, in order.
    pub driver: Vec<DriverEvent>,
    /// What else was in the process's address space, where the trace tells.
    pub surroundings: Option<Surroundings>,
    /// What else was in the device's memory, where the trace tells.
    pub others: Option<Others>,
    /// Questions for free memory, where the trace tells.
    pub queries: Vec<Query>,
    /// The segments that those calls concern, and those that were there before.
    pub segments: Vec<RecordedSegment>,
    /// For each allocation the segment that it was in, or [`NO_SEGMENT`]; empty once every pool is known.
    pub segment_of: Vec<u32>,
    /// What was live when recording began; empty for a complete history.
    pub initial: Vec<LayoutSegment>,
    /// The allocations that were already live then, in address order. They have no [`Op::Alloc`].
    pub initial_allocs: Vec<AllocId>,
    /// What the trace says is mapped at the end.
    pub final_layout: Vec<LayoutSegment>,
    /// What the ops cover.
    pub history: History,
    /// The facts known about the recorded allocator.
    pub settings: RecordedSettings,
    /// Stacks, shared among the devices of a trace.
    pub stacks: Arc<Stacks>,
}

impl OpStream {
    /// The allocation behind an id.
    pub fn allocation(&self, id: AllocId) -> &Allocation {
        &self.allocations[id.0 as usize]
    }

    /// The pool behind an index.
    pub fn pool(&self, pool: PoolIdx) -> Pool {
        self.pools[usize::from(pool.0)]
    }

    /// Inserts ops, each before the op that has its index now. Driver calls stay where they were; those of a burst
    /// that an inserted op explains come right after it.
    pub fn insert_ops(&mut self, places: &[(u32, Op)]) {
        if places.is_empty() {
            return;
        }
        let mut ops = Vec::with_capacity(self.ops.len() + places.len());
        let mut places_left = places.iter().peekable();
        let mut driver = self.driver.iter_mut().peekable();
        let nearby = self.surroundings.iter_mut().flat_map(|surroundings| &mut surroundings.events);
        let mut nearby = nearby.peekable();
        let others = self.others.iter_mut().flat_map(|others| &mut others.changes);
        let mut others = others.peekable();
        for index in 0..=self.ops.len() {
            while let Some((_, op)) = places_left.next_if(|(before, _)| *before as usize == index) {
                ops.push(*op);
            }
            while let Some(event) = driver.next_if(|event| event.before_op as usize == index) {
                event.before_op = ops.len() as u32;
            }
            while let Some(event) = nearby.next_if(|event| event.before_op as usize == index) {
                event.before_op = ops.len() as u32;
            }
            while let Some(change) = others.next_if(|change| change.before_op as usize == index) {
                change.before_op = ops.len() as u32;
            }
            ops.extend(self.ops.get(index).copied());
        }
        self.ops = ops;
    }

    /// Number of requests, failed ones included.
    pub fn n_requests(&self) -> usize {
        self.ops.iter().filter(|op| matches!(op, Op::Alloc(_) | Op::Oom(_))).count()
    }
}

/// Builds an [`OpStream`] event by event. Streams and pools are numbered as they are met and sorted at the end.
pub struct Builder {
    stream: OpStream,
    stream_indices: HashMap<u64, StreamIdx>,
    pool_indices: HashMap<(u64, u64), PoolIdx>,
}

/// More streams or pools than an [`OpStream`] can number.
#[derive(Debug, thiserror::Error)]
#[error("more than 65,535 {0} on one device: this trace is damaged")]
pub struct TooMany(&'static str);

impl Builder {
    /// An empty stream of one device.
    pub fn new(device: u32) -> Builder {
        let default = Pool { id: (0, 0) };
        Builder {
            stream: OpStream {
                device,
                ops: Vec::new(),
                allocations: Vec::new(),
                restored: Vec::new(),
                streams: vec![0],
                pools: vec![default],
                knows_pools: false,
                ooms: Vec::new(),
                driver: Vec::new(),
                surroundings: None,
                others: None,
                queries: Vec::new(),
                segments: Vec::new(),
                segment_of: Vec::new(),
                initial: Vec::new(),
                initial_allocs: Vec::new(),
                final_layout: Vec::new(),
                history: History::Complete,
                settings: RecordedSettings::default(),
                stacks: Arc::default(),
            },
            stream_indices: HashMap::from([(0, StreamIdx(0))]),
            pool_indices: HashMap::from([((0, 0), PoolIdx::DEFAULT)]),
        }
    }

    /// The index of a stream handle.
    ///
    /// # Errors
    /// When there are more streams than can be numbered.
    pub fn stream(&mut self, handle: u64) -> Result<StreamIdx, TooMany> {
        let next = self.stream.streams.len();
        if let Some(known) = self.stream_indices.get(&handle) {
            return Ok(*known);
        }
        let index = StreamIdx(u16::try_from(next).map_err(|_| TooMany("streams"))?);
        self.stream.streams.push(handle);
        self.stream_indices.insert(handle, index);
        Ok(index)
    }

    /// The index of a pool id.
    ///
    /// # Errors
    /// When there are more pools than can be numbered.
    pub fn pool(&mut self, id: (u64, u64)) -> Result<PoolIdx, TooMany> {
        let next = self.stream.pools.len();
        if let Some(known) = self.pool_indices.get(&id) {
            return Ok(*known);
        }
        let index = PoolIdx(u16::try_from(next).map_err(|_| TooMany("pools"))?);
        self.stream.pools.push(Pool { id });
        self.pool_indices.insert(id, index);
        Ok(index)
    }

    /// Adds an allocation without an op: for those that were live before the history began.
    pub fn allocation(&mut self, allocation: Allocation) -> AllocId {
        let id = AllocId(self.stream.allocations.len() as u32);
        self.stream.allocations.push(allocation);
        id
    }

    /// A request that was served.
    pub fn alloc(&mut self, allocation: Allocation) -> AllocId {
        let id = self.allocation(allocation);
        self.op(Op::Alloc(id));
        id
    }

    /// Any other op.
    pub fn op(&mut self, op: Op) {
        self.stream.ops.push(op);
    }

    /// A request that failed.
    pub fn oom(&mut self, oom: RecordedOom) {
        self.op(Op::Oom(self.stream.ooms.len() as u32));
        self.stream.ooms.push(oom);
    }

    /// A driver call at this point of the stream.
    pub fn driver(&mut self, call: DriverCall, address: u64, bytes: u64, segment: u32) {
        let before_op = self.stream.ops.len() as u32;
        self.stream.driver.push(DriverEvent { before_op, call, address, bytes, segment });
    }

    /// Something that happened beside the recorded allocator at this point of the stream.
    pub fn nearby(&mut self, what: Nearby) {
        let (before_op, before_call) = (self.stream.ops.len() as u32, self.stream.driver.len() as u32);
        let surroundings = self.stream.surroundings.get_or_insert_default();
        surroundings.events.push(NearbyEvent { before_op, before_call, what });
    }

    /// Ops so far.
    pub fn n_ops(&self) -> u32 {
        self.stream.ops.len() as u32
    }

    /// What has been built so far, to be completed in place.
    pub fn stream_mut(&mut self) -> &mut OpStream {
        &mut self.stream
    }

    /// The finished stream, with stream indices in the order of the handles.
    pub fn finish(mut self) -> OpStream {
        let mut order: Vec<usize> = (0..self.stream.streams.len()).collect();
        order.sort_by_key(|index| self.stream.streams[*index]);
        let mut new_index = vec![StreamIdx(0); order.len()];
        for (new, old) in order.iter().enumerate() {
            new_index[*old] = StreamIdx(new as u16);
        }
        let renumber = |stream: &mut StreamIdx| *stream = new_index[usize::from(stream.0)];
        let ops = &mut self.stream;
        ops.streams.sort_unstable();
        ops.allocations.iter_mut().for_each(|allocation| renumber(&mut allocation.stream));
        ops.ooms.iter_mut().filter_map(|oom| oom.stream.as_mut()).for_each(renumber);
        ops.segments.iter_mut().for_each(|segment| renumber(&mut segment.stream));
        ops.initial.iter_mut().chain(&mut ops.final_layout).for_each(|segment| renumber(&mut segment.stream));
        ops.ops.shrink_to_fit();
        ops.allocations.shrink_to_fit();
        self.stream
    }
}
