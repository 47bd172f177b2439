//! The answers of verbs that need more than sections of a story: each turns analyses into [`gputrace_report::model`].
#![forbid(unsafe_code)]

pub mod budget;
mod callers;
pub mod caught;
pub mod causes;
pub mod checked;
mod curve;
pub mod diff;
pub mod edits;
mod largest;
pub mod layers;
pub mod leaks;
pub mod model_copies;
pub mod moment;
pub mod plans;
pub mod postmortem;
pub mod predict;
pub mod predict_ranks;
pub mod remedies;
pub mod replay;
pub mod reproduce;
mod still;
pub mod tree;
pub mod tune;
pub mod verdict;
pub mod whatif;
pub mod who;

use gputrace_report::model::Part;

/// What a verb says about a trace whose JSON has a shape of its own.
pub struct Reply {
    /// For people.
    pub part: Part,
    /// For programs.
    pub json: serde_json::Value,
}
