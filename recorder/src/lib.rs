//! Drains a ring into a trace.

pub mod python_lines;
