//! What the page shows of a trace, collected while its events are booked.
//!
//! Memory is divided as where one moment is shown ([`gputrace_analyse::live`]): what the driver handed out, PyTorch's blocks
//! inside of its segments, JAX's buffers inside of its allocator's, and the unused rest of these. So the parts of every state
//! add up to what the device held.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use gputrace_schemas::event::{Bytes, Event, EventKind, HOST, MarkAction, Nanos, StackId, ThreadId};
use rustc_hash::FxHashMap;

use super::history::{Height, History, Room};
use super::inside::{Buffers, Pools};
use super::map::{Ground, Rectangles};
use super::shapes::Row;
use super::tape::{Changes, Lives, Tape};
use gputrace_analyse::live::Level;
use gputrace_analyse::story::Story;
use gputrace_trace::Definitions;
use gputrace_trace::ledger::{
    Fate, HeapBlock, Ledger, MemoryKind, Object, OwnerId, Paging, SiteId, Step, Watch,
};
use gputrace_trace::owners::TORCH_PINNED;

/// Most marks of each kind that are kept; the others are counted.
const MOST_MARKS: usize = 4000;
/// Longest history of requests that is kept for what-ifs.
pub(super) const MOST_REQUESTS: usize = gputrace_sim::effort::PAGE.most;

/// How much of a trace is kept.
#[derive(Clone, Copy, Debug)]
pub(super) struct Detail {
    /// Of its history.
    pub history: Room,
    /// Rectangles of the map.
    pub rectangles: usize,
    /// All is kept from then to then, as far as there is room.
    pub focus: Option<(Nanos, Nanos)>,
}

/// Who holds something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Holder {
    pub level: Level,
    pub owner: OwnerId,
    pub site: SiteId,
    pub stack: StackId,
    pub stream: Option<u64>,
    /// The role of a block, from 1; 0 none.
    pub role: u16,
    /// The private pool of PyTorch's that it is in, from 1; 0 none.
    pub pool: u16,
    /// The layer of the model that it belongs to, from 1; 0 none.
    pub layer: u16,
    /// What kind of memory, in words.
    pub kind: &'static str,
}

/// Without the words: those of one stack nearly always have the same, and a holder is looked up at every event.
impl Hash for Holder {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let Holder { level, owner, site, stack, stream, role, pool, layer, kind: _ } = *self;
        (u64::from(stack.0) << 32 | u64::from(site.0)).hash(state);
        (stream.map_or(u64::MAX, |stream| stream << 1)).hash(state);
        (u64::from(owner.0) << 32 | u64::from(role) << 16 | u64::from(pool)).hash(state);
        (layer, level).hash(state);
    }
}

/// What of an allocator's memory nothing is in.
fn rest(level: Level, owner: OwnerId, pool: u16) -> Holder {
    let kind = if level == Level::Arena { "JAX's allocator, in no buffer" } else { "PyTorch's unused cache" };
    let (site, stack) = (SiteId(u32::MAX), StackId(0));
    Holder { level, owner, site, stack, stream: None, role: 0, pool, layer: 0, kind }
}

/// Memory of a device, or of the host.
fn is_shown(object: &Object) -> bool {
    if object.device == HOST { object.kind != MemoryKind::Imported } else { object.kind.is_physical() }
}

/// A moment, or some time, with a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Mark {
    pub kind: MarkKind,
    pub from: Nanos,
    /// None where it never ended.
    pub to: Option<Nanos>,
    pub text: String,
    pub device: i16,
    pub bytes: u64,
    /// Where the program was; 0 where that is not known.
    pub stack: StackId,
}

/// What is marked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum MarkKind {
    /// A request for memory that failed.
    OutOfMemory,
    /// A turn of the training loop.
    Step,
    /// A range or mark of NVTX.
    Nvtx,
    /// PyTorch gave its cache back.
    EmptyCache,
    /// A call into NCCL.
    Nccl,
}

impl MarkKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            MarkKind::OutOfMemory => "out of memory",
            MarkKind::Step => "step",
            MarkKind::Nvtx => "nvtx",
            MarkKind::EmptyCache => "cache emptied",
            MarkKind::Nccl => "nccl",
        }
    }
}

/// The cache of a device is being emptied: since when, up to when, how much, from where.
#[derive(Clone, Copy)]
struct Emptying {
    from: Nanos,
    to: Nanos,
    bytes: u64,
    stack: StackId,
}

/// Marks of one kind: the longest, where there are too many.
#[derive(Clone, Debug, Default)]
pub(super) struct Marks {
    pub list: Vec<Mark>,
    pub n: u64,
}

impl Marks {
    pub(super) fn add(&mut self, mark: Mark) {
        self.n += 1;
        self.list.push(mark);
        if self.list.len() >= 2 * MOST_MARKS {
            self.thin();
        }
    }

    pub(super) fn thin(&mut self) {
        if self.list.len() > MOST_MARKS {
            let length = |mark: &Mark| mark.to.map_or(u64::MAX, |to| to.0.saturating_sub(mark.from.0));
            self.list.select_nth_unstable_by_key(MOST_MARKS - 1, |mark| std::cmp::Reverse(length(mark)));
            self.list.truncate(MOST_MARKS);
        }
        self.list.sort_by_key(|mark| (mark.from, mark.to));
    }
}

/// One device.
pub(super) struct Device {
    pub history: History,
    /// Its highest state so far.
    highest: Height,
    pub blocks: Rectangles,
    pub grounds: Rectangles,
    /// Objects of the driver without an address of their own.
    pub n_unplaced: u64,
    /// What PyTorch had at each of its requests: when, allocated, reserved.
    pub requests: Vec<(Nanos, Bytes, Bytes)>,
    /// Some request is not among these.
    pub has_more_requests: bool,
    segments: u64,
    in_blocks: u64,
    /// What of the segments is unused, by private pool; 0 those of none.
    cached: BTreeMap<u16, u64>,
    has_blocks: bool,
}

/// What is known of each block, in the order of all blocks' births.
#[derive(Clone, Copy, Default)]
pub(super) struct Known<'a> {
    /// Its role, from 0.
    pub roles: &'a [u16],
    /// Its layer, from 1; 0 none.
    pub layers: &'a [u16],
}

/// The watch.
pub(super) struct Collector<'a> {
    definitions: &'a dyn Definitions,
    known: Known<'a>,
    detail: Detail,
    span: (Nanos, Nanos),
    /// Devices whose PyTorch blocks were seen: their segments are shown by these.
    with_blocks: Vec<i16>,
    pub holders: Vec<(i16, Holder)>,
    numbers: FxHashMap<(i16, Holder), u32>,
    pub pools: Pools,
    buffers: Buffers,
    pub devices: BTreeMap<i16, Device>,
    pub marks: BTreeMap<MarkKind, Marks>,
    n_born: usize,
    open: FxHashMap<u64, u32>,
    ranges: FxHashMap<ThreadId, Vec<(Nanos, String)>>,
    processes_ranges: FxHashMap<u64, (Nanos, String)>,
    calls: FxHashMap<u64, (Nanos, String, u64)>,
    /// The caches that are being emptied, by device.
    emptying: BTreeMap<i16, Emptying>,
    touched: Vec<(i16, Vec<Row>)>,
    /// Where all of it is written down too.
    tape: Option<Arc<Tape>>,
}

impl<'a> Collector<'a> {
    pub(super) fn new(
        definitions: &'a dyn Definitions,
        story: &Story,
        known: Known<'a>,
        detail: Detail,
    ) -> Collector<'a> {
        let devices = story.ledger.devices().iter();
        let with_blocks = devices
            .filter(|(_, books)| books.torch.as_ref().is_some_and(|torch| torch.blocks.peak().0 > 0))
            .map(|(device, _)| *device)
            .chain((story.ledger.host_blocks().peak().0 > 0).then_some(HOST));
        Collector {
            definitions,
            known,
            detail,
            span: (story.start(), story.ledger.run.last),
            with_blocks: with_blocks.collect(),
            holders: vec![],
            numbers: FxHashMap::default(),
            pools: Pools::default(),
            buffers: Buffers::of(&story.ledger),
            devices: BTreeMap::new(),
            marks: BTreeMap::new(),
            n_born: 0,
            open: FxHashMap::default(),
            ranges: FxHashMap::default(),
            processes_ranges: FxHashMap::default(),
            calls: FxHashMap::default(),
            emptying: BTreeMap::new(),
            touched: vec![],
            tape: None,
        }
    }

    /// The same, that writes all of it down there.
    pub(super) fn on(self, tape: Option<&Arc<Tape>>) -> Collector<'a> {
        Collector { tape: tape.cloned(), ..self }
    }

    /// No event follows.
    pub(super) fn finish(&mut self, ledger: &Ledger) {
        let emptying = std::mem::take(&mut self.emptying);
        emptying.into_iter().for_each(|(device, it)| self.emptied(ledger, device, it));
        let ranges = std::mem::take(&mut self.ranges).into_values().flatten();
        for (from, text) in ranges.chain(std::mem::take(&mut self.processes_ranges).into_values()) {
            self.mark(MarkKind::Nvtx, from, None, text, 0);
        }
        for (from, text, bytes) in std::mem::take(&mut self.calls).into_values() {
            self.mark(MarkKind::Nccl, from, None, text, bytes);
        }
        self.marks.values_mut().for_each(Marks::thin);
        for device in self.devices.values_mut() {
            device.history.finish();
            device.blocks.finish();
            device.grounds.finish();
        }
    }

    fn device(&mut self, device: i16) -> &mut Device {
        let (detail, span, tape) = (self.detail, self.span, &self.tape);
        let has_blocks = self.with_blocks.contains(&device);
        let rectangles = |room| {
            let rectangles = Rectangles::focused(room, span, detail.focus);
            tape.iter().fold(rectangles, |rectangles, tape| rectangles.on(Lives::new(tape)))
        };
        let history = || {
            let history = History::focused(detail.history, detail.focus);
            tape.iter().fold(history, |history, tape| history.on(Changes::new(tape)))
        };
        self.devices.entry(device).or_insert_with(|| Device {
            history: history(),
            highest: (Bytes(0), Bytes(0)),
            blocks: rectangles(detail.rectangles),
            grounds: rectangles(detail.rectangles / 4),
            n_unplaced: 0,
            requests: vec![],
            has_more_requests: false,
            segments: 0,
            in_blocks: 0,
            cached: BTreeMap::new(),
            has_blocks,
        })
    }

    fn number(&mut self, device: i16, holder: Holder) -> u32 {
        let next = self.holders.len() as u32;
        let number = *self.numbers.entry((device, holder)).or_insert(next);
        if number == next {
            self.holders.push((device, holder));
        }
        number
    }

    fn row(&mut self, device: i16, row: Row) {
        match self.touched.iter_mut().find(|(known, _)| *known == device) {
            Some((_, rows)) => rows.push(row),
            None => self.touched.push((device, vec![row])),
        }
    }

    fn gains(&mut self, device: i16, holder: u32, bytes: Bytes) {
        self.row(device, Row { holder, bytes: bytes.0 as i64, objects: 1 });
    }

    fn loses(&mut self, device: i16, holder: u32, bytes: Bytes) {
        self.row(device, Row { holder, bytes: -(bytes.0 as i64), objects: -1 });
    }

    fn step(&mut self, ledger: &Ledger, event: &Event, step: &Step) {
        match step {
            Step::Block(addr, block) => {
                let role = self.known.roles.get(self.n_born).map_or(0, |role| role + 1);
                let layer = self.known.layers.get(self.n_born).copied().unwrap_or(0);
                self.n_born += 1;
                let segment = ledger.torch_pools.segment_at(block.device, *addr);
                let pool = segment.map_or(0, |(range, id)| {
                    let pool = self.pools.number(block.device, id);
                    self.segment_of(block.device, range, pool);
                    pool
                });
                self.pools.gains(block.device, pool, block.bytes);
                let holder = Holder {
                    level: Level::Block,
                    owner: OwnerId(u32::MAX),
                    site: block.site,
                    stack: block.stack,
                    stream: block.stream,
                    role,
                    pool,
                    layer,
                    kind: "PyTorch's blocks",
                };
                let number = self.number(block.device, holder);
                self.open.insert(*addr, number);
                self.gains(block.device, number, block.bytes);
                let device = self.device(block.device);
                device.in_blocks = device.in_blocks.saturating_add(block.bytes.0);
                device.blocks.begins_with(*addr, (block.bytes, block.requested), event.time, number);
            }
            Step::BlockFreed(addr, block) => {
                let Some(number) = self.open.remove(addr) else { return };
                self.loses(block.device, number, block.bytes);
                let pool = self.holders.get(number as usize).map_or(0, |(_, holder)| holder.pool);
                self.pools.loses(block.device, pool, block.bytes);
                let device = self.device(block.device);
                device.in_blocks = device.in_blocks.saturating_sub(block.bytes.0);
                device.blocks.ends(*addr, event.time);
            }
            Step::Heap(Fate::Allocated, addr, block) if block.device == HOST => {
                self.pinned_begins(ledger, event, *addr, block)
            }
            Step::Heap(Fate::Freed, addr, block) if block.device == HOST => {
                self.pinned_ends(ledger, event, *addr, block);
            }
            Step::Gained(object) if is_shown(object) => {
                let is_segment = self.is_segment(ledger, object);
                let ground = if is_segment { Ground::Segment } else { Ground::Other };
                let is_arena = self.buffers.is_arena(object);
                let what = self.object(object);
                let device = self.device(object.device);
                match (is_segment, object.addr) {
                    (_, 0) => device.n_unplaced += u64::from(!is_segment),
                    (true, addr) => device.grounds.begins(addr, object.bytes, event.time, ground as u32),
                    (false, addr) => {
                        device.grounds.begins(addr, object.bytes, event.time, ground as u32);
                        device.blocks.begins(addr, object.bytes, event.time, what);
                    }
                }
                if is_segment {
                    device.segments = device.segments.saturating_add(object.bytes.0);
                } else if is_arena {
                    self.buffers.arena(object.device, object.bytes.0 as i64);
                } else {
                    self.gains(object.device, what, object.bytes);
                }
            }
            Step::Lost(object) if is_shown(object) => {
                let is_segment = self.is_segment(ledger, object);
                let is_arena = self.buffers.is_arena(object);
                let what = self.object(object);
                if object.addr != 0 {
                    self.ground_ends(object.device, object.addr, event.time);
                }
                let device = self.device(object.device);
                if is_segment {
                    device.segments = device.segments.saturating_sub(object.bytes.0);
                    let is_trim = matches!(&event.kind, EventKind::Call(call) if !call.in_allocate);
                    if is_trim && object.kind != MemoryKind::Virtual {
                        self.trims(event, object.device, object.bytes);
                    }
                } else {
                    if object.addr != 0 {
                        device.blocks.ends(object.addr, event.time);
                    }
                    if is_arena {
                        self.buffers.arena(object.device, -(object.bytes.0 as i64));
                    } else {
                        self.loses(object.device, what, object.bytes);
                    }
                }
            }
            Step::Pages(Paging::Mapped, range) => {
                let ground = if range.torch { Ground::Pages } else { Ground::OtherPages };
                self.device(range.device).grounds.begins(range.addr, range.bytes, event.time, ground as u32);
                if let Some((segment, id)) = ledger.torch_pools.segment_at(range.device, range.addr) {
                    let pool = self.pools.number(range.device, id);
                    let bytes = self.device(range.device).grounds.one_of_pool(range.addr, pool);
                    self.pools.reserves(range.device, pool, bytes);
                    self.segment_of(range.device, segment, pool);
                }
            }
            Step::Pages(Paging::Unmapped, range) => {
                self.ground_ends(range.device, range.addr, event.time);
                if range.torch && matches!(&event.kind, EventKind::Call(call) if !call.in_allocate) {
                    self.trims(event, range.device, range.bytes);
                }
            }
            Step::Gained(_) | Step::Lost(_) => {}
            Step::BlockDone(..) | Step::Stranger(..) | Step::Pages(..) | Step::Heap(..) => {}
        }
    }

    /// Whether the blocks in it show who has it.
    fn is_segment(&mut self, ledger: &Ledger, object: &Object) -> bool {
        let is_cache =
            object.torch || object.device == HOST && ledger.sites.owner(object.owner) == TORCH_PINNED;
        is_cache && self.device(object.device).has_blocks
    }

    fn pinned_begins(&mut self, ledger: &Ledger, event: &Event, addr: u64, block: &HeapBlock) {
        let number = self.pinned(ledger, block);
        self.gains(HOST, number, block.bytes);
        let host = self.device(HOST);
        host.in_blocks = host.in_blocks.saturating_add(block.bytes.0);
        host.blocks.begins(addr, block.bytes, event.time, number);
    }

    fn pinned_ends(&mut self, ledger: &Ledger, event: &Event, addr: u64, block: &HeapBlock) {
        let number = self.pinned(ledger, block);
        self.loses(HOST, number, block.bytes);
        let host = self.device(HOST);
        host.in_blocks = host.in_blocks.saturating_sub(block.bytes.0);
        host.blocks.ends(addr, event.time);
    }

    /// Who holds a block of the host's.
    fn pinned(&mut self, ledger: &Ledger, block: &HeapBlock) -> u32 {
        let (site, stack) = (block.site, block.stack);
        let owner = ledger.sites.site(site).map_or(OwnerId(u32::MAX), |site| site.owner);
        let kind = "PyTorch's pinned blocks";
        self.number(
            HOST,
            Holder {
                level: Level::Driver,
                owner,
                site,
                stack,
                stream: None,
                role: 0,
                pool: 0,
                layer: 0,
                kind,
            },
        )
    }

    fn object(&mut self, object: &Object) -> u32 {
        let holder = match self.buffers.is_arena(object) {
            true => rest(Level::Arena, object.owner, 0),
            false => Holder {
                level: Level::Driver,
                owner: object.owner,
                site: object.site,
                stack: object.stack,
                stream: None,
                role: 0,
                pool: 0,
                layer: 0,
                kind: object.kind.name(),
            },
        };
        self.number(object.device, holder)
    }

    /// A segment is known to be of a private pool.
    fn segment_of(&mut self, device: i16, range: (u64, u64), pool: u16) {
        if self.pools.is_new(device, range.0, pool) {
            let bytes = self.device(device).grounds.of_pool(range, pool);
            self.pools.reserves(device, pool, bytes);
        }
    }

    fn ground_ends(&mut self, device: i16, addr: u64, time: Nanos) {
        let ended = self.device(device).grounds.ends(addr, time);
        if let Some(ended) = ended {
            self.pools.gives_back(device, &ended);
        }
    }

    /// What of the segments is unused has changed, perhaps.
    fn cache(&mut self, device: i16) {
        let books = self.device(device);
        let cached = books.segments.saturating_sub(books.in_blocks);
        let before = std::mem::take(&mut books.cached);
        if !self.pools.has_any(device) && before.keys().all(|pool| *pool == 0) {
            return self.cache_of_no_pool(device, before, cached);
        }
        let now = self.pools.unused(device, cached);
        for pool in before.keys().chain(now.keys().filter(|pool| !before.contains_key(pool))) {
            let of = |parts: &BTreeMap<u16, u64>| parts.get(pool).copied().unwrap_or(0) as i64;
            let (earlier, later) = (of(&before), of(&now));
            if earlier != later {
                let holder = self.number(device, rest(Level::Cached, OwnerId(u32::MAX), *pool));
                let objects = i32::from(later > 0) - i32::from(earlier > 0);
                self.row(device, Row { holder, bytes: later - earlier, objects });
            }
        }
        self.device(device).cached = now;
    }

    /// The same where there is no private pool, which is so of most programs and at each of their requests.
    fn cache_of_no_pool(&mut self, device: i16, mut parts: BTreeMap<u16, u64>, later: u64) {
        let earlier = parts.get(&0).copied().unwrap_or(0);
        if earlier != later {
            let holder = self.number(device, rest(Level::Cached, OwnerId(u32::MAX), 0));
            let objects = i32::from(later > 0) - i32::from(earlier > 0);
            self.row(device, Row { holder, bytes: later as i64 - earlier as i64, objects });
            parts.insert(0, later);
        }
        self.device(device).cached = parts;
    }

    /// Buffers of JAX, and what its allocator holds beside them.
    fn buffers(&mut self, ledger: &Ledger, event: &Event) {
        if let EventKind::Pjrt(pjrt) = &event.kind {
            for (device, holder, bytes) in self.buffers.event(ledger, pjrt) {
                let number = self.number(device, holder);
                if bytes >= 0 {
                    self.gains(device, number, Bytes(bytes as u64));
                } else {
                    self.loses(device, number, Bytes(bytes.unsigned_abs()));
                }
            }
        }
        for (device, owner, bytes, objects) in self.buffers.changed() {
            let holder = self.number(device, rest(Level::Arena, owner, 0));
            self.row(device, Row { holder, bytes, objects });
        }
    }

    fn trims(&mut self, event: &Event, device: i16, bytes: Bytes) {
        let Event { time, stack, .. } = *event;
        let it = self.emptying.entry(device).or_insert(Emptying { from: time, to: time, bytes: 0, stack });
        it.to = time;
        it.bytes = it.bytes.saturating_add(bytes.0);
    }

    fn emptied(&mut self, ledger: &Ledger, device: i16, emptying: Emptying) {
        let Emptying { from, to, bytes, stack } = emptying;
        let text = ledger.sites.site_name(ledger.sites.site_of(stack));
        let mark = Mark { kind: MarkKind::EmptyCache, from, to: Some(to), text, device, bytes, stack };
        self.marks.entry(MarkKind::EmptyCache).or_default().add(mark);
    }

    fn mark(&mut self, kind: MarkKind, from: Nanos, to: Option<Nanos>, text: String, bytes: u64) {
        let mark = Mark { kind, from, to, text, device: -1, bytes, stack: StackId(0) };
        self.marks.entry(kind).or_default().add(mark);
    }

    fn marks(&mut self, ledger: &Ledger, event: &Event) {
        match &event.kind {
            EventKind::Mark(mark) => {
                let text = || self.definitions.text(mark.text).unwrap_or_default().to_owned();
                match mark.action {
                    MarkAction::Push => {
                        let opened = (event.time, text());
                        let open = self.ranges.entry(event.thread).or_default();
                        if open.len() < 256 {
                            open.push(opened);
                        }
                    }
                    MarkAction::Pop => {
                        let opened = self.ranges.get_mut(&event.thread).and_then(Vec::pop);
                        if let Some((from, text)) = opened {
                            self.mark(MarkKind::Nvtx, from, Some(event.time), text, 0);
                        }
                    }
                    MarkAction::Start => {
                        let opened = (event.time, text());
                        self.processes_ranges.insert(mark.range, opened);
                    }
                    MarkAction::End => {
                        if let Some((from, text)) = self.processes_ranges.remove(&mark.range) {
                            self.mark(MarkKind::Nvtx, from, Some(event.time), text, 0);
                        }
                    }
                    MarkAction::Mark => {
                        let text = text();
                        self.mark(MarkKind::Nvtx, event.time, Some(event.time), text, 0);
                    }
                    MarkAction::NameThread => {}
                }
            }
            EventKind::NcclEnter(call) => {
                let name = self.definitions.api(call.api).map_or(call.op.name(), |api| &api.name).to_owned();
                self.calls.insert(call.call, (event.time, name, call.count));
            }
            EventKind::NcclExit(exit) => {
                if let Some((from, text, count)) = self.calls.remove(&exit.call) {
                    self.mark(MarkKind::Nccl, from, Some(event.time), text, count);
                }
            }
            EventKind::BlockAlloc(block) => {
                let given = self.emptying.remove(&block.device);
                if let Some(it) = given {
                    self.emptied(ledger, block.device, it);
                }
                let torch = ledger.torch(block.device).map(|torch| (torch.allocated.now, torch.reserved.now));
                let device = self.device(block.device);
                device.has_more_requests |= device.requests.len() >= MOST_REQUESTS;
                if let Some((allocated, reserved)) = torch.filter(|_| !device.has_more_requests) {
                    device.requests.push((event.time, allocated, reserved));
                }
            }
            _ => {}
        }
        if let Some(oom) = ledger.ran_out() {
            let text = "a request for memory failed".to_owned();
            let mark = Mark {
                kind: MarkKind::OutOfMemory,
                from: event.time,
                to: Some(event.time),
                text,
                device: oom.device,
                bytes: oom.bytes.0,
                stack: event.stack,
            };
            self.marks.entry(MarkKind::OutOfMemory).or_default().add(mark);
        }
    }
}

impl Watch for Collector<'_> {
    fn begin(&mut self, ledger: &mut Ledger) {
        ledger.keep_steps();
        self.devices.clear();
        self.tape.iter().for_each(|tape| tape.clear());
        self.marks.clear();
        self.n_born = 0;
        self.open.clear();
        self.ranges.clear();
        self.processes_ranges.clear();
        self.calls.clear();
        self.emptying.clear();
        self.pools.clear();
        self.buffers.clear();
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        for step in ledger.steps() {
            self.step(ledger, event, step);
        }
        let steps = ledger.steps().iter().filter_map(|step| match step {
            Step::Gained(object) | Step::Lost(object) => Some(object.device),
            Step::Block(_, block) | Step::BlockFreed(_, block) => Some(block.device),
            Step::Heap(.., block) => (block.device == HOST).then_some(HOST),
            _ => None,
        });
        let mut before = None;
        for device in steps {
            if before.replace(device) != Some(device) {
                self.cache(device);
            }
        }
        self.buffers(ledger, event);
        let mut touched = std::mem::take(&mut self.touched);
        for (device, rows) in touched.iter_mut().filter(|(_, rows)| !rows.is_empty()) {
            let device = *device;
            let (physical, torch) = match device {
                HOST => (ledger.host().now().bytes, ledger.host_blocks().now().bytes.0),
                _ => (
                    ledger.devices().get(&device).map_or(Bytes(0), |books| books.physical.now().bytes),
                    ledger.torch(device).map_or(0, |torch| torch.blocks.now().bytes.0),
                ),
            };
            let allocated = Bytes(torch.saturating_add(self.buffers.held(device)));
            let device = self.device(device);
            if (physical, allocated) > device.highest {
                device.highest = (physical, allocated);
                device.blocks.is_highest(event.time);
                device.grounds.is_highest(event.time);
            }
            device.history.change(event.time, rows, (physical, allocated));
            rows.clear();
        }
        self.touched = touched;
        self.marks(ledger, event);
    }
}
