//! Texts without a heap, and small questions to `/proc`.

use crate::kernel;
use core::ffi::{CStr, c_char, c_int};

/// Ends the process at once.
#[cfg(not(test))]
pub(crate) fn die() -> ! {
    kernel::abort()
}

/// Keeps `errno` as the program left it, whatever we call meanwhile.
pub(crate) struct KeepErrno(c_int);

impl KeepErrno {
    pub(crate) fn new() -> KeepErrno {
        // SAFETY: the C library gives every thread its own errno.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above.
        KeepErrno(unsafe { *errno })
    }
}

impl Drop for KeepErrno {
    fn drop(&mut self) {
        // SAFETY: the C library gives every thread its own errno.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above.
        unsafe { *errno = self.0 };
    }
}

/// Text put together without a heap. What does not fit is cut.
pub(crate) struct Text<const N: usize> {
    bytes: [u8; N],
    used: usize,
}

impl<const N: usize> Text<N> {
    pub(crate) const fn new() -> Text<N> {
        Text { bytes: [0; N], used: 0 }
    }

    pub(crate) fn add(mut self, bytes: &[u8]) -> Self {
        self.append(bytes);
        self
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.fill(0);
        self.used = 0;
    }

    /// As [`Text::add`], where it is.
    pub(crate) fn append(&mut self, bytes: &[u8]) {
        for byte in bytes {
            // One byte stays for the end of a C string.
            if self.used + 1 < N
                && let Some(slot) = self.bytes.get_mut(self.used)
            {
                *slot = *byte;
                self.used += 1;
            }
        }
    }

    pub(crate) fn number(self, mut value: u64) -> Self {
        let mut digits = [0_u8; 20];
        let mut at = digits.len();
        loop {
            at -= 1;
            if let Some(digit) = digits.get_mut(at) {
                *digit = b'0' + (value % 10) as u8;
            }
            value /= 10;
            if value == 0 || at == 0 {
                break;
            }
        }
        self.add(digits.get(at..).unwrap_or_default())
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.used).unwrap_or_default()
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or_default()
    }

    pub(crate) fn is_full(&self) -> bool {
        self.used + 1 >= N
    }
}

/// Reads a small file such as those of `/proc`; bytes read.
pub(crate) fn read_file(path: &CStr, into: &mut [u8]) -> usize {
    let file = kernel::File::open(path, libc::O_RDONLY, 0);
    file.and_then(|file| file.read(into)).unwrap_or(0)
}

/// Whether a thread of this process will never run a line of the program again: it is gone, or the kernel is taking it down, which on a
/// busy machine takes longer than its `pthread_join`. In doubt it will.
pub(crate) fn is_thread_over(thread: u32) -> bool {
    let is_gone = || kernel::is_task_gone(thread);
    // It may go between the two questions.
    is_gone() || is_ending(b"/proc/self/task/", thread) || is_gone()
}

/// Whether a process is gone, or has ended and nobody has waited for it. In doubt it is not. For the start of a session.
pub(crate) fn is_process_over(process: u32) -> bool {
    let is_gone = kernel::may_use_rare_calls() && kernel::is_task_gone(process);
    is_gone || is_ending(b"/proc/", process)
}

/// By the flags of proc(5): `PF_EXITING` of the kernel's sched.h, which is 4 in every Linux.
fn is_ending(folder: &[u8], number: u32) -> bool {
    const PF_EXITING: u64 = 4;
    /// Words between a thread's name, which stands in parentheses, and its flags.
    const BEFORE_FLAGS: usize = 6;
    let path = Text::<64>::new().add(folder).number(number.into()).add(b"/stat");
    let mut stat = [0_u8; 192];
    let n = read_file(path.as_c_str(), &mut stat);
    let stat = stat.get(..n).unwrap_or_default();
    // A name may have parentheses too; nothing behind it has.
    let Some(after) = stat.iter().rposition(|byte| *byte == b')').and_then(|at| stat.get(at + 2..)) else {
        return false;
    };
    let mut words = after.split(|byte| *byte == b' ');
    let Some(flags) = words.nth(BEFORE_FLAGS).filter(|_| words.next().is_some()) else { return false };
    let flags = flags.iter().try_fold(0_u64, |sum, digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 10)?;
        sum.checked_mul(10)?.checked_add(digit.into())
    });
    flags.is_some_and(|flags| flags & PF_EXITING != 0)
}

/// Private zeroed memory that is never given back; null if there is none.
pub(crate) fn pages(bytes: usize) -> *mut u8 {
    let Some(at) = kernel::map_private(bytes) else { return core::ptr::null_mut() };
    // SAFETY: the mapping is new.
    let _ = unsafe { kernel::unlock(at, bytes) };
    at
}

/// A C string that somebody else guarantees.
///
/// # Safety
/// `text` is null or a C string that outlives the result's use.
pub(crate) unsafe fn c_bytes<'a>(text: *const c_char) -> &'a [u8] {
    if text.is_null() {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_bytes()
}
