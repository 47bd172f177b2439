//! The calling thread's Python frames, without the GIL.
//!
//! Why that is safe: the thread is inside a C call, so nobody else can pop its frames; each frame holds its code
//! object, and that its names. Nothing is written, no count is changed, no lock is taken. `_PyRuntime` says whether the
//! interpreter is being torn down by another thread; then nothing is read.
//!
//! A frame is named by its code object's identity and an instruction offset. Code objects die and their addresses are
//! used again within microseconds, so the identity is more than the address: with the interpreter's number and
//! `co_version` from 3.12 on, with the content before.
//!
//! As with native frames, the previous stack is kept, compared where its frames are met again, and hashed only where it
//! is new.

use super::python_offsets::{
    DEBUG_COOKIE, DEBUG_FREE_THREADED, DEBUG_VERSION, DEBUG_WORDS, NONE, Offsets, Place, VERSIONS,
};
use super::{Captured, Fixed, Lookup, join, mix};
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, Ordering};
use gputrace_ring::record::StackDef;

/// Frames that are kept, entries from C counted too. Deeper ones are cut and marked.
pub(crate) const MAX_FRAMES: usize = 512;
const INDEX_SLOTS: usize = 1024;
/// Bytes of a name or file name that are hashed and shipped at most.
const MAX_TEXT: u64 = 4096;
/// Bytes of a line table that are hashed at most, half from each end.
const MAX_HASHED_LINES: u64 = 4096;

/// What is known about Python in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum Status {
    /// No CPython was found (yet).
    Absent = 0,
    /// Frames are captured.
    Ready = 1,
    /// Another thread is finding out.
    Looking = 2,
    /// A build without a global lock: its frames move while they are read.
    FreeThreaded = 3,
    /// Older than 3.9 or newer than this library knows.
    UnknownVersion = 4,
    /// The memory does not look as this version's should.
    UnknownLayout = 5,
}

static STATUS: AtomicU32 = AtomicU32::new(Status::Absent as u32);
static PYTHON: Shared = Shared(UnsafeCell::new(MaybeUninit::uninit()));

struct Shared(UnsafeCell<MaybeUninit<Python>>);

// SAFETY: written once, before STATUS says Ready, and only read after that.
unsafe impl Sync for Shared {}

/// The interpreter's symbols and offsets.
#[derive(Clone, Copy)]
struct Python {
    offsets: Offsets,
    this_thread_state: unsafe extern "C" fn() -> *mut c_void,
    /// Before 3.12: the thread state that holds the GIL, whoever that is.
    current_thread_state: Option<unsafe extern "C" fn() -> *mut c_void>,
    runtime: u64,
    code_type: u64,
    text_type: u64,
    bytes_type: u64,
    /// Address range of the function that runs bytecode.
    interpreter: (u64, u64),
}

/// What is known about Python in this process.
#[must_use]
pub(crate) fn status() -> Status {
    use Status::*;
    let raw = STATUS.load(Ordering::Relaxed);
    [Ready, Looking, FreeThreaded, UnknownVersion, UnknownLayout]
        .into_iter()
        .find(|status| *status as u32 == raw)
        .unwrap_or(Absent)
}

/// `(major << 8) | minor` of the interpreter, and the address range of the function that runs bytecode (0 to 0 where it
/// is not to be found). `None` unless [`Status::Ready`].
#[must_use]
pub(crate) fn interpreter() -> Option<(u16, u64, u64)> {
    let python = ready()?;
    Some((3 << 8 | u16::from(python.offsets.minor), python.interpreter.0, python.interpreter.1))
}

/// Looks for an interpreter, unless one was found. May be called again when libraries were loaded.
///
/// # Safety
/// As for [`super::init`].
pub(crate) unsafe fn init(lookup: Lookup) {
    let absent = Status::Absent as u32;
    let looking = Status::Looking as u32;
    if STATUS.compare_exchange(absent, looking, Ordering::Relaxed, Ordering::Relaxed).is_err() {
        return;
    }
    // SAFETY: the caller's promise.
    let found = unsafe { find(lookup) };
    let status = match found {
        Ok(python) => {
            let cell = PYTHON.0.get();
            // SAFETY: only the thread that made the status Looking writes, once, and nobody reads before Ready.
            unsafe { cell.write(MaybeUninit::new(python)) };
            Status::Ready
        }
        Err(status) => status,
    };
    // SYNC: what `init` found is visible to whoever sees Ready.
    STATUS.store(status as u32, Ordering::Release);
}

fn ready() -> Option<&'static Python> {
    // SYNC: what `init` found is visible to whoever sees Ready.
    if STATUS.load(Ordering::Acquire) != Status::Ready as u32 {
        return None;
    }
    // SAFETY: `init` never gives the cell out again after Ready.
    let cell = unsafe { &*PYTHON.0.get() };
    // SAFETY: written before Ready, never again.
    Some(unsafe { cell.assume_init_ref() })
}

unsafe fn find(lookup: Lookup) -> Result<Python, Status> {
    let find = |name: &CStr| -> Result<u64, Status> {
        // SAFETY: a C string, at a moment the caller of `init` chose.
        let address = unsafe { lookup(name.as_ptr()) } as u64;
        if address == 0 { Err(Status::UnknownLayout) } else { Ok(address) }
    };
    let this_thread_state = find(c"PyGILState_GetThisThreadState").map_err(|_| Status::Absent)?;
    let version = find(c"Py_GetVersion")?;
    // SAFETY: `const char *Py_GetVersion(void)`, callable at any time; pylifecycle.h of every version.
    let version: unsafe extern "C" fn() -> *const c_char = unsafe { core::mem::transmute(version) };
    // SAFETY: as above.
    let version = unsafe { version() };
    // SAFETY: a static string of CPython.
    let version = unsafe { CStr::from_ptr(version) };
    let minor = minor_version(version).ok_or(Status::UnknownVersion)?;
    let offsets = VERSIONS.into_iter().find(|row| row.minor == minor).ok_or(Status::UnknownVersion)?;
    let runtime = find(c"_PyRuntime")?;
    // SAFETY: the address of CPython's own variable.
    let offsets = with_debug_offsets(offsets, unsafe { Object::new(runtime) })?;
    let eval = find(c"_PyEval_EvalFrameDefault").unwrap_or(0);
    let range = super::native::object_around(eval).and_then(|object| object.function_range(eval));
    let current = if minor < 12 { find(c"_PyThreadState_UncheckedGet").ok() } else { None };
    Ok(Python {
        offsets,
        // SAFETY: `PyThreadState *PyGILState_GetThisThreadState(void)`, pystate.h.
        this_thread_state: unsafe {
            core::mem::transmute::<u64, unsafe extern "C" fn() -> *mut c_void>(this_thread_state)
        },
        // SAFETY: `PyThreadState *_PyThreadState_UncheckedGet(void)`, cpython/pystate.h.
        current_thread_state: current.map(|address| unsafe {
            core::mem::transmute::<u64, unsafe extern "C" fn() -> *mut c_void>(address)
        }),
        runtime,
        code_type: find(c"PyCode_Type")?,
        text_type: find(c"PyUnicode_Type")?,
        bytes_type: find(c"PyBytes_Type")?,
        interpreter: range.unwrap_or((0, 0)),
    })
}

/// `3.12.1 (main, ...)` gives 12.
fn minor_version(text: &CStr) -> Option<u8> {
    let digits = text.to_bytes().strip_prefix(b"3.")?;
    let mut minor = None;
    for digit in digits.iter().take_while(|byte| byte.is_ascii_digit()) {
        minor = Some(minor.unwrap_or(0u8).checked_mul(10)?.checked_add(digit - b'0')?);
    }
    minor
}

/// The row, with what the process says about itself. A layout other than the row's loses the fields that only the row
/// knows.
fn with_debug_offsets(row: Offsets, runtime: Object) -> Result<Offsets, Status> {
    let Some(words) = DEBUG_WORDS.iter().find(|words| words.minor == row.minor) else { return Ok(row) };
    let word = |index: u8| runtime.word(u16::from(index) * 8);
    let version = word(DEBUG_VERSION) >> 16;
    if word(0) != DEBUG_COOKIE || version != 0x300 | u64::from(row.minor) {
        return Err(Status::UnknownLayout);
    }
    if word(DEBUG_FREE_THREADED) != 0 {
        return Err(Status::FreeThreaded);
    }
    let offset = |index: u8| u16::try_from(word(index)).unwrap_or(NONE);
    let said = Offsets {
        finalizing: offset(words.finalizing),
        interpreters: offset(words.finalizing + 1),
        interpreter_id: offset(words.interpreter_id),
        thread_interpreter: offset(words.thread_interpreter),
        thread_top: offset(words.thread_interpreter + 1),
        thread_id: offset(words.thread_interpreter + 2),
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
        ..row
    };
    if said == row {
        return Ok(row);
    }
    let all =
        [said.finalizing, said.interpreter_id, said.thread_interpreter, said.thread_top, said.thread_id];
    if all.contains(&NONE) {
        return Err(Status::UnknownLayout);
    }
    Ok(Offsets { code_version: NONE, code_first_traceable: NONE, ..said })
}

/// A structure of CPython.
#[derive(Clone, Copy)]
struct Object(u64);

impl Object {
    /// # Safety
    /// A structure of CPython lies at `address` and stays there while the value is used; reads stay inside it.
    #[inline(always)]
    const unsafe fn new(address: u64) -> Object {
        Object(address)
    }

    #[inline(always)]
    fn load<T: Copy>(self, offset: u64) -> T {
        let at = self.0.wrapping_add(offset) as *const T;
        // SAFETY: inside a live structure, by the promise of `new`; `T` is an integer.
        unsafe { at.read_unaligned() }
    }

    #[inline(always)]
    fn word(self, offset: u16) -> u64 {
        self.load(u64::from(offset))
    }

    #[inline(always)]
    fn half(self, offset: u16) -> u32 {
        self.load(u64::from(offset))
    }
}

/// A frame as it was read.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Node {
    frame: u64,
    previous: u64,
    /// The word that points to the code object, marks in its low bits included.
    raw_code: u64,
    raw_place: u64,
    /// `co_version`, or the content's fingerprint; [`Node::id`] follows from it.
    check: u64,
    /// Identity of the code object; 0 when the frame is not shown.
    id: u64,
    /// Instruction offset in bytes (low half) and [`StackDef::ENTRY`].
    place: u64,
    owner: u64,
}

impl Node {
    #[inline(always)]
    fn code(&self) -> Object {
        // From 3.14 on the low bits are marks; code objects are aligned to 16 bytes in all versions.
        // SAFETY: the frame holds a reference to its code object.
        unsafe { Object::new(self.raw_code & !7) }
    }
}

/// Hash and number of the shown frames up to a node.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Sum {
    hash: u64,
    n_shown: u64,
}

/// A Python frame of the last capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PythonFrame {
    /// Identity of the code object; the same for the same code as long as it lives.
    pub(crate) code: u64,
    /// Offset of the instruction in bytes (low half, -2 before the first), and [`StackDef::ENTRY`]: the native frame
    /// of the interpreter that runs this frame runs those inside it too, up to the next entry.
    pub(crate) place: u64,
}

/// What a capture found.
#[derive(Clone, Copy, Default)]
pub(crate) struct PythonStack {
    /// Hash of the frames; 0 when there are none.
    pub(crate) hash: u64,
    /// Frames.
    pub(crate) n_frames: u32,
    /// Marks, see [`Captured`].
    pub(crate) marks: u32,
}

/// A thread's part. All zeros is the state before the first capture.
#[repr(C)]
pub(crate) struct PythonState {
    /// The stack as last seen, outermost frame first.
    nodes: Fixed<Node, MAX_FRAMES>,
    /// `sums[i]` is over `nodes[0..=i]`.
    sums: Fixed<Sum, MAX_FRAMES>,
    index_of: [u16; INDEX_SLOTS],
    /// What the walk found before it met known frames, innermost first.
    found: Fixed<Node, MAX_FRAMES>,
    thread_state: u64,
    interpreter_id: u64,
    marks: u32,
    is_checked: u32,
}

impl PythonState {
    /// Captures the calling thread's frames.
    #[inline]
    pub(crate) fn capture(&mut self) -> PythonStack {
        let Some(python) = ready() else {
            self.nodes.clear();
            return PythonStack { marks: mark_of(status()), ..PythonStack::default() };
        };
        let Some(thread) = python.thread_state() else {
            self.nodes.clear();
            return PythonStack::default();
        };
        let top = python.top_frame(thread);
        let interpreter_id = python.interpreter_id(thread);
        if self.is_checked == 0 && !self.check(python, top) {
            self.nodes.clear();
            return PythonStack { marks: mark_of(status()), ..PythonStack::default() };
        }
        let is_other = thread.0 != self.thread_state || interpreter_id != self.interpreter_id;
        // A cut stack has no outermost frame to start from.
        if is_other || self.marks & Captured::PYTHON_TRUNCATED != 0 {
            self.nodes.clear();
            self.thread_state = thread.0;
            self.interpreter_id = interpreter_id;
        }
        if !self.walk(python, top) {
            self.nodes.clear();
            self.walk(python, top);
        }
        let Some(last) = self.nodes.len().checked_sub(1) else {
            return PythonStack { marks: self.marks, ..PythonStack::default() };
        };
        let sum = self.sums.get(last);
        PythonStack { hash: sum.hash, n_frames: sum.n_shown as u32, marks: self.marks }
    }

    /// Frames of the last capture, innermost first.
    pub(crate) fn frames(&self) -> impl Iterator<Item = PythonFrame> + '_ {
        self.shown().map(|node| PythonFrame { code: node.id, place: node.place })
    }

    /// What tells a native frame that runs bytecode, for the last capture: see [`Interpreters`].
    pub(crate) fn interpreters(&self) -> Interpreters<impl Iterator<Item = u64> + '_> {
        let python = ready();
        let mut has_shown = false;
        let shims = self.nodes.as_slice().iter().rev().filter_map(move |node| {
            let is_shim = python?.is_shim(node);
            let is_of_use = is_shim && has_shown;
            has_shown = node.id != 0 || (has_shown && !is_shim);
            is_of_use.then_some(node.frame)
        });
        let range = match python {
            Some(python) if python.offsets.shim_owner == u8::MAX && self.nodes.len() > 0 => {
                python.interpreter
            }
            _ => (0, 0),
        };
        Interpreters { shims: shims.peekable(), range }
    }

    /// Describes the code object of the last capture's frame `index`, innermost 0: copies its texts into `out`, each
    /// padded with zeros to eight bytes. `None` when there is no such frame or its code cannot be read.
    ///
    /// Only valid between a capture and the return into the code that it captured.
    pub(crate) fn define_code(&self, index: usize, out: &mut [u8]) -> Option<CodeText> {
        let python = ready()?;
        let node = self.shown().nth(index)?;
        python.define(node, out)
    }

    fn shown(&self) -> impl Iterator<Item = &Node> + '_ {
        self.nodes.as_slice().iter().rev().filter(|node| node.id != 0)
    }

    /// Makes `nodes` the stack that starts at `top`. False when that needs a start from nothing.
    #[inline(always)]
    fn walk(&mut self, python: &Python, top: u64) -> bool {
        self.found.clear();
        self.marks = 0;
        let mut frame = top;
        // Below this lie no structures: a null pointer, or what a corrupt one is likely to be.
        while frame >= 4096 {
            let known = self.index_of.get(slot_of(frame)).copied().unwrap_or_default() as usize;
            if known < self.nodes.len() && self.nodes.get(known).frame == frame {
                let first = self.first_unchanged(known + 1, python);
                if first == 0 {
                    return self.assemble(known + 1);
                }
                for index in (first..=known).rev() {
                    self.found.push(self.nodes.get(index));
                }
                frame = self.nodes.get(first - 1).frame;
            }
            let node = python.read(frame, self.interpreter_id);
            if !self.found.push(node) {
                self.marks |= Captured::PYTHON_TRUNCATED;
                return self.assemble(0);
            }
            frame = node.previous;
        }
        self.assemble(0)
    }

    /// The outermost index from which on every node before `end` is unchanged.
    #[inline(always)]
    fn first_unchanged(&self, end: usize, python: &Python) -> usize {
        let nodes = self.nodes.as_slice().get(..end).unwrap_or_default();
        nodes.iter().rposition(|node| !python.is_unchanged(node)).map_or(0, |changed| changed + 1)
    }

    #[inline(always)]
    fn assemble(&mut self, kept: usize) -> bool {
        if kept + self.found.len() > MAX_FRAMES {
            return false;
        }
        self.nodes.truncate(kept);
        self.sums.truncate(kept);
        let mut sum = if kept == 0 { Sum::default() } else { self.sums.get(kept - 1) };
        for node in self.found.as_slice().iter().rev() {
            let index = self.nodes.len();
            if node.id != 0 {
                sum.hash = join(sum.hash, mix(node.id, node.place), sum.n_shown as usize);
                sum.n_shown += 1;
            }
            if let Some(hint) = self.index_of.get_mut(slot_of(node.frame)) {
                *hint = index as u16;
            }
            self.nodes.push(*node);
            self.sums.push(sum);
        }
        true
    }

    /// Looks once a thread whether memory is laid out as expected, with reads that cannot fault.
    #[cold]
    #[inline(never)]
    fn check(&mut self, python: &Python, top: u64) -> bool {
        match python.looks_right(top) {
            Some(true) => self.is_checked = 1,
            Some(false) => STATUS.store(Status::UnknownLayout as u32, Ordering::Relaxed),
            None => {} // No frame to judge by.
        }
        status() == Status::Ready
    }
}

/// Tells native frames that run bytecode from others.
///
/// From 3.12 on such a function keeps a frame of its own kind, the shim, on its part of the C stack, whatever the
/// compiler made of the function (several copies; one function a bytecode, with tail calls). Before, there is only one
/// function to look for.
pub(crate) struct Interpreters<I: Iterator<Item = u64>> {
    /// Addresses of the shims that have shown frames inside, innermost first.
    shims: core::iter::Peekable<I>,
    range: (u64, u64),
}

impl<I: Iterator<Item = u64>> Interpreters<I> {
    /// Whether the function with this return address and this part of the stack runs shown Python frames. To be asked
    /// from the innermost frame outwards.
    pub(crate) fn is_at(&mut self, ip: u64, part: &core::ops::Range<u64>) -> bool {
        while self.shims.next_if(|shim| *shim < part.start).is_some() {}
        // A return address points behind its call, at the latest to the function's end.
        self.shims.next_if(|shim| part.contains(shim)).is_some() || (self.range.0 < ip && ip <= self.range.1)
    }
}

impl Python {
    /// The calling thread's state, unless it has none or another thread is tearing the interpreter down.
    #[inline(always)]
    fn thread_state(&self) -> Option<Object> {
        // SAFETY: reads thread-specific data; documented to work without the GIL.
        let own = unsafe { (self.this_thread_state)() } as u64;
        // SAFETY: the address of CPython's own variable.
        let runtime = unsafe { Object::new(self.runtime) };
        let finalizing = runtime.word(self.offsets.finalizing);
        if own == 0 || (finalizing != 0 && finalizing != own) {
            return None;
        }
        // SAFETY: the interpreter is alive, and so are its threads' states.
        let thread = unsafe { Object::new(own) };
        // SAFETY: no precondition.
        let this_thread = unsafe { libc::pthread_self() };
        if thread.word(self.offsets.thread_id) != this_thread as u64 {
            return None;
        }
        match self.current_thread_state {
            Some(current)
                if runtime.word(self.offsets.interpreters)
                    != thread.word(self.offsets.thread_interpreter) =>
            {
                Some(self.in_subinterpreter(current, thread))
            }
            _ => Some(thread),
        }
    }

    /// Before 3.12 a thread's own state stays the main interpreter's while it runs another one. The holder of the GIL
    /// is then the better answer, if it is this thread.
    #[cold]
    #[inline(never)]
    fn in_subinterpreter(&self, current: unsafe extern "C" fn() -> *mut c_void, own: Object) -> Object {
        // SAFETY: reads one atomic.
        let current = unsafe { current() } as u64;
        if current == 0 || current == own.0 {
            return own;
        }
        // Another thread's state may be freed at any moment: read it in a way that cannot fault.
        let owner = peek(current.wrapping_add(u64::from(self.offsets.thread_id)));
        // SAFETY: no precondition.
        let this_thread = unsafe { libc::pthread_self() } as u64;
        // SAFETY: a state whose owner is the calling thread stays alive while it runs.
        if owner == Ok(this_thread) { unsafe { Object::new(current) } } else { own }
    }

    #[inline(always)]
    fn top_frame(&self, thread: Object) -> u64 {
        let top = thread.word(self.offsets.thread_top);
        if self.offsets.cframe_current == NONE || top == 0 {
            return top;
        }
        // SAFETY: `cframe` points into the C stack of the running interpreter, or into the thread state.
        unsafe { Object::new(top) }.word(self.offsets.cframe_current)
    }

    /// Numbers of interpreters are never given twice.
    #[inline(always)]
    fn interpreter_id(&self, thread: Object) -> u64 {
        // SAFETY: a thread state holds its interpreter.
        unsafe { Object::new(thread.word(self.offsets.thread_interpreter)) }.word(self.offsets.interpreter_id)
    }

    #[inline(always)]
    fn owner(&self, frame: Object) -> u64 {
        match self.offsets.frame_owner {
            NONE => 0,
            offset if self.offsets.minor == 11 => u64::from(frame.load::<u16>(u64::from(offset))),
            offset => u64::from(frame.load::<u8>(u64::from(offset))),
        }
    }

    #[inline(always)]
    fn place(&self, frame: Object) -> u64 {
        match self.offsets.place {
            Place::Address => frame.word(self.offsets.frame_place),
            Place::Bytes | Place::Instructions => u64::from(frame.half(self.offsets.frame_place)),
        }
    }

    /// Whether a frame that is known to exist still is what it was.
    #[inline(always)]
    fn is_unchanged(&self, node: &Node) -> bool {
        // SAFETY: the frame inside it, or the thread state, was just seen to point to it.
        let frame = unsafe { Object::new(node.frame) };
        let is_same = (frame.word(self.offsets.frame_code) == node.raw_code)
            & (frame.word(self.offsets.frame_previous) == node.previous)
            & (self.place(frame) == node.raw_place)
            & (self.owner(frame) == node.owner);
        // The code object is looked at only when the frame does point to it.
        is_same && (node.id == 0 || self.check(node.code()) == node.check)
    }

    /// `co_version` where it says everything, else the content.
    #[inline(always)]
    fn check(&self, code: Object) -> u64 {
        if self.offsets.code_version != NONE {
            let version = code.half(self.offsets.code_version);
            // 0: four billion code objects were made, there are no more versions.
            if version != 0 {
                return u64::from(version);
            }
        }
        self.content(code)
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

    /// Reads one frame.
    #[inline(always)]
    fn read(&self, address: u64, interpreter_id: u64) -> Node {
        // SAFETY: the frame inside it, or the thread state, points to it.
        let frame = unsafe { Object::new(address) };
        let mut node = Node {
            frame: address,
            previous: frame.word(self.offsets.frame_previous),
            raw_code: frame.word(self.offsets.frame_code),
            raw_place: self.place(frame),
            owner: self.owner(frame),
            ..Node::default()
        };
        let code = node.code();
        if self.is_shim(&node) || code.0 == 0 || code.word(self.offsets.object_type) != self.code_type {
            return node;
        }
        let place = match self.offsets.place {
            Place::Bytes => node.raw_place,
            Place::Instructions => node.raw_place.wrapping_mul(2),
            Place::Address => {
                node.raw_place.wrapping_sub(code.0).wrapping_sub(u64::from(self.offsets.code_start))
            }
        } as u32;
        if self.is_incomplete(&node, place as i32) {
            return node;
        }
        node.check = self.check(code);
        node.id = mix(mix(interpreter_id, code.0), node.check) | 1;
        node.place = u64::from(place);
        if self.is_entry(&node) {
            node.place |= StackDef::ENTRY;
        }
        node
    }

    #[inline(always)]
    fn is_shim(&self, node: &Node) -> bool {
        self.offsets.shim_owner != u8::MAX && node.owner >= u64::from(self.offsets.shim_owner)
    }

    /// Frames that are being set up are shown by no traceback (`_PyFrame_IsIncomplete`).
    #[inline(always)]
    fn is_incomplete(&self, node: &Node, place: i32) -> bool {
        // Setting up takes an instruction or two for each cell; further in, nobody needs to look.
        const SET_UP_BYTES: i32 = 256;
        const GENERATOR: u64 = 1;
        let owner = if self.offsets.minor == 11 { node.owner >> 8 } else { node.owner };
        if self.offsets.code_first_traceable == NONE || place >= SET_UP_BYTES || owner == GENERATOR {
            return false;
        }
        place < (node.code().half(self.offsets.code_first_traceable) as i32).wrapping_mul(2)
    }

    /// Whether C code entered the interpreter to run this frame.
    #[inline(always)]
    fn is_entry(&self, node: &Node) -> bool {
        match self.offsets.minor {
            ..11 => true,
            11 => node.owner & 0xff != 0,
            _ if node.previous == 0 => true,
            _ => {
                // SAFETY: a frame's predecessor lives at least as long.
                let previous = unsafe { Object::new(node.previous) };
                self.owner(previous) >= u64::from(self.offsets.shim_owner)
            }
        }
    }

    /// Follows the frames with reads that cannot fault. `None` when there is no frame, or such reads are forbidden.
    fn looks_right(&self, top: u64) -> Option<bool> {
        let mut frame = top;
        let mut n_code = 0;
        for _ in 0..64 {
            if frame < 4096 {
                break;
            }
            match self.frame_looks_right(frame) {
                Ok(is_code) => n_code += u32::from(is_code),
                Err(Unreadable::Forbidden) => return Some(true), // Version and symbols are all there is to trust.
                Err(Unreadable::Fault) => return Some(false),
            }
            match peek(frame.wrapping_add(u64::from(self.offsets.frame_previous))) {
                Ok(previous) => frame = previous,
                Err(_) => return Some(false),
            }
        }
        if top < 4096 { None } else { Some(n_code > 0) }
    }

    /// Whether the frame shows code; an error when something is not what it should be.
    fn frame_looks_right(&self, frame: u64) -> Result<bool, Unreadable> {
        let field = |base: u64, offset: u16| peek(base.wrapping_add(u64::from(offset)));
        let code = field(frame, self.offsets.frame_code)? & !7;
        if code == 0 || field(code, self.offsets.object_type)? != self.code_type {
            return Ok(false);
        }
        let name = field(code, self.offsets.code_name)?;
        let file = field(code, self.offsets.code_file)?;
        let lines = field(code, self.offsets.code_lines)?;
        let place = field(frame, self.offsets.frame_place)?;
        let offset =
            place.wrapping_sub(code).wrapping_sub(u64::from(self.offsets.code_start)).wrapping_add(2);
        let is_right = field(name, self.offsets.object_type)? == self.text_type
            && field(file, self.offsets.object_type)? == self.text_type
            && field(lines, self.offsets.object_type)? == self.bytes_type
            && field(lines, self.offsets.length)? < 1 << 26
            && (self.offsets.place != Place::Address || offset < 1 << 28);
        if is_right { Ok(true) } else { Err(Unreadable::Fault) }
    }

    fn define(&self, node: &Node, out: &mut [u8]) -> Option<CodeText> {
        let code = node.code();
        // SAFETY: a code object holds its names and tables.
        let held = |offset: u16| unsafe { Object::new(code.word(offset)) };
        let mut definition = CodeText {
            id: node.id,
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
            data: unsafe { Object::new(text.0.wrapping_add(u64::from(start))) },
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

/// A hash of `length` bytes at `offset`, in lanes that do not wait for each other.
fn hash_bytes(object: Object, offset: u64, length: u64) -> u64 {
    let mut hash = length;
    let mut at = 0;
    while at + 8 <= length {
        hash = join(hash, object.load(offset + at), at as usize);
        at += 8;
    }
    let mut rest = 0u64;
    while at < length {
        rest = rest << 8 | u64::from(object.load::<u8>(offset + at));
        at += 1;
    }
    mix(hash, rest)
}

#[inline(always)]
fn slot_of(frame: u64) -> usize {
    (frame >> 3 ^ frame >> 13) as usize & (INDEX_SLOTS - 1)
}

fn mark_of(status: Status) -> u32 {
    match status {
        Status::Absent | Status::Ready | Status::Looking => 0,
        Status::FreeThreaded | Status::UnknownVersion | Status::UnknownLayout => Captured::NO_PYTHON,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unreadable {
    Fault,
    Forbidden,
}

/// A word of this process, read by the kernel: a bad address is an error, not a signal.
fn peek(address: u64) -> Result<u64, Unreadable> {
    let mut word = 0u64;
    let local = libc::iovec { iov_base: (&raw mut word).cast(), iov_len: 8 };
    let remote = libc::iovec { iov_base: address as *mut c_void, iov_len: 8 };
    // SAFETY: no precondition.
    let pid = unsafe { libc::getpid() };
    // SAFETY: the kernel writes at most eight bytes into `word` and checks the other address itself.
    let n = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    if n == 8 {
        return Ok(word);
    }
    // SAFETY: no precondition.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: the calling thread's own.
    let error = unsafe { errno.read() };
    Err(if error == libc::EFAULT || n >= 0 { Unreadable::Fault } else { Unreadable::Forbidden })
}
