//! The kernel's calls, made by instruction and not through the C library.
//!
//! The C library's wrappers would do harm in somebody else's process: other preloaded libraries and sanitizers stand in
//! for them, may not be ready yet, and keep books that our calls would upset; many are cancellation points, so a
//! thread that is being cancelled would end inside of us; and all of them write `errno`. An instruction does none of that.

use core::ffi::{CStr, c_int};
use core::mem::MaybeUninit;

/// What the kernel said: a number, or an error of `errno.h`.
pub(crate) type Answer = Result<usize, c_int>;

/// A set of signals as the kernel has it: signal 1 is bit 0. Unlike the C library's functions, a set may hold 32 and 33,
/// by which the C library cancels threads and changes user ids.
pub(crate) type SignalSet = u64;

/// Every signal. The kernel leaves out those that cannot be blocked.
pub(crate) const ALL_SIGNALS: SignalSet = u64::MAX;

/// Calls the kernel.
///
/// # Safety
/// As for the call of that number: pointers lead to what it reads or writes.
#[inline]
pub(crate) unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> Answer {
    let [a, b, c, d, e, f] = arguments;
    let answer: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel's own convention (psABI AMD64, A.2.1): it changes rcx, r11 and the answer, and memory only as the
    // caller of this function knows.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel's own convention (syscall(2)): it changes the answer, and memory only as the caller knows.
    unsafe {
        core::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") a as isize => answer,
            in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f,
            options(nostack),
        );
    }
    // Errors are the last page of numbers (linux/err.h, MAX_ERRNO).
    if (-4095..0).contains(&answer) { Err(-answer as c_int) } else { Ok(answer as usize) }
}

/// A descriptor of ours, closed when dropped.
pub(crate) struct File(c_int);

impl File {
    /// Opens a path; `openat(2)` from the current folder.
    pub(crate) fn open(path: &CStr, flags: c_int, mode: u32) -> Result<File, c_int> {
        let arguments = [
            libc::AT_FDCWD as usize,
            path.as_ptr() as usize,
            (flags | libc::O_CLOEXEC) as usize,
            mode as usize,
            0,
            0,
        ];
        // SAFETY: the path ends with a zero.
        unsafe { call(libc::SYS_openat, arguments) }.map(|number| File(number as c_int))
    }

    /// Takes over a descriptor that the kernel has just given out.
    pub(crate) fn of(number: usize) -> File {
        File(number as c_int)
    }

    /// Its number.
    pub(crate) fn number(&self) -> c_int {
        self.0
    }

    /// Leaves it open.
    pub(crate) fn keep(self) -> c_int {
        let number = self.0;
        core::mem::forget(self);
        number
    }

    /// `read(2)`.
    pub(crate) fn read(&self, into: &mut [u8]) -> Answer {
        // SAFETY: the kernel writes at most the buffer's length into the buffer.
        unsafe { call(libc::SYS_read, [self.0 as usize, into.as_mut_ptr() as usize, into.len(), 0, 0, 0]) }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours. On Linux it is closed whatever the answer.
        let _ = unsafe { call(libc::SYS_close, [self.0 as usize, 0, 0, 0, 0, 0]) };
    }
}

/// `write(2)`, to a descriptor that is not ours to close.
pub(crate) fn write(file: c_int, bytes: &[u8]) -> Answer {
    // SAFETY: the kernel reads the buffer and no more.
    unsafe { call(libc::SYS_write, [file as usize, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0]) }
}

/// Number of this process, asked anew: the C library's copy may be that of a parent.
pub(crate) fn process_id() -> u32 {
    // SAFETY: takes nothing.
    unsafe { call(libc::SYS_getpid, [0; 6]) }.unwrap_or(0) as u32
}

/// Number of the calling thread.
pub(crate) fn thread_id() -> u32 {
    // SAFETY: takes nothing.
    unsafe { call(libc::SYS_gettid, [0; 6]) }.unwrap_or(0) as u32
}

/// Whether a thread of this process is gone. In doubt it is not.
pub(crate) fn is_thread_gone(process: u32, thread: u32) -> bool {
    // SAFETY: signal 0 is not sent, only checked.
    let answer = unsafe { call(libc::SYS_tgkill, [process as usize, thread as usize, 0, 0, 0, 0]) };
    answer == Err(libc::ESRCH)
}

/// Sleeps; signals may cut it short.
pub(crate) fn sleep(nanos: u32) {
    let pause = libc::timespec {
        tv_sec: i64::from(nanos / 1_000_000_000),
        tv_nsec: i64::from(nanos % 1_000_000_000),
    };
    // SAFETY: the timespec is ours.
    let _ = unsafe { call(libc::SYS_nanosleep, [(&raw const pause) as usize, 0, 0, 0, 0, 0]) };
}

/// Makes `signals` the calling thread's blocked ones, and gives those before.
pub(crate) fn block_signals(signals: SignalSet) -> SignalSet {
    let mut before: SignalSet = 0;
    let arguments = [
        libc::SIG_SETMASK as usize,
        (&raw const signals) as usize,
        (&raw mut before) as usize,
        size_of::<SignalSet>(),
        0,
        0,
    ];
    // SAFETY: both sets are ours, of the size we say.
    let _ = unsafe { call(libc::SYS_rt_sigprocmask, arguments) };
    before
}

/// Whether eight bytes at `address` can be read now. Another thread may change that at any moment.
pub(crate) fn can_read(address: usize) -> bool {
    // The kernel reads the new set before it looks at what to do with it (`kernel/signal.c`, sys_rt_sigprocmask): an
    // unknown wish changes nothing, and its answer says whether the set could be read.
    // SAFETY: the kernel checks the address itself, and changes nothing.
    let answer =
        unsafe { call(libc::SYS_rt_sigprocmask, [usize::MAX, address, 0, size_of::<SignalSet>(), 0, 0]) };
    answer == Err(libc::EINVAL)
}

/// A new private zeroed mapping; `None` if there is no room.
pub(crate) fn map_private(bytes: usize) -> Option<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    map(bytes, flags, usize::MAX)
}

/// A new mapping of a file that others share.
pub(crate) fn map_shared(file: &File, bytes: usize) -> Option<*mut u8> {
    map(bytes, libc::MAP_SHARED, file.0 as usize)
}

fn map(bytes: usize, flags: c_int, file: usize) -> Option<*mut u8> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping touches nothing that exists.
    let at = unsafe { call(libc::SYS_mmap, [0, bytes, access as usize, flags as usize, file, 0]) };
    Some(at.ok()? as *mut u8)
}

/// Gives a mapping back.
///
/// # Safety
/// The mapping is ours, and nobody uses it any more.
pub(crate) unsafe fn unmap(at: *mut u8, bytes: usize) {
    // SAFETY: the caller's promise.
    let _ = unsafe { call(libc::SYS_munmap, [at as usize, bytes, 0, 0, 0, 0]) };
}

/// `madvise(2)`.
///
/// # Safety
/// The advice holds for this memory: it is ours, and what the advice throws away is not wanted.
pub(crate) unsafe fn advise(at: *mut u8, bytes: usize, advice: c_int) -> Answer {
    // SAFETY: the caller's promise.
    unsafe { call(libc::SYS_madvise, [at as usize, bytes, advice as usize, 0, 0, 0]) }
}

/// A soft limit of this process; all ones without one, or where it cannot be asked for.
pub(crate) fn limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limits = MaybeUninit::<libc::rlimit64>::zeroed();
    let arguments = [0, resource as usize, 0, limits.as_mut_ptr() as usize, 0, 0];
    // SAFETY: the kernel writes one structure of 64-bit numbers.
    match unsafe { call(libc::SYS_prlimit64, arguments) } {
        // SAFETY: the kernel has just written it; zeros before.
        Ok(_) => unsafe { limits.assume_init() }.rlim_cur,
        Err(_) => u64::MAX,
    }
}

/// Ends the process with SIGABRT, or, where the program catches or ignores that, with 134.
pub(crate) fn abort() -> ! {
    let arguments = [process_id() as usize, thread_id() as usize, libc::SIGABRT as usize, 0, 0, 0];
    // SAFETY: a signal to the calling thread.
    let _ = unsafe { call(libc::SYS_tgkill, arguments) };
    loop {
        // SAFETY: takes a number, and does not come back.
        let _ = unsafe { call(libc::SYS_exit_group, [134, 0, 0, 0, 0, 0]) };
    }
}

/// Copies memory of this process, as far as it can be read, in a way that cannot fault: bytes copied, or an error if there
/// are none (`EFAULT`), or if such a copy is not to be had here (another error).
///
/// # Safety
/// `into` has room for so many bytes.
pub(crate) unsafe fn copy(from: usize, into: *mut u8, bytes: usize) -> Answer {
    let own = libc::iovec { iov_base: into.cast(), iov_len: bytes };
    let other = libc::iovec { iov_base: from as *mut _, iov_len: bytes };
    let arguments =
        [process_id() as usize, (&raw const own) as usize, 1, (&raw const other) as usize, 1, 0];
    // SAFETY: the kernel checks the address itself, and writes no more than the caller's room.
    unsafe { call(libc::SYS_process_vm_readv, arguments) }
}

/// Whether a filter of system calls is on (seccomp): it may end the process for a call that few programs make.
pub(crate) fn is_filtered() -> bool {
    // SAFETY: asks for a number.
    let answer = unsafe { call(libc::SYS_prctl, [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0]) };
    answer != Ok(0)
}
