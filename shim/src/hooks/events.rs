//! Stream events, stream capture, and nodes of graphs.
//!
//! PyTorch's allocator gives a block that other streams used back to its pool only when an event it recorded on each
//! of them is done (CUDACachingAllocator.cpp `insert_events`, `process_events`). It records them just
//! before it reports the free, on the same thread, and asks for them inside `allocate`. Programs record and ask for
//! far more events than that, so a recorded event is only noted beside the thread, and becomes a record when a free
//! of PyTorch's follows.

use super::structs::{self, GraphNode};
use super::torch;
use crate::captures;
use crate::lanes;
use crate::probe;
use crate::session::{self, Start};
use crate::thread_state::WAIT_SLOTS;
use crate::tls;
use core::ffi::c_void;
use gputrace_ring::record::{Action, Wait, WaitAction};

/// `cuEventRecord` and its variants.
#[inline]
pub(crate) fn recorded(run: impl FnOnce() -> i32, event: *mut c_void, stream: *mut c_void) -> i32 {
    let result = run();
    // Only threads that made PyTorch events have somewhere to note it.
    if result == 0
        && torch::is_here()
        && let Some(mut lane) = lanes::lane(Start::OnlyIfLive)
    {
        let tls = tls::here();
        let n = tls.waits.get() as usize;
        let wait =
            Wait { event: event as u64, stream: stream as u64, action: WaitAction::Record as u32, result: 0 };
        // The newest are those that matter: the oldest makes room.
        let waits = &mut lane.state().waits;
        if let Some(slot) = waits.get_mut(n % WAIT_SLOTS) {
            *slot = wait;
        }
        tls.waits.set((n + 1) as u32);
    }
    result
}

/// `cuEventQuery`: of interest only inside PyTorch's `allocate`.
#[inline]
pub(crate) fn queried(run: impl FnOnce() -> i32, event: *mut c_void) -> i32 {
    let result = run();
    if tls::here().is_in_allocate() {
        send(event, WaitAction::Query, result);
    }
    result
}

/// `cuEventSynchronize`: PyTorch waits for all its events before it gives memory back to the driver.
#[inline]
pub(crate) fn synchronised(run: impl FnOnce() -> i32, event: *mut c_void) -> i32 {
    let result = run();
    if torch::is_here() {
        send(event, WaitAction::Synchronize, result);
    }
    result
}

fn send(event: *mut c_void, action: WaitAction, result: i32) {
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        let at = session::now();
        let wait = Wait { event: event as u64, stream: 0, action: action as u32, result };
        lane.producer().push(at, 0, &wait);
    }
}

/// `cuGraphAddNode`: of interest only for nodes that give memory out or take it back.
pub(crate) fn graph_node(
    run: impl FnOnce() -> i32,
    row: u16,
    graph: *mut c_void,
    params: *mut c_void,
) -> i32 {
    // There is a session since there is a context, without which no node is made.
    if !session::is_live() {
        return run();
    }
    // SAFETY: the program's own structure, which the driver is about to read.
    match unsafe { structs::graph_node(params) } {
        GraphNode::Other => run(),
        GraphNode::Alloc => {
            probe::acquire(Start::IfNeeded, row, Action::GraphAlloc, run, |draft, succeeded| {
                // SAFETY: as above; after success the driver has written the address.
                let node = unsafe { structs::graph_node_alloc(params) };
                draft.handle(graph);
                draft.bytes(node.bytes);
                draft.location(node.location);
                if succeeded {
                    draft.addr(node.addr);
                }
            })
        }
        GraphNode::Free(addr) => probe::acquire(Start::IfNeeded, row, Action::GraphFree, run, |draft, _| {
            draft.handle(graph);
            draft.addr(addr);
        }),
    }
}

/// `cuGraphLaunch`.
#[inline]
pub(crate) fn graph_launch(
    run: impl FnOnce() -> i32,
    row: u16,
    exec: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    if !captures::graphs_own_memory() {
        return run();
    }
    probe::acquire(Start::OnlyIfLive, row, Action::GraphLaunch, run, |draft, _| {
        draft.handle(exec);
        draft.stream(stream);
    })
}

/// `cuStreamBeginCapture_v2`.
pub(crate) fn begin_capture(run: impl FnOnce() -> i32, row: u16, stream: *mut c_void, mode: i32) -> i32 {
    let result = probe::acquire(Start::OnlyIfLive, row, Action::CaptureBegin, run, |draft, _| {
        draft.stream(stream);
        draft.extra(mode);
    });
    if result == 0 {
        captures::note_begun(tls::here());
    }
    result
}

/// `cuStreamEndCapture`.
pub(crate) fn end_capture(
    run: impl FnOnce() -> i32,
    row: u16,
    stream: *mut c_void,
    graph: *mut *mut c_void,
) -> i32 {
    let result = probe::acquire(Start::OnlyIfLive, row, Action::CaptureEnd, run, |draft, succeeded| {
        draft.stream(stream);
        if succeeded {
            // SAFETY: the function wrote the graph behind the program's pointer, unless that is null.
            draft.handle(unsafe { structs::read_handle(graph) });
        }
    });
    // A capture that was invalidated ends with an error.
    captures::note_ended(tls::here());
    result
}
