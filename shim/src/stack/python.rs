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

use super::interpreter::{Object, Python, ready};
use super::python_code::Codes;
use super::python_offsets::{NONE, Place};
use super::{Captured, Fixed, join, mix};
use gputrace_ring::record::StackDef;

pub(crate) use super::interpreter::{Status, init, interpreter, status};
pub(crate) use super::python_code::CodeText;

/// Frames that are kept, entries from C counted too. Deeper ones are cut and marked.
pub(crate) const MAX_FRAMES: usize = 512;
const INDEX_SLOTS: usize = 1024;
/// A frame as it was read.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Node {
    frame: u64,
    previous: u64,
    /// The word that points to the code object, marks in its low bits included.
    raw_code: u64,
    raw_place: u64,
    /// [`Python::check`] of the code object.
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
    codes: Codes,
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
        let is_other = thread.address() != self.thread_state || interpreter_id != self.interpreter_id;
        // A cut stack has no outermost frame to start from.
        if is_other || self.marks & Captured::PYTHON_TRUNCATED != 0 {
            self.nodes.clear();
            self.thread_state = thread.address();
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
        python.define(node.code(), node.id, out)
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
            let node = python.read(frame, self.interpreter_id, &mut self.codes);
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
            Some(false) => super::interpreter::give_up(),
            None => {} // No frame to judge by.
        }
        status() == Status::Ready
    }
}

/// Whether the interpreter of the calling thread is collecting reference cycles.
///
/// The tensors that it frees give up the interpreter's lock meanwhile, so "this thread holds the lock" would be false
/// where it matters; another thread can run in those moments, and is told the same.
#[inline]
pub(crate) fn is_collecting() -> bool {
    ready().is_some_and(|python| python.thread_state().is_some_and(|thread| python.is_collecting(thread)))
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

    /// Reads one frame.
    #[inline(always)]
    fn read(&self, address: u64, interpreter_id: u64, codes: &mut Codes) -> Node {
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
        if self.is_shim(&node) || code.address() == 0 || code.word(self.offsets.object_type) != self.code_type
        {
            return node;
        }
        let place = match self.offsets.place {
            Place::Bytes => node.raw_place,
            Place::Instructions => node.raw_place.wrapping_mul(2),
            Place::Address => {
                node.raw_place.wrapping_sub(code.address()).wrapping_sub(u64::from(self.offsets.code_start))
            }
        } as u32;
        if self.is_incomplete(&node, place as i32) {
            return node;
        }
        node.check = self.check(code);
        node.id = codes.id(self, interpreter_id, code, node.check);
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
