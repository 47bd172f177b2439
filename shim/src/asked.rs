//! Questions to the kernel that a program under a sandbox might not have been allowed: asked only where [`own::may_ask`] says so.

use crate::kernel::{SignalSet, call, copy, may_use_rare_calls};
use crate::{own, valgrind};
use core::mem::MaybeUninit;

/// The least page of Linux on these processors.
const PAGE: usize = 4096;

/// Whether eight bytes at `address` can be read now. Another thread may change that at any moment. No, where the kernel may not be
/// asked ([`own::may_ask`]).
pub(crate) fn can_read(address: usize) -> bool {
    if valgrind::is_on() {
        // It says of each such wish that it does not know it.
        let mut word = [0_u8; 8];
        // SAFETY: the room is as long as we say.
        return unsafe { copy(address, word.as_mut_ptr(), word.len()) } == Ok(word.len());
    }
    if !own::may_ask() {
        return false;
    }
    // The kernel reads the new set before it looks at what to do with it (`kernel/signal.c`, sys_rt_sigprocmask): an
    // unknown wish changes nothing, and its answer says whether the set could be read.
    // SAFETY: the kernel checks the address itself, and changes nothing.
    let answer =
        unsafe { call(libc::SYS_rt_sigprocmask, [usize::MAX, address, 0, size_of::<SignalSet>(), 0, 0]) };
    answer == Err(libc::EINVAL)
}

/// Copies what can be read at `address` up to the end of its page, as long as the room; bytes copied. Cannot fault.
pub(crate) fn read_memory(address: usize, into: &mut [u8]) -> usize {
    let wanted = into.len().min(PAGE - address % PAGE);
    let Some(into) = into.get_mut(..wanted).filter(|into| !into.is_empty()) else { return 0 };
    if !own::may_ask() {
        return 0;
    }
    if may_use_rare_calls() {
        // SAFETY: the room is as long as we say.
        if let Ok(n) = unsafe { copy(address, into.as_mut_ptr(), wanted) } {
            return n.min(wanted);
        }
    }
    // The word may reach into the next page, which says nothing about this one.
    let probe = address.min((address | (PAGE - 1)) - 7);
    if !can_read(probe) {
        return 0;
    }
    for (at, byte) in into.iter_mut().enumerate() {
        // SAFETY: the page could be read just now. Another thread may unmap it between these lines, as it may for the C
        // library's own readers; where the kernel may be asked to copy, that cannot fault either.
        *byte = unsafe { ((address + at) as *const u8).read_volatile() };
    }
    wanted
}

/// Whether the calling thread is on the stack it set aside for signals. In doubt it is: the kernel may not be asked
/// ([`own::may_ask`]).
pub(crate) fn is_on_signal_stack() -> bool {
    if !own::may_ask() {
        return true;
    }
    let mut stack = MaybeUninit::<libc::stack_t>::zeroed();
    // SAFETY: the kernel writes one `stack_t`.
    let answer = unsafe { call(libc::SYS_sigaltstack, [0, stack.as_mut_ptr() as usize, 0, 0, 0, 0]) };
    // SAFETY: zeros, or what the kernel wrote.
    answer.is_ok() && unsafe { stack.assume_init() }.ss_flags & libc::SS_ONSTACK != 0
}
