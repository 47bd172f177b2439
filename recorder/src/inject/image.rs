//! A library in the memory of another process: where its functions are, by its own tables there. The file on disk may be
//! another one by now.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// More than libraries of the C library's kind have.
const MOST_SYMBOLS: usize = 1 << 16;
const MOST_BYTES: usize = 1 << 24;

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
        let (at, size, n) = (word(&head, 32)?, u64::from(short(&head, 54)?), u64::from(short(&head, 56)?));
        let headers = bytes(memory, base.checked_add(at)?, usize::try_from(size.checked_mul(n)?).ok()?)?;
        let (mut code, mut dynamic) = (Vec::new(), None);
        for header in headers.chunks_exact(usize::try_from(size).ok()?) {
            let start = base.wrapping_add(word(header, 16)?);
            let range = start..start.wrapping_add(word(header, 40)?);
            match half(header, 0)? {
                PT_LOAD if half(header, 4)? & 1 == 1 => code.push(range),
                PT_DYNAMIC => dynamic = Some(range),
                _ => {}
            }
        }
        let dynamic = dynamic?;
        let length = usize::try_from(dynamic.end - dynamic.start).ok()?.min(64 << 10);
        let dynamic = bytes(memory, dynamic.start, length)?;
        let entry = |tag: u64| {
            let mut entries = dynamic.chunks_exact(16);
            entries.find_map(|entry| (word(entry, 0)? == tag).then(|| word(entry, 8))?)
        };
        // The loader turns them into addresses.
        let address = |tag| entry(tag).map(|at| if at < base { at.wrapping_add(base) } else { at });
        let n = count(memory, address(DT_GNU_HASH)?)?;
        let symbols = bytes(memory, address(DT_SYMTAB)?, n.checked_mul(24)?)?;
        let strings = bytes(memory, address(DT_STRTAB)?, usize::try_from(entry(DT_STRSZ)?).ok()?)?;
        let mut functions = HashMap::new();
        for symbol in symbols.chunks_exact(24) {
            if symbol[4] & 15 != FUNCTION || short(symbol, 6)? == 0 {
                continue;
            }
            let name = strings.get(half(symbol, 0)? as usize..)?.split(|byte| *byte == 0).next()?;
            let start = base.wrapping_add(word(symbol, 8)?);
            let range = start..start.wrapping_add(word(symbol, 16)?);
            functions.insert(String::from_utf8_lossy(name).into_owned(), range);
        }
        Some(Image { functions, code })
    }

    /// The function's code.
    pub(super) fn function(&self, name: &str) -> Option<&Range<u64>> {
        self.functions.get(name)
    }

    /// Where this stands in its code.
    pub(super) fn find(&self, memory: &File, sought: &[u8]) -> Option<u64> {
        self.code.iter().find_map(|range| {
            let code = bytes(memory, range.start, usize::try_from(range.end - range.start).ok()?)?;
            let at = code.windows(sought.len()).position(|window| window == sought)?;
            Some(range.start + at as u64)
        })
    }
}

/// How many symbols there are: as the last chain of the hash table ends.
fn count(memory: &File, table: u64) -> Option<usize> {
    let head = bytes(memory, table, 16)?;
    let (n_buckets, first, n_words) = (half(&head, 0)?, half(&head, 4)?, half(&head, 8)?);
    let buckets_at = table + 16 + 8 * u64::from(n_words);
    let buckets = bytes(memory, buckets_at, (n_buckets as usize).checked_mul(4)?)?;
    let last = buckets.chunks_exact(4).filter_map(|it| half(it, 0)).max()?;
    let chains = buckets_at + 4 * u64::from(n_buckets);
    let mut index = u64::from(last.checked_sub(first)?);
    while index < MOST_SYMBOLS as u64 {
        let hash = bytes(memory, chains + 4 * index, 4)?;
        index += 1;
        if half(&hash, 0)? & 1 == 1 {
            return usize::try_from(index).ok()?.checked_add(first as usize);
        }
    }
    None
}

/// So many bytes of the other process; `None` if they cannot be read.
pub(super) fn bytes(memory: &File, at: u64, n: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; (n <= MOST_BYTES).then_some(n)?];
    memory.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

/// The eight bytes there, as a number.
pub(super) fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn short(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}
