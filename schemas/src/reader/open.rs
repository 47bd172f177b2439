//! Opening a file that somebody else may have put there.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Opens a file to be read as a trace. Whoever may write to its folder can have put anything there: a FIFO or a lease is not waited
/// for, and what is not a regular file is not read.
pub(super) fn open(path: &Path) -> io::Result<File> {
    /// `O_NONBLOCK` and `O_NOCTTY` (asm-generic/fcntl.h).
    const FLAGS: i32 = 0o4000 | 0o400;
    let file = OpenOptions::new().read(true).custom_flags(FLAGS).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(file)
}
