//! What a trace says, independent of how it is stored.
//!
//! A trace is one process's story: [`Process`] facts, definitions ([`Module`], [`Frame`], [`Stack`], [`Thread`],
//! [`Device`], [`Api`]), [`Event`]s in the order of their times, the process's [`Mappings`] where they matter, and
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
    /// The driver's own figures, sampled by the recorder.
    Sample(Sample),
    /// Events that were dropped before this moment.
    Lost(Lost),
    /// A fact in words, for `doctor` and the report.
    Note(String),
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
    }
}
