//! Periodic programs with small disturbances, replayed twice: with what repeats skipped, and with every op simulated. Nothing may differ.
//!
//! `SKIP_PROGRAMS` sets how many programs there are; `make skips` tries 10,000.

use std::ops::ControlFlow;

use crate::addresses::{AddressSpace, Bump, Direction, Recorded, Shuffled};
use crate::device::{Device, Placement};
use crate::driver::{Continued, Disturbance, Knowledge};
use crate::ops::{AllocId, Allocation, Builder, Op, OpStream, OtherChange, Others, RecordedOom};
use crate::ops::{DriverCall, PoolChange, PoolIdx, StackId, StreamIdx};
use crate::policies::torch::{PROFILES, Torch, parse};
use crate::policies::{Build, POLICIES, Policy};
use crate::simulator::{Observer, Outcome, Skip, run, run_with_limits};
use crate::skip::Repeats;
use crate::whatif::{Laboratory, Other, Question};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

struct Dice(u64);

impl Dice {
    fn of(seed: u64) -> Dice {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        dice.below(2);
        dice
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    fn of_all<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len() as u64) as usize]
    }
}

/// What a step does, each time.
#[derive(Clone, Copy, Debug)]
enum Deed {
    Ask {
        requested: u64,
        stream: u16,
        pool: u16,
    },
    /// Gives back what was asked for so many requests ago, if it is still there, and what waits for a stream is done so many deeds later.
    Give {
        ago: usize,
        done_after: usize,
    },
    Trim,
    Change(u16, PoolChange),
}

/// Writes steps into an [`OpStream`].
struct Author {
    builder: Builder,
    /// By request: what is not given back.
    made: Vec<Option<AllocId>>,
    /// Frees that complete later: deeds left, and which.
    waiting: Vec<(usize, AllocId)>,
}

impl Author {
    fn ask(&mut self, requested: u64, stream: u16, pool: u16) {
        let (stack, stream, pool) = (StackId::NONE, StreamIdx(stream), PoolIdx(pool));
        let id = self.builder.alloc(Allocation { requested, address: 0, stack, stream, pool });
        self.made.push(Some(id));
    }

    fn complete(&mut self) {
        let due: Vec<AllocId> =
            self.waiting.iter().filter(|(left, _)| *left == 0).map(|(_, id)| *id).collect();
        self.waiting.retain(|(left, _)| *left > 0);
        self.waiting.iter_mut().for_each(|(left, _)| *left -= 1);
        due.into_iter().for_each(|id| self.builder.op(Op::FreeCompleted(id)));
    }

    fn give(&mut self, ago: usize, done_after: usize) {
        let Some(at) = self.made.len().checked_sub(ago + 1) else { return };
        let Some(id) = self.made[at].take() else { return };
        self.builder.op(Op::FreeRequested(id));
        match done_after {
            0 => self.builder.op(Op::FreeCompleted(id)),
            later => self.waiting.push((later, id)),
        }
    }

    fn deed(&mut self, deed: Deed) {
        self.complete();
        match deed {
            Deed::Ask { requested, stream, pool } => self.ask(requested, stream, pool),
            Deed::Give { ago, done_after } => self.give(ago, done_after),
            Deed::Trim => self.builder.op(Op::Trim),
            Deed::Change(pool, change) => self.builder.op(Op::ChangePool(PoolIdx(pool), change)),
        }
    }
}

fn size(dice: &mut Dice) -> u64 {
    match dice.below(6) {
        0 => 1 + dice.below(4 * KIB),
        1 => 1 + dice.below(MIB),
        2 => MIB + dice.below(9 * MIB),
        3 => 10 * MIB + dice.below(60 * MIB),
        4 => 512 * (1 + dice.below(300)),
        _ => 2 * MIB * (1 + dice.below(8)),
    }
}

/// A step of so many requests. All of them are given back, most in this step, some in the next ones.
fn step(dice: &mut Dice, is_plain: bool) -> Vec<Deed> {
    let n = 6 + dice.below(40) as usize;
    let (n_streams, n_pools, may_trim) = (1 + dice.below(3), 1 + dice.below(2), dice.chance(8));
    let n_pools = if is_plain { 1 } else { n_pools };
    // In per cent: how many outlive the step.
    let n_outliving = *dice.of_all(&[0, 0, 5, 15]);
    let sizes: Vec<u64> = (0..4 + dice.below(8)).map(|_| size(dice)).collect();
    // (place in the step, deed)
    let mut deeds: Vec<(usize, Deed)> = Vec::new();
    for request in 0..n {
        let (stream, pool) = (dice.below(n_streams) as u16, dice.below(n_pools) as u16);
        let requested = *dice.of_all(&sizes);
        deeds.push((request, Deed::Ask { requested, stream, pool }));
        // Given back before request number `until`, which may be one of a later step.
        let longest = if dice.chance(n_outliving) { 3 * n } else { n / 2 + 1 };
        let until = request + 1 + dice.below(longest as u64) as usize;
        let done_after = if dice.chance(20) && !is_plain { 1 + dice.below(30) as usize } else { 0 };
        deeds.push((until % n, Deed::Give { ago: until - request - 1, done_after }));
    }
    // What is given back before a request comes before it.
    deeds.sort_by_key(|(at, deed)| (*at, matches!(deed, Deed::Ask { .. })));
    let mut deeds: Vec<Deed> = deeds.into_iter().map(|(_, deed)| deed).collect();
    if may_trim {
        deeds.insert(dice.below(deeds.len() as u64) as usize, Deed::Trim);
    }
    if n_pools > 1 && dice.chance(20) {
        let change = *dice.of_all(&[PoolChange::Trim, PoolChange::ServeOthers, PoolChange::ServeNoOthers]);
        deeds.insert(dice.below(deeds.len() as u64) as usize, Deed::Change(1, change));
    }
    deeds
}

/// Something that one step does otherwise.
fn disturb(deeds: &mut Vec<Deed>, dice: &mut Dice, is_plain: bool) {
    let at = dice.below(deeds.len() as u64) as usize;
    match dice.below(7) {
        // A request more, which stays.
        0 => deeds.insert(at, Deed::Ask { requested: size(dice), stream: 0, pool: 0 }),
        // Another size.
        1 | 2 => {
            for deed in &mut deeds[at..] {
                if let Deed::Ask { requested, .. } = deed {
                    *requested = if dice.chance(50) { *requested + 512 } else { size(dice) };
                    break;
                }
            }
        }
        // An event that completes later.
        3 if !is_plain => {
            for deed in &mut deeds[at..] {
                if let Deed::Give { done_after, .. } = deed {
                    *done_after += 1 + dice.below(50) as usize;
                    break;
                }
            }
        }
        // Another thread comes in between.
        4 => {
            deeds.insert(at, Deed::Ask { requested: size(dice), stream: 0, pool: 0 });
            deeds.insert(
                at + 1,
                Deed::Give { ago: 0, done_after: if is_plain { 0 } else { dice.below(4) as usize } },
            );
        }
        5 => deeds.insert(at, Deed::Trim),
        // Two requests change places.
        _ => {
            let other = dice.below(deeds.len() as u64) as usize;
            deeds.swap(at, other);
        }
    }
}

/// Weights, and steps that are the same but for a few.
fn program(seed: u64) -> OpStream {
    written(seed, false)
}

/// The same without pools, and every free completes at once.
pub(crate) fn periodic(seed: u64) -> OpStream {
    written(seed, true)
}

fn written(seed: u64, is_plain: bool) -> OpStream {
    let mut dice = Dice::of(seed);
    let mut builder = Builder::new(0);
    (1..3).for_each(|handle| _ = builder.stream(handle).unwrap());
    if !is_plain {
        builder.pool((u64::from(dice.chance(50)), 7)).unwrap();
    }
    let mut author = Author { builder, made: Vec::new(), waiting: Vec::new() };
    for _ in 0..dice.below(20) {
        let requested = size(&mut dice);
        author.ask(requested, 0, 0);
    }
    let kinds: Vec<Vec<Deed>> =
        (0..1 + u64::from(dice.chance(25))).map(|_| step(&mut dice, is_plain)).collect();
    let (n_steps, n_disturbed) = (20 + dice.below(60) as usize, dice.below(4));
    let disturbed: Vec<usize> = (0..n_disturbed).map(|_| dice.below(n_steps as u64) as usize).collect();
    let (release_at, oom_at) = (dice.below(200) as usize, dice.below(100) as usize);
    for n in 0..n_steps {
        // Two kinds by turns, or one after the other.
        let kind = if seed.is_multiple_of(2) { n % kinds.len() } else { n * kinds.len() / n_steps };
        let mut deeds = kinds[kind].clone();
        if disturbed.contains(&n) {
            disturb(&mut deeds, &mut dice, is_plain);
        }
        deeds.into_iter().for_each(|deed| author.deed(deed));
        if is_plain {
            continue;
        }
        if n == release_at {
            author.builder.op(Op::ReleasePool(PoolIdx(1)));
        }
        if n == oom_at {
            let (stream, stack) = (Some(StreamIdx(0)), StackId::NONE);
            author.builder.oom(RecordedOom {
                rounded: 900 * MIB,
                device_free: 0,
                stream,
                pool: PoolIdx(0),
                stack,
            });
        }
    }
    let n_ops = author.builder.n_ops();
    let mut stream = author.builder.finish();
    if dice.chance(30) {
        let change = |dice: &mut Dice| OtherChange {
            before_op: dice.below(u64::from(n_ops)) as u32,
            name: 0,
            bytes: dice.below(200) * MIB,
        };
        let mut changes: Vec<OtherChange> = (0..dice.below(4)).map(|_| change(&mut dice)).collect();
        changes.sort_by_key(|change| change.before_op);
        stream.others = Some(Others { names: vec!["others".into()], changes, is_charge_known: true });
    }
    stream
}

/// Every placement, those that were skipped too.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Log {
    /// Op, id, address, bytes.
    pub(crate) placed: Vec<(usize, u32, u64, u64)>,
    reserved: Vec<u64>,
    pub(crate) n_skipped: usize,
}

impl Observer for Log {
    fn placed(&mut self, op: usize, id: AllocId, at: Placement, device: &Device) -> ControlFlow<()> {
        self.placed.push((op, id.0, at.address, at.bytes));
        self.reserved.push(device.books.reserved.current);
        ControlFlow::Continue(())
    }

    fn edge(&self) -> Option<[u64; 2]> {
        Some([self.placed.len() as u64, 0])
    }

    fn skipped(&mut self, skip: &Skip, [since, _]: [u64; 2], _: &[(AllocId, AllocId, Placement)]) {
        let cycle = since as usize..self.placed.len();
        for n in 1..=skip.times() as usize {
            for at in cycle.clone() {
                let (op, id, address, bytes) = self.placed[at];
                self.placed.push((op + n * skip.cycle, id + n as u32 * skip.shift, address, bytes));
            }
            self.reserved.extend_from_within(cycle.clone());
        }
        self.n_skipped += skip.to - skip.from;
    }
}

/// All that can be told of a replay.
#[derive(Debug, PartialEq)]
struct Told {
    outcome: Outcome,
    placed: Vec<(usize, u32, u64, u64)>,
    reserved: Vec<u64>,
    n_strayed: u64,
    /// Statistics, what the run hung on.
    torch: String,
}

/// The settings of a replay.
#[derive(Debug)]
struct Setting {
    profile: usize,
    options: &'static str,
    limit: Option<u64>,
    total: u64,
    space: u64,
}

const OPTIONS: [&str; 11] = [
    "",
    "",
    "expandable_segments:True",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.9",
    "max_split_size_mb:32",
    "max_split_size_mb:64,garbage_collection_threshold:0.7",
    "roundup_power2_divisions:4",
    "expandable_segments:True,garbage_collection_threshold:0.5",
    "expandable_segments:True,roundup_power2_divisions:8",
    "max_split_size_mb:21,roundup_power2_divisions:2",
];

impl Setting {
    fn of(dice: &mut Dice, peak: u64) -> Setting {
        let limit = dice.chance(60).then(|| peak * (50 + dice.below(80)) / 100);
        let total = *dice.of_all(&[u64::MAX, u64::MAX, 4 << 30, peak * 11 / 10]);
        let profile = dice.below(PROFILES.len() as u64) as usize;
        Setting { profile, options: dice.of_all::<&str>(&OPTIONS), limit, total, space: dice.below(6) }
    }

    fn space<'a>(&self, stream: &OpStream, knowledge: &'a Knowledge) -> Box<dyn AddressSpace + 'a> {
        match self.space {
            0 => Box::new(Bump::new(Direction::Ascending)),
            // Reservations of terabytes would come to the end of the addresses.
            1 if !self.options.contains("expandable") => Box::new(Bump::new(Direction::Descending)),
            1 | 2 => Box::new(Shuffled::new(3)),
            3 => Box::new(Recorded::new(&stream.driver)),
            4 => Box::new(Continued::new(knowledge, None)),
            _ => Box::new(Continued::new(knowledge, Some(Disturbance::new(5, 0.05)))),
        }
    }

    /// What comes of it, and how many ops were skipped.
    fn told(&self, stream: &OpStream, knowledge: &Knowledge, skips: bool) -> (Told, usize) {
        let profile = &PROFILES[self.profile];
        let options = parse(self.options, profile).unwrap_or_else(|_| parse("", profile).unwrap());
        let mut torch = Torch::new(options, *profile, stream.streams.len(), stream.pools.len());
        let mut device = Device::new(self.total, self.limit, self.space(stream, knowledge));
        if let Some(others) = &stream.others {
            device = device.beside(others);
        }
        if !skips {
            device = device.simulating_all();
        }
        let mut log = Log::default();
        let outcome = run(stream, &mut torch, &mut device, &mut log);
        let n_strayed = device.n_strayed();
        let told = format!("{:?} {:?}", torch.stats(), torch.latitude());
        (Told { outcome, placed: log.placed, reserved: log.reserved, n_strayed, torch: told }, log.n_skipped)
    }
}

/// The stream with the addresses and driver calls of a replay, as if that had been recorded.
fn recorded(stream: &OpStream) -> OpStream {
    struct Placed(Vec<(u32, u64)>);
    impl Observer for Placed {
        fn placed(&mut self, _: usize, id: AllocId, at: Placement, _: &Device) -> ControlFlow<()> {
            self.0.push((id.0, at.address));
            ControlFlow::Continue(())
        }
    }
    /// Writes down what is asked of it.
    struct Calls<'a>(Bump, &'a std::cell::RefCell<Vec<(u32, DriverCall, u64, u64)>>, u32);
    impl AddressSpace for Calls<'_> {
        fn map(&mut self, bytes: u64, op: u32) -> Option<u64> {
            let address = self.0.map(bytes, op)?;
            self.2 = op;
            self.1.borrow_mut().push((op, DriverCall::Alloc, address, bytes));
            Some(address)
        }
        fn unmap(&mut self, address: u64, bytes: u64) {
            self.1.borrow_mut().push((self.2, DriverCall::Free, address, bytes));
        }
        fn reserve(&mut self, bytes: u64) -> u64 {
            self.0.reserve(bytes)
        }
    }
    let (calls, mut placed) = (std::cell::RefCell::default(), Placed(vec![]));
    let profile = &PROFILES[PROFILES.len() / 2];
    let mut torch =
        Torch::new(parse("", profile).unwrap(), *profile, stream.streams.len(), stream.pools.len());
    let space = Calls(Bump::new(Direction::Descending), &calls, 0);
    let mut device = Device::new(u64::MAX, None, Box::new(space)).simulating_all();
    run(stream, &mut torch, &mut device, &mut placed);
    drop(device);
    let mut stream = stream.clone();
    placed.0.into_iter().for_each(|(id, address)| stream.allocations[id as usize].address = address);
    let segments = calls.into_inner();
    stream.driver = segments
        .into_iter()
        .map(|(before_op, call, address, bytes)| crate::ops::DriverEvent {
            before_op,
            call,
            address,
            bytes,
            segment: 0,
        })
        .collect();
    stream
}

pub(crate) fn n_programs() -> u64 {
    std::env::var("SKIP_PROGRAMS").ok().and_then(|n| n.parse().ok()).unwrap_or(400)
}

/// What all programs have in common: how often something was skipped.
#[derive(Default)]
struct Tally {
    n_replays: usize,
    n_with_skips: usize,
    n_ops: usize,
    n_skipped: usize,
}

#[test]
fn disturbed_periodic_programs_come_out_as_if_every_op_were_simulated() {
    let tallies = crate::cores::on_all_cores(n_programs() as usize, |seed| {
        let mut tally = Tally::default();
        let mut dice = Dice::of(seed as u64 + 77);
        let plain = program(seed as u64);
        let stream = if seed % 3 == 0 { recorded(&plain) } else { plain };
        let knowledge = Knowledge::of(&stream);
        let free = Setting { profile: 0, options: "", limit: None, total: u64::MAX, space: 4 };
        let peak = free.told(&stream, &knowledge, false).0.outcome.books.reserved.peak;
        for _ in 0..4 {
            let setting = Setting::of(&mut dice, peak);
            let (told, n_skipped) = setting.told(&stream, &knowledge, true);
            let (all, none) = setting.told(&stream, &knowledge, false);
            assert_eq!(none, 0);
            assert_eq!(told.outcome, all.outcome, "program {seed}, {setting:?}");
            assert!(told == all, "program {seed}, {setting:?}");
            tally.n_replays += 1;
            tally.n_with_skips += usize::from(n_skipped > 0);
            tally.n_ops += stream.ops.len();
            tally.n_skipped += n_skipped;
        }
        Some(tally)
    });
    let sum = |of: fn(&Tally) -> usize| tallies.iter().map(of).sum::<usize>();
    let (n_replays, n_with_skips) = (sum(|it| it.n_replays), sum(|it| it.n_with_skips));
    let (n_ops, n_skipped) = (sum(|it| it.n_ops), sum(|it| it.n_skipped));
    println!(
        "{n_with_skips} of {n_replays} replays skipped something, {n_skipped} of {n_ops} ops in all; 0 differ"
    );
    assert!(n_with_skips * 3 > n_replays && n_skipped * 5 > n_ops, "{n_with_skips} {n_skipped}");
}

#[test]
fn whole_questions_have_the_same_answers() {
    for seed in 0..n_programs() / 20 {
        let stream = recorded(&program(seed * 3));
        let mut dice = Dice::of(seed);
        let asked = |skips: bool| {
            let laboratory = Laboratory::new(&stream).unwrap();
            if skips { laboratory } else { laboratory.simulating_all() }
        };
        let peak = asked(false).guess(&Question::torch((2, 9), "")).unwrap().books.reserved.peak;
        let limits = [100, 95, 80, 60, 40].map(|percent| peak * percent / 100);
        for _ in 0..2 {
            let version = PROFILES[dice.below(PROFILES.len() as u64) as usize].version;
            let options = *dice.of_all(&["", "expandable_segments:True", "garbage_collection_threshold:0.6"]);
            let other = *dice.of_all(&[Other::Ignored, Other::Recorded, Other::Bytes(3 * MIB)]);
            let limit = dice.chance(40).then_some(peak * 9 / 10);
            let question = Question { limit, other, ..Question::torch(version, options) };
            let told = |laboratory: Laboratory| {
                let gap = laboratory.gap(&question);
                let series = laboratory.reserved_over_time(&question);
                let below = laboratory.guess_with_limits(&question, &limits);
                let below: Vec<_> = limits
                    .iter()
                    .map(|limit| laboratory.guess(&Question { limit: Some(*limit), ..question.clone() }))
                    .chain([below])
                    .collect();
                laboratory.check_limits(&question, &limits).ok();
                let checks = laboratory.check_under(&question).ok();
                let answer = laboratory.answer(&question).ok();
                format!("{gap:?} {series:?} {below:?} {checks:?} {answer:?}")
            };
            assert!(told(asked(true)) == told(asked(false)), "program {seed}, {question:?}");
        }
    }
}

#[test]
fn every_policy_comes_out_as_if_every_op_were_simulated() {
    for entry in POLICIES {
        let mut n_with_skips = 0;
        for seed in 0..n_programs() / 20 {
            let stream = program(seed);
            let told = |skips: bool| {
                let (options, torch_version) = ("", (2, 9));
                let (n_streams, n_pools) = (stream.streams.len(), stream.pools.len());
                let profile = Some(&stream);
                let mut policy =
                    (entry.build)(Build { options, torch_version, n_streams, n_pools, profile }).unwrap();
                let limit = Some((100 + seed * 20) * MIB);
                let space = Box::new(Bump::new(Direction::Ascending));
                let mut device = Device::new(u64::MAX, limit, space);
                if !skips {
                    device = device.simulating_all();
                }
                let mut log = Log::default();
                let outcome = run(&stream, &mut *policy, &mut device, &mut log);
                (outcome, log.placed, log.reserved, log.n_skipped)
            };
            let (outcome, placed, reserved, n_skipped) = told(true);
            n_with_skips += usize::from(n_skipped > 0);
            assert!((outcome, placed, reserved, 0) == told(false), "{}, program {seed}", entry.name);
        }
        println!("{}: {n_with_skips} programs skipped something", entry.name);
    }
}

#[test]
fn limits_on_the_way_of_a_replay_fork_it_where_they_did() {
    for seed in 0..n_programs() / 10 {
        let stream = program(seed);
        let repeats = Repeats::of(&stream);
        let told = |skips: bool| {
            let profile = &PROFILES[seed as usize % PROFILES.len()];
            let (n_streams, n_pools) = (stream.streams.len(), stream.pools.len());
            let mut torch = Torch::new(parse("", profile).unwrap(), *profile, n_streams, n_pools);
            let mut device = Device::new(u64::MAX, None, Box::new(Bump::new(Direction::Ascending)));
            if !skips {
                device = device.simulating_all();
            }
            let limits: Vec<u64> = (1..12).map(|n| n * 40 * MIB).collect();
            let mut log = Log::default();
            let (outcome, below) =
                run_with_limits((&stream, &repeats), false, &mut torch, &mut device, &mut log, &limits);
            let below: Vec<_> = below
                .into_iter()
                .map(|it| (it.limit, it.outcome, it.n_strayed, it.observer.placed, it.observer.reserved))
                .collect();
            (outcome, below, log.placed)
        };
        assert!(told(true) == told(false), "program {seed}");
    }
}
