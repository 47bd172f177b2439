//! Being run by Valgrind, which translates the program and looks at each of its memory accesses.
//!
//! We read memory that Memcheck does not know to be readable (the C library's thread descriptor, words of a stack), always where the
//! kernel or the C library says that it is there. Memcheck would count that among the program's errors, and so change its exit status
//! (`--error-exitcode`). Valgrind is asked to leave these reads out, by its client requests (valgrind.h, "Client request mechanism"):
//! an instruction sequence that does nothing elsewhere.

use crate::arch;
use core::sync::atomic::{AtomicU32, Ordering};

/// `VG_USERREQ__RUNNING_ON_VALGRIND`, of valgrind.h.
const RUNNING_ON_VALGRIND: usize = 0x1001;
/// `VG_USERREQ__CHANGE_ERR_DISABLEMENT`: the calling thread's errors are not reported while the sum of all changes is positive.
const CHANGE_ERROR_DISABLEMENT: usize = 0x1801;

#[unsafe(link_section = "gputrace_hot_data")]
static STATE: AtomicU32 = AtomicU32::new(NOT_ASKED);
const NOT_ASKED: u32 = 0;
const ABSENT: u32 = 1;
const PRESENT: u32 = 2;

/// Whether Valgrind runs this process. Constructors of other libraries may call us before ours has run, so the first caller asks;
/// no call of the kernel is made.
#[inline]
pub(crate) fn is_on() -> bool {
    match STATE.load(Ordering::Relaxed) {
        NOT_ASKED => ask(),
        state => state == PRESENT,
    }
}

#[cold]
fn ask() -> bool {
    let is_on = request(RUNNING_ON_VALGRIND, 0) != 0;
    STATE.store(if is_on { PRESENT } else { ABSENT }, Ordering::Relaxed);
    is_on
}

/// Errors of the calling thread are not reported while one of these lives.
pub(crate) struct Unwatched(bool);

impl Unwatched {
    #[inline]
    pub(crate) fn new() -> Unwatched {
        let is_on = is_on();
        if is_on {
            request(CHANGE_ERROR_DISABLEMENT, 1);
        }
        Unwatched(is_on)
    }
}

impl Drop for Unwatched {
    #[inline]
    fn drop(&mut self) {
        if self.0 {
            request(CHANGE_ERROR_DISABLEMENT, usize::MAX);
        }
    }
}

/// A client request with one argument; 0 where no Valgrind is.
#[cold]
#[inline(never)]
fn request(number: usize, argument: usize) -> usize {
    let arguments = [number, argument, 0, 0, 0, 0];
    // SAFETY: six words.
    unsafe { arch::valgrind_request(arguments.as_ptr()) }
}
