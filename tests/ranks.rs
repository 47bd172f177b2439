//! `gputrace ranks` on jobs of real processes, each with one known fault, and on healthy ones: `nccl/scenarios/jobs.py` has them
//! and what must be said of each. Whoever hangs is killed with SIGKILL, as people do it.
//!
//! No verdict may hang on how busy the machine is: that a job hangs is seen from what its processes do, how long a wait must be from
//! how far their calls were apart, and that recorders have seen it from their own looks. A finding that is about time alone is not held
//! against a healthy job here, nor is one missed that a busy machine's own delays may hide. `replay/ranks/src/tests.rs` holds those, on
//! clocks of its own.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use gputrace_schemas::event::EventKind;
use gputrace_schemas::reader::Trace;
use gputrace_tests::nccl_jobs::{list, python, source};
use gputrace_tests::patience::is_hang;
use gputrace_tests::recorded::{self, Folder};
use serde_json::Value;

/// Jobs that run at the same time.
const AT_ONCE: usize = 8;
/// Ranks that only waited for twice as long wait for ever.
const QUIET: Duration = Duration::from_millis(400);
/// Whoever has gone to sleep so often meanwhile, and recorded nothing, looks again and again for others.
const LOOKS: u64 = 100;
/// What is a long wait for `gputrace ranks`, at least.
const LEAST_WAIT: Duration = Duration::from_millis(1200);
/// A wait is long for it that is so many times as long as what was usual before.
const TIMES: u32 = 3;
/// A recorder that has gone to sleep so often has asked in between whether its process is alive.
const SLEEPS: u64 = 3;
/// A job that is stopped at work runs so long, and each rank has come so far.
const WORK: Duration = Duration::from_millis(800);
const WORKED: u64 = 10;
/// What a healthy job looks like where a rank does not get to a processor: it comes late, or has not come yet when the job is
/// stopped at work.
const HANGS_ON_TIME: &[&str] = &["straggler", "rank_stuck"];
/// No job takes a tenth of this, on a machine that does nothing else.
const PATIENCE: Duration = Duration::from_secs(1800);

#[test]
fn every_fault_is_named_with_its_rank_call_and_line_and_healthy_jobs_are_consistent() {
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "ranks");
    let modules = folder.path().join("site-packages");
    // Installed, so that the innermost line of the program is that of the scenario.
    let library = modules.join("fake_nccl");
    fs::create_dir_all(&library).expect("a folder");
    fs::copy(source("fake_nccl.py"), library.join("__init__.py")).expect("a copy of fake_nccl.py");
    let scenarios = list("scenarios/jobs.py");
    let n_healthy = scenarios.iter().filter(|scenario| scenario["expected"].is_null()).count();
    assert!(n_healthy >= 10 && scenarios.len() - n_healthy >= 20, "{n_healthy} of {}", scenarios.len());

    let next = Mutex::new(scenarios.iter());
    let wrong = Mutex::new(vec![]);
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(scenario) = next.lock().expect("no panic").next() else { return };
                    let problems = try_scenario(scenario, folder.path(), &modules);
                    let named = |problem| format!("{}: {problem}", scenario["name"]);
                    wrong.lock().expect("no panic").extend(problems.into_iter().map(named));
                }
            });
        }
    });
    let wrong = wrong.into_inner().expect("no panic");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Runs a scenario and says what is wrong with what `gputrace ranks` says of it.
fn try_scenario(scenario: &Value, folder: &Path, modules: &Path) -> Vec<String> {
    let name = scenario["name"].as_str().expect("a name");
    let traces = folder.join(name);
    fs::create_dir_all(&traces).expect("a folder");
    let mut ranks = start(scenario, name, &traces, modules);
    let n_untraced = scenario["untraced"].as_array().map_or(0, Vec::len);
    let n_traces = match name {
        // It never comes to CUDA.
        "has_no_trace_and_never_comes_to_init" => ranks.len() - 1,
        _ => ranks.len() - n_untraced,
    };
    wait(&mut ranks, &traces, &job(name), n_traces, scenario["endless"] == true);
    kill_all(&mut ranks);
    for rank in &mut ranks {
        rank.wait().expect("it ends");
    }
    remove_meetings(&job(name));
    until(|| n_complete(&traces) >= n_traces);
    let output =
        Command::new(recorded::built().join("gputrace")).args(["ranks", "--json"]).arg(&traces).output();
    let output = output.expect("gputrace runs");
    let said: Value = match serde_json::from_slice(&output.stdout) {
        Ok(said) => said,
        Err(_) => return vec![String::from_utf8_lossy(&output.stderr).into_owned()],
    };
    let mut problems = check(&scenario["expected"], &said);
    problems.extend(by_summaries(&traces, &output.stdout));
    problems
}

/// The summaries of a job say what its traces say, byte for byte.
fn by_summaries(traces: &Path, said: &[u8]) -> Option<String> {
    let summaries = traces.with_extension("summaries");
    let gputrace = recorded::built().join("gputrace");
    let reduced = Command::new(&gputrace).args(["reduce", "-o"]).args([&summaries, traces]).output();
    let reduced = reduced.expect("gputrace runs");
    if !reduced.status.success() {
        return Some(format!("cannot be reduced: {}", String::from_utf8_lossy(&reduced.stderr)));
    }
    let output = Command::new(&gputrace).args(["ranks", "--json"]).arg(&summaries).output();
    let output = output.expect("gputrace runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    let (by_traces, by_summaries) = [said, &output.stdout].map(String::from_utf8_lossy).into();
    let first = by_traces.lines().zip(by_summaries.lines()).find(|(a, b)| a != b);
    (output.stdout != said)
        .then(|| format!("its summaries say something else than its traces: {first:?} {errors}"))
}

fn job(name: &str) -> String {
    format!("{}.{name}", std::process::id())
}

fn start(scenario: &Value, name: &str, traces: &Path, modules: &Path) -> Vec<Child> {
    let gputrace = recorded::built().join("gputrace");
    let n_ranks = scenario["n_ranks"].as_u64().expect("a number");
    let environment = scenario["environment"].as_object().expect("an object");
    let start = |rank: u64, group: i32| {
        let trace = traces.join(format!("rank{rank}.gtr"));
        let is_traced = scenario["untraced"].as_array().is_none_or(|ranks| !ranks.contains(&rank.into()));
        let mut command = Command::new(if is_traced { &gputrace } else { python() });
        if is_traced {
            command.args(["record", "--ring-size", "2M", "-o"]).arg(trace).arg("--").arg(python());
        }
        command.arg(source("scenarios/jobs.py")).arg(name);
        command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", n_ranks.to_string())
            .env("MASTER_PORT", "29500")
            .env("FAKE_NCCL_JOB", job(name))
            .env("FAKE_NCCL_INIT", "4MiB")
            .env("FAKE_NCCL_FIRST", "4MiB")
            .env("LD_LIBRARY_PATH", fake_cuda::library_dir())
            .env("PYTHONPATH", modules)
            .envs(environment.iter().filter_map(|(name, value)| Some((name, value.as_str()?))))
            .process_group(group)
            .stderr(Stdio::null());
        command.spawn().expect("gputrace runs")
    };
    let first = start(0, 0);
    let group = first.id().cast_signed();
    [first].into_iter().chain((1..n_ranks).map(|rank| start(rank, group))).collect()
}

/// All by one call, as we may not get to a processor between two: a rank that outlives another waits for it.
fn kill_all(ranks: &mut [Child]) {
    if ranks.iter_mut().any(|rank| matches!(rank.try_wait(), Ok(None))) {
        let group = format!("-{}", ranks[0].id());
        let killed = Command::new("kill").args(["-KILL", "--", &group]).status().expect("kill runs");
        assert!(killed.success(), "{killed}");
    }
}

/// Until all ranks have ended, or those that have not do nothing any more; an endless job for a while.
fn wait(ranks: &mut [Child], traces: &Path, job: &str, n_traces: usize, endless: bool) {
    let started = Instant::now();
    let (mut before, mut began, mut at_work_since) = (Default::default(), Instant::now(), None);
    let mut looks: Vec<Look> = ranks.iter().map(Look::new).collect();
    // A rank may stop waiting just before it is judged, and not get to a processor: twice is enough.
    let mut n_idle = 0;
    while !is_hang(started, PATIENCE) && n_idle < 2 {
        if ranks.iter_mut().all(|rank| matches!(rank.try_wait(), Ok(Some(_)))) {
            return;
        }
        for look in &mut looks {
            look.again();
        }
        // A recorder that does not get to a processor writes late what its rank has long done: the others know.
        let now = (sizes_in(traces), met(job));
        let all_there = now.0.len() >= n_traces && now.0.values().all(|bytes| *bytes > 0);
        let all_work = now.1.values().any(|meeting| meeting.n_at_work(WORKED) == ranks.len());
        if all_there && endless && all_work && at_work_since.get_or_insert_with(Instant::now).elapsed() > WORK
        {
            return;
        }
        let has_grown = now != before;
        let is_long_enough = began.elapsed() > QUIET;
        if !all_there || has_grown || (is_long_enough && looks.iter().all(Look::only_waits)) {
            n_idle = if !all_there || has_grown { 0 } else { n_idle + 1 };
            (before, began) = (now, Instant::now());
            looks.iter_mut().for_each(Look::begin);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    // A recorder may see late that its rank ended: what follows counts from then.
    let n_ended = ranks.iter_mut().filter_map(|rank| rank.try_wait().ok()?).count();
    until(|| n_complete(traces) >= n_ended);
    // Whether somebody waits for long is judged by how long the calls before took, and when the end of a rank was seen.
    let usual = sizes_in(traces).into_keys().map(|trace| longest_gap(&trace)).max().unwrap_or_default();
    std::thread::sleep(LEAST_WAIT + usual * TIMES);
    let recorders: Vec<Recorder> = ranks.iter().filter_map(Recorder::of).collect();
    until(|| recorders.iter().all(Recorder::has_looked));
}

/// The longest that a process took from one call of NCCL to the next.
fn longest_gap(trace: &Path) -> Duration {
    let Ok(trace) = Trace::open(trace) else { return Duration::ZERO };
    let calls = trace.events().filter(|event| matches!(event.kind, EventKind::NcclEnter(_)));
    let times: Vec<u64> = calls.map(|event| event.time.0).collect();
    let gaps = times.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
    Duration::from_nanos(gaps.max().unwrap_or(0))
}

/// What records a rank, and how often it had gone to sleep when it was found.
struct Recorder {
    process: PathBuf,
    slept: u64,
}

impl Recorder {
    fn of(rank: &Child) -> Option<Recorder> {
        let ring = format!("gputrace.{}.", rank.id());
        let process = fs::read_dir("/proc").ok()?.flatten().map(|entry| entry.path()).find(|process| {
            let words = fs::read(process.join("cmdline")).unwrap_or_default();
            let words = String::from_utf8_lossy(&words);
            words.contains("\0recorder\0") && words.contains(&ring)
        })?;
        let slept = n_sleeps(&process)?;
        Some(Recorder { process, slept })
    }

    /// Since it was found; one that is gone has nothing to see any more.
    fn has_looked(&self) -> bool {
        n_sleeps(&self.process).is_none_or(|now| now >= self.slept + SLEEPS)
    }
}

/// How often a thread, or the first of a process, has gone to sleep by itself.
fn n_sleeps(thread: &Path) -> Option<u64> {
    let status = fs::read_to_string(thread.join("status")).ok()?;
    let slept = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    slept.and_then(|number| number.trim().parse().ok())
}

/// What a rank's process was seen doing.
struct Look {
    pid: u32,
    /// How often its threads had gone to sleep by themselves, when this began and now.
    sleeps: [u64; 2],
    /// Ticks of a processor's time that they have had.
    ticks: u64,
    /// When one of them last ran, or wanted to.
    busy: Instant,
}

impl Look {
    fn new(rank: &Child) -> Look {
        Look { pid: rank.id(), sleeps: [0; 2], ticks: 0, busy: Instant::now() }
    }

    fn begin(&mut self) {
        self.sleeps[0] = self.sleeps[1];
        self.busy = Instant::now();
    }

    fn again(&mut self) {
        let (mut sleeps, mut ticks, mut wants) = (0, 0, false);
        for thread in fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten().flatten() {
            let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            sleeps += n_sleeps(&thread.path()).unwrap_or(0);
            // From the state on, which is field 3 (proc(5)).
            let fields: Vec<&str> =
                stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
            wants |= matches!(fields.first(), Some(&("R" | "D")));
            ticks += [14, 15]
                .into_iter()
                .filter_map(|number| fields.get(number - 3)?.parse::<u64>().ok())
                .sum::<u64>();
        }
        if wants || ticks != self.ticks {
            self.busy = Instant::now();
        }
        (self.sleeps[1], self.ticks) = (sleeps, ticks);
    }

    /// It slept all the time, or did nothing but look whether something has come.
    fn only_waits(&self) -> bool {
        self.busy.elapsed() > QUIET || self.sleeps[1] >= self.sleeps[0] + LOOKS
    }
}

fn sizes_in(folder: &Path) -> BTreeMap<PathBuf, u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.path(), entry.metadata().ok()?.len()))).collect()
}

/// How many recorders have finished their traces.
fn n_complete(traces: &Path) -> usize {
    let is_complete = |path: &PathBuf| Trace::open(path).is_ok_and(|trace| trace.is_complete());
    sizes_in(traces).into_keys().filter(is_complete).count()
}

/// Until it is so, or patience ends.
fn until(is_so: impl Fn() -> bool) {
    let started = Instant::now();
    while !is_hang(started, PATIENCE) && !is_so() {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The files in which the ranks of a job meet.
fn meetings(job: &str) -> impl Iterator<Item = PathBuf> {
    let name = format!("fake-nccl.{job}.");
    let entries = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let is_its = move |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with(&name);
    entries.filter(is_its).map(|entry| entry.path())
}

/// How far the ranks of a communicator have come: its file's length, and what it says at its beginning and at its end (`struct
/// meeting` in fake-cuda/nccl_meet.h).
#[derive(PartialEq)]
struct Meeting(u64, Vec<u8>);

impl Meeting {
    /// How many ranks have made so many collectives.
    fn n_at_work(&self, least: u64) -> usize {
        let (numbers, _) = self.1.as_chunks::<8>();
        numbers.iter().skip(1).take(64).filter(|number| u64::from_le_bytes(**number) >= least).count()
    }
}

fn met(job: &str) -> BTreeMap<PathBuf, Meeting> {
    const COLLECTIVES: usize = 8 + 64 * 8;
    const MESSAGES: i64 = 3 * 64 * 64 * 8;
    let read = |path: PathBuf| {
        let mut file = fs::File::open(&path).ok()?;
        let length = file.metadata().ok()?.len();
        let mut bytes = vec![0; COLLECTIVES];
        let n = file.read(&mut bytes).ok()?;
        bytes.truncate(n);
        if file.seek(SeekFrom::End(-MESSAGES)).is_ok() {
            file.read_to_end(&mut bytes).ok()?;
        }
        Some((path, Meeting(length, bytes)))
    };
    meetings(job).filter_map(read).collect()
}

fn remove_meetings(job: &str) {
    meetings(job).for_each(|path| drop(fs::remove_file(path)));
}

fn check(expected: &Value, said: &Value) -> Vec<String> {
    let jobs = said["jobs"].as_array().map_or(&[][..], Vec::as_slice);
    let [job] = jobs else { return vec![format!("{} jobs instead of one", jobs.len())] };
    let texts = || {
        let findings = job["findings"].as_array().into_iter().flatten();
        findings.map(|finding| format!("\n    {}", finding["text"])).collect::<String>()
    };
    if expected["or_nothing"] == true && job["findings"].as_array().is_some_and(Vec::is_empty) {
        return vec![];
    }
    let mut problems = vec![];
    let mut same = |what: &str, wanted: &Value, got: &Value| {
        if wanted != got {
            problems.push(format!("{what} is {got} and should be {wanted}{}", texts()));
        }
    };
    let first = &job["findings"][0];
    if expected.is_null() {
        let findings = job["findings"].as_array().into_iter().flatten();
        let firm = findings.map(|it| &it["kind"]).find(|kind| HANGS_ON_TIME.iter().all(|it| kind != it));
        same("first finding", &Value::Null, firm.unwrap_or(&Value::Null));
        return problems;
    }
    for key in ["kind", "ranks", "communicator", "sequence"] {
        if expected[key] != "any" {
            same(key, &expected[key], &first[key]);
        }
    }
    for key in ["own", "others"] {
        if !expected[key].is_null() {
            same(&format!("line of {key}"), &expected[key], &first[key]["place"]["line"]);
        }
    }
    problems
}
