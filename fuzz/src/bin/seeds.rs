//! Writes what the corpora begin with, below the folder that is named: made from the golden traces and by small generators.
//!
//!     seeds FOLDER GOLDEN

use gputrace_fuzz::{blocks, seed};
use gputrace_replay::reduce::{Summary, reduce};
use gputrace_replay::trace::source::Source;
use gputrace_ring::record::Kind;
use gputrace_schemas::event::{
    Action, Api, ApiId, Bytes, Call, CommId, Device, Event, EventKind, Nanos, Process, StackId, ThreadId,
};
use gputrace_schemas::reader::Trace;
use gputrace_schemas::writer::Writer;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Events that are kept of a golden trace: more would make each run slow, and show nothing new.
const MOST_EVENTS: usize = 100;

fn main() {
    let arguments: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [folder, golden] = arguments.as_slice() else { panic!("usage: seeds FOLDER GOLDEN") };
    traces(&folder.join("trace_reader"), golden);
    rings(&folder.join("ring_reader"));
    pickles(&folder.join("pickle"));
    let lines = "7,15:47:02:841961,allocate,0x10012400000,1048576,0\n7,1,allocate failure,(nil),99,0x2\n\
                 7,1,deallocate,0x1,512,0\n\n7,1,free,0x10012400000,1048576,0x0\n";
    seed(&folder.join("rmm_log"), "lines", lines.as_bytes());
    options(&folder.join("options"));
    simulator(&folder.join("simulator"));
    symbol_files(&folder.join("symbol_files"));
    foreign_images(&folder.join("foreign_image"));
    summaries(&folder.join("summary"), golden);
    requests(&folder.join("http_request"));
    upload_states(&folder.join("upload_state"));
}

/// What browsers, Prometheus and curl send, and what they should not.
fn requests(folder: &Path) {
    let requests = [
        ("curl", "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9464\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n"),
        (
            "browser",
            "GET /0123/details?trace=0&from=1&to=2 HTTP/1.1\r\nHost: localhost:80\r\nOrigin: http://localhost:80\r\n\
             Sec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\nSec-Fetch-Dest: empty\r\n\r\n",
        ),
        ("whole", "GET http://[::1]:80/metrics?x HTTP/1.0\r\nhost: node17\r\n\r\n"),
        ("two", "HEAD / HTTP/1.1\r\nHost: a.\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
        ("chunks", "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("length", "GET / HTTP/1.1\r\nHost: a:1\r\nContent-Length: 0\r\nX: \u{fc}\t\r\n\r\n"),
    ];
    requests.iter().for_each(|(name, request)| seed(folder, name, request.as_bytes()));
}

/// Uploads of which nothing, and two parts, were sent.
fn upload_states(folder: &Path) {
    for (name, parts) in [("none", ""), ("two", r#"["\"9b2cf535f27731c974343645a3985328\"",1],["AAAA",4294967295]"#)] {
        let state = format!(
            r#"{{"schema":"gputrace.upload/1","url":"s3://bucket/a%20b.gtr","id":"u~1.2_3","part_bytes":8388608,"parts":[{parts}]}}"#
        );
        seed(folder, name, state.as_bytes());
    }
}

/// Summaries of short traces, and the texts of their states, which no damage to a compressed file ever reaches.
fn summaries(folder: &Path, golden: &Path) {
    for name in ["dataparallel", "version1", "caught-oom"] {
        let trace = Trace::open(&golden.join(format!("{name}.gtr"))).expect("a golden trace");
        let path = folder.with_file_name(format!("{name}.gtr"));
        std::fs::write(&path, beginning(&trace).expect("memory")).expect("a file");
        let source = Source::open(&path).expect("a trace");
        let bytes = reduce(&source).expect("memory").bytes;
        std::fs::remove_file(&path).expect("the file");
        seed(folder, name, &[&[0], bytes.as_slice()].concat());
        let states = Summary::of(&path, bytes).expect("a summary").states();
        seed(folder, &format!("{name}-states"), &[&[1], states.as_bytes()].concat());
    }
}

fn traces(folder: &Path, golden: &Path) {
    for entry in std::fs::read_dir(golden).expect("golden traces") {
        let path = entry.expect("readable").path();
        let Ok(trace) = Trace::open(&path) else { continue };
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let bytes = beginning(&trace).expect("memory");
        seed(folder, &name, &[&[1], blocks::unfold(&bytes).as_slice()].concat());
        seed(folder, &format!("{name}-whole"), &[&[0], bytes.as_slice()].concat());
    }
    let calls = calls().expect("memory");
    seed(folder, "calls", &[&[1], blocks::unfold(&calls).as_slice()].concat());
    seed(folder, "calls-whole", &[&[0], calls.as_slice()].concat());
}

/// A trace's first events, with what they name.
fn beginning(trace: &Trace) -> std::io::Result<Vec<u8>> {
    let mut writer = Writer::new(Vec::new())?;
    writer.process(trace.process());
    let events: Vec<Event> = trace.events().take(MOST_EVENTS).collect();
    for (id, api) in (0..).map(ApiId).zip(trace.apis()) {
        writer.api(id, api);
    }
    for device in trace.devices() {
        writer.device(device);
    }
    for (id, thread) in (0..).map(ThreadId).zip(trace.threads()) {
        writer.thread(id, thread);
    }
    for event in &events {
        if let Some(stack) = trace.stack(event.stack) {
            writer.stack(event.stack, stack);
            for frame in &stack.frames {
                trace.frame(*frame).into_iter().for_each(|found| writer.frame(*frame, found));
            }
        }
    }
    for event in &events {
        writer.event(event)?;
    }
    writer.finish()
}

/// A few calls of the driver.
fn calls() -> std::io::Result<Vec<u8>> {
    let mut writer = Writer::new(Vec::new())?;
    writer.process(&Process::default());
    writer.device(&Device::default());
    writer.api(ApiId(1), &Api { name: "cuMemAlloc_v2".into(), ..Api::default() });
    for (time, action) in (0..).zip(Action::ALL) {
        let call = Call {
            api: ApiId(1),
            action: *action,
            device: 0,
            result: Some(0),
            addr: 0x7f00_0000_0000 + time % 4 * (2 << 20),
            bytes: Bytes(2 << 20),
            stream: 0,
            handle: time % 6,
            extra: 1,
            duration: Nanos(5),
            captured: false,
            comm: CommId(0),
            nccl_call: 0,
            nccl_thread: false,
            in_allocate: false,
        };
        let kind = EventKind::Call(call);
        writer.event(&Event { time: Nanos(time * 10), thread: ThreadId(1), stack: StackId(0), kind })?;
    }
    writer.finish()
}

/// Each kind of record, with as many words as the longest has, small numbers in them.
fn rings(folder: &Path) {
    for kind in (0..=u8::MAX).filter_map(Kind::from_raw) {
        for n_words in [1u16, 2, 3, 5, 8, 16] {
            let mut records = Vec::new();
            for round in 0..2u64 {
                let header = gputrace_ring::record::Header {
                    words: n_words + 1,
                    kind: kind as u8,
                    flags: 0,
                    delta: 9,
                };
                records.extend(header.encode().to_le_bytes());
                (0..u64::from(n_words)).for_each(|word| records.extend((word * 3 + round).to_le_bytes()));
            }
            let length = (records.len() as u16).to_le_bytes();
            // What `ring_reader.rs` reads: chunk, line, thread, generation, sequence, base, place, bytes, committed, state.
            let mut input = vec![9, 0, 1, 1, 1, 0, 8, 1, 0, 0];
            input.extend(length);
            input.extend(&records);
            input.extend(length);
            input.extend([2, 0, 2]);
            seed(folder, &format!("{kind:?}-{n_words}"), &input);
        }
    }
}

fn pickles(folder: &Path) {
    // Where Python is there, as Python writes them.
    let program = "
import pickle, sys, os
entry = lambda action, addr, size: dict(action=action, addr=addr, size=size, stream=0, time_us=5,
    frames=[dict(name='f', filename='a.py', line=3)])
base = 0x7f0000000000
snapshot = dict(segments=[dict(device=0, address=base, total_size=2<<20, allocated_size=512, active_size=512,
    stream=0, segment_type='small', segment_pool_id=(0, 0), is_expandable=False, frames=[],
    blocks=[dict(address=base, size=512, requested_size=500, state='active_allocated', frames=[]),
            dict(address=base+512, size=(2<<20)-512, requested_size=0, state='inactive', frames=[])])],
    device_traces=[[entry('segment_alloc', base, 2<<20), entry('alloc', base, 500), entry('alloc', base+512, 700),
        entry('free_requested', base+512, 1024), entry('free_completed', base+512, 1024), entry('oom', 99, 1<<40)]],
    allocator_settings=dict(PYTORCH_CUDA_ALLOC_CONF='', max_split_size=-1, expandable_segments=False))
for protocol in 2, 3, 4, 5:
    with open(os.path.join(sys.argv[1], f'protocol-{protocol}'), 'wb') as to:
        to.write(b' ' + pickle.dumps(snapshot, protocol))
";
    std::fs::create_dir_all(folder).expect("writable");
    let _ = Command::new("python3").arg("-c").arg(program).arg(folder).status();
    let random = &mut Random(88_172_645_463_325_252);
    for n in 0..20 {
        seed(folder, &format!("shape-{n}"), &[b" ", snapshot(random).as_slice()].concat());
    }
    seed(folder, "empty", b" \x80\x04}\x94(\x8c\x08segments\x94]\x94\x8c\x0ddevice_traces\x94]\x94]\x94au.");
    seed(folder, "compressed", b"z\x80\x02}(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00device_traces]u.");
    seed(folder, "hostile", b" \x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.");
}

fn options(folder: &Path) {
    let texts = [
        "expandable_segments:True,max_split_size_mb:128",
        "backend:native,garbage_collection_threshold:0.8",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
        "per_process_memory_fraction:0.5,large_segment_size_mb:40",
        "expandable_segments_reserve:40G,expandable_segments_reserve_by_class:[a:0.5]",
        "max_non_split_rounding_mb:200,throw_on_cudamalloc_oom:True,pinned_num_register_threads:8",
        "fit=worst,segment=64MiB",
        "preallocate=1GiB,first_region=1MiB",
        "initial=10,maximum=1TiB",
        "page=64KiB",
        "size=1073741824",
        "frag_limit=1MiB",
    ];
    for (at, text) in (0u8..).zip(texts) {
        for choice in [0, 20, at * 2 + 1] {
            seed(folder, &format!("{at}-{choice}"), &[&[choice], text.as_bytes()].concat());
        }
    }
}

/// One short program on each allocator.
fn simulator(folder: &Path) {
    for policy in 0..gputrace_sim::policies::POLICIES.len() as u8 {
        let mut input = vec![policy, 11, policy % 6, policy * 16, policy];
        for step in 0..60u8 {
            input.extend([step.wrapping_mul(37), step, 3, step / 3, 0]);
        }
        seed(folder, &format!("{policy}"), &input);
    }
}

/// Small programs of the machine's compiler, if it has one, with the ways to say a line and a function.
fn symbol_files(folder: &Path) {
    let source = "static inline __attribute__((always_inline)) int twice(int x) { return x * 2 + (x > 7 ? twice_(x) : 0); }";
    let source = source.replace("(x > 7 ? twice_(x) : 0)", "x / 3")
        + "\nint a(int x) { int y = twice(x); if (y > 9) y += twice(y); return y; }\nint b(int x) { return a(x) + twice(x); }\n";
    std::fs::create_dir_all(folder).expect("writable");
    let c = folder.with_extension("c");
    std::fs::write(&c, source).expect("writable");
    for (name, flags) in [
        ("dwarf5", "-g -gdwarf-5 -O2"),
        ("dwarf4", "-g -gdwarf-4 -O2"),
        ("dwarf2", "-g -gdwarf-2 -gstrict-dwarf -O1"),
        ("sections", "-g -ffunction-sections -O2"),
        ("types", "-g -fdebug-types-section -O2"),
        ("none", "-O2"),
    ] {
        let compiled = Command::new("cc")
            .args(flags.split(' '))
            .args(["-shared", "-nostdlib", "-fPIC", "-Wl,--build-id", "-Wl,-z,noseparate-code", "-o"])
            .args([&folder.join(name), &c])
            .status();
        if compiled.is_ok_and(|status| status.success()) {
            let _ = Command::new("strip")
                .arg("--only-keep-debug")
                .arg("-o")
                .arg(folder.join(format!("{name}-debug")))
                .arg(folder.join(name))
                .status();
        }
    }
    seed(folder, "none-at-all", b"\x7fELF\x02\x01\x01");
}

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

/// Small libraries of the machine's compiler, if it has one, as the loader lays them out in memory.
fn foreign_images(folder: &Path) {
    std::fs::create_dir_all(folder).expect("writable");
    let c = folder.with_extension("c");
    std::fs::write(&c, "int a(int x) { return x + 1; }\nint b(int x) { return a(x) * a(x); }\nint kept = 7;\n")
        .expect("writable");
    for (name, flags) in [("gnu", "--hash-style=gnu"), ("both", "--hash-style=both"), ("sysv", "--hash-style=sysv")] {
        let file = folder.with_extension("so");
        let mut compiler = std::process::Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-nostdlib", "-O1", "-o"]).arg(&file).arg(&c).arg(format!("-Wl,{flags}"));
        let is_built = compiler.status().is_ok_and(|status| status.success());
        let laid_out = std::fs::read(&file).ok().filter(|_| is_built).and_then(|file| laid_out(&file));
        if let Some(image) = laid_out {
            seed(folder, name, &image);
        }
        let _ = std::fs::remove_file(&file);
    }
    let _ = std::fs::remove_file(&c);
}

/// What of a file is loaded, at its addresses.
fn laid_out(file: &[u8]) -> Option<Vec<u8>> {
    let number = |at: usize, n: usize| {
        file.get(at..at + n).map(|bytes| bytes.iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte)))
    };
    let mut image = vec![];
    for index in 0..number(56, 2)? {
        let header = number(32, 8)? + 56 * index;
        if number(header, 4)? == 1 {
            let (offset, address, bytes) = (number(header + 8, 8)?, number(header + 16, 8)?, number(header + 32, 8)?);
            image.resize(image.len().max(address + bytes), 0);
            image.get_mut(address..address + bytes)?.copy_from_slice(file.get(offset..offset + bytes)?);
        }
    }
    Some(image)
}
