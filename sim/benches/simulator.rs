//! Events per second of the default PyTorch policy, memory for ten million events, and the same requests served by PyTorch's
//! own compiled allocator (`tests/oracle/`), where it was built.
//!
//! `cargo bench -p gputrace` prints one line for each shape of trace. The traces are made here: layers of a network that
//! keep activations in the forward pass and drop them in the backward pass, with sizes that vary between steps.

#![allow(clippy::print_stdout, reason = "a benchmark prints its result")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use gputrace_sim::addresses::{Bump, Direction};
use gputrace_sim::device::Device;
use gputrace_sim::ops::{Allocation, Builder, Op, OpStream, PoolIdx, StackId, StreamIdx};
use gputrace_sim::policies::{Build, by_name};
use gputrace_sim::simulator::{Unobserved, run};

const SHAPES: [(&str, u64, bool); 3] =
    [("steady training", 48, false), ("varying sizes", 48, true), ("deep", 400, true)];

fn main() {
    for (name, n_layers, varies) in SHAPES {
        let started = Instant::now();
        let stream = training(10_000_000, n_layers, varies);
        let made = started.elapsed();
        let (seconds, peak_mib) = simulated(&stream, Device::simulating_all);
        let (skipping, _) = simulated(&stream, |device| device);
        println!(
            "{name}: {:.1} M events/s, {:.1} where what repeats is skipped ({} events, made in {made:.1?}), peak reserved {peak_mib} MiB, resident {} MiB",
            stream.ops.len() as f64 / seconds / 1e6,
            stream.ops.len() as f64 / skipping / 1e6,
            stream.ops.len(),
            resident_mib(),
        );
    }
    match oracle() {
        Some(oracle) => {
            SHAPES.iter().for_each(|(name, n_layers, varies)| against(&oracle, name, *n_layers, *varies))
        }
        None => println!("skipped: no compiled allocator; make one with `make oracle RELEASES=2.11.0`"),
    }
}

/// Seconds, and the peak.
fn simulated(stream: &OpStream, prepared: fn(Device<'static>) -> Device<'static>) -> (f64, u64) {
    let mut policy = by_name("torch")
        .and_then(|entry| {
            (entry.build)(Build {
                options: "",
                torch_version: (2, 11),
                n_streams: 1,
                n_pools: 1,
                profile: None,
            })
        })
        .expect("the default policy has no options");
    let mut device = prepared(Device::new(u64::MAX, None, Box::new(Bump::new(Direction::Descending))));
    let started = Instant::now();
    let outcome = run(stream, &mut *policy, &mut device, &mut Unobserved);
    (started.elapsed().as_secs_f64(), outcome.books.reserved.peak >> 20)
}

/// The simulator and the compiled allocator in turn, best of five, on the same requests and frees.
fn against(oracle: &Path, name: &str, n_layers: u64, varies: bool) {
    let stream = training(1_000_000, n_layers, varies);
    let commands = commands(&stream);
    let (mut ours, mut theirs) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..5 {
        ours = ours.min(simulated(&stream, Device::simulating_all).0);
        theirs = theirs.min(real(oracle, &commands));
    }
    println!(
        "{name}: {:.1} ns for each request and free simulated, {:.1} ns by PyTorch's own allocator: {:.1} times as fast",
        ours * 1e9 / stream.allocations.len() as f64,
        theirs * 1e9 / stream.allocations.len() as f64,
        theirs / ours,
    );
}

fn oracle() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/oracle/oracle-2.11.0");
    path.exists().then_some(path)
}

fn commands(stream: &OpStream) -> String {
    let mut lines = Vec::new();
    for op in &stream.ops {
        match *op {
            Op::Alloc(id) => lines.push(format!("alloc {} {}", id.0, stream.allocation(id).requested)),
            Op::FreeRequested(id) => lines.push(format!("free {}", id.0)),
            _ => {}
        }
    }
    format!("run {} 0\ntime {} 1\n{}\nstop\n", 1u64 << 42, lines.len(), lines.join("\n"))
}

/// Seconds that the compiled allocator took.
fn real(oracle: &Path, commands: &str) -> f64 {
    let mut child = Command::new(oracle)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("the oracle starts");
    let mut stdin = child.stdin.take().expect("it was piped");
    stdin.write_all(commands.as_bytes()).expect("the oracle reads");
    drop(stdin);
    let output = child.wait_with_output().expect("the oracle ends");
    let text = String::from_utf8_lossy(&output.stdout);
    let seconds = text.lines().find_map(|line| line.strip_prefix("time "));
    seconds.and_then(|seconds| seconds.parse().ok()).expect("the oracle says how long it took")
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
