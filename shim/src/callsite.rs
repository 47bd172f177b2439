//! From where an event came: captures the thread's stack, and sends each stack and each Python code object once.
//!
//! The id of a stack is its hash, so that threads need no common table; a thread remembers which ones it has sent. What
//! another thread sent too is sent again, and the recorder drops the copy.

use crate::backward;
use crate::config::Stacks;
use crate::elf;
use crate::lanes::{self, Lane};
use crate::session::{self, Start};
use crate::stack::objects::Closing;
use crate::stack::{self, Captured, NATIVE, PYTHON};
use crate::sys::Text;
use crate::thread_state::{CODE_BYTES, Rest};
use crate::valgrind::Unwatched;
use core::sync::atomic::{AtomicBool, Ordering};
use gputrace_ring::record::{CodeDef, Kind, StackDef};
use gputrace_ring::ring::{Producer, Pushed, as_words_bytes};

/// Who asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Of {
    /// A call into the driver: its native frames say whose memory it is, so it has them in every mode.
    DriverCall,
    /// A block of a framework's allocator of so many bytes: what the user asked for.
    Block(u64),
    /// A call into NCCL: what the user asked for.
    Nccl,
    /// A call into PJRT: what the user asked for.
    Pjrt,
}

/// To be called where the program looks up a function of this name: an interpreter may have been loaded, or have come back.
pub(crate) fn note_loaded(asked_for: &[u8]) {
    let is_python = asked_for.starts_with(b"Py") || asked_for.starts_with(b"_Py");
    let change = if is_python { stack::python::Change::Asked } else { stack::python::Change::Loaded };
    if session::is_live()
        && stack::python::note_changed(change, elf::lookup)
        && let Some(mut lane) = lanes::lane(Start::OnlyIfLive)
    {
        describe_python(lane.producer());
    }
}

/// To be called after objects were unloaded, while a [`stack::objects::Closing`] is under way.
pub(crate) fn note_unloaded() {
    stack::native::note_unloaded();
    stack::python::note_changed(stack::python::Change::Unloaded, elf::lookup);
}

/// Says in the trace below which size blocks have no stack: `stacks.min_size=BYTES`.
fn describe_min_size(producer: &mut Producer) {
    let least = session::stacks_min_size();
    if least > 0 {
        let text = Text::<64>::new().add(b"stacks.min_size=").number(least);
        let at = producer.now();
        producer.push_raw(at, Kind::Note, &[text.as_bytes()]);
    }
}

/// Says in the trace which native frames run Python: `python.interpreter=VERSION START END`, addresses; or, with
/// `python.frames=unseen: WHY`, that no stack has Python frames (from here on).
pub(crate) fn describe(producer: &mut Producer) {
    describe_min_size(producer);
    describe_python(producer);
}

/// Whether the trace says that no stack has Python frames.
static IS_UNSEEN_SAID: AtomicBool = AtomicBool::new(false);

fn describe_python(producer: &mut Producer) {
    use stack::python::Status;
    let unseen = |why: &[u8]| {
        IS_UNSEEN_SAID.store(true, Ordering::Relaxed);
        Text::<128>::new().add(b"python.frames=unseen: this ").add(why)
    };
    let text = match (stack::python::interpreter(), stack::python::status()) {
        (Some((version, start, end)), _) => Text::<128>::new()
            .add(b"python.interpreter=")
            .number(u64::from(version >> 8))
            .add(b".")
            .number(u64::from(version & 0xff))
            .add(b" ")
            .number(start)
            .add(b" ")
            .number(end),
        (None, Status::FreeThreaded) => unseen(b"CPython is a free-threaded build"),
        (None, Status::UnknownVersion) => unseen(b"is not CPython 3.9 to 3.15"),
        (None, Status::UnknownLayout) => unseen(b"CPython has another memory layout than its version"),
        (None, Status::Absent | Status::Looking | Status::Ready) => return,
    };
    let at = producer.now();
    producer.push_raw(at, Kind::Note, &[text.as_bytes()]);
}

/// Stack id of the calling thread's stack; 0 if it was not looked at.
#[inline]
#[unsafe(link_section = "gputrace_hot")]
pub(crate) fn capture(lane: &mut Lane, of: Of) -> u64 {
    let want = match (session::stacks(), of) {
        (_, Of::Block(bytes)) if bytes < session::stacks_min_size() => return 0,
        (Stacks::All, _) | (Stacks::Python, Of::DriverCall) => NATIVE | PYTHON,
        (Stacks::Python, Of::Block(_) | Of::Nccl | Of::Pjrt) => PYTHON,
        (Stacks::None, Of::DriverCall) => NATIVE,
        (Stacks::None, Of::Block(_) | Of::Nccl | Of::Pjrt) => return 0,
    };
    if !backward::tell_node(lane) {
        return 0;
    }
    match capture_frames(lane, want) {
        0 if want == PYTHON => capture_without_python(lane),
        0 => StackDef::EMPTY,
        id => id,
    }
}

/// Where lines of Python are wanted and the thread runs none: its native stack, unless PyTorch says what it does.
#[cold]
#[inline(never)]
fn capture_without_python(lane: &mut Lane) -> u64 {
    let in_backward = lane.state().node.class != 0;
    match if in_backward { 0 } else { capture_frames(lane, NATIVE | PYTHON) } {
        0 => StackDef::EMPTY,
        id => id,
    }
}

/// Whether the calling thread came from this library to ours. Asked where it is rare: walks the stack anew.
#[cold]
pub(crate) fn is_called_by(lane: &mut Lane, library: &core::ffi::CStr) -> bool {
    let (_, rest) = lane.parts();
    // SAFETY: as in `capture_frames`.
    let _ = unsafe { stack::capture(&raw mut rest.stack, NATIVE) };
    if !rest.stack.complete() {
        return false;
    }
    let mut callers = rest.stack.native_addresses().filter_map(|ip| elf::by_address(ip as usize));
    callers.find(|object| !object.is_ours()).is_some_and(|caller| caller.soname() == library)
}

/// As [`capture`], for what is not told itself but where it was called: the Python frames; in a program without Python
/// the native ones.
#[unsafe(link_section = "gputrace_hot")]
pub(crate) fn capture_program(lane: &mut Lane) -> u64 {
    let has_python = stack::python::status() == stack::python::Status::Ready;
    match session::stacks() {
        Stacks::None => 0,
        Stacks::Python | Stacks::All if has_python => capture_frames(lane, PYTHON),
        Stacks::Python | Stacks::All => capture_frames(lane, NATIVE),
    }
}

#[inline(always)]
fn capture_frames(lane: &mut Lane, want: u32) -> u64 {
    if Closing::is_any() {
        lane.look_for_left_closers();
    }
    let _unwatched = Unwatched::new();
    let (producer, rest) = lane.parts();
    rest.stack.doing = rest.node.class;
    let captured = if want == PYTHON {
        rest.stack.capture_python()
    } else {
        // SAFETY: the state was zeroed when it was made, and the lane is the thread's only one.
        unsafe { stack::capture(&raw mut rest.stack, want) }
    };
    if captured.id != 0 && rest.stack.is_new_stack(captured.id, rest.definitions) {
        send(producer, rest, captured);
    }
    captured.id
}

#[cold]
#[inline(never)]
fn send(producer: &mut Producer, rest: &mut Rest, captured: Captured) {
    if !rest.stack.complete() {
        rest.stack.forget_stack(captured.id);
        return;
    }
    // That memory is laid out otherwise than this version's is found out at a thread's first frames.
    if captured.marks & Captured::NO_PYTHON != 0 && !IS_UNSEEN_SAID.load(Ordering::Relaxed) {
        describe_python(producer);
    }
    let at = producer.now();
    let scratch = &mut rest.scratch;
    let mut words = scratch.frames.iter_mut();
    let mut n_native = 0;
    // The frames first: `zip` takes from its left side before it learns that the right side is at its end.
    for (from, to) in rest.stack.native_addresses().zip(words.by_ref()) {
        *to = from;
        n_native += 1;
    }
    let mut n_python = 0;
    for frame in rest.stack.python_frames() {
        let (Some(code), Some(place)) = (words.next(), words.next()) else { break };
        (*code, *place) = (frame.code, frame.place);
        n_python += 1;
    }
    let native = usize::from(n_native);
    for index in 0..usize::from(n_python) {
        let id = scratch.frames.get(native + 2 * index).copied().unwrap_or_default();
        if rest.stack.is_new_code(id, rest.definitions)
            && !send_code(producer, &rest.stack, &mut scratch.code, index)
        {
            rest.stack.forget_code(id);
        }
    }
    let truncated = captured.marks & (Captured::TRUNCATED | Captured::PYTHON_TRUNCATED) != 0;
    let broken = captured.marks & (Captured::BROKEN | Captured::GUESSED) != 0;
    let marks = (u32::from(truncated) * StackDef::TRUNCATED) | (u32::from(broken) * StackDef::BROKEN);
    let definition = StackDef { id: captured.id, native: n_native, python: n_python, marks };
    let n_words = native + 2 * usize::from(n_python);
    let frames = as_words_bytes(scratch.frames.get(..n_words).unwrap_or_default());
    if producer.push_with(at, 0, &definition, &[frames]) != Pushed::Yes {
        rest.stack.forget_stack(captured.id);
    }
}

fn send_code(
    producer: &mut Producer,
    stack: &stack::ThreadStackState,
    texts: &mut [u8; CODE_BYTES],
    index: usize,
) -> bool {
    let Some(code) = stack.define_code(index, texts) else { return false };
    let definition = CodeDef {
        id: code.id,
        name: code.name,
        file: code.file,
        lines: code.lines,
        first_line: code.first_line,
        python: code.python,
        marks: code.marks,
    };
    let at = producer.now();
    let texts = texts.get(..code.bytes as usize).unwrap_or_default();
    producer.push_with(at, 0, &definition, &[texts]) == Pushed::Yes
}
