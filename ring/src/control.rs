//! The control page: where a process whose library sleeps is asked to wake, and answers.
//!
//! A memory file of one page that the process made and that only its user may open ([`NAME`]); whoever attaches finds
//! it among the process's descriptors, locks it (`flock`, which ends with the attacher), writes [`Control::options`] and
//! then [`Control::asked`]. Only the process writes the other words. It trusts nothing in the page but the one word.

use core::sync::atomic::{AtomicU8, AtomicU32, AtomicU64};

/// What the memory file is called: `/proc/PID/fd/N` leads to `/memfd:gputrace-control (deleted)`.
pub const NAME: &core::ffi::CStr = c"gputrace-control";
/// First word of the page: "gputctrl".
pub const MAGIC: u64 = u64::from_le_bytes(*b"gputctrl");
/// Version of this layout.
pub const VERSION: u32 = 2;
/// Bytes of the file.
pub const BYTES: usize = 4096;
/// Bytes of the variables that come with a request.
pub const OPTIONS: usize = 2048;
/// Bytes of an answer.
pub const ANSWER: usize = 1024;

/// Nothing is asked.
pub const NOTHING: u32 = 0;
/// Begin a session.
pub const WAKE: u32 = 1;
/// End it.
pub const SLEEP: u32 = 2;

/// No session; calls pass on.
pub const ASLEEP: u32 = 1;
/// A thread makes the session, or ends it.
pub const CHANGING: u32 = 2;
/// There is a session: [`Control::answer`] is its ring.
pub const AWAKE: u32 = 3;
/// There is none, and [`Control::answer`] says why.
pub const REFUSED: u32 = 4;
/// The process is at its end.
pub const ENDING: u32 = 5;

/// The page.
#[derive(Debug)]
#[repr(C)]
pub struct Control {
    /// [`MAGIC`], once everything else is in place.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// The process, as it numbers itself: a forked child holds its parent's descriptor, and is not meant.
    pub pid: AtomicU32,
    /// [`NOTHING`], [`WAKE`] or [`SLEEP`]; back to nothing when a thread has begun to obey.
    pub asked: AtomicU32,
    /// [`ASLEEP`] and others.
    pub state: AtomicU32,
    /// How often the process has answered; grows after [`Control::state`] and the answer are written.
    pub answers: AtomicU32,
    /// The recorder of the session, as the process numbers it; 0 none.
    pub recorder: AtomicU32,
    /// Allocations that are known to live.
    pub known: AtomicU64,
    /// Allocations that there was no room to remember.
    pub unknown: AtomicU64,
    /// 1 in a process into which the library came late.
    pub is_late: AtomicU32,
    /// There: words of the program's that lead to us. With none, no call does, and nobody hears a request.
    pub words: AtomicU32,
    /// Variables for the next session, `NAME=value`, each ended by a zero, the last by two.
    pub options: [AtomicU8; OPTIONS],
    /// Text, ended by a zero.
    pub answer: [AtomicU8; ANSWER],
    /// Bytes of rings that are mapped still, though nobody records: a thread was in the middle of an event. A wish to sleep has the
    /// process try again to unmap them.
    pub left: AtomicU64,
}

const _: () = assert!(size_of::<Control>() <= BYTES);
