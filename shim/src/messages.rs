//! What the library says to the user, and where.
//!
//! Descriptor 2 belongs to the program. It may have become a pipe that nobody reads, a file of the program's own, or a terminal that
//! the user has stopped: a write there would end the process by a signal, halt it, or land in somebody's data. So a message goes to
//! descriptor 2 only if that is still what it was when the library was loaded, only by a write that cannot wait, and with the signals
//! of a failed write kept from the program. All other messages go into the ring ([`gputrace_ring::notices`]), from which the recorder
//! takes them into the trace; and without a ring into a file beside the place where it would have been.

use crate::arch;
use crate::kernel::{self, Answer, File};
use crate::sys::Text;
use crate::{elf, own, ring_file};
use core::ffi::{CStr, c_int};
use core::mem::MaybeUninit;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use gputrace_ring::map::{self, Map};

/// Standard error.
const STDERR: c_int = 2;
/// Longest message, in bytes: no more than a pipe takes at once (POSIX, `_POSIX_PIPE_BUF`).
const LONGEST: usize = 512;
/// Our duplicate of descriptor 2 gets a number from here on: low numbers are those that programs count on.
const SPARE: usize = 100;
/// `poll(2)`.
const POLLERR_OR_WORSE: i16 = libc::POLLERR | libc::POLLHUP | libc::POLLNVAL;
/// `RWF_NOWAIT` of linux/fs.h (Linux 4.14; of pipes 6.4): the call fails where it would have to wait.
const RWF_NOWAIT: usize = 8;
/// Major number of `/dev/null`, `/dev/zero`, `/dev/full` (Documentation/admin-guide/devices.txt).
const MEMORY_DEVICES: u64 = 1;

/// What tells one open file from another, by `fstat(2)`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Which {
    device: u64,
    inode: u64,
    /// Of a device file, which device it is.
    rdev: u64,
    kind: u32,
}

impl Which {
    fn of(file: c_int) -> Option<Which> {
        let mut facts = MaybeUninit::<libc::stat64>::zeroed();
        let arguments = [file as usize, facts.as_mut_ptr() as usize, 0, 0, 0, 0];
        // SAFETY: the kernel writes one structure.
        unsafe { kernel::call(libc::SYS_fstat, arguments) }.ok()?;
        // SAFETY: the kernel has just written it.
        let facts = unsafe { facts.assume_init_ref() };
        Some(Which {
            device: facts.st_dev,
            inode: facts.st_ino,
            rdev: facts.st_rdev,
            kind: facts.st_mode & libc::S_IFMT,
        })
    }
}

/// What descriptor 2 was when the library was loaded. Written by the constructor, before there are threads of ours.
struct AtStart {
    is_open: AtomicBool,
    device: AtomicU64,
    inode: AtomicU64,
    rdev: AtomicU64,
    kind: AtomicU32,
}

static AT_START: AtStart = AtStart {
    is_open: AtomicBool::new(false),
    device: AtomicU64::new(0),
    inode: AtomicU64::new(0),
    rdev: AtomicU64::new(0),
    kind: AtomicU32::new(0),
};

impl AtStart {
    fn get(&self) -> Option<Which> {
        self.is_open.load(Ordering::Acquire).then(|| Which {
            device: self.device.load(Ordering::Relaxed),
            inode: self.inode.load(Ordering::Relaxed),
            rdev: self.rdev.load(Ordering::Relaxed),
            kind: self.kind.load(Ordering::Relaxed),
        })
    }
}

/// Remembers what descriptor 2 is. For the constructor: one call of the kernel.
pub(crate) fn remember_stderr() {
    let Some(now) = Which::of(STDERR) else { return };
    AT_START.device.store(now.device, Ordering::Relaxed);
    AT_START.inode.store(now.inode, Ordering::Relaxed);
    AT_START.rdev.store(now.rdev, Ordering::Relaxed);
    AT_START.kind.store(now.kind, Ordering::Relaxed);
    AT_START.is_open.store(true, Ordering::Release);
}

/// Whether descriptor 2 still is the standard error that the process was started with. In a process that we came to late nobody knows
/// what it was: there only a terminal counts.
pub(crate) fn has_stderr() -> bool {
    stderr().is_some()
}

fn stderr() -> Option<Which> {
    let now = Which::of(STDERR).filter(|now| Some(*now) == AT_START.get())?;
    (!elf::is_late() || is_terminal(STDERR)).then_some(now)
}

/// When something is said.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// A session begins, or does not: whether there is a filter of system calls was found out just now.
    Start,
    /// Later: the program may have put itself into a sandbox since, which kills who makes a call that it does not know.
    Later,
}

/// Says one line to the user. `ring` is the session's, if there is one.
pub(crate) fn say(message: &[u8], ring: Option<Map>, moment: Moment) {
    let may_call = moment == Moment::Start || (kernel::may_use_rare_calls() && may_still_call(ring));
    let line = Text::<LONGEST>::new().add(b"gputrace: ").add(message).add(b"\n");
    let is_said = may_call && tell_stderr(line.as_bytes());
    let is_kept = is_said || ring.is_some_and(|ring| ring.header().notices.push(message));
    if !is_kept && may_call {
        keep_in_file(line.as_bytes());
    }
}

/// A recorder that was killed can look at nothing, and that it was is the one thing that nobody else says: then what it saw last counts.
fn may_still_call(ring: Option<Map>) -> bool {
    let is_dead = |ring: &Map| ring.header().recorder_thread.value.load(Ordering::Acquire) & map::DIED != 0;
    match ring.filter(is_dead) {
        Some(ring) => ring.header().sandbox.state.load(Ordering::Acquire) == map::AS_BEFORE,
        None => own::may_ask(),
    }
}

/// Whether standard error took all of it.
fn tell_stderr(line: &[u8]) -> bool {
    let Some(which) = stderr() else { return false };
    let answer = match which.kind {
        // Not by a duplicate: closing one gives back all locks of the process on the file (fcntl(2)).
        libc::S_IFREG => quietly(|| kernel::write(STDERR, line)),
        libc::S_IFIFO | libc::S_IFSOCK | libc::S_IFCHR => {
            // Another thread may give the number to another file at any time.
            let arguments = [STDERR as usize, libc::F_DUPFD_CLOEXEC as usize, SPARE, 0, 0, 0];
            // SAFETY: takes numbers.
            let Ok(number) = (unsafe { kernel::call(libc::SYS_fcntl, arguments) }) else { return false };
            let file = File::of(number);
            if Which::of(file.number()) != Some(which) {
                return false;
            }
            quietly(|| write_at_once(&file, which, line))
        }
        // An eventfd, a directory, a disk: text is wrong there whoever opened it.
        _ => return false,
    };
    answer == Ok(line.len())
}

/// Writes what can be written without waiting.
fn write_at_once(file: &File, which: Which, line: &[u8]) -> Answer {
    let number = file.number();
    match which.kind {
        libc::S_IFSOCK if kernel::may_use_rare_calls() => {
            let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
            let arguments = [number as usize, line.as_ptr() as usize, line.len(), flags as usize, 0, 0];
            // SAFETY: the kernel reads the line.
            unsafe { kernel::call(libc::SYS_sendto, arguments) }
        }
        // A socket that takes anything has room for far more than a line: a third of its buffer (sock_writeable in net/sock.h).
        libc::S_IFSOCK if is_ready(number) => kernel::write(number, line),
        libc::S_IFIFO if is_ready(number) => match write_nowait(number, line) {
            Err(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::EPERM) => {
                // Through /proc, which may not be there, or show a file of another user: an empty pipe has room for a line.
                write_nonblocking(number, which, line).or_else(|error| match error {
                    libc::EACCES | libc::EPERM | libc::ENOENT if is_empty(number) => {
                        kernel::write(number, line)
                    }
                    error => Err(error),
                })
            }
            answer => answer,
        },
        // Nobody sees what goes to /dev/null.
        libc::S_IFCHR if which.rdev >> 8 & 0xfff == MEMORY_DEVICES => Err(libc::ENODEV),
        // One that the user has stopped (Ctrl-S) is not ready.
        libc::S_IFCHR if is_terminal(number) && is_ready(number) => write_nonblocking(number, which, line),
        _ => Err(libc::EAGAIN),
    }
}

/// `pwritev2(2)` that does not wait.
fn write_nowait(file: c_int, line: &[u8]) -> Answer {
    if !kernel::may_use_rare_calls() {
        return Err(libc::ENOSYS);
    }
    let part = libc::iovec { iov_base: line.as_ptr().cast_mut().cast(), iov_len: line.len() };
    // An offset of -1 is where the file is.
    let arguments = [file as usize, (&raw const part) as usize, 1, usize::MAX, usize::MAX, RWF_NOWAIT];
    // SAFETY: the kernel reads the line.
    unsafe { kernel::call(libc::SYS_pwritev2, arguments) }
}

/// Writes by an open file of its own that does not wait: `O_NONBLOCK` of the program's would hold for the program and for whoever else
/// it shares the file with.
fn write_nonblocking(file: c_int, which: Which, line: &[u8]) -> Answer {
    // SAFETY: takes numbers.
    let flags = unsafe { kernel::call(libc::SYS_fcntl, [file as usize, libc::F_GETFL as usize, 0, 0, 0, 0]) };
    if flags? & libc::O_NONBLOCK as usize != 0 {
        return kernel::write(file, line);
    }
    let path = Text::<64>::new().add(b"/proc/self/fd/").number(file as u64);
    let flags = libc::O_WRONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
    let own = File::open(path.as_c_str(), flags, 0)?;
    if Which::of(own.number()) != Some(which) {
        return Err(libc::ENOENT);
    }
    kernel::write(own.number(), line)
}

/// Whether a write would not wait, and somebody is at the other end. Does not wait itself.
fn is_ready(file: c_int) -> bool {
    let mut wanted = [libc::pollfd { fd: file, events: libc::POLLOUT, revents: 0 }];
    // SAFETY: as many structures as it says, and a time to wait.
    let answer = arch::poll_now(&mut wanted, |number, arguments| unsafe { kernel::call(number, arguments) });
    let [wanted] = wanted;
    answer == Ok(1) && wanted.revents & POLLERR_OR_WORSE == 0 && wanted.revents & libc::POLLOUT != 0
}

/// Whether everything in a pipe was read.
fn is_empty(file: c_int) -> bool {
    let mut left: c_int = -1;
    let arguments = [file as usize, libc::FIONREAD as usize, (&raw mut left) as usize, 0, 0, 0];
    // SAFETY: the kernel writes the number.
    unsafe { kernel::call(libc::SYS_ioctl, arguments) }.is_ok() && left == 0
}

fn is_terminal(file: c_int) -> bool {
    // Larger than the kernel's structure (asm-generic/termbits.h: 36 bytes).
    let mut settings = [0_u64; 16];
    let arguments = [file as usize, libc::TCGETS as usize, settings.as_mut_ptr() as usize, 0, 0, 0];
    // SAFETY: the kernel writes one structure.
    unsafe { kernel::call(libc::SYS_ioctl, arguments) }.is_ok()
}

/// Writes, and keeps from the program the signal that a write raises: SIGPIPE without a reader, SIGXFSZ at the limit of file sizes,
/// SIGTTOU in the background of a terminal with `stty tostop`.
fn quietly(write: impl FnOnce() -> Answer) -> Answer {
    let before = kernel::block_signals(kernel::MOST_SIGNALS);
    let was_pending = pending();
    let answer = write();
    let raised = match answer {
        Err(libc::EPIPE) => libc::SIGPIPE,
        Err(libc::EFBIG) => libc::SIGXFSZ,
        _ => 0,
    };
    if raised != 0 && was_pending & signal_set(raised) == 0 {
        take_back(raised);
    }
    kernel::block_signals(before);
    answer
}

fn signal_set(signal: c_int) -> kernel::SignalSet {
    1 << (signal - 1)
}

/// Signals that the program has blocked and that wait for it; none where that may not be asked.
fn pending() -> kernel::SignalSet {
    let mut set: kernel::SignalSet = 0;
    if kernel::may_use_rare_calls() {
        let arguments = [(&raw mut set) as usize, size_of::<kernel::SignalSet>(), 0, 0, 0, 0];
        // SAFETY: the kernel writes the set.
        let _ = unsafe { kernel::call(libc::SYS_rt_sigpending, arguments) };
    }
    set
}

/// Takes a blocked signal that the kernel has just sent to this thread.
fn take_back(signal: c_int) {
    if kernel::may_use_rare_calls() {
        let (set, no_time) = (signal_set(signal), libc::timespec { tv_sec: 0, tv_nsec: 0 });
        let (set, no_time) = ((&raw const set) as usize, (&raw const no_time) as usize);
        let arguments = [set, 0, no_time, size_of::<kernel::SignalSet>(), 0, 0];
        // SAFETY: the kernel reads a set and a time.
        if unsafe { kernel::call(libc::SYS_rt_sigtimedwait, arguments) } == Ok(signal as usize) {
            return;
        }
    }
    // Under a filter we come here only if the reader went away between two calls. To ignore a signal throws away those that wait
    // (sigaction(2)). The kernel's own structure (asm-generic/signal.h): handler, flags, restorer, mask.
    let (ignored, mut before) = ([libc::SIG_IGN, 0, 0, 0], [0_usize; 4]);
    let change = |to: *const usize, from: *mut usize| {
        let arguments = [signal as usize, to as usize, from as usize, size_of::<kernel::SignalSet>(), 0, 0];
        // SAFETY: the kernel reads and writes one structure each.
        unsafe { kernel::call(libc::SYS_rt_sigaction, arguments) }
    };
    if change(ignored.as_ptr(), before.as_mut_ptr()).is_ok() {
        let _ = change(before.as_ptr(), core::ptr::null_mut());
    }
}

/// Where nobody hears us and there is no ring: a file of the user's. Children of this process add none.
fn keep_in_file(line: &[u8]) {
    static IS_MADE: AtomicBool = AtomicBool::new(false);
    if IS_MADE.swap(true, Ordering::Relaxed) || kernel::limit(libc::RLIMIT_FSIZE) < LONGEST as u64 {
        return;
    }
    for folder in [c"/dev/shm/", c"/tmp/"].map(CStr::to_bytes) {
        let path =
            Text::<64>::new().add(folder).add(b"gputrace.").number(kernel::process_id().into()).add(b".");
        let path = path.number(gputrace_ring::clock::nanos(libc::CLOCK_MONOTONIC)).add(b".log");
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        let Ok(file) = File::open(path.as_c_str(), flags, 0o600) else { continue };
        if quietly(|| kernel::write(file.number(), line)) == Ok(line.len()) {
            return;
        }
        ring_file::remove(path.as_c_str());
    }
}
