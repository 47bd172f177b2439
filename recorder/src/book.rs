//! What events name by number, for a recording in several files: each file defines what its own events name.

use crate::item::Item;
use crate::output::TraceFile;
use gputrace_schemas::event::{
    Api, ApiId, CommId, Communicator, Device, Event, EventKind, Frame, Module, ModuleId, Nanos, Process,
    Stack, StackId, TextId, Thread, ThreadId,
};
use gputrace_schemas::writer::Writer;
use std::io;

/// Stacks that name one another: an operation of the backward pass, its forward operation and its caller.
const DEEPEST: usize = 4;
/// In the place of a file's number: an event has named it, and its definition is to come.
const WANTED: u32 = u32::MAX;
/// Larger numbers are not handed out.
const MOST_IDS: usize = 1 << 28;

/// All definitions, and in which file each was written last.
#[derive(Default)]
pub(crate) struct Book {
    process: Option<Process>,
    modules: Vec<Option<Module>>,
    apis: Vec<Option<Api>>,
    devices: Vec<Device>,
    frames: Shelf<Frame>,
    stacks: Shelf<Stack>,
    threads: Shelf<Thread>,
    texts: Shelf<String>,
    communicators: Shelf<Communicator>,
    /// Threads of which nothing more will come, that files may still name.
    ended: Vec<ThreadId>,
    /// The file that is written now, and the oldest that is left.
    segment: u32,
    since: Nanos,
    after_gap: bool,
    oldest: u32,
}

/// Definitions of one kind, and for each the newest file that has it; 0 none.
struct Shelf<T> {
    known: Vec<Option<T>>,
    written: Vec<u32>,
}

impl<T> Default for Shelf<T> {
    fn default() -> Shelf<T> {
        Shelf { known: vec![], written: vec![] }
    }
}

impl<T> Shelf<T> {
    /// A definition that no file has yet in this form; the newest file that has it in another, 0 none.
    fn put(&mut self, id: u32, value: T) -> u32 {
        put(&mut self.known, id, value);
        if self.written.len() < self.known.len() {
            self.written.resize(self.known.len(), 0);
        }
        self.written.get_mut(id as usize).map_or(0, std::mem::take)
    }

    /// What this file does not have yet; from now on it has.
    fn missing(&mut self, id: u32, segment: u32) -> Option<&T> {
        let at = id as usize;
        if at >= self.written.len() && at < MOST_IDS {
            self.written.resize(at + 1, 0);
            self.known.resize_with(at + 1, || None);
        }
        let written = self.written.get_mut(at).filter(|written| **written != segment)?;
        let value = self.known.get(at)?.as_ref();
        *written = if value.is_some() { segment } else { WANTED };
        value
    }

    /// The newest file that has it; 0 none.
    fn newest(&self, id: u32) -> u32 {
        self.written.get(id as usize).copied().unwrap_or(0)
    }

    fn forget(&mut self, id: u32) {
        if let Some(known) = self.known.get_mut(id as usize) {
            *known = None;
        }
        self.mark(id, 0);
    }

    fn mark(&mut self, id: u32, segment: u32) {
        if let Some(written) = self.written.get_mut(id as usize) {
            *written = segment;
        }
    }
}

fn put<T>(to: &mut Vec<Option<T>>, id: u32, value: T) {
    let at = id as usize;
    if at >= to.len() {
        to.resize_with(at + 1, || None);
    }
    if let Some(slot) = to.get_mut(at) {
        *slot = Some(value);
    }
}

impl Book {
    /// For a recording whose first file has this number.
    pub(crate) fn new(segment: u32) -> Book {
        Book { segment, oldest: segment, ..Book::default() }
    }

    /// The files that are left.
    pub(crate) fn left(&mut self, oldest: u32) {
        self.oldest = oldest;
    }

    /// Begins a file: what any event may name.
    ///
    /// # Errors
    /// The file's.
    pub(crate) fn begin(
        &mut self,
        segment: u32,
        since: Nanos,
        after_gap: bool,
        writer: &mut Writer<TraceFile>,
    ) -> io::Result<()> {
        self.segment = segment;
        self.since = since;
        self.after_gap = after_gap;
        if let Some(process) = &self.process {
            writer.process(&Process { segment, since, after_gap, ..process.clone() });
            // In a block of its own: who looks whose file it is reads no more.
            writer.flush()?;
        }
        for (id, module) in (0..).zip(&self.modules) {
            if let Some(module) = module {
                writer.module(ModuleId(id), module);
            }
        }
        for (id, api) in (0..).zip(&self.apis) {
            if let Some(api) = api {
                writer.api(ApiId(id), api);
            }
        }
        for device in &self.devices {
            writer.device(device);
        }
        Ok(())
    }

    /// Goes back to the file before, as another could not be begun.
    pub(crate) fn take_back(&mut self, segment: u32, since: Nanos) {
        let failed = std::mem::replace(&mut self.segment, segment);
        self.since = since;
        let lists = [
            &mut self.frames.written,
            &mut self.stacks.written,
            &mut self.threads.written,
            &mut self.texts.written,
            &mut self.communicators.written,
        ];
        // Whether that file has them is not known any more: they are written again.
        for number in lists.into_iter().flatten().filter(|number| **number == failed) {
            *number = 0;
        }
    }

    /// A definition: known from now on, and written to `writer` where a file that is left has it, or one of its events waits for it.
    pub(crate) fn define(&mut self, item: &Item, writer: Option<&mut Writer<TraceFile>>) {
        let (now, oldest) = (self.segment, self.oldest);
        let is_wanted = |newest: u32| newest != 0 && newest >= oldest;
        match item {
            Item::Process(process) => {
                let (since, after_gap) = (self.since, self.after_gap);
                let process = Process { segment: now, since, after_gap, ..(**process).clone() };
                if let Some(writer) = writer {
                    writer.process(&process);
                }
                self.process = Some(process);
            }
            Item::Module(id, module) => {
                put(&mut self.modules, id.0, module.clone());
                if let Some(writer) = writer {
                    writer.module(*id, module);
                }
            }
            Item::Api(id, api) => {
                put(&mut self.apis, id.0, api.clone());
                if let Some(writer) = writer {
                    writer.api(*id, api);
                }
            }
            Item::Device(device) => {
                self.devices.retain(|known| known.ordinal != device.ordinal);
                self.devices.push(device.clone());
                if let Some(writer) = writer {
                    writer.device(device);
                }
            }
            Item::Frame(id, frame) => {
                let is_wanted = is_wanted(self.frames.put(id.0, frame.clone()));
                if let Some(writer) = writer.filter(|_| is_wanted) {
                    self.frames.mark(id.0, now);
                    writer.frame(*id, frame);
                }
            }
            Item::Stack(id, stack) => {
                let is_wanted = is_wanted(self.stacks.put(id.0, stack.clone()));
                if let Some(writer) = writer.filter(|_| is_wanted) {
                    self.need_stack(*id, writer, DEEPEST);
                }
            }
            Item::Thread(id, thread) => {
                let is_wanted = is_wanted(self.threads.put(id.0, thread.clone()));
                if let Some(writer) = writer.filter(|_| is_wanted) {
                    self.threads.mark(id.0, now);
                    writer.thread(*id, thread);
                }
            }
            Item::Text(id, text) => {
                let is_wanted = is_wanted(self.texts.put(id.0, text.clone()));
                if let Some(writer) = writer.filter(|_| is_wanted) {
                    self.texts.mark(id.0, now);
                    writer.text(*id, text);
                }
            }
            Item::Communicator(id, communicator) => {
                self.communicators.put(id.0, (**communicator).clone());
                if let Some(writer) = writer {
                    self.communicators.mark(id.0, now);
                    writer.communicator(*id, communicator);
                }
            }
            Item::Mappings(_) | Item::Event(_) | Item::ThreadEnded(_) => {}
        }
    }

    pub(crate) fn thread(&self, id: ThreadId) -> Option<&Thread> {
        self.threads.known.get(id.0 as usize)?.as_ref()
    }

    /// Nothing more will come of a thread.
    pub(crate) fn thread_ended(&mut self, id: ThreadId) {
        self.ended.push(id);
    }

    /// Threads that have ended and that no file names any more: what is held is named by the newest.
    pub(crate) fn take_free_threads(&mut self) -> Vec<ThreadId> {
        let (threads, oldest) = (&mut self.threads, self.oldest);
        let gone = self.ended.extract_if(.., |id| threads.newest(id.0) < oldest);
        let gone: Vec<ThreadId> = gone.collect();
        for id in &gone {
            threads.forget(id.0);
        }
        gone
    }

    /// Writes what an event names, where the file does not have it yet.
    pub(crate) fn need(&mut self, event: &Event, writer: &mut Writer<TraceFile>) {
        if let Some(thread) = self.threads.missing(event.thread.0, self.segment) {
            writer.thread(event.thread, thread);
        }
        if event.stack != StackId(0) {
            self.need_stack(event.stack, writer, DEEPEST);
        }
        match &event.kind {
            EventKind::Call(call) => self.need_communicator(call.comm, writer),
            EventKind::NcclEnter(enter) => self.need_communicator(enter.comm, writer),
            EventKind::NcclTiming(timing) => self.need_communicator(timing.comm, writer),
            EventKind::Mark(mark) => {
                self.need_text(mark.text, writer);
                self.need_text(mark.domain, writer);
            }
            EventKind::Pjrt(pjrt) => self.need_text(pjrt.text, writer),
            EventKind::PjrtExecutable(made) => self.need_text(made.name, writer),
            EventKind::BlockAlloc(_) | EventKind::BlockFree(_) | EventKind::BlockOom(_) => {}
            EventKind::Wait(_) | EventKind::Sample(_) | EventKind::NcclExit(_) => {}
            EventKind::Lost(_) | EventKind::Note(_) => {}
        }
    }

    fn need_text(&mut self, id: TextId, writer: &mut Writer<TraceFile>) {
        if id != TextId(0)
            && let Some(text) = self.texts.missing(id.0, self.segment)
        {
            writer.text(id, text);
        }
    }

    fn need_communicator(&mut self, id: CommId, writer: &mut Writer<TraceFile>) {
        let mut id = id;
        while id != CommId(0)
            && let Some(communicator) = self.communicators.missing(id.0, self.segment)
        {
            writer.communicator(id, communicator);
            id = communicator.parent;
        }
    }

    fn need_stack(&mut self, id: StackId, writer: &mut Writer<TraceFile>, deep: usize) {
        let Some(stack) = self.stacks.missing(id.0, self.segment) else { return };
        for frame in &stack.frames {
            if let Some(known) = self.frames.missing(frame.0, self.segment) {
                writer.frame(*frame, known);
            }
        }
        writer.stack(id, stack);
        let others = stack.backward.as_ref().map(|backward| [backward.forward, backward.caller]);
        for other in others.into_iter().flatten().filter(|other| *other != StackId(0) && deep > 0) {
            self.need_stack(other, writer, deep - 1);
        }
    }
}
