//! What a device's memory goes to at chosen moments, in rows that are disjoint and add up to the driver's figure.
//!
//! ```text
//!  driver's figure = PyTorch's blocks by role + pools of CUDA graphs + what is free in PyTorch's segments
//!                  + NCCL, libraries, the program itself + page rounding
//!                  + context, code and the like (estimates from the driver's figures) + unaccounted
//! ```
//! `unaccounted` is what remains, with its sign. NVML is asked now and then: between two samples the driver's figure is what was
//! handed out at the moment, and what another sample charged beyond what was handed out at its time.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Action, Bytes, Device, Event, EventKind, MarkAction, Nanos, StackId, TextId};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::categories::Categories;
use crate::live::Highest;
use crate::lives::{Life, Lives, NEVER};
use crate::roles::{Role, Roles, roles};
use crate::story::{End, Story};
use gputrace_trace::ledger::pools::PoolId;
use gputrace_trace::ledger::{Cause, Ledger, Sampled, SiteId, Step, Watch};
use gputrace_trace::owners::{APPLICATION, JAX, NCCL, UNKNOWN};
use gputrace_trace::source::Source;

/// A server is ready when it has this share of the most that its weights and caches ever take.
const READY: f64 = 0.99;
/// A cache that is held for less than this share of all births and deaths of blocks is a request's.
const STATIC: u32 = 4;

macro_rules! rows {
    ($( $row:ident $key:literal $name:literal $meaning:literal, )*) => {
        /// What memory goes to.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Row { $( #[doc = $meaning] $row, )* }
        impl Row {
            /// All of them, in the order of the table.
            pub const ALL: &'static [Row] = &[ $( Row::$row, )* ];
            /// For programs.
            #[must_use]
            pub fn key(self) -> &'static str { match self { $( Row::$row => $key, )* } }
            /// For people.
            #[must_use]
            pub fn name(self) -> &'static str { match self { $( Row::$row => $name, )* } }
            /// What is in it.
            #[must_use]
            pub fn meaning(self) -> &'static str { match self { $( Row::$row => $meaning, )* } }
        }
    };
}

rows! {
    Weights "weights" "weights" "PyTorch blocks with the role of weights or parameters",
    KvCache "kv_cache" "KV cache" "PyTorch blocks with the role of a key-value cache",
    Activations "activations" "activations" "PyTorch blocks that come and go with a request or a step",
    Gradients "gradients" "gradients" "PyTorch blocks with the role of gradients",
    Optimizer "optimizer" "optimizer state" "PyTorch blocks with the role of optimizer state",
    Tensors "tensors" "other tensors" "PyTorch blocks with another role, or none",
    Graphs "graphs" "CUDA graphs' pools" "private PyTorch pools with captured graphs, including their free memory: nothing else may use it",
    GraphExecs "graph_execs" "CUDA graphs, by driver" "memory that the driver keeps for executable graphs and for nodes that allocate; partly an estimate",
    Workspaces "workspaces" "workspaces" "PyTorch blocks for cuBLAS",
    Nccl "nccl" "NCCL" "memory that NCCL requested from the driver",
    Libraries "libraries" "libraries" "memory that other libraries requested from the driver",
    Jax "jax" "JAX/XLA" "memory that JAX's allocator requested from the driver",
    Application "application" "the program itself" "memory that the program requested from the driver without a library, or with an unknown owner",
    Context "context" "CUDA context" "estimate: increase in charged memory when a context was created",
    Code "code" "kernel code" "estimate: increase in charged memory when modules were loaded",
    Driver "driver" "driver's pools, peers" "estimate: memory kept by stream-ordered pools, and page tables for imported memory",
    Stranded "stranded" "free, stranded" "free in PyTorch segments beside a block in use (inactive split): the driver cannot have it back",
    Cached "cached" "free, cached" "PyTorch segments that are wholly free: empty_cache releases them",
    Rounding "rounding" "page rounding" "memory in the driver's pages beyond the requested sizes",
    Unaccounted "unaccounted" "unaccounted" "the remainder of the driver's figure",
}

/// Where the sum of the rows comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Figure {
    /// What NVML charged to the process.
    Process,
    /// What NVML says of the whole card, as it does not know the process.
    Card,
    /// No figure of the driver's is in the trace: what was handed out.
    HandedOut,
}

impl Figure {
    /// For programs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Figure::Process => "nvml_process",
            Figure::Card => "nvml_card",
            Figure::HandedOut => "handed_out",
        }
    }
}

/// The rows at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bill {
    /// When.
    pub time: Nanos,
    /// Bytes of each row; those without any are left out.
    pub rows: BTreeMap<Row, i64>,
    /// Their sum.
    pub total: i64,
    /// Where that comes from.
    pub figure: Figure,
    /// When NVML was asked.
    pub sampled: Option<Nanos>,
    /// What was allocated is what it was when NVML was asked.
    pub is_sampled_then: bool,
    /// Used by others, and reserved by the driver; where the card's figure is known.
    pub others: Option<i64>,
    /// Free on the card.
    pub free: Option<i64>,
}

impl Bill {
    /// Bytes of a row.
    #[must_use]
    pub fn of(&self, row: Row) -> i64 {
        self.rows.get(&row).copied().unwrap_or(0)
    }
}

/// One thing that was held, by its number: a block, or an object of the driver's.
pub type Thing = (bool, u64);

/// Whose a [`Thing`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    /// In which row.
    pub row: Row,
    /// How large.
    pub bytes: u64,
    /// From where.
    pub site: SiteId,
    /// Free bytes of the segment that it keeps, alone or with others.
    pub pins: u64,
    /// A block's birth; for objects of the driver's that of the call.
    pub since: Nanos,
    /// The private pool it is in.
    pub pool: Option<PoolId>,
}

/// A moment that is shown.
#[derive(Clone, PartialEq, Debug)]
pub struct Column {
    /// `ready`, `peak`, `end`, or what the user called it.
    pub name: String,
    /// How it was found.
    pub why: String,
    /// The rows.
    pub bill: Bill,
    /// All that was held, but for the driver's own.
    pub items: FxHashMap<Thing, Item>,
}

/// The budget of a device.
pub struct Budget {
    /// Which.
    pub device: i16,
    /// The moments, in the order of the table.
    pub columns: Vec<Column>,
    /// The two moments that were requested.
    pub between: Option<(Column, Column)>,
    /// Lives of this device that are of a cache which is held long: indexes, ascending.
    pub cache: Vec<usize>,
}

/// Budgets of all devices with memory, and what they were made from.
pub struct Budgets {
    /// The events.
    pub story: Story,
    /// One for each device.
    pub devices: Vec<Budget>,
    /// Lives of blocks, and their addresses.
    pub course: Course,
}

/// An instant that a user names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Instant {
    /// So long after the start of the trace.
    After(Nanos),
    /// An NVTX mark, or a range's begin.
    Mark(String),
}

/// What is watched while the books are made.
#[derive(Default)]
pub struct Course {
    /// Lives of blocks.
    pub lives: Lives,
    /// Addresses of the blocks, in the order of [`Course::lives`].
    pub addrs: Vec<u64>,
    /// Begin and end of captures.
    pub captures: Vec<(Nanos, Nanos)>,
    highest: Highest,
    n_events: u64,
    /// After how many events each moment of the lives was.
    moments: Vec<u64>,
    /// Names of marks and of ranges that began, and after how many events.
    marks: Vec<(TextId, u64)>,
    /// After how many events a capture ended, or a graph was launched for the first time since.
    graphs: Vec<(u64, bool)>,
    /// When memory of each device was asked for, and what was held then, in blocks where there are any: the last times with so much.
    asked: BTreeMap<i16, Vec<(u64, u64)>>,
}

impl Watch for Course {
    fn begin(&mut self, ledger: &mut Ledger) {
        *self = Course::default();
        self.lives.begin(ledger);
        self.highest.begin(ledger);
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        self.n_events += 1;
        self.lives.event(ledger, event);
        self.highest.event(ledger, event);
        let mut asked = vec![];
        for step in ledger.steps() {
            match step {
                Step::Block(addr, block) => {
                    self.addrs.push(*addr);
                    asked.push(block.device);
                }
                Step::Gained(object) if object.kind.is_physical() => asked.push(object.device),
                _ => {}
            }
        }
        for device in asked {
            let blocks = ledger.torch(device).map_or(0, |torch| torch.blocks.now().bytes.0);
            let physical = || ledger.devices().get(&device).map_or(0, |books| books.physical.now().bytes.0);
            let held = if blocks > 0 { blocks } else { physical() };
            let asked = self.asked.entry(device).or_default();
            while asked.pop_if(|(_, before)| *before <= held).is_some() {}
            asked.push((self.n_events, held));
        }
        self.moments.resize(self.lives.n_moments as usize, self.n_events);
        match &event.kind {
            EventKind::Call(call) if call.result == Some(0) => match call.action {
                Action::CaptureBegin => self.captures.push((event.time, Nanos(u64::MAX))),
                Action::CaptureEnd => {
                    let open = self.captures.iter_mut().rev().find(|(_, end)| end.0 == u64::MAX);
                    if let Some(capture) = open {
                        capture.1 = event.time;
                    }
                    self.graphs.push((self.n_events, false));
                }
                Action::GraphLaunch if self.graphs.last().is_some_and(|(_, is_launch)| !is_launch) => {
                    self.graphs.push((self.n_events, true));
                }
                _ => {}
            },
            EventKind::Mark(mark) => match mark.action {
                MarkAction::Push | MarkAction::Start | MarkAction::Mark => {
                    self.marks.push((mark.text, self.n_events));
                }
                MarkAction::Pop | MarkAction::End | MarkAction::NameThread => {}
            },
            _ => {}
        }
    }
}

/// The budgets of all devices, at their moments and between two that are requested.
///
/// # Errors
/// There is no such mark, in words.
pub fn budgets(
    source: &Source,
    categories: &Categories,
    between: Option<&[Instant; 2]>,
) -> Result<Budgets, String> {
    let mut course = Course::default();
    let story = Story::watched(source, &mut course);
    course.lives.finish();
    let roles = roles(&course.lives, source.definitions(), &story.ledger.sites, categories);
    let rows: Vec<Row> = roles.of_lives.iter().map(|number| row_of(&roles, *number)).collect();
    let asked = between.map(|instants| course.places(source, &story, instants)).transpose()?;
    let mut devices: Vec<Budget> = vec![];
    let mut wanted: Vec<(u64, i16, usize)> = vec![];
    for device in course.devices(&story) {
        let cache = course.cache(device, &rows);
        let mut places = course.columns(&story, device, &rows);
        if let Some((names, at)) = &asked {
            places.extend(names.iter().zip(at).map(|(name, place)| (*place, name.clone(), String::new())));
        }
        let mut columns = vec![];
        for (place, name, why) in places {
            wanted.push((place, device, columns.len()));
            columns.push(Column { name, why, bill: Bill::nothing(), items: FxHashMap::default() });
        }
        devices.push(Budget { device, columns, between: None, cache });
    }
    let picture = Maker { story: &story, rows: &rows };
    visit(source, wanted, |(device, column), lives, ledger, time| {
        let (bill, items) = picture.bill(lives, ledger, device, time);
        if let Some(budget) = devices.iter_mut().find(|budget| budget.device == device) {
            (budget.columns[column].bill, budget.columns[column].items) = (bill, items);
        }
    });
    for budget in devices.iter_mut().filter(|_| asked.is_some()) {
        if let (Some(after), Some(before)) = (budget.columns.pop(), budget.columns.pop()) {
            budget.between = Some((before, after));
        }
    }
    Ok(Budgets { story, devices, course })
}

/// Goes through the events once, and shows the books at each place: device and column, open lives, books, time.
fn visit(
    source: &Source,
    mut wanted: Vec<(u64, i16, usize)>,
    mut see: impl FnMut((i16, usize), &Lives, &Ledger, Nanos),
) {
    wanted.sort_unstable();
    let (mut ledger, mut lives, mut n, mut time) = (Ledger::default(), Lives::default(), 0, Nanos(0));
    lives.begin(&mut ledger);
    let mut wanted = wanted.into_iter().peekable();
    let mut events = source.events();
    while let Some((place, device, column)) = wanted.peek().copied() {
        if place > n
            && let Some(event) = events.next()
        {
            n += 1;
            time = event.time;
            ledger.event(source.definitions(), &event);
            lives.event(&mut ledger, &event);
            continue;
        }
        wanted.next();
        see((device, column), &lives, &ledger, time);
    }
}

/// The row of a role. The user's own names count where they are those of rows.
fn row_of(roles: &Roles, number: u16) -> Row {
    let name = roles.names.get(usize::from(number)).map_or("", |(name, _)| name);
    let Some(role) = Role::ALL.iter().find(|role| role.name() == name) else {
        let is_named = |row: &&Row| row.name().eq_ignore_ascii_case(name) || row.key() == name;
        return Row::ALL.iter().find(is_named).copied().unwrap_or(Row::Tensors);
    };
    match role {
        Role::Parameters | Role::Weights => Row::Weights,
        Role::KvCache => Row::KvCache,
        Role::Activations | Role::Temporaries | Role::Serving => Row::Activations,
        Role::Gradients => Row::Gradients,
        Role::Optimizer => Row::Optimizer,
        Role::Workspaces => Row::Workspaces,
        Role::Kept | Role::Before | Role::Unknown => Row::Tensors,
    }
}

impl Course {
    fn devices(&self, story: &Story) -> Vec<i16> {
        let held = |device: &i16| self.highest.places().contains_key(device);
        story.ledger.devices().keys().copied().filter(|device| *device >= 0 && held(device)).collect()
    }

    /// Blocks of caches that are not the cache of one request: held for long, or to the end of a device's work, from a place that gave
    /// none back before (a run that ends when the server has just started).
    fn statics(&self, device: i16, rows: &[Row]) -> FxHashSet<usize> {
        let lives = || self.lives.list.iter().enumerate().filter(|(_, life)| life.device == device);
        let of_cache = || lives().filter(|(idx, _)| rows[*idx] == Row::KvCache);
        let last = lives().map(|(_, life)| life.born).max().unwrap_or(0);
        let passing: FxHashSet<StackId> =
            of_cache().filter(|(_, life)| life.died < last).map(|(_, life)| life.stack).collect();
        let is_static = |life: &Life| {
            life.died == NEVER
                || life.died - life.born > self.lives.n_moments / STATIC
                || (life.died > last && !passing.contains(&life.stack))
        };
        of_cache().filter(|(_, life)| is_static(life)).map(|(idx, _)| idx).collect()
    }

    /// Blocks of caches that are held for long, and those of the same places or sizes: a server that wakes up makes its cache again.
    fn cache(&self, device: i16, rows: &[Row]) -> Vec<usize> {
        let of_cache = || {
            let lives = self.lives.list.iter().enumerate();
            lives.filter(|(idx, life)| life.device == device && rows[*idx] == Row::KvCache)
        };
        let statics = self.statics(device, rows);
        let long: Vec<&Life> =
            of_cache().filter(|(idx, _)| statics.contains(idx)).map(|(_, life)| life).collect();
        let places: FxHashSet<StackId> = long.iter().map(|life| life.stack).collect();
        let sizes: FxHashSet<Bytes> = long.iter().map(|life| life.requested).collect();
        let is_it = |life: &Life| places.contains(&life.stack) || sizes.contains(&life.requested);
        of_cache().filter(|(_, life)| is_it(life)).map(|(idx, _)| idx).collect()
    }

    /// The moments of a device's table: after how many events, name, and how it was found.
    fn columns(&self, story: &Story, device: i16, rows: &[Row]) -> Vec<(u64, String, String)> {
        let mut columns = vec![];
        let mut served = 0;
        if let Some((place, why, held)) = self.ready(device, rows) {
            columns.push((place, "ready".to_owned(), why));
            served = held;
        }
        if let Some(place) = self.highest.places().get(&device) {
            let why = "allocated memory was at its highest, and within that time PyTorch had most in use";
            columns.push((*place, "peak".to_owned(), why.to_owned()));
        }
        let is_over = story.complete && !story.is_running && story.end().is_none_or(End::is_own);
        let asked = self.asked.get(&device).map_or(&[][..], |asked| asked);
        let last = asked.iter().rev().find(|(_, held)| *held >= served / 2).filter(|_| is_over);
        let (place, why) = match last {
            Some((last, _)) if served > 0 => {
                (*last, "the last request, while weights and caches existed; then the program ended")
            }
            Some((last, _)) => (*last, "the last request; then the program ended"),
            None if story.is_running => {
                (self.n_events, "the end of the trace so far: the process is still running")
            }
            None => (self.n_events, "the last event"),
        };
        let name = if story.is_running { "now" } else { "end" };
        columns.push((place, name.to_owned(), why.to_owned()));
        columns
    }

    /// When weights and caches were there, and the graphs that were captured before one of them was launched; and the most bytes
    /// of weights and caches.
    fn ready(&self, device: i16, rows: &[Row]) -> Option<(u64, String, u64)> {
        let statics = self.statics(device, rows);
        let of_server = |idx: usize| match rows[idx] {
            Row::Weights => self.lives.list[idx].device == device,
            Row::KvCache => statics.contains(&idx),
            _ => false,
        };
        let (mut held, mut course) = (0_u64, vec![]);
        for (moment, idx) in self.lives.moments().iter().copied().enumerate() {
            let life = self.lives.list.get(idx as usize).filter(|_| of_server(idx as usize));
            let Some(life) = life else { continue };
            let is_birth = life.born as usize == moment;
            held =
                if is_birth { held.saturating_add(life.bytes.0) } else { held.saturating_sub(life.bytes.0) };
            course.push((moment, held));
        }
        let most = course.iter().map(|(_, held)| *held).max().filter(|most| *most > 0)?;
        let (moment, _) = course.iter().find(|(_, held)| *held as f64 >= READY * most as f64)?;
        let place = *self.moments.get(*moment)?;
        let after = self.graphs.iter().skip_while(|(at, _)| *at <= place);
        let captured = after.take_while(|(_, is_launch)| !is_launch);
        let n = captured.clone().count();
        let what = "weights and caches exist";
        Some(match captured.last() {
            None => (place, what.to_owned(), most),
            Some((last, _)) => {
                let graphs = if n == 1 { "graph" } else { "graphs" };
                (*last, format!("{what}, and {n} {graphs} had been captured before the first launch"), most)
            }
        })
    }

    /// Where two instants are, and what they are called.
    fn places(
        &self,
        source: &Source,
        story: &Story,
        instants: &[Instant; 2],
    ) -> Result<([String; 2], [u64; 2]), String> {
        let mut from = 0;
        let mut found = [0; 2];
        let mut names = [String::new(), String::new()];
        for (instant, (found, name)) in instants.iter().zip(found.iter_mut().zip(&mut names)) {
            (*found, *name) = match instant {
                Instant::After(time) => {
                    let until = Nanos(story.start().0.saturating_add(time.0));
                    let place = source.events().take_while(|event| event.time <= until).count() as u64;
                    (place, gputrace_trace::words::time(*time))
                }
                Instant::Mark(wanted) => {
                    let is_it = |text: TextId| source.definitions().text(text) == Some(wanted);
                    let mut marks = self.marks.iter().filter(|(text, place)| *place > from && is_it(*text));
                    let place = marks.next().map(|(_, place)| *place);
                    (place.ok_or_else(|| self.no_mark(source, wanted))?, wanted.clone())
                }
            };
            from = *found;
        }
        Ok((names, found))
    }

    fn no_mark(&self, source: &Source, wanted: &str) -> String {
        const SHOWN: usize = 8;
        let mut known: Vec<&str> = vec![];
        for text in self.marks.iter().filter_map(|(text, _)| source.definitions().text(*text)) {
            if !known.contains(&text) && known.len() < SHOWN {
                known.push(text);
            }
        }
        match known.is_empty() {
            true => format!("no NVTX mark `{wanted}`: the program made none (use times: 10s,20s)"),
            false => format!("no NVTX mark `{wanted}` (from there on); the marks are {}", known.join(", ")),
        }
    }
}

/// Makes bills of the books.
struct Maker<'a> {
    story: &'a Story,
    /// Of each life.
    rows: &'a [Row],
}

/// A part of PyTorch's memory that is one for the driver: a segment, or pages of one that lie together.
struct Range {
    start: u64,
    end: u64,
    pool: Option<PoolId>,
    in_use: u64,
}

impl Maker<'_> {
    fn bill(
        &self,
        lives: &Lives,
        ledger: &Ledger,
        device: i16,
        time: Nanos,
    ) -> (Bill, FxHashMap<Thing, Item>) {
        let mut items = FxHashMap::default();
        let mut rows: BTreeMap<Row, i64> = BTreeMap::new();
        let mut add = |row: Row, bytes: u64| *rows.entry(row).or_default() += signed(bytes);
        let ranges = self.blocks(lives, ledger, device, &mut items);
        let mut segments = 0_u64;
        for object in ledger.live().filter(|object| object.device == device && object.kind.is_physical()) {
            if object.torch && !ranges.is_empty() {
                segments = segments.saturating_add(object.bytes.0);
                continue;
            }
            let row = if object.torch { Row::Tensors } else { owner_row(ledger.sites.owner(object.owner)) };
            let (bytes, site, since) = (object.bytes.0, object.site, object.since);
            items.insert((false, object.serial), Item { row, bytes, site, pins: 0, since, pool: None });
        }
        items.values().for_each(|item| add(item.row, item.bytes));
        // What is free in PyTorch's segments: of graphs, beside something, or nobody's.
        let mut in_ranges = 0_u64;
        for range in &ranges {
            let free = (range.end - range.start).saturating_sub(range.in_use);
            in_ranges = in_ranges.saturating_add(range.end - range.start);
            match (is_of_graphs(ledger, device, range.pool), range.in_use) {
                (true, _) => add(Row::Graphs, free),
                (false, 0) => add(Row::Cached, free),
                (false, _) => add(Row::Stranded, free),
            }
        }
        // Pages that are made and not mapped.
        add(Row::Cached, segments.saturating_sub(in_ranges));
        if let Some(books) = ledger.devices().get(&device) {
            add(Row::Rounding, books.pages.rounding().0);
            add(Row::GraphExecs, books.graphs_kept.now.0);
        }
        (self.with_figure(device, time, rows), items)
    }

    /// PyTorch's segments. Its blocks in them become items.
    fn blocks(
        &self,
        lives: &Lives,
        ledger: &Ledger,
        device: i16,
        items: &mut FxHashMap<Thing, Item>,
    ) -> Vec<Range> {
        let has_blocks = ledger.torch(device).is_some_and(|torch| torch.blocks.peak().0 > 0);
        let mut ranges: Vec<Range> = vec![];
        for (start, bytes, is_mapped) in ledger.torch_ranges(device).into_iter().filter(|_| has_blocks) {
            let (end, pool) = (start.saturating_add(bytes.0), ledger.torch_pools.at(device, start));
            match ranges.last_mut().filter(|last| is_mapped && last.end == start && last.pool == pool) {
                Some(last) => last.end = end,
                None => ranges.push(Range { start, end, pool, in_use: 0 }),
            }
        }
        let open = lives.open_lives();
        let mut placed: Vec<(usize, u64)> = vec![];
        for (addr, block) in ledger.live_blocks().filter(|(_, block)| block.device == device) {
            let idx = ranges.partition_point(|range| range.end <= addr);
            let Some(range) = ranges.get_mut(idx).filter(|range| range.start <= addr) else { continue };
            range.in_use = range.in_use.saturating_add(block.bytes.0);
            let role = open.get(&addr).and_then(|life| self.rows.get(*life as usize)).copied();
            let row = match role.unwrap_or(Row::Tensors) {
                Row::KvCache => Row::KvCache,
                _ if is_of_graphs(ledger, device, range.pool) => Row::Graphs,
                row => row,
            };
            let item = Item {
                row,
                bytes: block.bytes.0,
                site: block.site,
                pins: 0,
                since: block.since,
                pool: range.pool,
            };
            items.insert((true, block.serial), item);
            placed.push((idx, block.serial));
        }
        for (idx, serial) in placed {
            if let (Some(range), Some(item)) = (ranges.get(idx), items.get_mut(&(true, serial))) {
                item.pins = (range.end - range.start).saturating_sub(range.in_use);
            }
        }
        ranges
    }

    /// Adds what only the driver's figures show.
    fn with_figure(&self, device: i16, time: Nanos, mut rows: BTreeMap<Row, i64>) -> Bill {
        let handed_out: i64 = rows.values().sum();
        let samples = self.story.ledger.devices().get(&device).map_or(&[][..], |books| &books.samples.kept);
        let Some((sampled, figure)) = judging(samples, time, handed_out) else {
            let rows = without_nothing(rows);
            let (total, figure) = (handed_out, Figure::HandedOut);
            return Bill { rows, total, figure, time, ..Bill::nothing() };
        };
        for cause in Cause::ALL {
            let row = match cause {
                Cause::Context => Row::Context,
                Cause::Code => Row::Code,
                Cause::Graph => Row::GraphExecs,
                Cause::Pool | Cause::Peer => Row::Driver,
            };
            *rows.entry(row).or_default() += signed(sampled.of(cause).0);
        }
        let charged = match figure {
            Figure::Process => sampled.process_used.unwrap_or_default(),
            Figure::Card | Figure::HandedOut => sampled.device_used,
        };
        let then = signed(sampled.tracked.0) + signed(sampled.rounding.0);
        let since = handed_out - then;
        let total = signed(charged.0) + since;
        let known: i64 = rows.values().sum();
        *rows.entry(Row::Unaccounted).or_default() += total - known;
        let others = if figure == Figure::Process { others(samples, sampled) } else { 0 };
        let card = self.story.device(device).map(|device: &Device| signed(device.total.0));
        Bill {
            time,
            rows: without_nothing(rows),
            total,
            figure,
            sampled: Some(sampled.time),
            is_sampled_then: since == 0,
            others: Some(others),
            free: card.filter(|card| *card > 0).map(|card| card - others - total),
        }
    }
}

impl Bill {
    fn nothing() -> Bill {
        Bill {
            time: Nanos(0),
            rows: BTreeMap::new(),
            total: 0,
            figure: Figure::HandedOut,
            sampled: None,
            is_sampled_then: false,
            others: None,
            free: None,
        }
    }
}

fn without_nothing(mut rows: BTreeMap<Row, i64>) -> BTreeMap<Row, i64> {
    rows.retain(|row, bytes| *bytes != 0 || *row == Row::Unaccounted);
    rows
}

/// What others use of the card, and the driver has reserved. The figures of a process and of the card are not of one instant:
/// where less is used of the card than by the process, another sample says it.
fn others(samples: &[Sampled], sampled: &Sampled) -> i64 {
    let others = |sampled: &Sampled| {
        Some(signed(sampled.device_used.0) - signed(sampled.process_used?.0)).filter(|others| *others >= 0)
    };
    let by_distance = || {
        let known = samples.iter().filter(|other| others(other).is_some());
        known.min_by_key(|other| other.time.0.abs_diff(sampled.time.0)).and_then(others)
    };
    others(sampled).or_else(by_distance).unwrap_or(0)
}

/// The sample that a time is judged by: one in which anything was charged, to the process where NVML knows it, else to the card.
/// Figures that have not changed are not sampled again, so each counts until the next. Where what was handed out is not what it was
/// at the last sample, that is out of date: the next one knows the contexts and the code of the time.
fn judging(samples: &[Sampled], time: Nanos, handed_out: i64) -> Option<(&Sampled, Figure)> {
    let of_process = |sampled: &&Sampled| sampled.process_used.is_some_and(|used| used.0 > 0);
    let of_card = |sampled: &&Sampled| sampled.process_used.is_none() && sampled.device_used.0 > 0;
    let known: Vec<&Sampled> = samples.iter().filter(of_process).collect();
    let (known, figure) = match known.is_empty() {
        false => (known, Figure::Process),
        true => (samples.iter().filter(of_card).collect(), Figure::Card),
    };
    let next = known.partition_point(|sampled| sampled.time <= time);
    let (before, after) = (next.checked_sub(1).map(|idx| known[idx]), known.get(next).copied());
    let fits = |sampled: &&Sampled| signed(sampled.tracked.0) + signed(sampled.rounding.0) == handed_out;
    let sampled = before.filter(fits).or(after.filter(fits)).or(after).or(before)?;
    Some((sampled, figure))
}

/// Graphs were captured into the pool.
fn is_of_graphs(ledger: &Ledger, device: i16, pool: Option<PoolId>) -> bool {
    pool.is_some_and(|id| {
        ledger.torch_pools.pools.get(&(device, id)).is_some_and(|pool| !pool.graphs.is_empty())
    })
}

fn owner_row(owner: &str) -> Row {
    match owner {
        NCCL => Row::Nccl,
        JAX => Row::Jax,
        APPLICATION | UNKNOWN => Row::Application,
        _ => Row::Libraries,
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
