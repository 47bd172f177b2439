//! `gputrace who`: every owner that an address had, in order.
//!
//! ```text
//!  segment  ├──────────────────────────────────────
//!  block      ├──── a ────┤   ├── b ──┤
//!  time     0            ↑ freed by train.py:40
//! ```

use std::collections::BTreeMap;

use gputrace_analyse::story::Story;
use gputrace_report::model::{Mood, Section, Table, Value};
use gputrace_schemas::event::{Bytes, Event, Nanos, StackId};
use gputrace_sim::ops::{AllocId, Op, OpStream, Pool};
use gputrace_trace::import::Requests;
use gputrace_trace::ledger::pools::{GraphState, Pools};
use gputrace_trace::ledger::{
    Block, Fate, HeapBlock, Ledger, MemoryKind, Object, Paging, Step, Watch, call_site,
};
use gputrace_trace::source::Source;
use gputrace_trace::words::{bytes, time};
use gputrace_trace::{Before, Definitions};
use rustc_hash::FxHashMap;

/// An address that no block had is reported with its neighbours up to this distance, bytes.
const NEAR: u64 = 1 << 30;

/// Something that had the address.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Owner {
    /// Its kind.
    pub what: &'static str,
    /// On which device.
    pub device: i16,
    /// Its first byte.
    pub addr: u64,
    /// How large.
    pub bytes: Bytes,
    /// The requested amount, of a block.
    pub requested: Option<Bytes>,
    /// Since when; none where it was there when the recording began.
    pub since: Option<Nanos>,
    /// Until when; none where it still is there.
    pub until: Option<Nanos>,
    /// When no stream used it any more, where that was later.
    pub done: Option<Nanos>,
    /// Stream of the request, where known.
    pub stream: Option<u64>,
    /// Private pool of the block.
    pub pool: Option<Pool>,
    /// Number of the CUDA graph whose capture requested it.
    pub graph: Option<u64>,
    /// The call stack of the request.
    pub made_by: StackId,
    /// The call stack that freed it.
    pub freed_by: StackId,
    /// What lay below and above it when it was freed, or at the end.
    pub beside: [Option<Neighbour>; 2],
    serial: u64,
    /// Its number among the blocks of the device that were seen handed out.
    number: usize,
}

/// A block beside another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Neighbour {
    /// Its first byte.
    pub addr: u64,
    /// How large.
    pub bytes: Bytes,
    /// Bytes between the two.
    pub gap: u64,
    /// The call stack of the request.
    pub made_by: StackId,
}

/// Follows one address through a trace.
struct Follower {
    address: u64,
    owners: Vec<Owner>,
    /// Live blocks of PyTorch and libraries by first byte.
    live: BTreeMap<(i16, u64), (u64, StackId)>,
    n_blocks: FxHashMap<i16, usize>,
    last: Nanos,
    /// What came nearest below and above, of all that there ever was: distance, first byte, length.
    nearest: [Option<(u64, u64, u64)>; 2],
}

impl Follower {
    fn new(address: u64) -> Follower {
        Follower {
            address,
            owners: vec![],
            live: BTreeMap::new(),
            n_blocks: FxHashMap::default(),
            last: Nanos(0),
            nearest: [None; 2],
        }
    }

    fn holds(&self, addr: u64, bytes: u64) -> bool {
        addr <= self.address && self.address - addr < bytes
    }

    fn near(&mut self, addr: u64, bytes: u64) {
        let end = addr.saturating_add(bytes);
        let (side, distance) = if end <= self.address {
            (0, self.address - end)
        } else {
            (1, addr.saturating_sub(self.address))
        };
        let is_nearer = self.nearest[side].is_none_or(|(least, ..)| distance < least);
        if distance <= NEAR && is_nearer && addr > 0 && !self.holds(addr, bytes) {
            self.nearest[side] = Some((distance, addr, bytes));
        }
    }

    fn gained(&mut self, owner: Owner) {
        if self.holds(owner.addr, owner.bytes.0) {
            self.owners.push(owner);
        }
    }

    fn lost(&mut self, serial: u64, is_block: bool, event: &Event) {
        let is_it =
            |owner: &Owner| owner.serial == serial && owner.is_block() == is_block && owner.until.is_none();
        let Some(at) = self.owners.iter().rposition(is_it) else { return };
        let beside = self.beside(&self.owners[at]);
        let owner = &mut self.owners[at];
        (owner.until, owner.freed_by, owner.beside) = (Some(event.time), event.stack, beside);
    }

    fn beside(&self, owner: &Owner) -> [Option<Neighbour>; 2] {
        if !owner.is_block() {
            return [None; 2];
        }
        let neighbour = |(device, addr): (i16, u64), (length, made_by): (u64, StackId)| {
            let gap = if addr < owner.addr {
                owner.addr.saturating_sub(addr.saturating_add(length))
            } else {
                addr.saturating_sub(owner.addr.saturating_add(owner.bytes.0))
            };
            let is_near = device == owner.device && gap <= NEAR;
            is_near.then_some(Neighbour { addr, bytes: Bytes(length), gap, made_by })
        };
        let key = (owner.device, owner.addr);
        let below = self.live.range(..key).next_back();
        let above = self.live.range((owner.device, owner.addr.saturating_add(1))..).next();
        [below, above].map(|found| found.and_then(|(key, value)| neighbour(*key, *value)))
    }

    fn object(&mut self, object: &Object) {
        let bytes = object.bytes.0;
        if object.addr == 0 {
            return;
        }
        self.near(object.addr, bytes);
        let what = match (object.torch, object.kind) {
            (true, MemoryKind::Linear) => "segment",
            _ => object.kind.name(),
        };
        let owner = Owner {
            what,
            device: object.device,
            addr: object.addr,
            bytes: object.bytes,
            requested: None,
            since: Some(object.since),
            until: None,
            done: None,
            stream: None,
            pool: None,
            graph: None,
            made_by: object.stack,
            freed_by: StackId(0),
            beside: [None; 2],
            serial: object.serial,
            number: usize::MAX,
        };
        self.gained(owner);
    }

    fn block(&mut self, addr: u64, block: &Block, pools: &Pools) {
        let number = self.n_blocks.entry(block.device).or_default();
        *number += 1;
        let number = *number - 1;
        self.near(addr, block.bytes.0);
        self.live.insert((block.device, addr), (block.bytes.0, block.stack));
        self.gained(Owner {
            what: BLOCK,
            device: block.device,
            addr,
            bytes: block.bytes,
            requested: Some(block.requested),
            since: Some(block.since),
            until: None,
            done: None,
            stream: block.stream,
            pool: pools.at(block.device, addr).map(|id| Pool { id }),
            graph: pools.capturing(block.device, addr),
            made_by: block.stack,
            freed_by: StackId(0),
            beside: [None; 2],
            serial: block.serial,
            number,
        });
    }

    fn heap(&mut self, addr: u64, block: &HeapBlock) {
        self.near(addr, block.bytes.0);
        self.gained(Owner {
            what: "buffer of a library",
            device: block.device,
            addr,
            bytes: block.bytes,
            requested: None,
            since: Some(block.since),
            until: None,
            done: None,
            stream: None,
            pool: None,
            graph: None,
            made_by: block.stack,
            freed_by: StackId(0),
            beside: [None; 2],
            serial: addr,
            number: usize::MAX,
        });
    }
}

const BLOCK: &str = "block";

impl Owner {
    fn is_block(&self) -> bool {
        self.what == BLOCK
    }
}

impl Watch for Follower {
    /// It may begin a second time: see [`Ledger::of`].
    fn begin(&mut self, ledger: &mut Ledger) {
        *self = Follower::new(self.address);
        ledger.keep_steps();
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        self.last = self.last.max(event.time);
        for step in ledger.steps() {
            match step {
                Step::Gained(object) => self.object(object),
                Step::Lost(object) => self.lost(object.serial, false, event),
                Step::Block(addr, block) => self.block(*addr, block, &ledger.torch_pools),
                Step::BlockFreed(addr, block) => {
                    self.live.remove(&(block.device, *addr));
                    self.lost(block.serial, true, event);
                }
                Step::BlockDone(_, block) => {
                    let of = |owner: &&mut Owner| owner.is_block() && owner.serial == block.serial;
                    if let Some(owner) = self.owners.iter_mut().find(of) {
                        owner.done = Some(event.time).filter(|time| Some(*time) != owner.until);
                    }
                }
                Step::Stranger(Fate::Freed, stranger) if self.holds(stranger.addr, stranger.bytes.0) => {
                    self.owners.push(Owner {
                        what: BLOCK,
                        device: stranger.device,
                        addr: stranger.addr,
                        bytes: stranger.bytes,
                        requested: None,
                        since: None,
                        until: Some(event.time),
                        done: None,
                        stream: None,
                        pool: None,
                        graph: None,
                        made_by: StackId(0),
                        freed_by: event.stack,
                        beside: [None; 2],
                        serial: stranger.serial,
                        number: usize::MAX,
                    });
                }
                Step::Heap(Fate::Allocated, addr, block) => self.heap(*addr, block),
                Step::Heap(Fate::Freed, addr, _) => {
                    let of = |owner: &&mut Owner| {
                        owner.what == "buffer of a library" && owner.serial == *addr && owner.until.is_none()
                    };
                    if let Some(owner) = self.owners.iter_mut().find(of) {
                        (owner.until, owner.freed_by) = (Some(event.time), event.stack);
                    }
                }
                Step::Pages(Paging::Grown, pages) if self.holds(pages.addr, pages.bytes.0) => {
                    self.owners.push(Owner {
                        what: "pages of an expandable segment",
                        device: pages.device,
                        addr: pages.addr,
                        bytes: pages.bytes,
                        requested: None,
                        since: Some(event.time),
                        until: None,
                        done: None,
                        stream: None,
                        pool: None,
                        graph: None,
                        made_by: event.stack,
                        freed_by: StackId(0),
                        beside: [None; 2],
                        serial: pages.addr,
                        number: usize::MAX,
                    });
                }
                Step::Pages(Paging::Shrunk(_), page) if self.holds(page.addr, page.bytes.0) => {
                    let of = |owner: &&mut Owner| {
                        owner.what == "pages of an expandable segment" && owner.until.is_none()
                    };
                    if let Some(owner) = self.owners.iter_mut().rev().find(of) {
                        (owner.until, owner.freed_by) = (Some(event.time), event.stack);
                    }
                }
                Step::Pages(..) | Step::Stranger(..) | Step::Heap(..) => {}
            }
        }
    }
}

/// A snapshot lists what was held when its history began, or without a history, but not since when.
fn forget_births_before_history(story: &Story, owners: &mut [Owner]) {
    let notes = &story.ledger.health.notes;
    let before: Vec<Before> = notes.iter().filter_map(|(_, note)| Before::of_note(note)).collect();
    for owner in owners {
        let of_device = before.iter().find(|before| before.device == owner.device);
        let is_from_before = of_device.is_some_and(|before| {
            !before.has_history || owner.is_block() && (owner.number as u64) < before.n_blocks
        });
        if is_from_before {
            owner.since = None;
        }
    }
}

/// Every owner that an address had.
pub struct Who {
    /// The trace.
    pub story: Story,
    /// The address.
    pub address: u64,
    /// In the order in which they got it.
    pub owners: Vec<Owner>,
    /// When the trace ends.
    pub end: Nanos,
    nearest: [Option<(u64, u64, u64)>; 2],
}

impl Who {
    /// Looks through a trace.
    pub fn of(source: &Source, address: u64) -> Who {
        let mut follower = Follower::new(address);
        let story = Story::watched(source, &mut follower);
        for at in 0..follower.owners.len() {
            if follower.owners[at].until.is_none() {
                follower.owners[at].beside = follower.beside(&follower.owners[at]);
            }
        }
        let Follower { mut owners, last, nearest, .. } = follower;
        forget_births_before_history(&story, &mut owners);
        if owners.iter().any(Owner::is_block)
            && let Ok(trace) = source.requests()
        {
            trace.devices.iter().for_each(|stream| pools(stream, &mut owners));
        }
        Who { story, address, owners, end: last, nearest }
    }

    /// The answer.
    pub fn section(&self, definitions: &dyn Definitions) -> Section {
        let mut known: FxHashMap<StackId, String> = FxHashMap::default();
        let mut place = |stack: StackId| {
            let words = known.entry(stack).or_insert_with(|| {
                let site = call_site(definitions, stack).filter(|site| !site.function.is_empty());
                site.map_or_else(String::new, |site| site.to_string())
            });
            words.clone()
        };
        let section = Section::new("owners_of_address", format!("Owners of {:#x}", self.address))
            .line(self.mood(), self.words(&mut place));
        let shown: Vec<(&Owner, String, String, String)> = self
            .owners
            .iter()
            .map(|owner| (owner, place(owner.made_by), place(owner.freed_by), beside(owner, &mut place)))
            .collect();
        let time = |time: Option<Nanos>| {
            time.map_or(Value::Missing, |time| Value::Time(self.story.since_start(time)))
        };
        let words = |text: &str| if text.is_empty() { Value::Missing } else { Value::text(text) };
        let table = Table::of(
            "owners",
            &shown,
            &[
                ("since_ns", "since", &|(owner, ..)| time(owner.since)),
                ("until_ns", "until", &|(owner, ..)| time(owner.until)),
                ("reusable_ns", "reusable", &|(owner, ..)| time(owner.done.or(owner.until))),
                ("what", "what", &|(owner, ..)| Value::text(owner.what)),
                ("device", "device", &|(owner, ..)| Value::text(device(owner.device))),
                ("address", "from", &|(owner, ..)| Value::text(format!("{:#x}", owner.addr))),
                ("bytes", "bytes", &|(owner, ..)| Value::Bytes(owner.bytes)),
                ("requested_bytes", "requested", &|(owner, ..)| {
                    owner.requested.map_or(Value::Missing, Value::Bytes)
                }),
                ("offset_bytes", "offset", &|(owner, ..)| Value::Bytes(Bytes(self.address - owner.addr))),
                ("stream", "stream", &|(owner, ..)| {
                    owner.stream.map_or(Value::Missing, |stream| Value::text(format!("{stream:#x}")))
                }),
                ("pool", "pool", &|(owner, ..)| owner.pool.map_or(Value::Missing, pool_words)),
                ("graph", "captured into", &|(owner, ..)| {
                    owner.graph.map_or(Value::Missing, |graph| Value::text(self.graph(graph)))
                }),
                ("made_by", "allocated by", &|(_, made, ..)| words(made)),
                ("freed_by", "freed by", &|(_, _, freed, _)| words(freed)),
                ("beside", "neighbours then", &|(.., beside)| words(beside)),
            ],
        );
        let section = match self.replayed() {
            Some((number, 1)) => section.line(
                Mood::Note,
                format!("one allocation captured into graph {number} had it: each replay of the graph uses it, even after it was freed"),
            ),
            Some((number, n)) => section.line(
                Mood::Note,
                format!("{n} allocations captured into graph {number} had it: each replay of the graph uses it, even after they were freed"),
            ),
            None => section,
        };
        section.table(table).warn(self.story.caveats())
    }

    /// A graph and what became of it.
    fn graph(&self, number: u64) -> String {
        match self.state_of(number) {
            Some(state) => format!("graph {number}, {}", state.name()),
            None => format!("graph {number}"),
        }
    }

    fn state_of(&self, number: u64) -> Option<GraphState> {
        let mut graphs = self.story.ledger.torch_pools.pools.values().flat_map(|pool| &pool.graphs);
        graphs.find(|graph| graph.number == number).map(|graph| graph.state)
    }

    /// The graph that still exists and works in the address at each replay, and how many of its allocations had it.
    fn replayed(&self) -> Option<(u64, usize)> {
        let is_alive = |number: &u64| self.state_of(*number) == Some(GraphState::Made);
        let number = self.owners.iter().rev().filter_map(|owner| owner.graph).find(is_alive)?;
        Some((number, self.owners.iter().filter(|owner| owner.graph == Some(number)).count()))
    }

    fn mood(&self) -> Mood {
        if self.owners.iter().any(|owner| owner.until.is_none()) { Mood::Note } else { Mood::Warning }
    }

    /// The state at the end, in a sentence.
    fn words(&self, place: &mut dyn FnMut(StackId) -> String) -> String {
        let by = |place: String| if place.is_empty() { String::new() } else { format!(" by {place}") };
        let before = |when: Nanos| {
            let ago = Nanos(self.end.0.saturating_sub(when.0));
            format!("{} before the end", time(ago))
        };
        let blocks = || self.owners.iter().rev().filter(|owner| owner.is_block());
        if let Some(owner) = blocks().find(|owner| owner.until.is_none()) {
            let offset = bytes(Bytes(self.address - owner.addr));
            return format!(
                "in use at the end: {offset} into a block of {}, allocated {}{}",
                bytes(owner.bytes),
                owner.since.map_or_else(|| "before the recording began".to_owned(), before),
                by(place(owner.made_by))
            );
        }
        if let Some(owner) = blocks().next() {
            let offset = bytes(Bytes(self.address - owner.addr));
            let freed = owner.until.map_or_else(String::new, before);
            return format!(
                "not in use at the end: freed {freed}{}, {offset} into a block of {} allocated{}",
                by(place(owner.freed_by)),
                bytes(owner.bytes),
                by(place(owner.made_by))
            );
        }
        if let Some(owner) = self.owners.last() {
            let state = match owner.until {
                None => "still held at the end".to_owned(),
                Some(when) => format!("freed {}{}", before(when), by(place(owner.freed_by))),
            };
            return format!(
                "in no block; in a {} of {} from {:#x}, {state}",
                owner.what,
                bytes(owner.bytes),
                owner.addr
            );
        }
        let [below, above] = self.nearest;
        let below = below.map(|(distance, addr, length)| {
            format!("{} after the end of {} at {addr:#x}", bytes(Bytes(distance)), bytes(Bytes(length)))
        });
        let above = above.map(|(distance, addr, length)| {
            format!("{} before {} at {addr:#x}", bytes(Bytes(distance)), bytes(Bytes(length)))
        });
        let near: Vec<String> = below.into_iter().chain(above).collect();
        match near.is_empty() {
            true => "no recorded allocation contained or was near this address".to_owned(),
            false => format!("no recorded memory had this address: it is {}", near.join(", and ")),
        }
    }
}

fn device(ordinal: i16) -> String {
    if ordinal >= 0 { format!("cuda:{ordinal}") } else { "host".to_owned() }
}

fn pool_words(pool: Pool) -> Value {
    Value::text(match pool {
        Pool { id: (0, 0) } => "default".to_owned(),
        pool if pool.is_guessed() => "private (guessed)".to_owned(),
        pool if pool.is_capture() => format!("CUDA graph {}", pool.id.0),
        pool => format!("MemPool {}", pool.id.1),
    })
}

fn beside(owner: &Owner, place: &mut dyn FnMut(StackId) -> String) -> String {
    let [below, above] = owner.beside;
    let mut words = |side: &str, it: Option<Neighbour>| {
        let it = it?;
        let (length, by) = (bytes(it.bytes), place(it.made_by));
        let by = if by.is_empty() { String::new() } else { format!(" by {by}") };
        let gap = if it.gap == 0 { String::new() } else { format!(" after {}", bytes(Bytes(it.gap))) };
        Some(format!("{side} {length}{by}{gap}"))
    };
    let all: Vec<String> = [words("below", below), words("above", above)].into_iter().flatten().collect();
    all.join("; ")
}

/// The pool of each block, where the requests of the simulator are the same blocks.
fn pools(stream: &OpStream, owners: &mut [Owner]) {
    let asked: Vec<AllocId> =
        stream.ops.iter().filter_map(|op| if let Op::Alloc(id) = op { Some(*id) } else { None }).collect();
    let n_before = stream.initial_allocs.len();
    for owner in owners.iter_mut().filter(|it| i64::from(it.device) == i64::from(stream.device)) {
        // A snapshot's history begins with blocks that nobody asked for.
        let numbers = [owner.number.checked_sub(n_before), Some(owner.number)];
        let id = numbers.into_iter().flatten().filter_map(|number| asked.get(number).copied());
        let mut id = id.filter(|id| stream.allocation(*id).address == owner.addr);
        if let Some(id) = id.next() {
            let allocation = stream.allocation(id);
            owner.pool = Some(stream.pool(allocation.pool));
            owner.stream =
                owner.stream.or_else(|| stream.streams.get(usize::from(allocation.stream.0)).copied());
        }
    }
}
