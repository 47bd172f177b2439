//! Programs under gputrace: run with the library preloaded, and what their traces say.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use gputrace_schemas::event::{Action, Event, EventKind};
use gputrace_schemas::reader::Trace;

use crate::calls::{Census, Fate};
use crate::patience::{LONG, is_hang};

/// A folder for one run's traces, removed with it.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// A new one of this name below `parent`.
    ///
    /// # Panics
    /// If it cannot be made.
    pub fn new(parent: &Path, name: &str) -> Folder {
        let path = parent.join(format!("{name}.{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Folder(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Its traces, once `n` of them are complete.
    ///
    /// # Panics
    /// If that takes too long, or one cannot be read.
    pub fn traces(&self, n: usize) -> Vec<Trace> {
        let started = Instant::now();
        loop {
            let paths = self.files("gtr");
            let complete = |path: &PathBuf| Trace::open(path).ok().filter(Trace::is_complete);
            let traces: Vec<_> = paths.iter().filter_map(complete).collect();
            if traces.len() == paths.len() && traces.len() >= n {
                assert_eq!(traces.len(), n, "more traces than processes with CUDA: {paths:?}");
                return traces;
            }
            assert!(!is_hang(started, LONG), "{} of {n} traces are complete: {paths:?}", traces.len());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Its files with this ending, in order.
    pub fn files(&self, extension: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).into_iter().flatten();
        let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.retain(|path| path.extension().is_some_and(|found| found == extension));
        paths.sort();
        paths
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A recorded job of Python ranks on the stand-in for NCCL: the program and its arguments follow, traces go to `folder`.
///
/// # Panics
/// If the release build is missing, or older than its sources.
#[must_use]
pub fn nccl_job(ranks: u32, folder: &Folder) -> Command {
    let mut command = Command::new("python3");
    command
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/nccl/launch.py"))
        .args(["--ranks", &ranks.to_string(), "--out"])
        .arg(folder.path())
        .arg("--gputrace")
        .arg(built().join("gputrace"))
        .arg("--fake")
        .arg(fake_cuda::library_dir());
    command
}

/// Where `libgputrace.so` and `gputrace` were built. `GPUTRACE_TEST_BUILT` names another folder that has them: those of a debug
/// build, or of another version that a test is to be held against.
///
/// # Panics
/// If they were not, or before their sources changed.
pub fn built() -> PathBuf {
    if let Some(folder) = std::env::var_os("GPUTRACE_TEST_BUILT") {
        return PathBuf::from(folder);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let directory = target.join("release");
    let parts: [(&str, &[&str]); 2] = [
        ("libgputrace.so", &["ring/src", "shim/src"]),
        ("gputrace", &["ring/src", "recorder/src", "schemas/src", "sim/src", "replay/src"]),
    ];
    for (name, sources) in parts {
        let path = directory.join(name);
        let modified = fs::metadata(&path).and_then(|data| data.modified());
        let modified = modified.unwrap_or_else(|e| panic!("{}: {e}; `make build` makes it", path.display()));
        // The floors of the offline half: each folder of `replay/` with a `src`.
        let floors = fs::read_dir(root.join("replay")).into_iter().flatten().flatten();
        let floors = floors.map(|floor| floor.path().join("src")).filter(|_| name == "gputrace");
        let changed =
            sources.iter().map(|folder| root.join(folder)).chain(floors).map(|it| newest(&it)).max();
        let is_new = changed.is_none_or(|changed| modified >= changed);
        assert!(is_new, "{}: older than its sources; `make build` makes it again", path.display());
    }
    fs::canonicalize(&directory).unwrap_or(directory)
}

fn newest(folder: &Path) -> SystemTime {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let times = entries.map(|entry| {
        let path = entry.path();
        if path.is_dir() {
            return newest(&path);
        }
        entry.metadata().and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
    });
    times.max().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// Has the command's process, and its children, leave traces in the folder.
pub fn preload(command: &mut Command, folder: &Folder) {
    let built = built();
    command
        .env("LD_PRELOAD", built.join("libgputrace.so"))
        .env("GPUTRACE_RECORDER", built.join("gputrace"))
        .env("GPUTRACE_OUTPUT", folder.path().join("%p.%t.gtr"));
}

/// Counts the requests of traces as [`crate::calls::census`] counts those of a call log.
pub fn census(traces: &[Trace]) -> Census {
    let mut census = Census::new();
    for trace in traces {
        let mut live: HashMap<(&str, u64), (String, u64)> = HashMap::new();
        for event in trace.events() {
            let Event { kind: EventKind::Call(call), .. } = event else { continue };
            let name = trace.api(call.api).map_or("?", |api| &api.name).to_owned();
            let mut count = |(name, bytes), fate| *census.entry((name, bytes, fate)).or_default() += 1;
            let (maker, key) = match call.action {
                Action::Alloc
                | Action::AllocAsync
                | Action::AllocManaged
                | Action::AllocHost
                | Action::HostRegister
                | Action::GraphAlloc => (true, ("addr", call.addr)),
                Action::ArrayCreate => (true, ("array", call.handle)),
                Action::Create => (true, ("handle", call.handle)),
                Action::Free
                | Action::FreeAsync
                | Action::FreeHost
                | Action::HostUnregister
                | Action::GraphFree => (false, ("addr", call.addr)),
                Action::ArrayDestroy => (false, ("array", call.handle)),
                Action::Release => (false, ("handle", call.handle)),
                _ => continue,
            };
            let result = call.result.unwrap_or(-1);
            if !maker {
                if let Some(made) = (result == 0).then(|| live.remove(&key)).flatten() {
                    count(made, Fate::Freed);
                }
            } else if result != 0 {
                count((name, call.bytes.0), Fate::Failed(result));
            } else if let Some(forgotten) = live.insert(key, (name, call.bytes.0)) {
                count(forgotten, Fate::Leaked);
            }
        }
        for made in live.into_values() {
            *census.entry((made.0, made.1, Fate::Leaked)).or_default() += 1;
        }
    }
    census
}
