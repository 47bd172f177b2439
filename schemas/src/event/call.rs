//! Calls into the driver, and what each does to memory.

use super::{ApiId, Bytes, CommId, Nanos};

/// A call into the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// Which function.
    pub api: ApiId,
    /// What it does to memory; says which of the fields below mean something.
    pub action: Action,
    /// Device ordinal, [`NO_DEVICE`](super::NO_DEVICE) or [`HOST`](super::HOST).
    pub device: i16,
    /// `CUresult`; 0 is success. `None`: the process ended inside the call.
    pub result: Option<i32>,
    /// Device or host address.
    pub addr: u64,
    /// Bytes requested.
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
    /// [`NcclEnter::call`](super::NcclEnter::call) of the program's call that caused it; 0 if none did, or it is not known which.
    pub nccl_call: u64,
    /// Made on a thread that NCCL started, not inside the program's call: `comm` is the one that the thread was started
    /// for or whose call was open at that moment.
    pub nccl_thread: bool,
}

impl Action {
    /// The action allocates memory.
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
        /// PyTorch's allocator serves requests from the pool `handle`, `extra` (`MempoolId_t`) from now on: those of the thread, or
        /// of the streams that are captured. The thread's current one in `stream`.
        TorchPoolBegin = 57 "torch_pool_begin",
        /// It no longer does: the pool `handle`, `extra`.
        TorchPoolEnd = 58 "torch_pool_end",
        /// A graph or a `MemPool` lets go of the pool `handle`, `extra`: the last one's cached segments may go.
        TorchPoolRelease = 59 "torch_pool_release",
        /// A graph or a `MemPool` makes or shares the pool `handle`, `extra`.
        TorchPoolCreate = 60 "torch_pool_create",
        /// Requests of others may use the pool `handle`, `extra` before they fail; 0 in `bytes` if no longer.
        TorchPoolUseOnOom = 61 "torch_pool_use_on_oom",
        /// Blocks of the pool `handle`, `extra` are handed out whole.
        TorchPoolNoSplit = 62 "torch_pool_no_split",
        /// The program gives PyTorch's cached memory back: of the pool `handle`, `extra`, or of all where both are 0.
        TorchTrim = 63 "torch_trim",
        /// A library handed out a part of memory that it has (NVSHMEM's symmetric heap): `addr`, `bytes`.
        HeapAlloc = 64 "heap_alloc",
        /// The same given back: `addr`.
        HeapFree = 65 "heap_free",
        /// A checkpoint of the process in `handle`, this or another: 1 locked, 2 taken, 3 restored, 4 unlocked in `extra`.
        Checkpoint = 66 "checkpoint",
    }
}
