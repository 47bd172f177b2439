//! How PyTorch's memory is cut up: what is free in its segments, and in what pieces. Measured, from the books;
//! [`gputrace_sim::gap`] takes the gap apart further, from a simulated run, in the same words. Here `stranded` and
//! `wholly free` are of all streams and pools, so each has its part of `isolated`, and what waits for streams counts as free.

use gputrace_schemas::event::Bytes;
use gputrace_sim::policies::torch::{SMALL_REQUEST, SMALL_SEGMENT};

use gputrace_trace::ledger::Ledger;

/// The free memory of one device's segments.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Fragmentation {
    /// Segments for requests of up to 1 MiB.
    pub small: Pool,
    /// The others.
    pub large: Pool,
}

/// The free memory of one pool. What streams may still use counts as free here: only time will show.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pool {
    /// Segments: neighbouring mapped pages of an expandable segment are one.
    pub n_segments: u64,
    /// All of them.
    pub reserved: Bytes,
    /// In live blocks.
    pub allocated: Bytes,
    /// Pieces that are free.
    pub n_free: u64,
    /// The largest of them.
    pub largest_free: Bytes,
    /// In segments without any live block: what `empty_cache` frees.
    pub wholly_free: Bytes,
}

impl Pool {
    /// Free, in segments that have live blocks: it can serve smaller requests only, and cannot go back to the driver.
    #[must_use]
    pub fn stranded(&self) -> Bytes {
        Bytes(self.free().0.saturating_sub(self.wholly_free.0))
    }

    /// Free, one way or the other.
    #[must_use]
    pub fn free(&self) -> Bytes {
        Bytes(self.reserved.0.saturating_sub(self.allocated.0))
    }
}

impl Fragmentation {
    /// Of a device, now.
    #[must_use]
    pub fn of(ledger: &Ledger, device: i16) -> Fragmentation {
        let mut blocks: Vec<(u64, u64)> = ledger
            .live_blocks()
            .filter(|(_, block)| block.device == device)
            .map(|(addr, block)| (addr, block.bytes.0))
            .collect();
        blocks.sort_unstable();
        let mut fragmentation = Fragmentation::default();
        for (start, end, is_expandable) in segments(&ledger.torch_ranges(device)) {
            let from = blocks.partition_point(|(addr, _)| *addr < start);
            let to = blocks.partition_point(|(addr, _)| *addr < end);
            let blocks = &blocks[from..to];
            let is_small = is_small(end - start, is_expandable, blocks.iter().map(|(_, bytes)| *bytes));
            let pool = if is_small { &mut fragmentation.small } else { &mut fragmentation.large };
            pool.add(start, end, blocks);
        }
        fragmentation
    }

    /// Both pools.
    #[must_use]
    pub fn pools(&self) -> [(&'static str, &Pool); 2] {
        [("small", &self.small), ("large", &self.large)]
    }

    /// In segments without any live block.
    #[must_use]
    pub fn wholly_free(&self) -> Bytes {
        Bytes(self.small.wholly_free.0.saturating_add(self.large.wholly_free.0))
    }
}

impl Pool {
    fn add(&mut self, start: u64, end: u64, blocks: &[(u64, u64)]) {
        self.n_segments += 1;
        self.reserved.0 += end - start;
        if blocks.is_empty() {
            self.wholly_free.0 += end - start;
        }
        let mut at = start;
        for (addr, bytes) in blocks {
            self.gap(at, *addr);
            let stop = addr.saturating_add(*bytes).min(end);
            self.allocated.0 += stop.saturating_sub((*addr).max(at));
            at = at.max(stop);
        }
        self.gap(at, end);
    }

    fn gap(&mut self, from: u64, to: u64) {
        if to > from {
            self.n_free += 1;
            self.largest_free = self.largest_free.max(Bytes(to - from));
        }
    }
}

/// Whether a segment is PyTorch's for small requests: by its size, or by the blocks in it where it grows.
pub fn is_small(bytes: u64, is_expandable: bool, blocks: impl Iterator<Item = u64>) -> bool {
    match is_expandable {
        false => bytes == SMALL_SEGMENT,
        true => blocks.max().is_some_and(|largest| largest <= SMALL_REQUEST),
    }
}

/// Start, end and whether it is a run of mapped pages. Two `cudaMalloc`s that happen to be neighbours stay two.
fn segments(ranges: &[(u64, Bytes, bool)]) -> Vec<(u64, u64, bool)> {
    let mut segments: Vec<(u64, u64, bool)> = vec![];
    for (start, bytes, is_mapped) in ranges {
        let end = start.saturating_add(bytes.0);
        match segments.last_mut() {
            Some((_, stop, true)) if *is_mapped && *stop == *start => *stop = end,
            _ => segments.push((*start, end, *is_mapped)),
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_trace::scene::ledger;

    #[test]
    fn free_memory_is_counted_by_what_it_can_still_serve() {
        //  a (2M, small)  | x 512 | free          |
        //  b (20M)        | y 4M  | free 12M  | z 4M |
        //  c (10M)        | free                  |
        let ledger = ledger(
            "Alloc addr=0x1000000 bytes=2M by=libc10_cuda.so
             Alloc addr=0x2000000 bytes=20M by=libc10_cuda.so
             Alloc addr=0x5000000 bytes=10M by=libc10_cuda.so
             block addr=0x1000000 bytes=512 requested=512
             block addr=0x2000000 bytes=4M requested=4M
             block addr=0x3000000 bytes=4M requested=4M
             Alloc addr=0x9000000 bytes=3M by=libnccl.so.2",
        );
        let found = Fragmentation::of(&ledger, 0);
        assert_eq!((found.small.n_segments, found.small.stranded()), (1, Bytes((2 << 20) - 512)));
        let large = found.large;
        assert_eq!((large.n_segments, large.reserved, large.allocated), (2, Bytes(30 << 20), Bytes(8 << 20)));
        assert_eq!((large.n_free, large.largest_free), (2, Bytes(12 << 20)));
        assert_eq!((large.wholly_free, large.stranded()), (Bytes(10 << 20), Bytes(12 << 20)));
    }

    #[test]
    fn pages_of_an_expandable_segment_are_one_piece() {
        let ledger = ledger(
            "Create handle=1 bytes=2M by=libc10_cuda.so
             Create handle=2 bytes=2M by=libc10_cuda.so
             Map addr=0x4000000 bytes=2M handle=1 by=libc10_cuda.so
             Map addr=0x4200000 bytes=2M handle=2 by=libc10_cuda.so
             block addr=0x4000000 bytes=512 requested=512",
        );
        let found = Fragmentation::of(&ledger, 0);
        assert_eq!((found.small.n_segments, found.small.largest_free), (1, Bytes((4 << 20) - 512)));
    }
}
