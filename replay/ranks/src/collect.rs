//! From a trace to what `ranks` needs of it, in one pass over its events.

use gputrace_schemas::event::{
    Action, Alive, Bytes, Call, CommId, Communicator, Event, EventKind, Frame, Nanos, NcclEnter, NcclExit,
    NcclOp, NcclSequence, NcclTimed, NcclTiming, StackId, StackRead, Thread, ThreadId, UNKNOWN,
};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

use super::calls::{
    CallKind, Closing, Ending, FailedCall, Lane, LastSeen, Membership, OpenCall, Participant, PlaceId,
    ReadStack, Reduction, SameFunction, Signature, UnfinishedCall,
};
use super::memory;
use super::names::MAKES_DEFAULT_GROUP;
use super::shares::Shares;
use gputrace_analyse::story::{End, Story};
use gputrace_trace::Definitions;
use gputrace_trace::ledger::{self, Ledger, Site, Watch};
use gputrace_trace::source::Source;
use gputrace_trace::words;

/// `ncclInProgress`: the call goes on behind the program's back.
const IN_PROGRESS: i32 = 7;
/// Failed calls that are kept.
const MAX_FAILED: usize = 64;
/// Threads whose stacks are kept.
const MAX_STACKS: usize = 64;
/// Stacks read of all threads whose thread and number are kept, to see whether one stays where it is.
const MAX_READ: usize = 4096;
/// Heartbeats that are kept: an hour of them.
const MAX_BEATS: usize = 360;
/// Lines of a stack that are kept.
const MAX_LINES: usize = 32;

/// Reads what a process did with NCCL and with memory.
#[must_use]
pub fn collect(source: &Source) -> Participant {
    let mut collector = Collector::new(source);
    let story = Story::watched(source, &mut collector);
    collector.finish(&story)
}

/// Collects it, while somebody else looks at the same events.
pub struct Collector<'a> {
    source: &'a Source,
    definitions: &'a dyn Definitions,
    places: Vec<Site>,
    place_ids: FxHashMap<Site, PlaceId>,
    stacks: FxHashMap<StackId, PlaceId>,
    memberships: Vec<Membership>,
    known: FxHashMap<CommId, usize>,
    reductions: FxHashMap<u64, Reduction>,
    open: FxHashMap<u64, Pending>,
    /// Launches that the GPU has not ended yet, as far as is known.
    launched: FxHashMap<u64, Launched>,
    groups: FxHashMap<ThreadId, Group>,
    failed: Vec<FailedCall>,
    /// What the driver refused last during a call into NCCL: the call, and bytes.
    refused: Option<(u64, Bytes)>,
    last_call: Option<(Nanos, NcclOp, Option<Signature>, StackId)>,
    last_event: Option<(Nanos, EventName, StackId)>,
    /// Out-of-memory errors.
    ooms: Vec<(Nanos, u64, StackId)>,
    /// From when on the trace has all events, if it has not been there from the beginning.
    since: Option<Nanos>,
    first: Nanos,
    end: Nanos,
    /// When the process did something last, and when its recorder last saw it alive.
    newest: Nanos,
    alive_at: Option<Nanos>,
    beats: VecDeque<(Nanos, Alive)>,
    /// Stacks that were read last, all at one time.
    read: Vec<(Nanos, ThreadId, StackRead, StackId)>,
    /// The same of every time, the oldest left out.
    read_before: VecDeque<(ThreadId, StackRead, StackId)>,
    peaks: memory::Peaks,
    shares: Shares,
}

/// A call that has not returned.
struct Pending {
    enter: NcclEnter,
    time: Nanos,
    stack: StackId,
    membership: Option<usize>,
    /// For the end of a group, what is in it.
    group: Vec<(usize, Lane, u64)>,
    streams: Vec<u64>,
}

/// What a call has launched: memberships, their calls, and the streams. When, and from where.
struct Launched {
    calls: Vec<(usize, Lane, u64, u64)>,
    op: NcclOp,
    time: Nanos,
    place: PlaceId,
}

/// A group that is open on a thread.
struct Group {
    start: NcclEnter,
    time: Nanos,
    stack: StackId,
    calls: Vec<(usize, Lane, u64)>,
    /// The streams of the calls.
    streams: Vec<u64>,
}

#[derive(Clone, Copy)]
enum EventName {
    Driver(Call),
    Nccl(NcclOp),
    Torch(&'static str),
}

impl<'a> Collector<'a> {
    /// Of a process whose events have not been seen yet.
    #[must_use]
    pub fn new(source: &'a Source) -> Collector<'a> {
        Collector {
            source,
            definitions: source.definitions(),
            places: vec![Site::default()],
            place_ids: FxHashMap::default(),
            stacks: FxHashMap::default(),
            memberships: vec![],
            known: FxHashMap::default(),
            reductions: FxHashMap::default(),
            open: FxHashMap::default(),
            launched: FxHashMap::default(),
            groups: FxHashMap::default(),
            failed: vec![],
            last_call: None,
            last_event: None,
            ooms: vec![],
            refused: None,
            since: Some(source.definitions().process().since).filter(|since| since.0 > 0),
            first: Nanos(0),
            end: Nanos(0),
            newest: Nanos(0),
            alive_at: None,
            beats: VecDeque::new(),
            read_before: VecDeque::new(),
            read: vec![],
            peaks: memory::Peaks::default(),
            shares: Shares::default(),
        }
    }

    fn place(&mut self, stack: StackId) -> PlaceId {
        if let Some(place) = self.stacks.get(&stack) {
            return *place;
        }
        let place = match ledger::call_site(self.definitions, stack) {
            None => 0,
            Some(site) => *self.place_ids.entry(site).or_insert_with_key(|site| {
                self.places.push(site.clone());
                self.places.len() as PlaceId - 1
            }),
        };
        self.stacks.insert(stack, place);
        place
    }

    fn membership(&mut self, comm: CommId) -> Option<usize> {
        if comm == CommId(0) {
            return None;
        }
        if let Some(idx) = self.known.get(&comm) {
            return Some(*idx);
        }
        let facts = self.definitions.communicator(comm).cloned().unwrap_or_default();
        let parent = facts.parent;
        self.memberships.push(Membership::new(facts));
        let idx = self.memberships.len() - 1;
        self.known.insert(comm, idx);
        self.memberships[idx].parent = self.membership(parent);
        Some(idx)
    }

    fn enter(&mut self, event: &Event, enter: &NcclEnter) {
        let place = self.place(event.stack);
        let membership = self.membership(enter.comm);
        let signature = signature(enter, &self.reductions);
        if enter.op == NcclOp::RedOpCreate {
            self.reductions.insert(enter.call, Reduction::PreMulSum(enter.datatype, enter.extra));
        }
        self.last_call = Some((event.time, enter.op, Some(signature), event.stack));
        self.makes(event, enter, place);
        let mut pending = Pending {
            enter: *enter,
            time: event.time,
            stack: event.stack,
            membership,
            group: vec![],
            streams: vec![],
        };
        match enter.op {
            NcclOp::GroupStart if enter.group_depth == 0 => {
                let (calls, streams) = (vec![], vec![]);
                let group = Group { start: *enter, time: event.time, stack: event.stack, calls, streams };
                self.groups.insert(event.thread, group);
            }
            NcclOp::GroupEnd if enter.group_depth <= 1 => {
                if let Some(group) = self.groups.remove(&event.thread) {
                    (pending.group, pending.streams) = (group.calls, group.streams);
                }
            }
            NcclOp::GroupSimulateEnd if enter.group_depth <= 1 => {
                let calls = self.groups.remove(&event.thread).map_or_else(Vec::new, |group| group.calls);
                self.forget(&calls);
            }
            _ => {}
        }
        if let (Some(idx), Some(lane)) = (membership_of_sequence(self, enter, membership), lane(enter)) {
            let kind = self.memberships[idx].kind(CallKind { signature, place });
            let calls = self.memberships[idx].lanes.entry(lane).or_default();
            let is_kept = |since| event.time > since && !calls.kinds.is_empty();
            match self.since.is_none_or(is_kept) {
                true => calls.set(enter.sequence, kind, event.time),
                false => calls.carry(enter.sequence, kind, event.time),
            }
            if let Some(group) = self.groups.get_mut(&event.thread) {
                group.calls.push((idx, lane, enter.sequence));
                group.streams.push(enter.stream);
            }
        }
        if let (Some(idx), NcclOp::CommDestroy | NcclOp::CommAbort | NcclOp::CommRevoke) =
            (membership, enter.op)
        {
            let closing = Closing { op: enter.op, time: event.time, place };
            let known = &mut self.memberships[idx].closing;
            // A communicator that was aborted is destroyed later: the first says more.
            known.get_or_insert(closing);
        }
        self.open.insert(enter.call, pending);
    }

    /// The call makes communicators.
    fn makes(&mut self, event: &Event, enter: &NcclEnter, place: PlaceId) {
        let n_new = match enter.op {
            NcclOp::CommInit | NcclOp::CommSplit | NcclOp::CommShrink | NcclOp::CommGrow => 1,
            NcclOp::CommInitAll => u32::try_from(enter.count).unwrap_or(0),
            _ => return,
        };
        if enter.comm == CommId(0) {
            return;
        }
        for n in 0..n_new {
            if let Some(idx) = self.membership(CommId(enter.comm.0.saturating_add(n))) {
                self.memberships[idx].created.0 = Some(event.time);
                self.memberships[idx].place = place;
                self.memberships[idx].is_default_group = self.is_default_group(event.stack);
            }
        }
    }

    /// PyTorch's function that makes the default group is on the stack.
    fn is_default_group(&self, stack: StackId) -> bool {
        let frames = self.definitions.stack(stack).map_or(&[][..], |stack| &stack.frames);
        frames.iter().filter_map(|id| self.definitions.frame(*id)).any(|frame| match frame {
            Frame::Python { function, file, .. } => {
                function == MAKES_DEFAULT_GROUP && file.contains("torch/distributed/")
            }
            Frame::Native { .. } => false,
        })
    }

    fn exit(&mut self, event: &Event, exit: &NcclExit) {
        let Some(pending) = self.open.remove(&exit.call) else { return };
        let enter = &pending.enter;
        let place = self.place(pending.stack);
        match enter.op {
            NcclOp::CommInit
            | NcclOp::CommSplit
            | NcclOp::CommShrink
            | NcclOp::CommGrow
            | NcclOp::CommInitAll => {
                let n_new = if enter.op == NcclOp::CommInitAll { enter.count as u32 } else { 1 };
                for n in 0..n_new {
                    let made = self.known.get(&CommId(enter.comm.0.saturating_add(n))).copied();
                    if let Some(idx) = made {
                        let created = &mut self.memberships[idx].created;
                        (created.1, created.2) = (Some(event.time), Some(exit.result));
                    }
                }
            }
            NcclOp::AsyncError => {
                if let Some(idx) =
                    pending.membership.filter(|_| exit.value != 0 && exit.value != IN_PROGRESS as u64)
                {
                    let error = (event.time, exit.value as i32, place);
                    self.memberships[idx].async_error.get_or_insert(error);
                }
            }
            _ => {}
        }
        if exit.timed == Some(NcclTimed::Enqueued) {
            self.launch(exit.call, &pending, place);
        }
        let enter = &pending.enter;
        if exit.result != 0 && exit.result != IN_PROGRESS {
            let idx = membership_of_sequence(self, enter, pending.membership);
            let spot = lane(enter).map(|lane| (lane, enter.sequence));
            if let (Some(idx), Some((lane, sequence))) = (idx, spot) {
                self.forget(&[(idx, lane, sequence)]);
            }
            self.forget(&pending.group);
            if self.failed.len() < MAX_FAILED {
                let (op, result, time) = (enter.op, exit.result, pending.time);
                let refused = self.refused.filter(|(call, _)| *call == exit.call).map(|(_, bytes)| bytes);
                self.failed.push(FailedCall {
                    op,
                    membership: idx.or(pending.membership),
                    spot,
                    result,
                    refused,
                    time,
                    place,
                });
            }
        }
    }

    /// The GPU has work because of the call.
    fn launch(&mut self, call: u64, pending: &Pending, place: PlaceId) {
        let enter = &pending.enter;
        let calls = match (pending.membership, lane(enter)) {
            (Some(idx), Some(lane)) => vec![(idx, lane, enter.sequence, enter.stream)],
            _ => {
                let streams = pending.group.iter().zip(&pending.streams);
                streams.map(|((idx, lane, sequence), stream)| (*idx, *lane, *sequence, *stream)).collect()
            }
        };
        self.launched.insert(call, Launched { calls, op: enter.op, time: pending.time, place });
    }

    /// It has ended, for one communicator and stream.
    fn timing(&mut self, timing: &NcclTiming) {
        let membership = self.membership(timing.comm);
        let Some(launched) = self.launched.get_mut(&timing.call) else { return };
        let is_it = |call: &(usize, Lane, u64, u64)| Some(call.0) == membership && call.3 == timing.stream;
        if let Some((idx, lane, sequence, _)) = launched.calls.iter().copied().find(is_it)
            && let Some(known) = self.memberships[idx].lanes.get_mut(&lane)
        {
            known.gpu.insert(sequence, timing.duration);
        }
        launched.calls.retain(|call| !is_it(call));
        if launched.calls.is_empty() {
            self.launched.remove(&timing.call);
        }
    }

    /// The oldest launch that was never seen to end.
    fn unfinished(&self) -> Option<UnfinishedCall> {
        let (_, oldest) = self.launched.iter().min_by_key(|(call, _)| **call)?;
        let spot = oldest.calls.first().map(|(idx, lane, sequence, _)| (*idx, *lane, *sequence));
        Some(UnfinishedCall { op: oldest.op, spot, time: oldest.time, place: oldest.place })
    }

    /// These calls were given back: they are not started.
    fn forget(&mut self, calls: &[(usize, Lane, u64)]) {
        for (idx, lane, sequence) in calls.iter().rev() {
            let known = self.memberships[*idx].lanes.get_mut(lane);
            if let Some(known) = known.filter(|known| known.len() as u64 == sequence + 1) {
                known.truncate(*sequence);
            }
        }
    }

    fn open_call(&mut self, pending: Pending) -> OpenCall {
        let place = self.place(pending.stack);
        let membership = membership_of_sequence(self, &pending.enter, pending.membership);
        OpenCall {
            op: pending.enter.op,
            membership: membership.or(pending.membership),
            spot: lane(&pending.enter).map(|lane| (lane, pending.enter.sequence)),
            peer: pending.enter.peer,
            group: pending.group,
            since: pending.time,
            place,
            stack: self.lines(pending.stack),
        }
    }

    /// A stack for people: its lines of Python, or its functions where there are none.
    fn lines(&self, stack: StackId) -> Vec<String> {
        lines(self.definitions, stack)
    }

    fn seen(&mut self, time: Nanos, what: String, stack: StackId) -> LastSeen {
        LastSeen { time, what, place: self.place(stack), stack: self.lines(stack) }
    }

    /// Of each device the largest communicator that it is in, and how many collectives there were on it.
    pub fn marks(&self) -> Vec<(i16, (usize, u64))> {
        let mut marks: Vec<(i16, (usize, u64))> = vec![];
        for (idx, membership) in self.memberships.iter().enumerate().filter(|(_, it)| it.facts.device >= 0) {
            let size = |idx: usize| self.memberships[idx].facts.n_ranks.unwrap_or(0);
            let n = membership.lane(Lane::Collective).map_or(0, |calls| calls.len() as u64);
            match marks.iter_mut().find(|(device, _)| *device == membership.facts.device) {
                Some((_, mark)) if size(idx) > size(mark.0) => *mark = (idx, n),
                Some(_) => {}
                None => marks.push((membership.facts.device, (idx, n))),
            }
        }
        marks
    }

    /// The Python function in which the main thread was at every reading of the last silence, called from the same lines each time.
    fn same_function(&self, story: &Story) -> Option<SameFunction> {
        let threads: FxHashMap<ThreadId, Thread> = self.source.threads().into_iter().collect();
        let is_main = |id: &ThreadId| threads.get(id).is_some_and(|thread| thread.tid == story.process.pid);
        let mut same: Option<SameFunction> = None;
        let mut calls = vec![];
        let of_main = self.read_before.iter().rev().filter(|(thread, ..)| is_main(thread));
        for (_, read, stack) in of_main {
            let (function, from) = innermost_python(self.definitions, *stack)?;
            match &mut same {
                None => {
                    let newest = read.silent;
                    calls = from;
                    same = Some(SameFunction { function, n_readings: 1, first: newest, last: newest });
                }
                // An earlier silence ended meanwhile.
                Some(same) if read.silent >= same.first => break,
                Some(same) if function == same.function && calls == from => {
                    same.n_readings += 1;
                    same.first = read.silent;
                }
                Some(_) => return None,
            }
        }
        same
    }

    fn read_stacks(&mut self, story: &Story) -> Vec<ReadStack> {
        let threads: FxHashMap<ThreadId, Thread> = self.source.threads().into_iter().collect();
        let read = std::mem::take(&mut self.read);
        let stack = |(time, thread, read, stack): (Nanos, ThreadId, StackRead, StackId)| {
            let thread = threads.get(&thread);
            ReadStack {
                time,
                silent: read.silent,
                tid: thread.map_or(0, |thread| thread.tid),
                name: thread.map_or_else(String::new, |thread| thread.name.clone()),
                is_torn: read.is_torn,
                place: self.place(stack),
                stack: self.lines(stack),
            }
        };
        let mut stacks: Vec<ReadStack> = read.into_iter().map(stack).collect();
        stacks.sort_by_key(|read| (read.tid != story.process.pid, read.tid));
        stacks.truncate(MAX_STACKS);
        stacks
    }

    /// All events were seen.
    #[must_use]
    pub fn finish(mut self, story: &Story) -> Participant {
        // What NCCL said only after a call had returned is in the newest definition.
        for (comm, idx) in &self.known {
            if let Some(facts) = self.definitions.communicator(*comm) {
                self.memberships[*idx].facts = Communicator::clone(facts);
            }
        }
        let mut open: Vec<_> = std::mem::take(&mut self.open).into_values().collect();
        open.sort_by_key(|pending| (pending.time, pending.enter.call));
        let in_groups: Vec<_> = std::mem::take(&mut self.groups).into_values().collect();
        let mut open_groups = vec![];
        for group in in_groups {
            // What was never started was never issued.
            self.forget(&group.calls);
            let (start, time, stack) = (group.start, group.time, group.stack);
            let (group, streams) = (group.calls, group.streams);
            let pending = Pending { enter: start, time, stack, membership: None, group, streams };
            open_groups.push(self.open_call(pending));
        }
        open_groups.sort_by_key(|group| group.since);
        let unfinished = self.unfinished();
        let open_calls = open.into_iter().map(|pending| self.open_call(pending)).collect();
        let last_call = self.last_call.map(|(time, op, signature, stack)| {
            let what = signature.map_or_else(|| op.to_string(), |signature| signature.to_string());
            self.seen(time, what, stack)
        });
        let last_event = self.last_event.map(|(time, name, stack)| {
            let what = match name {
                EventName::Driver(call) => self
                    .definitions
                    .api(call.api)
                    .map_or_else(|| call.action.to_string(), |api| api.name.clone()),
                EventName::Nccl(op) => op.to_string(),
                EventName::Torch(name) => name.to_owned(),
            };
            self.seen(time, what, stack)
        });
        let ooms: Vec<LastSeen> = std::mem::take(&mut self.ooms)
            .into_iter()
            .map(|(time, bytes, stack)| {
                let what = format!("out of memory: a request for {} was refused", words::bytes(Bytes(bytes)));
                self.seen(time, what, stack)
            })
            .collect();
        let (same, read_stacks) = (self.same_function(story), self.read_stacks(story));
        let end = story.end();
        let ending = match end {
            Some(end) if end.is_own() => Ending::Exit,
            Some(_) => Ending::Killed,
            // A whole trace without a word about it: the process was gone before its recorder looked.
            None if story.complete => Ending::Killed,
            None => Ending::Unknown,
        };
        let ended = end.unwrap_or(End::Unseen).text();
        Participant {
            path: self.source.path().to_owned(),
            process: story.process.clone(),
            devices: story.devices.clone(),
            doubts: story.caveats(),
            memory: memory::device_uses(story, &self.peaks, |stack| {
                (
                    ledger::call_site(self.definitions, stack).unwrap_or_default(),
                    lines(self.definitions, stack),
                )
            }),
            places: self.places,
            memberships: self.memberships,
            open_calls,
            open_groups,
            gpu_timed: *story.ledger.gpu_timed(),
            unfinished,
            failed_calls: self.failed,
            last_call,
            last_event,
            out_of_memory: ooms.last().cloned(),
            ooms,
            first: self.first,
            end: self.end,
            alive_at: self.alive_at.map_or(self.end, |alive_at| alive_at.max(self.newest)),
            beats: self.beats.into(),
            read_stacks,
            same_function: same,
            troubles: super::troubles::troubles(&story.process, &story.ledger.health),
            ending,
            ended,
            shares: self.shares,
            is_written: false,
            recorder_is_late: false,
            summary: None,
        }
    }
}

/// The driver has just refused memory, for want of it.
fn is_refused_memory(ledger: &Ledger, event: &Event) -> bool {
    ledger.refusals.last().is_some_and(|it| it.time == event.time && it.is_final)
}

impl Watch for Collector<'_> {
    fn begin(&mut self, _ledger: &mut Ledger) {
        *self = Collector::new(self.source);
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        if self.first == Nanos(0) {
            self.first = event.time;
        }
        self.end = self.end.max(event.time);
        match &event.kind {
            // The recorder's own, written when it had seen the end.
            EventKind::Note(note) => {
                if let Some(alive) = Alive::parse(note) {
                    self.beats.push_back((event.time, alive));
                    if self.beats.len() > MAX_BEATS {
                        self.beats.pop_front();
                    }
                }
                if let Some(read) = StackRead::parse(note).filter(|_| event.stack != StackId(0)) {
                    self.read.retain(|(time, ..)| *time == event.time);
                    self.read.push((event.time, event.thread, read, event.stack));
                    self.read_before.push_back((event.thread, read, event.stack));
                    if self.read_before.len() > MAX_READ {
                        self.read_before.pop_front();
                    }
                }
                let alive_at = note.strip_prefix("process.alive_at=").and_then(|at| at.parse().ok());
                self.alive_at = alive_at.map(Nanos).or(self.alive_at);
            }
            // The process's own.
            EventKind::NcclExit(_) => self.newest = self.newest.max(event.time),
            _ if event.stack != StackId(0) => self.newest = self.newest.max(event.time),
            _ => {}
        }
        if let Some(oom) = ledger.ran_out() {
            // The last is kept whatever came before.
            self.ooms.truncate(MAX_FAILED - 1);
            self.ooms.push((event.time, oom.bytes.0, event.stack));
        }
        let name = match &event.kind {
            EventKind::NcclEnter(enter) => {
                self.enter(event, enter);
                Some(EventName::Nccl(enter.op))
            }
            EventKind::NcclExit(exit) => {
                self.exit(event, exit);
                None
            }
            EventKind::NcclTiming(timing) => {
                self.timing(timing);
                None
            }
            EventKind::Call(call) => {
                self.context(event, call);
                if call.result == Some(0) {
                    let mut shares = std::mem::take(&mut self.shares);
                    shares.call(ledger, call, || self.place(event.stack));
                    self.shares = shares;
                }
                if call.nccl_call != 0 && is_refused_memory(ledger, event) {
                    self.refused = Some((call.nccl_call, call.bytes));
                }
                // What NCCL does by itself says nothing about where the program is.
                (!call.nccl_thread && call.nccl_call == 0).then_some(EventName::Driver(*call))
            }
            EventKind::BlockOom(_) => Some(EventName::Torch("out of memory")),
            EventKind::BlockAlloc(_) => Some(EventName::Torch("allocation of a tensor")),
            EventKind::BlockFree(_) => Some(EventName::Torch("release of a tensor")),
            EventKind::Wait(_) | EventKind::Sample(_) | EventKind::Lost(_) | EventKind::Note(_) => None,
            EventKind::Pjrt(_) | EventKind::PjrtExecutable(_) | EventKind::Mark(_) => None,
        };
        if let Some(name) = name.filter(|_| event.stack != StackId(0)) {
            self.last_event = Some((event.time, name, event.stack));
        }
        self.peaks.watch(ledger, &self.memberships);
    }
}

impl Collector<'_> {
    /// What gave the process a context on a device.
    fn context(&mut self, event: &Event, call: &Call) {
        if call.result != Some(0) {
            return;
        }
        let device = match call.action {
            Action::PrimaryRetain => i16::try_from(call.extra).ok(),
            Action::ContextCreate | Action::Alloc | Action::AllocAsync | Action::Create => Some(call.device),
            _ => None,
        };
        if let Some(device) = device.filter(|device| *device >= 0) {
            self.peaks.context(device, event.stack);
        }
    }
}

/// The membership whose numbers the call is counted in: what makes a communicator from another is counted in that.
fn membership_of_sequence(
    collector: &mut Collector<'_>,
    enter: &NcclEnter,
    membership: Option<usize>,
) -> Option<usize> {
    match enter.op {
        NcclOp::CommSplit | NcclOp::CommShrink | NcclOp::CommGrow => {
            let made = membership.and_then(|idx| collector.memberships[idx].parent);
            made.or_else(|| collector.membership(CommId(u32::try_from(enter.extra).ok()?)))
        }
        _ => membership,
    }
}

fn lane(enter: &NcclEnter) -> Option<Lane> {
    if enter.sequence == UNKNOWN {
        return None;
    }
    Some(match enter.op.sequence(enter.peer)? {
        NcclSequence::Collective => Lane::Collective,
        NcclSequence::Send(peer) => Lane::Send(peer),
        NcclSequence::Receive(peer) => Lane::Receive(peer),
        NcclSequence::OneSided => Lane::OneSided,
        NcclSequence::Management => Lane::Management,
    })
}

fn signature(enter: &NcclEnter, reductions: &FxHashMap<u64, Reduction>) -> Signature {
    let has_root = matches!(enter.op, NcclOp::Broadcast | NcclOp::Reduce | NcclOp::Gather | NcclOp::Scatter);
    let reduction = match enter.redop {
        ..0 => Reduction::None,
        0..=4 => Reduction::Own(enter.redop),
        _ => reductions.get(&enter.redop_call).copied().unwrap_or(Reduction::Unseen),
    };
    Signature {
        op: enter.op,
        count: enter.count,
        datatype: enter.datatype,
        reduction,
        root: if has_root { enter.peer } else { -1 },
        captured: enter.captured,
    }
}

/// A stack for people, innermost first.
/// `function (file)` of the innermost Python frame, and the lines that it was called from.
fn innermost_python(definitions: &dyn Definitions, stack: StackId) -> Option<(String, Vec<String>)> {
    let frames = definitions.stack(stack)?.frames.iter().filter_map(|id| definitions.frame(*id));
    let mut python = frames.filter_map(|frame| match frame {
        Frame::Python { function, file, line } => Some((function, file, line)),
        Frame::Native { .. } => None,
    });
    let (function, file, _) = python.next()?;
    let innermost = format!("{function} ({})", file.rsplit('/').next().unwrap_or(file));
    Some((innermost, python.map(|(function, file, line)| format!("{function} ({file}:{line})")).collect()))
}

fn lines(definitions: &dyn Definitions, stack: StackId) -> Vec<String> {
    let Some(stack) = definitions.stack(stack) else { return vec![] };
    let frames = stack.frames.iter().filter_map(|id| definitions.frame(*id));
    let python = |frame: &Frame| match frame {
        Frame::Python { function, file, line } => Some(format!("{function} ({file}:{line})")),
        Frame::Native { .. } => None,
    };
    let native = |frame: &Frame| match frame {
        Frame::Native { function, file, line, .. } if !function.is_empty() => {
            Some(match (file.is_empty(), *line) {
                (true, _) | (_, 0) => function.clone(),
                (false, line) => format!("{function} ({file}:{line})"),
            })
        }
        Frame::Native { .. } | Frame::Python { .. } => None,
    };
    let lines: Vec<String> = frames.clone().filter_map(python).take(MAX_LINES).collect();
    if lines.is_empty() { frames.filter_map(native).take(MAX_LINES).collect() } else { lines }
}
