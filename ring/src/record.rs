//! Records: what one event is in the ring. Fixed layouts of eight-byte words, so that a record never straddles a
//! word and the recorder can read them without trusting the process that wrote them.
//!
//! These layouts are private to one build of gputrace ([`ABI`]): the trace file has its own, versioned one.

/// The version of everything in this crate. A recorder refuses a ring of another version.
pub const ABI: u32 = 15;

macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident: $repr:ty { $( $(#[$variant_doc:meta])* $variant:ident = $number:literal, )* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[repr($repr)]
        pub enum $name { $( $(#[$variant_doc])* $variant = $number, )* }
        impl $name {
            /// The value with this number.
            #[must_use]
            #[inline]
            pub fn from_raw(raw: $repr) -> Option<$name> {
                match raw { $( $number => Some($name::$variant), )* _ => None }
            }
            /// Every value, in order.
            pub const ALL: &'static [$name] = &[ $( $name::$variant, )* ];
        }
    };
}

numbered! {
    /// What kind of record follows a [`Header`].
    Kind: u8 {
        /// [`TimeBase`]: later records of this chunk count from here.
        TimeBase = 1,
        /// [`Call`]: a driver function, or a library function that wraps one.
        Call = 2,
        /// [`CallEnd`]: how the last [`Call`] of this thread marked [`Call::OPEN`] ended.
        CallEnd = 3,
        /// [`BlockAlloc`]: a framework handed out a block.
        BlockAlloc = 4,
        /// [`BlockFree`]: a framework took a block back.
        BlockFree = 5,
        /// [`BlockOom`]: a framework could not serve a request.
        BlockOom = 6,
        /// [`Wait`]: the framework allocator recorded or asked for a stream event.
        Wait = 7,
        /// A call stack: [`StackDef`], then its frames.
        Stack = 8,
        /// A Python code object: [`CodeDef`], then its texts.
        Code = 9,
        /// The name of an [`Call::api`]: a `u64` with the number, then the text.
        Api = 10,
        /// [`Device`], then its name.
        Device = 11,
        /// An address inside a module that carries a CUDA runtime: one `u64`.
        Runtime = 12,
        /// A fact about the process, in words for `doctor` and the report: text.
        Note = 13,
        /// [`Node`]: what of PyTorch's backward pass the thread is in from here on.
        Node = 14,
        /// The name of a [`Node::class`]: a `u64` with the number, then the text.
        NodeClass = 15,
        /// [`Forward`]: where an operation was called that can be undone.
        Forward = 16,
        /// [`Backward`]: the thread enters or leaves `backward()`.
        Backward = 17,
        /// [`TextDef`], then the bytes of a text that marks name.
        Text = 18,
        /// [`Mark`]: the program said where it is (NVTX).
        Mark = 19,
        /// [`NcclEnter`]: a call into NCCL begins.
        NcclEnter = 20,
        /// [`NcclExit`]: it has returned.
        NcclExit = 21,
        /// [`Communicator`], then its names.
        Communicator = 22,
        /// [`NcclTiming`]: what a call enqueued is done.
        NcclTiming = 23,
        /// [`BriefAlloc`]: a [`BlockAlloc`] that follows from what its chunk has said.
        BriefAlloc = 24,
        /// [`BriefFree`]: a [`BlockFree`] that does.
        BriefFree = 25,
        /// [`BriefForward`]: a [`Forward`] that does.
        BriefForward = 26,
        /// [`Pjrt`]: something happened to a buffer of PJRT, or an executable ran.
        Pjrt = 40,
        /// [`PjrtExecutable`]: an executable is there.
        PjrtExecutable = 41,
    }
}

impl Kind {
    /// Whether a record of this kind is something that happened, and not what explains or ends another: one that there is no
    /// room for is a loss.
    #[must_use]
    pub fn is_event(self) -> bool {
        use Kind::*;
        match self {
            Call | BlockAlloc | BlockFree | BlockOom | Wait | Note | Backward | Mark | NcclEnter
            | NcclExit | NcclTiming | BriefAlloc | BriefFree | Pjrt | PjrtExecutable => true,
            TimeBase | CallEnd | Stack | Code | Api | Device | Runtime | Node | NodeClass | Forward
            | Text | Communicator | BriefForward => false,
        }
    }
}

/// First word of every record.
///
/// ```text
///  63            32 31     24 23   16 15          0
/// |  ticks - base  |  flags  |  kind |  words      |
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Length of the record in eight-byte words, this one included; never 0.
    pub words: u16,
    /// A [`Kind`].
    pub kind: u8,
    /// Free for the kind.
    pub flags: u8,
    /// Ticks since the chunk's base.
    pub delta: u32,
}

impl Header {
    /// As the word in the ring.
    #[inline]
    #[must_use]
    pub fn encode(self) -> u64 {
        u64::from(self.words)
            | u64::from(self.kind) << 16
            | u64::from(self.flags) << 24
            | u64::from(self.delta) << 32
    }

    /// From the word in the ring.
    #[inline]
    #[must_use]
    pub fn decode(word: u64) -> Header {
        Header {
            words: word as u16,
            kind: (word >> 16) as u8,
            flags: (word >> 24) as u8,
            delta: (word >> 32) as u32,
        }
    }
}

/// A record payload: plain words without padding.
///
/// # Safety
/// The type is `repr(C)`, a multiple of eight bytes long, has no padding, and every bit pattern is a value.
pub unsafe trait Payload: Copy {
    /// Its place in [`Kind`].
    const KIND: Kind;

    /// The payload that words begin with, and the words behind it; none where there are too few.
    #[must_use]
    fn from_words(words: &[u64]) -> Option<(Self, &[u64])> {
        let (own, rest) = words.split_at_checked(size_of::<Self>() / size_of::<u64>())?;
        // SAFETY: these are as many bytes as the type has, and every bit pattern is a value of it.
        Some((unsafe { own.as_ptr().cast::<Self>().read_unaligned() }, rest))
    }
}

macro_rules! payloads {
    ($( $(#[$doc:meta])* $kind:ident $name:ident { $( $(#[$field_doc:meta])* $field:ident: $type:ty, )* } )*) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        #[repr(C)]
        pub struct $name { $( $(#[$field_doc])* pub $field: $type, )* }
        // No padding: the fields' sizes add up to a whole number of words.
        const _: () = assert!(core::mem::size_of::<$name>() == 0 $( + core::mem::size_of::<$type>() )*);
        const _: () = assert!(core::mem::size_of::<$name>() % 8 == 0);
        // SAFETY: integers only, and the assertions above rule out padding.
        unsafe impl Payload for $name { const KIND: Kind = Kind::$kind; }
    )*
        /// Every layout, for the test of [`ABI`].
        #[cfg(test)]
        pub(super) const LAYOUTS: &str = concat!($( stringify!($name), "{", $( stringify!($field), ":", stringify!($type), ",", )* "}", )*);
    };
}

payloads! {
    /// Full ticks, for the records that follow.
    TimeBase TimeBase {
        /// [`crate::clock::Ticks`].
        ticks: u64,
    }

    /// One call into the driver. What the fields mean depends on `action`; see [`Action`].
    /// Calls that give memory back are recorded before they run (`OPEN`), all others after. In the ring, words that are 0
    /// may be left out: see [`crate::brief::restore_call`].
    Call Call {
        /// Row of the hook table; named by an Api record.
        api: u16,
        /// [`Action`].
        action: u8,
        /// Device ordinal in this process; -1 unknown, -2 host memory.
        device: i8,
        /// What the function returned; 0 while open.
        result: i32,
        /// Device or host address.
        addr: u64,
        /// Bytes asked for.
        bytes: u64,
        /// `CUstream`, as given; for per-thread variants a null stream becomes 2 (`CU_STREAM_PER_THREAD`).
        stream: u64,
        /// Handle: VMM allocation, pool, array, graph, context.
        handle: u64,
        /// Second number: offset of a map, second handle, flags of a host allocation.
        extra: u64,
        /// Stack id; 0 none.
        stack: u64,
        /// Ticks the real function took, saturating.
        duration: u32,
        /// [`Call::OPEN`] and others.
        flags: u32,
        /// Communicator that NCCL made the call for; 0 none.
        comm: u32,
        /// Unused.
        reserved: u32,
        /// Number of the call into NCCL that caused it; 0 none.
        nccl_call: u64,
    }

    /// The end of an open call.
    CallEnd CallEnd {
        /// Row of the hook table, the same as the open call's.
        api: u16,
        /// Unused.
        reserved: u16,
        /// What the function returned.
        result: i32,
        /// The open call's address or handle, to match it.
        addr: u64,
        /// Ticks the real function took.
        duration: u64,
    }

    /// A block handed out by PyTorch's allocator, with its own totals at that instant.
    BlockAlloc BlockAlloc {
        /// First byte.
        addr: u64,
        /// Bytes of the block, rounded by the allocator; the device ordinal in the top byte.
        device_bytes: u64,
        /// Bytes the program asked for; `UNKNOWN` where the request did not pass by.
        requested: u64,
        /// `CUstream` the request was made for; `UNKNOWN` where the request did not pass by.
        stream: u64,
        /// PyTorch's total of allocated bytes on the device, this block included.
        allocated: u64,
        /// PyTorch's total of reserved bytes on the device.
        reserved: u64,
        /// Stack id; 0 none.
        stack: u64,
    }

    /// A block taken back by PyTorch's allocator.
    BlockFree BlockFree {
        /// First byte.
        addr: u64,
        /// Bytes of the block; the device ordinal in the top byte.
        device_bytes: u64,
        /// PyTorch's total of allocated bytes on the device, without this block.
        allocated: u64,
        /// PyTorch's total of reserved bytes on the device.
        reserved: u64,
        /// Stack id; 0 none.
        stack: u64,
    }

    /// A block handed out on the device of the chunk's last block, for the stream of the last that was handed out. The
    /// totals are the last block's, with this one.
    BriefAlloc BriefAlloc {
        /// First byte.
        addr: u64,
        /// Bytes of the block in the lower 40 bits; in the others how many the program did not ask for, or all ones.
        bytes_slack: u64,
        /// Stack id; 0 none.
        stack: u64,
    }

    /// A block taken back on the device of the chunk's last block. The totals are that one's, without this one.
    BriefFree BriefFree {
        /// First byte.
        addr: u64,
        /// Bytes of the block.
        bytes: u64,
        /// Stack id; 0 none.
        stack: u64,
    }

    /// PyTorch's allocator gave up on a request.
    BlockOom BlockOom {
        /// Bytes of the failed request as PyTorch reports them; the device ordinal in the top byte.
        device_bytes: u64,
        /// Bytes the program asked for; `UNKNOWN` where the request did not pass by.
        requested: u64,
        /// `cudaStream_t` of the request; `UNKNOWN` where the request did not pass by.
        stream: u64,
        /// PyTorch's total of allocated bytes on the device.
        allocated: u64,
        /// PyTorch's total of reserved bytes on the device.
        reserved: u64,
        /// Stack id; 0 none.
        stack: u64,
    }

    /// A stream event of PyTorch's allocator: what decides when a block used by several streams is free.
    Wait Wait {
        /// `CUevent`.
        event: u64,
        /// `CUstream` for a recorded event; 0 for others.
        stream: u64,
        /// [`WaitAction`].
        action: u32,
        /// What the function returned: 0 done, 600 (`CUDA_ERROR_NOT_READY`) not yet.
        result: i32,
    }

    /// A call into NCCL begins. What the fields mean depends on `op`; see [`NcclOp`].
    NcclEnter NcclEnter {
        /// Named by an Api record.
        api: u16,
        /// [`NcclOp`].
        op: u8,
        /// [`NcclEnter::CAPTURED`].
        marks: u8,
        /// Groups open on the thread before the call.
        group_depth: u32,
        /// Number of the call in the process, from 1.
        call: u64,
        /// Number of the communicator in the process, from 1; 0 none.
        comm: u32,
        /// Number of the thread's outermost group, from 1; 0 none.
        group: u32,
        /// Number of the call on the communicator, from 0; `UNKNOWN` none.
        sequence: u64,
        /// Elements, bytes or a number.
        count: u64,
        /// Address that is read.
        send: u64,
        /// Address that is written.
        receive: u64,
        /// `cudaStream_t`.
        stream: u64,
        /// Window or registration.
        handle: u64,
        /// A second number.
        extra: u64,
        /// `ncclDataType_t`; -1 none.
        datatype: i32,
        /// `ncclRedOp_t`; -1 none.
        redop: i32,
        /// Number of the call that made the operation; 0 none.
        redop_call: u64,
        /// Root, peer or rank; -1 none.
        peer: i32,
        /// Unused.
        reserved: u32,
        /// Stack id; 0 none.
        stack: u64,
    }

    /// A call into NCCL has returned.
    NcclExit NcclExit {
        /// Number of the call.
        call: u64,
        /// What it gave out.
        value: u64,
        /// Ticks the real function took.
        duration: u64,
        /// `ncclResult_t`.
        result: i32,
        /// [`NcclTimed`].
        timed: u32,
    }

    /// What a call into NCCL put on one stream for one communicator has run on the GPU: two events said when.
    NcclTiming NcclTiming {
        /// Number of the call that launched it: the operation itself, or the end of its group.
        call: u64,
        /// Number of the communicator.
        comm: u32,
        /// Which time line `start` counts on: those of two contexts do not compare.
        timeline: u32,
        /// `cudaStream_t`.
        stream: u64,
        /// Nanoseconds on the GPU since the time line began.
        start: u64,
        /// Nanoseconds on the GPU.
        duration: u64,
    }

    /// A communicator, followed by the bytes of its name and of its network's name. Later ones replace earlier ones.
    Communicator Communicator {
        /// Number in the process, from 1.
        id: u32,
        /// Number of its parent; 0 none.
        parent: u32,
        /// Number of the call that made it; 0 if that was not seen.
        call: u64,
        /// `ncclComm_t`; 0 not known yet.
        handle: u64,
        /// Hash of the unique id.
        unique_id: u64,
        /// NCCL's `commHash`, if marked.
        comm_hash: u64,
        /// -1 not known yet.
        rank: i32,
        /// -1 not known yet.
        n_ranks: i32,
        /// See `ordinal` in the trace.
        ordinal: u32,
        /// `NCCL_VERSION_CODE`.
        version: u32,
        /// Of a split, if marked.
        color: i32,
        /// Of a split, if marked.
        key: i32,
        /// [`NcclOp`] that made it; 0 not seen.
        origin: u16,
        /// Device ordinal; -1 unknown.
        device: i16,
        /// [`Communicator::HAS_HASH`] and others.
        marks: u32,
        /// blocking, cgaClusterSize, minCTAs, maxCTAs, splitShare, trafficClass, nvlsCTAs, maxP2pPeers of
        /// `ncclConfig_t`; the least number where the choice was left to NCCL.
        config: [i32; 8],
        /// Bytes of the name.
        name: u32,
        /// Bytes of the network's name.
        net_name: u32,
    }

    /// A call stack, followed by `native` addresses (one word each, innermost first), then `python` frames
    /// (two words each: code id, instruction offset with its marks).
    Stack StackDef {
        /// The id that events carry.
        id: u64,
        /// Native frames.
        native: u16,
        /// Python frames.
        python: u16,
        /// [`StackDef::TRUNCATED`] and others.
        marks: u32,
    }

    /// The operation of the backward pass that the thread runs until its next such record.
    Node Node {
        /// The forward operation that it undoes, see [`Operation`]; 0 when no operation runs.
        operation: u64,
        /// Number of its class, named by a NodeClass record.
        class: u64,
    }

    /// A forward operation: what [`Node`] refers to.
    Forward Forward {
        /// See [`Operation`].
        operation: u64,
        /// Stack id.
        stack: u64,
    }

    /// The forward operation after the chunk's last one.
    BriefForward BriefForward {
        /// Stack id.
        stack: u64,
    }

    /// `backward()` begins or ends on this thread.
    Backward Backward {
        /// PyTorch's number of the thread, see [`Operation`].
        thread: u64,
        /// Where it was called: stack id, 0 unknown.
        stack: u64,
        /// Where on the thread's stack: what is at this address or below has ended, however it did.
        frame: u64,
        /// 1 at the beginning, 0 at the end.
        begins: u64,
    }

    /// A Python code object, followed by the bytes of its qualified name, file name and line table, each padded
    /// to whole words.
    Code CodeDef {
        /// The id that frames carry.
        id: u64,
        /// Bytes of the name.
        name: u16,
        /// Bytes of the file name.
        file: u16,
        /// Bytes of the line table.
        lines: u32,
        /// Line of its first instruction's definition.
        first_line: u32,
        /// `(major << 8) | minor` of the interpreter: which line table this is.
        python: u16,
        /// Which of the texts were cut.
        marks: u16,
    }

    /// A text, followed by its bytes. Another thread may send it too.
    Text TextDef {
        /// The id that marks carry: its hash.
        id: u64,
        /// Bytes.
        length: u64,
    }

    /// A mark or a range of NVTX.
    Mark Mark {
        /// [`MarkAction`].
        action: u32,
        /// The program's number for a group of marks; 0 none.
        category: u32,
        /// Text id of what it is called; 0 none.
        text: u64,
        /// Text id of the domain's name; 0 the default domain.
        domain: u64,
        /// The number that joins the start of a range with its end; the thread that is named.
        range: u64,
    }

    /// A device of this process, followed by its name.
    Device Device {
        /// Ordinal in this process.
        ordinal: u32,
        /// Bytes of the name.
        name: u32,
        /// First half of `CUuuid`, as bytes in order.
        uuid_low: u64,
        /// Second half.
        uuid_high: u64,
        /// Bytes of memory (`cuDeviceTotalMem_v2`).
        total: u64,
    }
}

/// A number that the shim could not learn.
pub const UNKNOWN: u64 = u64::MAX;

impl Call {
    /// Recorded before the real function ran; a [`CallEnd`] follows unless the process died inside.
    pub const OPEN: u32 = 1;
    /// The call was made for memory of the host (`CUmemLocation.type` 2, 3, 4).
    pub const HOST: u32 = 2;
    /// The thread's stream was being captured into a graph.
    pub const CAPTURED: u32 = 4;
    /// Made inside PyTorch's `allocate`.
    pub const IN_ALLOCATE: u32 = 8;
    /// Made on a thread that NCCL started.
    pub const NCCL_THREAD: u32 = 16;
}

impl BlockFree {
    /// In the header's flags, also those of a [`BriefFree`]: the interpreter of the thread was collecting reference cycles.
    pub const COLLECTING: u8 = 1;
}

impl NcclEnter {
    /// A stream was being captured into a graph.
    pub const CAPTURED: u8 = 1;
}

impl Communicator {
    /// `comm_hash` is known.
    pub const HAS_HASH: u32 = 1;
    /// It has a color and a key.
    pub const HAS_COLOR: u32 = 2;
}

impl StackDef {
    /// Deeper frames are missing.
    pub const TRUNCATED: u32 = 1;
    /// The native unwinder could not go on.
    pub const BROKEN: u32 = 2;

    /// The id of a stack without frames, as in threads without Python where only Python was wanted. 0 is that of one that
    /// was not looked at.
    pub const EMPTY: u64 = 1;

    /// In the word of a native frame, beside its address: the function runs bytecode, up to the next Python frame
    /// with [`StackDef::ENTRY`].
    pub const INTERPRETER: u64 = 1 << 63;
    /// In the second word of a Python frame, beside the instruction offset (its low half): C code entered the
    /// interpreter to run it.
    pub const ENTRY: u64 = 1 << 32;
}

/// Bytes and device ordinal in one word.
#[inline]
#[must_use]
pub fn pack_device(device: i8, bytes: u64) -> u64 {
    u64::from(device as u8) << 56 | bytes & ((1 << 56) - 1)
}

/// The reverse of [`pack_device`].
#[inline]
#[must_use]
pub fn unpack_device(word: u64) -> (i8, u64) {
    ((word >> 56) as i8, word & ((1 << 56) - 1))
}

numbered! {
    /// What a [`Call`] did to memory, and which fields it filled.
    Action: u8 {
        /// Linear device memory: `addr`, `bytes`.
        Alloc = 1,
        /// Linear, managed or stream-ordered memory given back at once: `addr`.
        Free = 2,
        /// Stream-ordered: `addr`, `bytes`, `stream`, pool in `handle` (0: the device's current one).
        AllocAsync = 3,
        /// Stream-ordered: `addr`, `stream`.
        FreeAsync = 4,
        /// Managed memory: `addr`, `bytes`, flags in `extra`.
        AllocManaged = 5,
        /// Pinned host memory: `addr`, `bytes`, flags in `extra`.
        AllocHost = 6,
        /// Pinned host memory: `addr`.
        FreeHost = 7,
        /// Host memory pinned in place: `addr`, `bytes`, flags in `extra`.
        HostRegister = 8,
        /// `addr`.
        HostUnregister = 9,
        /// Address range: `addr`, `bytes`, alignment in `extra`.
        Reserve = 10,
        /// `addr`, `bytes`.
        Unreserve = 11,
        /// Physical memory: `handle`, `bytes`; its device is the location's.
        Create = 12,
        /// `handle`.
        Release = 13,
        /// `handle` from the mapped `addr`.
        Retain = 14,
        /// `addr`, `bytes`, `handle`, offset in `extra`.
        Map = 15,
        /// `addr`, `bytes`.
        Unmap = 16,
        /// `addr`, `bytes`; the access flags in `extra`.
        SetAccess = 17,
        /// `handle` to another process; the handle type in `extra`, the hash of a fabric handle in `addr`.
        Export = 18,
        /// `handle` from another process; the handle type in `extra`, the hash of a fabric handle in `addr`.
        Import = 19,
        /// `handle`; the device is the location's.
        PoolCreate = 20,
        /// `handle`.
        PoolDestroy = 21,
        /// `handle`, bytes to keep in `bytes`.
        PoolTrim = 22,
        /// `handle`, attribute in `extra`, its value in `bytes`.
        PoolGet = 23,
        /// `handle`, attribute in `extra`, its value in `bytes`.
        PoolSet = 24,
        /// `addr`: 64-byte handle made for another process; its hash in `handle`.
        IpcGet = 25,
        /// `addr` of another process's memory; the handle's hash in `handle`.
        IpcOpen = 26,
        /// `addr`.
        IpcClose = 27,
        /// `handle`; estimated `bytes`.
        ArrayCreate = 28,
        /// `handle`.
        ArrayDestroy = 29,
        /// Memory that a graph owns: `addr`, `bytes`, graph in `handle`.
        GraphAlloc = 30,
        /// `addr`, graph in `handle`.
        GraphFree = 31,
        /// `handle`; flags in `extra`.
        ContextCreate = 32,
        /// `handle`: everything in it is gone.
        ContextDestroy = 33,
        /// Primary context of the device in `extra`; `handle`.
        PrimaryRetain = 34,
        /// Primary context of the device in `extra`.
        PrimaryRelease = 35,
        /// Primary context of the device in `extra`: everything in it is gone.
        PrimaryReset = 36,
        /// The program asked: free bytes in `bytes`, total in `extra`.
        MemInfo = 37,
        /// A multicast object: `handle`, `bytes`; no memory of its own.
        MulticastCreate = 38,
        /// `stream` begins to be captured into a graph.
        CaptureBegin = 39,
        /// `stream` is no longer captured; graph in `handle`.
        CaptureEnd = 40,
        /// Memory of another process or of graphics: `addr`, `bytes`; owns nothing.
        ImportPointer = 41,
        /// `handle` of a pool made for or taken from another process.
        PoolShare = 42,
        /// The driver was initialised.
        Init = 43,
        /// `handle` is the device's current pool from now on.
        PoolSelect = 44,
        /// The program asked which pool is the device's: `handle`; 1 in `extra` for its default one.
        PoolOf = 45,
        /// Executable graph in `handle`, of the graph in `extra`.
        GraphInstantiate = 46,
        /// Executable graph in `handle`, on `stream`. Only where graphs own memory.
        GraphLaunch = 47,
        /// Executable graph in `handle`.
        GraphExecDestroy = 48,
        /// Graph in `handle`.
        GraphDestroy = 49,
        /// What graphs of the device keep and do not use goes back to the driver.
        GraphMemTrim = 50,
        /// The program asked: attribute in `extra`, its value in `bytes`.
        GraphMemGet = 51,
        /// Code: module or library in `handle`, bytes of its image where they are known.
        CodeLoad = 52,
        /// Module or library in `handle`.
        CodeUnload = 53,
        /// Function or module in `handle`: its code is on the device now. Told once, until code goes.
        FunctionLoad = 54,
        /// A limit of the context: which in `extra`, its value in `bytes`.
        LimitSet = 55,
        /// The memory of the context in `handle` is visible to the current one.
        PeerEnable = 56,
        /// PyTorch's allocator serves requests from the pool `handle`, `extra` (`MempoolId_t`) from now on: those of the thread, or
        /// of the streams that are captured. The thread's current one in `stream`.
        TorchPoolBegin = 57,
        /// It no longer does: the pool `handle`, `extra`.
        TorchPoolEnd = 58,
        /// A graph or a `MemPool` lets go of the pool `handle`, `extra`: the last one's cached segments may go.
        TorchPoolRelease = 59,
        /// A graph or a `MemPool` makes or shares the pool `handle`, `extra`.
        TorchPoolCreate = 60,
        /// Requests of others may use the pool `handle`, `extra` before they fail; 0 in `bytes` if no longer.
        TorchPoolUseOnOom = 61,
        /// Blocks of the pool `handle`, `extra` are handed out whole.
        TorchPoolNoSplit = 62,
        /// The program gives PyTorch's cached memory back: of the pool `handle`, `extra`, or of all where both are 0.
        TorchTrim = 63,
        /// A library handed out a part of memory that it has (NVSHMEM's symmetric heap): `addr`, `bytes`.
        HeapAlloc = 64,
        /// The same given back: `addr`.
        HeapFree = 65,
        /// A checkpoint of the process in `handle`, this or another: 1 locked, 2 taken, 3 restored, 4 unlocked in `extra`.
        Checkpoint = 66,
    }
}

numbered! {
    /// What the program said with a [`Mark`].
    MarkAction: u32 {
        /// A range of this thread begins.
        Push = 1,
        /// The range that the thread began last in the domain ends.
        Pop = 2,
        /// A range of the process begins: `range`.
        Start = 3,
        /// `range` ends.
        End = 4,
        /// One moment.
        Mark = 5,
        /// The thread whose kernel id is `range` has this name.
        NameThread = 6,
    }
}

numbered! {
    /// Whether the GPU's time for a call into NCCL is measured, or why it is not.
    NcclTimed: u32 {
        /// Nobody asked, or the call launches nothing.
        No = 0,
        /// Events stand around it: a [`NcclTiming`] follows for each communicator and stream, once they are done.
        Enqueued = 1,
        /// A stream was being captured into a graph.
        Capture = 2,
        /// Too many calls wait for the GPU: there was no event left.
        NoEvents = 3,
        /// NCCL goes on in a thread of its own, and nobody can say where in the stream.
        InProgress = 4,
        /// The driver refused an event, or its context is unknown or gone.
        Refused = 5,
    }
}

numbered! {
    /// What happened to a stream event of PyTorch's allocator.
    WaitAction: u32 {
        /// `cuEventRecord`: the block freed next on this thread waits for it.
        Record = 1,
        /// `cuEventQuery` inside `allocate`.
        Query = 2,
        /// `cuEventSynchronize`.
        Synchronize = 3,
    }
}

numbered! {
    /// What a call into NCCL does. The trace's `NcclOp` says which fields it fills.
    NcclOp: u8 {
        /// `ncclAllReduce`.
        AllReduce = 1,
        /// `ncclBroadcast`, `ncclBcast`.
        Broadcast = 2,
        /// `ncclReduce`.
        Reduce = 3,
        /// `ncclAllGather`.
        AllGather = 4,
        /// `ncclReduceScatter`.
        ReduceScatter = 5,
        /// `ncclAlltoAll`.
        AlltoAll = 6,
        /// `ncclGather`.
        Gather = 7,
        /// `ncclScatter`.
        Scatter = 8,
        /// `ncclSend`.
        Send = 9,
        /// `ncclRecv`.
        Receive = 10,
        /// `ncclPutSignal`.
        PutSignal = 11,
        /// `ncclSignal`.
        Signal = 12,
        /// `ncclWaitSignal`.
        WaitSignal = 13,
        /// `ncclGroupStart`.
        GroupStart = 14,
        /// `ncclGroupEnd`.
        GroupEnd = 15,
        /// `ncclGroupSimulateEnd`.
        GroupSimulateEnd = 16,
        /// `ncclGetUniqueId`, `ncclCommGetUniqueId`.
        UniqueId = 17,
        /// `ncclCommInitRank` and its kin.
        CommInit = 18,
        /// `ncclCommInitAll`.
        CommInitAll = 19,
        /// `ncclCommSplit`.
        CommSplit = 20,
        /// `ncclCommShrink`.
        CommShrink = 21,
        /// `ncclCommGrow`.
        CommGrow = 22,
        /// `ncclCommFinalize`.
        CommFinalize = 23,
        /// `ncclCommDestroy`.
        CommDestroy = 24,
        /// `ncclCommAbort`.
        CommAbort = 25,
        /// `ncclCommRevoke`.
        CommRevoke = 26,
        /// `ncclCommSuspend`.
        CommSuspend = 27,
        /// `ncclCommResume`.
        CommResume = 28,
        /// `ncclCommGetAsyncError` with another answer than before.
        AsyncError = 29,
        /// `ncclMemAlloc`.
        MemAlloc = 30,
        /// `ncclMemFree`.
        MemFree = 31,
        /// `ncclCommRegister`.
        Register = 32,
        /// `ncclCommDeregister`.
        Deregister = 33,
        /// `ncclCommWindowRegister`.
        WindowRegister = 34,
        /// `ncclCommWindowDeregister`.
        WindowDeregister = 35,
        /// `ncclRedOpCreatePreMulSum`.
        RedOpCreate = 36,
        /// `ncclRedOpDestroy`.
        RedOpDestroy = 37,
        /// `ncclDevCommCreate`.
        DevCommCreate = 38,
        /// `ncclDevCommDestroy`.
        DevCommDestroy = 39,
    }
}

mod operation;
mod pjrt;
pub use operation::Operation;
pub use pjrt::*;

#[cfg(test)]
mod tests;
