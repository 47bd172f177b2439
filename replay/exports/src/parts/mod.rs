//! What several formats are made of: the events of a request, its changes of memory as rows, and three file formats.

pub mod changes;
pub(super) mod events;
pub mod parquet;
pub(super) mod protobuf;
