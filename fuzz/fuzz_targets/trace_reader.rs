//! Any bytes as a trace: everything in it is looked at, and its programs are replayed.
#![no_main]

use gputrace_fuzz::{Scratch, blocks};
use gputrace_replay::import::load;
use gputrace_sim::whatif::Laboratory;
use gputrace_schemas::reader::Trace;
use std::io::Cursor;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static SCRATCH: OnceLock<Scratch> = OnceLock::new();
    let Some((way, data)) = data.split_first() else { return };
    // As it is, or with the checksums that it ought to have: else no mutation would get past them.
    let bytes = if *way == 0 { data.to_vec() } else { blocks::fold(data) };
    let Ok(trace) = Trace::read(Cursor::new(bytes.clone()), "input") else { return };
    for event in trace.events().take(1 << 16) {
        let _ = (trace.thread(event.thread), trace.stack_frames(event.stack).take(64).count());
    }
    let _ = (trace.mappings().take(64).count(), trace.span(), trace.n_events());
    let _ = trace.damages().iter().map(ToString::to_string).count();
    let path = SCRATCH.get_or_init(|| Scratch::new("trace")).holding(&bytes);
    let Ok(loaded) = load(path) else { return };
    for stream in &loaded.devices {
        if let Ok(laboratory) = Laboratory::new(stream) {
            laboratory.self_check(Some((2, 11)));
        }
    }
});
