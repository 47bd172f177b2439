//! Bounded recordings (`gputrace record --keep`, `--max-size`): what is left of one is whole from a moment on, says from which, and has
//! what was held then, however its recorder or its program ended.
//!
//! `keep/counted.c` allocates and frees in an order that is known here, so each trace is held against a model: allocations since that
//! moment have the numbers that follow each other, and what is held at the end is what the model holds. `GPUTRACE_KEEP_KILLS` is how often they are
//! killed in each place (`make keep`: 200 times, and every verb is asked each time).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use gputrace_schemas::event::{Action, EventKind, LostCause, Nanos};
use gputrace_schemas::reader::{Trace, older_segments};
use gputrace_skip::skip;
use gputrace_tests::nccl_jobs;
use gputrace_tests::patience::{LONG, is_hang};
use gputrace_tests::recorded::{self, Folder};
use serde_json::{Value, json};

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

/// The recorder of a process, by the ring that it was given.
fn recorder_of(pid: u32) -> Option<u32> {
    let entries = fs::read_dir("/proc").ok()?.flatten();
    let mut pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let its = format!("gputrace.{pid}.");
    pids.find(|pid| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0).skip(1);
        words.next() == Some(b"recorder") && words.any(|it| String::from_utf8_lossy(it).contains(&its))
    })
}

/// Processes that a process has started.
fn children_of(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads.map(|it| fs::read_to_string(it.path().join("children")).unwrap_or_default());
    children
        .flat_map(|it| it.split_whitespace().filter_map(|it| it.parse().ok()).collect::<Vec<_>>())
        .collect()
}

fn kill(pid: u32) {
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

/// Where programs record that are to be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Plain,
    /// Two processes, both of which fork all the time.
    Forking,
    /// On a disk that is smaller than the bound.
    FullDisk,
}

/// A program that records until it is killed.
struct Run {
    folder: Folder,
    started: Started,
    place: Place,
    /// What is recorded.
    pids: Vec<u32>,
    is_killed: bool,
}

impl Run {
    /// Starts it, and waits until segments are removed, some each second: every instant is then near to a rotation. `None` where it
    /// cannot be had.
    fn start(place: Place, name: &str) -> Option<Run> {
        let folder = folder(&format!("{name}-{place:?}"));
        let (output, program) = (folder.path().join("%p.gtr"), self::program());
        let (mut command, max_size) = match place {
            Place::Plain | Place::Forking => (Command::new(&program), SMALL),
            Place::FullDisk => {
                let (disk, program) = (folder.path().display(), program.display());
                let script = format!(
                    "mount -t tmpfs -o size=1100k none {disk} && {program} 100000000 1000; exec sleep 600"
                );
                let mut command = Command::new("unshare");
                command.args(["--mount", "--user", "--map-root-user", "sh", "-c", &script]);
                (command, 4 * SMALL)
            }
        };
        let built = recorded::built();
        command
            .env("LD_PRELOAD", built.join("libgputrace.so"))
            .env("GPUTRACE_RECORDER", built.join("gputrace"))
            .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
            .env("GPUTRACE_OUTPUT", &output)
            .env("GPUTRACE_MAX_SIZE", max_size.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        match place {
            Place::Plain => command.args(["100000000", "1000"]),
            Place::Forking => command.args(["100000000", "1000", "forks"]),
            Place::FullDisk => &mut command,
        };
        let started = Started(command.spawn().ok()?);
        let mut run = Run { folder, started, place, pids: vec![], is_killed: false };
        let (n, began) = (if place == Place::Forking { 2 } else { 1 }, Instant::now());
        loop {
            run.pids = run.recorded();
            let rotates = |pid: &u32| older_segments(&run.seen(*pid)).first().is_some_and(|it| it.0 > 1);
            if run.pids.len() == n && run.pids.iter().all(rotates) {
                return Some(run);
            }
            if run.started.0.try_wait().expect("a child").is_some() && place == Place::FullDisk {
                skip("a full disk in a mount namespace", "unshare or mount is refused");
                return None;
            }
            assert!(!is_hang(began, LONG), "segments");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The processes with a trace.
    fn recorded(&self) -> Vec<u32> {
        let first = self.started.0.id();
        let pids = [first].into_iter().chain(children_of(first));
        pids.filter(|pid| self.seen(*pid).exists()).collect()
    }

    /// A trace, as it is found from here.
    fn seen(&self, pid: u32) -> PathBuf {
        let trace = self.folder.path().join(format!("{pid}.gtr"));
        match self.place {
            Place::Plain | Place::Forking => trace,
            Place::FullDisk => {
                let root = format!("/proc/{}/root", self.started.0.id());
                Path::new(&root).join(trace.strip_prefix("/").expect("an absolute path"))
            }
        }
    }

    /// Kills some of it at once, and the rest a little later.
    fn kill(&mut self, killed: Killed) {
        let pids = self.pids.clone();
        let recorders: Vec<u32> = pids.iter().filter_map(|pid| recorder_of(*pid)).collect();
        assert_eq!(recorders.len(), pids.len());
        if killed != Killed::Program {
            recorders.iter().for_each(|pid| kill(*pid));
        }
        if killed == Killed::Recorder {
            std::thread::sleep(Duration::from_millis(20));
        }
        pids.iter().for_each(|pid| kill(*pid));
        self.is_killed = true;
        if self.place != Place::FullDisk {
            let _ = self.started.0.wait();
        }
        wait_for("the recorders' end", || pids.iter().all(|pid| recorder_of(*pid).is_none()));
    }

    /// What is left, in a folder of its own.
    fn left(&self) -> Vec<PathBuf> {
        let to = self.folder.path().with_extension("left");
        let _ = fs::remove_dir_all(&to);
        fs::create_dir_all(&to).expect("a folder");
        let copied = |pid: &u32| {
            let from = self.seen(*pid);
            let older = older_segments(&from).into_iter().map(|(_, path)| path);
            for file in older.chain([from.clone()]) {
                // Where it was killed between two names, the numbers alone are there.
                let _ = fs::copy(&file, to.join(file.file_name().expect("a name")));
            }
            to.join(from.file_name().expect("a name"))
        };
        self.pids.iter().map(copied).collect()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        for pid in &self.pids {
            if !self.is_killed {
                kill(*pid);
            }
            rings_of(*pid).into_iter().for_each(|ring| drop(fs::remove_file(ring)));
        }
        let _ = fs::remove_dir_all(self.folder.path().with_extension("left"));
    }
}

/// Rings that a process left in memory.
fn rings_of(pid: u32) -> Vec<PathBuf> {
    let rings = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let its = format!("gputrace.{pid}.");
    let named = rings.filter(|ring| ring.file_name().to_string_lossy().starts_with(&its));
    named.map(|ring| ring.path()).filter(|path| path.extension().is_some_and(|it| it == "ring")).collect()
}

/// Until the condition holds.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(!is_hang(began, LONG), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Every verb answers, and says since when.
fn answers(trace: &Path) {
    for verb in ["report", "leaks", "oom", "stats", "replay", "tune"] {
        let shown = gputrace([verb]).arg(trace).output().expect("gputrace runs");
        let text = [shown.stdout, shown.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        assert!(text.contains("all events since") || text.contains("complete since"), "{verb}: {text}");
    }
    let page = trace.with_extension("html");
    let made = gputrace(["html", "-F", "-o"]).arg(&page).arg(trace).output().expect("gputrace runs");
    assert!(made.status.success() && page.exists(), "{}", String::from_utf8_lossy(&made.stderr));
    let _ = fs::remove_file(page);
}

/// Kills it so often, at random instants, in each of the ways.
fn killed_at_random(place: Place) {
    let asked: Option<u64> = std::env::var("GPUTRACE_KEEP_KILLS").ok().and_then(|n| n.parse().ok());
    let n_kills = asked.unwrap_or(if place == Place::Plain { 18 } else { 6 });
    let mut seed = u64::from(std::process::id());
    let (mut n_traces, mut n_full, mut n_gaps, mut n_events) = (0, 0, 0, 0);
    let ways = [Killed::Recorder, Killed::Program, Killed::Both];
    for (n, killed) in (0..n_kills).zip(ways.into_iter().cycle()) {
        let Some(mut run) = Run::start(place, &format!("kill-{n}-{killed:?}")) else { return };
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        std::thread::sleep(Duration::from_micros((seed >> 33) % 150_000));
        run.kill(killed);
        for trace in run.left() {
            n_traces += 1;
            if ring_was_full(&trace) {
                // The recorder was kept from running for so long that the library had to drop events, and the trace says so.
                n_full += 1;
                continue;
            }
            let read = check(&trace);
            assert!(read.since.is_some(), "{killed:?}");
            n_events += read.allocated.len() as u64 + read.n_freed;
            n_gaps += u64::from(Trace::open(&trace).expect("a trace").process().after_gap);
            assert!(place == Place::FullDisk || size(&trace) <= SMALL, "{killed:?}: {}", size(&trace));
            if n == 0 || asked.is_some() {
                answers(&trace);
            }
        }
    }
    eprintln!(
        "{place:?}: {n_kills} kills, {n_traces} traces with {n_events} events since they say; {n_full} whose ring was full, {n_gaps} behind a gap"
    );
}

#[test]
fn killed_at_any_instant_nothing_of_what_is_kept_is_lost() {
    killed_at_random(Place::Plain);
}

#[test]
fn the_same_while_it_forks() {
    killed_at_random(Place::Forking);
}

#[test]
fn the_same_on_a_full_disk() {
    killed_at_random(Place::FullDisk);
}

/// Its recorder is killed around a change of segments, and the program some time after.
#[test]
fn what_a_killed_recorder_had_not_read_is_a_trace_that_says_since_when() {
    let folder = folder("recover");
    let rest = folder.path().join("rest.gtr");
    let mut run = Run::start(Place::Plain, "recovered").expect("a program");
    let (pid, trace) = (run.pids[0], run.seen(run.pids[0]));
    let newest = || older_segments(&trace).last().map(|(number, _)| *number);
    let before = newest();
    wait_for("another segment", || newest() != before);
    run.kill(Killed::Recorder);
    let rings = rings_of(pid);
    assert_eq!(rings.len(), 1, "{rings:?}");
    let made = gputrace(["recover", "-o"]).arg(&rest).arg(&rings[0]).output().expect("gputrace runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    assert!(rings_of(pid).is_empty());
    // The segments are one trace, as without it.
    let kept = check(&trace);
    assert!(older_segments(&trace).len() > 1);
    // The ring has what followed, with no event in neither but those that were read and not yet written.
    let opened = Trace::open(&rest).expect("a trace");
    let numbers: Vec<u64> = opened
        .events()
        .filter_map(|event| match event.kind {
            EventKind::Call(call) if call.action == Action::Alloc && call.result == Some(0) => {
                Some(call.bytes.0 - FIRST)
            }
            _ => None,
        })
        .collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "allocations are missing");
    assert!(numbers.last() > kept.allocated.last(), "{:?} {:?}", numbers.last(), kept.allocated.last());
    let since = opened.since().expect("it begins within the process");
    let (kept_from, kept_until) = Trace::open(&trace).expect("a trace").span().expect("events");
    assert!(since > kept_from && opened.span().expect("events").1 > kept_until);
    assert!(opened.events().all(|event| event.time > since));
    assert!(says_since(&json(&["report", "--json"], &rest)).is_some());
    for (verb, words) in [("report", "recorder of this process was killed"), ("leaks", "not known")] {
        let shown = gputrace([verb]).arg(&rest).output().expect("gputrace runs");
        let text = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(text.contains(words), "{verb}: {text}{}", String::from_utf8_lossy(&shown.stderr));
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

/// Two ranks of which each keeps another part; what `gputrace ranks` says of them, and of their summaries.
fn two_ranks(name: &str, words: &[&str], sizes: [&str; 2]) -> [Value; 2] {
    let folder = folder(name);
    let job = format!("{}.{name}", std::process::id());
    let start = |rank: usize| {
        let trace = folder.path().join(format!("rank{rank}.gtr"));
        let mut command = gputrace(["record", "--max-size", sizes[rank], "-o"]);
        command.arg(trace).arg("--").arg(nccl_jobs::python());
        command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("keep/steps.py")).args(words);
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", "2")
            .env("FAKE_NCCL_JOB", &job)
            .env("PYTHONPATH", nccl_jobs::source(""))
            .env("COME", folder.path().join(format!("come{rank}")))
            .stderr(Stdio::null());
        Started(command.spawn().expect("gputrace runs"))
    };
    let mut ranks = [start(0), start(1)];
    if words.contains(&"late") {
        let come = |rank: usize| folder.path().join(format!("come{rank}")).exists();
        wait_for("the last step", || come(0) && come(1));
        // A long wait for `gputrace ranks`.
        std::thread::sleep(Duration::from_secs(2));
        // `record` has become the program.
        ranks.iter().for_each(|rank| kill(rank.0.id()));
    }
    for rank in &mut ranks {
        rank.0.wait().expect("it ends");
    }
    let meetings = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    for meeting in meetings.filter(|it| it.file_name().to_string_lossy().contains(&format!(".{job}."))) {
        let _ = fs::remove_file(meeting.path());
    }
    folder.traces(2);
    let ranks = |of: &Path| {
        let output = gputrace(["ranks", "--json"]).arg(of).output().expect("gputrace runs");
        serde_json::from_slice::<Value>(&output.stdout).expect("JSON")["jobs"][0].clone()
    };
    let summaries = folder.path().join("summaries");
    let reduced = gputrace(["reduce", "-o"]).arg(&summaries).arg(folder.path()).output();
    assert!(reduced.expect("gputrace runs").status.success());
    [ranks(folder.path()), ranks(&summaries)]
}

#[test]
fn ranks_that_keep_different_parts_are_compared_where_both_know() {
    for said in two_ranks("ranks", &["160000"], ["1M", "3M"]) {
        assert_eq!(said["verdict"], "consistent", "{said}");
        assert_eq!(said["findings"].as_array().map(Vec::len), Some(0), "{said}");
        assert_eq!(said["communicators"][0]["collectives"], json!([320_000, 320_000]));
        let window = &said["window"];
        let first = &window["first_calls"][0];
        let n_compared = 2 * (320_000 - first["sequence"].as_u64().expect("a number"));
        assert_eq!((&window["rank"], &first["order"]), (&json!(0), &json!("collective")), "{said}");
        assert!(n_compared < 640_000 && said["calls"].as_u64().is_some_and(|calls| calls >= n_compared));
        // The report does not mention calls that one of them no longer has.
        let notes = said["notes"].as_array().expect("notes");
        assert!(notes[0].as_str().is_some_and(|note| note.contains("calls are compared since")), "{said}");
    }
}

#[test]
fn a_rank_that_stays_away_is_named_by_what_both_keep() {
    for said in two_ranks("late", &["160000", "late"], ["1M", "3M"]) {
        assert_eq!(said["verdict"], "inconsistent", "{said}");
        let findings = said["findings"].as_array().expect("findings");
        assert_eq!(findings.len(), 1, "{said}");
        assert_eq!(
            (&findings[0]["ranks"], &findings[0]["sequence"]),
            (&json!([1]), &json!(320_000)),
            "{said}"
        );
    }
}
