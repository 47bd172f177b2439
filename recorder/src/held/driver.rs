//! What the driver handed out, and what was said of it, as the books of a reader keep it (`replay/trace/src/ledger/driver.rs`).

use super::graphs::Graphs;
use super::nccl::Nccl;
use super::{Born, Pairs, Table, driver_call};
use gputrace_schemas::event::{Action, Call, Event, HOST, Nanos, ThreadId};
use std::collections::{BTreeMap, HashMap, VecDeque};

/// Uses of a private pool of PyTorch's that are kept: they say which of what is held is in it.
const MOST_USES: usize = 128;

/// Where something is found again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Shelf {
    Device,
    Host,
    Array,
    Range,
    Heap,
    Pool,
    Context,
    Code,
    Capture,
}

/// The newest of its kind replaces the one before.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Said {
    Export(u64),
    PoolSet(u64, u64),
    PoolGet(u64, u64),
    PoolSelect(i16),
    PoolOf(i16, u64),
    Function(u64),
    /// The last step of a checkpoint of a process.
    Checkpoint(u64),
    Limit(i16, u64),
    Peer(i16, u64),
    UseOnOom(u64, u64),
    NoSplit(u64, u64),
    GraphTrim(i16),
    Init,
}

#[derive(Default)]
pub(super) struct Driver {
    objects: Pairs<(Shelf, u64), Born>,
    /// Contexts of what lies in another than the primary one.
    contexts: HashMap<(Shelf, u64), u64>,
    /// Contexts of each thread, the current one last.
    current: HashMap<ThreadId, Vec<u64>>,
    primary: BTreeMap<u64, Vec<Born>>,
    physical: Table<u64, Physical>,
    n_physical: u64,
    handles: Table<u64, u64>,
    maps: BTreeMap<u64, Mapped>,
    /// By the first address.
    accesses: BTreeMap<u64, Vec<Born>>,
    said: HashMap<Said, Born>,
    pools: HashMap<(u64, u64), TorchPool>,
    graphs: Graphs,
    /// What went away with a context, until something is handed out again.
    torn: Vec<Born>,
}

struct Mapped {
    born: Born,
    physical: u64,
    bytes: u64,
}

/// Memory of `cuMemCreate`: there while it is referred to or mapped.
#[derive(Default)]
struct Physical {
    births: Vec<Born>,
    references: u32,
    maps: u32,
    handles: Vec<u64>,
}

/// A private pool of PyTorch's allocator.
#[derive(Default)]
struct TorchPool {
    made: Vec<Born>,
    uses: VecDeque<Born>,
}

impl Driver {
    pub(super) fn call(&mut self, order: u64, event: &Event, call: &Call, nccl: &mut Nccl) {
        let born = || Born { order, event: event.clone() };
        if self.graphs.call(order, event, call) {
            return;
        }
        match call.action {
            Action::Alloc
            | Action::AllocAsync
            | Action::AllocManaged
            | Action::IpcOpen
            | Action::ImportPointer => self.begin((Shelf::Device, call.addr), born(), nccl),
            // Nodes of graphs are kept with their graph.
            Action::GraphAlloc | Action::GraphFree => {}
            Action::Free | Action::FreeAsync | Action::IpcClose => {
                self.said.remove(&Said::Export(call.addr));
                self.end((Shelf::Device, call.addr), event.time, nccl);
            }
            Action::AllocHost | Action::HostRegister => self.begin((Shelf::Host, call.addr), born(), nccl),
            Action::FreeHost | Action::HostUnregister => self.end((Shelf::Host, call.addr), event.time, nccl),
            Action::ArrayCreate => self.begin((Shelf::Array, call.handle), born(), nccl),
            Action::ArrayDestroy => self.end((Shelf::Array, call.handle), event.time, nccl),
            Action::HeapAlloc => self.begin((Shelf::Heap, call.addr), born(), nccl),
            Action::HeapFree => self.end((Shelf::Heap, call.addr), event.time, nccl),
            Action::Reserve => self.begin((Shelf::Range, call.addr), born(), nccl),
            Action::Unreserve => self.end((Shelf::Range, call.addr), event.time, nccl),
            Action::PoolCreate | Action::PoolShare => self.begin((Shelf::Pool, call.handle), born(), nccl),
            Action::PoolDestroy => {
                self.end((Shelf::Pool, call.handle), event.time, nccl);
                self.said.retain(|said, _| !is_of_pool(*said, call.handle));
            }
            Action::CodeLoad => self.begin((Shelf::Code, call.handle), born(), nccl),
            Action::CodeUnload => self.end((Shelf::Code, call.handle), event.time, nccl),
            Action::CaptureBegin => self.begin((Shelf::Capture, call.stream), born(), nccl),
            Action::CaptureEnd => self.end((Shelf::Capture, call.stream), event.time, nccl),
            Action::Create | Action::Import | Action::MulticastCreate => self.create(born(), call, nccl),
            Action::Retain => self.retain(born(), call),
            Action::Release => self.release(born(), call.handle, nccl),
            Action::Map => self.map(born(), call),
            Action::Unmap => self.unmap(call, event.time, nccl),
            Action::SetAccess => {
                let there = self.accesses.entry(call.addr).or_default();
                there.retain(|known| device(&known.event) != call.device);
                there.push(born());
            }
            Action::ContextCreate => {
                self.current.entry(event.thread).or_default().push(call.handle);
                self.begin((Shelf::Context, call.handle), born(), nccl);
            }
            Action::ContextDestroy => self.destroy_context(born(), call.handle, nccl),
            Action::PrimaryRetain => {
                self.primary.entry(call.extra).or_default().push(born());
            }
            Action::PrimaryRelease => {
                let retained = self.primary.entry(call.extra).or_default();
                let was_last = retained.len() == 1;
                if let Some(last) = retained.pop()
                    && was_last
                {
                    self.tear(|shelf| shelf.is_none(), Some(call.extra), nccl);
                    self.torn.extend([last, born()]);
                }
            }
            Action::PrimaryReset => {
                self.tear(|shelf| shelf.is_none(), Some(call.extra), nccl);
                self.torn.push(born());
            }
            Action::TorchPoolCreate => {
                self.pools.entry((call.handle, call.extra)).or_default().made.push(born());
            }
            Action::TorchPoolRelease => {
                let key = (call.handle, call.extra);
                if let Some(pool) = self.pools.get_mut(&key) {
                    pool.made.pop();
                    if pool.made.is_empty() {
                        self.pools.remove(&key);
                        self.said.remove(&Said::UseOnOom(key.0, key.1));
                        self.said.remove(&Said::NoSplit(key.0, key.1));
                    }
                }
            }
            Action::TorchPoolBegin | Action::TorchPoolEnd => {
                let uses = &mut self.pools.entry((call.handle, call.extra)).or_default().uses;
                if uses.len() >= MOST_USES {
                    uses.drain(..2);
                }
                uses.push_back(born());
            }
            Action::IpcGet => self.say(Said::Export(call.addr), born()),
            Action::Export => self.say(Said::Export(call.handle), born()),
            Action::PoolSet => self.say(Said::PoolSet(call.handle, call.extra), born()),
            Action::PoolGet => self.say(Said::PoolGet(call.handle, call.extra), born()),
            Action::PoolSelect => self.say(Said::PoolSelect(call.device), born()),
            Action::PoolOf => self.say(Said::PoolOf(call.device, call.handle), born()),
            Action::FunctionLoad => self.say(Said::Function(call.handle), born()),
            Action::LimitSet => self.say(Said::Limit(call.device, call.extra), born()),
            Action::PeerEnable => self.say(Said::Peer(call.device, call.handle), born()),
            Action::TorchPoolUseOnOom => self.say(Said::UseOnOom(call.handle, call.extra), born()),
            Action::TorchPoolNoSplit => self.say(Said::NoSplit(call.handle, call.extra), born()),
            Action::GraphMemTrim => self.say(Said::GraphTrim(call.device), born()),
            Action::Checkpoint => self.say(Said::Checkpoint(call.handle), born()),
            Action::Init => {
                self.said.entry(Said::Init).or_insert_with(born);
            }
            // Of graphs without memory, and questions.
            Action::GraphInstantiate | Action::GraphLaunch | Action::GraphExecDestroy => {}
            Action::GraphDestroy | Action::GraphMemGet | Action::PoolTrim => {}
            Action::MemInfo | Action::TorchTrim => {}
        }
    }

    pub(super) fn thread_ended(&mut self, thread: ThreadId) {
        self.current.remove(&thread);
    }

    /// Forgets births whose ends were lost.
    pub(super) fn settle(&mut self, since: Nanos, nccl: &mut Nccl) {
        for stale in self.objects.settle(|newer| newer.event.time < since) {
            nccl.gone(&stale.event);
        }
    }

    pub(super) fn events(&self, to: &mut Vec<Born>) {
        to.extend(self.objects.values().cloned());
        to.extend(self.primary.values().flatten().cloned());
        to.extend(self.physical.values().flat_map(|physical| &physical.births).cloned());
        to.extend(self.maps.values().map(|mapped| mapped.born.clone()));
        to.extend(self.accesses.values().flatten().cloned());
        to.extend(self.said.values().cloned());
        to.extend(self.pools.values().flat_map(|pool| pool.made.iter().chain(&pool.uses)).cloned());
        self.graphs.events(to);
        to.extend(self.torn.iter().cloned());
    }

    fn say(&mut self, what: Said, born: Born) {
        self.said.insert(what, born);
    }

    fn begin(&mut self, key: (Shelf, u64), born: Born, nccl: &mut Nccl) {
        if key.0 == Shelf::Device || key.0 == Shelf::Host {
            self.torn.clear();
        }
        if !self.current.is_empty() {
            let context = self.current.get(&born.event.thread).and_then(|stack| stack.last()).copied();
            match context {
                Some(context) => self.contexts.insert(key, context),
                None => self.contexts.remove(&key),
            };
        }
        nccl.born(&born.event);
        if let Some(lost) = self.objects.begin(key, born) {
            nccl.gone(&lost.event);
        }
    }

    fn end(&mut self, key: (Shelf, u64), time: Nanos, nccl: &mut Nccl) {
        if let Some(ended) = self.objects.end(key, |born| born.event.time <= time) {
            nccl.gone(&ended.event);
            if !self.contexts.is_empty() && !self.objects.newest.contains_key(&key) {
                self.contexts.remove(&key);
            }
        }
    }

    fn destroy_context(&mut self, born: Born, handle: u64, nccl: &mut Nccl) {
        for stack in self.current.values_mut() {
            stack.retain(|context| *context != handle);
        }
        self.current.retain(|_, stack| !stack.is_empty());
        self.tear(|context| context == Some(handle), None, nccl);
        if let Some(made) = self.objects.newest.remove(&(Shelf::Context, handle)) {
            self.torn.extend([made, born]);
        }
        self.contexts.retain(|_, context| *context != handle);
    }

    /// What lies in a context is gone; of a primary context what is on its device.
    fn tear(&mut self, is_in: impl Fn(Option<u64>) -> bool, of: Option<u64>, nccl: &mut Nccl) {
        let contexts = &self.contexts;
        let gone = self.objects.newest.extract_if(|key, born| {
            let is_memory = matches!(key.0, Shelf::Device | Shelf::Host | Shelf::Array);
            let its_device = if key.0 == Shelf::Host { HOST } else { device(&born.event) };
            let is_there = of.is_none_or(|device| i64::from(its_device) == device as i64);
            is_memory && is_there && is_in(contexts.get(key).copied())
        });
        for (_, born) in gone {
            nccl.gone(&born.event);
            self.torn.push(born);
        }
    }

    fn create(&mut self, born: Born, call: &Call, nccl: &mut Nccl) {
        nccl.born(&born.event);
        let id = self.n_physical;
        self.n_physical += 1;
        if let Some(before) = self.handles.insert(call.handle, id)
            && let Some(physical) = self.physical.get_mut(&before)
        {
            // The driver uses the number again only after the memory is gone; a map may still have kept it.
            physical.references = 0;
            physical.handles.retain(|handle| *handle != call.handle);
            self.collect(before, nccl);
        }
        let physical = Physical { births: vec![born], references: 1, maps: 0, handles: vec![call.handle] };
        self.physical.insert(id, physical);
    }

    fn retain(&mut self, born: Born, call: &Call) {
        let mapped = self.maps.range(..=call.addr).next_back();
        let mapped =
            mapped.filter(|(start, map)| call.addr - **start < map.bytes).map(|(_, map)| map.physical);
        let Some(id) = mapped.or_else(|| self.handles.get(&call.handle).copied()) else { return };
        if let Some(physical) = self.physical.get_mut(&id) {
            physical.references = physical.references.saturating_add(1);
            physical.births.push(born);
            if !physical.handles.contains(&call.handle) {
                physical.handles.push(call.handle);
            }
            self.handles.insert(call.handle, id);
        }
    }

    fn release(&mut self, born: Born, handle: u64, nccl: &mut Nccl) {
        let Some(id) = self.handles.get(&handle).copied() else { return };
        let Some(physical) = self.physical.get_mut(&id) else { return };
        physical.references = physical.references.saturating_sub(1);
        // A release undoes a reference that was taken, and else the first one.
        let retained = physical.births.iter().rposition(|born| action(&born.event) == Some(Action::Retain));
        match retained {
            Some(at) => drop(physical.births.remove(at)),
            None => physical.births.push(born),
        }
        self.collect(id, nccl);
    }

    fn collect(&mut self, id: u64, nccl: &mut Nccl) {
        let is_gone = |physical: &Physical| physical.references == 0 && physical.maps == 0;
        if self.physical.get(&id).is_some_and(is_gone)
            && let Some(physical) = self.physical.remove(&id)
        {
            for born in &physical.births {
                if action(&born.event) != Some(Action::Release) {
                    nccl.gone(&born.event);
                }
            }
            for handle in physical.handles {
                if self.handles.get(&handle) == Some(&id) {
                    self.handles.remove(&handle);
                }
                self.said.remove(&Said::Export(handle));
            }
        }
    }

    fn map(&mut self, born: Born, call: &Call) {
        let id = match self.handles.get(&call.handle) {
            Some(id) => *id,
            None => {
                // It was made before the recording began.
                self.n_physical += 1;
                self.n_physical - 1
            }
        };
        let physical = self.physical.entry(id).or_default();
        physical.maps = physical.maps.saturating_add(1);
        let mapped = Mapped { born, physical: id, bytes: call.bytes.0 };
        if let Some(before) = self.maps.insert(call.addr, mapped)
            && let Some(physical) = self.physical.get_mut(&before.physical)
        {
            physical.maps = physical.maps.saturating_sub(1);
        }
    }

    fn unmap(&mut self, call: &Call, time: Nanos, nccl: &mut Nccl) {
        let (from, to) = (call.addr, call.addr.saturating_add(call.bytes.0));
        let there: Vec<u64> = self.maps.range(from..to).map(|(addr, _)| *addr).collect();
        for addr in there {
            if self.maps.get(&addr).is_none_or(|mapped| mapped.born.event.time > time) {
                continue;
            }
            let Some(mapped) = self.maps.remove(&addr) else { continue };
            if let Some(physical) = self.physical.get_mut(&mapped.physical) {
                physical.maps = physical.maps.saturating_sub(1);
            }
            self.collect(mapped.physical, nccl);
        }
        // Rights go with the last map that they are of.
        let before = self.accesses.range(..from).next_back().map(|(addr, _)| *addr);
        let within = self.accesses.range(from..to).map(|(addr, _)| *addr);
        for addr in within.chain(before).collect::<Vec<u64>>() {
            let Some(there) = self.accesses.get_mut(&addr) else { continue };
            let maps = &self.maps;
            there.retain(|born| maps.range(addr..addr.saturating_add(bytes(&born.event))).next().is_some());
            if there.is_empty() {
                self.accesses.remove(&addr);
            }
        }
    }
}

fn is_of_pool(said: Said, handle: u64) -> bool {
    match said {
        Said::PoolSet(pool, _) | Said::PoolGet(pool, _) | Said::PoolOf(_, pool) => pool == handle,
        Said::Export(_) | Said::PoolSelect(_) | Said::Function(_) | Said::Limit(..) | Said::Peer(..) => false,
        Said::UseOnOom(..) | Said::NoSplit(..) | Said::GraphTrim(_) => false,
        Said::Checkpoint(_) | Said::Init => false,
    }
}

fn action(event: &Event) -> Option<Action> {
    driver_call(event).map(|call| call.action)
}

fn device(event: &Event) -> i16 {
    driver_call(event).map_or(HOST, |call| call.device)
}

fn bytes(event: &Event) -> u64 {
    driver_call(event).map_or(0, |call| call.bytes.0)
}
