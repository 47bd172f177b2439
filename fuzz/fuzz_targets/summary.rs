//! A summary of `gputrace reduce`, as a file or, where the first byte is 1, as the text of one of its states.
#![no_main]

use std::path::Path;

use gputrace_replay::ranks::report::Ranks;
use gputrace_replay::reduce::{Summary, again};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((kind, data)) = data.split_first() else { return };
    let path = Path::new("fuzz.summary.parquet");
    let summary = match kind {
        1 => Summary::of_states(path, &String::from_utf8_lossy(data)),
        _ => Summary::of(path, data.to_vec()),
    };
    let Ok(summary) = summary else { return };
    let _ = (summary.head(), summary.leaks(), summary.at_peak(), summary.at_end());
    let _ = (summary.answer("stats"), summary.answer("report"), summary.answer("report --all"));
    let _ = summary.most_between(0, 0, 1);
    if let Ok(participant) = summary.participant() {
        let participants = [participant.clone(), participant];
        let _ = Ranks::of(&participants, &again).report();
    }
});
