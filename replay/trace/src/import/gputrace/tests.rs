//! Scenes, and the ops that they are read as.

use expect_test::{Expect, expect};
use gputrace_schemas::event::Nanos;
use gputrace_sim::ops::Op;
use gputrace_sim::whatif::Laboratory;

use super::*;
use crate::scene::recording;
use crate::scene::requests;

const SEGMENT: &str = "Alloc addr=0x40000000 bytes=2M by=libcudart.so,libc10_cuda.so in_allocate=1\n";

/// The ops and driver calls of a scene's first device, one per line.
fn check(scene: &str, expected: Expect) {
    let trace = requests(scene);
    let mut text = String::new();
    for stream in trace.devices.iter().take(1) {
        let mut driver = stream.driver.iter().peekable();
        for index in 0..=stream.ops.len() {
            while let Some(call) = driver.next_if(|call| call.before_op as usize == index) {
                text += &format!("  {:?} {:#x}+{}K\n", call.call, call.address, call.bytes >> 10);
            }
            let Some(op) = stream.ops.get(index) else { break };
            match op {
                Op::Alloc(id) => {
                    let it = stream.allocation(*id);
                    let handle = stream.streams[usize::from(it.stream.0)];
                    text += &format!("Alloc({}) {} on {handle}\n", id.0, it.requested);
                }
                op => text += &format!("{op:?}\n"),
            }
        }
        text += &format!("{:?}\n", stream.history);
    }
    trace.notes.iter().for_each(|note| text += &format!("{note}\n"));
    expected.assert_eq(&text);
}

#[test]
fn blocks_are_requests_and_their_segments_driver_calls() {
    check(
        &format!(
            "{SEGMENT}
            block addr=0x40000000 bytes=512 requested=400 stream=7
            free addr=0x40000000 bytes=512"
        ),
        expect![[r#"
              Alloc 0x40000000+2048K
            Alloc(0) 400 on 7
            FreeRequested(AllocId(0))
            FreeCompleted(AllocId(0))
            Complete
        "#]],
    );
}

#[test]
fn the_largest_number_as_a_pools_threshold_is_no_memory() {
    let trace = requests(&format!(
        "{SEGMENT}
        PoolSet handle=p bytes=0xffffffffffffffff by=libnccl.so.2
        block addr=0x40000000 bytes=512 requested=512"
    ));
    assert_eq!(trace.devices[0].history, History::Complete);
}

#[test]
fn what_others_hold_is_known_at_each_op() {
    let trace = requests(&format!(
        "{SEGMENT}
        PrimaryRetain handle=c by=libc10_cuda.so
        sample used=502M
        wait ms=100
        block addr=0x40000000 bytes=512 requested=512
        Create handle=n bytes=8M by=libnccl.so.2
        Alloc addr=0x50000000 bytes=1M by=libcublas.so.13
        block addr=0x40000200 bytes=512 requested=512
        Release handle=n by=libnccl.so.2
        wait ms=100
        sample used=504M
        wait ms=100
        block addr=0x40000400 bytes=512 requested=512"
    ));
    let others = trace.devices[0].others.as_ref().unwrap();
    let at = |op: usize| {
        let held = others.names.iter().zip(others.at(op)).filter(|(_, bytes)| *bytes > 0);
        let mut held: Vec<String> = held.map(|(name, bytes)| format!("{name} {}M", bytes >> 20)).collect();
        held.sort();
        held.join(", ")
    };
    assert!(others.is_charge_known);
    assert_eq!(at(0), "CUDA context 500M");
    assert_eq!(at(1), "CUDA context 500M, NCCL 8M, cuBLAS 1M, page rounding 1M");
    assert_eq!(at(2), "CUDA context 500M, cuBLAS 1M, page rounding 1M");
}

#[test]
fn a_free_completes_when_its_stream_event_was_seen_done() {
    check(
        &format!(
            "{SEGMENT}
            block addr=0x40000000 bytes=512 requested=512
            record event=1
            free addr=0x40000000 bytes=512
            query event=1 result=600
            block addr=0x40000200 bytes=512 requested=512
            query event=1
            block addr=0x40000000 bytes=512 requested=512"
        ),
        expect![[r#"
              Alloc 0x40000000+2048K
            Alloc(0) 512 on 0
            FreeRequested(AllocId(0))
            Alloc(1) 512 on 0
            FreeCompleted(AllocId(0))
            Alloc(2) 512 on 0
            Complete
        "#]],
    );
}

#[test]
fn a_stream_event_of_the_program_delays_nothing() {
    check(
        &format!(
            "{SEGMENT}
            block addr=0x40000000 bytes=512 requested=512
            record event=9
            free addr=0x40000000 bytes=512"
        ),
        expect![[r#"
              Alloc 0x40000000+2048K
            Alloc(0) 512 on 0
            FreeRequested(AllocId(0))
            FreeCompleted(AllocId(0))
            Complete
        "#]],
    );
}

#[test]
fn segments_given_back_outside_of_allocate_are_a_trim_and_those_within_are_not() {
    let scene = |how: &str| {
        format!(
            "{SEGMENT}
            block addr=0x40000000 bytes=512 requested=512
            free addr=0x40000000 bytes=512
            Free addr=0x40000000 by=libcudart.so,libc10_cuda.so {how}
            Alloc addr=0x50000000 bytes=20M by=libcudart.so,libc10_cuda.so in_allocate=1
            block addr=0x50000000 bytes=2M requested=2M"
        )
    };
    check(
        &scene(""),
        expect![[r#"
              Alloc 0x40000000+2048K
            Alloc(0) 512 on 0
            FreeRequested(AllocId(0))
            FreeCompleted(AllocId(0))
            Trim
              Free 0x40000000+2048K
              Alloc 0x50000000+20480K
            Alloc(1) 2097152 on 0
            Complete
        "#]],
    );
    assert!(!requests(&scene("in_allocate=1")).devices[0].ops.contains(&Op::Trim));
}

#[test]
fn what_a_failed_request_waited_for_completes_after_it() {
    check(
        &format!(
            "{SEGMENT}
            block addr=0x40000000 bytes=512 requested=512
            record event=1
            free addr=0x40000000 bytes=512
            Alloc result=2 bytes=20M by=libcudart.so,libc10_cuda.so in_allocate=1
            sync event=1
            oom bytes=2M requested=2M"
        ),
        expect![[r#"
              Alloc 0x40000000+2048K
            Alloc(0) 512 on 0
            FreeRequested(AllocId(0))
            Oom(0)
            FreeCompleted(AllocId(0))
            Complete
        "#]],
    );
}

#[test]
fn each_capture_has_a_pool_and_shares_it_with_those_that_use_its_segments() {
    let capture = |first: u64, second: u64| {
        format!(
            "CaptureBegin
            Alloc addr={first:#x} bytes=20M by=libcudart.so,libc10_cuda.so in_allocate=1
            block addr={first:#x} bytes=4M requested=4M
            block addr={second:#x} bytes=4M requested=4M
            CaptureEnd\n"
        )
    };
    let failing = "CaptureBegin
            Alloc result=2 bytes=20M by=libcudart.so,libc10_cuda.so in_allocate=1
            oom bytes=4M requested=4M stream=7";
    let pools_of = |scene: &str| {
        let trace = requests(scene);
        let stream = &trace.devices[0];
        let of_blocks: Vec<u16> = stream.allocations.iter().map(|it| it.pool.0).collect();
        (of_blocks, stream.ooms[0].pool.0, stream.ooms[0].stream)
    };
    let apart = capture(0x4000_0000, 0x4080_0000) + &capture(0x5000_0000, 0x5080_0000) + failing;
    let (blocks, failed, stream) = pools_of(&apart);
    assert_eq!((&*blocks, failed), (&[1, 1, 2, 2][..], 3), "each its own, the one that failed too");
    assert_eq!(stream.map(|at| requests(&apart).devices[0].streams[usize::from(at.0)]), Some(7));
    // The second has a block in a segment of the first.
    let (blocks, failed, _) =
        pools_of(&(capture(0x4000_0000, 0x4080_0000) + &capture(0x5000_0000, 0x4100_0000) + failing));
    assert_eq!((&*blocks, failed), (&[1, 1, 1, 1][..], 2));
}

#[test]
fn pages_of_a_growing_segment_are_one_call() {
    check(
        "Reserve addr=0x100000000 bytes=1G by=libc10_cuda.so
        Create handle=1 bytes=2M by=libc10_cuda.so in_allocate=1
        Create handle=2 bytes=2M by=libc10_cuda.so in_allocate=1
        Map addr=0x100000000 bytes=2M handle=1 by=libc10_cuda.so in_allocate=1
        Map addr=0x100200000 bytes=2M handle=2 by=libc10_cuda.so in_allocate=1
        SetAccess addr=0x100000000 bytes=4M by=libc10_cuda.so in_allocate=1
        block addr=0x100000000 bytes=3M requested=3M
        free addr=0x100000000 bytes=3M
        Unmap addr=0x100000000 bytes=2M by=libc10_cuda.so
        Unmap addr=0x100200000 bytes=2M by=libc10_cuda.so",
        expect![[r#"
              Map 0x100000000+4096K
            Alloc(0) 3145728 on 0
            FreeRequested(AllocId(0))
            FreeCompleted(AllocId(0))
            Trim
              Unmap 0x100000000+4096K
            Complete
            device 0: the program itself set expandable_segments:True: its allocator mapped pages
        "#]],
    );
}

const GROWN: &str = "Reserve addr=0x100000000 bytes=1G by=libc10_cuda.so
    Create handle=1 bytes=2M by=libc10_cuda.so in_allocate=1
    Create handle=2 bytes=2M by=libc10_cuda.so in_allocate=1
    Map addr=0x100000000 bytes=2M handle=1 by=libc10_cuda.so in_allocate=1
    SetAccess addr=0x100000000 bytes=2M by=libc10_cuda.so in_allocate=1
    block addr=0x100000000 bytes=1M requested=1M\n";

#[test]
fn pages_given_back_to_make_room_for_others_are_a_call_of_their_own() {
    check(
        &format!(
            "{GROWN}
            free addr=0x100000000 bytes=1M
            Unmap addr=0x100000000 bytes=2M by=libc10_cuda.so in_allocate=1
            Reserve addr=0x200000000 bytes=1G by=libc10_cuda.so
            Map addr=0x200000000 bytes=2M handle=2 by=libc10_cuda.so in_allocate=1
            SetAccess addr=0x200000000 bytes=2M by=libc10_cuda.so in_allocate=1
            block addr=0x200000000 bytes=1M requested=1M stream=7"
        ),
        expect![[r#"
              Map 0x100000000+2048K
            Alloc(0) 1048576 on 0
            FreeRequested(AllocId(0))
            FreeCompleted(AllocId(0))
              Unmap 0x100000000+2048K
              Map 0x200000000+2048K
            Alloc(1) 1048576 on 7
            Complete
            device 0: the program itself set expandable_segments:True: its allocator mapped pages
            device 0: the pools of some segments are not known; from request 3 on, the replay is a guess
        "#]],
    );
}

#[test]
fn pages_that_are_unmapped_at_once_are_all_gone() {
    check(
        &format!(
            "{GROWN}
            block addr=0x100100000 bytes=1M requested=1M
            Map addr=0x100200000 bytes=2M handle=2 by=libc10_cuda.so in_allocate=1
            SetAccess addr=0x100200000 bytes=2M by=libc10_cuda.so in_allocate=1
            block addr=0x100200000 bytes=1M requested=1M
            free addr=0x100000000 bytes=1M
            free addr=0x100100000 bytes=1M
            free addr=0x100200000 bytes=1M
            Unmap addr=0x100000000 bytes=4M by=libc10_cuda.so"
        ),
        expect![[r#"
              Map 0x100000000+2048K
            Alloc(0) 1048576 on 0
            Alloc(1) 1048576 on 0
              Map 0x100200000+2048K
            Alloc(2) 1048576 on 0
            FreeRequested(AllocId(0))
            FreeCompleted(AllocId(0))
            FreeRequested(AllocId(1))
            FreeCompleted(AllocId(1))
            FreeRequested(AllocId(2))
            FreeCompleted(AllocId(2))
            Trim
              Unmap 0x100000000+4096K
            Complete
            device 0: the program itself set expandable_segments:True: its allocator mapped pages
        "#]],
    );
}

#[test]
fn what_another_library_maps_is_no_part_of_a_segment() {
    let trace = requests(&format!(
        "{GROWN}
        Map addr=0x100200000 bytes=2M handle=2 by=libother.so
        SetAccess addr=0x100200000 bytes=2M by=libother.so
        block addr=0x100000000 bytes=512 requested=512"
    ));
    assert_eq!(trace.devices[0].segments[0].bytes, 2 << 20);
}

#[test]
fn without_pytorch_the_driver_calls_are_the_requests() {
    let scene = "Alloc addr=0x40000000 bytes=3M by=plain
        Free addr=0x40000000 by=plain
        AllocAsync addr=0x50000000 bytes=1M stream=4 by=plain";
    check(
        scene,
        expect![[r#"
              Alloc 0x40000000+3072K
            Alloc(0) 3145728 on 0
            FreeRequested(AllocId(0))
            FreeCompleted(AllocId(0))
              Free 0x40000000+3072K
              Alloc 0x50000000+1024K
            Alloc(1) 1048576 on 4
            Complete
        "#]],
    );
    let trace = requests(scene);
    assert_eq!(trace.devices[0].settings.policy, "direct");
    assert!(Laboratory::new(&trace.devices[0]).unwrap().self_check(None).is_perfect());
}

#[test]
fn physical_memory_is_given_back_when_it_is_released_and_mapped_nowhere() {
    check(
        "Create handle=7 bytes=2M by=plain
        Map addr=0x40000000 bytes=2M handle=7 by=plain
        Release handle=7 by=plain
        Alloc addr=0x50000000 bytes=1M by=plain
        Unmap addr=0x40000000 bytes=2M by=plain",
        expect![[r#"
              Alloc 0x7+2048K
            Alloc(0) 2097152 on 0
              Alloc 0x50000000+1024K
            Alloc(1) 1048576 on 0
            FreeRequested(AllocId(0))
            FreeCompleted(AllocId(0))
              Free 0x7+2048K
            Complete
        "#]],
    );
}

#[test]
fn what_lies_in_a_context_goes_with_it() {
    check(
        "PrimaryRetain extra=0 handle=9 by=plain
        Alloc addr=0x40000000 bytes=1M by=plain
        PrimaryReset extra=0 by=plain
        Alloc addr=0x40000000 bytes=1M by=plain",
        expect![[r#"
              Alloc 0x40000000+1024K
            Alloc(0) 1048576 on 0
            FreeRequested(AllocId(0))
            FreeCompleted(AllocId(0))
              Free 0x40000000+1024K
              Alloc 0x40000000+1024K
            Alloc(1) 1048576 on 0
            Complete
        "#]],
    );
}

#[test]
fn a_trace_with_lost_events_is_not_replayed() {
    check(
        "block addr=0x40000000 bytes=512 requested=512
        lost events=3",
        expect![[r#"
            Alloc(0) 512 on 0
            Broken("3 events were lost; record again with a larger --ring-size")
        "#]],
    );
}

#[test]
fn memory_of_others_and_mappings_are_kept_for_the_addresses() {
    let recording = recording(&format!(
        "{SEGMENT}
        block addr=0x40000000 bytes=512 requested=512
        Alloc addr=0x7f0010000000 bytes=8M by=libnccl.so.2!
        Free addr=0x7f0010000000 by=libnccl.so.2!"
    ));
    let mapped = vec![
        Mapping { start: 0x1000, end: 0x2000 },
        Mapping { start: 0x7f00_2000_0000, end: 0x7f00_3000_0000 },
    ];
    let read = Mappings { time: Nanos(0), mapped };
    let each = |see: &mut dyn FnMut(&Event) -> ControlFlow<()>| {
        let _ = recording.events.iter().try_for_each(see);
    };
    let trace = import(&recording, &each, std::iter::once(read)).unwrap();
    let surroundings = trace.devices[0].surroundings.clone().unwrap();
    assert_eq!(surroundings.ceiling, 0x7f00_2000_0000);
    let kinds: Vec<Nearby> = surroundings.events.iter().map(|event| event.what).collect();
    assert_eq!(
        kinds,
        [
            Nearby::Mapped { start: 0x1000, end: 0x2000 },
            Nearby::Mapped { start: 0x7f00_2000_0000, end: 0x7f00_3000_0000 },
            Nearby::Allocated { address: 0x7f00_1000_0000, bytes: 8 << 20 },
            Nearby::Freed { address: 0x7f00_1000_0000 },
        ]
    );
}

#[test]
fn a_block_is_taken_back_on_the_device_that_it_was_handed_out_on() {
    let trace = requests(&format!(
        "{SEGMENT}
        block addr=0x40000000 bytes=512 requested=512
        free addr=0x40000000 bytes=512 dev=1"
    ));
    assert_eq!(trace.devices.len(), 1);
    assert_eq!(trace.devices[0].history, History::Complete);
}

#[test]
fn a_block_that_was_there_before_the_first_event_waits_for_its_streams_too() {
    check(
        &format!(
            "{SEGMENT}
            record event=1
            free addr=0x40000000 bytes=512
            block addr=0x40000400 bytes=512 requested=512
            query event=1"
        ),
        expect![[r#"
              Alloc 0x40000000+2048K
            FreeRequested(AllocId(0))
            Alloc(1) 512 on 0
            FreeCompleted(AllocId(0))
            StartsLate
            device 0: 1 blocks were freed whose allocation was not seen
            device 0: the pools of some segments are not known; from request 1 on, the replay is a guess
        "#]],
    );
}
