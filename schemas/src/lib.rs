//! The trace file format of gputrace: what is in a `.gtr` file ([`event`]), how it is written ([`writer`]) and read
//! back ([`reader`]).
//!
//! FORMAT.md describes the bytes. This crate knows no ring and no live process.
#![deny(unsafe_code)]

mod block;
mod codec;
mod columns;
mod definitions;
pub mod event;
pub mod printable;
pub mod reader;
mod tables;
pub mod writer;
