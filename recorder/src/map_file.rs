//! The ring's file in our memory, and files of symbols. With `memory`, the only file of this crate with `unsafe`.
#![allow(unsafe_code)]

use crate::Error;
use crate::opened::{self, Access, Expected, Links};
use gputrace_ring::map::{Header, LOCKED, Map, NotARing};
use memmap2::{Mmap, MmapOptions, MmapRaw};
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Larger files are not rings: each byte of a ring is allocated when it is made, and so many would hold an hour of events.
const MOST_BYTES: u64 = 64 << 30;

/// A mapped ring. [`Map`]s taken from it must not outlive it.
pub(crate) struct MapFile {
    map: Map,
    path: PathBuf,
    /// By which the process's own mapping of the file is known.
    inode: u64,
    bytes: usize,
    file: File,
    /// Whoever drains the ring holds this file's lock, which the kernel gives back however the holder ends.
    lockable: Lockable,
    guard: Guarded,
    _memory: MmapRaw,
}

/// How long a recorder waits for the lock of another, and how long between two tries.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Whether a lock of the file would be ours alone. It belongs to an open file description: one of a description that
/// the process shares with us would outlive us for as long as the process maps the ring, and then nobody could take over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lockable {
    Ours,
    Shared,
}

/// Whether the process still maps the ring ([`LOCKED`]).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum WriterLock {
    Held,
    Free,
    /// It never took the lock, or we cannot ask.
    Unknown,
}

impl MapFile {
    /// Maps a ring's file; also `/proc/PID/fd/N`.
    pub(crate) fn open(path: &Path) -> Result<MapFile, Error> {
        let io = |source| Error::Ring { ring: path.to_owned(), source };
        let file = open_again(path).map_err(|why| match why {
            opened::Unexpected::System { source, .. } => io(source),
            opened::Unexpected::Differs { what, .. } => Error::NotARing { ring: path.to_owned(), what },
        })?;
        let metadata = file.metadata().map_err(io)?;
        let (owner, us) = (metadata.uid(), rustix::process::geteuid().as_raw());
        if owner != us {
            return Err(Error::NotYours { ring: path.to_owned(), owner, us });
        }
        MapFile::of(path, file, Lockable::Ours)
    }

    /// Maps the ring that whoever started us left open as this descriptor. `path` is for what must be said.
    pub(crate) fn inherit(path: &Path, number: RawFd) -> Result<MapFile, Error> {
        let io = |source| Error::Ring { ring: path.to_owned(), source };
        let file = File::from(inherited(number).ok_or_else(|| io(io::Error::from(io::ErrorKind::NotFound)))?);
        let metadata = file.metadata().map_err(io)?;
        check_kind(path, &metadata)?;
        let is_it = |other: &File| {
            other.metadata().is_ok_and(|other| (other.dev(), other.ino()) == (metadata.dev(), metadata.ino()))
        };
        // Our own table of descriptors, so nothing else can be there now. Without `/proc`, the ring's name, which may lead
        // to another file by now; a name under `/proc` is one of another process's table.
        let by_number = open_again(&Path::new("/proc/self/fd").join(number.to_string())).ok();
        let by_name = || if path.starts_with("/proc") { None } else { open_again(path).ok() };
        match by_number.filter(is_it).or_else(|| by_name().filter(is_it)) {
            Some(own) => MapFile::of(path, own, Lockable::Ours),
            // Whoever looks for the lock cannot open the file either.
            None => MapFile::of(path, file, Lockable::Shared),
        }
    }

    fn of(path: &Path, file: File, lockable: Lockable) -> Result<MapFile, Error> {
        let io = |source| Error::Ring { ring: path.to_owned(), source };
        let metadata = file.metadata().map_err(io)?;
        check_kind(path, &metadata)?;
        let bytes = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        // `Map::open` looks at one page before it knows the length.
        if bytes < Map::bytes_for(1) {
            return Err(not_a_ring(path, NotARing::TooShort { expected: Map::bytes_for(1) }));
        }
        // A raw mapping makes no reference to memory that the process writes to.
        let memory = MmapOptions::new().len(bytes).map_raw(&file).map_err(io)?;
        let guard = Guarded::new(memory.as_mut_ptr() as usize, bytes);
        // SAFETY: the mapping is page aligned, `bytes` long, writable, and kept beside the map for as long as it.
        let map = unsafe { Map::open(memory.as_mut_ptr(), bytes) }.map_err(|why| not_a_ring(path, why))?;
        let (path, inode) = (path.to_owned(), metadata.ino());
        Ok(MapFile { map, path, inode, bytes, file, lockable, guard, _memory: memory })
    }

    /// Makes this the ring's only recorder, until dropped. Waits a moment for another one: a recorder that was killed keeps the lock until the
    /// kernel has taken it down, and `gputrace recover` has it until it finds that the process lives.
    pub(crate) fn lock(&self) -> Result<(), Error> {
        if self.lockable == Lockable::Shared {
            return Ok(());
        }
        let began = Instant::now();
        loop {
            match self.file.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::WouldBlock) if began.elapsed() < LOCK_PATIENCE => {
                    std::thread::sleep(LOCK_PAUSE)
                }
                Err(TryLockError::WouldBlock) => {
                    let pid = self.header().pid.load(Ordering::Relaxed);
                    return Err(Error::Busy { ring: self.path.clone(), pid });
                }
                Err(TryLockError::Error(source)) => {
                    return Err(Error::Ring { ring: self.path.clone(), source });
                }
            }
        }
    }

    /// Whether the process, or a forked child of it, still maps the ring. The lock is seen from other namespaces too.
    pub(crate) fn writer_lock(&self) -> WriterLock {
        if self.lockable == Lockable::Shared || self.header().lock.load(Ordering::Relaxed) != LOCKED {
            return WriterLock::Unknown;
        }
        match range_lock(&self.file, libc::F_OFD_GETLK, libc::F_WRLCK) {
            Some(found) if found == libc::F_UNLCK => WriterLock::Free,
            Some(_) => WriterLock::Held,
            None => WriterLock::Unknown,
        }
    }

    /// Whether somebody has cut the file: what was in it is lost.
    pub(crate) fn is_cut(&self) -> bool {
        let is_short = |data: fs::Metadata| data.len() < self.bytes as u64;
        self.guard.has_faulted() || self.file.metadata().is_ok_and(is_short)
    }

    pub(crate) fn map(&self) -> Map {
        self.map
    }

    pub(crate) fn header(&self) -> &Header {
        self.map.header()
    }

    /// Gives the memory behind the ring back, but for its header. Where the library sleeps, the process keeps the mapping: a
    /// thread that was interrupted in its last record may still write there.
    pub(crate) fn free_memory(&self) {
        let header = 4096;
        if let Ok(bytes) = self.file.metadata().map(|data| data.len()) {
            let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            // Where that cannot be done, the memory stays taken until the process ends.
            let _ = rustix::fs::fallocate(&self.file, hole, header, bytes.saturating_sub(header));
        }
    }

    /// Gives the file memory for these bytes of it: all, or none of them are used.
    pub(crate) fn allocate(&self, from: u64, bytes: u64) -> bool {
        rustix::fs::fallocate(&self.file, rustix::fs::FallocateFlags::empty(), from, bytes).is_ok()
    }

    /// Bytes that the ring's file system has free; `None` where it does not say.
    pub(crate) fn free_space(&self) -> Option<u64> {
        let facts = rustix::fs::fstatfs(&self.file).ok().filter(|facts| facts.f_blocks > 0)?;
        Some(facts.f_bavail.saturating_mul(u64::try_from(facts.f_bsize).ok()?))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }
}

/// Opens a file for ourselves. A name that anybody could have made must not lead elsewhere, nor make us wait.
fn open_again(path: &Path) -> Result<File, opened::Unexpected> {
    let links = if path.starts_with("/proc") { Links::Followed } else { Links::Refused };
    let expected = Expected::regular().with_one_name().with_bytes(0..=MOST_BYTES);
    opened::opened(path, links, Access::ReadWrite, &expected)
}

fn check_kind(path: &Path, metadata: &fs::Metadata) -> Result<(), Error> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(Error::NotARing { ring: path.to_owned(), what: "it is not a regular file".to_owned() })
}

/// Takes over a descriptor that whoever started us left open. `None` if there is none of that number.
pub(crate) fn inherited(number: RawFd) -> Option<OwnedFd> {
    // The first three are everybody's.
    // SAFETY: asks for the descriptor's flags, and changes nothing.
    if number < 3 || unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: it is open, and its number came from the command line, by which it was given to us and nobody else.
    Some(unsafe { OwnedFd::from_raw_fd(number) })
}

/// A file that is read in place: one of symbols, which can be gigabytes long.
pub(crate) struct Mapped {
    _guard: Guarded,
    memory: Mmap,
}

impl Mapped {
    /// Maps the whole file.
    ///
    /// # Errors
    /// It is not a regular file, the system does not let us, or as many are mapped as can be guarded.
    pub(crate) fn open(path: &Path) -> io::Result<Mapped> {
        Mapped::of(&opened::opened(path, Links::Followed, Access::Read, &Expected::regular())?)
    }

    /// Maps the whole of a file that was opened as a regular one.
    pub(crate) fn of(file: &File) -> io::Result<Mapped> {
        // SAFETY: the mapping is private to us and only read. Somebody may write to the file meanwhile, which changes what we read:
        // every reader of it checks what it finds. Pages behind a new end are replaced ([`Guarded`]).
        let memory = unsafe { Mmap::map(file) }?;
        let guard = Guarded::new(memory.as_ptr() as usize, memory.len());
        if guard.slot.is_none() {
            return Err(io::Error::other("too many files are mapped at once"));
        }
        Ok(Mapped { _guard: guard, memory })
    }

    /// What is in it.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory
    }
}

/// Marks a trace as one that is being written, until its file is closed. A lock for writing needs a descriptor that may write, so who can
/// only read the trace cannot make others wait for it; `flock(2)` asks for nothing. Not everywhere there are locks, and nothing else
/// depends on this one.
pub(crate) fn mark_as_written(trace: &File) {
    let _ = range_lock(trace, libc::F_OFD_SETLK, libc::F_WRLCK);
    // Programs of earlier releases ask for this one.
    let _ = trace.try_lock();
}

/// Whether somebody who may write to the file has marked it.
pub(crate) fn is_marked_as_written(trace: &File) -> bool {
    // Only a lock for writing keeps a reader's away.
    match range_lock(trace, libc::F_OFD_GETLK, libc::F_RDLCK) {
        Some(found) => found == libc::F_WRLCK,
        // A kernel without such locks (gVisor).
        None => matches!(trace.try_lock_shared(), Err(TryLockError::WouldBlock)),
    }
}

/// Sets, or asks for, a lock of the whole file that belongs to this open file (fcntl(2), "Open file description locks"). What the kernel
/// answers: the kind of the lock that is in the way.
fn range_lock(file: &File, command: libc::c_int, kind: libc::c_int) -> Option<libc::c_int> {
    // SAFETY: all zeros are a value of this structure: the whole file, and no process, as these commands want it.
    let mut asked: libc::flock = unsafe { std::mem::zeroed() };
    asked.l_type = kind as libc::c_short;
    // SAFETY: the descriptor is ours, and the kernel writes to nothing but the structure.
    let answer = unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut asked) };
    (answer == 0).then_some(asked.l_type.into())
}

/// Memory of a file that its owner may cut at any moment. The kernel answers an access behind the new end by SIGBUS, which
/// would end us in the middle of the trace: such a page is replaced by an empty one, in which nothing is recorded.
struct Guarded {
    slot: Option<&'static Slot>,
}

#[derive(Default)]
struct Slot {
    /// Where a mapping begins, its length, and whether a page of it has been replaced; a length of 0 is a free slot.
    start: AtomicUsize,
    bytes: AtomicUsize,
    faulted: AtomicBool,
}

/// One ring at a time, but for tests.
static SLOTS: [Slot; 64] = [const {
    Slot { start: AtomicUsize::new(0), bytes: AtomicUsize::new(0), faulted: AtomicBool::new(false) }
}; 64];

/// Bytes of a page.
static PAGE: AtomicUsize = AtomicUsize::new(4096);

impl Guarded {
    fn new(start: usize, bytes: usize) -> Guarded {
        static HANDLE: Once = Once::new();
        HANDLE.call_once(|| {
            // SAFETY: asks for a number.
            let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
            PAGE.store(usize::try_from(page).unwrap_or(4096), Ordering::Relaxed);
            // SAFETY: all zeros are a value of this structure.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            // SAFETY: the handler has the signature that SA_SIGINFO asks for, and does only what a handler may. If this
            // fails, such an access ends us as it would have.
            unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
        });
        let free =
            |slot: &&Slot| slot.bytes.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let slot = SLOTS.iter().find(free);
        if let Some(slot) = slot {
            slot.faulted.store(false, Ordering::Relaxed);
            slot.start.store(start, Ordering::Relaxed);
            slot.bytes.store(bytes, Ordering::Release);
        }
        Guarded { slot }
    }

    fn has_faulted(&self) -> bool {
        self.slot.is_some_and(|slot| slot.faulted.load(Ordering::Relaxed))
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            slot.start.store(0, Ordering::Relaxed);
            slot.bytes.store(0, Ordering::Release);
        }
    }
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes what it says of the signal, which for this one has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    let holds = |slot: &&Slot| {
        let (start, bytes) = (slot.start.load(Ordering::Relaxed), slot.bytes.load(Ordering::Acquire));
        start != 0 && address.wrapping_sub(start) < bytes
    };
    let Some(slot) = SLOTS.iter().find(holds) else {
        // SAFETY: back to what it was; the access is tried again, and ends us.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    };
    slot.faulted.store(true, Ordering::Relaxed);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    // Pages longer than this one are those of huge files, which no ring and no file of symbols is.
    let bytes = PAGE.load(Ordering::Relaxed);
    let page = (address & !(bytes - 1)) as *mut libc::c_void;
    // SAFETY: one page of a mapping that is ours alone and mapped for as long as the slot is taken. A ring has atomics in it, which
    // may have any value; of a file of symbols nothing is believed.
    if unsafe { libc::mmap(page, bytes, access, flags, -1, 0) } == libc::MAP_FAILED {
        // SAFETY: as above.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

fn not_a_ring(path: &Path, why: NotARing) -> Error {
    let what = match why {
        NotARing::TooShort { expected } => {
            format!(
                "it is shorter than the expected {expected} bytes; its process died while creating it, and nothing is lost"
            )
        }
        NotARing::NoMagic => {
            "it does not begin like a ring; if its process died while creating it, nothing is lost".to_owned()
        }
        NotARing::OtherAbi { found } => format!(
            "it was made by another version of gputrace (layout {found}, this is {}); use the gputrace that belongs to that libgputrace.so",
            gputrace_ring::record::ABI
        ),
    };
    Error::NotARing { ring: path.to_owned(), what }
}
