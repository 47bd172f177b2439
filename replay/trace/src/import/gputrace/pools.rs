//! Pools of PyTorch's allocator, where the trace says which are open, made and released: the books say whose a request is.

use gputrace_schemas::event::{Action, Call, ThreadId};
use gputrace_sim::ops::{Op, PoolChange, PoolIdx, TooMany};
use rustc_hash::{FxHashMap, FxHashSet};

use super::Importer;
use crate::ledger::Ledger;
use crate::ledger::pools::PoolId;
use crate::torch_release;

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

    /// A call about pools that came before the recording began.
    pub(super) fn pool_before(&mut self, call: &Call) {
        if matches!(call.action, Action::TorchPoolBegin | Action::TorchPoolCreate) {
            *self.pools.uses.entry((call.device, (call.handle, call.extra))).or_default() += 1;
        }
    }

    /// A call about pools.
    pub(super) fn pool_call(&mut self, ledger: &Ledger, call: &Call) -> Result<(), TooMany> {
        let id = (call.handle, call.extra);
        let key = (call.device, id);
        if call.action == Action::TorchTrim {
            return self.trims(ledger, id);
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
    fn trims(&mut self, ledger: &Ledger, id: PoolId) -> Result<(), TooMany> {
        let version = self.definitions.process().torch_version.as_deref().and_then(torch_release);
        for ordinal in &self.survey.torch {
            let Some(device) = self.devices.get_mut(ordinal) else { continue };
            let is_held = ledger.torch_pools.hold_flushes(*ordinal, version);
            if id == (0, 0) && is_held {
                // Pools that nobody holds any more are emptied all the same.
                let released = self.pools.uses.iter().filter(|((of, _), uses)| of == ordinal && **uses == 0);
                let mut released: Vec<PoolId> = released.map(|((_, id), _)| *id).collect();
                released.sort_unstable();
                for id in released {
                    let pool = device.builder.pool(id)?;
                    device.builder.op(Op::ChangePool(pool, PoolChange::Trim));
                }
            } else if id == (0, 0) {
                device.trim(&[]);
            } else if self.pools.uses.contains_key(&(*ordinal, id)) {
                let pool = device.builder.pool(id)?;
                device.builder.op(Op::ChangePool(pool, PoolChange::Trim));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use gputrace_sim::ops::{Op, PoolChange, PoolIdx};
    use gputrace_sim::whatif::Laboratory;

    use crate::scene::requests;

    const BY: &str = "by=libcudart.so,libc10_cuda.so in_allocate=1";

    /// The pool of each request, and what else happened to pools.
    fn pools(scene: &str) -> (Vec<(u64, u64)>, Vec<Op>) {
        let trace = requests(&format!("note torch.pools=seen\n{scene}"));
        assert!(Laboratory::new(&trace.devices[0]).unwrap().self_check(None).is_perfect());
        told(scene)
    }

    fn told(scene: &str) -> (Vec<(u64, u64)>, Vec<Op>) {
        let trace = requests(&format!("note torch.pools=seen\n{scene}"));
        assert_eq!(trace.notes, [""; 0]);
        let stream = &trace.devices[0];
        let of_pools = |op: &&Op| matches!(op, Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..));
        let ids = stream.allocations.iter().map(|it| stream.pool(it.pool).id).collect();
        (ids, stream.ops.iter().filter(of_pools).copied().collect())
    }

    #[test]
    fn a_thread_that_opened_a_pool_gets_blocks_of_it_and_others_do_not() {
        let (ids, ops) = pools(&format!(
            "Alloc addr=0x40000000 bytes=2M {BY}
            block addr=0x40000000 bytes=512 requested=512
            TorchPoolCreate extra=1
            TorchPoolUseOnOom extra=1
            TorchPoolBegin extra=1
            Alloc addr=0x50000000 bytes=2M {BY}
            block addr=0x50000000 bytes=512 requested=512
            block addr=0x40000200 bytes=512 requested=512 thread=1
            TorchPoolEnd extra=1
            TorchPoolRelease extra=1
            block addr=0x40000400 bytes=512 requested=512
            free addr=0x50000000 bytes=512
            TorchPoolRelease extra=1
            TorchTrim extra=1
            Free addr=0x50000000 by=libcudart.so,libc10_cuda.so
            TorchTrim
            block addr=0x40000600 bytes=512 requested=512"
        ));
        assert_eq!(ids, [(0, 0), (0, 1), (0, 0), (0, 0), (0, 0)]);
        let pool = PoolIdx(1);
        assert_eq!(ops, [Op::ReleasePool(pool), Op::ChangePool(pool, PoolChange::Trim), Op::Trim]);
    }

    #[test]
    fn a_capture_gets_what_is_asked_for_on_its_stream_and_nothing_once_it_failed() {
        let (ids, _) = pools(&format!(
            "TorchPoolBegin handle=1 stream=5
            CaptureBegin stream=5
            Alloc addr=0x50000000 bytes=2M {BY}
            block addr=0x50000000 bytes=512 requested=512 stream=5
            block addr=0x50000200 bytes=512 requested=512 stream=5 thread=1
            Alloc addr=0x60000000 bytes=2M {BY} thread=1
            block addr=0x60000000 bytes=512 requested=512 stream=6 thread=1
            CaptureEnd stream=5 result=901
            Alloc addr=0x70000000 bytes=2M {BY}
            block addr=0x70000000 bytes=512 requested=512 stream=5"
        ));
        assert_eq!(ids, [(1, 0), (1, 0), (0, 0), (0, 0)]);
    }

    #[test]
    fn the_pool_that_was_opened_last_is_asked_first() {
        let (ids, _) = pools(&format!(
            "TorchPoolBegin extra=1
            TorchPoolBegin extra=2
            Alloc addr=0x50000000 bytes=2M {BY}
            block addr=0x50000000 bytes=512 requested=512
            TorchPoolEnd extra=2
            Alloc addr=0x60000000 bytes=2M {BY}
            block addr=0x60000000 bytes=512 requested=512"
        ));
        assert_eq!(ids, [(0, 2), (0, 1)]);
    }

    #[test]
    fn a_block_that_nobody_asked_for_is_put_where_it_had_been() {
        // Best fit would take the smaller hole.
        let (ids, _) = pools(&format!(
            "TorchPoolBegin handle=1
            CaptureBegin stream=5
            Alloc addr=0x50000000 bytes=2M {BY}
            block addr=0x50000000 bytes=1M requested=1M stream=5
            Alloc addr=0x60000000 bytes=2M {BY}
            block addr=0x50100000 bytes=1M requested=1M stream=5
            block addr=0x60000000 bytes=512 requested=512 stream=5
            free addr=0x50100000 bytes=1M
            free addr=0x60000000 bytes=512
            block addr=0x60000000 bytes=512"
        ));
        assert_eq!(ids, [(1, 0); 4]);
    }

    #[test]
    fn a_pool_that_was_open_before_the_recording_began_serves_what_was_asked_until_it_is_closed() {
        // 1500 MiB were refused while 2000 MiB lay free: they were in a pool that somebody held.
        let tensors = |n: u64, first: u64, mib: u64| -> String {
            let tensor = |at: u64| {
                format!(
                    "Alloc addr={at:#x} bytes={mib}M {BY}
                    block addr={at:#x} bytes={mib}M requested={mib}M\n"
                )
            };
            (0..n).map(|index| tensor(first + index * 0x4000_0000)).collect()
        };
        let (in_pool, outside) = (tensors(4, 0x4000_0000, 500), tensors(3, 0x4_0000_0000, 400));
        let freed: String =
            (1..5u64).map(|n| format!("free addr={:#x} bytes=500M\n", n * 0x4000_0000)).collect();
        let trace = requests(&format!(
            "note torch.pools=seen
            {in_pool}
            TorchPoolEnd extra=1
            TorchPoolRelease extra=1
            {freed}
            {outside}
            oom requested=1500M bytes=1500M
            TorchPoolRelease extra=1"
        ));
        let stream = &trace.devices[0];
        let is_private = |it: &gputrace_sim::ops::Allocation| it.pool != PoolIdx::DEFAULT;
        let private: Vec<bool> = stream.allocations.iter().map(is_private).collect();
        assert_eq!(private, [true, true, true, true, false, false, false]);
        // It is released once, after the refusal.
        let n = stream.ops.len();
        assert_eq!(stream.ops[n - 2..], [Op::Oom(0), Op::ReleasePool(PoolIdx(1))]);
    }

    #[test]
    fn what_a_pool_serves_to_others_was_asked_of_the_default_one() {
        // Not replayed: nothing here says how much room the device had.
        let (ids, ops) = told(&format!(
            "TorchPoolCreate extra=1
            TorchPoolBegin extra=1
            Alloc addr=0x50000000 bytes=2M {BY}
            block addr=0x50000000 bytes=512 requested=512
            TorchPoolEnd extra=1
            TorchPoolUseOnOom extra=1 bytes=1
            block addr=0x50000200 bytes=512 requested=512"
        ));
        assert_eq!(ids, [(0, 1), (0, 0)]);
        assert_eq!(ops, [Op::ChangePool(PoolIdx(1), PoolChange::ServeOthers)]);
    }
}
