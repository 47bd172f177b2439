//! What the driver handed out, object by object.
//!
//! Physical memory, address ranges and mappings are three different things and are never added. Physical memory of the
//! virtual-memory functions lives as long as something refers to it:
//!
//! ```text
//!   references = 1 (create) + retains - releases     memory is given back when references + maps reach 0
//!   maps       = live cuMemMap of it
//!
//!   NCCL frees:  retain   release   unmap   release
//!   references   2        1         1       0
//!   maps         1        1         0       0  -> free
//! ```

use std::collections::BTreeMap;

use gputrace_schemas::event::{Action, Bytes, Call, Event, HOST, NO_DEVICE, Nanos, StackId, ThreadId};
use rustc_hash::{FxHashMap, FxHashSet};

use super::Effect;
use super::contexts::Contexts;
use super::findings::Finding;
use super::graphs::Graphs;
use super::phases::PhaseId;
use super::sites::{Origin, OwnerId, SiteId};

/// What kind of memory an object is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MemoryKind {
    /// `cuMemAlloc` and its like.
    Linear,
    /// `cuMemCreate`.
    Virtual,
    /// `cuMemAllocAsync` and its like: what is in use, not what its pool keeps.
    Async,
    /// Arrays: the driver does not say how large they are; estimated from their shape.
    Array,
    /// `cuMemAllocManaged`: may be on the device or on the host.
    Managed,
    /// Owned by a CUDA graph: backed while the graph runs.
    Graph,
    /// Pinned host memory of the driver.
    Pinned,
    /// Pinned host memory of the program.
    Registered,
    /// `cuMemCreate` on the host.
    HostVirtual,
    /// Memory of another process or of graphics: owns nothing here.
    Imported,
}

impl MemoryKind {
    /// Memory of a device while it is live; what its driver allocates.
    #[must_use]
    pub fn is_physical(self) -> bool {
        matches!(self, MemoryKind::Linear | MemoryKind::Virtual | MemoryKind::Async | MemoryKind::Array)
    }

    /// Name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MemoryKind::Linear => "linear",
            MemoryKind::Virtual => "virtual memory management",
            MemoryKind::Async => "stream-ordered",
            MemoryKind::Array => "arrays (estimated)",
            MemoryKind::Managed => "managed",
            MemoryKind::Graph => "graph-owned",
            MemoryKind::Pinned => "pinned host",
            MemoryKind::Registered => "registered host",
            MemoryKind::HostVirtual => "host virtual memory management",
            MemoryKind::Imported => "imported",
        }
    }
}

/// Something the driver allocated that is still there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Object {
    /// Its kind.
    pub kind: MemoryKind,
    /// On which device: an ordinal, [`NO_DEVICE`] or [`HOST`].
    pub device: i16,
    /// How large.
    pub bytes: Bytes,
    /// Its owner.
    pub owner: OwnerId,
    /// Asked for from where.
    pub site: SiteId,
    /// In which phase of the program.
    pub phase: PhaseId,
    /// Since when.
    pub since: Nanos,
    /// Asked for by PyTorch's caching allocator.
    pub torch: bool,
    /// Its first byte; 0 for physical memory and arrays, which have no address of their own.
    pub addr: u64,
    /// Its number among all calls that succeeded: no two objects of a process have the same.
    pub serial: u64,
    /// From where, in full.
    pub stack: StackId,
    /// Context it lies in, as far as that is known; 0 is the device's primary one.
    context: u64,
}

/// Where an object is booked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Shelf {
    /// Memory of a device.
    Physical(i16),
    /// Managed memory.
    Managed(i16),
    /// Memory of graphs.
    Graphs(i16),
    /// Memory of the host.
    Host,
    /// Memory of others that is open on a device.
    Imported(i16),
}

impl Object {
    /// What it counts for in its books: what belongs to others is a number of mappings.
    pub(super) fn booked(&self) -> Bytes {
        if self.kind == MemoryKind::Imported { Bytes(1) } else { self.bytes }
    }

    pub(super) fn shelf(&self) -> Shelf {
        match self.kind {
            MemoryKind::Imported => Shelf::Imported(self.device),
            MemoryKind::Pinned | MemoryKind::Registered | MemoryKind::HostVirtual => Shelf::Host,
            _ if self.device == HOST => Shelf::Host,
            MemoryKind::Linear | MemoryKind::Virtual | MemoryKind::Async | MemoryKind::Array => {
                Shelf::Physical(self.device)
            }
            MemoryKind::Managed => Shelf::Managed(self.device),
            MemoryKind::Graph => Shelf::Graphs(self.device),
        }
    }
}

/// What changed in the books.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// The driver handed this out.
    Gained(Object),
    /// The program gave this back.
    Freed(Object),
    /// This went away with its context.
    Dropped(Object),
    /// An address range was reserved on this device.
    Reserved(i16, Bytes),
    /// It was given back.
    Unreserved(i16, Bytes),
    /// Physical memory became visible: where, how much, and whether PyTorch's allocator did that with its own memory.
    Mapped(Mapped),
    /// It is not visible any more.
    Unmapped(Mapped),
    /// CUDA graphs keep so much of this device now.
    GraphsKeep(i16, Bytes),
}

/// A range that was mapped or unmapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapped {
    /// On which device.
    pub device: i16,
    /// First byte.
    pub addr: u64,
    /// Length.
    pub bytes: Bytes,
    /// The physical memory was made here, by PyTorch's allocator.
    pub torch: bool,
    /// The reserved address range that it lies in: its start and length.
    pub reservation: Option<(u64, Bytes)>,
}

struct Physical {
    object: Object,
    references: u32,
    maps: u32,
}

struct Map {
    bytes: Bytes,
    physical: u64,
    torch: bool,
    device: i16,
}

/// Everything alive.
#[derive(Default)]
pub(super) struct Driver {
    by_address: FxHashMap<u64, Object>,
    host: FxHashMap<u64, Object>,
    arrays: FxHashMap<u64, Object>,
    physical: FxHashMap<u64, Physical>,
    n_physical: u64,
    n_calls: u64,
    handles: FxHashMap<u64, u64>,
    maps: BTreeMap<u64, Map>,
    reservations: BTreeMap<u64, (Bytes, i16)>,
    /// The contexts that each thread has made current, the newest last.
    current: FxHashMap<ThreadId, Vec<u64>>,
    pub(super) contexts: Contexts,
    graphs: Graphs,
    /// Whose memory a stream-ordered pool gives out.
    pools: FxHashMap<u64, i16>,
    /// What went away with contexts since the last allocation on its device.
    dropped: Vec<Object>,
    retained: FxHashMap<u64, u32>,
    /// Addresses given back and not handed out again since, to tell a double free from an unseen allocation.
    freed: RecentlyFreed,
}

impl Driver {
    /// Books a call that succeeded; the same call, on the device that it was for.
    pub(super) fn call(&mut self, event: &Event, call: &Call, origin: &Origin, effect: &mut Effect) -> Call {
        let placed = self.placed(call);
        self.contexts.call(event, &placed, origin.owner, origin.site);
        if let Some((device, kept)) = self.graphs.call(event, &placed) {
            effect.changed(Change::GraphsKeep(device, kept));
        }
        self.objects(event, &placed, origin, effect);
        placed
    }

    /// A call that the driver refused: on which device it was, and whether what it gives back is not there.
    pub(super) fn refused(&self, call: &Call, effect: &mut Effect) -> Call {
        let call = self.placed(call);
        if call.action.takes() {
            effect.found.push(match call.addr != 0 && self.freed.contains(call.addr) {
                true => Finding::DoubleFree(call.addr),
                false => Finding::FreeFailed(if call.addr == 0 { call.handle } else { call.addr }),
            });
        }
        let is_of_memory = call.action.gives() || call.action.takes();
        Call { device: if is_of_memory { self.device_of(&call) } else { call.device }, ..call }
    }

    /// What a pool hands out lies where the pool was made for, whatever the current device is: it may be one of the host.
    fn placed(&self, call: &Call) -> Call {
        let pool = || self.pools.get(&call.handle).copied();
        let device = match call.action {
            Action::AllocAsync if call.handle != 0 => pool().filter(|device| *device != NO_DEVICE),
            Action::PoolGet => pool().filter(|device| *device >= 0),
            _ => None,
        };
        Call { device: device.unwrap_or(call.device), ..*call }
    }

    fn objects(&mut self, event: &Event, call: &Call, origin: &Origin, effect: &mut Effect) {
        let context = self.current.get(&event.thread).and_then(|stack| stack.last()).copied().unwrap_or(0);
        let serial = self.n_calls;
        self.n_calls += 1;
        let object = |kind| Object {
            kind,
            addr: call.addr,
            serial,
            stack: event.stack,
            device: call.device,
            bytes: call.bytes,
            owner: origin.owner,
            site: origin.site,
            phase: origin.phase,
            since: event.time,
            torch: origin.torch,
            context,
        };
        let imported = || Object { addr: 0, bytes: Bytes(0), torch: false, ..object(MemoryKind::Imported) };
        match call.action {
            Action::Alloc => self.gain(call.addr, object(MemoryKind::Linear), effect),
            Action::AllocAsync if call.captured => self.gain(call.addr, object(MemoryKind::Graph), effect),
            Action::AllocAsync => self.gain(call.addr, object(MemoryKind::Async), effect),
            Action::AllocManaged => self.gain(call.addr, object(MemoryKind::Managed), effect),
            Action::GraphAlloc => self.gain(call.addr, object(MemoryKind::Graph), effect),
            Action::IpcOpen | Action::ImportPointer => {
                self.gain(call.addr, Object { bytes: Bytes(0), ..object(MemoryKind::Imported) }, effect);
            }
            Action::Free | Action::FreeAsync | Action::GraphFree | Action::IpcClose => {
                self.free(call.addr, effect);
            }
            Action::AllocHost | Action::HostRegister => {
                let is_own = call.action == Action::AllocHost;
                let kind = if is_own { MemoryKind::Pinned } else { MemoryKind::Registered };
                let object = Object { device: HOST, ..object(kind) };
                missed(call.addr, self.host.insert(call.addr, object), effect);
                self.gained(object, effect);
            }
            Action::FreeHost | Action::HostUnregister => self.free_host(call.addr, effect),
            Action::ArrayCreate => {
                let object = Object { addr: 0, ..object(MemoryKind::Array) };
                missed(call.handle, self.arrays.insert(call.handle, object), effect);
                self.gained(object, effect);
            }
            Action::ArrayDestroy => match self.arrays.remove(&call.handle) {
                Some(object) => effect.changed(Change::Freed(object)),
                None => effect.found.push(Finding::UnknownHandle(call.handle)),
            },
            Action::Reserve => {
                self.reservations.insert(call.addr, (call.bytes, call.device));
                effect.changed(Change::Reserved(call.device, call.bytes));
            }
            Action::Unreserve => match self.reservations.remove(&call.addr) {
                Some((bytes, device)) => effect.changed(Change::Unreserved(device, bytes)),
                None => effect.found.push(Finding::UnknownFree(call.addr)),
            },
            Action::Create => {
                let kind = if call.device == HOST { MemoryKind::HostVirtual } else { MemoryKind::Virtual };
                self.create(call.handle, Object { addr: 0, ..object(kind) }, effect);
            }
            Action::Import | Action::MulticastCreate => self.create(call.handle, imported(), effect),
            Action::Release => self.release(call.handle, effect),
            Action::Retain => self.retain(call.addr, call.handle, effect),
            Action::Map => self.map(call, origin.torch, imported(), effect),
            Action::Unmap => self.unmap(call.addr, call.bytes, effect),
            Action::ContextCreate => self.current.entry(event.thread).or_default().push(call.handle),
            Action::ContextDestroy => self.destroy_context(call.handle, effect),
            Action::PrimaryRetain => {
                let retained = self.retained.entry(call.extra).or_default();
                *retained = retained.saturating_add(1);
            }
            Action::PrimaryRelease => self.release_primary(call.extra, effect),
            Action::PrimaryReset => self.drop_primary(call.extra, effect),
            Action::PoolCreate | Action::PoolOf | Action::PoolSelect => {
                self.pools.insert(call.handle, call.device);
            }
            // Calls that hand out nothing and take nothing back.
            Action::SetAccess | Action::Export | Action::IpcGet | Action::MemInfo | Action::LimitSet => {}
            Action::PoolDestroy
            | Action::PoolTrim
            | Action::PoolGet
            | Action::PoolSet
            | Action::PoolShare => {}
            Action::CaptureBegin | Action::CaptureEnd | Action::GraphInstantiate | Action::GraphLaunch => {}
            Action::GraphExecDestroy | Action::GraphDestroy | Action::GraphMemTrim | Action::GraphMemGet => {}
            Action::CodeLoad | Action::CodeUnload | Action::FunctionLoad | Action::PeerEnable => {}
            Action::TorchPoolBegin | Action::TorchPoolEnd | Action::TorchPoolRelease => {}
            Action::TorchPoolCreate | Action::TorchPoolUseOnOom | Action::TorchPoolNoSplit => {}
            Action::TorchTrim | Action::HeapAlloc | Action::HeapFree | Action::Checkpoint | Action::Init => {}
        }
    }

    fn destroy_context(&mut self, destroyed: u64, effect: &mut Effect) {
        for stack in self.current.values_mut() {
            stack.retain(|context| *context != destroyed);
        }
        self.drop_all(|object| object.context == destroyed, effect);
    }

    fn release_primary(&mut self, device: u64, effect: &mut Effect) {
        let retained = self.retained.entry(device).or_default();
        let was_last = *retained == 1;
        *retained = retained.saturating_sub(1);
        if was_last {
            self.drop_primary(device, effect);
        }
    }

    /// What the program holds: memory of devices and of the host, arrays, physical memory.
    pub(super) fn live(&self) -> impl Iterator<Item = &Object> {
        let physical = self.physical.values().map(|physical| &physical.object);
        let addressed = self.by_address.values().chain(self.host.values());
        addressed.chain(self.arrays.values()).chain(physical).chain(&self.dropped)
    }

    /// What the driver handed out that has its first byte or another one there.
    pub(super) fn object_at(&self, addr: u64) -> Option<&Object> {
        let holds = |object: &&Object| addr.checked_sub(object.addr).is_some_and(|at| at < object.bytes.0);
        self.by_address.get(&addr).or_else(|| self.by_address.values().find(holds))
    }

    /// The physical memory behind a handle.
    pub(super) fn object_of(&self, handle: u64) -> Option<&Object> {
        self.handles.get(&handle).and_then(|id| self.physical.get(id)).map(|physical| &physical.object)
    }

    /// Where PyTorch's memory of a device is visible, ascending: start, length, whether it was mapped there.
    pub(super) fn torch_ranges(&self, device: i16) -> Vec<(u64, Bytes, bool)> {
        let linear = self.by_address.iter().filter(|(_, object)| object.torch && object.device == device);
        let linear = linear.filter(|(_, object)| object.kind == MemoryKind::Linear);
        let mapped = self.maps.iter().filter(|(_, map)| map.torch && map.device == device);
        let mut ranges: Vec<_> = linear.map(|(addr, object)| (*addr, object.bytes, false)).collect();
        ranges.extend(mapped.map(|(addr, map)| (*addr, map.bytes, true)));
        ranges.sort_unstable();
        ranges
    }

    /// The device of something that is about to be given back, for calls that failed.
    fn device_of(&self, call: &Call) -> i16 {
        let known = match call.action {
            Action::Release | Action::Map => {
                let physical = self.handles.get(&call.handle).and_then(|id| self.physical.get(id));
                physical.map(|physical| physical.object.device)
            }
            _ => self.by_address.get(&call.addr).map(|object| object.device),
        };
        known.unwrap_or(call.device)
    }

    /// The reservation that `addr` lies in: its start and length.
    fn reservation(&self, addr: u64) -> Option<(u64, Bytes)> {
        let (start, (bytes, _)) = self.reservations.range(..=addr).next_back()?;
        (addr - start < bytes.0).then_some((*start, *bytes))
    }

    fn gain(&mut self, addr: u64, object: Object, effect: &mut Effect) {
        self.freed.forget(addr);
        match self.by_address.insert(addr, object) {
            // Opening the same memory again gives the same address.
            Some(before) if object.kind == MemoryKind::Imported => effect.changed(Change::Freed(before)),
            before => missed(addr, before, effect),
        }
        self.gained(object, effect);
    }

    /// Whatever is allocated after a teardown makes that one of the past.
    fn gained(&mut self, object: Object, effect: &mut Effect) {
        if !self.dropped.is_empty() {
            self.dropped.retain(|dropped| dropped.shelf() != object.shelf());
        }
        effect.changed(Change::Gained(object));
    }

    fn free(&mut self, addr: u64, effect: &mut Effect) {
        if addr == 0 {
            return; // Freeing nothing is allowed.
        }
        match self.by_address.remove(&addr) {
            Some(object) => {
                self.freed.remember(addr);
                effect.changed(Change::Freed(object));
            }
            None if self.freed.contains(addr) => effect.found.push(Finding::DoubleFree(addr)),
            None => effect.found.push(Finding::UnknownFree(addr)),
        }
    }

    fn free_host(&mut self, addr: u64, effect: &mut Effect) {
        match self.host.remove(&addr) {
            Some(object) => effect.changed(Change::Freed(object)),
            None if addr == 0 => {}
            None => effect.found.push(Finding::UnknownFree(addr)),
        }
    }

    fn create(&mut self, handle: u64, object: Object, effect: &mut Effect) {
        let id = self.n_physical;
        self.n_physical += 1;
        if let Some(before) = self.handles.insert(handle, id) {
            // The driver reuses the value only after the memory is gone; a map may still have kept it.
            if let Some(before) = self.physical.get_mut(&before) {
                before.references = 0;
            }
            self.collect(before, effect);
        }
        self.physical.insert(id, Physical { object, references: 1, maps: 0 });
        self.gained(object, effect);
    }

    fn release(&mut self, handle: u64, effect: &mut Effect) {
        let Some(id) = self.handles.get(&handle).copied() else {
            return effect.found.push(Finding::UnknownHandle(handle));
        };
        match self.physical.get_mut(&id) {
            Some(physical) if physical.references > 0 => {
                physical.references -= 1;
                self.collect(id, effect);
            }
            _ => effect.found.push(Finding::ReleasedTooOften(handle)),
        }
    }

    fn retain(&mut self, addr: u64, handle: u64, effect: &mut Effect) {
        let mapped = self.maps.range(..=addr).next_back();
        let mapped = mapped.filter(|(start, map)| addr - **start < map.bytes.0).map(|(_, map)| map.physical);
        let Some(id) = mapped.or_else(|| self.handles.get(&handle).copied()) else {
            return effect.found.push(Finding::UnknownHandle(handle));
        };
        if let Some(physical) = self.physical.get_mut(&id) {
            physical.references = physical.references.saturating_add(1);
        }
        // The driver may name the same memory by another number from now on.
        self.handles.insert(handle, id);
    }

    /// `unseen` stands for physical memory that was made before the trace began.
    fn map(&mut self, call: &Call, by_torch: bool, unseen: Object, effect: &mut Effect) {
        let id = match self.handles.get(&call.handle) {
            Some(id) => *id,
            None => {
                effect.found.push(Finding::UnknownHandle(call.handle));
                let id = self.n_physical;
                self.n_physical += 1;
                self.physical.insert(id, Physical { object: unseen, references: 0, maps: 0 });
                id
            }
        };
        let Some(end) = call.addr.checked_add(call.bytes.0) else {
            return effect.found.push(Finding::BadRange(call.addr));
        };
        let overlaps =
            self.maps.range(..end).next_back().is_some_and(|(start, map)| start + map.bytes.0 > call.addr);
        if overlaps {
            effect.found.push(Finding::MappedTwice(call.addr));
            self.unmap(call.addr, call.bytes, effect);
        }
        let Some(physical) = self.physical.get_mut(&id) else { return };
        physical.maps = physical.maps.saturating_add(1);
        let device = if physical.object.device == NO_DEVICE { call.device } else { physical.object.device };
        let torch = by_torch && physical.object.torch;
        let map = Map { bytes: call.bytes, physical: id, torch, device };
        if let Some(partly) = self.maps.insert(call.addr, map) {
            self.unmapped(call.addr, &partly, effect);
        }
        let (addr, bytes, reservation) = (call.addr, call.bytes, self.reservation(call.addr));
        effect.changed(Change::Mapped(Mapped { device, addr, bytes, torch, reservation }));
    }

    fn unmap(&mut self, addr: u64, bytes: Bytes, effect: &mut Effect) {
        let Some(end) = addr.checked_add(bytes.0) else {
            return effect.found.push(Finding::BadRange(addr));
        };
        let inside: Vec<u64> = self
            .maps
            .range(addr..end)
            .filter(|(start, map)| *start + map.bytes.0 <= end)
            .map(|(start, _)| *start)
            .collect();
        if inside.is_empty() {
            effect.found.push(Finding::NotMapped(addr));
        }
        for start in inside {
            if let Some(map) = self.maps.remove(&start) {
                self.unmapped(start, &map, effect);
            }
        }
    }

    fn unmapped(&mut self, addr: u64, map: &Map, effect: &mut Effect) {
        let Map { bytes, torch, device, .. } = *map;
        let reservation = self.reservation(addr);
        effect.changed(Change::Unmapped(Mapped { device, addr, bytes, torch, reservation }));
        if let Some(physical) = self.physical.get_mut(&map.physical) {
            physical.maps = physical.maps.saturating_sub(1);
        }
        self.collect(map.physical, effect);
    }

    /// Gives physical memory back if nothing refers to it.
    fn collect(&mut self, id: u64, effect: &mut Effect) {
        let is_free = self.physical.get(&id).is_some_and(|p| p.references == 0 && p.maps == 0);
        if let Some(physical) = is_free.then(|| self.physical.remove(&id)).flatten() {
            effect.changed(Change::Freed(physical.object));
        }
    }

    fn drop_primary(&mut self, device: u64, effect: &mut Effect) {
        self.drop_all(|object| object.context == 0 && i64::from(object.device) == device as i64, effect);
    }

    /// Forgets what lay in a context. Physical memory of `cuMemCreate` lies in none.
    fn drop_all(&mut self, gone: impl Fn(&Object) -> bool, effect: &mut Effect) {
        for objects in [&mut self.by_address, &mut self.host, &mut self.arrays] {
            objects.retain(|_, object| {
                let gone = gone(object);
                if gone {
                    self.dropped.push(*object);
                    effect.changed(Change::Dropped(*object));
                }
                !gone
            });
        }
    }
}

/// What was handed out again was given back in between.
fn missed(at: u64, before: Option<Object>, effect: &mut Effect) {
    if let Some(before) = before {
        effect.found.push(Finding::GivenOutTwice(at));
        effect.changed(Change::Freed(before));
    }
}

/// The newest addresses that were given back; a bounded number, so that a long trace needs no more memory.
#[derive(Default)]
struct RecentlyFreed {
    newest: FxHashSet<u64>,
    older: FxHashSet<u64>,
}

impl RecentlyFreed {
    /// This many are known at least.
    const KEPT: usize = 65_536;

    fn remember(&mut self, addr: u64) {
        if self.newest.len() >= Self::KEPT {
            self.older = std::mem::take(&mut self.newest);
        }
        self.newest.insert(addr);
    }

    fn forget(&mut self, addr: u64) {
        self.newest.remove(&addr);
        self.older.remove(&addr);
    }

    fn contains(&self, addr: u64) -> bool {
        self.newest.contains(&addr) || self.older.contains(&addr)
    }
}
