//! Stacks of other processes' threads, where the processor's frames cannot be followed from outside: none.

pub use crate::thread_stack::{End, How, NoStacks, Stacks, ThreadStack};

/// Reads the stacks of all threads of a process.
///
/// # Errors
/// Always: they can be read on x86-64 only.
pub fn stacks(_pid: u32) -> Result<Stacks, NoStacks> {
    Err(NoStacks::NotHere)
}
