//! Opening a file that another user may have put there.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// `O_PATH` names a file without opening it (asm-generic/fcntl.h).
const NAMED: i32 = 0o10_000_000;
/// `O_NONBLOCK` and `O_NOCTTY` (asm-generic/fcntl.h): neither a FIFO nor a lease is waited for.
const AT_ONCE: i32 = 0o4000 | 0o400;

/// The folders whose files may be opened, where not all may.
static CONFINED: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// From now on, this process opens only files that lie below one of these folders, by whatever link they are named. The first call counts.
///
/// Folders are real names, without links. This bounds which traces are read for somebody who names them from outside; it keeps no code
/// of this process from other files.
pub fn confine_to(folders: Vec<PathBuf>) {
    let _ = CONFINED.set(folders);
}

/// Opens a regular file for reading; links are followed, but not out of the folders of [`confine_to`].
///
/// Whoever may write to its folder can have put anything there, and can exchange it at any moment. So the file is named first,
/// which has no effect on it: to open a device may already do something. Only a regular file is then opened, and it is that very file.
///
/// # Errors
/// The system's, it is not a regular file, or it lies elsewhere.
pub fn open_regular(path: impl AsRef<Path>) -> io::Result<File> {
    let path = path.as_ref();
    let with = |flags| {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(flags);
        options
    };
    let named = with(NAMED).open(path)?;
    if let Some(folders) = CONFINED.get() {
        // Of the file that is named now: whatever becomes of links on the way, it is this one that is opened.
        let real = std::fs::read_link(format!("/proc/self/fd/{}", named.as_raw_fd()))?;
        if !folders.iter().any(|folder| real.starts_with(folder)) {
            let outside = "it is outside the folders that may be read";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, outside));
        }
    }
    let found = named.metadata()?;
    let refused = || io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file");
    if !found.is_file() {
        return Err(refused());
    }
    let file = match with(AT_ONCE).open(format!("/proc/self/fd/{}", named.as_raw_fd())) {
        // Without /proc, by its name once more; which file that is, is compared below.
        Err(error) if error.kind() == io::ErrorKind::NotFound => with(AT_ONCE).open(path)?,
        opened => opened?,
    };
    let opened = file.metadata()?;
    if (opened.dev(), opened.ino()) != (found.dev(), found.ino()) {
        return Err(refused());
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn what_a_reader_would_wait_for_is_refused_and_a_link_to_a_file_is_followed() {
        let folder = std::env::temp_dir().join(format!("gputrace-open-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).expect("a folder");
        let at = |name: &str| folder.join(name);
        assert!(Command::new("mkfifo").arg(at("fifo")).status().expect("mkfifo").success());
        std::fs::write(at("file"), "text").expect("writable");
        for (link, target) in [("link", "file"), ("to-fifo", "fifo"), ("to-device", "/dev/zero")] {
            std::os::unix::fs::symlink(target, at(link)).expect("writable");
        }
        assert!(open_regular(at("file")).is_ok() && open_regular(at("link")).is_ok());
        for name in ["fifo", "to-fifo", "to-device", "."] {
            let refused = open_regular(at(name)).expect_err(name);
            assert_eq!(refused.to_string(), "it is not a regular file", "{name}");
        }
        std::fs::remove_dir_all(folder).expect("ours");
    }
}
