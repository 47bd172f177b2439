//! What follows from the books: lives of blocks, roles, growth, what is held at a moment. Nothing here knows how it is shown.
#![forbid(unsafe_code)]

pub mod budget;
pub mod categories;
pub mod cycles;
pub mod doubts;
pub mod fragmentation;
pub mod growth;
pub mod held;
pub mod holdings;
pub mod idle;
pub mod libraries;
pub mod lifetimes;
pub mod live;
pub mod lives;
pub mod piles;
pub mod reactions;
pub mod repetition;
pub mod roles;
pub mod rules;
mod serving;
pub mod sets;
pub mod story;
pub mod unaccounted;
