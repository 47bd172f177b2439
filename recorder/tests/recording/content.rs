//! What single records become in the trace: totals that were left out, calls that end late, stacks.

use crate::support::*;
use gputrace_recorder::record;
use gputrace_ring::map::Map;
use gputrace_ring::record::{self as ring, Kind, pack_device};
use gputrace_ring::ring::{Producer, Pushed, as_words_bytes};
use gputrace_schemas::event::{Action, EventKind, Frame, NO_DEVICE};
use gputrace_schemas::reader::Trace;
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What a block event of the trace says, but for its time: whether it is a block handed out, address, device, bytes,
/// requested, stream, allocated, reserved.
type Said = (bool, u64, i16, u64, Option<u64>, Option<u64>, u64, u64);

fn said(kind: &EventKind) -> Option<Said> {
    match kind {
        EventKind::BlockAlloc(it) => Some((
            true,
            it.addr,
            it.device,
            it.bytes.0,
            it.requested.map(|bytes| bytes.0),
            it.stream,
            it.allocated.0,
            it.reserved.0,
        )),
        EventKind::BlockFree(it) => {
            Some((false, it.addr, it.device, it.bytes.0, None, None, it.allocated.0, it.reserved.0))
        }
        _ => None,
    }
}

/// Three threads take turns on two devices faster than the ring takes it; each has its own part of the addresses.
#[test]
fn totals_that_were_left_out_in_the_ring_are_in_the_trace() {
    const N_THREADS: usize = 3;
    let folder = Folder::new("totals");
    let mut kept: Vec<Vec<Said>> = vec![Vec::new(); N_THREADS];
    let mut n_lost = 0;
    let trace = recording(&folder, 12, |map| {
        // Allocated and reserved, by device.
        let totals = std::sync::Mutex::new([(0, 1 << 30), (0, 1 << 31)]);
        let done: Vec<(Vec<Said>, u64)> = std::thread::scope(|scope| {
            let work = |thread: usize| {
                let totals = &totals;
                move || {
                    let mut producer = Producer::new(map, tid(), tid());
                    let (mut kept, mut n_lost) = (Vec::new(), 0);
                    for n in 0..40_000_u64 {
                        let addr = (thread as u64) << 40 | n;
                        let (turn, bytes) = (n / 100, 512 * (1 + n / 2 % 9));
                        let device = (turn + thread as u64) as usize / 3 % 2;
                        // Pushed under a lock, as PyTorch's allocator does it.
                        let mut totals = totals.lock().unwrap();
                        let (allocated, reserved) = &mut totals[device];
                        let device_bytes = pack_device(device as i8, bytes);
                        let (at, stack) = (producer.now(), 0);
                        let (pushed, said) = if n % 2 == 0 {
                            *allocated += bytes;
                            *reserved += if n % 1_000 == 0 { 2 << 20 } else { 0 };
                            let (requested, stream) = (bytes - n % 500, turn / 4 % 3);
                            let (allocated, reserved) = (*allocated, *reserved);
                            let alloc = ring::BlockAlloc {
                                addr,
                                device_bytes,
                                requested,
                                stream,
                                allocated,
                                reserved,
                                stack,
                            };
                            let (requested, stream) = (Some(requested), Some(stream));
                            let said =
                                (true, addr, device as i16, bytes, requested, stream, allocated, reserved);
                            (producer.push_brief(at, 0, &alloc), said)
                        } else {
                            *allocated -= bytes;
                            let (allocated, reserved) = (*allocated, *reserved);
                            let free = ring::BlockFree { addr, device_bytes, allocated, reserved, stack };
                            let said = (false, addr, device as i16, bytes, None, None, allocated, reserved);
                            (producer.push_brief(at, 0, &free), said)
                        };
                        drop(totals);
                        if pushed == Pushed::Yes {
                            kept.push(said);
                        } else {
                            n_lost += 1;
                        }
                    }
                    producer.complete();
                    (kept, n_lost)
                }
            };
            let threads: Vec<_> = (0..N_THREADS).map(|thread| scope.spawn(work(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (slot, (of_thread, lost)) in kept.iter_mut().zip(done) {
            *slot = of_thread;
            n_lost += lost;
        }
    });
    let told = trace.events().filter_map(|event| match event.kind {
        EventKind::Lost(lost) => Some(lost.events),
        _ => None,
    });
    assert_eq!(told.sum::<u64>(), n_lost);
    let mut found: Vec<Vec<Said>> = vec![Vec::new(); N_THREADS];
    for said in trace.events().filter_map(|event| said(&event.kind)) {
        found[(said.1 >> 40) as usize].push(said);
    }
    for (thread, (found, kept)) in found.iter().zip(&kept).enumerate() {
        assert_eq!(found.len(), kept.len(), "thread {thread}");
        let differs = found.iter().zip(kept).find(|(found, kept)| found != kept);
        assert_eq!(differs, None, "thread {thread}");
    }
}

#[test]
fn what_follows_from_an_unreadable_record_is_not_guessed() {
    let folder = Folder::new("unreadable");
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(4));
    // A pid that no process has.
    let map = memory.make_ring(4, 0x7fff_fff0);
    let mut producer = Producer::new(map, 1, 1);
    // Each block is one kibibyte; the fifth comes with a new segment, so its totals are in the ring.
    for n in 1..=8 {
        let (device_bytes, requested) = (pack_device(0, 1024), 1000);
        let reserved = if n < 5 { 1 << 20 } else { 2 << 20 };
        let (addr, stream, allocated, stack) = (n << 12, 0, 1024 * n, 0);
        let alloc = ring::BlockAlloc { addr, device_bytes, requested, stream, allocated, reserved, stack };
        assert_eq!(producer.push_brief(producer.now(), 0, &alloc), Pushed::Yes);
    }
    // The second record: of no kind.
    let first = ring::Header::decode(gputrace_ring::ring::Reader::new(map).word(0, 0));
    let second = size_of::<gputrace_ring::map::ChunkHeader>() + usize::from(first.words) * 8;
    // SAFETY: inside of the chunk, and nobody else has the ring yet.
    unsafe { *map.chunk(0).add(second + 2) = 0xee };
    let summary = record(&ring, options(&folder, "a.gtr")).unwrap();
    let trace = Trace::open(&summary.trace).unwrap();
    let found: Vec<(u64, u64)> =
        trace.events().filter_map(|event| said(&event.kind)).map(|said| (said.1 >> 12, said.6)).collect();
    assert_eq!(found, [1, 5, 6, 7, 8].map(|n| (n, 1024 * n)));
    assert_eq!(summary.n_damaged, 3, "the second, and the two that follow from it");
}

#[test]
fn an_open_call_gets_its_result_when_it_ends_and_keeps_its_time() {
    let folder = Folder::new("open");
    let trace = recording(&folder, 16, |map| {
        let mut producer = Producer::new(map, tid(), tid());
        let name =
            |number: u64, name: &'static str| [number.to_ne_bytes().to_vec(), name.as_bytes().to_vec()];
        for (number, text) in [(7, "cuMemFree_v2"), (9, "cuMemUnmap")] {
            let [number, text] = name(number, text);
            producer.push_raw(producer.now(), Kind::Api, &[&number, &text, b"\0", b"cudaFree"]);
        }
        // Never ends: the next call of the same function shows that its end was lost.
        producer.push(producer.now(), 0, &free_call(7, 0x1000));
        producer.push(producer.now(), 0, &free_call(7, 0x2000));
        // Long enough for the recorder to give up on order.
        for n in 0..8 {
            std::thread::sleep(Duration::from_millis(20));
            producer.push_raw(producer.now(), Kind::Note, &[format!("note {n}").as_bytes()]);
        }
        let end =
            ring::CallEnd { api: 7, result: 3, addr: 0x2000, duration: 1_000_000, ..Default::default() };
        producer.push(producer.now(), 0, &end);
        producer.complete();
    });
    let shown: Vec<String> = trace
        .events()
        .map(|event| match event.kind {
            EventKind::Call(call) => {
                assert_eq!((call.action, call.device), (Action::Free, NO_DEVICE));
                let api = trace.api(call.api).unwrap();
                format!(
                    "{} {} {:x} {:?} {}",
                    api.name,
                    api.runtime_name,
                    call.addr,
                    call.result,
                    call.duration.0 > 0
                )
            }
            EventKind::Note(text) => text,
            other => panic!("{other:?}"),
        })
        .collect();
    let mut expected = vec![
        "cuMemFree_v2 cudaFree 1000 None false".to_owned(),
        "cuMemFree_v2 cudaFree 2000 Some(3) true".to_owned(),
    ];
    expected.extend((0..8).map(|n| format!("note {n}")));
    expected.push("process.end=detached".to_owned());
    assert_eq!(shown, expected);
}

#[inline(never)]
fn a_place_to_call_from() -> u64 {
    std::hint::black_box(4)
}

#[test]
fn stacks_come_with_their_functions_and_lines() {
    let folder = Folder::new("stacks");
    let native = a_place_to_call_from as *const () as u64 + 2;
    let trace = recording(&folder, 16, |map| {
        let mut producer = Producer::new(map, tid(), tid());
        let texts: [&[u8]; 3] = [b"train.step", b"train.py", &[0x80 | 10 << 3, 0, 0]];
        let code = ring::CodeDef {
            id: 0xc0de,
            name: texts[0].len() as u16,
            file: texts[1].len() as u16,
            lines: texts[2].len() as u32,
            first_line: 30,
            python: 3 << 8 | 12,
            marks: 0,
        };
        let stack = ring::StackDef { id: 0x57ac, native: 1, python: 1, marks: 0 };
        let frames = [native, 0xc0de, 0];
        producer.push_with(producer.now(), 0, &stack, &[as_words_bytes(&frames)]);
        producer.push_with(producer.now(), 0, &code, &texts);
        for _ in 0..2 {
            let free = ring::BlockFree { stack: 0x57ac, ..numbered(0, 1) };
            producer.push_brief(producer.now(), 0, &free);
        }
        // Its definition never comes.
        producer.push_brief(producer.now(), 0, &ring::BlockFree { stack: 0xdead, ..numbered(0, 2) });
        producer.complete();
        a_place_to_call_from();
    });
    let frees = trace.events().filter(|event| !matches!(event.kind, EventKind::Note(_)));
    let stacks: Vec<_> = frees.map(|event| event.stack).collect();
    assert_eq!(stacks.len(), 3);
    assert!(stacks[0] == stacks[1] && stacks[0] != stacks[2]);
    assert_eq!(trace.stack_frames(stacks[2]).count(), 0);
    // An optimised build has functions inlined at the address.
    let inlined = |frame: &&Frame| matches!(frame, Frame::Native { inlined: true, .. });
    let frames: Vec<&Frame> = trace.stack_frames(stacks[0]).filter(|frame| !inlined(frame)).collect();
    let [Frame::Native { address, module, function, file, .. }, python] = frames.as_slice() else {
        panic!("{frames:?}")
    };
    assert_eq!(*address, native);
    assert!(function.ends_with("a_place_to_call_from"), "{function}");
    assert!(file.ends_with("recording/content.rs"), "{file}");
    let module = trace.module(module.unwrap()).unwrap();
    assert_eq!(Path::new(&module.path), fs::canonicalize(std::env::current_exe().unwrap()).unwrap());
    let (function, file) = ("train.step".to_owned(), "train.py".to_owned());
    assert_eq!(**python, Frame::Python { function, file, line: 30 });
}

#[test]
fn a_line_that_got_another_owner_ends_the_calls_of_the_one_before() {
    let folder = Folder::new("lanes");
    const N_OWNERS: u64 = 200;
    let trace = recording(&folder, 8, |map| {
        for n in 0..N_OWNERS {
            // One after the other, on one line, as where few threads live at a time.
            map.thread(5).tid.store(0, Ordering::Relaxed);
            let mut producer = on_line(map, 5);
            producer.push(producer.now(), 0, &free_call(7, n << 12));
            producer.complete();
            while map.state(0).load(Ordering::Acquire) != gputrace_ring::ring::FREE {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        // The last one lives: its call is still open.
        let mut last = on_line(map, 6);
        last.push(last.now(), 0, &free_call(7, 0x7000));
    });
    let calls = || {
        trace.events().filter_map(|event| match event.kind {
            EventKind::Call(call) => Some((call.addr, call.result)),
            _ => None,
        })
    };
    // All but the last owner of that line have a successor; its call and the other line's are open where the recording ends.
    let begun = (0..N_OWNERS).map(|n| n << 12).chain([0x7000]);
    assert_eq!(calls().collect::<Vec<_>>(), begun.map(|addr| (addr, None)).collect::<Vec<_>>());
    assert_eq!(trace.threads().iter().filter(|thread| thread.tid == 5).count() as u64, N_OWNERS);
}
