//! Runs `main` of a C program that was built as a library, in a process with a sanitizer's runtime.
//!
//! rustc links the runtime into executables only, so neither the shim nor the program has one of its own: both find
//! this one's, as a program that was built with the sanitizer would offer it.
//!
//!     host PROGRAM.so ARGUMENTS

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
    let program = arguments.first().expect("usage: host PROGRAM.so ARGUMENTS");
    // SAFETY: a path; what it loads runs nothing that we rely on.
    let library = unsafe { dlopen(program.as_ptr(), RTLD_NOW | RTLD_GLOBAL) };
    if library.is_null() {
        // SAFETY: it has just failed, so there is a text.
        panic!("{program:?}: {:?}", unsafe { CStr::from_ptr(dlerror()) });
    }
    // SAFETY: a handle from above.
    let main = unsafe { dlsym(library, c"main".as_ptr()) };
    assert!(!main.is_null(), "{program:?} has no main");
    // SAFETY: a C program's `main`.
    let main: extern "C" fn(c_int, *const *const c_char) -> c_int = unsafe { std::mem::transmute(main) };
    let mut pointers: Vec<*const c_char> = arguments.iter().map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    std::process::exit(main(arguments.len() as c_int, pointers.as_ptr()));
}
