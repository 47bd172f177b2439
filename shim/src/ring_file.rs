//! The shared file: where it is made, how large it may be, and how it is told from others.

use crate::kernel::{self, File};
use crate::sys::{self, Text};
use crate::{config, room};
use core::ffi::{CStr, c_int};
use core::mem::MaybeUninit;
use gputrace_ring::clock::Clock;
use gputrace_ring::map::{self, Map};
use gputrace_ring::ring::Reader;

/// Bytes of the ring where nobody says otherwise: eight seconds of 100,000 events a second, should the recorder be
/// kept from running.
const RING_BYTES: u64 = 32 << 20;
/// The least a ring is worth making for.
const LEAST_RING_BYTES: u64 = 1 << 20;
/// The most, whatever is asked for: a recorder must map it.
const MOST_RING_BYTES: u64 = 64 << 30;
/// Bytes that have memory before the recorder gives the rest its own: a chunk for each thread that there can be. The kernel takes 0.3 ms
/// of a processor to clear and free 1 MiB, which is what most of a short program's recording used to cost. Threads cannot give the
/// ring more when they come (`MADV_POPULATE_WRITE`): by then the program may be under a sandbox that nobody has seen yet.
const FIRST_BYTES: u64 = 17 << 20;
const _: () = assert!(Map::chunks_in(FIRST_BYTES as usize) as usize >= map::MAX_THREADS);
/// The same where the user asks for a size: for bursts, which do not wait for the recorder.
const FIRST_BYTES_ASKED: u64 = 256 << 20;
/// Shared memory of less than this (containers often have 64 MiB) is left to the program: where none is free, a write of its own is a
/// SIGBUS. Eight processes with a ring each take a quarter of this.
const SCARCE_BYTES: u64 = 1 << 30;

/// A new ring.
pub(crate) struct Ring {
    pub(crate) map: Map,
    /// What the user and the recorder know it by.
    pub(crate) path: Text<128>,
    /// Open until the recorder has it, or for ever where it has no name that stays.
    pub(crate) file: Option<File>,
    /// The descriptor is the only way to it.
    pub(crate) is_memory: bool,
    /// Its path leads nowhere until [`Ring::named`].
    is_nameless: bool,
    pub(crate) identity: Identity,
}

/// Where a ring may be.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Places {
    All,
    /// In `/dev/shm`, with a name: its descriptor need not be the process's own.
    Shared,
}

/// What the ring says of the process; for a thread of it.
pub(crate) fn writer() -> map::Writer {
    map::Writer { pid: kernel::process_id(), start_time: start_time(), pid_namespace: pid_namespace() }
}

/// Which file it is, whatever its name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// Of an open file.
    pub(crate) fn of(file: &File) -> Option<Identity> {
        let mut facts = MaybeUninit::<libc::stat64>::zeroed();
        let arguments = [file.number() as usize, facts.as_mut_ptr() as usize, 0, 0, 0, 0];
        // SAFETY: the kernel writes one structure.
        unsafe { kernel::call(libc::SYS_fstat, arguments) }.ok()?;
        // SAFETY: the kernel has just written it.
        Some(Identity::from(unsafe { facts.assume_init_ref() }))
    }

    fn from(facts: &libc::stat64) -> Identity {
        Identity { device: facts.st_dev, inode: facts.st_ino }
    }
}

impl Ring {
    /// A ring that this clock stamps, with a name that no other of this process has.
    pub(crate) fn make(clock: Clock, writer: map::Writer, places: Places) -> Result<Ring, &'static [u8]> {
        let wanted = config::RING_BYTES.number();
        let first = if wanted.is_some() { FIRST_BYTES_ASKED } else { FIRST_BYTES };
        let mut wanted = wanted.unwrap_or(RING_BYTES).clamp(LEAST_RING_BYTES, MOST_RING_BYTES);
        if wanted > RING_BYTES {
            wanted = wanted.min(room::quarter_of_memory()).max(LEAST_RING_BYTES);
        }
        // A file that grows beyond it is no error but a signal, which ends programs.
        let limit = kernel::limit(libc::RLIMIT_FSIZE);
        if limit < LEAST_RING_BYTES {
            return Err(b"the limit of file sizes (ulimit -f) leaves no room for the ring (1 MiB is enough)");
        }
        let wanted = Wanted { bytes: wanted.min(limit), first };
        let now = clock.now().0;
        let name = Text::<128>::new()
            .add(b"gputrace.")
            .number(writer.pid.into())
            .add(b".")
            .number(now)
            .add(b".ring");
        let is_all = places == Places::All;
        let shared = |least| Ring::in_folder(b"/dev/shm/", least, &name, is_all, wanted, writer, clock);
        if !is_all {
            return shared(0).ok_or(b"no room for the ring in /dev/shm (1 MiB is enough)");
        }
        shared(SCARCE_BYTES)
            .or_else(|| Ring::in_memory(wanted, writer, clock))
            .or_else(|| shared(0))
            .or_else(|| Ring::in_folder(b"/tmp/", 0, &name, is_all, wanted, writer, clock))
            .ok_or(b"no room for the ring in /dev/shm, in memory or in /tmp (1 MiB is enough)")
    }

    /// A file with a name, so that a recorder that comes later finds it (`gputrace recover`). Whoever may truncate it can end the
    /// process, by SIGBUS at the next write: the same user, who may as well kill it, and root. A seal against that
    /// (`F_SEAL_SHRINK`) exists for memory files only, which are gone with the process that is to be recovered. `allocate`
    /// sees to it that no full file system does the same. Nothing in a file system of fewer than `least` bytes. A file that `may_be_nameless`
    /// gets its name later, where the kernel can do that: it is gone with a program that ends before.
    fn in_folder(
        folder: &[u8],
        least: u64,
        name: &Text<128>,
        may_be_nameless: bool,
        wanted: Wanted,
        writer: map::Writer,
        clock: Clock,
    ) -> Option<Ring> {
        let path = Text::<128>::new().add(folder).add(name.as_bytes());
        if path.is_full() {
            return None;
        }
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_NOFOLLOW;
        let nameless = (may_be_nameless && kernel::may_use_rare_calls())
            .then(|| Text::<128>::new().add(folder))
            .and_then(|folder| File::open(folder.as_c_str(), libc::O_RDWR | libc::O_TMPFILE, 0o600).ok());
        let is_nameless = nameless.is_some();
        let file = nameless.or_else(|| File::open(path.as_c_str(), flags, 0o600).ok())?;
        let is_large = least == 0 || space(&file).whole >= least;
        match is_large.then(|| fill(&file, wanted, writer, clock).zip(Identity::of(&file))).flatten() {
            Some((map, identity)) => {
                Some(Ring { map, path, file: Some(file), is_memory: false, is_nameless, identity })
            }
            None => {
                // We made the file, and nobody can use it.
                if !is_nameless {
                    remove(path.as_c_str());
                }
                None
            }
        }
    }

    /// Gives it its name, if it has none: from now on there may be something in it that must be found. Where that is refused, it is like
    /// a memory file.
    pub(crate) fn named(self) -> Ring {
        let number = match &self.file {
            Some(file) if self.is_nameless => file.number() as u64,
            _ => return self,
        };
        let link = |name: &[u8]| Text::<128>::new().add(b"/proc/").add(name).add(b"/fd/").number(number);
        let (from, here) = (link(b"thread-self"), libc::AT_FDCWD as usize);
        let (from_at, to_at) = (from.as_c_str().as_ptr() as usize, self.path.as_c_str().as_ptr() as usize);
        let arguments = [here, from_at, here, to_at, libc::AT_SYMLINK_FOLLOW as usize, 0];
        // SAFETY: both paths end with a zero.
        if unsafe { kernel::call(libc::SYS_linkat, arguments) }.is_ok() {
            return Ring { is_nameless: false, ..self };
        }
        let path = Text::new().add(b"/proc/").number(kernel::process_id().into()).add(b"/fd/").number(number);
        Ring { path, is_memory: true, is_nameless: false, ..self }
    }

    fn in_memory(wanted: Wanted, writer: map::Writer, clock: Clock) -> Option<Ring> {
        if !kernel::may_use_rare_calls() {
            return None;
        }
        let arguments = [c"gputrace".as_ptr() as usize, libc::MFD_CLOEXEC as usize, 0, 0, 0, 0];
        // SAFETY: the name ends with a zero.
        let file = File::of(unsafe { kernel::call(libc::SYS_memfd_create, arguments) }.ok()?);
        // Its file system has no end of its own.
        let wanted = Wanted { bytes: wanted.bytes.min(room::quarter_of_memory()), ..wanted };
        let map = fill(&file, wanted, writer, clock)?;
        let identity = Identity::of(&file)?;
        let path =
            Text::new().add(b"/proc/").number(writer.pid.into()).add(b"/fd/").number(file.number() as u64);
        Some(Ring { map, path, file: Some(file), is_memory: true, is_nameless: false, identity })
    }
}

/// How large a ring should be.
#[derive(Clone, Copy)]
struct Wanted {
    bytes: u64,
    /// How much of it has memory from the start.
    first: u64,
}

/// Makes a new file a ring.
fn fill(file: &File, wanted: Wanted, writer: map::Writer, clock: Clock) -> Option<Map> {
    let bytes = wanted.bytes.min(space(file).quarter);
    if bytes < LEAST_RING_BYTES {
        return None;
    }
    let n_chunks = Map::chunks_in(usize::try_from(bytes).ok()?);
    let n_first = Map::chunks_in(usize::try_from(bytes.min(wanted.first)).ok()?).min(n_chunks);
    let bytes = Map::bytes_for(n_chunks);
    // Without memory a full file system would be a SIGBUS in the middle of somebody's training.
    let n_usable = match allocate(file, Map::bytes_before(n_chunks, n_first), bytes)? {
        Allocated::First => n_first,
        Allocated::All => n_chunks,
    };
    let base = kernel::map_shared(file, bytes)?;
    // SAFETY: the file keeps its zeros.
    let _ = unsafe { kernel::unlock(base, bytes) };
    // SAFETY: the file is new, so the mapping is zero, as long as asked, and never unmapped. So many chunks have memory.
    let map = unsafe { Map::create_in_part(base, n_chunks, n_usable, writer, clock) };
    if lock(file) {
        map.header().lock.store(map::LOCKED, core::sync::atomic::Ordering::Release);
    }
    Some(map)
}

/// Bytes of a ring's file system.
struct Space {
    whole: u64,
    /// That a ring may take: a quarter of what is free.
    quarter: u64,
}

fn space(file: &File) -> Space {
    let mut space = MaybeUninit::<libc::statfs>::zeroed();
    let arguments = [file.number() as usize, space.as_mut_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: the kernel writes one structure.
    let is_known = unsafe { kernel::call(libc::SYS_fstatfs, arguments) }.is_ok();
    // SAFETY: zeros, or what the kernel wrote.
    let space = unsafe { space.assume_init() };
    // A memory file says that it has no blocks at all.
    if is_known && space.f_blocks > 0 {
        let bytes = |blocks: u64| blocks.saturating_mul(space.f_bsize as u64);
        Space { whole: bytes(space.f_blocks), quarter: bytes(space.f_bavail) / 4 }
    } else {
        Space { whole: u64::MAX, quarter: u64::MAX }
    }
}

/// Gives the whole ring memory where nobody else will: no recorder could be started.
pub(crate) fn allocate_rest(file: &File, map: &Map) {
    let (n_chunks, number) = (map.n_chunks(), file.number() as usize);
    if map.n_usable() < n_chunks {
        let (from, to) = (Map::bytes_before(n_chunks, map.n_usable()), Map::bytes_for(n_chunks));
        // SAFETY: changes the file and nothing else. Only rings of which a part was allocated by this call come here.
        if unsafe { kernel::call(libc::SYS_fallocate, [number, 0, from, to - from, 0, 0]) }.is_ok() {
            Reader::new(*map).grow(n_chunks);
        }
    }
}

/// How much of a file has memory.
enum Allocated {
    First,
    All,
}

/// Makes the file `bytes` long, and gives it pages, all zero: the first so many bytes, or all.
fn allocate(file: &File, first: usize, bytes: usize) -> Option<Allocated> {
    let number = file.number() as usize;
    if kernel::may_use_rare_calls() {
        // SAFETY: changes the file and nothing else.
        match unsafe { kernel::call(libc::SYS_fallocate, [number, 0, 0, first, 0, 0]) } {
            Ok(_) => {
                // SAFETY: as above.
                let is_long =
                    unsafe { kernel::call(libc::SYS_ftruncate, [number, bytes, 0, 0, 0, 0]) }.is_ok();
                return is_long.then_some(Allocated::First);
            }
            // This file system, or this sandbox, has no such thing.
            Err(libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM) => {}
            Err(_) => return None,
        }
    }
    let zeros = [0_u8; 1024];
    let mut at = 0;
    while at < bytes {
        match kernel::write(file.number(), zeros.get(..zeros.len().min(bytes - at)).unwrap_or_default()) {
            Ok(n) if n > 0 => at += n,
            Err(libc::EINTR) => {}
            Ok(_) | Err(_) => return None,
        }
    }
    Some(Allocated::All)
}

/// Has the kernel tell everybody, other PID namespaces included, that somebody maps the ring: a lock of the open file
/// description, which a mapping keeps (fcntl(2), Open file description locks; Linux 3.15).
fn lock(file: &File) -> bool {
    if !kernel::may_use_rare_calls() {
        return false;
    }
    let mut lock = MaybeUninit::<libc::flock64>::zeroed();
    // SAFETY: zeros are a value: the whole file, from its start.
    let whole = unsafe { lock.assume_init_mut() };
    whole.l_type = libc::F_RDLCK as i16;
    whole.l_whence = libc::SEEK_SET as i16;
    let arguments = [file.number() as usize, libc::F_OFD_SETLK as usize, lock.as_ptr() as usize, 0, 0, 0];
    // SAFETY: the kernel reads the structure.
    unsafe { kernel::call(libc::SYS_fcntl, arguments) }.is_ok()
}

pub(crate) fn remove(path: &CStr) {
    let arguments = [libc::AT_FDCWD as usize, path.as_ptr() as usize, 0, 0, 0, 0];
    // SAFETY: the path ends with a zero.
    let _ = unsafe { kernel::call(libc::SYS_unlinkat, arguments) };
}

/// Field 22 of `/proc/self/stat` (proc(5)): when the process started, in clock ticks since boot; 0 if unreadable.
fn start_time() -> u64 {
    let mut buffer = [0_u8; 1024];
    let n = sys::read_file(c"/proc/self/stat", &mut buffer);
    let text = buffer.get(..n).unwrap_or_default();
    // The second field is the name in parentheses, which may hold spaces and parentheses itself.
    let after_name = text.iter().rposition(|byte| *byte == b')').map_or(0, |at| at + 2);
    let field = text.get(after_name..).unwrap_or_default().split(|byte| *byte == b' ').nth(22 - 3);
    field
        .unwrap_or_default()
        .iter()
        .fold(0_u64, |sum, digit| sum.wrapping_mul(10).wrapping_add(u64::from(digit.wrapping_sub(b'0'))))
}

/// Inode of the PID namespace; 0 if it cannot be asked for.
fn pid_namespace() -> u64 {
    match inode(c"/proc/thread-self/ns/pid", 0) {
        // Before Linux 3.17.
        0 => inode(c"/proc/self/ns/pid", 0),
        namespace => namespace,
    }
}

/// Whether children of this process will be in another PID namespace than itself (`unshare(CLONE_NEWPID)`,
/// pid_namespaces(7)). No, where that cannot be found out.
pub(crate) fn has_namespace_for_children() -> bool {
    // This thread's: `/proc/self` is that of the one that began the process, and may be over.
    let (own, of_children) = (pid_namespace(), c"/proc/thread-self/ns/pid_for_children");
    // Before the first child there is no such namespace: then the link is there (Linux 4.12), and leads nowhere.
    own != 0 && inode(of_children, 0) != own && inode(of_children, libc::AT_SYMLINK_NOFOLLOW) != 0
}

/// Inode of a file; 0 if it cannot be asked for.
fn inode(path: &CStr, flags: c_int) -> u64 {
    let mut facts = MaybeUninit::<libc::stat64>::zeroed();
    let (path, into) = (path.as_ptr() as usize, facts.as_mut_ptr() as usize);
    let arguments = [libc::AT_FDCWD as usize, path, into, flags as usize, 0, 0];
    // SAFETY: the path ends with a zero, and the kernel writes one structure.
    match unsafe { kernel::call(libc::SYS_newfstatat, arguments) } {
        // SAFETY: the kernel has just written it.
        Ok(_) => Identity::from(unsafe { facts.assume_init_ref() }).inode,
        Err(_) => 0,
    }
}

/// Whether nobody holds the lock of this ring's file, as a recorder does for as long as it lives. No, where that cannot be
/// found out.
pub(crate) fn is_unlocked(path: &CStr, identity: Identity) -> bool {
    // A file of this name may be another one by now, of any kind.
    let flags = libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY;
    let Ok(file) = File::open(path, flags, 0) else { return false };
    if Identity::of(&file) != Some(identity) {
        return false;
    }
    let wish: c_int = libc::LOCK_SH | libc::LOCK_NB;
    // Closing the file gives the lock back, if we have it.
    // SAFETY: takes numbers.
    unsafe { kernel::call(libc::SYS_flock, [file.number() as usize, wish as usize, 0, 0, 0, 0]) }.is_ok()
}
