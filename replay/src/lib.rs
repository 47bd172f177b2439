//! Everything offline: ledger, simulator, policies, analyses, reports, exports.
#![forbid(unsafe_code)]

pub mod ledger;
pub mod owners;
pub mod trace;

#[cfg(test)]
mod scene;
