//! Any bytes as a program file with symbols and debug information.
#![no_main]

use gputrace_fuzz::Scratch;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static SCRATCH: OnceLock<Scratch> = OnceLock::new();
    let path = SCRATCH.get_or_init(|| Scratch::new("elf")).holding(data);
    let _ = gputrace_recorder::fuzzing::symbols(path);
});
