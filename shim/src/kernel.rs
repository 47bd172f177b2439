//! The kernel's calls, made by instruction and not through the C library.
//!
//! The C library's wrappers would do harm in somebody else's process: other preloaded libraries and sanitizers stand in
//! for them, may not be ready yet, and keep books that our calls would upset; many are cancellation points, so a
//! thread that is being cancelled would end inside of us; and all of them write `errno`. An instruction does none of that.

use crate::arch;
use core::ffi::{CStr, c_int, c_void};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicU32, Ordering};

/// What the kernel said: a number, or an error of `errno.h`.
pub(crate) type Answer = Result<usize, c_int>;

/// A set of signals as the kernel has it: signal 1 is bit 0. Unlike the C library's functions, a set may hold 32 and 33,
/// by which the C library cancels threads and changes user ids.
pub(crate) type SignalSet = u64;

/// Every signal. The kernel leaves out those that cannot be blocked.
pub(crate) const ALL_SIGNALS: SignalSet = u64::MAX;

/// Every signal but SIGSYS (31). A filter may leave a call to the program's own handler (`SECCOMP_RET_TRAP`, as browsers' sandboxes do).
/// Where that signal is blocked, the kernel ends the process instead.
pub(crate) const MOST_SIGNALS: SignalSet = ALL_SIGNALS & !(1 << 30);

/// Calls the kernel.
///
/// # Safety
/// As for the call of that number: pointers lead to what it reads or writes.
#[inline]
pub(crate) unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> Answer {
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: the kernel's own convention (psABI AMD64, A.2.1; syscall(2)): it changes what the instruction says and the answer, and
    // memory only as the caller of this function knows.
    let answer: isize = unsafe { arch::system_call!(number, a, b, c, d, e, f) };
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

/// Whether no thread of any process has this number: one that shares our memory need not be of our thread group (`CLONE_VM`
/// without `CLONE_THREAD`). In doubt one has.
pub(crate) fn is_task_gone(thread: u32) -> bool {
    // SAFETY: signal 0 is not sent, only checked.
    let answer = unsafe { call(libc::SYS_tkill, [thread as usize, 0, 0, 0, 0, 0]) };
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

/// Sleeps until the word, which other processes may share, no longer holds `value`, until somebody wakes who waits for it, or for
/// so many milliseconds; signals may cut it short.
pub(crate) fn wait_while(word: &AtomicU32, value: u32, milliseconds: u32) {
    let pause = libc::timespec {
        tv_sec: i64::from(milliseconds / 1000),
        tv_nsec: i64::from(milliseconds % 1000) * 1_000_000,
    };
    let (word, pause) = (core::ptr::from_ref(word) as usize, (&raw const pause) as usize);
    // SAFETY: the kernel reads the word and the timespec.
    let _ = unsafe { call(libc::SYS_futex, [word, libc::FUTEX_WAIT as usize, value as usize, pause, 0, 0]) };
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

/// A new private zeroed mapping; `None` if there is no room.
pub(crate) fn map_private(bytes: usize) -> Option<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    map(bytes, flags, usize::MAX)
}

/// Private zeroed memory that takes none until it is used; `None` if there is no room. Nor does it count as locked (`mlockall`), if that is
/// asked for and there is a need: the call is one that programs rarely make.
pub(crate) fn reserve(bytes: usize, is_unlocked: bool) -> Option<*mut u8> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // Not to be used yet, so that nothing is put into it where mappings are locked from the start.
    // SAFETY: a new mapping touches nothing that exists.
    let at =
        unsafe { call(libc::SYS_mmap, [0, bytes, libc::PROT_NONE as usize, flags as usize, usize::MAX, 0]) };
    let at = at.ok()? as *mut u8;
    if is_unlocked && may_be_locked() {
        // SAFETY: locks are no property of the memory's content.
        let _ = unsafe { call(libc::SYS_munlock, [at as usize, bytes, 0, 0, 0, 0]) };
    }
    // A huge page would be taken whole for the first line of many. Nobody looks for it in a core file.
    for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP] {
        // SAFETY: throws nothing away.
        let _ = unsafe { advise(at, bytes, advice) };
    }
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the mapping is ours.
    if unsafe { call(libc::SYS_mprotect, [at as usize, bytes, access as usize, 0, 0, 0]) }.is_err() {
        // SAFETY: as above, and nobody has seen it.
        unsafe { unmap(at, bytes) };
        return None;
    }
    Some(at)
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

/// Whether the kernel may be asked for what programs rarely ask for. Under a seccomp filter it may not: some kill whoever
/// makes a call that they do not know. Holds since [`look_for_filter`].
pub(crate) fn may_use_rare_calls() -> bool {
    FILTER.load(Ordering::Relaxed) == NO_FILTER
}

/// Whether memory of this process may be locked as it is mapped (`mlockall`). Yes, where that is not known.
pub(crate) fn may_be_locked() -> bool {
    LOCKED.load(Ordering::Relaxed) != NOTHING_LOCKED
}

static FILTER: AtomicU32 = AtomicU32::new(0);
const NO_FILTER: u32 = 1;
const A_FILTER: u32 = 2;
static LOCKED: AtomicU32 = AtomicU32::new(0);
const SOMETHING_LOCKED: u32 = 1;
const NOTHING_LOCKED: u32 = 2;

/// Finds out whether this process is under a seccomp filter, and whether it has locked memory.
pub(crate) fn look_for_filter() {
    // A file is read before the kernel is asked: every filter lets programs read files.
    let (mode, locked) =
        first_of_lines([b"\nSeccomp:\t", b"\nVmLck:\t"]).map_or((None, None), |[a, b]| (a, b));
    let has_filter = match mode {
        Some(mode) => mode != b'0',
        None => {
            // SAFETY: takes nothing else.
            let mode = unsafe { call(libc::SYS_prctl, [libc::PR_GET_SECCOMP as usize, 0, 0, 0, 0, 0]) };
            mode != Ok(0)
        }
    };
    FILTER.store(if has_filter { A_FILTER } else { NO_FILTER }, Ordering::Relaxed);
    LOCKED.store(if locked == Some(b'0') { NOTHING_LOCKED } else { SOMETHING_LOCKED }, Ordering::Relaxed);
}

/// What each of these lines of the calling thread's status begins with, after blanks (proc(5), Linux 3.8).
fn first_of_lines<const N: usize>(lines: [&[u8]; N]) -> Option<[Option<u8>; N]> {
    // The first thread's may be without a filter that this one has. Linux 3.17 has the first of these.
    let open = |path| File::open(path, libc::O_RDONLY, 0);
    let file = open(c"/proc/thread-self/status").or_else(|_| open(c"/proc/self/status")).ok()?;
    let (mut buffer, mut matched, mut found) = ([0_u8; 256], [0; N], [None; N]);
    loop {
        let n = file.read(&mut buffer).ok()?;
        if n == 0 || found.iter().all(Option::is_some) {
            return Some(found);
        }
        for byte in buffer.get(..n)? {
            for ((line, matched), found) in lines.iter().zip(&mut matched).zip(&mut found) {
                match line.get(*matched) {
                    None if *byte == b' ' || found.is_some() => {}
                    None => *found = Some(*byte),
                    Some(next) if next == byte => *matched += 1,
                    Some(_) => *matched = usize::from(*byte == b'\n'),
                }
            }
        }
    }
}

/// Undoes what `mlockall(MCL_FUTURE)` does to a mapping of ours: it would count against the program's limit. What the
/// mapping alone holds is lost.
///
/// # Safety
/// Whole pages of a private mapping that nobody else uses, or of a file, which keeps what it has.
pub(crate) unsafe fn unlock(at: *mut u8, bytes: usize) -> Answer {
    // SAFETY: the caller's promise.
    unsafe { advise(at, bytes, libc::MADV_DONTNEED) }.or_else(|_| {
        // Locked memory cannot be thrown away (madvise(2), EINVAL).
        // SAFETY: locks are no property of the memory's content.
        let _ = unsafe { call(libc::SYS_munlock, [at as usize, bytes, 0, 0, 0, 0]) };
        // SAFETY: the caller's promise.
        unsafe { advise(at, bytes, libc::MADV_DONTNEED) }
    })
}

/// Starts a process that runs `function(argument)` on a stack of its own, and ends with what that returns. Its number.
///
/// # Safety
/// `stack` is the upper end of enough free memory. With `CLONE_VM` the function shares our memory: everything it touches
/// is ours to share, it calls the kernel and nothing else (the thread pointer is the calling thread's), and
/// it ends before the stack is given back.
pub(crate) unsafe fn spawn(
    flags: c_int,
    stack: *mut u8,
    function: extern "C" fn(*mut c_void) -> c_int,
    argument: *mut c_void,
) -> Answer {
    // SAFETY: the caller's promise.
    let answer =
        unsafe { clone_onto(flags as usize, stack as usize & !15, function as usize, argument as usize) };
    if (-4095..0).contains(&answer) { Err(-answer as c_int) } else { Ok(answer as usize) }
}

unsafe extern "C" {
    #[link_name = "gputrace_clone"]
    fn clone_onto(flags: usize, stack: usize, function: usize, argument: usize) -> isize;
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

/// Calls `each` with every number that names something in a folder of `/proc`, and with the folder's own descriptor. False
/// if the folder cannot be read.
pub(crate) fn list_numbers(path: &CStr, mut each: impl FnMut(c_int, c_int)) -> bool {
    let Ok(folder) = File::open(path, libc::O_RDONLY | libc::O_DIRECTORY, 0) else { return false };
    // Aligned as the kernel's entries are (getdents64(2)): inode, offset, bytes of the entry, kind, name.
    let mut entries = [0_u64; 256];
    loop {
        let arguments =
            [folder.number() as usize, entries.as_mut_ptr() as usize, size_of_val(&entries), 0, 0, 0];
        // SAFETY: the kernel writes at most so many bytes.
        let n = match unsafe { call(libc::SYS_getdents64, arguments) } {
            Ok(0) => return true,
            Ok(n) => n,
            Err(_) => return false,
        };
        // SAFETY: words may be read as bytes, and the kernel has just written as many.
        let bytes = unsafe { core::slice::from_raw_parts(entries.as_ptr().cast::<u8>(), n) };
        let mut at = 0;
        while let Some(entry) = bytes.get(at..).filter(|entry| entry.len() > 19) {
            if let Some(number) = number_of(entry.get(19..).unwrap_or_default()) {
                each(number, folder.number());
            }
            let length =
                entry.get(16..18).and_then(|length| length.try_into().ok()).map_or(0, u16::from_ne_bytes);
            at += usize::from(length.max(20));
        }
    }
}

/// A name that is a number, up to its zero.
fn number_of(name: &[u8]) -> Option<c_int> {
    let digits = name.split(|byte| *byte == 0).next().filter(|digits| !digits.is_empty())?;
    digits.iter().try_fold(0 as c_int, |sum, digit| {
        let digit = digit.checked_sub(b'0').filter(|digit| *digit < 10)?;
        sum.checked_mul(10)?.checked_add(c_int::from(digit))
    })
}

/// Copies memory of this process, as far as it can be read, in a way that cannot fault: bytes copied, or an error if there
/// are none (`EFAULT`), or if such a copy is not to be had here (another error).
///
/// # Safety
/// `into` has room for so many bytes.
pub(crate) unsafe fn copy(from: usize, into: *mut u8, bytes: usize) -> Answer {
    let own = libc::iovec { iov_base: into.cast(), iov_len: bytes };
    let other = libc::iovec { iov_base: from as *mut _, iov_len: bytes };
    let arguments = [process_id() as usize, (&raw const own) as usize, 1, (&raw const other) as usize, 1, 0];
    // SAFETY: the kernel checks the address itself, and writes no more than the caller's room.
    unsafe { call(libc::SYS_process_vm_readv, arguments) }
}
