//! Traces of other tools, as [`OpStream`](crate::ops::OpStream)s.

mod pickle;
mod pools;
mod snapshot;

pub use pickle::PickleError;
pub use snapshot::{ImportError, Snapshot, read_snapshot};
