//! Pools of PyTorch's allocator, where the trace says which are open, made and released: the books say whose a request is.

use gputrace_schemas::event::{Action, Call, ThreadId};
use gputrace_sim::ops::{Op, PoolChange, PoolIdx, TooMany};
use rustc_hash::{FxHashMap, FxHashSet};

use super::Importer;
use crate::ledger::Ledger;
use crate::ledger::pools::PoolId;

/// The pools of all devices.
#[derive(Default)]
pub(super) struct Pools {
    /// Graphs and `MemPool`s that hold a pool.
    uses: FxHashMap<(i16, PoolId), u32>,
    /// Pools that serve requests of others before they fail.
    overflow: FxHashSet<(i16, PoolId)>,
}

impl Importer<'_> {
    /// The pool of a request on a thread and stream.
    pub(super) fn pool_of_request(
        &mut self,
        ledger: &Ledger,
        device: i16,
        thread: ThreadId,
        stream: Option<u64>,
    ) -> Result<PoolIdx, TooMany> {
        let Some(id) = ledger.torch_pools.of_request(device, thread, stream) else {
            return Ok(PoolIdx::DEFAULT);
        };
        self.device(device).map_or(Ok(PoolIdx::DEFAULT), |device| device.builder.pool(id))
    }

    /// The pool that a block is booked in: that of its segment, unless this served a request of another.
    pub(super) fn pool_of_block(&mut self, ordinal: i16, segment: u32, asked: PoolIdx) -> PoolIdx {
        let Pools { overflow, .. } = &self.pools;
        let Some(device) = self.devices.get_mut(&ordinal) else { return asked };
        let stream = device.builder.stream_mut();
        let Some(segment) = stream.segments.get_mut(segment as usize) else { return asked };
        let pool = *segment.pool.get_or_insert(asked);
        let serves_others = overflow.contains(&(ordinal, stream.pool(pool).id));
        if asked == PoolIdx::DEFAULT && serves_others { asked } else { pool }
    }

    /// Segments that were obtained for a request.
    pub(super) fn pools_of_segments(&mut self, obtained: Vec<(i16, u32)>, asked: PoolIdx) {
        if self.survey.knows_pools {
            for (device, segment) in obtained {
                self.pool_of_block(device, segment, asked);
            }
        }
    }

    /// A call about pools.
    pub(super) fn pool_call(&mut self, call: &Call) -> Result<(), TooMany> {
        let id = (call.handle, call.extra);
        let key = (call.device, id);
        if call.action == Action::TorchTrim {
            return self.trims(id);
        }
        let Some(device) = self.devices.get_mut(&call.device) else { return Ok(()) };
        let pool = device.builder.pool(id)?;
        let uses = self.pools.uses.entry(key).or_default();
        match call.action {
            Action::TorchPoolBegin | Action::TorchPoolCreate => *uses = uses.saturating_add(1),
            Action::TorchPoolRelease => {
                *uses = uses.saturating_sub(1);
                if *uses == 0 {
                    device.builder.op(Op::ReleasePool(pool));
                }
            }
            Action::TorchPoolUseOnOom if call.bytes.0 != 0 => {
                self.pools.overflow.insert(key);
                device.builder.op(Op::ChangePool(pool, PoolChange::ServeOthers));
            }
            Action::TorchPoolUseOnOom if self.pools.overflow.remove(&key) => {
                device.builder.op(Op::ChangePool(pool, PoolChange::ServeNoOthers));
            }
            Action::TorchPoolNoSplit => {
                device.builder.op(Op::ChangePool(pool, PoolChange::KeepWhole));
            }
            _ => {}
        }
        Ok(())
    }

    /// `emptyCache`, of one pool or of everything.
    fn trims(&mut self, id: PoolId) -> Result<(), TooMany> {
        for ordinal in &self.survey.torch {
            let Some(device) = self.devices.get_mut(ordinal) else { continue };
            if id == (0, 0) {
                device.trim(&[]);
            } else if self.pools.uses.contains_key(&(*ordinal, id)) {
                let pool = device.builder.pool(id)?;
                device.builder.op(Op::ChangePool(pool, PoolChange::Trim));
            }
        }
        Ok(())
    }
}
