//! Events as columns, and back. `trace.fbs` says what each column holds.

use crate::block::{MAX_EVENTS, unzigzag, zigzag};
use crate::event::{
    Action, ApiId, BlockAlloc, BlockFree, BlockOom, Bytes, Call, CommId, Event, EventKind, Lost, LostCause,
    Mark, MarkAction, Nanos, NcclEnter, NcclExit, NcclOp, NcclTimed, NcclTiming, Pjrt, PjrtAction,
    PjrtExecutable, PjrtOrigin, Sample, StackId, TextId, ThreadId, UNKNOWN, Wait, WaitAction,
};
use crate::tables::{
    BlockAllocsFields, BlockFreesFields, BlockOomsFields, CallsFields, Events, EventsFields, Field,
    LossesFields, MarksFields, NcclEntersFields, NcclExitsFields, NcclTimingsFields, PjrtExecutablesFields,
    PjrtsFields, Root, Rows, SamplesFields, WaitsFields, column, keys, nested, rows, texts,
};
use flatbuffers::FlatBufferBuilder;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

const CALL: u8 = 1;
const BLOCK_ALLOC: u8 = 2;
const BLOCK_FREE: u8 = 3;
const BLOCK_OOM: u8 = 4;
const WAIT: u8 = 5;
const SAMPLE: u8 = 6;
const LOST: u8 = 7;
const NOTE: u8 = 8;
const NCCL_ENTER: u8 = 9;
const NCCL_EXIT: u8 = 10;
const MARK: u8 = 11;
const NCCL_TIMING: u8 = 12;
const PJRT: u8 = 13;
const PJRT_EXECUTABLE: u8 = 14;

const NO_RESULT: u8 = 1;
const CAPTURED: u8 = 2;
const IN_ALLOCATE: u8 = 4;
const NCCL_THREAD: u8 = 8;
const NCCL_CAPTURED: u8 = 1;
const HAS_REQUESTED: u8 = 1;
const HAS_STREAM: u8 = 2;
const COLLECTING: u8 = 1;

/// From one list of what each kind's table has: its columns while they are written (`Tables`), and how far they have been
/// read (`Cursors`).
macro_rules! columns {
    ($( $table:ident: $name:ident -> $fields:ident { $( $column:ident: $type:ty, )* } )*) => {
        $(
            #[derive(Default)]
            struct $name { $( $column: Vec<$type>, )* }
            impl $name {
                fn build(&self, to: &mut FlatBufferBuilder<'_>) -> Field {
                    let fields = $fields { $( $column: column(to, &self.$column), )* };
                    nested(fields.build(to))
                }
                fn clear(&mut self) { $( self.$column.clear(); )* }
            }
        )*
        #[derive(Default)]
        struct Tables { $( $table: $name, )* }
        impl Tables {
            fn clear(&mut self) { $( self.$table.clear(); )* }
        }
        mod cursor {
            use crate::tables::Rows;
            $( #[allow(non_camel_case_types)] pub(super) struct $table<'a> { $( pub(super) $column: Rows<'a, $type>, )* } )*
        }
        struct Cursors<'a> { $( $table: cursor::$table<'a>, )* }
        impl<'a> Cursors<'a> {
            fn new(events: &Events<'a>) -> Cursors<'a> {
                Cursors { $( $table: cursor::$table {
                    $( $column: rows(events.$table().and_then(|table| table.$column())), )*
                }, )* }
            }
        }
    };
}

columns! {
    calls: CallRows -> CallsFields {
        apis: u32, actions: u8, devices: i16, flags: u8, results: i32, addresses: u64, bytes: u64, streams: u64,
        handles: u64, extras: u64, durations: u64, comms: u32, nccl_calls: u64,
    }
    allocs: AllocRows -> BlockAllocsFields {
        devices: i16, addresses: u64, bytes: u64, flags: u8, requested: u64, streams: u64, allocated: u64,
        reserved: u64,
    }
    frees: FreeRows -> BlockFreesFields {
        devices: i16, addresses: u64, bytes: u64, allocated: u64, reserved: u64, flags: u8,
    }
    ooms: OomRows -> BlockOomsFields {
        devices: i16, bytes: u64, flags: u8, requested: u64, allocated: u64, reserved: u64, streams: u64,
    }
    waits: WaitRows -> WaitsFields { events: u64, streams: u64, actions: u8, results: i32, }
    samples: SampleRows -> SamplesFields { devices: i16, process_used: u64, device_used: u64, totals: u64, }
    losses: LossRows -> LossesFields { causes: u8, events: u64, }
    marks: MarkRows -> MarksFields { actions: u8, texts: u32, domains: u32, ranges: u64, categories: u32, }
    nccl_enters: EnterRows -> NcclEntersFields {
        apis: u32, ops: u8, calls: u64, comms: u32, sequences: u64, groups: u32, group_depths: u32, counts: u64,
        datatypes: u32, redops: u64, redop_calls: u64, peers: u64, sends: u64, receives: u64, streams: u64,
        handles: u64, extras: u64, flags: u8,
    }
    nccl_exits: ExitRows -> NcclExitsFields { calls: u64, results: i32, values: u64, durations: u64, timed: u8, }
    nccl_timings: TimingRows -> NcclTimingsFields {
        calls: u64, comms: u32, timelines: u32, streams: u64, starts: u64, durations: u64,
    }
    pjrts: PjrtRows -> PjrtsFields {
        actions: u8, origins: u8, devices: i16, buffers: u64, executables: u64, bytes: u64, codes: i32, texts: u32,
    }
    pjrt_executables: PjrtExecutableRows -> PjrtExecutablesFields {
        executables: u64, names: u32, temporary: u64, arguments: u64, outputs: u64, aliased: u64, code: u64,
    }
}

/// Events that wait to become a block.
#[derive(Default)]
pub(crate) struct EventRows {
    kinds: Vec<u8>,
    times: Vec<u64>,
    threads: Vec<u32>,
    stacks: Vec<u32>,
    tables: Tables,
    notes: Vec<String>,
    /// Newest number of a call into NCCL in `nccl_enters`, in `nccl_exits` and in `nccl_timings`.
    nccl_calls: (u64, u64, u64),
    /// Newest start in `nccl_timings`.
    nccl_start: u64,
    before: u64,
    expected: Expected,
    first: u64,
    last: u64,
}

impl EventRows {
    pub(crate) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// Earliest and latest time.
    pub(crate) fn span(&self) -> (u64, u64) {
        (self.first, self.last)
    }

    pub(crate) fn push(&mut self, event: &Event) {
        let time = event.time.0;
        (self.first, self.last) =
            if self.kinds.is_empty() { (time, time) } else { (self.first.min(time), self.last.max(time)) };
        self.times.push(zigzag(time, self.before));
        self.before = time;
        self.threads.push(event.thread.0);
        self.stacks.push(event.stack.0);
        self.kinds.push(match &event.kind {
            EventKind::Call(call) => self.tables.calls.push(call),
            EventKind::BlockAlloc(alloc) => self.tables.allocs.push(alloc, &mut self.expected),
            EventKind::BlockFree(free) => self.tables.frees.push(free, &mut self.expected),
            EventKind::BlockOom(oom) => self.tables.ooms.push(oom),
            EventKind::Wait(wait) => self.tables.waits.push(wait),
            EventKind::Sample(sample) => self.tables.samples.push(sample),
            EventKind::Lost(lost) => self.tables.losses.push(*lost),
            EventKind::Mark(mark) => self.tables.marks.push(mark),
            EventKind::Note(text) => {
                self.notes.push(text.clone());
                NOTE
            }
            EventKind::NcclEnter(enter) => self.tables.nccl_enters.push(enter, &mut self.nccl_calls.0),
            EventKind::NcclExit(exit) => self.tables.nccl_exits.push(exit, &mut self.nccl_calls.1),
            EventKind::NcclTiming(timing) => {
                self.tables.nccl_timings.push(timing, &mut self.nccl_calls.2, &mut self.nccl_start)
            }
            EventKind::Pjrt(pjrt) => self.tables.pjrts.push(pjrt),
            EventKind::PjrtExecutable(executable) => self.tables.pjrt_executables.push(executable),
        });
    }

    pub(crate) fn build(&self, to: &mut FlatBufferBuilder<'_>) {
        let fields = EventsFields {
            kinds: keys(to, &self.kinds),
            times: column(to, &self.times),
            threads: column(to, &self.threads),
            stacks: column(to, &self.stacks),
            calls: self.tables.calls.build(to),
            allocs: self.tables.allocs.build(to),
            frees: self.tables.frees.build(to),
            ooms: self.tables.ooms.build(to),
            waits: self.tables.waits.build(to),
            samples: self.tables.samples.build(to),
            losses: self.tables.losses.build(to),
            notes: texts(to, &self.notes),
            marks: self.tables.marks.build(to),
            nccl_enters: self.tables.nccl_enters.build(to),
            nccl_exits: self.tables.nccl_exits.build(to),
            nccl_timings: self.tables.nccl_timings.build(to),
            pjrts: self.tables.pjrts.build(to),
            pjrt_executables: self.tables.pjrt_executables.build(to),
        };
        let root = fields.build(to);
        to.finish_minimal(root);
    }

    pub(crate) fn clear(&mut self) {
        self.kinds.clear();
        self.times.clear();
        self.threads.clear();
        self.stacks.clear();
        self.tables.clear();
        self.notes.clear();
        self.nccl_calls = (0, 0, 0);
        self.nccl_start = 0;
        self.before = 0;
        self.expected.clear();
    }
}

impl CallRows {
    fn push(&mut self, call: &Call) -> u8 {
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        self.apis.push(call.api.0);
        self.actions.push(call.action as u8);
        self.devices.push(call.device);
        self.flags.push(
            flag(call.result.is_none(), NO_RESULT)
                | flag(call.captured, CAPTURED)
                | flag(call.in_allocate, IN_ALLOCATE)
                | flag(call.nccl_thread, NCCL_THREAD),
        );
        self.results.push(call.result.unwrap_or_default());
        self.addresses.push(call.addr);
        self.bytes.push(call.bytes.0);
        self.streams.push(call.stream);
        self.handles.push(call.handle);
        self.extras.push(call.extra);
        self.durations.push(call.duration.0);
        self.comms.push(call.comm.0);
        self.nccl_calls.push(call.nccl_call);
        CALL
    }
}

impl AllocRows {
    fn push(&mut self, alloc: &BlockAlloc, expected: &mut Expected) -> u8 {
        let (allocated, reserved) = expected.after_alloc(alloc.device, alloc.addr, alloc.bytes.0);
        self.devices.push(alloc.device);
        self.addresses.push(alloc.addr);
        self.bytes.push(alloc.bytes.0);
        self.flags.push(
            if alloc.requested.is_some() { HAS_REQUESTED } else { 0 }
                | if alloc.stream.is_some() { HAS_STREAM } else { 0 },
        );
        self.requested.push(alloc.requested.map_or(0, |requested| zigzag(alloc.bytes.0, requested.0)));
        self.streams.push(alloc.stream.unwrap_or_default());
        self.allocated.push(zigzag(alloc.allocated.0, allocated));
        self.reserved.push(zigzag(alloc.reserved.0, reserved));
        expected.set(alloc.device, alloc.allocated.0, alloc.reserved.0);
        BLOCK_ALLOC
    }
}

impl FreeRows {
    fn push(&mut self, free: &BlockFree, expected: &mut Expected) -> u8 {
        let (allocated, reserved) = expected.after_free(free.device, free.bytes.0);
        self.devices.push(free.device);
        self.addresses.push(free.addr);
        self.bytes.push(zigzag(free.bytes.0, expected.bytes_at(free.addr)));
        self.allocated.push(zigzag(free.allocated.0, allocated));
        self.reserved.push(zigzag(free.reserved.0, reserved));
        self.flags.push(if free.collecting { COLLECTING } else { 0 });
        expected.set(free.device, free.allocated.0, free.reserved.0);
        BLOCK_FREE
    }
}

impl OomRows {
    fn push(&mut self, oom: &BlockOom) -> u8 {
        self.devices.push(oom.device);
        self.bytes.push(oom.bytes.0);
        self.flags.push(
            if oom.requested.is_some() { HAS_REQUESTED } else { 0 }
                | if oom.stream.is_some() { HAS_STREAM } else { 0 },
        );
        self.requested.push(oom.requested.unwrap_or_default().0);
        self.allocated.push(oom.allocated.0);
        self.reserved.push(oom.reserved.0);
        self.streams.push(oom.stream.unwrap_or_default());
        BLOCK_OOM
    }
}

impl WaitRows {
    fn push(&mut self, wait: &Wait) -> u8 {
        self.events.push(wait.event);
        self.streams.push(wait.stream);
        self.actions.push(wait.action as u8);
        self.results.push(wait.result);
        WAIT
    }
}

impl SampleRows {
    fn push(&mut self, sample: &Sample) -> u8 {
        self.devices.push(sample.device);
        self.process_used.push(sample.process_used.map_or(0, |used| used.0.saturating_add(1)));
        self.device_used.push(sample.device_used.0);
        self.totals.push(sample.total.0);
        SAMPLE
    }
}

impl LossRows {
    fn push(&mut self, lost: Lost) -> u8 {
        self.causes.push(lost.cause as u8);
        self.events.push(lost.events);
        LOST
    }
}

impl EnterRows {
    fn push(&mut self, enter: &NcclEnter, before: &mut u64) -> u8 {
        self.apis.push(enter.api.0);
        self.ops.push(enter.op as u8);
        self.calls.push(zigzag(enter.call, *before));
        *before = enter.call;
        self.comms.push(enter.comm.0);
        // `UNKNOWN` wraps to 0, "none".
        self.sequences.push(enter.sequence.wrapping_add(1));
        self.groups.push(enter.group);
        self.group_depths.push(enter.group_depth);
        self.counts.push(enter.count);
        self.datatypes.push(enter.datatype.wrapping_add(1) as u32);
        self.redops.push(optional(enter.redop));
        self.redop_calls.push(enter.redop_call);
        self.peers.push(optional(enter.peer));
        self.sends.push(enter.send);
        self.receives.push(enter.receive);
        self.streams.push(enter.stream);
        self.handles.push(enter.handle);
        self.extras.push(enter.extra);
        self.flags.push(if enter.captured { NCCL_CAPTURED } else { 0 });
        NCCL_ENTER
    }
}

impl ExitRows {
    fn push(&mut self, exit: &NcclExit, before: &mut u64) -> u8 {
        self.calls.push(zigzag(exit.call, *before));
        *before = exit.call;
        self.results.push(exit.result);
        self.values.push(exit.value);
        self.durations.push(exit.duration.0);
        self.timed.push(exit.timed.map_or(0, |timed| timed as u8));
        NCCL_EXIT
    }
}

impl TimingRows {
    fn push(&mut self, timing: &NcclTiming, call: &mut u64, start: &mut u64) -> u8 {
        self.calls.push(zigzag(timing.call, *call));
        *call = timing.call;
        self.comms.push(timing.comm.0);
        self.timelines.push(timing.timeline);
        self.streams.push(timing.stream);
        self.starts.push(zigzag(timing.start.0, *start));
        *start = timing.start.0;
        self.durations.push(timing.duration.0);
        NCCL_TIMING
    }
}

impl PjrtRows {
    fn push(&mut self, pjrt: &Pjrt) -> u8 {
        self.actions.push(pjrt.action as u8);
        self.origins.push(pjrt.origin as u8);
        self.devices.push(pjrt.device);
        self.buffers.push(pjrt.buffer);
        self.executables.push(pjrt.executable);
        self.bytes.push(pjrt.bytes.0);
        self.codes.push(pjrt.code);
        self.texts.push(pjrt.text.0);
        PJRT
    }
}

impl PjrtExecutableRows {
    fn push(&mut self, made: &PjrtExecutable) -> u8 {
        // 0 is "not known"; the largest number there is would be one too many.
        let stored = |bytes: Option<Bytes>| bytes.map_or(0, |bytes| bytes.0.saturating_add(1));
        self.executables.push(made.executable);
        self.names.push(made.name.0);
        self.temporary.push(stored(made.temporary));
        self.arguments.push(stored(made.arguments));
        self.outputs.push(stored(made.outputs));
        self.aliased.push(stored(made.aliased));
        self.code.push(stored(made.code));
        PJRT_EXECUTABLE
    }
}

/// 0 for -1, "none"; otherwise the number's 32 bits plus one.
fn optional(number: i32) -> u64 {
    if number == -1 { 0 } else { u64::from(number as u32) + 1 }
}

/// The reverse of [`optional`].
fn number(stored: u64) -> i32 {
    stored.checked_sub(1).map_or(-1, |number| number as u32 as i32)
}

impl MarkRows {
    fn push(&mut self, mark: &Mark) -> u8 {
        self.actions.push(mark.action as u8);
        self.texts.push(mark.text.0);
        self.domains.push(mark.domain.0);
        self.ranges.push(mark.range);
        self.categories.push(mark.category);
        MARK
    }
}

/// What the next row's totals and sizes most likely are: most of PyTorch's figures follow from those before.
#[derive(Default)]
struct Expected {
    device: i16,
    totals: (u64, u64),
    others: HashMap<i16, (u64, u64)>,
    sizes: HashMap<u64, u64, BuildHasherDefault<AddressHasher>>,
}

impl Expected {
    fn after_alloc(&mut self, device: i16, addr: u64, bytes: u64) -> (u64, u64) {
        self.sizes.insert(addr, bytes);
        let (allocated, reserved) = self.totals_of(device);
        (allocated.wrapping_add(bytes), reserved)
    }

    fn after_free(&mut self, device: i16, bytes: u64) -> (u64, u64) {
        let (allocated, reserved) = self.totals_of(device);
        (allocated.wrapping_sub(bytes), reserved)
    }

    fn bytes_at(&self, addr: u64) -> u64 {
        self.sizes.get(&addr).copied().unwrap_or_default()
    }

    fn totals_of(&mut self, device: i16) -> (u64, u64) {
        if device != self.device {
            self.others.insert(self.device, self.totals);
            self.totals = self.others.get(&device).copied().unwrap_or_default();
            self.device = device;
        }
        self.totals
    }

    /// After [`Expected::totals_of`] for the same device.
    fn set(&mut self, device: i16, allocated: u64, reserved: u64) {
        debug_assert_eq!(device, self.device);
        self.totals = (allocated, reserved);
    }

    fn clear(&mut self) {
        (self.device, self.totals) = (0, (0, 0));
        self.others.clear();
        self.sizes.clear();
    }
}

/// Addresses are multiples of 512, so their low bits say nothing. A hostile file can make them collide only as far as
/// one block goes.
#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 ^ u64::from(*byte));
        }
    }
    fn write_u64(&mut self, addr: u64) {
        // 2^64 / golden ratio; the fold brings the well mixed high half to the low bits that pick the bucket.
        let mixed = addr.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ mixed >> 32;
    }
}

/// Memory that decoding needs, kept from block to block.
#[derive(Default)]
pub(crate) struct Scratch(Expected);

/// Events of a payload that may be anything, added to `events` as they are stored. Returns whether their times are in order.
pub(crate) fn decode(
    payload: &[u8],
    count: u32,
    scratch: &mut Scratch,
    events: &mut Vec<Event>,
) -> Result<bool, String> {
    let table = Events::parse(payload)?;
    let n_kinds = table.kinds().map_or(0, |kinds| kinds.len());
    if n_kinds != count as usize || count > MAX_EVENTS {
        return Err(format!("{n_kinds} events, but the header counts {count}"));
    }
    scratch.0.clear();
    let mut decoder = Decoder::new(&table, &mut scratch.0);
    events.reserve(n_kinds);
    let (mut times, mut threads, mut stacks) =
        (rows(table.times()), rows(table.threads()), rows(table.stacks()));
    let mut time = 0;
    for kind in table.kinds().into_iter().flatten() {
        time = unzigzag(times.next(), time);
        events.push(Event {
            time: Nanos(time),
            thread: ThreadId(threads.next()),
            stack: StackId(stacks.next()),
            kind: decoder.next(kind)?,
        });
    }
    Ok(are_sorted(rows(table.times()), n_kinds))
}

/// Whether the first times of a column are in order. They are read twice, as reading them again is cheaper than the events.
fn are_sorted(mut times: Rows<'_, u64>, n: usize) -> bool {
    let mut time = 0;
    (0..n).all(|_| {
        let before = time;
        time = unzigzag(times.next(), before);
        before <= time
    })
}

/// Reads the rows of a block's tables in the order of its events.
struct Decoder<'a> {
    cursors: Cursors<'a>,
    notes: Option<flatbuffers::VectorIter<'a, flatbuffers::ForwardsUOffset<&'a str>>>,
    /// Newest number of a call into NCCL in `nccl_enters`, in `nccl_exits` and in `nccl_timings`.
    newest_calls: (u64, u64, u64),
    newest_start: u64,
    expected: &'a mut Expected,
}

impl<'a> Decoder<'a> {
    fn new(events: &Events<'a>, expected: &'a mut Expected) -> Decoder<'a> {
        Decoder {
            cursors: Cursors::new(events),
            notes: events.notes().map(|notes| notes.iter()),
            newest_calls: (0, 0, 0),
            newest_start: 0,
            expected,
        }
    }
}

impl Decoder<'_> {
    fn next(&mut self, kind: u8) -> Result<EventKind, String> {
        Ok(match kind {
            CALL => EventKind::Call(self.call()?),
            BLOCK_ALLOC => EventKind::BlockAlloc(self.alloc()),
            BLOCK_FREE => EventKind::BlockFree(self.free()),
            BLOCK_OOM => EventKind::BlockOom(self.oom()),
            WAIT => EventKind::Wait(self.wait()?),
            SAMPLE => EventKind::Sample(self.sample()),
            LOST => EventKind::Lost(self.lost()?),
            MARK => EventKind::Mark(self.mark()?),
            NOTE => {
                EventKind::Note(self.notes.as_mut().and_then(Iterator::next).unwrap_or_default().to_owned())
            }
            NCCL_ENTER => EventKind::NcclEnter(self.nccl_enter()?),
            NCCL_EXIT => EventKind::NcclExit(self.nccl_exit()?),
            NCCL_TIMING => EventKind::NcclTiming(self.nccl_timing()),
            PJRT => EventKind::Pjrt(self.pjrt()?),
            PJRT_EXECUTABLE => EventKind::PjrtExecutable(self.pjrt_executable()),
            _ => return Err(format!("event kind {kind}, which this version does not know")),
        })
    }

    fn call(&mut self) -> Result<Call, String> {
        let from = &mut self.cursors.calls;
        let (action, flags, result) = (from.actions.next(), from.flags.next(), from.results.next());
        Ok(Call {
            api: ApiId(from.apis.next()),
            action: Action::from_u8(action)
                .ok_or_else(|| format!("action {action}, which this version does not know"))?,
            device: from.devices.next(),
            result: (flags & NO_RESULT == 0).then_some(result),
            addr: from.addresses.next(),
            bytes: Bytes(from.bytes.next()),
            stream: from.streams.next(),
            handle: from.handles.next(),
            extra: from.extras.next(),
            duration: Nanos(from.durations.next()),
            captured: flags & CAPTURED != 0,
            in_allocate: flags & IN_ALLOCATE != 0,
            comm: CommId(from.comms.next()),
            nccl_call: from.nccl_calls.next(),
            nccl_thread: flags & NCCL_THREAD != 0,
        })
    }

    fn nccl_enter(&mut self) -> Result<NcclEnter, String> {
        let from = &mut self.cursors.nccl_enters;
        let op = from.ops.next();
        self.newest_calls.0 = unzigzag(from.calls.next(), self.newest_calls.0);
        Ok(NcclEnter {
            api: ApiId(from.apis.next()),
            op: NcclOp::from_u8(op)
                .ok_or_else(|| format!("operation {op} of NCCL, which this version does not know"))?,
            call: self.newest_calls.0,
            comm: CommId(from.comms.next()),
            sequence: from.sequences.next().checked_sub(1).unwrap_or(UNKNOWN),
            group: from.groups.next(),
            group_depth: from.group_depths.next(),
            count: from.counts.next(),
            datatype: from.datatypes.next().wrapping_sub(1) as i32,
            redop: number(from.redops.next()),
            redop_call: from.redop_calls.next(),
            peer: number(from.peers.next()),
            send: from.sends.next(),
            receive: from.receives.next(),
            stream: from.streams.next(),
            handle: from.handles.next(),
            extra: from.extras.next(),
            captured: from.flags.next() & NCCL_CAPTURED != 0,
        })
    }

    fn nccl_exit(&mut self) -> Result<NcclExit, String> {
        let from = &mut self.cursors.nccl_exits;
        self.newest_calls.1 = unzigzag(from.calls.next(), self.newest_calls.1);
        let (result, value, duration) = (from.results.next(), from.values.next(), from.durations.next());
        let timed = match from.timed.next() {
            0 => None,
            raw => Some(
                NcclTimed::from_u8(raw)
                    .ok_or_else(|| format!("timing {raw} of NCCL, which this version does not know"))?,
            ),
        };
        Ok(NcclExit { call: self.newest_calls.1, result, value, duration: Nanos(duration), timed })
    }

    fn nccl_timing(&mut self) -> NcclTiming {
        let from = &mut self.cursors.nccl_timings;
        self.newest_calls.2 = unzigzag(from.calls.next(), self.newest_calls.2);
        self.newest_start = unzigzag(from.starts.next(), self.newest_start);
        NcclTiming {
            call: self.newest_calls.2,
            comm: CommId(from.comms.next()),
            timeline: from.timelines.next(),
            stream: from.streams.next(),
            start: Nanos(self.newest_start),
            duration: Nanos(from.durations.next()),
        }
    }

    fn pjrt(&mut self) -> Result<Pjrt, String> {
        let from = &mut self.cursors.pjrts;
        let (action, origin) = (from.actions.next(), from.origins.next());
        Ok(Pjrt {
            action: PjrtAction::from_u8(action)
                .ok_or_else(|| format!("action {action} of PJRT, which this version does not know"))?,
            origin: PjrtOrigin::from_u8(origin)
                .ok_or_else(|| format!("origin {origin} of a buffer, which this version does not know"))?,
            device: from.devices.next(),
            buffer: from.buffers.next(),
            executable: from.executables.next(),
            bytes: Bytes(from.bytes.next()),
            code: from.codes.next(),
            text: TextId(from.texts.next()),
        })
    }

    fn pjrt_executable(&mut self) -> PjrtExecutable {
        let from = &mut self.cursors.pjrt_executables;
        let known = |stored: u64| stored.checked_sub(1).map(Bytes);
        PjrtExecutable {
            executable: from.executables.next(),
            name: TextId(from.names.next()),
            temporary: known(from.temporary.next()),
            arguments: known(from.arguments.next()),
            outputs: known(from.outputs.next()),
            aliased: known(from.aliased.next()),
            code: known(from.code.next()),
        }
    }

    fn alloc(&mut self) -> BlockAlloc {
        let (from, expected) = (&mut self.cursors.allocs, &mut *self.expected);
        let (device, addr, bytes) = (from.devices.next(), from.addresses.next(), from.bytes.next());
        let (flags, requested, stream) = (from.flags.next(), from.requested.next(), from.streams.next());
        let (allocated, reserved) = expected.after_alloc(device, addr, bytes);
        let allocated = unzigzag(from.allocated.next(), allocated);
        let reserved = unzigzag(from.reserved.next(), reserved);
        expected.set(device, allocated, reserved);
        // The stored difference is `bytes - requested`, so this subtracts it.
        let requested = bytes.wrapping_sub(unzigzag(requested, 0));
        BlockAlloc {
            device,
            addr,
            bytes: Bytes(bytes),
            requested: (flags & HAS_REQUESTED != 0).then_some(Bytes(requested)),
            stream: (flags & HAS_STREAM != 0).then_some(stream),
            allocated: Bytes(allocated),
            reserved: Bytes(reserved),
        }
    }

    fn free(&mut self) -> BlockFree {
        let (from, expected) = (&mut self.cursors.frees, &mut *self.expected);
        let (device, addr) = (from.devices.next(), from.addresses.next());
        let bytes = unzigzag(from.bytes.next(), expected.bytes_at(addr));
        let (allocated, reserved) = expected.after_free(device, bytes);
        let allocated = unzigzag(from.allocated.next(), allocated);
        let reserved = unzigzag(from.reserved.next(), reserved);
        expected.set(device, allocated, reserved);
        BlockFree {
            device,
            addr,
            bytes: Bytes(bytes),
            allocated: Bytes(allocated),
            reserved: Bytes(reserved),
            collecting: self.cursors.frees.flags.next() & COLLECTING != 0,
        }
    }

    fn oom(&mut self) -> BlockOom {
        let from = &mut self.cursors.ooms;
        let (flags, requested, stream) = (from.flags.next(), from.requested.next(), from.streams.next());
        BlockOom {
            device: from.devices.next(),
            bytes: Bytes(from.bytes.next()),
            requested: (flags & HAS_REQUESTED != 0).then_some(Bytes(requested)),
            stream: (flags & HAS_STREAM != 0).then_some(stream),
            allocated: Bytes(from.allocated.next()),
            reserved: Bytes(from.reserved.next()),
        }
    }

    fn wait(&mut self) -> Result<Wait, String> {
        let from = &mut self.cursors.waits;
        let action = from.actions.next();
        Ok(Wait {
            event: from.events.next(),
            stream: from.streams.next(),
            action: WaitAction::from_u8(action)
                .ok_or_else(|| format!("wait action {action}, which this version does not know"))?,
            result: from.results.next(),
        })
    }

    fn sample(&mut self) -> Sample {
        let from = &mut self.cursors.samples;
        Sample {
            device: from.devices.next(),
            process_used: from.process_used.next().checked_sub(1).map(Bytes),
            device_used: Bytes(from.device_used.next()),
            total: Bytes(from.totals.next()),
        }
    }

    fn mark(&mut self) -> Result<Mark, String> {
        let from = &mut self.cursors.marks;
        let action = from.actions.next();
        Ok(Mark {
            action: MarkAction::from_u8(action)
                .ok_or_else(|| format!("mark {action}, which this version does not know"))?,
            text: TextId(from.texts.next()),
            domain: TextId(from.domains.next()),
            range: from.ranges.next(),
            category: from.categories.next(),
        })
    }

    fn lost(&mut self) -> Result<Lost, String> {
        let from = &mut self.cursors.losses;
        let cause = from.causes.next();
        Ok(Lost {
            cause: LostCause::from_u8(cause)
                .ok_or_else(|| format!("loss cause {cause}, which this version does not know"))?,
            events: from.events.next(),
        })
    }
}
