//! Writes the traces of a job of many ranks, to measure `gputrace ranks` with. Each rank goes through a training run that was recorded on a GPU
//! (tests/golden/varying-lengths.gtr: its requests, sizes, addresses, stacks and segments), again and again, emptying PyTorch's cache
//! in between, and makes a collective every few events. Three ranks have a fault each (`make fleet` looks for them): the middle one skips a
//! collective, the next one calls one with another count, and the one after that keeps a block of every pass.
//!
//!     cargo run --release -p gputrace-schemas --example ranks -- FOLDER RANKS EVENTS [FIRST LAST]

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::io::{self, BufWriter, Cursor};

use gputrace_schemas::event::*;
use gputrace_schemas::reader::Trace;
use gputrace_schemas::writer::Writer;

const RECORDED: &[u8] = include_bytes!("../../tests/golden/varying-lengths.gtr");
/// Lines of the program that call NCCL.
const CALLS: u64 = 10;
/// Events of the recorded run between two collectives.
const BETWEEN: usize = 10;
/// What the rank that leaks asks the driver for in every pass, and keeps; and where.
const KEPT: u64 = 2 << 20;
const KEPT_AT: u64 = 0x6000_0000_0000;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, ranks, events, some @ ..] = arguments.as_slice() else {
        return Err("usage: FOLDER RANKS EVENTS [FIRST LAST]".into());
    };
    let (ranks, events) = (ranks.parse::<u32>()?, events.parse::<u64>()?);
    std::fs::create_dir_all(folder)?;
    let wanted = match some {
        [first, last] => first.parse()?..last.parse::<u32>()? + 1,
        _ => 0..ranks,
    };
    let recorded = Recorded::read()?;
    for rank in wanted {
        rank_trace(&recorded, folder, rank, ranks, events)?;
    }
    Ok(())
}

/// The run that was recorded.
struct Recorded {
    trace: Trace,
    events: Vec<Event>,
    /// Those that happen in every pass: what concerns memory.
    again: Vec<Event>,
    /// Nanoseconds that it took.
    span: u64,
    /// What gives linear memory back.
    free: ApiId,
    /// Lines that call NCCL, and the one that keeps a block.
    lines: Vec<StackId>,
}

impl Recorded {
    fn read() -> Result<Recorded, Box<dyn Error>> {
        let trace = Trace::read(Cursor::new(RECORDED), "varying-lengths.gtr")?;
        let events: Vec<Event> = trace.events().collect();
        let concerns_memory = |event: &&Event| match &event.kind {
            EventKind::Call(call) => call.result == Some(0) && (call.action.gives() || call.action.takes()),
            EventKind::BlockAlloc(_) | EventKind::BlockFree(_) | EventKind::Wait(_) | EventKind::Mark(_) => {
                true
            }
            _ => false,
        };
        let again = events.iter().filter(concerns_memory).cloned().collect();
        let span = trace.span().map_or(0, |(first, last)| last.0 - first.0) + 1_000_000;
        let (free, first) = (ApiId(trace.apis().len() as u32), trace.stacks().len() as u32);
        let lines = (0..=CALLS as u32).map(|line| StackId(first + line)).collect();
        Ok(Recorded { trace, events, again, span, free, lines })
    }

    /// What the run defined, as of another rank.
    fn define(&self, writer: &mut Writer<BufWriter<File>>, rank: u32, ranks: u32) {
        let trace = &self.trace;
        let (host, gpu) = (format!("node{}", rank / 8), format!("GPU-{rank}"));
        let process = Process { pid: 1000 + rank, host, rank: Some(rank), ..trace.process().clone() };
        writer.process(&process);
        for device in trace.devices() {
            writer.device(&Device { uuid: gpu.clone(), ..device.clone() });
        }
        (0..).zip(trace.modules()).for_each(|(id, it)| writer.module(ModuleId(id), it));
        (0..).zip(trace.frames()).for_each(|(id, it)| writer.frame(FrameId(id), it));
        (0..).zip(trace.stacks()).skip(1).for_each(|(id, it)| writer.stack(StackId(id), it));
        (0..).zip(trace.threads()).for_each(|(id, it)| writer.thread(ThreadId(id), it));
        (0..).zip(trace.apis()).for_each(|(id, it)| writer.api(ApiId(id), it));
        (0..).zip(trace.texts()).skip(1).for_each(|(id, it)| writer.text(TextId(id), it));
        writer.api(self.free, &Api { name: "cuMemFree_v2".into(), runtime_name: "cudaFree".into() });
        for (line, stack) in (1..).zip(&self.lines) {
            let frame = FrameId(trace.frames().len() as u32 + line);
            let (function, file) = ("step".to_owned(), "/job/train.py".to_owned());
            writer.frame(frame, &Frame::Python { function, file, line });
            writer.stack(*stack, &Stack { frames: vec![frame], ..Stack::default() });
        }
        writer.communicator(
            CommId(1),
            &Communicator {
                origin: Some(NcclOp::CommInit),
                call: 1,
                unique_id: 7,
                rank: Some(rank),
                n_ranks: Some(ranks),
                ..Communicator::default()
            },
        );
    }
}

fn rank_trace(recorded: &Recorded, folder: &str, rank: u32, ranks: u32, n_events: u64) -> io::Result<()> {
    let mut writer = Writer::new(BufWriter::new(File::create(format!("{folder}/rank{rank}.gtr"))?))?;
    recorded.define(&mut writer, rank, ranks);
    let mut job = Job {
        recorded,
        writer,
        now: recorded.trace.span().map_or(1, |(first, _)| first.0) + u64::from(rank),
        n_events: 0,
        n_calls: 0,
        n_collectives: 0,
        live: BTreeMap::new(),
        blocks: BTreeMap::new(),
        n_kept: 0,
        fault: match rank.checked_sub(ranks / 2) {
            Some(0) => Some(Fault::Skips),
            Some(1) => Some(Fault::Differs),
            Some(2) => Some(Fault::Keeps),
            _ => None,
        },
    };
    job.call(NcclOp::CommInit, UNKNOWN, 0, 1)?;
    job.pass(&recorded.events, false)?;
    // All but the first, which also loads code, are equally long, whatever is kept between them.
    let before = job.n_events;
    job.pass(&recorded.again, false)?;
    let n_passes = (n_events / (job.n_events - before)).max(3);
    for pass in 2..n_passes {
        if job.fault == Some(Fault::Keeps) {
            job.keep()?;
        }
        job.pass(&recorded.again, pass == n_passes / 2)?;
    }
    job.writer.finish()?;
    Ok(())
}

/// What is wrong with a rank.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    Skips,
    Differs,
    Keeps,
}

struct Job<'a> {
    recorded: &'a Recorded,
    writer: Writer<BufWriter<File>>,
    now: u64,
    n_events: u64,
    n_calls: u64,
    n_collectives: u64,
    /// Linear memory that is not given back, and blocks.
    live: BTreeMap<u64, Event>,
    blocks: BTreeMap<u64, Event>,
    /// Blocks that the rank has kept.
    n_kept: u64,
    fault: Option<Fault>,
}

impl Job<'_> {
    /// The run once more, and what it left given back. In the middle of all passes a rank calls otherwise than the others.
    fn pass(&mut self, events: &[Event], is_middle: bool) -> io::Result<()> {
        let shift = self.now - events.first().map_or(0, |event| event.time.0);
        let mut n_calls = 0;
        for (n, event) in events.iter().enumerate() {
            let mut event = Event { time: Nanos(event.time.0 + shift), ..event.clone() };
            match &mut event.kind {
                EventKind::Call(call) if call.action == Action::Alloc && call.result == Some(0) => {
                    self.live.insert(call.addr, event.clone());
                }
                EventKind::BlockAlloc(it) => {
                    self.blocks.insert(it.addr, Event { kind: EventKind::BlockAlloc(*it), ..event });
                    (it.allocated, it.reserved) = self.with_kept(it.allocated, it.reserved);
                }
                EventKind::BlockFree(it) => {
                    self.blocks.remove(&it.addr);
                    (it.allocated, it.reserved) = self.with_kept(it.allocated, it.reserved);
                }
                _ => {}
            }
            self.now = event.time.0;
            self.n_events += 1;
            self.writer.event(&event)?;
            if n % BETWEEN == BETWEEN - 1 {
                let is_chosen = is_middle && n / BETWEEN == events.len() / BETWEEN / 2;
                let (skips, differs) = (self.fault == Some(Fault::Skips), self.fault == Some(Fault::Differs));
                if !(is_chosen && skips) {
                    let sequence = self.n_collectives;
                    self.n_collectives += 1;
                    let n_times = if is_chosen && differs { 2 } else { 1 };
                    self.call(NcclOp::AllReduce, sequence, n_calls % CALLS, n_times)?;
                }
                n_calls += 1;
            }
        }
        self.give_back()?;
        self.now += self.recorded.span / 100;
        Ok(())
    }

    /// PyTorch's own totals, with what the rank has kept.
    fn with_kept(&self, allocated: Bytes, reserved: Bytes) -> (Bytes, Bytes) {
        let kept = self.n_kept * KEPT;
        (Bytes(allocated.0 + kept), Bytes(reserved.0 + kept))
    }

    /// What the run left: its blocks, and then the segments, as when the cache is emptied.
    fn give_back(&mut self) -> io::Result<()> {
        let blocks = std::mem::take(&mut self.blocks);
        let mut allocated: u64 = blocks.values().map(bytes_of).sum();
        let reserved = self.live.values().filter(|event| is_of_torch(event)).map(bytes_of).sum::<u64>();
        for (addr, event) in blocks {
            allocated -= bytes_of(&event);
            let (allocated, reserved) = self.with_kept(Bytes(allocated), Bytes(reserved));
            let (device, bytes) = (0, Bytes(bytes_of(&event)));
            let free = BlockFree { device, addr, bytes, allocated, reserved, collecting: false };
            self.event(event.thread, event.stack, EventKind::BlockFree(free))?;
        }
        for (_, event) in std::mem::take(&mut self.live) {
            if let EventKind::Call(call) = event.kind {
                let free = Call {
                    api: self.recorded.free,
                    action: Action::Free,
                    bytes: Bytes(0),
                    in_allocate: false,
                    ..call
                };
                self.event(event.thread, event.stack, EventKind::Call(free))?;
            }
        }
        Ok(())
    }

    /// A block that is never given back, in a segment of its own.
    fn keep(&mut self) -> io::Result<()> {
        let addr = KEPT_AT + self.n_kept * KEPT;
        self.n_kept += 1;
        let recorded = self.recorded;
        let segments = recorded.again.iter().filter(|event| is_of_torch(event));
        let mut calls = segments.filter_map(|event| match event.kind {
            EventKind::Call(call) => Some((event, call)),
            _ => None,
        });
        let Some((event, call)) = calls.next_back() else { return Ok(()) };
        let segment = Call { addr, bytes: Bytes(KEPT), ..call };
        self.event(event.thread, event.stack, EventKind::Call(segment))?;
        let (allocated, reserved) = self.with_kept(Bytes(0), Bytes(0));
        let (bytes, requested, stream) = (Bytes(KEPT), Some(Bytes(KEPT)), Some(0));
        let block = BlockAlloc { device: 0, addr, bytes, requested, stream, allocated, reserved };
        let line = recorded.lines[CALLS as usize];
        self.event(event.thread, line, EventKind::BlockAlloc(block))
    }

    fn event(&mut self, thread: ThreadId, stack: StackId, kind: EventKind) -> io::Result<()> {
        self.now += 1000;
        self.n_events += 1;
        self.writer.event(&Event { time: Nanos(self.now), thread, stack, kind })
    }

    fn call(&mut self, op: NcclOp, sequence: u64, line: u64, n_times: u64) -> io::Result<()> {
        self.n_calls += 1;
        let call = self.n_calls;
        let enter = NcclEnter {
            api: ApiId(0),
            op,
            call,
            comm: CommId(1),
            sequence,
            group: 0,
            group_depth: 0,
            count: 1024 * (line + 1) * n_times,
            datatype: 7,
            redop: 0,
            redop_call: 0,
            peer: -1,
            send: 0x1000,
            receive: 0x2000,
            stream: 0,
            handle: 0,
            extra: 0,
            captured: false,
        };
        let stack = self.recorded.lines[line as usize];
        self.event(ThreadId(0), stack, EventKind::NcclEnter(enter))?;
        let exit = NcclExit { call, result: 0, value: 0, duration: Nanos(500), timed: None };
        self.event(ThreadId(0), stack, EventKind::NcclExit(exit))
    }
}

fn bytes_of(event: &Event) -> u64 {
    match &event.kind {
        EventKind::Call(call) => call.bytes.0,
        EventKind::BlockAlloc(block) => block.bytes.0,
        _ => 0,
    }
}

/// A segment of PyTorch's allocator.
fn is_of_torch(event: &Event) -> bool {
    matches!(&event.kind, EventKind::Call(call) if call.in_allocate && call.action == Action::Alloc)
}
