//! One device's ops so far.

use std::collections::BTreeMap;

use gputrace_sim::ops::{
    AllocId, Allocation, Builder, NO_SEGMENT, Op, PoolIdx, RecordedSegment, StackId, StreamIdx, TooMany,
};
use rustc_hash::FxHashMap;

/// One device's ops so far.
pub(super) struct Device {
    pub(super) builder: Builder,
    pub(super) live: FxHashMap<u64, AllocId>,
    /// Segments of PyTorch that are there now: start to end and index.
    pub(super) segments: BTreeMap<u64, (u64, u32)>,
    /// Segments obtained while a stream was captured, and the capture.
    pub(super) captured: Vec<(u32, u64)>,
    pub(super) at_start: Vec<(u64, AllocId)>,
    /// Who asked for free memory, whether to choose an algorithm, and how often.
    pub(super) queries: FxHashMap<(StackId, bool), u64>,
    /// Number of ops when `empty_cache` was last seen: what follows without another op belongs to it.
    trimmed_at: Option<usize>,
    pub(super) n_twice: u64,
    pub(super) n_requests_unseen: u64,
    pub(super) n_frees_in_capture: u64,
}

impl Device {
    pub(super) fn new(ordinal: i16) -> Device {
        Device {
            builder: Builder::new(u32::from(ordinal.unsigned_abs())),
            live: FxHashMap::default(),
            segments: BTreeMap::new(),
            captured: Vec::new(),
            at_start: Vec::new(),
            queries: FxHashMap::default(),
            trimmed_at: None,
            n_twice: 0,
            n_requests_unseen: 0,
            n_frees_in_capture: 0,
        }
    }

    fn segment_at(&self, address: u64) -> u32 {
        let below = self.segments.range(..=address).next_back();
        below.filter(|(_, (end, _))| *end > address).map_or(NO_SEGMENT, |(_, (_, index))| *index)
    }

    pub(super) fn new_segment(&mut self, address: u64, bytes: u64) -> u32 {
        let segments = &mut self.builder.stream_mut().segments;
        segments.push(RecordedSegment { address, bytes, stream: StreamIdx(0), pool: None });
        segments.len() as u32 - 1
    }

    pub(super) fn handed_out(&mut self, allocation: Allocation) -> AllocId {
        let address = allocation.address;
        if let Some(missed) = self.live.remove(&address) {
            self.n_twice += 1;
            self.builder.op(Op::FreeRequested(missed));
            self.builder.op(Op::FreeCompleted(missed));
        }
        let segment = self.segment_at(address);
        let id = self.builder.alloc(allocation);
        self.builder.stream_mut().segment_of.push(segment);
        self.live.insert(address, id);
        id
    }

    pub(super) fn taken_back(&mut self, address: u64, bytes: u64) -> AllocId {
        let id = self.live.remove(&address).unwrap_or_else(|| {
            let id = self.builder.allocation(Allocation {
                requested: bytes.max(1),
                address,
                stack: StackId::NONE,
                stream: StreamIdx(0),
                pool: PoolIdx::DEFAULT,
            });
            let segment = self.segment_at(address);
            self.builder.stream_mut().segment_of.push(segment);
            self.at_start.push((address, id));
            id
        });
        self.builder.op(Op::FreeRequested(id));
        id
    }

    /// The program called `empty_cache`; `completed` is what it waited for.
    pub(super) fn trim(&mut self, completed: &[AllocId]) {
        for id in completed {
            self.builder.op(Op::FreeCompleted(*id));
        }
        let n_ops = self.builder.stream_mut().ops.len();
        if self.trimmed_at != Some(n_ops) {
            self.builder.op(Op::Trim);
            self.trimmed_at = Some(n_ops + 1);
        }
    }
}

/// Gives the segments of captures their pools.
pub(super) fn private_pools(device: &mut Device) -> Result<(), TooMany> {
    for (segment, capture) in std::mem::take(&mut device.captured) {
        let pool = device.builder.pool((capture.max(1), 0))?;
        device.builder.stream_mut().segments[segment as usize].pool = Some(pool);
    }
    Ok(())
}
