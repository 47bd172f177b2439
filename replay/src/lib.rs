//! Everything offline: ledger, simulator, policies, analyses, reports, exports.
#![forbid(unsafe_code)]

mod backward;
pub mod books_audit;
pub mod categories;
pub mod caught;
mod changes;
pub mod cycles;
pub mod diff;
pub mod exports;
pub mod fragmentation;
pub mod growth;
pub mod leaks;
pub mod ledger;
pub mod lifetimes;
pub mod live;
pub mod lives;
pub mod moment;
pub mod owners;
pub mod postmortem;
pub mod processes;
mod protobuf;
pub mod ranks;
pub mod reactions;
pub mod redact;
pub mod report;
pub mod roles;
pub mod source;
mod sqlite;
pub mod story;
pub mod summary;
pub mod trace;
pub mod tree;
pub mod unaccounted;

pub mod import;
#[cfg(test)]
mod scene;
