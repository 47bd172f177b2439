//! What must be known of a whole trace before its first event is understood.

use std::collections::BTreeSet;

use gputrace_schemas::event::{Action, Event, EventKind, Mapping, Nanos};
use gputrace_sim::driver::REGION;
use rustc_hash::FxHashSet;

use super::MAX_DEVICES;
use crate::import::{HIGHEST, LARGEST, LARGEST_REFUSED};
use crate::ledger::asked_about;
use crate::ledger::pools::POOLS_SEEN;

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
    /// Somebody attached to a process that ran already.
    pub(super) is_attached: bool,
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
