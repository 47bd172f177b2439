//! Opens paths that another user may change at any moment: names below `/tmp` and `/dev/shm`, and what `/proc/PID` of another
//! process leads to. A look before the open proves nothing, because the name may lead elsewhere by then. So each open here has
//! three steps, and only the last one gives a file that can be read or written:
//!
//! ```text
//! O_PATH            names the file, and has no effect on it (no FIFO is joined, no tape rewound, no lease waited for)
//! statx             of that descriptor: kind, owner, size, links, device, identity
//! /proc/self/fd/N   opens that same file, O_NONBLOCK; its identity is compared once more
//! ```
//!
//! A descriptor of another process is better taken from it than opened (`Descriptors`): the copy gives us no right that
//! the process did not have.

use rustix::fs::{
    AtFlags, MemfdFlags, Mode, OFlags, StatxFlags, fcntl_getfl, fstat, major, makedev, memfd_create, minor,
    open, statx,
};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, socket_timeout};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// Descriptors of one process that are looked at, at most.
const MOST_DESCRIPTORS: usize = 1 << 17;
/// Bytes of a text of `/proc/PID` that are read, at most: `maps` of a process with 65,530 mappings (`vm.max_map_count`) and long
/// paths has fewer.
const MOST_TEXT: u64 = 64 << 20;

/// Why a file was not opened.
#[derive(Debug, thiserror::Error)]
pub enum Unexpected {
    /// The system did not let us.
    #[error("{path}: {source}", path = path.display())]
    System {
        /// The name.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// Another file is there than the one that was expected. It was neither read nor written.
    #[error("{path} was left untouched: {what}", path = path.display())]
    Differs {
        /// The name.
        path: PathBuf,
        /// What differs.
        what: String,
    },
}

impl From<Unexpected> for io::Error {
    fn from(unexpected: Unexpected) -> io::Error {
        match unexpected {
            Unexpected::System { source, .. } => source,
            differs @ Unexpected::Differs { .. } => io::Error::other(differs),
        }
    }
}

/// What a file is to be used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// It is read.
    Read,
    /// It is read and written.
    ReadWrite,
    /// What is written goes to its end.
    Append,
}

/// Whether the last part of a name may be a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Links {
    /// No: the name is one that we chose.
    Refused,
    /// Yes: links of `/proc`, and names that a user or a distribution may have made links.
    Followed,
}

/// What the file must be. Nothing is expected that is not said.
#[derive(Clone, Debug)]
pub struct Expected {
    kind: Kind,
    /// One of these users.
    owners: Option<Vec<u32>>,
    bytes: RangeInclusive<u64>,
    /// Names that it has in its file system, at most.
    most_names: u64,
    identity: Option<Identity>,
    /// Not everybody may write to it.
    is_guarded: bool,
    /// Everybody may read it, or it belongs to one of these users.
    readers: Option<Vec<u32>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// In some file system.
    Regular,
    /// Made by `memfd_create(2)`: in the kernel's own file system for memory, and without a name.
    Memory,
}

/// Which file it is, whatever it is called: device and inode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Identity {
    device: u64,
    inode: u64,
}

/// What the system says of an open file.
struct Facts {
    identity: Identity,
    mode: u32,
    owner: u32,
    bytes: u64,
    n_names: u64,
}

impl Expected {
    /// A regular file.
    #[must_use]
    pub fn regular() -> Expected {
        Expected {
            kind: Kind::Regular,
            owners: None,
            bytes: 0..=u64::MAX,
            most_names: u64::MAX,
            identity: None,
            is_guarded: false,
            readers: None,
        }
    }

    /// A memory file.
    #[must_use]
    pub fn memory() -> Expected {
        Expected { kind: Kind::Memory, ..Expected::regular() }
    }

    /// It belongs to one of these users.
    #[must_use]
    pub fn of(mut self, owners: &[u32]) -> Expected {
        self.owners = Some(owners.to_vec());
        self
    }

    /// It has one name at most: where anybody may make names, another may be that of any file of ours.
    #[must_use]
    pub fn with_one_name(mut self) -> Expected {
        self.most_names = 1;
        self
    }

    /// It has so many bytes.
    #[must_use]
    pub fn with_bytes(mut self, bytes: RangeInclusive<u64>) -> Expected {
        self.bytes = bytes;
        self
    }

    /// It is this file.
    #[must_use]
    pub fn that_is(mut self, identity: Identity) -> Expected {
        self.identity = Some(identity);
        self
    }

    /// Not everybody may write to it.
    #[must_use]
    pub fn guarded(mut self) -> Expected {
        self.is_guarded = true;
        self
    }

    /// These users may read it: it belongs to one of them, or everybody may.
    #[must_use]
    pub fn readable_by(mut self, users: &[u32]) -> Expected {
        self.readers = Some(users.to_vec());
        self
    }

    /// What differs, if anything does.
    fn differs(&self, found: &Facts) -> Option<String> {
        let kind = found.mode & libc::S_IFMT;
        if kind != libc::S_IFREG {
            return Some(format!("it is {}, not a regular file", in_words(kind)));
        }
        if self.identity.is_some_and(|identity| identity != found.identity) {
            return Some("another file has its name now".to_owned());
        }
        if self.kind == Kind::Memory {
            let Some(device) = memory_device() else {
                return Some("this kernel has no memory files (memfd_create) to compare it with".to_owned());
            };
            if found.identity.device != device || found.n_names != 0 {
                return Some(format!(
                    "it is a file of device {}:{} with {} names, not a memory file",
                    major(found.identity.device),
                    minor(found.identity.device),
                    found.n_names
                ));
            }
        }
        if let Some(owners) = self.owners.as_ref().filter(|owners| !owners.contains(&found.owner)) {
            let expected: Vec<String> = owners.iter().map(u32::to_string).collect();
            return Some(format!("it belongs to user {}, not to {}", found.owner, expected.join(" or ")));
        }
        if self.is_guarded && found.mode & libc::S_IWOTH != 0 {
            return Some("every user may write to it".to_owned());
        }
        let readers = self.readers.as_ref().filter(|_| found.mode & libc::S_IROTH == 0);
        if readers.is_some_and(|users| !users.contains(&found.owner) && !users.contains(&0)) {
            return Some("the process's user may not read it".to_owned());
        }
        if found.n_names > self.most_names {
            return Some(format!("it has {} names (hard links)", found.n_names));
        }
        let (least, most) = (self.bytes.start(), self.bytes.end());
        (!self.bytes.contains(&found.bytes))
            .then(|| format!("it has {} bytes; expected {least} to {most}", found.bytes))
    }
}

impl Identity {
    /// Its number in its file system.
    pub(crate) fn inode(self) -> u64 {
        self.inode
    }

    /// Of an open file.
    ///
    /// # Errors
    /// What the system says.
    pub fn of(file: impl AsFd) -> io::Result<Identity> {
        Ok(stat(&file)?.identity)
    }
}

/// Opens a file if it is the expected one. Nothing is read or written before that is known, and nothing waited for.
///
/// # Errors
/// It is another, or the system does not let us.
pub fn opened(path: &Path, links: Links, access: Access, expected: &Expected) -> Result<File, Unexpected> {
    let no = |source: io::Error| Unexpected::System { path: path.to_owned(), source };
    let follow = if links == Links::Refused { OFlags::NOFOLLOW } else { OFlags::empty() };
    let named = open(path, OFlags::PATH | OFlags::CLOEXEC | follow, Mode::empty());
    let named = named.map_err(|error| no(error.into()))?;
    if let Some(users) = &expected.readers
        && let Some(what) = out_of_reach(&named, path, users)
    {
        return Err(Unexpected::Differs { path: path.to_owned(), what });
    }
    again(&named, path, access, expected)
}

/// Why a name is not taken that leads, by links, to a file in a folder which these users may not enter. They may have made the links, to have
/// us read what they cannot. One that is named as it is called was chosen by our caller.
fn out_of_reach(named: &OwnedFd, path: &Path, users: &[u32]) -> Option<String> {
    let real = fs::read_link(format!("/proc/self/fd/{}", named.as_raw_fd())).ok()?;
    if real == path || users.contains(&0) {
        return None;
    }
    let is_closed = |folder: &&Path| {
        let is_open = |data: fs::Metadata| data.mode() & libc::S_IXOTH != 0 || users.contains(&data.uid());
        !fs::metadata(folder).is_ok_and(is_open)
    };
    let folder = real.ancestors().skip(1).find(is_closed)?;
    let (real, folder) = (real.display(), folder.display());
    Some(format!("it leads to {real}, and the process's user may not enter {folder}; to use it, name it so"))
}

/// Opens the file of a descriptor that is ours once more, if it is the expected one.
fn again(descriptor: &OwnedFd, path: &Path, access: Access, expected: &Expected) -> Result<File, Unexpected> {
    let no = |source: io::Error| Unexpected::System { path: path.to_owned(), source };
    let first = check(descriptor, path, expected)?;
    let how = match access {
        Access::Read => OFlags::RDONLY,
        Access::ReadWrite => OFlags::RDWR,
        Access::Append => OFlags::WRONLY | OFlags::APPEND,
    };
    // A lease that somebody holds would be waited for.
    let how = how | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let number = format!("/proc/self/fd/{}", descriptor.as_raw_fd());
    let file = match open(&*number, how, Mode::empty()) {
        // Without `/proc`, by name; which file that is, is asked below.
        Err(Errno::NOENT | Errno::NOTDIR) => open(path, how | OFlags::NOFOLLOW, Mode::empty()),
        answer => answer,
    };
    let file = file.map_err(|error| no(error.into()))?;
    check(&file, path, &expected.clone().that_is(first))?;
    Ok(File::from(file))
}

/// Compares an open file with what is expected.
///
/// # Errors
/// It differs.
pub fn check(file: impl AsFd, path: &Path, expected: &Expected) -> Result<Identity, Unexpected> {
    let path = || path.to_owned();
    let found = stat(&file).map_err(|source| Unexpected::System { path: path(), source })?;
    match expected.differs(&found) {
        Some(what) => Err(Unexpected::Differs { path: path(), what }),
        None => Ok(found.identity),
    }
}

/// Reads a file of at most so many bytes.
///
/// # Errors
/// As [`opened`]; also if it has more bytes.
pub fn read(path: &Path, links: Links, expected: &Expected) -> Result<Vec<u8>, Unexpected> {
    let file = opened(path, links, Access::Read, expected)?;
    let mut bytes = Vec::new();
    // It may have grown since.
    let most = expected.bytes.end().saturating_add(1);
    let no = |source: io::Error| Unexpected::System { path: path.to_owned(), source };
    let n = file.take(most).read_to_end(&mut bytes).map_err(no)?;
    if n as u64 == most {
        let what = format!("it has more than {} bytes", expected.bytes.end());
        return Err(Unexpected::Differs { path: path.to_owned(), what });
    }
    Ok(bytes)
}

/// What a file of `/proc/PID` says, or as much of it as anybody needs: the process may make it as long as it likes.
///
/// # Errors
/// What the system says.
pub fn of_proc(path: impl AsRef<Path>) -> io::Result<Vec<u8>> {
    // Most are shorter, and say beforehand that they are empty: they would be read by 32 bytes, and by more each time.
    let mut bytes = Vec::with_capacity(4096);
    File::open(path)?.take(MOST_TEXT).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The same as text.
///
/// # Errors
/// As [`of_proc`].
pub fn text_of_proc(path: impl AsRef<Path>) -> io::Result<String> {
    of_proc(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// The descriptors of another process.
#[derive(Debug)]
pub(crate) struct Descriptors {
    pid: u32,
    /// Of the process, where the kernel has such descriptors (Linux 5.3).
    process: Option<OwnedFd>,
}

/// A copy of one of them.
pub(crate) struct Taken {
    descriptor: OwnedFd,
    path: PathBuf,
    /// The process itself may write to the file by it.
    is_writable: bool,
}

impl Descriptors {
    pub(crate) fn of(pid: u32) -> Descriptors {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let process = number.and_then(|number| pidfd_open(number, PidfdFlags::empty()).ok());
        Descriptors { pid, process }
    }

    /// The numbers of those whose links begin so. That says nothing of where they lead a moment later.
    ///
    /// # Errors
    /// They may not be looked at.
    pub(crate) fn named(&self, begin: &str) -> io::Result<Vec<u32>> {
        let listed = fs::read_dir(self.folder())?.take(MOST_DESCRIPTORS).flatten();
        let is_it = |path: &Path| {
            fs::read_link(path)
                .is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(begin.as_bytes()))
        };
        let named = listed.filter(|entry| is_it(&entry.path()));
        Ok(named.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
    }

    /// What the link of this one says.
    pub(crate) fn path(&self, number: u32) -> Option<String> {
        let to = fs::read_link(self.folder().join(number.to_string())).ok()?;
        Some(to.to_string_lossy().into_owned())
    }

    /// A copy of this one, whatever it is: by pidfd_getfd(2) (Linux 5.6), for which the kernel asks for a debugger's rights.
    /// Else by its link, as a name of the file.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn take(&self, number: u32) -> Result<Taken, Unexpected> {
        let path = self.folder().join(number.to_string());
        let copy = self.process.as_ref().and_then(|process| {
            pidfd_getfd(process, i32::try_from(number).ok()?, PidfdGetfdFlags::empty()).ok()
        });
        if let Some(descriptor) = copy {
            let flags = fcntl_getfl(&descriptor).unwrap_or(OFlags::PATH);
            let is_writable = !flags.contains(OFlags::PATH) && flags & OFlags::RWMODE == OFlags::RDWR;
            return Ok(Taken { descriptor, path, is_writable });
        }
        let named = open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let no = |error: Errno| Unexpected::System { path: path.clone(), source: error.into() };
        Ok(Taken { descriptor: named.map_err(no)?, path, is_writable: false })
    }

    fn folder(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd", self.pid))
    }
}

impl Taken {
    /// The file, opened for us alone: its offset, its flags and its locks are not the process's.
    ///
    /// # Errors
    /// It is not the expected one.
    pub(crate) fn open(&self, access: Access, expected: &Expected) -> Result<File, Unexpected> {
        again(&self.descriptor, &self.path, access, expected)
    }

    /// The file by the process's own open descriptor, where that may be read and written: to write to it is nothing that the
    /// process could not do. Else as [`Taken::open`].
    ///
    /// # Errors
    /// It is not the expected one.
    pub(crate) fn shared(self, expected: &Expected) -> Result<File, Unexpected> {
        if !self.is_writable {
            return self.open(Access::ReadWrite, expected);
        }
        check(&self.descriptor, &self.path, expected)?;
        Ok(File::from(self.descriptor))
    }

    /// How long a socket waits for what it receives at most (`SO_RCVTIMEO`); `None` for ever.
    ///
    /// # Errors
    /// It is not a socket (`ENOTSOCK`), or the kernel does not say.
    pub(crate) fn receives_for(&self) -> Result<Option<Duration>, Errno> {
        socket_timeout(&self.descriptor, Timeout::Recv)
    }

    /// Which file it is.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn identity(&self) -> io::Result<Identity> {
        Identity::of(&self.descriptor)
    }

    /// Whether the process may write to the file by it.
    pub(crate) fn is_writable(&self) -> bool {
        self.is_writable
    }
}

/// The users that a process acts as: real, effective, saved, and that of its files. Empty where it is gone.
#[must_use]
pub fn users_of(pid: u32) -> Vec<u32> {
    let status = text_of_proc(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    line.split_ascii_whitespace().filter_map(|user| user.parse().ok()).collect()
}

/// Where the kernel keeps memory files. It is the same for all processes.
fn memory_device() -> Option<u64> {
    static DEVICE: OnceLock<Option<u64>> = OnceLock::new();
    *DEVICE.get_or_init(|| {
        let own = memfd_create("gputrace", MemfdFlags::CLOEXEC).ok()?;
        Some(Identity::of(own).ok()?.device)
    })
}

/// Does not ask a server of files (NFS, FUSE), which may belong to whoever wants us to wait.
fn stat(file: &impl AsFd) -> io::Result<Facts> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    match statx(file.as_fd(), "", flags, StatxFlags::BASIC_STATS) {
        Ok(found) => Ok(Facts {
            identity: Identity {
                device: makedev(found.stx_dev_major, found.stx_dev_minor),
                inode: found.stx_ino,
            },
            mode: found.stx_mode.into(),
            owner: found.stx_uid,
            bytes: found.stx_size,
            n_names: found.stx_nlink.into(),
        }),
        // Linux before 4.11, and sandboxes that do not know the call.
        Err(Errno::NOSYS | Errno::PERM) => {
            let found = fstat(file)?;
            Ok(Facts {
                identity: Identity { device: found.st_dev, inode: found.st_ino },
                mode: found.st_mode,
                owner: found.st_uid,
                bytes: u64::try_from(found.st_size).unwrap_or(0),
                n_names: found.st_nlink as u64,
            })
        }
        Err(error) => Err(error.into()),
    }
}

fn in_words(kind: u32) -> &'static str {
    match kind {
        libc::S_IFDIR => "a folder",
        libc::S_IFIFO => "a FIFO",
        libc::S_IFSOCK => "a socket",
        libc::S_IFLNK => "a link",
        libc::S_IFCHR | libc::S_IFBLK => "a device",
        _ => "something else",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
    use std::process::Command;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    struct Folder(PathBuf);

    impl Folder {
        fn new() -> Folder {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let name =
                format!("gputrace-opened-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            fs::create_dir(&path).expect("writable");
            Folder(path)
        }

        fn file(&self, name: &str, text: &str) -> PathBuf {
            let path = self.0.join(name);
            fs::write(&path, text).expect("writable");
            path
        }

        fn fifo(&self, name: &str) -> PathBuf {
            let path = self.0.join(name);
            assert!(Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
            path
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn why(path: &Path, links: Links, expected: &Expected) -> String {
        let refused = opened(path, links, Access::ReadWrite, expected).expect_err("refused");
        refused.to_string().replace(&path.display().to_string(), "IT")
    }

    fn own() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    #[test]
    fn a_file_that_goes_to_a_process_is_one_that_its_user_may_read() {
        let folder = Folder::new();
        let file = folder.file("library", "x");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("ours");
        let ours = own();
        let readable_by =
            |user| opened(&file, Links::Refused, Access::Read, &Expected::regular().readable_by(&[user]));
        assert!(readable_by(ours).is_ok() && readable_by(0).is_ok());
        let refused = readable_by(ours + 1).expect_err("refused").to_string();
        assert!(refused.contains("the process's user may not read it"), "{refused}");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).expect("ours");
        assert!(readable_by(ours + 1).is_ok());
    }

    #[test]
    fn what_is_not_the_expected_file_is_left_alone_and_named() {
        let folder = Folder::new();
        let (file, fifo) = (folder.file("file", "text"), folder.fifo("fifo"));
        let regular = Expected::regular();
        assert!(opened(&file, Links::Refused, Access::ReadWrite, &regular).is_ok());
        // Nobody has the other end of it.
        assert_eq!(
            why(&fifo, Links::Refused, &regular),
            "IT was left untouched: it is a FIFO, not a regular file"
        );
        assert_eq!(
            why(Path::new("/dev/null"), Links::Refused, &regular),
            "IT was left untouched: it is a device, not a regular file"
        );
        assert_eq!(
            why(&folder.0, Links::Refused, &regular),
            "IT was left untouched: it is a folder, not a regular file"
        );
        let link = folder.0.join("link");
        symlink(&file, &link).expect("writable");
        assert_eq!(
            why(&link, Links::Refused, &regular),
            "IT was left untouched: it is a link, not a regular file"
        );
        assert!(opened(&link, Links::Followed, Access::Read, &regular).is_ok());
        let other = regular.clone().of(&[own() + 1]);
        assert_eq!(
            why(&file, Links::Refused, &other),
            format!("IT was left untouched: it belongs to user {}, not to {}", own(), own() + 1)
        );
        fs::hard_link(&file, folder.0.join("second")).expect("writable");
        let alone = regular.clone().with_one_name();
        assert_eq!(why(&file, Links::Refused, &alone), "IT was left untouched: it has 2 names (hard links)");
        let memory = why(&file, Links::Refused, &Expected::memory());
        assert!(memory.ends_with("with 2 names, not a memory file"), "{memory}");
        assert_eq!(fs::read(&file).expect("there"), b"text");
    }

    #[test]
    fn a_file_of_any_length_is_read_up_to_its_bound() {
        let folder = Folder::new();
        let path = folder.file("file", "text");
        let expected = Expected::regular().with_bytes(0..=10);
        assert_eq!(read(&path, Links::Refused, &expected).expect("short"), b"text");
        fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .and_then(|file| file.set_len(1 << 40))
            .expect("sparse");
        let refused = read(&path, Links::Refused, &expected).expect_err("long").to_string();
        assert!(refused.ends_with("it has 1099511627776 bytes; expected 0 to 10"), "{refused}");
    }

    #[test]
    fn a_name_that_leads_elsewhere_a_moment_later_leads_nobody_astray() {
        let folder = Folder::new();
        let (name, good) = (folder.0.join("name"), folder.file("good", "good"));
        let bad = folder.file("bad", "bad");
        folder.fifo("fifo");
        let identity = Identity::of(File::open(&good).expect("there")).expect("known");
        let stops = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let next = folder.0.join("next");
                for target in ["good", "bad", "fifo"].into_iter().cycle() {
                    if stops.load(Ordering::Relaxed) {
                        break;
                    }
                    fs::hard_link(folder.0.join(target), &next).expect("writable");
                    fs::rename(&next, &name).expect("writable");
                    // Two names of one file: then it stays.
                    let _ = fs::remove_file(&next);
                }
            });
            let expected = Expected::regular().that_is(identity);
            let mut n_opened = 0;
            for _ in 0..20_000 {
                if let Ok(mut file) = opened(&name, Links::Refused, Access::Append, &expected) {
                    n_opened += 1;
                    file.write_all(b".").expect("room");
                }
            }
            stops.store(true, Ordering::Relaxed);
            assert_eq!(fs::read(&good).expect("there").len(), 4 + n_opened);
        });
        assert_eq!(fs::read(&bad).expect("there"), b"bad");
    }

    #[test]
    fn a_library_that_everybody_may_write_to_is_not_taken() {
        let folder = Folder::new();
        let path = folder.0.join("libgputrace.so");
        fs::write(&path, "code").expect("writable");
        let read =
            |expected: Expected| read(&path, Links::Followed, &expected).map_err(|why| why.to_string());
        let mode = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("ours");
        mode(0o664);
        assert_eq!(read(Expected::regular().guarded()).as_deref(), Ok(&b"code"[..]));
        mode(0o666);
        let refused = read(Expected::regular().guarded()).expect_err("writable");
        assert!(refused.ends_with("was left untouched: every user may write to it"), "{refused}");
        assert!(read(Expected::regular()).is_ok());
    }

    #[test]
    fn a_memory_file_of_another_process_is_taken_for_what_it_is_and_not_for_its_name() {
        let own_files = Descriptors::of(std::process::id());
        let made = memfd_create("gputrace-opened-test", MemfdFlags::CLOEXEC).expect("a memory file");
        let numbers = own_files.named("/memfd:gputrace-opened-test ").expect("our own");
        assert_eq!(numbers, [made.as_raw_fd() as u32]);
        let expected = Expected::memory().of(&users_of(std::process::id())).with_bytes(0..=0);
        let taken = own_files.take(numbers[0]).expect("our own");
        assert!(taken.is_writable());
        let file = taken.shared(&expected).expect("as it was made");
        assert_eq!(Identity::of(&file).expect("known"), Identity::of(&made).expect("known"));
        file.set_len(4096).expect("writable");
        // A file whose name says the same, and which has a place in some folder.
        let folder = Folder::new();
        let path = folder.0.join("memfd:gputrace-opened-test ");
        let disk = fs::OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
        let disk = disk.expect("writable");
        let taken = own_files.take(disk.as_raw_fd() as u32).expect("our own");
        let refused = taken.shared(&expected).expect_err("not memory").to_string();
        assert!(refused.contains("not a memory file"), "{refused}");
        // The right one, and no longer as it was made.
        let taken = own_files.take(numbers[0]).expect("our own");
        assert!(taken.shared(&expected).expect_err("longer").to_string().contains("it has 4096 bytes"));
    }
}
