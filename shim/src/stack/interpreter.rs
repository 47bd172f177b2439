//! The interpreter of this process, once found, and the calling thread's place in it.

use super::Lookup;
use super::objects::Reading;
use super::python_offsets::{
    DEBUG_COOKIE, DEBUG_FREE_THREADED, DEBUG_VERSION, DEBUG_WORDS, NONE, Offsets, Place, VERSIONS,
};
use crate::arch;
use crate::{asked, elf};
use core::cell::UnsafeCell;
use core::ffi::{CStr, c_char, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

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

#[unsafe(link_section = "gputrace_hot_data")]
static STATUS: AtomicU32 = AtomicU32::new(Status::Absent as u32);
#[unsafe(link_section = "gputrace_hot_data")]
static PYTHON: Shared = Shared(UnsafeCell::new(MaybeUninit::uninit()));

struct Shared(UnsafeCell<MaybeUninit<Python>>);

// SAFETY: written once, before STATUS says Ready, and only read after that.
unsafe impl Sync for Shared {}

/// What has to be compared to tell whether a frame still is what it was: one copy of the walk for each.
pub(crate) struct Shape;

impl Shape {
    /// 3.9 and 3.10: a frame knows its offset into the bytecode.
    pub(crate) const OFFSETS: u8 = 0;
    /// 3.11: a frame has the address of its instruction, and a mark whether it was entered from C.
    pub(crate) const ENTRIES: u8 = 1;
    /// From 3.12 on: entries from C have frames of their own.
    pub(crate) const ADDRESSES: u8 = 2;
    /// The same, and code objects have a version.
    pub(crate) const VERSIONED: u8 = 3;

    const fn of(offsets: &Offsets) -> u8 {
        match offsets.place {
            Place::Bytes | Place::Instructions => Shape::OFFSETS,
            Place::Address if offsets.minor == 11 => Shape::ENTRIES,
            Place::Address if offsets.code_version == NONE => Shape::ADDRESSES,
            Place::Address => Shape::VERSIONED,
        }
    }
}

/// The state of the thread that started Python is a part of `_PyRuntime` (`_initial_thread` of `_main_interpreter`,
/// `pycore_interp.h`), so it can be read at any time, and from 3.12 on it says itself whether it is still the thread's.
/// 0: this thread's is another one, or Python is older.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Lasting(u64);

/// The interpreter's symbols and offsets.
#[derive(Clone, Copy)]
pub(crate) struct Python {
    pub(crate) offsets: Offsets,
    /// One of [`Shape`].
    pub(crate) shape: u8,
    /// Addresses of the object that has `_PyRuntime`.
    object: (u64, u64),
    /// That object was loaded by the program, which so may unload it.
    may_go: bool,
    this_thread_state: unsafe extern "C" fn() -> *mut c_void,
    /// Before 3.12: the thread state that holds the GIL, whoever that is.
    current_thread_state: Option<unsafe extern "C" fn() -> *mut c_void>,
    runtime: u64,
    pub(crate) code_type: u64,
    pub(crate) text_type: u64,
    pub(crate) bytes_type: u64,
    /// Address range of the function that runs bytecode.
    pub(crate) interpreter: (u64, u64),
}

/// To be held while the interpreter's own variables and functions are used. Thread and frame objects of a thread that is
/// inside of Python need none: who unloads an interpreter that runs is lost without us.
pub(crate) struct Using {
    /// Keeps the interpreter, where it could go.
    _reading: Option<Reading>,
}

impl Python {
    /// `None` if the interpreter may be going just now.
    #[inline(always)]
    pub(crate) fn using(&self) -> Option<Using> {
        if !self.may_go {
            return Some(Using { _reading: None });
        }
        self.using_reading()
    }

    #[cold]
    fn using_reading(&self) -> Option<Using> {
        let reading = Reading::begin()?;
        // It may have gone between the caller's look and ours; and it may have gone past our `dlclose` (which whoever was
        // bound before us, or to the C library's own, calls): then only this says so.
        let is_there = || {
            let object = super::native::object_around(self.runtime);
            object.is_some_and(|object| self.object == (object.mapping.start(), object.mapping.end()))
        };
        let is_same = status() == Status::Ready && (self.object == (0, 0) || is_there());
        is_same.then_some(Using { _reading: Some(reading) })
    }
}

/// What may have become of the objects of the process.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Change {
    /// Some may have been loaded.
    Loaded,
    /// The program asks for a function of CPython.
    Asked,
    /// Some were unloaded.
    Unloaded,
}

/// Forgets an interpreter that went, and finds one that came.
/// `lookup` as for [`super::init`]. True if one was found that was unknown. To be called while a [`super::objects::Closing`] is under way if objects were unloaded.
pub(crate) fn note_changed(change: Change, lookup: Lookup) -> bool {
    let may_go = MAY_GO.load(Ordering::Relaxed);
    if !may_go && change != Change::Asked {
        return false;
    }
    if change == Change::Unloaded {
        let (ready, absent) = (Status::Ready as u32, Status::Absent as u32);
        // SYNC: reader or closer: who reads has begun before the closer looked, or sees that there is a closer.
        let _ = STATUS.compare_exchange(ready, absent, Ordering::SeqCst, Ordering::SeqCst);
    }
    if status() != Status::Absent {
        return false;
    }
    // SAFETY: the caller's function, and it is called outside of the loader.
    unsafe { init(lookup) };
    status() == Status::Ready
}

/// One was found that the program may unload.
static MAY_GO: AtomicBool = AtomicBool::new(false);

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

/// The interpreter whose frames a thread has found to be as expected, by the address of its variables; 0 none.
static CHECKED: AtomicU64 = AtomicU64::new(0);

/// Declines the interpreter: its memory is not what it should be.
pub(crate) fn give_up() {
    STATUS.store(Status::UnknownLayout as u32, Ordering::Relaxed);
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
    CHECKED.store(0, Ordering::Relaxed);
    // SAFETY: the caller's promise.
    let found = unsafe { find(lookup) };
    let status = match found {
        Ok(python) => {
            let cell = PYTHON.0.get();
            MAY_GO.fetch_or(python.may_go, Ordering::Relaxed);
            // SAFETY: only the thread that made the status Looking writes, and nobody reads before Ready; nor after an
            // interpreter went, which waits for those who use it.
            unsafe { cell.write(MaybeUninit::new(python)) };
            Status::Ready
        }
        Err(status) => status,
    };
    // SYNC: what `init` found is visible to whoever sees Ready.
    STATUS.store(status as u32, Ordering::Release);
}

/// The interpreter, when its frames can be read.
#[inline(always)]
pub(crate) fn ready() -> Option<&'static Python> {
    // SYNC: what `init` found is visible to whoever sees Ready.
    if STATUS.load(Ordering::Acquire) != Status::Ready as u32 {
        return None;
    }
    // SAFETY: `init` never gives the cell out again after Ready.
    let cell = unsafe { &*PYTHON.0.get() };
    // SAFETY: written before Ready, and again only where one went that nobody uses any more.
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
    let object = super::native::object_around(runtime)
        .map_or((0, 0), |object| (object.mapping.start(), object.mapping.end()));
    Ok(Python {
        offsets,
        shape: Shape::of(&offsets),
        object,
        may_go: !elf::is_startup(runtime as usize),
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
        thread_id: offset(words.thread_id),
        thread_status: offset(words.thread_id + 3),
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
        gc_collecting: u16::try_from(word(words.interpreter_gc).saturating_add(word(words.gc_collecting)))
            .unwrap_or(NONE),
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
pub(crate) struct Object(u64);

impl Object {
    /// # Safety
    /// A structure of CPython lies at `address` and stays there while the value is used; reads stay inside it.
    #[inline(always)]
    pub(crate) const unsafe fn new(address: u64) -> Object {
        Object(address)
    }

    /// Where it lies.
    #[inline(always)]
    pub(crate) const fn address(self) -> u64 {
        self.0
    }

    /// The integer at `offset`.
    #[inline(always)]
    pub(crate) fn load<T: Copy>(self, offset: u64) -> T {
        let at = self.0.wrapping_add(offset) as *const T;
        // SAFETY: inside a live structure, by the promise of `new`; `T` is an integer.
        unsafe { at.read_unaligned() }
    }

    #[inline(always)]
    pub(crate) fn word(self, offset: u16) -> u64 {
        self.load(u64::from(offset))
    }

    #[inline(always)]
    pub(crate) fn half(self, offset: u16) -> u32 {
        self.load(u64::from(offset))
    }
}

/// In [`Offsets::thread_status`]: `PyGILState_GetThisThreadState` gives this state to its thread
/// (`_status.bound_gilstate`, `cpython/pystate.h` of 3.12 to 3.15).
const BOUND_GILSTATE: u32 = 1 << 3;

impl Python {
    /// The calling thread's state, unless it has none or another thread is tearing the interpreter down.
    #[inline(always)]
    pub(crate) fn thread_state(&self, lasting: &mut Lasting) -> Option<Object> {
        if lasting.0 != 0 {
            // SAFETY: part of a variable of CPython's.
            let thread = unsafe { Object::new(lasting.0) };
            // SAFETY: the address of CPython's own variable.
            let runtime = unsafe { Object::new(self.runtime) };
            let finalizing = runtime.word(self.offsets.finalizing);
            if (thread.half(self.offsets.thread_status) & BOUND_GILSTATE != 0)
                & (thread.word(self.offsets.thread_id) == arch::this_thread())
                & (finalizing == 0 || finalizing == lasting.0)
            {
                return Some(thread);
            }
        }
        self.find_thread_state(lasting)
    }

    #[inline(never)]
    #[unsafe(link_section = "gputrace_hot")]
    fn find_thread_state(&self, lasting: &mut Lasting) -> Option<Object> {
        *lasting = Lasting::default();
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
        if thread.word(self.offsets.thread_id) != arch::this_thread() {
            return None;
        }
        let is_part = self.object.0 <= own && own < self.object.1;
        if is_part && self.offsets.thread_status != NONE {
            *lasting = Lasting(own);
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
        // SAFETY: another thread's state may be freed at any moment. Then this is a word of the C library's heap: see `running`.
        let owner = unsafe { Object::new(current) }.word(self.offsets.thread_id);
        // SAFETY: a state whose owner is the calling thread stays alive while it runs.
        if owner == arch::this_thread() { unsafe { Object::new(current) } } else { own }
    }

    /// The innermost frame of a thread whose state was just given, and the number of its interpreter, which is never given
    /// twice. `None` if another thread has begun to tear the interpreter down.
    ///
    /// Without the GIL a daemon thread gets here at any moment of that, and no lock holds it off. What it reads then is there:
    /// states of other threads are freed after `finalizing` was set (pylifecycle.c, `Py_FinalizeEx`), so what was
    /// read of one before `finalizing` was seen unset was whole, and the rest is thrown away unfollowed. (A freed state is a
    /// word of the C library's heap to read: too small for a mapping of its own.) The frames are the thread's own, and stay:
    /// it holds them and through them their code, it never runs Python again, and who frees its state leaves the memory of its
    /// frames (pystate.c: `_PyThreadState_DeleteExcept`, later `_PyThreadState_DeleteList`, give back no `datastack_chunk`; so in
    /// 3.10, 3.12 and 3.14).
    #[inline(always)]
    pub(crate) fn running(&self, thread: Object) -> Option<(u64, u64)> {
        let top = thread.word(self.offsets.thread_top);
        let interpreter = thread.word(self.offsets.thread_interpreter);
        if !self.stays(thread) {
            return None;
        }
        let frame = if self.offsets.cframe_current == NONE || top == 0 {
            top
        } else {
            // SAFETY: `cframe` points into the C stack of the running interpreter, or into the thread state.
            unsafe { Object::new(top) }.word(self.offsets.cframe_current)
        };
        // SAFETY: a thread state holds its interpreter.
        let number = unsafe { Object::new(interpreter) }.word(self.offsets.interpreter_id);
        self.stays(thread).then_some((frame, number))
    }

    /// Whether all that was read of a thread's state until now was its state.
    #[inline(always)]
    fn stays(&self, thread: Object) -> bool {
        // What was read before is not read after this.
        fence(Ordering::Acquire);
        // SAFETY: the address of CPython's own variable.
        let runtime = unsafe { Object::new(self.runtime) };
        let finalizing = runtime.word(self.offsets.finalizing);
        finalizing == 0 || finalizing == thread.0
    }

    /// Whether the thread's interpreter is collecting reference cycles, and not because everything ends.
    #[inline(always)]
    pub(crate) fn is_collecting(&self, thread: Object) -> bool {
        /// Bytes between `gc.generations` and `gc.generation0`: three generations of a list head and two integers
        /// (`pycore_gc.h`, 3.9 to 3.13).
        const GENERATIONS: u64 = 72;
        // SAFETY: the address of CPython's own variable.
        let runtime = unsafe { Object::new(self.runtime) };
        if self.offsets.gc_collecting == NONE || runtime.word(self.offsets.finalizing) != 0 {
            return false;
        }
        // SAFETY: a thread state holds its interpreter, which is larger than any of the offsets.
        let interpreter = unsafe { Object::new(thread.word(self.offsets.thread_interpreter)) };
        let is_there = match self.offsets.gc_youngest {
            NONE => true,
            youngest => {
                let at = interpreter.address() + u64::from(youngest);
                interpreter.word(youngest) == at.wrapping_sub(GENERATIONS)
            }
        };
        is_there && interpreter.half(self.offsets.gc_collecting) == 1
    }

    /// Whether a thread's frames were as expected.
    pub(crate) fn is_checked(&self) -> bool {
        CHECKED.load(Ordering::Relaxed) == self.runtime
    }

    /// Other threads need not look at their frames as this one has.
    pub(crate) fn note_checked(&self) {
        CHECKED.store(self.runtime, Ordering::Relaxed);
    }

    /// Follows the frames with reads that cannot fault, for which the kernel is asked. `None` when there is no frame.
    pub(crate) fn looks_right(&self, top: u64) -> Option<bool> {
        let mut frame = top;
        let mut n_code = 0;
        for _ in 0..64 {
            if frame < 4096 {
                break;
            }
            match self.frame_looks_right(frame) {
                Ok(is_code) => n_code += u32::from(is_code),
                Err(Unreadable) => return Some(false),
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
        if is_right { Ok(true) } else { Err(Unreadable) }
    }
}

/// There is nothing at an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Unreadable;

/// A word of this process, read in a way that cannot fault.
fn peek(address: u64) -> Result<u64, Unreadable> {
    let mut word = [0; 8];
    match asked::read_memory(address as usize, &mut word) {
        8 => Ok(u64::from_ne_bytes(word)),
        _ => Err(Unreadable),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the row of a minor version becomes with the first words of `_PyRuntime`, all others zero.
    fn offsets_with(minor: u8, version: u64, is_free_threaded: bool) -> Result<Offsets, Status> {
        let mut runtime = [0_u64; 128];
        for (at, word) in [
            (0, DEBUG_COOKIE),
            (usize::from(DEBUG_VERSION), version),
            (usize::from(DEBUG_FREE_THREADED), u64::from(is_free_threaded)),
        ] {
            if let Some(slot) = runtime.get_mut(at) {
                *slot = word;
            }
        }
        let row = VERSIONS.into_iter().find(|row| row.minor == minor).ok_or(Status::UnknownVersion)?;
        // SAFETY: as many words as any version's table has.
        with_debug_offsets(row, unsafe { Object::new(runtime.as_ptr() as u64) })
    }

    #[test]
    fn builds_without_a_global_lock_are_declined() {
        for (minor, version) in [(13, 0x030d_00f0), (14, 0x030e_00f0), (15, 0x030f_00f0)] {
            assert_eq!(offsets_with(minor, version, true).err(), Some(Status::FreeThreaded), "3.{minor}t");
            assert_ne!(offsets_with(minor, version, false).err(), Some(Status::FreeThreaded), "3.{minor}");
        }
    }

    #[test]
    fn an_interpreter_that_says_another_version_than_it_has_is_declined() {
        assert_eq!(offsets_with(13, 0x030e_00f0, false).err(), Some(Status::UnknownLayout));
    }
}
