//! What gputrace's shim and recorder agree on in memory: fixed-layout [`record`]s, most of them [`brief`], written to chunks that
//! one thread owns ([`ring`]), in one mapped file ([`map`]), stamped by one [`clock`].
//!
//! ```text
//! header | thread lines | their holders | chunk states | chunk 0 | chunk 1 | ...
//!
//!   thread A ── claims ──> chunk 3 ── fills, one release store a record ──> completes ──┐
//!   thread B ── claims ──> chunk 7 ...                                                  │
//!   recorder <── reads what is committed, complete or not ── frees the chunk ──────────┘
//! ```
//!
//! Who owns a thread line is written in the process's own memory ([`owners`]).
//!
//! This crate lives in somebody else's process: it allocates nothing, locks nothing, panics nowhere, and knows
//! neither CUDA nor any file format. A process that dies at any instruction leaves everything committed readable.
#![no_std]

mod arch;
pub mod brief;
mod chunk;
pub mod clock;
pub mod control;
pub mod late;
pub mod map;
#[cfg(loom)]
pub mod model;
pub mod notices;
pub mod owners;
pub mod python_offsets;
pub mod record;
pub mod ring;
mod sync;
pub mod variables;
