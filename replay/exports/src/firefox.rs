//! The Firefox Profiler's processed profile format, version 55, which profiler.firefox.com brings up to date by itself
//! (docs-developer/CHANGELOG-formats.md of github.com/firefox-devtools/profiler): for each device a thread with its native
//! allocations, which the profiler shows as call trees of retained memory, and a memory track.
//!
//! The profiler holds a profile in a browser's memory. Of a long history, only the allocations that lived longest are written,
//! and the profile's name says so; the memory track has them all.

use std::collections::BTreeMap;
use std::io::{self, Write};

use gputrace_schemas::event::{Nanos, StackId};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::parts::events::{each_event, origins, process_name};
use super::{Export, Request, Takes};
use gputrace_analyse::live::{Line, Lines};
use gputrace_trace::interned::Interned;
use gputrace_trace::ledger::{Block, Ledger, Object, Step};
use gputrace_trace::owners::TORCH;
use gputrace_trace::source::Source;

pub(super) const ENTRY: Export = Export {
    name: "firefox",
    summary: "allocations with their stacks and memory over time, for profiler.firefox.com",
    takes: Takes { several: true, ..Takes::ONE },
    is_binary: false,
    export,
};

/// Most allocations and frees together.
const MOST_CHANGES: u64 = 500_000;
/// Most points of a memory track; the highest of every few is kept.
const MOST_POINTS: u64 = 50_000;
const VERSION: u32 = 55;

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let least = least_lifetime(request)?;
    let (mut threads, mut counters) = (vec![], vec![]);
    for (source, origin) in request.sources.iter().zip(origins(request.sources)) {
        for told in tell(request, source, origin, least)?.into_values() {
            counters.push(told.counter(threads.len()));
            threads.push(told.thread());
        }
    }
    let start = request.sources.iter().map(|it| it.definitions().process().start_realtime);
    let cut = match least {
        0 => String::new(),
        least => {
            format!(" (allocations that lived for {least} events or more; the memory track has all)")
        }
    };
    let profile = json!({
        "meta": {
            "preprocessedProfileVersion": VERSION,
            "version": 24,
            "product": format!("gputrace{cut}"),
            "startTime": start.min().unwrap_or(0) as f64 / 1e6,
            "interval": 1.0,
            "processType": 0,
            "categories": [{"name": "Other", "color": "grey", "subcategories": ["Other"]}],
            "markerSchema": [{
                "name": "oom",
                "display": ["marker-chart", "marker-table", "timeline-overview"],
                "chartLabel": "{marker.data.bytes}",
                "fields": [{"key": "bytes", "label": "Bytes requested", "format": "bytes"}],
            }],
            "extensions": {"length": 0, "baseURL": [], "id": [], "name": []},
            "sampleUnits": {"time": "ms", "eventDelay": "ms", "threadCPUDelta": "µs"},
            "debug": false,
            "symbolicated": true,
            "pausedRanges": [],
            "usesOnlyOneStackType": true,
            "sourceCodeIsNotOnSearchfox": true,
        },
        "libs": [],
        "pages": [],
        "profilerOverhead": [],
        "counters": counters,
        "threads": threads,
    });
    serde_json::to_writer(&mut *out, &profile)?;
    writeln!(out)
}

/// How many events an allocation has to live for to be written: the smallest power of two that leaves few enough; 0 if all are.
fn least_lifetime(request: &Request) -> io::Result<u64> {
    let mut n_by_lifetime = [0u64; 65];
    for source in request.sources {
        let mut born: FxHashMap<(i16, u64), u64> = FxHashMap::default();
        let mut n = 0;
        each_event(source, Nanos(0), |ledger, _, _| {
            n += 1;
            for change in ledger.steps().iter().filter_map(|step| change(ledger, step)) {
                let key = (change.device, change.key);
                if change.is_gain {
                    born.insert(key, n);
                } else if let Some(born) = born.remove(&key) {
                    n_by_lifetime[bits(n - born)] += 2;
                }
            }
            Ok(())
        })?;
        n_by_lifetime[64] += born.len() as u64;
    }
    let mut n = 0;
    let too_many = n_by_lifetime.iter().enumerate().rev().find(|(_, of_lifetime)| {
        n += **of_lifetime;
        n > MOST_CHANGES
    });
    Ok(too_many.map_or(0, |(bits, _)| 1 << bits.min(63)))
}

/// A number with this many bits is below two to that power.
fn bits(number: u64) -> usize {
    64 - number.leading_zeros() as usize
}

/// A piece of memory that the program got or gave back: blocks of PyTorch, and what others got from the driver.
struct Change {
    device: i16,
    /// The same for its allocation and its free, and for nothing else that is there at the same time.
    key: u64,
    bytes: u64,
    is_gain: bool,
    stack: StackId,
    owner: String,
}

fn change(ledger: &Ledger, step: &Step) -> Option<Change> {
    let of_block = |is_gain, addr, block: &Block| Change {
        device: block.device,
        key: addr,
        bytes: block.bytes.0,
        is_gain,
        stack: block.stack,
        owner: TORCH.to_owned(),
    };
    let of_object = |is_gain, object: &Object| {
        // Segments are shown by the blocks in them.
        (object.kind.is_physical() && !object.torch).then(|| Change {
            device: object.device,
            // Physical memory has no address; nothing else lies this low.
            key: if object.addr > 0 { object.addr } else { object.serial },
            bytes: object.bytes.0,
            is_gain,
            stack: object.stack,
            owner: ledger.sites.owner(object.owner).to_owned(),
        })
    };
    match step {
        Step::Gained(object) => of_object(true, object),
        Step::Lost(object) => of_object(false, object),
        Step::Block(addr, block) => Some(of_block(true, *addr, block)),
        Step::BlockFreed(addr, block) => Some(of_block(false, *addr, block)),
        Step::BlockDone(..) | Step::Stranger(..) | Step::Heap(..) | Step::Pages(..) => None,
    }
}

/// What is shown of each device of one trace.
fn tell(request: &Request, source: &Source, origin: Nanos, least: u64) -> io::Result<BTreeMap<i16, Told>> {
    let mut told: BTreeMap<i16, Told> = BTreeMap::new();
    let mut lines = Lines::new(source.definitions(), request.native);
    let stride = (source.events().size_hint().1.unwrap_or(0) as u64).div_ceil(MOST_POINTS).max(1);
    let mut n = 0;
    each_event(source, origin, |ledger, _, time| {
        n += 1;
        for change in ledger.steps().iter().filter_map(|step| change(ledger, step)) {
            if !request.wants(change.device) {
                continue;
            }
            let device =
                told.entry(change.device).or_insert_with(|| Told::new(source, change.device, origin));
            device.change(&change, n, time, least, &mut lines);
        }
        for (ordinal, device) in &mut told {
            let bytes = ledger.devices().get(ordinal).map_or(0, |books| books.physical.now().bytes.0);
            device.level(bytes, time, n % stride == 0);
        }
        told_oom(&mut told, ledger, time);
        Ok(())
    })?;
    told.values_mut().for_each(Told::end);
    Ok(told)
}

fn told_oom(told: &mut BTreeMap<i16, Told>, ledger: &Ledger, time: Nanos) {
    if let Some(oom) = ledger.ran_out()
        && let Some(device) = told.get_mut(&oom.device)
    {
        device.ooms.push((time, oom.bytes.0));
    }
}

/// A row of the table of native allocations.
#[derive(Clone, Copy)]
struct Written {
    /// After how many events.
    n: u64,
    time: Nanos,
    weight: i64,
    stack: Option<u32>,
    key: u64,
}

fn column<T>(changes: &[Written], of: impl Fn(&Written) -> T) -> Vec<T> {
    changes.iter().map(of).collect()
}

/// A device of a process, as a thread of a profile.
struct Told {
    name: String,
    process: String,
    pid: String,
    origin: Nanos,
    last: Nanos,
    texts: Interned<String>,
    frames: Interned<(u32, Option<u32>, u32)>,
    /// The frame before, and the frame.
    stacks: Interned<(Option<u32>, u32)>,
    known: FxHashMap<(StackId, String), Option<u32>>,
    /// What was got and not given back yet, by [`Change::key`].
    open: FxHashMap<u64, Written>,
    changes: Vec<Written>,
    /// Time and bytes of the points of the memory track.
    points: Vec<(Nanos, u64)>,
    highest: Option<(Nanos, u64)>,
    ooms: Vec<(Nanos, u64)>,
}

impl Told {
    fn new(source: &Source, ordinal: i16, origin: Nanos) -> Told {
        let process = source.definitions().process();
        let device = source.devices().iter().find(|device| device.ordinal == ordinal);
        let name = device.map_or_else(String::new, |device| format!(" {}", device.name));
        Told {
            name: format!("cuda:{ordinal}{name}"),
            process: process_name(process),
            pid: process.pid.to_string(),
            origin,
            last: origin,
            texts: Interned::default(),
            frames: Interned::default(),
            stacks: Interned::default(),
            known: FxHashMap::default(),
            open: FxHashMap::default(),
            changes: vec![],
            points: vec![],
            highest: None,
            ooms: vec![],
        }
    }

    fn change(&mut self, change: &Change, n: u64, time: Nanos, least: u64, lines: &mut Lines) {
        if change.is_gain {
            let stack = self.stack(change, lines);
            let got = Written { n, time, weight: change.bytes as i64, stack, key: change.key };
            self.open.insert(change.key, got);
        } else if let Some(got) = self.open.remove(&change.key)
            && n - got.n >= least
        {
            self.changes.push(got);
            self.changes.push(Written { n, time, weight: -got.weight, ..got });
        }
    }

    /// The owner is the outermost frame.
    fn stack(&mut self, change: &Change, lines: &mut Lines) -> Option<u32> {
        let key = (change.stack, change.owner.clone());
        if let Some(known) = self.known.get(&key) {
            return *known;
        }
        let owner = Line { name: change.owner.clone(), ..Line::default() };
        let mut last = None;
        for line in std::iter::once(&owner).chain(lines.of(change.stack)) {
            let name = self.texts.id(line.name.clone());
            let file = (!line.file.is_empty()).then(|| self.texts.id(line.file.clone()));
            let frame = self.frames.id((name, file, line.line));
            last = Some(self.stacks.id((last, frame)));
        }
        self.known.insert(key, last);
        last
    }

    fn level(&mut self, bytes: u64, time: Nanos, is_due: bool) {
        self.last = time;
        if self.points.last().is_some_and(|(_, last)| *last == bytes) && self.highest.is_none() {
            return;
        }
        if self.highest.is_none_or(|(_, highest)| bytes > highest) {
            self.highest = Some((time, bytes));
        }
        if is_due {
            self.points.extend(self.highest.take());
            if self.points.last().is_some_and(|(_, last)| *last != bytes) {
                self.points.push((time, bytes));
            }
        }
    }

    fn end(&mut self) {
        self.points.extend(self.highest.take());
        self.changes.extend(self.open.drain().map(|(_, got)| got));
        // What an event frees comes first: the same event may hand the address out again.
        self.changes.sort_by_key(|change| (change.n, change.weight > 0, change.key));
    }

    fn thread(self) -> Value {
        let Told { texts, frames, stacks, .. } = self;
        let n_frames = frames.values.len();
        let fill = |value: Value| vec![value; n_frames];
        let mut texts = texts;
        let name = texts.id("out of memory".to_owned());
        let (prefixes, of_frame): (Vec<_>, Vec<_>) = stacks.values.iter().copied().unzip();
        let times: Vec<f64> = self.ooms.iter().map(|(time, _)| millis(*time)).collect();
        let n_ooms = self.ooms.len();
        // The profiler shows a thread that has samples: one at each end, which weigh nothing.
        let ends = [millis(self.origin), millis(self.last)];
        json!({
            "name": self.name,
            "isMainThread": true,
            "processName": self.process,
            "processType": "default",
            "processStartupTime": ends[0],
            "processShutdownTime": null,
            "registerTime": ends[0],
            "unregisterTime": null,
            "pausedRanges": [],
            "showMarkersInTimeline": true,
            "pid": self.pid,
            "tid": format!("{} {}", self.pid, self.name),
            "samples": {
                "length": 2,
                "weightType": "samples",
                "stack": [null, null],
                "timeDeltas": [ends[0], ends[1] - ends[0]],
                "weight": [0, 0],
                "threadCPUDelta": [0, 0],
            },
            "nativeAllocations": {
                "length": self.changes.len(),
                "weightType": "bytes",
                "time": column(&self.changes, |change| millis(change.time)),
                "weight": column(&self.changes, |change| change.weight),
                "stack": column(&self.changes, |change| change.stack),
                "memoryAddress": column(&self.changes, |change| change.key),
                "threadId": vec![0; self.changes.len()],
            },
            "markers": {
                "length": n_ooms,
                "name": vec![name; n_ooms],
                "category": vec![0; n_ooms],
                "phase": vec![0; n_ooms],
                "startTime": times,
                "endTime": vec![Value::Null; n_ooms],
                "data": self.ooms.iter().map(|(_, bytes)| json!({"type": "oom", "bytes": bytes})).collect::<Vec<_>>(),
            },
            "stackTable": {"length": prefixes.len(), "prefix": prefixes, "frame": of_frame},
            "frameTable": {
                "length": n_frames,
                "address": fill((-1).into()),
                "inlineDepth": fill(0.into()),
                "category": fill(0.into()),
                "subcategory": fill(0.into()),
                "func": (0..n_frames).collect::<Vec<_>>(),
                "nativeSymbol": fill(Value::Null),
                "innerWindowID": fill(0.into()),
                "line": frames.values.iter().map(|(_, _, line)| (*line > 0).then_some(*line)).collect::<Vec<_>>(),
                "column": fill(Value::Null),
            },
            "funcTable": {
                "length": n_frames,
                "name": frames.values.iter().map(|(name, _, _)| *name).collect::<Vec<_>>(),
                "isJS": fill(false.into()),
                "relevantForJS": fill(false.into()),
                "resource": fill((-1).into()),
                "fileName": frames.values.iter().map(|(_, file, _)| *file).collect::<Vec<_>>(),
                "lineNumber": fill(Value::Null),
                "columnNumber": fill(Value::Null),
            },
            "resourceTable": {"length": 0, "lib": [], "name": [], "host": [], "type": []},
            "nativeSymbols": {"length": 0, "address": [], "functionSize": [], "libIndex": [], "name": []},
            "stringArray": texts.values,
        })
    }

    /// The memory track: differences of time and of bytes. It begins with nothing: what the profiler calls the range of a track is
    /// what it shows beyond its first sample.
    fn counter(&self, thread: usize) -> Value {
        let mut before = (millis(self.origin), 0);
        let (mut deltas, mut counts) = (vec![before.0], vec![0]);
        for (time, bytes) in &self.points {
            deltas.push(millis(*time) - before.0);
            counts.push(*bytes as i64 - before.1);
            before = (millis(*time), *bytes as i64);
        }
        json!({
            "name": self.name,
            "category": "Memory",
            "description": "Memory allocated from the driver",
            "pid": self.pid,
            "mainThreadIndex": thread,
            "samples": {
                "length": counts.len(),
                "number": vec![1; counts.len()],
                "timeDeltas": deltas,
                "count": counts,
            },
        })
    }
}

/// The format's time.
fn millis(time: Nanos) -> f64 {
    time.0 as f64 / 1e6
}
