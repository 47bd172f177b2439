//! What differs between processors, one file for each: assembly, registers, the calling convention, the frames of stacks, and the few
//! names and numbers that Linux gives differently. Both files have the same items. Nothing else of the library asks which processor it
//! is for (`tests/tidy.rs`).

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;

#[cfg(target_arch = "x86_64")]
mod x86_64;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
