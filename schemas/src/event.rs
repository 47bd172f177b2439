//! What a trace says, independent of how it is stored.
//!
//! A trace is one process's story: [`Process`] facts, definitions ([`Module`], [`Frame`], [`Stack`], [`Thread`],
//! [`Device`], [`Api`], [`Communicator`]), [`Event`]s in the order of their times, the process's [`Mappings`] where they matter, and
//! what was lost. Definitions come before the first event that names them.

use std::fmt;

/// Bytes of memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Bytes(pub u64);

/// Nanoseconds of the host's `CLOCK_MONOTONIC`: comparable between the processes of one host and one boot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Nanos(pub u64);

macro_rules! ids {
    ($( $(#[$doc:meta])* $name:ident, )*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
        pub struct $name(pub u32);
    )* };
}

ids! {
    /// Index of a [`Stack`]. 0 is "no stack"; real ones start at 1.
    StackId,
    /// Index of a [`Frame`].
    FrameId,
    /// Index of a [`Module`].
    ModuleId,
    /// Index of a [`Thread`].
    ThreadId,
    /// Index of an [`Api`].
    ApiId,
    /// Index of a text. 0 is "no text"; real ones start at 1.
    TextId,
    /// Index of a [`Communicator`]. 0 is "none, or not known"; real ones start at 1.
    CommId,
}

/// A value that was not observed.
pub const UNKNOWN: u64 = u64::MAX;
/// [`Event`] concerns no device that is known.
pub const NO_DEVICE: i16 = -1;
/// [`Event`] concerns memory of the host.
pub const HOST: i16 = -2;

/// The process that was traced, as known when the trace began.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Parent's process id.
    pub parent: u32,
    /// Host name.
    pub host: String,
    /// `boot_id` of the host: times of two traces compare only within one boot.
    pub boot: String,
    /// Path of the executable.
    pub executable: String,
    /// The command line, argument by argument.
    pub command: Vec<String>,
    /// Environment variables that change what allocators or NCCL do, or that name the rank; nothing else is kept.
    pub environment: Vec<(String, String)>,
    /// Rank in the job, from the environment, where it can be known.
    pub rank: Option<u32>,
    /// `CLOCK_MONOTONIC` at the beginning.
    pub start: Nanos,
    /// `CLOCK_REALTIME` at the same moment, nanoseconds since 1970.
    pub start_realtime: u64,
    /// gputrace's version that recorded.
    pub recorder: String,
    /// PyTorch's version, where the process loaded PyTorch and its `version.py` could be read.
    pub torch_version: Option<String>,
    /// When the process began, in ticks of 10 ms since boot: with `pid` and `boot` it names the process, as numbers are
    /// used again. 0 unknown.
    pub began: u64,
    /// Those of its ancestors that were recorded too or could have been, its parent first. Fewer where one had ended.
    pub ancestors: Vec<Ancestor>,
}

/// A process that the traced one descends from. It may have no trace of its own: launchers use no GPU.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ancestor {
    /// Process id.
    pub pid: u32,
    /// As [`Process::began`].
    pub began: u64,
    /// The command line, argument by argument.
    pub command: Vec<String>,
}

/// Something the process had mapped that holds code.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Module {
    /// Path as the process saw it.
    pub path: String,
    /// GNU build id in lower-case hex; empty if it has none.
    pub build_id: String,
    /// First mapped byte.
    pub start: u64,
    /// Byte after the last mapped one.
    pub end: u64,
    /// What to subtract from an address to get the file's own.
    pub bias: u64,
    /// The module has a CUDA runtime in it (libcudart itself, or linked statically).
    pub has_runtime: bool,
}

/// One line of a stack.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Frame {
    /// An address.
    Native {
        /// Where the call returns to.
        address: u64,
        /// The module it lies in.
        module: Option<ModuleId>,
        /// Demangled function, empty if unknown.
        function: String,
        /// Source file, empty if unknown.
        file: String,
        /// Line in it, 0 if unknown.
        line: u32,
        /// The function was inlined into the next frame's.
        inlined: bool,
    },
    /// A line of Python.
    Python {
        /// Qualified name.
        function: String,
        /// File name as the interpreter has it.
        file: String,
        /// Line that was executing.
        line: u32,
    },
}

/// A call stack, innermost frame first.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Stack {
    /// The frames.
    pub frames: Vec<FrameId>,
    /// Outer frames are missing.
    pub truncated: bool,
    /// What of PyTorch's backward pass ran, if any did.
    pub backward: Option<Box<Backward>>,
}

/// An operation of PyTorch's backward pass.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Backward {
    /// Its class: `torch::autograd::generated::AddmmBackward0`.
    pub node: String,
    /// The forward operation that it undoes was called there; 0 unknown, or there is none.
    pub forward: StackId,
    /// `backward()` was called there, by another thread; 0 unknown, or this thread called it.
    pub caller: StackId,
    /// Several threads were inside of `backward()`; the one is taken that made the forward operation.
    pub is_caller_inferred: bool,
}

impl Backward {
    /// The operation as users know it: `AddmmBackward0`.
    #[must_use]
    pub fn short_node(&self) -> &str {
        self.node.rsplit("::").next().unwrap_or_default()
    }
}

/// A thread that made events.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Thread {
    /// Kernel thread id.
    pub tid: u32,
    /// Its name, as last seen.
    pub name: String,
}

/// A device of the process.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Device {
    /// Ordinal in the process, after `CUDA_VISIBLE_DEVICES`.
    pub ordinal: i16,
    /// Marketing name.
    pub name: String,
    /// `GPU-xxxxxxxx-xxxx-...`.
    pub uuid: String,
    /// Total memory.
    pub total: Bytes,
}

/// A function that was hooked.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Api {
    /// The exported symbol: `cuMemAlloc_v2`.
    pub name: String,
    /// What a program that goes through the CUDA runtime called: `cudaMalloc`; empty if there is no such function.
    pub runtime_name: String,
}

/// A mapping of the process: `/proc/PID/maps` without what does not matter for the driver's address choice.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mapping {
    /// First byte.
    pub start: u64,
    /// Byte after the last.
    pub end: u64,
}

/// A communicator of NCCL, or the attempt to make one: defined when the call that makes it begins, and again when it
/// has ended and more is known.
///
/// Two processes' communicators are the same one if [`Communicator::unique_id`] and [`Communicator::ordinal`] agree
/// for those that have no parent, and if parent, `ordinal` and `color` agree for those that were split off another.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Communicator {
    /// What made it: one of the `Comm*` operations; `None` for one that was met in use, but not seen when it was made.
    pub origin: Option<NcclOp>,
    /// [`NcclEnter::call`] of the call that made it, which also has the stack; 0 for one met in use.
    pub call: u64,
    /// `ncclComm_t`; 0 until it is known. NCCL uses addresses again.
    pub handle: u64,
    /// Hash of the unique id (that of NCCL since 2.26); 0 for one that was split off another.
    pub unique_id: u64,
    /// NCCL's own `commHash`, `commId` in its log. Computed here, as NCCL computes it; not always unique.
    pub comm_hash: Option<u64>,
    /// Rank in it. Unknown while it is being split off; a call in a group or of a communicator that does not block
    /// says it late or never, and then it follows from the other ranks' keys.
    pub rank: Option<u32>,
    /// Ranks in it.
    pub n_ranks: Option<u32>,
    /// Device ordinal: the current one when the call was made, [`NO_DEVICE`] if there was none.
    pub device: i16,
    /// What it was split off, shrunk or grown from.
    pub parent: CommId,
    /// For one without parent, how many with this `unique_id` and rank the process made before; for others, the number
    /// of the call among those that make communicators of this parent, from 1.
    pub ordinal: u32,
    /// Color of a split; -1 is NCCL_SPLIT_NOCOLOR, and no communicator.
    pub color: Option<i32>,
    /// Key of a split.
    pub key: Option<i32>,
    /// `NCCL_VERSION_CODE` of the library; 0 unknown.
    pub version: u32,
    /// What the program asked for in `ncclConfig_t`.
    pub config: CommConfig,
}

/// Fields of `ncclConfig_t` within the size that the program declared; `None` where it left the choice to NCCL.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CommConfig {
    /// `commName` (2.27): PyTorch's description of the process group.
    pub name: String,
    /// `netName`.
    pub net_name: String,
    /// `blocking`: 0 if calls return before they are done.
    pub blocking: Option<i32>,
    /// `cgaClusterSize`.
    pub cga_cluster_size: Option<i32>,
    /// `minCTAs`.
    pub min_ctas: Option<i32>,
    /// `maxCTAs`.
    pub max_ctas: Option<i32>,
    /// `splitShare`: 1 if what is split off shares its parent's buffers.
    pub split_share: Option<i32>,
    /// `trafficClass` (2.26).
    pub traffic_class: Option<i32>,
    /// `nvlsCTAs` (2.27).
    pub nvls_ctas: Option<i32>,
    /// `maxP2pPeers` (2.30).
    pub max_p2p_peers: Option<i32>,
}

/// The process's address space at one moment; neighbouring mappings are joined.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Mappings {
    /// When they were read.
    pub time: Nanos,
    /// Ascending, not overlapping.
    pub mapped: Vec<Mapping>,
}

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Event {
    /// When: after the call for what gives memory out, before it for what takes memory back.
    pub time: Nanos,
    /// On which thread.
    pub thread: ThreadId,
    /// From where; `StackId(0)` if that was not recorded.
    pub stack: StackId,
    /// What.
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EventKind {
    /// A call into the driver.
    Call(Call),
    /// PyTorch's allocator handed out a block.
    BlockAlloc(BlockAlloc),
    /// PyTorch's allocator took a block back.
    BlockFree(BlockFree),
    /// PyTorch's allocator gave up on a request.
    BlockOom(BlockOom),
    /// PyTorch's allocator recorded or asked for a stream event.
    Wait(Wait),
    /// The program said where it is.
    Mark(Mark),
    /// The driver's own figures, sampled by the recorder.
    Sample(Sample),
    /// Events that were dropped before this moment.
    Lost(Lost),
    /// A fact in words, for `doctor` and the report.
    Note(String),
    /// A call into NCCL begins. Without an [`EventKind::NcclExit`] of the same number the process never came back.
    NcclEnter(NcclEnter),
    /// A call into NCCL has returned.
    NcclExit(NcclExit),
    /// What a call into NCCL launched has run on the GPU.
    NcclTiming(NcclTiming),
}

/// A call into the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// Which function.
    pub api: ApiId,
    /// What it does to memory; says which of the fields below mean something.
    pub action: Action,
    /// Device ordinal, [`NO_DEVICE`] or [`HOST`].
    pub device: i16,
    /// `CUresult`; 0 is success. `None`: the process ended inside the call.
    pub result: Option<i32>,
    /// Device or host address.
    pub addr: u64,
    /// Bytes asked for.
    pub bytes: Bytes,
    /// `CUstream` as given.
    pub stream: u64,
    /// Handle of a VMM allocation, pool, array, graph or context.
    pub handle: u64,
    /// A second number; see [`Action`].
    pub extra: u64,
    /// How long the real function took.
    pub duration: Nanos,
    /// Made while a stream of the thread was captured into a graph.
    pub captured: bool,
    /// Made inside PyTorch's `allocate`.
    pub in_allocate: bool,
    /// The communicator that NCCL made this call for; 0 if it was not NCCL, or for several at once (a group, or
    /// `ncclCommInitAll`: there the device tells which).
    pub comm: CommId,
    /// [`NcclEnter::call`] of the program's call that caused it; 0 if none did, or it is not known which.
    pub nccl_call: u64,
    /// Made on a thread that NCCL started, not inside the program's call: `comm` is the one that the thread was started
    /// for or whose call was open at that moment.
    pub nccl_thread: bool,
}

impl Action {
    /// The action hands out memory.
    #[must_use]
    pub fn gives(self) -> bool {
        use Action::*;
        matches!(
            self,
            Alloc
                | AllocAsync
                | AllocManaged
                | AllocHost
                | HostRegister
                | Create
                | ArrayCreate
                | GraphAlloc
                | Reserve
                | Map
        )
    }

    /// The action takes memory back.
    #[must_use]
    pub fn takes(self) -> bool {
        use Action::*;
        matches!(
            self,
            Free | FreeAsync
                | FreeHost
                | HostUnregister
                | Release
                | Unmap
                | Unreserve
                | ArrayDestroy
                | GraphFree
        )
    }
}

/// `CUDA_ERROR_OUT_OF_MEMORY`, cuda.h.
const OUT_OF_MEMORY: i32 = 2;

/// A request for memory that failed for good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory {
    /// Device ordinal, [`NO_DEVICE`] or [`HOST`].
    pub device: i16,
    /// What was asked for.
    pub bytes: Bytes,
}

impl Event {
    /// The request that failed for good with this event. What the driver refuses PyTorch's allocator is not one: it gives its
    /// cache back and asks again, and where that does not help it says so itself ([`BlockOom`]).
    #[must_use]
    pub fn out_of_memory(&self) -> Option<OutOfMemory> {
        match &self.kind {
            EventKind::BlockOom(oom) => {
                Some(OutOfMemory { device: oom.device, bytes: oom.requested.unwrap_or(oom.bytes) })
            }
            EventKind::Call(call)
                if call.result == Some(OUT_OF_MEMORY) && call.action.gives() && !call.in_allocate =>
            {
                Some(OutOfMemory { device: call.device, bytes: call.bytes })
            }
            _ => None,
        }
    }
}

/// A call into NCCL, as the program made it: what NCCL calls of itself is left out. [`NcclOp`] says which fields mean
/// something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NcclEnter {
    /// Which function; `pncclX` is named as `ncclX`.
    pub api: ApiId,
    /// What it does.
    pub op: NcclOp,
    /// Number of the call in the process, from 1.
    pub call: u64,
    /// The communicator; for those that make one, the new one (`ncclCommInitAll`: the first).
    pub comm: CommId,
    /// Number of the call on this communicator, from 0, counted apart for each [`NcclSequence`]; [`UNKNOWN`] for
    /// calls that have no order. A call that fails (not `ncclSuccess` or `ncclInProgress`) or whose group was only
    /// simulated gives its number back.
    pub sequence: u64,
    /// Number of the outermost `ncclGroupStart` that is open on the thread, in the process from 1; 0 outside of groups.
    /// `ncclGroupStart` and `ncclGroupEnd` have that of the group they open or close.
    pub group: u32,
    /// Groups open on the thread before the call.
    pub group_depth: u32,
    /// Elements as the function counts them, bytes, or a number; see [`NcclOp`].
    pub count: u64,
    /// `ncclDataType_t`; -1 none.
    pub datatype: i32,
    /// `ncclRedOp_t` as given; -1 none. From 5 on it is the program's own operation, a number that differs between
    /// ranks: see `redop_call`.
    pub redop: i32,
    /// For the program's own operation, the number of the call that made it (its datatype and residence are there);
    /// 0 otherwise or if that was not seen.
    pub redop_call: u64,
    /// Root, peer, or own rank; -1 none.
    pub peer: i32,
    /// Address that is read.
    pub send: u64,
    /// Address that is written.
    pub receive: u64,
    /// `cudaStream_t` as given.
    pub stream: u64,
    /// Window or registration; see [`NcclOp`].
    pub handle: u64,
    /// A second number; see [`NcclOp`].
    pub extra: u64,
    /// Made while a stream was captured into a graph: it runs when the graph does.
    pub captured: bool,
}

/// The end of a call into NCCL.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NcclExit {
    /// Number of the call.
    pub call: u64,
    /// `ncclResult_t`: 0 success, 7 in progress.
    pub result: i32,
    /// What the call gave out; see [`NcclOp`].
    pub value: u64,
    /// How long the real function took.
    pub duration: Nanos,
    /// Whether the GPU's time for it is measured; `None` if nobody asked for that, or it launches nothing.
    pub timed: Option<NcclTimed>,
}

/// When the GPU ran what a call into NCCL launched on one stream for one communicator: from when everything before it on
/// the stream was done until it was done itself. Waiting for other ranks is in it. The event's own time is when this was
/// read, some milliseconds after it happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NcclTiming {
    /// [`NcclEnter::call`] of what launched it: the operation itself or, in a group, the `ncclGroupEnd`. Then it holds
    /// for all of the group's operations on this communicator and stream together.
    pub call: u64,
    /// The communicator.
    pub comm: CommId,
    /// Which time line `start` counts on: those of two CUDA contexts do not compare.
    pub timeline: u32,
    /// `cudaStream_t` as given.
    pub stream: u64,
    /// On the time line, since it began.
    pub start: Nanos,
    /// How long; the events it is made from resolve about half a microsecond (CUDA's documentation of
    /// `cuEventElapsedTime`).
    pub duration: Nanos,
}

/// What [`NcclEnter::sequence`] counts apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum NcclSequence {
    /// Collectives: all ranks of the communicator make them in the same order.
    Collective,
    /// Sends to one peer.
    Send(i32),
    /// Receives from one peer.
    Receive(i32),
    /// One-sided calls.
    OneSided,
    /// Split, shrink, grow, finalize, window registration and others that all ranks make in the same order.
    Management,
}

/// A block handed out by PyTorch's caching allocator, with PyTorch's own totals just after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockAlloc {
    /// Device ordinal.
    pub device: i16,
    /// First byte.
    pub addr: u64,
    /// Size of the block.
    pub bytes: Bytes,
    /// What the program asked for, where the request was seen.
    pub requested: Option<Bytes>,
    /// `CUstream` of the request, where it was seen.
    pub stream: Option<u64>,
    /// PyTorch's allocated bytes on the device.
    pub allocated: Bytes,
    /// PyTorch's reserved bytes on the device.
    pub reserved: Bytes,
}

/// A block taken back by PyTorch's caching allocator ("free requested"), with PyTorch's own totals just after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockFree {
    /// Device ordinal.
    pub device: i16,
    /// First byte.
    pub addr: u64,
    /// Size of the block.
    pub bytes: Bytes,
    /// PyTorch's allocated bytes on the device.
    pub allocated: Bytes,
    /// PyTorch's reserved bytes on the device.
    pub reserved: Bytes,
    /// The Python interpreter of the thread was collecting reference cycles. Another of its threads can be the one
    /// that collects, where an object's end gives up the interpreter's lock.
    pub collecting: bool,
}

/// PyTorch raised `OutOfMemoryError`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockOom {
    /// Device ordinal.
    pub device: i16,
    /// Bytes PyTorch wanted from the driver (the rounded request).
    pub bytes: Bytes,
    /// What the program asked for, where the request was seen.
    pub requested: Option<Bytes>,
    /// The `cudaStream_t` that the block would have been of, where the request was seen.
    pub stream: Option<u64>,
    /// PyTorch's allocated bytes on the device.
    pub allocated: Bytes,
    /// PyTorch's reserved bytes on the device.
    pub reserved: Bytes,
}

/// A stream event of PyTorch's allocator. A block freed while other streams may still use it becomes reusable when
/// the events recorded just before its [`BlockFree`] on the same thread were seen done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    /// `CUevent`. The allocator's own are those it ever queries or synchronises inside `allocate` or a trim.
    pub event: u64,
    /// `CUstream` it was recorded on; 0 for others.
    pub stream: u64,
    /// What was done.
    pub action: WaitAction,
    /// `CUresult`: 0 done, 600 not ready.
    pub result: i32,
}

/// A mark or a range of NVTX: what the program says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// What begins, ends or happens.
    pub action: MarkAction,
    /// What it is called.
    pub text: TextId,
    /// Name of its domain; `TextId(0)` is the default one.
    pub domain: TextId,
    /// Joins [`MarkAction::Start`] with [`MarkAction::End`]; the kernel's thread id for [`MarkAction::NameThread`].
    pub range: u64,
    /// The program's number for a group of marks; 0 none.
    pub category: u32,
}

/// The driver's own figures for one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Device ordinal in the traced process.
    pub device: i16,
    /// Bytes that NVML charges to the process, where it tells.
    pub process_used: Option<Bytes>,
    /// Bytes used on the device by everybody.
    pub device_used: Bytes,
    /// Bytes of the device.
    pub total: Bytes,
}

/// Events that were dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lost {
    /// Why.
    pub cause: LostCause,
    /// How many since the last such event.
    pub events: u64,
}

macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident { $( $(#[$variant_doc:meta])* $variant:ident = $number:literal $text:literal, )* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        #[repr(u8)]
        pub enum $name { $( $(#[$variant_doc])* $variant = $number, )* }
        impl $name {
            /// Every value, in order.
            pub const ALL: &'static [$name] = &[ $( $name::$variant, )* ];
            /// The value with this number in a file.
            #[must_use]
            pub fn from_u8(raw: u8) -> Option<$name> {
                match raw { $( $number => Some($name::$variant), )* _ => None }
            }
            /// Its name in reports, exports and JSON.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $( $name::$variant => $text, )* }
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result { to.pad(self.name()) }
        }
    };
}

numbered! {
    /// Why events were dropped.
    LostCause {
        /// The ring was full: the recorder did not keep up.
        RingFull = 1 "ring full",
        /// More threads than the ring has lines.
        TooManyThreads = 2 "too many threads",
        /// A signal handler interrupted another event.
        Nested = 3 "in a signal handler",
        /// Another thread was starting the session.
        Starting = 4 "while starting",
        /// The trace could not be written (disk full).
        NotWritten = 5 "not written",
        /// A record was unreadable.
        Damaged = 6 "damaged",
    }
}

numbered! {
    /// What a [`Mark`] says.
    MarkAction {
        /// A range of the thread begins.
        Push = 1 "push",
        /// The range that the thread began last in the domain ends.
        Pop = 2 "pop",
        /// A range of the process begins: `range`.
        Start = 3 "start",
        /// `range` ends, on whatever thread.
        End = 4 "end",
        /// One moment.
        Mark = 5 "mark",
        /// A thread got a name.
        NameThread = 6 "name_thread",
    }
}

numbered! {
    /// What happened to a stream event.
    WaitAction {
        /// `cuEventRecord`.
        Record = 1 "record",
        /// `cuEventQuery`.
        Query = 2 "query",
        /// `cuEventSynchronize`.
        Synchronize = 3 "synchronize",
    }
}

numbered! {
    /// Whether the GPU's time for a call into NCCL is measured, or why it is not.
    NcclTimed {
        /// It is: one [`EventKind::NcclTiming`] follows for each communicator and stream, unless it never ran to its end.
        Enqueued = 1 "enqueued",
        /// A stream was being captured into a graph.
        Capture = 2 "capture",
        /// Too many calls waited for the GPU.
        NoEvents = 3 "no_events",
        /// NCCL went on in a thread of its own (`ncclInProgress`).
        InProgress = 4 "in_progress",
        /// The driver refused, or the stream's context was not known.
        Refused = 5 "refused",
    }
}

numbered! {
    /// What a call into NCCL does, and which fields it fills. `value` is [`NcclExit::value`].
    NcclOp {
        /// `send`, `receive`, `count`, `datatype`, `redop`, `stream`.
        AllReduce = 1 "all_reduce",
        /// `send`, `receive`, `count`, `datatype`, root in `peer`, `stream`. `ncclBcast` reads and writes one address.
        Broadcast = 2 "broadcast",
        /// `send`, `receive`, `count`, `datatype`, `redop`, root in `peer`, `stream`.
        Reduce = 3 "reduce",
        /// `send`, `receive`, `count` (of what each rank sends), `datatype`, `stream`.
        AllGather = 4 "all_gather",
        /// `send`, `receive`, `count` (of what each rank receives), `datatype`, `redop`, `stream`.
        ReduceScatter = 5 "reduce_scatter",
        /// `send`, `receive`, `count` (for each rank), `datatype`, `stream`.
        AlltoAll = 6 "all_to_all",
        /// `send`, `receive`, `count` (from each rank), `datatype`, root in `peer`, `stream`.
        Gather = 7 "gather",
        /// `send`, `receive`, `count` (for each rank), `datatype`, root in `peer`, `stream`.
        Scatter = 8 "scatter",
        /// `send`, `count`, `datatype`, `peer`, `stream`.
        Send = 9 "send",
        /// `receive`, `count`, `datatype`, `peer`, `stream`.
        Receive = 10 "recv",
        /// `send`, `count`, `datatype`, `peer`, window in `handle`, offset in it in `extra`, `stream`.
        PutSignal = 11 "put_signal",
        /// `peer`, signal and context in `extra` (high and low half), `stream`.
        Signal = 12 "signal",
        /// Signals waited for in `count`, `peer` and `extra` of the first of them, `stream`.
        WaitSignal = 13 "wait_signal",
        /// The group is open.
        GroupStart = 14 "group_start",
        /// The group ends; the outermost one starts what it holds.
        GroupEnd = 15 "group_end",
        /// The group ends and what it holds is never started.
        GroupSimulateEnd = 16 "group_simulate_end",
        /// Hash of the unique id in `value`.
        UniqueId = 17 "unique_id",
        /// `comm` is the new one; ranks in `count`, rank in `peer`, hash of the unique id in `extra`, `value` the handle.
        CommInit = 18 "comm_init",
        /// `comm` is the first of `count` new ones, numbered one after the other.
        CommInitAll = 19 "comm_init_all",
        /// `comm` is the new one, which names its parent, color and key; the parent in `extra`; `value` the handle.
        /// The sequence is the parent's.
        CommSplit = 20 "comm_split",
        /// As a split; ranks left out in `count`, flags in `handle`.
        CommShrink = 21 "comm_shrink",
        /// As a split; ranks in `count`, rank in `peer` (-1: as before).
        CommGrow = 22 "comm_grow",
        /// `comm`.
        CommFinalize = 23 "comm_finalize",
        /// `comm`.
        CommDestroy = 24 "comm_destroy",
        /// `comm`: what it has not done is lost.
        CommAbort = 25 "comm_abort",
        /// `comm`, flags in `extra`.
        CommRevoke = 26 "comm_revoke",
        /// `comm`, flags in `extra`: NCCL gives its memory back for a while.
        CommSuspend = 27 "comm_suspend",
        /// `comm`.
        CommResume = 28 "comm_resume",
        /// `ncclCommGetAsyncError` said something else than before: `comm`, the error in `value`.
        AsyncError = 29 "async_error",
        /// Memory for the program: bytes in `count`, address in `value`.
        MemAlloc = 30 "mem_alloc",
        /// Address in `send`.
        MemFree = 31 "mem_free",
        /// `comm`, address in `send`, bytes in `count`, `value` the registration.
        Register = 32 "register",
        /// `comm`, registration in `handle`.
        Deregister = 33 "deregister",
        /// `comm`, address in `send`, bytes in `count`, flags in `extra`, `value` the window.
        WindowRegister = 34 "window_register",
        /// `comm`, window in `handle`.
        WindowDeregister = 35 "window_deregister",
        /// `comm`, `datatype`, where the scalar lies in `extra` (0 device, 1 host), `value` the new `ncclRedOp_t`.
        RedOpCreate = 36 "redop_create",
        /// `comm`, `redop`.
        RedOpDestroy = 37 "redop_destroy",
        /// `comm`: from here on kernels of the program may communicate unseen.
        DevCommCreate = 38 "dev_comm_create",
        /// `comm`.
        DevCommDestroy = 39 "dev_comm_destroy",
    }
}

impl NcclOp {
    /// All ranks of a communicator make these in the same order, counted together.
    #[must_use]
    pub fn is_collective(self) -> bool {
        use NcclOp::*;
        matches!(
            self,
            AllReduce | Broadcast | Reduce | AllGather | ReduceScatter | AlltoAll | Gather | Scatter
        )
    }

    /// What the numbers of these calls count; `None` for those without order.
    #[must_use]
    pub fn sequence(self, peer: i32) -> Option<NcclSequence> {
        use NcclOp::*;
        match self {
            AllReduce | Broadcast | Reduce | AllGather | ReduceScatter | AlltoAll | Gather | Scatter => {
                Some(NcclSequence::Collective)
            }
            Send => Some(NcclSequence::Send(peer)),
            Receive => Some(NcclSequence::Receive(peer)),
            PutSignal | Signal | WaitSignal => Some(NcclSequence::OneSided),
            CommSplit | CommShrink | CommGrow | CommFinalize | CommSuspend | CommResume | WindowRegister
            | WindowDeregister | DevCommCreate | DevCommDestroy => Some(NcclSequence::Management),
            GroupStart | GroupEnd | GroupSimulateEnd | UniqueId | CommInit | CommInitAll | CommDestroy
            | CommAbort | CommRevoke | AsyncError | MemAlloc | MemFree | Register | Deregister
            | RedOpCreate | RedOpDestroy => None,
        }
    }
}

numbered! {
    /// What a call does to memory, and which fields it fills.
    Action {
        /// Linear device memory: `addr`, `bytes`.
        Alloc = 1 "alloc",
        /// Linear, managed or stream-ordered memory given back at once: `addr`.
        Free = 2 "free",
        /// Stream-ordered: `addr`, `bytes`, `stream`, pool in `handle` (0: the device's current one).
        AllocAsync = 3 "alloc_async",
        /// Stream-ordered: `addr`, `stream`.
        FreeAsync = 4 "free_async",
        /// Managed memory: `addr`, `bytes`, flags in `extra`.
        AllocManaged = 5 "alloc_managed",
        /// Pinned host memory: `addr`, `bytes`, flags in `extra`.
        AllocHost = 6 "alloc_host",
        /// Pinned host memory: `addr`.
        FreeHost = 7 "free_host",
        /// Host memory pinned in place: `addr`, `bytes`, flags in `extra`.
        HostRegister = 8 "host_register",
        /// `addr`.
        HostUnregister = 9 "host_unregister",
        /// Address range: `addr`, `bytes`, alignment in `extra`.
        Reserve = 10 "reserve",
        /// `addr`, `bytes`.
        Unreserve = 11 "unreserve",
        /// Physical memory: `handle`, `bytes`; its device is the location's.
        Create = 12 "create",
        /// `handle`.
        Release = 13 "release",
        /// `handle` from the mapped `addr`.
        Retain = 14 "retain",
        /// `addr`, `bytes`, `handle`, offset in `extra`.
        Map = 15 "map",
        /// `addr`, `bytes`.
        Unmap = 16 "unmap",
        /// `addr`, `bytes`, access flags in `extra`.
        SetAccess = 17 "set_access",
        /// `handle` to another process, handle type in `extra`.
        Export = 18 "export",
        /// `handle` from another process, handle type in `extra`.
        Import = 19 "import",
        /// `handle`; the device is the location's.
        PoolCreate = 20 "pool_create",
        /// `handle`.
        PoolDestroy = 21 "pool_destroy",
        /// `handle`, bytes to keep in `bytes`.
        PoolTrim = 22 "pool_trim",
        /// `handle`, `CUmemPool_attribute` in `extra`, its value in `bytes`.
        PoolGet = 23 "pool_get",
        /// `handle`, `CUmemPool_attribute` in `extra`, its value in `bytes`.
        PoolSet = 24 "pool_set",
        /// `addr` made known to another process; the handle's hash in `handle`.
        IpcGet = 25 "ipc_get",
        /// `addr` of another process's memory; the handle's hash in `handle`.
        IpcOpen = 26 "ipc_open",
        /// `addr`.
        IpcClose = 27 "ipc_close",
        /// `handle`, estimated `bytes`.
        ArrayCreate = 28 "array_create",
        /// `handle`.
        ArrayDestroy = 29 "array_destroy",
        /// Memory a graph owns: `addr`, `bytes`, graph in `handle`.
        GraphAlloc = 30 "graph_alloc",
        /// `addr`, graph in `handle`.
        GraphFree = 31 "graph_free",
        /// `handle`, flags in `extra`.
        ContextCreate = 32 "context_create",
        /// `handle`: everything in it is gone.
        ContextDestroy = 33 "context_destroy",
        /// Primary context of the device in `extra`; `handle`.
        PrimaryRetain = 34 "primary_retain",
        /// Primary context of the device in `extra`.
        PrimaryRelease = 35 "primary_release",
        /// Primary context of the device in `extra`: everything in it is gone.
        PrimaryReset = 36 "primary_reset",
        /// The program asked: free bytes in `bytes`, total in `extra`.
        MemInfo = 37 "mem_info",
        /// A multicast object: `handle`, `bytes`; no memory of its own.
        MulticastCreate = 38 "multicast_create",
        /// `stream` begins to be captured into a graph.
        CaptureBegin = 39 "capture_begin",
        /// `stream` is no longer captured; graph in `handle`.
        CaptureEnd = 40 "capture_end",
        /// Memory of another process or of graphics: `addr`, `bytes`; owns nothing.
        ImportPointer = 41 "import_pointer",
        /// A pool made for or taken from another process: `handle`.
        PoolShare = 42 "pool_share",
        /// The driver was initialised.
        Init = 43 "init",
        /// `handle` is the device's current pool from now on.
        PoolSelect = 44 "pool_select",
        /// The program asked which pool is the device's: `handle`; 1 in `extra` for its default one.
        PoolOf = 45 "pool_of",
        /// Executable graph in `handle`, of the graph in `extra`.
        GraphInstantiate = 46 "graph_instantiate",
        /// Executable graph in `handle`, on `stream`; recorded only where graphs own memory.
        GraphLaunch = 47 "graph_launch",
        /// Executable graph in `handle`.
        GraphExecDestroy = 48 "graph_exec_destroy",
        /// Graph in `handle`.
        GraphDestroy = 49 "graph_destroy",
        /// What graphs of the device keep and do not use goes back to the driver.
        GraphMemTrim = 50 "graph_mem_trim",
        /// The program asked: `CUgraphMem_attribute` in `extra`, its value in `bytes`.
        GraphMemGet = 51 "graph_mem_get",
        /// Code: module or library in `handle`, bytes of its image where they are known.
        CodeLoad = 52 "code_load",
        /// Module or library in `handle`.
        CodeUnload = 53 "code_unload",
        /// Function or module in `handle`: its code is on the device now. Told once, until code goes; older traces have one
        /// for each launch.
        FunctionLoad = 54 "function_load",
        /// A limit of the context: `CUlimit` in `extra`, its value in `bytes`.
        LimitSet = 55 "limit_set",
        /// The memory of the context in `handle` is visible to the current one.
        PeerEnable = 56 "peer_enable",
    }
}
