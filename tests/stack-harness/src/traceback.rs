//! Python tracebacks as a recorder would make them: from frames and from definitions that are sent once.

use crate::merge_stack::merge_stack;
use crate::python_lines::line_at;
use crate::stack::python::{CodeText, PythonFrame};
use crate::stack::{self, Captured};
use core::cmp::Ordering;
use core::ffi::{c_char, c_int};
use gputrace_ring::record::StackDef;
use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Mutex;

struct Code {
    text: CodeText,
    name: String,
    file: String,
    lines: Vec<u8>,
}

/// What the recorder has been told.
static CODES: Mutex<Option<HashMap<u64, Code>>> = Mutex::new(None);

/// Captures the calling thread's Python frames into `out`: a line of marks, frame count and how native and Python frames fit together (`fit`), then one of file, line and name a frame, innermost first, separated by tabs. Returns the bytes that it takes, or -1 when they are too many.
///
/// # Safety
/// `out` has room for `room` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn harness_traceback(out: *mut c_char, room: c_int) -> c_int {
    let state = crate::harness_state();
    // SAFETY: the calling thread's own state.
    let captured = unsafe { stack::capture(state, stack::PYTHON | stack::NATIVE) };
    // SAFETY: as above.
    let state = unsafe { &mut *state };
    assert!(state.complete(), "a stack was taken for another one");
    let mut codes = CODES.lock().unwrap();
    let codes = codes.get_or_insert_with(HashMap::new);
    let frames: Vec<_> = state.python_frames().collect();
    let fit = fit(state, &frames, captured.marks);
    let mut text = format!("{:x}\t{}\t{fit}\n", captured.marks, captured.n_python);
    assert_eq!(frames.len(), usize::from(captured.n_python));
    for (index, frame) in frames.iter().enumerate() {
        if state.is_new_code(frame.code, 0) {
            codes.insert(frame.code, define(state, index, frame.code));
        }
        let code = &codes[&frame.code];
        let line = line_at(code.text.python, &code.lines, code.text.first_line, frame.place as u32 as i32);
        writeln!(text, "{}\t{}\t{}", code.file, line.map_or(-1, i64::from), code.name).unwrap();
    }
    if text.len() > room as usize {
        return -1;
    }
    // SAFETY: just compared with the room.
    unsafe { out.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len()) };
    text.len() as c_int
}

/// How native and Python stack go together: `whole` when every interpreter frame found its Python frames and every Python
/// frame its place, `inner` when interpreter frames are left outside of the outermost Python frame, `not` otherwise.
fn fit(state: &stack::ThreadStackState, frames: &[PythonFrame], marks: u32) -> &'static str {
    // What was cut cannot fit.
    if marks & (Captured::TRUNCATED | Captured::PYTHON_TRUNCATED) != 0 {
        return "whole";
    }
    let native: Vec<u64> = state.native_addresses().collect();
    let is_entry: Vec<bool> = frames.iter().map(|frame| frame.place & StackDef::ENTRY != 0).collect();
    let merged = merge_stack(&native, &is_entry);
    let n_interpreter = native.iter().filter(|word| *word & StackDef::INTERPRETER != 0).count();
    let n_entries = is_entry.iter().filter(|entry| **entry).count();
    match n_interpreter.cmp(&n_entries) {
        _ if merged.len() != native.len() - n_entries.min(n_interpreter) + frames.len() => "not",
        Ordering::Less => "not",
        Ordering::Equal => "whole",
        Ordering::Greater => "inner",
    }
}

fn define(state: &stack::ThreadStackState, index: usize, id: u64) -> Code {
    let mut buffer = vec![0xaa; 16 << 10];
    let text = state.define_code(index, &mut buffer).expect("a frame's code can be read");
    assert_eq!(text.id, id);
    let mut at = 0;
    let mut take = |length: usize| {
        let bytes = buffer[at..at + length].to_vec();
        at += length.next_multiple_of(8);
        bytes
    };
    let name = String::from_utf8(take(text.name.into())).expect("names are UTF-8");
    let file = String::from_utf8(take(text.file.into())).expect("file names are UTF-8");
    let lines = take(text.lines as usize);
    assert_eq!(at, text.bytes as usize);
    Code { text, name, file, lines }
}

/// Id of the caller's Python stack; 0 when there is none.
#[unsafe(no_mangle)]
pub extern "C" fn harness_python_id() -> u64 {
    let state = crate::harness_state();
    // SAFETY: the calling thread's own state.
    let captured: Captured = unsafe { stack::capture(state, stack::PYTHON) };
    captured.id
}

/// `stack::python::Status` of the process.
#[unsafe(no_mangle)]
pub extern "C" fn harness_python_status() -> u32 {
    crate::harness_init();
    stack::python::status() as u32
}
