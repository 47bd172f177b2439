//! Drains a ring into a trace.

pub mod merge_stack;
pub mod python_lines;
