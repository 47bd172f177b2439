//! What an attacher and a library agree on that comes into a process that runs already.

use core::ffi::CStr;

/// The function that is called once the library is there: `uint64_t (uint64_t milliseconds)`.
pub const ENTRY: &CStr = c"gputrace_attach_loaded";
/// The name of the memory file that the library is loaded from begins so: `/memfd:gputrace-library.0123456789abcdef (deleted)`.
pub const NAME: &CStr = c"gputrace-library";

/// The recording has begun, or was ended again already.
pub const DONE: u64 = 1;
/// A recording is on.
pub const AWAKE: u64 = 2;
/// The library was there from the start, and does not want to be attached to.
pub const PRELOADED: u64 = 3;
/// The process has no driver of CUDA's.
pub const NO_DRIVER: u64 = 4;
/// The library stepped aside: it was switched off, or has no memory, or a filter of calls is on.
pub const REFUSED: u64 = 5;
/// Nobody requested a recording: the words were put back.
pub const UNUSED: u64 = 6;
/// No word of the program's libraries leads to the driver.
pub const NO_WORDS: u64 = 7;
