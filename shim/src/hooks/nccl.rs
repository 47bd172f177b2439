//! NCCL: one row a function, as in `cuda_driver.rs`, and the reasons why some functions have none.
//!
//! ```text
//! /// `ncclResult_t ncclSend(const void *sendbuff, size_t count, ...)`
//! fn ncclSend / pncclSend(send: Address, count: usize, datatype: i32, peer: i32, comm: Comm, stream: Address)
//!     = call Send { send: send, count: count, datatype: datatype, peer: peer, comm: comm, stream: stream };
//! ```
//!
//! Prototypes are those of nccl.h 2.18 to 2.32, where they have never changed. The fields are filled in the order they
//! are written in: `peer` before `comm`, which counts by peer; `redop` after `comm`, which made it.
//!
//! Exported, and no rows (`tests/nccl.rs` compares with what the releases export):
//!
//! | function | why |
//! |---|---|
//! | `ncclGetVersion` | only reads; we ask it ourselves |
//! | `ncclGetErrorString` | gives a text |
//! | `ncclGetLastError` | gives a text |
//! | `ncclCommCount` | only reads; we ask it ourselves |
//! | `ncclCommUserRank` | only reads; we ask it ourselves |
//! | `ncclCommCuDevice` | only reads |
//! | `ncclCommQueryProperties` | only reads |
//! | `ncclCommMemStats` | only reads |
//! | `ncclWinGetUserPtr` | only reads |
//! | `ncclTeam*` | computes ranks of teams, on the host |
//! | `ncclLsa*` | computes what a kernel will need, before `ncclDevCommCreate` |
//! | `ncclGin*` | computes what a kernel will need, before `ncclDevCommCreate` |
//! | `ncclLLA2A*` | computes what a kernel will need, before `ncclDevCommCreate` |
//! | `ncclGetCft*` | gives addresses of a window that is registered already |
//! | `ncclGetLsa*` | gives addresses of a window that is registered already |
//! | `ncclGetMultimem*` | gives addresses of a window that is registered already |
//! | `ncclGetPeer*` | gives addresses of a window that is registered already |
//! | `ncclParam*` | reads NCCL's settings |
//! | `ncclResetDebugInit*` | opens NCCL's log anew |
//! | `ncclSetEncryption` | sets how the network is encrypted |

use super::nccl_loader;
use crate::nccl::banks::{BANKS, LINKED, LINKED_PROFILED};
use crate::nccl::{Comm, UniqueId, WaitSignal, call, comms};
use crate::session::Start;
use core::ffi::{CStr, c_void};
use core::ptr::{null, null_mut};
use gputrace_ring::record::NcclOp;

type Address = *mut c_void;

/// What the loader and the trace know of a row.
pub(crate) struct Hook {
    /// The exported symbol.
    pub(crate) name: &'static CStr,
    /// Its other name: tools call it to pass by those who stand in for the first.
    pub(crate) profiled: &'static CStr,
    /// Our function, once for each bank.
    pub(crate) banks: [*const (); BANKS],
}

// SAFETY: addresses of functions are plain numbers.
unsafe impl Sync for Hook {}

/// Signal and context in one number.
fn signal_of(signal: i32, context: i32) -> u64 {
    u64::from(signal as u32) << 32 | u64::from(context as u32)
}

/// The first signal that is waited for.
fn first_signal(n: i32, signals: *const WaitSignal) -> WaitSignal {
    if n < 1 || signals.is_null() {
        return WaitSignal { count: 0, peer: -1, signal: 0, context: 0 };
    }
    // SAFETY: the program gives NCCL `n` of them.
    unsafe { *signals }
}

/// Signals that are waited for.
fn signals_in(n: i32, signals: *const WaitSignal) -> u64 {
    let n = if signals.is_null() { 0 } else { usize::try_from(n).unwrap_or(0) };
    // SAFETY: as above.
    (0..n).map(|index| unsafe { *signals.wrapping_add(index) }.count.max(0) as u64).sum()
}

/// What NCCL wrote.
///
/// # Safety
/// The call that writes it has succeeded.
unsafe fn read(out: *const Address) -> u64 {
    // SAFETY: the caller's promise.
    if out.is_null() { 0 } else { unsafe { *out as u64 } }
}

/// Writes the functions in all banks, the exported ones, and the table.
macro_rules! hooks {
    ($(
        $(#[$doc:meta])*
        fn $name:ident / $profiled:ident($($arg:ident: $type:ty),* $(,)?)
            = $shape:ident $($op:ident)? { $($field:ident: $value:expr),* $(,)? } $(gives ($given:expr))? $(via $custom:path)?;
    )*) => {
        /// Places of the rows in [`HOOKS`].
        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[repr(u16)]
        enum Row { $( $name, )* }

        /// How many rows there are.
        pub(crate) const ROWS: usize = [ $( stringify!($name), )* ].len();

        /// Every function we stand in for.
        pub(crate) static HOOKS: &[Hook] = &[ $( Hook {
            // SAFETY: the literal ends with its only zero.
            name: unsafe { CStr::from_bytes_with_nul_unchecked(concat!(stringify!($name), "\0").as_bytes()) },
            // SAFETY: as above.
            profiled: unsafe { CStr::from_bytes_with_nul_unchecked(concat!(stringify!($profiled), "\0").as_bytes()) },
            banks: [
                $name as *const (),
                $profiled as *const (),
                banks::$name::<2> as *const (),
                banks::$name::<3> as *const (),
                banks::$name::<4> as *const (),
                banks::$name::<5> as *const (),
            ],
        }, )* ];

        $(
            $(#[$doc])*
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
            pub(crate) unsafe extern "C" fn $name($($arg: $type),*) -> i32 {
                // SAFETY: the program's own arguments, passed on unchanged.
                unsafe { banks::$name::<LINKED>($($arg),*) }
            }

            $(#[$doc])*
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
            pub(crate) unsafe extern "C" fn $profiled($($arg: $type),*) -> i32 {
                // SAFETY: as above.
                unsafe { banks::$name::<LINKED_PROFILED>($($arg),*) }
            }
        )*

        /// The rows as functions, for each library that a program can mean.
        mod banks {
            use super::*;
            $(
                #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
                pub(super) unsafe extern "C" fn $name<const BANK: usize>($($arg: $type),*) -> i32 {
                    type Real = unsafe extern "C" fn($($type),*) -> i32;
                    const ROW: u16 = Row::$name as u16;
                    // SAFETY: the row gives the function's own prototype.
                    let real = match unsafe { nccl_loader::real::<Real>(BANK, ROW) } {
                        Some(real) => real,
                        None => return nccl_loader::absent(ROW),
                    };
                    // SAFETY: the program's own arguments, passed on unchanged.
                    let run = || unsafe { real($($arg),*) };
                    hooks!(@$shape run, ROW, BANK, $($op,)? { $($field: $value),* } $(gives ($given))? $(via $custom)?)
                }
            )*
        }
    };
    (@call $run:ident, $row:ident, $bank:ident, $op:ident, { $($field:ident: $value:expr),* } $(gives ($given:expr))?) => {
        hooks!(@around Start::OnlyIfLive, $run, $row, $op, { $($field: $value),* } $(gives ($given))?)
    };
    (@acquire $run:ident, $row:ident, $bank:ident, $op:ident, { $($field:ident: $value:expr),* } $(gives ($given:expr))?) => {
        hooks!(@around Start::IfNeeded, $run, $row, $op, { $($field: $value),* } $(gives ($given))?)
    };
    (@around $start:expr, $run:ident, $row:ident, $op:ident, { $($field:ident: $value:expr),* } $(gives ($given:expr))?) => {
        call::around($start, $row, NcclOp::$op, $run, |_draft| { $( _draft.$field($value); )* }, || {
            let given = 0_u64;
            // SAFETY: NCCL has written it, for it succeeded.
            $( let given = { let _ = given; unsafe { $given } }; )?
            given
        })
    };
    (@custom $run:ident, $row:ident, $bank:ident, { $($field:ident: $value:expr),* } via $custom:path) => {
        $custom($run, call::Place { row: $row, bank: $bank }, $($value),*)
    };
}

hooks! {
    // Communicators come.

    /// `ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank)`
    fn ncclCommInitRank / pncclCommInitRank(out: *mut Comm, n_ranks: i32, id: UniqueId, rank: i32)
        = custom { out: out, n_ranks: n_ranks, id: &raw const id, rank: rank, config: null() } via comms::init_rank;
    /// `ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config)`
    fn ncclCommInitRankConfig / pncclCommInitRankConfig(out: *mut Comm, n_ranks: i32, id: UniqueId, rank: i32, config: *mut c_void)
        = custom { out: out, n_ranks: n_ranks, id: &raw const id, rank: rank, config: config } via comms::init_rank;
    /// `ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds, ncclConfig_t *config)`
    fn ncclCommInitRankScalable / pncclCommInitRankScalable(out: *mut Comm, n_ranks: i32, rank: i32, n_ids: i32, ids: *mut UniqueId, config: *mut c_void)
        = custom { out: out, n_ranks: n_ranks, id: ids, rank: rank, config: config } via comms::init_rank;
    /// `ncclResult_t ncclCommInitAll(ncclComm_t *comm, int ndev, const int *devlist)`
    fn ncclCommInitAll / pncclCommInitAll(out: *mut Comm, n_devices: i32, devices: *const i32)
        = custom { out: out, n_devices: n_devices, devices: devices } via comms::init_all;
    /// `ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config)`
    fn ncclCommSplit / pncclCommSplit(comm: Comm, color: i32, key: i32, out: *mut Comm, config: *mut c_void)
        = custom { comm: comm, color: color, key: key, out: out, config: config } via comms::split;
    /// `ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags)`
    fn ncclCommShrink / pncclCommShrink(comm: Comm, excluded: *mut i32, n_excluded: i32, out: *mut Comm, config: *mut c_void, flags: i32)
        = custom { comm: comm, excluded: excluded, n_excluded: n_excluded, out: out, config: config, flags: flags } via comms::shrink;
    /// `ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank, ncclComm_t *newcomm, ncclConfig_t *config)`
    fn ncclCommGrow / pncclCommGrow(comm: Comm, n_ranks: i32, id: *const UniqueId, rank: i32, out: *mut Comm, config: *mut c_void)
        = custom { comm: comm, n_ranks: n_ranks, id: id, rank: rank, out: out, config: config } via comms::grow;
    /// `ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId)`
    fn ncclGetUniqueId / pncclGetUniqueId(id: *mut UniqueId)
        = custom { comm: null_mut(), id: id } via comms::unique_id;
    /// `ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId)`
    fn ncclCommGetUniqueId / pncclCommGetUniqueId(comm: Comm, id: *mut UniqueId)
        = custom { comm: comm, id: id } via comms::unique_id;

    // Communicators go.

    /// `ncclResult_t ncclCommFinalize(ncclComm_t comm)`
    fn ncclCommFinalize / pncclCommFinalize(comm: Comm)
        = call CommFinalize { comm: comm };
    /// `ncclResult_t ncclCommDestroy(ncclComm_t comm)`
    fn ncclCommDestroy / pncclCommDestroy(comm: Comm)
        = call CommDestroy { comm: comm };
    /// `ncclResult_t ncclCommAbort(ncclComm_t comm)`
    fn ncclCommAbort / pncclCommAbort(comm: Comm)
        = call CommAbort { comm: comm };
    /// `ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags)`
    fn ncclCommRevoke / pncclCommRevoke(comm: Comm, flags: i32)
        = call CommRevoke { comm: comm, extra: flags };
    /// `ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags)`
    fn ncclCommSuspend / pncclCommSuspend(comm: Comm, flags: i32)
        = call CommSuspend { comm: comm, extra: flags };
    /// `ncclResult_t ncclCommResume(ncclComm_t comm)`
    fn ncclCommResume / pncclCommResume(comm: Comm)
        = call CommResume { comm: comm };
    /// `ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError)`
    fn ncclCommGetAsyncError / pncclCommGetAsyncError(comm: Comm, error: *mut i32)
        = custom { comm: comm, error: error } via comms::async_error;

    // Collectives.

    /// `ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)`
    fn ncclAllReduce / pncclAllReduce(send: Address, receive: Address, count: usize, datatype: i32, redop: i32, comm: Comm, stream: Address)
        = call AllReduce { send: send, receive: receive, count: count, datatype: datatype, comm: comm, redop: redop, stream: stream };
    /// `ncclResult_t ncclAllReduceConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)`
    fn ncclAllReduceConfig / pncclAllReduceConfig(send: Address, receive: Address, count: usize, datatype: i32, redop: i32, comm: Comm, stream: Address, config: Address)
        = call AllReduce { send: send, receive: receive, count: count, datatype: datatype, comm: comm, redop: redop, stream: stream };
    /// `ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)`
    fn ncclBroadcast / pncclBroadcast(send: Address, receive: Address, count: usize, datatype: i32, root: i32, comm: Comm, stream: Address)
        = call Broadcast { send: send, receive: receive, count: count, datatype: datatype, peer: root, comm: comm, stream: stream };
    /// `ncclResult_t ncclBroadcastConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)`
    fn ncclBroadcastConfig / pncclBroadcastConfig(send: Address, receive: Address, count: usize, datatype: i32, root: i32, comm: Comm, stream: Address, config: Address)
        = call Broadcast { send: send, receive: receive, count: count, datatype: datatype, peer: root, comm: comm, stream: stream };
    /// `ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)`
    fn ncclBcast / pncclBcast(buffer: Address, count: usize, datatype: i32, root: i32, comm: Comm, stream: Address)
        = call Broadcast { send: buffer, receive: buffer, count: count, datatype: datatype, peer: root, comm: comm, stream: stream };
    /// `ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream)`
    fn ncclReduce / pncclReduce(send: Address, receive: Address, count: usize, datatype: i32, redop: i32, root: i32, comm: Comm, stream: Address)
        = call Reduce { send: send, receive: receive, count: count, datatype: datatype, peer: root, comm: comm, redop: redop, stream: stream };
    /// `ncclResult_t ncclReduceConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)`
    fn ncclReduceConfig / pncclReduceConfig(send: Address, receive: Address, count: usize, datatype: i32, redop: i32, root: i32, comm: Comm, stream: Address, config: Address)
        = call Reduce { send: send, receive: receive, count: count, datatype: datatype, peer: root, comm: comm, redop: redop, stream: stream };
    /// `ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)`
    fn ncclAllGather / pncclAllGather(send: Address, receive: Address, count: usize, datatype: i32, comm: Comm, stream: Address)
        = call AllGather { send: send, receive: receive, count: count, datatype: datatype, comm: comm, stream: stream };
    /// `ncclResult_t ncclAllGatherConfig(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)`
    fn ncclAllGatherConfig / pncclAllGatherConfig(send: Address, receive: Address, count: usize, datatype: i32, comm: Comm, stream: Address, config: Address)
        = call AllGather { send: send, receive: receive, count: count, datatype: datatype, comm: comm, stream: stream };
    /// `ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream)`
    fn ncclReduceScatter / pncclReduceScatter(send: Address, receive: Address, count: usize, datatype: i32, redop: i32, comm: Comm, stream: Address)
        = call ReduceScatter { send: send, receive: receive, count: count, datatype: datatype, comm: comm, redop: redop, stream: stream };
    /// `ncclResult_t ncclReduceScatterConfig(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)`
    fn ncclReduceScatterConfig / pncclReduceScatterConfig(send: Address, receive: Address, count: usize, datatype: i32, redop: i32, comm: Comm, stream: Address, config: Address)
        = call ReduceScatter { send: send, receive: receive, count: count, datatype: datatype, comm: comm, redop: redop, stream: stream };
    /// `ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream)`
    fn ncclAlltoAll / pncclAlltoAll(send: Address, receive: Address, count: usize, datatype: i32, comm: Comm, stream: Address)
        = call AlltoAll { send: send, receive: receive, count: count, datatype: datatype, comm: comm, stream: stream };
    /// `ncclResult_t ncclAlltoAllConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)`
    fn ncclAlltoAllConfig / pncclAlltoAllConfig(send: Address, receive: Address, count: usize, datatype: i32, comm: Comm, stream: Address, config: Address)
        = call AlltoAll { send: send, receive: receive, count: count, datatype: datatype, comm: comm, stream: stream };
    /// `ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)`
    fn ncclGather / pncclGather(send: Address, receive: Address, count: usize, datatype: i32, root: i32, comm: Comm, stream: Address)
        = call Gather { send: send, receive: receive, count: count, datatype: datatype, peer: root, comm: comm, stream: stream };
    /// `ncclResult_t ncclGatherConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)`
    fn ncclGatherConfig / pncclGatherConfig(send: Address, receive: Address, count: usize, datatype: i32, root: i32, comm: Comm, stream: Address, config: Address)
        = call Gather { send: send, receive: receive, count: count, datatype: datatype, peer: root, comm: comm, stream: stream };
    /// `ncclResult_t ncclScatter(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream)`
    fn ncclScatter / pncclScatter(send: Address, receive: Address, count: usize, datatype: i32, root: i32, comm: Comm, stream: Address)
        = call Scatter { send: send, receive: receive, count: count, datatype: datatype, peer: root, comm: comm, stream: stream };
    /// `ncclResult_t ncclScatterConfig(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t *config)`
    fn ncclScatterConfig / pncclScatterConfig(send: Address, receive: Address, count: usize, datatype: i32, root: i32, comm: Comm, stream: Address, config: Address)
        = call Scatter { send: send, receive: receive, count: count, datatype: datatype, peer: root, comm: comm, stream: stream };

    // Point to point, and one-sided.

    /// `ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)`
    fn ncclSend / pncclSend(send: Address, count: usize, datatype: i32, peer: i32, comm: Comm, stream: Address)
        = call Send { send: send, count: count, datatype: datatype, peer: peer, comm: comm, stream: stream };
    /// `ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream)`
    fn ncclRecv / pncclRecv(receive: Address, count: usize, datatype: i32, peer: i32, comm: Comm, stream: Address)
        = call Receive { receive: receive, count: count, datatype: datatype, peer: peer, comm: comm, stream: stream };
    /// `ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)`
    fn ncclPutSignal / pncclPutSignal(send: Address, count: usize, datatype: i32, peer: i32, window: Address, offset: usize, signal: i32, context: i32, flags: u32, comm: Comm, stream: Address)
        = call PutSignal { send: send, count: count, datatype: datatype, peer: peer, handle: window, extra: offset, comm: comm, stream: stream };
    /// `ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned int flags, ncclComm_t comm, cudaStream_t stream)`
    fn ncclSignal / pncclSignal(peer: i32, signal: i32, context: i32, flags: u32, comm: Comm, stream: Address)
        = call Signal { peer: peer, extra: signal_of(signal, context), comm: comm, stream: stream };
    /// `ncclResult_t ncclWaitSignal(int nDesc, ncclWaitSignalDesc_t *signalDescs, ncclComm_t comm, cudaStream_t stream)`
    fn ncclWaitSignal / pncclWaitSignal(n: i32, signals: *mut WaitSignal, comm: Comm, stream: Address)
        = call WaitSignal { count: signals_in(n, signals), peer: first_signal(n, signals).peer, extra: signal_of(first_signal(n, signals).signal, first_signal(n, signals).context), comm: comm, stream: stream };

    // Groups.

    /// `ncclResult_t ncclGroupStart(void)`
    fn ncclGroupStart / pncclGroupStart()
        = call GroupStart {};
    /// `ncclResult_t ncclGroupEnd(void)`
    fn ncclGroupEnd / pncclGroupEnd()
        = call GroupEnd {};
    /// `ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo)`
    fn ncclGroupSimulateEnd / pncclGroupSimulateEnd(info: Address)
        = call GroupSimulateEnd {};

    // Memory, registrations, windows, reduction operations.

    /// `ncclResult_t ncclMemAlloc(void **ptr, size_t size)`
    fn ncclMemAlloc / pncclMemAlloc(pointer: *mut Address, size: usize)
        = acquire MemAlloc { count: size } gives (read(pointer));
    /// `ncclResult_t ncclMemFree(void *ptr)`
    fn ncclMemFree / pncclMemFree(pointer: Address)
        = call MemFree { send: pointer };
    /// `ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle)`
    fn ncclCommRegister / pncclCommRegister(comm: Comm, buffer: Address, size: usize, handle: *mut Address)
        = call Register { comm: comm, send: buffer, count: size } gives (read(handle));
    /// `ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)`
    fn ncclCommDeregister / pncclCommDeregister(comm: Comm, handle: Address)
        = call Deregister { comm: comm, handle: handle };
    /// `ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags)`
    fn ncclCommWindowRegister / pncclCommWindowRegister(comm: Comm, buffer: Address, size: usize, window: *mut Address, flags: i32)
        = call WindowRegister { comm: comm, send: buffer, count: size, extra: flags } gives (read(window));
    /// `ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win)`
    fn ncclCommWindowDeregister / pncclCommWindowDeregister(comm: Comm, window: Address)
        = call WindowDeregister { comm: comm, handle: window };
    /// `ncclResult_t ncclDevCommCreate(ncclComm_t comm, ncclDevCommRequirements_t const *reqs, ncclDevComm_t *outDevComm)`
    fn ncclDevCommCreate / pncclDevCommCreate(comm: Comm, requirements: Address, out: Address)
        = call DevCommCreate { comm: comm };
    /// `ncclResult_t ncclDevCommDestroy(ncclComm_t comm, ncclDevComm_t const *devComm)`
    fn ncclDevCommDestroy / pncclDevCommDestroy(comm: Comm, dev_comm: Address)
        = call DevCommDestroy { comm: comm };
    /// `ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm)`
    fn ncclRedOpCreatePreMulSum / pncclRedOpCreatePreMulSum(op: *mut i32, scalar: Address, datatype: i32, residence: i32, comm: Comm)
        = custom { op: op, datatype: datatype, residence: residence, comm: comm } via comms::redop_create;
    /// `ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm)`
    fn ncclRedOpDestroy / pncclRedOpDestroy(op: i32, comm: Comm)
        = custom { op: op, comm: comm } via comms::redop_destroy;
}
