//! Snapshots end to end: made here byte by byte, and real ones where `../shared/groundtruth` is present.

mod pickles;

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use gputrace_replay::import::load;
use gputrace_replay::story::Story;
use gputrace_sim::ops::{AllocId, DriverCall, History, Op, OpStream, StreamIdx};
use gputrace_sim::whatif::{Confidence, Laboratory, Other, Question};
use pickles::{Item, pickle};

const MIB: i64 = 1 << 20;
const BASE: i64 = 0x7f00_0000_0000;

fn entry(action: &'static str, address: i64, bytes: i64) -> Item {
    Item::Dict(vec![
        ("action", Item::Text(action)),
        ("addr", Item::Int(BASE + address)),
        ("size", Item::Int(bytes)),
        ("stream", Item::Int(0)),
    ])
}

fn segment(address: i64, bytes: i64, blocks: Vec<Item>) -> Item {
    Item::Dict(vec![
        ("device", Item::Int(0)),
        ("address", Item::Int(BASE + address)),
        ("total_size", Item::Int(bytes)),
        ("stream", Item::Int(0)),
        ("segment_type", Item::Text("large")),
        ("segment_pool_id", Item::Pair(0, 0)),
        ("blocks", Item::List(blocks)),
    ])
}

fn block(bytes: i64, state: &'static str) -> Item {
    Item::Dict(vec![
        ("size", Item::Int(bytes)),
        ("requested_size", Item::Int(bytes)),
        ("state", Item::Text(state)),
    ])
}

fn snapshot(name: &str, segments: Vec<Item>, entries: Vec<Item>) -> PathBuf {
    written(
        name,
        vec![("segments", Item::List(segments)), ("device_traces", Item::List(vec![Item::List(entries)]))],
    )
}

fn written(name: &str, keys: Vec<(&'static str, Item)>) -> PathBuf {
    let root = Item::Dict(keys);
    let mut bytes = vec![0x80, 4];
    pickle(&root, &mut bytes);
    bytes.push(b'.');
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::File::create(&path).unwrap().write_all(&bytes).unwrap();
    path
}

#[test]
fn a_complete_history_is_checked_address_by_address() {
    let path = snapshot(
        "complete.pickle",
        vec![segment(0, 30 * MIB, vec![block(10 * MIB, "active_allocated"), block(20 * MIB, "inactive")])],
        vec![
            entry("segment_alloc", 0, 30 * MIB),
            entry("alloc", 0, 30 * MIB),
            entry("free_requested", 0, 30 * MIB),
            entry("free_completed", 0, 30 * MIB),
            entry("alloc", 0, 10 * MIB),
        ],
    );
    let trace = load(&path).unwrap();
    let stream = &trace.devices[0];
    assert_eq!(stream.history, History::Complete);
    let laboratory = Laboratory::new(stream).unwrap();
    let check = laboratory.self_check(Some((2, 11)));
    assert_eq!((check.n_matching, check.n_requests, check.n_strayed), (2, 2, 0));
    let answer = laboratory
        .answer(&Question {
            policy: "torch".into(),
            options: "expandable_segments:True".into(),
            torch_version: (2, 11),
            device_memory: None,
            limit: None,
            other: Other::Ignored,
        })
        .unwrap();
    assert_eq!(answer.confidence, Confidence::Exact);
    // Two pages of 20 MiB.
    assert_eq!(answer.outcome.books.reserved.peak, 40 << 20);
}

#[test]
fn private_pools_that_a_snapshot_names_are_in_its_books() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/groundtruth/graph_train.default.pickle.gz");
    let story = Story::read(&path).unwrap();
    let pools = story.ledger.torch_pools.pools.iter();
    let found: Vec<_> = pools.map(|((_, id), pool)| (*id, pool.reserved.now.0, pool.n_segments)).collect();
    // What `segments` of the pickle adds up to, by `segment_pool_id`.
    assert_eq!(found, [((1, 0), 69_206_016, 3), ((2, 0), 436_207_616, 15), ((3, 0), 499_122_176, 21)]);
    let active: u64 = story.ledger.torch_pools.pools.values().map(|pool| pool.active.now.0).sum();
    assert_eq!(active, 68_157_440);
}

#[test]
fn a_history_that_starts_late_is_run_backwards() {
    let path = snapshot(
        "late.pickle",
        vec![segment(0, 30 * MIB, vec![block(10 * MIB, "inactive"), block(20 * MIB, "active_allocated")])],
        vec![entry("free_requested", 0, 10 * MIB), entry("free_completed", 0, 10 * MIB)],
    );
    let trace = load(&path).unwrap();
    let stream = &trace.devices[0];
    assert_eq!(stream.history, History::StartsLate);
    let blocks = &stream.initial[0].blocks;
    let shown: Vec<(u64, bool)> =
        blocks.iter().map(|block| (block.bytes >> 20, block.alloc.is_some())).collect();
    assert_eq!(shown, [(10, true), (20, true)]);
}

/// PyTorch 2.0: the frames of a block are in its history, and without a recorded history the trace has one row, which says nothing.
#[test]
fn a_snapshot_of_pytorch_2_0_without_history_says_so_and_names_the_lines() {
    let frame = Item::Dict(vec![
        ("filename", Item::Text("/job/load.py")),
        ("name", Item::Text("allocate")),
        ("line", Item::Int(190)),
    ]);
    let history = Item::Dict(vec![
        ("addr", Item::Int(BASE)),
        ("real_size", Item::Int(10 * MIB)),
        ("frames", Item::List(vec![frame])),
    ]);
    let held = Item::Dict(vec![
        ("size", Item::Int(10 * MIB)),
        ("requested_size", Item::Int(10 * MIB)),
        ("state", Item::Text("active_allocated")),
        ("history", Item::List(vec![history])),
    ]);
    let rest = block(10 * MIB, "inactive");
    let path = snapshot(
        "history.pickle",
        vec![segment(0, 20 * MIB, vec![held, rest])],
        vec![entry("snapshot", 0, 20 * MIB)],
    );
    let said = |verb: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_gputrace")).arg(verb).arg(&path).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    };
    for verb in ["report", "leaks", "oom", "budget"] {
        assert_eq!(said(verb).matches("this snapshot has no history").count(), 1, "{verb}: {}", said(verb));
    }
    let report = said("report");
    assert!(report.contains("allocate (/job/load.py:190)"), "{report}");
    assert!(report.contains("_record_memory_history") && !report.contains("gradients"), "{report}");
    assert!(said("tune").contains("it has no history"), "{}", said("tune"));
    let output = Command::new(env!("CARGO_BIN_EXE_gputrace"))
        .args(["who", &format!("{:#x}", BASE + 4)])
        .arg(&path)
        .output()
        .unwrap();
    let who = String::from_utf8_lossy(&output.stdout);
    assert!(who.contains("allocated before the recording began by allocate"), "{who}");
}

#[test]
fn what_is_placed_behind_a_block_that_was_there_tells_its_size() {
    // 10 MiB were asked for and 10.5 MiB handed out; only where the next one lies tells.
    let half = MIB / 2;
    let blocks = vec![
        block(21 * half, "inactive"),
        block(10 * half, "active_allocated"),
        block(29 * half, "inactive"),
    ];
    let entries = vec![
        entry("alloc", 21 * half, 10 * half),
        entry("free_requested", 0, 20 * half),
        entry("free_completed", 0, 20 * half),
    ];
    let trace = load(&snapshot("behind.pickle", vec![segment(0, 60 * half, blocks)], entries)).unwrap();
    let stream = &trace.devices[0];
    let sizes: Vec<u64> = stream.initial[0].blocks.iter().map(|block| block.bytes / half as u64).collect();
    assert_eq!(sizes, [21, 39]);
    assert!(Laboratory::new(stream).unwrap().self_check(Some((2, 11))).is_perfect());
}

#[test]
fn segments_given_back_without_need_are_an_empty_cache() {
    let freed = |address, mib| {
        [
            entry("segment_alloc", address, mib * MIB),
            entry("alloc", address, mib * MIB),
            entry("free_requested", address, mib * MIB),
            entry("free_completed", address, mib * MIB),
        ]
    };
    let mut entries: Vec<Item> = freed(0, 30).into_iter().chain(freed(64 * MIB, 40)).collect();
    entries.extend([entry("segment_free", 0, 30 * MIB), entry("segment_free", 64 * MIB, 40 * MIB)]);
    entries.extend(freed(0, 12));
    let trace = load(&snapshot(
        "trim.pickle",
        vec![segment(0, 12 * MIB, vec![block(12 * MIB, "inactive")])],
        entries,
    ))
    .unwrap();
    let stream = &trace.devices[0];
    assert_eq!(stream.ops.iter().filter(|op| **op == Op::Trim).count(), 1);
    assert!(Laboratory::new(stream).unwrap().self_check(Some((2, 11))).is_perfect());
}

#[test]
fn a_history_with_holes_is_refused_with_the_reason() {
    let path = snapshot("holes.pickle", vec![], vec![entry("alloc", 0, 512), entry("alloc", 0, 512)]);
    let trace = load(&path).unwrap();
    let why = Laboratory::new(&trace.devices[0]).err().unwrap();
    assert!(why.contains("allocated twice") && why.contains("skip_actions"), "{why}");
}

#[test]
fn damaged_files_are_named_and_never_crash() {
    let path = snapshot("whole.pickle", vec![segment(0, MIB, vec![])], vec![entry("alloc", 0, 512)]);
    let whole = std::fs::read(&path).unwrap();
    let damaged = Path::new(env!("CARGO_TARGET_TMPDIR")).join("damaged.pickle");
    for length in 0..whole.len() {
        std::fs::write(&damaged, &whole[..length]).unwrap();
        let error = load(&damaged).unwrap_err().to_string();
        assert!(error.contains("damaged.pickle") && error.contains("truncated"), "{length}: {error}");
    }
    for index in 0..whole.len() {
        let mut bytes = whole.clone();
        for value in [0, 0x28, 0x2e, 0x7d, 0x8a, 0xff] {
            bytes[index] = value;
            std::fs::write(&damaged, &bytes).unwrap();
            let _ = load(&damaged); // Any answer, but an answer.
        }
    }
}

#[test]
fn every_address_of_real_snapshots_is_reproduced() {
    for path in real_snapshots() {
        let trace = load(&path).unwrap();
        let check = Laboratory::new(&trace.devices[0]).unwrap().self_check(Some((2, 11)));
        assert!(check.is_perfect(), "{}: {check:?}", path.display());
        println!("{}: {} of {} match", path.display(), check.n_matching, check.n_requests);
    }
}

/// What a recording of the same program shows that began before the op of that index.
fn cut_down(full: &OpStream, from: usize) -> PathBuf {
    let row = |action, address: u64, bytes: u64, stream: u64| {
        Item::Dict(vec![
            ("action", Item::Text(action)),
            ("addr", Item::Int(address as i64)),
            ("size", Item::Int(bytes as i64)),
            ("stream", Item::Int(stream as i64)),
        ])
    };
    let handle = |stream: StreamIdx| full.streams[usize::from(stream.0)];
    let of = |action, id: AllocId| {
        let allocation = full.allocation(id);
        row(action, allocation.address, allocation.requested, handle(allocation.stream))
    };
    let mut entries = Vec::new();
    let mut calls = full.driver.iter().filter(|call| call.before_op as usize >= from).peekable();
    for index in from..=full.ops.len() {
        while let Some(call) = calls.next_if(|call| call.before_op as usize == index) {
            let action = match call.call {
                DriverCall::Alloc => "segment_alloc",
                DriverCall::Free => "segment_free",
                DriverCall::Map => "segment_map",
                DriverCall::Unmap => "segment_unmap",
            };
            let stream = full.segments[call.segment as usize].stream;
            entries.push(row(action, call.address, call.bytes, handle(stream)));
        }
        match full.ops.get(index) {
            Some(Op::Alloc(id)) => entries.push(of("alloc", *id)),
            Some(Op::FreeRequested(id)) => entries.push(of("free_requested", *id)),
            Some(Op::FreeCompleted(id)) => entries.push(of("free_completed", *id)),
            Some(Op::Oom(oom)) => {
                let oom = &full.ooms[*oom as usize];
                entries.push(row(
                    "oom",
                    oom.device_free,
                    oom.rounded,
                    handle(oom.stream.unwrap_or(StreamIdx(0))),
                ));
            }
            Some(Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..)) | None => {}
        }
    }
    let segments = full.final_layout.iter().map(|segment| {
        let blocks = segment.blocks.iter().map(|block| {
            let requested = block.alloc.map_or(0, |id| full.allocation(id).requested);
            Item::Dict(vec![
                ("size", Item::Int(block.bytes as i64)),
                ("requested_size", Item::Int(requested as i64)),
                ("state", Item::Text(if block.alloc.is_some() { "active_allocated" } else { "inactive" })),
            ])
        });
        let pool = full.pools[usize::from(segment.pool.0)].id;
        Item::Dict(vec![
            ("device", Item::Int(0)),
            ("address", Item::Int(segment.address as i64)),
            ("total_size", Item::Int(segment.bytes as i64)),
            ("stream", Item::Int(handle(segment.stream) as i64)),
            ("segment_type", Item::Text(if segment.small { "small" } else { "large" })),
            ("segment_pool_id", Item::Pair(pool.0 as i64, pool.1 as i64)),
            ("blocks", Item::List(blocks.collect())),
        ])
    });
    snapshot("cut.pickle", segments.collect(), entries)
}

/// Address, bytes and stream.
type Range = (u64, u64, u64);

fn range(stream: &OpStream, id: AllocId) -> Range {
    let allocation = stream.allocation(id);
    (allocation.address, allocation.requested, stream.streams[usize::from(allocation.stream.0)])
}

/// What was live, and what was mapped, before the op of that index of a complete history.
fn state_before(full: &OpStream, op: usize) -> (BTreeSet<Range>, BTreeSet<(u64, u64)>) {
    let mut live = BTreeSet::new();
    for op in &full.ops[..op] {
        match *op {
            Op::Alloc(id) => drop(live.insert(range(full, id))),
            Op::FreeCompleted(id) => drop(live.remove(&range(full, id))),
            Op::FreeRequested(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
        }
    }
    let mut mapped = BTreeSet::new();
    for call in full.driver.iter().filter(|call| (call.before_op as usize) < op) {
        match call.call {
            DriverCall::Alloc | DriverCall::Map => mapped.insert((call.address, call.bytes)),
            DriverCall::Free | DriverCall::Unmap => mapped.remove(&(call.address, call.bytes)),
        };
    }
    (live, mapped)
}

#[test]
fn a_real_history_that_is_cut_starts_with_what_was_there_and_goes_on_as_it_did() {
    let paths = real_snapshots();
    let (n_snapshots, mut imperfect) = (paths.len(), Vec::new());
    for path in paths {
        let name = path.file_name().unwrap().to_str().unwrap().strip_suffix(".pickle.gz").unwrap();
        let full = load(&path).unwrap();
        let full = &full.devices[0];
        for quarter in 1..4 {
            let from = full.ops.len() * quarter / 4;
            let late = load(&cut_down(full, from)).unwrap();
            let late = &late.devices[0];
            assert_eq!(late.history, History::StartsLate);
            let live = late.initial_allocs.iter().map(|id| range(late, *id)).collect();
            let mapped = late.initial.iter().map(|segment| (segment.address, segment.bytes)).collect();
            assert_eq!((live, mapped), state_before(full, from), "{name}: from {from}");
            let tiled: u64 = late.initial.iter().flat_map(|it| &it.blocks).map(|block| block.bytes).sum();
            assert_eq!(tiled, late.initial.iter().map(|segment| segment.bytes).sum::<u64>());
            let allocs = |stream: &OpStream, from: usize| -> Vec<Range> {
                let ids = stream.ops[from..].iter().filter_map(|op| match op {
                    Op::Alloc(id) => Some(range(stream, *id)),
                    _ => None,
                });
                ids.collect()
            };
            assert_eq!(allocs(late, 0), allocs(full, from));
            let check = Laboratory::new(late).unwrap().self_check(Some((2, 11)));
            if !check.is_perfect() {
                imperfect.push(format!("{name} from quarter {quarter}"));
            }
        }
    }
    // A snapshot names the private pools of those segments only that are left at its end.
    let of_private_pools = [
        "graph_train.default from quarter 1",
        "mempool.default from quarter 1",
        "mempool.default from quarter 2",
        "mempool.default from quarter 3",
    ];
    let expected = if n_snapshots > 0 { &of_private_pools[..] } else { &[] };
    assert_eq!(imperfect, expected);
}

/// Prints what `tune` finds beside what the best of the settings that were really run had reserved. The seconds mean
/// something with `cargo test --release -p gputrace --test snapshots tune -- --nocapture`.
#[test]
fn tune_finds_a_setting_at_least_as_good_as_any_that_was_really_run() {
    println!("{:24} {:>14} {:>14} {:>5}  setting", "snapshot", "best of runs", "tune", "s");
    for path in real_snapshots() {
        let name = path.file_name().unwrap().to_str().unwrap().strip_suffix(".pickle.gz").unwrap();
        let recorded = truth(&path.with_file_name(format!("{name}.json")));
        let best = best_of_runs(&path, &recorded);
        let (answer, seconds) = tune(&path, &recorded);
        let peak = answer["best"]["peak_reserved_range"][1].as_u64().unwrap();
        println!("{name:24} {best:>14} {peak:>14} {seconds:>5.1}  {}", answer["best"]["options"]);
        assert_eq!(answer["best"]["fits"], true, "{name}");
        assert!(peak <= best, "{name}: {peak} bytes, {best} were possible");
    }
}

/// Least peak of the runs of the same workload under the same limit that did not run out of memory.
fn best_of_runs(snapshot: &Path, recorded: &serde_json::Value) -> u64 {
    let name = snapshot.file_name().unwrap().to_str().unwrap();
    let workload = name.split('.').next().unwrap();
    let runs = std::fs::read_dir(snapshot.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let is_run = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        // Those of other allocators keep no such statistics.
        let is_native = !name.contains(".async.") && !name.contains(".nocache.");
        name.starts_with(&format!("{workload}.")) && name.ends_with(".json") && is_native
    };
    let runs = runs.filter(is_run).map(|path| truth(&path));
    runs.filter(|run| run["limit"] == recorded["limit"] && run["oom"].is_null())
        .map(|run| run["stats"]["reserved_bytes.all.peak"].as_u64().unwrap())
        .min()
        .unwrap()
}

fn tune(snapshot: &Path, recorded: &serde_json::Value) -> (serde_json::Value, f64) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gputrace"));
    command.args(["tune", "--json", "--torch-version", "2.11"]);
    command.args(["--device-memory", &recorded["total_memory"].to_string()]);
    if recorded["limit"].as_u64() > Some(0) {
        command.args(["--limit", &recorded["limit"].to_string()]);
    }
    let begin = Instant::now();
    let output = command.arg(snapshot).output().unwrap();
    let seconds = begin.elapsed().as_secs_f64();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (serde_json::from_slice(&output.stdout).unwrap(), seconds)
}

fn truth(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Snapshots of PyTorch 2.11 and what other settings really made of the same programs: those in the repository, or more.
fn real_snapshots() -> Vec<PathBuf> {
    let more = std::env::var_os("GPUTRACE_SHARED").map(|folder| PathBuf::from(folder).join("groundtruth"));
    let folder = more.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/groundtruth"));
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|it| it == "gz")).collect();
    paths.sort();
    paths
}
