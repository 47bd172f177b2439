//! What a stack costs: the shim's capture, and the crate `backtrace` as its peer. `make bench`.
//!
//! Ratios within one run, best of five in turn.

use std::hint::black_box;
use std::io::{self, Write};
use std::time::Instant;

use stack_harness::{harness_init, harness_repeat};

/// Frames below `main`, about those of a PyTorch program's C++ half.
const DEPTH: u32 = 25;
const N: u64 = 20_000;
/// `stack::NATIVE`.
const NATIVE: u32 = 1;

fn main() -> io::Result<()> {
    harness_init();
    descend(DEPTH)
}

#[inline(never)]
fn descend(depth: u32) -> io::Result<()> {
    if depth > 0 {
        let result = descend(black_box(depth - 1));
        // Not a tail call: the frame stays.
        black_box(depth);
        return result;
    }
    let (mut ours, mut theirs) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..5 {
        ours = ours.min(nanos(|| {
            black_box(harness_repeat(NATIVE, N));
        }));
        theirs = theirs.min(nanos(|| {
            for _ in 0..N {
                let mut last = 0;
                let remember = |frame: &backtrace::Frame| {
                    last = frame.ip() as usize;
                    true
                };
                // SAFETY: nothing is resolved, which is what needs one thread at a time.
                unsafe { backtrace::trace_unsynchronized(remember) };
                black_box(last);
            }
        }));
    }
    let mut out = io::stdout();
    writeln!(out, "a native stack, {DEPTH} frames and those of the runtime")?;
    writeln!(out, "  the shim's capture     {ours:8.1} ns")?;
    writeln!(out, "  the crate `backtrace`  {theirs:8.1} ns   {:5.1} x", theirs / ours)
}

/// Nanoseconds for each of [`N`].
fn nanos(all: impl FnOnce()) -> f64 {
    let began = Instant::now();
    all();
    began.elapsed().as_nanos() as f64 / N as f64
}
