//! Names of the environment variables that steer gputrace, a row each. SECURITY.md lists them for users.

use core::ffi::CStr;

macro_rules! variables {
    ($( $(#[doc = $does:literal])* $row:ident = $name:literal, )*) => {
        $( $(#[doc = $does])* pub const $row: &CStr = $name; )*
    };
}

// What the library reads, when a session begins.
variables! {
    /// `0` or `off`: the library does nothing at all. `dormant`: it records nothing until `gputrace attach` wakes it.
    SWITCH = c"GPUTRACE",
    /// `none`, `python` (the default) or `all`: which frames stacks have.
    STACKS = c"GPUTRACE_STACKS",
    /// Bytes: blocks of PyTorch's that are smaller have no stack. Driver calls do: their stacks say whose memory it is.
    STACKS_MIN_SIZE = c"GPUTRACE_STACKS_MIN_SIZE",
    /// Bytes of the ring; by default 32 MiB, never more than a quarter of what `/dev/shm` has free.
    RING_BYTES = c"GPUTRACE_RING_BYTES",
    /// Path of the `gputrace` program; by default it is looked for beside the library, then on `PATH`.
    RECORDER = c"GPUTRACE_RECORDER",
    /// Milliseconds that a process waits at its end for its trace to be complete: without other threads by default 5000, as process
    /// 1 of a PID namespace with them 1000, else not at all.
    EXIT_WAIT = c"GPUTRACE_EXIT_WAIT",
    /// `1`: how long the GPU works for each call into NCCL is measured.
    NCCL_TIMING = c"GPUTRACE_NCCL_TIMING",
}

// What the recorder reads, which inherits the environment.
variables! {
    /// Pattern of the trace's name; empty or not set is the default.
    OUTPUT = c"GPUTRACE_OUTPUT",
    /// When `gputrace record` was called: younger traces are those of its other processes. Nanoseconds since 1970, and of
    /// `CLOCK_MONOTONIC`.
    JOB_BEGAN = c"GPUTRACE_JOB_BEGAN",
    /// Overwrites a trace of the same name if set to anything but `0`.
    FORCE = c"GPUTRACE_FORCE",
    /// A length of time (`30m`): at least the last so long of the recording is kept, and what is older is removed.
    KEEP = c"GPUTRACE_KEEP",
    /// Bytes: the recording takes at most so many on the disk, and the oldest part is removed.
    MAX_SIZE = c"GPUTRACE_MAX_SIZE",
    /// `0` or `off`: nothing is said of requests that fail for want of memory.
    OOM = c"GPUTRACE_OOM",
    /// Seconds of silence after which the stacks of a rank of a job are read into the trace; 60 by default, 0 never.
    HANG_AFTER = c"GPUTRACE_HANG_AFTER",
}

// What the program `gputrace` reads.
variables! {
    /// Where `libgputrace.so` is; by default beside the program, or in `../lib` of it.
    LIBRARY = c"GPUTRACE_LIBRARY",
}
