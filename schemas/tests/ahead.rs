//! A long trace is decoded on several processors: in the same order, with the same damage, whoever is faster.

use std::io::Cursor;

use gputrace_schemas::event::*;
use gputrace_schemas::reader::Trace;
use gputrace_schemas::writer::Writer;

/// So many marks, in blocks as the writer makes them.
fn long(n: u64) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new()).unwrap();
    writer.text(TextId(1), "step");
    for number in 0..n {
        let mark =
            Mark { action: MarkAction::Push, text: TextId(1), domain: TextId(0), range: number, category: 0 };
        let event = Event {
            time: Nanos(1000 + number),
            thread: ThreadId(1),
            stack: StackId(0),
            kind: EventKind::Mark(mark),
        };
        writer.event(&event).unwrap();
    }
    writer.finish().unwrap()
}

fn ranges(trace: &Trace) -> Vec<u64> {
    let range = |event: Event| match event.kind {
        EventKind::Mark(mark) => mark.range,
        other => panic!("{other:?}"),
    };
    trace.events().map(range).collect()
}

#[test]
fn every_event_of_a_long_trace_comes_in_its_turn() {
    let n = 600_000;
    let trace = Trace::read(Cursor::new(long(n)), "long").unwrap();
    for _ in 0..3 {
        assert!(ranges(&trace).into_iter().eq(0..n));
    }
    // Whoever stops in the middle leaves no thread that goes on.
    assert_eq!(trace.events().take(300_000).count(), 300_000);
    assert_eq!(trace.damages(), []);
}

#[test]
fn what_is_damaged_is_told_in_the_order_of_the_file() {
    let mut bytes = long(600_000);
    let n_bytes = bytes.len();
    for part in [3, 5, 7] {
        bytes[n_bytes / 10 * part] ^= 0x40;
    }
    let read = || {
        let trace = Trace::read(Cursor::new(bytes.clone()), "long").unwrap();
        (ranges(&trace), trace.damages())
    };
    let (events, damages) = read();
    assert!(events.is_sorted() && events.len() < 600_000);
    assert!(!damages.is_empty() && damages.is_sorted_by_key(|damage| damage.offset), "{damages:?}");
    for _ in 0..5 {
        assert_eq!(read(), (events.clone(), damages.clone()));
    }
}
