//! How a report looks.

mod chart;
pub mod json;
mod site;
pub mod text;
