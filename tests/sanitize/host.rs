//! Loads the shim, and runs `main` of a C program that was built as a library, in a process with a sanitizer's runtime.
//!
//! rustc links the runtime into executables only, so neither the shim nor the program has one of its own: both find
//! this one's, as a program that was built with the sanitizer would offer it. Loaded, not preloaded: the runtime looks for
//! functions with `dlsym` before it can bear instrumented code, and a preloaded shim's `dlsym` would be such code. What the
//! program is linked to is looked up in what was loaded for all, the shim, before its own libraries.
//!
//!     host libgputrace.so PROGRAM.so ARGUMENTS

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStringExt;

unsafe extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *const c_char;
}

const RTLD_NOW: c_int = 2;
const RTLD_GLOBAL: c_int = 0x100;

fn main() {
    let arguments: Vec<CString> =
        std::env::args_os().skip(1).map(|word| CString::new(word.into_vec()).expect("a word")).collect();
    let [shim, program, ..] = arguments.as_slice() else { panic!("usage: host SHIM PROGRAM ARGUMENTS") };
    load(shim);
    let library = load(program);
    // SAFETY: a handle from above.
    let main = unsafe { dlsym(library, c"main".as_ptr()) };
    assert!(!main.is_null(), "{program:?} has no main");
    // SAFETY: a C program's `main`.
    let main: extern "C" fn(c_int, *const *const c_char) -> c_int = unsafe { std::mem::transmute(main) };
    let mut pointers: Vec<*const c_char> = arguments.iter().skip(1).map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    std::process::exit(main(arguments.len() as c_int - 1, pointers.as_ptr()));
}

fn load(path: &CStr) -> *mut c_void {
    // SAFETY: a path; what it loads runs nothing that we rely on.
    let library = unsafe { dlopen(path.as_ptr(), RTLD_NOW | RTLD_GLOBAL) };
    if library.is_null() {
        // SAFETY: it has just failed, so there is a text.
        panic!("{path:?}: {:?}", unsafe { CStr::from_ptr(dlerror()) });
    }
    library
}
