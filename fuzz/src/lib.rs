//! What the fuzzed programs share: a file in memory, blocks of a trace, and bytes taken for decisions.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A file that is written anew for each input, in the folder that `run.sh` made in memory.
pub struct Scratch {
    file: File,
    path: PathBuf,
}

impl Scratch {
    /// An empty one of this process.
    #[must_use]
    pub fn new(name: &str) -> Scratch {
        let folder = std::env::var_os("FUZZ_SCRATCH").map_or_else(std::env::temp_dir, PathBuf::from);
        let path = folder.join(format!("gputrace-fuzz-{}-{name}", std::process::id()));
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path).expect("writable");
        Scratch { file, path }
    }

    /// Makes `bytes` all that is in it.
    pub fn holding(&self, bytes: &[u8]) -> &Path {
        self.file.write_all_at(bytes, 0).expect("there is room");
        self.file.set_len(bytes.len() as u64).expect("there is room");
        &self.path
    }

    /// As it is.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Bytes of an input, taken one decision after the other; zeros when there are none left.
pub struct Bytes<'a>(pub &'a [u8]);

impl<'a> Bytes<'a> {
    /// Nothing is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next so many, or all that are left.
    pub fn take(&mut self, n: usize) -> &'a [u8] {
        let (taken, left) = self.0.split_at(n.min(self.0.len()));
        self.0 = left;
        taken
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    /// The next two.
    pub fn short(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// The next eight.
    pub fn word(&mut self) -> u64 {
        self.word_of(8)
    }

    /// The next `n` as one number.
    pub fn word_of(&mut self, n: usize) -> u64 {
        let mut word = [0; 8];
        let taken = self.take(n.min(8));
        word[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(word)
    }

    /// A number of any length, the short ones in two bytes: how many bits, then so many bytes.
    pub fn number(&mut self) -> u64 {
        let bits = u32::from(self.byte()) % 65;
        let mut word = [0; 8];
        let taken = self.take(bits.div_ceil(8) as usize);
        word[..taken.len()].copy_from_slice(taken);
        u64::from_le_bytes(word) & (u64::MAX.checked_shr(64 - bits).unwrap_or(0))
    }
}

/// The parts of a trace as the fuzzer sees them: payloads without compression and checksums, so that what it changes is
/// what is parsed. `schemas/FORMAT.md` describes the file; this is written from there, apart from the writer.
pub mod blocks {
    use super::Bytes;

    const MAGIC: &[u8; 8] = b"GPUTRC\0\x01";
    const BLOCK: &[u8; 4] = b"GTB\x01";
    const HEADER: usize = 64;

    /// An input becomes a trace: per block a byte for the kind, one for what is wrong with it, how many, the times, how
    /// long, and the payload.
    #[must_use]
    pub fn fold(input: &[u8]) -> Vec<u8> {
        let mut input = Bytes(input);
        let mut file = MAGIC.to_vec();
        let mut sequence = 0;
        let mut index = None;
        let mut n_events = 0u64;
        while !input.is_empty() {
            let (kind, oddity) = (input.byte(), input.byte());
            let (count, first, last) = (input.number() as u32, input.number(), input.number());
            let length = input.number() as usize;
            let payload = input.take(length);
            match kind {
                EVENTS => n_events += u64::from(count),
                INDEX => index = Some(file.len() as u64),
                _ => {}
            }
            block(&mut file, kind, oddity, [u64::from(count), sequence, first, last], payload);
            sequence += 1;
        }
        if let Some(index) = index {
            let mut footer = index.to_le_bytes().to_vec();
            footer.extend(n_events.to_le_bytes());
            footer.extend([0; 4]);
            let crc = crc32fast::hash(&footer[..20]);
            footer.extend(crc.to_le_bytes());
            footer.extend(b"GPUTREND");
            file.extend(footer);
        }
        file
    }

    const EVENTS: u8 = 2;
    const INDEX: u8 = 4;

    fn block(file: &mut Vec<u8>, kind: u8, oddity: u8, words: [u64; 4], payload: &[u8]) {
        let stored = zstd::bulk::compress(payload, 1).expect("compressible");
        let raw =
            if oddity & 1 != 0 { payload.len() as u32 + u32::from(oddity) } else { payload.len() as u32 };
        let [count, sequence, first, last] = words;
        let mut header = BLOCK.to_vec();
        header.extend([kind, if oddity & 2 != 0 { oddity } else { 1 }, HEADER as u8, 0]);
        for word in [count as u32, raw, stored.len() as u32, crc32fast::hash(&stored)] {
            header.extend(word.to_le_bytes());
        }
        for word in [sequence, first, last] {
            header.extend(word.to_le_bytes());
        }
        header.resize(HEADER - 4, 0);
        header.extend(crc32fast::hash(&header).to_le_bytes());
        if oddity & 4 != 0 {
            header[usize::from(oddity >> 3)] ^= oddity;
        }
        file.extend(header);
        file.extend(stored);
    }

    /// The input that [`fold`] makes this trace of, but for its footer.
    #[must_use]
    pub fn unfold(trace: &[u8]) -> Vec<u8> {
        let mut input = Vec::new();
        let mut at = MAGIC.len();
        while let Some(header) = trace.get(at..at + HEADER).filter(|header| header.starts_with(BLOCK)) {
            let word = |at: usize| header[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            let half = |at: usize| header[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
            let (raw, stored) = (half(12) as usize, half(16) as usize);
            let Some(payload) = trace.get(at + HEADER..at + HEADER + stored) else { break };
            let payload = zstd::bulk::decompress(payload, raw).expect("a good trace");
            input.extend([header[4], 0]);
            for value in [u64::from(half(8)), word(32), word(40), payload.len() as u64] {
                number(&mut input, value);
            }
            input.extend(payload);
            at += HEADER + stored;
        }
        input
    }

    /// As [`Bytes::number`] reads it.
    fn number(to: &mut Vec<u8>, value: u64) {
        let bits = 64 - value.leading_zeros();
        to.push(bits as u8);
        to.extend(&value.to_le_bytes()[..bits.div_ceil(8) as usize]);
    }
}

/// Writes an input where a corpus begins with it.
///
/// # Panics
/// When the file cannot be written.
pub fn seed(folder: &Path, name: &str, bytes: &[u8]) {
    std::fs::create_dir_all(folder).expect("writable");
    let mut file = File::create(folder.join(name)).expect("writable");
    file.write_all(bytes).expect("writable");
}
