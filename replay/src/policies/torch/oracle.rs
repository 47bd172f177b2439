//! Holds [`Torch`] against PyTorch's own compiled allocator (`tests/oracle/`), command by command.
//!
//! `tests/oracle/build.sh target/oracle VERSION...` makes the oracles; without them the tests say that they skip.
//! `ORACLE_SEEDS` sets how many random programs are run for each release and option string.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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
    Trim,
    Fraction(f64),
    Begin(u16),
    End(u16),
    Release(u16),
    Stats,
}

impl Step {
    fn text(self) -> String {
        match self {
            Step::Alloc(id, bytes, stream) => format!("alloc {id} {bytes} {stream}"),
            Step::Free(id) => format!("free {id}"),
            Step::Record(id, stream) => format!("record {id} {stream}"),
            Step::Done(done) => format!("done {}", u8::from(done)),
            Step::Trim => "trim".into(),
            Step::Fraction(fraction) => format!("fraction {fraction}"),
            Step::Begin(pool) => format!("begin {pool}"),
            Step::End(pool) => format!("end {pool}"),
            Step::Release(pool) => format!("release {pool}"),
            Step::Stats => "stats".into(),
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

#[derive(Clone, Copy, PartialEq)]
enum Flavour {
    Plain,
    Streams,
    Pools,
    Limited,
}

/// A random program. Sizes repeat, so that equal blocks compete.
fn program(seed: u64, n_steps: usize, flavour: Flavour) -> Vec<Step> {
    let random = &mut Random(seed);
    let sizes: Vec<u64> = (0..24).map(|_| bytes(random)).collect();
    let n_streams = if flavour == Flavour::Streams { 3 } else { 1 };
    let (mut steps, mut live, mut next) = (Vec::new(), Vec::new(), 0);
    let (mut inside, mut pools, mut n_pools): (Option<u16>, Vec<(u16, u32)>, u16) = (None, Vec::new(), 0);
    if flavour == Flavour::Limited {
        steps.push(Step::Fraction([0.5, 0.8, 1.0][random.below(3) as usize]));
    }
    for _ in 0..n_steps {
        match random.below(100) {
            roll if roll < 54 || live.is_empty() => {
                let size = if random.chance(75) { sizes[random.below(24) as usize] } else { bytes(random) };
                steps.push(Step::Alloc(next, size, random.below(n_streams) as u16));
                live.push(next);
                next += 1;
            }
            0..=93 => steps.push(Step::Free(live.swap_remove(random.below(live.len() as u64) as usize))),
            94 if inside.is_none() => steps.push(Step::Trim),
            95..=96 if flavour == Flavour::Streams => {
                steps.push(Step::Record(
                    live[random.below(live.len() as u64) as usize],
                    random.below(3) as u16,
                ));
            }
            97 if flavour == Flavour::Streams => steps.push(Step::Done(random.chance(50))),
            94..=96 if flavour == Flavour::Pools => match inside.take() {
                Some(pool) => steps.push(Step::End(pool)),
                None => {
                    let again =
                        (!pools.is_empty() && random.chance(50)).then(|| random.below(pools.len() as u64));
                    let index = again.map(|index| index as usize).unwrap_or_else(|| {
                        n_pools += 1;
                        pools.push((n_pools, 0));
                        pools.len() - 1
                    });
                    pools[index].1 += 1;
                    inside = Some(pools[index].0);
                    steps.push(Step::Begin(pools[index].0));
                }
            },
            97 if flavour == Flavour::Pools && inside.is_none() && !pools.is_empty() => {
                let (pool, uses) = pools.swap_remove(random.below(pools.len() as u64) as usize);
                steps.extend((0..uses).map(|_| Step::Release(pool)));
            }
            98 => steps.push(Step::Stats),
            _ => {}
        }
    }
    steps.push(Step::Stats);
    steps
}

/// The simulated side of the harness.
struct Simulated {
    torch: Torch,
    device: Device<'static>,
    live: HashMap<u32, (Placement, u64, Vec<u16>)>,
    /// Frees that wait for streams: by stream, in order.
    events: BTreeMap<u16, Vec<u32>>,
    waiting: HashMap<u32, (Placement, u64, usize)>,
    done: bool,
    inside: Option<u16>,
    uses: HashMap<u16, i64>,
    has_device_counters: bool,
}

impl Simulated {
    fn step(&mut self, step: Step, out: &mut Vec<String>) {
        match step {
            Step::Alloc(id, bytes, stream) => self.alloc(id, bytes, stream, out),
            Step::Free(id) => {
                let Some((placement, requested, uses)) = self.live.remove(&id) else { return };
                self.device.free_requested(placement);
                self.torch.free_requested(placement);
                if uses.is_empty() {
                    self.complete(placement, requested);
                    return;
                }
                self.waiting.insert(id, (placement, requested, uses.len()));
                self.device.pend(AllocId(id), placement, requested);
                for stream in uses {
                    self.events.entry(stream).or_default().push(id);
                }
            }
            Step::Record(id, stream) => {
                if let Some((placement, _, uses)) = self.live.get_mut(&id) {
                    let own = self.torch.block(placement.handle).stream;
                    if own.0 != stream && !uses.contains(&stream) {
                        uses.push(stream);
                    }
                }
            }
            Step::Done(done) => self.done = done,
            Step::Trim => {
                self.torch.trim(&mut self.device);
                self.forget_events();
            }
            Step::Fraction(fraction) => self.torch.set_memory_fraction(fraction, self.device.total()),
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
            Step::Stats => self.stats(out),
        }
    }

    fn alloc(&mut self, id: u32, bytes: u64, stream: u16, out: &mut Vec<String>) {
        let capture = if self.inside.is_some() { Capture::MemPool } else { Capture::No };
        let captures = self.inside.is_some() && self.torch.profile.mem_pool_is_capture();
        if self.done && !captures {
            self.process_events();
        }
        let request =
            Request { bytes, stream: StreamIdx(stream), pool: PoolIdx(self.inside.unwrap_or(0)), capture };
        let syncs = self.torch.stats.num_sync_all_streams;
        match self.torch.alloc(&mut self.device, request) {
            Ok(placement) => {
                self.device.allocated(placement, bytes);
                self.live.insert(id, (placement, bytes, Vec::new()));
                out.push(format!("at {id} {:x}", placement.address));
            }
            Err(error) => out.push(format!("oom {id} {}", error.message)),
        }
        if self.torch.stats.num_sync_all_streams != syncs {
            self.forget_events();
        }
    }

    fn process_events(&mut self) {
        for (_, ids) in std::mem::take(&mut self.events) {
            for id in ids {
                let Some(waiting) = self.waiting.get_mut(&id) else { continue };
                waiting.2 -= 1;
                if waiting.2 == 0 {
                    let (placement, requested, _) = *waiting;
                    self.waiting.remove(&id);
                    self.device.unpend(AllocId(id));
                    self.complete(placement, requested);
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

    fn stats(&self, out: &mut Vec<String>) {
        let stats = &self.torch.stats;
        let row = |stat: &Stat| format!(" {}/{}/{}/{}", stat.current, stat.peak, stat.allocated, stat.freed);
        for (name, arrays) in NAMES.iter().zip(&stats.arrays) {
            out.push(format!("{name}{}", arrays.iter().map(row).collect::<String>()));
        }
        out.push(format!("oversize_allocations{}", row(&stats.oversize_allocations)));
        out.push(format!("oversize_segments{}", row(&stats.oversize_segments)));
        out.push(format!("retries {} ooms {}", stats.num_alloc_retries, stats.num_ooms));
        if self.has_device_counters {
            let (alloc, free, sync) =
                (stats.num_device_alloc, stats.num_device_free, stats.num_sync_all_streams);
            out.push(format!("device_alloc {alloc} device_free {free} sync {sync}"));
        }
        out.push(format!("stub used {}", self.device.total() - self.device.free()));
        // The books outside must say the same as PyTorch's own.
        let books = &self.device.books;
        for (name, gauge) in [
            (Name::AllocatedBytes, books.allocated),
            (Name::ReservedBytes, books.reserved),
            (Name::ActiveBytes, books.active),
            (Name::RequestedBytes, books.requested),
            (Name::InactiveSplitBytes, books.inactive_split),
        ] {
            let own = stats.all(name);
            assert_eq!(
                (own.current as u64, own.peak as u64),
                (gauge.current, gauge.peak),
                "books of {name:?}"
            );
        }
    }
}

/// The releases that have been built: (text, (major, minor), program).
fn oracles() -> Vec<(String, (u8, u8), PathBuf)> {
    let folder = std::env::var_os("GPUTRACE_ORACLE")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/oracle"), PathBuf::from);
    let entries = std::fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let text = name.strip_prefix("oracle-")?;
            let mut parts = text.split('.').map(str::parse);
            let version = (parts.next()?.ok()?, parts.next()?.ok()?);
            Some((text.to_string(), version, entry.path()))
        })
        .collect();
    found.sort_by_key(|(_, version, _)| *version);
    found
}

fn option_strings(version: (u8, u8)) -> Vec<&'static str> {
    let all: &[((u8, u8), &str)] = &[
        ((2, 0), ""),
        ((2, 0), "max_split_size_mb:21"),
        ((2, 0), "max_split_size_mb:128"),
        ((2, 0), "roundup_power2_divisions:4"),
        ((2, 0), "roundup_power2_divisions:[1:2,8:8,64:4,>:1]"),
        ((2, 0), "garbage_collection_threshold:0.6"),
        ((2, 0), "garbage_collection_threshold:0.5,max_split_size_mb:64"),
        ((2, 1), "expandable_segments:True"),
        ((2, 5), "expandable_segments:True,max_split_size_mb:64"),
        ((2, 1), "expandable_segments:True,roundup_power2_divisions:8,garbage_collection_threshold:0.6"),
        ((2, 6), "max_split_size_mb:32,max_non_split_rounding_mb:40"),
        ((2, 11), "large_segment_size_mb:32"),
        ((2, 11), "large_segment_size_mb:64,expandable_segments:True"),
        ((2, 12), "throw_on_cudamalloc_oom:True"),
        ((2, 10), "per_process_memory_fraction:0.7"),
    ];
    all.iter().filter(|(since, _)| *since <= version).map(|(_, options)| *options).collect()
}

struct Case<'a> {
    program: &'a Path,
    version: (u8, u8),
    options: &'a str,
    total: u64,
    direction: Direction,
    steps: &'a [Step],
}

fn real(case: &Case) -> Vec<String> {
    let mut command = Command::new(case.program);
    command.env("STUB_TOTAL", case.total.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
    command.stderr(Stdio::null()).env_remove("STUB_DESCENDING");
    command.env_remove("PYTORCH_CUDA_ALLOC_CONF").env_remove("PYTORCH_ALLOC_CONF");
    if !case.options.is_empty() {
        command.env("PYTORCH_CUDA_ALLOC_CONF", case.options);
    }
    if case.direction == Direction::Descending {
        command.env("STUB_DESCENDING", "1");
    }
    let mut child = command.spawn().unwrap();
    let text: String = case.steps.iter().map(|step| step.text() + "\n").collect();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().unwrap();
    let _ = writer.join();
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_string).collect()
}

fn simulated(case: &Case) -> Vec<String> {
    let profile = profile(case.version).unwrap();
    let options = parse(case.options, profile).unwrap();
    let mut simulated = Simulated {
        torch: Torch::new(options, *profile, 4, 200),
        device: Device::new(case.total, None, Box::new(Bump::new(case.direction))).audited(),
        live: HashMap::new(),
        events: BTreeMap::new(),
        waiting: HashMap::new(),
        done: true,
        inside: None,
        uses: HashMap::new(),
        has_device_counters: case.version >= (2, 3),
    };
    let mut out = Vec::new();
    for step in case.steps {
        simulated.step(*step, &mut out);
    }
    out
}

/// What may differ: advice and process lists of the texts, and releases' own internal errors.
fn comparable(line: &str) -> String {
    let end = [
        "If reserved memory is >>",
        "If reserved but unallocated",
        "expandable_segments is enabled",
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

fn compare(flavour: Flavour) {
    let seeds: u64 = std::env::var("ORACLE_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(3);
    let oracles = oracles();
    if oracles.is_empty() {
        println!("skipped: no oracle; make some with tests/oracle/build.sh target/oracle 2.11.0");
    }
    let (mut n_programs, mut n_lines) = (0, 0);
    for (text, version, program) in oracles {
        // 2.0 has no calls for private pools, 2.1 other ones.
        if flavour == Flavour::Pools && version < (2, 3) {
            continue;
        }
        for options in option_strings(version) {
            for seed in 0..seeds {
                let steps = self::program(seed * 1000 + flavour as u64, 500, flavour);
                let direction = if seed % 2 == 0 { Direction::Ascending } else { Direction::Descending };
                let total = (1 + seed % 5) << 30;
                let case = Case { program: &program, version, options, total, direction, steps: &steps };
                let (real, simulated) = (real(&case), simulated(&case));
                // Private pools of expandable segments trip an assertion of PyTorch itself; nothing can be compared after.
                let errors = real.iter().position(|line| line.starts_with("error")).unwrap_or(real.len());
                let pairs = real[..errors].iter().zip(&simulated);
                for (index, (real, simulated)) in pairs.enumerate() {
                    assert_eq!(
                        comparable(real),
                        comparable(simulated),
                        "PyTorch {text}, {options:?}, seed {seed}, line {index}"
                    );
                }
                if errors == real.len() {
                    assert_eq!(real.len(), simulated.len(), "PyTorch {text}, {options:?}, seed {seed}");
                }
                n_programs += 1;
                n_lines += errors;
            }
        }
    }
    println!("{n_programs} programs, {n_lines} lines compared");
}

#[test]
fn the_compiled_allocator_does_the_same() {
    compare(Flavour::Plain);
}

#[test]
fn the_compiled_allocator_does_the_same_with_streams() {
    compare(Flavour::Streams);
}

#[test]
fn the_compiled_allocator_does_the_same_with_private_pools() {
    compare(Flavour::Pools);
}

#[test]
fn the_compiled_allocator_does_the_same_under_a_limit() {
    compare(Flavour::Limited);
}
