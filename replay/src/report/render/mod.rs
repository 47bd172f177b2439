//! How a report looks.

pub mod json;
mod site;
pub mod text;
