//! What is held at one moment, by owner, place and full stack: for call trees, flame graphs and differences.
//!
//! A segment is shown as its blocks, under the code that requested them, and its unused rest. So the parts of a device
//! always add up to what the driver had handed out.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Event, EventKind, Frame, Module, Nanos, Stack, StackId};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use crate::categories::Categories;
use crate::lives::Lives;
use crate::roles::roles;
use crate::story::Story;
use gputrace_trace::Definitions;
use gputrace_trace::backward::{place, python_lines};
use gputrace_trace::ledger::{Block, Ledger, Object, OwnerId, PhaseId, SiteId, Unwatched, Watch};
use gputrace_trace::owners::{JAX, TORCH, file_name};
use gputrace_trace::source::Source;
use gputrace_trace::words::time;

/// Which moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum When {
    /// When the driver had handed out most on the device, and of that time, when PyTorch had most of it allocated.
    Peak,
    /// At the end, or before the context went away with everything.
    End,
    /// This long after the start of the trace.
    At(Nanos),
    /// As [`When::Peak`], between two times after the start of the trace.
    Within(Nanos, Nanos),
    /// As [`When::Peak`], in the training step of this number.
    Step(u64),
}

impl When {
    /// From when to when, as the trace counts time, where it began at `start`. When a step was, only its [`span`] says.
    #[must_use]
    pub fn since(self, start: Nanos) -> (Nanos, Nanos) {
        let since = |time: Nanos| Nanos(start.0.saturating_add(time.0));
        match self {
            When::Peak | When::End | When::Step(_) => (Nanos(0), Nanos(u64::MAX)),
            When::At(time) => (Nanos(0), since(time)),
            When::Within(from, to) => (since(from), since(to)),
        }
    }
}

/// What kind of thing is held.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize, Serialize)]
pub enum Level {
    /// Handed out by the driver.
    Driver,
    /// A block of PyTorch.
    Block,
    /// Reserved by PyTorch and not in use.
    Cached,
    /// A buffer of JAX.
    Buffer,
    /// Held by JAX's allocator, and in no buffer.
    Arena,
}

impl Level {
    /// What is left of an allocator's memory, and has no place in the program.
    #[must_use]
    pub fn is_rest(self) -> bool {
        match self {
            Level::Cached | Level::Arena => true,
            Level::Driver | Level::Block | Level::Buffer => false,
        }
    }
}

/// Memory held in the same way from the same place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Holder {
    /// On which device.
    pub device: i16,
    /// Its kind.
    pub level: Level,
    /// Whose; of blocks and cache that is PyTorch.
    pub owner: OwnerId,
    /// From where, in short.
    pub site: SiteId,
    /// From where, in full.
    pub stack: StackId,
    /// For which stream, where that was seen.
    pub stream: Option<u64>,
    /// Which of [`View::parts`] it belongs to; 0 where none were requested.
    pub part: u32,
}

/// What else separates holders, where it was requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Parts {
    /// Nothing.
    #[default]
    None,
    /// The program's phases: NVTX ranges.
    Phases,
    /// What PyTorch's blocks are for, see [`crate::roles`]. Needs memory for every block.
    Roles,
}

/// Memory held, and the story that it belongs to.
pub struct View {
    /// The events.
    pub story: Story,
    /// Of all devices that held anything.
    pub pictures: Vec<Picture>,
    /// Names of the parts that were requested, by number.
    pub parts: Vec<String>,
}

/// Memory held at a moment of one device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Picture {
    /// Which device.
    pub device: i16,
    /// When.
    pub time: Nanos,
    /// By whom: bytes and number of objects.
    pub held: BTreeMap<Holder, (Bytes, u64)>,
    /// The objects by their size: how many there are of each. What PyTorch keeps unused has no objects.
    pub sizes: BTreeMap<Bytes, u64>,
}

impl Picture {
    /// All of it.
    #[must_use]
    pub fn total(&self) -> Bytes {
        Bytes(self.held.values().fold(0, |sum, (bytes, _)| sum.saturating_add(bytes.0)))
    }
}

/// Pictures of all devices that held anything, and the story that they belong to.
#[must_use]
pub fn pictures(source: &Source, when: When) -> (Story, Vec<Picture>) {
    pictures_of(source, when, picture)
}

fn pictures_of(
    source: &Source,
    when: When,
    picture: impl Fn(&Ledger, i16, Nanos) -> Picture,
) -> (Story, Vec<Picture>) {
    let mut highest = Highest::default();
    let story = Story::watched(source, &mut highest);
    let mut pictures = vec![];
    match places(source, &story, &highest, when) {
        None => {
            let (ledger, devices) = (&story.ledger, story.ledger.devices().keys());
            pictures.extend(devices.map(|device| picture(ledger, *device, ledger.run.last)));
        }
        Some(places) => {
            visit(source, &places, |ledger, device, time| pictures.push(picture(ledger, device, time)));
        }
    }
    (story, sorted(pictures))
}

/// The same, with holders separated by phase or role.
#[must_use]
pub fn view(source: &Source, when: When, parts: Parts, categories: &Categories) -> View {
    match parts {
        Parts::None => {
            let (story, pictures) = pictures(source, when);
            View { story, pictures, parts: vec![String::new()] }
        }
        Parts::Phases => by_phase(source, when),
        Parts::Roles => by_role(source, when, categories),
    }
}

fn by_phase(source: &Source, when: When) -> View {
    let (story, pictures) = pictures_of(source, when, |ledger, device, time| {
        parted(ledger, device, time, &|_, block| block.phase.0, &|object| object.phase.0)
    });
    let path = |id| match story.ledger.phases.path(PhaseId(id)) {
        "" => "(outside any range)".to_owned(),
        path => path.to_owned(),
    };
    let n_phases = u32::try_from(story.ledger.phases.len()).unwrap_or(u32::MAX);
    let parts = (0..n_phases).map(path).collect();
    View { story, pictures, parts }
}

/// Roles follow from whole lives, so all of the trace is read before the moment is looked at; a life has the same number
/// in both readings.
fn by_role(source: &Source, when: When, categories: &Categories) -> View {
    let mut watches = (Highest::default(), Lives::default());
    let story = Story::watched(source, &mut watches);
    let (highest, mut lives) = watches;
    let open_at_end = lives.open_lives();
    lives.finish();
    let roles = roles(&lives, source.definitions(), &story.ledger.sites, categories);
    let picture = |open: &FxHashMap<u64, u32>, ledger: &Ledger, device, time| {
        let role = |addr: u64| roles.of_lives.get(*open.get(&addr)? as usize);
        let of_block = |addr, _: &Block| role(addr).map_or(0, |role| u32::from(*role) + 1);
        parted(ledger, device, time, &of_block, &|_| 0)
    };
    let mut pictures = vec![];
    match places(source, &story, &highest, when) {
        None => {
            let (ledger, devices) = (&story.ledger, story.ledger.devices().keys());
            pictures.extend(devices.map(|device| picture(&open_at_end, ledger, *device, ledger.run.last)));
        }
        Some(places) => {
            let mut lives = Lives::default();
            visit_watched(source, &places, &mut lives, |lives, ledger, device, time| {
                pictures.push(picture(&lives.open_lives(), ledger, device, time));
            });
        }
    }
    let names = roles.names.into_iter().map(|(name, _)| name);
    let parts = std::iter::once("(no role)".to_owned()).chain(names).collect();
    View { story, pictures: sorted(pictures), parts }
}

fn sorted(mut pictures: Vec<Picture>) -> Vec<Picture> {
    pictures.retain(|picture| !picture.held.is_empty());
    pictures.sort_by_key(|picture| picture.device);
    pictures
}

/// After how many events to look at each device; `None` for the end.
fn places(source: &Source, story: &Story, highest: &Highest, when: When) -> Option<BTreeMap<i16, u64>> {
    match when {
        When::End => None,
        When::Peak => Some(highest.places()),
        When::At(_) => {
            let (_, time) = span(story, when).unwrap_or_default();
            let before = source.events().take_while(|event| event.time <= time).count() as u64;
            Some(story.ledger.devices().keys().map(|device| (*device, before)).collect())
        }
        When::Within(..) | When::Step(_) => Some(match span(story, when) {
            Ok((from, to)) => highest_within(source, from, to),
            Err(_) => BTreeMap::new(),
        }),
    }
}

/// From when to when, as the trace counts time; for a single moment, from the start.
///
/// # Errors
/// There is no such step, or the trace ends before that range, in words.
pub fn span(story: &Story, when: When) -> Result<(Nanos, Nanos), String> {
    let number = match when {
        When::Step(number) => number,
        When::Within(from, _) if from > story.since_start(story.ledger.run.last) => {
            let (end, from) = (time(story.since_start(story.ledger.run.last)), time(from));
            return Err(format!("the trace ends at {end}, before the range begins at {from}"));
        }
        When::Peak | When::End | When::At(_) | When::Within(..) => return Ok(when.since(story.start())),
    };
    let steps = story.ledger.training().map_or(&[][..], |training| &training.steps);
    match (steps.iter().find(|step| step.number == number), steps) {
        (Some(step), _) => Ok((step.begin, step.end.unwrap_or(story.ledger.run.last))),
        (None, []) => {
            Err(format!("no step {number}: the program's steps are not known (use a time, 10s..20s)"))
        }
        (None, [first, .., last]) => {
            Err(format!("no step {number}: steps are {} to {}", first.number, last.number))
        }
        (None, [only]) => Err(format!("no step {number}: the only step is {}", only.number)),
    }
}

/// After how many events each device held most between two times.
fn highest_within(source: &Source, from: Nanos, to: Nanos) -> BTreeMap<i16, u64> {
    let (definitions, mut ledger) = (source.definitions(), Ledger::default());
    let mut highest = Highest::default();
    for event in source.events().take_while(|event| event.time <= to) {
        ledger.event(definitions, &event);
        if event.time < from {
            highest.n_events += 1;
        } else {
            highest.event(&mut ledger, &event);
        }
    }
    highest.places()
}

/// After how many events each device was at its peak.
#[derive(Default)]
pub(super) struct Highest {
    n_events: u64,
    /// An event was compared. After that, a free of a block cannot make anything higher.
    has_begun: bool,
    devices: BTreeMap<i16, Peak>,
}

#[derive(Clone, Copy, Default)]
struct Peak {
    physical: Bytes,
    allocated: Bytes,
    event: u64,
}

impl Highest {
    /// The events after which each device that held anything held most.
    pub(super) fn places(&self) -> BTreeMap<i16, u64> {
        self.devices.iter().map(|(device, peak)| (*device, peak.event)).collect()
    }
}

impl Watch for Highest {
    fn begin(&mut self, _ledger: &mut Ledger) {
        *self = Highest::default();
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        self.n_events += 1;
        if std::mem::replace(&mut self.has_begun, true) && matches!(event.kind, EventKind::BlockFree(_)) {
            return;
        }
        for (device, books) in ledger.devices() {
            let physical = books.physical.now().bytes;
            if physical.0 == 0 {
                continue;
            }
            let best = self.devices.entry(*device).or_default();
            let torch = || ledger.torch(*device).map_or(0, |torch| torch.blocks.now().bytes.0);
            let jax = || books.pjrt.as_ref().map_or(0, |pjrt| pjrt.buffers.now().bytes.0);
            let allocated = || Bytes(torch().saturating_add(jax()));
            if physical > best.physical || (physical == best.physical && allocated() > best.allocated) {
                *best = Peak { physical, allocated: allocated(), event: self.n_events };
            }
        }
    }
}

/// Shows the books of each device after that many events of the trace.
pub fn visit(source: &Source, places: &BTreeMap<i16, u64>, mut see: impl FnMut(&Ledger, i16, Nanos)) {
    visit_watched(source, places, &mut Unwatched, |_, ledger, device, time| see(ledger, device, time));
}

/// The same, with a watch that has seen the events until then.
fn visit_watched<W: Watch>(
    source: &Source,
    places: &BTreeMap<i16, u64>,
    watch: &mut W,
    mut see: impl FnMut(&W, &Ledger, i16, Nanos),
) {
    let (definitions, last) = (source.definitions(), places.values().copied().max().unwrap_or(0));
    let mut ledger = Ledger::default();
    watch.begin(&mut ledger);
    for (event, n) in source.events().zip(1..=last) {
        ledger.event(definitions, &event);
        watch.event(&mut ledger, &event);
        for (device, _) in places.iter().filter(|(_, place)| **place == n) {
            see(watch, &ledger, *device, event.time);
        }
    }
}

/// Memory of a device held now.
pub fn picture(ledger: &Ledger, device: i16, time: Nanos) -> Picture {
    parted(ledger, device, time, &|_, _| 0, &|_| 0)
}

/// The same, in parts.
fn parted(
    ledger: &Ledger,
    device: i16,
    time: Nanos,
    of_block: &dyn Fn(u64, &Block) -> u32,
    of_object: &dyn Fn(&Object) -> u32,
) -> Picture {
    let mut held: BTreeMap<Holder, (Bytes, u64)> = BTreeMap::new();
    let mut sizes: BTreeMap<Bytes, u64> = BTreeMap::new();
    let mut add = |holder: Holder, bytes: Bytes| {
        if !holder.level.is_rest() {
            *sizes.entry(bytes).or_default() += 1;
        }
        let (sum, n) = held.entry(holder).or_default();
        sum.0 = sum.0.saturating_add(bytes.0);
        *n += 1;
    };
    let mut in_blocks = 0u64;
    let mut segments = 0u64;
    let torch_owner = torch_owner(ledger);
    let has_blocks = ledger.torch(device).is_some_and(|torch| torch.blocks.peak().0 > 0);
    for (addr, block) in ledger.live_blocks().filter(|(_, block)| block.device == device) {
        in_blocks = in_blocks.saturating_add(block.bytes.0);
        let (site, stack, stream, part) = (block.site, block.stack, block.stream, of_block(addr, block));
        let holder = Holder { device, level: Level::Block, owner: torch_owner, site, stack, stream, part };
        add(holder, block.bytes);
    }
    let (mut in_buffers, mut arena, mut jax_owner) = (0u64, 0u64, OwnerId(u32::MAX));
    let has_buffers = ledger.devices().get(&device).is_some_and(|books| books.pjrt.is_some());
    for object in ledger.live().filter(|object| object.device == device && object.kind.is_physical()) {
        if has_buffers && ledger.sites.owner(object.owner) == JAX {
            (arena, jax_owner) = (arena.saturating_add(object.bytes.0), object.owner);
            continue;
        }
        if object.torch && has_blocks {
            segments = segments.saturating_add(object.bytes.0);
            continue;
        }
        let (owner, site, stack) = (object.owner, object.site, object.stack);
        let part = of_object(object);
        add(Holder { device, level: Level::Driver, owner, site, stack, stream: None, part }, object.bytes);
    }
    for (_, buffer) in ledger.live_buffers().filter(|(_, buffer)| buffer.device == device) {
        in_buffers = in_buffers.saturating_add(buffer.bytes.0);
        let (site, stack) = (buffer.site, buffer.stack);
        let holder =
            Holder { device, level: Level::Buffer, owner: jax_owner, site, stack, stream: None, part: 0 };
        add(holder, buffer.bytes);
    }
    let unused = arena.saturating_sub(in_buffers);
    if unused > 0 {
        let (site, stack) = (SiteId(u32::MAX), StackId(0));
        add(
            Holder { device, level: Level::Arena, owner: jax_owner, site, stack, stream: None, part: 0 },
            Bytes(unused),
        );
    }
    let cached = segments.saturating_sub(in_blocks);
    if cached > 0 {
        let (site, stack) = (SiteId(u32::MAX), StackId(0));
        add(
            Holder { device, level: Level::Cached, owner: torch_owner, site, stack, stream: None, part: 0 },
            Bytes(cached),
        );
    }
    Picture { device, time, held, sizes }
}

fn torch_owner(ledger: &Ledger) -> OwnerId {
    let torch = ledger.live().find(|object| object.torch).map(|object| object.owner);
    torch.unwrap_or(OwnerId(u32::MAX))
}

/// Unused memory, as a line of a stack.
pub const CACHED: &str = "(reserved by PyTorch, used by nobody)";
/// Memory that JAX's allocator holds beside buffers, as a line of a stack.
pub const ARENA: &str = "(held by JAX's allocator, in no buffer: temporaries, free)";
/// Memory requested without a recorded stack, as a line of a stack.
pub const NO_STACK: &str = "(no stack recorded)";

/// A line of a stack in words.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Line {
    /// Function, or file and offset.
    pub name: String,
    /// Source file, or loaded file; may be empty.
    pub file: String,
    /// From 1; 0 where unknown.
    pub line: u32,
}

impl std::fmt::Display for Line {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.file.is_empty(), self.line) {
            (true, _) => write!(to, "{}", self.name),
            (false, 0) => write!(to, "{} ({})", self.name, file_name(&self.file)),
            (false, line) => write!(to, "{} ({}:{line})", self.name, file_name(&self.file)),
        }
    }
}

/// Whether native frames are shown beside lines of Python.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Native {
    /// Only where there is no Python.
    #[default]
    Hidden,
    /// All of them.
    Shown,
}

/// Turns stacks into words, each once.
pub struct Lines<'a> {
    definitions: &'a dyn Definitions,
    native: Native,
    stacks: FxHashMap<StackId, Vec<Line>>,
}

impl<'a> Lines<'a> {
    /// For the stacks of a trace.
    #[must_use]
    pub fn new(definitions: &'a dyn Definitions, native: Native) -> Lines<'a> {
        Lines { definitions, native, stacks: FxHashMap::default() }
    }

    /// The definitions of its stacks.
    pub fn definitions(&self) -> &'a dyn Definitions {
        self.definitions
    }

    /// The lines of a stack, outermost first; none where no stack was recorded.
    pub fn of(&mut self, stack: StackId) -> &[Line] {
        let (definitions, native) = (self.definitions, self.native);
        self.stacks.entry(stack).or_insert_with(|| {
            definitions.stack(stack).map_or_else(Vec::new, |stack| lines(definitions, stack, native))
        })
    }

    /// The lines of a holder, outermost first, never none.
    pub fn of_holder(&mut self, holder: &Holder) -> Vec<Line> {
        let only = |name: &str| vec![Line { name: name.into(), ..Line::default() }];
        if holder.level == Level::Cached {
            return only(CACHED);
        }
        if holder.level == Level::Arena {
            return only(ARENA);
        }
        match self.of(holder.stack) {
            [] => only(NO_STACK),
            lines => lines.to_vec(),
        }
    }
}

/// The lines of a stack, outermost first. What the backward pass did hangs below the line of the forward pass.
fn lines(definitions: &dyn Definitions, stack: &Stack, native: Native) -> Vec<Line> {
    let place = place(definitions, stack);
    let mut lines = frames(definitions, place.stack, native);
    if !place.mark.is_empty() {
        let caller = if place.caller.is_empty() { String::new() } else { format!(", {}", place.caller) };
        lines.push(Line { name: format!("({}{caller})", place.mark), ..Line::default() });
    }
    // A thread of autograd's own: what it runs of Python is inside of the operation.
    let has_own_python = stack.backward.as_ref().is_some_and(|backward| backward.caller.0 != 0)
        && python_lines(definitions, stack).next().is_some();
    if place.is_elsewhere && (native == Native::Shown || has_own_python) {
        lines.extend(frames(definitions, stack, native));
    }
    lines
}

fn frames(definitions: &dyn Definitions, stack: &Stack, native: Native) -> Vec<Line> {
    let has_python = python_lines(definitions, stack).next().is_some();
    let is_shown = |frame: &&Frame| match frame {
        Frame::Python { .. } => true,
        Frame::Native { module, .. } => match native {
            Native::Hidden => !has_python,
            Native::Shown => !module.and_then(|id| definitions.module(id)).is_some_and(is_ours),
        },
    };
    let frames = stack.frames.iter().rev().filter_map(|id| definitions.frame(*id)).filter(is_shown);
    frames.map(|frame| line(definitions, frame)).collect()
}

/// The library that recorded: the program did not ask for it.
fn is_ours(module: &Module) -> bool {
    file_name(&module.path) == "libgputrace.so"
}

/// A frame in words.
pub fn line(definitions: &dyn Definitions, frame: &Frame) -> Line {
    match frame {
        Frame::Python { function, file, line } => {
            Line { name: function.clone(), file: file.clone(), line: *line }
        }
        Frame::Native { address, module, function, file, line, .. } => {
            let module = module.and_then(|id| definitions.module(id));
            let path = module.map_or("", |module| &module.path);
            let name = match (function.is_empty(), module) {
                (false, _) => function.clone(),
                (true, Some(module)) => {
                    format!("{}+{:#x}", file_name(path), address.wrapping_sub(module.bias))
                }
                (true, None) => format!("{address:#x}"),
            };
            let file = if file.is_empty() { path.to_owned() } else { file.clone() };
            Line { name, file, line: *line }
        }
    }
}

/// Who a holder's memory belongs to, in words.
#[must_use]
pub fn owner<'a>(ledger: &'a Ledger, holder: &Holder) -> &'a str {
    match holder.level {
        Level::Driver => ledger.sites.owner(holder.owner),
        Level::Block | Level::Cached => TORCH,
        Level::Buffer | Level::Arena => JAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_trace::scene::{ledger, recording};

    const SCENE: &str = "Create handle=n bytes=100 by=libnccl.so.2
         Alloc addr=a bytes=2M by=libc10_cuda.so
         block addr=a bytes=512 requested=400 allocated=512 reserved=2M by=inner@/job/a.py:2,outer@/job/a.py:9
         block addr=b bytes=1K requested=1K allocated=1536 reserved=2M by=inner@/job/a.py:2,outer@/job/a.py:9
         free addr=a bytes=512 allocated=1K reserved=2M
         Release handle=n
         free addr=b bytes=1K
         Free addr=a";

    fn shown(when: When) -> Vec<String> {
        let source = Source::of("train.gtr", recording(SCENE));
        let (story, pictures) = pictures(&source, when);
        let mut lines = Lines::new(source.definitions(), Native::Hidden);
        let mut shown = vec![];
        for picture in &pictures {
            for (holder, (bytes, n)) in &picture.held {
                let stack: Vec<_> = lines.of_holder(holder).iter().map(ToString::to_string).collect();
                shown.push(format!("{} {} {n} {}", owner(&story.ledger, holder), bytes.0, stack.join(" < ")));
            }
            if when == When::Peak {
                assert_eq!(picture.total(), story.ledger.devices()[&picture.device].physical.peak());
            }
        }
        shown.sort();
        shown
    }

    #[test]
    fn the_parts_add_up_to_the_peak() {
        assert_eq!(
            shown(When::Peak),
            [
                "NCCL 100 1 libnccl.so.2+0x10 (libnccl.so.2)",
                "PyTorch 1536 2 outer (a.py:9) < inner (a.py:2)",
                "PyTorch 2095616 1 (reserved by PyTorch, used by nobody)",
            ]
        );
    }

    /// The lines of one block's stack, outermost first.
    fn lines_of(by: &str, native: Native) -> Vec<String> {
        let scene = format!(
            "Alloc addr=a bytes=2M by=libc10_cuda.so
             block addr=a bytes=512 requested=400 allocated=512 reserved=2M by={by}"
        );
        let source = Source::of("train.gtr", recording(&scene));
        let (_, pictures) = pictures(&source, When::Peak);
        let mut lines = Lines::new(source.definitions(), native);
        let holder = pictures[0].held.keys().find(|holder| holder.level == Level::Block).expect("one block");
        lines.of_holder(holder).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn native_frames_hide_behind_python_unless_asked_for() {
        let by = "empty@libtorch.so,enter@libgputrace.so,f@/job/a.py:2";
        assert_eq!(lines_of(by, Native::Hidden), ["f (a.py:2)"]);
        assert_eq!(lines_of(by, Native::Shown), ["f (a.py:2)", "empty (libtorch.so)"]);
        assert_eq!(lines_of("work@job,main@job", Native::Hidden), ["main (job)", "work (job)"]);
    }

    #[test]
    fn the_backward_pass_hangs_below_the_line_of_the_forward_pass() {
        let by = "mm@libtorch.so^torch::autograd::generated::MmBackward0^f@/job/a.py:2,main@/job/a.py:9^main@/job/a.py:10";
        let forward = ["main (a.py:9)", "f (a.py:2)", "(backward of MmBackward0, called by main (a.py:10))"];
        assert_eq!(lines_of(by, Native::Hidden), forward);
        assert_eq!(lines_of(by, Native::Shown), [&forward[..], &["mm (libtorch.so)"]].concat());
    }

    #[test]
    fn an_operation_that_undoes_none_belongs_to_the_line_that_called_backward() {
        let by = "add@libtorch.so^torch::autograd::AccumulateGrad^^main@/job/a.py:10";
        let expected = ["main (a.py:10)", "(AccumulateGrad in backward, called by main (a.py:10))"];
        assert_eq!(lines_of(by, Native::Hidden), expected);
    }

    #[test]
    fn python_inside_of_an_operation_is_shown_below_it() {
        let by = "backward@/job/a.py:5^torch::autograd::PyNode^f@/job/a.py:2^main@/job/a.py:10";
        let expected = ["f (a.py:2)", "(backward of PyNode, called by main (a.py:10))", "backward (a.py:5)"];
        assert_eq!(lines_of(by, Native::Hidden), expected);
    }

    #[test]
    fn any_moment_can_be_shown() {
        let at = |line: u64| shown(When::At(Nanos((line - 1) * 1000)));
        assert_eq!(at(1), ["NCCL 100 1 libnccl.so.2+0x10 (libnccl.so.2)"]);
        assert_eq!(at(6).len(), 2);
        assert_eq!(shown(When::End), Vec::<String>::new());
    }

    #[test]
    fn the_peak_between_two_times_is_that_of_the_events_between_them() {
        let within =
            |from: u64, to: u64| shown(When::Within(Nanos((from - 1) * 1000), Nanos((to - 1) * 1000)));
        assert_eq!(within(1, 1), ["NCCL 100 1 libnccl.so.2+0x10 (libnccl.so.2)"]);
        assert_eq!(within(1, 8), shown(When::Peak));
        assert_eq!(within(6, 8), shown(When::At(Nanos(5000))));
        assert_eq!(shown(When::Step(1)), Vec::<String>::new());
    }

    /// Buffers of JAX within the memory that its plugin has of the driver.
    const JAX: &str = "Alloc addr=a bytes=64M by=xla_cuda_plugin.so
         compiled handle=f bytes=10M text=jit_step
         buffer addr=p bytes=8M by=init@/job/a.py:2
         buffer addr=d bytes=1M by=load@/job/a.py:3
         launched handle=f by=step@/job/a.py:4
         donated addr=p handle=f
         buffer addr=q bytes=8M handle=f by=step@/job/a.py:4
         destroyed addr=p
         destroyed addr=d";

    #[test]
    fn buffers_and_the_rest_add_up_to_what_the_driver_handed_out() {
        let ledger = ledger(JAX);
        let picture = picture(&ledger, 0, Nanos(0));
        let of = |level| -> u64 {
            let held = picture.held.iter().filter(|(holder, _)| holder.level == level);
            held.map(|(_, (bytes, _))| bytes.0).sum()
        };
        assert_eq!([Level::Buffer, Level::Arena, Level::Driver].map(of), [8 << 20, 56 << 20, 0]);
        assert_eq!(picture.total(), Bytes(64 << 20));
    }
}
