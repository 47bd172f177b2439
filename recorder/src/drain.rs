//! Chunks to records, each thread's in its order, and the chunks back to the process.

use crate::decode::{Progress, Record, read_chunk};
use gputrace_ring::map::{MAX_THREADS, Map};
use gputrace_ring::record::{
    Action, Backward, BlockAlloc, BlockFree, BlockOom, Call, CallEnd, Mark, MarkAction, NcclEnter, NcclExit,
    NcclOp, NcclTimed, NcclTiming, Node, Pjrt, PjrtAction, PjrtExecutable, PjrtOrigin, Wait, WaitAction,
};
use gputrace_ring::ring::{ChunkView, Reader};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;

/// Open calls a thread can have: frees do not nest, so this is generous.
const MOST_OPEN: usize = 16;

/// One life of a thread in the ring.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Lane(pub(crate) u32);

/// Something that happened, at its ticks.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Stamped {
    pub(crate) ticks: u64,
    pub(crate) lane: Lane,
    /// What of the backward pass the thread was in; the default outside of it.
    pub(crate) node: Node,
    pub(crate) what: Happened,
}

/// The records that are events.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Happened {
    /// `result` is `None` where the end was never seen; `duration` is in ticks.
    Call {
        call: Call,
        action: Action,
        result: Option<i32>,
        duration: u64,
    },
    BlockAlloc(BlockAlloc),
    /// With the header's flags.
    BlockFree(BlockFree, u8),
    BlockOom(BlockOom),
    Wait(Wait, WaitAction),
    Mark(Mark, MarkAction),
    Note(String),
    /// No event of the trace: it tells what others mean.
    Backward(Backward),
    NcclEnter(NcclEnter, NcclOp),
    NcclExit(NcclExit, NcclTimed),
    NcclTiming(NcclTiming),
    Pjrt(Pjrt, PjrtAction, PjrtOrigin),
    PjrtExecutable(PjrtExecutable),
}

impl Stamped {
    /// The driver may have taken memory for itself: for a context, for code, for a graph. No call says how much; only a
    /// sample of its own figures does, if it comes before the next of these.
    pub(crate) fn takes_hidden_memory(&self) -> bool {
        let Happened::Call { action, result: Some(0), .. } = self.what else { return false };
        matches!(
            action,
            Action::ContextCreate
                | Action::ContextDestroy
                | Action::PrimaryRetain
                | Action::PrimaryRelease
                | Action::PrimaryReset
                | Action::CodeLoad
                | Action::CodeUnload
                | Action::FunctionLoad
                | Action::GraphInstantiate
                | Action::GraphExecDestroy
                | Action::GraphMemTrim
                | Action::LimitSet
                | Action::PeerEnable
                | Action::MulticastCreate
                | Action::IpcOpen
                | Action::Import
        )
    }
}

/// What a pass over the ring found.
#[derive(Default)]
pub(crate) struct Found {
    /// Definitions, in each thread's order before what names them.
    pub(crate) definitions: Vec<Record>,
    /// Events, each thread's in order, but for calls whose end came later.
    pub(crate) events: Vec<Stamped>,
    /// Threads that were seen for the first time, with their kernel thread ids.
    pub(crate) lanes: Vec<(Lane, u32)>,
    /// Threads of which nothing more will come than is in `events`.
    pub(crate) ended: Vec<Lane>,
    /// Records that could not be read.
    pub(crate) damaged: u64,
    /// Records of any kind.
    pub(crate) n_records: u64,
}

/// Reads a ring.
pub(crate) struct Drain {
    reader: Reader,
    progress: Vec<Option<Progress>>,
    lanes: HashMap<LaneKey, LaneState>,
    n_lanes: u32,
    /// The newest owner of each line that has been seen.
    newest: Vec<u32>,
}

/// A thread line and how often it had been claimed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct LaneKey {
    line: u32,
    generation: u32,
}

struct LaneState {
    lane: Lane,
    open: Vec<(u64, Node, Call, Action)>,
    node: Node,
}

impl LaneKey {
    fn of(view: &ChunkView) -> LaneKey {
        LaneKey { line: view.thread, generation: (view.sequence >> 32) as u32 }
    }
}

impl Drain {
    pub(crate) fn new(map: Map) -> Drain {
        let progress = vec![None; map.n_chunks() as usize];
        let newest = vec![0; MAX_THREADS];
        Drain { reader: Reader::new(map), progress, lanes: HashMap::new(), n_lanes: 0, newest }
    }

    /// Reads everything that is committed and frees the chunks that are complete. What a thread is still writing to stays
    /// its own, and so does its line: only the process knows which of its threads have ended.
    pub(crate) fn pass(&mut self, found: &mut Found) {
        let views = self.sorted_views();
        let mut incomplete = HashSet::new();
        for view in &views {
            let key = LaneKey::of(view);
            // An earlier chunk of this thread was still being written when we looked: it may have got more records
            // since, which come before those of this chunk.
            if incomplete.contains(&key) {
                continue;
            }
            self.read(view, found);
            if view.complete {
                self.free(view.chunk);
            } else {
                incomplete.insert(key);
            }
        }
        // By what the pass before this one saw: what a thread left was complete before its line got another owner, so this
        // pass has read it.
        let newest = &self.newest;
        let has_successor =
            |key: &LaneKey| newest.get(key.line as usize).is_some_and(|it| is_newer(*it, key.generation));
        close_lanes(&mut self.lanes, |key| has_successor(key) && !incomplete.contains(key), found);
        for view in &views {
            let key = LaneKey::of(view);
            self.succeeds(key);
        }
    }

    /// Looks which lines have new owners that have not written yet.
    pub(crate) fn look_at_lines(&mut self) {
        for line in 0..MAX_THREADS as u32 {
            let generation = self.reader.map().thread(line).generation.load(Ordering::Relaxed);
            self.succeeds(LaneKey { line, generation });
        }
    }

    /// Reads everything that is committed. The process is gone: nobody needs room in the ring, which is left as it is, so
    /// that it can be read again.
    pub(crate) fn last_pass(&mut self, found: &mut Found) {
        for view in self.sorted_views() {
            self.read(&view, found);
        }
        self.close(found);
    }

    /// Says of calls that are still open that they began: the process lives, and nobody will record how they end.
    pub(crate) fn close(&mut self, found: &mut Found) {
        close_lanes(&mut self.lanes, |_| true, found);
    }

    fn succeeds(&mut self, key: LaneKey) {
        if let Some(newest) = self.newest.get_mut(key.line as usize)
            && is_newer(key.generation, *newest)
        {
            *newest = key.generation;
        }
    }

    fn sorted_views(&self) -> Vec<ChunkView> {
        let mut views: Vec<ChunkView> = self.views().collect();
        views.sort_unstable_by_key(|view| (LaneKey::of(view), view.sequence));
        views
    }

    fn views(&self) -> impl Iterator<Item = ChunkView> {
        (0..self.reader.map().n_usable()).filter_map(|chunk| self.reader.look(chunk))
    }

    fn free(&mut self, chunk: u32) {
        if let Some(progress) = self.progress.get_mut(chunk as usize) {
            *progress = None;
        }
        self.reader.free(chunk);
    }

    fn read(&mut self, view: &ChunkView, found: &mut Found) {
        let Some(slot) = self.progress.get_mut(view.chunk as usize) else { return };
        let fresh = Progress::new(view.sequence, view.base.0);
        let mut progress = slot.filter(|progress| progress.sequence == view.sequence).unwrap_or(fresh);
        if progress.at >= view.committed {
            *slot = Some(progress);
            return;
        }
        let state = self.lanes.entry(LaneKey::of(view)).or_insert_with(|| {
            let lane = Lane(self.n_lanes);
            self.n_lanes += 1;
            found.lanes.push((lane, view.tid));
            LaneState { lane, open: Vec::new(), node: Node::default() }
        });
        let Found { definitions, events, n_records, .. } = &mut *found;
        let damaged = read_chunk(&self.reader, view.chunk, view.committed, &mut progress, |ticks, record| {
            *n_records += 1;
            state.take(ticks, record, definitions, events);
        });
        found.damaged += damaged;
        if damaged > 0 {
            // One of them may have said where the thread is now.
            state.node = Node::default();
        }
        if let Some(slot) = self.progress.get_mut(view.chunk as usize) {
            *slot = Some(progress);
        }
    }
}

/// Ends lanes, and the calls that were open when their threads ended.
fn close_lanes(
    lanes: &mut HashMap<LaneKey, LaneState>,
    has_ended: impl Fn(&LaneKey) -> bool,
    found: &mut Found,
) {
    lanes.retain(|key, state| {
        let ends = has_ended(key);
        if ends {
            let lane = state.lane;
            let open = state.open.drain(..);
            found.events.extend(open.map(|open| unfinished(lane, open)));
            found.ended.push(lane);
        }
        !ends
    });
}

/// Counts that began again at 0 are newer than those before.
fn is_newer(generation: u32, than: u32) -> bool {
    generation.wrapping_sub(than).cast_signed() > 0
}

impl LaneState {
    fn take(&mut self, ticks: u64, record: Record, definitions: &mut Vec<Record>, events: &mut Vec<Stamped>) {
        let what = match record {
            Record::Call(call, action) if call.flags & Call::OPEN != 0 => {
                return self.begin(ticks, call, action, events);
            }
            Record::CallEnd(end) => return self.end(&end, events),
            Record::Call(call, action) => {
                Happened::Call { call, action, result: Some(call.result), duration: call.duration.into() }
            }
            Record::BlockAlloc(alloc) => Happened::BlockAlloc(alloc),
            Record::BlockFree(free, flags) => Happened::BlockFree(free, flags),
            Record::BlockOom(oom) => Happened::BlockOom(oom),
            Record::Wait(wait, action) => Happened::Wait(wait, action),
            Record::Mark(mark, action) => Happened::Mark(mark, action),
            Record::Note(text) => Happened::Note(text),
            Record::Backward(backward) => Happened::Backward(backward),
            Record::Node(node) => {
                self.node = node;
                return;
            }
            Record::NcclEnter(enter, op) => Happened::NcclEnter(enter, op),
            Record::NcclExit(exit, timed) => Happened::NcclExit(exit, timed),
            Record::NcclTiming(timing) => Happened::NcclTiming(timing),
            Record::Pjrt(pjrt, action, origin) => Happened::Pjrt(pjrt, action, origin),
            Record::PjrtExecutable(executable) => Happened::PjrtExecutable(executable),
            definition @ (Record::Stack { .. }
            | Record::Code(_)
            | Record::Text { .. }
            | Record::Api { .. }
            | Record::Device { .. }
            | Record::NodeClass { .. }
            | Record::Forward(_)
            | Record::Communicator { .. }
            | Record::Runtime(_)) => return definitions.push(definition),
        };
        events.push(Stamped { ticks, lane: self.lane, node: self.node, what });
    }

    fn begin(&mut self, ticks: u64, call: Call, action: Action, events: &mut Vec<Stamped>) {
        // A function does not run inside of itself: the end of an open call of the same one was lost.
        let lost = self.open.iter().position(|(_, _, open, _)| open.api == call.api);
        let lost = lost.or((self.open.len() >= MOST_OPEN).then_some(0));
        if let Some(lost) = lost {
            events.push(unfinished(self.lane, self.open.remove(lost)));
        }
        self.open.push((ticks, self.node, call, action));
    }

    fn end(&mut self, end: &CallEnd, events: &mut Vec<Stamped>) {
        let matches = |call: &Call| call.api == end.api && (call.addr == end.addr || call.handle == end.addr);
        // One that is not found began while the ring was full, which was counted there.
        if let Some(at) = self.open.iter().rposition(|(_, _, call, _)| matches(call)) {
            let (ticks, node, call, action) = self.open.remove(at);
            let what = Happened::Call { call, action, result: Some(end.result), duration: end.duration };
            events.push(Stamped { ticks, lane: self.lane, node, what });
        }
    }
}

fn unfinished(lane: Lane, (ticks, node, call, action): (u64, Node, Call, Action)) -> Stamped {
    Stamped { ticks, lane, node, what: Happened::Call { call, action, result: None, duration: 0 } }
}
