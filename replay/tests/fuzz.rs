//! Hostile files: any bytes give a trace or a clear error, never a panic, and never much memory.
//!
//! `GPUTRACE_FUZZ_SECONDS` says for how long random files are tried (1 without it, a minute in CI), `GPUTRACE_FUZZ_SEED` which
//! ones. A file that fails stays where the message says.

use std::io::{Cursor, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gputrace_replay::import::load;
use gputrace_schemas::event::{
    Action, Api, ApiId, Bytes, Call, CommId, Device, Event, EventKind, Nanos, Process, StackId, ThreadId,
};
use gputrace_schemas::writer::Writer;
use gputrace_sim::ops::History;
use gputrace_sim::policies::{Build, by_name};
use gputrace_sim::whatif::Laboratory;

/// More than this in use at once, and a file has made the reader wasteful, MiB.
const MOST_RESIDENT: u64 = 700;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, end: u64) -> u64 {
        (self.next() >> 11) % end.max(1)
    }

    fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    /// Any width, and the ends of the range more often than chance.
    fn wild(&mut self) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << 63,
            3 => i64::MAX as u64,
            _ => self.next() >> self.below(64),
        }
    }
}

// Pickles.

fn integer(value: u64, out: &mut Vec<u8>) {
    out.extend([0x8a, 8]);
    out.extend(value.to_le_bytes());
}

fn text(text: &str, out: &mut Vec<u8>) {
    out.extend([0x8c, text.len() as u8]);
    out.extend(text.as_bytes());
}

fn dictionary(items: &[(&str, u64)], out: &mut Vec<u8>) {
    out.extend(b"}(");
    for (key, value) in items {
        text(key, out);
        integer(*value, out);
    }
    out.push(b'u');
}

const ACTIONS: [&str; 12] = [
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
    "annotate",
    "free",
    "rubbish",
];

/// A snapshot in shape, with entries that may make sense.
fn snapshot(random: &mut Random) -> Vec<u8> {
    let out = &mut vec![0x80, 4];
    out.extend(b"}(");
    text("segments", out);
    out.extend(b"](");
    let number =
        |random: &mut Random, sensible: u64| if random.below(30) == 0 { random.wild() } else { sensible };
    let base = 0x7f00_0000_0000u64;
    for _ in 0..random.below(4) {
        let (at, size) = (base + random.below(8) * (20 << 20), (1 + random.below(10)) << 21);
        out.extend(b"}(");
        for (key, value) in [("device", 0), ("address", at), ("total_size", size), ("stream", 0)] {
            text(key, out);
            integer(number(random, value), out);
        }
        text("blocks", out);
        out.extend(b"](");
        for _ in 0..random.below(4) {
            let (size, requested) = (random.below(1 << 21), random.below(1 << 21));
            dictionary(&[("size", number(random, size)), ("requested_size", requested)], out);
            text("state", out);
            text(random.pick(&["active_allocated", "inactive", "active_pending_free", "?"]), out);
            out.push(b's');
        }
        out.extend(b"eu");
    }
    out.push(b'e');
    text("device_traces", out);
    out.extend(b"](](");
    for _ in 0..random.below(60) {
        let (at, size) = (base + random.below(64) * (2 << 20), (1 + random.below(64)) << 14);
        out.extend(b"}(");
        text("action", out);
        text(random.pick(&ACTIONS), out);
        for (key, value) in [("addr", at), ("size", size), ("stream", random.below(3)), ("time_us", 5)] {
            text(key, out);
            integer(number(random, value), out);
        }
        out.push(b'u');
    }
    out.extend(b"eeu.");
    out.clone()
}

/// Instructions in any order, with arguments.
fn instructions(random: &mut Random) -> Vec<u8> {
    let mut out = vec![0x80, random.pick(&[2, 3, 4, 5])];
    for _ in 0..random.below(200) {
        match random.below(16) {
            0..=2 => integer(random.wild(), &mut out),
            3..=5 => text(
                random.pick(&["segments", "device_traces", "action", "alloc", "filename", "addr"]),
                &mut out,
            ),
            6 => out.extend([b'q', random.below(8) as u8]),
            7 => out.extend([b'h', random.below(8) as u8]),
            8 => {
                out.push(random.pick(&[0x8d, 0x8e, 0x95, 0x96]));
                out.extend(random.wild().to_le_bytes());
            }
            9 => {
                out.push(random.pick(b"XBrjJT\x8b"));
                out.extend((random.wild() as u32).to_le_bytes());
            }
            _ => out.push(random.pick(b"}](.)tasuedl012N\x85\x86\x87\x88\x89\x94cRobi\x81\x92\x93P\x82")),
        }
    }
    out.push(b'.');
    out
}

/// Changes, doubles, drops or joins parts of a file.
fn mutate(random: &mut Random, bytes: &mut Vec<u8>, other: &[u8]) {
    for _ in 0..1 + random.below(6) {
        if bytes.is_empty() {
            return;
        }
        let at = random.index(bytes.len());
        let end = (at + random.index(64)).min(bytes.len());
        match random.below(7) {
            0 => bytes[at] = random.next() as u8,
            1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes.truncate(at),
            3 => drop(bytes.drain(at..end)),
            4 => {
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            5 if !other.is_empty() => {
                let from = random.index(other.len());
                let to = (from + random.index(256)).min(other.len());
                bytes.splice(at..at, other[from..to].iter().copied());
            }
            _ => {
                let wild = random.wild().to_le_bytes();
                let n = wild.len().min(bytes.len() - at);
                bytes[at..at + n].copy_from_slice(&wild[..n]);
            }
        }
    }
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

// Traces of gputrace.

/// A valid trace with calls that may make sense.
fn trace(random: &mut Random) -> Vec<u8> {
    let mut writer = Writer::new(Cursor::new(Vec::new())).unwrap();
    writer.process(&Process::default());
    writer.device(&Device::default());
    writer.api(ApiId(1), &Api { name: "cuMemAlloc_v2".into(), ..Api::default() });
    for time in 0..random.below(80) {
        let call = Call {
            api: ApiId(random.below(3) as u32),
            action: random.pick(Action::ALL),
            device: if random.below(20) == 0 { random.wild() as i16 } else { 0 },
            result: Some(if random.below(10) == 0 { 2 } else { 0 }),
            addr: 0x7f00_0000_0000 + random.below(16) * (2 << 20),
            bytes: Bytes(if random.below(20) == 0 { random.wild() } else { random.below(8 << 20) }),
            stream: random.below(3),
            handle: random.below(6),
            extra: random.below(6),
            duration: Nanos(5),
            captured: false,
            comm: CommId(0),
            nccl_call: 0,
            nccl_thread: false,
            in_allocate: false,
        };
        let event = Event {
            time: Nanos(if random.below(30) == 0 { random.wild() } else { time * 10 }),
            thread: ThreadId(random.below(2) as u32),
            stack: StackId(0),
            kind: EventKind::Call(call),
        };
        writer.event(&event).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

// The trial.

/// Reads a file in every way that a verb would. Whether it was taken for a trace.
fn try_file(path: &Path) -> bool {
    let trace = match load(path) {
        Ok(trace) => trace,
        Err(error) => {
            let said = error.to_string();
            assert!(
                said.contains(path.file_name().unwrap().to_str().unwrap()),
                "the error names no file: {said}"
            );
            return false;
        }
    };
    for stream in &trace.devices {
        if let Ok(laboratory) = Laboratory::new(stream) {
            laboratory.self_check(Some((2, 11)));
        } else {
            assert!(matches!(stream.history, History::Broken(_)));
        }
    }
    true
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) >> 10
}

fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn setting(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[test]
fn random_files_give_an_answer() {
    let seconds = setting("GPUTRACE_FUZZ_SECONDS", 1);
    let seed = setting("GPUTRACE_FUZZ_SEED", 1);
    let started = Instant::now();
    let (mut n_files, mut n_read) = (0u64, 0u64);
    while started.elapsed() < Duration::from_secs(seconds) {
        let random = &mut Random((seed << 32) + n_files + 1);
        for _ in 0..8 {
            random.next();
        }
        let other = snapshot(random);
        let mut bytes = match random.below(4) {
            0 => instructions(random),
            1 => trace(random),
            _ => other.clone(),
        };
        if random.below(8) > 0 {
            mutate(random, &mut bytes, &other);
        }
        if random.below(10) == 0 {
            bytes = gzip(&bytes);
            if random.below(4) == 0 {
                mutate(random, &mut bytes, &[]);
            }
        }
        let path = file("fuzz.case", &bytes);
        n_read += u64::from(try_file(&path));
        n_files += 1;
    }
    println!("{n_files} files, {n_read} of them read, at most {} MiB", resident_mib());
    assert!(
        n_read > 0 && n_read < n_files,
        "{n_read} of {n_files} were read: the files are not what they should be"
    );
    assert!(resident_mib() < MOST_RESIDENT, "{} MiB", resident_mib());
}

#[test]
fn what_is_known_to_be_hostile_is_refused_with_the_reason() {
    let repeated = |part: &[u8], n: usize| [b"\x80\x04", part.repeat(n).as_slice(), b"."].concat();
    let length = |opcode: u8| [&[0x80, 4, opcode][..], &(1u64 << 63).to_le_bytes(), b"."].concat();
    let cases: Vec<(&str, Vec<u8>, &str)> = vec![
        ("global", b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.".to_vec(), "would run code"),
        ("stack_global", b"\x80\x04\x8c\x02os\x8c\x06system\x93.".to_vec(), "would run code"),
        ("inst", b"\x80\x02(ios\nsystem\n.".to_vec(), "would run code"),
        ("reduce", b"\x80\x02NNR.".to_vec(), "would run code"),
        ("text of 2^63 bytes", length(0x8d), "9223372036854775808 bytes"),
        ("bytes of 2^63", length(0x8e), "9223372036854775808 bytes"),
        ("a list in itself", b"\x80\x02]q\x00h\x00a.".to_vec(), "memory snapshot"),
        (
            "a million lists in one another",
            [repeated(b"]", 1_000_000), b"a".repeat(999_999), b".".to_vec()].concat(),
            "",
        ),
        ("twenty million marks", gzip(&repeated(b"(", 20_000_000)), "too many for a file of its size"),
        ("ten million lists", gzip(&repeated(b"]0", 10_000_000)), "too many for a file of its size"),
        (
            "one list of ten million",
            gzip(&[b"\x80\x04]", b"Na".repeat(10_000_000).as_slice(), b"."].concat()),
            "too many",
        ),
        ("a memo that jumps", memo_that_jumps(), "too many for a file of its size"),
        ("nothing", Vec::new(), "truncated"),
    ];
    for (name, bytes, reason) in cases {
        let path = file("hostile.pickle", &bytes);
        let error = load(&path).map(|_| ()).expect_err(name).to_string();
        assert!(error.contains("hostile.pickle") && error.contains(reason), "{name}: {error}");
    }
    assert!(resident_mib() < 2 * MOST_RESIDENT, "{} MiB", resident_mib());
}

fn memo_that_jumps() -> Vec<u8> {
    let mut bytes = b"\x80\x04N".to_vec();
    for jump in 1..4000u32 {
        bytes.push(b'r');
        bytes.extend((jump * 60_000).to_le_bytes());
    }
    bytes
}

#[test]
fn every_policy_says_what_it_does_not_understand() {
    for entry in gputrace_sim::policies::POLICIES {
        let build =
            Build { options: "no_such=1", torch_version: (2, 11), n_streams: 1, n_pools: 1, profile: None };
        let error = (by_name(entry.name).unwrap().build)(build).err().expect(entry.name);
        assert!(error.to_string().contains("no_such"), "{}: {error}", entry.name);
    }
}
