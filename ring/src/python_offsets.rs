//! Where CPython keeps what a stack needs: one row a minor version, from its own headers (`Include/internal`,
//! `Include/cpython`), x86-64 release builds. From 3.13 on the process says it itself (`_Py_DebugOffsets`, the first bytes
//! of `_PyRuntime`, `pycore_runtime.h` and later `pycore_debug_offsets.h`) and the row only fills what it leaves out.

/// No such field in this version.
pub const NONE: u16 = u16::MAX;

/// How a frame says where it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// `f_lasti`: bytes into the bytecode.
    Bytes,
    /// `f_lasti`: two-byte instructions into the bytecode.
    Instructions,
    /// Address of an instruction inside the code object.
    Address,
}

/// Offsets in bytes from the start of each structure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Offsets {
    /// Minor version of Python 3.
    pub minor: u8,
    /// `PyThreadState.frame`, `.current_frame`, or `.cframe` where `cframe_current` is not [`NONE`].
    pub thread_top: u16,
    /// `_PyCFrame.current_frame`.
    pub cframe_current: u16,
    /// `PyThreadState.thread_id`: `pthread_self()` of its owner.
    pub thread_id: u16,
    /// `PyThreadState._status`; [`NONE`] before 3.12, where states do not say whose they are.
    pub thread_status: u16,
    /// `PyThreadState.interp`.
    pub thread_interpreter: u16,
    /// `PyInterpreterState.id`.
    pub interpreter_id: u16,
    /// `PyThreadState.next`; for who reads from outside, as the three below. [`NONE`] where the process says it itself.
    pub thread_next: u16,
    /// `PyThreadState.native_thread_id`; [`NONE`] before 3.11.
    pub thread_native_id: u16,
    /// `PyInterpreterState.next`.
    pub interpreter_next: u16,
    /// `PyInterpreterState.tstate_head`, later `.threads.head`.
    pub interpreter_threads: u16,
    /// `PyInterpreterState.gc.collecting`.
    pub gc_collecting: u16,
    /// `PyInterpreterState.gc.generation0`, which points to `gc.generations`; [`NONE`] where the process says the
    /// place of `gc_collecting` itself.
    pub gc_youngest: u16,
    /// `_PyRuntimeState._finalizing`: the thread state that runs `Py_Finalize`.
    pub finalizing: u16,
    /// `_PyRuntimeState.interpreters.head`.
    pub interpreters: u16,
    /// `PyFrameObject.f_code`, `_PyInterpreterFrame.f_executable`.
    pub frame_code: u16,
    /// `f_back`, `previous`.
    pub frame_previous: u16,
    /// `f_lasti`, `prev_instr`, `instr_ptr`.
    pub frame_place: u16,
    /// How to read `frame_place`.
    pub place: Place,
    /// `_PyInterpreterFrame.owner`, or the 16 bits that end with it (3.11: `is_entry`, `owner`).
    pub frame_owner: u16,
    /// From this owner on, a frame runs no Python code: it marks an entry from C.
    pub shim_owner: u8,
    /// `PyCodeObject.co_filename`.
    pub code_file: u16,
    /// `co_qualname`; `co_name` before 3.11.
    pub code_name: u16,
    /// `co_linetable`; `co_lnotab` in 3.9.
    pub code_lines: u16,
    /// `co_firstlineno`.
    pub code_first_line: u16,
    /// `co_version`, a number that no other code object of the interpreter ever has.
    pub code_version: u16,
    /// `co_code_adaptive`: the instructions themselves.
    pub code_start: u16,
    /// `_co_firsttraceable`: the first instruction of a frame that is set up.
    pub code_first_traceable: u16,
    /// `PyASCIIObject`: its size, where ASCII text starts.
    pub text_ascii: u16,
    /// `PyCompactUnicodeObject`: its size, where other text starts.
    pub text_compact: u16,
    /// `ob_type`.
    pub object_type: u16,
    /// `PyASCIIObject.length` and `PyBytesObject.ob_size`.
    pub length: u16,
    /// `PyASCIIObject.hash`.
    pub text_hash: u16,
    /// `PyASCIIObject.state`.
    pub text_state: u16,
    /// `PyBytesObject.ob_sval`.
    pub bytes_data: u16,
}

const PYTHON_3_9: Offsets = Offsets {
    minor: 9,
    thread_top: 24,
    cframe_current: NONE,
    thread_id: 176,
    thread_status: NONE,
    thread_interpreter: 16,
    interpreter_id: 24,
    thread_next: 8,
    thread_native_id: NONE,
    interpreter_next: 0,
    interpreter_threads: 8,
    gc_collecting: 816,
    gc_youngest: 712,
    finalizing: 16,
    interpreters: 32,
    frame_code: 32,
    frame_previous: 24,
    frame_place: 104,
    place: Place::Bytes,
    frame_owner: NONE,
    shim_owner: u8::MAX,
    code_file: 104,
    code_name: 112,
    code_lines: 120,
    code_first_line: 40,
    code_version: NONE,
    code_start: NONE,
    code_first_traceable: NONE,
    text_ascii: 48,
    text_compact: 72,
    object_type: 8,
    length: 16,
    text_hash: 24,
    text_state: 32,
    bytes_data: 32,
};

const PYTHON_3_10: Offsets = Offsets { minor: 10, frame_place: 96, place: Place::Instructions, ..PYTHON_3_9 };

const PYTHON_3_11: Offsets = Offsets {
    minor: 11,
    thread_top: 56,
    cframe_current: 8,
    thread_id: 152,
    interpreter_id: 48,
    thread_native_id: 160,
    interpreter_threads: 16,
    gc_collecting: 848,
    gc_youngest: 744,
    finalizing: 24,
    interpreters: 40,
    frame_code: 32,
    frame_previous: 48,
    frame_place: 56,
    place: Place::Address,
    frame_owner: 68,
    code_file: 112,
    code_name: 128,
    code_lines: 136,
    code_first_line: 72,
    code_start: 184,
    code_first_traceable: 168,
    ..PYTHON_3_9
};

const PYTHON_3_12: Offsets = Offsets {
    minor: 12,
    cframe_current: 0,
    thread_id: 136,
    thread_status: 24,
    interpreter_id: 8,
    thread_native_id: 144,
    interpreter_threads: 72,
    gc_collecting: 312,
    gc_youngest: 208,
    frame_code: 0,
    frame_previous: 8,
    frame_owner: 70,
    shim_owner: 3,
    code_first_line: 68,
    code_version: 92,
    code_start: 192,
    code_first_traceable: 176,
    text_ascii: 40,
    text_compact: 56,
    ..PYTHON_3_11
};

const PYTHON_3_13: Offsets = Offsets {
    minor: 13,
    thread_top: 72,
    cframe_current: NONE,
    thread_id: 152,
    thread_status: 32,
    interpreter_id: 7272,
    thread_next: NONE,
    thread_native_id: NONE,
    interpreter_next: NONE,
    interpreter_threads: NONE,
    gc_collecting: 7600,
    gc_youngest: NONE,
    finalizing: 608,
    interpreters: 632,
    code_start: 200,
    code_first_traceable: 184,
    ..PYTHON_3_12
};

const PYTHON_3_14: Offsets = Offsets {
    minor: 14,
    interpreter_id: 7280,
    finalizing: 784,
    interpreters: 808,
    frame_owner: 74,
    code_start: 208,
    code_first_traceable: 192,
    ..PYTHON_3_13
};

const PYTHON_3_15: Offsets = Offsets {
    minor: 15,
    thread_id: 176,
    interpreter_id: 7272,
    gc_collecting: 7512,
    finalizing: 912,
    interpreters: 936,
    ..PYTHON_3_14
};

/// The versions that can be read.
pub const VERSIONS: [Offsets; 7] =
    [PYTHON_3_9, PYTHON_3_10, PYTHON_3_11, PYTHON_3_12, PYTHON_3_13, PYTHON_3_14, PYTHON_3_15];

/// Places of the fields of `_Py_DebugOffsets`, in eight-byte words from its start.
#[derive(Clone, Copy)]
pub struct DebugWords {
    /// Minor version of Python 3.
    pub minor: u8,
    /// `runtime_state.finalizing`; `.interpreters_head` follows.
    pub finalizing: u8,
    /// `interpreter_state.id`; `.next`, `.threads_head` follow.
    pub interpreter_id: u8,
    /// `interpreter_state.gc`.
    pub interpreter_gc: u8,
    /// `thread_state.interp`; `.next` comes before it, `.current_frame` follows.
    pub thread_interpreter: u8,
    /// `thread_state.thread_id`; `.native_thread_id`, `.datastack_chunk`, `.status` follow.
    pub thread_id: u8,
    /// `interpreter_frame.previous`; `.executable`, `.instr_ptr`, `.localsplus`, `.owner` follow.
    pub frame_previous: u8,
    /// `code_object.filename`; `.name`, `.qualname`, `.linetable`, `.firstlineno` follow.
    pub code_file: u8,
    /// `code_object.co_code_adaptive`.
    pub code_start: u8,
    /// `pyobject.ob_type`.
    pub object_type: u8,
    /// `gc.collecting`.
    pub gc_collecting: u8,
}

/// Word of the version number (`PY_VERSION_HEX`), after the cookie.
pub const DEBUG_VERSION: u8 = 1;
/// Word that is 1 in builds without a global lock.
pub const DEBUG_FREE_THREADED: u8 = 2;
/// `_Py_Debug_Cookie`.
pub const DEBUG_COOKIE: u64 = u64::from_le_bytes(*b"xdebugpy");

/// The versions that say their offsets themselves.
pub const DEBUG_WORDS: [DebugWords; 3] = [
    DebugWords {
        minor: 13,
        finalizing: 4,
        interpreter_id: 7,
        interpreter_gc: 10,
        thread_interpreter: 22,
        thread_id: 24,
        frame_previous: 29,
        code_file: 35,
        code_start: 43,
        object_type: 45,
        gc_collecting: 72,
    },
    DebugWords {
        minor: 14,
        finalizing: 4,
        interpreter_id: 7,
        interpreter_gc: 11,
        thread_interpreter: 25,
        thread_id: 27,
        frame_previous: 32,
        code_file: 40,
        code_start: 48,
        object_type: 51,
        gc_collecting: 82,
    },
    DebugWords {
        minor: 15,
        finalizing: 4,
        interpreter_id: 7,
        interpreter_gc: 11,
        thread_interpreter: 25,
        thread_id: 30,
        frame_previous: 40,
        code_file: 48,
        code_start: 56,
        object_type: 59,
        gc_collecting: 95,
    },
];
