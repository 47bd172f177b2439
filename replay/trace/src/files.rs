//! Files by the names that users gave them. What lies elsewhere is brought here by whoever knows how: this library reads files, and
//! speaks to nobody.

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use gputrace_schemas::reader::{self, Trace};

/// Brings a file here and says where it is, or nothing where the name is a file's of this machine.
pub type Bring = fn(&Path) -> Option<io::Result<PathBuf>>;

static BRING: OnceLock<Bring> = OnceLock::new();

/// From now on, names are asked of this first. The first to be told stays.
pub fn bring_by(bring: Bring) {
    let _ = BRING.set(bring);
}

/// What opens a file of this name.
///
/// # Errors
/// It lies elsewhere and cannot be brought.
pub fn here(name: &Path) -> io::Result<Cow<'_, Path>> {
    match BRING.get().and_then(|bring| bring(name)) {
        Some(brought) => brought.map(Cow::Owned),
        None => Ok(Cow::Borrowed(name)),
    }
}

/// Opens a regular file. A FIFO or a device that another user put into the folder is neither waited for nor read.
///
/// # Errors
/// It is not a regular file, the system does not let us, or it cannot be brought.
pub fn open(name: &Path) -> io::Result<File> {
    reader::open_regular(here(name)?)
}

/// Opens a trace of gputrace's own: of a bounded recording, all that is left of it.
///
/// # Errors
/// It cannot be read, or is not one. Damage is not an error.
pub fn trace(name: &Path) -> Result<Trace, reader::Error> {
    Trace::open_by(name, &open)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fifo_with_the_name_of_a_trace_is_not_waited_for() {
        let path = std::env::temp_dir().join(format!("gputrace-files-{}.gtr", std::process::id()));
        assert!(std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
        let (tells, told) = std::sync::mpsc::channel();
        let fifo = path.clone();
        std::thread::spawn(move || {
            let errors = [open(&fifo).map(drop).err(), trace(&fifo).map(drop).err().map(io::Error::other)];
            let _ = tells.send(errors.map(|error| error.is_some()));
        });
        let refused = told.recv_timeout(std::time::Duration::from_secs(60));
        std::fs::remove_file(path).expect("ours");
        assert_eq!(refused, Ok([true; 2]));
    }
}
