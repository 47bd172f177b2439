//! The harness library, loaded as a shim would be: its own frames are then not the test's.
#![allow(dead_code, unreachable_pub, reason = "each test uses what it needs")]

use std::ffi::{CStr, CString, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

/// Where cargo put the library.
pub fn library() -> PathBuf {
    let deps = std::env::current_exe().unwrap();
    let deps = deps.parent().unwrap();
    let places = [deps.join("libstack_harness.so"), deps.parent().unwrap().join("libstack_harness.so")];
    let found = places.iter().find(|place| place.exists());
    found
        .unwrap_or_else(|| panic!("no libstack_harness.so beside {}: cargo build it", deps.display()))
        .clone()
}

/// The library's functions.
pub struct Harness {
    /// Compares the caller's stack with libgcc's, see `compare.rs`.
    pub compare: extern "C" fn() -> c_int,
    /// Copies the caller's return addresses.
    pub native: unsafe extern "C" fn(*mut u64, c_int) -> c_int,
    pub note_unloaded: extern "C" fn(),
    pub note_loaded: extern "C" fn(),
}

/// Loads the library once.
pub fn harness() -> &'static Harness {
    static HARNESS: OnceLock<Harness> = OnceLock::new();
    HARNESS.get_or_init(|| {
        let path = CString::new(library().into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: a library of ours.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "cannot load {path:?}");
        let symbol = |name: &CStr| {
            // SAFETY: a live handle.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!address.is_null(), "no {name:?}");
            address
        };
        Harness {
            // SAFETY: the function's type in the harness.
            compare: unsafe {
                std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> c_int>(symbol(c"harness_compare"))
            },
            // SAFETY: the function's type in the harness.
            native: unsafe {
                std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*mut u64, c_int) -> c_int>(
                    symbol(c"harness_native"),
                )
            },
            // SAFETY: the function's type in the harness.
            note_unloaded: unsafe {
                std::mem::transmute::<*mut libc::c_void, extern "C" fn()>(symbol(c"harness_note_unloaded"))
            },
            // SAFETY: the function's type in the harness.
            note_loaded: unsafe {
                std::mem::transmute::<*mut libc::c_void, extern "C" fn()>(symbol(c"harness_note_loaded"))
            },
        }
    })
}

/// Captures with room for all frames that are kept.
pub fn addresses() -> Vec<u64> {
    let mut frames = vec![0; 1024];
    // SAFETY: the room that is named.
    let n = unsafe { (harness().native)(frames.as_mut_ptr(), 1024) };
    frames.truncate(n as usize);
    frames
}
