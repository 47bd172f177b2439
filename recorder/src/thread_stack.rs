//! The stack of a thread of another process, how it was read, and why it is not whole.

use gputrace_schemas::event::{Frame, Module};
use std::time::Duration;

/// Why there are no stacks.
#[derive(Debug, thiserror::Error)]
pub enum NoStacks {
    /// There is no such process.
    #[error("process {0} does not exist")]
    Gone(u32),
    /// This processor's frames cannot be followed from outside.
    #[error("the stacks of running processes can be read only on x86-64, not on {}", std::env::consts::ARCH)]
    NotHere,
    /// The kernel does not let us read.
    #[error("cannot read the memory of process {pid}: {why}")]
    Refused {
        /// The process.
        pid: u32,
        /// Why, and what to change.
        why: String,
    },
}

/// The stacks of a process.
#[derive(Debug)]
pub struct Stacks {
    /// Its threads, the main thread first.
    pub threads: Vec<ThreadStack>,
    /// Why there are no Python frames; `None` where there are.
    pub no_python: Option<String>,
    /// Files without names of functions, and why.
    pub left_out: Vec<String>,
    /// Files of its code, by the numbers that native frames name.
    pub modules: Vec<Module>,
}

/// The stack of a thread.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ThreadStack {
    /// The kernel's number of it, as its own namespace has it; 0 not known.
    pub tid: u32,
    /// The kernel's name of it.
    pub name: String,
    /// Its state, as `/proc` says: `S` sleeps, `R` runs, `D` waits in the kernel.
    pub state: char,
    /// Its frames, innermost first.
    pub frames: Vec<Frame>,
    /// How its native frames were read.
    pub how: How,
    /// Where its native frames end.
    pub end: End,
    /// Its Python frames changed under each reading: they may be of different moments.
    pub is_torn: bool,
}

impl ThreadStack {
    /// Its Python frames, innermost first: function, file, line.
    pub fn python(&self) -> impl Iterator<Item = (&str, &str, u32)> {
        self.frames.iter().filter_map(|frame| match frame {
            Frame::Python { function, file, line } => Some((function.as_str(), file.as_str(), *line)),
            Frame::Native { .. } => None,
        })
    }
}

/// How a copy was made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum How {
    /// The thread waited, and was not stopped.
    Waiting,
    /// It was stopped, for so long at most: from when it was last seen to run until it was let go.
    Stopped(Duration),
    /// There is no copy, and why.
    None(String),
}

/// Why a stack has no more frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The thread began there.
    Whole,
    /// No table covers the code (code made at run time, or a file that cannot be read).
    NoTable,
    /// A register's value is needed that is not known without stopping the thread.
    Unknown,
    /// The stack is larger than what was copied, or has more frames than are followed.
    TooLarge,
    /// The tables and the stack do not fit together.
    Damaged,
}
