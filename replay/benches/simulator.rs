//! Events per second of the default PyTorch policy, and memory for ten million events.
//!
//! `cargo bench -p gputrace` prints one line for each shape of trace. The traces are made here: layers of a network that
//! keep activations in the forward pass and drop them in the backward pass, with sizes that vary between steps.

#![allow(clippy::print_stdout, reason = "a benchmark prints its result")]

use std::time::Instant;

use gputrace_replay::addresses::{Bump, Direction};
use gputrace_replay::device::Device;
use gputrace_replay::ops::{Allocation, Builder, Op, OpStream, PoolIdx, StackId, StreamIdx};
use gputrace_replay::policies::{Build, by_name};
use gputrace_replay::simulator::{Unobserved, run};

fn main() {
    for (name, n_layers, varies) in
        [("steady training", 48, false), ("varying sizes", 48, true), ("deep", 400, true)]
    {
        let started = Instant::now();
        let stream = training(10_000_000, n_layers, varies);
        let made = started.elapsed();
        let mut policy = by_name("torch")
            .and_then(|entry| {
                (entry.build)(Build { options: "", torch_version: (2, 11), n_streams: 1, n_pools: 1 })
            })
            .expect("the default policy has no options");
        let mut device = Device::new(u64::MAX, None, Box::new(Bump::new(Direction::Descending)));
        let started = Instant::now();
        let outcome = run(&stream, &mut *policy, &mut device, &mut Unobserved);
        let seconds = started.elapsed().as_secs_f64();
        println!(
            "{name}: {:.1} M events/s ({} events, made in {made:.1?}), peak reserved {} MiB, resident {} MiB",
            stream.ops.len() as f64 / seconds / 1e6,
            stream.ops.len(),
            outcome.books.reserved.peak >> 20,
            resident_mib(),
        );
    }
}

/// Most memory that this process had, MiB (Linux; 0 elsewhere).
fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) >> 10
}

fn training(n_events: usize, n_layers: u64, varies: bool) -> OpStream {
    let mut builder = Builder::new(0);
    let mut random = 1u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let alloc = |builder: &mut Builder, requested: u64| {
        builder.alloc(Allocation {
            requested,
            address: 0,
            stack: StackId::NONE,
            stream: StreamIdx(0),
            pool: PoolIdx::DEFAULT,
        })
    };
    let free = |builder: &mut Builder, id| {
        builder.op(Op::FreeRequested(id));
        builder.op(Op::FreeCompleted(id));
    };
    let n_done = |builder: &mut Builder| builder.stream_mut().ops.len();
    while n_done(&mut builder) < n_events {
        let tokens = if varies { 200 + next() % 1800 } else { 1024 };
        let mut kept = Vec::new();
        for layer in 0..n_layers {
            for width in [768, 2304, 768, 3072] {
                kept.push(alloc(&mut builder, tokens * width * 2));
                let scratch = alloc(&mut builder, 512 * (1 + layer % 7) + tokens * 8);
                free(&mut builder, scratch);
            }
        }
        while let Some(id) = kept.pop() {
            let gradient = alloc(&mut builder, tokens * 768 * 2);
            free(&mut builder, id);
            free(&mut builder, gradient);
        }
    }
    builder.finish()
}
