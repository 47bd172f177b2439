//! Bytes an event takes in a trace, and how fast events come back, for a sequence of blocks from standard input:
//! lines `alloc|free TIME_NS ADDR BYTES ALLOCATED RESERVED`, as `snapshot_to_blocks.py` makes them of a PyTorch snapshot.
//! FORMAT.md, Size, has the results. An argument repeats the sequence, shifted in time.
#![allow(clippy::print_stdout)]

use gputrace_schemas::event::{BlockAlloc, BlockFree, Bytes, Event, EventKind, Nanos, StackId, ThreadId};
use gputrace_schemas::{reader::Trace, writer::Writer};
use std::io::{BufRead, Cursor};
use std::time::Duration;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let times: u64 = std::env::args().nth(1).map_or(Ok(1), |argument| argument.parse())?;
    let mut sequence = Vec::new();
    for line in std::io::stdin().lock().lines() {
        sequence
            .push(event(&line?).ok_or("a line is not `alloc|free TIME_NS ADDR BYTES ALLOCATED RESERVED`")?);
    }
    let (first, last) = (sequence[0].time.0, sequence[sequence.len() - 1].time.0);
    let mut writer = Writer::new(Vec::new())?;
    let begin = on_processor()?;
    for turn in 0..times {
        for event in &sequence {
            let time = Nanos(event.time.0 + turn * (last - first + 1_000));
            writer.event(&Event { time, ..event.clone() })?;
        }
    }
    let written = on_processor()? - begin;
    let bytes = writer.finish()?;
    let length = bytes.len();
    let begin = on_processor()?;
    let trace = Trace::read(Cursor::new(bytes), "memory")?;
    let n_events = trace.events().inspect(|event| assert!(event.time.0 > 0)).count();
    let read = on_processor()? - begin;
    let per_second = |time: Duration| n_events as f64 / time.as_secs_f64() / 1e6;
    println!(
        "{n_events} events, {:.2} bytes an event, written {:.1} M, read {:.1} M events a second of processor time",
        length as f64 / n_events as f64,
        per_second(written),
        per_second(read),
    );
    Ok(())
}

/// Time that this thread has had a processor: other programs do not count.
fn on_processor() -> Result<Duration, Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    Ok(Duration::from_nanos(text.split(' ').next().unwrap_or_default().parse()?))
}

fn event(line: &str) -> Option<Event> {
    let mut words = line.split_ascii_whitespace();
    let action = words.next()?;
    let mut number = || words.next()?.parse::<u64>().ok();
    let (time, addr, bytes) = (Nanos(number()?), number()?, Bytes(number()?));
    let (allocated, reserved) = (Bytes(number()?), Bytes(number()?));
    let kind = match action {
        // Requests are seldom whole multiples of 512: up to that much below the block's size, from the size itself.
        "alloc" => EventKind::BlockAlloc(BlockAlloc {
            device: 0,
            addr,
            bytes,
            requested: Some(Bytes(bytes.0 - bytes.0 / 512 * 4 % 512)),
            stream: Some(0),
            allocated,
            reserved,
        }),
        "free" => {
            EventKind::BlockFree(BlockFree { device: 0, addr, bytes, allocated, reserved, collecting: false })
        }
        _ => return None,
    };
    Some(Event { time, thread: ThreadId(1), stack: StackId(0), kind })
}
