//! What libraries hand out of memory that they have: NVSHMEM's symmetric heap, and pinned memory of the host in PyTorch's snapshots.
//! The memory itself is the driver's business; these blocks lie in it, and their bytes are never added to it.

use gputrace_schemas::event::{Action, Bytes, Call, Event, HOST, Nanos, StackId};
use rustc_hash::FxHashMap;

use super::sites::OwnerId;
use super::{Books, Devices, Fate, Ledger, SiteId, Step, Steps};
use crate::owners::{JAX, NVSHMEM, TORCH_PINNED};

/// A block that is allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeapBlock {
    /// On which device; [`HOST`] for pinned memory.
    pub device: i16,
    /// How much was requested.
    pub bytes: Bytes,
    /// From where.
    pub site: SiteId,
    /// From where, in full.
    pub stack: StackId,
    /// Since when.
    pub since: Nanos,
}

/// Memory that libraries allocated on one device.
#[derive(Clone, Debug, Default)]
pub struct HeapBooks {
    /// By call site.
    pub blocks: Books,
    /// Requests that were refused.
    pub n_refused: u64,
    /// The last of them: when, how much, and from where.
    pub refused: Option<(Nanos, Bytes, SiteId)>,
}

/// Blocks of all heaps of the process.
#[derive(Debug, Default)]
pub(super) struct Heaps {
    pub(super) live: FxHashMap<u64, HeapBlock>,
    /// Of pinned memory: the host is not a device.
    pub(super) host: HeapBooks,
}

impl Heaps {
    /// Books a call that succeeded.
    pub(super) fn call(
        &mut self,
        event: &Event,
        call: &Call,
        site: SiteId,
        devices: &mut Devices,
        steps: &mut Steps,
    ) {
        let gone = match call.action {
            Action::HeapAlloc => {
                let (device, bytes, stack, since) = (call.device, call.bytes, event.stack, event.time);
                self.live.insert(call.addr, HeapBlock { device, bytes, site, stack, since })
            }
            Action::HeapFree => self.live.remove(&call.addr),
            _ => return,
        };
        // What was handed out again had been given back: its end was lost, or one function called another.
        if let Some(gone) = gone {
            self.books(gone.device, devices).blocks.lose(OwnerId(0), gone.site, gone.bytes);
            steps.push(Step::Heap(Fate::Freed, call.addr, gone));
        }
        if call.action == Action::HeapAlloc {
            self.books(call.device, devices).blocks.gain(event.time, OwnerId(0), site, call.bytes);
            steps.push(Step::Heap(Fate::Allocated, call.addr, self.live[&call.addr]));
        }
    }

    fn books<'a>(&'a mut self, device: i16, devices: &'a mut Devices) -> &'a mut HeapBooks {
        if device == HOST { &mut self.host } else { &mut devices.entry(device).or_default().heap }
    }
}

/// A place where NVSHMEM takes memory for its heap, which is shown by the blocks in it.
pub fn is_heap(ledger: &Ledger, device: i16, site: SiteId) -> bool {
    let has_blocks = ledger.devices().get(&device).is_some_and(|books| books.heap.blocks.peak().0 > 0);
    has_blocks && ledger.sites.site(site).is_some_and(|site| ledger.sites.owner(site.owner) == NVSHMEM)
}

/// What PyTorch pinned for its cache, where blocks show who has it.
pub fn is_pinned_cache(ledger: &Ledger, device: i16, owner: OwnerId) -> bool {
    device == HOST && ledger.host_blocks().peak().0 > 0 && ledger.sites.owner(owner) == TORCH_PINNED
}

/// A place where JAX's allocator takes memory of the device from the driver, which is shown by the buffers in it.
pub fn is_arena(ledger: &Ledger, device: i16, site: SiteId) -> bool {
    let has_buffers = ledger.devices().get(&device).is_some_and(|books| books.pjrt.is_some());
    has_buffers && ledger.sites.site(site).is_some_and(|site| ledger.sites.owner(site.owner) == JAX)
}

#[cfg(test)]
mod tests {
    use crate::ledger::Ledger;
    use crate::scene::ledger;
    use gputrace_schemas::event::Bytes;

    fn figures(ledger: &Ledger) -> (Bytes, Bytes, Bytes) {
        let books = &ledger.devices()[&0];
        (books.heap.blocks.now().bytes, books.heap.blocks.peak(), books.physical.now().bytes)
    }

    #[test]
    fn blocks_of_a_heap_are_not_added_to_it() {
        let ledger = ledger(
            "Create handle=h bytes=64M by=libnvshmem_host.so.3,init@/job/a.py:1
             HeapAlloc addr=a bytes=8M by=buffers@/job/a.py:5
             HeapAlloc addr=b bytes=4M by=buffers@/job/a.py:6
             HeapFree addr=a
             HeapFree addr=unknown",
        );
        assert_eq!(figures(&ledger), (Bytes(4 << 20), Bytes(12 << 20), Bytes(64 << 20)));
        let (_, block) = ledger.live_heap_blocks().next().expect("one is left");
        assert_eq!(ledger.sites.site_name(block.site), "buffers (/job/a.py:6)");
    }

    #[test]
    fn a_heap_that_is_full_is_not_a_device_that_is_full() {
        let ledger = ledger(
            "HeapAlloc addr=a bytes=8M
HeapAlloc bytes=1G result=2 by=grow@/job/a.py:9",
        );
        let heap = &ledger.devices()[&0].heap;
        let (_, bytes, site) = heap.refused.expect("a refusal");
        assert_eq!((heap.n_refused, bytes), (1, Bytes(1 << 30)));
        assert_eq!(ledger.sites.site_name(site), "grow (/job/a.py:9)");
        assert!(ledger.refusals.is_empty());
    }

    #[test]
    fn what_is_handed_out_twice_is_there_once() {
        // calloc may call malloc.
        let ledger = ledger("HeapAlloc addr=a bytes=8M\nHeapAlloc addr=a bytes=8M");
        assert_eq!(figures(&ledger).0, Bytes(8 << 20));
    }
}
