//! Everything offline: ledger, simulator, policies, analyses, reports, exports.
#![forbid(unsafe_code)]

pub mod ledger;
pub mod owners;
pub mod report;
pub mod story;
pub mod summary;
pub mod trace;

pub mod addresses;
pub mod audit;
pub mod bounds;
pub mod bytes;
pub mod device;
pub mod driver;
pub mod fragmentation;
pub mod import;
pub mod ops;
pub mod policies;
#[cfg(test)]
mod scene;
pub mod simulator;
pub mod whatif;
