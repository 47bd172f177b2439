//! Traces of any kind, as [`gputrace_sim::ops::OpStream`]s.

use std::io::Read;
use std::path::Path;

mod gputrace;
mod host;
mod others;
mod pickle;
mod pools;
mod recording;
mod rmm_log;
mod snapshot;
mod trims;

pub use gputrace::of_recording;
pub(crate) use gputrace::{Gathering, each, of_open, with_notes};
use gputrace_schemas::reader::looks_like_a_trace;
use gputrace_sim::ops::OpStream;

use crate::files;
pub use others::UNACCOUNTED;
pub use pickle::PickleError;
pub use recording::recording_of;
pub(crate) use recording::snapshot;
pub use snapshot::{ImportError, read_snapshot};

/// No address that a device or its driver hands out is above: x86-64 and arm64 have 57 bits at most.
const HIGHEST: u64 = 1 << 57;
/// Nobody is given more at once.
const LARGEST: u64 = 1 << 46;
/// A request of an EiB or more is rejected by PyTorch before it is recorded (CUDACachingAllocator.cpp, 2.0 to 2.15).
const LARGEST_REFUSED: u64 = 1 << 60;
/// All that a history may ask for together, so that sums can be formed.
const LARGEST_SUM: u64 = 1 << 62;

/// The requests to the devices of one process.
#[derive(Clone, Debug)]
pub struct Trace {
    /// By device ordinal; devices without anything are left out.
    pub devices: Vec<OpStream>,
    /// Parts that the reader could not use, in sentences.
    pub notes: Vec<String>,
}

/// One of [`Trace::notes`], where somebody attached to a process that ran already.
pub const ATTACHED: &str = "attached to a running process: earlier allocations and frees are not known";

/// What one of [`Trace::notes`] begins with, where older segments of a bounded recording were removed.
pub const LEFT: &str = "complete since ";

/// Where the requests of a trace are had, once they are needed.
pub trait Requests {
    /// What the devices were asked: read once, and kept.
    ///
    /// # Errors
    /// As [`load`].
    fn requests(&self) -> Result<&Trace, &ImportError>;
}

/// Reads a trace of any kind that is known.
///
/// # Errors
/// When the file cannot be opened, is damaged, is hostile, or is of no known kind.
pub fn load(path: &Path) -> Result<Trace, ImportError> {
    let mut first = [0; 8];
    let is_read = files::open(path).and_then(|mut file| file.read_exact(&mut first)).is_ok();
    if is_read && looks_like_a_trace(&first) {
        gputrace::read(path)
    } else if is_read && rmm_log::looks_like_a_log(&first) {
        rmm_log::read(path)
    } else if is_pickle(path)
        || !files::here(path).is_ok_and(|path| path.is_file())
        || is_named_a_pickle(path)
    {
        read_snapshot(path)
    } else {
        // Which says what it is instead.
        gputrace::read(path)
    }
}

/// What is wrong with it is told in the words of what it was meant to be.
fn is_named_a_pickle(path: &Path) -> bool {
    let name = path.to_string_lossy();
    let name = name.strip_suffix(".gz").unwrap_or(&name);
    [".pickle", ".pkl"].iter().any(|ending| name.ends_with(ending))
}

/// Whether it is a snapshot of PyTorch, as far as its first bytes tell: pickles begin with the opcode PROTO (0x80), gzip with 1f 8b; a
/// trace with neither.
#[must_use]
pub fn is_pickle(path: &Path) -> bool {
    let mut first = [0; 2];
    let read = files::open(path).and_then(|mut file| file.read_exact(&mut first));
    read.is_ok() && (first == [0x1f, 0x8b] || first[0] == 0x80)
}
