//! What a trace says: the books, what follows from them, reports, exports. The simulator is `gputrace_sim`.
#![forbid(unsafe_code)]

pub mod analyse;
pub mod answers;
pub mod exports;
pub mod import;
pub mod ledger;
pub mod page;
pub mod ranks;
pub mod reduce;
pub mod report;
mod rules;
#[cfg(test)]
mod scene;
pub mod story;
pub mod trace;
