//! Contexts that go: our own events in them go too.

use crate::nccl::timing::{Going, around_destruction};
use crate::probe;
use crate::session::Start;
use core::ffi::c_void;
use gputrace_ring::record::Action;

/// `cuCtxDestroy` and `cuCtxDestroy_v2`.
pub(crate) fn destroyed(run: impl FnOnce() -> i32, row: u16, context: *mut c_void) -> i32 {
    let run = || around_destruction(Going::Context(context as u64), run);
    probe::release(row, Action::ContextDestroy, run, |draft, _| draft.handle(context))
}

/// `cuDevicePrimaryCtxRelease` and `cuDevicePrimaryCtxRelease_v2`.
pub(crate) fn released(run: impl FnOnce() -> i32, row: u16, device: i32) -> i32 {
    primary(Action::PrimaryRelease, || around_destruction(Going::Released(device), run), row, device)
}

/// `cuDevicePrimaryCtxReset` and `cuDevicePrimaryCtxReset_v2`.
pub(crate) fn reset(run: impl FnOnce() -> i32, row: u16, device: i32) -> i32 {
    primary(Action::PrimaryReset, || around_destruction(Going::Reset(device), run), row, device)
}

fn primary(action: Action, run: impl FnOnce() -> i32, row: u16, device: i32) -> i32 {
    probe::acquire(Start::IfNeeded, row, action, run, |draft, _| {
        draft.device(device);
        draft.extra(device);
    })
}
