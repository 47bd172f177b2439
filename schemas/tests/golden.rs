//! A trace of the first version, kept as it was written: every later version must read it, and see the same in it.

use std::collections::BTreeMap;
use std::path::Path;

use gputrace_schemas::event::{CommId, EventKind, Frame, FrameId, Nanos, StackId, TextId};
use gputrace_schemas::reader::Trace;

#[test]
fn a_trace_of_version_1_reads_as_it_was_written() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/version1.gtr");
    let trace = Trace::open(path).expect("version 1 is read for ever");
    assert!(trace.is_complete());
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    let (mut asked, mut given, mut with_stack, mut last) = (0, 0, 0, Nanos(0));
    for event in trace.events() {
        assert!(event.time >= last, "events come in the order of their times");
        last = event.time;
        with_stack += u64::from(event.stack != StackId(0));
        let name = match &event.kind {
            EventKind::Call(call) => {
                given += call.bytes.0;
                "call"
            }
            EventKind::BlockAlloc(block) => {
                asked += block.requested.expect("every request is known").0;
                "block"
            }
            EventKind::BlockFree(_) => "free",
            EventKind::BlockOom(_) => "oom",
            EventKind::Wait(_) => "wait",
            EventKind::Mark(_) => "mark",
            EventKind::Sample(_) => "sample",
            EventKind::Lost(_) => "lost",
            EventKind::Note(_) => "note",
            EventKind::NcclEnter(_) => "nccl enter",
            EventKind::NcclExit(_) => "nccl exit",
            EventKind::NcclTiming(_) => "nccl timing",
            EventKind::Pjrt(_) | EventKind::PjrtExecutable(_) => "pjrt",
        };
        *counts.entry(name).or_default() += 1;
    }
    assert_eq!(trace.damages(), []);
    let counts: Vec<String> = counts.iter().map(|(name, n)| format!("{n} {name}")).collect();
    assert_eq!(counts.join(", "), COUNTS);
    assert_eq!((asked, given, with_stack, last), TOTALS);
    let process = trace.process();
    assert_eq!((process.pid, process.rank, &*process.host), (4242, Some(3), "node7.cluster.example"));
    assert_eq!(process.command[1], "/data/jobs/train_lm.py");
    assert_eq!((trace.stacks().len(), trace.frames().len(), trace.modules().len()), (4004, 1002, 3));
    assert_eq!(trace.device(0).expect("device 0").name, "NVIDIA H200");
    assert_eq!(trace.text(TextId(1)), Some("step"));
    let communicator = trace.communicator(CommId(1)).expect("communicator 1");
    assert_eq!((communicator.n_ranks, &*communicator.config.name), (Some(8), "default_pg"));
    let function = |id| match trace.frame(id) {
        Some(Frame::Native { function, .. } | Frame::Python { function, .. }) => function.as_str(),
        None => "",
    };
    assert_eq!((function(FrameId(1001)), function(FrameId(100))), ("ncclCommInitRank", "Block0.forward"));
    let backward = trace.stack(StackId(4003)).and_then(|stack| stack.backward.as_ref());
    assert_eq!(backward.map(|backward| backward.short_node()), Some("AddmmBackward0"));
}

/// As counted when the trace was made (`examples/training.rs`, 5,000 events).
const COUNTS: &str = "3072 block, 9 call, 3072 free, 1 lost, 8 mark, 5 nccl enter, 5 nccl exit, 1 note, 1 oom, 4 sample, 2 wait";
const TOTALS: (u64, u64, u64, Nanos) = (1_003_894_760, 482_344_960, 3087, Nanos(1_018_539_619));
