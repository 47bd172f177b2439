//! Builds the programs of the scenarios and runs them, alone or recorded.

use crate::emulation::name_of_traces;
use crate::processes::*;
use crate::scenarios::*;
use crate::traces::*;
use gputrace_schemas::reader::{Error, Trace};
use gputrace_tests::recorded;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Everything built once, and where runs have their files.
pub(crate) struct Workshop {
    pub(crate) folder: PathBuf,
    pub(crate) seed: AtomicU64,
    pub(crate) runs: AtomicU32,
    pub(crate) pythons: Vec<PathBuf>,
}

/// How a run ended.
pub(crate) struct Run {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    /// Without what we say.
    pub(crate) stderr: String,
    pub(crate) said: String,
    pub(crate) cpu: f64,
    /// By line: calls asked for, calls that came back, requests.
    pub(crate) lines: Vec<Line>,
    pub(crate) traces: PathBuf,
    pub(crate) hung: Option<String>,
    pub(crate) began: SystemTime,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Line {
    pub(crate) requests: u64,
    pub(crate) asked: u64,
    pub(crate) completed: u64,
    pub(crate) process: u64,
}

pub(crate) fn is_long() -> bool {
    std::env::var("GPUTRACE_TORTURE").is_ok_and(|form| form == "long")
}

pub(crate) fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

pub(crate) fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("torture")
}

impl Workshop {
    pub(crate) fn new() -> Workshop {
        let folder = std::env::temp_dir().join(format!("gputrace-torture.{}", std::process::id()));
        fs::create_dir_all(folder.join("driver")).expect("a folder");
        // Another user must be able to come here, and the working copy may be closed to it.
        let open = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o755)).expect("ours");
        open(&folder);
        for file in ["libgputrace.so", "gputrace"] {
            fs::copy(recorded::built().join(file), folder.join(file)).expect("a copy");
            open(&folder.join(file));
        }
        let seed = std::env::var("GPUTRACE_TORTURE_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()) << 32 | 0x9e37_79b9);
        say(&format!("torture: seed {seed}"));
        let list = std::env::var("GPUTRACE_TEST_PYTHONS").unwrap_or_else(|_| "python3".to_owned());
        let workshop = Workshop {
            folder,
            seed: AtomicU64::new(seed),
            runs: AtomicU32::new(0),
            pythons: list.split(':').filter_map(real_python).collect(),
        };
        workshop
            .build("driver.c", "-shared -fPIC -Wl,-soname,libcuda.so.1", "driver/libcuda.so.1")
            .expect("a driver");
        workshop.build("launch.c", "", "launch").expect("a launcher");
        workshop
    }

    pub(crate) fn random(&self, below: u64) -> u64 {
        // xorshift64: any order of the threads that ask gives one of its numbers.
        let step = |mut x: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x
        };
        let before = self.seed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |x| Some(step(x)));
        step(before.unwrap_or_default()) % below.max(1)
    }

    /// Compiles a file of `torture/`.
    pub(crate) fn build(&self, source: &str, options: &str, name: &str) -> Result<PathBuf, String> {
        let target = self.folder.join(name);
        let is_cpp = source.ends_with(".cc");
        let (variable, compiler) = if is_cpp { ("CXX", "c++") } else { ("CC", "cc") };
        let mut command = Command::new(std::env::var_os(variable).unwrap_or_else(|| compiler.into()));
        command.arg(if is_cpp { "-std=gnu++20" } else { "-std=gnu11" });
        command
            .args(["-O1", "-g", "-Wall", "-Wextra", "-pthread", "-o"])
            .arg(&target)
            .arg(sources().join(source));
        let is_library = options.contains("-shared");
        if !is_library && !options.contains("-DBY_DLOPEN") && name != "launch" {
            command.arg(self.folder.join("driver/libcuda.so.1"));
        }
        let output = command.args(options.split_whitespace()).arg("-ldl").output();
        let output = output.map_err(|error| format!("no compiler: {error}"))?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() { Ok(target) } else { Err(format!("{source} {options}: {said}")) }
    }

    /// What scenarios name: their programs by source and options, and the libraries of their words.
    pub(crate) fn build_all(
        &self,
        scenarios: &[&Scenario],
    ) -> BTreeMap<(String, String), Result<PathBuf, String>> {
        let mut wanted = BTreeSet::new();
        for scenario in scenarios {
            if !scenario.program.ends_with(".py") {
                wanted.insert((scenario.program.to_owned(), scenario.options.to_owned()));
            }
            for library in libraries(scenario) {
                wanted.insert((format!("{library}.c"), "-shared -fPIC".to_owned()));
            }
        }
        let wanted: Vec<_> = wanted.into_iter().collect();
        let built = Mutex::new(BTreeMap::new());
        in_parallel(wanted.len(), |at| {
            let (source, options) = &wanted[at];
            let stem = source.split('.').next().unwrap_or_default();
            let name =
                if options.starts_with("-shared") { format!("lib{stem}.so") } else { format!("{stem}.{at}") };
            let result = self.build(source, options, &name);
            built.lock().expect("no panic").insert(wanted[at].clone(), result);
        });
        built.into_inner().expect("no panic")
    }

    /// One run of a scenario, alone or recorded.
    pub(crate) fn run(
        &self,
        scenario: &Scenario,
        program: &[PathBuf],
        is_recorded: bool,
    ) -> Result<Run, String> {
        let number = self.runs.fetch_add(1, Ordering::Relaxed);
        let folder = self.folder.join(format!("run.{number}"));
        let traces = folder.join("traces");
        fs::create_dir_all(&traces).expect("a folder");
        fs::set_permissions(&traces, fs::Permissions::from_mode(0o777)).expect("ours");
        let page = folder.join("page");
        let file = fs::File::create(&page).expect("a file");
        file.set_len(PAGE_BYTES).expect("a sparse file");
        fs::set_permissions(&page, fs::Permissions::from_mode(0o666)).expect("ours");
        let usage = folder.join("usage");
        let (out, err) = (folder.join("stdout"), folder.join("stderr"));

        let size = scenario.size[usize::from(is_long())].to_string();
        let word = |word: &str| {
            let word = word.replace('#', &size).replace("FOLDER", &traces.display().to_string());
            let word = match word.split_once('~') {
                Some((before, below)) => format!("{before}{}", self.random(below.parse().unwrap_or(1))),
                None => word,
            };
            match word.split_once('@') {
                Some((before, name)) => {
                    format!("{before}{}", self.folder.join(format!("lib{name}.so")).display())
                }
                None => word,
            }
        };
        let mut command = Command::new(self.folder.join("launch"));
        command.args(scenario.around.split_whitespace().map(word)).arg("--").args(program);
        command.args(scenario.arguments.split_whitespace().map(word));
        command
            .env("LD_LIBRARY_PATH", self.folder.join("driver"))
            .env("TORTURE_PAGE", &page)
            .env("TORTURE_USAGE", &usage)
            .env("TORTURE_FOLDER", &folder)
            .env("GPUTRACE_RECORDER", self.folder.join("gputrace"))
            .env("GPUTRACE_OUTPUT", traces.join(name_of_traces()))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdin(Stdio::null())
            .stdout(fs::File::create(&out).expect("a file"))
            .stderr(fs::File::create(&err).expect("a file"))
            .process_group(0)
            .envs(scenario.env.iter().copied());
        if is_recorded {
            command.env("TORTURE_PRELOAD", self.folder.join("libgputrace.so"));
        }
        // Before the first file of the run: a busy machine may have run all of it before we come again. The kernel's clock for
        // files stands still for some milliseconds.
        let (began, at) = (Instant::now(), SystemTime::now() - Duration::from_millis(20));
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let mut hung = None;
        let status = loop {
            if let Some(status) = child.try_wait().expect("our child") {
                break status;
            }
            if is_hang(began) {
                hung = Some(format!("hangs: {}", where_it_stands(&usage)));
                kill_group(child.id());
                break child.wait().expect("our child");
            }
            if is_recorded && scenario.is_recovered_meanwhile {
                self.recover_meanwhile(&usage, &folder);
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        if let Some(left) = wait_for_the_end(&usage) {
            hung = hung.or(Some(format!("never ends: {left}")));
        }
        let text = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        let all = text(&err);
        let is_ours = |line: &&str| line.starts_with("gputrace: ");
        if let Some(reason) = all.lines().find_map(|line| line.strip_prefix("launch: skip: ")) {
            return Err(reason.to_owned());
        }
        Ok(Run {
            status,
            stdout: text(&out),
            stderr: all.lines().filter(|line| !is_ours(line)).map(without_pid).collect::<Vec<_>>().join("\n"),
            said: all.lines().filter(is_ours).collect::<Vec<_>>().join("\n"),
            cpu: text(&usage).trim().parse::<f64>().unwrap_or(0.0) / 1e6,
            lines: read_page(&page),
            traces,
            hung,
            began: at,
        })
    }

    /// Does to a living process's ring what must be refused.
    pub(crate) fn recover_meanwhile(&self, usage: &Path, folder: &Path) {
        // Before its recorder has the ring, anybody may have it.
        let is_recorded = fs::read_dir(folder.join("traces")).is_ok_and(|mut traces| traces.next().is_some());
        if !is_recorded {
            return;
        }
        for (pid, command) in processes(usage) {
            let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            let ring = maps.lines().find_map(|line| Some(&line[line.find("/dev/shm/gputrace.")?..]));
            let Some(ring) = ring.filter(|_| !command.contains(" recorder ")) else { continue };
            let mut recover = Command::new(self.folder.join("gputrace"));
            recover.arg("recover").arg(ring).arg("-o").arg(folder.join("stolen.gtr"));
            let _ = recover.stdout(Stdio::null()).stderr(Stdio::null()).spawn().map(|child| {
                std::thread::sleep(Duration::from_millis(300));
                kill(&child.id().to_string());
            });
        }
    }

    /// Reads the traces of a run, and those of its rings that nobody has read.
    pub(crate) fn find(&self, scenario: &Scenario, run: &Run) -> Found {
        let mut found = Found::default();
        for ring in rings(run) {
            let made = run.traces.join(format!("recovered{}.gtr", found.recovered));
            // Only its owner may read a ring.
            let owner = scenario.around.split(' ').filter(|word| *word == "nobody");
            let mut command = Command::new(self.folder.join("launch"));
            command
                .args(owner)
                .arg("--")
                .arg(self.folder.join("gputrace"))
                .arg("recover")
                .arg(&ring)
                .arg("-o")
                .arg(&made);
            let output = command.env("TORTURE_USAGE", "/dev/null").output().expect("gputrace runs");
            if output.status.success() {
                found.recovered += 1;
            } else {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                found.torn.push(format!("{}: recover: {said}", ring.display()));
            }
            let _ = fs::remove_file(&ring);
        }
        let entries = fs::read_dir(&run.traces).into_iter().flatten().flatten();
        for path in
            entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "gtr"))
        {
            match Trace::open(&path) {
                Ok(trace) => found.read(&trace, &run.lines),
                // Its recorder was killed before the first word; what it would have held is in the ring.
                Err(Error::NotBegun { .. }) => {}
                Err(error) => found.torn.push(error.to_string()),
            }
        }
        found
    }
}

/// Sanitizers begin their lines with `==PID==`.
pub(crate) fn without_pid(line: &str) -> &str {
    line.strip_prefix("==").and_then(|rest| Some(rest.split_once("==")?.1)).unwrap_or(line)
}

/// A Python's own file: what version managers put on PATH are scripts.
pub(crate) fn real_python(name: &str) -> Option<PathBuf> {
    let output = Command::new(name).args(["-c", "import sys; print(sys.executable)"]).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?;
    Some(PathBuf::from(path.trim())).filter(|path| path.exists())
}

/// Calls `work` with each number below `n`, on as many threads as there are processors.
pub(crate) fn in_parallel(n: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    let workers = std::thread::available_parallelism().map_or(2, |count| count.get().clamp(1, 8));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= n {
                        return;
                    }
                    work(at);
                }
            });
        }
    });
}
