//! A restricted, streaming reader of Python pickles (protocols 2 to 5) for memory snapshots.
//!
//! It knows data only: dictionaries, lists, tuples, numbers, strings, booleans and None. Anything that would
//! import a name or call it is refused, so reading a snapshot from a stranger runs nothing. It never
//! recurses, never trusts a length, and turns trace entries and stack frames into fixed-size rows as soon as
//! their dictionary is complete, so that a snapshot of millions of events needs tens of bytes for each.
//!
//! It must not know what the rows mean: that is `snapshot.rs`.

use std::collections::HashMap;
use std::io::{BufReader, Read};

use rustc_hash::FxHashMap;

/// Why a pickle could not be read. Every message names the byte where reading stopped.
#[derive(Debug, thiserror::Error)]
pub enum PickleError {
    /// The stream ended before STOP.
    #[error("ends early at byte {at}: the file is truncated (was the process killed while writing it?)")]
    Truncated {
        /// Offset in the uncompressed stream, bytes.
        at: u64,
    },
    /// The stream could not be read at all.
    #[error("cannot be read at byte {at}: {cause}")]
    Read {
        /// Offset in the uncompressed stream, bytes.
        at: u64,
        /// What the operating system or the decompressor said.
        cause: std::io::Error,
    },
    /// An instruction that could run code.
    #[error(
        "contains {opcode} at byte {at}, which would run code: a memory snapshot never needs it; do not load this file with Python"
    )]
    Unsafe {
        /// Its name in Python's `pickletools`.
        opcode: &'static str,
        /// Offset in the uncompressed stream, bytes.
        at: u64,
    },
    /// Something that snapshots do not contain.
    #[error("is not a memory snapshot: {what} at byte {at}")]
    Unexpected {
        /// What was found, in words.
        what: String,
        /// Offset in the uncompressed stream, bytes.
        at: u64,
    },
}

/// Any value of the pickle, eight bytes. Compound values are indices into the [`Heap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value {
    None,
    Bool(bool),
    Int(i32),
    /// An integer that needs more than 32 bits: index into `wide`.
    Wide(u32),
    /// A float: its bits are in `wide`.
    Float(u32),
    /// An integer of more than 64 bits, or bytes: nothing that a snapshot needs.
    Opaque,
    Str(u32),
    List(u32),
    Tuple(u32),
    Dict(u32),
    Mark,
}

/// A dictionary, or what became of it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Dict {
    /// Key and value pairs: index into `raw`.
    Raw(u32),
    /// A trace entry: index into `entries`.
    Entry(u32),
    /// A stack frame: index into `frames`.
    Frame(u32),
}

/// One element of `device_traces`, as recorded. A key that was missing is [`MISSING`] or [`NO_STRING`]. There may be ten
/// million of them: 40 bytes each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawEntry {
    pub(crate) address: i64,
    pub(crate) bytes: i64,
    pub(crate) time_us: i64,
    /// Index into `strings`.
    pub(crate) action: u32,
    /// Index into `streams`.
    stream: u32,
    /// Index into `lists`.
    frames: u32,
    /// Index into `tuples`.
    pool: u32,
}

const _: () = assert!(size_of::<RawEntry>() == 40);

/// Missing integer of a [`RawEntry`].
pub(crate) const MISSING: i64 = i64::MIN;
/// Missing string of a [`RawEntry`] or [`RawFrame`], and any other missing index.
const NO_STRING: u32 = u32::MAX;
/// Traces with more streams than this are refused.
const MOST_STREAMS: usize = 1 << 17;

/// One stack frame as recorded: indices into `strings`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct RawFrame {
    pub(crate) name: u32,
    pub(crate) file: u32,
    pub(crate) line: i64,
}

/// Everything that a pickle contains, flat.
#[derive(Default)]
pub(crate) struct Heap {
    pub(crate) strings: Vec<Box<str>>,
    pub(crate) wide: Vec<i64>,
    pub(crate) lists: Vec<Vec<Value>>,
    pub(crate) tuples: Vec<Box<[Value]>>,
    pub(crate) dicts: Vec<Dict>,
    pub(crate) raw: Vec<Vec<(Value, Value)>>,
    pub(crate) entries: Vec<RawEntry>,
    /// Streams that entries name, each once.
    streams: Vec<i64>,
    stream_numbers: FxHashMap<i64, u32>,
    /// Free memory of the device, for the entries that say it: errors.
    device_free: FxHashMap<u32, i64>,
    pub(crate) frames: Vec<RawFrame>,
    interned: HashMap<Box<str>, u32>,
    pairs: FxHashMap<(i32, i32), u32>,
    keys: Keys,
}

/// Indices of the strings that the reader looks for, or `NO_STRING` until one is met.
struct Keys([u32; KEYS.len()]);

impl Default for Keys {
    fn default() -> Self {
        Keys([NO_STRING; KEYS.len()])
    }
}

/// Keys of trace entries and frames. The order is that of the constants below.
const KEYS: [&str; 15] = [
    "action",
    "addr",
    "size",
    "stream",
    "time_us",
    "device_free",
    "frames",
    "pool_id",
    "name",
    "filename",
    "line",
    "compile_context",
    "user_metadata",
    "segment_pool_id",
    "mempool_id",
];
const ACTION: usize = 0;
const FILENAME: usize = 9;

/// A string longer than this is hostile: snapshots hold file and function names.
const LONGEST_STRING: u64 = 64 << 20;
/// More objects of one kind than this cannot be indexed.
const MOST_OBJECTS: usize = u32::MAX as usize - 1;
/// A file may have this many objects of one kind, and this many more for each of its bytes. Compressed snapshots have less
/// than one per byte; a file that has more was made to fill the memory.
const OBJECTS_OF_A_FILE: u64 = 1 << 20;
const OBJECTS_OF_A_BYTE: u64 = 16;

impl Heap {
    /// The integer behind a value, booleans included.
    pub(crate) fn int(&self, value: Value) -> Option<i64> {
        match value {
            Value::Int(small) => Some(i64::from(small)),
            Value::Wide(index) => self.wide.get(index as usize).copied(),
            Value::Bool(flag) => Some(i64::from(flag)),
            _ => None,
        }
    }

    /// The text behind a value.
    pub(crate) fn text(&self, value: Value) -> Option<&str> {
        match value {
            Value::Str(index) => self.strings.get(index as usize).map(|text| &**text),
            _ => None,
        }
    }

    /// The elements of a list or tuple.
    pub(crate) fn elements(&self, value: Value) -> Option<&[Value]> {
        match value {
            Value::List(index) => self.lists.get(index as usize).map(Vec::as_slice),
            Value::Tuple(index) => self.tuples.get(index as usize).map(|tuple| &**tuple),
            _ => None,
        }
    }

    /// The pairs of a dictionary that is neither an entry nor a frame.
    pub(crate) fn pairs(&self, value: Value) -> Option<&[(Value, Value)]> {
        match value {
            Value::Dict(index) => match self.dicts.get(index as usize)? {
                Dict::Raw(raw) => self.raw.get(*raw as usize).map(Vec::as_slice),
                Dict::Entry(_) | Dict::Frame(_) => None,
            },
            _ => None,
        }
    }

    /// The value of `key` in a dictionary; the last one where the key occurs twice.
    pub(crate) fn get(&self, value: Value, key: &str) -> Option<Value> {
        let pairs = self.pairs(value)?;
        pairs.iter().rev().find(|(name, _)| self.text(*name) == Some(key)).map(|(_, found)| *found)
    }

    /// Which trace entry a value is.
    pub(crate) fn entry_index(&self, value: Value) -> Option<u32> {
        match value {
            Value::Dict(index) => match self.dicts.get(index as usize)? {
                Dict::Entry(entry) => Some(*entry),
                Dict::Raw(_) | Dict::Frame(_) => None,
            },
            _ => None,
        }
    }

    /// Which stack frame a value is.
    pub(crate) fn frame_index(&self, value: Value) -> Option<u32> {
        match value {
            Value::Dict(index) => match self.dicts.get(index as usize)? {
                Dict::Frame(frame) => Some(*frame),
                Dict::Raw(_) | Dict::Entry(_) => None,
            },
            _ => None,
        }
    }

    fn intern(&mut self, text: &str) -> u32 {
        if let Some(found) = self.interned.get(text) {
            return *found;
        }
        let index = self.strings.len() as u32;
        self.strings.push(text.into());
        self.interned.insert(text.into(), index);
        if let Some(known) = KEYS.iter().position(|key| *key == text) {
            self.keys.0[known] = index;
        }
        index
    }

    /// Which of `KEYS` a value is.
    fn key(&self, value: Value) -> Option<usize> {
        match value {
            Value::Str(index) => self.keys.0.iter().position(|known| *known == index),
            _ => None,
        }
    }

    fn fill_entry(&mut self, entry: u32, items: &[Value]) {
        let mut row = self.entries[entry as usize];
        for pair in items.chunks_exact(2) {
            let int = self.int(pair[1]).unwrap_or(MISSING);
            match self.key(pair[0]) {
                Some(0) => row.action = if let Value::Str(text) = pair[1] { text } else { NO_STRING },
                Some(1) => row.address = int,
                Some(2) => row.bytes = int,
                Some(3) => row.stream = self.stream_number(int),
                Some(4) => row.time_us = int,
                Some(5) if int != MISSING => {
                    self.device_free.insert(entry, int);
                }
                Some(6) => row.frames = if let Value::List(list) = pair[1] { list } else { NO_STRING },
                Some(7) | Some(13) | Some(14) => {
                    row.pool = if let Value::Tuple(pool) = pair[1] { pool } else { NO_STRING };
                }
                // A newer PyTorch says more of them.
                Some(_) | None => {}
            }
        }
        self.entries[entry as usize] = row;
    }

    fn stream_number(&mut self, stream: i64) -> u32 {
        if let Some(known) = self.stream_numbers.get(&stream) {
            return *known;
        }
        let number = self.streams.len().min(MOST_STREAMS) as u32;
        if self.streams.len() <= MOST_STREAMS {
            self.streams.push(stream);
            self.stream_numbers.insert(stream, number);
        }
        number
    }

    /// The stream of an entry; 0 where it names none.
    pub(crate) fn stream(&self, entry: RawEntry) -> u64 {
        let stream = self.streams.get(entry.stream as usize).copied();
        stream.filter(|stream| *stream != MISSING).unwrap_or(0) as u64
    }

    /// Free memory of the device, where an entry says it.
    pub(crate) fn device_free(&self, entry: u32) -> Option<u64> {
        self.device_free.get(&entry).map(|free| *free as u64)
    }

    /// Forgets what only leads to the entries, once they have been found.
    pub(crate) fn forget_ways(&mut self) {
        self.dicts = Vec::new();
        self.raw = Vec::new();
        self.wide = Vec::new();
        self.lists = Vec::new();
    }

    fn fill_frame(&mut self, frame: u32, items: &[Value]) {
        let mut row = self.frames[frame as usize];
        for pair in items.chunks_exact(2) {
            match (self.key(pair[0]), pair[1]) {
                (Some(8), Value::Str(text)) => row.name = text,
                (Some(FILENAME), Value::Str(text)) => row.file = text,
                (Some(10), line) => row.line = self.int(line).unwrap_or(0),
                _ => {}
            }
        }
        self.frames[frame as usize] = row;
    }
}

/// Reads one pickle, stored in a file of `file_bytes`, to its STOP.
///
/// # Errors
/// When the stream ends early, cannot be decompressed, or contains what a snapshot cannot contain.
pub(crate) fn read(source: impl Read, file_bytes: u64) -> Result<(Heap, Value), PickleError> {
    let most = file_bytes.saturating_mul(OBJECTS_OF_A_BYTE).saturating_add(OBJECTS_OF_A_FILE);
    let mut machine = Machine {
        most: usize::try_from(most).map_or(MOST_OBJECTS, |most| most.min(MOST_OBJECTS)),
        n_elements: 0,
        source: BufReader::with_capacity(1 << 16, source),
        at: 0,
        heap: Heap::default(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        pinned: 0,
        scratch: Vec::new(),
        spare: Vec::new(),
    };
    let root = machine.run()?;
    Ok((machine.heap, root))
}

struct Machine<R: Read> {
    /// Objects of one kind that may be made.
    most: usize,
    /// Elements of all lists and dictionaries.
    n_elements: usize,
    source: BufReader<R>,
    at: u64,
    heap: Heap,
    stack: Vec<Value>,
    /// Where each open MARK is on the stack, and how many wide integers there were.
    marks: Vec<(usize, usize)>,
    memo: Vec<Value>,
    /// Wide integers below this are remembered by the memo and must stay.
    pinned: usize,
    scratch: Vec<u8>,
    /// To be filled again, instead of a list of its own for each dictionary.
    spare: Vec<Value>,
}

impl<R: Read> Machine<R> {
    fn run(&mut self) -> Result<Value, PickleError> {
        loop {
            let start = self.at;
            let opcode = self.byte()?;
            match opcode {
                0x80 => self.protocol()?,
                // FRAME only announces how many bytes follow.
                0x95 => drop(self.number::<8>()?),
                b'.' => return self.pop(),
                b'N' => self.push(Value::None)?,
                0x88 => self.push(Value::Bool(true))?,
                0x89 => self.push(Value::Bool(false))?,
                b'K' => {
                    let small = self.byte()?;
                    self.push(Value::Int(i32::from(small)))?;
                }
                b'M' => {
                    let bytes = self.array::<2>()?;
                    self.push(Value::Int(i32::from(u16::from_le_bytes(bytes))))?;
                }
                b'J' => {
                    let bytes = self.array::<4>()?;
                    self.push(Value::Int(i32::from_le_bytes(bytes)))?;
                }
                0x8a => self.short_long()?,
                0x8b => self.long()?,
                b'G' => {
                    let bytes = self.array::<8>()?;
                    let index = self.wide(i64::from_be_bytes(bytes))?;
                    self.push(Value::Float(index))?;
                }
                0x8c => self.string::<1>()?,
                b'X' => self.string::<4>()?,
                0x8d => self.string::<8>()?,
                b'C' => self.opaque::<1>()?,
                b'B' => self.opaque::<4>()?,
                0x8e => self.opaque::<8>()?,
                b'}' => self.dictionary()?,
                b']' => self.list(Vec::new())?,
                b')' => self.tuple_of(0)?,
                0x85 => self.tuple_of(1)?,
                0x86 => self.tuple_of(2)?,
                0x87 => self.tuple_of(3)?,
                b't' => {
                    let (elements, _) = self.above_mark()?;
                    self.tuple(&elements)?;
                    self.spare = elements;
                }
                b'(' => {
                    self.marks.push((self.stack.len(), self.heap.wide.len()));
                    self.push(Value::Mark)?;
                }
                b'0' => drop(self.pop()?),
                b'2' => {
                    let top = *self.stack.last().ok_or_else(|| self.underflow())?;
                    self.push(top)?;
                }
                b'a' => {
                    let element = self.pop()?;
                    self.append(&[element])?;
                }
                b'e' => {
                    let (elements, _) = self.above_mark()?;
                    self.append(&elements)?;
                    self.spare = elements;
                }
                b's' => {
                    let value = self.pop()?;
                    let key = self.pop()?;
                    let wide = self.heap.wide.len();
                    self.set_items(&[key, value], wide)?;
                }
                b'u' => {
                    let (items, wide) = self.above_mark()?;
                    self.set_items(&items, wide)?;
                    self.spare = items;
                }
                b'd' => {
                    let (items, wide) = self.above_mark()?;
                    self.dictionary()?;
                    self.set_items(&items, wide)?;
                }
                b'l' => {
                    let (elements, _) = self.above_mark()?;
                    self.list(elements)?;
                }
                b'1' => drop(self.above_mark()?),
                0x94 => self.remember(self.memo.len() as u64)?,
                b'q' => self.remember_at::<1>()?,
                b'r' => self.remember_at::<4>()?,
                b'h' => self.recall::<1>()?,
                b'j' => self.recall::<4>()?,
                other => return Err(refused(other, start)),
            }
        }
    }

    fn protocol(&mut self) -> Result<(), PickleError> {
        match self.byte()? {
            2..=5 => Ok(()),
            other => Err(self.unexpected(format!("pickle protocol {other} (2 to 5 are read)"))),
        }
    }

    fn unexpected(&self, what: impl Into<String>) -> PickleError {
        PickleError::Unexpected { what: what.into(), at: self.at }
    }

    fn underflow(&self) -> PickleError {
        self.unexpected("an instruction without its operands")
    }

    fn room(&self, objects: usize) -> Result<(), PickleError> {
        if objects < self.most {
            Ok(())
        } else {
            Err(self.unexpected(format!("more than {} objects, too many for a file of its size,", self.most)))
        }
    }

    fn fill(&mut self, target: &mut [u8]) -> Result<(), PickleError> {
        match self.source.read_exact(target) {
            Ok(()) => {
                self.at += target.len() as u64;
                Ok(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(PickleError::Truncated { at: self.at })
            }
            Err(cause) => Err(PickleError::Read { at: self.at, cause }),
        }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn byte(&mut self) -> Result<u8, PickleError> {
        Ok(self.array::<1>()?[0])
    }

    /// A number of `N` bytes that says how long something is, or which it is.
    fn number<const N: usize>(&mut self) -> Result<u64, PickleError> {
        let mut bytes = [0; 8];
        self.fill(&mut bytes[..N])?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Reads as many bytes as a number of `N` bytes says into `scratch`, growing only as bytes really arrive.
    fn bytes<const N: usize>(&mut self) -> Result<(), PickleError> {
        let length = self.number::<N>()?;
        self.bytes_of(length)
    }

    fn bytes_of(&mut self, length: u64) -> Result<(), PickleError> {
        if length > LONGEST_STRING {
            return Err(self.unexpected(format!("a string of {length} bytes")));
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        let mut left = length as usize;
        while left > 0 {
            let step = left.min(1 << 16);
            let start = scratch.len();
            scratch.resize(start + step, 0);
            self.fill(&mut scratch[start..])?;
            left -= step;
        }
        self.scratch = scratch;
        Ok(())
    }

    fn string<const N: usize>(&mut self) -> Result<(), PickleError> {
        self.bytes::<N>()?;
        self.room(self.heap.strings.len())?;
        let scratch = std::mem::take(&mut self.scratch);
        // Python writes lone surrogates of file names as is; they are not UTF-8 and only shown.
        let index = self.heap.intern(&String::from_utf8_lossy(&scratch));
        self.scratch = scratch;
        self.push(Value::Str(index))
    }

    fn opaque<const N: usize>(&mut self) -> Result<(), PickleError> {
        self.bytes::<N>()?;
        self.push(Value::Opaque)
    }

    fn long(&mut self) -> Result<(), PickleError> {
        self.bytes::<4>()?;
        self.long_of_scratch()
    }

    /// Nearly all integers that need more than 32 bits are of at most 8 bytes.
    fn short_long(&mut self) -> Result<(), PickleError> {
        let length = usize::from(self.byte()?);
        let mut bytes = [0; 8];
        let Some(number) = bytes.get_mut(..length).filter(|_| length > 0) else {
            self.bytes_of(length as u64)?;
            return self.long_of_scratch();
        };
        self.fill(number)?;
        if number[length - 1] & 0x80 != 0 {
            bytes[length..].fill(0xff);
        }
        self.integer(i64::from_le_bytes(bytes))
    }

    fn long_of_scratch(&mut self) -> Result<(), PickleError> {
        if self.scratch.len() > 9 || (self.scratch.len() == 9 && !matches!(self.scratch[8], 0 | 0xff)) {
            return self.push(Value::Opaque);
        }
        // Little-endian two's complement; nine bytes only for the sign of an unsigned 64-bit number.
        let negative = self.scratch.last().is_some_and(|byte| byte & 0x80 != 0);
        let mut bytes = if negative { [0xff; 8] } else { [0; 8] };
        for (target, byte) in bytes.iter_mut().zip(&self.scratch) {
            *target = *byte;
        }
        self.integer(i64::from_le_bytes(bytes))
    }

    fn integer(&mut self, value: i64) -> Result<(), PickleError> {
        match i32::try_from(value) {
            Ok(small) => self.push(Value::Int(small)),
            Err(_) => {
                let index = self.wide(value)?;
                self.push(Value::Wide(index))
            }
        }
    }

    fn wide(&mut self, value: i64) -> Result<u32, PickleError> {
        self.room(self.heap.wide.len())?;
        self.heap.wide.push(value);
        Ok(self.heap.wide.len() as u32 - 1)
    }

    fn push(&mut self, value: Value) -> Result<(), PickleError> {
        self.room(self.stack.len())?;
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, PickleError> {
        match self.stack.pop() {
            None | Some(Value::Mark) => Err(self.underflow()),
            Some(value) => Ok(value),
        }
    }

    /// Takes what lies above the newest mark, and the mark; also, how many wide integers there were at the mark. What is taken may be
    /// given back to `spare`, for the next.
    fn above_mark(&mut self) -> Result<(Vec<Value>, usize), PickleError> {
        let (mark, wide) = self.marks.pop().ok_or_else(|| self.underflow())?;
        let mut values = std::mem::take(&mut self.spare);
        values.clear();
        values.extend_from_slice(&self.stack[mark + 1..]);
        self.stack.truncate(mark);
        Ok((values, wide))
    }

    fn dictionary(&mut self) -> Result<(), PickleError> {
        let (raw, dict) = (self.heap.raw.len(), self.heap.dicts.len());
        self.room(raw.max(dict))?;
        self.heap.raw.push(Vec::new());
        self.heap.dicts.push(Dict::Raw(raw as u32));
        self.push(Value::Dict(dict as u32))
    }

    fn list(&mut self, elements: Vec<Value>) -> Result<(), PickleError> {
        let list = self.heap.lists.len();
        self.room(list)?;
        self.n_elements += elements.len();
        self.room(self.n_elements)?;
        self.heap.lists.push(elements);
        self.push(Value::List(list as u32))
    }

    fn tuple_of(&mut self, count: usize) -> Result<(), PickleError> {
        if self.stack.len() < count || self.stack[self.stack.len() - count..].contains(&Value::Mark) {
            return Err(self.underflow());
        }
        let elements = self.stack.split_off(self.stack.len() - count);
        self.tuple(&elements)
    }

    /// Pairs of small integers are pool ids, one for every entry: kept once.
    fn tuple(&mut self, elements: &[Value]) -> Result<(), PickleError> {
        let next = self.heap.tuples.len() as u32;
        self.room(next as usize)?;
        let index = match elements {
            [Value::Int(first), Value::Int(second)] => {
                *self.heap.pairs.entry((*first, *second)).or_insert(next)
            }
            _ => next,
        };
        if index == next {
            self.n_elements += elements.len();
            self.room(self.n_elements)?;
            self.heap.tuples.push(elements.into());
        }
        self.push(Value::Tuple(index))
    }

    fn append(&mut self, elements: &[Value]) -> Result<(), PickleError> {
        self.n_elements += elements.len();
        self.room(self.n_elements)?;
        match self.stack.last() {
            Some(Value::List(list)) => {
                self.heap.lists[*list as usize].extend_from_slice(elements);
                Ok(())
            }
            _ => Err(self.unexpected("an element appended to something that is not a list")),
        }
    }

    /// `wide` is how many wide integers there were before the items.
    fn set_items(&mut self, items: &[Value], wide: usize) -> Result<(), PickleError> {
        if !items.len().is_multiple_of(2) {
            return Err(self.underflow());
        }
        let Some(Value::Dict(dict)) = self.stack.last().copied() else {
            return Err(self.unexpected("a key set on something that is not a dictionary"));
        };
        match self.heap.dicts[dict as usize] {
            Dict::Raw(raw) => {
                let fresh = self.heap.raw[raw as usize].is_empty();
                let has = |wanted| items.iter().step_by(2).any(|key| self.heap.key(*key) == Some(wanted));
                if fresh && has(ACTION) {
                    self.room(self.heap.entries.len())?;
                    let entry = self.heap.entries.len() as u32;
                    self.heap.entries.push(EMPTY_ENTRY);
                    self.become_row(dict, raw, Dict::Entry(entry));
                    self.heap.fill_entry(entry, items);
                    self.forget_wide(wide);
                } else if fresh && has(FILENAME) {
                    self.room(self.heap.frames.len())?;
                    let frame = self.heap.frames.len() as u32;
                    self.heap.frames.push(RawFrame { name: NO_STRING, file: NO_STRING, line: 0 });
                    self.become_row(dict, raw, Dict::Frame(frame));
                    self.heap.fill_frame(frame, items);
                    self.forget_wide(wide);
                } else {
                    self.n_elements += items.len();
                    self.room(self.n_elements)?;
                    let pairs = &mut self.heap.raw[raw as usize];
                    pairs.extend(items.chunks_exact(2).map(|pair| (pair[0], pair[1])));
                }
            }
            Dict::Entry(entry) => self.heap.fill_entry(entry, items),
            Dict::Frame(frame) => self.heap.fill_frame(frame, items),
        }
        Ok(())
    }

    fn become_row(&mut self, dict: u32, raw: u32, row: Dict) {
        self.heap.dicts[dict as usize] = row;
        if raw as usize + 1 == self.heap.raw.len() {
            self.heap.raw.pop();
        }
    }

    /// The wide integers of a completed row were copied into it.
    fn forget_wide(&mut self, wide: usize) {
        self.heap.wide.truncate(wide.max(self.pinned));
    }

    fn remember_at<const N: usize>(&mut self) -> Result<(), PickleError> {
        let index = self.number::<N>()?;
        self.remember(index)
    }

    fn remember(&mut self, index: u64) -> Result<(), PickleError> {
        let value = match self.stack.last() {
            None | Some(Value::Mark) => return Err(self.underflow()),
            Some(value) => *value,
        };
        if matches!(value, Value::Wide(_) | Value::Float(_)) {
            self.pinned = self.heap.wide.len();
        }
        // Writers count up; a hostile index must not make the table huge.
        if index > self.memo.len() as u64 + (1 << 16) {
            return Err(self.unexpected(format!("memo index {index}")));
        }
        self.room(index as usize)?;
        if index as usize >= self.memo.len() {
            self.memo.resize(index as usize + 1, Value::Mark);
        }
        self.memo[index as usize] = value;
        Ok(())
    }

    fn recall<const N: usize>(&mut self) -> Result<(), PickleError> {
        let index = self.number::<N>()?;
        match self.memo.get(index as usize) {
            None | Some(Value::Mark) => {
                Err(self.unexpected(format!("memo index {index} that was never set")))
            }
            Some(value) => self.push(*value),
        }
    }
}

const EMPTY_ENTRY: RawEntry = RawEntry {
    address: MISSING,
    bytes: MISSING,
    time_us: MISSING,
    action: NO_STRING,
    stream: NO_STRING,
    frames: NO_STRING,
    pool: NO_STRING,
};

impl RawEntry {
    /// The list of its frames.
    pub(crate) fn frames(self) -> Value {
        if self.frames == NO_STRING { Value::None } else { Value::List(self.frames) }
    }

    /// The pair that names its pool.
    pub(crate) fn pool(self) -> Value {
        if self.pool == NO_STRING { Value::None } else { Value::Tuple(self.pool) }
    }
}

/// Names as in CPython's `pickletools`.
fn refused(opcode: u8, at: u64) -> PickleError {
    let name = match opcode {
        b'c' => "GLOBAL",
        0x93 => "STACK_GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x82..=0x84 => "EXT",
        _ => {
            let is_text = at == 0 && matches!(opcode, b'[' | b'{' | b' ' | b'\n');
            let what = match is_text {
                true => "text, as JSON: name the snapshot or the trace that it was made from".to_owned(),
                false => format!("not a pickle: 0x{opcode:02x}"),
            };
            return PickleError::Unexpected { what, at };
        }
    };
    PickleError::Unsafe { opcode: name, at }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(bytes: &[u8]) -> String {
        match read(bytes, bytes.len() as u64) {
            Ok(_) => "read".into(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn hostile_input_is_an_error_with_its_place() {
        for (bytes, said) in [
            (&b""[..], "ends early at byte 0"),
            (b"\x80\x04", "ends early at byte 2"),
            (b"\x80\x09.", "pickle protocol 9"),
            (b"\x80\x02cos\nsystem\n.", "contains GLOBAL at byte 2"),
            (b"\x80\x02N)R.", "contains REDUCE at byte 4"),
            (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f", "a string of 9223372036854775807 bytes"),
            (b"\x80\x04X\xff\xff\xff\x03abc", "ends early"),
            (b"\x80\x02]r\xff\xff\xff\xff.", "memo index 4294967295"),
            (b"\x80\x02h\x05.", "memo index 5 that was never set"),
            (b"\x80\x02u.", "an instruction without its operands"),
            (b"\x80\x02(.", "an instruction without its operands"),
            (b"\x80\x02}(K", "ends early"),
            (b"\x80\x02}(K\x01u.", "an instruction without its operands"),
            (b"\x80\x02Ns.", "an instruction without its operands"),
            (b"\x80\x02NNs.", "a key set on something that is not a dictionary"),
            (b"\x80\x02K\x01NNs.", "a key set on something that is not a dictionary"),
            (b"\x80\x02K\x01Na.", "appended to something that is not a list"),
            (b"\x80\x02(\x86.", "an instruction without its operands"),
            (b"\x80\x02\xff.", "not a pickle: 0xff at byte 2"),
        ] {
            assert!(error(bytes).contains(said), "{bytes:?}: {}", error(bytes));
        }
    }

    #[test]
    fn a_list_that_contains_itself_is_read() {
        let (heap, root) = read(&b"\x80\x02]q\x00h\x00a."[..], 100).unwrap();
        assert_eq!(heap.elements(root), Some(&[root][..]));
    }

    #[test]
    fn a_million_nested_lists_are_read_without_recursion() {
        let mut bytes = vec![0x80, 2];
        bytes.extend(std::iter::repeat_n(b']', 1_000_000));
        bytes.extend(std::iter::repeat_n(b'a', 999_999));
        bytes.push(b'.');
        assert!(read(&bytes[..], bytes.len() as u64).is_ok());
    }

    #[test]
    fn integers_of_every_width_are_read() {
        for (bytes, value) in [
            (&b"\x80\x02K\xff."[..], 255),
            (b"\x80\x02M\xff\xff.", 65535),
            (b"\x80\x02J\xff\xff\xff\xff.", -1),
            (b"\x80\x02\x8a\x00.", 0),
            (b"\x80\x02\x8a\x06\x00\x00\x00\x00\x00\x7f.", 0x7f00_0000_0000),
            (b"\x80\x02\x8b\x02\x00\x00\x00\x00\x80.", -32768),
        ] {
            let (heap, root) = read(bytes, 100).unwrap();
            assert_eq!(heap.int(root), Some(value), "{bytes:?}");
        }
    }
}
