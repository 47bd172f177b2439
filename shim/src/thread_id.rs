//! The calling thread's number, without a system call.
//!
//! A sandbox that the program puts on itself after the session began may kill whoever calls `gettid`. The C library knows the
//! number, and shows it through a public layout: a recursive mutex that was locked holds its owner's thread id
//! (`pthread_mutex_t.__data.__owner`; bits/struct_mutex.h, the same since glibc 2.3.3 on 64-bit processors). Locking a mutex that
//! nobody else knows makes no system call.

use crate::kernel;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// `pthread_mutex_t` of glibc, as far as it matters here; 40 bytes on x86-64, 48 on AArch64.
#[repr(C, align(16))]
struct Mutex {
    lock: c_int,
    count: u32,
    owner: c_int,
    n_users: u32,
    kind: c_int,
    rest: [u32; 11],
}

/// `PTHREAD_MUTEX_RECURSIVE_NP` (pthread.h): other kinds do not note their owner in every release.
const RECURSIVE: c_int = 1;

/// The C library's own `pthread_mutex_lock`; 0 not looked for, or not found.
static LOCK: AtomicUsize = AtomicUsize::new(0);
/// A mutex has named a thread as the kernel did: it will name every thread of this process.
static IS_TRUSTED: AtomicU32 = AtomicU32::new(0);

/// Finds out whether mutexes can be asked. `find_lock` finds the C library's own `pthread_mutex_lock`. To be called when a session begins:
/// it makes system calls.
pub(crate) fn learn(find_lock: impl FnOnce() -> Option<usize>) {
    if LOCK.load(Ordering::Relaxed) == 0 {
        LOCK.store(find_lock().unwrap_or(0), Ordering::Relaxed);
    }
    // A forked child may have been made past the C library, which then still has its parent's number.
    IS_TRUSTED.store(0, Ordering::Relaxed);
    own();
}

/// The calling thread's number. Asks the kernel only where the C library cannot be asked.
pub(crate) fn own() -> u32 {
    let noted = noted();
    if noted != 0 && IS_TRUSTED.load(Ordering::Relaxed) != 0 {
        return noted;
    }
    let number = kernel::thread_id();
    if noted == number {
        IS_TRUSTED.store(1, Ordering::Relaxed);
    }
    number
}

/// The same, where the kernel need not be asked.
pub(crate) fn known() -> Option<u32> {
    let is_trusted = IS_TRUSTED.load(Ordering::Relaxed) != 0;
    Some(noted()).filter(|number| *number != 0 && is_trusted)
}

/// The number as the C library notes it; 0 if it does not.
fn noted() -> u32 {
    let lock = LOCK.load(Ordering::Relaxed);
    if lock == 0 {
        return 0;
    }
    // SAFETY: `learn` was given the C library's function of this name.
    let lock: unsafe extern "C" fn(*mut c_void) -> c_int = unsafe { core::mem::transmute(lock) };
    // Left locked: nobody else sees it, and the C library keeps no list of such mutexes.
    let mut mutex = Mutex { lock: 0, count: 0, owner: 0, n_users: 0, kind: RECURSIVE, rest: [0; 11] };
    // SAFETY: a mutex of this kind, initialised as PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP does, with room for either layout.
    unsafe { lock((&raw mut mutex).cast()) };
    mutex.owner as u32
}
