//! `gputrace reproduce`: its programs, run on PyTorch's own compiled allocator, and what is in them.
//!
//! The allocator is the one of `make oracle`; `tests/oracle/torch` is the part of PyTorch that the programs use, in front of it. So the
//! very file that a user would attach to an issue is run, with addresses that ascend and with addresses that descend.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_replay::answers::reproduce;
use gputrace_replay::import::{Requests, of_recording};
use gputrace_replay::trace::Recording;
use gputrace_replay::trace::scene::recording;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Frame;
use gputrace_sim::addresses::{AddressSpace, Bump, Direction};
use gputrace_sim::device::Device;
use gputrace_sim::ops::{
    AllocId, Allocation, Builder, DriverCall, DriverEvent, NO_SEGMENT, Op, OpStream, PoolIdx, RecordedOom,
    StreamIdx,
};
use gputrace_sim::policies::torch::{Torch, parse, profile};
use gputrace_sim::simulator::{Unobserved, run};
use serde_json::Value;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A folder of this test alone.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("reproduce-{name}"));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// Traces and snapshots of PyTorch 2.11 and 2.15, recorded on GPUs.
const TRACES: [&str; 40] = [
    "tests/golden/caught-oom.gtr",
    "tests/golden/dataparallel.gtr",
    "tests/golden/empty-cache-loop.gtr",
    "tests/golden/evaluation-with-graph.gtr",
    "tests/golden/kept-losses.gtr",
    "tests/golden/owners/exporter.gtr",
    "tests/golden/owners/importer.gtr",
    "tests/golden/pools/compile.gtr",
    "tests/golden/pools/failed.gtr",
    "tests/golden/pools/graphs.gtr",
    "tests/golden/pools/mempool.gtr",
    "tests/golden/pools/serving.gtr",
    "tests/golden/reference-cycle.gtr",
    "tests/golden/running-total.gtr",
    "tests/golden/snapshots/pinned-2.15.pickle.gz",
    "tests/golden/varying-lengths.gtr",
    "tests/golden/verdicts/all-predictions/all-predictions.gtr",
    "tests/golden/verdicts/best-models/best-models.gtr",
    "tests/golden/verdicts/cache-of-requests/cache-of-requests.gtr",
    "tests/golden/verdicts/captured-with-item/captured-with-item.gtr",
    "tests/golden/verdicts/closure/closure.gtr",
    "tests/golden/verdicts/expandable/expandable.gtr",
    "tests/golden/verdicts/forward-hook/forward-hook.gtr",
    "tests/golden/verdicts/generation/generation.gtr",
    "tests/golden/verdicts/hidden-state/hidden-state.gtr",
    "tests/golden/verdicts/holes/holes.gtr",
    "tests/golden/verdicts/pinned/pinned.gtr",
    "tests/golden/verdicts/replay-buffer/replay-buffer.gtr",
    "tests/golden/verdicts/too-large/too-large.gtr",
    "tests/golden/verdicts/training-with-evaluation/training-with-evaluation.gtr",
    "tests/golden/verdicts/trim-by-habit/trim-by-habit.gtr",
    "tests/golden/version1.gtr",
    "tests/groundtruth/empty_cache.default.pickle.gz",
    "tests/groundtruth/gpt_grow.default.pickle.gz",
    "tests/groundtruth/graph_train.default.pickle.gz",
    "tests/groundtruth/mempool.default.pickle.gz",
    "tests/groundtruth/resnet_multires.default.pickle.gz",
    "tests/groundtruth/streams.default.pickle.gz",
    "tests/groundtruth/unet_multires.default.pickle.gz",
    "tests/groundtruth/vit_eval_train.default.pickle.gz",
];
/// Equal blocks at different addresses decide in these, whatever is left out: on another run the figures may be others.
const DEPENDS_ON_ADDRESSES: [&str; 1] = ["tests/groundtruth/vit_eval_train.default.pickle.gz"];
/// What the recording says is not what the simulator comes to: it was cut up by hand.
const NOT_AS_RECORDED: [&str; 2] =
    ["tests/golden/version1.gtr", "tests/groundtruth/graph_train.default.pickle.gz"];

/// Writes a program, and what was said of it.
fn program(trace: &str, to: &Path, more: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_gputrace"))
        .args(["reproduce", "-F", "--json", "--seconds", "1e9", "-o"])
        .arg(to)
        .args(more)
        .arg(repository().join(trace))
        .output()
        .unwrap();
    assert!(output.status.success(), "{trace}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The compiled allocator of a release, such as `2.11`.
fn oracle(release: &str) -> Option<PathBuf> {
    let folder =
        std::env::var_os("GPUTRACE_ORACLE").map_or_else(|| repository().join("target/oracle"), PathBuf::from);
    let start = format!("oracle-{release}.");
    let found = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let mut found = found.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(&start));
    found.next()
}

/// Runs a program on the compiled allocator.
fn on_oracle(oracle: &Path, program: &Path, is_descending: bool) -> Output {
    let mut command = Command::new("python3");
    command.arg(program).env("PYTHONPATH", repository().join("tests/oracle")).env("ORACLE", oracle);
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    if is_descending {
        command.env("ORACLE_DESCENDING", "1");
    }
    command.output().unwrap()
}

#[test]
fn programs_come_to_the_same_on_pytorchs_own_allocator() {
    let folder = folder("oracle");
    let mut table = String::new();
    let (mut n_run, mut lengths) = (0, vec![]);
    for trace in TRACES {
        let name = trace.rsplit('/').next().unwrap().split('.').next().unwrap();
        let file = folder.join(format!("{name}.py"));
        let json = program(trace, &file, &["--exact"]);
        let is_as_recorded = json["is_as_recorded"] == true;
        assert_eq!(is_as_recorded, !NOT_AS_RECORDED.contains(&trace), "{trace}: {json}");
        assert_eq!(json["is_sure"] == true, !DEPENDS_ON_ADDRESSES.contains(&trace), "{trace}: {json}");
        lengths.push(json["n_lines"].as_u64().unwrap());
        let row = |what: &str| {
            format!(
                "{name:26} {:8} {:>6} -> {:>4} requests {:>4} lines  {what}\n",
                json["kind"].as_str().unwrap(),
                json["n_requests_before"],
                json["n_requests"],
                json["n_lines"]
            )
        };
        let Some(oracle) = oracle(json["torch_version"].as_str().unwrap()) else {
            table += &row("not run");
            continue;
        };
        n_run += 1;
        let ways = [false, true].map(|is_descending| on_oracle(&oracle, &file, is_descending));
        let n_same = ways.iter().filter(|output| output.status.success()).count();
        let needed = if json["is_sure"] == true { 2 } else { 1 };
        table += &row(String::from_utf8_lossy(&ways[0].stdout).trim());
        for output in &ways {
            let said = String::from_utf8_lossy(&output.stdout);
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(n_same >= needed, "{trace}: {said}{error}\n{table}");
        }
    }
    println!("{table}");
    lengths.sort_unstable();
    println!("median length: {} lines", lengths[lengths.len() / 2]);
    if n_run == 0 {
        gputrace_skip::skip("the compiled allocator", "`make oracle` builds it; target/oracle has none");
    }
}

#[test]
fn common_failures_fit_on_a_page_and_are_the_same_every_time() {
    let folder = folder("short");
    for trace in ["tests/golden/caught-oom.gtr", "tests/golden/verdicts/holes/holes.gtr"] {
        let files = ["one.py", "two.py"].map(|name| folder.join(name));
        let json = program(trace, &files[0], &[]);
        program(trace, &files[1], &[]);
        let [one, two] = files.map(|file| std::fs::read_to_string(file).unwrap());
        assert_eq!(one, two, "{trace}");
        assert!(json["n_lines"].as_u64().unwrap() < 100, "{trace}: {json}");
        assert_eq!(json["kind"], "refusal");
    }
}

#[test]
fn a_program_of_all_requests_comes_to_the_recorded_figures() {
    let file = folder("whole").join("whole.py");
    let trace = "tests/golden/verdicts/holes/holes.gtr";
    let json = program(trace, &file, &["--whole"]);
    assert_eq!(json["n_requests"], json["n_requests_before"]);
    let text = std::fs::read_to_string(&file).unwrap();
    let recorded = format!("\"reserved\": {}", json["recorded_reserved_bytes"]);
    assert!(text.contains(&recorded), "{recorded}\n{text}");
    if let Some(oracle) = oracle("2.11") {
        assert!(on_oracle(&oracle, &file, false).status.success());
    } else {
        gputrace_skip::skip("the compiled allocator", "`make oracle` builds it; target/oracle has none");
    }
}

/// Blocks of a model, a pass and an optimizer; the last request fails.
const SCENE: &str = "Alloc addr=0x7f0000000000 bytes=20M by=libc10_cuda.so
    block addr=0x7f0000000000 bytes=8M requested=8M allocated=8M reserved=20M by=f@NAME_A/torch/nn/modules/linear.py:3
    block addr=0x7f0000800000 bytes=8M requested=8M allocated=16M reserved=20M by=g@NAME_B/torch/optim/adam.py:2
    free addr=0x7f0000000000 bytes=8M allocated=8M reserved=20M
    Alloc addr=0x7f0010000000 bytes=30M by=libc10_cuda.so
    block addr=0x7f0010000000 bytes=30M requested=30M allocated=38M reserved=50M by=h@NAME_C/job.py:9
    oom requested=100M bytes=100M allocated=38M reserved=50M by=h@NAME_C/job.py:10
    Alloc addr=0 bytes=200M result=2 by=k@NAME_D/job.cc:3";

/// A generator of its own: the same names every time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A word that occurs in no generated program, with characters that Python, a shell or a terminal might interpret.
    fn name(&mut self) -> String {
        const HOSTILE: [&str; 10] = [
            "\"\"\"",
            "\nimport os\n",
            "'); x = (",
            "\x1b]0;t\x07",
            "\u{202e}",
            "{0}",
            "%s",
            "\\",
            "#",
            "\u{2028}",
        ];
        let hostile = HOSTILE[(self.next() % 10) as usize];
        format!("secret{:016x}{hostile}", self.next())
    }
}

/// Every name of a recording is another one.
fn renamed(recording: &mut Recording, random: &mut Random) {
    recording.process.executable = random.name();
    recording.process.command = (0..3).map(|_| random.name()).collect();
    recording.process.environment.push(("SECRET".into(), random.name()));
    for device in &mut recording.devices {
        (device.name, device.uuid) = (random.name(), random.name());
    }
    for frame in recording.frames.values_mut() {
        match frame {
            Frame::Python { function, file, .. } => {
                *function = random.name();
                // What tells roles stays.
                let rest = file.split_once("/torch/").map_or("", |(_, rest)| rest).to_owned();
                *file = format!("/{}/torch/{rest}", random.name());
            }
            Frame::Native { function, file, .. } => {
                (*function, *file) = (random.name(), random.name());
            }
        }
    }
    recording.threads.values_mut().for_each(|thread| thread.name = random.name());
    recording.texts.values_mut().for_each(|text| *text = random.name());
}

#[test]
fn no_word_of_a_program_is_in_a_thousand_files() {
    let base = recording(SCENE);
    let (mut n_files, mut n_roles) = (0, 0);
    for seed in 0..1000 {
        let mut random = Random(seed);
        let mut recording = base.clone();
        renamed(&mut recording, &mut random);
        let trace = of_recording(&recording).unwrap();
        let source = Source::of(&random.name(), recording);
        assert!(source.requests().is_ok());
        let stream = &trace.devices[0];
        let roles = reproduce::purposes(&source, stream);
        let mut go_on = |_| true;
        let is_whole = seed % 2 == 0;
        let watcher: Option<&mut reproduce::Watcher<'_>> = if is_whole { None } else { Some(&mut go_on) };
        let refused = reproduce::cuda::reproduce(&source, None, is_whole).unwrap();
        let cuda = reproduce::cuda::cuda(&refused);
        assert!(cuda.contains("linear(kept, 200 * MIB)") && !cuda.contains("secret"), "{cuda}");
        assert!(cuda.is_ascii(), "{cuda}");
        // An option that no release has is no reason to write nothing, nor to write it.
        let Ok(found) = reproduce::reproduce(stream, Some((2, 11)), &roles, watcher) else { continue };
        let text = reproduce::python(&found, true, seed % 3 == 0);
        n_files += 1;
        n_roles += usize::from(text.contains("  # "));
        assert!(!text.contains("secret"), "{text}");
        let is_plain = |c: char| c == '\n' || (' '..='~').contains(&c);
        assert!(text.chars().all(is_plain), "{text}");
    }
    assert_eq!((n_files, n_roles > 0), (1000, true));
}

/// Writes down what the simulated driver was asked, as a recording has it.
struct Recorder<'a> {
    bump: Bump,
    calls: &'a RefCell<Vec<DriverEvent>>,
    op: u32,
}

impl Recorder<'_> {
    fn call(&self, call: DriverCall, address: u64, bytes: u64) {
        let event = DriverEvent { before_op: self.op, call, address, bytes, segment: NO_SEGMENT };
        self.calls.borrow_mut().push(event);
    }
}

impl AddressSpace for Recorder<'_> {
    fn map(&mut self, bytes: u64, op: u32) -> Option<u64> {
        self.op = op;
        let address = self.bump.map(bytes, op)?;
        self.call(DriverCall::Alloc, address, bytes);
        Some(address)
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        self.call(DriverCall::Free, address, bytes);
    }

    fn reserve(&mut self, bytes: u64) -> u64 {
        self.bump.reserve(bytes)
    }

    fn commit(&mut self, address: u64, bytes: u64) -> bool {
        self.call(DriverCall::Map, address, bytes);
        true
    }

    fn decommit(&mut self, address: u64, bytes: u64) {
        self.call(DriverCall::Unmap, address, bytes);
    }
}

/// What a random program has beside tensors of one stream.
#[derive(Clone, Copy, PartialEq)]
enum Flavour {
    Plain,
    Streams,
    Delays,
    MemPools,
    Graphs,
}

/// A run that ended in a refusal, as a recording of it; none where a thousand requests fitted.
fn refused_run(seed: u64, flavour: Flavour, version: (u8, u8), options: &str) -> Option<OpStream> {
    const MIB: u64 = 1 << 20;
    let mut random = Random(seed);
    let mut below = |bound: u64| random.next() % bound;
    let n_streams = if matches!(flavour, Flavour::Streams | Flavour::Delays) { 3 } else { 1 };
    let n_pools = if matches!(flavour, Flavour::MemPools | Flavour::Graphs) { 3 } else { 1 };
    let mut builder = Builder::new(0);
    for stream in 0..n_streams {
        builder.stream(stream * 0x1000).unwrap();
    }
    for pool in 1..n_pools {
        builder.pool(if flavour == Flavour::Graphs { (pool, 0) } else { (0, pool) }).unwrap();
    }
    const MOST: [u64; 4] = [4000, 3 * MIB, 40 * MIB, 200 * MIB];
    let mut sizes = vec![];
    for _ in 0..12 {
        let most = MOST[below(4) as usize];
        sizes.push(1 + below(most));
    }
    let mut live: Vec<AllocId> = vec![];
    let mut delayed: Vec<AllocId> = vec![];
    for _ in 0..1000 {
        match below(20) {
            0..=10 => {
                if flavour == Flavour::Delays && delayed.len() > 3 {
                    delayed.drain(..).for_each(|id| builder.op(Op::FreeCompleted(id)));
                }
                let requested = sizes[below(12) as usize];
                let (stream, pool) = (StreamIdx(below(n_streams) as u16), PoolIdx(below(n_pools) as u16));
                let stack = gputrace_sim::ops::StackId::NONE;
                live.push(builder.alloc(Allocation { requested, address: 0, stack, stream, pool }));
            }
            11..=17 if !live.is_empty() => {
                let id = live.swap_remove(below(live.len() as u64) as usize);
                builder.op(Op::FreeRequested(id));
                match flavour == Flavour::Delays && below(2) == 0 {
                    true => delayed.push(id),
                    false => builder.op(Op::FreeCompleted(id)),
                }
            }
            18 => builder.op(Op::Trim),
            _ => {}
        }
    }
    let mut stream = builder.finish();
    stream.knows_pools = true;
    stream.settings.torch_version = Some(version);
    stream.settings.options = Some(options.to_owned());
    let limit = (512 + below(1500)) * MIB;
    let profile = profile(version).unwrap();
    let calls = RefCell::new(vec![]);
    let mut policy =
        Torch::new(parse(options, profile).unwrap(), *profile, n_streams as usize, n_pools as usize);
    let space = Recorder { bump: Bump::new(Direction::Ascending), calls: &calls, op: 0 };
    let mut device = Device::new(u64::MAX, Some(limit), Box::new(space));
    let refusal = run(&stream, &mut policy, &mut device, &mut Unobserved).oom?;
    drop(device);
    stream.driver = calls.into_inner();
    let Op::Alloc(id) = stream.ops[refusal.op] else { panic!("a request was refused") };
    let Allocation { requested, stream: own, pool, stack, .. } = *stream.allocation(id);
    stream.ops.truncate(refusal.op);
    stream.ops.push(Op::Oom(0));
    // In half of them the driver refused the request.
    let device_free = if seed.is_multiple_of(2) && options.is_empty() { limit - refusal.reserved } else { 0 };
    stream.ooms.push(RecordedOom { rounded: requested, device_free, stream: Some(own), pool, stack });
    Some(stream)
}

#[test]
fn refusals_of_all_kinds_are_refused_by_pytorchs_own_allocator() {
    let folder = folder("kinds");
    let flavours = [
        ("plain", Flavour::Plain, ""),
        ("streams", Flavour::Streams, ""),
        ("delays", Flavour::Delays, ""),
        ("mempools", Flavour::MemPools, ""),
        ("graphs", Flavour::Graphs, ""),
        ("expandable", Flavour::Plain, "expandable_segments:True"),
        ("split", Flavour::Streams, "max_split_size_mb:64"),
        ("roundup", Flavour::Plain, "roundup_power2_divisions:[64:2,256:4,>:8]"),
        ("collected", Flavour::Plain, "garbage_collection_threshold:0.7"),
    ];
    let (mut table, mut n_run, mut n_written, mut lengths) = (String::new(), 0, 0, vec![]);
    for (name, flavour, options) in flavours {
        for (seed, version) in [(1, (2, 11)), (2, (2, 11)), (3, (2, 9)), (4, (2, 15)), (5, (2, 13))] {
            let Some(stream) = refused_run(seed, flavour, version, options) else { continue };
            let label = format!("{name}-{seed} of {}.{}", version.0, version.1);
            let mut go_on = |_| true;
            let watcher: Option<&mut reproduce::Watcher<'_>> = Some(&mut go_on);
            let found = match reproduce::reproduce(&stream, None, &[], watcher) {
                Ok(found) => found,
                Err(why) => {
                    table += &format!("{label:24} no program: {why}\n");
                    continue;
                }
            };
            n_written += 1;
            let text = reproduce::python(&found, true, false);
            let file = folder.join(format!("{name}-{seed}.py"));
            std::fs::write(&file, &text).unwrap();
            let (before, after, n_lines) = (found.n_before, found.program.n_requests(), text.lines().count());
            lengths.push(n_lines);
            let reproduce::Goal::Refusal(reasons) = found.goal else {
                panic!("{label}: nothing was refused")
            };
            table += &format!(
                "{label:24} {before:>4} -> {after:>3} requests {n_lines:>4} lines  {}\n",
                reasons.words()
            );
            let release = format!("{}.{}", version.0, version.1);
            let Some(oracle) = oracle(&release) else { continue };
            n_run += 1;
            let ways: &[bool] = if found.is_sure { &[false, true] } else { &[false] };
            for is_descending in ways {
                let output = on_oracle(&oracle, &file, *is_descending);
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                let error = String::from_utf8_lossy(&output.stderr).into_owned();
                assert!(output.status.success(), "{label}: {said}{error}\n{text}\n{table}");
            }
        }
    }
    lengths.sort_unstable();
    println!("{table}{n_written} programs, {n_run} run; median length {} lines", lengths[lengths.len() / 2]);
    assert!(n_written >= 40, "{table}");
}

/// `torch.cuda.Stream()` hands out 32 streams again and again.
#[test]
fn more_streams_than_pytorch_has_stay_apart_and_read_as_a_loop() {
    const STREAMS: u16 = 41;
    let mut builder = Builder::new(0);
    for stream in 0..STREAMS {
        builder.stream(u64::from(stream) * 0x1000).unwrap();
    }
    let pool = builder.pool((0, 0)).unwrap();
    for stream in (0..STREAMS).map(StreamIdx) {
        let stack = gputrace_sim::ops::StackId::NONE;
        let id = builder.alloc(Allocation { requested: 30 << 20, address: 0, stack, stream, pool });
        builder.op(Op::FreeRequested(id));
        builder.op(Op::FreeCompleted(id));
    }
    let mut stream = builder.finish();
    stream.settings.torch_version = Some((2, 11));
    let mut go_on = |_| true;
    let watcher: Option<&mut reproduce::Watcher<'_>> = Some(&mut go_on);
    let found = reproduce::reproduce(&stream, None, &[], watcher).unwrap();
    assert_eq!(found.figures.peak_reserved, u64::from(STREAMS) * (30 << 20));
    let text = reproduce::python(&found, true, false);
    assert!(text.contains("for stream in streams[0:39]:\n    empty(30 * MIB, stream=stream)\n"), "{text}");
    let file = folder("streams").join("streams.py");
    std::fs::write(&file, &text).unwrap();
    match oracle("2.11") {
        None => {
            gputrace_skip::skip("the compiled allocator", "`make oracle` builds it; target/oracle has none")
        }
        Some(oracle) => {
            let output = on_oracle(&oracle, &file, false);
            assert!(output.status.success(), "{}\n{text}", String::from_utf8_lossy(&output.stdout));
        }
    }
}

/// A `MemPool` whose tensors are gone, tensors outside, and a request that is refused beside 2000 MiB of free memory; `before` is what was
/// seen of the pool before its first tensor.
fn beside_a_pool(before: &str) -> String {
    const BY: &str = "by=libcudart.so,libc10_cuda.so in_allocate=1";
    let tensors = |n: u64, first: u64, mib: u64| -> String {
        let tensor = |at: u64| {
            format!(
                "Alloc addr={at:#x} bytes={mib}M {BY}\nblock addr={at:#x} bytes={mib}M requested={mib}M\n"
            )
        };
        (0..n).map(|index| tensor(first + (index << 30))).collect()
    };
    let freed: String = (0..4u64)
        .map(|index| format!("free addr={:#x} bytes=500M\n", 0x1_0000_0000 + (index << 30)))
        .collect();
    format!(
        "note torch.pools=seen\n{before}{}TorchPoolEnd extra=1\nTorchPoolRelease extra=1\n{freed}{}oom requested=1500M \
         bytes=1500M\nTorchPoolRelease extra=1\n",
        tensors(4, 0x1_0000_0000, 500),
        tensors(3, 0x4_0000_0000, 400)
    )
}

#[test]
fn a_pool_that_somebody_holds_keeps_its_free_memory_when_a_request_is_refused() {
    let folder = folder("pool");
    // The second was made and opened before the recording began.
    for (name, before) in [("seen", "TorchPoolCreate extra=1\nTorchPoolBegin extra=1\n"), ("unseen", "")] {
        let trace = of_recording(&recording(&beside_a_pool(before))).unwrap();
        let mut go_on = |_| true;
        let watcher: Option<&mut reproduce::Watcher<'_>> = Some(&mut go_on);
        let found = reproduce::reproduce(&trace.devices[0], Some((2, 11)), &[], watcher).unwrap();
        let reproduce::Goal::Refusal(reasons) = found.goal else { panic!("{name}: nothing was refused") };
        assert_eq!(reasons.words(), "the request would succeed without private pools", "{name}");
        assert!(found.is_as_recorded() && found.is_sure, "{name}");
        let (text, file) = (reproduce::python(&found, true, false), folder.join(format!("{name}.py")));
        std::fs::write(&file, &text).unwrap();
        match oracle("2.11") {
            None => gputrace_skip::skip(
                "the compiled allocator",
                "`make oracle` builds it; target/oracle has none",
            ),
            Some(oracle) => {
                let output = on_oracle(&oracle, &file, false);
                assert!(
                    output.status.success(),
                    "{name}: {}\n{text}",
                    String::from_utf8_lossy(&output.stdout)
                );
            }
        }
    }
}
