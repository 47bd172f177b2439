//! A library in the memory of another process: where its functions are, by its own tables there. The file on disk may be
//! another one by now.
//!
//! The process may be hostile: every number here is its choice. Each is held against a limit before it is used, so that no process
//! makes us read, keep or look through more than a real library has.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// More than libraries of the C library's kind have.
const MOST_SYMBOLS: usize = 1 << 16;
/// Of one table, or of one segment of code.
const MOST_BYTES: usize = 1 << 24;
/// The C library has 14 program headers.
const MOST_HEADERS: u16 = 64;
/// Of them, those with code: it has one.
const MOST_CODE: usize = 4;
/// The dynamic section has some thirty entries of 16 bytes.
const MOST_DYNAMIC: usize = 64 << 10;
/// Longer names are none of those that are looked for.
const MOST_NAME: usize = 256;
/// Bytes of an entry of each table (gABI 4.1).
const HEADER: usize = 56;
const SYMBOL: usize = 24;

/// Kinds of program headers, tags of the dynamic section (gABI 4.1, chapter 5), and the machine.
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_STRSZ: u64 = 10;
const DT_GNU_HASH: u64 = 0x6fff_fef5;
const EM_X86_64: u16 = 62;
const FUNCTION: u8 = 2;

/// A library, as it lies in the other process.
#[derive(Debug)]
pub(super) struct Image {
    functions: HashMap<String, Range<u64>>,
    /// Its code.
    pub(super) code: Vec<Range<u64>>,
}

impl Image {
    /// The one whose first byte this is; `None` if it does not look like one for x86-64.
    pub(super) fn read(memory: &File, base: u64) -> Option<Image> {
        let head = bytes(memory, base, 64)?;
        if !head.starts_with(&[0x7f, b'E', b'L', b'F', 2, 1]) || short(&head, 18)? != EM_X86_64 {
            return None;
        }
        let (at, size, n) = (word(&head, 32)?, short(&head, 54)?, short(&head, 56)?);
        if usize::from(size) != HEADER || n > MOST_HEADERS {
            return None;
        }
        let headers = bytes(memory, base.checked_add(at)?, HEADER * usize::from(n))?;
        let (mut code, mut dynamic) = (Vec::new(), None);
        for header in headers.chunks_exact(HEADER) {
            let start = base.checked_add(word(header, 16)?)?;
            let range = start..start.checked_add(word(header, 40)?)?;
            match half(header, 0)? {
                PT_LOAD if half(header, 4)? & 1 == 1 && code.len() < MOST_CODE => code.push(range),
                PT_DYNAMIC => dynamic = Some(range),
                _ => {}
            }
        }
        let dynamic = dynamic?;
        let length = length(&dynamic)?.min(MOST_DYNAMIC);
        let dynamic = bytes(memory, dynamic.start, length)?;
        let entry = |tag: u64| {
            let mut entries = dynamic.chunks_exact(16);
            entries.find_map(|entry| (word(entry, 0)? == tag).then(|| word(entry, 8))?)
        };
        // The loader turns them into addresses.
        let address = |tag| entry(tag).map(|at| if at < base { at.saturating_add(base) } else { at });
        let n = count(memory, address(DT_GNU_HASH)?)?;
        let symbols = bytes(memory, address(DT_SYMTAB)?, n.checked_mul(SYMBOL)?)?;
        let strings = bytes(memory, address(DT_STRTAB)?, usize::try_from(entry(DT_STRSZ)?).ok()?)?;
        let mut functions = HashMap::new();
        for symbol in symbols.chunks_exact(SYMBOL) {
            if symbol[4] & 15 != FUNCTION || short(symbol, 6)? == 0 {
                continue;
            }
            let Some(name) = strings.get(half(symbol, 0)? as usize..) else { continue };
            let Some(n) = name.iter().take(MOST_NAME).position(|byte| *byte == 0) else { continue };
            let name = name.get(..n)?;
            let start = base.wrapping_add(word(symbol, 8)?);
            let Some(end) = start.checked_add(word(symbol, 16)?) else { continue };
            let range = start..end;
            functions.insert(String::from_utf8_lossy(name).into_owned(), range);
        }
        Some(Image { functions, code })
    }

    /// The function's code.
    pub(super) fn function(&self, name: &str) -> Option<&Range<u64>> {
        self.functions.get(name)
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn n_functions(&self) -> usize {
        self.functions.len()
    }

    /// Where this stands in its code.
    pub(super) fn find(&self, memory: &File, sought: &[u8]) -> Option<u64> {
        self.code.iter().find_map(|range| {
            let code = bytes(memory, range.start, length(range)?)?;
            let at = code.windows(sought.len()).position(|window| window == sought)?;
            Some(range.start + at as u64)
        })
    }
}

/// Bytes of a range, if it has any.
fn length(range: &Range<u64>) -> Option<usize> {
    usize::try_from(range.end.checked_sub(range.start)?).ok()
}

/// How many symbols there are: as the last chain of the hash table ends.
fn count(memory: &File, table: u64) -> Option<usize> {
    /// Words of a chain that are read at once.
    const AT_ONCE: usize = 1024;
    let head = bytes(memory, table, 16)?;
    let (n_buckets, first, n_words) = (half(&head, 0)?, half(&head, 4)?, half(&head, 8)?);
    let buckets_at = table.checked_add(16 + 8 * u64::from(n_words))?;
    let buckets = bytes(memory, buckets_at, (n_buckets as usize).checked_mul(4)?)?;
    let last = buckets.chunks_exact(4).filter_map(|it| half(it, 0)).max()?;
    let chains = buckets_at.checked_add(4 * u64::from(n_buckets))?;
    let mut index = last.checked_sub(first)? as usize;
    while index < MOST_SYMBOLS {
        let at = chains.checked_add(4 * index as u64)?;
        // The table may end before so many do.
        let hashes = (0..2).find_map(|one| bytes(memory, at, if one == 0 { 4 * AT_ONCE } else { 4 }))?;
        for hash in hashes.chunks_exact(4) {
            index += 1;
            if half(hash, 0)? & 1 == 1 {
                return index.checked_add(first as usize).filter(|n| *n <= MOST_SYMBOLS);
            }
        }
    }
    None
}

/// So many bytes of the other process; `None` if they cannot be read.
pub(super) fn bytes(memory: &File, at: u64, n: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; (n <= MOST_BYTES).then_some(n)?];
    at.checked_add(n as u64).filter(|end| *end <= i64::MAX as u64)?;
    memory.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

/// The eight bytes there, as a number.
pub(super) fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

pub(super) fn half(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(super) fn short(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::super::look_at_image;
    use super::*;
    use std::io::Write;

    /// A library at address 0, in a file that stands for memory: header, one segment with code, a dynamic section, and a table of one
    /// function.
    fn image() -> Vec<u8> {
        let mut bytes = vec![0_u8; 4096];
        let mut put = |at: usize, value: u64, n: usize| {
            bytes[at..at + n].copy_from_slice(&value.to_le_bytes()[..n]);
        };
        put(0, u64::from_le_bytes(*b"\x7fELF\x02\x01\x01\0"), 8);
        for (at, value, n) in [(18, 62, 2), (32, 64, 8), (54, 56, 2), (56, 2, 2)] {
            put(at, value, n);
        }
        // PT_LOAD of all with code, PT_DYNAMIC at 256.
        for (at, value, n) in
            [(64, 1, 4), (68, 5, 4), (104, 4096, 8), (120, 2, 4), (136, 256, 8), (160, 96, 8)]
        {
            put(at, value, n);
        }
        let dynamic = [(DT_GNU_HASH, 512), (DT_SYMTAB, 1024), (DT_STRTAB, 2048), (DT_STRSZ, 16), (0, 0)];
        for (index, (tag, value)) in dynamic.into_iter().enumerate() {
            put(256 + 16 * index, tag, 8);
            put(264 + 16 * index, value, 8);
        }
        // One bucket, the first symbol is 1, one word of filter; its chain ends at once.
        for (at, value, n) in [(512, 1, 4), (516, 1, 4), (520, 1, 4), (536, 1, 4), (540, 1, 4)] {
            put(at, value, n);
        }
        // A function of section 1 at 3000, 8 bytes.
        for (at, value, n) in [(1048, 1, 4), (1052, 2, 1), (1054, 1, 2), (1056, 3000, 8), (1064, 8, 8)] {
            put(at, value, n);
        }
        bytes[2049..2052].copy_from_slice(b"fun");
        bytes
    }

    fn looked_at(bytes: &[u8]) -> usize {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("gputrace-image-{}-{n}", std::process::id()));
        let mut file = File::create_new(&path).expect("writable");
        file.write_all(bytes).expect("room");
        let found = look_at_image(&File::open(&path).expect("there"));
        std::fs::remove_file(path).expect("ours");
        found
    }

    #[test]
    fn no_number_of_a_hostile_header_is_believed() {
        assert_eq!(looked_at(&image()), 1);
        for at in (16..4096).step_by(2).filter(|at| image()[*at..*at + 2] != [0, 0] || at % 64 == 0) {
            for value in [0_u64, 1, 0xffff, u64::from(u32::MAX), u64::MAX, i64::MAX as u64, 1 << 40] {
                for n in [2, 4, 8] {
                    let mut bytes = image();
                    bytes[at..at + n].copy_from_slice(&value.to_le_bytes()[..n]);
                    let _ = looked_at(&bytes);
                }
            }
        }
    }
}
