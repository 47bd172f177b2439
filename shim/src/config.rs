//! `GPUTRACE_*` variables: one row each.
//!
//! The shim reads its own when a session begins, never in a hook, and not at all where the user must not steer the program; the recorder, which inherits the environment, reads
//! the others.

use crate::environment;
use core::ffi::CStr;

/// A variable: its name, what it may hold, and what it does.
pub(crate) struct Variable {
    /// Its name.
    pub(crate) name: &'static CStr,
}

/// `0` or `off`: the library does nothing at all.
pub(crate) const SWITCH: Variable = Variable { name: c"GPUTRACE" };
/// `none`, `python` (the default) or `all`: which frames stacks have.
pub(crate) const STACKS: Variable = Variable { name: c"GPUTRACE_STACKS" };
/// Bytes: blocks of PyTorch's that are smaller have no stack. Driver calls do: their stacks say whose memory it is.
pub(crate) const STACKS_MIN_SIZE: Variable = Variable { name: c"GPUTRACE_STACKS_MIN_SIZE" };
/// Bytes of the ring; by default 32 MiB, never more than a quarter of what `/dev/shm` has free.
pub(crate) const RING_BYTES: Variable = Variable { name: c"GPUTRACE_RING_BYTES" };
/// Path of the `gputrace` program; by default it is looked for beside the library, then on `PATH`.
pub(crate) const RECORDER: Variable = Variable { name: c"GPUTRACE_RECORDER" };
/// Milliseconds that a process without other threads waits at its end for its trace to be complete; by default 5000.
pub(crate) const EXIT_WAIT: Variable = Variable { name: c"GPUTRACE_EXIT_WAIT" };

/// `1`: how long the GPU works for each call into NCCL is measured.
pub(crate) const NCCL_TIMING: Variable = Variable { name: c"GPUTRACE_NCCL_TIMING" };

/// Which frames a stack has.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Stacks {
    /// None, but for driver calls the few that tell whose memory it is.
    None = 0,
    /// Python frames, and native ones where a thread runs no Python; for driver calls always both, because they tell whose
    /// memory it is.
    Python = 1,
    /// Python and native frames.
    All = 2,
}

impl Variable {
    /// Its value, if it is set and not empty.
    pub(crate) fn value(&self) -> Option<&'static CStr> {
        environment::value(self.name).filter(|value| !value.is_empty())
    }

    /// Its value as a number; `None` if it is not one.
    pub(crate) fn number(&self) -> Option<u64> {
        let digits = self.value()?.to_bytes();
        digits.iter().try_fold(0_u64, |sum, digit| {
            let digit = digit.checked_sub(b'0').filter(|digit| *digit < 10)?;
            sum.checked_mul(10)?.checked_add(u64::from(digit))
        })
    }
}

/// Whether the user switched the library off, or has no say in this program.
pub(crate) fn is_off() -> bool {
    environment::is_secure()
        || SWITCH.value().is_some_and(|value| matches!(value.to_bytes(), b"0" | b"off" | b"false" | b"no"))
}

/// Whether the user wants to know how long the GPU works for NCCL.
pub(crate) fn is_nccl_timing_on() -> bool {
    NCCL_TIMING.value().is_some_and(|value| matches!(value.to_bytes(), b"1" | b"on" | b"true" | b"yes"))
}

/// Which frames the user wants.
pub(crate) fn stacks() -> Stacks {
    match STACKS.value().map(CStr::to_bytes) {
        Some(b"none" | b"0") => Stacks::None,
        Some(b"all") => Stacks::All,
        _ => Stacks::Python,
    }
}
