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
use crate::skip::{self, Edge, Repeats, Seen, State, Tracked, Trackers};

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OomPoint {
    /// Which request it was, counted from 0 over the whole history.
    pub request: u64,
    /// Index of the op.
    pub op: usize,
    /// Bytes that the program requested.
    pub requested: u64,
    /// Mapped from the driver at that moment, after everything that could be flushed was, bytes.
    pub reserved: u64,
    /// Handed out at that moment, bytes.
    pub allocated: u64,
    /// What the allocator and others held at that moment.
    pub held: Tightest,
    /// The policy's error.
    pub error: OutOfMemory,
}

/// The outcome of a run.
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

/// Requests and frees that need no simulation: they are those of windows right before, from a state that was there before those (`skip`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skip {
    /// The first op.
    pub from: usize,
    /// After the last one.
    pub to: usize,
    /// Ops from one coming of the state to the next.
    pub cycle: usize,
    /// By so much the ids of allocations differ from one to the next.
    pub shift: u32,
}

impl Skip {
    /// How often what happened in the ops of a cycle right before happens again.
    pub fn times(&self) -> u64 {
        ((self.to - self.from) / self.cycle) as u64
    }

    /// No further than to an op, in whole cycles.
    fn until(self, op: usize) -> Skip {
        let n_ops = op.clamp(self.from, self.to) - self.from;
        Skip { to: self.from + n_ops / self.cycle * self.cycle, ..self }
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

    /// What the observer needs to know later of how it stands now, if it can do without requests that repeat others. None where it must see
    /// each: then nothing is skipped.
    fn edge(&self) -> Option<[u64; 2]> {
        None
    }

    /// How far a skip may go: up to this op. `since` is how the observer stood a cycle before.
    fn reach(&self, skip: &Skip, since: [u64; 2]) -> usize {
        let _ = since;
        skip.to
    }

    /// Ops were skipped. What was seen since the observer stood at `since` ([`Observer::edge`]) is one cycle. `renamed` are the allocations that
    /// are live and belong to the cycles, before and after, with where they lie.
    fn skipped(&mut self, skip: &Skip, since: [u64; 2], renamed: &[(AllocId, AllocId, Placement)]) {
        let _ = (skip, since, renamed);
    }
}

/// Watches nothing.
#[derive(Clone)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn edge(&self) -> Option<[u64; 2]> {
        Some([0; 2])
    }
}

/// Runs the whole stream. What is known to come out as before is skipped, with the same results; [`Device::simulating_all`] turns that off.
pub fn run(
    stream: &OpStream,
    policy: &mut dyn Policy,
    device: &mut Device,
    observer: &mut impl Observer,
) -> Outcome {
    // Where a stream repeats, if that is of use.
    let is_of_use = device.skips() && observer.edge().is_some();
    let repeats = if is_of_use { Repeats::of(stream) } else { Repeats::default() };
    run_knowing(stream, &repeats, policy, device, observer)
}

/// As [`run`], with the stream's [`Repeats`].
pub(crate) fn run_knowing(
    stream: &OpStream,
    repeats: &Repeats,
    policy: &mut dyn Policy,
    device: &mut Device,
    observer: &mut impl Observer,
) -> Outcome {
    from_nothing(stream, repeats, policy, device, observer, &mut Open)
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

/// As [`run`], and what would have come of it under some lower limits. Up to the request that a limit may decide, the runs
/// are one: that is where another begins, with all that there is then. Limits that are not among the answers were never met, or
/// met too early.
pub(crate) fn run_with_limits<'d, O: Observer + Clone>(
    (stream, repeats): (&OpStream, &Repeats),
    is_as_recorded: bool,
    policy: &mut dyn Policy,
    device: &mut Device<'d>,
    observer: &mut O,
    limits: &[u64],
) -> (Outcome, Vec<Below<O>>) {
    // The lowest last.
    let mut waiting = limits.to_vec();
    waiting.sort_unstable_by_key(|limit| std::cmp::Reverse(*limit));
    let mut limits = Limits { waiting, below: Vec::new() };
    let outcome = match is_as_recorded {
        true => from_where_it_began(stream, repeats, policy, device, observer, &mut limits),
        false => from_nothing(stream, repeats, policy, device, observer, &mut limits),
    };
    (outcome, limits.below)
}

/// Sees a run before each request.
trait Gate<'d, O> {
    /// It goes on as before.
    fn pass(&mut self, before: &Before<'_, '_, 'd, O>);

    /// Where this is another number than before, it may look for something else.
    fn n_waiting(&self) -> usize;
}

/// Lets everything pass.
struct Open;

impl<O> Gate<'_, O> for Open {
    #[inline]
    fn pass(&mut self, _: &Before<'_, '_, '_, O>) {}

    fn n_waiting(&self) -> usize {
        0
    }
}

/// Lets runs begin where a lower limit may decide a request.
struct Limits<O> {
    /// The lowest last.
    waiting: Vec<u64>,
    below: Vec<Below<O>>,
}

impl<'d, O: Observer + Clone> Gate<'d, O> for Limits<O> {
    fn pass(&mut self, before: &Before<'_, '_, 'd, O>) {
        while let Some(limit) = self.waiting.last().copied()
            && before.policy.hangs_on_limit(before.bytes, limit)
        {
            self.waiting.pop();
            self.below.extend(before.under_limit(limit));
        }
    }

    fn n_waiting(&self) -> usize {
        self.waiting.len()
    }
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
        let outcome = self.run.clone().ops(self.op?, &mut *policy, &mut device, &mut observer, &mut Open);
        Some(Below { limit, outcome, n_strayed: device.n_strayed(), latitude: policy.latitude(), observer })
    }
}

fn from_nothing<'d, O: Observer>(
    stream: &OpStream,
    repeats: &Repeats,
    policy: &mut dyn Policy,
    device: &mut Device<'d>,
    observer: &mut O,
    before: &mut impl Gate<'d, O>,
) -> Outcome {
    let mut run = Run::new(stream, repeats);
    // What was live before the history began is asked for first, in address order.
    for id in &stream.initial_allocs {
        let bytes = stream.allocation(*id).requested;
        before.pass(&Before { run: &run, op: None, bytes, policy, device, observer });
        if let Err(error) = run.place(policy, device, *id) {
            run.fail(device, 0, bytes, error);
            return run.outcome(policy, device, true);
        }
    }
    run.n_requests = 0;
    run.ops(0, policy, device, observer, before)
}

/// Under the very settings that a stream was recorded under: what was there before the history began lies where it lay. Where that cannot be,
/// it is requested again.
fn from_where_it_began<'d, O: Observer>(
    stream: &OpStream,
    repeats: &Repeats,
    policy: &mut dyn Policy,
    device: &mut Device<'d>,
    observer: &mut O,
    before: &mut impl Gate<'d, O>,
) -> Outcome {
    let n_blocks =
        stream.initial.iter().flat_map(|it| &it.blocks).filter(|block| block.alloc.is_some()).count();
    let is_known = !stream.initial.is_empty() && n_blocks == stream.initial_allocs.len();
    if !is_known || stream.initial.iter().any(|segment| segment.expandable) {
        return from_nothing(stream, repeats, policy, device, observer, before);
    }
    let mut begun = Run::new(stream, repeats);
    for segment in &stream.initial {
        if !begun.adopt(policy, device, segment) {
            return from_nothing(stream, repeats, policy, device, observer, before);
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
    slots: Vec<Slot>,
    vacant: Vec<u32>,
}

#[derive(Clone, Copy)]
struct Slot {
    placement: Placement,
    /// Whose it was last.
    id: AllocId,
}

impl Live {
    fn new(n_allocations: usize) -> Live {
        Live { slot_of: vec![0; n_allocations], slots: Vec::new(), vacant: Vec::new() }
    }

    fn n(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    fn put(&mut self, id: AllocId, placement: Placement) {
        let filled = Slot { placement, id };
        let slot = match self.vacant.pop() {
            Some(slot) => {
                self.slots[slot as usize] = filled;
                slot
            }
            None => {
                self.slots.push(filled);
                self.slots.len() as u32 - 1
            }
        };
        self.slot_of[id.0 as usize] = slot + 1;
    }

    fn get(&self, id: AllocId) -> Option<Placement> {
        let slot = self.slot_of[id.0 as usize].checked_sub(1)?;
        Some(self.slots[slot as usize].placement)
    }

    fn take(&mut self, id: AllocId) -> Option<Placement> {
        let slot = std::mem::take(&mut self.slot_of[id.0 as usize]).checked_sub(1)?;
        self.vacant.push(slot);
        Some(self.slots[slot as usize].placement)
    }

    /// Ids with where they lie, ascending.
    fn all(&self) -> Vec<(u32, Placement)> {
        let is_filled = |(slot, it): &(u32, &Slot)| self.slot_of[it.id.0 as usize] == *slot;
        let filled = (1..).zip(&self.slots).filter(is_filled);
        let mut all: Vec<(u32, Placement)> = filled.map(|(_, it)| (it.id.0, it.placement)).collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        all
    }

    /// Adds to the ids from one on.
    fn rename(&mut self, from: u32, shift: u32) -> Vec<(AllocId, AllocId, Placement)> {
        let renamed: Vec<(AllocId, AllocId, Placement)> = self
            .all()
            .into_iter()
            .filter(|(id, _)| *id >= from)
            .map(|(id, placement)| (AllocId(id), AllocId(id + shift), placement))
            .collect();
        // A new id may be an old one of another.
        let slots: Vec<u32> =
            renamed.iter().map(|(old, ..)| std::mem::take(&mut self.slot_of[old.0 as usize])).collect();
        for ((_, new, _), slot) in renamed.iter().zip(slots) {
            self.slot_of[new.0 as usize] = slot;
            self.slots[slot as usize - 1].id = *new;
        }
        renamed
    }
}

#[derive(Clone)]
struct Run<'a> {
    stream: &'a OpStream,
    repeats: &'a Repeats,
    live: Live,
    n_requests: u64,
    oom: Option<OomPoint>,
}

impl<'a> Run<'a> {
    fn new(stream: &'a OpStream, repeats: &'a Repeats) -> Run<'a> {
        Run { stream, repeats, live: Live::new(stream.allocations.len()), n_requests: 0, oom: None }
    }

    /// From an op on. `before` is told of each request.
    fn ops<'d, O: Observer>(
        mut self,
        first: usize,
        policy: &mut dyn Policy,
        device: &mut Device<'d>,
        observer: &mut O,
        before: &mut impl Gate<'d, O>,
    ) -> Outcome {
        let n_ops = self.stream.ops.len();
        let mut trackers = match device.skips() && observer.edge().is_some() {
            true => Trackers::from(self.repeats, first),
            false => Trackers::default(),
        };
        let (mut at, mut n_skipped, mut is_cut_short) = (first, 0, false);
        'run: loop {
            let stop = trackers.next().min(n_ops);
            while at < stop {
                if self.op(at, policy, device, observer, before).is_break() {
                    is_cut_short = true;
                    break 'run;
                }
                at += 1;
            }
            if stop == n_ops {
                break;
            }
            at = self.edge(stop, &mut trackers, policy, device, observer, before.n_waiting());
            n_skipped += at - stop;
        }
        skip::count((at - first) as u64, n_skipped as u64);
        self.outcome(policy, device, is_cut_short)
    }

    /// One op. `Break` where the run ends there.
    #[inline(always)]
    fn op<'d, O: Observer>(
        &mut self,
        index: usize,
        policy: &mut dyn Policy,
        device: &mut Device<'d>,
        observer: &mut O,
        before: &mut impl Gate<'d, O>,
    ) -> ControlFlow<()> {
        let stream = self.stream;
        match stream.ops[index] {
            Op::Alloc(id) if !observer.asks(id) => {}
            Op::Alloc(id) => {
                let bytes = stream.allocation(id).requested;
                before.pass(&Before { run: self, op: Some(index), bytes, policy, device, observer });
                device.at_op(index);
                match self.place(policy, device, id) {
                    Ok(placement) => observer.placed(index, id, placement, device)?,
                    Err(error) if observer.refused(id).is_break() => {
                        self.fail(device, index, stream.allocation(id).requested, error);
                        return ControlFlow::Break(());
                    }
                    Err(_) => {}
                }
                self.n_requests += 1;
            }
            Op::FreeRequested(id) => {
                let Some(placement) = self.live.get(id) else { return ControlFlow::Continue(()) };
                device.free_requested(placement);
                policy.free_requested(placement);
                // Nearly always no stream is waited for.
                if stream.ops.get(index + 1) != Some(&Op::FreeCompleted(id)) {
                    device.pend(id, placement, stream.allocation(id).requested);
                }
            }
            Op::FreeCompleted(id) => {
                let Some(placement) = self.live.take(id) else { return ControlFlow::Continue(()) };
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
                before.pass(&Before { run: self, op: Some(index), bytes, policy, device, observer });
                self.recorded_oom(policy, device, index, oom);
                self.n_requests += 1;
            }
        }
        ControlFlow::Continue(())
    }

    /// At the beginning of a window: whether what follows is known. The op that is next.
    fn edge(
        &mut self,
        at: usize,
        trackers: &mut Trackers,
        policy: &mut dyn Policy,
        device: &mut Device,
        observer: &mut impl Observer,
        n_waiting: usize,
    ) -> usize {
        trackers.go_to(at);
        while let Some(tracked) = trackers.due(at) {
            let Some(to) = self.look(at, tracked, policy, device, observer, n_waiting) else {
                // Whoever does not say how it stands now does not later.
                *trackers = Trackers::default();
                return at;
            };
            if to > at {
                trackers.go_to(to);
                return to;
            }
        }
        at
    }

    /// Looks at the state, and skips what is known. The op that is next; none where the state is not told.
    fn look(
        &mut self,
        at: usize,
        tracked: &mut Tracked,
        policy: &mut dyn Policy,
        device: &mut Device,
        observer: &mut impl Observer,
        n_waiting: usize,
    ) -> Option<usize> {
        let now = Edge {
            op: at,
            glance: device.glance(self.live.n(), n_waiting),
            tallies: self.tallies(policy, device),
            noted: observer.edge()?,
            n_calls: device.n_calls(),
        };
        let oldest = tracked.repeat.oldest_at(at);
        let before = tracked.seen.as_ref().filter(|seen| seen.edge.glance == now.glance);
        let keeps = tracked.keeps();
        let mut cost = 0;
        if keeps || before.is_some() {
            let state = self.state(oldest, policy, device)?;
            cost = state.cost();
            let is_back = |seen: &&Seen| {
                let is_called = seen.edge.n_calls != now.n_calls;
                seen.state == state
                    && (!is_called || seen.space.is_some() && seen.space == device.space_state())
            };
            if let Some(seen) = before.filter(is_back) {
                let cycle = at - seen.edge.op;
                let shift = tracked.repeat.shift * (cycle / tracked.repeat.period) as u32;
                let all = Skip { from: at, to: at + tracked.n_ahead(at), cycle, shift };
                let due = device.next_change(seen.edge.n_calls != now.n_calls);
                let skip = all.until(due.unwrap_or(usize::MAX));
                let skip = skip.until(observer.reach(&skip, seen.edge.noted));
                if skip.times() > 0 {
                    self.skip(&skip, &seen.edge, oldest, policy, device, observer);
                    tracked.skipped(skip.to);
                    return Some(skip.to);
                }
            }
            if keeps {
                let space = device.space_state();
                tracked.seen = Some(Seen { edge: now, state, space });
            }
        }
        tracked.looked(at, cost);
        Some(at)
    }

    /// Leaves out what came of a cycle that is over, as often as it comes again.
    fn skip(
        &mut self,
        skip: &Skip,
        since: &Edge,
        oldest: u32,
        policy: &mut dyn Policy,
        device: &mut Device,
        observer: &mut impl Observer,
    ) {
        let mut then = since.tallies.iter();
        self.each_tally(policy, device, &mut |tally| {
            let of_a_cycle = then.next().map_or(0, |then| tally.wrapping_sub(*then));
            *tally = tally.wrapping_add(of_a_cycle.wrapping_mul(skip.times()));
        });
        let shift = skip.shift * skip.times() as u32;
        let renamed = self.live.rename(oldest, shift);
        device.skipped(skip.to - skip.from, oldest, shift);
        observer.skipped(skip, since.noted, &renamed);
    }

    /// What only counts: of all parts, in one order.
    fn each_tally(&mut self, policy: &mut dyn Policy, device: &mut Device, see: &mut dyn FnMut(&mut u64)) {
        see(&mut self.n_requests);
        device.tallies(see);
        policy.tallies(see);
    }

    fn tallies(&mut self, policy: &mut dyn Policy, device: &mut Device) -> Vec<u64> {
        let mut tallies = Vec::with_capacity(64);
        self.each_tally(policy, device, &mut |tally| tallies.push(*tally));
        tallies
    }

    /// All that what follows depends on, but for what chooses addresses. Allocations from `oldest` on are named by their distance.
    fn state(&self, oldest: u32, policy: &dyn Policy, device: &Device) -> Option<State> {
        let named = |id: u32| match id.checked_sub(oldest) {
            Some(distance) => (u64::from(distance) << 1) | 1,
            None => u64::from(id) << 1,
        };
        let mut live = self.live.all();
        // As in the order of their names.
        let n_older = live.partition_point(|(id, _)| *id < oldest);
        live.rotate_left(n_older);
        let mut state = State::default();
        state.put_all(
            live.iter().flat_map(|(id, placement)| [named(*id), placement.address, placement.bytes]),
        );
        device.write(&mut state, &named);
        let live: Vec<Placement> = live.into_iter().map(|(_, placement)| placement).collect();
        policy.write(&mut state, &live).then_some(state)
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
