//! The trace file format of gputrace: what is in a `.gtr` file ([`event`]), how it is written and read back.
//!
//! FORMAT.md describes the bytes. This crate knows no ring and no live process.
#![deny(unsafe_code)]

pub mod event;
