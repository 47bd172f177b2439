//! How the NVIDIA driver chooses addresses, measured on driver 580: more than 14,000 `cudaMalloc`s without exception.
//!
//! - The driver reserves *regions* of a multiple of 32 MiB: the request rounded up. A new region goes to the top of the
//!   highest gap of the process's address space that is at least 32 MiB larger (the slack pays for the alignment).
//! - A request is served from an existing region if one has a hole that fits, in steps of 2 MiB: the newest region
//!   first; inside it the smallest hole that fits, the lowest of equals, at its start.
//! - A region whose last allocation is freed goes back at once.
//! - Requests below 2 MiB share blocks of 2 MiB in steps of 512 bytes: the smallest hole of all blocks, of equals the one
//!   that has been a hole for longest. A block whose last user is gone goes back at once.
//! - CUDA's context has regions of its own, and what it leaves of them is used like any other hole (`CONTEXT`).
//!
//! So one address tells all others of a process that has nothing else: `tests/addresses.rs`.
//!
//! What else lies in the address space of a process (libraries, host memory, allocations of CUDA's own) is not known
//! from a PyTorch snapshot. [`Driver::learn`] infers it from addresses that were really handed out: what the rule
//! would have used and the real driver did not must have been taken.
//!
//! What stays unknown: pages that somebody took of a hole of which nothing was asked afterwards. With other settings
//! something may be asked of it, or its region cannot go back. For each of the three of 71 measured runs that are not
//! predicted to the byte, one such allocation would explain the difference.

mod continued;
mod holes;
mod knowledge;
mod learn;
mod rule;

pub use continued::{Continued, Disturbance};
pub use knowledge::Knowledge;
pub use learn::{Fact, Known};
pub use rule::{Driver, Learned};

/// 32 MiB: size and alignment of regions.
pub const REGION: u64 = 32 << 20;
