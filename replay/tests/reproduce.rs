//! `gputrace reproduce`: its programs, run on PyTorch's own compiled allocator, and what is in them.
//!
//! The allocator is the one of `make oracle`; `tests/oracle/torch` is the part of PyTorch that the programs use, in front of it. So the
//! very file that a user would attach to an issue is run, with addresses that ascend and with addresses that descend.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use gputrace_replay::answers::reproduce;
use gputrace_replay::import::{Requests, of_recording};
use gputrace_replay::trace::Recording;
use gputrace_replay::trace::scene::recording;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::*;
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
    oom requested=100M bytes=100M allocated=38M reserved=50M by=h@NAME_C/job.py:10";

/// A generator of its own: the same names every time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A word that no program of ours has, and what Python, a shell or a terminal might obey.
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
