use expect_test::{Expect, expect};
use gputrace_schemas::event::{Action, Nanos, StackId, ThreadId};

use super::*;
use crate::scene::ledger;

/// Shows the books after `scene`.
fn check(scene: &str, expected: Expect) {
    expected.assert_eq(&show(&ledger(scene)));
}

fn show(ledger: &Ledger) -> String {
    let mut text = String::new();
    for (ordinal, device) in ledger.devices() {
        let books = &device.physical;
        text += &format!(
            "device {ordinal}: live {} of peak {} at {}, {} allocs {} frees {} failed, mapped {} reserved {}\n",
            books.live().bytes.0,
            books.peak().0,
            books.peak_time().0 / 1000,
            device.allocs,
            device.frees,
            device.failed,
            device.mapped.now.0,
            device.reserved_addresses.now.0,
        );
        for part in books.owners() {
            text += &format!(
                "  {}: peak {} at peak {} live {}\n",
                ledger.sites.owner(part.id),
                part.peak.0,
                part.at_peak.bytes.0,
                part.live.bytes.0
            );
        }
        for (kind, name) in [(&device.managed, "managed"), (&device.graphs, "graphs")] {
            if kind.peak().0 > 0 {
                text += &format!("  {name}: live {} of peak {}\n", kind.now().bytes.0, kind.peak().0);
            }
        }
        if device.dropped.objects > 0 {
            text += &format!("  dropped with the context: {}\n", device.dropped.bytes.0);
        }
        if let Some(torch) = &device.torch {
            text += &format!(
                "  torch: {}+ {}- {} ooms, peaks {} allocated {} reserved {} requested, device {}+ {}-\n",
                torch.allocations,
                torch.frees,
                torch.n_ooms,
                torch.allocated.peak.0,
                torch.reserved.peak.0,
                torch.requested.peak.0,
                torch.device_allocs,
                torch.device_frees
            );
        }
    }
    if ledger.host().peak().0 > 0 {
        text += &format!("host: live {} of peak {}\n", ledger.host().now().bytes.0, ledger.host().peak().0);
    }
    for found in ledger.findings.iter() {
        text += &format!("! {} times: {}\n", found.count, found.first.text());
    }
    for open in &ledger.counts.open_calls {
        text += &format!("! ended in {}\n", ledger.sites.name(open.name));
    }
    text
}

#[test]
fn the_peak_is_shared_out_among_its_owners() {
    check(
        "Alloc addr=a bytes=100 by=libc10_cuda.so
         Alloc addr=b bytes=50 by=/x/libnccl.so.2!
         Free addr=a
         Alloc addr=a bytes=20 by=/job/train!",
        expect![[r#"
            device 0: live 70 of peak 150 at 2, 3 allocs 1 frees 0 failed, mapped 0 reserved 0
              PyTorch: peak 100 at peak 100 live 0
              NCCL: peak 50 at peak 50 live 50
              application: peak 20 at peak 0 live 20
              torch: 0+ 0- 0 ooms, peaks 0 allocated 0 reserved 0 requested, device 1+ 1-
        "#]],
    );
}

#[test]
fn nccl_gives_memory_back_by_retain_release_unmap_release() {
    //  references 1 . . 2 1 . 0
    //  maps       0 . 1 . . 0 .  -> free at the last release, not before
    check(
        "Create handle=h bytes=2M by=libnccl.so.2
         Reserve addr=a bytes=2M
         Map addr=a bytes=2M handle=h
         Retain addr=a handle=h
         Release handle=h
         Unmap addr=a bytes=2M
         Release handle=h
         Unreserve addr=a bytes=2M",
        expect![[r#"
            device 0: live 0 of peak 2097152 at 1, 1 allocs 1 frees 0 failed, mapped 0 reserved 0
              NCCL: peak 2097152 at peak 2097152 live 0
        "#]],
    );
}

#[test]
fn a_retained_handle_may_have_another_number() {
    check(
        "Create handle=h bytes=2M
         Map addr=a bytes=2M handle=h
         Retain addr=a handle=alias
         Release handle=alias
         Unmap addr=a bytes=2M
         Release handle=h",
        expect![[r#"
            device 0: live 0 of peak 2097152 at 1, 1 allocs 1 frees 0 failed, mapped 0 reserved 0
              unknown: peak 2097152 at peak 2097152 live 0
        "#]],
    );
}

#[test]
fn memory_that_is_mapped_outlives_its_handle() {
    // vLLM's sleep: created, mapped, released at once; unmapped to sleep; then new memory at the same address.
    check(
        "Create handle=h bytes=2M
         Map addr=a bytes=2M handle=h
         Release handle=h
         Unmap addr=a bytes=2M
         Create handle=i bytes=2M
         Map addr=a bytes=2M handle=i
         Release handle=i",
        expect![[r#"
            device 0: live 2097152 of peak 2097152 at 1, 2 allocs 1 frees 0 failed, mapped 2097152 reserved 0
              unknown: peak 2097152 at peak 2097152 live 2097152
        "#]],
    );
}

#[test]
fn one_unmap_covers_several_maps() {
    check(
        "Create handle=h bytes=2M
         Create handle=i bytes=2M
         Reserve addr=0x40000000 bytes=1G
         Map addr=0x40000000 bytes=2M handle=h
         Map addr=0x40200000 bytes=2M handle=i
         Release handle=h
         Release handle=i
         Unmap addr=0x40000000 bytes=4M",
        expect![[r#"
            device 0: live 0 of peak 4194304 at 2, 2 allocs 2 frees 0 failed, mapped 0 reserved 1073741824
              unknown: peak 4194304 at peak 4194304 live 0
        "#]],
    );
}

#[test]
fn memory_of_another_process_owns_nothing() {
    check(
        "Import handle=h
         Map addr=a bytes=2M handle=h
         IpcOpen addr=b bytes=1G
         ImportPointer addr=c bytes=1G
         MulticastCreate handle=m bytes=1G
         Unmap addr=a bytes=2M
         Release handle=h
         IpcClose addr=b",
        expect![[r#"
            device 0: live 0 of peak 0 at 0, 0 allocs 0 frees 0 failed, mapped 0 reserved 0
        "#]],
    );
}

#[test]
fn a_free_that_failed_freed_nothing() {
    check(
        "Alloc addr=a bytes=100
         Free addr=a result=700
         Free addr=a
         Free addr=a result=1
         Free addr=b result=4",
        expect![[r#"
            device 0: live 0 of peak 100 at 1, 1 allocs 1 frees 2 failed, mapped 0 reserved 0
              unknown: peak 100 at peak 100 live 0
            ! 1 times: free refused by the driver
            ! 1 times: freed twice
        "#]],
    );
}

#[test]
fn what_was_not_seen_is_a_finding() {
    check(
        "Free addr=a
         Release handle=h
         Unmap addr=a bytes=2M
         Alloc addr=b bytes=10
         Alloc addr=b bytes=20
         Map addr=0xffffffffffffff00 bytes=4K handle=q
         ArrayDestroy handle=z
         free addr=q bytes=1",
        expect![[r#"
            device 0: live 20 of peak 20 at 5, 2 allocs 1 frees 0 failed, mapped 0 reserved 0
              unknown: peak 20 at peak 20 live 20
              torch: 0+ 1- 0 ooms, peaks 0 allocated 0 reserved 0 requested, device 0+ 0-
            ! 1 times: PyTorch block freed without a recorded allocation (allocated before the trace began, or events were lost)
            ! 1 times: address and length do not match (the trace is damaged)
            ! 1 times: allocated again without a recorded free (events were lost)
            ! 1 times: freed without a recorded allocation (allocated before the trace began, or events were lost)
            ! 3 times: handle used without a recorded creation (created before the trace began, or events were lost)
            ! 1 times: unmapped without a recorded mapping
        "#]],
    );
}

#[test]
fn the_call_that_the_process_ended_in_changed_nothing() {
    check(
        "Alloc addr=a bytes=100 by=train!
         Free addr=a result=none by=/job/train!",
        expect![[r#"
            device 0: live 100 of peak 100 at 1, 1 allocs 0 frees 0 failed, mapped 0 reserved 0
              train: peak 100 at peak 100 live 100
            ! ended in cudaFree
        "#]],
    );
}

#[test]
fn resetting_the_device_frees_what_is_in_its_context() {
    check(
        "PrimaryRetain extra=0 handle=c
         Alloc addr=a bytes=100
         Alloc addr=b bytes=10 dev=1
         Create handle=h bytes=2M
         PrimaryReset extra=0",
        expect![[r#"
            device 0: live 2097252 of peak 2097252 at 4, 2 allocs 0 frees 0 failed, mapped 0 reserved 0
              unknown: peak 2097252 at peak 2097252 live 2097252
              dropped with the context: 100
            device 1: live 10 of peak 10 at 3, 1 allocs 0 frees 0 failed, mapped 0 reserved 0
              unknown: peak 10 at peak 10 live 10
        "#]],
    );
}

#[test]
fn destroying_a_context_frees_what_its_thread_allocated_in_it() {
    check(
        "Alloc addr=a bytes=1
         ContextCreate handle=c
         Alloc addr=b bytes=2
         Alloc addr=x bytes=4 thread=1
         ContextDestroy handle=c",
        expect![[r#"
            device 0: live 7 of peak 7 at 4, 3 allocs 0 frees 0 failed, mapped 0 reserved 0
              unknown: peak 7 at peak 7 live 7
              dropped with the context: 2
        "#]],
    );
}

#[test]
fn host_managed_and_graph_memory_are_not_the_devices() {
    check(
        "AllocHost addr=a bytes=100
         HostRegister addr=b bytes=10
         Create handle=h bytes=1 dev=-2
         AllocManaged addr=c bytes=1000
         AllocAsync addr=d bytes=5 captured=1
         FreeHost addr=a
         HostUnregister addr=b
         Free addr=c",
        expect![[r#"
            device 0: live 0 of peak 0 at 0, 2 allocs 1 frees 0 failed, mapped 0 reserved 0
              managed: live 0 of peak 1000
              graphs: live 5 of peak 5
            host: live 1 of peak 111
        "#]],
    );
}

#[test]
fn addresses_may_be_reserved_for_host_memory() {
    check(
        "Create handle=h bytes=2M dev=-2
         Reserve addr=a bytes=2M dev=-2
         Map addr=a bytes=2M handle=h dev=-2
         Alloc addr=b bytes=10",
        expect![[r#"
            device -2: live 0 of peak 0 at 0, 0 allocs 0 frees 0 failed, mapped 2097152 reserved 2097152
            device 0: live 10 of peak 10 at 4, 1 allocs 0 frees 0 failed, mapped 0 reserved 0
              unknown: peak 10 at peak 10 live 10
            host: live 2097152 of peak 2097152
        "#]],
    );
}

#[test]
fn requested_falls_when_a_free_is_completed() {
    //            requested  done
    //  a+400     400
    //  a-        400        event 1 pending: recorded on this thread just before the free
    //  b+300     700        still pending
    //  c+200     500        seen done inside this allocate
    check(
        "block addr=a bytes=512 requested=400 allocated=512 reserved=2M
         record event=9
         record event=9 thread=1
         record event=1
         free addr=a bytes=512 allocated=0 reserved=2M
         query event=1 result=600
         block addr=b bytes=512 requested=300 allocated=512 reserved=2M
         query event=1
         block addr=c bytes=512 requested=200 allocated=1024 reserved=2M",
        expect![[r#"
            device 0: live 0 of peak 0 at 0, 0 allocs 0 frees 0 failed, mapped 0 reserved 0
              torch: 3+ 1- 0 ooms, peaks 1024 allocated 2097152 reserved 700 requested, device 0+ 0-
        "#]],
    );
}

#[test]
fn events_of_the_program_do_not_hold_back_a_free() {
    check(
        "block addr=a bytes=512 requested=400 allocated=512 reserved=2M
         record event=9
         free addr=a bytes=512 allocated=0 reserved=2M
         block addr=b bytes=512 requested=300 allocated=512 reserved=2M",
        expect![[r#"
            device 0: live 0 of peak 0 at 0, 0 allocs 0 frees 0 failed, mapped 0 reserved 0
              torch: 2+ 1- 0 ooms, peaks 512 allocated 2097152 reserved 400 requested, device 0+ 0-
        "#]],
    );
}

#[test]
fn a_free_during_capture_leaves_requested_in_doubt() {
    let ledger = ledger(
        "block addr=a bytes=512 requested=400 allocated=512 reserved=2M
         CaptureBegin stream=1
         free addr=a bytes=512 allocated=0 reserved=2M
         block addr=a bytes=512 requested=400 allocated=512 reserved=2M
         CaptureEnd stream=1
         free addr=a bytes=512 allocated=0 reserved=2M",
    );
    assert_eq!(ledger.devices()[&0].torch.as_ref().map(|torch| torch.n_frees_in_capture), Some(1));
}

#[test]
fn an_expandable_segment_counts_calls_of_map_not_pages() {
    // One map of two pages; then unmapped in two runs, with a page between them that stays.
    check(
        "Reserve addr=0x40000000 bytes=1G by=libc10_cuda.so
         Create handle=h bytes=2M by=libc10_cuda.so
         Create handle=i bytes=2M by=libc10_cuda.so
         Create handle=j bytes=2M by=libc10_cuda.so
         Map addr=0x40000000 bytes=2M handle=h by=libc10_cuda.so
         Map addr=0x40200000 bytes=2M handle=i by=libc10_cuda.so
         Map addr=0x40400000 bytes=2M handle=j by=libc10_cuda.so
         SetAccess addr=0x40000000 bytes=6M by=libc10_cuda.so
         SetAccess addr=0x40000000 bytes=6M dev=1 by=libc10_cuda.so
         block addr=0x40000000 bytes=6M requested=6M allocated=6M reserved=6M
         free addr=0x40000000 bytes=6M allocated=0 reserved=6M
         block addr=0x40200000 bytes=512 requested=5 allocated=512 reserved=6M
         Unmap addr=0x40000000 bytes=2M by=libc10_cuda.so
         Release handle=h by=libc10_cuda.so
         Unmap addr=0x40400000 bytes=2M by=libc10_cuda.so
         Release handle=j by=libc10_cuda.so",
        expect![[r#"
            device 0: live 2097152 of peak 6291456 at 4, 3 allocs 2 frees 0 failed, mapped 2097152 reserved 1073741824
              PyTorch: peak 6291456 at peak 6291456 live 2097152
              torch: 2+ 1- 0 ooms, peaks 6291456 allocated 6291456 reserved 6291456 requested, device 1+ 2-
        "#]],
    );
}

#[test]
fn reserved_follows_a_segment_that_is_given_back_and_active_a_free_that_waits() {
    let scene = "Alloc addr=0x50000000 bytes=20M by=libcudart.so,libc10_cuda.so
         block addr=0x50000000 bytes=4M reserved=20M
         record event=1
         free addr=0x50000000 bytes=4M reserved=20M";
    let given = "query event=1
         Free addr=0x50000000 by=libcudart.so,libc10_cuda.so";
    // Nobody asks for steps here, and no pool was ever opened.
    let of = |scene: &str| {
        let ledger = ledger(scene);
        let torch = ledger.torch(0).expect("PyTorch on the first device");
        (torch.reserved.now.0 >> 20, torch.reserved.peak.0 >> 20, torch.pending.0 >> 20)
    };
    assert_eq!(of(scene), (20, 20, 0), "whose event it was is learned by the query");
    assert_eq!(of(&format!("{scene}\nquery event=1 result=600")), (20, 20, 4));
    assert_eq!(of(&format!("{scene}\n{given}")), (0, 20, 0));
    // PyTorch's own word counts as soon as it comes.
    assert_eq!(of(&format!("{scene}\n{given}\nblock addr=0x70000000 bytes=1M reserved=2M")), (2, 20, 0));
}

#[test]
fn without_native_frames_requests_inside_allocate_are_pytorchs() {
    check(
        "Alloc addr=a bytes=2M in_allocate=1
         Alloc addr=b bytes=2M in_allocate=1 by=f@/job/train.py:3
         Free addr=a",
        expect![[r#"
            device 0: live 2097152 of peak 4194304 at 2, 2 allocs 1 frees 0 failed, mapped 0 reserved 0
              PyTorch: peak 4194304 at peak 4194304 live 2097152
              torch: 0+ 0- 0 ooms, peaks 0 allocated 0 reserved 0 requested, device 2+ 1-
        "#]],
    );
}

/// Any events in any order, as a damaged or hostile trace has them: no panic, and the parts still make up the whole.
#[test]
fn parts_add_up_whatever_the_events() {
    use crate::Recording;
    use gputrace_schemas::event::{BlockAlloc, BlockFree, BlockOom, CommId, Wait, WaitAction};

    for seed in 1..200_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut random = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        let huge = seed % 4 == 0;
        let mut ledger = Ledger::default();
        let trace = Recording::default();
        for time in 0..400 {
            // Few addresses, so that they are met again; in one of four runs sizes that overflow anything.
            let addr = random(12) * 0x1000;
            let bytes = Bytes(if huge { u64::MAX - random(3) } else { random(5) * 0x1000 });
            let device = random(3) as i16 - 1;
            let (allocated, reserved) = (bytes, bytes);
            let kind = match random(8) {
                0 => EventKind::BlockAlloc(BlockAlloc {
                    device,
                    addr,
                    bytes,
                    requested: None,
                    stream: None,
                    allocated,
                    reserved,
                }),
                1 => EventKind::BlockFree(BlockFree {
                    device,
                    addr,
                    bytes,
                    allocated,
                    reserved,
                    collecting: false,
                }),
                2 => EventKind::Wait(Wait {
                    event: random(4),
                    stream: 0,
                    action: WaitAction::ALL[random(3) as usize],
                    result: 0,
                }),
                3 if random(10) == 0 => EventKind::BlockOom(BlockOom {
                    device,
                    bytes,
                    requested: None,
                    stream: None,
                    allocated,
                    reserved,
                }),
                _ => EventKind::Call(Call {
                    api: gputrace_schemas::event::ApiId(random(4) as u32),
                    action: Action::ALL[random(Action::ALL.len() as u64) as usize],
                    device,
                    result: Some(if random(10) == 0 { 2 } else { 0 }),
                    addr,
                    bytes,
                    stream: 0,
                    handle: random(6),
                    extra: random(3),
                    duration: Nanos(random(100)),
                    captured: random(9) == 0,
                    in_allocate: random(3) == 0,
                    comm: CommId(0),
                    nccl_call: 0,
                    nccl_thread: false,
                }),
            };
            let stack = StackId(0);
            let thread = ThreadId(random(3) as u32);
            ledger.event(&trace, &Event { time: Nanos(time), thread, stack, kind });
        }
        ledger.finish();
        for books in ledger.devices().values().filter(|_| !huge) {
            let sum =
                |part: fn(&Part<OwnerId>) -> u64| books.physical.owners().map(|p| part(&p)).sum::<u64>();
            assert_eq!(sum(|part| part.live.bytes.0), books.physical.live().bytes.0, "seed {seed}");
            assert_eq!(sum(|part| part.at_peak.bytes.0), books.physical.peak().0, "seed {seed}");
            let kinds = books.kinds.iter().filter(|(kind, _)| kind.is_physical());
            assert_eq!(kinds.map(|(_, meter)| meter.now.0).sum::<u64>(), books.physical.now().bytes.0);
        }
        let live: u64 = ledger
            .live()
            .filter(|o| o.kind.is_physical() && o.device != HOST)
            .fold(0, |sum, o| sum.saturating_add(o.bytes.0));
        let booked =
            ledger.devices().values().fold(0u64, |sum, d| sum.saturating_add(d.physical.live().bytes.0));
        assert!(huge || live == booked, "seed {seed}: {live} live, {booked} in the books");
    }
}

#[test]
fn what_a_pool_hands_out_lies_where_the_pool_was_made_for() {
    // -2 is the host; the current device is the first one throughout.
    let ledger = ledger(
        "PoolCreate handle=0x11 dev=-2
         PoolCreate handle=0x12 dev=1
         AllocAsync addr=a bytes=32M handle=0x11
         AllocAsync addr=b bytes=8M handle=0x12
         AllocAsync addr=c bytes=2M",
    );
    let held = |device| ledger.devices().get(&device).map_or(0, |books| books.physical.now().bytes.0 >> 20);
    assert_eq!((held(0), held(1), ledger.host().now().bytes.0 >> 20), (2, 8, 32));
}

/// Threads of NCCL that work for all communicators of a call take memory on the device of one of them.
#[test]
fn memory_of_a_call_for_several_communicators_is_that_of_the_device_s() {
    use gputrace_schemas::event::{ApiId, Communicator, NcclEnter, NcclOp};
    let mut trace = crate::scene::recording(
        "Alloc addr=a bytes=1M dev=0
         Alloc addr=b bytes=2M dev=1
         Alloc addr=c bytes=4M dev=1
         Alloc addr=d bytes=8M dev=2
         Alloc addr=e bytes=16M dev=0",
    );
    for (comm, device) in [(1, 0), (2, 1), (3, 0)] {
        trace.communicators.insert(CommId(comm), Communicator { device, ..Communicator::default() });
    }
    let enter = |op, call, comm, group, group_depth, count| {
        EventKind::NcclEnter(NcclEnter {
            api: ApiId(0),
            op,
            call,
            comm: CommId(comm),
            sequence: 0,
            group,
            group_depth,
            count,
            datatype: -1,
            redop: -1,
            redop_call: 0,
            peer: -1,
            send: 0,
            receive: 0,
            stream: 0,
            handle: 0,
            extra: 0,
            captured: false,
        })
    };
    let mut ledger = Ledger::knowing(FxHashSet::default());
    let at = |ledger: &mut Ledger, kind| {
        let event = Event { time: Nanos(1), thread: ThreadId(0), stack: StackId(0), kind };
        ledger.event(&trace, &event);
    };
    let memory: Vec<EventKind> = trace.events.iter().map(|event| event.kind.clone()).collect();
    let by = |n: usize, nccl_call| match &memory[n] {
        EventKind::Call(call) => EventKind::Call(Call { nccl_call, nccl_thread: true, ..*call }),
        other => other.clone(),
    };
    // One call makes a communicator for each of two devices, and a third device has none of them.
    at(&mut ledger, enter(NcclOp::CommInitAll, 1, 1, 0, 0, 2));
    for n in [0, 1, 3] {
        at(&mut ledger, by(n, 1));
    }
    // A group of two communicators on two devices.
    at(&mut ledger, enter(NcclOp::AllReduce, 2, 2, 7, 1, 1));
    at(&mut ledger, enter(NcclOp::AllReduce, 3, 3, 7, 1, 1));
    at(&mut ledger, enter(NcclOp::GroupEnd, 4, 0, 7, 1, 0));
    for n in [2, 4] {
        at(&mut ledger, by(n, 4));
    }
    let held: Vec<_> = ledger.communicators().map(|(id, books)| (id.0, books.device.now.0 >> 20)).collect();
    assert_eq!(held, [(1, 1), (2, 6), (3, 16)]);
}
