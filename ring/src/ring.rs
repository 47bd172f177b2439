//! Chunks: claimed by a thread, filled record by record, read by the recorder whether complete or not.
//!
//! | state | means | who may change it |
//! |---|---|---|
//! | `FREE` | nobody's | a thread, to `CLAIMED` |
//! | `CLAIMED` | header being written; a thread that dies here loses nothing | its thread, to `WRITING` |
//! | `WRITING` | records up to `committed` are whole | its thread, to `COMPLETE` |
//! | `COMPLETE` | no more records will come | the recorder, to `FREE` |
//!
//! One record costs one release store. A thread that dies leaves its last chunk in `WRITING`; the recorder reads it
//! up to `committed` and, when the thread is gone, frees it.

use crate::clock::{Clock, Ticks};
use crate::map::{CHUNK_PAYLOAD, ChunkHeader, MAX_THREADS, Map};
use crate::record::{Header, Kind, Payload, TimeBase};
use core::mem::{size_of, size_of_val};
use core::sync::atomic::{AtomicU64, Ordering};

/// Nobody's.
pub const FREE: u32 = 0;
/// Being prepared by a thread.
pub const CLAIMED: u32 = 1;
/// Being filled by a thread.
pub const WRITING: u32 = 2;
/// Full, or left by its thread.
pub const COMPLETE: u32 = 3;

const WORD: usize = 8;
const NO_CHUNK: u32 = u32::MAX;
/// Longest record, header word included.
pub const MAX_RECORD: usize = CHUNK_PAYLOAD - 2 * WORD;

/// What became of a push.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pushed {
    /// The recorder will see it.
    Yes,
    /// Dropped and counted: the recorder does not keep up.
    Full,
    /// Dropped and counted: longer than [`MAX_RECORD`].
    TooLong,
}

/// One thread's end of the ring. There is one per thread, so nothing here is shared until it is committed.
pub struct Producer {
    map: Map,
    clock: Clock,
    thread: u32,
    tid: u32,
    chunk: u32,
    used: usize,
    base: u64,
    sequence: u64,
}

impl Producer {
    /// Takes a free thread line. `None`, counted as a loss by the caller, when [`MAX_THREADS`] threads write already.
    #[must_use]
    pub fn new(map: Map, tid: u32) -> Option<Producer> {
        let start = tid as usize % MAX_THREADS;
        for step in 0..MAX_THREADS {
            let thread = ((start + step) % MAX_THREADS) as u32;
            let line = map.thread(thread);
            if line.tid.load(Ordering::Relaxed) == 0
                && line.tid.compare_exchange(0, tid, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                let generation = line.generation.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
                line.events.store(0, Ordering::Relaxed);
                line.lost.store(0, Ordering::Relaxed);
                // Chunk sequences of a later owner follow those of an earlier one.
                let sequence = u64::from(generation) << 32;
                let clock = map.clock();
                return Some(Producer {
                    map,
                    clock,
                    thread,
                    tid,
                    chunk: NO_CHUNK,
                    used: 0,
                    base: 0,
                    sequence,
                });
            }
        }
        None
    }

    /// Now, on the ring's clock.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Ticks {
        self.clock.now()
    }

    /// The ring.
    #[must_use]
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Index of the thread line this producer took.
    #[must_use]
    pub fn thread_line(&self) -> u32 {
        self.thread
    }

    /// Writes a record stamped `at` and makes it visible. `at` never goes back on one thread.
    #[inline]
    pub fn push<P: Payload>(&mut self, at: Ticks, flags: u8, payload: &P) -> Pushed {
        self.push_with(at, flags, payload, &[])
    }

    /// As [`Producer::push`], followed by byte strings, each padded with zeros to whole words.
    pub fn push_with<P: Payload>(&mut self, at: Ticks, flags: u8, payload: &P, tail: &[&[u8]]) -> Pushed {
        let tail_bytes: usize = tail.iter().map(|part| part.len().next_multiple_of(WORD)).sum();
        self.push_bytes(at, flags, P::KIND, as_bytes(payload), tail, tail_bytes)
    }

    /// A record of byte strings alone, each padded with zeros to whole words.
    pub fn push_raw(&mut self, at: Ticks, kind: Kind, parts: &[&[u8]]) -> Pushed {
        let bytes: usize = parts.iter().map(|part| part.len().next_multiple_of(WORD)).sum();
        self.push_bytes(at, 0, kind, &[], parts, bytes)
    }

    #[inline]
    fn push_bytes(
        &mut self,
        at: Ticks,
        flags: u8,
        kind: Kind,
        head: &[u8],
        tail: &[&[u8]],
        tail_bytes: usize,
    ) -> Pushed {
        let bytes = WORD + head.len() + tail_bytes;
        if bytes > MAX_RECORD {
            return self.lose(bytes, Pushed::TooLong);
        }
        if self.chunk == NO_CHUNK || self.used + bytes + 2 * WORD > CHUNK_PAYLOAD {
            self.complete();
            if !self.claim(at) {
                return self.lose(bytes, Pushed::Full);
            }
        }
        let mut delta = at.0.saturating_sub(self.base);
        if delta > u64::from(u32::MAX) {
            self.base = at.0;
            delta = 0;
            let header = Header { words: 2, kind: Kind::TimeBase as u8, flags: 0, delta: 0 };
            self.put(&header.encode().to_ne_bytes());
            self.put(as_bytes(&TimeBase { ticks: at.0 }));
        }
        let header = Header { words: (bytes / WORD) as u16, kind: kind as u8, flags, delta: delta as u32 };
        self.put(&header.encode().to_ne_bytes());
        self.put(head);
        for part in tail {
            self.put(part);
            let padding = part.len().next_multiple_of(WORD) - part.len();
            self.put([0_u8; WORD].get(..padding).unwrap_or_default());
        }
        // SYNC: record visible to the consumer.
        self.map.chunk_header(self.chunk).committed.store(self.used as u32, Ordering::Release);
        Pushed::Yes
    }

    /// Gives the chunk to the recorder; the next record starts a new one.
    pub fn complete(&mut self) {
        if self.chunk != NO_CHUNK {
            // SYNC: chunk complete.
            self.map.state(self.chunk).store(COMPLETE, Ordering::Release);
            self.chunk = NO_CHUNK;
        }
    }

    fn lose(&self, bytes: usize, why: Pushed) -> Pushed {
        self.map.header().lost_full.add(bytes);
        self.map.thread(self.thread).lost.fetch_add(1, Ordering::Relaxed);
        why
    }

    #[cold]
    fn claim(&mut self, at: Ticks) -> bool {
        let header = self.map.header();
        // One load when the ring is full: a flood must not turn into a search of every chunk per event.
        if header.free_chunks.value.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let next = &header.next_chunk.value;
        for _ in 0..self.map.n_chunks() {
            let mut chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= self.map.n_chunks() {
                chunk = 0;
                next.store(1, Ordering::Relaxed);
            }
            let state = self.map.state(chunk);
            if state.load(Ordering::Relaxed) == FREE
                // SYNC: chunk free.
                && state.compare_exchange(FREE, CLAIMED, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                header.free_chunks.value.fetch_sub(1, Ordering::Relaxed);
                let chunk_header = self.map.chunk_header(chunk);
                self.sequence += 1;
                chunk_header.thread.store(self.thread, Ordering::Relaxed);
                chunk_header.tid.store(self.tid, Ordering::Relaxed);
                chunk_header.sequence.store(self.sequence, Ordering::Relaxed);
                chunk_header.committed.store(0, Ordering::Relaxed);
                chunk_header.base.store(at.0, Ordering::Relaxed);
                // SYNC: chunk header visible.
                state.store(WRITING, Ordering::Release);
                (self.chunk, self.used, self.base) = (chunk, 0, at.0);
                return true;
            }
        }
        false
    }

    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        let at = size_of::<ChunkHeader>() + self.used;
        // SAFETY: `push_bytes` made sure that the record and a time base fit into the chunk.
        let to = unsafe { self.map.chunk(self.chunk).add(at) };
        // SAFETY: only this thread writes to a chunk in `WRITING`, and nobody reads beyond `committed`.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        self.used += bytes.len();
    }
}

/// A payload as bytes.
#[inline]
pub fn as_bytes<P: Payload>(payload: &P) -> &[u8] {
    // SAFETY: `Payload` promises plain words without padding.
    unsafe { core::slice::from_raw_parts(core::ptr::from_ref(payload).cast::<u8>(), size_of::<P>()) }
}

/// Words as the bytes they have in the ring.
#[must_use]
pub fn as_words_bytes(words: &[u64]) -> &[u8] {
    // SAFETY: a word is eight bytes, any of which may be read.
    unsafe { core::slice::from_raw_parts(words.as_ptr().cast::<u8>(), size_of_val(words)) }
}

/// What a reader finds of one chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ChunkView {
    /// Index of the chunk.
    pub chunk: u32,
    /// Index of the owner's thread line.
    pub thread: u32,
    /// The owner's kernel thread id.
    pub tid: u32,
    /// Place in the order of the owner's chunks.
    pub sequence: u64,
    /// Base of the first records.
    pub base: Ticks,
    /// Bytes of whole records, never more than a chunk holds.
    pub committed: usize,
    /// No more records will come.
    pub complete: bool,
}

/// The recorder's end: looks at chunks and frees them. There is one per ring.
#[derive(Clone, Copy)]
pub struct Reader {
    map: Map,
}

impl Reader {
    /// The reader of this ring.
    #[must_use]
    pub fn new(map: Map) -> Reader {
        Reader { map }
    }

    /// The ring.
    #[must_use]
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// One chunk as it is now; `None` where it holds no records.
    #[must_use]
    pub fn look(&self, chunk: u32) -> Option<ChunkView> {
        // SYNC: chunk header visible; chunk complete.
        let state = self.map.state(chunk).load(Ordering::Acquire);
        if state != WRITING && state != COMPLETE {
            return None;
        }
        let header = self.map.chunk_header(chunk);
        // SYNC: record visible to the consumer.
        let committed = header.committed.load(Ordering::Acquire) as usize;
        Some(ChunkView {
            chunk,
            thread: header.thread.load(Ordering::Relaxed) % MAX_THREADS as u32,
            tid: header.tid.load(Ordering::Relaxed),
            sequence: header.sequence.load(Ordering::Relaxed),
            base: Ticks(header.base.load(Ordering::Relaxed)),
            committed: committed.min(CHUNK_PAYLOAD) / WORD * WORD,
            complete: state == COMPLETE,
        })
    }

    /// One committed word of a chunk. Racing writes of a hostile process give a wrong word, never a fault.
    #[must_use]
    pub fn word(&self, chunk: u32, at: usize) -> u64 {
        if at > CHUNK_PAYLOAD - WORD || !at.is_multiple_of(WORD) {
            return 0;
        }
        // SAFETY: inside the chunk, checked above.
        let word = unsafe { self.map.chunk(chunk).add(size_of::<ChunkHeader>() + at) };
        // SAFETY: eight-byte aligned: chunks and their headers are, and `at` is a multiple of a word.
        unsafe { &*word.cast::<AtomicU64>() }.load(Ordering::Relaxed)
    }

    /// Gives a chunk back to the producers. Only for chunks that are complete, or whose thread is gone.
    pub fn free(&self, chunk: u32) {
        let header = self.map.header();
        // SYNC: chunk free.
        self.map.state(chunk).store(FREE, Ordering::Release);
        header.free_chunks.value.fetch_add(1, Ordering::Relaxed);
        // The lowest free chunk is taken next: a recorder that keeps up lets the program write into the same few, which
        // its caches and page tables still hold, instead of going round the whole ring.
        header.next_chunk.value.fetch_min(chunk, Ordering::Relaxed);
    }
}
