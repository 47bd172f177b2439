//! The program's own source, where this machine still has it as it ran: a trace says which line made memory, and the source says what the
//! program did with it.
//!
//! Read only on the host that recorded, and only Python files that were last written before the recording began and that the reader owns, or
//! root: a trace from elsewhere names no file of this machine.

use std::cell::RefCell;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::rc::Rc;

use gputrace_schemas::event::Process;
use gputrace_trace::files;
use rustc_hash::FxHashMap;

mod follow;
mod statements;

pub(crate) use follow::{How, Keeper};
use statements::Statements;

/// Longer files are not read.
const MOST_BYTES: u64 = 4 << 20;

/// A frame of the program's own: function, file and line.
pub(crate) type Line = (String, String, u32);

/// The files that were asked for.
pub(crate) struct Sources {
    /// When the recording began, in nanoseconds since 1970; none where the files of this machine say nothing.
    since: Option<u64>,
    files: RefCell<FxHashMap<String, Option<Rc<Statements>>>>,
}

impl Sources {
    /// Those of a process.
    pub(crate) fn of(process: &Process) -> Sources {
        let is_here = !process.host.is_empty() && host().is_some_and(|host| host == process.host);
        let since = Some(process.start_realtime).filter(|since| is_here && *since > 0);
        Sources { since, files: RefCell::default() }
    }

    /// What keeps the memory that was requested there: `lines` are the program's own of a stack, innermost first.
    pub(crate) fn keeper(&self, lines: &[Line]) -> Option<Keeper> {
        follow::keeper(lines, |file| self.statements(file))
    }

    fn statements(&self, file: &str) -> Option<Rc<Statements>> {
        let since = self.since?;
        let mut files = self.files.borrow_mut();
        files.entry(file.to_owned()).or_insert_with(|| read(file, since).map(Rc::new)).clone()
    }
}

fn read(name: &str, since: u64) -> Option<Statements> {
    let path = Path::new(name);
    if !path.is_absolute() || path.extension().is_none_or(|extension| extension != "py") {
        return None;
    }
    let file = files::open(path).ok()?;
    let found = file.metadata().ok()?;
    let written = u64::try_from(found.mtime()).ok()?.saturating_mul(1_000_000_000);
    let is_own = found.uid() == 0 || found.uid() == rustix::process::geteuid().as_raw();
    if !is_own || written > since || found.len() > MOST_BYTES {
        return None;
    }
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text).ok()?;
    Some(Statements::of(&text))
}

/// This machine's name, as recordings have it.
fn host() -> Option<String> {
    Some(rustix::system::uname().nodename().to_string_lossy().into_owned())
}
