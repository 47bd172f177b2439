//! What shim and recorder agree on in memory.
