//! Any program on any allocator, on a device of any size, under audit: what is placed lies in mapped memory, apart from
//! everything else, and the books agree.
#![no_main]

use gputrace_fuzz::Bytes;
use gputrace_sim::addresses::{AddressSpace, Bump, Direction, Shuffled};
use gputrace_sim::bounds::Bounds;
use gputrace_sim::device::Device;
use gputrace_sim::ops::{Allocation, Builder, Op, OpStream, PoolIdx, RecordedOom, StackId};
use gputrace_sim::policies::torch::PROFILES;
use gputrace_sim::policies::{Build, POLICIES};
use gputrace_sim::simulator::{Unobserved, run};

/// Options that change what an allocator does, and that many of them take.
const OPTIONS: &[&str] = &[
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "garbage_collection_threshold:0.6",
    "roundup_power2_divisions:4",
    "expandable_segments:True,max_split_size_mb:64",
];

/// More than any program here asks for.
const PLENTY: u64 = 1 << 42;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mut input = Bytes(data);
    let entry = &POLICIES[usize::from(input.byte()) % POLICIES.len()];
    let torch_version = PROFILES[usize::from(input.byte()) % PROFILES.len()].version;
    let options = if entry.name == "torch" { OPTIONS[usize::from(input.byte()) % OPTIONS.len()] } else { "" };
    let (total, limit) = match input.byte() {
        0..=127 => (PLENTY, None),
        share @ 128..=191 => (u64::from(share - 127) << 22, None),
        share => (PLENTY, Some(u64::from(share - 191) << 22)),
    };
    let is_shuffled = input.byte() % 4 == 3;
    let ops = program(&mut input);
    let build = Build {
        options,
        torch_version,
        n_streams: ops.streams.len(),
        n_pools: ops.pools.len(),
        profile: Some(&ops),
    };
    let Ok(mut policy) = (entry.build)(build) else { return };
    let space: Box<dyn AddressSpace> =
        if is_shuffled { Box::new(Shuffled::new(7)) } else { Box::new(Bump::new(Direction::Ascending)) };
    let mut device = Device::new(total, limit, space).audited();
    let outcome = run(&ops, &mut *policy, &mut device, &mut Unobserved);
    // PyTorch compares with its limit what a segment would take, and then maps whole pages of 20 MiB.
    let beyond = if options.contains("expandable_segments") && limit.is_some() { 20 << 20 } else { 0 };
    assert!(
        outcome.books.reserved.peak <= limit.unwrap_or(total) + beyond,
        "{} reserved what is not there",
        entry.name
    );
    assert!(!outcome.is_cut_short || outcome.oom.is_some(), "{} ended without a reason", entry.name);
    if !outcome.is_cut_short {
        // Where memory is short, allocators wait for streams: memory comes back earlier than the program says.
        let is_plenty = total == PLENTY && limit.is_none();
        let least = Bounds::of(&ops).requested;
        assert!(!is_plenty || outcome.books.requested.peak >= least, "{} lost requests", entry.name);
        assert!(outcome.books.allocated.current >= outcome.books.requested.current || has_pending(&ops));
    }
});

/// Memory that was given back and that a stream still uses is requested, but no longer allocated.
fn has_pending(ops: &OpStream) -> bool {
    let count = |wanted: fn(&Op) -> bool| ops.ops.iter().filter(|op| wanted(op)).count();
    count(|op| matches!(op, Op::FreeRequested(_))) != count(|op| matches!(op, Op::FreeCompleted(_)))
}

fn program(input: &mut Bytes) -> OpStream {
    let mut builder = Builder::new(0);
    let streams = [0, 7, 9].map(|handle| builder.stream(handle).expect("few"));
    let pools = [PoolIdx::DEFAULT, builder.pool((0, 1)).expect("few"), builder.pool((1, 0)).expect("few")];
    let (mut live, mut pending) = (Vec::new(), Vec::new());
    for _ in 0..2000 {
        if input.is_empty() {
            break;
        }
        let op = input.byte();
        let which = usize::from(op >> 4);
        match op % 16 {
            0..=6 => {
                let most = [12, 16, 20, 21, 24, 26, 28][usize::from(op % 16)];
                let requested = 1 + (input.word_of(4) & ((1 << most) - 1));
                let (stream, pool) = (streams[which % 3], pools[[0, 0, 0, 0, 1, 2][which % 6]]);
                let allocation = Allocation { requested, address: 0, stack: StackId::NONE, stream, pool };
                live.push(builder.alloc(allocation));
            }
            7..=11 if !live.is_empty() => {
                let id = live.swap_remove((which + usize::from(input.byte())) % live.len());
                builder.op(Op::FreeRequested(id));
                if op % 16 == 11 { pending.push(id) } else { builder.op(Op::FreeCompleted(id)) }
            }
            12 if !pending.is_empty() => builder.op(Op::FreeCompleted(pending.remove(which % pending.len()))),
            13 => builder.op(Op::Trim),
            14 => {
                let rounded = input.word_of(4);
                let stream = streams[which % 3];
                builder.oom(RecordedOom { rounded, device_free: 0, stream: Some(stream), pool: PoolIdx::DEFAULT, stack: StackId::NONE });
            }
            15 => builder.op(Op::ReleasePool(pools[1 + which % 2])),
            _ => {}
        }
    }
    builder.finish()
}
