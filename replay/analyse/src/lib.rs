//! What follows from the books: lives of blocks, roles, growth, what is held at a moment. Nothing here knows how it is shown.

pub mod budget;
pub mod categories;
pub mod cycles;
pub mod fragmentation;
pub mod growth;
pub mod lifetimes;
pub mod live;
pub mod lives;
pub mod reactions;
pub mod roles;
mod serving;
pub mod summary;
pub mod unaccounted;
