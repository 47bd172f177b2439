//! What the recorder says to the user, and where.
//!
//! Its standard error is the traced program's: the same pipe, terminal or file, which the recorder must neither fill, nor wait for, nor
//! make non-blocking (that flag belongs to the open file, which the two share). So it writes by an open file of its own where it can,
//! and only what is taken without waiting. A message that standard error does not take goes into the trace as a note, and where there is
//! no trace into a file beside the ring.

use gputrace_schemas::printable::printable;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fstat, open};
use rustix::io::{Errno, ReadWriteFlags, ioctl_fionread, pwritev2, write};
use rustix::net::{SendFlags, send};
use std::fs::OpenOptions;
use std::io::{self, IoSlice, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long the reader of a report may take between two parts of it. One line gets no time: it is taken at once or not at all.
const REPORT_PATIENCE: Duration = Duration::from_millis(250);
/// A pipe takes so much at once or nothing (pipe(7), `PIPE_BUF`).
const AT_ONCE: usize = 4096;
/// Most messages that wait for a trace.
const MOST: usize = 64;

/// Messages that standard error did not take.
static UNSAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Says one line to the user.
pub fn say(text: &str) {
    let text = printable(text);
    if !tell_stderr(format!("gputrace: {text}\n").as_bytes(), Duration::ZERO) {
        keep(text.into_owned());
    }
}

/// Says several lines, which are printable already. Where standard error does not take all of them, the trace gets `instead`; not where
/// the user has thrown it away.
pub fn say_report(lines: &[u8], instead: &str) {
    if !is_thrown_away() && !tell_stderr(lines, REPORT_PATIENCE) {
        keep(printable(instead).into_owned());
    }
}

fn keep(text: String) {
    let mut unsaid = UNSAID.lock().unwrap_or_else(PoisonError::into_inner);
    if unsaid.len() < MOST {
        unsaid.push(text);
    }
}

/// Whether standard error is `/dev/null`.
fn is_thrown_away() -> bool {
    // Documentation/admin-guide/devices.txt of Linux.
    const NULL: (u32, u32) = (1, 3);
    fstat(io::stderr()).is_ok_and(|it| {
        FileType::from_raw_mode(it.st_mode) == FileType::CharacterDevice
            && (rustix::fs::major(it.st_rdev), rustix::fs::minor(it.st_rdev)) == NULL
    })
}

/// Messages that standard error did not take, for the trace.
pub(crate) fn take_unsaid() -> Vec<String> {
    std::mem::take(&mut *UNSAID.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Writes what no trace has taken to a file of the user's beside the ring.
pub(crate) fn keep_in_file(ring: &Path) {
    let unsaid = take_unsaid();
    if unsaid.is_empty() {
        return;
    }
    let text: String = unsaid.iter().map(|text| format!("gputrace: {text}\n")).collect();
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    // There is no more that could be done about a failure.
    let _ = names(ring).iter().find_map(|path| options.open(path).ok()?.write_all(text.as_bytes()).ok());
}

/// `gputrace.PID.TICKS.log`, as the ring is called; elsewhere only if that folder takes no file. A ring without a name is a descriptor.
fn names(ring: &Path) -> Vec<PathBuf> {
    let named = ring.file_name().filter(|_| ring.extension().is_some_and(|it| it == "ring"));
    let name = match named {
        Some(name) => Path::new(name).with_extension("log"),
        None => format!("gputrace.{}.{}.log", std::process::id(), crate::ticks::monotonic()).into(),
    };
    let beside = ring.parent().filter(|_| named.is_some()).map(Path::to_owned);
    let folders = beside.into_iter().chain(["/dev/shm".into(), "/tmp".into()]);
    folders.map(|folder| folder.join(&name)).collect()
}

/// Writes to standard error. What stands in a file there already stays: the text goes to its end.
///
/// # Errors
/// Those of writing.
pub fn write_stderr(mut bytes: &[u8]) -> io::Result<()> {
    let stderr = io::stderr();
    if !fstat(&stderr).is_ok_and(|it| FileType::from_raw_mode(it.st_mode) == FileType::RegularFile) {
        return stderr.lock().write_all(bytes);
    }
    while !bytes.is_empty() {
        match append(stderr.as_fd(), bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = bytes.get(n..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Writes at the end of a file, and moves the position that all who share it write at. After `>` the position is where the program
/// stopped: once the program has ended, a script may have appended to the file, and a plain write would overwrite that.
fn append(file: BorrowedFd<'_>, part: &[u8]) -> Result<usize, Errno> {
    // An offset of -1 moves the position (pwritev2(2)). Linux before 4.16, and some file systems, do not know the flag.
    match pwritev2(file, &[IoSlice::new(part)], u64::MAX, ReadWriteFlags::APPEND) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => write(file, part),
        answer => answer,
    }
}

/// Whether standard error took all of it. Waits for its reader no longer than `patience` between two parts, asks for no memory, and
/// raises no signal (Rust's runtime ignores SIGPIPE, and [`crate::limits`] catches SIGXFSZ).
pub(crate) fn tell_stderr(mut bytes: &[u8], patience: Duration) -> bool {
    let stderr = io::stderr();
    let Some(sink) = Sink::of(stderr.as_fd()) else { return false };
    let mut until = Instant::now() + patience;
    while !bytes.is_empty() {
        let part = bytes.get(..AT_ONCE).unwrap_or(bytes);
        match sink.write(part) {
            Ok(0) => return false,
            Ok(n) => {
                bytes = bytes.get(n..).unwrap_or_default();
                until = Instant::now() + patience;
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() || !sink.is_ready(left) {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
    true
}

/// A way to standard error that does not wait.
enum Sink<'a> {
    /// A file on a disk.
    File(BorrowedFd<'a>),
    Socket(BorrowedFd<'a>),
    /// A pipe or a terminal that is open without blocking: by us alone, or by the program's own wish.
    NonBlocking(BorrowedFd<'a>),
    /// A pipe that we may not open again: it belongs to another user, or there is no `/proc`.
    Pipe(BorrowedFd<'a>),
}

impl Sink<'_> {
    /// `None` where nobody would read it, or where a write might wait.
    fn of(stderr: BorrowedFd<'_>) -> Option<Sink<'_>> {
        let facts = fstat(stderr).ok()?;
        // What stands in for a closed one may be a pipe that can only be read.
        if fcntl_getfl(stderr).is_ok_and(|flags| flags & OFlags::ACCMODE == OFlags::RDONLY) {
            return None;
        }
        let is_terminal = || io::stderr().is_terminal();
        match FileType::from_raw_mode(facts.st_mode) {
            FileType::RegularFile => Some(Sink::File(stderr)),
            FileType::Socket => Some(Sink::Socket(stderr)),
            FileType::Fifo => non_blocking(stderr).or(Some(Sink::Pipe(stderr))),
            FileType::CharacterDevice if is_terminal() => non_blocking(stderr),
            _ => None,
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Sink::File(fd) | Sink::Socket(fd) | Sink::NonBlocking(fd) | Sink::Pipe(fd) => *fd,
        }
    }

    fn write(&self, part: &[u8]) -> Result<usize, Errno> {
        match self {
            Sink::File(fd) => append(*fd, part),
            Sink::Socket(fd) => send(fd, part, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            _ if !self.is_ready(Duration::ZERO) => Err(Errno::AGAIN),
            Sink::NonBlocking(fd) => write(fd, part),
            // An offset of -1 is where the file is. Pipes know this flag since Linux 6.4; an empty one has room for a part.
            Sink::Pipe(fd) => match pwritev2(fd, &[IoSlice::new(part)], u64::MAX, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) if ioctl_fionread(fd) == Ok(0) => {
                    write(fd, part)
                }
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Err(Errno::AGAIN),
                answer => answer,
            },
        }
    }

    /// Whether a write would find room within this time, and a reader.
    fn is_ready(&self, within: Duration) -> bool {
        let mut wanted = [PollFd::from_borrowed_fd(self.fd(), PollFlags::OUT)];
        let within = Timespec::try_from(within).ok();
        let found = poll(&mut wanted, within.as_ref()).unwrap_or(0);
        let refused = PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL;
        found == 1 && wanted.iter().all(|it| !it.revents().intersects(refused))
    }
}

/// Standard error by an open file that does not wait.
fn non_blocking(stderr: BorrowedFd<'_>) -> Option<Sink<'_>> {
    static OWN: OnceLock<Option<OwnedFd>> = OnceLock::new();
    if fcntl_getfl(stderr).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
        return Some(Sink::NonBlocking(stderr));
    }
    let own = OWN.get_or_init(|| {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let own = open(c"/proc/self/fd/2", flags, Mode::empty()).ok()?;
        let which = |fd: BorrowedFd<'_>| fstat(fd).map(|it| (it.st_dev, it.st_ino, it.st_rdev));
        (which(own.as_fd()) == which(stderr)).then_some(own)
    });
    own.as_ref().map(|own| Sink::NonBlocking(own.as_fd()))
}
