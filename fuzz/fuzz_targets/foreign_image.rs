//! Any bytes as a library in the memory of another process: its headers, its tables of functions, and its code.
#![no_main]

use gputrace_fuzz::Scratch;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static SCRATCH: OnceLock<Scratch> = OnceLock::new();
    let _ = gputrace_recorder::fuzzing::foreign_image(SCRATCH.get_or_init(|| Scratch::new("image")).holding(data));
});
