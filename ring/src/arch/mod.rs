//! What differs between processors, one file for each: their counter, and how the kernel is asked. Both files have the items of the list
//! below. Nothing else of this crate asks which processor it is for (`tests/tidy.rs`).

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
use aarch64 as processor;

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
use x86_64 as processor;

/// The counter, read after everything that the calling thread did before.
pub(crate) use processor::counter;

/// The counter, read then or a little before. Costs less where that can be.
pub(crate) use processor::early_counter;

/// Whether the counter has one speed, in all states of the processor.
pub(crate) use processor::counter_is_invariant;

/// Reads a POSIX clock by a call of the kernel. Miri, which runs no instructions, has `clock.rs` do it.
#[cfg(not(miri))]
pub(crate) use processor::ask_kernel;
