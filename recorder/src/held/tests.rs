//! What is held, against a naive model and against the order in which events can come.

use super::*;
use gputrace_schemas::event::{ApiId, CommId};

fn at(time: u64, kind: EventKind) -> Event {
    Event { time: Nanos(time), thread: ThreadId(1), stack: StackId(1), kind }
}

fn call(action: Action, addr: u64, handle: u64, bytes: u64) -> EventKind {
    EventKind::Call(Call {
        api: ApiId(0),
        action,
        device: 0,
        result: Some(0),
        addr,
        bytes: Bytes(bytes),
        stream: 0,
        handle,
        extra: 0,
        duration: Nanos(0),
        captured: false,
        in_allocate: false,
        comm: CommId(0),
        nccl_call: 0,
        nccl_thread: false,
    })
}

/// One line for each event that is held: time, action, address or handle.
fn held(events: &[(u64, EventKind)]) -> Vec<String> {
    let mut held = Held::default();
    for (time, kind) in events {
        held.event(&at(*time, kind.clone()));
    }
    let shown = |event: Event| match event.kind {
        EventKind::Call(call) => {
            format!(
                "{} {} {:x}",
                event.time.0,
                call.action,
                if call.addr == 0 { call.handle } else { call.addr }
            )
        }
        EventKind::BlockAlloc(block) => {
            format!("{} block {:x} of {} {}", event.time.0, block.addr, block.allocated.0, block.reserved.0)
        }
        EventKind::BlockFree(block) => {
            format!("{} freed {:x} of {}", event.time.0, block.addr, block.allocated.0)
        }
        other => format!("{} {other:?}", event.time.0),
    };
    held.events().into_iter().map(shown).collect()
}

fn alloc(addr: u64) -> EventKind {
    call(Action::Alloc, addr, 0, 512)
}

fn free(addr: u64) -> EventKind {
    call(Action::Free, addr, 0, 0)
}

fn block(addr: u64, bytes: u64, allocated: u64) -> EventKind {
    EventKind::BlockAlloc(BlockAlloc {
        device: 0,
        addr,
        bytes: Bytes(bytes),
        requested: None,
        stream: None,
        allocated: Bytes(allocated),
        reserved: Bytes(1000),
    })
}

fn block_freed(addr: u64, bytes: u64, allocated: u64) -> EventKind {
    EventKind::BlockFree(BlockFree {
        device: 0,
        addr,
        bytes: Bytes(bytes),
        allocated: Bytes(allocated),
        reserved: Bytes(1000),
        collecting: false,
    })
}

#[test]
fn what_is_freed_is_held_no_more_and_the_rest_keeps_its_time() {
    assert_eq!(held(&[(1, alloc(0xa)), (2, alloc(0xb)), (3, free(0xa))]), ["2 alloc b"]);
    assert_eq!(held(&[(1, alloc(0xa)), (2, free(0xa)), (3, alloc(0xa))]), ["3 alloc a"]);
    let refused = call(Action::Alloc, 0xc, 0, 1);
    let EventKind::Call(refused) = refused else { unreachable!() };
    let refused = EventKind::Call(Call { result: Some(2), ..refused });
    assert_eq!(held(&[(1, refused)]), [""; 0]);
}

#[test]
fn a_free_that_is_written_late_takes_the_older_birth() {
    // Stamped before its call, and written after another thread got the address.
    assert_eq!(held(&[(1, alloc(0xa)), (5, alloc(0xa)), (3, free(0xa))]), ["5 alloc a"]);
    // Still on its way: both are in the trace, and so will be the free.
    assert_eq!(held(&[(1, alloc(0xa)), (5, alloc(0xa))]), ["1 alloc a", "5 alloc a"]);
    // Lost: a minute later nothing waits for it.
    let later = LATE + 10;
    assert_eq!(
        held(&[(1, alloc(0xa)), (5, alloc(0xa)), (later, alloc(0xb))]),
        ["5 alloc a".to_owned(), format!("{later} alloc b")]
    );
}

#[test]
fn physical_memory_is_held_while_it_is_referred_to_or_mapped() {
    let create = || (1, call(Action::Create, 0, 7, 2 << 20));
    let map = || (2, call(Action::Map, 0x1000, 7, 0x1000));
    let access = || (3, call(Action::SetAccess, 0x1000, 0, 0x1000));
    let release = || (4, call(Action::Release, 0, 7, 0));
    let unmap = || (5, call(Action::Unmap, 0x1000, 0, 0x1000));
    let released = ["1 create 7", "2 map 1000", "3 set_access 1000", "4 release 7"];
    assert_eq!(held(&[create(), map(), access(), release()]), released);
    assert_eq!(held(&[create(), map(), access(), release(), unmap()]), [""; 0]);
    assert_eq!(held(&[create(), map(), access(), unmap()]), ["1 create 7"]);
    // As NCCL frees: retain, release, unmap, release.
    let retain = (4, call(Action::Retain, 0x1000, 7, 0));
    assert_eq!(held(&[create(), map(), retain.clone(), release()]), ["1 create 7", "2 map 1000"]);
    assert_eq!(held(&[create(), map(), retain, release(), unmap(), release()]), [""; 0]);
}

#[test]
fn totals_of_blocks_are_those_of_what_is_held_and_the_last_is_what_pytorch_said() {
    let events = [
        (1, block(0xa, 100, 100)),
        (2, block(0xb, 200, 300)),
        (3, block(0xc, 50, 350)),
        (4, block_freed(0xb, 200, 150)),
    ];
    // A segment that was not seen: what is reserved is at least what is held, and then what was said.
    assert_eq!(held(&events), ["1 block a of 100 100", "3 block c of 150 1000"]);
    let none_left = [(1, block(0xa, 100, 100)), (2, block_freed(0xa, 100, 0))];
    assert_eq!(held(&none_left), ["1 block a of 100 1000", "2 freed a of 0"]);
}

#[test]
fn a_context_that_goes_takes_what_lies_in_it() {
    let device = |action| {
        let EventKind::Call(made) = call(action, 0, 9, 0) else { unreachable!() };
        EventKind::Call(made)
    };
    let retain = || (1, device(Action::PrimaryRetain));
    let events = [retain(), (2, alloc(0xa)), (3, device(Action::PrimaryRelease))];
    // Who looks at the end sees what went away with it, until something else is handed out.
    assert_eq!(held(&events).len(), 3);
    let again =
        [retain(), (2, alloc(0xa)), (3, device(Action::PrimaryRelease)), (4, retain().1), (5, alloc(0xb))];
    assert_eq!(held(&again), ["4 primary_retain 9", "5 alloc b"]);
}

#[test]
fn losses_are_summed_and_settings_kept_once() {
    let note = |text: &str| EventKind::Note(text.to_owned());
    let lost = |events| EventKind::Lost(Lost { cause: LostCause::RingFull, events });
    let events = [
        (1, note("a=1")),
        (2, note("a=1")),
        (3, note("a=2")),
        (4, note("process.alive=events 1 last 1")),
        (5, lost(2)),
        (6, lost(3)),
    ];
    assert_eq!(
        held(&events),
        [
            "2 Note(\"a=1\")".to_owned(),
            "3 Note(\"a=2\")".to_owned(),
            "6 Lost(Lost { cause: RingFull, events: 5 })".to_owned(),
        ]
    );
}

#[test]
fn the_recorder_s_own_words_do_not_move_the_time_of_the_newest_event() {
    let mut held = Held::default();
    held.event(&at(10, alloc(0xa)));
    held.event(&at(90, EventKind::Note("process.alive=events 1 last 1".to_owned())));
    held.event(&at(95, EventKind::Lost(Lost { cause: LostCause::RingFull, events: 1 })));
    assert_eq!(held.newest(), Nanos(10));
    // Read late, and older than those.
    held.event(&at(20, alloc(0xb)));
    assert_eq!(held.newest(), Nanos(20));
}

/// Against a model that keeps all events and looks through them.
#[test]
fn random_lives_are_those_of_a_naive_model() {
    let mut seed = 7_u64;
    let mut random = |most: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % most
    };
    for _ in 0..50 {
        let mut events = vec![];
        let mut model: Vec<(u64, u64)> = vec![];
        for time in 1..random(400) {
            let addr = 0x10 + random(20);
            match model.iter().position(|(_, at)| *at == addr) {
                Some(at) => {
                    model.remove(at);
                    events.push((time, free(addr)));
                }
                None => {
                    model.push((time, addr));
                    events.push((time, alloc(addr)));
                }
            }
        }
        let expected: Vec<String> =
            model.iter().map(|(time, addr)| format!("{time} alloc {addr:x}")).collect();
        assert_eq!(held(&events), expected);
    }
}
