//! Everything offline: ledger, simulator, policies, analyses, reports, exports.
#![forbid(unsafe_code)]

pub mod ledger;
pub mod owners;
pub mod report;
pub mod story;
pub mod summary;
pub mod trace;

#[cfg(test)]
mod scene;
