//! A trace comes back as it was written; cut short or damaged it gives what is left, and never a panic.

use gputrace_schemas::event::*;
use gputrace_schemas::reader::{Error, Trace};
use gputrace_schemas::writer::{EVENTS_PER_BLOCK, Writer};
use std::collections::BTreeSet;
use std::io::{self, Cursor, Write};

/// A small generator of numbers (xorshift64*), so that failures repeat.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
    /// Any width, and the ends of the range more often than chance.
    fn wild(&mut self) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << 63,
            _ => self.next() >> self.below(64),
        }
    }
    fn maybe<T>(&mut self, value: T) -> Option<T> {
        (self.below(2) == 0).then_some(value)
    }
    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
    fn text(&mut self) -> String {
        let n = self.below(12);
        (0..n).map(|_| self.pick(&['a', 'Z', '/', '.', 'ß', '漢', '\n', '\0'])).collect()
    }
    fn texts(&mut self) -> Vec<String> {
        (0..self.below(4)).map(|_| self.text()).collect()
    }
}

/// Miri is a thousand times slower than the processor: it tries every so-and-so-many-th case.
const STEP: usize = if cfg!(miri) { 499 } else { 1 };

#[derive(PartialEq, Debug, Default)]
struct Story {
    process: Process,
    modules: Vec<Module>,
    frames: Vec<Frame>,
    stacks: Vec<Stack>,
    threads: Vec<Thread>,
    devices: Vec<Device>,
    apis: Vec<Api>,
    texts: Vec<String>,
    communicators: Vec<Communicator>,
    mappings: Vec<Mappings>,
    events: Vec<Event>,
}

fn nccl_enter(random: &mut Random) -> NcclEnter {
    NcclEnter {
        api: ApiId(random.wild() as u32),
        op: random.pick(NcclOp::ALL),
        call: random.wild(),
        comm: CommId(random.wild() as u32),
        sequence: random.wild(),
        group: random.wild() as u32,
        group_depth: random.wild() as u32,
        count: random.wild(),
        datatype: random.wild() as i32,
        redop: random.wild() as i32,
        redop_call: random.wild(),
        peer: random.wild() as i32,
        send: random.wild(),
        receive: random.wild(),
        stream: random.wild(),
        handle: random.wild(),
        extra: random.wild(),
        captured: random.below(2) == 0,
    }
}

fn communicator(random: &mut Random) -> Communicator {
    let maybe = |random: &mut Random| {
        let number = random.wild() as i32;
        random.maybe(number).filter(|number| *number != i32::MIN)
    };
    let (color, key) = match maybe(random) {
        Some(color) => (Some(color), Some(random.wild() as i32)),
        None => (None, None),
    };
    let (rank, n_ranks) = (random.wild() as u32, random.wild() as u32);
    let hash = random.wild();
    Communicator {
        origin: match random.below(2) {
            0 => None,
            _ => Some(random.pick(NcclOp::ALL)),
        },
        call: random.wild(),
        handle: random.wild(),
        unique_id: random.wild(),
        comm_hash: random.maybe(hash),
        rank: random.maybe(rank),
        n_ranks: random.maybe(n_ranks),
        device: random.wild() as i16,
        parent: CommId(random.wild() as u32),
        ordinal: random.wild() as u32,
        color,
        key,
        version: random.wild() as u32,
        config: CommConfig {
            name: random.text(),
            net_name: random.text(),
            blocking: maybe(random),
            cga_cluster_size: maybe(random),
            min_ctas: maybe(random),
            max_ctas: maybe(random),
            split_share: maybe(random),
            traffic_class: maybe(random),
            nvls_ctas: maybe(random),
            max_p2p_peers: maybe(random),
        },
    }
}

fn kind(random: &mut Random) -> EventKind {
    let device = random.wild() as i16;
    let (allocated, reserved, bytes) = (Bytes(random.wild()), Bytes(random.wild()), Bytes(random.wild()));
    let requested = Bytes(random.wild());
    match random.below(14) {
        0 => EventKind::Call(Call {
            api: ApiId(random.wild() as u32),
            action: random.pick(Action::ALL),
            device,
            result: {
                let result = random.wild() as i32;
                random.maybe(result)
            },
            addr: random.wild(),
            bytes,
            stream: random.wild(),
            handle: random.wild(),
            extra: random.wild(),
            duration: Nanos(random.wild()),
            captured: random.below(2) == 0,
            in_allocate: random.below(2) == 0,
            comm: CommId(random.wild() as u32),
            nccl_call: random.wild(),
            nccl_thread: random.below(2) == 0,
        }),
        8 => EventKind::NcclEnter(nccl_enter(random)),
        9 => EventKind::NcclExit(NcclExit {
            call: random.wild(),
            result: random.wild() as i32,
            value: random.wild(),
            duration: Nanos(random.wild()),
            timed: {
                let timed = random.pick(NcclTimed::ALL);
                random.maybe(timed)
            },
        }),
        10 => EventKind::NcclTiming(NcclTiming {
            call: random.wild(),
            comm: CommId(random.wild() as u32),
            timeline: random.wild() as u32,
            stream: random.wild(),
            start: Nanos(random.wild()),
            duration: Nanos(random.wild()),
        }),
        11 => EventKind::Pjrt(Pjrt {
            action: random.pick(PjrtAction::ALL),
            origin: random.pick(PjrtOrigin::ALL),
            device,
            buffer: random.wild(),
            executable: random.wild(),
            bytes,
            code: random.wild() as i32,
            text: TextId(random.wild() as u32),
        }),
        12 => EventKind::PjrtExecutable(PjrtExecutable {
            executable: random.wild(),
            name: TextId(random.wild() as u32),
            temporary: random.maybe(Bytes(bytes.0 >> 1)),
            arguments: random.maybe(Bytes(bytes.0 >> 1)),
            outputs: random.maybe(Bytes(bytes.0 >> 1)),
            aliased: random.maybe(Bytes(bytes.0 >> 1)),
            code: random.maybe(Bytes(bytes.0 >> 1)),
        }),
        1 => EventKind::BlockAlloc(BlockAlloc {
            device,
            addr: random.below(8) << 9,
            bytes,
            requested: random.maybe(requested),
            stream: {
                let stream = random.wild();
                random.maybe(stream)
            },
            allocated,
            reserved,
        }),
        2 => EventKind::BlockFree(BlockFree {
            device,
            addr: random.below(8) << 9,
            bytes,
            allocated,
            reserved,
            collecting: random.below(2) == 1,
        }),
        3 => EventKind::BlockOom(BlockOom {
            device,
            bytes,
            requested: random.maybe(requested),
            stream: random.maybe(bytes.0),
            allocated,
            reserved,
        }),
        4 => EventKind::Wait(Wait {
            event: random.wild(),
            stream: random.wild(),
            action: random.pick(WaitAction::ALL),
            result: random.wild() as i32,
        }),
        5 => EventKind::Sample(Sample {
            device,
            // The largest number is "not told".
            process_used: {
                let used = Bytes(random.wild() >> 1);
                random.maybe(used)
            },
            device_used: bytes,
            total: reserved,
        }),
        6 => EventKind::Lost(Lost { cause: random.pick(LostCause::ALL), events: random.wild() }),
        7 => EventKind::Mark(Mark {
            action: random.pick(MarkAction::ALL),
            text: TextId(random.wild() as u32),
            domain: TextId(random.wild() as u32),
            range: random.wild(),
            category: random.wild() as u32,
        }),
        _ => EventKind::Note(random.text()),
    }
}

fn story(seed: u64, n_events: u64) -> Story {
    let random = &mut Random(seed * 2 + 1);
    let mut story = Story {
        process: Process {
            pid: random.wild() as u32,
            parent: random.wild() as u32,
            host: random.text(),
            boot: random.text(),
            executable: random.text(),
            command: random.texts(),
            environment: (0..random.below(3)).map(|_| (random.text(), random.text())).collect(),
            rank: {
                let rank = random.wild() as u32;
                random.maybe(rank)
            },
            start: Nanos(random.wild()),
            start_realtime: random.wild(),
            recorder: random.text(),
            torch_version: {
                let text = random.text();
                random.maybe(text)
            },
            began: random.wild(),
            segment: random.wild() as u32,
            since: Nanos(random.wild()),
            after_gap: random.wild().is_multiple_of(2),
            ancestors: (0..random.below(3))
                .map(|_| Ancestor {
                    pid: random.wild() as u32,
                    began: random.wild(),
                    command: random.texts(),
                })
                .collect(),
        },
        stacks: vec![Stack::default()],
        texts: vec![String::new()],
        communicators: vec![Communicator::default()],
        ..Story::default()
    };
    for _ in 0..random.below(4) {
        story.modules.push(Module {
            path: random.text(),
            build_id: random.text(),
            start: random.wild(),
            end: random.wild(),
            bias: random.wild(),
            has_runtime: random.below(2) == 0,
        });
        story.threads.push(Thread { tid: random.wild() as u32, name: random.text() });
        story.texts.push(random.text());
        story.apis.push(Api { name: random.text(), runtime_name: random.text() });
        story.communicators.push(communicator(random));
        let ordinal = story.devices.len() as i16 - 1;
        let (name, uuid) = (random.text(), random.text());
        story.devices.push(Device { ordinal, name, uuid, total: Bytes(random.wild()) });
        let mut at = 0;
        let mapped = (0..random.below(5)).map(|_| {
            let start = at + random.below(1 << 40);
            at = start + random.below(1 << 40);
            Mapping { start, end: at }
        });
        story.mappings.push(Mappings { mapped: mapped.collect(), time: Nanos(random.wild()) });
    }
    for _ in 0..random.below(6) {
        let (function, file, line) = (random.text(), random.text(), random.wild() as u32);
        story.frames.push(if random.below(2) == 0 {
            Frame::Python { function, file, line }
        } else {
            let module = ModuleId(random.below(1 << 32) as u32 / 2);
            let (address, inlined) = (random.wild(), random.below(2) == 0);
            Frame::Native { address, module: random.maybe(module), function, file, line, inlined }
        });
        let frames = (0..random.below(5)).map(|_| FrameId(random.wild() as u32)).collect();
        let backward = Backward {
            node: format!("torch::autograd::{}", random.text()),
            forward: StackId(random.wild() as u32),
            caller: StackId(random.wild() as u32),
            is_caller_inferred: random.below(2) == 0,
        };
        let backward = random.maybe(Box::new(backward));
        story.stacks.push(Stack { frames, truncated: random.below(2) == 0, backward });
    }
    let mut time = 1 << 40;
    for _ in 0..n_events {
        time += random.below(1000);
        story.events.push(Event {
            time: Nanos(time),
            thread: ThreadId(random.wild() as u32),
            stack: StackId(random.wild() as u32),
            kind: kind(random),
        });
    }
    story
}

fn define<W: Write>(writer: &mut Writer<W>, story: &Story) {
    writer.process(&story.process);
    for (id, module) in (0..).zip(&story.modules) {
        writer.module(ModuleId(id), module);
    }
    for (id, frame) in (0..).zip(&story.frames) {
        writer.frame(FrameId(id), frame);
    }
    for (id, stack) in (0..).zip(&story.stacks).skip(1) {
        writer.stack(StackId(id), stack);
    }
    for (id, thread) in (0..).zip(&story.threads) {
        writer.thread(ThreadId(id), thread);
    }
    for device in &story.devices {
        writer.device(device);
    }
    for (id, api) in (0..).zip(&story.apis) {
        writer.api(ApiId(id), api);
    }
    for (id, text) in (0..).zip(&story.texts).skip(1) {
        writer.text(TextId(id), text);
    }
    for (id, communicator) in (0..).zip(&story.communicators).skip(1) {
        writer.communicator(CommId(id), communicator);
    }
}

fn write(story: &Story, flush_every: usize) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new()).unwrap();
    define(&mut writer, story);
    for mappings in &story.mappings {
        writer.mappings(mappings).unwrap();
    }
    for (n, event) in story.events.iter().enumerate() {
        writer.event(event).unwrap();
        if n % flush_every == flush_every - 1 {
            writer.flush().unwrap();
        }
    }
    writer.finish().unwrap()
}

fn open(bytes: Vec<u8>) -> Result<Trace, Error> {
    Trace::read(Cursor::new(bytes), "test.gtr")
}

fn read(trace: &Trace) -> Story {
    let mut stacks = trace.stacks().to_vec();
    if stacks.is_empty() {
        stacks.push(Stack::default());
    }
    let mut communicators = trace.communicators().to_vec();
    if communicators.is_empty() {
        communicators.push(Communicator::default());
    }
    let mut texts = trace.texts().to_vec();
    if texts.is_empty() {
        texts.push(String::new());
    }
    Story {
        process: trace.process().clone(),
        modules: trace.modules().to_vec(),
        frames: trace.frames().to_vec(),
        stacks,
        threads: trace.threads().to_vec(),
        devices: trace.devices().to_vec(),
        apis: trace.apis().to_vec(),
        texts,
        communicators,
        mappings: trace.mappings().collect(),
        events: trace.events().collect(),
    }
}

/// What is not among the random events is written and read back by nothing here.
#[test]
fn the_random_events_are_of_every_kind_and_the_schema_numbers_them_all() {
    let declared =
        include_str!("../src/event/mod.rs").split_once("pub enum EventKind {").expect("the enum").1;
    let lines = declared.split_once("\n}").expect("its end").0.lines().map(str::trim);
    let declared: BTreeSet<&str> =
        lines.filter(|line| !line.starts_with("//")).filter_map(|line| line.split('(').next()).collect();
    let declared: BTreeSet<&str> = declared.into_iter().filter(|name| !name.is_empty()).collect();
    let random = &mut Random(1);
    let made: BTreeSet<String> = (0..1000).map(|_| format!("{:?}", kind(random))).collect();
    let made: BTreeSet<&str> = made.iter().filter_map(|kind| kind.split('(').next()).collect();
    assert_eq!(made, declared, "`kind` above makes an event of each kind of src/event/mod.rs");

    let schema = include_str!("../trace.fbs").split_once("kinds: [ubyte];").expect("the column of kinds").1;
    let listed = schema.split_once("times:").expect("the next column").0.replace("//", " ");
    let numbers = listed.split([' ', '\n']).filter_map(|word| word.parse::<usize>().ok());
    let all: Vec<usize> = (1..=declared.len()).collect();
    assert_eq!(numbers.collect::<Vec<_>>(), all, "trace.fbs: the comment at `kinds` names each");
    let newest = format!("kind {}", declared.len());
    assert!(
        include_str!("../FORMAT.md").contains(&newest),
        "FORMAT.md: a row of Versions for event {newest}"
    );
}

#[test]
fn what_was_written_is_read_back() {
    for seed in (0..200).step_by(STEP.div_ceil(10)) {
        let story = story(seed, seed * 3);
        let trace = open(write(&story, 1 + seed as usize)).unwrap();
        assert_eq!(read(&trace), story, "seed {seed}");
        assert_eq!(trace.damages(), [], "seed {seed}");
        assert!(trace.is_complete());
        assert_eq!(trace.n_events(), story.events.len() as u64);
    }
}

#[cfg(not(miri))] // Fifty thousand events are too many for it.
#[test]
fn events_of_several_blocks_come_in_the_order_of_their_times() {
    let mut story = story(3, 3 * EVENTS_PER_BLOCK as u64 + 5);
    let mut random = Random(9);
    let written = story.events.clone();
    for event in &mut story.events {
        // Up to 50 events late, and one in a thousand by half a block.
        let late = if random.below(1000) == 0 { 4_000_000 } else { random.below(25_000) };
        event.time.0 = event.time.0.saturating_sub(late);
    }
    let trace = open(write(&story, usize::MAX)).unwrap();
    let got: Vec<Event> = trace.events().collect();
    story.events.sort_by_key(|event| event.time);
    assert_eq!(got.len(), written.len());
    assert!(got == story.events, "equal times keep the order they were written in");
    assert_eq!(trace.damages(), []);
}

#[test]
fn events_that_are_lent_are_those_that_are_given_however_both_are_mixed() {
    let mut story = story(5, 9 * EVENTS_PER_BLOCK as u64 + 5);
    let mut random = Random(9);
    for event in &mut story.events {
        // So that blocks overlap, and are lent in parts.
        event.time.0 = event.time.0.saturating_sub(random.below(25_000));
    }
    let trace = open(write(&story, usize::MAX)).unwrap();
    let mut events = trace.events();
    let (mut got, mut n_lent) = (vec![], 0);
    for number in 0.. {
        let before = got.len();
        match number % 3 {
            0 => got.extend(events.next()),
            _ => {
                got.extend_from_slice(events.lend().unwrap_or_default());
                n_lent += 1;
            }
        }
        if got.len() == before {
            break;
        }
    }
    assert!(got == trace.events().collect::<Vec<Event>>() && got.len() == story.events.len());
    assert!(n_lent > 9, "{n_lent} parts of 10 blocks");
    assert!(events.lend().is_none() && events.next().is_none(), "the end stays the end");
}

#[test]
fn a_redefinition_replaces_the_definition_for_the_whole_trace() {
    let frame = |line| Frame::Python { function: "f".to_owned(), file: "a.py".to_owned(), line };
    let mut writer = Writer::new(Vec::new()).unwrap();
    for line in 0..3 {
        writer.frame(FrameId(0), &frame(line));
        writer.stack(StackId(1), &Stack { frames: vec![FrameId(0); 1 + line as usize], ..Stack::default() });
        writer.flush().unwrap();
    }
    let trace = open(writer.finish().unwrap()).unwrap();
    assert_eq!(trace.frames(), [frame(2)]);
    assert_eq!(trace.stack_frames(StackId(1)).count(), 3);
    assert_eq!(trace.stack_frames(StackId(0)).count(), 0);
    assert_eq!(trace.stack_frames(StackId(7)).count(), 0);
}

#[test]
fn what_is_appended_to_a_trace_replaces_its_definitions_and_hides_none_of_its_damage() {
    let story = story(7, 60);
    let whole = write(&story, 10);
    let frame = Frame::Python { function: "f".to_owned(), file: "a.py".to_owned(), line: 3 };
    let append = |bytes: &[u8]| {
        let trace = open(bytes.to_vec()).unwrap();
        let sink = bytes[..trace.blocks_end() as usize].to_vec();
        let mut writer = Writer::append(&trace, sink).unwrap();
        writer.frame(FrameId(0), &frame);
        writer.try_finish().unwrap();
        open(std::mem::take(writer.sink())).unwrap()
    };
    let appended = append(&whole);
    assert!(appended.is_complete());
    let (got, mut expected) = (read(&appended), story);
    expected.frames[0] = frame.clone();
    assert_eq!(got, expected);
    let mut broken = whole.clone();
    let middle = broken.len() / 2;
    broken[middle] ^= 1;
    let before = open(broken.clone()).unwrap();
    let after = append(&broken);
    let events: Vec<Event> = after.events().collect();
    assert_eq!(events, before.events().collect::<Vec<_>>());
    assert!(!before.damages().is_empty() && after.damages() == before.damages(), "{:?}", after.damages());
}

#[test]
fn every_prefix_of_a_trace_is_readable_and_keeps_every_whole_block() {
    let story = story(7, 60);
    let whole = write(&story, 10);
    let mut most = 0;
    for length in (0..whole.len()).rev().step_by(STEP).collect::<Vec<_>>().into_iter().rev() {
        let trace = match open(whole[..length].to_vec()) {
            Ok(trace) => trace,
            Err(Error::NotBegun { .. }) if length < 8 => continue,
            Err(error) => panic!("{length} bytes: {error}"),
        };
        let got = read(&trace);
        assert!(!trace.is_complete(), "{length} bytes");
        assert_eq!(got.events, story.events[..got.events.len()], "{length} bytes");
        assert!(got.events.len() >= most && got.events.len().is_multiple_of(10), "{length} bytes");
        assert!(trace.damages().len() <= 1, "{length} bytes: {:?}", trace.damages());
        most = got.events.len();
    }
    assert_eq!(most, 60, "the events do not need the footer");
}

#[test]
fn a_flipped_bit_costs_at_most_its_block() {
    let story = story(11, 40);
    let whole = write(&story, 10);
    for bit in (0..whole.len() * 8).step_by(STEP) {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let trace = match open(bytes) {
            Ok(trace) => trace,
            Err(Error::NotATrace { .. } | Error::Version { .. }) if bit < 64 => continue,
            Err(error) => panic!("bit {bit}: {error}"),
        };
        let events: Vec<Event> = trace.events().collect();
        let _ = trace.mappings().count();
        assert!(events.len() >= 30, "bit {bit}: {} events", events.len());
        let mut rest = story.events.iter();
        assert!(events.iter().all(|event| rest.any(|other| other == event)), "bit {bit}: other events");
        assert!(events.len() == 40 || !trace.damages().is_empty(), "bit {bit}: a loss is not told");
    }
}

#[test]
fn garbage_between_blocks_is_skipped_and_told() {
    let story = story(13, 40);
    let whole = write(&story, 10);
    let magics: Vec<usize> = (0..whole.len() - 4).filter(|at| whole[*at..].starts_with(b"GTB\x01")).collect();
    // Before the last block of events and the index.
    let at = magics[magics.len() - 2];
    for garbage in [&b"GTB\x01"[..], &[0; 100], &[0x47; 1000], &whole[8..50]] {
        let bytes = [&whole[..at], garbage, &whole[at..]].concat();
        let trace = open(bytes).unwrap();
        assert_eq!(read(&trace), story, "the index no longer fits, but everything is there");
        let damages = trace.damages();
        let [damage] = damages.as_slice() else { panic!("{damages:?}") };
        assert_eq!((damage.offset, damage.bytes), (at as u64, garbage.len() as u64));
    }
}

#[test]
fn random_bytes_after_the_magic_are_damage_and_nothing_else() {
    for seed in (1..300).step_by(STEP.div_ceil(10)) {
        let mut random = Random(seed);
        let length = random.below(4000) as usize;
        let mut bytes = b"GPUTRC\0\x01".to_vec();
        bytes.extend((0..length).map(|_| random.next() as u8));
        let trace = open(bytes).unwrap();
        assert_eq!(trace.events().count(), 0);
        assert_eq!(trace.damages().len(), usize::from(length > 0));
    }
}

/// A block as its header describes it, with right checksums.
fn block(kind: u8, count: u32, raw: u32, payload: &[u8], first: u64) -> Vec<u8> {
    let mut header = b"GTB\x01".to_vec();
    header.extend([kind, 1, 64, 0]);
    for number in [count, raw, payload.len() as u32, crc32fast::hash(payload)] {
        header.extend(number.to_le_bytes());
    }
    for number in [0, first, first] {
        header.extend(u64::to_le_bytes(number));
    }
    header.resize(60, 0);
    header.extend(crc32fast::hash(&header).to_le_bytes());
    [&header, payload].concat()
}

#[cfg(not(miri))] // Miri runs no zstd.
#[test]
fn blocks_that_lie_about_themselves_are_damage() {
    let zeros = zstd::bulk::compress(&vec![0; 32 << 20], 1).unwrap();
    let small = zstd::bulk::compress(&[0; 100], 1).unwrap();
    let check = |block: Vec<u8>, what: &str| {
        let trace = open([b"GPUTRC\0\x01", block.as_slice()].concat()).unwrap();
        assert_eq!(trace.events().count(), 0);
        assert_eq!(trace.mappings().count(), 0);
        let damages = trace.damages();
        assert!(damages.len() == 1 && damages[0].what.contains(what), "{what}: {damages:?}");
    };
    for kind in 1..=3 {
        check(block(kind, 1, 100, &zeros, 0), "Destination buffer is too small");
        check(block(kind, 1, 200, &small, 0), "decompresses to 100 bytes instead of 200");
        check(block(kind, 1, 65 << 20, &zeros, 0), "no block header here (Length)");
        check(block(kind, 1, 100, b"no zstd at all", 0), "nknown frame");
    }
    let ones = zstd::bulk::compress(&[0xff; 100], 1).unwrap();
    check(block(1, 1, 100, &ones, 0), "not a FlatBuffer of the schema (Type `i32`");
    check(block(2, u32::MAX, 100, &small, 0), "no more than 65536 are allowed");
    check(block(77, 1, 100, &small, 0), "a block of unknown kind 77");
}

#[test]
fn more_overlapping_blocks_than_can_be_open_are_told_and_lose_nothing() {
    let mut writer = Writer::new(Vec::new()).unwrap();
    for n in 0..100 {
        // Each block begins at 0 and ends after all others began.
        for time in [0, 1_000 + n] {
            let kind = EventKind::Note(n.to_string());
            writer.event(&Event { time: Nanos(time), thread: ThreadId(0), stack: StackId(0), kind }).unwrap();
        }
        writer.flush().unwrap();
    }
    let trace = open(writer.finish().unwrap()).unwrap();
    assert_eq!(trace.events().count(), 200);
    let [damage] = &trace.damages()[..] else { panic!("{:?}", trace.damages()) };
    assert_eq!((damage.bytes, damage.what.as_str()), (0, "more than 64 blocks of events overlap in time"));
}

#[test]
fn other_files_are_refused_with_a_remedy() {
    let refusal = |bytes: &[u8]| open(bytes.to_vec()).unwrap_err().to_string();
    assert_eq!(
        refusal(b"\x80\x04\x95 pickle"),
        "test.gtr is not a gputrace trace: it begins with \"\\x80\\x04\\x95 pick\"; `gputrace record` makes traces"
    );
    for begun in [&b""[..], b"GPUT"] {
        let text = refusal(begun);
        assert!(
            text.starts_with("test.gtr has no trace yet: ") && text.contains("`gputrace recover`"),
            "{text}"
        );
    }
    assert_eq!(
        refusal(b"GPUTRC\0\x02"),
        "test.gtr has format version 2, and this gputrace reads version 1: upgrade gputrace"
    );
    let missing = Trace::open("/nonexistent/a.gtr").unwrap_err();
    assert_eq!(missing.to_string(), "cannot read /nonexistent/a.gtr");
}

/// A sink that refuses to grow beyond a size, as a full disk does.
struct Full {
    bytes: Vec<u8>,
    room: usize,
}

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let fits = bytes.len().min(self.room - self.bytes.len());
        if fits == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(&bytes[..fits]);
        Ok(fits)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_costs_the_events_that_did_not_fit_and_no_definition() {
    let story = story(17, 400);
    let mut writer = Writer::new(Full { bytes: Vec::new(), room: 3000 }).unwrap();
    define(&mut writer, &story);
    let mut failures = 0;
    for (n, event) in story.events.iter().enumerate() {
        if n == 300 {
            writer.sink().room = usize::MAX;
        }
        writer.event(event).unwrap();
        if n % 10 == 9 && writer.flush().is_err() {
            failures += 1;
            let whole = writer.position() as usize;
            writer.sink().bytes.truncate(whole);
        }
    }
    assert!(failures > 0);
    assert_eq!((writer.events_dropped(), writer.events_written()), (10 * failures, 400 - 10 * failures));
    let trace = open(writer.finish().unwrap().bytes).unwrap();
    let got = read(&trace);
    assert_eq!(trace.damages(), []);
    assert_eq!((got.process, got.frames, got.stacks), (story.process, story.frames, story.stacks));
    assert_eq!(got.events.len() as u64, 400 - 10 * failures);
    assert_eq!(got.events.last(), story.events.last());
}

/// A training loop as PyTorch's allocator sees it: the same blocks every step, sizes and addresses of a few hundred
/// tensors, nanosecond noise in the times, a tenth of the sizes new in each step.
fn training(n_steps: u64) -> Vec<Event> {
    let mut random = Random(5);
    let shapes: Vec<(u64, u64, u64)> = (0..500)
        .map(|_| {
            let width = random.below(14);
            (random.below(1 << 20) << 9, (1 + random.below(1 << width)) << 9, random.below(512))
        })
        .collect();
    let (mut time, mut allocated) = (1 << 50, 0);
    let mut events = Vec::new();
    for _ in 0..n_steps {
        let mut live = Vec::new();
        for (shape, &(addr, mut bytes, waste)) in shapes.iter().enumerate() {
            if random.below(10) == 0 {
                bytes += random.below(64) << 9;
            }
            let mut event = |kind, stack| {
                time += 1_500 + random.below(6_000);
                events.push(Event { time: Nanos(time), thread: ThreadId(0), stack: StackId(stack), kind });
            };
            let (addr, device, reserved) = (0x7f12_0000_0000 + addr, 0, Bytes(12 << 30));
            allocated += bytes;
            let (requested, stream) = (Some(Bytes(bytes - waste)), Some(0));
            let (size, totals) = (Bytes(bytes), Bytes(allocated));
            event(
                EventKind::BlockAlloc(BlockAlloc {
                    device,
                    addr,
                    bytes: size,
                    requested,
                    stream,
                    allocated: totals,
                    reserved,
                }),
                0,
            );
            live.push((addr, bytes));
            if shape % 3 != 0 {
                let (addr, bytes) = live.swap_remove(shape * 7 % live.len());
                allocated -= bytes;
                let (bytes, allocated) = (Bytes(bytes), Bytes(allocated));
                event(
                    EventKind::BlockFree(BlockFree {
                        device,
                        addr,
                        bytes,
                        allocated,
                        reserved,
                        collecting: false,
                    }),
                    0,
                );
            }
        }
        for (addr, bytes) in live.into_iter().rev() {
            allocated -= bytes;
            time += 900 + random.below(3_000);
            let (bytes, allocated, reserved) = (Bytes(bytes), Bytes(allocated), Bytes(12 << 30));
            let kind = EventKind::BlockFree(BlockFree {
                device: 0,
                addr,
                bytes,
                allocated,
                reserved,
                collecting: false,
            });
            events.push(Event { time: Nanos(time), thread: ThreadId(1), stack: StackId(0), kind });
        }
    }
    events
}

#[cfg(not(miri))] // Miri runs no zstd, and without it nothing is small.
#[test]
fn an_event_of_a_training_loop_takes_at_most_14_bytes() {
    let events = training(100);
    let mut writer = Writer::new(Vec::new()).unwrap();
    for event in &events {
        writer.event(event).unwrap();
    }
    let bytes = writer.finish().unwrap();
    let per_event = bytes.len() as f64 / events.len() as f64;
    println!("{per_event:.2} bytes an event");
    assert!(per_event <= 14.0, "{per_event}");
    assert!(open(bytes).unwrap().events().eq(events));
}
