//! What must be known of a whole trace before its first event is understood.

use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::{
    Action, ApiId, Bytes, Call, CommId, Event, EventKind, Mapping, Nanos, ThreadId,
};
use gputrace_sim::driver::REGION;
use rustc_hash::FxHashSet;

use super::MAX_DEVICES;
use crate::import::{HIGHEST, LARGEST, LARGEST_REFUSED};
use crate::ledger::asked_about;
use crate::ledger::pools::{POOLS_SEEN, PoolId};

/// What must be known before the first event is understood.
#[derive(Default)]
pub(super) struct Survey {
    /// The stream events that the allocator asked about. The program's own are not among them.
    pub(super) own_events: FxHashSet<u64>,
    /// Devices with blocks of PyTorch's allocator.
    pub(super) torch: FxHashSet<i16>,
    /// Devices that anything was asked of.
    pub(super) devices: BTreeSet<i16>,
    /// Address space that was reserved at any time, from start to end. PyTorch's segments that grow take terabytes of
    /// it, which another setting would not have taken.
    pub(super) reserved: Vec<Mapping>,
    /// When the address space was read for the first time.
    pub(super) first_read: Option<Nanos>,
    /// The driver's regions of memory that was handed out before that.
    pub(super) regions: Vec<Mapping>,
    /// PyTorch's `allocate` was seen: [`Call::in_allocate`] means something.
    pub(super) knows_allocate: bool,
    /// The allocator's pools and `empty_cache` were seen.
    pub(super) knows_pools: bool,
    /// What was seen of each pool.
    pub(super) pools: BTreeMap<(i16, PoolId), Seen>,
    /// Somebody attached to a process that ran already.
    pub(super) is_attached: bool,
}

/// What was seen of a pool: more ends than beginnings mean that some came before the recording.
#[derive(Default)]
pub(super) struct Seen {
    is_created: bool,
    uses: i64,
    least_uses: i64,
    open: i64,
    least_open: i64,
    /// Who closed it without having opened it.
    closed_by: ThreadId,
}

impl Seen {
    fn call(&mut self, action: Action, thread: ThreadId) {
        match action {
            Action::TorchPoolCreate => {
                (self.is_created, self.uses) = (true, self.uses + 1);
            }
            Action::TorchPoolBegin => {
                (self.uses, self.open) = (self.uses + 1, self.open + 1);
            }
            Action::TorchPoolEnd => {
                self.open -= 1;
                if self.open < self.least_open {
                    (self.least_open, self.closed_by) = (self.open, thread);
                }
            }
            Action::TorchPoolRelease => {
                self.uses -= 1;
                self.least_uses = self.least_uses.min(self.uses);
            }
            _ => {}
        }
    }

    /// The calls that came before the recording: those that made or opened it, and those that left it open.
    fn before(&self, device: i16, id: PoolId) -> impl Iterator<Item = (ThreadId, Call)> {
        let n_open = -self.least_open;
        let is_of_graphs = id.1 == 0;
        // A `MemPool` holds what it opens (PyTorch 2.6), and may never be seen to let it go.
        let is_held = n_open > 0 && !is_of_graphs && !self.is_created;
        let n_held = (-self.least_uses - n_open).max(i64::from(is_held));
        let held: &[Action] = match is_of_graphs {
            true => &[Action::TorchPoolBegin, Action::TorchPoolEnd],
            false => &[Action::TorchPoolCreate],
        };
        let call = move |action| Call {
            api: ApiId(0),
            action,
            device,
            result: Some(0),
            addr: 0,
            bytes: Bytes(0),
            stream: 0,
            handle: id.0,
            extra: id.1,
            duration: Nanos(0),
            captured: false,
            in_allocate: false,
            comm: CommId(0),
            nccl_call: 0,
            nccl_thread: false,
        };
        let held = (0..n_held).flat_map(move |_| held.iter().map(|action| (ThreadId(0), *action)));
        let thread = self.closed_by;
        let open = (0..n_open).map(move |_| (thread, Action::TorchPoolBegin));
        held.chain(open).map(move |(thread, action)| (thread, call(action)))
    }
}

fn changes_pool(action: Action) -> bool {
    use Action::{TorchPoolBegin, TorchPoolCreate, TorchPoolEnd, TorchPoolRelease};
    matches!(action, TorchPoolBegin | TorchPoolCreate | TorchPoolEnd | TorchPoolRelease)
}

impl Survey {
    pub(super) fn event(&mut self, event: &Event) {
        match &event.kind {
            EventKind::Wait(wait) => self.own_events.extend(asked_about(wait)),
            EventKind::Call(call) if call.result == Some(0) && call.action.gives() => {
                if call.action == Action::Reserve {
                    let end = call.addr.saturating_add(call.bytes.0);
                    self.reserved.push(Mapping { start: call.addr, end });
                }
                if call.action == Action::Alloc && self.first_read.is_some_and(|read| event.time <= read) {
                    let end = call.addr.saturating_add(call.bytes.0);
                    let end = end.checked_next_multiple_of(REGION).unwrap_or(end);
                    self.regions.push(Mapping { start: call.addr / REGION * REGION, end });
                }
                self.devices.extend(Some(call.device).filter(|device| (0..MAX_DEVICES).contains(device)));
            }
            EventKind::Call(call) if changes_pool(call.action) => {
                let seen = self.pools.entry((call.device, (call.handle, call.extra))).or_default();
                seen.call(call.action, event.thread);
            }
            EventKind::BlockAlloc(block) => {
                self.torch.insert(block.device);
                self.knows_allocate |= block.requested.is_some();
            }
            EventKind::BlockOom(oom) => {
                self.torch.insert(oom.device);
            }
            EventKind::Note(note) => {
                self.knows_pools |= note == POOLS_SEEN;
                self.is_attached |= note.starts_with("attach.before=");
            }
            _ => {}
        }
    }

    /// Calls about pools that came before the recording, as what came later shows.
    pub(super) fn pools_before(&self) -> Vec<(ThreadId, Call)> {
        self.pools.iter().flat_map(|((device, id), seen)| seen.before(*device, *id)).collect()
    }
}

/// The bytes that an event is about, if a device can have them at that address.
pub(super) fn plausible_bytes(kind: &EventKind) -> Option<u64> {
    let (address, bytes) = match kind {
        // Elsewhere they are not memory: a pool's release threshold is often the largest number there is.
        EventKind::Call(call) if !call.action.gives() && !call.action.takes() => (0, 0),
        EventKind::Call(call) => (call.addr, call.bytes.0),
        EventKind::BlockAlloc(block) => {
            (block.addr, block.bytes.0.max(block.requested.map_or(0, |requested| requested.0)))
        }
        EventKind::BlockFree(block) => (block.addr, block.bytes.0),
        EventKind::BlockOom(oom) => return Some(oom.bytes.0).filter(|bytes| *bytes <= LARGEST_REFUSED),
        _ => (0, 0),
    };
    let largest = if is_failed(kind) { LARGEST_REFUSED } else { LARGEST };
    (address <= HIGHEST && bytes <= largest).then_some(bytes)
}

pub(super) fn is_failed(kind: &EventKind) -> bool {
    matches!(kind, EventKind::Call(call) if call.result != Some(0))
}
