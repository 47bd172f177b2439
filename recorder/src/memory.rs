//! The recorder's memory, where the program's limits (`ulimit -v`) bind it: as little address space as will do, and a word
//! of our own when none is left. The other file of this crate with `unsafe`.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The system's allocator. A recorder that gets no more memory from it says so and ends: what Rust itself says then would
/// be taken for the program's. The library tells where the events are that are left.
#[derive(Clone, Copy, Debug)]
pub struct Memory;

static ENDS_WITH_A_WORD: AtomicBool = AtomicBool::new(false);

/// From here on a request that fails ends the process, and the C library does not reserve 64 MiB of addresses for each
/// thread that allocates (mallopt(3), `M_ARENA_MAX`), which is more than all that we use.
pub(crate) fn is_the_recorders() {
    ENDS_WITH_A_WORD.store(true, Ordering::Relaxed);
    #[cfg(target_env = "gnu")]
    // SAFETY: takes numbers; a refusal changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1)
    };
}

/// `struct robust_list_head` (linux/futex.h); of an entry, the kernel reads the first word alone.
#[repr(C)]
struct RobustList {
    next: *const RobustList,
    futex_offset: isize,
    pending: *const RobustList,
}

/// Has the kernel add `FUTEX_OWNER_DIED` to the word when the calling thread ends, whatever ends it. Where the kernel refuses, the word
/// stays 0. The thread must lock no robust mutex of the C library, whose list this replaces. The lists are ours alone: nobody who can
/// write to the word can lead the kernel or us elsewhere.
pub(crate) fn mark_end_of_thread(word: &AtomicU32) {
    let end = |next, futex_offset| RobustList { next, futex_offset, pending: std::ptr::null() };
    // Kept for ever: the kernel reads them when the thread is gone.
    let entry = Box::into_raw(Box::new(end(std::ptr::null(), 0)));
    let offset = (std::ptr::from_ref(word) as isize).wrapping_sub(entry as isize);
    let head = Box::into_raw(Box::new(end(entry, offset)));
    // SAFETY: both are ours, and the kernel does not look yet.
    unsafe { (*entry).next = head };
    let tid = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
    word.store(tid, Ordering::Relaxed);
    // The kernel's structure has three words, as ours.
    // SAFETY: the list is whole and stays; the word is aligned, and the kernel itself checks whether it is still mapped.
    let answer = unsafe { libc::syscall(libc::SYS_set_robust_list, head, size_of::<RobustList>()) };
    if answer != 0 {
        word.store(0, Ordering::Relaxed);
    }
}

fn held(memory: *mut u8) -> *mut u8 {
    if memory.is_null() && ENDS_WITH_A_WORD.load(Ordering::Relaxed) {
        end();
    }
    memory
}

#[cold]
fn end() -> ! {
    let said =
        b"gputrace: the recorder has no more memory (ulimit -v, or the machine's memory is full); its trace ends here\n";
    // A request that comes from in here would end up here again.
    ENDS_WITH_A_WORD.store(false, Ordering::Relaxed);
    let _ = crate::messages::tell_stderr(said, std::time::Duration::ZERO);
    // SAFETY: it runs nothing that could ask for memory.
    unsafe { libc::_exit(1) }
}

// SAFETY: the system's allocator does all of it; we only look at what it answers.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the same.
        held(unsafe { System.alloc(layout) })
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        held(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: as above.
        held(unsafe { System.realloc(memory, layout, bytes) })
    }
}
