//! Memory for the rest of the ring.
//!
//! The process makes its ring with memory for a part of it. A program that has ended before it needed more never pays for more;
//! any other gets all of it soon, so that events have room when this recorder is kept from running. Memory that cannot be had is
//! asked for again: until then the ring is as large as it is, and what finds no room in it is counted as for any full ring.

use crate::map_file::MapFile;
use crate::steering::variable;
use gputrace_ring::map::{CHUNK_BYTES, Map};
use gputrace_ring::ring::Reader;
use gputrace_ring::variables;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A process that has been recorded for so long gets the whole ring.
const ALL_AFTER: Duration = Duration::from_millis(250);
/// Chunks that get memory at once, 4 MiB: the kernel takes about a millisecond to clear them.
const STEP: u32 = 256;
/// Between two tries where there was no memory.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// A ring takes at most this part of what is free.
const PART: u64 = 4;

pub(crate) struct Growth {
    began: Instant,
    not_before: Instant,
    /// Chunks that should have memory.
    wanted: u32,
}

impl Growth {
    pub(crate) fn new() -> Growth {
        let began = Instant::now();
        Growth { began, not_before: began, wanted: 0 }
    }

    /// Gives the ring one more piece of memory if it is time for that, or if threads have used half of what it has. Returns whether it
    /// should have another piece at once. The machine may take a second to find all of it, so the caller answers threads in between.
    pub(crate) fn step(&mut self, file: &MapFile) -> bool {
        let map = file.map();
        let (n_usable, n_chunks) = (map.n_usable(), map.n_chunks());
        if n_usable >= n_chunks {
            return false;
        }
        let now = Instant::now();
        let n_free = map.header().free_chunks.value.load(Ordering::Relaxed);
        let next = n_usable.saturating_add(STEP).min(n_chunks);
        // While it grows, free chunks come one piece at a time: they say nothing until all are there.
        if n_usable >= self.wanted && n_free < n_usable / 2 {
            self.wanted = n_usable.saturating_mul(2);
        }
        let is_wanted = n_usable < self.wanted.min(n_chunks) || now - self.began >= ALL_AFTER;
        if !is_wanted || now < self.not_before {
            return false;
        }
        if !grow(file, map, next) {
            self.not_before = now + AGAIN_AFTER;
            return false;
        }
        next < self.wanted.min(n_chunks)
    }
}

/// What is said of a ring that is smaller than the program's user asked for.
pub(crate) fn shortfall(map: Map) -> Option<String> {
    let asked: u64 = std::env::var(variable(variables::RING_BYTES)).ok()?.parse().ok()?;
    let given = Map::bytes_for(map.n_chunks()) as u64;
    // It has whole chunks.
    let is_short = given.saturating_add(2 * CHUNK_BYTES as u64) < asked;
    is_short.then(|| {
        format!(
            "ring.bytes={given} of {asked}: a ring takes at most a quarter of free memory, 64 GiB, or what `ulimit -f` allows"
        )
    })
}

fn grow(file: &MapFile, map: Map, n_usable: u32) -> bool {
    let before = |chunk| Map::bytes_before(map.n_chunks(), chunk) as u64;
    let (from, to) = (before(map.n_usable()), before(n_usable));
    let has_room = file.free_space().is_none_or(|free| to <= free.saturating_add(from) / PART);
    let grows = has_room && file.allocate(from, to - from);
    if grows {
        Reader::new(map).grow(n_usable);
    }
    grows
}
