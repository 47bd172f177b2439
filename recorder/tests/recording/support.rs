//! A ring in memory, processes that write into it, and what a trace of numbered records must hold.

use gputrace_recorder::{Error, Options, Overwrite, Summary, record};
use gputrace_ring::clock::Clock;
use gputrace_ring::map::{Map, RECORDING, Writer};
use gputrace_ring::record::{self as ring, pack_device};
use gputrace_ring::ring::{Producer, Pushed};
use gputrace_schemas::event::{EventKind, LostCause};
use gputrace_schemas::reader::Trace;
use memmap2::MmapRaw;
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Path of the ring, number of threads, records a thread (0: until killed), and what to do at the end.
pub(crate) const PRODUCER: &str = "GPUTRACE_TEST_PRODUCER";

/// A file in memory.
pub(crate) struct Mapped {
    pub(crate) memory: MmapRaw,
}

impl Mapped {
    pub(crate) fn create(path: &Path, bytes: usize) -> Mapped {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(bytes as u64).unwrap();
        Mapped { memory: MmapRaw::map_raw(&file).unwrap() }
    }

    pub(crate) fn open(path: &Path) -> Mapped {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        Mapped { memory: MmapRaw::map_raw(&file).unwrap() }
    }

    pub(crate) fn make_ring(&self, n_chunks: u32, pid: u32) -> Map {
        let pid_namespace = fs::metadata("/proc/self/ns/pid").unwrap().ino();
        let writer = Writer { pid, pid_namespace, ..Writer::default() };
        self.make_ring_of(n_chunks, writer)
    }

    pub(crate) fn make_ring_of(&self, n_chunks: u32, writer: Writer) -> Map {
        // SAFETY: new, zeroed by `set_len`, long enough, and leaked below.
        unsafe { Map::create(self.memory.as_mut_ptr(), n_chunks, writer, Clock::of_this_machine()) }
    }

    /// How many records each thread knows to be in the ring.
    pub(crate) fn counters(&self) -> &[AtomicU64] {
        assert!(self.memory.len() >= 8 * 64);
        // SAFETY: checked above; atomics may be shared between processes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<AtomicU64>(), 64) }
    }
}

pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Folder {
        let parent =
            if Path::new("/dev/shm").is_dir() { PathBuf::from("/dev/shm") } else { std::env::temp_dir() };
        let folder = parent.join(format!("gputrace-test-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Every record holds the same number in all its fields, so that a torn one shows.
pub(crate) fn numbered(thread: u64, n: u64) -> ring::BlockFree {
    let word = thread << 40 | n;
    ring::BlockFree {
        addr: word,
        device_bytes: pack_device(thread as i8, n),
        allocated: word,
        reserved: word,
        stack: 0,
    }
}

pub(crate) fn produce_numbers(map: Map, counters: &[AtomicU64], n_threads: u64, n_records: u64) {
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

pub(crate) fn tid() -> u32 {
    let link = fs::read_link("/proc/thread-self").unwrap();
    link.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

/// A producer that does not outlive its test.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub(crate) fn start_producer(
    ring: &Path,
    n_threads: u64,
    n_records: u64,
    n_chunks: u32,
) -> (Running, Mapped) {
    let counters = Mapped::create(Path::new(&format!("{}.counters", ring.display())), 8 * 64);
    let orders = format!("{} {n_threads} {n_records} {n_chunks}", ring.display());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "producer", "--test-threads=1", "--nocapture"]).env(PRODUCER, orders);
    let child = Running(command.stdout(std::process::Stdio::null()).spawn().unwrap());
    let patience = Instant::now() + Duration::from_secs(300);
    while counters.counters().iter().all(|counter| counter.load(Ordering::Acquire) == 0) {
        assert!(Instant::now() < patience, "the producer did not begin");
        std::thread::sleep(Duration::from_millis(1));
    }
    (child, counters)
}

pub(crate) fn options(folder: &Folder, name: &str) -> Options {
    let output = Some(folder.join(name).display().to_string());
    Options { output, overwrite: Overwrite::Refuse, ..Options::default() }
}

/// Records a ring that this process had open before. What another test starts meanwhile has copies of our open files, and so their
/// locks, until it has become its program; on a busy machine that takes a while.
pub(crate) fn record_again(ring: &Path, options: &Options) -> Result<Summary, Error> {
    let until = Instant::now() + Duration::from_secs(300);
    loop {
        match record(ring, options.clone()) {
            Err(Error::Busy { .. } | Error::Elsewhere { is: "is alive", .. }) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            answer => return answer,
        }
    }
}

/// How many numbers of each thread are in the trace: all of them from 0, in order, none torn.
pub(crate) fn check_numbers(trace: &Trace) -> HashMap<u64, u64> {
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
            // How and when the process ended, and that it was gone before its mappings could be read.
            EventKind::Note(note)
                if ["process.", "mappings=unread"].iter().any(|it| note.starts_with(it)) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(trace.damages(), []);
    next
}

/// A ring of this process, and a recording that ends when `end` says so.
pub(crate) fn recording(folder: &Folder, n_chunks: u32, write: impl FnOnce(Map)) -> Trace {
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

pub(crate) fn free_call(api: u16, addr: u64) -> ring::Call {
    ring::Call {
        api,
        action: ring::Action::Free as u8,
        device: -1,
        addr,
        flags: ring::Call::OPEN,
        ..Default::default()
    }
}

/// A thread of this number, on the line that it takes in an empty ring.
pub(crate) fn on_line(map: Map, number: u32) -> Producer {
    Producer::new(map, number, number)
}

/// A ring with one record, left in the middle of its only chunk by a process that no one has.
pub(crate) fn left_behind(folder: &Folder, writer: Writer) -> (PathBuf, Mapped, Map) {
    let ring = folder.join("ring");
    let memory = Mapped::create(&ring, Map::bytes_for(4));
    let map = memory.make_ring_of(4, writer);
    let mut producer = on_line(map, 7);
    assert_eq!(producer.push_brief(producer.now(), 0, &numbered(0, 0)), Pushed::Yes);
    (ring, memory, map)
}

pub(crate) fn own_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").unwrap().ino()
}

/// What nobody has: the largest number of a process is 2^22 (proc(5), pid_max).
pub(crate) const NOBODY: u32 = 0x7fff_fff0;
