//! The recorder's memory, where the program's limits (`ulimit -v`) bind it: as little address space as will do, and a word
//! of our own when none is left. The other file of this crate with `unsafe`.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

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

fn held(memory: *mut u8) -> *mut u8 {
    if memory.is_null() && ENDS_WITH_A_WORD.load(Ordering::Relaxed) {
        end();
    }
    memory
}

#[cold]
fn end() -> ! {
    let said =
        b"gputrace: the recorder gets no more memory (ulimit -v, or the machine's); its trace ends here\n";
    // SAFETY: the bytes are there; `_exit` runs nothing that could ask for memory.
    unsafe {
        libc::write(2, said.as_ptr().cast(), said.len());
        libc::_exit(1)
    }
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
