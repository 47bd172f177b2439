//! What every policy must do, whatever it decides: the auditor sees every placement.

use gputrace_sim::addresses::{Bump, Direction};
use gputrace_sim::bounds::Bounds;
use gputrace_sim::device::Device;
use gputrace_sim::ops::{Allocation, Builder, Op, OpStream, PoolIdx, StackId};
use gputrace_sim::policies::{Build, POLICIES, PolicyEntry};
use gputrace_sim::simulator::{Outcome, Unobserved, run};

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }
}

/// A random program that frees everything at its end and then gives its cache back.
fn program(seed: u64) -> OpStream {
    let mut random = Random(seed * 2 + 1);
    let mut builder = Builder::new(0);
    let streams = [0, 7, 9].map(|handle| builder.stream(handle).unwrap());
    let pools = [PoolIdx::DEFAULT, builder.pool((0, 1)).unwrap()];
    let (mut live, mut pending) = (Vec::new(), Vec::new());
    for _ in 0..2000 {
        match random.below(100) {
            0..=49 => {
                let requested = match random.below(4) {
                    0 => 1 + random.below(4096),
                    1 => 1 + random.below(1 << 20),
                    2 => 1 + random.below(24 << 20),
                    _ => (1 + random.below(40)) << 20,
                };
                let pool = pools[usize::from(random.below(8) == 0)];
                let stream = streams[random.below(3) as usize];
                live.push(builder.alloc(Allocation {
                    requested,
                    address: 0,
                    stack: StackId::NONE,
                    stream,
                    pool,
                }));
            }
            50..=94 if !live.is_empty() => {
                let id = live.swap_remove(random.below(live.len() as u64) as usize);
                builder.op(Op::FreeRequested(id));
                if random.below(10) == 0 { pending.push(id) } else { builder.op(Op::FreeCompleted(id)) }
            }
            95..=97 if !pending.is_empty() => builder.op(Op::FreeCompleted(pending.remove(0))),
            98 => builder.op(Op::Trim),
            _ => {}
        }
    }
    for id in live {
        builder.op(Op::FreeRequested(id));
        builder.op(Op::FreeCompleted(id));
    }
    pending.into_iter().for_each(|id| builder.op(Op::FreeCompleted(id)));
    builder.op(Op::ReleasePool(pools[1]));
    builder.op(Op::Trim);
    builder.finish()
}

/// A training loop: weights, turns of the same requests of which one is freed late now and then, and what each turn keeps.
fn training(seed: u64) -> OpStream {
    let mut random = Random(seed * 2 + 1);
    let mut builder = Builder::new(0);
    let stream = builder.stream(0).unwrap();
    let alloc = |builder: &mut Builder, requested| {
        builder.alloc(Allocation {
            requested,
            address: 0,
            stack: StackId::NONE,
            stream,
            pool: PoolIdx::DEFAULT,
        })
    };
    let free = |builder: &mut Builder, id| {
        builder.op(Op::FreeRequested(id));
        builder.op(Op::FreeCompleted(id));
    };
    let mut live: Vec<_> = (0..10).map(|_| alloc(&mut builder, 1 + random.below(8 << 20))).collect();
    let sizes: Vec<u64> = (0..30).map(|_| 1 + random.below(24 << 20)).collect();
    for _ in 0..12 {
        let late = random.below(40);
        let turn: Vec<_> = sizes.iter().map(|bytes| alloc(&mut builder, *bytes)).collect();
        for (index, id) in (0..).zip(turn) {
            if index == late || index == 7 { live.push(id) } else { free(&mut builder, id) }
        }
    }
    live.into_iter().for_each(|id| free(&mut builder, id));
    builder.op(Op::Trim);
    builder.finish()
}

fn programs() -> impl Iterator<Item = OpStream> {
    (0..10).flat_map(|seed| [program(seed), training(seed)])
}

fn simulate(entry: &PolicyEntry, stream: &OpStream, total: u64, limit: Option<u64>) -> Outcome {
    let build = Build {
        options: "",
        torch_version: (2, 11),
        n_streams: stream.streams.len(),
        n_pools: stream.pools.len(),
        profile: Some(stream),
    };
    let mut policy = (entry.build)(build).unwrap();
    let mut device = Device::new(total, limit, Box::new(Bump::new(Direction::Ascending))).audited();
    run(stream, &mut *policy, &mut device, &mut Unobserved)
}

fn serves_all(entry: &PolicyEntry, outcome: &Outcome) {
    assert!(
        !outcome.is_cut_short,
        "{}: with default options, a policy serves whatever the device has room for, here 1 TiB: {:?}",
        entry.name, outcome.oom
    );
}

#[test]
fn every_policy_places_everything_apart_and_within_mapped_memory() {
    for entry in POLICIES {
        for stream in programs() {
            let outcome = simulate(entry, &stream, 1 << 40, None);
            serves_all(entry, &outcome);
            assert_eq!(outcome.books.n_allocs as usize, stream.n_requests(), "{}", entry.name);
            assert_eq!(outcome.books.allocated.current, 0, "{}", entry.name);
            assert_eq!(outcome.books.requested.current, 0, "{}", entry.name);
            assert_eq!(
                outcome,
                simulate(entry, &stream, 1 << 40, None),
                "{} is not deterministic",
                entry.name
            );
        }
    }
}

#[test]
fn no_policy_reserves_less_than_the_lower_bound() {
    for entry in POLICIES {
        for stream in programs() {
            let outcome = simulate(entry, &stream, 1 << 40, None);
            serves_all(entry, &outcome);
            let (reserved, requested) = (outcome.books.reserved.peak, outcome.books.requested.peak);
            let least = Bounds::of(&stream).requested;
            assert!(reserved >= least, "{}: {reserved} reserved, {least} in use at once", entry.name);
            assert!(requested >= least, "{}: {requested} requested, {least} in use at once", entry.name);
        }
    }
}

#[test]
fn every_policy_ends_in_an_error_where_memory_is_short() {
    for entry in POLICIES {
        for stream in programs() {
            for (total, limit) in [(64 << 20, None), (1 << 40, Some(64 << 20)), (0, None)] {
                let outcome = simulate(entry, &stream, total, limit);
                assert!(outcome.is_cut_short && outcome.oom.is_some(), "{}", entry.name);
                let most = limit.unwrap_or(total);
                assert!(outcome.books.reserved.peak <= most, "{} reserved more than there is", entry.name);
            }
        }
    }
}

#[test]
fn every_policy_refuses_options_that_it_does_not_have() {
    for entry in POLICIES {
        for options in ["nonsense", "nonsense=1", "page=x", "backend:nonsense"] {
            let build = Build { options, torch_version: (2, 11), n_streams: 1, n_pools: 1, profile: None };
            assert!((entry.build)(build).is_err(), "{} accepts {options}", entry.name);
        }
    }
}

/// Every option of every policy that has `key=value` options, with amounts that no device has, or nearly: refused, or
/// computed with; never wrapped around.
#[test]
fn amounts_beyond_any_device_are_refused_or_computed_with() {
    let amounts = [u64::MAX, u64::MAX - 511, 1 << 63, (1 << 57) + 1, 1 << 57, (1 << 57) - 1];
    let stream = program(0);
    let mut refused = 0;
    for entry in POLICIES {
        // The keys as the help names them: words before a `=`.
        let keys =
            entry.options.split([' ', ',', ';', '(', '|']).filter_map(|word| Some(word.split_once('=')?.0));
        for (key, amount) in keys.flat_map(|key| amounts.map(|amount| (key, amount))) {
            let options = format!("{key}={amount}");
            let build =
                Build { options: &options, torch_version: (2, 9), n_streams: 3, n_pools: 2, profile: None };
            let Ok(mut policy) = (entry.build)(build) else {
                refused += usize::from(amount > 1 << 57);
                continue;
            };
            let mut device = Device::new(1 << 30, None, Box::new(Bump::new(Direction::Ascending))).audited();
            run(&stream, &mut *policy, &mut device, &mut Unobserved);
        }
    }
    assert!(refused > 20, "{refused}");
}

#[test]
fn policy_names_are_unique_and_explained() {
    for (index, entry) in POLICIES.iter().enumerate() {
        assert!(POLICIES[index + 1..].iter().all(|other| other.name != entry.name), "{} twice", entry.name);
        assert!(!entry.summary.is_empty() && !entry.options.is_empty(), "{}", entry.name);
    }
}

#[test]
fn a_plan_serves_every_turn_of_a_loop() {
    let entry = POLICIES.iter().find(|entry| entry.name == "stalloc").unwrap();
    let stream = training(1);
    let outcome = simulate(entry, &stream, 1 << 40, None);
    let (planned, fallback) = (outcome.counter("planned_requests"), outcome.counter("fallback_requests"));
    assert!(planned > 5 * fallback, "{planned} planned, {fallback} not");
    let unplanned = Build { options: "", torch_version: (2, 11), n_streams: 1, n_pools: 1, profile: None };
    let mut policy = (entry.build)(unplanned).unwrap();
    let mut device = Device::new(1 << 40, None, Box::new(Bump::new(Direction::Ascending)));
    let without = run(&stream, &mut *policy, &mut device, &mut Unobserved);
    assert_eq!(without.counter("planned_requests"), 0);
    assert!(outcome.books.reserved.peak <= without.books.reserved.peak);
}
