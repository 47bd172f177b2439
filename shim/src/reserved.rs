//! Memory for the lines of threads, reserved before these come: under a sandbox that was added meanwhile, a thread may not ask for any
//! ([`crate::own`]).
//!
//! The first lines get theirs when the session begins. The library reserves more whenever the program creates threads, within
//! `pthread_create`, which maps memory itself. Reserving all lines at once would take 1.3 GiB of addresses. `mlockall` would lock them, they
//! would count against a later `RLIMIT_DATA`, and core files would grow by as much.

use crate::{kernel, own};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use gputrace_ring::map::MAX_THREADS;

/// Lines that get memory at once.
const GROUP: u32 = 64;
const GROUPS: usize = MAX_THREADS / GROUP as usize;
/// Threads beside those that the program made by `pthread_create`: its first, those of a library that calls `clone`, and those that come
/// while another thread maps memory for them.
const SPARE: u32 = 16;
/// Of a limited address space, no more than this part is reserved.
const PART: u64 = 64;

static MEMORY: [AtomicPtr<u8>; GROUPS] = [const { AtomicPtr::new(null_mut()) }; GROUPS];
/// Lines of the first group that have memory: fewer where addresses are limited.
static N_FIRST: AtomicU32 = AtomicU32::new(0);
/// Lines that may have memory.
static MOST: AtomicU32 = AtomicU32::new(0);
/// Bytes of a line.
static BYTES: AtomicUsize = AtomicUsize::new(0);
/// Threads that the program has made.
static MADE: AtomicU32 = AtomicU32::new(0);

/// Reserves memory for the first lines, and for as many as the program has threads. `bytes` for each: whole pages.
pub(crate) fn prepare(bytes: usize) {
    if !MEMORY[0].load(Ordering::Acquire).is_null() {
        return;
    }
    let room = kernel::limit(libc::RLIMIT_AS).min(kernel::limit(libc::RLIMIT_DATA));
    let most = if room == u64::MAX { u64::MAX } else { room / PART / bytes as u64 };
    let most = most.min(MAX_THREADS as u64) as u32;
    BYTES.store(bytes, Ordering::Relaxed);
    MOST.store(most, Ordering::Relaxed);
    // Where memory is promised only as far as there is some, a few lines' are had.
    for n in [most.min(GROUP), most.min(GROUP / 8)] {
        if n == 0 {
            continue;
        }
        if let Some(memory) = kernel::reserve(n as usize * bytes, true) {
            N_FIRST.store(n, Ordering::Relaxed);
            // SYNC: how many lines it is for, and how large each is.
            MEMORY[0].store(memory, Ordering::Release);
            return grow(true);
        }
    }
}

/// The program makes a thread, which may need a line.
#[inline]
pub(crate) fn expect_thread() {
    MADE.fetch_add(1, Ordering::Relaxed);
    // SYNC: how large a line is.
    if !MEMORY[0].load(Ordering::Acquire).is_null() {
        grow(false);
    }
}

/// Reserves memory for as many lines as there may be threads.
fn grow(is_beginning: bool) {
    let wanted = MADE.load(Ordering::Relaxed).saturating_add(SPARE).min(MOST.load(Ordering::Relaxed)) / GROUP;
    let bytes = GROUP as usize * BYTES.load(Ordering::Relaxed);
    for group in MEMORY.iter().take(wanted as usize + 1).skip(1) {
        if !group.load(Ordering::Relaxed).is_null() {
            continue;
        }
        if !is_beginning && !own::is_as_before() {
            return;
        }
        let Some(memory) = kernel::reserve(bytes, is_beginning) else { return };
        if group.compare_exchange(null_mut(), memory, Ordering::Release, Ordering::Relaxed).is_err() {
            // SAFETY: just mapped, and nobody has seen it.
            unsafe { kernel::unmap(memory, bytes) };
        }
    }
}

/// Zeroed memory for a line; null where none is reserved for it.
pub(crate) fn of(line: u32) -> *mut u8 {
    let Some(group) = MEMORY.get((line / GROUP) as usize) else { return null_mut() };
    // SYNC: how many lines it is for, and how large each is.
    let memory = group.load(Ordering::Acquire);
    if memory.is_null() || (line < GROUP && line >= N_FIRST.load(Ordering::Relaxed)) {
        return null_mut();
    }
    memory.wrapping_add((line % GROUP) as usize * BYTES.load(Ordering::Relaxed))
}
