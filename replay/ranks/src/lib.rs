//! All processes of a job side by side: what each held, and what each called of NCCL.
//!
//! ```text
//! trace ─ collect ─> Participant ┐
//! trace ─ collect ─> Participant ┼─ jobs ─> Job ─ diagnose (align, matching, waits) ─> findings
//! trace ─ collect ─> Participant ┘            └─ memory at equal logical time ──────> imbalance
//! ```
#![forbid(unsafe_code)]

pub mod align;
pub mod arrivals;
pub mod calls;
pub mod clocks;
pub mod collect;
pub mod diagnose;
pub mod findings;
pub mod gpu;
mod health;
pub mod jobs;
mod kinds;
mod lateness;
pub mod live;
pub mod memory;
mod names;
pub mod packed;
mod places;
pub mod report;
pub mod reproduce;
mod runs;
#[cfg(any(test, feature = "scene"))]
pub mod scene;
mod sections;
pub mod shared;
mod shares;
mod show;
#[cfg(test)]
mod tests;
mod tracks;
pub mod troubles;
pub mod verdict;
pub mod waits;
pub mod window;
