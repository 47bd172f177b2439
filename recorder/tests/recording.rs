//! Whole recordings, with producers in processes of their own: what they were told is in the ring is in the trace.
//!
//! This test is its own producer: run with [`PRODUCER`] in its environment it writes into the ring named there.

use gputrace_recorder::{Inherited, Moment, Options, Overwrite, record};
use gputrace_ring::clock::Clock;
use gputrace_ring::map::{COMPLETE, EXITING, FAILED, LOCKED, Map, NO_RECORDER, OFF, RECORDING, Writer};
use gputrace_ring::record::{self as ring, Kind, pack_device};
use gputrace_ring::ring::{Producer, Pushed, WRITING, as_words_bytes};
use gputrace_schemas::event::{Action, EventKind, Frame, LostCause, NO_DEVICE};
use gputrace_schemas::reader::Trace;
use memmap2::MmapRaw;
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Path of the ring, number of threads, records a thread (0: until killed), and what to do at the end.
const PRODUCER: &str = "GPUTRACE_TEST_PRODUCER";

/// A file in memory.
struct Mapped {
    memory: MmapRaw,
}

impl Mapped {
    fn create(path: &Path, bytes: usize) -> Mapped {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(bytes as u64).unwrap();
        Mapped { memory: MmapRaw::map_raw(&file).unwrap() }
    }

    fn open(path: &Path) -> Mapped {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        Mapped { memory: MmapRaw::map_raw(&file).unwrap() }
    }

    fn make_ring(&self, n_chunks: u32, pid: u32) -> Map {
        let pid_namespace = fs::metadata("/proc/self/ns/pid").unwrap().ino();
        let writer = Writer { pid, pid_namespace, ..Writer::default() };
        self.make_ring_of(n_chunks, writer)
    }

    fn make_ring_of(&self, n_chunks: u32, writer: Writer) -> Map {
        // SAFETY: new, zeroed by `set_len`, long enough, and leaked below.
        unsafe { Map::create(self.memory.as_mut_ptr(), n_chunks, writer, Clock::of_this_machine()) }
    }

    /// How many records each thread knows to be in the ring.
    fn counters(&self) -> &[AtomicU64] {
        assert!(self.memory.len() >= 8 * 64);
        // SAFETY: checked above; atomics may be shared between processes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<AtomicU64>(), 64) }
    }
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let parent =
            if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
        let folder = parent.join(format!("gputrace-test-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }
    fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Every record holds the same number in all its fields, so that a torn one shows.
fn numbered(thread: u64, n: u64) -> ring::BlockFree {
    let word = thread << 40 | n;
    ring::BlockFree {
        addr: word,
        device_bytes: pack_device(thread as i8, n),
        allocated: word,
        reserved: word,
        stack: 0,
    }
}

fn produce_numbers(map: Map, counters: &[AtomicU64], n_threads: u64, n_records: u64) {
    std::thread::scope(|scope| {
        for thread in 0..n_threads {
            let counter = &counters[thread as usize];
            scope.spawn(move || {
                let mut producer = Producer::new(map, tid(), tid());
                let mut n = 0;
                while n_records == 0 || n < n_records {
                    let at = producer.now();
                    if producer.push_brief(at, 0, &numbered(thread, n)) == Pushed::Yes {
                        n += 1;
                        counter.store(n, Ordering::Release);
                    } else {
                        std::thread::sleep(Duration::from_micros(300));
                    }
                }
                producer.complete();
            });
        }
    });
}

fn tid() -> u32 {
    let link = fs::read_link("/proc/thread-self").unwrap();
    link.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// Not a test of its own: what the other process runs.
#[test]
fn producer() {
    let Ok(orders) = std::env::var(PRODUCER) else { return };
    let words: Vec<&str> = orders.split(' ').collect();
    let [ring, n_threads, n_records, n_chunks] = words.as_slice() else { panic!("{orders}") };
    let counters = Mapped::open(Path::new(&format!("{ring}.counters")));
    let n_chunks = n_chunks.parse().unwrap();
    let memory = Mapped::create(Path::new(ring), Map::bytes_for(n_chunks));
    let map = memory.make_ring(n_chunks, std::process::id());
    produce_numbers(map, counters.counters(), n_threads.parse().unwrap(), n_records.parse().unwrap());
    let header = map.header();
    header.process.value.store(EXITING, Ordering::Release);
    let patience = Instant::now() + Duration::from_secs(20);
    while header.recorder.value.load(Ordering::Acquire) != COMPLETE && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The ring that a recorder of its own process is to record.
const RECORDER: &str = "GPUTRACE_TEST_RECORDER";

/// Not a test of its own: a recorder as libgputrace.so starts it.
#[test]
fn recorder() {
    let Ok(ring) = std::env::var(RECORDER) else { return };
    let _ = gputrace_recorder::daemon_main(["--ring".into(), ring.into()], |_| None);
}

/// Starts that recorder in a shell with limits.
fn start_recorder(limits: &str, ring: &Path, trace: &Path) -> Child {
    let script = format!("{limits}; exec \"$0\" --exact recorder --test-threads=1 --nocapture");
    let mut command = Command::new("sh");
    command.args(["-c", &script]).arg(std::env::current_exe().unwrap());
    command.env(RECORDER, ring).env("GPUTRACE_OUTPUT", trace);
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped()).spawn().unwrap()
}

/// A producer that does not outlive its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_producer(ring: &Path, n_threads: u64, n_records: u64, n_chunks: u32) -> (Running, Mapped) {
    let counters = Mapped::create(Path::new(&format!("{}.counters", ring.display())), 8 * 64);
    let orders = format!("{} {n_threads} {n_records} {n_chunks}", ring.display());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "producer", "--test-threads=1", "--nocapture"]).env(PRODUCER, orders);
    let child = Running(command.stdout(std::process::Stdio::null()).spawn().unwrap());
    let patience = Instant::now() + Duration::from_secs(20);
    while counters.counters().iter().all(|counter| counter.load(Ordering::Acquire) == 0) {
        assert!(Instant::now() < patience, "the producer did not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    (child, counters)
}

fn options(folder: &Folder, name: &str) -> Options {
    let output = Some(folder.join(name).display().to_string());
    Options { output, overwrite: Overwrite::Refuse, ..Options::default() }
}

/// How many numbers of each thread are in the trace: all of them from 0, in order, none torn.
fn check_numbers(trace: &Trace) -> HashMap<u64, u64> {
    assert!(trace.is_complete());
    let mut next: HashMap<u64, u64> = HashMap::new();
    let mut time = 0;
    for event in trace.events() {
        assert!(event.time.0 >= time, "events are in the order of their times");
        time = event.time.0;
        match event.kind {
            EventKind::BlockFree(free) => {
                let (thread, n) = (free.addr >> 40, free.addr & ((1 << 40) - 1));
                assert_eq!((free.allocated.0, free.reserved.0), (free.addr, free.addr), "torn");
                assert_eq!((free.device, free.bytes.0), (thread as i16, n), "torn");
                let next = next.entry(thread).or_default();
                assert_eq!(n, *next, "thread {thread}");
                *next += 1;
            }
            EventKind::Lost(lost) => assert_eq!(lost.cause, LostCause::RingFull),
            EventKind::Note(how) if how.starts_with("process.end=") => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(trace.damages(), []);
    next
}

#[test]
fn everything_that_several_threads_write_is_in_the_trace() {
    let folder = Folder::new("all");
    let ring = folder.join("ring");
    let (mut child, counters) = start_producer(&ring, 4, 300_000, 256);
    let summary = record(&ring, options(&folder, "a.gtr")).unwrap();
    assert!(child.0.wait().unwrap().success());
    let trace = Trace::open(&summary.trace).unwrap();
    let found = check_numbers(&trace);
    let written: Vec<u64> =
        (0..4).map(|thread| counters.counters()[thread].load(Ordering::Acquire)).collect();
    assert_eq!(written, [300_000; 4]);
    assert_eq!((0..4).map(|thread| found[&thread]).collect::<Vec<_>>(), written);
    assert!(!ring.exists(), "the ring is removed");
    assert_eq!(trace.process().pid, child.0.id());
    assert!(trace.process().command.iter().any(|word| word == "producer"));
    assert!(trace.modules().iter().any(|module| module.path == trace.process().executable));
    assert!(trace.mappings().next().is_some_and(|mappings| mappings.mapped.len() > 5));
    assert!(trace.threads().iter().all(|thread| !thread.name.is_empty()), "{:?}", trace.threads());
}

#[test]
fn a_killed_process_loses_nothing_that_it_had_written() {
    let folder = Folder::new("kill");
    let mut random: u64 = 88_172_645_463_325_252;
    let (mut n_events, mut n_lost) = (0, 0);
    for turn in 0..60 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let ring = folder.join(&format!("ring{turn}"));
        // Few chunks make full rings and often reused chunks.
        let (mut child, counters) =
            start_producer(&ring, 1 + turn % 4, 0, if turn % 3 == 0 { 8 } else { 128 });
        let options = options(&folder, &format!("{turn}.gtr"));
        let recording = std::thread::spawn({
            let ring = ring.clone();
            move || record(&ring, options).unwrap()
        });
        std::thread::sleep(Duration::from_micros(random % 60_000));
        child.0.kill().unwrap();
        let status = child.0.wait().unwrap();
        assert!(!status.success());
        let summary = recording.join().unwrap();
        let found = check_numbers(&Trace::open(&summary.trace).unwrap());
        for thread in 0..1 + turn % 4 {
            let known = counters.counters()[thread as usize].load(Ordering::Acquire);
            let found = found.get(&thread).copied().unwrap_or_default();
            // The record is in before the thread counts it.
            assert!(found == known || found == known + 1, "turn {turn} thread {thread}: {found} of {known}");
            n_events += found;
        }
        n_lost += summary.n_lost;
        assert_eq!(summary.n_damaged, 0);
        fs::remove_file(summary.trace).unwrap();
    }
    println!("60 kills, {n_events} events recovered, {n_lost} refused by full rings, 0 torn");
}

#[test]
fn a_ring_without_a_recorder_becomes_a_trace_afterwards() {
    let folder = Folder::new("recover");
    let ring = folder.join("ring");
    let (mut child, counters) = start_producer(&ring, 2, 0, 64);
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    let summary = record(&ring, options(&folder, "a.gtr")).unwrap();
    let found = check_numbers(&Trace::open(&summary.trace).unwrap());
    for thread in 0..2 {
        let known = counters.counters()[thread as usize].load(Ordering::Acquire);
        let found = found.get(&thread).copied().unwrap_or_default();
        assert!(found == known || found == known + 1, "{found} of {known}");
    }
}

/// A ring of this process, and a recording that ends when `end` says so.
fn recording(folder: &Folder, n_chunks: u32, write: impl FnOnce(Map)) -> Trace {
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(n_chunks));
    let map = memory.make_ring(n_chunks, std::process::id());
    let options = options(folder, "a.gtr");
    let recorder = std::thread::spawn(move || record(&ring, options).unwrap());
    while map.header().recorder.value.load(Ordering::Acquire) != RECORDING {
        std::thread::sleep(Duration::from_millis(1));
    }
    write(map);
    map.header().process.value.store(gputrace_ring::map::OFF, Ordering::Release);
    let summary = recorder.join().unwrap();
    // The memory stays mapped until here.
    drop(memory);
    Trace::open(&summary.trace).unwrap()
}

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

fn free_call(api: u16, addr: u64) -> ring::Call {
    ring::Call {
        api,
        action: ring::Action::Free as u8,
        device: -1,
        addr,
        flags: ring::Call::OPEN,
        ..Default::default()
    }
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
    let stacks: Vec<_> = trace.events().map(|event| event.stack).collect();
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
    assert!(file.ends_with("recording.rs"), "{file}");
    let module = trace.module(module.unwrap()).unwrap();
    assert_eq!(Path::new(&module.path), fs::canonicalize(std::env::current_exe().unwrap()).unwrap());
    let (function, file) = ("train.step".to_owned(), "train.py".to_owned());
    assert_eq!(**python, Frame::Python { function, file, line: 30 });
}

#[test]
fn a_process_that_is_gone_right_after_it_came_to_its_exit_has_exited() {
    for turn in 0..20 {
        let folder = Folder::new("hurries");
        let ring = folder.join("ring");
        let mut child = Running(Command::new("sleep").arg("1000").spawn().unwrap());
        let memory = Mapped::create(&ring, Map::bytes_for(16));
        let map = memory.make_ring(16, child.0.id());
        // Its child knows that it lived, even where it is gone before the first look.
        let options = Options { is_its_child: true, ..options(&folder, "a.gtr") };
        let recording = std::thread::spawn(move || record(&ring, options).unwrap());
        while map.header().recorder.value.load(Ordering::Acquire) != RECORDING {
            std::thread::sleep(Duration::from_millis(1));
        }
        // At various moments of the recorder's turn.
        std::thread::sleep(Duration::from_micros(317 * turn));
        map.header().process.value.store(EXITING, Ordering::Release);
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        let trace = Trace::open(&recording.join().unwrap().trace).unwrap();
        let notes: Vec<_> = trace.events().map(|event| event.kind).collect();
        assert_eq!(notes, [EventKind::Note("process.end=exit".to_owned())]);
    }
}

#[test]
fn what_other_threads_write_after_the_end_was_announced_follows() {
    let folder = Folder::new("late");
    let trace = recording(&folder, 16, |map| {
        let mut producer = Producer::new(map, tid(), tid());
        producer.push_brief(producer.now(), 0, &numbered(0, 0));
        map.header().process.value.store(EXITING, Ordering::Release);
        while map.header().recorder.value.load(Ordering::Acquire) != COMPLETE {
            std::thread::sleep(Duration::from_millis(1));
        }
        let early = Trace::open(folder.join("a.gtr")).unwrap();
        assert!(early.is_complete(), "the program may end now, and its trace is whole");
        assert_eq!(check_numbers(&early)[&0], 1);
        producer.push_brief(producer.now(), 0, &numbered(0, 1));
        producer.complete();
    });
    assert_eq!(check_numbers(&trace)[&0], 2);
}

/// What [`answered`] was told: which failure, and how many events and out-of-memory errors the trace had by then.
static ANSWERS: std::sync::Mutex<Vec<(u64, bool, usize, usize)>> = std::sync::Mutex::new(Vec::new());

fn answered(oom: &gputrace_recorder::Oom) -> Option<gputrace_recorder::FollowUp> {
    let trace = Trace::open_prefix(&oom.trace, oom.length);
    let kinds: Vec<EventKind> = trace.iter().flat_map(|it| it.events().map(|event| event.kind)).collect();
    let n_ooms = kinds.iter().filter(|kind| matches!(kind, EventKind::BlockOom(_))).count();
    ANSWERS.lock().unwrap().push((oom.nth, oom.full, kinds.len(), n_ooms));
    None
}

#[test]
fn who_answers_for_memory_that_ran_out_sees_the_trace_up_to_there() {
    let folder = Folder::new("oom");
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(16));
    let map = memory.make_ring(16, std::process::id());
    let options = Options { on_oom: Some(answered), ..options(&folder, "a.gtr") };
    let recording = std::thread::spawn(move || record(&ring, options).unwrap());
    let mut producer = Producer::new(map, tid(), tid());
    let n_answers = || ANSWERS.lock().unwrap().len();
    for n in 1..=5 {
        producer.push_brief(producer.now(), 0, &numbered(0, n));
        let oom = ring::BlockOom { device_bytes: pack_device(0, 1 << 40), ..ring::BlockOom::default() };
        let began = Instant::now();
        producer.push(producer.now(), 0, &oom);
        while n_answers() < n as usize && n < 5 {
            assert!(began.elapsed() < Duration::from_secs(10), "no answer to failure {n}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    producer.complete();
    map.header().process.value.store(OFF, Ordering::Release);
    recording.join().unwrap();
    let answers = ANSWERS.lock().unwrap().clone();
    // Each failure comes with a note that there is no NVML to ask; the fifth came too soon after the fourth.
    assert_eq!(answers, [(1, true, 3, 1), (2, true, 6, 2), (3, true, 9, 3), (4, false, 0, 0)]);
}

#[test]
fn a_trace_that_exists_is_not_overwritten_and_the_program_is_told() {
    let folder = Folder::new("exists");
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(4));
    let map = memory.make_ring(4, std::process::id());
    fs::write(folder.join("a.gtr"), "precious").unwrap();
    // Whatever was written before the job began is not a sibling's.
    let realtime = std::time::SystemTime::now() + Duration::from_secs(60);
    let job_began = Some(Moment { realtime, monotonic: 0 });
    let options = Options { job_began, ..options(&folder, "a.gtr") };
    let error = record(&ring, options).unwrap_err().to_string();
    assert!(error.ends_with("a.gtr exists; choose another name with -o, or overwrite it with -f"), "{error}");
    assert_eq!(fs::read_to_string(folder.join("a.gtr")).unwrap(), "precious");
    assert_eq!(map.header().recorder.value.load(Ordering::Acquire), FAILED);
}

#[test]
fn a_file_that_is_no_ring_is_refused() {
    let folder = Folder::new("no-ring");
    let refuse = |bytes: usize| {
        let ring = folder.join("ring");
        fs::write(&ring, vec![7; bytes]).unwrap();
        let error = record(&ring, options(&folder, "a.gtr")).unwrap_err().to_string();
        error.split_once("that can be read: ").unwrap().1.to_owned()
    };
    let short = format!(
        "it is shorter than the {} bytes it should have; its process died while making it, and nothing is lost",
        Map::bytes_for(1)
    );
    assert_eq!(refuse(100), short);
    assert_eq!(
        refuse(Map::bytes_for(1)),
        "it does not begin as a ring does; if its process died while making it, nothing is lost"
    );
}

#[test]
fn random_bytes_in_the_ring_give_a_trace_and_never_a_panic() {
    for seed in 1..40_u64 {
        let folder = Folder::new(&format!("random{seed}"));
        let ring = folder.join("ring");
        let n_chunks = 6;
        let memory = Mapped::create(&ring, Map::bytes_for(n_chunks));
        // A pid that no process has.
        let map = memory.make_ring(n_chunks, 0x7fff_fff0);
        let mut random = seed;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random
        };
        let mut bytes = fs::read(&ring).unwrap();
        let from = if seed % 2 == 0 {
            bytes.len() - n_chunks as usize * gputrace_ring::map::CHUNK_BYTES
        } else {
            64
        };
        for word in bytes[from..].chunks_mut(8) {
            let value = match next() % 4 {
                // A plausible record header or chunk state.
                0 => (next() % 12) | ((next() % 28) << 16) | ((next() % 1000) << 32),
                1 => (next() % 4) | ((next() % 4) << 32),
                2 => 0,
                _ => next(),
            };
            word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
        }
        fs::write(&ring, &bytes).unwrap();
        for chunk in 0..n_chunks {
            map.state(chunk).store(2 + chunk % 2, Ordering::Relaxed);
        }
        let summary = record(&ring, options(&folder, "a.gtr")).unwrap();
        let trace = Trace::open(&summary.trace).unwrap();
        assert!(trace.is_complete());
        assert_eq!(trace.events().count() as u64, summary.n_events, "seed {seed}");
    }
}

/// A thread of this number, on the line that it takes in an empty ring.
fn on_line(map: Map, number: u32) -> Producer {
    Producer::new(map, number, number)
}

/// A ring with one record, left in the middle of its only chunk by a process that no one has.
fn left_behind(folder: &Folder, writer: Writer) -> (PathBuf, Mapped, Map) {
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(4));
    let map = memory.make_ring_of(4, writer);
    let mut producer = on_line(map, 7);
    assert_eq!(producer.push_brief(producer.now(), 0, &numbered(0, 0)), Pushed::Yes);
    (ring, memory, map)
}

fn own_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").unwrap().ino()
}

/// What nobody has: the largest number of a process is 2^22 (proc(5), pid_max).
const NOBODY: u32 = 0x7fff_fff0;

#[test]
fn a_ring_that_is_kept_gives_the_same_again() {
    let folder = Folder::new("twice");
    let writer = Writer { pid: NOBODY, pid_namespace: own_namespace(), start_time: 0 };
    let (ring, _memory, map) = left_behind(&folder, writer);
    let mut other = on_line(map, 8);
    // Complete chunks are left as they are, too.
    for n in 0..600 {
        assert_eq!(other.push_brief(other.now(), 0, &numbered(1, n)), Pushed::Yes);
    }
    let states = || -> Vec<u32> { (0..4).map(|chunk| map.state(chunk).load(Ordering::Acquire)).collect() };
    let before = states();
    assert!(before.contains(&gputrace_ring::ring::COMPLETE), "{before:?}");
    for turn in ["a.gtr", "b.gtr"] {
        let summary = record(&ring, Options { keep_ring: true, ..options(&folder, turn) }).unwrap();
        let found = check_numbers(&Trace::open(&summary.trace).unwrap());
        assert_eq!(found, HashMap::from([(0, 1), (1, 600)]), "{turn}");
        assert_eq!(states(), before, "{turn}");
        let owners = [7, 8].map(|line| map.thread(line).tid.load(Ordering::Acquire));
        assert_eq!(owners, [7, 8], "{turn}");
    }
    record(&ring, options(&folder, "c.gtr")).unwrap();
    assert!(!ring.exists());
}

#[test]
fn a_ring_of_another_namespace_is_read_only_when_its_process_is_known_to_be_gone() {
    let folder = Folder::new("elsewhere");
    let writer = Writer { pid: 1, pid_namespace: own_namespace() + 1, start_time: 0 };
    let (ring, _memory, map) = left_behind(&folder, writer);
    let refused = |is: &str| {
        let error = record(&ring, options(&folder, "a.gtr")).unwrap_err().to_string();
        assert!(error.contains(is) && error.contains("--process-is-gone"), "{error}");
        assert_eq!(map.header().recorder.value.load(Ordering::Acquire), NO_RECORDER, "nothing is changed");
        assert!(ring.exists() && !folder.join("a.gtr").exists());
    };
    refused("may be alive");
    // What the process's mapping holds: another open file description than the recorder's.
    let file = OpenOptions::new().read(true).open(&ring).unwrap();
    map.header().lock.store(LOCKED, Ordering::Relaxed);
    read_lock(&file);
    refused("is alive");
    drop(file);
    let summary = record(&ring, Options { keep_ring: true, ..options(&folder, "a.gtr") }).unwrap();
    assert_eq!(check_numbers(&Trace::open(&summary.trace).unwrap()), HashMap::from([(0, 1)]));
    map.header().lock.store(0, Ordering::Relaxed);
    let told = Options { process_is_gone: true, ..options(&folder, "b.gtr") };
    let summary = record(&ring, told).unwrap();
    assert_eq!(check_numbers(&Trace::open(&summary.trace).unwrap()), HashMap::from([(0, 1)]));
}

/// As libgputrace.so takes it.
fn read_lock(file: &fs::File) {
    // SAFETY: all zeros are a value of this structure: the whole file.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_RDLCK as libc::c_short;
    // SAFETY: the descriptor is ours, and the kernel reads the structure.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }, 0);
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
    // All but the last owner of that line have a successor.
    assert_eq!(calls().collect::<Vec<_>>(), (0..N_OWNERS - 1).map(|n| (n << 12, None)).collect::<Vec<_>>());
    assert_eq!(trace.threads().iter().filter(|thread| thread.tid == 5).count() as u64, N_OWNERS);
}

/// What the process may still use, however it looks from outside.
#[test]
fn a_process_that_cannot_be_seen_is_alive_and_keeps_its_lines_and_chunks() {
    let folder = Folder::new("unseen");
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(8));
    // Nothing in `/proc` has this number: as with hidepid, or where the recorder has no descriptors left.
    let map = memory.make_ring(8, NOBODY);
    let process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mut process = Running(process);
    let descriptor = descriptor_of(&process.0);
    let shared = OpenOptions::new().read(true).write(true).open(&ring).unwrap().into_raw_fd();
    let inherited = Inherited { ring: Some(shared), process: Some(descriptor) };
    let orders = Options { inherited, is_its_child: true, ..options(&folder, "a.gtr") };
    let recorder = std::thread::spawn({
        let ring = ring.clone();
        move || record(&ring, orders).unwrap()
    });
    let mut producer = on_line(map, 7);
    for n in 0..10 {
        assert_eq!(producer.push_brief(producer.now(), 0, &numbered(0, n)), Pushed::Yes);
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(map.thread(7).tid.load(Ordering::Acquire), 7);
        assert_eq!(map.state(0).load(Ordering::Acquire), WRITING);
        assert!(!recorder.is_finished());
    }
    process.0.kill().unwrap();
    let summary = recorder.join().unwrap();
    assert_eq!(check_numbers(&Trace::open(&summary.trace).unwrap()), HashMap::from([(0, 10)]));
    assert!(!ring.exists());
}

fn descriptor_of(child: &Child) -> i32 {
    // SAFETY: takes two numbers, and gives a new descriptor.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    assert!(descriptor >= 0, "{}", std::io::Error::last_os_error());
    descriptor as i32
}

#[test]
fn a_ring_is_recorded_by_its_descriptor_whatever_its_name_leads_to() {
    let folder = Folder::new("descriptor");
    let writer = Writer { pid: NOBODY, pid_namespace: own_namespace(), start_time: 0 };
    let (ring, _memory, _map) = left_behind(&folder, writer);
    let shared = OpenOptions::new().read(true).write(true).open(&ring).unwrap().into_raw_fd();
    // The name is gone, and another file has it.
    fs::rename(&ring, folder.join("moved")).unwrap();
    fs::write(&ring, "precious").unwrap();
    let inherited = Inherited { ring: Some(shared), process: None };
    let orders = Options { inherited, is_its_child: true, keep_ring: true, ..options(&folder, "a.gtr") };
    let summary = record(&ring, orders).unwrap();
    assert_eq!(check_numbers(&Trace::open(&summary.trace).unwrap()), HashMap::from([(0, 1)]));
    assert_eq!(fs::read_to_string(&ring).unwrap(), "precious");
}

#[test]
fn a_ring_that_is_cut_ends_the_trace_and_nothing_else() {
    let folder = Folder::new("cut");
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(64));
    let map = memory.make_ring(64, std::process::id());
    let orders = options(&folder, "a.gtr");
    let recorder = std::thread::spawn({
        let ring = ring.clone();
        move || record(&ring, orders).unwrap()
    });
    let mut producer = on_line(map, 7);
    for n in 0..1000 {
        assert_eq!(producer.push_brief(producer.now(), 0, &numbered(0, n)), Pushed::Yes);
    }
    // Until it has been read.
    while map.state(0).load(Ordering::Acquire) != gputrace_ring::ring::FREE {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(100));
    OpenOptions::new().write(true).open(&ring).unwrap().set_len(0).unwrap();
    let summary = recorder.join().unwrap();
    let trace = Trace::open(&summary.trace).unwrap();
    assert!(trace.is_complete());
    let notes = trace.events().filter_map(|event| match event.kind {
        EventKind::Note(text) => Some(text),
        _ => None,
    });
    assert_eq!(notes.filter(|note| note.starts_with("ring.cut")).count(), 1);
    let n_read = trace.events().filter(|event| matches!(event.kind, EventKind::BlockFree(_))).count();
    assert!((500..=1000).contains(&n_read), "{n_read}");
}

#[test]
fn what_is_no_ring_of_ours_is_not_even_opened() {
    let folder = Folder::new("not-ours");
    let refuse = |ring: &Path, what: &str| {
        let error = record(ring, options(&folder, "a.gtr")).unwrap_err();
        let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
        assert!(format!("{error}{cause}").contains(what), "{error}{cause}");
    };
    let fifo = folder.join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // Nobody writes to it: opening it would wait for ever.
    refuse(&fifo, "no regular file");
    refuse(Path::new("/dev/null"), "no regular file");
    refuse(&folder.0, "no regular file");
    let writer = Writer { pid: NOBODY, pid_namespace: own_namespace(), start_time: 0 };
    let (ring, _memory, _map) = left_behind(&folder, writer);
    let link = folder.join("link");
    std::os::unix::fs::symlink(&ring, &link).unwrap();
    refuse(&link, "symbolic link");
    if std::os::unix::fs::chown(&ring, Some(12345), None).is_err() {
        return gputrace_skip::skip("a ring of another user", "only root can give a file to somebody else");
    }
    let us = fs::metadata(&folder.0).unwrap().uid();
    refuse(&ring, &format!("belongs to user 12345, and this is user {us}"));
}

/// What a recorder under limits makes of a living process that writes 200,000 records and ends.
fn recorded_under(limits: &str, name: &str) -> (std::process::Output, Option<Trace>) {
    let folder = Folder::new(name);
    let (ring, trace) = (folder.join("ring"), folder.join("a.gtr"));
    let (mut producer, _counters) = start_producer(&ring, 2, 200_000, 256);
    let recorder = start_recorder(limits, &ring, &trace);
    assert!(producer.0.wait().unwrap().success());
    let output = recorder.wait_with_output().unwrap();
    (output, Trace::open(&trace).ok())
}

#[test]
fn a_limit_on_the_length_of_files_ends_the_trace_and_not_the_recorder() {
    use std::os::unix::process::ExitStatusExt;
    // Blocks of 512 bytes.
    let (output, trace) = recorded_under("ulimit -f 100", "fsize");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.signal(), None, "{said}");
    assert!(said.contains("File too large") && said.contains("what is written stays readable"), "{said}");
    let trace = trace.expect("it is readable up to there");
    let n_read = trace.events().filter(|event| matches!(event.kind, EventKind::BlockFree(_))).count();
    assert!(n_read < 400_000, "{n_read}");
    assert_eq!(trace.damages(), []);
}

#[test]
fn a_recorder_with_hardly_any_descriptors_records_everything() {
    // Three streams, the ring, the process, the trace: nothing is left for `/proc`.
    let (output, trace) = recorded_under("ulimit -n 6", "nofile");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let trace = trace.unwrap_or_else(|| panic!("{said}"));
    assert_eq!(check_numbers(&trace), HashMap::from([(0, 200_000), (1, 200_000)]), "{said}");
}
