//! x86-64.

mod foreign;
mod inject;
pub(crate) mod late;
mod ptrace;
mod python_stacks;
mod thread_copy;
pub mod thread_stacks;
mod unwind;

#[cfg(fuzzing)]
pub(crate) use inject::look_at_image;

/// Nothing.
pub const MISSING_HERE: Option<&str> = None;
