//! Any lines as a log of RMM, replayed by its pool.
#![no_main]

use gputrace_fuzz::Scratch;
use gputrace_replay::import::load;
use gputrace_sim::whatif::Laboratory;
use std::sync::OnceLock;

const HEADER: &[u8] = b"Thread,Time,Action,Pointer,Size,Stream\n";

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static SCRATCH: OnceLock<Scratch> = OnceLock::new();
    let path = SCRATCH.get_or_init(|| Scratch::new("rmm.csv")).holding(&[HEADER, data].concat());
    let Ok(trace) = load(path) else { return };
    for stream in &trace.devices {
        if let Ok(laboratory) = Laboratory::new(stream) {
            laboratory.self_check(None);
        }
    }
});
