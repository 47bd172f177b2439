//! A ring as a process might leave it that was hit by anything, or that wishes the recorder ill: it changes between two
//! looks, and the recorder goes on.
#![no_main]

use gputrace_fuzz::{Bytes, Scratch};
use gputrace_recorder::fuzzing::Ring;
use gputrace_ring::clock::Clock;
use gputrace_ring::map::{CHUNK_PAYLOAD, ChunkHeader, Map, Writer};
use memmap2::{MmapOptions, MmapRaw};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

const N_CHUNKS: u32 = 4;
/// Lines that are written to; the others stay free.
const N_LINES: u32 = 4;

struct Host {
    scratch: Scratch,
    map: Map,
    _memory: MmapRaw,
}

// SAFETY: a map may be sent and shared: everything behind it is atomics.
unsafe impl Sync for Host {}
// SAFETY: as above.
unsafe impl Send for Host {}

impl Host {
    fn new() -> Host {
        let scratch = Scratch::new("ring");
        let bytes = Map::bytes_for(N_CHUNKS);
        scratch.file().set_len(bytes as u64).expect("there is room");
        let memory = MmapOptions::new().len(bytes).map_raw(scratch.file()).expect("memory");
        let writer = Writer { pid: 1, start_time: 0, pid_namespace: 0 };
        // SAFETY: page aligned, zeros, writable, as long as it asks for, and kept beside it.
        let map = unsafe { Map::create(memory.as_mut_ptr(), N_CHUNKS, writer, Clock::Monotonic) };
        Host { scratch, map, _memory: memory }
    }

    fn reset(&self) {
        for chunk in 0..N_CHUNKS {
            self.map.state(chunk).store(0, Ordering::Relaxed);
            let header = self.map.chunk_header(chunk);
            header.sequence.store(0, Ordering::Relaxed);
            header.committed.store(0, Ordering::Relaxed);
        }
        for line in 0..N_LINES {
            self.map.thread(line).tid.store(0, Ordering::Relaxed);
            self.map.thread(line).generation.store(0, Ordering::Relaxed);
        }
        self.map.header().free_chunks.value.store(N_CHUNKS, Ordering::Relaxed);
        self.map.header().n_chunks.store(N_CHUNKS, Ordering::Relaxed);
    }

    /// A chunk's header and some of its records.
    fn write(&self, input: &mut Bytes) {
        let chunk = u32::from(input.byte()) % N_CHUNKS;
        let header = self.map.chunk_header(chunk);
        header.thread.store(u32::from(input.byte()), Ordering::Relaxed);
        header.tid.store(1 + u32::from(input.byte() % 8), Ordering::Relaxed);
        let (generation, sequence) = (u64::from(input.byte()), u64::from(input.byte()));
        header.sequence.store(generation << 32 | sequence, Ordering::Relaxed);
        header.base.store(input.number(), Ordering::Relaxed);
        let (at, length) = (usize::from(input.short()), usize::from(input.short()));
        for (byte, at) in input.take(length).iter().zip(at..CHUNK_PAYLOAD) {
            // SAFETY: `at` is inside of the chunk.
            let to = unsafe { self.map.chunk(chunk).add(size_of::<ChunkHeader>() + at) };
            // SAFETY: a byte of the mapping, which others only read, atomically.
            unsafe { &*to.cast::<AtomicU8>() }.store(*byte, Ordering::Relaxed);
        }
        header.committed.store(u32::from(input.short()), Ordering::Relaxed);
        self.map.state(chunk).store(u32::from(input.byte()), Ordering::Release);
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static HOST: OnceLock<Host> = OnceLock::new();
    let host = HOST.get_or_init(Host::new);
    host.reset();
    let Some(mut ring) = Ring::open(host.scratch.path()) else { unreachable!("it is one") };
    let mut input = Bytes(data);
    while !input.is_empty() {
        match input.byte() {
            0 => ring.pass(),
            1 => ring.look_at_lines(),
            2 => drop(ring.translate()),
            3 => {
                let line = host.map.thread(u32::from(input.byte()) % N_LINES);
                line.tid.store(u32::from(input.byte() % 8), Ordering::Relaxed);
                line.generation.store(u32::from(input.byte()), Ordering::Relaxed);
            }
            4 => host.map.header().n_chunks.store(input.number() as u32, Ordering::Relaxed),
            5 => {
                // One word of a record, as if the process changed it after it was committed.
                let (chunk, at) = (u32::from(input.byte()) % N_CHUNKS, usize::from(input.short()));
                let at = size_of::<ChunkHeader>() + at % CHUNK_PAYLOAD;
                // SAFETY: inside of the chunk.
                let to = unsafe { host.map.chunk(chunk).add(at) };
                // SAFETY: a byte of the mapping, which others only read, atomically.
                unsafe { &*to.cast::<AtomicU8>() }.store(input.byte(), Ordering::Relaxed);
            }
            _ => host.write(&mut input),
        }
    }
    ring.pass();
    ring.last_pass();
    ring.last_pass();
    ring.translate();
});
