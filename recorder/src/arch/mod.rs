//! What differs between processors, one folder for each: registers and instructions of other processes' threads. Both have the items of
//! the list below. Nothing else of the recorder asks which processor it is for (`tests/tidy.rs`).

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
use aarch64 as processor;

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
use x86_64 as processor;

/// Bringing the library into a process that was started without it.
pub(crate) use processor::late;

/// The stacks of all threads of a process.
pub use processor::thread_stacks;

/// What cannot be done on this processor, in words for users; `None` where all can.
pub use processor::MISSING_HERE;

/// Looks for functions and code in the memory of another process; how many functions it has.
#[cfg(fuzzing)]
pub(crate) use processor::look_at_image;
