//! The answers of verbs that are about more than one section: each takes analyses and makes [`crate::report::model`] of them.

pub mod caught;
pub mod diff;
pub mod import;
pub mod leaks;
pub mod moment;
pub mod postmortem;
pub mod processes;
pub mod replay;
pub mod tree;
pub mod tune;
pub mod whatif;

use crate::report::model::Part;

/// What a verb says about a trace whose JSON has a shape of its own.
pub struct Answer {
    /// For people.
    pub part: Part,
    /// For programs.
    pub json: serde_json::Value,
}
