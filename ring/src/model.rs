//! A ring for loom (`cfg(loom)`): the same tables made of loom's atomics, which are no words of a file. The code that works
//! on them is the real one.

extern crate std;

use crate::map::{CHUNK_PAYLOAD, ChunkHeader, Header, MAX_THREADS, Map, Tenure, ThreadLine};
use crate::sync::{AtomicU32, AtomicU64};
use std::boxed::Box;
use std::vec::Vec;

/// A ring's memory. Maps taken from it must not outlive it.
pub struct Memory {
    header: Header,
    threads: [ThreadLine; MAX_THREADS],
    tenures: [Tenure; MAX_THREADS],
    states: Vec<AtomicU32>,
    chunks: Vec<Chunk>,
}

/// Begins with its header, as a real one does.
#[derive(Default)]
#[repr(C)]
struct Chunk {
    header: ChunkHeader,
    words: [AtomicU64; CHUNK_PAYLOAD / 8],
}

impl Memory {
    /// An empty ring: what `Map::create` is given.
    #[must_use]
    pub fn new(n_chunks: u32) -> Box<Memory> {
        Box::new(Memory {
            header: Header::default(),
            threads: core::array::from_fn(|_| ThreadLine::default()),
            tenures: core::array::from_fn(|_| Tenure::default()),
            states: (0..n_chunks).map(|_| AtomicU32::default()).collect(),
            chunks: (0..n_chunks).map(|_| Chunk::default()).collect(),
        })
    }

    /// Its start.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        core::ptr::from_ref(self).cast_mut().cast()
    }
}

impl Map {
    fn memory(&self) -> &Memory {
        // SAFETY: under loom, maps are made from a memory that lives as long as the model.
        unsafe { &*self.base().cast::<Memory>() }
    }

    /// The header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.memory().header
    }

    /// A thread's line.
    #[must_use]
    pub fn thread(&self, index: u32) -> &ThreadLine {
        &self.memory().threads[index as usize % MAX_THREADS]
    }

    /// The holder of a thread line.
    #[must_use]
    pub fn tenure(&self, line: u32) -> &Tenure {
        &self.memory().tenures[line as usize % MAX_THREADS]
    }

    /// A chunk's state word.
    #[must_use]
    pub fn state(&self, chunk: u32) -> &AtomicU32 {
        &self.memory().states[(chunk % self.n_chunks()) as usize]
    }

    /// A chunk.
    #[must_use]
    pub fn chunk(&self, chunk: u32) -> *mut u8 {
        let chunk = &self.memory().chunks[(chunk % self.n_chunks()) as usize];
        core::ptr::from_ref(chunk).cast_mut().cast()
    }
}

/// A word of a chunk's records.
///
/// # Safety
/// `chunk` is one of a [`Memory`], and `at` a multiple of eight in it.
pub(crate) unsafe fn word<'a>(chunk: *mut u8, at: usize) -> &'a AtomicU64 {
    // SAFETY: as promised.
    let chunk = unsafe { &*chunk.cast::<Chunk>() };
    &chunk.words[at / 8]
}

/// Writes whole words of a chunk's records, in any order that a processor may choose.
///
/// # Safety
/// As [`word`], for all of `bytes`.
pub(crate) unsafe fn write(chunk: *mut u8, at: usize, bytes: &[u8]) {
    let (words, rest) = bytes.as_chunks::<8>();
    assert!(rest.is_empty(), "models write whole words");
    for (word, at) in words.iter().zip((at..).step_by(8)) {
        // SAFETY: as promised.
        unsafe { self::word(chunk, at) }.store(u64::from_ne_bytes(*word), crate::sync::Ordering::Relaxed);
    }
}
