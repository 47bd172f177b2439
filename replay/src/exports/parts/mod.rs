//! What several formats are made of: the events of a request, its changes of memory as rows, and two file formats.

pub(super) mod changes;
pub(super) mod events;
pub(super) mod protobuf;
pub(super) mod sqlite_file;
