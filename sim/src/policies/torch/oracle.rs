//! Holds [`Torch`] against PyTorch's own compiled allocator (`tests/oracle/`), command by command.
//!
//! `tests/oracle/build.sh target/oracle VERSION...` makes the oracles; without them the test says that it skips.
//! `ORACLE_SEEDS` sets how many random programs are run for each release and option string, `ORACLE_STEPS` how many
//! commands each has. After every command all statistics are compared, by their hash. A program that differs is shrunk
//! to one in which every command is needed, and told as the harness reads it.
//!
//! PyTorch itself can come to an end in a program with private pools in expandable segments (`Torch::n_pools_lost`): an
//! assertion fails, or it reads a pool that it has deleted. The first is seen by its text, the second by the harness, which
//! takes the pages of deleted objects away (`tests/oracle/fence.h`). [`Simulated`] foretells both, and at which command:
//! where only one side ends, or at another command, that is a difference like any other. The table counts these programs
//! as `asserted` and `undefined`; up to their end they were compared.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use object::{Object, ObjectSymbol};

use super::*;
use crate::addresses::{Bump, Direction};
use crate::ops::AllocId;

/// A command of the harness.
#[derive(Clone, Copy, Debug)]
enum Step {
    Alloc(u32, u64, u16),
    Free(u32),
    Record(u32, u16),
    Done(bool),
    Finish(u16),
    Trim,
    Fraction(f64),
    Reset,
    Begin(u16),
    End(u16),
    Release(u16),
    Overflow(u16),
    Whole(u16),
}

impl Step {
    fn text(self) -> String {
        match self {
            Step::Alloc(id, bytes, stream) => format!("alloc {id} {bytes} {stream}"),
            Step::Free(id) => format!("free {id}"),
            Step::Record(id, stream) => format!("record {id} {stream}"),
            Step::Done(done) => format!("done {}", u8::from(done)),
            Step::Finish(stream) => format!("finish {stream}"),
            Step::Trim => "trim".into(),
            Step::Fraction(fraction) => format!("fraction {fraction}"),
            Step::Reset => "reset".into(),
            Step::Begin(pool) => format!("begin {pool}"),
            Step::End(pool) => format!("end {pool}"),
            Step::Release(pool) => format!("release {pool}"),
            Step::Overflow(pool) => format!("overflow {pool}"),
            Step::Whole(pool) => format!("whole {pool}"),
        }
    }
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

const MIB: u64 = 1 << 20;

fn bytes(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => random.between(1, 4000),
        1 => random.between(1, MIB),
        2 => random.between(MIB, 10 * MIB),
        3 => random.between(10 * MIB, 200 * MIB),
        4 => MIB + random.below(2),
        5 => 10 * MIB - random.below(2),
        6 => random.between(1, 64 * MIB),
        _ => random.between(1, 300) * 512,
    }
}

/// What a program does beside allocating and freeing.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Flavour {
    Plain,
    Streams,
    Pools,
    Limited,
    Everything,
}

const FLAVOURS: [Flavour; 5] =
    [Flavour::Plain, Flavour::Streams, Flavour::Pools, Flavour::Limited, Flavour::Everything];

impl Flavour {
    fn has_streams(self) -> bool {
        matches!(self, Flavour::Streams | Flavour::Everything)
    }

    fn has_pools(self, version: (u8, u8)) -> bool {
        // 2.0 has no calls for private pools.
        version >= (2, 1) && matches!(self, Flavour::Pools | Flavour::Everything)
    }

    fn has_limit(self) -> bool {
        matches!(self, Flavour::Limited | Flavour::Everything)
    }
}

/// A private pool of a program: begun so often, and not released.
struct Opened {
    pool: u16,
    uses: u32,
}

/// Writes a random program.
struct Author {
    random: Random,
    version: (u8, u8),
    steps: Vec<Step>,
    live: Vec<u32>,
    n_allocs: u32,
    inside: Option<u16>,
    opened: Vec<Opened>,
    n_pools: u16,
    /// Blocks that other streams use.
    recorded: HashSet<u32>,
    /// One of these was freed in a capture, and no request since made PyTorch look at it.
    has_deferred: bool,
}

/// A random program. Sizes repeat, so that equal blocks compete.
fn program(seed: u64, n_steps: usize, flavour: Flavour, version: (u8, u8)) -> Vec<Step> {
    let mut random = Random(seed);
    let sizes: Vec<u64> = (0..24).map(|_| bytes(&mut random)).collect();
    let n_streams = if flavour.has_streams() { 3 } else { 1 };
    let mut author = Author {
        random,
        version,
        steps: Vec::new(),
        live: Vec::new(),
        n_allocs: 0,
        inside: None,
        opened: Vec::new(),
        n_pools: 0,
        recorded: HashSet::new(),
        has_deferred: false,
    };
    if flavour.has_limit() {
        author.fraction();
    }
    while author.steps.len() < n_steps {
        match author.random.below(100) {
            roll if roll < 54 || author.live.is_empty() => author.alloc(&sizes, n_streams),
            0..=91 => author.free(),
            92 if flavour.has_limit() && author.random.chance(30) => author.fraction(),
            93 if author.random.chance(30) => author.steps.push(Step::Reset),
            94 if author.inside.is_none() => author.trim(),
            95 | 96 if flavour.has_streams() => author.record(),
            97 if flavour.has_streams() => author.complete(),
            94..=98 if flavour.has_pools(version) => author.enter_or_leave(),
            99 if flavour.has_pools(version) && author.inside.is_none() => author.release(),
            _ => {}
        }
    }
    author.steps
}

impl Author {
    fn alloc(&mut self, sizes: &[u64], n_streams: u64) {
        let random = &mut self.random;
        let size = if random.chance(75) { sizes[random.below(24) as usize] } else { bytes(random) };
        self.steps.push(Step::Alloc(self.n_allocs, size, random.below(n_streams) as u16));
        self.live.push(self.n_allocs);
        self.n_allocs += 1;
        self.has_deferred &= self.inside.is_some();
    }

    fn trim(&mut self) {
        self.steps.push(Step::Trim);
        self.has_deferred = false;
    }

    fn any(&mut self) -> usize {
        self.random.below(self.live.len() as u64) as usize
    }

    fn free(&mut self) {
        let index = self.any();
        if self.inside.is_some() && self.recorded.contains(&self.live[index]) {
            // 2.9 to 2.12 keep what is freed in a capture in a hash table of pointers (deferred_blocks): two of them come
            // back in an order, and so with a peak of inactive_split_bytes, that differs from process to process.
            if self.has_deferred && ((2, 9)..=(2, 12)).contains(&self.version) {
                return;
            }
            self.has_deferred = true;
        }
        self.steps.push(Step::Free(self.live.swap_remove(index)));
    }

    fn record(&mut self) {
        let index = self.any();
        self.recorded.insert(self.live[index]);
        self.steps.push(Step::Record(self.live[index], self.random.below(3) as u16));
    }

    fn complete(&mut self) {
        let step = match self.random.below(4) {
            0 => Step::Done(true),
            1 => Step::Done(false),
            _ => Step::Finish(self.random.below(3) as u16),
        };
        self.steps.push(step);
    }

    fn fraction(&mut self) {
        self.steps.push(Step::Fraction([0.3, 0.5, 0.8, 1.0][self.random.below(4) as usize]));
    }

    fn enter_or_leave(&mut self) {
        if let Some(pool) = self.inside.take() {
            self.steps.push(Step::End(pool));
            return;
        }
        let again = !self.opened.is_empty() && self.random.chance(50);
        let index = if again {
            self.random.below(self.opened.len() as u64) as usize
        } else {
            self.n_pools += 1;
            self.opened.push(Opened { pool: self.n_pools, uses: 0 });
            self.opened.len() - 1
        };
        self.opened[index].uses += 1;
        let pool = self.opened[index].pool;
        self.inside = Some(pool);
        self.steps.push(Step::Begin(pool));
        if !again && self.version >= (2, 10) && self.random.chance(20) {
            self.steps.push(Step::Whole(pool));
        }
        // One a program: PyTorch tries several in the order of a hash table. It is never released, because PyTorch then
        // looks at it again and fails an assertion.
        let has_overflow = self.steps.iter().any(|step| matches!(step, Step::Overflow(_)));
        if !again && !has_overflow && self.version >= (2, 8) && self.random.chance(40) {
            self.steps.push(Step::Overflow(pool));
            self.opened[index].uses += 1;
            self.steps.extend([Step::End(pool), Step::Begin(pool)]);
        }
    }

    fn release(&mut self) {
        if self.opened.is_empty() {
            return;
        }
        let index = self.random.below(self.opened.len() as u64) as usize;
        if self
            .steps
            .iter()
            .any(|step| matches!(step, Step::Overflow(pool) if *pool == self.opened[index].pool))
        {
            return;
        }
        let Opened { pool, uses } = self.opened.swap_remove(index);
        self.steps.extend((0..uses).map(|_| Step::Release(pool)));
    }
}

/// A block that the program has.
struct Held {
    placement: Placement,
    requested: u64,
    /// Streams that use it beside its own.
    uses: Vec<u16>,
    /// Those that began to during a capture: a capture's end waits for them, so that no event is needed.
    captured: Vec<u16>,
}

/// A freed block that streams still use.
struct Waiting {
    placement: Placement,
    requested: u64,
    n_events: usize,
}

/// The simulated side of the harness.
struct Simulated {
    torch: Torch,
    device: Device<'static>,
    live: HashMap<u32, Held>,
    waiting: HashMap<u32, Waiting>,
    /// Freed during a capture: events come after it.
    deferred: Vec<(u32, Vec<u16>)>,
    /// By stream: (number of the event, block).
    events: BTreeMap<u16, VecDeque<(u64, u32)>>,
    n_events: u64,
    finished: [u64; 3],
    all_done: bool,
    inside: Option<u16>,
    uses: HashMap<u16, i64>,
    version: (u8, u8),
    /// PyTorch keeps the streams of events in a hash table: in which order it walks them.
    stream_order: [u16; 3],
    out: Vec<String>,
    has_ended: bool,
}

/// What is said where PyTorch's own assertion fails.
const ASSERTED: &str = "error block->pool->owner_PrivatePool->cudaMalloc_count > 0";
/// What is said where PyTorch reads what it has deleted.
const FREED: &str = "freed";

impl Simulated {
    fn step(&mut self, step: Step) {
        if self.has_ended {
            return;
        }
        match step {
            Step::Alloc(id, bytes, stream) => {
                self.alloc(id, bytes, stream);
                if self.torch.n_assertions > 0 {
                    self.out.pop();
                    return self.end(ASSERTED);
                }
            }
            Step::Free(id) => {
                if self.live.get(&id).is_some_and(|held| self.is_lost(held.placement)) {
                    return self.end(FREED);
                }
                self.free(id);
            }
            Step::Record(id, stream) => {
                let captures = self.version >= (2, 4) && self.captures();
                let Some(held) = self.live.get_mut(&id) else { return self.hash() };
                let own = self.torch.block(held.placement.handle).stream;
                if own.0 != stream && !held.uses.contains(&stream) {
                    held.uses.push(stream);
                }
                if own.0 != stream && captures {
                    held.captured.push(stream);
                }
            }
            Step::Done(done) => {
                if self.all_done {
                    self.finished = [self.n_events; 3];
                }
                self.all_done = done;
            }
            Step::Finish(stream) => self.finished[usize::from(stream)] = self.n_events,
            Step::Trim => {
                self.record_deferred();
                self.order_pending();
                self.torch.trim(&mut self.device);
                self.forget_events();
                if self.torch.n_assertions > 0 {
                    return self.end(ASSERTED);
                }
            }
            Step::Fraction(fraction) => self.torch.set_memory_fraction(fraction, self.device.total()),
            Step::Reset => self.torch.reset_peaks(),
            Step::Begin(pool) => {
                *self.uses.entry(pool).or_default() += 1;
                self.inside = Some(pool);
            }
            Step::End(_) => self.inside = None,
            Step::Release(pool) => {
                let uses = self.uses.entry(pool).or_default();
                *uses -= 1;
                if *uses == 0 {
                    self.torch.release_pool(PoolIdx(pool));
                }
            }
            Step::Overflow(pool) => self.torch.use_on_oom(PoolIdx(pool)),
            Step::Whole(pool) => self.torch.never_split(PoolIdx(pool)),
        }
        self.hash();
    }

    fn end(&mut self, said: &str) {
        self.out.push(said.into());
        self.has_ended = true;
    }

    /// Whether PyTorch has deleted the pool of this block.
    fn is_lost(&self, placement: Placement) -> bool {
        self.torch.owners[self.torch.block(placement.handle).pool as usize / 2].is_gone
    }

    /// Whether PyTorch takes it that a stream may be captured.
    fn captures(&self) -> bool {
        self.inside.is_some() && self.torch.profile.mem_pool_is_capture()
    }

    fn alloc(&mut self, id: u32, bytes: u64, stream: u16) {
        if !self.captures() {
            self.record_deferred();
            self.process_events();
        }
        self.order_pending();
        // Up to 2.2 a pool is entered by one stream.
        let inside = self.inside.filter(|_| self.version >= (2, 3) || stream == 0);
        // What a capture forbids, it forbids to all.
        let capture = if self.inside.is_some() { Capture::MemPool } else { Capture::No };
        let pool = PoolIdx(inside.unwrap_or(0));
        let request = Request { bytes, stream: StreamIdx(stream), pool, capture };
        let syncs = self.torch.stats.num_sync_all_streams;
        match self.torch.alloc(&mut self.device, request) {
            Ok(placement) => {
                self.device.allocated(placement, bytes);
                self.live
                    .insert(id, Held { placement, requested: bytes, uses: Vec::new(), captured: Vec::new() });
                self.out.push(format!("at {id} {:x}", placement.address));
            }
            Err(error) => self.out.push(format!("oom {id} {}", error.message)),
        }
        if self.torch.stats.num_sync_all_streams != syncs {
            self.forget_events();
        }
    }

    fn free(&mut self, id: u32) {
        let Some(Held { placement, requested, mut uses, captured }) = self.live.remove(&id) else { return };
        self.device.free_requested(placement);
        self.torch.free_requested(placement);
        if uses.is_empty() {
            self.complete(placement, requested);
            return;
        }
        let is_deferred = self.captures();
        if is_deferred {
            uses.retain(|stream| !captured.contains(stream));
        }
        self.waiting.insert(id, Waiting { placement, requested, n_events: uses.len() });
        self.device.pend(AllocId(id), placement, requested);
        if is_deferred {
            self.deferred.push((id, uses));
        } else {
            self.record_events(id, uses);
        }
    }

    fn record_events(&mut self, id: u32, uses: Vec<u16>) {
        for stream in uses {
            self.n_events += 1;
            self.events.entry(stream).or_default().push_back((self.n_events, id));
        }
    }

    fn record_deferred(&mut self) {
        for (id, uses) in std::mem::take(&mut self.deferred) {
            if uses.is_empty()
                && let Some(waiting) = self.waiting.remove(&id)
            {
                self.device.unpend(AllocId(id));
                self.complete(waiting.placement, waiting.requested);
            }
            self.record_events(id, uses);
        }
    }

    fn process_events(&mut self) {
        for stream in self.stream_order {
            let limit = if self.all_done { u64::MAX } else { self.finished[usize::from(stream)] };
            while let Some(queue) = self.events.get_mut(&stream)
                && let Some((_, id)) = queue.pop_front_if(|(number, _)| *number <= limit)
            {
                let Some(waiting) = self.waiting.get_mut(&id) else { continue };
                waiting.n_events -= 1;
                if waiting.n_events == 0 {
                    let Waiting { placement, requested, .. } = *waiting;
                    self.waiting.remove(&id);
                    self.device.unpend(AllocId(id));
                    self.complete(placement, requested);
                }
            }
        }
    }

    /// A flush waits for one stream after the other; the device is to hand the blocks back in that order.
    fn order_pending(&mut self) {
        let mut left: HashMap<u32, usize> =
            self.waiting.iter().map(|(id, waiting)| (*id, waiting.n_events)).collect();
        for stream in self.stream_order {
            for (_, id) in self.events.get(&stream).into_iter().flatten() {
                let Some(n_events) = left.get_mut(id) else { continue };
                *n_events -= 1;
                if *n_events == 0 {
                    let waiting = &self.waiting[id];
                    self.device.unpend(AllocId(*id));
                    self.device.pend(AllocId(*id), waiting.placement, waiting.requested);
                }
            }
        }
    }

    fn complete(&mut self, placement: Placement, requested: u64) {
        self.device.free_completed(placement, requested);
        self.torch.free(&mut self.device, placement);
    }

    /// A flush has waited for all of them.
    fn forget_events(&mut self) {
        self.events.clear();
        self.waiting.clear();
    }

    /// Every number, by name.
    fn numbers(&self) -> Vec<(&'static str, i64)> {
        let stats = &self.torch.stats;
        let mut numbers: Vec<(&'static str, i64)> =
            stats.numbers().flat_map(|(name, four)| four.map(|value| (name, value))).collect();
        let mut scalar = |name, value: u64| numbers.push((name, value as i64));
        scalar("num_alloc_retries", stats.num_alloc_retries);
        scalar("num_ooms", stats.num_ooms);
        if self.version >= (2, 3) {
            scalar("num_device_alloc", stats.num_device_alloc);
            scalar("num_device_free", stats.num_device_free);
            scalar("num_sync_all_streams", stats.num_sync_all_streams);
        }
        if self.version >= (2, 12) {
            scalar("num_oom_rejections", stats.num_oom_rejections);
        }
        scalar("stub_used", self.device.total() - self.device.free());
        numbers
    }

    fn hash(&mut self) {
        // FNV-1a over words, as in the harness.
        let mix = |hash: u64, value: i64| (hash ^ value as u64).wrapping_mul(0x100_0000_01b3);
        let hash =
            self.numbers().into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, (_, value)| mix(hash, value));
        self.out.push(format!("= {hash:x}"));
    }

    /// The books outside must say the same as PyTorch's own, except for peaks that the program has reset.
    fn check_books(&self) {
        let books = &self.device.books;
        for (name, gauge) in [
            (Name::AllocatedBytes, books.allocated),
            (Name::ReservedBytes, books.reserved),
            (Name::ActiveBytes, books.active),
            (Name::RequestedBytes, books.requested),
            (Name::InactiveSplitBytes, books.inactive_split),
        ] {
            let own = self.torch.stats.all(name);
            assert_eq!(own.current as u64, gauge.current, "books of {name:?}");
            assert!(own.peak as u64 <= gauge.peak, "peak of {name:?}");
        }
    }
}

/// One compiled allocator.
struct Oracle {
    /// As in its file's name.
    text: String,
    version: (u8, u8),
    program: PathBuf,
}

/// The releases that have been built.
fn oracles() -> Vec<Oracle> {
    let folder = std::env::var_os("GPUTRACE_ORACLE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/oracle"), PathBuf::from);
    let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let text = name.strip_prefix("oracle-")?.to_string();
            let mut parts = text.split('.').map(str::parse);
            let version = (parts.next()?.ok()?, parts.next()?.ok()?);
            Some(Oracle { text, version, program: entry.path() })
        })
        .collect();
    found.sort_by_key(|oracle| oracle.version);
    found
}

fn option_strings(version: (u8, u8)) -> Vec<&'static str> {
    let all: &[((u8, u8), &str)] = &[
        ((2, 0), ""),
        ((2, 0), "max_split_size_mb:21"),
        ((2, 0), "max_split_size_mb:32"),
        ((2, 0), "max_split_size_mb:128"),
        ((2, 0), "roundup_power2_divisions:4"),
        ((2, 0), "roundup_power2_divisions:[1:2,8:8,64:4,>:1]"),
        ((2, 0), "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],max_split_size_mb:256"),
        ((2, 0), "garbage_collection_threshold:0.6"),
        ((2, 0), "garbage_collection_threshold:0.8"),
        ((2, 0), "garbage_collection_threshold:0.5,max_split_size_mb:64"),
        ((2, 0), "garbage_collection_threshold:0.3,roundup_power2_divisions:16"),
        ((2, 0), "max_split_size_mb:64,roundup_power2_divisions:8,garbage_collection_threshold:0.9"),
        ((2, 1), "expandable_segments:True"),
        ((2, 5), "expandable_segments:True,max_split_size_mb:64"),
        ((2, 1), "expandable_segments:True,roundup_power2_divisions:8,garbage_collection_threshold:0.6"),
        ((2, 6), "max_split_size_mb:32,max_non_split_rounding_mb:40"),
        ((2, 11), "large_segment_size_mb:32"),
        ((2, 11), "large_segment_size_mb:64,expandable_segments:True"),
        ((2, 12), "throw_on_cudamalloc_oom:True"),
        ((2, 10), "per_process_memory_fraction:0.7"),
        ((2, 15), "expandable_segments:True,expandable_segments_reserve:0.1"),
        (
            (2, 15),
            "expandable_segments:True,expandable_segments_reserve:0.2G,garbage_collection_threshold:0.6",
        ),
    ];
    all.iter().filter(|(since, _)| *since <= version).map(|(_, options)| *options).collect()
}

/// A running harness: programs go in, what happened comes out.
struct Harness {
    child: Child,
    commands: ChildStdin,
    said: BufReader<ChildStdout>,
}

impl Harness {
    fn start(program: &Path, options: &str) -> Harness {
        let mut command = Command::new(program);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        command.env_remove("PYTORCH_CUDA_ALLOC_CONF").env_remove("PYTORCH_ALLOC_CONF");
        if !options.is_empty() {
            command.env("PYTORCH_CUDA_ALLOC_CONF", options);
        }
        let mut child = command.spawn().unwrap();
        let commands = child.stdin.take().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Harness { child, commands, said }
    }

    /// Runs one program. The lines end with how its process ended.
    fn run(&mut self, commands: &str) -> Vec<String> {
        self.commands.write_all(commands.as_bytes()).unwrap();
        self.commands.flush().unwrap();
        let mut lines = Vec::new();
        let mut line = Vec::new();
        while self.said.read_until(b'\n', &mut line).unwrap() > 0 {
            let text = String::from_utf8_lossy(&line).trim_end().to_string();
            line.clear();
            let ends = text.starts_with("ended ");
            if text.is_empty() {
                continue;
            }
            lines.push(text);
            if ends {
                break;
            }
        }
        lines
    }

    fn stop(mut self) {
        drop(self.commands);
        let _ = self.child.wait();
    }
}

struct Case<'a> {
    oracle: &'a Oracle,
    options: &'a str,
    flavour: Flavour,
    seed: u64,
    total: u64,
    direction: Direction,
    steps: Vec<Step>,
}

impl Case<'_> {
    fn commands(&self, watched: &[Step]) -> String {
        let ascending = u8::from(self.direction == Direction::Ascending);
        let mut text = format!("run {} {ascending}\nwatch\n", self.total);
        watched.iter().for_each(|step| text.push_str(&(step.text() + "\n")));
        text
    }

    fn simulated(&self, stream_order: [u16; 3], steps: &[Step]) -> Simulated {
        let profile = profile(self.oracle.version).unwrap();
        let options = parse(self.options, profile).unwrap();
        let device = Device::new(self.total, None, Box::new(Bump::new(self.direction)));
        let mut simulated = Simulated {
            torch: Torch::new(options, *profile, 4, 200),
            device: if self.seed.is_multiple_of(10) { device.audited() } else { device },
            live: HashMap::new(),
            waiting: HashMap::new(),
            deferred: Vec::new(),
            events: BTreeMap::new(),
            n_events: 0,
            finished: [0; 3],
            all_done: true,
            inside: None,
            uses: HashMap::new(),
            version: self.oracle.version,
            stream_order,
            out: Vec::new(),
            has_ended: false,
        };
        simulated.hash();
        steps.iter().for_each(|step| simulated.step(*step));
        if !simulated.has_ended {
            simulated.check_books();
        }
        simulated
    }

    fn name(&self) -> String {
        let Case { oracle, options, flavour, seed, .. } = self;
        format!("PyTorch {}, {options:?}, {flavour:?}, seed {seed}", oracle.text)
    }
}

/// What may differ: advice and process lists of the texts, places in PyTorch's source and code.
fn comparable(line: &str) -> String {
    if line.starts_with(FREED) {
        return FREED.into();
    }
    let end = [
        " INTERNAL ASSERT FAILED",
        "If reserved memory is >>",
        "If reserved but unallocated",
        "expandable_segments is enabled",
        "This allocation exceeds the expandable-segment reserve",
        "See documentation",
        " try setting",
    ]
    .iter()
    .filter_map(|it| line.find(it))
    .min();
    let mut line = line[..end.unwrap_or(line.len())].trim_end().to_string();
    if let (Some(start), Some(stop)) = (line.find("Including non-PyTorch"), line.find(" in use. ")) {
        line.replace_range(start..stop + " in use. ".len(), "");
    }
    line
}

const STREAM_ORDERS: [[u16; 3]; 6] = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];

/// What became of the programs.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    programs: u64,
    /// Commands after which everything was compared.
    commands: u64,
    /// Lines compared: addresses, out-of-memory texts, hashes.
    lines: u64,
    ooms: u64,
    /// Programs that PyTorch ended with its own assertion, as foretold.
    asserted: u64,
    /// Programs in which PyTorch read a pool that it had deleted, as foretold.
    undefined: u64,
    differing: u64,
}

impl Tally {
    fn add(&mut self, other: Tally) {
        self.programs += other.programs;
        self.commands += other.commands;
        self.lines += other.lines;
        self.ooms += other.ooms;
        self.asserted += other.asserted;
        self.undefined += other.undefined;
        self.differing += other.differing;
    }

    fn count(&mut self, said: &[String]) {
        let n_of = |start: &str| said.iter().filter(|line| line.starts_with(start)).count() as u64;
        self.programs += 1;
        self.commands += n_of("=") - 1;
        self.lines += said.len() as u64;
        self.ooms += n_of("oom");
        self.asserted += n_of("error");
        self.undefined += n_of(FREED);
    }
}

/// What PyTorch said up to its end, if it came to one before the program did.
fn said(case: &Case, harness: &mut Harness, steps: &[Step]) -> Vec<String> {
    let mut lines = harness.run(&(case.commands(steps) + "stop\n"));
    let ends = |line: &String| ["error", FREED, "ended"].iter().any(|it| line.starts_with(it));
    let end = lines.iter().position(ends).expect("the harness says how a program ended");
    let is_complete = lines[end] == "ended 0";
    lines.truncate(if is_complete { end } else { end + 1 });
    lines
}

fn first_difference(real: &[String], simulated: &[String]) -> Option<usize> {
    let mut pairs = real.iter().zip(simulated);
    let differs =
        pairs.position(|(real, simulated)| real != simulated && comparable(real) != comparable(simulated));
    differs.or_else(|| (real.len() != simulated.len()).then_some(real.len().min(simulated.len())))
}

/// Where the two sides differ, in whatever order the hash table is walked.
fn difference(case: &Case, real: &[String], order: &mut [u16; 3], steps: &[Step]) -> Option<usize> {
    let differs = first_difference(real, &case.simulated(*order, steps).out)?;
    for other in STREAM_ORDERS.into_iter().filter(|_| case.flavour.has_streams()) {
        if first_difference(real, &case.simulated(other, steps).out).is_none() {
            *order = other;
            return None;
        }
    }
    Some(differs)
}

/// Runs one program on both sides. The text tells the first difference.
fn compare(case: &Case, harness: &mut Harness, order: &mut [u16; 3], tally: &mut Tally) -> Option<String> {
    let real = said(case, harness, &case.steps);
    if difference(case, &real, order, &case.steps).is_none() {
        tally.count(&real);
        return None;
    }
    tally.programs += 1;
    tally.differing += 1;
    let steps = shrunk(case, harness, *order);
    Some(explain(case, harness, *order, &steps))
}

/// Takes commands away, in halves, quarters and so on, as long as the rest makes sense and still differs.
fn shrunk(case: &Case, harness: &mut Harness, mut order: [u16; 3]) -> Vec<Step> {
    let mut steps = case.steps.clone();
    let mut size = steps.len() / 2;
    while size > 0 {
        let n_before = steps.len();
        let mut start = 0;
        while start < steps.len() {
            let mut fewer = steps.clone();
            fewer.drain(start..(start + size).min(steps.len()));
            let differs = makes_sense(&fewer) && {
                let real = said(case, harness, &fewer);
                difference(case, &real, &mut order, &fewer).is_some()
            };
            if differs {
                steps = fewer;
            } else {
                start += size;
            }
        }
        if size > 1 || steps.len() == n_before {
            size /= 2;
        }
    }
    steps
}

/// Whether pools are begun before they are ended, and released as often as they were begun, as [`Author`] does it.
fn makes_sense(steps: &[Step]) -> bool {
    let (mut inside, mut uses) = (None, HashMap::<u16, u32>::new());
    let stays = |pool: u16| steps.iter().any(|step| matches!(step, Step::Overflow(it) if *it == pool));
    steps.iter().all(|step| match *step {
        Step::Begin(pool) => {
            *uses.entry(pool).or_default() += 1;
            inside.replace(pool).is_none()
        }
        Step::End(pool) => inside.take() == Some(pool),
        Step::Release(pool) => {
            let left = uses.get(&pool).copied().unwrap_or(0);
            uses.insert(pool, left.saturating_sub(1));
            left > 0 && !stays(pool)
        }
        Step::Overflow(pool) | Step::Whole(pool) => inside == Some(pool),
        Step::Trim => inside.is_none(),
        _ => true,
    })
}

/// Tells a program, its first difference, and the statistics that differ then.
fn explain(case: &Case, harness: &mut Harness, order: [u16; 3], steps: &[Step]) -> String {
    let real = said(case, harness, steps);
    let simulated = case.simulated(order, steps);
    let differs = first_difference(&real, &simulated.out).unwrap_or(0);
    let line = |lines: &[String]| lines.get(differs).map_or("nothing".into(), Clone::clone);
    let n_steps = real[..differs].iter().filter(|line| line.starts_with('=')).count();
    let steps = &steps[..n_steps.min(steps.len())];
    let mut text = format!(
        "{}\n{}  real      {}\n  simulated {}\n",
        case.name(),
        case.commands(steps),
        line(&real),
        line(&simulated.out),
    );
    let lines = harness.run(&(case.commands(steps) + "stats\nstop\n"));
    let mut ours: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (name, value) in case.simulated(order, steps).numbers() {
        ours.entry(name).or_default().push(value.to_string());
    }
    for (name, values) in lines.iter().filter_map(|line| line.split_once(' ')) {
        if let Some(ours) = ours.get(name).map(|ours| ours.join(" "))
            && ours != values
        {
            text.push_str(&format!("  {name}: real {values}, simulated {ours}\n"));
        }
    }
    text
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// All programs of one release under one option string.
fn campaign(oracle: &Oracle, options: &str, differences: &Mutex<Vec<String>>) -> Tally {
    let mut harness = Harness::start(&oracle.program, options);
    let mut tally = Tally::default();
    let mut order = STREAM_ORDERS[0];
    for seed in 0..number("ORACLE_SEEDS", 5) {
        let flavour = FLAVOURS[seed as usize % FLAVOURS.len()];
        let n_steps = number("ORACLE_STEPS", 1000) as usize;
        let case = Case {
            oracle,
            options,
            flavour,
            seed,
            total: (1 + seed % 6) << 29,
            direction: if seed / 5 % 2 == 0 { Direction::Ascending } else { Direction::Descending },
            steps: program(seed, n_steps, flavour, oracle.version),
        };
        if let Some(difference) = compare(&case, &mut harness, &mut order, &mut tally) {
            differences.lock().unwrap().push(difference);
        }
    }
    harness.stop();
    tally
}

#[test]
fn the_compiled_allocator_does_the_same() {
    let oracles = oracles();
    if oracles.is_empty() {
        return gputrace_skip::skip(
            "the compiled allocator",
            "make some with tests/oracle/build.sh target/oracle 2.11.0",
        );
    }
    let jobs: Vec<(&Oracle, &str)> = oracles
        .iter()
        .flat_map(|oracle| option_strings(oracle.version).into_iter().map(move |options| (oracle, options)))
        .collect();
    let (next, differences) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let tallies = Mutex::new(BTreeMap::<(u8, u8), (usize, Tally)>::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((oracle, options)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let tally = campaign(oracle, options, &differences);
                    let mut tallies = tallies.lock().unwrap();
                    let (n_options, sum) = tallies.entry(oracle.version).or_default();
                    *n_options += 1;
                    sum.add(tally);
                }
            });
        }
    });
    println!("release options programs   commands      lines     ooms asserted undefined differing");
    for ((major, minor), (n_options, tally)) in tallies.into_inner().unwrap() {
        let Tally { programs, commands, lines, ooms, asserted, undefined, differing } = tally;
        let release = format!("{major}.{minor}");
        println!(
            "{release:<7} {n_options:>7} {programs:>8} {commands:>10} {lines:>10} {ooms:>8} {asserted:>8} {undefined:>9} {differing:>9}"
        );
    }
    let differences = differences.into_inner().unwrap();
    assert!(differences.is_empty(), "{}", differences[..differences.len().min(6)].join("\n"));
}

#[test]
fn the_compiled_allocator_knows_the_same_options() {
    for oracle in oracles() {
        let profile = profile(oracle.version).unwrap();
        for text in super::options::examples()
            .chain(["no_such_key:1", "expandable_segments_handle_type:1"].map(String::from))
        {
            let mut harness = Harness::start(&oracle.program, &text);
            let said = harness.run("run 1073741824 1\nalloc 0 1000 0\nstop\n");
            harness.stop();
            let is_refused = !said.iter().any(|line| line.starts_with("at "));
            let ours = parse(&text, profile);
            assert_eq!(is_refused, ours.is_err(), "PyTorch {} {text}: {said:?}, ours {ours:?}", oracle.text);
        }
    }
}

const EXPANDABLE: &str = "expandable_segments:True";

/// One request maps two pages, which is counted once; one page goes back, which is counted too, while the other is in use.
const DELETES_TOO_EARLY: [Step; 8] = [
    Step::Begin(1),
    Step::Alloc(0, 40 * MIB, 0),
    Step::Free(0),
    Step::Alloc(1, 20 * MIB, 0),
    Step::End(1),
    Step::Release(1),
    Step::Trim,
    Step::Free(1),
];

/// One request maps three pages, and two go back one by one.
const COUNTS_BELOW_ZERO: [Step; 11] = [
    Step::Begin(1),
    Step::Alloc(0, 60 * MIB, 0),
    Step::Free(0),
    Step::Alloc(1, 20 * MIB, 0),
    Step::Alloc(2, 20 * MIB, 0),
    Step::Alloc(3, 20 * MIB, 0),
    Step::End(1),
    Step::Release(1),
    Step::Free(1),
    Step::Free(3),
    Step::Trim,
];

fn with_case(oracle: &Oracle, steps: &[Step], mut check: impl FnMut(&Case)) {
    check(&Case {
        oracle,
        options: EXPANDABLE,
        flavour: Flavour::Pools,
        seed: 0,
        total: 1 << 30,
        direction: Direction::Ascending,
        steps: steps.to_vec(),
    });
}

#[test]
fn a_pool_of_expandable_segments_that_is_released_while_in_use_ends_pytorch() {
    for Profile { version, .. } in &PROFILES[1..] {
        let oracle = Oracle { text: String::new(), version: *version, program: PathBuf::new() };
        for (steps, end) in [(&DELETES_TOO_EARLY[..], FREED), (&COUNTS_BELOW_ZERO, ASSERTED)] {
            with_case(&oracle, steps, |case| {
                let simulated = case.simulated(STREAM_ORDERS[0], steps);
                let last = simulated.out.last().unwrap();
                assert_eq!(last == end, *version >= (2, 5), "PyTorch {version:?} {steps:?}: {last}");
            });
        }
    }
}

#[test]
fn the_compiled_allocator_reads_a_pool_that_it_has_deleted() {
    for oracle in oracles().into_iter().filter(|oracle| oracle.version >= (2, 1)) {
        let expected = u64::from(oracle.version >= (2, 5));
        let mut harness = Harness::start(&oracle.program, EXPANDABLE);
        let mut tally = Tally::default();
        with_case(&oracle, &COUNTS_BELOW_ZERO, |case| {
            assert_eq!(compare(case, &mut harness, &mut [0, 1, 2], &mut tally), None);
        });
        with_case(&oracle, &DELETES_TOO_EARLY, |case| {
            assert_eq!(compare(case, &mut harness, &mut [0, 1, 2], &mut tally), None);
            if expected == 1 {
                let lines = said(case, &mut harness, &DELETES_TOO_EARLY);
                let words: Vec<&str> = lines.last().unwrap().split(' ').collect();
                let [FREED, _, deleter, user] = words[..] else { panic!("{words:?}") };
                let (deleter, user) = (function(&oracle, deleter), function(&oracle, user));
                // Some compilers put release_cached_blocks into its caller.
                let deletes = ["release_cached_blocks", "10emptyCache"].iter().any(|it| deleter.contains(it));
                let uses =
                    ["DeviceCachingAllocator4free", "11free_locked"].iter().any(|it| user.contains(it));
                assert!(deletes && uses, "PyTorch {}: {deleter}, {user}", oracle.text);
            }
        });
        harness.stop();
        assert_eq!((tally.asserted, tally.undefined), (expected, expected), "PyTorch {}", oracle.text);
    }
}

/// The mangled name of the function at a place such as `libc10_cuda.so+3816e`.
fn function(oracle: &Oracle, place: &str) -> String {
    let (library, offset) = place.split_once('+').unwrap();
    let offset = u64::from_str_radix(offset, 16).unwrap();
    let folder = oracle.program.with_file_name(format!("lib-{}", oracle.text));
    let bytes = std::fs::read(folder.join(library)).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let mut functions = file.symbols();
    let found = functions.find(|it| it.address() <= offset && offset < it.address() + it.size());
    found.map_or_else(String::new, |it| it.name().unwrap().into())
}
