//! Call stacks for events: native return addresses and Python frames of the calling thread.
//!
//! ```text
//! hook ── capture(state) ──> Captured { id, .. }      the id goes into the event
//!          └─ id not seen by this thread? ──> native_addresses(), python_frames() go into a stack definition
//!                                              └─ code not seen? ──> define_code() goes into a code definition
//! ```
//!
//! This lives in somebody else's process: nothing here locks, allocates, panics, takes the GIL or touches a
//! reference count. All state of a thread is one zeroed block that the caller provides.

pub(crate) mod cfi;
mod interpreter;
pub(crate) mod memory;
pub(crate) mod native;
pub(crate) mod objects;
pub(crate) mod python;
mod python_code;
mod seen;

use crate::arch;
use core::ffi::{c_char, c_void};
use gputrace_ring::record::StackDef;
use native::{NativeStack, NativeState};
use python::{CodeText, PythonFrame, PythonStack, PythonState};
use seen::Seen;

// The same table that the recorder reads other processes by.
use gputrace_ring::python_offsets;

/// Finds a symbol of the process by name, like `dlsym(RTLD_DEFAULT, name)`; null when there is none.
pub(crate) type Lookup = unsafe extern "C" fn(name: *const c_char) -> *mut c_void;

/// Prepares the process for captures. Called at a moment when `lookup` may be: not from a hook that the loader
/// itself calls, nor under a lock that it takes.
/// Called again it looks again for an interpreter, where none was found before.
///
/// # Safety
/// `lookup` gives the addresses of the symbols with these names, or null.
pub(crate) unsafe fn init(lookup: Lookup) {
    // SAFETY: a C string, at a moment the caller chose.
    arch::learn(|| unsafe { lookup(c"pthread_self".as_ptr()) });
    // SAFETY: as above.
    let find_object = unsafe { lookup(c"_dl_find_object".as_ptr()) };
    // SAFETY: glibc exports one function of this name.
    unsafe { native::init(find_object) };
    // SAFETY: as above.
    unsafe { python::init(lookup) };
}

pub(crate) use memory::is_above_on_own_stack;

/// Finds out by questions what must be known without them later. To be called when a session begins, by a thread of the program.
pub(crate) fn learn() {
    memory::learn();
}

/// What a capture found, in two registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub(crate) struct Captured {
    /// The same for the same stack of the same process, whatever thread; 0 when there is no frame.
    pub(crate) id: u64,
    /// Native frames.
    pub(crate) n_native: u16,
    /// Python frames.
    pub(crate) n_python: u16,
    /// [`Captured::TRUNCATED`] and others.
    pub(crate) marks: u32,
}

impl Captured {
    /// Outer native frames are missing: there are more than [`native::MAX_FRAMES`].
    pub(crate) const TRUNCATED: u32 = 1;
    /// The native walk could not go on at its outermost frame.
    pub(crate) const BROKEN: u32 = 2;
    /// Some frames were found through the frame pointer, in code without unwind tables: they may be wrong.
    pub(crate) const GUESSED: u32 = 4;
    /// Native frames are not to be had: the stack's end is unknown.
    pub(crate) const NO_NATIVE: u32 = 8;
    /// Outer Python frames are missing: there are more than [`python::MAX_FRAMES`].
    pub(crate) const PYTHON_TRUNCATED: u32 = 16;
    /// There is an interpreter whose frames cannot be read: [`python::status`] says why.
    pub(crate) const NO_PYTHON: u32 = 32;
}

impl Captured {
    #[inline(always)]
    fn of(native: NativeStack, python: PythonStack) -> Captured {
        let marks = native.marks | python.marks;
        let mut id = native.hash;
        if python.n_frames > 0 {
            id = mix(id, python.hash);
        }
        if native.n_frames > 0 || python.n_frames > 0 {
            // Cut and whole stacks are never the same; 0 says that there is none.
            id = mix(id, u64::from(marks)) | 1;
        }
        Captured { id, n_native: native.n_frames as u16, n_python: python.n_frames as u16, marks }
    }
}

/// Everything a thread needs for its captures: 1.1 MiB of zeroed memory, of which a thread with few different stacks
/// touches little.
#[repr(C, align(64))]
pub(crate) struct ThreadStackState {
    native: NativeState,
    python: PythonState,
    seen_stacks: Seen,
    seen_codes: Seen,
    /// What the last capture was to find; the rest is from one before.
    wanted: u32,
    /// Anything that tells what the thread does: stacks are looked for first among those seen with it.
    pub(crate) doing: u64,
}

/// Which frames to capture.
pub(crate) const NATIVE: u32 = 1;
/// Python frames.
pub(crate) const PYTHON: u32 = 2;

/// Captures the stack of the function that called this one.
///
/// Costs about a nanosecond a frame of a stack that the thread has had before, six nanoseconds a frame of one that it has
/// not, half a microsecond a frame whose address it never saw.
///
/// # Safety
/// `state` points to a state in writable memory, zeroed before the first capture, which only the calling thread uses,
/// and its signal handlers not during a capture.
#[unsafe(naked)]
#[unsafe(link_section = "gputrace_hot")]
pub(crate) unsafe extern "C" fn capture(state: *mut ThreadStackState, want: u32) -> Captured {
    // `capture_from` then starts at the caller itself.
    arch::captures_from!(capture_from)
}

#[unsafe(link_section = "gputrace_hot")]
unsafe extern "C" fn capture_from(
    state: *mut ThreadStackState,
    want: u32,
    ip: u64,
    sp: u64,
    fp: u64,
) -> Captured {
    // SAFETY: the caller of `capture` owes an exclusive, initialised state.
    let state = unsafe { &mut *state };
    state.wanted = want;
    let python = if want & PYTHON != 0 { state.python.capture() } else { PythonStack::default() };
    let native = if want & NATIVE != 0 {
        state.native.capture(ip, sp, fp, python.hash ^ state.doing)
    } else {
        NativeStack::default()
    };
    Captured::of(native, python)
}

impl ThreadStackState {
    /// Makes it another thread's: what was learnt of the process stays, what was learnt of the thread goes.
    pub(crate) fn hand_on(&mut self) {
        let ThreadStackState { native, python, seen_stacks: _, seen_codes: _, wanted, doing } = self;
        native.hand_on();
        python.hand_on();
        (*wanted, *doing) = (0, 0);
    }

    /// As [`capture`] for [`PYTHON`] alone.
    #[inline(always)]
    pub(crate) fn capture_python(&mut self) -> Captured {
        self.wanted = PYTHON;
        Captured::of(NativeStack::default(), self.python.capture())
    }

    /// Reads the frames of a stack that the last capture only recognised. To be called before the captured function goes
    /// on. False if they are other ones: then nothing may be said of them.
    #[must_use]
    pub(crate) fn complete(&mut self) -> bool {
        self.wanted & NATIVE == 0 || self.native.complete()
    }

    /// Return addresses of the last capture, innermost first. Those in functions that run Python frames of the same
    /// capture are marked with [`StackDef::INTERPRETER`]. Only after [`ThreadStackState::complete`].
    pub(crate) fn native_addresses(&self) -> impl Iterator<Item = u64> + '_ {
        let has_native = self.wanted & NATIVE != 0;
        let has_both = has_native && self.wanted & PYTHON != 0;
        let mut interpreters = self.python.interpreters();
        let frames = has_native.then(|| self.native.frames());
        frames.into_iter().flatten().map(move |(ip, part)| {
            if has_both && interpreters.is_at(ip, &part) { ip | StackDef::INTERPRETER } else { ip }
        })
    }

    /// Whether the interpreter of the calling thread is collecting reference cycles. `is_captured`: the last capture was of
    /// where the thread is now.
    ///
    /// The tensors that it frees give up the interpreter's lock meanwhile, so "this thread holds the lock" would be false
    /// where it matters; another thread can run in those moments, and is told the same.
    #[inline]
    pub(crate) fn is_collecting(&mut self, is_captured: bool) -> bool {
        self.python.is_collecting(is_captured && self.wanted & PYTHON != 0)
    }

    /// Python frames of the last capture, innermost first.
    pub(crate) fn python_frames(&self) -> impl Iterator<Item = PythonFrame> + '_ {
        let has_python = self.wanted & PYTHON != 0;
        has_python.then(|| self.python.frames()).into_iter().flatten()
    }

    /// See [`PythonState::define_code`].
    pub(crate) fn define_code(&self, index: usize, out: &mut [u8]) -> Option<CodeText> {
        self.python.define_code(index, out)
    }

    /// Whether this thread's definitions lack the stack `id`; from now on they have it. `definitions` is the number of
    /// times that the recorder lost them: when it changes, everything is new again.
    #[inline]
    pub(crate) fn is_new_stack(&mut self, id: u64, definitions: u32) -> bool {
        self.seen_stacks.insert(id, definitions)
    }

    /// The same for code objects.
    #[inline]
    pub(crate) fn is_new_code(&mut self, id: u64, definitions: u32) -> bool {
        self.seen_codes.insert(id, definitions)
    }

    /// Takes back [`ThreadStackState::is_new_stack`], when the definition could not be written.
    pub(crate) fn forget_stack(&mut self, id: u64) {
        self.seen_stacks.remove(id);
    }

    /// Takes back [`ThreadStackState::is_new_code`].
    pub(crate) fn forget_code(&mut self, id: u64) {
        self.seen_codes.remove(id);
    }
}

/// The hash of a stack with one more frame inside. A sum, so that frames need not wait for each other; the index makes
/// the order count.
#[inline(always)]
fn join(outer: u64, frame: u64, index: usize) -> u64 {
    let key = (index as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03);
    outer.wrapping_add(mix(mix(key, frame), frame))
}

/// One step of a 64-bit hash: multiply by the golden ratio, fold the high bits down.
#[inline(always)]
pub(crate) fn mix(hash: u64, word: u64) -> u64 {
    let product = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 29)
}

/// A vector of fixed room. Zeroed memory is an empty one.
#[repr(C)]
struct Fixed<T, const N: usize> {
    len: usize,
    items: [T; N],
}

impl<T: Copy + Default, const N: usize> Fixed<T, N> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.len
    }

    #[inline(always)]
    fn clear(&mut self) {
        self.len = 0;
    }

    /// The item at `index`, if there is one.
    #[inline(always)]
    fn at(&mut self, index: usize) -> Option<&mut T> {
        self.items.get_mut(..self.len)?.get_mut(index)
    }

    #[inline(always)]
    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// False when there is no room.
    #[inline(always)]
    fn push(&mut self, item: T) -> bool {
        let Some(slot) = self.items.get_mut(self.len) else { return false };
        *slot = item;
        self.len += 1;
        true
    }

    /// The item at `index`; the default beyond the room.
    #[inline(always)]
    fn get(&self, index: usize) -> T {
        self.items.get(index).copied().unwrap_or_default()
    }

    #[inline(always)]
    fn as_slice(&self) -> &[T] {
        self.items.get(..self.len).unwrap_or_default()
    }
}
