//! Records of the ring to what a trace says: the only file that knows both.

use crate::autograd::{Autograd, Context, RELEASES};
use crate::decode::{Code, Record};
use crate::drain::{Happened, Lane, Stamped};
use crate::merge_stack::{MergedFrame, merge_stack};
use crate::oom::{self, Failure};
use crate::pjrt::asked_for;
use crate::process;
use crate::python_lines::line_at;
use crate::symbols::{self, Symbols, demangle};
use crate::ticks::Timeline;
use gputrace_ring::record::{
    self, Action as RingAction, Call as RingCall, MarkAction as RingMarkAction, NcclOp as RingNcclOp,
    NcclTimed as RingNcclTimed, PjrtAction as RingPjrtAction, PjrtOrigin as RingPjrtOrigin, StackDef,
    WaitAction as RingWaitAction, unpack_device,
};
use gputrace_schemas::event::{
    Action, Api, ApiId, Backward, BlockAlloc, BlockFree, BlockOom, Bytes, Call, CommConfig, CommId,
    Communicator, Device, Event, EventKind, Frame, FrameId, HOST, Lost, LostCause, Mappings, Mark,
    MarkAction, Module, ModuleId, Nanos, NcclEnter, NcclExit, NcclOp, NcclTimed, NcclTiming, Pjrt,
    PjrtAction, PjrtExecutable, PjrtOrigin, Process, Stack, StackId, TextId, Thread, ThreadId, Wait,
    WaitAction,
};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// What the writing thread gets.
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

/// Texts that a trace keeps: a program that gives every mark a name of its own (`emit_nvtx` does) fills no memory.
const MOST_TEXTS: usize = 1 << 18;

/// Everything that has been given a number.
pub(crate) struct Translator {
    pub(crate) items: Vec<Item>,
    pub(crate) threads: Vec<Thread>,
    lanes: HashMap<Lane, ThreadId>,
    free_threads: FreeThreads,
    apis: HashMap<u64, (ApiId, Api)>,
    stacks: HashMap<u64, KnownStack>,
    /// Stacks in the backward pass, by the id of the ring.
    backwards: HashMap<(u64, Context), StackId>,
    pub(crate) n_stacks: u32,
    autograd: Autograd,
    natives: HashMap<u64, FrameId>,
    pythons: HashMap<(u64, u64), FrameId>,
    frames: Vec<Frame>,
    codes: HashMap<u64, Code>,
    modules: Vec<Module>,
    /// Where libgputrace.so lies.
    ours: Range<u64>,
    runtimes: Vec<u64>,
    /// Texts by the shim's id; empty ones were not defined yet.
    texts: HashMap<u64, (TextId, String)>,
    /// Names that the program gave to threads, by kernel thread id.
    thread_names: HashMap<u32, String>,
    devices: Vec<Device>,
    /// Names of communicators.
    communicators: HashMap<CommId, (String, String)>,
    n_collisions: u64,
    /// Addresses whose functions are known, or cannot be.
    resolved: HashSet<u64>,
    /// The frames that stand before a frame because they were inlined into it.
    inlined: HashMap<FrameId, Vec<FrameId>>,
}

struct KnownStack {
    id: StackId,
    /// Without functions that were inlined: their names come later.
    stack: Option<Stack>,
    /// As it was written last, if that is different.
    shown: Option<Stack>,
    used: bool,
}

impl Translator {
    pub(crate) fn new() -> Translator {
        let mut new = Translator {
            items: Vec::new(),
            threads: Vec::new(),
            lanes: HashMap::new(),
            free_threads: FreeThreads::default(),
            apis: HashMap::new(),
            stacks: HashMap::new(),
            backwards: HashMap::new(),
            n_stacks: 0,
            autograd: Autograd::default(),
            natives: HashMap::new(),
            pythons: HashMap::new(),
            frames: Vec::new(),
            codes: HashMap::new(),
            modules: Vec::new(),
            ours: 0..0,
            runtimes: Vec::new(),
            texts: HashMap::new(),
            thread_names: HashMap::new(),
            devices: Vec::new(),
            communicators: HashMap::new(),
            n_collisions: 0,
            resolved: HashSet::new(),
            inlined: HashMap::new(),
        };
        new.thread(Thread { tid: 0, name: "gputrace recorder".to_owned() });
        new
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
        self.n_collisions
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

    /// Begins a life of a thread.
    pub(crate) fn lane(&mut self, lane: Lane, tid: u32, name: String) {
        let id = self.thread(Thread { tid, name });
        self.lanes.insert(lane, id);
    }

    pub(crate) fn thread(&mut self, thread: Thread) -> ThreadId {
        let free = self.free_threads.lock().ok().and_then(|mut free| free.pop());
        let known = free.and_then(|id| Some((id, self.threads.get_mut(id.0 as usize)?)));
        let id = match known {
            Some((id, slot)) => {
                slot.clone_from(&thread);
                id
            }
            None => {
                self.threads.push(thread.clone());
                ThreadId(self.threads.len() as u32 - 1)
            }
        };
        self.items.push(Item::Thread(id, thread));
        id
    }

    /// From here on, threads get numbers that are given back there.
    pub(crate) fn take_numbers_from(&mut self, free: FreeThreads) {
        self.free_threads = free;
    }

    /// Nothing more will come of a thread.
    pub(crate) fn end_lane(&mut self, lane: Lane) {
        if let Some(id) = self.lanes.remove(&lane) {
            self.items.push(Item::ThreadEnded(id));
        }
        self.autograd.end_lane(lane);
    }

    /// Looks for new names of the threads that write: a process may have had a hundred thousand others before.
    pub(crate) fn rename_threads(&mut self, name_of: impl Fn(u32) -> Option<String>) {
        let mut ids: Vec<ThreadId> = self.lanes.values().copied().collect();
        ids.sort_unstable_by_key(|id| id.0);
        for id in ids {
            let Some(thread) = self.threads.get_mut(id.0 as usize) else { continue };
            // What the program calls a thread says more than what the kernel does.
            let name = self.thread_names.get(&thread.tid).cloned().or_else(|| name_of(thread.tid));
            if let Some(name) = name.filter(|name| *name != thread.name) {
                thread.name = name;
                self.items.push(Item::Thread(id, thread.clone()));
            }
        }
    }

    /// Those of the modules that are not known yet.
    pub(crate) fn unknown_modules(&self, found: &[Module]) -> Vec<Module> {
        let known: HashSet<_> =
            self.modules.iter().map(|module| (module.start, module.end, &module.path)).collect();
        let is_new = |module: &&Module| !known.contains(&(module.start, module.end, &module.path));
        found.iter().filter(is_new).cloned().collect()
    }

    /// Adds modules.
    pub(crate) fn modules(&mut self, found: Vec<Module>) {
        for mut module in found {
            module.has_runtime = self.runtimes.iter().any(|address| contains(&module, *address));
            if module.path.ends_with("/libgputrace.so") {
                self.ours = module.start..module.end;
            }
            let id = ModuleId(self.modules.len() as u32);
            self.items.push(Item::Module(id, module.clone()));
            self.modules.push(module);
        }
    }

    /// The newest module with this address: what was unmapped before it does not count.
    pub(crate) fn module_at(&self, address: u64) -> Option<ModuleId> {
        let at = self.modules.iter().rposition(|module| contains(module, address))?;
        Some(ModuleId(at as u32))
    }

    fn runtime(&mut self, address: u64) {
        self.runtimes.push(address);
        if let Some(ModuleId(id)) = self.module_at(address)
            && let Some(module) = self.modules.get_mut(id as usize)
            && !module.has_runtime
        {
            module.has_runtime = true;
            self.items.push(Item::Module(ModuleId(id), module.clone()));
        }
    }

    /// A definition.
    pub(crate) fn define(&mut self, definition: Record) {
        match definition {
            Record::Stack { id, native, python, truncated } => self.stack(id, &native, &python, truncated),
            Record::Code(code) => self.code(code),
            Record::Api { number, name, runtime_name } => self.api(number, Api { name, runtime_name }),
            Record::Device { ordinal, name, uuid, total } => {
                let uuid = process::gpu_uuid(&name, uuid);
                let ordinal = i16::try_from(ordinal).unwrap_or(gputrace_schemas::event::NO_DEVICE);
                let device = Device { ordinal, name, uuid, total: Bytes(total) };
                if !self.devices.contains(&device) {
                    self.devices.push(device.clone());
                    self.items.push(Item::Device(device));
                }
            }
            Record::Runtime(address) => self.runtime(address),
            Record::Text { id, text } => self.text(id, text),
            Record::Communicator { definition, name, net_name } if definition.id != 0 => {
                self.communicator(communicator(&definition, name, net_name), CommId(definition.id));
            }
            Record::NodeClass { number, name } => self.autograd.class(number, name),
            Record::Forward(forward) => self.autograd.forward(&forward),
            // Events, and a communicator without a number.
            Record::Call(..) | Record::CallEnd(_) | Record::Wait(..) | Record::Mark(..) | Record::Note(_) => {
            }
            Record::BlockAlloc(_) | Record::BlockFree(..) | Record::BlockOom(_) => {}
            Record::Node(_) | Record::Backward(_) | Record::Pjrt(..) | Record::PjrtExecutable(_) => {}
            Record::NcclEnter(..) | Record::NcclExit(..) | Record::NcclTiming(_) => {}
            Record::Communicator { .. } => {}
        }
    }

    fn text(&mut self, id: u64, text: String) {
        let number = self.text_id(id);
        // Each thread sends a text once, so several threads send it several times.
        if let Some((_, known)) = self.texts.get_mut(&id).filter(|(_, known)| known.is_empty()) {
            known.clone_from(&text);
            self.items.push(Item::Text(number, text));
        }
    }

    fn text_id(&mut self, id: u64) -> TextId {
        if id == 0 || (self.texts.len() >= MOST_TEXTS && !self.texts.contains_key(&id)) {
            return TextId(0);
        }
        let next = TextId(self.texts.len() as u32 + 1);
        self.texts.entry(id).or_insert_with(|| (next, String::new())).0
    }

    /// Whether there were more texts than are kept: marks have lost their names.
    pub(crate) fn texts_are_full(&self) -> bool {
        self.texts.len() >= MOST_TEXTS
    }

    /// Names are sent once: when the rest is known, the program's structure is gone.
    fn communicator(&mut self, mut communicator: Communicator, id: CommId) {
        let CommConfig { name, net_name, .. } = &mut communicator.config;
        let (known, known_net) = self.communicators.entry(id).or_default();
        for (new, old) in [(name, known), (net_name, known_net)] {
            if new.is_empty() {
                new.clone_from(old);
            } else {
                old.clone_from(new);
            }
        }
        self.items.push(Item::Communicator(id, Box::new(communicator)));
    }

    fn api(&mut self, number: u64, api: Api) {
        let id = self.api_id(number);
        if let Some((_, known)) = self.apis.get_mut(&number)
            && *known != api
        {
            *known = api.clone();
            self.items.push(Item::Api(id, api));
        }
    }

    fn api_id(&mut self, number: u64) -> ApiId {
        let next = ApiId(self.apis.len() as u32);
        self.apis.entry(number).or_insert_with(|| (next, Api::default())).0
    }

    fn stack(&mut self, id: u64, native: &[u64], python: &[(u64, u64)], truncated: bool) {
        let is_entry: Vec<bool> = python.iter().map(|(_, place)| place & StackDef::ENTRY != 0).collect();
        // Our own frames stand between a program and the library whose functions we wrap.
        let is_ours = |word: &u64| self.ours.contains(&(word & !StackDef::INTERPRETER));
        let theirs = native.iter().copied().filter(|word| !is_ours(word));
        let native: Vec<u64> = theirs.collect();
        let merged = merge_stack(&native, &is_entry).into_iter().filter_map(|frame| match frame {
            MergedFrame::Native(at) => Some(self.native_frame(native.get(at)? & !StackDef::INTERPRETER)),
            MergedFrame::Python(at) => python.get(at).map(|(code, place)| self.python_frame(*code, *place)),
        });
        let frames = merged.collect();
        let stack = Stack { frames, truncated, backward: None };
        let known = self.known_stack(id);
        match &known.stack {
            // Each thread sends a stack once, so several threads send it several times.
            Some(other) if *other == stack => {}
            Some(_) => self.n_collisions += 1,
            None => {
                known.stack = Some(stack.clone());
                let known = known.id;
                self.items.push(Item::Stack(known, stack));
                // Where another thread's copy of the definition came after what names it.
                let early = self.backwards.keys().filter(|(of, _)| *of == id).cloned().collect();
                self.write_backwards(early);
            }
        }
    }

    fn known_stack(&mut self, id: u64) -> &mut KnownStack {
        let n_stacks = &mut self.n_stacks;
        self.stacks.entry(id).or_insert_with(|| {
            *n_stacks += 1;
            KnownStack { id: StackId(*n_stacks), stack: None, shown: None, used: false }
        })
    }

    fn stack_id(&mut self, id: u64) -> StackId {
        if id == 0 || id == StackDef::EMPTY {
            return StackId(0);
        }
        // Its definition was lost, or another thread's copy is on its way.
        let known = self.known_stack(id);
        known.used = true;
        known.id
    }

    /// The stack of an event of the backward pass.
    fn backward_stack_id(&mut self, id: u64, context: Context) -> StackId {
        let key = (id, context);
        if let Some(known) = self.backwards.get(&key) {
            return *known;
        }
        for part in [key.0, key.1.forward, key.1.caller] {
            self.stack_id(part);
        }
        self.n_stacks += 1;
        let stack = StackId(self.n_stacks);
        self.backwards.insert(key.clone(), stack);
        self.write_backwards(vec![key]);
        stack
    }

    /// Writes what stacks of the backward pass are now: their frames are those of others.
    fn write_backwards(&mut self, keys: Vec<(u64, Context)>) {
        for (id, context) in keys {
            let Some(known) = self.backwards.get(&(id, context.clone())).copied() else { continue };
            let own = self.stacks.get(&id).and_then(|own| own.shown.as_ref().or(own.stack.as_ref()));
            let mut stack = own.cloned().unwrap_or_default();
            stack.backward = Some(Box::new(Backward {
                node: class_name(self.autograd.class_name(context.class)),
                forward: self.stack_id(context.forward),
                caller: self.stack_id(context.caller),
                is_caller_inferred: context.is_caller_inferred,
            }));
            self.items.push(Item::Stack(known, stack));
        }
    }

    /// The release of PyTorch, which decides what can be read of its backward pass.
    pub(crate) fn torch_version(&mut self, now: Nanos, version: &str) {
        self.autograd.release(version);
        if self.autograd.is_other_release() {
            let (first, last) = (RELEASES.start(), RELEASES.end());
            let known = format!("{}.{} to {}.{}", first.0, first.1, last.0, last.1);
            self.note(now, format!("torch.backward=unseen: PyTorch {version} is none of {known}"));
        }
    }

    fn native_frame(&mut self, address: u64) -> FrameId {
        if let Some(id) = self.natives.get(&address) {
            return *id;
        }
        let module = self.module_at(address);
        let (function, file) = (String::new(), String::new());
        let id = self.frame(Frame::Native { address, module, function, file, line: 0, inlined: false });
        self.natives.insert(address, id);
        id
    }

    fn python_frame(&mut self, code: u64, instruction: u64) -> FrameId {
        if let Some(id) = self.pythons.get(&(code, instruction)) {
            return *id;
        }
        let id = self.frame(python_frame(self.codes.get(&code), instruction));
        self.pythons.insert((code, instruction), id);
        id
    }

    pub(crate) fn frame(&mut self, frame: Frame) -> FrameId {
        let id = FrameId(self.frames.len() as u32);
        self.items.push(Item::Frame(id, frame.clone()));
        self.frames.push(frame);
        id
    }

    fn redefine(&mut self, id: FrameId, frame: Frame) {
        if let Some(known) = self.frames.get_mut(id.0 as usize)
            && *known != frame
        {
            *known = frame.clone();
            self.items.push(Item::Frame(id, frame));
        }
    }

    fn code(&mut self, code: Code) {
        if self.codes.contains_key(&code.id) {
            return;
        }
        // Frames of it that came first, from a thread whose own copy was lost.
        let early = self.pythons.iter().filter(|((of, _), _)| *of == code.id);
        let early: Vec<(FrameId, u64)> = early.map(|((_, instruction), id)| (*id, *instruction)).collect();
        for (id, instruction) in early {
            self.redefine(id, python_frame(Some(&code), instruction));
        }
        self.codes.insert(code.id, code);
    }

    /// An event; what it says of memory that could not be had.
    pub(crate) fn event(&mut self, stamped: Stamped, timeline: &Timeline) -> Option<Failure> {
        let thread = self.lanes.get(&stamped.lane).copied().unwrap_or(RECORDER);
        let time = Nanos(timeline.nanos(stamped.ticks));
        let (stack, kind) = match stamped.what {
            Happened::Call { call, action, result, duration } => {
                let api = self.api_id(call.api.into());
                let duration = Nanos(timeline.nanos_in(duration));
                (call.stack, EventKind::Call(self::call(&call, api, action, result, duration)))
            }
            Happened::BlockAlloc(alloc) => (alloc.stack, EventKind::BlockAlloc(block_alloc(&alloc))),
            Happened::BlockFree(free, flags) => (free.stack, EventKind::BlockFree(block_free(&free, flags))),
            Happened::BlockOom(oom) => (oom.stack, EventKind::BlockOom(block_oom(&oom))),
            Happened::Wait(wait, action) => (0, EventKind::Wait(self::wait(&wait, action))),
            Happened::Mark(mark, action) => (0, EventKind::Mark(self.mark(&mark, action))),
            Happened::Note(text) => (0, EventKind::Note(text)),
            Happened::NcclEnter(enter, op) => {
                let api = self.api_id(enter.api.into());
                (enter.stack, EventKind::NcclEnter(nccl_enter(&enter, api, op)))
            }
            Happened::NcclExit(exit, timed) => {
                let duration = Nanos(timeline.nanos_in(exit.duration));
                let (call, result, value) = (exit.call, exit.result, exit.value);
                let timed = nccl_timed(timed);
                (0, EventKind::NcclExit(NcclExit { call, result, value, duration, timed }))
            }
            Happened::NcclTiming(timing) => (0, EventKind::NcclTiming(nccl_timing(&timing))),
            Happened::Pjrt(pjrt, action, origin) => {
                (pjrt.stack, EventKind::Pjrt(self.pjrt(&pjrt, action, origin)))
            }
            Happened::PjrtExecutable(made) => {
                let name = self.text_id(made.text);
                (made.stack, EventKind::PjrtExecutable(pjrt_executable(&made, name)))
            }
            Happened::Backward(backward) => {
                self.autograd.backward(stamped.lane, backward);
                return None;
            }
        };
        let is_engine = || {
            self.threads.get(thread.0 as usize).is_some_and(|thread| thread.name.starts_with(ENGINE_THREAD))
        };
        let context = match stack {
            0 => Context::default(),
            _ => self.autograd.context(stamped.lane, &stamped.node, is_engine()),
        };
        let stack = if context == Context::default() {
            self.stack_id(stack)
        } else {
            self.backward_stack_id(stack, context)
        };
        let event = Event { time, thread, stack, kind };
        let failure = oom::failure(&event);
        self.push(event);
        failure
    }

    fn pjrt(&mut self, of: &record::Pjrt, action: RingPjrtAction, origin: RingPjrtOrigin) -> Pjrt {
        let (device, bytes) = unpack_device(of.device_bytes);
        let said = self.texts.get(&of.text).map_or("", |(_, text)| text);
        let asked = (action == RingPjrtAction::Failed).then(|| asked_for(said)).flatten();
        Pjrt {
            action: pjrt_action(action),
            origin: pjrt_origin(origin),
            device: device.into(),
            buffer: of.buffer,
            executable: of.executable,
            bytes: Bytes(asked.unwrap_or(bytes)),
            code: of.code,
            text: self.text_id(of.text),
        }
    }

    fn mark(&mut self, mark: &record::Mark, action: RingMarkAction) -> Mark {
        let (text, domain) = (self.text_id(mark.text), self.text_id(mark.domain));
        if action == RingMarkAction::NameThread
            && let (Ok(tid), Some((_, name))) = (u32::try_from(mark.range), self.texts.get(&mark.text))
        {
            self.thread_names.insert(tid, name.clone());
            self.rename_threads(|_| None);
        }
        Mark { action: mark_action(action), text, domain, range: mark.range, category: mark.category }
    }

    /// Something the recorder has to say itself.
    pub(crate) fn note(&mut self, time: Nanos, text: String) {
        self.push(Event { time, thread: RECORDER, stack: StackId(0), kind: EventKind::Note(text) });
    }

    /// Events that are missing before this moment.
    pub(crate) fn lost(&mut self, time: Nanos, cause: LostCause, events: u64) {
        let kind = EventKind::Lost(Lost { cause, events });
        self.push(Event { time, thread: RECORDER, stack: StackId(0), kind });
    }

    pub(crate) fn push(&mut self, event: Event) {
        self.items.push(Item::Event(event));
    }

    /// Gives the addresses of used stacks their functions and lines, as far as `symbols` gets in its time: how many it did not
    /// get to.
    pub(crate) fn symbolise(&mut self, symbols: &mut Symbols<'_>) -> usize {
        let mut wanted: Vec<u64> = Vec::new();
        for known in self.stacks.values().filter(|known| known.used) {
            for frame in known.stack.iter().flat_map(|stack| &stack.frames) {
                if let Some(Frame::Native { address, .. }) = self.frames.get(frame.0 as usize) {
                    wanted.push(*address);
                }
            }
        }
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|address| !self.resolved.contains(address));
        let found = symbols.resolve(&wanted, &self.modules, |address| self.module_at(address));
        let n_late = wanted.len() - found.len();
        // What each frame becomes: itself, after the functions that were inlined into it.
        for resolved in found {
            let address = resolved.0;
            self.resolved.insert(address);
            let Some(id) = self.natives.get(&address).copied() else { continue };
            let Some((outermost, inner)) = symbols::frames(resolved) else { continue };
            self.redefine(id, outermost);
            let inner: Vec<FrameId> = inner.into_iter().map(|frame| self.frame(frame)).collect();
            if !inner.is_empty() {
                self.inlined.insert(id, inner);
            }
        }
        self.unfold_stacks();
        n_late
    }

    /// What was left out because reading it takes too much memory.
    pub(crate) fn too_large(&self, symbols: &Symbols<'_>) -> Vec<String> {
        symbols.too_large(&self.modules)
    }

    /// Writes the stacks again in which functions were inlined: these have frames of their own.
    fn unfold_stacks(&mut self) {
        for known in self.stacks.values_mut().filter(|known| known.used) {
            let Some(stack) = &known.stack else { continue };
            let frames = symbols::unfold(&stack.frames, &self.inlined);
            let stack = Stack { frames, truncated: stack.truncated, backward: None };
            if known.shown.as_ref().or(known.stack.as_ref()) != Some(&stack) {
                self.items.push(Item::Stack(known.id, stack.clone()));
                known.shown = Some(stack);
            }
        }
        let unfolded = |(of, _): &&(u64, Context)| self.stacks.get(of).is_some_and(|own| own.shown.is_some());
        let keys = self.backwards.keys().filter(unfolded).cloned().collect();
        self.write_backwards(keys);
    }
}

/// What the names of autograd's threads begin with (torch/csrc/autograd/engine.cpp, since 2.4).
const ENGINE_THREAD: &str = "pt_autograd";

/// `torch::autograd::generated::AddmmBackward0` of a class's mangled name.
fn class_name(mangled: &str) -> String {
    if mangled.is_empty() { String::new() } else { demangle(&format!("_Z{mangled}")) }
}

fn contains(module: &Module, address: u64) -> bool {
    (module.start..module.end).contains(&address)
}

/// A Python frame; the file and line are unknown where the code object is.
fn python_frame(code: Option<&Code>, instruction: u64) -> Frame {
    match code {
        Some(code) => Frame::Python {
            function: code.name.clone(),
            file: code.file.clone(),
            // The low half is the offset in bytes, the high half holds marks.
            line: line_at(code.python, &code.lines, code.first_line, instruction as i32).unwrap_or(0),
        },
        None => Frame::Python { function: String::new(), file: String::new(), line: 0 },
    }
}

fn call(call: &RingCall, api: ApiId, action: RingAction, result: Option<i32>, duration: Nanos) -> Call {
    let has = |flag| call.flags & flag != 0;
    Call {
        api,
        action: self::action(action),
        device: if has(RingCall::HOST) { HOST } else { call.device.into() },
        result,
        addr: call.addr,
        bytes: Bytes(call.bytes),
        stream: call.stream,
        handle: call.handle,
        extra: call.extra,
        duration,
        captured: has(RingCall::CAPTURED),
        in_allocate: has(RingCall::IN_ALLOCATE),
        comm: CommId(call.comm),
        nccl_call: call.nccl_call,
        nccl_thread: has(RingCall::NCCL_THREAD),
    }
}

fn known(number: u64) -> Option<u64> {
    (number != record::UNKNOWN).then_some(number)
}

fn block_alloc(alloc: &record::BlockAlloc) -> BlockAlloc {
    let (device, bytes) = unpack_device(alloc.device_bytes);
    BlockAlloc {
        device: device.into(),
        addr: alloc.addr,
        bytes: Bytes(bytes),
        requested: known(alloc.requested).map(Bytes),
        stream: known(alloc.stream),
        allocated: Bytes(alloc.allocated),
        reserved: Bytes(alloc.reserved),
    }
}

fn block_free(free: &record::BlockFree, flags: u8) -> BlockFree {
    let (device, bytes) = unpack_device(free.device_bytes);
    BlockFree {
        device: device.into(),
        addr: free.addr,
        bytes: Bytes(bytes),
        allocated: Bytes(free.allocated),
        reserved: Bytes(free.reserved),
        collecting: flags & record::BlockFree::COLLECTING != 0,
    }
}

fn block_oom(oom: &record::BlockOom) -> BlockOom {
    let (device, bytes) = unpack_device(oom.device_bytes);
    BlockOom {
        device: device.into(),
        bytes: Bytes(bytes),
        requested: known(oom.requested).map(Bytes),
        stream: known(oom.stream),
        allocated: Bytes(oom.allocated),
        reserved: Bytes(oom.reserved),
    }
}

fn mark_action(action: RingMarkAction) -> MarkAction {
    match action {
        RingMarkAction::Push => MarkAction::Push,
        RingMarkAction::Pop => MarkAction::Pop,
        RingMarkAction::Start => MarkAction::Start,
        RingMarkAction::End => MarkAction::End,
        RingMarkAction::Mark => MarkAction::Mark,
        RingMarkAction::NameThread => MarkAction::NameThread,
    }
}

fn wait(wait: &record::Wait, action: RingWaitAction) -> Wait {
    let action = match action {
        RingWaitAction::Record => WaitAction::Record,
        RingWaitAction::Query => WaitAction::Query,
        RingWaitAction::Synchronize => WaitAction::Synchronize,
    };
    Wait { event: wait.event, stream: wait.stream, action, result: wait.result }
}

fn nccl_enter(enter: &record::NcclEnter, api: ApiId, op: RingNcclOp) -> NcclEnter {
    NcclEnter {
        api,
        op: nccl_op(op),
        call: enter.call,
        comm: CommId(enter.comm),
        sequence: enter.sequence,
        group: enter.group,
        group_depth: enter.group_depth,
        count: enter.count,
        datatype: enter.datatype,
        redop: enter.redop,
        redop_call: enter.redop_call,
        peer: enter.peer,
        send: enter.send,
        receive: enter.receive,
        stream: enter.stream,
        handle: enter.handle,
        extra: enter.extra,
        captured: enter.marks & record::NcclEnter::CAPTURED != 0,
    }
}

fn nccl_timing(timing: &record::NcclTiming) -> NcclTiming {
    NcclTiming {
        call: timing.call,
        comm: CommId(timing.comm),
        timeline: timing.timeline,
        stream: timing.stream,
        start: Nanos(timing.start),
        duration: Nanos(timing.duration),
    }
}

fn pjrt_executable(of: &record::PjrtExecutable, name: TextId) -> PjrtExecutable {
    let [temporary, arguments, outputs, aliased, code] =
        [of.temporary, of.arguments, of.outputs, of.aliased, of.code].map(|bytes| known(bytes).map(Bytes));
    PjrtExecutable { executable: of.executable, name, temporary, arguments, outputs, aliased, code }
}

/// What was not asked for is no word of the trace.
fn nccl_timed(timed: RingNcclTimed) -> Option<NcclTimed> {
    match timed {
        RingNcclTimed::No => None,
        RingNcclTimed::Enqueued => Some(NcclTimed::Enqueued),
        RingNcclTimed::Capture => Some(NcclTimed::Capture),
        RingNcclTimed::NoEvents => Some(NcclTimed::NoEvents),
        RingNcclTimed::InProgress => Some(NcclTimed::InProgress),
        RingNcclTimed::Refused => Some(NcclTimed::Refused),
    }
}

fn communicator(of: &record::Communicator, name: String, net_name: String) -> Communicator {
    let has = |mark| of.marks & mark != 0;
    let [
        blocking,
        cga_cluster_size,
        min_ctas,
        max_ctas,
        split_share,
        traffic_class,
        nvls_ctas,
        max_p2p_peers,
    ] = of.config.map(|number| Some(number).filter(|number| *number != i32::MIN));
    Communicator {
        origin: u8::try_from(of.origin).ok().and_then(RingNcclOp::from_raw).map(nccl_op),
        call: of.call,
        handle: of.handle,
        unique_id: of.unique_id,
        comm_hash: has(record::Communicator::HAS_HASH).then_some(of.comm_hash),
        rank: u32::try_from(of.rank).ok(),
        n_ranks: u32::try_from(of.n_ranks).ok(),
        device: of.device,
        parent: CommId(of.parent),
        ordinal: of.ordinal,
        color: has(record::Communicator::HAS_COLOR).then_some(of.color),
        key: has(record::Communicator::HAS_COLOR).then_some(of.key),
        version: of.version,
        config: CommConfig {
            name,
            net_name,
            blocking,
            cga_cluster_size,
            min_ctas,
            max_ctas,
            split_share,
            traffic_class,
            nvls_ctas,
            max_p2p_peers,
        },
    }
}

/// As with [`action`].
macro_rules! same_words {
    ($name:ident: $ring:ident -> $trace:ident { $( $word:ident )* }) => {
        fn $name(of: $ring) -> $trace {
            match of { $( $ring::$word => $trace::$word, )* }
        }
    };
}

same_words! { pjrt_action: RingPjrtAction -> PjrtAction { Made Destroyed Deleted Donated Failed Executed Unloaded ClientGone } }
same_words! { pjrt_origin: RingPjrtOrigin -> PjrtOrigin { Unknown FromHost Uninitialized View Execute Copy Transfer Dependency Compile } }

/// One line an operation, as with [`action`].
macro_rules! nccl_ops {
    ($( $op:ident )*) => {
        fn nccl_op(of: RingNcclOp) -> NcclOp {
            match of { $( RingNcclOp::$op => NcclOp::$op, )* }
        }
    };
}

nccl_ops! {
    AllReduce Broadcast Reduce AllGather ReduceScatter AlltoAll Gather Scatter Send
    Receive PutSignal Signal WaitSignal GroupStart GroupEnd GroupSimulateEnd UniqueId CommInit
    CommInitAll CommSplit CommShrink CommGrow CommFinalize CommDestroy CommAbort CommRevoke
    CommSuspend CommResume AsyncError MemAlloc MemFree Register Deregister WindowRegister
    WindowDeregister RedOpCreate RedOpDestroy DevCommCreate DevCommDestroy
}

/// One line an action: a new one in the ring does not compile until the trace has a word for it.
macro_rules! actions {
    ($( $action:ident )*) => {
        fn action(of: RingAction) -> Action {
            match of { $( RingAction::$action => Action::$action, )* }
        }
    };
}

actions! {
    Alloc Free AllocAsync FreeAsync AllocManaged AllocHost FreeHost HostRegister HostUnregister Reserve Unreserve
    Create Release Retain Map Unmap SetAccess Export Import PoolCreate PoolDestroy PoolTrim PoolGet PoolSet IpcGet
    IpcOpen IpcClose ArrayCreate ArrayDestroy GraphAlloc GraphFree ContextCreate ContextDestroy PrimaryRetain
    PrimaryRelease PrimaryReset MemInfo MulticastCreate CaptureBegin CaptureEnd ImportPointer PoolShare Init
    PoolSelect PoolOf GraphInstantiate GraphLaunch GraphExecDestroy GraphDestroy GraphMemTrim GraphMemGet CodeLoad
    CodeUnload FunctionLoad LimitSet PeerEnable TorchPoolBegin TorchPoolEnd TorchPoolRelease TorchPoolCreate
    TorchPoolUseOnOom TorchPoolNoSplit TorchTrim HeapAlloc HeapFree Checkpoint
}

#[cfg(test)]
mod tests;
