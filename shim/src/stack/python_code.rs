//! Code objects: what tells them apart, and what a definition of one ships.

use super::interpreter::{Object, Python};
use super::mix;
use super::python_offsets::NONE;

/// Bytes of a name or file name that are hashed and shipped at most.
const MAX_TEXT: u64 = 4096;
/// Bytes of a line table that are hashed at most, half from each end. Tables of this length that differ only between
/// would have to replace each other at one address, with the same length, names and first line.
const MAX_HASHED_LINES: u64 = 1024;

/// Line tables shorter than this (functions of forty lines or so) are compared whole, of others six words, to tell whether a
/// code object that was met before still is the same. Programs that compile a function over and over do get tables of one
/// length at one place that differ in few bytes; whole tables cost 4 ns a frame in a training step with CPython 3.11.
const COMPARED_LINES: u64 = 256;
/// Code objects of a thread whose content is remembered.
const CODES: usize = 512;

/// Code objects whose content was read, by address: reading it costs a hundred times what comparing does.
#[repr(C)]
pub(crate) struct Codes {
    slots: [KnownCode; CODES],
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct KnownCode {
    address: u64,
    check: u64,
    id: u64,
}

impl Codes {
    /// Identity of a code object, whose [`Python::check`] is `check`.
    #[inline(always)]
    pub(crate) fn id(&mut self, python: &Python, interpreter: u64, code: Object, check: u64) -> u64 {
        let address = mix(interpreter, code.address());
        if python.offsets.code_version != NONE {
            return mix(address, check) | 1;
        }
        let slot = (address >> 55) as usize;
        let known = self.slots.get(slot).copied().unwrap_or_default();
        if known.address == address && known.check == check {
            return known.id;
        }
        let id = mix(address, python.content(code)) | 1;
        if let Some(known) = self.slots.get_mut(slot) {
            *known = KnownCode { address, check, id };
        }
        id
    }
}

impl Python {
    /// Whether a code object that was met at this address before still is the same: `co_version` where there is one.
    /// Before, the content's places and its table: another object would have to come to this address whose names and table
    /// lie where those of the old one lay, with the same first line and table; of a long one the same length, start, middle
    /// and end.
    #[inline(always)]
    pub(crate) fn check(&self, code: Object) -> u64 {
        if self.offsets.code_version == NONE {
            return self.parts(code);
        }
        match code.half(self.offsets.code_version) {
            // Four billion code objects were made, there are no more versions.
            0 => self.content(code),
            version => u64::from(version),
        }
    }

    #[inline(always)]
    fn parts(&self, code: Object) -> u64 {
        let lines = code.word(self.offsets.code_lines);
        let places = lines
            ^ code.word(self.offsets.code_name).rotate_left(21)
            ^ code.word(self.offsets.code_file).rotate_left(42);
        // SAFETY: a code object holds its table.
        let lines = unsafe { Object::new(lines) };
        let n_lines = lines.word(self.offsets.length);
        let start = u64::from(self.offsets.bytes_data);
        let hash = mix(places, n_lines << 32 ^ u64::from(code.half(self.offsets.code_first_line)));
        if n_lines < COMPARED_LINES {
            return mix(hash, hash_bytes(lines, start, n_lines));
        }
        // Two words each of start, middle and end; none waits for another.
        let middle = (n_lines / 2) & !7;
        let word = |at: u64, key: u64| mix(key, lines.load::<u64>(start + at));
        let head = word(0, 1).wrapping_add(word(8, 2));
        let tail = word(n_lines - 16, 3).wrapping_add(word(n_lines - 8, 4));
        let inner = word(middle - 8, 5).wrapping_add(word(middle, 6));
        mix(hash, head.wrapping_add(tail).wrapping_add(inner))
    }

    /// A fingerprint of all that a definition ships.
    #[inline(never)]
    fn content(&self, code: Object) -> u64 {
        // SAFETY: a code object holds its names and tables.
        let held = |offset: u16| unsafe { Object::new(code.word(offset)) };
        let lines = held(self.offsets.code_lines);
        let n_lines = lines.word(self.offsets.length);
        let start = u64::from(self.offsets.bytes_data);
        let half = (n_lines.min(MAX_HASHED_LINES) / 2 + 7) & !7;
        let mut hash = mix(n_lines, u64::from(code.half(self.offsets.code_first_line)));
        if n_lines <= MAX_HASHED_LINES {
            hash = mix(hash, hash_bytes(lines, start, n_lines));
        } else {
            hash = mix(hash, hash_bytes(lines, start, half));
            hash = mix(hash, hash_bytes(lines, start + n_lines - half, half));
        }
        hash = mix(hash, self.text_hash(held(self.offsets.code_name)));
        // Bit 32 keeps fingerprints and versions apart.
        mix(hash, self.text_hash(held(self.offsets.code_file))) | 1 << 32
    }

    fn text_hash(&self, text: Object) -> u64 {
        let cached = text.word(self.offsets.text_hash);
        if cached != u64::MAX {
            return cached;
        }
        match self.text(text) {
            Some(text) => hash_bytes(text.data, 0, (text.length * text.width).min(MAX_TEXT)),
            None => 0,
        }
    }

    /// Describes a code object, see [`super::python::PythonState::define_code`].
    pub(crate) fn define(&self, code: Object, id: u64, out: &mut [u8]) -> Option<CodeText> {
        // SAFETY: a code object holds its names and tables.
        let held = |offset: u16| unsafe { Object::new(code.word(offset)) };
        let mut definition = CodeText {
            id,
            first_line: code.half(self.offsets.code_first_line),
            python: 3 << 8 | u16::from(self.offsets.minor),
            ..CodeText::default()
        };
        let mut at = 0;
        let room = out.len();
        // Names never take what the line table needs most.
        let name = out.get_mut(..(room / 4).min(MAX_TEXT as usize))?;
        let (n_name, name_cut) = self.text(held(self.offsets.code_name))?.copy_start(name);
        at += pad(out, at, n_name)?;
        let end = at + (room / 4).min(MAX_TEXT as usize);
        let file = out.get_mut(at..end.min(room))?;
        let (n_file, file_cut) = self.text(held(self.offsets.code_file))?.copy_end(file);
        at += pad(out, at, n_file)?;
        let lines = held(self.offsets.code_lines);
        if lines.word(self.offsets.object_type) != self.bytes_type {
            return None;
        }
        let n_all = lines.word(self.offsets.length);
        let to = out.get_mut(at..room & !7)?;
        let n_lines = to.len().min(n_all as usize);
        for (index, byte) in to.iter_mut().take(n_lines).enumerate() {
            *byte = lines.load(u64::from(self.offsets.bytes_data) + index as u64);
        }
        at += pad(out, at, n_lines)?;
        definition.name = n_name as u16;
        definition.file = n_file as u16;
        definition.lines = n_lines as u32;
        definition.bytes = at as u32;
        let mark = |is_cut: bool, mark: u16| if is_cut { mark } else { 0 };
        definition.marks = mark(name_cut, CodeText::NAME_CUT)
            | mark(file_cut, CodeText::FILE_CUT)
            | mark(n_lines as u64 != n_all, CodeText::LINES_CUT);
        Some(definition)
    }

    fn text(&self, text: Object) -> Option<Text> {
        if text.word(self.offsets.object_type) != self.text_type {
            return None;
        }
        // unicodeobject.h: interned:2, kind:3, compact:1, ascii:1. 3.14 gives interned a byte of its own only in builds
        // without a global lock.
        let state = text.half(self.offsets.text_state);
        let (width, is_compact, is_ascii) = (state >> 2 & 7, state >> 5 & 1 != 0, state >> 6 & 1 != 0);
        if !is_compact || !matches!(width, 1 | 2 | 4) {
            return None;
        }
        let start = if is_ascii { self.offsets.text_ascii } else { self.offsets.text_compact };
        Some(Text {
            // SAFETY: the characters of a compact string are part of it.
            data: unsafe { Object::new(text.address().wrapping_add(u64::from(start))) },
            length: text.word(self.offsets.length),
            width: u64::from(width),
        })
    }
}

/// A code object's definition: the lengths of the texts that were copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct CodeText {
    /// Identity, as in frames.
    pub(crate) id: u64,
    /// `co_firstlineno`.
    pub(crate) first_line: u32,
    /// Bytes of the qualified name (before 3.11 the plain name), UTF-8.
    pub(crate) name: u16,
    /// Bytes of the file name, UTF-8.
    pub(crate) file: u16,
    /// Bytes of the line table.
    pub(crate) lines: u32,
    /// Bytes written in all, padding included.
    pub(crate) bytes: u32,
    /// `(major << 8) | minor` of the interpreter: which line table this is.
    pub(crate) python: u16,
    /// [`CodeText::NAME_CUT`] and others.
    pub(crate) marks: u16,
}

impl CodeText {
    /// The end of the name is missing.
    pub(crate) const NAME_CUT: u16 = 1;
    /// The start of the file name is missing.
    pub(crate) const FILE_CUT: u16 = 2;
    /// The end of the line table is missing.
    pub(crate) const LINES_CUT: u16 = 4;
}

/// The characters of a string: `length` of `width` bytes each.
struct Text {
    data: Object,
    length: u64,
    width: u64,
}

impl Text {
    fn character(&self, index: u64) -> char {
        let code = match self.width {
            1 => u32::from(self.data.load::<u8>(index)),
            2 => u32::from(self.data.load::<u16>(index.wrapping_mul(2))),
            _ => self.data.load::<u32>(index.wrapping_mul(4)),
        };
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
    }

    /// Copies as UTF-8 what fits, from the start. Returns bytes and whether something is missing.
    fn copy_start(&self, out: &mut [u8]) -> (usize, bool) {
        self.copy(0, out)
    }

    /// The same from the end: of a path, that tells most.
    fn copy_end(&self, out: &mut [u8]) -> (usize, bool) {
        let mut bytes = 0;
        let mut from = self.length;
        while from > 0 {
            bytes += self.character(from - 1).len_utf8();
            if bytes > out.len() {
                break;
            }
            from -= 1;
        }
        let (n, is_cut) = self.copy(from, out);
        (n, is_cut || from > 0)
    }

    fn copy(&self, from: u64, out: &mut [u8]) -> (usize, bool) {
        let mut n = 0;
        for index in from..self.length {
            let character = self.character(index);
            let Some(room) = out.get_mut(n..n + character.len_utf8()) else { return (n, true) };
            n += character.encode_utf8(room).len();
        }
        (n, false)
    }
}

/// Zeroes the bytes between a text of `length` at `at` and the next word. Returns the padded length.
fn pad(out: &mut [u8], at: usize, length: usize) -> Option<usize> {
    let padded = length.next_multiple_of(8);
    out.get_mut(at + length..at + padded)?.fill(0);
    Some(padded)
}

/// A hash of `length` bytes at `offset`: sixteen bytes a multiplication, none of which waits for another.
fn hash_bytes(object: Object, offset: u64, length: u64) -> u64 {
    let mut hash = length;
    let mut key = 0x9e37_79b9_7f4a_7c15u64;
    let mut at = 0;
    while at + 16 <= length {
        let low: u64 = object.load(offset + at);
        let high: u64 = object.load(offset + at + 8);
        let product = u128::from(low ^ key) * u128::from(high ^ !key);
        hash = hash.wrapping_add(product as u64 ^ (product >> 64) as u64);
        key = key.wrapping_add(0xd1b5_4a32_d192_ed03);
        at += 16;
    }
    let mut rest = 0u128;
    while at < length {
        rest = rest << 8 | u128::from(object.load::<u8>(offset + at));
        at += 1;
    }
    mix(mix(hash, rest as u64), (rest >> 64) as u64)
}
