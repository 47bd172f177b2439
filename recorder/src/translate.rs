//! Records of the ring to what a trace says. Only this file and those in its folder know both.
//!
//! A [`Translator`] has a room for each kind of thing that a trace names by number. [`Translator::define`] takes a definition to its
//! room; [`Translator::event`] asks the rooms for the numbers of what an event names. Each gives what is to be written as [`Item`]s.

mod apis;
mod backwards;
mod communicators;
mod frames;
mod modules;
mod stacks;
mod texts;
mod threads;
mod words;

use crate::autograd::Context;
use crate::decode::Record;
use crate::drain::{Happened, Lane, Stamped};
use crate::item::{BATCH, FreeThreads, Item, own_event};
use crate::oom::{self, Failure};
use crate::symbols::Symbols;
use crate::ticks::Timeline;
use apis::Apis;
use backwards::Backwards;
use communicators::Communicators;
use frames::Frames;
use gputrace_ring::record::{self, MarkAction as RingMarkAction};
use gputrace_schemas::event::{
    Api, CommId, Device, Event, EventKind, Frame, FrameId, Lost, LostCause, Mappings, Mark, Module, ModuleId,
    Nanos, Process, Stack, StackId, Thread, ThreadId,
};
use modules::Modules;
use stacks::{Definition, Stacks};
use texts::Texts;
use threads::Threads;

/// Everything that has been given a number.
pub(crate) struct Translator {
    items: Vec<Item>,
    threads: Threads,
    apis: Apis,
    texts: Texts,
    devices: Vec<Device>,
    communicators: Communicators,
    modules: Modules,
    frames: Frames,
    stacks: Stacks,
    backwards: Backwards,
}

impl Translator {
    pub(crate) fn new() -> Translator {
        let mut items = Vec::new();
        Translator {
            threads: Threads::new(&mut items),
            items,
            apis: Apis::default(),
            texts: Texts::default(),
            devices: Vec::new(),
            communicators: Communicators::default(),
            modules: Modules::default(),
            frames: Frames::default(),
            stacks: Stacks::default(),
            backwards: Backwards::default(),
        }
    }

    /// What has been made since the last time.
    pub(crate) fn take(&mut self) -> Vec<Item> {
        // After a full batch comes another, as a rule. One that grew by doubling would have room for twice as many, for as long as it waits.
        let room = if self.items.len() < BATCH { 0 } else { BATCH + BATCH / 8 };
        std::mem::replace(&mut self.items, Vec::with_capacity(room))
    }

    pub(crate) fn n_items(&self) -> usize {
        self.items.len()
    }

    /// Stacks that had the same 64-bit id and other frames.
    pub(crate) fn n_collisions(&self) -> u64 {
        self.stacks.n_collisions()
    }

    /// Whether there were more texts than are kept: marks have lost their names.
    pub(crate) fn texts_are_full(&self) -> bool {
        self.texts.are_full()
    }

    pub(crate) fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub(crate) fn process(&mut self, process: Process) {
        self.items.push(Item::Process(Box::new(process)));
    }

    pub(crate) fn mappings(&mut self, mappings: Mappings) {
        self.items.push(Item::Mappings(mappings));
    }

    /// From here on, threads get numbers that are given back there.
    pub(crate) fn take_numbers_from(&mut self, free: FreeThreads) {
        self.threads.take_numbers_from(free);
    }

    /// Begins a life of a thread.
    pub(crate) fn lane(&mut self, lane: Lane, tid: u32, name: String) {
        self.threads.begin(lane, Thread { tid, name }, &mut self.items);
    }

    /// Nothing more will come of a thread.
    pub(crate) fn end_lane(&mut self, lane: Lane) {
        self.threads.end(lane, &mut self.items);
        self.backwards.autograd.end_lane(lane);
    }

    /// Looks for new names of the threads that write.
    pub(crate) fn rename_threads(&mut self, name_of: impl Fn(u32) -> Option<String>) {
        self.threads.rename(name_of, &mut self.items);
    }

    /// Those of the modules that are not known yet.
    pub(crate) fn unknown_modules(&self, found: &[Module]) -> Vec<Module> {
        self.modules.unknown(found)
    }

    /// Adds modules.
    pub(crate) fn modules(&mut self, found: Vec<Module>) {
        self.modules.add(found, &mut self.items);
    }

    /// The release of PyTorch, which decides what can be read of its backward pass.
    pub(crate) fn torch_version(&mut self, now: Nanos, version: &str) {
        if let Some(note) = self.backwards.release(version) {
            self.note(now, note);
        }
    }

    /// A definition.
    pub(crate) fn define(&mut self, definition: Record) {
        let items = &mut self.items;
        match definition {
            Record::Stack { id, native, python, truncated } => {
                let definition = Definition { id, native: &native, python: &python, truncated };
                if self.stacks.define(&definition, &mut self.frames, &self.modules, items) {
                    self.backwards.defined(id, &mut self.stacks, items);
                }
            }
            Record::Code(code) => self.frames.code(code, items),
            Record::Api { number, name, runtime_name } => {
                self.apis.define(number, Api { name, runtime_name }, items);
            }
            Record::Device { ordinal, name, uuid, total } => {
                let device = words::device(ordinal, name, uuid, total);
                if !self.devices.contains(&device) {
                    self.devices.push(device.clone());
                    items.push(Item::Device(device));
                }
            }
            Record::Runtime(address) => self.modules.runtime(address, items),
            Record::Text { id, text } => self.texts.define(id, text, items),
            Record::Communicator { definition, name, net_name } if definition.id != 0 => {
                let communicator = words::communicator(&definition, name, net_name);
                self.communicators.define(CommId(definition.id), communicator, items);
            }
            Record::NodeClass { number, name } => self.backwards.autograd.class(number, name),
            Record::Forward(forward) => self.backwards.autograd.forward(&forward),
            // Events, and a communicator without a number.
            Record::Call(..) | Record::CallEnd(_) | Record::Wait(..) | Record::Mark(..) | Record::Note(_) => {
            }
            Record::BlockAlloc(_) | Record::BlockFree(..) | Record::BlockOom(_) => {}
            Record::Node(_) | Record::Backward(_) | Record::Pjrt(..) | Record::PjrtExecutable(_) => {}
            Record::NcclEnter(..) | Record::NcclExit(..) | Record::NcclTiming(_) => {}
            Record::Communicator { .. } => {}
        }
    }

    /// An event; what it says of memory that could not be had.
    pub(crate) fn event(&mut self, stamped: Stamped, timeline: &Timeline) -> Option<Failure> {
        let thread = self.threads.of(stamped.lane);
        let time = Nanos(timeline.nanos(stamped.ticks));
        let lasted = |ticks| Nanos(timeline.nanos_in(ticks));
        let (stack, kind) = match stamped.what {
            Happened::Call { call, action, result, duration } => {
                let api = self.apis.id(call.api.into());
                (call.stack, EventKind::Call(words::call(&call, api, action, result, lasted(duration))))
            }
            Happened::BlockAlloc(alloc) => (alloc.stack, EventKind::BlockAlloc(words::block_alloc(&alloc))),
            Happened::BlockFree(free, flags) => {
                (free.stack, EventKind::BlockFree(words::block_free(&free, flags)))
            }
            Happened::BlockOom(oom) => (oom.stack, EventKind::BlockOom(words::block_oom(&oom))),
            Happened::Wait(wait, action) => (0, EventKind::Wait(words::wait(&wait, action))),
            Happened::Mark(mark, action) => (0, EventKind::Mark(self.mark(&mark, action))),
            Happened::Note(text) => (0, EventKind::Note(text)),
            Happened::NcclEnter(enter, op) => {
                let api = self.apis.id(enter.api.into());
                (enter.stack, EventKind::NcclEnter(words::nccl_enter(&enter, api, op)))
            }
            Happened::NcclExit(exit, timed) => {
                (0, EventKind::NcclExit(words::nccl_exit(&exit, timed, lasted(exit.duration))))
            }
            Happened::NcclTiming(timing) => (0, EventKind::NcclTiming(words::nccl_timing(&timing))),
            Happened::Pjrt(pjrt, action, origin) => {
                let id = self.texts.id(pjrt.text);
                let text = (id, self.texts.get(pjrt.text).unwrap_or_default());
                (pjrt.stack, EventKind::Pjrt(words::pjrt(&pjrt, (action, origin), text)))
            }
            Happened::PjrtExecutable(made) => {
                let name = self.texts.id(made.text);
                (made.stack, EventKind::PjrtExecutable(words::pjrt_executable(&made, name)))
            }
            Happened::Backward(backward) => {
                self.backwards.autograd.backward(stamped.lane, backward);
                return None;
            }
        };
        let context = match stack {
            0 => Context::default(),
            _ => {
                let is_engine = self.threads.is_of_autograd(thread);
                self.backwards.autograd.context(stamped.lane, &stamped.node, is_engine)
            }
        };
        let stack = self.backwards.id(stack, context, &mut self.stacks, &mut self.items);
        let event = Event { time, thread, stack, kind };
        let failure = oom::failure(&event);
        self.push(event);
        failure
    }

    fn mark(&mut self, mark: &record::Mark, action: RingMarkAction) -> Mark {
        let texts = (self.texts.id(mark.text), self.texts.id(mark.domain));
        if action == RingMarkAction::NameThread
            && let (Ok(tid), Some(name)) = (u32::try_from(mark.range), self.texts.get(mark.text))
        {
            self.threads.name(tid, name, &mut self.items);
        }
        words::mark(mark, action, texts)
    }

    /// Something the recorder has to say itself.
    pub(crate) fn note(&mut self, time: Nanos, text: String) {
        self.items.push(own_event(time, EventKind::Note(text)));
    }

    /// Events that are missing before this moment.
    pub(crate) fn lost(&mut self, time: Nanos, cause: LostCause, events: u64) {
        self.items.push(own_event(time, EventKind::Lost(Lost { cause, events })));
    }

    pub(crate) fn push(&mut self, event: Event) {
        self.items.push(Item::Event(event));
    }

    /// A thread whose stack was read from outside.
    pub(crate) fn thread_of(&mut self, tid: u32, name: &str) -> ThreadId {
        self.threads.of_tid(tid, name, &mut self.items)
    }

    /// A frame of such a stack.
    pub(crate) fn frame(&mut self, frame: Frame) -> FrameId {
        self.frames.add(frame, &mut self.items)
    }

    /// The newest module with this address.
    pub(crate) fn module_at(&self, address: u64) -> Option<ModuleId> {
        self.modules.at(address)
    }

    /// Such a stack.
    pub(crate) fn stack(&mut self, stack: Stack) -> StackId {
        let id = self.stacks.new_id();
        self.items.push(Item::Stack(id, stack));
        id
    }

    /// Gives the addresses of used stacks their functions and lines, as far as `symbols` gets in its time: how many it did not
    /// get to.
    pub(crate) fn symbolise(&mut self, symbols: &mut Symbols<'_>) -> usize {
        let Translator { items, modules, frames, stacks, backwards, .. } = self;
        let wanted = frames.unresolved(stacks.used_frames());
        let found = symbols.resolve(&wanted, modules.all(), |address| modules.at(address));
        let n_late = wanted.len() - found.len();
        for resolved in found {
            frames.resolved(resolved, items);
        }
        stacks.unfold(frames, items);
        backwards.unfold(stacks, items);
        n_late
    }

    /// What was left out because reading it takes too much memory.
    pub(crate) fn too_large(&self, symbols: &Symbols<'_>) -> Vec<String> {
        symbols.too_large(self.modules.all())
    }
}
