//! The control page of a process whose library sleeps (`ring/src/control.rs`): made where a session would begin, read for one word
//! at each event, and answered.
//!
//! The page is not trusted: whoever may write to it is the process's user, who may do anything to it, but what stands
//! there is copied before it is read, and only variables of ours are taken from it.

use crate::kernel::{self, File};
use crate::ledger;
use crate::sys::Text;
use core::ffi::c_int;
use core::sync::atomic::{AtomicI32, Ordering};
use gputrace_ring::control::{self, BYTES, Control, OPTIONS};

/// Numbers from here on are out of the way of programs that close all they know, or take the lowest free one.
const NUMBER: usize = 900;

/// A new page, and the descriptor by which it is found; `None` if there can be none.
pub(crate) fn make() -> Option<&'static Control> {
    static LAST: AtomicI32 = AtomicI32::new(-1);
    if !kernel::may_use_rare_calls() {
        return None;
    }
    // A forked child holds its parent's, if the program has not closed it: as long as it says so, it is nobody's.
    let inherited = LAST.load(Ordering::Relaxed);
    if inherited >= 0 && is_control(inherited) {
        drop(File::of(inherited as usize));
    }
    let flags = libc::MFD_CLOEXEC as usize;
    // SAFETY: the name ends with a zero.
    let low =
        unsafe { kernel::call(libc::SYS_memfd_create, [control::NAME.as_ptr() as usize, flags, 0, 0, 0, 0]) };
    let low = File::of(low.ok()?);
    let number = low.number() as usize;
    // SAFETY: these take numbers, and change the file and nothing else.
    unsafe { kernel::call(libc::SYS_fchmod, [number, 0o600, 0, 0, 0, 0]) }.ok()?;
    // SAFETY: as above.
    unsafe { kernel::call(libc::SYS_ftruncate, [number, BYTES, 0, 0, 0, 0]) }.ok()?;
    let page = kernel::map_shared(&low, BYTES)?;
    // A child must not answer for its parent.
    // SAFETY: the mapping is ours.
    let _ = unsafe { kernel::advise(page, BYTES, libc::MADV_DONTFORK) };
    let duplicate = |from: usize| {
        // SAFETY: takes numbers.
        unsafe { kernel::call(libc::SYS_fcntl, [number, libc::F_DUPFD_CLOEXEC as usize, from, 0, 0, 0]) }
    };
    // Where so many are not allowed, the number that it has will do.
    let kept = duplicate(NUMBER).map_or_else(|_| low.keep(), |high| high as c_int);
    LAST.store(kept, Ordering::Relaxed);
    // SAFETY: the mapping is new, zero, aligned and never unmapped.
    let page = unsafe { &*page.cast::<Control>() };
    page.version.store(control::VERSION, Ordering::Relaxed);
    page.pid.store(kernel::process_id(), Ordering::Relaxed);
    page.state.store(control::ASLEEP, Ordering::Relaxed);
    page.magic.store(control::MAGIC, Ordering::Release);
    Some(page)
}

/// Whether the descriptor still leads to a page of ours: a program may have put another file there.
fn is_control(number: c_int) -> bool {
    let path = Text::<64>::new().add(b"/proc/self/fd/").number(number as u64);
    let mut target = [0_u8; 64];
    let arguments = [
        libc::AT_FDCWD as usize,
        path.as_c_str().as_ptr() as usize,
        target.as_mut_ptr() as usize,
        target.len(),
        0,
        0,
    ];
    // SAFETY: the path ends with a zero, and the kernel writes at most so many bytes.
    let n = unsafe { kernel::call(libc::SYS_readlinkat, arguments) }.unwrap_or(0);
    let target = target.get(..n).unwrap_or_default();
    target.strip_prefix(b"/memfd:").is_some_and(|rest| rest.starts_with(control::NAME.to_bytes()))
}

/// Says how it stands, and with what.
pub(crate) fn answer(page: &Control, state: u32, recorder: u32, text: &[u8]) {
    let (known, unknown) = ledger::counts();
    page.known.store(known, Ordering::Relaxed);
    page.unknown.store(unknown, Ordering::Relaxed);
    page.recorder.store(recorder, Ordering::Relaxed);
    let ended = text.iter().copied().take(control::ANSWER - 1).chain([0]);
    page.answer.iter().zip(ended).for_each(|(to, byte)| to.store(byte, Ordering::Relaxed));
    page.state.store(state, Ordering::Relaxed);
    // SYNC: the answer is whole for whoever sees that there is one.
    page.answers.fetch_add(1, Ordering::Release);
}

/// The variables that came with the wish, as the page has them now.
pub(crate) fn options(page: &Control) -> [u8; OPTIONS] {
    let mut copy = [0; OPTIONS];
    copy.iter_mut().zip(&page.options).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
    // Whatever stands there, it ends.
    copy.iter_mut().rev().take(2).for_each(|last| *last = 0);
    copy
}
