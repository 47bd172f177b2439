//! Chunks: claimed by a thread, filled record by record, read by the recorder whether complete or not.
//!
//! | state | means | who may change it |
//! |---|---|---|
//! | `FREE` | nobody's | a thread, to `CLAIMED` |
//! | `CLAIMED` | header being written; a thread that dies here loses nothing | its thread, to `WRITING` |
//! | `WRITING` | records up to `committed` are whole | its thread, to `COMPLETE` |
//! | `COMPLETE` | no more records will come | the recorder, to `FREE` |
//!
//! One record costs one release store. A thread that dies leaves its last chunk in `WRITING`: its process completes it
//! (see [`crate::owners`]), or, where the process died with it, the recorder reads it up to `committed`. While the
//! process lives the recorder frees what is `COMPLETE` and nothing else.

use crate::brief::{Brief, CALL_WORDS, Said, says, shorten_call};
use crate::chunk;
use crate::clock::{Clock, Ticks};
use crate::map::{CHUNK_PAYLOAD, ChunkHeader, MAX_THREADS, Map};
use crate::record::{Call, Header, Kind, Payload, TimeBase};
use crate::sync::Ordering;
use core::mem::{size_of, size_of_val};
use core::sync::atomic::compiler_fence;

/// Nobody's.
pub const FREE: u32 = 0;
/// Being prepared by a thread.
pub const CLAIMED: u32 = 1;
/// Being filled by a thread.
pub const WRITING: u32 = 2;
/// Full, or left by its thread.
pub const COMPLETE: u32 = 3;

const WORD: usize = 8;
/// Longest record, header word included.
pub const MAX_RECORD: usize = CHUNK_PAYLOAD - 2 * WORD;

/// The fate of a push.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pushed {
    /// The recorder will see it.
    Yes,
    /// Dropped and counted: the recorder does not keep up.
    Full,
    /// Dropped and counted: longer than [`MAX_RECORD`].
    TooLong,
}

/// What a thread is asked to do between two events.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wish {
    /// [`Producer::complete`]: too many threads hold a chunk.
    Complete,
    /// No chunk was free: some may be held by threads that are gone.
    FindChunks,
}

const WISH_COMPLETE: u32 = 1;
const WISH_CHUNKS: u32 = 2;

/// One thread's end of the ring. There is one per thread, so nothing here is shared until it is committed.
#[repr(C, align(64))]
pub struct Producer {
    // What each record needs, in one cache line.
    /// The chunk, where it begins; null without one.
    chunk: *mut u8,
    /// Bytes of records in the chunk; without one, as many as it can hold.
    used: u32,
    /// What the thread is asked to do after its event; 0 nothing.
    wish: u32,
    base: u64,
    said: Said,
    // What each chunk needs.
    map: Map,
    chunk_idx: u32,
    clock: Clock,
    thread: u32,
    tid: u32,
    sequence: u64,
}

const _: () = assert!(core::mem::offset_of!(Producer, map) == 64);

// SAFETY: the pointer is into the map, which may be sent, to a chunk that is this producer's alone.
unsafe impl Send for Producer {}

impl Producer {
    /// The producer of a thread that owns this thread line, which is the process's own knowledge: see
    /// [`crate::owners`].
    #[must_use]
    pub fn new(map: Map, line: u32, tid: u32) -> Producer {
        let thread = map.thread(line);
        // Chunk sequences of a later owner follow those of an earlier one.
        let generation = thread.generation.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        thread.tid.store(tid, Ordering::Relaxed);
        thread.events.store(0, Ordering::Relaxed);
        thread.lost.store(0, Ordering::Relaxed);
        let clock = map.clock();
        Producer {
            chunk: core::ptr::null_mut(),
            used: CHUNK_PAYLOAD as u32,
            wish: 0,
            base: 0,
            said: Said::default(),
            map,
            chunk_idx: 0,
            clock,
            thread: line,
            tid,
            sequence: u64::from(generation) << 32,
        }
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

    /// As [`Producer::push`], in the brief form where that says as much.
    #[inline]
    pub fn push_brief<P: Brief>(&mut self, at: Ticks, flags: u8, payload: &P) -> Pushed {
        let most = WORD + size_of::<P>();
        // First of all: a new chunk has said nothing.
        if !self.make_room(at, most) {
            return self.lose(P::KIND, most, Pushed::Full);
        }
        match payload.shorten(&mut self.said) {
            Some(form) => self.write(at, flags, P::Form::KIND, as_bytes(&form), &[]),
            None => self.write_whole(at, flags, *payload),
        }
        Pushed::Yes
    }

    /// A copy, so that one that is written briefly can stay in registers.
    #[cold]
    #[inline(never)]
    fn write_whole<P: Brief>(&mut self, at: Ticks, flags: u8, payload: P) {
        payload.say(&mut self.said);
        self.write(at, flags, P::KIND, as_bytes(&payload), &[]);
    }

    /// As [`Producer::push`], without the words that are 0.
    pub fn push_call(&mut self, at: Ticks, call: &Call) -> Pushed {
        let mut words = [0; CALL_WORDS];
        for (word, bytes) in words.iter_mut().zip(as_bytes(call).as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        let (n_words, flags) = shorten_call(&mut words);
        let bytes = as_words_bytes(words.get(..n_words).unwrap_or_default());
        self.push_bytes(at, flags, Kind::Call, bytes, &[])
    }

    /// As [`Producer::push`], followed by byte strings, each padded with zeros to whole words.
    #[inline]
    pub fn push_with<P: Payload>(&mut self, at: Ticks, flags: u8, payload: &P, tail: &[&[u8]]) -> Pushed {
        const { assert!(!says(P::KIND), "`push_brief` knows what the chunk has said") };
        self.push_bytes(at, flags, P::KIND, as_bytes(payload), tail)
    }

    /// A record of byte strings alone, each padded with zeros to whole words.
    pub fn push_raw(&mut self, at: Ticks, kind: Kind, parts: &[&[u8]]) -> Pushed {
        self.push_bytes(at, 0, kind, &[], parts)
    }

    /// `head` has whole words.
    #[inline]
    #[unsafe(link_section = "gputrace_hot")]
    fn push_bytes(&mut self, at: Ticks, flags: u8, kind: Kind, head: &[u8], tail: &[&[u8]]) -> Pushed {
        let bytes = WORD + head.len() + tail_bytes(tail);
        if bytes > MAX_RECORD {
            return self.lose(kind, bytes, Pushed::TooLong);
        }
        if !self.make_room(at, bytes) {
            return self.lose(kind, bytes, Pushed::Full);
        }
        self.write(at, flags, kind, head, tail);
        Pushed::Yes
    }

    /// Whether a record of so many bytes, at most [`MAX_RECORD`], can be written now.
    #[inline]
    fn make_room(&mut self, at: Ticks, bytes: usize) -> bool {
        // A time base may come before it.
        self.used as usize + bytes + 2 * WORD <= CHUNK_PAYLOAD || self.next_chunk(at)
    }

    /// Writes a record that there is room for, and makes it visible.
    #[inline]
    fn write(&mut self, at: Ticks, flags: u8, kind: Kind, head: &[u8], tail: &[&[u8]]) {
        let bytes = WORD + head.len() + tail_bytes(tail);
        let delta = at.0.saturating_sub(self.base);
        let delta = u32::try_from(delta).unwrap_or_else(|_| self.write_base(at));
        let header = Header { words: (bytes / WORD) as u16, kind: kind as u8, flags, delta };
        let mut to = self.used as usize;
        self.put(to, &header.encode().to_ne_bytes());
        to += WORD;
        self.put(to, head);
        to += head.len();
        for part in tail {
            self.put(to, part);
            to += part.len();
            let padding = part.len().next_multiple_of(WORD) - part.len();
            self.put(to, [0_u8; WORD].get(..padding).unwrap_or_default());
            to += padding;
        }
        self.used = to as u32;
        // SAFETY: whoever writes has a chunk, which begins with its header, all of it atomics.
        let chunk_header = unsafe { &*self.chunk.cast::<ChunkHeader>() };
        // SYNC: record visible to the consumer.
        chunk_header.committed.store(to as u32, Ordering::Release);
    }

    /// What follows counts from here: nothing, in ticks.
    #[cold]
    fn write_base(&mut self, at: Ticks) -> u32 {
        self.base = at.0;
        let header = Header { words: 2, kind: Kind::TimeBase as u8, flags: 0, delta: 0 };
        let at_word = self.used as usize;
        self.put(at_word, &header.encode().to_ne_bytes());
        self.put(at_word + WORD, as_bytes(&TimeBase { ticks: at.0 }));
        self.used += 2 * WORD as u32;
        0
    }

    /// Gives the chunk to the recorder; the next record starts a new one.
    pub fn complete(&mut self) {
        if !self.chunk.is_null() {
            // Forgotten first: whoever takes over from a thread that was torn away between these lines must not complete
            // a chunk that is somebody else's by then.
            (self.chunk, self.used) = (core::ptr::null_mut(), CHUNK_PAYLOAD as u32);
            compiler_fence(Ordering::SeqCst);
            self.map.header().held_chunks.value.fetch_sub(1, Ordering::Relaxed);
            // SYNC: chunk complete.
            self.map.state(self.chunk_idx).store(COMPLETE, Ordering::Release);
        }
    }

    /// What the thread should do after its event, asked at each of them.
    #[inline]
    #[must_use]
    pub fn wish(&self) -> Option<Wish> {
        if self.wish == 0 { None } else { Some(self.which_wish()) }
    }

    #[cold]
    fn which_wish(&self) -> Wish {
        if self.wish == WISH_CHUNKS { Wish::FindChunks } else { Wish::Complete }
    }

    /// The wish was heard, and is not repeated before there is a reason.
    pub fn heard(&mut self) {
        self.wish = 0;
    }

    #[cold]
    fn lose(&self, kind: Kind, bytes: usize, why: Pushed) -> Pushed {
        // What only explains others is sent again with the next that needs it.
        if kind.is_event() {
            self.map.header().lost_full.add(bytes);
            self.map.thread(self.thread).lost.fetch_add(1, Ordering::Relaxed);
        }
        why
    }

    #[cold]
    fn next_chunk(&mut self, at: Ticks) -> bool {
        self.complete();
        let header = self.map.header();
        self.wish = WISH_CHUNKS;
        // One load when the ring is full: a flood must not turn into a search of every chunk per event.
        if header.free_chunks.value.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let next = &header.next_chunk.value;
        let n_usable = self.map.n_usable();
        for _ in 0..n_usable {
            let mut chunk = next.fetch_add(1, Ordering::Relaxed);
            if chunk >= n_usable {
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
                (self.chunk, self.chunk_idx) = (self.map.chunk(chunk), chunk);
                (self.used, self.base, self.said) = (0, at.0, Said::default());
                // Threads that keep a chunk for their next event may hold half of the ring. Those that come later give
                // theirs back at once: so many slow threads leave room for the fast ones.
                let held = header.held_chunks.value.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
                self.wish = if held > n_usable / 2 { WISH_COMPLETE } else { 0 };
                return true;
            }
        }
        false
    }

    /// Writes where no record is yet.
    #[inline]
    fn put(&self, at: usize, bytes: &[u8]) {
        // SAFETY: `make_room` made sure that the record and a time base fit into the chunk; only this thread writes to a
        // chunk in `WRITING`, and nobody reads beyond `committed`.
        unsafe { chunk::write(self.chunk, at, bytes) };
    }
}

#[inline]
fn tail_bytes(tail: &[&[u8]]) -> usize {
    tail.iter().map(|part| part.len().next_multiple_of(WORD)).sum()
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
        // SAFETY: inside the chunk and a multiple of a word, checked above.
        unsafe { chunk::word(self.map.chunk(chunk), at) }.load(Ordering::Relaxed)
    }

    /// Lets producers use the first `n_usable` chunks. Only for chunks that the ring's file has memory for, and by one at a
    /// time.
    pub fn grow(&self, n_usable: u32) {
        let header = self.map.header();
        let (before, now) = (self.map.n_usable(), n_usable.min(self.map.n_chunks()));
        if now > before {
            // SYNC: the memory of usable chunks.
            header.usable_chunks.value.store(now, Ordering::Release);
            header.free_chunks.value.fetch_add(now - before, Ordering::Relaxed);
        }
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
