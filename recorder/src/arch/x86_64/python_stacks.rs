//! The Python frames of another process's threads, read while it runs.
//!
//! Nothing of the process is changed: words are read from its memory, by the offsets that the library uses inside
//! ([`gputrace_ring::python_offsets`]). Who asks sees to it that the thread stands still meanwhile (`thread_copy.rs`), or reads it until two
//! readings in a row are the same. Every read is bounded, and nothing that was read is believed before it was checked: a code
//! object must be of CPython's type for code, a text of its type for texts.

use super::foreign::{Foreign, LEAST_ADDRESS};
use crate::pages::Headers;
use crate::process::{AddressSpace, Fate, Target};
use crate::python_lines::line_at;
use gputrace_ring::python_offsets::{
    DEBUG_COOKIE, DEBUG_FREE_THREADED, DEBUG_VERSION, DEBUG_WORDS, NONE, Offsets, Place, VERSIONS,
};
use gputrace_schemas::event::Module;
use object::{Object, ObjectSymbol};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::time::Instant;

/// Threads, interpreters, and frames of a thread that are read at most.
const MOST_THREADS: usize = 1024;
const MOST_INTERPRETERS: usize = 64;
const MOST_FRAMES: usize = 256;
/// Characters of a name, and bytes of a table of lines, that are read at most.
const MOST_TEXT: u64 = 1024;
const MOST_LINES: u64 = 1 << 20;
/// `tid` in `struct pthread` (glibc 2.28 to 2.41, x86-64): before 3.11 the interpreter knows a thread only by the address of that.
const TID_IN_PTHREAD: u64 = 0x2d0;
/// Bytes of `_PyRuntime` in which it says its offsets.
const DEBUG_BYTES: usize = 1024;
/// Bytes of a frame in which all lies that is read of it.
const FRAME_BYTES: usize = 112;

/// A line of a stack.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Line {
    /// The function, qualified from Python 3.11 on.
    pub(crate) function: String,
    /// Its file, as the interpreter names it.
    pub(crate) file: String,
    /// The line that runs; 0 where the table of lines does not say it.
    pub(crate) line: u32,
}

/// The interpreter of the process.
pub(crate) struct Python {
    offsets: Offsets,
    runtime: u64,
    code_type: u64,
    text_type: u64,
    bytes_type: u64,
}

/// A frame before its code is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Frame {
    code: u64,
    instruction: i32,
    /// C code entered the interpreter to run it.
    pub(crate) is_entry: bool,
}

impl Python {
    /// The interpreter of a process, or why there is none that can be read.
    pub(crate) fn find(target: &Target, space: &AddressSpace, foreign: &Foreign) -> Result<Python, String> {
        let is_python = |module: &&Module| {
            let name = module.path.rsplit('/').next().unwrap_or_default();
            name.starts_with("libpython3") || name.starts_with("python3") || name == "python"
        };
        let named = space.modules.iter().filter(is_python);
        // A program that embeds the interpreter is the first of the modules.
        for module in named.chain(space.modules.first()) {
            let Some((file, _)) = target.open(module, Fate::There) else { continue };
            let Some(symbols) = symbols(module, &file) else { continue };
            let offsets = offsets(module, &symbols, foreign)?;
            return Ok(Python {
                offsets,
                runtime: symbols["_PyRuntime"],
                code_type: *symbols.get("PyCode_Type").ok_or("it has no PyCode_Type")?,
                text_type: *symbols.get("PyUnicode_Type").ok_or("it has no PyUnicode_Type")?,
                bytes_type: *symbols.get("PyBytes_Type").ok_or("it has no PyBytes_Type")?,
            });
        }
        Err("it does not run CPython 3".to_owned())
    }

    /// The states of its threads, by the kernel's numbers of these as the process's own namespace has them.
    pub(crate) fn threads(&self, foreign: &Foreign) -> Vec<(u32, u64)> {
        let mut threads = vec![];
        let mut interpreter = foreign.word(self.runtime, self.offsets.interpreters).unwrap_or(0);
        for _ in 0..MOST_INTERPRETERS {
            let Some(first) = foreign.word(interpreter, self.offsets.interpreter_threads) else { break };
            let (mut thread, mut seen) = (first, HashSet::new());
            while thread >= LEAST_ADDRESS && threads.len() < MOST_THREADS && seen.insert(thread) {
                threads.extend(self.number(foreign, thread).map(|tid| (tid, thread)));
                thread = foreign.word(thread, self.offsets.thread_next).unwrap_or(0);
            }
            interpreter = foreign.word(interpreter, self.offsets.interpreter_next).unwrap_or(0);
        }
        threads
    }

    fn number(&self, foreign: &Foreign, thread: u64) -> Option<u32> {
        match self.offsets.thread_native_id {
            NONE => {
                let pthread = foreign.word(thread, self.offsets.thread_id)?;
                let mut tid = [0; 4];
                foreign.bytes(pthread.checked_add(TID_IN_PTHREAD)?, &mut tid)?;
                Some(u32::from_le_bytes(tid))
            }
            native => foreign.half(thread, native),
        }
    }

    /// Where the frames of a thread are, innermost first; `None` where they could not be followed to their end by then.
    pub(crate) fn frames(&self, foreign: &Foreign, thread: u64, until: Instant) -> Option<Vec<Frame>> {
        let offsets = &self.offsets;
        let mut at = foreign.word(thread, offsets.thread_top)?;
        if offsets.cframe_current != NONE && at != 0 {
            at = foreign.word(at, offsets.cframe_current)?;
        }
        let mut frames: Vec<Frame> = vec![];
        for _ in 0..MOST_FRAMES {
            if at < LEAST_ADDRESS {
                break;
            }
            if Instant::now() >= until {
                return None;
            }
            let mut bytes = [0; FRAME_BYTES];
            foreign.bytes(at, &mut bytes)?;
            let word = |offset: u16| {
                let word = bytes.get(usize::from(offset)..usize::from(offset) + 8);
                word.and_then(|word| word.try_into().ok()).map(u64::from_le_bytes)
            };
            let owner = if offsets.frame_owner == NONE { 0 } else { word(offsets.frame_owner)? };
            let is_shim = offsets.shim_owner != u8::MAX && owner & 0xff >= u64::from(offsets.shim_owner);
            if is_shim && let Some(last) = frames.last_mut() {
                last.is_entry = true;
            }
            let code = word(offsets.frame_code)? & !7;
            if !is_shim && code != 0 && foreign.word(code, offsets.object_type) == Some(self.code_type) {
                let place = word(offsets.frame_place)?;
                let instruction = match offsets.place {
                    Place::Bytes => place as u32,
                    Place::Instructions => (place as u32).wrapping_mul(2),
                    Place::Address => {
                        place.wrapping_sub(code).wrapping_sub(u64::from(offsets.code_start)) as u32
                    }
                };
                // 3.11 says it of each frame (`is_entry`), later versions by the frame before.
                let is_entry = offsets.minor < 11 || (offsets.minor == 11 && owner & 0xff != 0);
                frames.push(Frame { code, instruction: instruction.cast_signed(), is_entry });
            }
            at = word(offsets.frame_previous)?;
        }
        if let Some(outermost) = frames.last_mut() {
            outermost.is_entry = true;
        }
        Some(frames)
    }
}

/// Addresses of the symbols that are needed, if `_PyRuntime` is one of this file's.
fn symbols(module: &Module, file: &File) -> Option<HashMap<&'static str, u64>> {
    const WANTED: [&str; 5] = ["_PyRuntime", "PyCode_Type", "PyUnicode_Type", "PyBytes_Type", "Py_Version"];
    let headers = Headers::of(file);
    let elf = object::File::parse(&headers).ok()?;
    let mut module = module.clone();
    crate::process::read_module(&mut module, file);
    let mut found = HashMap::new();
    for symbol in elf.dynamic_symbols().filter(object::ObjectSymbol::is_definition) {
        let known = symbol.name().ok().and_then(|name| WANTED.iter().find(|wanted| **wanted == name));
        if let Some(name) = known {
            found.insert(*name, module.bias.wrapping_add(symbol.address()));
        }
    }
    found.contains_key("_PyRuntime").then_some(found)
}

/// The row of this interpreter, with what the process says itself.
fn offsets(
    module: &Module,
    symbols: &HashMap<&'static str, u64>,
    foreign: &Foreign,
) -> Result<Offsets, String> {
    let runtime = symbols["_PyRuntime"];
    let mut debug = [0; DEBUG_BYTES];
    foreign.bytes(runtime, &mut debug).ok_or("its interpreter cannot be read")?;
    let word = |index: u8| {
        let at = usize::from(index) * 8;
        debug.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
    };
    if word(0) != DEBUG_COOKIE {
        let by_symbol = symbols.get("Py_Version").and_then(|at| foreign.half(*at, 0));
        let minor = by_symbol.map(|version| version >> 16 & 0xff).or_else(|| minor_by_name(&module.path));
        let minor = minor.ok_or("its CPython version is not known")?;
        // From 3.13 on it would have said its offsets.
        let row = VERSIONS.iter().find(|row| u32::from(row.minor) == minor && minor < 13);
        return row.copied().ok_or_else(|| format!("CPython 3.{minor} is not known"));
    }
    let minor = word(DEBUG_VERSION) >> 16 & 0xff;
    if word(DEBUG_FREE_THREADED) != 0 {
        return Err(format!("CPython 3.{minor} without a global lock cannot be read"));
    }
    let words = DEBUG_WORDS.iter().find(|words| u64::from(words.minor) == minor);
    let row = VERSIONS.iter().find(|row| u64::from(row.minor) == minor);
    let (Some(words), Some(row)) = (words, row) else {
        return Err(format!("CPython 3.{minor} is not known"));
    };
    let offset = |index: u8| u16::try_from(word(index)).unwrap_or(NONE);
    let said = Offsets {
        interpreters: offset(words.finalizing + 1),
        interpreter_next: offset(words.interpreter_id + 1),
        interpreter_threads: offset(words.interpreter_id + 2),
        thread_next: offset(words.thread_interpreter - 1),
        thread_top: offset(words.thread_interpreter + 1),
        thread_id: offset(words.thread_id),
        thread_native_id: offset(words.thread_id + 1),
        frame_previous: offset(words.frame_previous),
        frame_code: offset(words.frame_previous + 1),
        frame_place: offset(words.frame_previous + 2),
        frame_owner: offset(words.frame_previous + 4),
        code_file: offset(words.code_file),
        code_name: offset(words.code_file + 2),
        code_lines: offset(words.code_file + 3),
        code_first_line: offset(words.code_file + 4),
        code_start: offset(words.code_start),
        object_type: offset(words.object_type),
        ..*row
    };
    Ok(said)
}

/// `/usr/bin/python3.10`, `/usr/lib/libpython3.9.so.1.0`: 10 and 9.
fn minor_by_name(path: &str) -> Option<u32> {
    let name = path.rsplit('/').next()?;
    let (_, rest) = name.split_once("python3.")?;
    rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// Reads names and lines of frames.
pub(crate) struct Reader<'a> {
    python: &'a Python,
    foreign: &'a Foreign,
    codes: HashMap<u64, Option<Code>>,
}

struct Code {
    function: String,
    file: String,
    first_line: u32,
    lines: Vec<u8>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(python: &'a Python, foreign: &'a Foreign) -> Reader<'a> {
        Reader { python, foreign, codes: HashMap::new() }
    }

    /// `None` where the code is not to be read.
    pub(crate) fn line(&mut self, frame: Frame) -> Option<Line> {
        if !self.codes.contains_key(&frame.code) {
            let code = self.code(frame.code);
            self.codes.insert(frame.code, code);
        }
        let code = self.codes.get(&frame.code)?.as_ref()?;
        let python = 3 << 8 | u16::from(self.python.offsets.minor);
        let line = line_at(python, &code.lines, code.first_line, frame.instruction).unwrap_or(0);
        Some(Line { function: code.function.clone(), file: code.file.clone(), line })
    }

    fn code(&self, code: u64) -> Option<Code> {
        let (offsets, foreign) = (&self.python.offsets, self.foreign);
        let lines = foreign.word(code, offsets.code_lines)?;
        if foreign.word(lines, offsets.object_type)? != self.python.bytes_type {
            return None;
        }
        let length = foreign.word(lines, offsets.length)?;
        let mut table = vec![0; usize::try_from(length.min(MOST_LINES)).ok()?];
        foreign.bytes(lines.checked_add(u64::from(offsets.bytes_data))?, &mut table)?;
        Some(Code {
            function: self.text(foreign.word(code, offsets.code_name)?)?,
            file: self.text(foreign.word(code, offsets.code_file)?)?,
            first_line: foreign.half(code, offsets.code_first_line)?,
            lines: table,
        })
    }

    /// A compact string (unicodeobject.h): interned:2, kind:3, compact:1, ascii:1.
    fn text(&self, text: u64) -> Option<String> {
        let (offsets, foreign) = (&self.python.offsets, self.foreign);
        if foreign.word(text, offsets.object_type)? != self.python.text_type {
            return None;
        }
        let state = foreign.half(text, offsets.text_state)?;
        let (width, is_compact, is_ascii) = (state >> 2 & 7, state >> 5 & 1 != 0, state >> 6 & 1 != 0);
        if !is_compact || !matches!(width, 1 | 2 | 4) {
            return None;
        }
        let start = if is_ascii { offsets.text_ascii } else { offsets.text_compact };
        let length = foreign.word(text, offsets.length)?.min(MOST_TEXT);
        let mut bytes = vec![0; usize::try_from(length * u64::from(width)).ok()?];
        foreign.bytes(text.checked_add(u64::from(start))?, &mut bytes)?;
        let numbers = bytes
            .chunks_exact(width as usize)
            .map(|chunk| chunk.iter().rev().fold(0_u32, |number, byte| number << 8 | u32::from(*byte)));
        Some(numbers.map(|code| char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_read_from_a_name() {
        assert_eq!(minor_by_name("/usr/lib/libpython3.9.so.1.0"), Some(9));
        assert_eq!(minor_by_name("/opt/python3.12/bin/python3.10"), Some(10));
        assert_eq!(minor_by_name("/usr/bin/python"), None);
    }
}
