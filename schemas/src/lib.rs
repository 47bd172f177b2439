//! The trace file format.
