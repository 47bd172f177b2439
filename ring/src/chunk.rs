//! The bytes of a chunk: words of a file, or under `cfg(loom)` the model's.

#[cfg(loom)]
pub(crate) use crate::model::{word, write};
#[cfg(not(loom))]
use crate::{map::ChunkHeader, sync::AtomicU64};

/// A word of a chunk's records.
///
/// # Safety
/// `chunk` is a chunk, `at` a multiple of eight in its records.
#[cfg(not(loom))]
#[inline]
pub(crate) unsafe fn word<'a>(chunk: *mut u8, at: usize) -> &'a AtomicU64 {
    // SAFETY: inside the chunk, as promised.
    let word = unsafe { chunk.add(size_of::<ChunkHeader>() + at) };
    // SAFETY: eight-byte aligned: chunks and their headers are, and `at` is a multiple of a word.
    unsafe { &*word.cast::<AtomicU64>() }
}

/// Writes records, or parts of them.
///
/// # Safety
/// `chunk` is a chunk that nobody else writes to, `bytes` fit into its records at `at`, and nobody reads there yet.
#[cfg(not(loom))]
#[inline]
pub(crate) unsafe fn write(chunk: *mut u8, at: usize, bytes: &[u8]) {
    // SAFETY: inside the chunk, as promised.
    let to = unsafe { chunk.add(size_of::<ChunkHeader>() + at) };
    // SAFETY: nobody else writes or reads there, as promised.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}
