//! A file that is read by blocks, so that the few headers that are wanted of it cost a few calls, however long it is.

use object::read::{ReadCache, ReadRef};
use std::cell::Cell;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Bytes of a block. ELF files keep their headers in the first page and their section table at the end.
const BLOCK: usize = 16 << 10;
/// Blocks that are kept: the start of a file, its section table, the sections' names and one more.
const MOST_BLOCKS: usize = 4;

/// Bytes that are read of a file's headers, notes and names, at most: real files need less than one of these.
const MOST_BYTES: u64 = 64 << 20;

/// The headers of a file, for `object`, which would read and keep as much as the file says that they have.
pub(crate) struct Headers<'f> {
    cache: ReadCache<Pages<'f>>,
    left: Cell<u64>,
}

impl<'f> Headers<'f> {
    pub(crate) fn of(file: &'f File) -> Headers<'f> {
        Headers { cache: ReadCache::new(Pages::new(file)), left: Cell::new(MOST_BYTES) }
    }

    fn take(&self, bytes: u64) -> Result<(), ()> {
        self.left.set(self.left.get().checked_sub(bytes).ok_or(())?);
        Ok(())
    }
}

impl<'a> ReadRef<'a> for &'a Headers<'_> {
    fn len(self) -> Result<u64, ()> {
        (&self.cache).len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'a [u8], ()> {
        self.take(size)?;
        (&self.cache).read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: Range<u64>, delimiter: u8) -> Result<&'a [u8], ()> {
        let bytes = (&self.cache).read_bytes_at_until(range, delimiter)?;
        self.take(bytes.len() as u64)?;
        Ok(bytes)
    }
}

/// Reads a file by blocks, and keeps the last few.
struct Pages<'f> {
    file: &'f File,
    at: u64,
    /// Each with its place in the file, the newest last.
    blocks: Vec<(u64, Vec<u8>)>,
}

impl<'f> Pages<'f> {
    /// Reads this file from its start.
    fn new(file: &'f File) -> Pages<'f> {
        Pages { file, at: 0, blocks: Vec::new() }
    }

    /// The block that begins here.
    fn block(&mut self, start: u64) -> io::Result<&[u8]> {
        if let Some(known) = self.blocks.iter().position(|(at, _)| *at == start) {
            let block = self.blocks.remove(known);
            self.blocks.push(block);
        } else {
            let bytes = read_block(self.file, start)?;
            if self.blocks.len() == MOST_BLOCKS {
                self.blocks.remove(0);
            }
            self.blocks.push((start, bytes));
        }
        Ok(self.blocks.last().map_or(&[], |(_, bytes)| bytes))
    }
}

/// As much of a block as the file has.
fn read_block(file: &File, start: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; BLOCK];
    let mut n = 0;
    while n < BLOCK {
        match file.read_at(bytes.get_mut(n..).unwrap_or_default(), start + n as u64) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(n);
    Ok(bytes)
}

impl Read for Pages<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let within = (self.at % BLOCK as u64) as usize;
        let block = self.block(self.at - within as u64)?;
        let from = block.get(within..).unwrap_or_default();
        let n = from.len().min(to.len());
        if let (Some(to), Some(from)) = (to.get_mut(..n), from.get(..n)) {
            to.copy_from_slice(from);
        }
        self.at += n as u64;
        Ok(n)
    }
}

impl Seek for Pages<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let from = |base: u64, by: i64| {
            base.checked_add_signed(by).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
        };
        self.at = match to {
            SeekFrom::Start(at) => at,
            SeekFrom::Current(by) => from(self.at, by)?,
            SeekFrom::End(by) => from(self.file.metadata()?.len(), by)?,
        };
        Ok(self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_reads_the_same_by_blocks() {
        let path = std::env::temp_dir().join(format!("gputrace-pages-{}", std::process::id()));
        let bytes: Vec<u8> = (0..5 * BLOCK + 77).map(|at| (at / 3) as u8).collect();
        std::fs::write(&path, &bytes).expect("writable");
        let file = File::open(&path).expect("there");
        let mut pages = Pages::new(&file);
        for (at, n) in [(0, 64), (5 * BLOCK + 70, 7), (BLOCK - 3, 2 * BLOCK), (64, 1), (3 * BLOCK, 0)] {
            let mut found = vec![0; n];
            pages.seek(SeekFrom::Start(at as u64)).expect("a place");
            pages.read_exact(&mut found).expect("inside");
            assert_eq!(found, bytes[at..at + n], "{at}");
        }
        assert_eq!(pages.seek(SeekFrom::End(-1)).expect("a place"), bytes.len() as u64 - 1);
        assert_eq!(pages.read(&mut [0; 9]).expect("inside"), 1);
        assert_eq!(pages.read(&mut [0; 9]).expect("the end"), 0);
        assert_eq!((pages.seek(SeekFrom::Start(u64::MAX - 5)).is_ok(), pages.blocks.len()), (true, 4));
        assert!(pages.read(&mut [0; 9]).is_err() || pages.at == u64::MAX - 5);
        let _ = std::fs::remove_file(path);
    }

    #[test]
    fn headers_that_claim_more_than_files_have_are_not_read() {
        use object::Object;

        let path = std::env::temp_dir().join(format!("gputrace-headers-{}", std::process::id()));
        // An ELF file with one program header: a note of 32 GiB.
        let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0\x01\0\0\0".to_vec();
        bytes.extend([0, 64, 0].iter().flat_map(|word: &u64| word.to_le_bytes()));
        bytes.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0]);
        let length = 32 << 30;
        bytes.extend([120, 120, 120, length, length, 4].iter().flat_map(|word: &u64| word.to_le_bytes()));
        std::fs::write(&path, &bytes).expect("writable");
        let file = File::options().read(true).write(true).open(&path).expect("ours");
        file.set_len(1 << 40).expect("sparse");
        let headers = Headers::of(&file);
        let elf = object::File::parse(&headers).expect("headers");
        assert!(elf.build_id().is_err(), "it was read");
        assert!(headers.left.get() > MOST_BYTES / 2);
        std::fs::remove_file(path).expect("ours");
    }
}
