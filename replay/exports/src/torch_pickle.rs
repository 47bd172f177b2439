//! A PyTorch memory snapshot, for pytorch.org/memory_viz and everything else that reads such pickles.
//!
//! On request it also shows memory that is not PyTorch's (NCCL, cuBLAS), which PyTorch's own snapshots cannot: as segments of
//! its own with one block each, in pools of its own, with the owner as the innermost frame. Physical memory without an
//! address gets one from 2^50 on.
//!
//! Protocol 4 with the opcodes that the viewer knows (no FRAME, no integers of more than 8 bytes), lists in batches of
//! 1,000, and every stack written once.

use std::collections::BTreeMap;
use std::io::{self, Write};

use gputrace_schemas::event::{Action, Event, EventKind, Nanos, Process, StackId};
use gputrace_sim::policies::torch::{SMALL_SEGMENT, VARIABLES};
use rustc_hash::FxHashMap;

use super::parts::events::each_event;
use super::{Export, Request, Takes};
use gputrace_analyse::fragmentation::is_small;
use gputrace_analyse::live::{Line, Lines};
use gputrace_trace::ledger::pools::PoolId;
use gputrace_trace::ledger::{Block, Ledger, MemoryKind, Object, Paging, Step};

pub(super) const ENTRY: Export = Export {
    name: "torch-pickle",
    summary: "the history as a PyTorch snapshot, with --non-torch including other libraries' memory, for pytorch.org/memory_viz",
    takes: Takes { non_torch: true, ..Takes::ONE },
    is_binary: true,
    export,
};

/// Where memory without an address is shown: above every address of x86-64 and ARM, below 2^53, JavaScript's limit.
const NOWHERE: u64 = 1 << 50;
/// Entries that may wait for the stream of a segment to be known.
const MOST_WAITING: usize = 4096;
/// The function that runs a node of the backward pass (torch/csrc/autograd/engine.cpp).
const ENGINE: &str = "torch::autograd::Engine::evaluate_function";
/// The viewer spreads a batch over the arguments of a function.
const BATCH: usize = 1000;

fn export(request: &Request, out: &mut dyn Write) -> io::Result<()> {
    let source = request.source();
    let mut devices: Vec<i16> = vec![];
    each_event(source, Nanos(0), |ledger, _, _| {
        let new = ledger.devices().keys().filter(|device| **device >= 0 && request.wants(**device));
        devices.extend(new.filter(|device| !devices.contains(device)).copied().collect::<Vec<_>>());
        Ok(())
    })?;
    let mut pickle = Pickle {
        out,
        n_memo: 0,
        texts: FxHashMap::default(),
        stacks: FxHashMap::default(),
        frames: FxHashMap::default(),
    };
    let mut lines = Lines::new(source.definitions(), request.native);
    let process = source.definitions().process();
    pickle.raw(b"\x80\x04}(")?;
    pickle.text("device_traces")?;
    pickle.raw(b"](")?;
    let mut ends = vec![];
    for device in 0..=devices.iter().copied().max().unwrap_or(0) {
        pickle.raw(b"]")?;
        let mut teller = Teller::new(device, process, request.non_torch);
        if devices.contains(&device) {
            let mut batch = Batch::default();
            each_event(source, Nanos(0), |ledger, event, time| {
                teller.event(ledger, event, time);
                teller.ready(|entry| batch.put(&mut pickle, &mut lines, entry))
            })?;
            teller.is_over = true;
            teller.ready(|entry| batch.put(&mut pickle, &mut lines, entry))?;
            batch.end(&mut pickle)?;
        }
        ends.push(teller);
    }
    pickle.raw(b"e")?;
    pickle.text("segments")?;
    pickle.raw(b"]")?;
    for teller in &ends {
        for segment in teller.final_segments() {
            pickle.raw(b"(")?;
            segment.write(teller, &mut pickle, &mut lines)?;
            pickle.raw(b"e")?;
        }
    }
    pickle.text("allocator_settings")?;
    pickle.raw(b"}(")?;
    pickle.text("PYTORCH_CUDA_ALLOC_CONF")?;
    let options = process.environment.iter().find(|(name, _)| VARIABLES.contains(&&**name));
    pickle.text(options.map_or("", |(_, value)| value))?;
    pickle.raw(b"uu.")
}

/// An element of `device_traces`.
struct Entry {
    action: &'static str,
    addr: u64,
    bytes: u64,
    stream: Option<u64>,
    /// Since 1970.
    time: Nanos,
    stack: StackId,
    /// Of others than PyTorch.
    owner: Option<Pseudo>,
    /// `device_free`, of an out-of-memory error.
    free: Option<u64>,
}

impl Entry {
    /// On a stream that is not known yet.
    fn new(action: &'static str, (addr, bytes): (u64, u64), time: Nanos, stack: StackId) -> Entry {
        Entry { action, addr, bytes, stream: None, time, stack, owner: None, free: None }
    }
}

/// Memory that is not PyTorch's.
#[derive(Clone)]
struct Pseudo {
    owner: String,
    pool: u64,
}

#[derive(Clone)]
struct Segment {
    addr: u64,
    bytes: u64,
    stream: u64,
    stack: StackId,
    is_expandable: bool,
    /// PyTorch's id of its pool.
    pool: PoolId,
    owner: Option<Pseudo>,
}

#[derive(Clone, Copy)]
struct Live {
    bytes: u64,
    requested: u64,
    stack: StackId,
    is_pending: bool,
}

/// Turns what happened to one device into entries, and remembers what there is.
struct Teller {
    device: i16,
    /// With memory that is not PyTorch's.
    non_torch: bool,
    realtime: u64,
    waiting: Vec<Entry>,
    n_unresolved: usize,
    is_over: bool,
    /// Segments, and pieces of expandable ones.
    segments: BTreeMap<u64, Segment>,
    blocks: BTreeMap<u64, Live>,
    /// Made-up addresses of memory without one, by its serial number.
    placed: FxHashMap<u64, u64>,
    next: u64,
    owners: Vec<String>,
    /// The newest entry is a run of maps that has not ended.
    is_mapping: bool,
}

impl Teller {
    fn new(device: i16, process: &Process, non_torch: bool) -> Teller {
        Teller {
            device,
            non_torch,
            realtime: process.start_realtime,
            waiting: vec![],
            n_unresolved: 0,
            is_over: false,
            segments: BTreeMap::new(),
            blocks: BTreeMap::new(),
            placed: FxHashMap::default(),
            next: NOWHERE,
            owners: vec![],
            is_mapping: false,
        }
    }

    fn event(&mut self, ledger: &Ledger, event: &Event, time: Nanos) {
        let time = Nanos(self.realtime.saturating_add(time.0));
        if is_teardown(event) {
            return;
        }
        for step in ledger.steps() {
            match step {
                Step::Gained(object) if self.is_mine(object) => self.gained(ledger, object, time),
                Step::Lost(object) if self.is_mine(object) => self.lost(object, time),
                Step::Pages(Paging::Mapped, range) if range.torch && range.device == self.device => {
                    self.mapped(range.addr, range.bytes.0, time, event.stack);
                }
                Step::Pages(Paging::Unmapped, range) if range.torch && range.device == self.device => {
                    self.unmapped(range.addr, range.bytes.0, time, event.stack);
                }
                Step::Block(addr, block) if block.device == self.device => {
                    self.block(ledger, *addr, block, time)
                }
                Step::BlockFreed(addr, block) if block.device == self.device => {
                    if let Some(live) = self.blocks.get_mut(addr) {
                        live.is_pending = true;
                    }
                    self.of_block("free_requested", *addr, block, time);
                }
                Step::BlockDone(addr, block) if block.device == self.device => {
                    self.blocks.remove(addr);
                    self.of_block("free_completed", *addr, block, time);
                }
                _ => {}
            }
        }
        match &event.kind {
            EventKind::Call(call) if call.action == Action::SetAccess => self.is_mapping = false,
            EventKind::BlockOom(oom) if oom.device == self.device => {
                let free = ledger.torch(self.device).and_then(|torch| torch.ooms.last()?.device);
                let free = Some(free.map_or(0, |(free, _)| free.0));
                let (stack, bytes) = (event.stack, oom.requested.unwrap_or(oom.bytes).0);
                self.push(Entry { stream: Some(0), free, ..Entry::new("oom", (0, bytes), time, stack) });
            }
            _ => {}
        }
    }

    /// Physical memory of the device. PyTorch's expandable segments are recognised by what is mapped.
    fn is_mine(&self, object: &Object) -> bool {
        let is_page = object.torch && object.kind == MemoryKind::Virtual;
        let is_shown = object.kind.is_physical() && !is_page && (self.non_torch || object.torch);
        is_shown && object.device == self.device
    }

    fn gained(&mut self, ledger: &Ledger, object: &Object, time: Nanos) {
        let (bytes, stack) = (object.bytes.0, object.stack);
        if object.torch && object.kind == MemoryKind::Linear {
            let addr = object.addr;
            let segment =
                Segment { addr, bytes, stream: 0, stack, is_expandable: false, pool: (0, 0), owner: None };
            self.segments.insert(addr, segment);
            return self.unresolved("segment_alloc", addr, bytes, time, stack);
        }
        let owner = ledger.sites.owner(object.owner);
        let pool = match self.owners.iter().position(|known| known == owner) {
            Some(known) => known,
            None => {
                self.owners.push(owner.to_owned());
                self.owners.len() - 1
            }
        };
        // Ids from 1,000,000 on are not in use: PyTorch counts them from 1.
        let owner = Some(Pseudo { owner: owner.to_owned(), pool: 1_000_000 + pool as u64 });
        let addr = if object.addr > 0 {
            object.addr
        } else {
            let addr = self.next;
            self.next = self.next.saturating_add(bytes.max(1).next_multiple_of(SMALL_SEGMENT));
            addr
        };
        self.placed.insert(object.serial, addr);
        let segment = Segment {
            addr,
            bytes,
            stream: 0,
            stack,
            is_expandable: false,
            pool: (0, 0),
            owner: owner.clone(),
        };
        self.segments.insert(addr, segment);
        self.blocks.insert(addr, Live { bytes, requested: bytes, stack, is_pending: false });
        for action in ["segment_alloc", "alloc"] {
            let entry = Entry::new(action, (addr, bytes), time, stack);
            self.push(Entry { stream: Some(0), owner: owner.clone(), ..entry });
        }
    }

    fn lost(&mut self, object: &Object, time: Nanos) {
        let addr = self.placed.remove(&object.serial).unwrap_or(object.addr);
        let Some(segment) = self.segments.remove(&addr) else { return };
        let (bytes, stack, owner) = (segment.bytes, StackId(0), segment.owner);
        let actions: &[&'static str] = match owner {
            Some(_) => &["free_requested", "free_completed", "segment_free"],
            None => &["segment_free"],
        };
        if owner.is_some() {
            self.blocks.remove(&addr);
        }
        let stream = Some(segment.stream);
        for action in actions {
            let entry = Entry::new(action, (addr, bytes), time, stack);
            self.push(Entry { stream, owner: owner.clone(), ..entry });
        }
    }

    /// Neighbouring pages that are mapped by one call of the allocator are one entry.
    fn mapped(&mut self, addr: u64, bytes: u64, time: Nanos, stack: StackId) {
        let segment =
            Segment { addr, bytes, stream: 0, stack, is_expandable: true, pool: (0, 0), owner: None };
        self.segments.insert(addr, segment);
        if let Some(last) = self.waiting.last_mut().filter(|_| self.is_mapping)
            && last.action == "segment_map"
            && last.addr + last.bytes == addr
        {
            last.bytes += bytes;
            return;
        }
        self.unresolved("segment_map", addr, bytes, time, stack);
        self.is_mapping = true;
    }

    fn unmapped(&mut self, addr: u64, bytes: u64, time: Nanos, stack: StackId) {
        let stream = self.segments.remove(&addr).map_or(0, |segment| segment.stream);
        if let Some(last) = self.waiting.last_mut()
            && last.action == "segment_unmap"
            && last.addr + last.bytes == addr
        {
            last.bytes += bytes;
            return;
        }
        let entry = Entry::new("segment_unmap", (addr, bytes), time, stack);
        self.push(Entry { stream: Some(stream), ..entry });
    }

    fn block(&mut self, ledger: &Ledger, addr: u64, block: &Block, time: Nanos) {
        let stream = block.stream.unwrap_or(0);
        if self.n_unresolved > 0 {
            for entry in self.waiting.iter_mut().filter(|entry| entry.stream.is_none()) {
                if (entry.addr..entry.addr + entry.bytes).contains(&addr) {
                    entry.stream = Some(stream);
                    self.n_unresolved -= 1;
                    let inside = self.segments.range_mut(entry.addr..entry.addr + entry.bytes);
                    let pool = ledger.torch_pools.at(self.device, addr).unwrap_or_default();
                    inside.for_each(|(_, segment)| (segment.stream, segment.pool) = (stream, pool));
                }
            }
        }
        let (bytes, requested, stack) = (block.bytes.0, block.requested.0, block.stack);
        self.blocks.insert(addr, Live { bytes, requested, stack, is_pending: false });
        self.of_block("alloc", addr, block, time);
    }

    fn of_block(&mut self, action: &'static str, addr: u64, block: &Block, time: Nanos) {
        let (bytes, stream) = (block.requested.0, Some(block.stream.unwrap_or(0)));
        let stack = if action == "alloc" { block.stack } else { StackId(0) };
        self.push(Entry { stream, ..Entry::new(action, (addr, bytes), time, stack) });
    }

    fn unresolved(&mut self, action: &'static str, addr: u64, bytes: u64, time: Nanos, stack: StackId) {
        self.n_unresolved += 1;
        self.push(Entry::new(action, (addr, bytes), time, stack));
    }

    fn push(&mut self, entry: Entry) {
        self.is_mapping = false;
        self.waiting.push(entry);
    }

    /// Passes on what waits for nothing. The newest stays, because it may grow.
    fn ready(&mut self, put: impl FnMut(Entry) -> io::Result<()>) -> io::Result<()> {
        let blocked = self.n_unresolved > 0 && self.waiting.len() < MOST_WAITING;
        if self.is_over {
            self.n_unresolved = 0;
            return self.waiting.drain(..).try_for_each(put);
        }
        if blocked || self.waiting.len() < 2 {
            return Ok(());
        }
        let newest = self.waiting.len() - 1;
        self.n_unresolved = usize::from(self.waiting[newest].stream.is_none());
        self.waiting.drain(..newest).try_for_each(put)
    }

    /// What is there at the end, pieces of expandable segments joined.
    fn final_segments(&self) -> Vec<Segment> {
        let mut joined: Vec<Segment> = vec![];
        for segment in self.segments.values() {
            match joined.last_mut() {
                Some(last)
                    if last.is_expandable
                        && segment.is_expandable
                        && last.addr + last.bytes == segment.addr
                        && (last.stream, last.pool) == (segment.stream, segment.pool) =>
                {
                    last.bytes += segment.bytes;
                }
                _ => joined.push(segment.clone()),
            }
        }
        joined
    }
}

/// The context went away with everything: nobody freed it, and what there was then is what a snapshot shows.
fn is_teardown(event: &Event) -> bool {
    use Action::{ContextDestroy, PrimaryRelease, PrimaryReset};
    matches!(&event.kind, EventKind::Call(call) if matches!(call.action, ContextDestroy | PrimaryRelease | PrimaryReset))
}

impl Segment {
    fn write(&self, teller: &Teller, pickle: &mut Pickle, lines: &mut Lines) -> io::Result<()> {
        let end = self.addr.saturating_add(self.bytes);
        let blocks: Vec<(u64, Live)> =
            teller.blocks.range(self.addr..end).map(|(addr, live)| (*addr, *live)).collect();
        let sum =
            |keep: &dyn Fn(&Live) -> Option<u64>| blocks.iter().filter_map(|(_, live)| keep(live)).sum();
        let sizes = blocks.iter().map(|(_, live)| live.bytes);
        let is_small = self.owner.is_none() && is_small(self.bytes, self.is_expandable, sizes);
        pickle.raw(b"}(")?;
        pickle.field("device", teller.device as u64)?;
        pickle.field("address", self.addr)?;
        pickle.field("total_size", self.bytes)?;
        pickle.field("allocated_size", sum(&|live| (!live.is_pending).then_some(live.bytes)))?;
        pickle.field("active_size", sum(&|live| Some(live.bytes)))?;
        pickle.field("requested_size", sum(&|live| Some(live.requested)))?;
        pickle.field("stream", self.stream)?;
        pickle.text("segment_type")?;
        pickle.text(if is_small { "small" } else { "large" })?;
        pickle.text("segment_pool_id")?;
        let (graph, user) = self.owner.as_ref().map_or(self.pool, |owner| (0, owner.pool));
        pickle.pair(graph, user)?;
        pickle.text("is_expandable")?;
        pickle.raw(if self.is_expandable { b"\x88" } else { b"\x89" })?;
        pickle.text("frames")?;
        pickle.stack(lines, self.stack, self.owner.as_ref())?;
        pickle.text("blocks")?;
        pickle.raw(b"]")?;
        let mut at = self.addr;
        for (addr, live) in &blocks {
            if *addr > at {
                self.block(pickle, lines, at, addr - at, None)?;
            }
            if *addr >= at {
                self.block(pickle, lines, *addr, live.bytes.min(end - addr), Some(live))?;
                at = addr.saturating_add(live.bytes);
            }
        }
        if at < end {
            self.block(pickle, lines, at, end - at, None)?;
        }
        pickle.raw(b"u")
    }

    fn block(
        &self,
        pickle: &mut Pickle,
        lines: &mut Lines,
        addr: u64,
        bytes: u64,
        live: Option<&Live>,
    ) -> io::Result<()> {
        pickle.raw(b"(}(")?;
        pickle.field("address", addr)?;
        pickle.field("size", bytes)?;
        pickle.field("requested_size", live.map_or(0, |live| live.requested))?;
        pickle.text("state")?;
        pickle.text(match live {
            None => "inactive",
            Some(live) if live.is_pending => "active_pending_free",
            Some(_) => "active_allocated",
        })?;
        pickle.text("frames")?;
        pickle.stack(
            lines,
            live.map_or(StackId(0), |live| live.stack),
            self.owner.as_ref().filter(|_| live.is_some()),
        )?;
        pickle.raw(b"ue")
    }
}

/// Writes entries in batches.
#[derive(Default)]
struct Batch {
    n: usize,
}

impl Batch {
    fn put(&mut self, pickle: &mut Pickle, lines: &mut Lines, entry: Entry) -> io::Result<()> {
        if self.n == 0 {
            pickle.raw(b"(")?;
        }
        pickle.raw(b"}(")?;
        pickle.text("action")?;
        pickle.text(entry.action)?;
        match entry.free {
            Some(free) => pickle.field("device_free", free)?,
            None => pickle.field("addr", entry.addr)?,
        }
        pickle.field("size", entry.bytes)?;
        pickle.field("stream", entry.stream.unwrap_or(0))?;
        pickle.field("time_us", entry.time.0 / 1000)?;
        if let Some(owner) = &entry.owner {
            pickle.text("pool_id")?;
            pickle.pair(0, owner.pool)?;
        }
        pickle.text("frames")?;
        pickle.stack(lines, entry.stack, entry.owner.as_ref())?;
        pickle.raw(b"u")?;
        self.n += 1;
        if self.n == BATCH {
            self.end(pickle)?;
        }
        Ok(())
    }

    fn end(&mut self, pickle: &mut Pickle) -> io::Result<()> {
        if std::mem::take(&mut self.n) > 0 { pickle.raw(b"e") } else { Ok(()) }
    }
}

/// A pickle, as it is written.
struct Pickle<'a> {
    out: &'a mut dyn Write,
    n_memo: u32,
    texts: FxHashMap<String, u32>,
    frames: FxHashMap<Line, u32>,
    stacks: FxHashMap<(StackId, Option<u64>), u32>,
}

impl Pickle<'_> {
    fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.out.write_all(bytes)
    }

    /// MEMOIZE: what was just written has the next number.
    fn memoize(&mut self) -> io::Result<u32> {
        self.raw(b"\x94")?;
        self.n_memo += 1;
        Ok(self.n_memo - 1)
    }

    /// BINGET or LONG_BINGET.
    fn again(&mut self, memo: u32) -> io::Result<()> {
        match u8::try_from(memo) {
            Ok(short) => self.raw(&[b'h', short]),
            Err(_) => {
                self.raw(b"j")?;
                self.raw(&memo.to_le_bytes())
            }
        }
    }

    fn text(&mut self, text: &str) -> io::Result<()> {
        if let Some(memo) = self.texts.get(text) {
            return self.again(*memo);
        }
        match u8::try_from(text.len()) {
            Ok(length) => self.raw(&[0x8c, length])?,
            Err(_) => {
                self.raw(b"X")?;
                self.raw(&(text.len() as u32).to_le_bytes())?;
            }
        }
        self.raw(text.as_bytes())?;
        let memo = self.memoize()?;
        self.texts.insert(text.to_owned(), memo);
        Ok(())
    }

    fn number(&mut self, value: u64) -> io::Result<()> {
        let bytes = value.to_le_bytes();
        match value {
            0..=0xff => self.raw(&[b'K', bytes[0]]),
            0x100..=0xffff => self.raw(&[b'M', bytes[0], bytes[1]]),
            0x1_0000..=0x7fff_ffff => {
                self.raw(b"J")?;
                self.raw(&bytes[..4])
            }
            // LONG1 is signed: at most 8 bytes for what has its highest bit clear.
            _ => {
                let length = (64 - value.leading_zeros()) as usize / 8 + 1;
                let mut wide = [0; 9];
                wide[..8].copy_from_slice(&bytes);
                self.raw(&[0x8a, length as u8])?;
                self.raw(&wide[..length])
            }
        }
    }

    fn field(&mut self, name: &str, value: u64) -> io::Result<()> {
        self.text(name)?;
        self.number(value)
    }

    fn pair(&mut self, first: u64, second: u64) -> io::Result<()> {
        self.number(first)?;
        self.number(second)?;
        self.raw(b"\x86")
    }

    /// A list of frames, innermost first; the owner of what is not PyTorch's is the innermost of all. Requests of the
    /// backward pass have the engine's frame beside the line of the forward pass. Without it, a snapshot would show both passes alike.
    fn stack(&mut self, lines: &mut Lines, stack: StackId, owner: Option<&Pseudo>) -> io::Result<()> {
        let key = (stack, owner.map(|owner| owner.pool));
        if let Some(memo) = self.stacks.get(&key) {
            return self.again(*memo);
        }
        self.raw(b"]")?;
        let memo = self.memoize()?;
        self.stacks.insert(key, memo);
        let owner = owner.map(|owner| Line { name: format!("[{}]", owner.owner), ..Line::default() });
        let is_backward = lines.definitions().stack(stack).is_some_and(|stack| stack.backward.is_some());
        let own = lines.of(stack);
        let needs_engine = is_backward && !own.iter().any(|line| line.name.contains(ENGINE));
        let engine = needs_engine.then(|| Line { name: ENGINE.to_owned(), ..Line::default() });
        let frames: Vec<Line> = owner.into_iter().chain(engine).chain(own.iter().rev().cloned()).collect();
        if frames.is_empty() {
            return Ok(());
        }
        self.raw(b"(")?;
        for frame in frames {
            match self.frames.get(&frame) {
                Some(memo) => self.again(*memo)?,
                None => {
                    self.raw(b"}")?;
                    let memo = self.memoize()?;
                    self.raw(b"(")?;
                    self.text("name")?;
                    self.text(&frame.name)?;
                    self.text("filename")?;
                    self.text(&frame.file)?;
                    self.field("line", u64::from(frame.line))?;
                    self.raw(b"u")?;
                    self.frames.insert(frame, memo);
                }
            }
        }
        self.raw(b"e")
    }
}
