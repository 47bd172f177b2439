//! Traces of any kind, as events and as requests, and the books that are kept of them.
//!
//! This file is what the analyses need from a trace, apart from its events: the things that events name by number. Analyses take [`Definitions`] and one [`Event`] after the other, so that a trace of any size, a damaged trace and a
//! test's hand-made [`Recording`] all take the same path. Nothing here knows how a trace is stored.

#![forbid(unsafe_code)]

pub mod backward;
pub mod by_stack;
pub mod clocks;
pub mod faults;
pub mod files;
pub mod import;
pub mod interned;
pub mod ledger;
pub mod newest;
pub mod owners;
pub mod preparing;
pub mod redact;
#[cfg(any(test, feature = "scene"))]
pub mod scene;
pub mod source;
pub mod words;

use std::collections::HashMap;

use gputrace_schemas::event::{
    Api, ApiId, CommId, Communicator, Device, Event, Frame, FrameId, Module, ModuleId, Process, Stack,
    StackId, TextId, Thread, ThreadId,
};
use gputrace_schemas::reader::Trace;

/// The release that a version of PyTorch's is of: of `2.11.0+cu130` 2 and 11.
#[must_use]
pub fn torch_release(version: &str) -> Option<(u8, u8)> {
    let mut parts = version.split(['.', '+']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The things that events name by number. A number that was never defined gives `None`: damaged traces are normal.
pub trait Definitions: Sync {
    /// The process that was traced.
    fn process(&self) -> &Process;
    /// Its devices.
    fn devices(&self) -> &[Device];
    /// A function that was hooked.
    fn api(&self, id: ApiId) -> Option<&Api>;
    /// A call stack.
    fn stack(&self, id: StackId) -> Option<&Stack>;
    /// A line of a stack.
    fn frame(&self, id: FrameId) -> Option<&Frame>;
    /// A loaded file.
    fn module(&self, id: ModuleId) -> Option<&Module>;
    /// A thread.
    fn thread(&self, id: ThreadId) -> Option<&Thread>;
    /// What a mark is called.
    fn text(&self, id: TextId) -> Option<&str>;
    /// A communicator of NCCL.
    fn communicator(&self, id: CommId) -> Option<&Communicator>;
}

/// A trace in memory: for tests and for programs that make their own.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// The process.
    pub process: Process,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Hooked functions.
    pub apis: HashMap<ApiId, Api>,
    /// Call stacks.
    pub stacks: HashMap<StackId, Stack>,
    /// Lines of stacks.
    pub frames: HashMap<FrameId, Frame>,
    /// Loaded files.
    pub modules: HashMap<ModuleId, Module>,
    /// Threads.
    pub threads: HashMap<ThreadId, Thread>,
    /// The names of marks.
    pub texts: HashMap<TextId, String>,
    /// Communicators of NCCL.
    pub communicators: HashMap<CommId, Communicator>,
    /// What happened, in the order of its times.
    pub events: Vec<Event>,
}

impl Recording {
    /// What the events of a trace name, without the events.
    #[must_use]
    pub fn definitions_of(trace: &Trace) -> Recording {
        fn numbered<Id: std::hash::Hash + Eq, T: Clone>(id: fn(u32) -> Id, values: &[T]) -> HashMap<Id, T> {
            (0..).map(id).zip(values.iter().cloned()).collect()
        }
        Recording {
            process: trace.process().clone(),
            devices: trace.devices().to_vec(),
            apis: numbered(ApiId, trace.apis()),
            stacks: numbered(StackId, trace.stacks()),
            frames: numbered(FrameId, trace.frames()),
            modules: numbered(ModuleId, trace.modules()),
            threads: numbered(ThreadId, trace.threads()),
            texts: numbered(TextId, trace.texts()),
            communicators: numbered(CommId, trace.communicators()),
            events: vec![],
        }
    }
}

impl Definitions for Recording {
    fn process(&self) -> &Process {
        &self.process
    }
    fn devices(&self) -> &[Device] {
        &self.devices
    }
    fn api(&self, id: ApiId) -> Option<&Api> {
        self.apis.get(&id)
    }
    fn stack(&self, id: StackId) -> Option<&Stack> {
        self.stacks.get(&id)
    }
    fn frame(&self, id: FrameId) -> Option<&Frame> {
        self.frames.get(&id)
    }
    fn module(&self, id: ModuleId) -> Option<&Module> {
        self.modules.get(&id)
    }
    fn thread(&self, id: ThreadId) -> Option<&Thread> {
        self.threads.get(&id)
    }
    fn text(&self, id: TextId) -> Option<&str> {
        self.texts.get(&id).map(String::as_str)
    }
    fn communicator(&self, id: CommId) -> Option<&Communicator> {
        self.communicators.get(&id)
    }
}

impl Definitions for Trace {
    fn process(&self) -> &Process {
        Trace::process(self)
    }
    fn devices(&self) -> &[Device] {
        Trace::devices(self)
    }
    fn api(&self, id: ApiId) -> Option<&Api> {
        Trace::api(self, id)
    }
    fn stack(&self, id: StackId) -> Option<&Stack> {
        Trace::stack(self, id)
    }
    fn frame(&self, id: FrameId) -> Option<&Frame> {
        Trace::frame(self, id)
    }
    fn module(&self, id: ModuleId) -> Option<&Module> {
        Trace::module(self, id)
    }
    fn thread(&self, id: ThreadId) -> Option<&Thread> {
        Trace::thread(self, id)
    }
    fn text(&self, id: TextId) -> Option<&str> {
        Trace::text(self, id)
    }
    fn communicator(&self, id: CommId) -> Option<&Communicator> {
        Trace::communicator(self, id)
    }
}

/// What a snapshot does not hold of a device: the births of what was held when its history began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Before {
    /// Which.
    pub device: i16,
    /// Blocks that were held when the history began: the first blocks of the device's events.
    pub n_blocks: u64,
    /// There is a history.
    pub has_history: bool,
}

impl Before {
    const NAME: &str = "snapshot.before=";

    /// As a note of a trace.
    #[must_use]
    pub fn note(self) -> String {
        let kind = if self.has_history { "history" } else { "none" };
        format!("{}{} {} {kind}", Before::NAME, self.device, self.n_blocks)
    }

    /// From such a note.
    #[must_use]
    pub fn of_note(note: &str) -> Option<Before> {
        let mut words = note.strip_prefix(Before::NAME)?.split(' ');
        let (device, n_blocks) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(Before { device, n_blocks, has_history: words.next()? == "history" })
    }
}
