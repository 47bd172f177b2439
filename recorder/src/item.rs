//! What the recording thread hands to the writing thread: definitions and events of the trace, in the order in which they are written.

use gputrace_schemas::event::{
    Api, ApiId, CommId, Communicator, Device, Event, EventKind, Frame, FrameId, Mappings, Module, ModuleId,
    Nanos, Process, Stack, StackId, TextId, Thread, ThreadId,
};
use std::sync::{Arc, Mutex};

/// One of them.
#[derive(Debug)]
pub(crate) enum Item {
    Process(Box<Process>),
    Module(ModuleId, Module),
    Frame(FrameId, Frame),
    Stack(StackId, Stack),
    Thread(ThreadId, Thread),
    /// Nothing more will come of the thread. Its number may get another meaning once it is given back ([`FreeThreads`]).
    ThreadEnded(ThreadId),
    Device(Device),
    Api(ApiId, Api),
    Text(TextId, String),
    Communicator(CommId, Box<Communicator>),
    Mappings(Mappings),
    Event(Event),
}

/// Numbers of threads that no file of the recording has any more, given back by who writes it. A process may have millions of threads in a week.
pub(crate) type FreeThreads = Arc<Mutex<Vec<ThreadId>>>;

/// The thread of events that the recorder makes itself.
pub(crate) const RECORDER: ThreadId = ThreadId(0);

/// Items in one message to the writing thread.
pub(crate) const BATCH: usize = 4096;

/// An event that the recorder makes itself.
pub(crate) fn own_event(time: Nanos, kind: EventKind) -> Item {
    Item::Event(Event { time, thread: RECORDER, stack: StackId(0), kind })
}
