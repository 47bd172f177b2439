//! Periodic programs with small disturbances, of which a replay skips what repeats, held against the compiled allocator: every address.

use super::*;
use crate::ops::{Op, OpStream};
use crate::simulator::run;
use crate::skip::tests::{Log, periodic};

const TOTAL: u64 = 4 << 30;
/// The part of the device that may be used, where options need a limit.
const FRACTION: f64 = 0.5;

/// The commands of a stream whose frees all complete at once.
fn steps(stream: &OpStream) -> Vec<Step> {
    let step = |op: &Op| match *op {
        Op::Alloc(id) => {
            let allocation = stream.allocation(id);
            Some(Step::Alloc(id.0, allocation.requested, allocation.stream.0))
        }
        Op::FreeRequested(id) => Some(Step::Free(id.0)),
        Op::Trim => Some(Step::Trim),
        Op::FreeCompleted(_) => None,
        Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {
            panic!("{op:?} is not part of these programs")
        }
    };
    stream.ops.iter().filter_map(step).collect()
}

/// What the simulator says of it, with what repeats skipped, and how many ops were.
fn skipping(stream: &OpStream, options: &str, version: (u8, u8), limit: Option<u64>) -> (Vec<String>, usize) {
    let profile = profile(version).unwrap();
    let n_streams = stream.streams.len();
    let mut torch = Torch::new(parse(options, profile).unwrap(), *profile, n_streams, 1);
    let mut device = Device::new(TOTAL, limit, Box::new(Bump::new(Direction::Ascending)));
    let mut log = Log::default();
    run(stream, &mut torch, &mut device, &mut log);
    let said = log.placed.iter().map(|(_, id, address, _)| format!("at {id} {address:x}"));
    (said.collect(), log.n_skipped)
}

#[test]
fn what_is_skipped_is_what_the_compiled_allocator_does() {
    let oracles = oracles();
    for oracle in &oracles {
        let (mut n_programs, mut n_requests, mut n_skipped) = (0, 0, 0);
        for options in option_strings(oracle.version) {
            let limit = options.contains("garbage").then_some((TOTAL as f64 * FRACTION) as u64);
            let mut harness = Harness::start(&oracle.program, options);
            for seed in 0..crate::skip::tests::n_programs() / 40 {
                let stream = periodic(seed);
                let (ours, n_ops) = skipping(&stream, options, oracle.version, limit);
                let mut text = format!("run {TOTAL} 1\nwatch\n");
                if limit.is_some() {
                    text.push_str(&(Step::Fraction(FRACTION).text() + "\n"));
                }
                steps(&stream).iter().for_each(|step| text.push_str(&(step.text() + "\n")));
                let real = harness.run(&(text + "stop\n"));
                let is_said = |line: &&String| line.starts_with("at ") || line.starts_with("oom ");
                let real = real.iter().filter(is_said).take_while(|line| line.starts_with("at "));
                let name = format!("PyTorch {}, {options:?}, program {seed}", oracle.text);
                assert!(real.eq(ours.iter()), "{name}");
                n_programs += 1;
                n_requests += ours.len();
                n_skipped += n_ops;
            }
            harness.stop();
        }
        println!(
            "{}: {n_programs} periodic programs, {n_requests} addresses, {n_skipped} ops skipped; 0 differ",
            oracle.text
        );
    }
}
