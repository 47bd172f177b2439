//! Drains a ring into a trace.
