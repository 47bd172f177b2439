//! Perfetto's protobuf trace, for ui.perfetto.dev and its SQL, with nanoseconds and no limit of size. Each trace is a process
//! with a counter track for every owner of every device, out-of-memory errors as instants, NCCL's calls as slices of their
//! threads, and what was asked for as stack samples weighed in bytes.
//!
//! Messages and field numbers: `protos/perfetto/trace/` of github.com/google/perfetto (`TracePacket`, `TrackDescriptor`,
//! `TrackEvent`, `InternedData`, and `StackSample` of v58).

use std::io::{self, Write};

use gputrace_schemas::event::{
    Event, EventKind, HOST, Nanos, NcclEnter, OutOfMemory, Process, StackId, ThreadId,
};
use rustc_hash::{FxHashMap, FxHashSet};

use super::parts::events::{Part, each_event, origins, parts_by_owner, process_name};
use super::parts::protobuf::Message;
use super::{Export, Request, Takes};
use gputrace_analyse::live::{Line, Lines};
use gputrace_trace::ledger::{Ledger, OwnerId, Step};
use gputrace_trace::owners::TORCH;
use gputrace_trace::source::Source;

pub(super) const ENTRY: Export = Export {
    name: "perfetto",
    summary: "memory over time by owner, NCCL's calls and stacks, for ui.perfetto.dev and its SQL",
    takes: Takes { several: true, ..Takes::ONE },
    is_binary: true,
    export,
};

/// `TrackEvent.Type`.
const SLICE_BEGIN: u64 = 1;
const SLICE_END: u64 = 2;
const INSTANT: u64 = 3;
const COUNTER: u64 = 4;
/// `CounterDescriptor.Unit.UNIT_SIZE_BYTES`.
const SIZE_BYTES: u64 = 3;
/// `StackSample.Unit.UNIT_BYTES`.
const UNIT_BYTES: u64 = 4;
/// `TracePacket.SequenceFlags`.
const INCREMENTAL_STATE_CLEARED: u64 = 1;
const NEEDS_INCREMENTAL_STATE: u64 = 2;
/// Fields of `TracePacket`.
const TRACK_EVENT: u64 = 11;
const INTERNED_DATA: u64 = 12;
const DEFAULTS: u64 = 59;
const TRACK_DESCRIPTOR: u64 = 60;
const STACK_SAMPLE: u64 = 135;
/// Tracks of a trace are numbered from here, times the number of the trace.
const TRACKS: u64 = 1 << 32;
/// Most stack samples of a trace; more are joined, stack by stack, and no byte is left out.
const MOST_SAMPLES: u64 = 1_000_000;

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    for (idx, (source, origin)) in (1..).zip(request.sources.iter().zip(origins(request.sources))) {
        let mut rank = Rank::new(out, idx, request, source)?;
        each_event(source, origin, |ledger, event, time| rank.event(ledger, event, time))?;
        rank.samples.end(&mut rank.sequence)?;
    }
    Ok(())
}

/// What one trace writes.
struct Rank<'a> {
    request: &'a Request<'a>,
    source: &'a Source,
    process: &'a Process,
    sequence: Sequence<'a>,
    counters: FxHashMap<(i16, Part), Counter>,
    threads: FxHashSet<ThreadId>,
    samples: Samples<'a>,
    /// Devices of the newest event.
    touched: Vec<i16>,
}

struct Counter {
    track: u64,
    last: u64,
}

impl<'a> Rank<'a> {
    fn new(
        out: &'a mut dyn Write,
        idx: u64,
        request: &'a Request<'a>,
        source: &'a Source,
    ) -> io::Result<Rank<'a>> {
        let process = source.definitions().process();
        let mut sequence = Sequence { out, id: idx, n_tracks: 0 };
        sequence.begin(process)?;
        let n_events = source.events().size_hint().1.unwrap_or(0) as u64;
        let samples = Samples {
            lines: Lines::new(source.definitions(), request.native),
            pid: process.pid,
            joined: n_events.div_ceil(MOST_SAMPLES).max(1),
            texts: FxHashMap::default(),
            frames: FxHashMap::default(),
            stacks: FxHashMap::default(),
            waiting: FxHashMap::default(),
        };
        Ok(Rank {
            request,
            source,
            process,
            sequence,
            counters: FxHashMap::default(),
            threads: FxHashSet::default(),
            samples,
            touched: vec![],
        })
    }

    fn event(&mut self, ledger: &Ledger, event: &Event, time: Nanos) -> io::Result<()> {
        let mut touched = std::mem::take(&mut self.touched);
        touched.clear();
        for step in ledger.steps() {
            let device = device_of(step);
            if device != HOST && self.request.wants(device) {
                if !touched.contains(&device) {
                    touched.push(device);
                }
                self.samples.step(ledger, step, event, time, &mut self.sequence)?;
            }
        }
        for device in &touched {
            self.counters(ledger, *device, time)?;
        }
        self.touched = touched;
        match &event.kind {
            EventKind::NcclEnter(call) => self.nccl_begins(call, event.thread, time)?,
            EventKind::NcclExit(call) => {
                let track = self.thread(event.thread)?;
                let result = (call.result != 0).then_some(call.result as u64);
                self.sequence.track_event(SLICE_END, track, time, |end| {
                    result.into_iter().for_each(|result| annotation(end, "result", result));
                })?;
            }
            _ => {}
        }
        if let Some(OutOfMemory { device, bytes }) =
            ledger.ran_out().filter(|oom| self.request.wants(oom.device))
        {
            let track = self.sequence.process_track();
            self.sequence.track_event(INSTANT, track, time, |instant| {
                instant.bytes(23, format!("out of memory on cuda:{device}: {} bytes", bytes.0).as_bytes());
                annotation(instant, "bytes", bytes.0);
            })?;
        }
        Ok(())
    }

    /// Writes the counters of a device that have changed.
    fn counters(&mut self, ledger: &Ledger, device: i16, time: Nanos) -> io::Result<()> {
        for (part, bytes) in parts_by_owner(ledger, device) {
            // The whole is shown by its parts from now on.
            if let Part::Allocated(owner) = part
                && let Some(whole) = self.counters.get_mut(&(device, Part::Owner(owner)))
            {
                self.sequence.counter(whole, 0, time)?;
            }
            self.count(ledger, device, part, bytes, time)?;
        }
        Ok(())
    }

    fn count(&mut self, ledger: &Ledger, device: i16, part: Part, bytes: u64, time: Nanos) -> io::Result<()> {
        if let Some(counter) = self.counters.get_mut(&(device, part)) {
            return self.sequence.counter(counter, bytes, time);
        }
        let mut unit = Message::default();
        unit.number(3, SIZE_BYTES);
        let track = self.sequence.track(|track| {
            track.bytes(2, format!("cuda:{device} {}", part.name(ledger)).as_bytes());
            track.bytes(8, &unit.0);
        })?;
        let mut counter = Counter { track, last: u64::MAX };
        self.sequence.counter(&mut counter, bytes, time)?;
        self.counters.insert((device, part), counter);
        Ok(())
    }

    fn nccl_begins(&mut self, call: &NcclEnter, thread: ThreadId, time: Nanos) -> io::Result<()> {
        let track = self.thread(thread)?;
        let communicator = self.source.definitions().communicator(call.comm);
        let n_ranks = communicator.and_then(|it| it.n_ranks).map_or(0, u64::from);
        let name = self.source.definitions().api(call.api).map_or(call.op.name(), |api| &api.name);
        self.sequence.track_event(SLICE_BEGIN, track, time, |slice| {
            slice.bytes(22, b"nccl");
            slice.bytes(23, name.as_bytes());
            annotation(slice, "call", call.call);
            annotation(slice, "communicator", u64::from(call.comm.0));
            annotation(slice, "ranks", n_ranks);
            annotation(slice, "count", call.count);
            if call.sequence != u64::MAX {
                annotation(slice, "sequence", call.sequence);
            }
        })
    }

    /// The track of a thread.
    fn thread(&mut self, id: ThreadId) -> io::Result<u64> {
        let track = self.sequence.id * TRACKS + TRACKS / 2 + u64::from(id.0);
        if self.threads.insert(id) {
            let known = self.source.definitions().thread(id);
            let mut thread = Message::default();
            thread.number(1, u64::from(self.process.pid.max(1)));
            thread.number(2, known.map_or(u64::from(id.0) + 1, |thread| u64::from(thread.tid)));
            thread.bytes(5, known.map_or("", |thread| &thread.name).as_bytes());
            let mut descriptor = Message::default();
            descriptor.number(1, track);
            descriptor.number(5, self.sequence.process_track());
            descriptor.bytes(4, &thread.0);
            self.sequence.packet(None, TRACK_DESCRIPTOR, &descriptor, 0)?;
        }
        Ok(track)
    }
}

fn device_of(step: &Step) -> i16 {
    match step {
        Step::Gained(object) | Step::Lost(object) => object.device,
        Step::Block(_, block) | Step::BlockFreed(_, block) | Step::BlockDone(_, block) => block.device,
        Step::Stranger(_, block) => block.device,
        Step::Pages(_, range) => range.device,
        // They lie in what is counted already.
        Step::Heap(..) => HOST,
    }
}

/// `DebugAnnotation`: a name and a number.
fn annotation(event: &mut Message, name: &str, value: u64) {
    let mut annotation = Message::default();
    annotation.bytes(10, name.as_bytes());
    annotation.varint(3 << 3);
    annotation.varint(value);
    event.bytes(4, &annotation.0);
}

/// What the program asked for, as samples: PyTorch's blocks, and what others got from the driver.
struct Samples<'a> {
    lines: Lines<'a>,
    pid: u32,
    /// This many requests from one place make one sample.
    joined: u64,
    texts: FxHashMap<(Table, String), u64>,
    frames: FxHashMap<Line, u64>,
    stacks: FxHashMap<(StackId, OwnerId), u64>,
    /// Bytes and number of requests that were not written yet, and the time of the last.
    waiting: FxHashMap<(u64, u32), (u64, u64, Nanos)>,
}

/// Tables of `InternedData` with texts.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Table {
    Functions = 5,
    SourcePaths = 18,
}

impl Samples<'_> {
    fn step(
        &mut self,
        ledger: &Ledger,
        step: &Step,
        event: &Event,
        time: Nanos,
        sequence: &mut Sequence,
    ) -> io::Result<()> {
        let (stack, owner, bytes) = match step {
            Step::Block(_, block) => (block.stack, None, block.bytes),
            Step::Gained(object) if !object.torch && object.kind.is_physical() => {
                (object.stack, Some(object.owner), object.bytes)
            }
            _ => return Ok(()),
        };
        let stack = self.stack(ledger, stack, owner, sequence)?;
        let thread = self.lines.definitions().thread(event.thread).map_or(0, |thread| thread.tid);
        let waiting = self.waiting.entry((stack, thread)).or_default();
        *waiting = (waiting.0.saturating_add(bytes.0), waiting.1 + 1, time);
        if waiting.1 < self.joined {
            return Ok(());
        }
        let weight = std::mem::take(&mut waiting.0);
        waiting.1 = 0;
        self.write(stack, thread, weight, time, sequence)
    }

    fn write(
        &self,
        stack: u64,
        thread: u32,
        weight: u64,
        time: Nanos,
        sequence: &mut Sequence,
    ) -> io::Result<()> {
        let mut task = Message::default();
        task.number(2, u64::from(self.pid.max(1)));
        task.number(3, u64::from(if thread > 0 { thread } else { self.pid.max(1) }));
        let mut sample = Message::default();
        sample.bytes(1, &task.0);
        sample.number(6, stack);
        sample.number(11, weight);
        sequence.packet(Some(time), STACK_SAMPLE, &sample, NEEDS_INCREMENTAL_STATE)
    }

    /// Writes what is still pending.
    fn end(&mut self, sequence: &mut Sequence) -> io::Result<()> {
        let mut waiting: Vec<_> = self.waiting.drain().filter(|(_, (_, n, _))| *n > 0).collect();
        waiting.sort_unstable_by_key(|((stack, thread), _)| (*stack, *thread));
        for ((stack, thread), (weight, _, time)) in waiting {
            self.write(stack, thread, weight, time, sequence)?;
        }
        Ok(())
    }

    /// The number of a stack, with its owner as the outermost frame.
    fn stack(
        &mut self,
        ledger: &Ledger,
        stack: StackId,
        owner: Option<OwnerId>,
        sequence: &mut Sequence,
    ) -> io::Result<u64> {
        let key = (stack, owner.unwrap_or(OwnerId(u32::MAX)));
        if let Some(id) = self.stacks.get(&key) {
            return Ok(*id);
        }
        let name = owner.map_or(TORCH, |owner| ledger.sites.owner(owner)).to_owned();
        let mut lines = vec![Line { name, ..Line::default() }];
        lines.extend_from_slice(self.lines.of(stack));
        let mut interned = Message::default();
        let frames: Vec<u64> = lines.iter().map(|line| self.frame(line, &mut interned)).collect();
        let id = self.stacks.len() as u64 + 1;
        let mut callstack = Message::default();
        callstack.number(1, id);
        frames.iter().for_each(|frame| callstack.number(2, *frame));
        interned.bytes(7, &callstack.0);
        self.stacks.insert(key, id);
        sequence.packet(None, INTERNED_DATA, &interned, NEEDS_INCREMENTAL_STATE)?;
        Ok(id)
    }

    fn frame(&mut self, line: &Line, interned: &mut Message) -> u64 {
        if let Some(id) = self.frames.get(line) {
            return *id;
        }
        let function = self.text(Table::Functions, &line.name, interned);
        let path = self.text(Table::SourcePaths, &line.file, interned);
        let id = self.frames.len() as u64 + 1;
        let mut frame = Message::default();
        frame.number(1, id);
        frame.number(2, function);
        frame.number(5, path);
        frame.number(6, u64::from(line.line));
        interned.bytes(6, &frame.0);
        self.frames.insert(line.clone(), id);
        id
    }

    fn text(&mut self, table: Table, text: &str, interned: &mut Message) -> u64 {
        if text.is_empty() {
            return 0;
        }
        let key = (table, text.to_owned());
        if let Some(id) = self.texts.get(&key) {
            return *id;
        }
        let id = self.texts.len() as u64 + 1;
        let mut entry = Message::default();
        entry.number(1, id);
        entry.bytes(2, text.as_bytes());
        interned.bytes(table as u64, &entry.0);
        self.texts.insert(key, id);
        id
    }
}

/// The packets of one trace: tracks and interned data are its own.
struct Sequence<'a> {
    out: &'a mut dyn Write,
    id: u64,
    n_tracks: u64,
}

impl Sequence<'_> {
    /// Names the process, and says that samples weigh bytes.
    fn begin(&mut self, process: &Process) -> io::Result<()> {
        let mut weight = Message::default();
        weight.bytes(2, b"bytes requested");
        weight.number(3, UNIT_BYTES);
        let mut of_samples = Message::default();
        of_samples.bytes(1, b"gputrace");
        of_samples.bytes(2, &weight.0);
        let mut defaults = Message::default();
        defaults.bytes(100, &of_samples.0);
        self.packet(None, DEFAULTS, &defaults, INCREMENTAL_STATE_CLEARED)?;
        let mut of_process = Message::default();
        of_process.number(1, u64::from(process.pid.max(1)));
        of_process.bytes(6, process_name(process).as_bytes());
        let mut track = Message::default();
        track.number(1, self.process_track());
        track.bytes(3, &of_process.0);
        self.packet(None, TRACK_DESCRIPTOR, &track, 0)
    }

    fn process_track(&self) -> u64 {
        self.id * TRACKS
    }

    /// A new track of the process.
    fn track(&mut self, describe: impl FnOnce(&mut Message)) -> io::Result<u64> {
        self.n_tracks += 1;
        let track = self.process_track() + self.n_tracks;
        let mut descriptor = Message::default();
        descriptor.number(1, track);
        descriptor.number(5, self.process_track());
        describe(&mut descriptor);
        self.packet(None, TRACK_DESCRIPTOR, &descriptor, 0)?;
        Ok(track)
    }

    /// Writes a value if it differs from the one before.
    fn counter(&mut self, counter: &mut Counter, bytes: u64, time: Nanos) -> io::Result<()> {
        if std::mem::replace(&mut counter.last, bytes) == bytes {
            return Ok(());
        }
        self.track_event(COUNTER, counter.track, time, |event| {
            // 0 is a value of a counter, not a missing one.
            event.varint(30 << 3);
            event.varint(bytes);
        })
    }

    fn track_event(
        &mut self,
        kind: u64,
        track: u64,
        time: Nanos,
        more: impl FnOnce(&mut Message),
    ) -> io::Result<()> {
        let mut event = Message::default();
        event.number(9, kind);
        event.number(11, track);
        more(&mut event);
        self.packet(Some(time), TRACK_EVENT, &event, 0)
    }

    /// `Trace.packet`.
    fn packet(&mut self, time: Option<Nanos>, field: u64, inside: &Message, flags: u64) -> io::Result<()> {
        let mut packet = Message::default();
        packet.number(8, time.map_or(0, |time| time.0));
        packet.number(10, self.id);
        packet.number(13, flags);
        packet.bytes(field, &inside.0);
        let mut outer = Message::default();
        outer.bytes(1, &packet.0);
        self.out.write_all(&outer.0)
    }
}
