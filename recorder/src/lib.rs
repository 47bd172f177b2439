//! Drains a ring into a trace, while the process that fills the ring runs and after whatever ended it.
//!
//! ```text
//!  ring ─ drain ─> records, each thread's in order ─ record ─> merged by time ─ translate ─> items
//!         (decode)                                  (ticks)                                    │ channel
//!  /proc ─ process ─> address space, modules ───────────────────────────────────────────────> write ─> .gtr
//!  NVML ── nvml ────> samples ──────────────────────────────────────────────────────────────────┘
//!  at the end: symbols
//! ```
//!
//! One recorder belongs to one traced process. It trusts nothing that it reads from the ring or from `/proc`, never
//! blocks the process, and whatever it has written is readable if it is killed.
#![deny(unsafe_code)]
#![warn(clippy::print_stderr, reason = "`say` keeps terminals from obeying names")]

mod arch;
pub mod attach;
mod autograd;
mod book;
mod card;
mod daemon;
mod decode;
mod drain;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod gpu_health;
mod gpus;
mod growth;
mod guarded;
mod handed_out;
mod heartbeat;
mod held;
mod item;
mod job;
pub mod late;
pub mod left;
mod limits;
mod line;
mod lines;
mod liveness;
mod map_file;
mod memory;
mod merge_stack;
pub mod messages;
mod metered;
mod nvml;
mod nvml_process;
mod oom;
pub mod opened;
mod output;
pub mod output_file;
mod pages;
mod patient;
mod pidfd;
mod pjrt;
mod process;
pub mod python_lines;
mod record;
mod room;
pub mod segments;
mod standstill;
mod steering;
mod suspended;
mod symbol_files;
pub mod symbolise;
mod symbols;
mod thread_stack;
mod ticks;
mod translate;
mod whole;
mod witness;
mod write;

pub use arch::{MISSING_HERE, thread_stacks};
pub use card::Holder;
pub use daemon::daemon_main;
pub use gpus::{Gpu, Gpus};
pub use gputrace_ring::variables;
pub use job::{Job, State, Told, is_left, job_begins};
pub use memory::Memory;
pub(crate) use messages::say;
pub use oom::{Answer, FollowUp, Oom};
pub use output::{
    Overwrite, WaitsUntil, check as check_output, check_pattern, is_written, wait_for_recorder,
};
pub use pidfd::{end_with_us, with_standard_files_only};
pub use record::{Inherited, Options, Summary, record};
pub use steering::{is_off, misspelt, variable};
pub use symbol_files::OtherBuild;
pub use ticks::Moment;

use gputrace_schemas::reader;
use std::io;
use std::path::PathBuf;

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The ring's file.
    #[error("cannot open the ring {ring}", ring = ring.display())]
    Ring {
        /// The file.
        ring: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Something else is in the file.
    #[error("{ring} is not a readable ring: {what}", ring = ring.display())]
    NotARing {
        /// The file.
        ring: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// Whoever made it may have filled it to mislead us, and would get the trace.
    #[error("{ring} belongs to user {owner}, and this is user {us}; run `gputrace recover` as that user (`sudo -u '#{owner}' gputrace recover ...`)", ring = ring.display())]
    NotYours {
        /// The file.
        ring: PathBuf,
        /// Its owner.
        owner: u32,
        /// Us.
        us: u32,
    },
    /// Its process cannot be looked at from here.
    #[error("process {pid} of {ring} {is} in another PID namespace; run `gputrace recover` inside it (`docker exec`, `kubectl exec`, `nsenter --target PID --pid --mount`) or when it has ended; if you know that it has ended, add --process-is-gone", ring = ring.display())]
    Elsewhere {
        /// The file.
        ring: PathBuf,
        /// The traced process, as it numbers itself.
        pid: u32,
        /// What is known of it.
        is: &'static str,
    },
    /// Another recorder has it.
    #[error("another recorder reads {ring} of process {pid}; its trace is already readable", ring = ring.display())]
    Busy {
        /// The file.
        ring: PathBuf,
        /// The traced process.
        pid: u32,
    },
    /// The name of the trace.
    #[error("the output pattern {pattern:?} cannot be used: {what}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// What is wrong.
        what: String,
    },
    /// The trace is there already.
    #[error("{file} exists; choose another name with -o, or overwrite it with -F", file = file.display())]
    Exists {
        /// The file.
        file: PathBuf,
    },
    /// No file may be written under this name.
    #[error(transparent)]
    Unfit(#[from] output_file::Unfit),
    /// A device takes no trace, and root would replace it by one.
    #[error("{file} is a device, which cannot hold a trace; choose a file with -o, or set GPUTRACE=0 to run the program without recording it", file = file.display())]
    Device {
        /// The device.
        file: PathBuf,
    },
    /// No file may be made in its folder.
    #[error("cannot write traces in {folder}: {why}", folder = folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// What the system said, and what to do.
        why: String,
    },
    /// There is no room for a trace.
    #[error("{folder} has only {} KiB free, too little for a trace: free some space, or choose another folder with -o", free / 1024, folder = folder.display())]
    Full {
        /// The folder.
        folder: PathBuf,
        /// What a user may still write there.
        free: u64,
    },
    /// The trace that is to be read.
    #[error(transparent)]
    Trace(#[from] reader::Error),
    /// A trace cannot be rewritten in its place: what was written last would be lost with the machine.
    #[error("{file} is the trace itself; choose another name with -o", file = file.display())]
    InPlace {
        /// The file.
        file: PathBuf,
    },
    /// The trace cannot be made.
    #[error("cannot write {file}", file = file.display())]
    Output {
        /// The file.
        file: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// In a line, with what the system said.
    pub(crate) fn with_cause(&self) -> String {
        let cause = std::error::Error::source(self).map(|cause| format!(": {cause}")).unwrap_or_default();
        format!("{self}{cause}")
    }
}
