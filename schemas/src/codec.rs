//! How payloads are stored: as zstd frames. Miri runs no C: there a payload is stored as it is, so that all around it can be
//! tried.

#[cfg(miri)]
pub(crate) use plain::{Compressor, Decompressor, compress_bound};
#[cfg(not(miri))]
pub(crate) use zstd::zstd_safe::compress_bound;

#[cfg(not(miri))]
pub(crate) type Compressor = zstd::bulk::Compressor<'static>;
#[cfg(not(miri))]
pub(crate) type Decompressor = zstd::bulk::Decompressor<'static>;

#[cfg(miri)]
mod plain {
    use std::io;

    pub(crate) struct Compressor;

    impl Compressor {
        pub(crate) fn new(_level: i32) -> io::Result<Compressor> {
            Ok(Compressor)
        }

        pub(crate) fn compress_to_buffer(&mut self, from: &[u8], to: &mut [u8]) -> io::Result<usize> {
            to[..from.len()].copy_from_slice(from);
            Ok(from.len())
        }
    }

    pub(crate) struct Decompressor;

    impl Decompressor {
        pub(crate) fn new() -> io::Result<Decompressor> {
            Ok(Decompressor)
        }

        pub(crate) fn decompress_to_buffer(&mut self, from: &[u8], to: &mut Vec<u8>) -> io::Result<usize> {
            if from.len() > to.capacity() {
                return Err(io::Error::other("Destination buffer is too small"));
            }
            to.extend_from_slice(from);
            Ok(from.len())
        }
    }

    pub(crate) fn compress_bound(bytes: usize) -> usize {
        bytes
    }
}
