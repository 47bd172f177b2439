//! One device's ops so far.

use std::collections::{BTreeMap, BTreeSet};

use gputrace_sim::ops::{
    AllocId, Allocation, Builder, DriverCall, NO_SEGMENT, Op, PoolIdx, RecordedOom, RecordedSegment, StackId,
    StreamIdx, TooMany,
};
use rustc_hash::FxHashMap;

use crate::ledger::Stranger;

/// One device's ops so far.
pub(super) struct Device {
    pub(super) builder: Builder,
    /// PyTorch's blocks until no stream uses them any more, by [`crate::ledger::Block::serial`]; where there are none, what
    /// the driver handed out, by [`crate::ledger::Object::serial`].
    live: FxHashMap<u64, AllocId>,
    /// Segments of PyTorch that are there now: start to end and index.
    pub(super) segments: BTreeMap<u64, (u64, u32)>,
    /// Segments obtained while a stream was captured, and the capture.
    pub(super) captured: Vec<(u32, u64)>,
    /// Segments in which captures got blocks, and the captures.
    used_in: BTreeSet<(u32, u64)>,
    /// Requests that failed while a stream was captured, by number, and the capture.
    failed_captured: Vec<(usize, u64)>,
    pub(super) at_start: Vec<(u64, AllocId)>,
    /// Who asked for free memory, whether to choose an algorithm, and how often.
    pub(super) queries: FxHashMap<(StackId, bool), u64>,
    /// Number of ops when `empty_cache` was last seen: what follows without another op belongs to it.
    trimmed_at: Option<usize>,
    pub(super) n_twice: u64,
    pub(super) n_requests_unseen: u64,
}

impl Device {
    pub(super) fn new(ordinal: i16) -> Device {
        Device {
            builder: Builder::new(u32::from(ordinal.unsigned_abs())),
            live: FxHashMap::default(),
            segments: BTreeMap::new(),
            captured: Vec::new(),
            used_in: BTreeSet::new(),
            failed_captured: Vec::new(),
            at_start: Vec::new(),
            queries: FxHashMap::default(),
            trimmed_at: None,
            n_twice: 0,
            n_requests_unseen: 0,
        }
    }

    pub(super) fn segment_at(&self, address: u64) -> u32 {
        let below = self.segments.range(..=address).next_back();
        below.filter(|(_, (end, _))| *end > address).map_or(NO_SEGMENT, |(_, (_, index))| *index)
    }

    pub(super) fn new_segment(&mut self, address: u64, bytes: u64) -> u32 {
        let segments = &mut self.builder.stream_mut().segments;
        segments.push(RecordedSegment { address, bytes, stream: StreamIdx(0), pool: None });
        segments.len() as u32 - 1
    }

    pub(super) fn handed_out(&mut self, serial: u64, allocation: Allocation, segment: u32) {
        let id = self.builder.alloc(allocation);
        self.builder.stream_mut().segment_of.push(segment);
        self.live.insert(serial, id);
    }

    /// The newest allocation put a block back where it had been.
    pub(super) fn restored(&mut self) {
        let stream = self.builder.stream_mut();
        let newest = AllocId(stream.allocations.len() as u32 - 1);
        stream.restored.push(newest);
    }

    /// A block was there before the first event.
    pub(super) fn was_there(&mut self, stranger: &Stranger) {
        let Stranger { addr: address, bytes, serial, .. } = *stranger;
        let segment = self.segment_at(address);
        let id = self.builder.allocation(Allocation {
            requested: bytes.0.max(1),
            address,
            stack: StackId::NONE,
            stream: StreamIdx(0),
            pool: PoolIdx::DEFAULT,
        });
        self.builder.stream_mut().segment_of.push(segment);
        self.at_start.push((address, id));
        self.live.insert(serial, id);
    }

    /// A request failed, perhaps in a capture.
    pub(super) fn failed(&mut self, oom: RecordedOom, capture: Option<u64>) {
        let number = self.builder.stream_mut().ooms.len();
        self.failed_captured.extend(capture.map(|capture| (number, capture)));
        self.builder.oom(oom);
    }

    /// A block in this segment was got in a capture.
    pub(super) fn used_in(&mut self, segment: u32, capture: u64) {
        self.used_in.insert((segment, capture));
    }

    pub(super) fn block_freed(&mut self, serial: u64) {
        if let Some(id) = self.live.get(&serial) {
            self.builder.op(Op::FreeRequested(*id));
        }
    }

    pub(super) fn block_done(&mut self, serial: u64) {
        if let Some(id) = self.live.remove(&serial) {
            self.builder.op(Op::FreeCompleted(id));
        }
    }

    /// What the driver handed out is gone; whether it was a request.
    pub(super) fn given_back(&mut self, serial: u64) -> bool {
        let Some(id) = self.live.get(&serial).copied() else { return false };
        self.block_freed(serial);
        self.block_done(serial);
        let stream = self.builder.stream_mut();
        let Allocation { address, requested, .. } = *stream.allocation(id);
        let segment = stream.segment_of[id.0 as usize];
        self.builder.driver(DriverCall::Free, address, requested, segment);
        true
    }

    /// The program called `empty_cache`; `completed` is what it waited for.
    pub(super) fn trim(&mut self, completed: &[u64]) {
        completed.iter().for_each(|serial| self.block_done(*serial));
        let n_ops = self.builder.stream_mut().ops.len();
        if self.trimmed_at != Some(n_ops) {
            self.builder.op(Op::Trim);
            self.trimmed_at = Some(n_ops + 1);
        }
    }
}

/// Gives the segments of captures, and the requests that failed in them, their pools. A capture that gets a block in a
/// segment of another shares its pool; without that it is taken to have one of its own.
pub(super) fn private_pools(device: &mut Device) -> Result<(), TooMany> {
    let captured = std::mem::take(&mut device.captured);
    let owner: BTreeMap<u32, u64> = captured.iter().copied().collect();
    let mut shares_with: BTreeMap<u64, u64> = BTreeMap::new();
    for (segment, capture) in std::mem::take(&mut device.used_in) {
        if let Some(other) = owner.get(&segment) {
            let (one, other) = (first_of(&shares_with, capture), first_of(&shares_with, *other));
            if one != other {
                shares_with.insert(one.max(other), one.min(other));
            }
        }
    }
    let pool_of = |device: &mut Device, capture| device.builder.pool((first_of(&shares_with, capture), 0));
    for (segment, capture) in captured {
        let pool = pool_of(device, capture)?;
        device.builder.stream_mut().segments[segment as usize].pool = Some(pool);
    }
    for (number, capture) in std::mem::take(&mut device.failed_captured) {
        let pool = pool_of(device, capture)?;
        device.builder.stream_mut().ooms[number].pool = pool;
    }
    Ok(())
}

/// The first capture of those that share a pool with this one.
fn first_of(shares_with: &BTreeMap<u64, u64>, mut capture: u64) -> u64 {
    while let Some(earlier) = shares_with.get(&capture) {
        capture = *earlier;
    }
    capture.max(1)
}
