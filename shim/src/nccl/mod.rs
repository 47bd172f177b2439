//! What the rows of `hooks/nccl.rs` need: NCCL's libraries, its communicators, and calls into it.
//!
//! ```text
//! program ── ncclAllReduce ──> row ──> call::around: enter record, real call, exit record ──> ring
//!                                       comms: which communicator, which number on it
//! NCCL's own thread ── cuMemCreate ──> probe ──> threads::charge: for which communicator, because of which call
//! ```
//!
//! NCCL calls its own public functions; only the outermost call of a thread is the program's.

pub(crate) mod banks;
pub(crate) mod call;
pub(crate) mod comms;
pub(crate) mod config;
pub(crate) mod grouped;
pub(crate) mod hash;
pub(crate) mod noted;
pub(crate) mod process_groups;
pub(crate) mod threads;
pub(crate) mod timing;

pub(crate) use config::Config;

/// `ncclComm_t`.
pub(crate) type Comm = *mut core::ffi::c_void;

/// `ncclUniqueId`, nccl.h: passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

/// `ncclWaitSignalDesc_t`, nccl.h 2.29.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct WaitSignal {
    pub(crate) count: i32,
    pub(crate) peer: i32,
    pub(crate) signal: i32,
    pub(crate) context: i32,
}
