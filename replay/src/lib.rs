//! Everything offline: ledger, simulator, policies, analyses, reports, exports.
#![forbid(unsafe_code)]

pub mod addresses;
pub mod audit;
pub mod bounds;
pub mod bytes;
pub mod device;
pub mod driver;
pub mod import;
pub mod ops;
pub mod policies;
pub mod simulator;
pub mod whatif;
