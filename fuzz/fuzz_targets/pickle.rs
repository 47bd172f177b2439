//! Any bytes as a memory snapshot of PyTorch, compressed or not: an answer or an error that names the file.
#![no_main]

use gputrace_fuzz::Scratch;
use gputrace_replay::import::read_snapshot;
use gputrace_sim::whatif::Laboratory;
use std::io::Write;
use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static SCRATCH: OnceLock<Scratch> = OnceLock::new();
    let Some((way, data)) = data.split_first() else { return };
    let scratch = SCRATCH.get_or_init(|| Scratch::new("pickle"));
    let path = if *way == b'z' {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(data).expect("memory");
        scratch.holding(&gzip.finish().expect("memory"))
    } else {
        scratch.holding(data)
    };
    match read_snapshot(path) {
        Ok(trace) => {
            for stream in &trace.devices {
                if let Ok(laboratory) = Laboratory::new(stream) {
                    laboratory.self_check(Some((2, 11)));
                }
            }
        }
        Err(error) => {
            let (name, said) = (path.file_name().expect("a name").to_string_lossy(), error.to_string());
            assert!(said.contains(&*name), "the error names no file: {said}");
        }
    }
});
