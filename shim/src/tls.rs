//! What a thread keeps: 64 bytes of thread-local storage, everything else behind a pointer.
//!
//! Written in assembly because `thread_local!` needs `std`, and because the initial-exec model never enters the
//! loader: a preloaded library has its place in the static block from the start, so an access is two instructions
//! and works in the first call of a thread, in its last, and in a signal handler.

use core::cell::Cell;

/// A thread's own words, all zero when it starts.
#[repr(C, align(64))]
pub(crate) struct Tls {
    /// An event of this thread is being recorded.
    pub(crate) busy: Cell<u32>,
    /// Hooks that are inside their real function.
    pub(crate) depth: Cell<u32>,
    /// Session that `state` belongs to; 0 none.
    pub(crate) generation: Cell<u64>,
    /// The rest, once the thread made an event.
    pub(crate) state: Cell<*mut crate::session::ThreadState>,
    /// Stack pointer inside PyTorch's `allocate`; 0 outside. An exception leaves it behind: only deeper frames count.
    pub(crate) allocate_frame: Cell<usize>,
    /// What that `allocate` was asked for.
    pub(crate) requested: Cell<u64>,
    /// Streams of this thread that are being captured.
    pub(crate) capturing: Cell<u32>,
    /// Stream events recorded since the thread's last PyTorch event: how many of the state's slots are filled.
    pub(crate) waits: Cell<u32>,
    /// Ranges of NVTX's default domain that the thread has open.
    pub(crate) ranges: Cell<u64>,
}

const _: () = assert!(core::mem::size_of::<Tls>() == 64);

core::arch::global_asm!(
    ".pushsection .tbss,\"awT\",@nobits",
    ".globl gputrace_thread_words",
    ".hidden gputrace_thread_words",
    ".type gputrace_thread_words, @object",
    ".size gputrace_thread_words, 64",
    ".p2align 6",
    "gputrace_thread_words: .zero 64",
    ".popsection",
);

/// The calling thread's words.
#[inline]
pub(crate) fn here() -> &'static Tls {
    let words: *const Tls;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the ABI keeps the thread pointer at fs:0; the linker fills in the offset from it.
    unsafe {
        core::arch::asm!(
            "mov {words}, qword ptr fs:[0]",
            "add {words}, qword ptr [rip + gputrace_thread_words@gottpoff]",
            words = out(reg) words,
            options(pure, readonly, nostack),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the ABI keeps the thread pointer in tpidr_el0; the linker fills in the offset from it.
    unsafe {
        core::arch::asm!(
            "mrs {words}, tpidr_el0",
            "adrp {offset}, :gottprel:gputrace_thread_words",
            "ldr {offset}, [{offset}, :gottprel_lo12:gputrace_thread_words]",
            "add {words}, {words}, {offset}",
            words = out(reg) words,
            offset = out(reg) _,
            options(pure, readonly, nostack),
        );
    }
    // SAFETY: the words exist as long as the thread, are zero at its start, and only this thread reaches them. The
    // reference is not `Send`, because `Cell` is not `Sync`.
    unsafe { &*words }
}
