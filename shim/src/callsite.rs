//! From where an event came: captures the thread's stack, and sends each stack once.
//!
//! The id of a stack is its hash, so that threads need no common table; a thread remembers which ones it has sent. A
//! stack that another thread sent too is sent again, and the recorder drops the copy.

use crate::config::Stacks;
use crate::elf;
use crate::session::{self, Lane};
use crate::stack::{self, Captured, NATIVE};
use core::ffi::{CStr, c_char, c_void};
use gputrace_ring::record::StackDef;
use gputrace_ring::ring::{Pushed, as_words_bytes};

/// Stacks a thread remembers to have sent.
const SENT: usize = 4096;
/// Frames that are sent; the unwinder goes no deeper.
const MOST_FRAMES: usize = stack::native::MAX_FRAMES;

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    /// A call into the driver: its native frames say whose memory it is, so it has them in every mode.
    DriverCall,
    /// A block of a framework's allocator: what the user asked for.
    Block,
}

/// What a thread keeps for sending. All zeros is nothing sent.
pub(crate) struct Sent {
    ids: [u64; SENT],
    frames: [u64; MOST_FRAMES],
}

impl Sent {
    /// Everything must be sent again.
    pub(crate) fn forget(&mut self) {
        self.ids.fill(0);
    }
}

/// Prepares the process for captures.
pub(crate) fn begin() {
    // SAFETY: `lookup` finds the C library's own functions, or null.
    unsafe { stack::init(lookup) };
}

unsafe extern "C" fn lookup(name: *const c_char) -> *mut c_void {
    // SAFETY: the unwinder asks with C strings.
    let name = unsafe { CStr::from_ptr(name) };
    // `_dl_find_object` is the loader's (glibc 2.35).
    [c"ld-linux-x86-64.so.2", c"ld-linux-aarch64.so.1", c"libc.so.6"]
        .iter()
        .find_map(|library| elf::by_soname(library)?.symbol(name))
        .map_or(core::ptr::null_mut(), |address| address as *mut c_void)
}

/// Stack id of the calling thread's stack; 0 if none was captured.
#[inline]
pub(crate) fn capture(lane: &mut Lane, of: Of) -> u64 {
    let want = match (session::stacks(), of) {
        (Stacks::All, _) | (_, Of::DriverCall) => NATIVE,
        (Stacks::Python | Stacks::None, Of::Block) => return 0,
    };
    let state = lane.state();
    // SAFETY: the state was zeroed when it was made, and the lane is the thread's only one.
    let captured = unsafe { stack::capture(&raw mut state.stack, want) };
    if captured.id == 0 {
        return 0;
    }
    let slot = (captured.id >> 40) as usize % SENT;
    if state.sent.ids.get(slot) != Some(&captured.id) {
        send(lane, captured, slot);
    }
    captured.id
}

#[cold]
#[inline(never)]
fn send(lane: &mut Lane, captured: Captured, slot: usize) {
    let at = session::now();
    let (producer, state) = lane.parts();
    let mut n = 0;
    for (to, from) in state.sent.frames.iter_mut().zip(state.stack.native_addresses()) {
        *to = from;
        n += 1;
    }
    let truncated = captured.marks & Captured::TRUNCATED != 0;
    let broken = captured.marks & (Captured::BROKEN | Captured::GUESSED) != 0;
    let marks = u32::from(truncated) * StackDef::TRUNCATED | u32::from(broken) * StackDef::BROKEN;
    let definition = StackDef { id: captured.id, native: n, python: 0, marks };
    let frames = as_words_bytes(state.sent.frames.get(..usize::from(n)).unwrap_or_default());
    if producer.push_with(at, 0, &definition, &[frames]) == Pushed::Yes
        && let Some(id) = state.sent.ids.get_mut(slot)
    {
        *id = captured.id;
    }
}
