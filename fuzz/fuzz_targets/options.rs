//! Any text as the options of every allocator. What is accepted serves some requests, under audit.
#![no_main]

use gputrace_sim::addresses::{Bump, Direction};
use gputrace_sim::device::Device;
use gputrace_sim::ops::{Allocation, Builder, Op, PoolIdx, StackId};
use gputrace_sim::policies::torch::PROFILES;
use gputrace_sim::policies::{Build, POLICIES};
use gputrace_sim::simulator::{Unobserved, run};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((choice, text)) = data.split_first() else { return };
    let Ok(options) = str::from_utf8(text) else { return };
    let choice = usize::from(*choice);
    // Half of all inputs are PyTorch's, whose grammar is the richest.
    let entry = if choice % 2 == 0 { &POLICIES[0] } else { &POLICIES[choice / 2 % POLICIES.len()] };
    let torch_version = PROFILES[choice / 2 % PROFILES.len()].version;
    let mut builder = Builder::new(0);
    let stream = builder.stream(0).expect("the first");
    for requested in [1, 513, 3 << 20, (12 << 20) + 1, 70 << 20, 1000] {
        let allocation =
            Allocation { requested, address: 0, stack: StackId::NONE, stream, pool: PoolIdx::DEFAULT };
        let id = builder.alloc(allocation);
        if requested != 513 {
            builder.op(Op::FreeRequested(id));
            builder.op(Op::FreeCompleted(id));
        }
    }
    let ops = builder.finish();
    let build = Build { options, torch_version, n_streams: 1, n_pools: 1, profile: None };
    match (entry.build)(build) {
        Ok(mut policy) => {
            let mut device = Device::new(1 << 30, None, Box::new(Bump::new(Direction::Ascending))).audited();
            run(&ops, &mut *policy, &mut device, &mut Unobserved);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
