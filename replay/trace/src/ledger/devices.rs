//! What each device and the host hold, as the driver handed it out, and whom it is charged to.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Action, Bytes, Call, Event, HOST, Nanos, OutOfMemory, Sample, StackId};
use serde::{Deserialize, Serialize};

use super::Effect;
use super::amounts::{Books, Held, Meter};
use super::driver::{Change, MemoryKind, Object, Shelf};
use super::heaps::HeapBooks;
use super::hidden::{Pages, Samples, Span, concerns};
use super::pjrt::PjrtBooks;
use super::sites::{NameId, Origin, OwnerId, SiteId};
use super::torch::TorchBooks;

/// The books of one device.
#[derive(Clone, Debug, Default)]
pub struct DeviceBooks {
    /// Memory of the device: linear, virtual memory management, stream-ordered in use, and arrays as estimated.
    pub physical: Books,
    /// The same by phase of the program: owners are [`super::PhaseId`]s.
    pub phases: Books,
    /// The same by kind, and the kinds that are not in [`DeviceBooks::physical`].
    pub kinds: BTreeMap<MemoryKind, Meter>,
    /// Managed memory: may be here or on the host.
    pub managed: Books,
    /// Memory that belongs to CUDA graphs: here while the graph runs.
    pub graphs: Books,
    /// Memory of other processes, or of graphics, that is open here: mappings, each counted as one byte, because the
    /// owner of the memory counts it.
    pub imported: Books,
    /// What graphs keep of the device: from the first launch until it is trimmed.
    pub graphs_kept: Meter,
    /// Address ranges reserved.
    pub reserved_addresses: Meter,
    /// Address ranges with memory behind them.
    pub mapped: Meter,
    /// Objects that the driver allocated.
    pub allocs: u64,
    /// Objects that the program freed.
    pub frees: u64,
    /// Objects that went away with their context.
    pub dropped: Held,
    /// Calls that hand out or take back memory and that the driver refused.
    pub failed: u64,
    /// Memory that libraries allocated from memory that they have: inside what the driver allocated to them.
    pub heap: HeapBooks,
    /// PyTorch's books, if it used the device.
    pub torch: Option<TorchBooks>,
    /// Buffers of JAX and others that use PJRT.
    pub pjrt: Option<PjrtBooks>,
    /// The driver's own figures.
    pub samples: Samples,
    /// The driver's pages of linear memory.
    pub pages: Pages,
}

impl DeviceBooks {
    /// What the driver should have charged for what it handed out.
    fn charged(&self) -> u64 {
        self.handed_out().0.saturating_add(self.pages.rounding().0)
    }

    /// Memory of the device that was handed out, graphs' included.
    fn handed_out(&self) -> Bytes {
        Bytes(self.physical.now().bytes.0.saturating_add(self.graphs_kept.now.0))
    }
}

/// Which [`Books`] of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize, Serialize)]
pub enum Account {
    /// What the driver handed out.
    Driver,
    /// Managed memory.
    Managed,
    /// Memory of CUDA graphs.
    Graphs,
    /// Mappings of what others own: a number, not bytes.
    Imported,
    /// PyTorch's blocks.
    Blocks,
    /// Buffers of JAX.
    Buffers,
    /// Blocks of libraries' own heaps.
    Heap,
}

/// A request that the driver refused.
#[derive(Clone, Copy, Debug)]
pub struct Refusal {
    /// When.
    pub time: Nanos,
    /// Objects allocated on this device before it: whether the program continued.
    pub allocs_before: u64,
    /// Which function.
    pub name: NameId,
    /// What it answered: `CUresult`.
    pub result: i32,
    /// On which device.
    pub device: i16,
    /// Bytes requested.
    pub bytes: Bytes,
    /// The call stack of the request.
    pub owner: OwnerId,
    /// From where.
    pub site: SiteId,
    /// From where, in full.
    pub stack: StackId,
    /// No memory was left, and the request was not repeated ([`Event::out_of_memory`]).
    pub is_final: bool,
    /// Memory that the driver had allocated to the process on this device.
    pub tracked: Bytes,
}

/// The books of the devices and of the host.
#[derive(Default)]
pub(super) struct Memory {
    pub(super) devices: Devices,
    pub(super) host: Books,
}

pub(super) type Devices = BTreeMap<i16, DeviceBooks>;

impl Memory {
    /// Books a call that succeeded, and what it changed.
    pub(super) fn call(&mut self, event: &Event, call: &Call, origin: &Origin, effect: &mut Effect) {
        let time = event.time;
        let span = Span::of(time, call, call.action.gives());
        // All but frees are stamped when they have returned.
        let whole = Span::of(time, call, !call.action.takes());
        // Addresses may be reserved for host memory, which nobody samples.
        let is_sampled = |device: i16| device != HOST && concerns(call, device);
        for (_, books) in self.devices.iter_mut().filter(|(device, _)| is_sampled(**device)) {
            books.samples.call(whole, call, origin.owner, origin.site);
        }
        for change in &effect.changes {
            match *change {
                Change::Gained(object) => {
                    if self.gain(time, span, &object) {
                        effect.peaked = Some(object.device);
                    }
                }
                Change::Freed(object) => {
                    self.lose(span, &object, Books::lose);
                    if let Some(device) = self.device_of(&object) {
                        device.frees += 1;
                    }
                }
                Change::Dropped(object) => {
                    if let Some(device) = self.device_of(&object) {
                        device.dropped.add(object.bytes);
                    }
                    self.lose(span, &object, Books::drop_from);
                }
                Change::Reserved(device, bytes) => self.of(device).reserved_addresses.gain(time, bytes),
                Change::Unreserved(device, bytes) => self.of(device).reserved_addresses.lose(bytes),
                Change::Mapped(range) => self.of(range.device).mapped.gain(time, range.bytes),
                Change::Unmapped(range) => self.of(range.device).mapped.lose(range.bytes),
                Change::GraphsKeep(device, kept) => {
                    let books = self.of(device);
                    let before = books.charged();
                    books.graphs_kept.set(time, kept);
                    books.samples.changed(whole, before, books.charged());
                }
            }
        }
    }

    /// Books a call that the driver refused, by the function of that name; the refusal, if it was a request.
    pub(super) fn refused(
        &mut self,
        event: &Event,
        call: &Call,
        (origin, name): (&Origin, NameId),
        effect: &mut Effect,
    ) -> Option<Refusal> {
        if call.action == Action::HeapAlloc {
            // The heap was full, not the device.
            let heap = &mut self.of(call.device).heap;
            heap.n_refused += 1;
            heap.refused = Some((event.time, call.bytes, origin.site));
        }
        if !call.action.gives() && !call.action.takes() {
            return None;
        }
        let books = self.of(call.device);
        books.failed += 1;
        if call.action.takes() {
            return None;
        }
        // PyTorch's and JAX's allocators ask again for less, and say so themselves where that does not help.
        let asks_again = origin.torch || call.in_allocate || (origin.jax && books.pjrt.is_some());
        let ran_out = event.out_of_memory().filter(|_| !asks_again);
        if let Some(oom) = ran_out {
            effect.ran_out = Some(OutOfMemory { device: call.device, ..oom });
            books.physical.remember();
        }
        Some(Refusal {
            time: event.time,
            allocs_before: books.allocs,
            name,
            result: call.result?,
            device: call.device,
            bytes: call.bytes,
            owner: origin.owner,
            site: origin.site,
            stack: event.stack,
            is_final: ran_out.is_some(),
            tracked: books.physical.now().bytes,
        })
    }

    /// A request on a device has failed for good. How many objects were allocated there, and how large are those that it holds.
    pub(super) fn ran_out(&mut self, device: i16) -> (u64, Bytes) {
        let books = self.of(device);
        books.physical.remember();
        (books.allocs, books.physical.now().bytes)
    }

    pub(super) fn sample(&mut self, time: Nanos, sample: &Sample) {
        let books = self.of(sample.device);
        let (tracked, rounding) = (books.handed_out(), books.pages.rounding());
        books.samples.sample(time, sample, tracked, rounding);
    }

    /// Whether devices hold anything.
    pub(super) fn holds_on_devices(&self) -> bool {
        self.devices.iter().any(|(device, books)| *device >= 0 && books.physical.now().bytes.0 > 0)
    }

    /// Whether a device holds as much as it ever did.
    pub(super) fn is_at_peak(&self, device: i16) -> bool {
        let books = self.devices.get(&device).map(|books| &books.physical);
        books.is_some_and(|books| books.now().bytes == books.peak())
    }

    fn of(&mut self, device: i16) -> &mut DeviceBooks {
        self.devices.entry(device).or_default()
    }

    /// Books an object; says whether the device never held as much before.
    fn gain(&mut self, time: Nanos, span: Span, object: &Object) -> bool {
        if let Some(device) = self.device_of(object) {
            device.allocs += 1;
            device.kinds.entry(object.kind).or_default().gain(time, object.bytes);
        }
        self.charge(span, object, |memory| {
            if object.kind == MemoryKind::Linear && object.device != HOST {
                memory.of(object.device).pages.gain(object.addr, object.bytes);
            }
            if let Some(books) = memory.phases_of(object) {
                books.gain(time, OwnerId(object.phase.0), SiteId(0), object.bytes);
            }
            let Some(books) = memory.books_of(object) else { return false };
            let before = books.peak();
            books.gain(time, object.owner, object.site, object.booked());
            books.peak() > before && object.kind.is_physical()
        })
    }

    /// Books that an object is gone; `take` is what that does to books.
    fn lose(&mut self, span: Span, object: &Object, take: fn(&mut Books, OwnerId, SiteId, Bytes)) {
        if let Some(device) = self.device_of(object) {
            device.kinds.entry(object.kind).or_default().lose(object.bytes);
        }
        self.charge(span, object, |memory| {
            if let Some(books) = memory.books_of(object) {
                take(books, object.owner, object.site, object.booked());
            }
            if let Some(books) = memory.phases_of(object) {
                take(books, OwnerId(object.phase.0), SiteId(0), object.bytes);
            }
            if object.kind == MemoryKind::Linear && object.device != HOST {
                memory.of(object.device).pages.lose(object.addr, object.bytes);
            }
        });
    }

    /// Changes what a device is charged for, also where that is compared with the driver's own figures.
    fn charge<T>(&mut self, span: Span, object: &Object, change: impl FnOnce(&mut Memory) -> T) -> T {
        let charged = |memory: &Memory| memory.devices.get(&object.device).map_or(0, DeviceBooks::charged);
        let before = charged(self);
        let result = change(self);
        let after = charged(self);
        if before != after
            && let Some(books) = self.devices.get_mut(&object.device)
        {
            books.samples.changed(span, before, after);
        }
        result
    }

    /// The device whose objects are counted with this one: imports are not counted, because they own nothing.
    fn device_of(&mut self, object: &Object) -> Option<&mut DeviceBooks> {
        let counts = object.device != HOST && object.kind != MemoryKind::Imported;
        counts.then(|| self.of(object.device))
    }

    fn books_of(&mut self, object: &Object) -> Option<&mut Books> {
        match object.shelf() {
            Shelf::Physical(device) => Some(&mut self.of(device).physical),
            Shelf::Managed(device) => Some(&mut self.of(device).managed),
            Shelf::Graphs(device) => Some(&mut self.of(device).graphs),
            Shelf::Host => Some(&mut self.host),
            Shelf::Imported(device) => (device >= 0).then(|| &mut self.of(device).imported),
        }
    }

    /// The books by phase, for memory of a device.
    fn phases_of(&mut self, object: &Object) -> Option<&mut Books> {
        match object.shelf() {
            Shelf::Physical(device) => Some(&mut self.of(device).phases),
            Shelf::Managed(_) | Shelf::Graphs(_) | Shelf::Host | Shelf::Imported(_) => None,
        }
    }
}
