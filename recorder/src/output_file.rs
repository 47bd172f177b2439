//! Files that commands write: regular files of the user's, and nothing else.
//!
//! A path may name a FIFO, which waits for a reader; a device, which root could replace by a file; or a link that another user has made
//! and that leads to a file of ours. So each path is looked at before anything is written, every open is one that cannot wait, and what
//! was opened is looked at again. Everything that writes under a name that a user has chosen goes through here.

use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// As many links as the kernel follows (path_resolution(7)).
const MOST_LINKS: usize = 40;
/// Names that are tried for a file that is not complete yet.
const MOST_PARTS: u32 = 100;
/// Mode of a file that anybody may read as far as the umask lets them.
const BY_UMASK: u32 = 0o666;

/// Why nothing is written under a name.
#[derive(Debug, thiserror::Error)]
pub enum Unfit {
    /// It is there, and something else.
    #[error("{file} is {what}; gputrace needs a regular file: choose another name with -o", file = file.display())]
    NotAFile {
        /// The name.
        file: PathBuf,
        /// What is there.
        what: &'static str,
    },
    /// It leads to what this process has open, and not to a file.
    #[error("{file} leads to an open file of this process; choose a file's own name with -o, or omit -o if the command writes to standard output", file = file.display())]
    OpenFile {
        /// The name.
        file: PathBuf,
    },
    /// Whoever made the link chooses what is overwritten.
    #[error("{file} goes through {link}, a symbolic link of user {owner}, and this is user {us}: gputrace does not follow links of other users; choose another name with -o", file = file.display(), link = link.display())]
    ForeignLink {
        /// The name.
        file: PathBuf,
        /// The link.
        link: PathBuf,
        /// Its owner.
        owner: u32,
        /// Us.
        us: u32,
    },
    /// The file at its end is somebody else's.
    #[error("{file} is a symbolic link to {target}, which belongs to user {owner}, and this is user {us}; choose another name with -o", file = file.display(), target = target.display())]
    ForeignTarget {
        /// The name.
        file: PathBuf,
        /// The file.
        target: PathBuf,
        /// Its owner.
        owner: u32,
        /// Us.
        us: u32,
    },
    /// It leads nowhere.
    #[error("{file} is a symbolic link to {target}, which does not exist; remove the link, or choose another name with -o", file = file.display(), target = target.display())]
    Dangling {
        /// The name.
        file: PathBuf,
        /// What it says.
        target: PathBuf,
    },
    /// The system refuses.
    #[error("cannot write {file}: {}", refusal(why, "place"), file = file.display())]
    Io {
        /// The name.
        file: PathBuf,
        /// What the system said.
        why: io::Error,
    },
}

/// What the system said, and what to do where a user may not write: choose another place, or folder.
pub(crate) fn refusal(why: &io::Error, place: &str) -> String {
    match why.kind() {
        io::ErrorKind::PermissionDenied => format!("permission denied: choose another {place} with -o"),
        _ => why.to_string(),
    }
}

/// What is at a path under which a file is to be written.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// Nothing.
    Free,
    /// A regular file, under this name once links are followed.
    File(PathBuf),
}

/// Looks at a path under which a regular file is to be written, and changes nothing.
///
/// A link at its end is followed if this user made it, or root did, and if it leads to a regular file of this user's. Links to folders
/// on the way are followed, but for one of another user that leads to a folder that is not this user's either.
///
/// # Errors
/// No file may be written there.
pub fn look(path: &Path) -> Result<Place, Unfit> {
    let io = |why| Unfit::Io { file: path.to_owned(), why };
    for folder in path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()) {
        look_at_folder(path, folder)?;
    }
    match path.symlink_metadata() {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(Place::Free)
        }
        Err(error) => Err(io(error)),
        Ok(facts) if facts.is_file() => Ok(Place::File(path.to_owned())),
        Ok(facts) if facts.is_symlink() => look_behind(path),
        Ok(facts) => Err(Unfit::NotAFile { file: path.to_owned(), what: kind(facts.file_type()) }),
    }
}

/// A folder on the way, if it is a link.
fn look_at_folder(path: &Path, folder: &Path) -> Result<(), Unfit> {
    let Some(owner) = folder.symlink_metadata().ok().filter(Metadata::is_symlink).map(|link| link.uid())
    else {
        return Ok(());
    };
    let is_own = folder.metadata().is_ok_and(|folder| folder.uid() == us());
    if is_trusted(owner) || is_own {
        return Ok(());
    }
    Err(Unfit::ForeignLink { file: path.to_owned(), link: folder.to_owned(), owner, us: us() })
}

/// Follows the links at the end of a path.
fn look_behind(path: &Path) -> Result<Place, Unfit> {
    let io = |why| Unfit::Io { file: path.to_owned(), why };
    let mut at = path.to_owned();
    for _ in 0..MOST_LINKS {
        // What a link of /proc says is a description, and need not be a name (proc(5)). /dev/fd leads there.
        let folder = at.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if folder.canonicalize().is_ok_and(|folder| folder.starts_with("/proc")) {
            return Err(Unfit::OpenFile { file: path.to_owned() });
        }
        let facts = match at.symlink_metadata() {
            Ok(facts) => facts,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Unfit::Dangling { file: path.to_owned(), target: at });
            }
            Err(error) => return Err(io(error)),
        };
        if !facts.is_symlink() {
            let (file, owner) = (path.to_owned(), facts.uid());
            return match () {
                () if !facts.is_file() => Err(Unfit::NotAFile { file, what: kind_behind(facts.file_type()) }),
                () if owner != us() => Err(Unfit::ForeignTarget { file, target: at, owner, us: us() }),
                () => Ok(Place::File(at)),
            };
        }
        if !is_trusted(facts.uid()) {
            return Err(Unfit::ForeignLink { file: path.to_owned(), link: at, owner: facts.uid(), us: us() });
        }
        let target = fs::read_link(&at).map_err(io)?;
        let folder = at.parent().unwrap_or(Path::new("/")).to_owned();
        at = folder.join(target);
        for folder in at.ancestors().skip(1) {
            look_at_folder(path, folder)?;
        }
    }
    Err(io(rustix::io::Errno::LOOP.into()))
}

/// Whether a link of this user may be followed: ours, or the administrator's.
fn is_trusted(owner: u32) -> bool {
    owner == us() || owner == 0
}

fn us() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn kind(of: FileType) -> &'static str {
    match () {
        () if of.is_dir() => "a folder",
        () if of.is_fifo() => "a FIFO (named pipe)",
        () if of.is_socket() => "a socket",
        () if of.is_char_device() => "a character device",
        () if of.is_block_device() => "a block device",
        () => "not a regular file",
    }
}

fn kind_behind(of: FileType) -> &'static str {
    match () {
        () if of.is_dir() => "a symbolic link to a folder",
        () if of.is_fifo() => "a symbolic link to a FIFO (named pipe)",
        () if of.is_socket() => "a symbolic link to a socket",
        () if of.is_char_device() => "a symbolic link to a character device",
        () if of.is_block_device() => "a symbolic link to a block device",
        () => "a symbolic link to something that is not a regular file",
    }
}

/// Makes a file that does not exist yet, for reading and writing. Follows no link at the end of the path, and waits for nobody.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`], whatever has the name; or the system's.
pub fn create_new(path: &Path, mode: u32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(mode);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
}

/// What happens to a file that is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Existing {
    /// It stays, and nothing is written.
    Stays,
    /// It is replaced when the new one is complete.
    IsReplaced,
}

/// A file that gets its name when it is complete, and not before. Dropped earlier, it leaves nothing.
#[derive(Debug)]
pub struct WholeFile {
    file: File,
    part: PathBuf,
    target: PathBuf,
    existing: Existing,
}

impl WholeFile {
    /// Begins one that will have this name. Readable by whom the umask lets.
    ///
    /// # Errors
    /// As of [`look`]; or it cannot be made.
    pub fn begin(path: &Path, existing: Existing) -> Result<WholeFile, Unfit> {
        let target = match look(path)? {
            Place::Free => path.to_owned(),
            Place::File(target) => target,
        };
        let io = |why| Unfit::Io { file: path.to_owned(), why };
        for n in 0..MOST_PARTS {
            let mut part = target.clone().into_os_string();
            part.push(format!(".{}.{n}.part", std::process::id()));
            let part = PathBuf::from(part);
            match create_new(&part, BY_UMASK) {
                Ok(file) => return Ok(WholeFile { file, part, target, existing }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(io(error)),
            }
        }
        Err(io(io::ErrorKind::AlreadyExists.into()))
    }

    /// What is written to.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Gives it its name.
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::AlreadyExists`] if it is not to replace a file that came meanwhile.
    pub fn finish(self) -> io::Result<()> {
        match look(&self.target) {
            Ok(Place::Free) => {}
            Ok(Place::File(_)) if self.existing == Existing::IsReplaced => {}
            Ok(Place::File(_)) => return Err(io::ErrorKind::AlreadyExists.into()),
            Err(error) => return Err(io::Error::other(error)),
        }
        if self.existing == Existing::Stays {
            match renameat_with(CWD, &self.part, CWD, &self.target, RenameFlags::NOREPLACE) {
                // Not every file system can refuse to replace.
                Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {}
                answer => return Ok(answer?),
            }
        }
        fs::rename(&self.part, &self.target)
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        // It has its name by then, or is not wanted.
        let _ = fs::remove_file(&self.part);
    }
}

/// Moves a complete file to a name, in place of a regular file that has it.
///
/// # Errors
/// As of [`look`], or the system's.
pub fn put_in_place(from: &Path, to: &Path) -> Result<(), Unfit> {
    let target = match look(to)? {
        Place::Free => to.to_owned(),
        Place::File(target) => target,
    };
    fs::rename(from, target).map_err(|why| Unfit::Io { file: to.to_owned(), why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::symlink;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let folder = std::env::temp_dir().join(format!("gputrace-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&folder);
            fs::create_dir_all(&folder).expect("a folder");
            Folder(folder)
        }
        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }
        fn fifo(&self, name: &str) -> PathBuf {
            let path = self.path(name);
            let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
            rustix::fs::mknodat(CWD, &path, rustix::fs::FileType::Fifo, mode, 0).expect("a FIFO");
            path
        }
        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).expect("ours").flatten();
            let mut names: Vec<_> = entries.map(|it| it.file_name().to_string_lossy().into_owned()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn refused(path: &Path) -> String {
        look(path).expect_err("no place for a file").to_string()
    }

    #[test]
    fn only_regular_files_are_written() {
        let folder = Folder::new("kinds");
        let fifo = folder.fifo("fifo");
        assert!(refused(&fifo).contains("is a FIFO"), "{}", refused(&fifo));
        assert!(refused(Path::new("/dev/null")).contains("is a character device"));
        assert!(refused(&folder.0).contains("is a folder"));
        let _socket = std::os::unix::net::UnixListener::bind(folder.path("socket")).expect("a socket");
        assert!(refused(&folder.path("socket")).contains("is a socket"));
        for target in [Path::new("/dev/null"), &fifo, &folder.0] {
            let link = folder.path("link");
            symlink(target, &link).expect("a link");
            assert!(refused(&link).contains("is a symbolic link to a "), "{}", refused(&link));
            fs::remove_file(link).expect("ours");
        }
        assert_eq!(look(&folder.path("new")).ok(), Some(Place::Free));
    }

    #[test]
    fn links_lead_to_files_of_ones_own_and_nowhere_else() {
        let folder = Folder::new("links");
        let (file, link, other) = (folder.path("file"), folder.path("link"), folder.path("other"));
        fs::write(&file, b"old").expect("a file");
        symlink("file", &link).expect("a link");
        symlink("link", &other).expect("a link");
        assert_eq!(look(&link).ok(), Some(Place::File(file.clone())));
        assert_eq!(look(&other).ok(), Some(Place::File(file.clone())));
        fs::remove_file(&file).expect("ours");
        assert!(refused(&link).contains("does not exist"));
        symlink("/proc/self/fd/1", folder.path("stdout")).expect("a link");
        assert!(refused(&folder.path("stdout")).contains("open file of this process"));
        assert!(refused(Path::new("/dev/stdout")).contains("open file of this process"));
        assert!(refused(Path::new("/dev/fd/2")).contains("open file of this process"));
        symlink("loop", folder.path("loop")).expect("a link");
        assert!(refused(&folder.path("loop")).starts_with("cannot write "));
        // Only root can make what another user owns.
        if us() == 0 {
            fs::write(&file, b"ours").expect("a file");
            let chown = |path: &Path| std::os::unix::fs::lchown(path, Some(65_534), None).expect("root may");
            chown(&link);
            assert!(refused(&link).contains("a symbolic link of user 65534"), "{}", refused(&link));
            fs::remove_file(&link).expect("ours");
            symlink("file", &link).expect("a link");
            chown(&file);
            assert!(refused(&link).contains("belongs to user 65534"), "{}", refused(&link));
            let theirs = folder.path("theirs");
            fs::create_dir(folder.path("target")).expect("a folder");
            symlink("target", &theirs).expect("a link");
            chown(&theirs);
            assert_eq!(look(&theirs.join("new")).ok(), Some(Place::Free), "it leads to a folder of ours");
            chown(&folder.path("target"));
            assert!(refused(&theirs.join("new")).contains("theirs, a symbolic link of user 65534"));
        }
    }

    #[test]
    fn a_file_has_its_name_when_it_is_complete() {
        let folder = Folder::new("whole");
        let path = folder.path("out");
        let write = |text: &[u8], existing| {
            let whole = WholeFile::begin(&path, existing).expect("a place");
            whole.file().write_all(text).expect("room");
            whole
        };
        drop(write(b"given up", Existing::Stays));
        assert_eq!(folder.names(), [""; 0]);
        write(b"first", Existing::Stays).finish().expect("free");
        let second = write(b"second", Existing::Stays);
        assert_eq!(second.finish().expect_err("it is there").kind(), io::ErrorKind::AlreadyExists);
        write(b"third", Existing::IsReplaced).finish().expect("replaced");
        assert_eq!(fs::read(&path).expect("there"), b"third");
        // What came between the look and the end is left alone.
        let late = write(b"fourth", Existing::IsReplaced);
        fs::remove_file(&path).expect("ours");
        folder.fifo("out");
        assert!(late.finish().is_err());
        assert_eq!(folder.names(), ["out"]);
        assert!(path.symlink_metadata().expect("there").file_type().is_fifo());
    }

    #[test]
    fn a_fifo_is_not_waited_for() {
        let folder = Folder::new("waits");
        let fifo = folder.fifo("fifo");
        assert_eq!(create_new(&fifo, 0o600).expect_err("a FIFO").kind(), io::ErrorKind::AlreadyExists);
    }
}
