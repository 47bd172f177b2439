//! What is being captured into graphs, and whether graphs own memory. The hooks of `hooks/events.rs` see it; whoever records
//! a call asks here.

use crate::auxiliary::AUXILIARY;
use crate::tls::{self, Tls};
use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Whether a graph of this process owns memory: only then do launches matter, of which there may be thousands a second.
static GRAPHS_OWN_MEMORY: AtomicBool = AtomicBool::new(false);

/// Whether it does.
#[inline]
pub(crate) fn graphs_own_memory() -> bool {
    GRAPHS_OWN_MEMORY.load(Ordering::Relaxed)
}

/// A node that gives memory out was made, or a stream-ordered allocation was captured.
#[inline]
pub(crate) fn note_graph_memory() {
    GRAPHS_OWN_MEMORY.store(true, Ordering::Relaxed);
}

/// Streams of the process that are being captured.
static CAPTURES: AtomicU32 = AtomicU32::new(0);

/// The thread has begun to capture one.
#[inline]
pub(crate) fn note_begun(tls: &Tls) {
    tls.capturing.set(tls.capturing.get().saturating_add(1));
    CAPTURES.fetch_add(1, Ordering::Relaxed);
}

/// The thread has ended the capture of one.
#[inline]
pub(crate) fn note_ended(tls: &Tls) {
    tls.capturing.set(tls.capturing.get().saturating_sub(1));
    let _ = CAPTURES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |open| open.checked_sub(1));
}

/// Whether a stream of the process is being captured, as far as we know.
#[inline]
pub(crate) fn are_open() -> bool {
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
