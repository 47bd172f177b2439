//! Stream events, stream capture, and nodes of graphs.
//!
//! PyTorch's allocator gives a block that other streams used back to its pool only when an event it recorded on each
//! of them is done (CUDACachingAllocator.cpp `insert_events`, `process_events`). It records them just
//! before it reports the free, on the same thread, and asks for them inside `allocate`. Programs record and ask for
//! far more events than that, so a recorded event is only noted beside the thread, and becomes a record when a free
//! of PyTorch's follows.

use super::structs::{self, GraphNode};
use super::torch;
use crate::hook::AUXILIARY;
use crate::probe::{self, Start};
use crate::session::{self, WAIT_SLOTS};
use crate::tls;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use gputrace_ring::record::{Action, Wait, WaitAction};

/// `cuEventRecord` and its variants.
#[inline]
pub(crate) fn recorded(run: impl FnOnce() -> i32, event: *mut c_void, stream: *mut c_void) -> i32 {
    let result = run();
    // Only threads that made PyTorch events have somewhere to note it.
    if result == 0
        && torch::is_here()
        && let Some(mut lane) = session::lane(Start::OnlyIfLive)
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
    if let Some(mut lane) = session::lane(Start::OnlyIfLive) {
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

/// Whether a graph of this process owns memory: only then do launches matter, of which there may be thousands a second.
static GRAPHS_OWN_MEMORY: AtomicBool = AtomicBool::new(false);

/// `cuGraphLaunch`.
#[inline]
pub(crate) fn graph_launch(
    run: impl FnOnce() -> i32,
    row: u16,
    exec: *mut c_void,
    stream: *mut c_void,
) -> i32 {
    if !GRAPHS_OWN_MEMORY.load(Ordering::Relaxed) {
        return run();
    }
    probe::acquire(Start::OnlyIfLive, row, Action::GraphLaunch, run, |draft, _| {
        draft.handle(exec);
        draft.stream(stream);
    })
}

/// A node that gives memory out was made, or a stream-ordered allocation was captured.
pub(crate) fn graph_memory() {
    GRAPHS_OWN_MEMORY.store(true, Ordering::Relaxed);
}

/// `cuStreamBeginCapture_v2`.
pub(crate) fn begin_capture(run: impl FnOnce() -> i32, row: u16, stream: *mut c_void, mode: i32) -> i32 {
    let result = probe::acquire(Start::OnlyIfLive, row, Action::CaptureBegin, run, |draft, _| {
        draft.stream(stream);
        draft.extra(mode);
    });
    if result == 0 {
        let capturing = &tls::here().capturing;
        capturing.set(capturing.get().saturating_add(1));
        CAPTURES.fetch_add(1, Ordering::Relaxed);
    }
    result
}

/// Streams of the process that are being captured.
static CAPTURES: AtomicU32 = AtomicU32::new(0);

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
    let capturing = &tls::here().capturing;
    capturing.set(capturing.get().saturating_sub(1));
    let _ = CAPTURES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |open| open.checked_sub(1));
    result
}

/// Whether a stream of the process is being captured, as far as we know.
pub(crate) fn captures_are_open() -> bool {
    CAPTURES.load(Ordering::Relaxed) != 0
}

/// Whether what is enqueued on the stream now becomes part of a graph. The driver is asked only while the process has a
/// capture open: another thread may have begun it. The question is legal then, and changes nothing.
pub(crate) fn is_captured(stream: u64) -> bool {
    /// `CU_STREAM_CAPTURE_STATUS_ACTIVE`, cuda.h 13.0.
    const ACTIVE: c_int = 1;
    type IsCapturing = unsafe extern "C" fn(u64, *mut c_int) -> c_int;
    if CAPTURES.load(Ordering::Relaxed) == 0 {
        return false;
    }
    let mine = tls::here().capturing.get() != 0;
    // SAFETY: the type is that of cuda.h 13.0, unchanged since 10.0; a stream is a pointer, as large as a number.
    let Some(is_capturing) = (unsafe { AUXILIARY.stream_is_capturing.get::<IsCapturing>() }) else {
        return mine;
    };
    let mut status = 0;
    // SAFETY: the program's own stream, which it gives to NCCL in this moment; the out-parameter is ours.
    if stream == 0 || unsafe { is_capturing(stream, &raw mut status) } != 0 { mine } else { status == ACTIVE }
}
