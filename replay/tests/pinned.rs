//! Pinned memory of the host in PyTorch's snapshots: one that PyTorch wrote, and others made here as PyTorch 2.15 lays them out
//! (`host_segments`, `host_traces`: `HostSegmentInfo` and `TraceEntry` of `c10/core/CachingDeviceAllocator.h`, written by
//! `aten/src/ATen/core/CachingHostAllocator.h`; a device of -1, one block in each segment, and one list of entries).

mod pickles;

use std::path::{Path, PathBuf};

use gputrace_replay::import::load;
use gputrace_replay::report::summary::Summary;
use gputrace_replay::story::Story;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::{EventKind, HOST};
use pickles::{Item, pickle};

const MIB: i64 = 1 << 20;
const BASE: i64 = 0x7f00_0000_0000;

fn frames(line: i64) -> Item {
    let (name, file) = (Item::Text("load"), Item::Text("/job/loader.py"));
    Item::List(vec![Item::Dict(vec![("name", name), ("filename", file), ("line", Item::Int(line))])])
}

/// `action MiB-address MiB line`, one a line; a line of 0 has no frames.
fn traces(text: &'static str) -> Item {
    let entry = |(at, line): (usize, &'static str)| {
        let mut words = line.split_whitespace();
        let action = words.next().unwrap();
        let mut number = || words.next().unwrap().parse::<i64>().unwrap();
        let (address, bytes, line) = (BASE + number() * MIB, number() * MIB, number());
        let mut keys = vec![
            ("action", Item::Text(action)),
            ("addr", Item::Int(address)),
            ("size", Item::Int(bytes)),
            ("stream", Item::Int(0)),
            ("time_us", Item::Int(1_795_574_021_000_000 + at as i64)),
            ("compile_context", Item::Text("")),
            ("user_metadata", Item::Text("")),
        ];
        if line > 0 {
            keys.push(("frames", frames(line)));
        }
        Item::Dict(keys)
    };
    Item::List(text.lines().map(str::trim).filter(|line| !line.is_empty()).enumerate().map(entry).collect())
}

fn segment(address: i64, bytes: i64, state: &'static str, line: i64) -> Item {
    let (address, bytes) = (Item::Int(BASE + address * MIB), Item::Int(bytes * MIB));
    let block = Item::Dict(vec![
        ("address", address.clone()),
        ("size", bytes.clone()),
        ("requested_size", bytes.clone()),
        ("state", Item::Text(state)),
        ("frames", if line > 0 { frames(line) } else { Item::List(vec![]) }),
    ]);
    Item::Dict(vec![
        ("device", Item::Int(-1)),
        ("address", address),
        ("total_size", bytes),
        ("stream", Item::Int(0)),
        ("segment_type", Item::Text("small")),
        ("is_expandable", Item::Int(0)),
        ("blocks", Item::List(vec![block])),
    ])
}

fn written(name: &str, host: Vec<(&'static str, Item)>) -> PathBuf {
    let mut keys =
        vec![("segments", Item::List(vec![])), ("device_traces", Item::List(vec![Item::List(vec![])]))];
    keys.extend(host);
    let mut bytes = vec![0x80, 4];
    pickle(&Item::Dict(keys), &mut bytes);
    bytes.push(b'.');
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn with(name: &str, segments: Vec<Item>, entries: &'static str) -> Story {
    let keys = vec![("host_segments", Item::List(segments)), ("host_traces", traces(entries))];
    Story::read(&written(name, keys)).unwrap()
}

/// MiB: pinned at most, pinned at the end, in blocks at the end.
fn figures(story: &Story) -> [u64; 3] {
    let (host, blocks) = (story.ledger.host(), story.ledger.host_blocks());
    [host.peak(), host.now().bytes, blocks.now().bytes].map(|bytes| bytes.0 >> 20)
}

/// Who has it at the end: place, owner, MiB.
fn held(story: &Story) -> Vec<(String, String, u64)> {
    let sites = &story.ledger.sites;
    let mut held: Vec<_> = story
        .ledger
        .live_heap_blocks()
        .map(|(_, block)| {
            assert_eq!(block.device, HOST);
            let owner = sites.site(block.site).map(|site| sites.owner(site.owner).to_owned()).unwrap();
            (sites.site_name(block.site), owner, block.bytes.0 >> 20)
        })
        .collect();
    held.sort();
    held
}

fn notes(story: &Story) -> Vec<&str> {
    story.ledger.health.notes.iter().map(|(_, note)| note.as_str()).collect()
}

#[test]
fn what_pytorch_itself_wrote_is_booked_as_its_program_did() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/snapshots/pinned-2.15.pickle.gz");
    let story = Story::read(&path).unwrap();
    // tests/golden/snapshots/pinned.py: 2 + 4 + 3 x 1 + 32 MiB at most (a segment of 1 MiB is used again), and at its end
    // 2 + 3 x 1 + 16 + 1; of these 16 are in no block.
    assert_eq!(figures(&story), [41, 22, 6]);
    let wanted = [
        ("(no stack recorded)", 2),
        ("<module> (/job/pinned.py:42)", 1),
        ("pinned (/job/pinned.py:13)", 1),
        ("pinned (/job/pinned.py:13)", 1),
        ("pinned (/job/pinned.py:13)", 1),
    ];
    let wanted = wanted.map(|(place, mib)| (place.into(), "PyTorch, pinned memory".into(), mib));
    assert_eq!(held(&story), wanted);
    // Every frame is there: who called the function that pins.
    let source = Source::open(&path).unwrap();
    let (_, block) = story.ledger.live_heap_blocks().find(|(_, block)| block.bytes.0 == 1 << 20).unwrap();
    assert!(source.definitions().stack(block.stack).is_some_and(|stack| !stack.frames.is_empty()));
    let summary = serde_json::to_value(Summary::of(&[story])).unwrap();
    let wanted = serde_json::json!({
        "peak_bytes": 41 << 20, "live_bytes": 22 << 20, "blocks_peak_bytes": 37 << 20, "blocks_live_bytes": 6 << 20,
    });
    assert_eq!(summary["processes"][0]["host"], wanted);
}

#[test]
fn a_segment_that_is_used_again_is_held_by_the_newest_request() {
    let story = with(
        "again.pickle",
        vec![segment(0, 4, "active_allocated", 9), segment(8, 2, "inactive", 0)],
        "segment_alloc 0 4 7
         alloc 0 4 7
         segment_alloc 8 2 8
         alloc 8 2 8
         free_requested 0 4 7
         free_completed 0 4 7
         free_requested 8 2 8
         alloc 0 4 9",
    );
    assert_eq!(figures(&story), [6, 6, 4]);
    assert_eq!(held(&story), [("load (/job/loader.py:9)".into(), "PyTorch, pinned memory".into(), 4)]);
    assert_eq!(notes(&story), [""; 0]);
    // Requests and ends are one event each; nothing of a device is made up.
    assert_eq!((story.ledger.run.n_events, story.ledger.devices().len()), (7, 0));
}

#[test]
fn what_was_there_before_the_history_is_there_from_its_start() {
    let story = with(
        "late.pickle",
        vec![segment(0, 4, "active_allocated", 5), segment(16, 1, "inactive", 0)],
        "free_requested 8 2 6
         free_completed 8 2 6
         segment_free 8 2 0
         segment_alloc 24 8 7
         segment_free 24 8 0",
    );
    // 4 + 2 + 1 from the start, then without the 2, and 8 more for a time.
    assert_eq!(figures(&story), [13, 5, 4]);
    assert_eq!(held(&story), [("load (/job/loader.py:5)".into(), "PyTorch, pinned memory".into(), 4)]);
    let wanted = "pinned memory: the history does not show when 3 segments were pinned: assumed before it";
    assert_eq!(notes(&story), [wanted]);
}

#[test]
fn without_requests_or_without_a_history_the_rest_is_used() {
    // skip_actions=["free_requested"].
    let story = with("ends.pickle", vec![], "segment_alloc 0 4 7\nalloc 0 4 7\nfree_completed 0 4 7");
    assert_eq!((figures(&story), story.ledger.run.n_events), ([4, 4, 0], 3));
    // `state` keeps no history.
    let story = with("state.pickle", vec![segment(0, 4, "active_allocated", 5)], "");
    assert_eq!(figures(&story), [4, 4, 4]);
    let wanted = "pinned memory: its history was not recorded; it is shown as of the end";
    assert_eq!(notes(&story), [wanted]);
}

#[test]
fn older_releases_and_who_did_not_ask_have_no_pinned_memory() {
    let nothing = |host| {
        let story = Story::read(&written("none.pickle", host)).unwrap();
        assert_eq!((figures(&story), notes(&story).len()), ([0, 0, 0], 0));
    };
    nothing(vec![]);
    nothing(vec![("host_segments", Item::None), ("host_traces", Item::None)]);
    nothing(vec![("host_segments", Item::List(vec![])), ("host_traces", Item::List(vec![]))]);
    nothing(vec![("host_traces", Item::List(vec![]))]);
}

#[test]
fn hostile_pinned_memory_is_an_error_or_is_left_out_and_said() {
    let error = |key, value| {
        let path = written("wrong.pickle", vec![(key, value)]);
        Story::read(&path).err().map(|error| error.to_string()).expect("an error")
    };
    let wrong = error("host_segments", Item::Int(3));
    assert!(wrong.contains("wrong.pickle") && wrong.contains("`host_segments` is not a list"), "{wrong}");
    let wrong = error("host_traces", Item::Text("x"));
    assert!(wrong.contains("`host_traces` is not a list"), "{wrong}");
    // As lists of devices have it.
    let wrong = error("host_traces", Item::List(vec![Item::List(vec![])]));
    assert!(wrong.contains("`host_traces` has an element that is not an event"), "{wrong}");
    let story = with(
        "hostile.pickle",
        vec![
            segment(0, 1 << 30, "active_allocated", 0),
            segment(-1 << 30, 1, "active_allocated", 0),
            Item::Int(0),
        ],
        "segment_alloc 0 -4 7
         segment_alloc 0 1073741824 7
         segment_alloc 8 4 7
         segment_alloc 8 4 7
         alloc 8 4 7
         alloc 8 4 8
         segment_free 64 1 0
         unheard_of 0 4 7",
    );
    assert_eq!(figures(&story), [5, 4, 4]);
    let wanted = "pinned memory: left out 5 entries with an address or a size that no machine has: the snapshot is damaged";
    assert!(notes(&story).contains(&wanted), "{:?}", notes(&story));
    assert_eq!(story.ledger.findings.iter().count(), 1, "what was pinned twice is a finding");
}

#[test]
fn a_replay_says_that_pinned_memory_is_not_in_it() {
    let keys = vec![
        ("host_segments", Item::List(vec![segment(0, 2, "inactive", 0)])),
        ("host_traces", traces("segment_alloc 0 2 7")),
    ];
    let notes = load(&written("replayed.pickle", keys)).unwrap().notes;
    assert_eq!(notes, ["pinned host memory is not replayed: 1 segments of 2097152 bytes at the end"]);
}

#[test]
fn events_of_pinned_memory_are_in_the_order_of_all() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/snapshots/pinned-2.15.pickle.gz");
    let source = Source::open(&path).unwrap();
    let (mut before, mut devices) = (None, std::collections::BTreeSet::new());
    for event in source.events() {
        assert!(before.is_none_or(|before| before <= event.time));
        before = Some(event.time);
        match event.kind {
            EventKind::Call(call) => _ = devices.insert(call.device),
            EventKind::BlockAlloc(block) => _ = devices.insert(block.device),
            _ => {}
        }
    }
    assert_eq!(devices.into_iter().collect::<Vec<_>>(), [HOST, 0]);
}
