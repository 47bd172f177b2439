//! Drives a policy through an [`OpStream`] and keeps the books.
//!
//! The order of the ops is that of the trace. When a free completes is a fact of the GPU's timing: it keeps its place
//! among the requests, whatever the policy. Where a simulated request fails that had not failed, the program would
//! have stopped or gone another way: the replay ends there.

use std::ops::ControlFlow;

use crate::device::{Books, Device, Placement, Tightest};
use crate::ops::{AllocId, Allocation, LayoutSegment, Op, OpStream, PoolIdx};
use crate::policies::torch::Latitude;
use crate::policies::{Capture, OutOfMemory, Policy, Request, StandingSegment};

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomPoint {
    /// Which request it was, counted from 0 over the whole history.
    pub request: u64,
    /// Index of the op.
    pub op: usize,
    /// Bytes that the program asked for.
    pub requested: u64,
    /// Mapped from the driver at that moment, after everything that could be flushed was, bytes.
    pub reserved: u64,
    /// Handed out at that moment, bytes.
    pub allocated: u64,
    /// What the allocator and others held at that moment.
    pub held: Tightest,
    /// What the policy said.
    pub error: OutOfMemory,
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The books at the end, peaks over the whole history.
    pub books: Books,
    /// The policy's own numbers.
    pub counters: Vec<(&'static str, u64)>,
    /// The failure that ended the replay, or else the last recorded one that failed again.
    pub oom: Option<OomPoint>,
    /// Whether the replay ended before the trace did.
    pub is_cut_short: bool,
    /// When the allocator and others together held most.
    pub tightest: Tightest,
}

impl Outcome {
    /// Whether every request was served, those too that had failed when they were recorded.
    pub fn fits(&self) -> bool {
        self.oom.is_none()
    }

    /// Whether the policy has a number of that name.
    pub fn has_counter(&self, name: &str) -> bool {
        self.counters.iter().any(|(known, _)| *known == name)
    }

    /// One of the policy's own numbers; 0 where it has none of that name.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters.iter().find(|(known, _)| *known == name).map_or(0, |(_, value)| *value)
    }
}

/// Watches a run.
pub trait Observer {
    /// A request was served. `Break` ends the run here.
    fn placed(&mut self, op: usize, id: AllocId, placement: Placement, device: &Device) -> ControlFlow<()> {
        let _ = (op, id, placement, device);
        ControlFlow::Continue(())
    }

    /// Whether the program asks for it at all.
    fn asks(&mut self, id: AllocId) -> bool {
        let _ = id;
        true
    }

    /// There was no room for a request, and what was cached has been given back for it. `Continue` if the program goes on without.
    fn refused(&mut self, id: AllocId) -> ControlFlow<()> {
        let _ = id;
        ControlFlow::Break(())
    }
}

/// Watches nothing.
#[derive(Clone)]
pub struct Unobserved;

impl Observer for Unobserved {}

/// Runs the whole stream.
pub fn run(
    stream: &OpStream,
    policy: &mut dyn Policy,
    device: &mut Device,
    observer: &mut impl Observer,
) -> Outcome {
    from_nothing(stream, policy, device, observer, &mut |_| {})
}

/// Runs a stream under the very settings that it was recorded under: what was there before the history began lies where
/// it lay. Where that cannot be, it is asked for again, as in [`run`].
pub fn run_as_recorded(
    stream: &OpStream,
    policy: &mut dyn Policy,
    device: &mut Device,
    observer: &mut impl Observer,
) -> Outcome {
    from_where_it_began(stream, policy, device, observer, &mut |_| {})
}

/// What came of a run that might reserve less.
pub(crate) struct Below<O> {
    /// So much, bytes.
    pub(crate) limit: u64,
    pub(crate) outcome: Outcome,
    pub(crate) n_strayed: u64,
    pub(crate) latitude: Option<Latitude>,
    pub(crate) observer: O,
}

/// As [`run`] or [`run_as_recorded`], and what would have come of it under some lower limits. Up to the request that a limit may decide, the runs
/// are one: that is where another begins, with all that there is then. Limits that are not among the answers were never met, or
/// met too early.
pub(crate) fn run_with_limits<'d, O: Observer + Clone>(
    stream: &OpStream,
    is_as_recorded: bool,
    policy: &mut dyn Policy,
    device: &mut Device<'d>,
    observer: &mut O,
    limits: &[u64],
) -> (Outcome, Vec<Below<O>>) {
    // The lowest last.
    let mut waiting = limits.to_vec();
    waiting.sort_unstable_by_key(|limit| std::cmp::Reverse(*limit));
    let mut below = Vec::new();
    let mut part = |before: &Before<'_, '_, 'd, O>| {
        while let Some(limit) = waiting.last().copied()
            && before.policy.hangs_on_limit(before.bytes, limit)
        {
            waiting.pop();
            below.extend(before.under_limit(limit));
        }
    };
    let outcome = match is_as_recorded {
        true => from_where_it_began(stream, policy, device, observer, &mut part),
        false => from_nothing(stream, policy, device, observer, &mut part),
    };
    (outcome, below)
}

/// A run right before a request.
struct Before<'r, 's, 'd, O> {
    run: &'r Run<'s>,
    /// The op; none for what was live before the history began.
    op: Option<usize>,
    /// Bytes requested.
    bytes: u64,
    policy: &'r dyn Policy,
    device: &'r Device<'d>,
    observer: &'r O,
}

impl<O: Observer + Clone> Before<'_, '_, '_, O> {
    /// What becomes of it where only so much may be reserved from here on.
    fn under_limit(&self, limit: u64) -> Option<Below<O>> {
        let (mut policy, mut device) = (self.policy.under_limit(limit)?, self.device.fork(limit)?);
        let mut observer = self.observer.clone();
        let outcome = self.run.clone().ops(self.op?, &mut *policy, &mut device, &mut observer, &mut |_| {});
        Some(Below { limit, outcome, n_strayed: device.n_strayed(), latitude: policy.latitude(), observer })
    }
}

fn from_nothing<'d, O: Observer>(
    stream: &OpStream,
    policy: &mut dyn Policy,
    device: &mut Device<'d>,
    observer: &mut O,
    before: &mut impl FnMut(&Before<'_, '_, 'd, O>),
) -> Outcome {
    let mut run = Run::new(stream);
    // What was live before the history began is asked for first, in address order.
    for id in &stream.initial_allocs {
        let bytes = stream.allocation(*id).requested;
        before(&Before { run: &run, op: None, bytes, policy, device, observer });
        if let Err(error) = run.place(policy, device, *id) {
            run.fail(device, 0, bytes, error);
            return run.outcome(policy, device, true);
        }
    }
    run.n_requests = 0;
    run.ops(0, policy, device, observer, before)
}

fn from_where_it_began<'d, O: Observer>(
    stream: &OpStream,
    policy: &mut dyn Policy,
    device: &mut Device<'d>,
    observer: &mut O,
    before: &mut impl FnMut(&Before<'_, '_, 'd, O>),
) -> Outcome {
    let n_blocks =
        stream.initial.iter().flat_map(|it| &it.blocks).filter(|block| block.alloc.is_some()).count();
    let is_known = !stream.initial.is_empty() && n_blocks == stream.initial_allocs.len();
    if !is_known || stream.initial.iter().any(|segment| segment.expandable) {
        return from_nothing(stream, policy, device, observer, before);
    }
    let mut begun = Run::new(stream);
    for segment in &stream.initial {
        if !begun.adopt(policy, device, segment) {
            return from_nothing(stream, policy, device, observer, before);
        }
    }
    begun.ops(0, policy, device, observer, before)
}

/// Where everything that is not given back lies. Few of a trace's millions of allocations are live at once: what is known of
/// these stays small.
#[derive(Clone)]
struct Live {
    /// By allocation: one more than its slot, or 0 where it has none.
    slot_of: Vec<u32>,
    slots: Vec<Placement>,
    vacant: Vec<u32>,
}

impl Live {
    fn new(n_allocations: usize) -> Live {
        Live { slot_of: vec![0; n_allocations], slots: Vec::new(), vacant: Vec::new() }
    }

    fn put(&mut self, id: AllocId, placement: Placement) {
        let slot = match self.vacant.pop() {
            Some(slot) => slot,
            None => {
                self.slots.push(placement);
                self.slots.len() as u32 - 1
            }
        };
        self.slots[slot as usize] = placement;
        self.slot_of[id.0 as usize] = slot + 1;
    }

    fn get(&self, id: AllocId) -> Option<Placement> {
        let slot = self.slot_of[id.0 as usize].checked_sub(1)?;
        Some(self.slots[slot as usize])
    }

    fn take(&mut self, id: AllocId) -> Option<Placement> {
        let slot = std::mem::take(&mut self.slot_of[id.0 as usize]).checked_sub(1)?;
        self.vacant.push(slot);
        Some(self.slots[slot as usize])
    }
}

#[derive(Clone)]
struct Run<'a> {
    stream: &'a OpStream,
    live: Live,
    n_requests: u64,
    oom: Option<OomPoint>,
}

impl<'a> Run<'a> {
    fn new(stream: &'a OpStream) -> Run<'a> {
        Run { stream, live: Live::new(stream.allocations.len()), n_requests: 0, oom: None }
    }

    /// From an op on. `before` is told of each request.
    fn ops<'d, O: Observer>(
        mut self,
        first: usize,
        policy: &mut dyn Policy,
        device: &mut Device<'d>,
        observer: &mut O,
        before: &mut impl FnMut(&Before<'_, '_, 'd, O>),
    ) -> Outcome {
        let stream = self.stream;
        for (index, op) in stream.ops.iter().enumerate().skip(first) {
            match *op {
                Op::Alloc(id) if !observer.asks(id) => {}
                Op::Alloc(id) => {
                    let bytes = stream.allocation(id).requested;
                    before(&Before { run: &self, op: Some(index), bytes, policy, device, observer });
                    device.at_op(index);
                    match self.place(policy, device, id) {
                        Ok(placement) => {
                            if observer.placed(index, id, placement, device).is_break() {
                                return self.outcome(policy, device, true);
                            }
                        }
                        Err(error) if observer.refused(id).is_break() => {
                            self.fail(device, index, stream.allocation(id).requested, error);
                            return self.outcome(policy, device, true);
                        }
                        Err(_) => {}
                    }
                    self.n_requests += 1;
                }
                Op::FreeRequested(id) => {
                    let Some(placement) = self.live.get(id) else { continue };
                    device.free_requested(placement);
                    policy.free_requested(placement);
                    // Nearly always no stream is waited for.
                    if stream.ops.get(index + 1) != Some(&Op::FreeCompleted(id)) {
                        device.pend(id, placement, stream.allocation(id).requested);
                    }
                }
                Op::FreeCompleted(id) => {
                    let Some(placement) = self.live.take(id) else { continue };
                    let was_at_once = index > 0 && stream.ops[index - 1] == Op::FreeRequested(id);
                    if was_at_once || device.unpend(id) {
                        device.free_completed(placement, stream.allocation(id).requested);
                        policy.free(device, placement);
                    }
                }
                Op::Trim => policy.trim(device),
                Op::ReleasePool(pool) => policy.release_pool(pool),
                Op::ChangePool(pool, change) => policy.change_pool(device, pool, change),
                Op::Oom(oom) => {
                    let bytes = stream.ooms[oom as usize].rounded;
                    before(&Before { run: &self, op: Some(index), bytes, policy, device, observer });
                    self.recorded_oom(policy, device, index, oom);
                    self.n_requests += 1;
                }
            }
        }
        self.outcome(policy, device, false)
    }

    fn adopt(&mut self, policy: &mut dyn Policy, device: &mut Device, segment: &LayoutSegment) -> bool {
        let requested = |id: AllocId| self.stream.allocation(id).requested;
        let standing = StandingSegment {
            address: segment.address,
            bytes: segment.bytes,
            stream: segment.stream,
            pool: segment.pool,
            small: segment.small,
            blocks: segment.blocks.iter().map(|block| (block.bytes, block.alloc.map(requested))).collect(),
        };
        let Some(placements) = policy.adopt(device, &standing) else { return false };
        for (index, placement) in placements {
            if let Some(id) = segment.blocks[index].alloc {
                device.allocated(placement, requested(id));
                self.live.put(id, placement);
            }
        }
        true
    }

    fn request(&self, allocation: &Allocation) -> Request {
        Request {
            bytes: allocation.requested,
            stream: allocation.stream,
            pool: allocation.pool,
            at: None,
            capture: match allocation.pool {
                PoolIdx::DEFAULT => Capture::No,
                pool if self.stream.pool(pool).is_capture() => Capture::Graph,
                _ => Capture::MemPool,
            },
        }
    }

    fn place(
        &mut self,
        policy: &mut dyn Policy,
        device: &mut Device,
        id: AllocId,
    ) -> Result<Placement, OutOfMemory> {
        let allocation = self.stream.allocation(id);
        let restored = &self.stream.restored;
        let is_restored = !restored.is_empty() && restored.binary_search(&id).is_ok();
        let at = is_restored.then_some(allocation.address);
        let placement = policy.alloc(device, Request { at, ..self.request(allocation) })?;
        device.allocated(placement, allocation.requested);
        self.live.put(id, placement);
        Ok(placement)
    }

    /// A request that had failed is tried again. Should it fit now, nobody knows what the program would have done
    /// with it, so it is given back at once.
    fn recorded_oom(&mut self, policy: &mut dyn Policy, device: &mut Device, index: usize, oom: u32) {
        let recorded = self.stream.ooms[oom as usize];
        let allocation = Allocation {
            requested: recorded.rounded,
            address: 0,
            stack: crate::ops::StackId::NONE,
            stream: recorded.stream.unwrap_or(crate::ops::StreamIdx(0)),
            pool: recorded.pool,
        };
        if recorded.rounded == 0 {
            return;
        }
        device.repeat_refusals(true);
        let served = policy.alloc(device, self.request(&allocation));
        device.repeat_refusals(false);
        match served {
            Ok(placement) => {
                device.allocated(placement, recorded.rounded);
                device.free_requested(placement);
                policy.free_requested(placement);
                device.free_completed(placement, recorded.rounded);
                policy.free(device, placement);
            }
            Err(error) => self.fail(device, index, recorded.rounded, error),
        }
    }

    fn fail(&mut self, device: &Device, op: usize, requested: u64, error: OutOfMemory) {
        self.oom = Some(OomPoint {
            request: self.n_requests,
            op,
            requested,
            reserved: device.books.reserved.current,
            allocated: device.books.allocated.current,
            held: Tightest { op, ..device.now() },
            error,
        });
    }

    fn outcome(self, policy: &dyn Policy, device: &Device, is_cut_short: bool) -> Outcome {
        let (books, tightest) = (device.books, device.tightest());
        Outcome { books, counters: policy.counters(), oom: self.oom, is_cut_short, tightest }
    }
}
