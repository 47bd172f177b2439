//! The shim's stack capture behind C functions, so that test programs can compare it with other unwinders.
//!
//! Loaded with `LD_PRELOAD` it also captures in `posix_memalign` and `malloc`, which stand for CUDA calls: they are
//! reached from deep inside real libraries.

#[path = "../../../shim/src/arch/mod.rs"]
#[allow(dead_code, unused_imports, unused_macros, reason = "the shim uses what the harness does not")]
mod arch;
#[path = "../../../shim/src/asked.rs"]
#[allow(dead_code, unused_imports, reason = "the shim uses what the harness does not")]
mod asked;
#[path = "../../../shim/src/elf.rs"]
#[allow(dead_code, unused_imports, reason = "the shim uses what the harness does not")]
mod elf;
#[path = "../../../shim/src/kernel.rs"]
#[allow(dead_code, unused_imports, reason = "the shim uses what the harness does not")]
mod kernel;
#[path = "../../../shim/src/own.rs"]
#[allow(dead_code, unused_imports, reason = "the shim uses what the harness does not")]
mod own;
#[path = "../../../shim/src/stack/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the shim uses what the harness does not")]
mod stack;
#[path = "../../../shim/src/thread_id.rs"]
#[allow(dead_code, unused_imports, reason = "the shim uses what the harness does not")]
mod thread_id;
#[path = "../../../shim/src/tls.rs"]
#[allow(dead_code, unused_imports, reason = "the shim uses what the harness does not")]
mod tls;
#[path = "../../../shim/src/valgrind.rs"]
#[allow(dead_code, unused_imports, reason = "the shim uses what the harness does not")]
mod valgrind;

#[path = "../../../recorder/src/merge_stack.rs"]
#[allow(dead_code, reason = "the recorder uses what the harness does not")]
pub mod merge_stack;
#[path = "../../../recorder/src/python_lines.rs"]
pub mod python_lines;

pub mod compare;
pub mod hooks;
pub mod traceback;

use core::ffi::{CStr, c_char, c_int, c_void};
use stack::{Captured, ThreadStackState};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// A variable that makes the C library look as old as those before 2.35.
const OLD_GLIBC: &str = "STACK_HARNESS_OLD_GLIBC";

unsafe extern "C" fn lookup(name: *const c_char) -> *mut c_void {
    // SAFETY: the caller passes C strings.
    if unsafe { CStr::from_ptr(name) } == c"_dl_find_object" && std::env::var_os(OLD_GLIBC).is_some() {
        return core::ptr::null_mut();
    }
    // SAFETY: the name is a C string; the caller is not inside the loader.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name) }
}

/// Prepares captures, once.
#[unsafe(no_mangle)]
pub extern "C" fn harness_init() {
    static ONCE: Once = Once::new();
    // SAFETY: `lookup` looks up symbols, and no hook is active yet.
    ONCE.call_once(|| unsafe { stack::init(lookup) });
}

thread_local! {
    static STATE: *mut ThreadStackState = new_state();
    static IS_BUSY: core::cell::Cell<bool> = const { core::cell::Cell::new(false) };
}

fn new_state() -> *mut ThreadStackState {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new anonymous mapping.
    let block = unsafe {
        libc::mmap(
            core::ptr::null_mut(),
            size_of::<ThreadStackState>(),
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
            0,
        )
    };
    assert_ne!(block, libc::MAP_FAILED, "no memory for a stack state");
    block.cast()
}

/// The calling thread's state.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn harness_state() -> *mut ThreadStackState {
    harness_init();
    STATE.with(|state| *state)
}

/// Captures the caller's stack and copies its return addresses, innermost first. Returns their number.
///
/// # Safety
/// `out` has room for `room` addresses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn harness_native(out: *mut u64, room: c_int) -> c_int {
    let state = harness_state();
    // SAFETY: the calling thread's own state.
    unsafe { stack::capture(state, stack::NATIVE) };
    // SAFETY: as above.
    let state = unsafe { &mut *state };
    assert!(state.complete(), "a stack was taken for another one");
    let mut n = 0;
    for address in state.native_addresses().take(room as usize) {
        // SAFETY: `n` is less than `room`.
        let slot = unsafe { out.add(n) };
        // SAFETY: inside the caller's room.
        unsafe { slot.write(address) };
        n += 1;
    }
    n as c_int
}

/// Whether the calling thread's interpreter is collecting reference cycles.
#[unsafe(no_mangle)]
pub extern "C" fn harness_is_collecting() -> c_int {
    harness_init();
    // SAFETY: the calling thread's own state.
    c_int::from(unsafe { &mut *harness_state() }.is_collecting(false))
}

static WATCHERS: AtomicU32 = AtomicU32::new(0);
static DONE: AtomicU32 = AtomicU32::new(0);

/// Captures until the calling thread has no Python frames any more, and then on and on.
#[unsafe(no_mangle)]
pub extern "C" fn harness_watch_end() {
    let state = harness_state();
    WATCHERS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the calling thread's own state.
    while unsafe { stack::capture(state, stack::PYTHON) }.n_python > 0 {}
    DONE.fetch_add(1, Ordering::Relaxed);
    harness_repeat(stack::PYTHON | stack::NATIVE, u64::MAX);
}

/// Waits until no thread that watches has Python frames. Ends the process with 9 if that takes longer than it ever should.
#[unsafe(no_mangle)]
pub extern "C" fn harness_await_end() {
    for _ in 0..10_000 {
        if DONE.load(Ordering::Relaxed) == WATCHERS.load(Ordering::Relaxed) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // SAFETY: no precondition.
    unsafe { libc::_exit(9) };
}

/// How many threads watch.
#[unsafe(no_mangle)]
pub extern "C" fn harness_watchers() -> c_int {
    WATCHERS.load(Ordering::Relaxed) as c_int
}

/// Says that an object was unloaded.
#[unsafe(no_mangle)]
pub extern "C" fn harness_note_unloaded() {
    stack::native::note_unloaded();
}

/// Says that an object may have been loaded: the shim's `dlsym` does.
#[unsafe(no_mangle)]
pub extern "C" fn harness_note_loaded() {
    stack::objects::refresh();
}

/// Captures `n` times in a row; for timing.
#[unsafe(no_mangle)]
pub extern "C" fn harness_repeat(want: u32, n: u64) -> u64 {
    let state = harness_state();
    let mut id = 0;
    for _ in 0..n {
        // SAFETY: the calling thread's own state.
        let captured: Captured = unsafe { stack::capture(state, want) };
        id ^= captured.id;
    }
    id
}
