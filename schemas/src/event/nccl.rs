//! Communicators of NCCL, and calls into it.

use serde::{Deserialize, Serialize};

use super::{ApiId, CommId, Nanos};

/// A communicator of NCCL, or the attempt to make one: defined when the call that makes it begins, and again when it
/// has ended and more is known.
///
/// Two processes' communicators are the same one if [`Communicator::unique_id`] and [`Communicator::ordinal`] agree
/// for those that have no parent, and if parent, `ordinal` and `color` agree for those that were split off another.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
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
    /// Device ordinal: the current one when the call was made, [`NO_DEVICE`](super::NO_DEVICE) if there was none.
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
    /// The amount that the program requested in `ncclConfig_t`.
    pub config: CommConfig,
}

/// Fields of `ncclConfig_t` within the size that the program declared; `None` where it left the choice to NCCL.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct CommConfig {
    /// `commName` (2.27); where PyTorch makes the communicator, description and name of its process group.
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

/// A call into NCCL, as the program made it: what NCCL calls of itself is left out. [`NcclOp`] says which fields mean
/// something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NcclEnter {
    /// Which function; `pncclX` is named as `ncclX`.
    pub api: ApiId,
    /// The operation.
    pub op: NcclOp,
    /// Number of the call in the process, from 1.
    pub call: u64,
    /// The communicator; for those that make one, the new one (`ncclCommInitAll`: the first).
    pub comm: CommId,
    /// Number of the call on this communicator, from 0, counted apart for each [`NcclSequence`]; [`UNKNOWN`](super::UNKNOWN) for
    /// calls that have no order. A call that fails (not `ncclSuccess` or `ncclInProgress`) or whose group was only
    /// simulated gives its number back.
    pub sequence: u64,
    /// Number of the outermost `ncclGroupStart` that is open on the thread, in the process from 1; 0 outside groups.
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
    /// Whether the GPU's time for it is measured; `None` if nobody requested that, or it launches nothing.
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

numbered! {
    /// Whether the GPU's time for a call into NCCL is measured, or why it is not.
    NcclTimed {
        /// It is: one [`NcclTiming`] follows for each communicator and stream, unless it never ran to its end.
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
