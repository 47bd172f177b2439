//! The answers of verbs that are about more than one section: each takes analyses and makes [`crate::report::model`] of them.

pub mod caught;
pub mod diff;
pub mod leaks;
pub mod moment;
pub mod postmortem;
pub mod processes;
pub mod tree;
