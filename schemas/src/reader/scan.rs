//! Finds the blocks of a trace that has no index, and those behind a damaged part. A hostile file must not keep this at work.

use super::{Block, CORRUPT, CUT, Damage, Source};
use crate::block::{BLOCK_MAGIC, FILE_MAGIC, FOOTER_BYTES, Footer, HEADER_BYTES, Header};
use std::io::{self, SeekFrom};

/// What a search for the next block reads at once.
const WINDOW: usize = 1 << 16;
/// Bytes that a search for blocks in a damaged file may read in vain: more in long files, but no more than takes a fraction of a second. A file
/// can claim to have terabytes and have no block in them.
pub(super) const MIN_PATIENCE: u64 = 64 << 20;
const MAX_PATIENCE: u64 = 256 << 20;

/// How many bytes of a file of this length may be searched in vain.
pub(super) fn patience(length: u64) -> u64 {
    length.saturating_mul(2).clamp(MIN_PATIENCE, MAX_PATIENCE)
}

/// Finds the blocks of a trace without an index, and what is between them.
pub(super) fn scan(
    source: &mut dyn Source,
    length: u64,
    mut patience: u64,
    damages: &mut Vec<Damage>,
) -> io::Result<Vec<Block>> {
    let mut blocks = Vec::new();
    let mut at = FILE_MAGIC.len() as u64;
    while at < length {
        let bad = match look(source, at, length)? {
            Look::Block(block, end) => {
                blocks.push(block);
                at = end;
                continue;
            }
            Look::Damaged { what, remedy, checked } => {
                patience = patience.saturating_sub(checked);
                (what, remedy)
            }
        };
        // The bytes of an index that has lost its footer, or a footer without one, are no loss.
        let mut next = at + 1;
        let found = loop {
            match find_magic(source, next, length, &mut patience)? {
                None => break length,
                Some(_) if patience == 0 => break length,
                Some(candidate) => match look(source, candidate, length)? {
                    Look::Block(..) => break candidate,
                    Look::Damaged { checked, .. } => {
                        patience = patience.saturating_sub(checked.max(WINDOW as u64));
                        next = candidate + 1;
                    }
                },
            }
        };
        if !(found == length && is_footer(source, at, length)?) {
            let (what, remedy) = bad;
            damages.push(Damage { offset: at, bytes: found - at, what, remedy });
        }
        at = found.max(at + 1);
    }
    Ok(blocks)
}

pub(super) enum Look {
    Block(Block, u64),
    Damaged { what: String, remedy: &'static str, checked: u64 },
}

/// Whether a whole block is at `at`.
pub(super) fn look(source: &mut dyn Source, at: u64, length: u64) -> io::Result<Look> {
    let damaged = |what: String, remedy, checked| Ok(Look::Damaged { what, remedy, checked });
    if length - at < HEADER_BYTES as u64 {
        return damaged(format!("a block header is cut off after {} bytes", length - at), CUT, 0);
    }
    let mut bytes = [0; HEADER_BYTES];
    source.seek(SeekFrom::Start(at))?;
    source.read_exact(&mut bytes)?;
    let header = match Header::decode(&bytes) {
        Ok(header) => header,
        Err(why) => {
            let remedy = if bytes.iter().all(|byte| *byte == 0) { CUT } else { CORRUPT };
            return damaged(format!("no block header here ({why:?})"), remedy, 0);
        }
    };
    let end = at + header.block_bytes();
    if end > length {
        let what = format!("a block of {} bytes is cut off after {}", header.block_bytes(), length - at);
        return damaged(what, CUT, 0);
    }
    let mut crc = crc32fast::Hasher::new();
    let mut left = header.stored as usize;
    let mut window = vec![0; left.min(WINDOW)];
    while left > 0 {
        let part = left.min(WINDOW);
        source.read_exact(&mut window[..part])?;
        crc.update(&window[..part]);
        left -= part;
    }
    if crc.finalize() != header.crc {
        let what = "the checksum of a block's payload differs".to_owned();
        return damaged(what, CORRUPT, u64::from(header.stored));
    }
    Ok(Look::Block(Block::new(at, &header), end))
}

pub(super) fn is_footer(source: &mut dyn Source, at: u64, length: u64) -> io::Result<bool> {
    if length - at != FOOTER_BYTES as u64 {
        return Ok(false);
    }
    let mut footer = [0; FOOTER_BYTES];
    source.seek(SeekFrom::Start(at))?;
    source.read_exact(&mut footer)?;
    Ok(Footer::decode(&footer).is_some())
}

/// Where the next block magic begins, at `from` or later.
pub(super) fn find_magic(
    source: &mut dyn Source,
    from: u64,
    length: u64,
    patience: &mut u64,
) -> io::Result<Option<u64>> {
    let mut window = vec![0; WINDOW];
    let mut at = from;
    while at + (BLOCK_MAGIC.len() as u64) <= length && *patience > 0 {
        let part = (length - at).min(WINDOW as u64) as usize;
        source.seek(SeekFrom::Start(at))?;
        source.read_exact(&mut window[..part])?;
        *patience = patience.saturating_sub(part as u64);
        // What a file has not written reads as zeros, which are faster to recognise than a word is to find.
        let is_empty = window[..part].iter().all(|byte| *byte == 0);
        let find = || window[..part].windows(BLOCK_MAGIC.len()).position(|bytes| bytes == BLOCK_MAGIC);
        if let Some(found) = if is_empty { None } else { find() } {
            return Ok(Some(at + found as u64));
        }
        at += (part - BLOCK_MAGIC.len() + 1) as u64;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};

    /// A file that has been made long and never written to, and how much of it was read.
    struct Hole {
        length: u64,
        at: u64,
        n_read: u64,
    }

    impl Read for &mut Hole {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            to.fill(0);
            self.at += to.len() as u64;
            self.n_read += to.len() as u64;
            Ok(to.len())
        }
    }

    impl Seek for &mut Hole {
        fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
            let SeekFrom::Start(at) = to else { return Err(io::ErrorKind::Unsupported.into()) };
            self.at = at;
            Ok(at)
        }
    }

    #[test]
    fn a_search_through_a_hole_of_terabytes_ends() {
        let mut hole = Hole { length: 1 << 40, at: 0, n_read: 0 };
        let (length, mut damages) = (hole.length, vec![]);
        let blocks = scan(&mut &mut hole, length, 1 << 20, &mut damages).expect("readable");
        assert!(blocks.is_empty());
        // All of it is reported as lost, and most of it was not looked at.
        assert_eq!(damages.iter().map(|it| (it.offset, it.bytes)).collect::<Vec<_>>(), [(8, length - 8)]);
        assert!(hole.n_read < 2 << 20, "{} bytes", hole.n_read);
        assert_eq!(patience(length), MAX_PATIENCE);
    }
}
