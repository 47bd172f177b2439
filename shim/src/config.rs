//! What the user asks of the library, by the variables of `ring/src/variables.rs`.
//!
//! They are read when a session begins, never in a hook, and not at all where the user must not steer the program.

use crate::elf;
use crate::environment;
use core::ffi::CStr;
use gputrace_ring::variables;

/// One of the variables.
pub(crate) struct Variable(&'static CStr);

pub(crate) const STACKS_MIN_SIZE: Variable = Variable(variables::STACKS_MIN_SIZE);
pub(crate) const RING_BYTES: Variable = Variable(variables::RING_BYTES);
pub(crate) const RECORDER: Variable = Variable(variables::RECORDER);
pub(crate) const EXIT_WAIT: Variable = Variable(variables::EXIT_WAIT);
const SWITCH: Variable = Variable(variables::SWITCH);
const STACKS: Variable = Variable(variables::STACKS);
const NCCL_TIMING: Variable = Variable(variables::NCCL_TIMING);

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
        environment::value(self.0).filter(|value| !value.is_empty())
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

/// Whether the library sleeps until somebody attaches: the user wants that, or it came late.
pub(crate) fn is_dormant() -> bool {
    elf::is_late() || SWITCH.value().is_some_and(|value| value.to_bytes() == b"dormant")
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
