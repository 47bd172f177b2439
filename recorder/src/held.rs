//! What the process holds, as the events that explain it: with these a new segment of a bounded recording begins.
//!
//! ```text
//!  events of the trace ── event ──> births that nothing has ended yet ── events ──> the beginning of a segment
//! ```
//!
//! Each is the event itself, with its own time, thread and stack: a reader books it as if no segment had been removed. Memory is
//! bounded by what is held. An end is stamped before its call and written after it, so that another thread's birth at the same address
//! may be written first: an end takes the newest birth that is older than itself.

mod driver;
mod graphs;
mod nccl;

use self::driver::Driver;
use self::nccl::Nccl;
use gputrace_schemas::event::{
    Action, Alive, BlockAlloc, BlockFree, Bytes, Call, Event, EventKind, Lost, LostCause, Mark, MarkAction,
    Nanos, Pjrt, PjrtAction, StackId, StackRead, TextId, ThreadId,
};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

/// Notes of one kind that are kept, and kinds of them: settings of a session, and what its surroundings are.
const MOST_NOTES: usize = 64;
const MOST_KINDS: usize = 512;
/// Ranges that a thread may have open: a program that never closes them fills no memory.
const MOST_RANGES: usize = 1024;
/// Of two births at one address the older one waits so long for its end: a call that is still going on. Then its end was lost.
const LATE: u64 = 60_000_000_000;

/// An event, and its number among all.
#[derive(Clone, Debug)]
struct Born {
    order: u64,
    event: Event,
}

/// A block of PyTorch's: there are many of them.
#[derive(Clone, Copy, Debug)]
struct Block {
    order: u64,
    time: Nanos,
    thread: ThreadId,
    stack: StackId,
    alloc: BlockAlloc,
}

impl Block {
    fn event(&self) -> Event {
        let Block { time, thread, stack, alloc, .. } = *self;
        Event { time, thread, stack, kind: EventKind::BlockAlloc(alloc) }
    }
}

/// What PyTorch said of a device last.
#[derive(Clone, Default, Debug)]
struct Totals {
    time: Nanos,
    allocated: Bytes,
    reserved: Bytes,
    /// The block that was taken back last, and its end.
    last: Option<(Block, Born)>,
}

/// A table by address or number: the process chooses these, and could make its own recorder slow at worst.
type Table<K, V> = HashMap<K, V, BuildHasherDefault<Mixed>>;

/// Mixes numbers quickly (the multiplier of splitmix64).
#[derive(Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(number.into());
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(23) ^ number).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    }
}

/// What is held now.
#[derive(Default)]
pub(crate) struct Held {
    n_events: u64,
    newest: Nanos,
    blocks: Pairs<u64, Block>,
    totals: BTreeMap<i16, Totals>,
    driver: Driver,
    nccl: Nccl,
    /// Buffers and executables of PJRT, the first launch of each executable, and ranges of the process.
    others: Table<(Other, u64, u64), Born>,
    /// Ranges of threads, by domain.
    ranges: Table<(ThreadId, TextId), Vec<Born>>,
    /// By what stands before the sign of equality.
    notes: HashMap<String, VecDeque<Born>>,
    lost: BTreeMap<LostCause, (Born, u64)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Other {
    Buffer,
    Executable,
    Launch,
    Range,
    ThreadName,
}

/// Births by address. The older of two at one address waits for its end for a while.
struct Pairs<K, V> {
    newest: Table<K, V>,
    older: Table<K, V>,
}

impl<K, V> Default for Pairs<K, V> {
    fn default() -> Pairs<K, V> {
        Pairs { newest: Table::default(), older: Table::default() }
    }
}

impl<K: std::hash::Hash + Eq + Copy, V> Pairs<K, V> {
    /// A birth; what it pushes out had no end that was seen.
    fn begin(&mut self, key: K, value: V) -> Option<V> {
        let before = self.newest.insert(key, value)?;
        self.older.insert(key, before)
    }

    /// The birth that an end of this time ends.
    fn end(&mut self, key: K, is_before: impl Fn(&V) -> bool) -> Option<V> {
        if self.newest.get(&key).is_some_and(&is_before) {
            let ended = self.newest.remove(&key);
            if !self.older.is_empty()
                && let Some(older) = self.older.remove(&key)
            {
                self.newest.insert(key, older);
            }
            return ended;
        }
        if self.older.get(&key).is_some_and(is_before) { self.older.remove(&key) } else { None }
    }

    /// Forgets older births whose ends were lost; `is_late` is asked of the newer one.
    fn settle(&mut self, is_late: impl Fn(&V) -> bool) -> Vec<V> {
        let newest = &self.newest;
        let stale = self.older.extract_if(|key, _| newest.get(key).is_none_or(&is_late));
        stale.map(|(_, value)| value).collect()
    }

    fn values(&self) -> impl Iterator<Item = &V> {
        self.newest.values().chain(self.older.values())
    }
}

impl Held {
    /// Something that the trace says.
    pub(crate) fn event(&mut self, event: &Event) {
        self.n_events += 1;
        let order = self.n_events;
        // The recorder's own are of the moment at which it wrote them: the program's, read late, may be older.
        let is_own = matches!(event.kind, EventKind::Note(_) | EventKind::Sample(_) | EventKind::Lost(_));
        if !is_own {
            self.newest = self.newest.max(event.time);
        }
        match &event.kind {
            EventKind::BlockAlloc(alloc) => self.block(order, event, alloc),
            EventKind::BlockFree(free) => self.block_freed(order, event, free),
            EventKind::Call(call) if call.result == Some(0) => self.call(order, event, call),
            EventKind::NcclEnter(enter) => self.nccl.enter(order, event, enter),
            EventKind::NcclExit(exit) => self.nccl.exit(order, event, exit),
            EventKind::Pjrt(pjrt) => self.pjrt(order, event, pjrt),
            EventKind::PjrtExecutable(made) => {
                self.keep((Other::Executable, made.executable, 0), order, event);
            }
            EventKind::Mark(mark) => self.mark(order, event, mark),
            EventKind::Note(text) => self.note(order, event, text),
            EventKind::Lost(lost) => {
                let born = || Born { order, event: event.clone() };
                let (newest, n) = self.lost.entry(lost.cause).or_insert_with(|| (born(), 0));
                *newest = born();
                *n = n.saturating_add(lost.events);
            }
            // What happened, and is over.
            EventKind::Call(_)
            | EventKind::BlockOom(_)
            | EventKind::Wait(_)
            | EventKind::Sample(_)
            | EventKind::NcclTiming(_) => {}
        }
    }

    /// Nothing more will come of a thread: what it had begun, it will not end.
    pub(crate) fn thread_ended(&mut self, thread: ThreadId, tid: u32) {
        self.ranges.retain(|(of, _), _| *of != thread);
        self.others.remove(&(Other::ThreadName, tid.into(), 0));
        self.driver.thread_ended(thread);
    }

    /// The time of the newest event so far: all events after it come with later calls of [`Held::event`].
    pub(crate) fn newest(&self) -> Nanos {
        self.newest
    }

    /// Blocks that are held.
    pub(crate) fn n_blocks(&self) -> usize {
        self.blocks.newest.len()
    }

    /// The events that explain what is held, in the order of their times.
    pub(crate) fn events(&mut self) -> Vec<Event> {
        let since = Nanos(self.newest.0.saturating_sub(LATE));
        self.blocks.settle(|newer| newer.time < since);
        self.driver.settle(since, &mut self.nccl);
        let mut found: Vec<Born> = vec![];
        let mut last: BTreeMap<i16, u64> = BTreeMap::new();
        for block in self.blocks.values() {
            let last = last.entry(block.alloc.device).or_default();
            *last = block.order.max(*last);
            found.push(Born { order: block.order, event: block.event() });
        }
        // Where no block is left, the one that was taken back last says what PyTorch has reserved.
        for totals in self.totals.iter().filter(|(device, _)| !last.contains_key(device)).map(|(_, it)| it) {
            if let Some((block, end)) = &totals.last {
                found.push(Born { order: block.order, event: block.event() });
                found.push(end.clone());
            }
        }
        self.driver.events(&mut found);
        self.nccl.events(&mut found);
        found.extend(self.others.values().cloned());
        found.extend(self.ranges.values().flatten().cloned());
        found.extend(self.notes.values().flatten().cloned());
        for (newest, events) in self.lost.values() {
            let mut lost = newest.clone();
            if let EventKind::Lost(Lost { events: n, .. }) = &mut lost.event.kind {
                *n = *events;
            }
            found.push(lost);
        }
        found.sort_by_key(|born| (born.event.time, born.order));
        found.dedup_by_key(|born| born.order);
        self.correct_totals(&mut found, &last);
        found.into_iter().map(|born| born.event).collect()
    }

    /// PyTorch's totals of each moment are those of blocks that are gone since. They are replaced by what is held of its blocks and
    /// segments; the last block of a device has what PyTorch said last.
    fn correct_totals(&self, found: &mut [Born], last: &BTreeMap<i16, u64>) {
        let mut sums: BTreeMap<i16, (u64, u64)> = BTreeMap::new();
        for born in found {
            match &mut born.event.kind {
                EventKind::Call(call) if call.in_allocate && takes_segment(call) => {
                    let (_, reserved) = sums.entry(call.device).or_default();
                    *reserved = reserved.saturating_add(call.bytes.0);
                }
                EventKind::BlockAlloc(block) if last.contains_key(&block.device) => {
                    let (allocated, reserved) = sums.entry(block.device).or_default();
                    *allocated = allocated.saturating_add(block.bytes.0);
                    let is_last = last.get(&block.device) == Some(&born.order);
                    let said = self.totals.get(&block.device).filter(|_| is_last);
                    (block.allocated, block.reserved) = match said {
                        Some(said) => (said.allocated, said.reserved),
                        None => (Bytes(*allocated), Bytes((*reserved).max(*allocated))),
                    };
                }
                _ => {}
            }
        }
    }

    fn block(&mut self, order: u64, event: &Event, alloc: &BlockAlloc) {
        let Event { time, thread, stack, .. } = *event;
        self.says(alloc.device, time, alloc.allocated, alloc.reserved);
        self.blocks.begin(alloc.addr, Block { order, time, thread, stack, alloc: *alloc });
    }

    fn block_freed(&mut self, order: u64, event: &Event, free: &BlockFree) {
        self.says(free.device, event.time, free.allocated, free.reserved);
        if let Some(block) = self.blocks.end(free.addr, |block| block.time <= event.time)
            && let Some(totals) = self.totals.get_mut(&free.device)
        {
            totals.last = Some((block, Born { order, event: event.clone() }));
        }
    }

    fn says(&mut self, device: i16, time: Nanos, allocated: Bytes, reserved: Bytes) {
        let totals = self.totals.entry(device).or_default();
        if totals.time <= time {
            (totals.time, totals.allocated, totals.reserved) = (time, allocated, reserved);
        }
    }

    fn call(&mut self, order: u64, event: &Event, call: &Call) {
        self.driver.call(order, event, call, &mut self.nccl);
    }

    fn keep(&mut self, key: (Other, u64, u64), order: u64, event: &Event) {
        self.others.insert(key, Born { order, event: event.clone() });
    }

    fn pjrt(&mut self, order: u64, event: &Event, pjrt: &Pjrt) {
        match pjrt.action {
            PjrtAction::Made => self.keep((Other::Buffer, pjrt.buffer, 0), order, event),
            PjrtAction::Destroyed | PjrtAction::Deleted | PjrtAction::Donated => {
                self.others.remove(&(Other::Buffer, pjrt.buffer, 0));
            }
            PjrtAction::Executed => {
                let born = || Born { order, event: event.clone() };
                self.others.entry((Other::Launch, pjrt.executable, 0)).or_insert_with(born);
            }
            PjrtAction::Unloaded => {
                self.others.remove(&(Other::Executable, pjrt.executable, 0));
                self.others.remove(&(Other::Launch, pjrt.executable, 0));
            }
            PjrtAction::ClientGone => self.others.retain(|(other, ..), _| *other != Other::Buffer),
            PjrtAction::Failed => {}
        }
    }

    fn mark(&mut self, order: u64, event: &Event, mark: &Mark) {
        let range = (Other::Range, mark.range, u64::from(mark.domain.0));
        match mark.action {
            MarkAction::Push => {
                let open = self.ranges.entry((event.thread, mark.domain)).or_default();
                if open.len() < MOST_RANGES {
                    open.push(Born { order, event: event.clone() });
                }
            }
            MarkAction::Pop => {
                let key = (event.thread, mark.domain);
                if let Some(open) = self.ranges.get_mut(&key) {
                    open.pop();
                    if open.is_empty() {
                        self.ranges.remove(&key);
                    }
                }
            }
            MarkAction::Start => self.keep(range, order, event),
            MarkAction::End => {
                self.others.remove(&range);
            }
            MarkAction::NameThread => self.keep((Other::ThreadName, mark.range, 0), order, event),
            MarkAction::Mark => {}
        }
    }

    fn note(&mut self, order: u64, event: &Event, text: &str) {
        if Alive::parse(text).is_some() || StackRead::parse(text).is_some() {
            return;
        }
        let key = text.split('=').next().unwrap_or_default();
        if !self.notes.contains_key(key) && self.notes.len() >= MOST_KINDS {
            return;
        }
        let notes = self.notes.entry(key.to_owned()).or_default();
        notes.retain(|known| !matches!(&known.event.kind, EventKind::Note(other) if other == text));
        if notes.len() >= MOST_NOTES {
            notes.pop_front();
        }
        notes.push_back(Born { order, event: event.clone() });
    }
}

fn driver_call(event: &Event) -> Option<&Call> {
    if let EventKind::Call(call) = &event.kind { Some(call) } else { None }
}

/// PyTorch's allocator buys a segment, or pages of one.
fn takes_segment(call: &Call) -> bool {
    matches!(call.action, Action::Alloc | Action::Map)
}

#[cfg(test)]
mod tests;
