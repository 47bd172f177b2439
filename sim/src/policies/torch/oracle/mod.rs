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

mod harness;
mod periodic;
mod program;
mod simulated;

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::addresses::{Bump, Direction};
use harness::*;
use program::*;
use simulated::*;

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
