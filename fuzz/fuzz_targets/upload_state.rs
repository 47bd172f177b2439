//! Any bytes as the `FILE.upload` beside a trace.
#![no_main]

#[allow(dead_code)]
#[path = "../../objects/src/upload/state.rs"]
mod state;

use state::{MOST_PARTS, PART_BYTES, State};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    match State::parse(data) {
        Ok(state) => {
            assert!(state.parts.len() <= MOST_PARTS);
            assert!(state.sent() <= PART_BYTES * MOST_PARTS as u64);
            let kept = state.bytes().expect("text");
            assert_eq!(State::parse(&kept), Ok(state));
        }
        Err(why) => assert!(!why.to_string().is_empty()),
    }
});
