//! What a thread keeps: 192 bytes of thread-local storage, everything else behind a pointer.
//!
//! Written in assembly because `thread_local!` needs `std`, and because the initial-exec model never enters the
//! loader: a preloaded library has its place in the static block from the start, so an access is two instructions
//! and works in the first call of a thread, in its last, and in a signal handler.

use crate::arch;
use core::cell::Cell;

/// A thread's own words, all zero when it starts.
#[repr(C, align(64))]
pub(crate) struct Tls {
    /// Where the stack was when the event began that is being recorded; 0 none.
    pub(crate) busy: Cell<usize>,
    /// Where the mark of the hook lies that is inside its real function; 0 none. See [`crate::mark`].
    pub(crate) inside: Cell<usize>,
    /// Session that `state` belongs to; 0 none.
    pub(crate) generation: Cell<u64>,
    /// The rest, once the thread made an event: what it is, [`crate::lanes`] knows.
    pub(crate) state: Cell<*mut ()>,
    /// Stack pointer inside PyTorch's `allocate`; 0 outside. A jump leaves it behind: only deeper frames count.
    pub(crate) allocate_frame: Cell<usize>,
    /// What that `allocate` was asked for.
    pub(crate) requested: Cell<u64>,
    /// Streams of this thread that are being captured.
    pub(crate) capturing: Cell<u32>,
    /// Stream events recorded since the thread's last PyTorch event: how many of the state's slots are filled.
    pub(crate) waits: Cell<u32>,
    /// Ranges of NVTX's default domain that the thread has open.
    pub(crate) ranges: Cell<u64>,
    /// Communicator that NCCL works for on this thread; 0 none, or several. Holds while `nccl_call` is not 0.
    pub(crate) nccl_comm: Cell<u32>,
    /// NCCL's open groups of this thread.
    pub(crate) group_depth: Cell<u32>,
    /// The call into NCCL that the thread is inside of; 0 none. What NCCL calls of itself meanwhile is its own business.
    /// To be asked for by [`crate::nccl::threads::inside`].
    pub(crate) nccl_call: Cell<u64>,
    /// Where the mark of its hook lies. See [`crate::mark`].
    pub(crate) nccl_mark: Cell<usize>,
    /// Number of the outermost open group; 0 none.
    pub(crate) group: Cell<u32>,
    /// The one communicator of the group's calls; 0 none yet, all ones if there are several.
    pub(crate) group_comm: Cell<u32>,
    /// Hashes of the unique id that NCCL made for itself last.
    pub(crate) nested_id: [Cell<u64>; 2],
    /// For a thread that NCCL started: the communicator it works for, and the call that started it; 0 for others.
    pub(crate) lineage: [Cell<u64>; 2],
    /// Process group of PyTorch's that was last asked for what works on GPUs, its address; 0 none.
    pub(crate) process_group: Cell<usize>,
    /// By which claim the thread holds its line ([`crate::lanes`]); 0 none.
    pub(crate) claim: Cell<u32>,
}

const _: () = assert!(core::mem::size_of::<Tls>() == 192);

impl Tls {
    /// Whether the calling thread is inside PyTorch's `allocate`.
    #[inline]
    pub(crate) fn is_in_allocate(&self) -> bool {
        let frame = self.allocate_frame.get();
        let here = 0_u8;
        // A jump leaves the mark behind: only deeper frames can be inside.
        frame != 0 && (&raw const here as usize) < frame
    }
}

core::arch::global_asm!(
    ".pushsection .tbss,\"awT\",@nobits",
    ".globl gputrace_thread_words",
    ".hidden gputrace_thread_words",
    ".type gputrace_thread_words, @object",
    ".size gputrace_thread_words, 192",
    ".p2align 6",
    "gputrace_thread_words: .zero 192",
    ".popsection",
);

/// The calling thread's words.
#[inline]
pub(crate) fn here() -> &'static Tls {
    let words = arch::thread_words().cast::<Tls>();
    // SAFETY: the words exist as long as the thread, are zero at its start, and only this thread reaches them. The
    // reference is not `Send`, because `Cell` is not `Sync`.
    unsafe { &*words }
}

pub(crate) use arch::stack_pointer;
