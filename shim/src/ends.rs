//! Tells a part of us that a thread ends, in that thread, without a system call: by a key of the C library's thread-specific data.
//!
//! Threads that end past the C library (`_exit` of a raw `clone`), or in the middle of an event, are not told of.

use crate::elf;
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

type End = unsafe extern "C" fn(*mut c_void);
type Create = unsafe extern "C" fn(*mut c_uint, End) -> c_int;
type Set = unsafe extern "C" fn(c_uint, *const c_void) -> c_int;

/// The values of so many keys lie in the thread's descriptor (`PTHREAD_KEY_2NDLEVEL_SIZE`, nptl/descr.h); those of others in memory that
/// the C library would take from the program's heap.
const INLINE_KEYS: c_uint = 32;

/// The key plus one; 0 not made, all ones never.
static KEY: AtomicU32 = AtomicU32::new(0);
static SET: AtomicUsize = AtomicUsize::new(0);
const NEVER: u32 = u32::MAX;

/// Makes the key: `end` is called in each thread that said [`note`]. To be called when a session begins, by a thread of the program.
pub(crate) fn learn(end: End) {
    if KEY.compare_exchange(0, NEVER, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        return;
    }
    let function = |name| elf::c_library(name).unwrap_or(0);
    let (create, set) = (function(c"pthread_key_create"), function(c"pthread_setspecific"));
    if create == 0 || set == 0 {
        return;
    }
    // SAFETY: the C library's function of this name has this type.
    let create: Create = unsafe { core::mem::transmute(create) };
    let mut key = 0;
    // SAFETY: the key is ours, and `end` stays: the library is never unloaded.
    if unsafe { create(&raw mut key, end) } == 0 && key < INLINE_KEYS {
        SET.store(set, Ordering::Relaxed);
        KEY.store(key + 1, Ordering::Release);
    }
}

/// The calling thread wants its end to be told.
pub(crate) fn note() {
    let key = KEY.load(Ordering::Acquire);
    if key == 0 || key == NEVER {
        return;
    }
    // SAFETY: the C library's function of this name has this type.
    let set: Set = unsafe { core::mem::transmute(SET.load(Ordering::Relaxed)) };
    // SAFETY: a key that exists; its value is only compared with null.
    unsafe { set(key - 1, core::ptr::without_provenance(1)) };
}
