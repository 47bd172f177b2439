//! Pools of PyTorch's allocator: which segments and blocks are in each, and which graphs were captured into it.
//!
//! PyTorch asks each open pool, the newest first, whether a request is its own (CUDACachingAllocator.cpp, `get_pool`): a
//! graph's says so for streams that are being captured into the graph, a `MemPool`'s for the thread that opened it (up to 2.5
//! for all threads). Where a segment went decides for all blocks in it. Only private pools are kept here: what is in none of
//! them is in the default one.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Action, Bytes, Call, Event, EventKind, Nanos, StackId, ThreadId};
use rustc_hash::FxHashMap;

use super::amounts::Meter;
use super::{Effect, Paging, Step};
use super::{Ledger, MemoryKind, SiteId};
use crate::{Definitions, torch_release};

/// `MempoolId_t`: the first number was given out for a graph, the second for the user.
pub type PoolId = (u64, u64);

/// What the recorder says where it sees pools.
pub const POOLS_SEEN: &str = "torch.pools=seen";

/// The private pools of a process.
#[derive(Debug, Default)]
pub struct Pools {
    /// By device and id. Those that are gone stay.
    pub pools: BTreeMap<(i16, PoolId), Pool>,
    /// In the order in which they were opened.
    open: Vec<Open>,
    /// Where segments of private pools begin.
    segments: BTreeMap<(i16, u64), Segment>,
    /// Segments that a thread obtained for a request that is not over.
    obtained: FxHashMap<ThreadId, Vec<(i16, u64)>>,
    /// Blocks in private pools, by serial.
    blocks: FxHashMap<u64, (i16, PoolId)>,
    /// Pools of which a thread is not known to have opened its own serve all threads of their stream: before PyTorch 2.6.
    by_stream: bool,
}

/// One private pool.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// Memory that its segments take of the device.
    pub reserved: Meter,
    /// Blocks allocated.
    pub allocated: Meter,
    /// Blocks allocated, or still used by a stream.
    pub active: Meter,
    /// Segments now.
    pub n_segments: u64,
    /// Graphs and `MemPool`s that hold it now.
    pub uses: u64,
    /// `MemPool`s that were made for it.
    pub n_made: u64,
    /// It was opened or made there first.
    pub site: SiteId,
    /// It serves others before they fail.
    pub serves_others: bool,
    /// What was captured into it.
    pub graphs: Vec<Graph>,
}

impl Pool {
    /// Whether a graph is left that was captured into it.
    #[must_use]
    pub fn n_living(&self) -> usize {
        self.graphs.iter().filter(|graph| graph.is_alive()).count()
    }

    /// It keeps memory, and nobody is left who could use it: what was captured into it failed or is gone.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        let is_capturing = self.graphs.iter().any(|graph| graph.state == GraphState::Capturing);
        self.uses > 0 && self.n_made == 0 && !self.graphs.is_empty() && self.n_living() == 0 && !is_capturing
    }
}

/// Why nobody can use a pool that is abandoned.
#[must_use]
pub fn why_abandoned(pool: &Pool) -> String {
    match pool.graphs.iter().filter(|graph| graph.state == GraphState::Failed).count() {
        0 if pool.graphs.len() == 1 => "the graph that was captured into it no longer exists".to_owned(),
        0 => "no graph that was captured into it exists any more".to_owned(),
        1 if pool.graphs.len() == 1 => "the capture into it failed".to_owned(),
        n => format!("{n} captures into it failed, and no graph is left"),
    }
}

/// A capture into a pool, and the graph that came of it.
#[derive(Clone, Debug)]
pub struct Graph {
    /// Its number in the process, from 1.
    pub number: u64,
    /// The capture began then.
    pub since: Nanos,
    /// It began there.
    pub stack: StackId,
    /// The same, in short.
    pub site: SiteId,
    /// Its fate.
    pub state: GraphState,
    /// What the pool reserved while it was captured.
    pub reserved: Bytes,
    stream: u64,
    graph: u64,
    execs: Vec<u64>,
}

/// The fate of a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GraphState {
    /// It goes on.
    Capturing,
    /// A graph came of it.
    Made,
    /// It failed.
    Failed,
    /// The graph was destroyed.
    Gone,
}

impl GraphState {
    /// In a word.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            GraphState::Capturing => "capturing",
            GraphState::Made => "alive",
            GraphState::Failed => "failed",
            GraphState::Gone => "destroyed",
        }
    }
}

impl Graph {
    fn is_alive(&self) -> bool {
        self.state == GraphState::Made
    }
}

#[derive(Debug)]
struct Open {
    device: i16,
    id: PoolId,
    thread: ThreadId,
    stream: u64,
    /// A graph is captured into it, or was.
    is_capture: bool,
    /// The stream of that capture while it goes on.
    captured: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Segment {
    end: u64,
    bytes: Bytes,
    /// None before the request is over that it was obtained for.
    pool: Option<PoolId>,
}

impl Ledger {
    /// Books calls about PyTorch's pools that came before the recording began: nobody saw them, and nothing counts them.
    pub(crate) fn pools_before(&mut self, definitions: &dyn Definitions, calls: &[(ThreadId, Call)]) {
        self.effect.site = SiteId::default();
        for (thread, call) in calls {
            let kind = EventKind::Call(*call);
            let event = Event { time: Nanos(0), thread: *thread, stack: StackId(0), kind };
            self.torch_pools.event(definitions, &event, &mut self.effect);
        }
    }
}

impl Pools {
    /// Whether an event may say something of pools, or something private is open or left: what it does to blocks matters then.
    #[inline]
    pub(super) fn are_concerned(&self, event: &Event) -> bool {
        matches!(event.kind, EventKind::Call(_))
            || !(self.open.is_empty() && self.segments.is_empty() && self.blocks.is_empty())
    }

    /// Books what an event says of pools and graphs, and what it did to segments and blocks.
    pub(super) fn event(&mut self, definitions: &dyn Definitions, event: &Event, effect: &mut Effect) {
        if let EventKind::Call(call) = &event.kind {
            // From here on it matters what events do to blocks.
            if matches!(call.action, Action::TorchPoolBegin | Action::TorchPoolCreate) {
                effect.steps.wanted = true;
                let version = definitions.process().torch_version.as_deref().and_then(torch_release);
                self.by_stream = version.is_some_and(|version| version < (2, 6));
            }
            self.call(event, call, effect.site);
        }
        self.steps(event, &effect.steps.list);
    }

    /// The pool that a request is served from; none for the default one.
    #[must_use]
    pub fn of_request(&self, device: i16, thread: ThreadId, stream: Option<u64>) -> Option<PoolId> {
        let is_own = |open: &&Open| {
            let is_thread = open.thread == thread;
            open.device == device
                && match (open.is_capture, open.captured) {
                    (true, Some(captured)) => is_thread || stream == Some(captured),
                    (true, None) => false,
                    (false, _) => is_thread || (self.by_stream && stream == Some(open.stream)),
                }
        };
        self.open.iter().rev().find(is_own).map(|open| open.id)
    }

    /// Whether PyTorch takes it that the device's streams may be captured, and flushes nothing: while a pool is open, and from
    /// 2.13 on only one that a graph is or was captured into. One that failed may stay open forever.
    #[must_use]
    pub fn hold_flushes(&self, device: i16, version: Option<(u8, u8)>) -> bool {
        let only_captures = version.is_some_and(|version| version >= (2, 13));
        self.open.iter().any(|open| open.device == device && (open.is_capture || !only_captures))
    }

    /// Pools that keep memory which nobody can use any more, by device and id.
    pub fn abandoned(&self) -> impl Iterator<Item = (i16, PoolId, &Pool)> {
        let pools = self.pools.iter().map(|((device, id), pool)| (*device, *id, pool));
        pools.filter(|(.., pool)| pool.is_abandoned() && pool.reserved.now.0 > 0)
    }

    /// The pool of the segment at an address; none for the default one.
    #[must_use]
    pub fn at(&self, device: i16, addr: u64) -> Option<PoolId> {
        self.segment_at(device, addr).map(|(_, id)| id)
    }

    /// The number of the graph that is being captured into the pool of the segment at an address.
    #[must_use]
    pub fn capturing(&self, device: i16, addr: u64) -> Option<u64> {
        let pool = self.pools.get(&(device, self.at(device, addr)?))?;
        pool.graphs.iter().rev().find(|graph| graph.state == GraphState::Capturing).map(|graph| graph.number)
    }

    /// From where to where the segment of a private pool lies that an address is in, and of which pool it is.
    #[must_use]
    pub fn segment_at(&self, device: i16, addr: u64) -> Option<((u64, u64), PoolId)> {
        let below = self.segments.range(..=(device, addr)).next_back();
        let ((_, start), segment) = below.filter(|((of, _), segment)| *of == device && addr < segment.end)?;
        Some(((*start, segment.end), segment.pool?))
    }

    /// Books a call that succeeded or failed, from this place.
    fn call(&mut self, event: &Event, call: &Call, site: SiteId) {
        let key = (call.device, (call.handle, call.extra));
        let succeeded = call.result == Some(0);
        match call.action {
            Action::TorchPoolBegin => {
                self.held(key, site);
                self.open.push(Open {
                    device: call.device,
                    id: key.1,
                    thread: event.thread,
                    stream: call.stream,
                    is_capture: false,
                    captured: None,
                });
            }
            Action::TorchPoolEnd => {
                let is_it = |open: &Open| (open.device, open.id) == key;
                if let Some(at) = self.open.iter().rposition(is_it) {
                    self.open.remove(at);
                }
            }
            Action::TorchPoolCreate => {
                self.held(key, site);
                self.pools.entry(key).or_default().n_made += 1;
            }
            Action::TorchPoolRelease => {
                if let Some(pool) = self.pools.get_mut(&key) {
                    pool.uses = pool.uses.saturating_sub(1);
                    pool.n_made = pool.n_made.min(pool.uses);
                }
            }
            Action::TorchPoolUseOnOom => {
                self.pools.entry(key).or_default().serves_others = call.bytes.0 != 0;
            }
            Action::CaptureBegin if succeeded => self.capture_begins(event, call.stream, site),
            Action::CaptureEnd => self.capture_ends(call, succeeded),
            Action::GraphInstantiate if succeeded => {
                self.graphs().filter(|it| it.graph == call.extra).for_each(|it| it.execs.push(call.handle));
            }
            Action::GraphExecDestroy if succeeded => {
                for graph in self.graphs().filter(|graph| graph.execs.contains(&call.handle)) {
                    graph.execs.retain(|exec| *exec != call.handle);
                    graph.settle();
                }
            }
            Action::GraphDestroy if succeeded => {
                for graph in self.graphs().filter(|graph| graph.graph == call.handle) {
                    graph.graph = 0;
                    graph.settle();
                }
            }
            _ => {}
        }
    }

    fn held(&mut self, key: (i16, PoolId), site: SiteId) {
        let pool = self.pools.entry(key).or_insert_with(|| Pool { site, ..Pool::default() });
        pool.uses += 1;
    }

    fn graphs(&mut self) -> impl Iterator<Item = &mut Graph> {
        let graphs = self.pools.values_mut().flat_map(|pool| &mut pool.graphs);
        graphs.filter(|graph| graph.is_alive())
    }

    fn capture_begins(&mut self, event: &Event, stream: u64, site: SiteId) {
        let number = 1 + self.pools.values().map(|pool| pool.graphs.len() as u64).sum::<u64>();
        let mut own = self.open.iter_mut().rev().filter(|open| open.thread == event.thread);
        let Some(open) = own.next().filter(|open| !open.is_capture) else { return };
        (open.is_capture, open.captured) = (true, Some(stream));
        let pool = self.pools.entry((open.device, open.id)).or_default();
        pool.graphs.push(Graph {
            number,
            since: event.time,
            stack: event.stack,
            site,
            state: GraphState::Capturing,
            reserved: Bytes(0),
            stream,
            graph: 0,
            execs: vec![],
        });
    }

    /// What was captured is a graph now, or worthless. Its requests are not the pool's any more.
    fn capture_ends(&mut self, call: &Call, succeeded: bool) {
        for open in &mut self.open {
            open.captured.take_if(|captured| *captured == call.stream);
        }
        let graphs = self.pools.values_mut().flat_map(|pool| &mut pool.graphs);
        for graph in graphs.filter(|it| it.state == GraphState::Capturing && it.stream == call.stream) {
            graph.graph = if succeeded { call.handle } else { 0 };
            let is_made = succeeded && call.handle != 0;
            graph.state = if is_made { GraphState::Made } else { GraphState::Failed };
        }
    }

    /// Books what an event did to segments and blocks.
    fn steps(&mut self, event: &Event, steps: &[Step]) {
        let is_free = is_free(event);
        let stream = match &event.kind {
            EventKind::BlockAlloc(block) => block.stream,
            EventKind::BlockOom(oom) => oom.stream,
            _ => None,
        };
        if matches!(event.kind, EventKind::BlockAlloc(_) | EventKind::BlockOom(_)) {
            self.decide(event, stream);
        }
        for step in steps {
            match step {
                Step::Gained(object) if object.torch && object.kind == MemoryKind::Linear => {
                    self.obtains(event.thread, (object.device, object.addr), object.bytes, object.bytes);
                }
                Step::Lost(object) if is_free && object.torch && object.kind == MemoryKind::Linear => {
                    self.gone((object.device, object.addr), object.bytes);
                }
                Step::Pages(Paging::Grown, pages) => {
                    if let Some((start, room)) = pages.reservation {
                        self.obtains(event.thread, (pages.device, start), room, pages.bytes);
                    }
                }
                Step::Pages(Paging::Shrunk(_), pages) => {
                    if let Some((start, _)) = pages.reservation {
                        self.gone((pages.device, start), pages.bytes);
                    }
                }
                Step::Block(addr, block) => {
                    if let Some(id) = self.at(block.device, *addr) {
                        self.blocks.insert(block.serial, (block.device, id));
                        let pool = self.pools.entry((block.device, id)).or_default();
                        pool.allocated.gain(event.time, block.bytes);
                        pool.active.gain(event.time, block.bytes);
                    }
                }
                Step::BlockFreed(_, block) => {
                    if let Some(key) = self.blocks.get(&block.serial) {
                        self.pools.entry(*key).or_default().allocated.lose(block.bytes);
                    }
                }
                Step::BlockDone(_, block) => {
                    if let Some(key) = self.blocks.remove(&block.serial) {
                        self.pools.entry(key).or_default().active.lose(block.bytes);
                    }
                }
                _ => {}
            }
        }
    }

    /// The request is served or refused that segments were obtained for: whose they are follows from its stream.
    fn decide(&mut self, event: &Event, stream: Option<u64>) {
        for key in self.obtained.remove(&event.thread).into_iter().flatten() {
            let Some(segment) = self.segments.get(&key).copied() else { continue };
            match self.of_request(key.0, event.thread, stream) {
                Some(id) => {
                    self.segments.insert(key, Segment { pool: Some(id), ..segment });
                    let pool = self.pools.entry((key.0, id)).or_default();
                    pool.n_segments += 1;
                    pool.grows(event.time, segment.bytes);
                }
                // Of the default pool.
                None => _ = self.segments.remove(&key),
            }
        }
    }

    fn obtains(&mut self, thread: ThreadId, key: (i16, u64), room: Bytes, bytes: Bytes) {
        match self.segments.get_mut(&key) {
            Some(segment) => {
                segment.bytes.0 = segment.bytes.0.saturating_add(bytes.0);
                if let Some(id) = segment.pool {
                    self.pools.entry((key.0, id)).or_default().grows(Nanos(0), bytes);
                }
            }
            // Another segment of the default pool grows, or one is made while no pool is open.
            None if self.open.iter().all(|open| open.device != key.0) => {}
            None => {
                let end = key.1.saturating_add(room.0);
                self.segments.insert(key, Segment { end, bytes, pool: None });
                self.obtained.entry(thread).or_default().push(key);
            }
        }
    }

    fn gone(&mut self, key: (i16, u64), bytes: Bytes) {
        let Some(segment) = self.segments.get_mut(&key) else { return };
        segment.bytes.0 = segment.bytes.0.saturating_sub(bytes.0);
        let (is_gone, pool) = (segment.bytes.0 == 0, segment.pool);
        if is_gone {
            self.segments.remove(&key);
        }
        if let Some(id) = pool {
            let pool = self.pools.entry((key.0, id)).or_default();
            pool.reserved.lose(bytes);
            pool.n_segments -= u64::from(is_gone).min(pool.n_segments);
        }
    }
}

/// Memory was given back. What goes away with its context was not.
fn is_free(event: &Event) -> bool {
    matches!(&event.kind, EventKind::Call(call) if call.action == Action::Free)
}

impl Pool {
    fn grows(&mut self, time: Nanos, bytes: Bytes) {
        self.reserved.gain(time, bytes);
        if let Some(graph) = self.graphs.iter_mut().rev().find(|it| it.state == GraphState::Capturing) {
            graph.reserved.0 = graph.reserved.0.saturating_add(bytes.0);
        }
    }
}

impl Graph {
    fn settle(&mut self) {
        if self.graph == 0 && self.execs.is_empty() {
            self.state = GraphState::Gone;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BY: &str = "by=libcudart.so,libc10_cuda.so in_allocate=1";

    fn of(scene: &str) -> Pools {
        crate::scene::ledger(scene).torch_pools
    }

    fn figures(pool: &Pool) -> (u64, u64, u64, u64) {
        (pool.reserved.now.0 >> 20, pool.allocated.now.0 >> 20, pool.active.now.0 >> 20, pool.n_segments)
    }

    #[test]
    fn a_pool_has_its_segments_and_blocks_until_they_are_given_back() {
        let scene = format!(
            "TorchPoolBegin extra=1
            Alloc addr=0x50000000 bytes=20M {BY}
            block addr=0x50000000 bytes=2M requested=2M reserved=20M
            block addr=0x50200000 bytes=4M requested=4M reserved=20M
            TorchPoolEnd extra=1
            Alloc addr=0x70000000 bytes=20M {BY}
            block addr=0x70000000 bytes=2M requested=2M reserved=40M
            record event=1
            free addr=0x50000000 bytes=2M"
        );
        let first = (0, (0, 1));
        assert_eq!(figures(&of(&format!("{scene}\nquery event=1 result=600")).pools[&first]), (20, 4, 6, 1));
        assert_eq!(figures(&of(&format!("{scene}\nquery event=1")).pools[&first]), (20, 4, 4, 1));
        let given = "query event=1
            free addr=0x50200000 bytes=4M
            Free addr=0x50000000 by=libcudart.so,libc10_cuda.so";
        let pools = of(&format!("{scene}\n{given}"));
        assert_eq!(figures(&pools.pools[&first]), (0, 0, 0, 0));
    }

    #[test]
    fn a_pool_is_abandoned_once_no_graph_can_use_it_and_it_was_not_released() {
        let capture = format!(
            "TorchPoolBegin handle=1
            CaptureBegin stream=5
            Alloc addr=0x50000000 bytes=20M {BY}
            block addr=0x50000000 bytes=2M requested=2M stream=5"
        );
        let state = |rest: &str| {
            let pools = of(&format!("{capture}\n{rest}"));
            let pool = &pools.pools[&(0, (1, 0))];
            (pool.graphs[0].state, pool.is_abandoned())
        };
        let made = "CaptureEnd stream=5 handle=g
            GraphInstantiate handle=e extra=g
            GraphDestroy handle=g";
        assert_eq!(state(""), (GraphState::Capturing, false));
        assert_eq!(state(made), (GraphState::Made, false));
        assert_eq!(state("CaptureEnd stream=5 result=901"), (GraphState::Failed, true));
        let gone = format!("{made}\nGraphExecDestroy handle=e");
        assert_eq!(state(&gone), (GraphState::Gone, true));
        assert_eq!(state(&format!("{gone}\nTorchPoolRelease handle=1")), (GraphState::Gone, false));
    }
}
