//! The answers of verbs that need more than sections of a story: each turns analyses into [`gputrace_report::model`].
#![forbid(unsafe_code)]

pub mod budget;
mod callers;
pub mod caught;
pub mod causes;
pub mod checked;
mod code;
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
use serde::Serialize;

/// What a verb says about a trace whose JSON has a shape of its own.
pub struct Reply<T> {
    /// For people.
    pub part: Part,
    /// For programs.
    pub answer: T,
}

/// What a verb says about one trace, or about each of several.
#[derive(Serialize)]
#[serde(untagged)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub enum Answers<T> {
    /// Of one.
    One(T),
    /// Of each.
    All {
        /// Names the schema.
        schema: &'static str,
        /// In the order in which they were given.
        traces: Vec<T>,
    },
}

impl<T> Answers<T> {
    /// The answers that there are, of so many traces that were asked about.
    #[must_use]
    pub fn of(mut traces: Vec<T>, n_asked: usize, schema: &'static str) -> Answers<T> {
        match traces.pop() {
            Some(one) if n_asked == 1 => Answers::One(one),
            last => Answers::All { schema, traces: traces.into_iter().chain(last).collect() },
        }
    }
}
