//! How a report looks.

pub mod json;
pub mod text;
