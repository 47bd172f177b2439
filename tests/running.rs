//! `gputrace ranks` of jobs while they run: `nccl/scenarios/running.py` has some that hang, and healthy slow ones.
//!
//! The test asks about each job until it is reported as a hang, and then kills it. It asserts no times: a hang must be reported at some
//! point, and a healthy job never. A rank of a healthy job that does not get to a processor for half a
//! minute looks as one that stands still; so that would be an excuse, the pauses of the healthy jobs are a third of that.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use gputrace_schemas::reader::Trace;
use gputrace_tests::nccl_jobs::{list, python, source};
use gputrace_tests::patience::{self, is_hang};
use gputrace_tests::recorded::{self, Folder};
use serde_json::Value;

/// No hang takes a third of this to be seen, on a machine that does nothing else.
const PATIENCE: Duration = Duration::from_secs(900);
/// Healthy jobs are looked at for so long at least: their slow steps come in the first half of it.
const LEAST: Duration = Duration::from_secs(50);
/// Seconds of silence after which stacks are read.
const HANG_AFTER: &str = "5";
/// Jobs that hang, at a time. Where all start at once, their first steps are slow, and a rank that computes is not called a hang before
/// many times what its steps took.
const HANGING_AT_ONCE: usize = 6;

struct Job {
    name: String,
    began: Instant,
    expected: Value,
    traces: PathBuf,
    ranks: Vec<Child>,
    /// What was said last.
    said: Value,
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // `gputrace record` and its program are a group.
            let group = format!("-{}", rank.id());
            let _ = Command::new("kill").args(["-KILL", "--", &group]).stderr(Stdio::null()).status();
            let _ = rank.wait();
        }
        let meetings = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let ours = format!("fake-nccl.{}.", job(&self.name));
        for file in meetings.filter(|file| file.file_name().to_string_lossy().starts_with(&ours)) {
            let _ = fs::remove_file(file.path());
        }
    }
}

#[test]
fn hangs_are_named_while_they_last_and_slow_jobs_are_not_called_hangs() {
    let folder = Folder::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "running");
    let modules = folder.path().join("site-packages");
    let library = modules.join("fake_nccl");
    fs::create_dir_all(&library).expect("a folder");
    fs::copy(source("fake_nccl.py"), library.join("__init__.py")).expect("a copy of fake_nccl.py");
    let (healthy, mut waiting): (Vec<Value>, Vec<Value>) =
        list("scenarios/running.py").into_iter().partition(|scenario| scenario["expected"].is_null());
    assert!(healthy.len() >= 12 && waiting.len() >= 12, "{} and {}", healthy.len(), waiting.len());
    let start = |scenario: &Value| start(scenario, folder.path(), &modules);
    let mut healthy: Vec<Job> = healthy.iter().map(start).collect();
    let mut hanging: Vec<Job> = Vec::new();

    let began = Instant::now();
    while !hanging.is_empty() || !waiting.is_empty() || began.elapsed() < LEAST {
        let n_more = HANGING_AT_ONCE.saturating_sub(hanging.len()).min(waiting.len());
        hanging.extend(waiting.drain(..n_more).map(|scenario| start(&scenario)));
        for job in &mut healthy {
            job.said = ranks(&job.traces);
            // Once is too often.
            if let Some(problem) = job.problem() {
                panic!("{}, which is healthy: {problem}", job.name);
            }
        }
        for mut job in std::mem::take(&mut hanging) {
            job.said = ranks(&job.traces);
            match job.problem() {
                None => ends(job),
                Some(problem) => {
                    assert!(!is_hang(job.began, PATIENCE), "{}: {problem}", job.name);
                    hanging.push(job);
                }
            }
        }
        std::thread::sleep(Duration::from_secs(2));
    }
    healthy.iter().for_each(|job| eprintln!("{}", row(&job.name, &job.expected, &job.said)));
    if !may_read() {
        gputrace_skip::skip("stacks of ranks that hang", "kernel.yama.ptrace_scope is not 0");
    }
}

/// Kills a job that is named as it should be: its traces say the same, also where the late rank stood. What others of them take of a
/// processor is theirs from then on.
fn ends(job: Job) {
    let began = job.began;
    let (name, traces, expected, n_ranks) =
        (job.name.clone(), job.traces.clone(), job.expected.clone(), job.ranks.len());
    eprintln!("{:?}: {}", began.elapsed(), row(&name, &expected, &job.said));
    drop(job);
    // Commands wait for recorders, but not for ever.
    patience::until("the recorders of a killed job", || n_complete(&traces) == n_ranks);
    let said = ranks(&traces);
    eprintln!("  after kill -9: {}", row(&name, &expected, &said));
    assert_eq!(said["jobs"][0]["verdict"], "inconsistent", "{name}");
    let stack = expected["stack"].as_str().unwrap_or_default();
    let stands_in = stands_in(&said, expected["ranks"][0].as_u64().unwrap_or(0));
    assert!(!may_read() || stands_in.contains(stack), "{name}: {stands_in} is not in {stack}");
}

fn n_complete(traces: &Path) -> usize {
    let entries = fs::read_dir(traces).into_iter().flatten().flatten();
    entries.filter(|entry| Trace::open(entry.path()).is_ok_and(|trace| trace.is_complete())).count()
}

/// Whether a recorder, which is no ancestor of its process, may read its memory.
fn may_read() -> bool {
    let is_free = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|it| it.trim() == "0");
    let has_yama = fs::metadata("/proc/sys/kernel/yama/ptrace_scope").is_ok();
    is_free || !has_yama || fs::metadata("/proc/self").is_ok_and(|it| it.uid() == 0)
}

impl Job {
    /// What is wrong with what was said of it.
    fn problem(&self) -> Option<String> {
        let said = &self.said["jobs"][0];
        let (verdict, first) = (&said["verdict"], &said["findings"][0]);
        let text = || format!("{verdict}: {first}");
        if self.expected.is_null() {
            let is_called_hang = verdict == "hangs" || verdict == "inconsistent";
            return is_called_hang.then(text);
        }
        let is_hang = verdict == "hangs" || verdict == "inconsistent";
        let is_same = ["kind", "ranks", "communicator"].iter().all(|key| self.expected[*key] == first[*key]);
        let line = &self.expected["others"];
        // What rank 1 did not receive is the waiting rank's own call.
        let places = ["others", "own"].map(|key| &first[key]["place"]["line"]);
        let has_line = line.is_null() || places.contains(&line);
        let rank = self.expected["ranks"][0].as_u64().unwrap_or(0);
        let stack = self.expected["stack"].as_str().unwrap_or_default();
        let is_read = !may_read() || stands_in(&self.said, rank).contains(stack);
        (!is_hang || !is_same || !has_line || !is_read).then(text)
    }
}

fn ranks(traces: &Path) -> Value {
    let gputrace = recorded::built().join("gputrace");
    let output =
        Command::new(gputrace).args(["ranks", "--json"]).arg(traces).output().expect("gputrace runs");
    // Not every rank has a trace yet.
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

fn stands_in(said: &Value, rank: u64) -> String {
    let standings = said["jobs"][0]["standings"].as_array().cloned().unwrap_or_default();
    let of = standings.iter().find(|standing| standing["rank"] == rank);
    of.map_or_else(String::new, |standing| standing["stands_in"].as_str().unwrap_or_default().to_owned())
}

/// What was said of a job, in a line of a table: the job, the public thread that it resembles, the verdict, the ranks, the call's line, and
/// where the late rank stands.
fn row(name: &str, expected: &Value, said: &Value) -> String {
    let job = &said["jobs"][0];
    let first = &job["findings"][0];
    let text = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let lines = ["others", "own"].map(|key| first[key]["place"]["line"].to_string());
    format!(
        "{name} | {} | {} | {} | ranks {} | lines {} | {}",
        text(&expected["like"]),
        text(&job["verdict"]),
        text(&first["kind"]),
        first["ranks"],
        lines.join(" "),
        first["ranks"][0].as_u64().map_or_else(String::new, |rank| stands_in(said, rank)),
    )
}

fn job(name: &str) -> String {
    format!("{}.{name}", std::process::id())
}

fn start(scenario: &Value, folder: &Path, modules: &Path) -> Job {
    let name = scenario["name"].as_str().expect("a name");
    let traces = folder.join(name);
    fs::create_dir_all(&traces).expect("a folder");
    let n_ranks = scenario["n_ranks"].as_u64().expect("a number");
    let environment = scenario["environment"].as_object().expect("an object");
    let start = |rank: u64| {
        let mut command = Command::new(recorded::built().join("gputrace"));
        command
            .args(["record", "--ring-size", "2M", "--hang-after", HANG_AFTER, "-o"])
            .arg(traces.join(format!("rank{rank}.gtr")))
            .arg("--")
            .arg(python())
            .arg(source("scenarios/running.py"))
            .arg(name)
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
            .process_group(0)
            .stderr(Stdio::null());
        command.spawn().expect("gputrace runs")
    };
    let ranks = (0..n_ranks).map(start).collect();
    Job {
        name: name.to_owned(),
        began: Instant::now(),
        expected: scenario["expected"].clone(),
        traces,
        ranks,
        said: Value::Null,
    }
}
