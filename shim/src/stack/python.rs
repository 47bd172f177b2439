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
//! The previous stack is kept. Where one of its frames is met again, it and those outside it are compared in place, and
//! only frames that changed are read anew: a handful of instructions and half a cache line a frame, for this runs in
//! the middle of programs that have just used the caches for something else.

use super::interpreter::{Lasting, Object, Python, Shape, ready};
use super::python_code::Codes;
use super::python_offsets::{NONE, Place};
use super::{Captured, Fixed, join, mix};
use crate::own;
use core::hint::select_unpredictable;
use gputrace_ring::record::StackDef;

pub(crate) use super::interpreter::{Change, Status, init, interpreter, note_changed, status};
pub(crate) use super::python_code::CodeText;

/// Frames that are kept, entries from C counted too. Deeper ones are cut and marked.
pub(crate) const MAX_FRAMES: usize = 512;
const INDEX_SLOTS: usize = 1024;
/// No structure lies below: a null pointer does, or what a corrupt one is likely to be.
const LEAST_ADDRESS: u64 = 4096;
/// What is compared of a frame.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Node {
    frame: u64,
    /// The word that points to the code object, marks in its low bits included.
    raw_code: u64,
    /// Where the frame is; for 3.11 its kind too, above the bits of an address.
    raw_place: u64,
    /// [`Python::check`] of the code object; [`Node::HIDDEN`] when the frame is not shown.
    check: u64,
}

impl Node {
    const HIDDEN: u64 = u64::MAX;

    /// The frame, which was just seen to be where it was.
    #[inline(always)]
    fn known_frame(&self) -> Object {
        let address: *const u64 = &raw const self.frame;
        // The compiler knows that what the frame inside it points to is the same. Taken from here, the loads from one
        // frame do not wait for those from another.
        // SAFETY: a field of a live node.
        let address = unsafe { address.read_volatile() };
        // SAFETY: the frame inside it, or the thread state, points to it.
        unsafe { Object::new(address) }
    }

    #[inline(always)]
    fn code(&self) -> Object {
        // From 3.14 on the low bits are marks; code objects are aligned to 16 bytes in all versions.
        // SAFETY: the frame holds a reference to its code object.
        unsafe { Object::new(self.raw_code & !7) }
    }
}

/// What is shown of a frame.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Shown {
    /// Identity of the code object; 0 when the frame is not shown.
    id: u64,
    /// Instruction offset in bytes (low half) and [`StackDef::ENTRY`].
    place: u64,
    /// What it adds to the hash of its stack.
    term: u64,
}

impl Shown {
    #[inline(always)]
    fn is_shown(&self) -> u32 {
        u32::from(self.id != 0)
    }
}

/// A frame as it was read.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Found {
    node: Node,
    shown: Shown,
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
#[repr(C, align(64))]
pub(crate) struct PythonState {
    thread_state: u64,
    interpreter_id: u64,
    /// Hash of the stack: the sum of what its frames add, so that one frame's change is one addition.
    hash: u64,
    n_shown: u32,
    marks: u32,
    is_checked: u32,
    /// The thread's state, where that is part of the interpreter's own variables.
    lasting: Lasting,
    /// The stack as last seen, outermost frame first.
    nodes: Fixed<Node, MAX_FRAMES>,
    shown: Fixed<Shown, MAX_FRAMES>,
    index_of: [u16; INDEX_SLOTS],
    /// What the walk found before it met known frames, innermost first.
    found: Fixed<Found, MAX_FRAMES>,
    codes: Codes,
}

impl PythonState {
    /// Makes it another thread's.
    pub(super) fn hand_on(&mut self) {
        self.forget();
        (self.lasting, self.is_checked, self.interpreter_id) = (Lasting::default(), 0, 0);
    }

    /// Captures the calling thread's frames.
    #[unsafe(link_section = "gputrace_hot")]
    #[inline(never)]
    pub(crate) fn capture(&mut self) -> PythonStack {
        let Some(python) = ready() else {
            self.forget();
            (self.lasting, self.is_checked) = (Lasting::default(), 0);
            return PythonStack { marks: mark_of(status()), ..PythonStack::default() };
        };
        let Some(_using) = python.using() else {
            self.forget();
            (self.lasting, self.is_checked) = (Lasting::default(), 0);
            return PythonStack { marks: Captured::NO_PYTHON, ..PythonStack::default() };
        };
        let Some(thread) = python.thread_state(&mut self.lasting) else {
            self.forget();
            return PythonStack::default();
        };
        let Some((top, interpreter_id)) = python.running(thread) else {
            self.forget();
            return PythonStack::default();
        };
        if self.is_checked == 0 && !self.check(python, top) {
            self.forget();
            let marks = if status() == Status::Ready { Captured::NO_PYTHON } else { mark_of(status()) };
            return PythonStack { marks, ..PythonStack::default() };
        }
        let is_other = thread.address() != self.thread_state || interpreter_id != self.interpreter_id;
        // A cut stack has no outermost frame to start from.
        if is_other || self.marks & Captured::PYTHON_TRUNCATED != 0 {
            self.forget();
            self.thread_state = thread.address();
            self.interpreter_id = interpreter_id;
        }
        match python.shape {
            Shape::VERSIONED => self.walk::<{ Shape::VERSIONED }>(python, top),
            Shape::ENTRIES => self.walk::<{ Shape::ENTRIES }>(python, top),
            Shape::ADDRESSES => self.walk::<{ Shape::ADDRESSES }>(python, top),
            _ => self.walk::<{ Shape::OFFSETS }>(python, top),
        }
        PythonStack {
            hash: if self.n_shown == 0 { 0 } else { mix(self.hash, u64::from(self.n_shown)) },
            n_frames: self.n_shown,
            marks: self.marks,
        }
    }

    /// Whether the thread's interpreter is collecting reference cycles. `is_captured`: the last capture, which is still
    /// going on, looked for the thread's state.
    #[inline]
    pub(crate) fn is_collecting(&mut self, is_captured: bool) -> bool {
        let Some(python) = ready() else { return false };
        let Some(_using) = python.using() else { return false };
        if is_captured {
            // SAFETY: the thread that runs has a state, and the capture has just found it.
            return self.thread_state != 0 && python.is_collecting(unsafe { Object::new(self.thread_state) });
        }
        python.thread_state(&mut self.lasting).is_some_and(|thread| python.is_collecting(thread))
    }

    /// Frames of the last capture, innermost first.
    pub(crate) fn frames(&self) -> impl Iterator<Item = PythonFrame> + '_ {
        self.shown().map(|(_, shown)| PythonFrame { code: shown.id, place: shown.place })
    }

    /// What tells a native frame that runs bytecode, for the last capture: see [`Interpreters`].
    pub(crate) fn interpreters(&self) -> Interpreters<impl Iterator<Item = u64> + '_> {
        let python = ready();
        let mut has_shown = false;
        let shims = self.both().filter_map(move |(node, shown)| {
            let is_shim = shown.id == 0 && python?.is_shim(node.frame);
            let is_of_use = is_shim && has_shown;
            has_shown = shown.id != 0 || (has_shown && !is_shim);
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
        let (node, shown) = self.shown().nth(index)?;
        python.define(node.code(), shown.id, out)
    }

    fn both(&self) -> impl Iterator<Item = (&Node, &Shown)> + '_ {
        self.nodes.as_slice().iter().zip(self.shown.as_slice()).rev()
    }

    fn shown(&self) -> impl Iterator<Item = (&Node, &Shown)> + '_ {
        self.both().filter(|(_, shown)| shown.id != 0)
    }

    fn forget(&mut self) {
        self.truncate(0);
        self.thread_state = 0;
        self.marks = 0;
    }

    /// Makes `nodes` the stack that starts at `top`.
    #[inline(never)]
    #[unsafe(link_section = "gputrace_hot")]
    fn walk<const SHAPE: u8>(&mut self, python: &Python, top: u64) {
        self.found.clear();
        self.marks = 0;
        let mut frame = top;
        let mut kept = 0;
        while frame >= LEAST_ADDRESS {
            let known = self.index_of.get(slot_of(frame)).copied().unwrap_or_default() as usize;
            if known < self.nodes.len() && self.nodes.get(known).frame == frame {
                match self.compare::<SHAPE>(python, known) {
                    None => {
                        kept = known + 1;
                        break;
                    }
                    // The frames from `other` on are right, but another one called them.
                    Some((other, previous)) => {
                        for index in (other..=known).rev() {
                            let (node, shown) = (self.nodes.get(index), self.shown.get(index));
                            if !self.found.push(Found { node, shown }) {
                                self.marks |= Captured::PYTHON_TRUNCATED;
                            }
                        }
                        self.truncate(other);
                        if self.marks != 0 {
                            break;
                        }
                        frame = previous;
                        continue;
                    }
                }
            }
            let (found, previous) = python.read::<SHAPE>(frame, self.interpreter_id, &mut self.codes);
            if !self.found.push(found) {
                self.marks |= Captured::PYTHON_TRUNCATED;
                break;
            }
            frame = previous;
        }
        self.truncate(kept);
        self.append();
    }

    /// Makes the frames up to `known`, whose frame is known to exist, what they are now. Where another frame called one of
    /// them than before, says which one it is, and that frame.
    #[inline(always)]
    fn compare<const SHAPE: u8>(&mut self, python: &Python, known: usize) -> Option<(usize, u64)> {
        let mut end = known + 1;
        let mut frame = self.nodes.get(known).frame;
        loop {
            let (n_same, caller) = python.count_unchanged::<SHAPE>(self.nodes.items.get(..end)?, frame);
            end -= n_same;
            let Some(index) = end.checked_sub(1) else {
                let is_whole = caller < LEAST_ADDRESS;
                return if is_whole { None } else { self.called_by::<SHAPE>(python, 0, caller) };
            };
            if self.nodes.get(index).frame != caller {
                return self.called_by::<SHAPE>(python, end, caller);
            }
            frame = self.replace::<SHAPE>(python, index);
            end = index;
        }
    }

    /// The frame `index` was called by `caller`, which is not the frame that was known outside it.
    #[cold]
    fn called_by<const SHAPE: u8>(
        &mut self,
        python: &Python,
        index: usize,
        caller: u64,
    ) -> Option<(usize, u64)> {
        // Whether it was called from C may have changed, too.
        self.replace::<SHAPE>(python, index);
        Some((index, caller))
    }

    /// Reads the frame `index` once more, which is where it was. Gives its caller.
    #[inline(never)]
    #[unsafe(link_section = "gputrace_hot")]
    fn replace<const SHAPE: u8>(&mut self, python: &Python, index: usize) -> u64 {
        let address = self.nodes.get(index).frame;
        let (mut found, caller) = python.read::<SHAPE>(address, self.interpreter_id, &mut self.codes);
        found.shown.term = term(&found.shown, index);
        let (Some(node), Some(shown)) = (self.nodes.at(index), self.shown.at(index)) else { return caller };
        self.hash = self.hash.wrapping_sub(shown.term).wrapping_add(found.shown.term);
        self.n_shown = self.n_shown.wrapping_sub(shown.is_shown()).wrapping_add(found.shown.is_shown());
        (*node, *shown) = (found.node, found.shown);
        caller
    }

    #[inline(always)]
    fn truncate(&mut self, kept: usize) {
        for shown in self.shown.as_slice().get(kept..).unwrap_or_default() {
            self.hash = self.hash.wrapping_sub(shown.term);
            self.n_shown = self.n_shown.wrapping_sub(shown.is_shown());
        }
        self.nodes.truncate(kept);
        self.shown.truncate(kept);
    }

    /// Puts what was found onto the nodes; outermost frames that have no room are cut.
    #[inline(always)]
    fn append(&mut self) {
        if self.nodes.len() + self.found.len() > MAX_FRAMES {
            return self.cut();
        }
        for found in self.found.as_slice().iter().rev() {
            let index = self.nodes.len();
            let shown = Shown { term: term(&found.shown, index), ..found.shown };
            self.hash = self.hash.wrapping_add(shown.term);
            self.n_shown = self.n_shown.wrapping_add(shown.is_shown());
            if let Some(hint) = self.index_of.get_mut(slot_of(found.node.frame)) {
                *hint = index as u16;
            }
            self.nodes.push(found.node);
            self.shown.push(shown);
        }
    }

    /// Keeps the innermost frames of what was found and of the nodes.
    #[cold]
    #[inline(never)]
    fn cut(&mut self) {
        for index in (0..self.nodes.len()).rev() {
            if !self.found.push(Found { node: self.nodes.get(index), shown: self.shown.get(index) }) {
                break;
            }
        }
        self.truncate(0);
        self.append();
        self.marks |= Captured::PYTHON_TRUNCATED;
    }

    /// Looks whether memory is laid out as expected, with reads that cannot fault. The first thread that has frames does so for all, mostly
    /// when the session begins. Later the kernel may be asked only once the recorder has looked; without its answer the frames are left out.
    #[cold]
    #[inline(never)]
    fn check(&mut self, python: &Python, top: u64) -> bool {
        if python.is_checked() {
            self.is_checked = 1;
        } else if !own::may_ask() {
            return false;
        } else {
            match python.looks_right(top) {
                Some(true) => {
                    python.note_checked();
                    self.is_checked = 1;
                }
                Some(false) => super::interpreter::give_up(),
                None => {} // No frame to judge by.
            }
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
    #[inline(always)]
    fn owner(&self, frame: Object) -> u64 {
        match self.offsets.frame_owner {
            NONE => 0,
            offset if self.offsets.minor == 11 => u64::from(frame.load::<u16>(u64::from(offset))),
            offset => u64::from(frame.load::<u8>(u64::from(offset))),
        }
    }

    /// Where a frame is, as its version says it. In 3.11 the same frame may be entered from C at one time and not at another;
    /// later, an entry has a frame of its own.
    #[inline(always)]
    fn raw_place<const SHAPE: u8>(&self, frame: Object) -> u64 {
        match SHAPE {
            Shape::OFFSETS => u64::from(frame.half(self.offsets.frame_place)),
            Shape::ENTRIES => frame.word(self.offsets.frame_place) ^ self.owner(frame) << 48,
            _ => frame.word(self.offsets.frame_place),
        }
    }

    /// How many of `nodes`, from the last outwards, are what they were, if `frame` is the last one's; and what called the
    /// outermost of these, or `frame`.
    #[inline(always)]
    fn count_unchanged<const SHAPE: u8>(&self, nodes: &[Node], frame: u64) -> (usize, u64) {
        let mut caller = frame;
        let mut n_same = 0;
        for node in nodes.iter().rev() {
            if node.frame != caller || !self.is_unchanged::<SHAPE>(node) {
                break;
            }
            caller = node.known_frame().word(self.offsets.frame_previous);
            n_same += 1;
        }
        (n_same, caller)
    }

    /// Whether a frame that is known to exist still is what it was.
    #[inline(always)]
    fn is_unchanged<const SHAPE: u8>(&self, node: &Node) -> bool {
        let frame = node.known_frame();
        let is_same = (frame.word(self.offsets.frame_code) == node.raw_code)
            & (self.raw_place::<SHAPE>(frame) == node.raw_place);
        let is_hidden = node.check == Node::HIDDEN;
        if SHAPE == Shape::VERSIONED {
            // The code object is looked at only when the frame does point to it.
            return is_same && {
                let version = self.offsets.code_version;
                let (object, offset) =
                    select_unpredictable(is_hidden, (frame, self.offsets.frame_code), (node.code(), version));
                let found = u64::from(object.half(offset));
                // Without a version of its own a code object is compared whole.
                is_hidden | (found == node.check) || (found == 0 && self.check(node.code()) == node.check)
            };
        }
        is_same && (is_hidden || self.check(node.code()) == node.check)
    }

    /// Reads one frame; gives the one that called it, too.
    #[unsafe(link_section = "gputrace_hot")]
    #[inline(never)]
    fn read<const SHAPE: u8>(&self, address: u64, interpreter_id: u64, codes: &mut Codes) -> (Found, u64) {
        // SAFETY: the frame inside it, or the thread state, points to it.
        let frame = unsafe { Object::new(address) };
        let previous = frame.word(self.offsets.frame_previous);
        let raw_place = self.raw_place::<SHAPE>(frame);
        let mut node = Node {
            frame: address,
            raw_code: frame.word(self.offsets.frame_code),
            raw_place,
            check: Node::HIDDEN,
        };
        let mut shown = Shown::default();
        let (code, owner) = (node.code(), self.owner(frame));
        if self.is_shim_owner(owner)
            || code.address() == 0
            || code.word(self.offsets.object_type) != self.code_type
        {
            return (Found { node, shown }, previous);
        }
        let place = match self.offsets.place {
            Place::Bytes => raw_place,
            Place::Instructions => raw_place.wrapping_mul(2),
            // Half of the bits are enough: the kind of a 3.11 frame lies above them.
            Place::Address => {
                raw_place.wrapping_sub(code.address()).wrapping_sub(u64::from(self.offsets.code_start))
            }
        } as u32;
        if self.is_incomplete(code, owner, place as i32) {
            return (Found { node, shown }, previous);
        }
        // No version is as large, and a hash is so once in 2⁶⁴ code objects.
        node.check = self.check(code);
        shown.id = codes.id(self, interpreter_id, code, node.check);
        shown.place = u64::from(place);
        if self.is_entry(owner, previous) {
            shown.place |= StackDef::ENTRY;
        }
        (Found { node, shown }, previous)
    }

    #[inline(always)]
    fn is_shim_owner(&self, owner: u64) -> bool {
        self.offsets.shim_owner != u8::MAX && owner >= u64::from(self.offsets.shim_owner)
    }

    fn is_shim(&self, frame: u64) -> bool {
        // SAFETY: a frame of the last capture, which goes on.
        self.is_shim_owner(self.owner(unsafe { Object::new(frame) }))
    }

    /// Frames that are being set up are shown by no traceback (`_PyFrame_IsIncomplete`).
    #[inline(always)]
    fn is_incomplete(&self, code: Object, owner: u64, place: i32) -> bool {
        // Setting up takes an instruction or two for each cell; further in, nobody needs to look.
        const SET_UP_BYTES: i32 = 256;
        const GENERATOR: u64 = 1;
        let owner = if self.offsets.minor == 11 { owner >> 8 } else { owner };
        if self.offsets.code_first_traceable == NONE || place >= SET_UP_BYTES || owner == GENERATOR {
            return false;
        }
        place < (code.half(self.offsets.code_first_traceable) as i32).wrapping_mul(2)
    }

    /// Whether C code entered the interpreter to run this frame.
    #[inline(always)]
    fn is_entry(&self, owner: u64, previous: u64) -> bool {
        match self.offsets.minor {
            ..11 => true,
            11 => owner & 0xff != 0,
            _ if previous == 0 => true,
            _ => {
                // SAFETY: a frame's predecessor lives at least as long.
                let previous = unsafe { Object::new(previous) };
                self.owner(previous) >= u64::from(self.offsets.shim_owner)
            }
        }
    }
}

/// What a frame at `index`, counted from the outermost, adds to the hash of its stack. A sum, so that frames need not wait
/// for each other; the index makes the order count.
#[inline(always)]
fn term(shown: &Shown, index: usize) -> u64 {
    if shown.id == 0 { 0 } else { join(0, mix(shown.id, shown.place), index) }
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
