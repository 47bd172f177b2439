//! Bounded recordings (`gputrace record --keep`, `--max-size`): what is left of one is whole from a moment on, says from which, and has
//! what was held then, however its recorder or its program ended.
//!
//! `keep/counted.c` allocates and frees in an order that is known here, so each trace is held against a model: allocations since that
//! moment have the numbers that follow each other, and what is held at the end is what the model holds. `GPUTRACE_KEEP_KILLS` is how often each
//! way to end is tried (6; 200 before a release).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gputrace_schemas::event::{Action, EventKind, LostCause, Nanos};
use gputrace_schemas::reader::{Trace, older_segments};
use gputrace_skip::skip;
use gputrace_tests::recorded::{self, Folder};
use serde_json::Value;

/// No recorder takes longer.
const PATIENCE: Duration = Duration::from_secs(300);
/// The least that `--max-size` takes: a segment has about 10,000 events.
const SMALL: u64 = 1 << 20;
/// Bytes of the first allocation; see counted.c.
const FIRST: u64 = 512;
/// Allocations that are never freed.
const KEPT: u64 = 10;
const SLOTS: usize = 64;

fn folder(name: &str) -> Folder {
    Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &format!("keep-{name}"))
}

fn program() -> PathBuf {
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join("counted");
    let building = built.with_extension(format!("{:?}", std::thread::current().id()));
    let output = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(["-std=gnu11", "-O1", "-g", "-Wall", "-o"])
        .arg(&building)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("keep/counted.c"))
        .arg("-L")
        .arg(fake_cuda::library_dir())
        .arg("-l:libcuda.so.1")
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::rename(&building, &built).expect("a built file");
    built
}

/// `gputrace`, with words.
fn gputrace(words: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Command {
    let mut command = Command::new(recorded::built().join("gputrace"));
    command.args(words).env("LD_LIBRARY_PATH", fake_cuda::library_dir()).stdin(Stdio::null());
    command
}

/// Records the program into `trace`.
fn record(trace: &Path, bounds: &[&str], program: &[&str]) -> Output {
    let mut command = gputrace(["record", "-o"]);
    command.arg(trace).args(bounds).arg("--").arg(self::program()).args(program);
    let output = command.output().expect("gputrace runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// What the program does: numbers of allocations that are held after so many allocations and so many frees.
struct Model {
    seed: u64,
    live: [Option<u64>; SLOTS],
    n_allocated: u64,
    n_freed: u64,
}

impl Model {
    fn new() -> Model {
        Model { seed: 1, live: [None; SLOTS], n_allocated: KEPT, n_freed: 0 }
    }

    fn step(&mut self) {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let at = ((self.seed >> 33) as u32) as usize % SLOTS;
        match self.live[at].take() {
            Some(_) => self.n_freed += 1,
            None => {
                self.live[at] = Some(self.n_allocated);
                self.n_allocated += 1;
            }
        }
    }

    fn held(&self) -> Vec<u64> {
        let mut held: Vec<u64> = (0..KEPT).chain(self.live.iter().flatten().copied()).collect();
        held.sort_unstable();
        held
    }
}

/// What a trace says.
struct Read {
    since: Option<Nanos>,
    /// Numbers of allocations since then, in order.
    allocated: Vec<u64>,
    n_freed: u64,
    /// Numbers of allocations that are held at the end, ascending.
    held: Vec<u64>,
}

fn read(trace: &Trace) -> Read {
    let since = trace.since();
    let mut read = Read { since, allocated: vec![], n_freed: 0, held: vec![] };
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    for event in trace.events() {
        let is_since = since.is_none_or(|since| event.time > since);
        let EventKind::Call(call) = &event.kind else { continue };
        // The process may have been killed inside of a call: whether that was done is not known.
        if call.result != Some(0) {
            continue;
        }
        match call.action {
            Action::Alloc => {
                let number = call.bytes.0 - FIRST;
                assert_eq!(live.insert(call.addr, number), None, "given out twice: {:#x}", call.addr);
                if is_since {
                    read.allocated.push(number);
                }
                assert!(
                    trace.stack_frames(event.stack).next().is_some(),
                    "{number}: its stack is not defined"
                );
            }
            Action::Free => {
                assert!(live.remove(&call.addr).is_some(), "freed and not held: {:#x}", call.addr);
                read.n_freed += u64::from(is_since);
            }
            _ => {}
        }
    }
    read.held = live.into_values().collect();
    read.held.sort_unstable();
    assert_eq!(
        trace.damages().iter().filter(|it| !it.what.contains("cut off")).count(),
        0,
        "{:?}",
        trace.damages()
    );
    read
}

/// Whether the trace says that its process dropped events.
fn ring_was_full(path: &Path) -> bool {
    let trace = Trace::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    trace
        .events()
        .any(|event| matches!(&event.kind, EventKind::Lost(lost) if lost.cause == LostCause::RingFull))
}

/// Whether the trace is whole since the moment it names, and holds at its end what the program held there.
fn check(path: &Path) -> Read {
    let trace = Trace::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let read = read(&trace);
    for pair in read.allocated.windows(2) {
        assert_eq!(pair[1], pair[0] + 1, "{}: allocations are missing", path.display());
    }
    // The model goes on until it has made the newest allocation of the trace; frees may follow.
    let newest = read.held.iter().chain(read.allocated.last()).max().copied().unwrap_or(0);
    let mut model = Model::new();
    while model.n_allocated <= newest {
        model.step();
    }
    // What follows is in a trace only where it was held: of a segment that has just begun.
    while model.held() != read.held {
        model.step();
        let most = if read.allocated.is_empty() { 2 * SLOTS as u64 } else { 1 };
        assert!(
            model.n_allocated <= newest + most,
            "{}: held {:?}, and not {:?}",
            path.display(),
            read.held,
            model.held()
        );
    }
    read
}

fn json(verb: &[&str], trace: &Path) -> Value {
    let output = gputrace(verb).arg(trace).output().expect("gputrace runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    serde_json::from_str(&text)
        .unwrap_or_else(|e| panic!("{verb:?}: {e}: {text}{}", String::from_utf8_lossy(&output.stderr)))
}

/// The section of a report that says since when it knows.
fn says_since(report: &Value) -> Option<u64> {
    let sections = report["processes"][0]["sections"].as_array().expect("sections");
    sections[0]["since_ns"].as_u64().filter(|_| sections[0]["name"] == "recording")
}

/// Bytes of the files of a recording.
fn size(trace: &Path) -> u64 {
    let older = older_segments(trace).into_iter().map(|(_, path)| path);
    older.chain([trace.to_owned()]).filter_map(|path| fs::metadata(path).ok()).map(|data| data.len()).sum()
}

fn held_by_site(trace: &Path) -> Value {
    let report = json(&["leaks", "--json"], trace);
    let sections = report["processes"][0]["sections"].as_array().expect("sections");
    sections.iter().find(|it| it["name"] == "not_freed").expect("what is held").clone()
}

#[test]
fn what_is_left_is_whole_since_it_says_and_holds_what_the_whole_recording_holds() {
    let folder = folder("whole");
    let (whole, kept) = (folder.path().join("whole.gtr"), folder.path().join("kept.gtr"));
    let rounds = ["300000"];
    record(&whole, &[], &rounds);
    record(&kept, &["--max-size", "1M"], &rounds);
    assert!(size(&whole) > SMALL && size(&kept) <= SMALL, "{} of {}", size(&kept), size(&whole));
    let (all, left) = (check(&whole), check(&kept));
    assert!(all.since.is_none() && left.since.is_some());
    assert!(left.allocated.len() < all.allocated.len() && left.allocated.len() > 1000);
    assert_eq!(all.held, left.held);
    assert_eq!(all.allocated.last(), left.allocated.last());
    assert_eq!(held_by_site(&whole), held_by_site(&kept));
    // Any segment's name is the recording's.
    let older = older_segments(&kept);
    assert!(older.len() > 1, "{older:?}");
    for (_, segment) in &older {
        assert_eq!(check(segment).allocated, left.allocated, "{}", segment.display());
    }
    // The last segment alone, under another name in another folder.
    let alone = folder.path().join("alone");
    fs::create_dir(&alone).expect("a folder");
    let last = alone.join("last.gtr");
    fs::copy(&kept, &last).expect("a copy");
    let last_read = check(&last);
    assert!(last_read.since > left.since && last_read.held == left.held);
    assert_eq!(held_by_site(&last), held_by_site(&whole));
    // All verbs answer, and say since when.
    for trace in [&kept, &last] {
        let since = says_since(&json(&["report", "--json"], trace));
        assert!(since.is_some_and(|since| since > 0), "{since:?}");
        for verb in ["report", "leaks", "oom", "stats"] {
            let shown = gputrace([verb]).arg(trace).output().expect("gputrace runs");
            let text = String::from_utf8_lossy(&shown.stdout).into_owned();
            assert!(
                text.contains("all events since"),
                "{verb}: {text}{}",
                String::from_utf8_lossy(&shown.stderr)
            );
        }
        for verb in ["replay", "tune"] {
            let shown = gputrace([verb]).arg(trace).output().expect("gputrace runs");
            let (text, said) =
                (String::from_utf8_lossy(&shown.stdout), String::from_utf8_lossy(&shown.stderr));
            assert!(
                text.contains("complete since") || said.contains("complete since"),
                "{verb}: {text}{said}"
            );
        }
        let named = trace.with_extension("named");
        let made = gputrace(["symbolise", "-o"]).arg(&named).arg(trace).output().expect("gputrace runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        assert_eq!(check(&named).held, left.held);
        assert_eq!(held_by_site(&named), held_by_site(&whole));
        let page = trace.with_extension("html");
        let made = gputrace(["html", "-o"]).arg(&page).arg(trace).output().expect("gputrace runs");
        assert!(made.status.success() && page.exists(), "{}", String::from_utf8_lossy(&made.stderr));
    }
    assert_eq!(says_since(&json(&["report", "--json"], &whole)), None);
}

#[test]
fn the_library_alone_keeps_within_the_variables_and_a_length_of_time_is_kept() {
    let folder = folder("time");
    let mut command = Command::new(program());
    recorded::preload(&mut command, &folder);
    command.env("LD_LIBRARY_PATH", fake_cuda::library_dir());
    // 400 pauses of 10 ms: longer than what is kept.
    command.args(["204800", "10000"]).env("GPUTRACE_KEEP", "400ms");
    assert!(command.status().expect("it runs").success());
    let trace = folder.traces(1).pop().expect("a trace");
    let since = trace.since().expect("its beginning was removed");
    let last = trace.span().expect("events").1;
    assert!(last.0 - since.0 >= 400_000_000, "{}", last.0 - since.0);
    let path = folder.files("gtr").pop().expect("a trace");
    let read = check(&path);
    assert!(read.allocated.len() < 100_000);
}

/// How a recording is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    Recorder,
    Program,
    Both,
}

fn recorder_of(trace: &Path) -> Option<i32> {
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.into_iter().find(|pid| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let output = format!("GPUTRACE_OUTPUT={}", trace.display());
        let mut words = words.split(|byte| *byte == 0).skip(1);
        words.next() == Some(b"recorder")
            && environment.split(|byte| *byte == 0).any(|it| it == output.as_bytes())
    })
}

fn kill(pid: i32) {
    let _ = Command::new("kill").args(["-KILL", &pid.to_string()]).stderr(Stdio::null()).status();
}

/// A program that goes with its test.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(trace: &Path) -> Started {
    let mut command = Command::new(program());
    let built = recorded::built();
    command
        .env("LD_PRELOAD", built.join("libgputrace.so"))
        .env("GPUTRACE_RECORDER", built.join("gputrace"))
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .env("GPUTRACE_OUTPUT", trace)
        .env("GPUTRACE_MAX_SIZE", SMALL.to_string())
        .args(["100000000", "1000"])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    Started(command.spawn().expect("it runs"))
}

/// Until the condition holds.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn killed_at_any_instant_nothing_of_what_is_kept_is_lost() {
    let n_kills: u64 = std::env::var("GPUTRACE_KEEP_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(6);
    let mut seed = u64::from(std::process::id());
    for n in 0..n_kills {
        for killed in [Killed::Recorder, Killed::Program, Killed::Both] {
            let folder = folder(&format!("kill-{n}-{killed:?}"));
            let trace = folder.path().join("killed.gtr");
            let mut program = start(&trace);
            // Segments are removed by now, some each second: every instant is near to a rotation.
            wait_for("segments", || older_segments(&trace).first().is_some_and(|(number, _)| *number > 1));
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            std::thread::sleep(Duration::from_micros((seed >> 33) % 150_000));
            let recorder = recorder_of(&trace).expect("a recorder");
            if killed != Killed::Program {
                kill(recorder);
            }
            if killed != Killed::Recorder {
                kill(program.0.id() as i32);
            } else {
                std::thread::sleep(Duration::from_millis(20));
                kill(program.0.id() as i32);
            }
            let _ = program.0.wait();
            wait_for("the recorder's end", || recorder_of(&trace).is_none());
            if ring_was_full(&trace) {
                // The recorder was kept from running for so long that the library had to drop events, and the trace says so.
                continue;
            }
            let read = check(&trace);
            assert!(read.since.is_some(), "{killed:?}");
            assert!(size(&trace) <= SMALL, "{killed:?}: {}", size(&trace));
            if n == 0 {
                assert!(says_since(&json(&["report", "--json"], &trace)).is_some());
            }
            let rings = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
            let its = format!("gputrace-{}", program.0.id());
            for ring in rings.filter(|ring| ring.file_name().to_string_lossy().contains(&its)) {
                let _ = fs::remove_file(ring.path());
            }
        }
    }
}

#[test]
fn processes_that_fork_keep_recordings_of_their_own() {
    let folder = folder("fork");
    let mut command = Command::new(program());
    recorded::preload(&mut command, &folder);
    command.env("LD_LIBRARY_PATH", fake_cuda::library_dir()).env("GPUTRACE_MAX_SIZE", SMALL.to_string());
    command.env("GPUTRACE_OUTPUT", folder.path().join("fork.gtr")).args(["300000", "50", "fork"]);
    assert!(command.status().expect("it runs").success());
    assert_eq!(folder.traces(2).len(), 2);
    for trace in folder.files("gtr") {
        let read = check(&trace);
        assert!(read.since.is_some() && size(&trace) <= SMALL, "{}", trace.display());
    }
}

/// Records on a disk of this size; the folder with what is left, or `None` where no such disk can be made.
fn on_a_small_disk(name: &str, disk: &str, bounds: &str) -> Option<(Folder, PathBuf)> {
    let folder = folder(name);
    let mount = folder.path().join("disk");
    fs::create_dir(&mount).expect("a folder");
    let script = format!(
        "mount -t tmpfs -o size={disk} none {mount} && {gputrace} record {bounds} -o {mount}/full.gtr -- {program} 400000 100; cp {mount}/full.gtr* {folder}",
        mount = mount.display(),
        gputrace = recorded::built().join("gputrace").display(),
        program = program().display(),
        folder = folder.path().display(),
    );
    let output = Command::new("unshare")
        .args(["--mount", "--user", "--map-root-user", "sh", "-c", &script])
        .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
        .output();
    let said = output.map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
    let trace = folder.path().join("full.gtr");
    if !trace.exists() {
        skip("a full disk in a mount namespace", format!("{said:?}"));
        return None;
    }
    Some((folder, trace))
}

#[test]
fn on_a_full_disk_the_oldest_makes_room_for_the_newest() {
    let Some((_folder, trace)) = on_a_small_disk("small", "1100k", "--max-size 4M") else { return };
    let read = check(&trace);
    assert!(read.allocated.len() > 1000);
    let opened = Trace::open(&trace).expect("a trace");
    assert!(opened.is_complete() && opened.since().is_some() && !opened.process().after_gap);
}

#[test]
fn a_disk_that_stays_full_leaves_what_came_before() {
    // Where the disk ends within a block is chance: room for the next segment is kept wherever that is.
    for disk in ["1300k", "1500k", "1604k"] {
        let Some((_folder, trace)) = on_a_small_disk("full", disk, "--max-size 64M") else { return };
        // One segment would have 8 MiB: there is no older one to remove, so events are lost, and another segment begins behind the gap.
        let read = check(&trace);
        assert!(read.since.is_some(), "{disk}: nothing was recorded after the gap");
        assert!(Trace::open(&trace).expect("a trace").process().after_gap, "{disk}");
        // The one before the gap is there by its own name, until it makes room for others.
        for (number, older) in older_segments(&trace) {
            let read = check(&older);
            assert!(number > 1 || read.allocated.len() > 1000);
        }
    }
}

#[test]
fn a_disk_that_is_smaller_than_the_bound_keeps_what_fits() {
    let Some((_folder, trace)) = on_a_small_disk("fits", "1100k", "--max-size 1200K") else { return };
    let read = check(&trace);
    assert!(read.since.is_some() && read.allocated.len() > 1000);
    // It was recorded to its end.
    assert!(Trace::open(&trace).expect("a trace").is_complete());
    let mut model = Model::new();
    (0..400_000).for_each(|_| model.step());
    assert_eq!(read.held, model.held());
}
