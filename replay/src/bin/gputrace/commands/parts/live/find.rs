//! Which traces are being written, by whom, and of which process: what `/proc` says of the recorders.

use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use gputrace_recorder::opened::{Access, Expected, Links, of_proc, opened, text_of_proc, users_of};
use gputrace_recorder::{Moment, variable, variables};
use gputrace_schemas::event::Nanos;
use gputrace_schemas::reader::{Trace, looks_like_a_trace};

/// A trace that is younger may not have its recorder's lock yet: asking for it now could take it away.
const NEW: Duration = Duration::from_secs(2);

/// Which traces are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    /// Of every process that this user records.
    All,
    /// Of a process, or of what it started.
    Process(u32),
    /// Of the job that `gputrace record` began then.
    Job(String),
    /// Those of a folder that are being written.
    Folder(PathBuf),
    /// These, whether they are being written or not.
    Traces(Vec<PathBuf>),
}

/// A trace, and where its process is.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Device and inode.
    pub(crate) key: (u64, u64),
    /// What opens it, also where its name leads elsewhere.
    pub(crate) open: PathBuf,
    /// What people call it.
    pub(crate) shown: PathBuf,
    /// Its recorder is running.
    pub(crate) is_written: bool,
    /// The process's number in the `/proc` that is to be seen from here.
    pub(crate) process: Option<u32>,
    /// When the job began that it is of, as its recorder was told.
    job: Option<String>,
}

/// Now, as traces of this machine count time.
pub(crate) fn now() -> Nanos {
    Nanos(Moment::now().monotonic)
}

impl Which {
    /// What the argument means: a number of a process, a folder, a trace; everything where there is none.
    pub(crate) fn of(named: &[PathBuf]) -> anyhow::Result<Which> {
        match named {
            [] => Ok(Which::All),
            [one] if one.is_dir() => Ok(Which::Folder(one.clone())),
            [one] if !one.exists() && number(one).is_some() => {
                let pid = number(one).unwrap_or_default();
                anyhow::ensure!(Path::new(&format!("/proc/{pid}")).exists(), "process {pid} does not exist");
                Ok(Which::Process(pid))
            }
            files => {
                for file in files {
                    anyhow::ensure!(
                        file.is_file(),
                        "{}: not a trace, a folder or a process number",
                        file.display()
                    );
                }
                Ok(Which::Traces(files.to_vec()))
            }
        }
    }

    /// Whether what has ended stays in sight: where it was named, or is somebody's to judge.
    pub(crate) fn keeps_what_ended(&self) -> bool {
        matches!(self, Which::Traces(_) | Which::Job(_))
    }

    /// Those that are there now.
    pub(crate) fn find(&self) -> Vec<Place> {
        let mut places = written();
        match self {
            Which::All => places,
            Which::Process(pid) => {
                places.retain(|place| is_of(place, *pid));
                places
            }
            Which::Job(began) => {
                places.retain(|place| place.job.as_ref() == Some(began));
                places
            }
            Which::Folder(folder) => in_folder(folder, &places),
            Which::Traces(paths) => {
                let there = paths.iter().filter_map(|path| Some((path, fs::metadata(path).ok()?)));
                there.map(|(path, data)| of_file(path, (data.dev(), data.ino()), &places)).collect()
            }
        }
    }

    /// What to say where there is nothing to show.
    pub(crate) fn note(&self, n_shown: usize) -> Option<String> {
        if n_shown > 0 {
            return None;
        }
        Some(match self {
            Which::All => "no process of this user is being recorded: start one with `gputrace record -- PROGRAM`. If /proc does not show its recorder (hidepid, another PID namespace), name its folder: `gputrace top FOLDER`"
                .to_owned(),
            Which::Process(pid) => format!("process {pid} and its child processes are not being recorded"),
            Which::Job(_) => "no process of the job is being recorded".to_owned(),
            Which::Folder(folder) => format!("no trace in {} is being written", folder.display()),
            Which::Traces(_) => "the traces no longer exist".to_owned(),
        })
    }
}

fn number(path: &Path) -> Option<u32> {
    path.to_str()?.parse().ok()
}

/// Whether it is the trace of this process, or of one that it started.
fn is_of(place: &Place, pid: u32) -> bool {
    if place.process == Some(pid) {
        return true;
    }
    let trace = Trace::open_prefix(&place.open, 1 << 20);
    trace.is_ok_and(|trace| {
        let process = trace.process();
        process.pid == pid || process.parent == pid || process.ancestors.iter().any(|it| it.pid == pid)
    })
}

fn of_file(path: &Path, key: (u64, u64), written: &[Place]) -> Place {
    let recorded = written.iter().find(|place| place.key == key);
    Place {
        key,
        open: path.to_owned(),
        shown: path.to_owned(),
        is_written: recorded.is_some() || is_locked(path),
        process: recorded.and_then(|place| place.process),
        job: recorded.and_then(|place| place.job.clone()),
    }
}

fn in_folder(folder: &Path, written: &[Place]) -> Vec<Place> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut places = vec![];
    for entry in entries {
        let path = entry.path();
        if path.extension().is_none_or(|ending| ending != "gtr") {
            continue;
        }
        let Ok(data) = fs::metadata(&path) else { continue };
        let place = of_file(&path, (data.dev(), data.ino()), written);
        if place.is_written {
            places.push(place);
        }
    }
    places.sort_by(|a, b| a.shown.cmp(&b.shown));
    places
}

/// Whether a recorder has marked it as one that it writes.
fn is_locked(path: &Path) -> bool {
    let Ok(file) = opened(path, Links::Followed, Access::Read, &Expected::regular()) else { return false };
    let made = file.metadata().and_then(|data| data.created().or_else(|_| data.modified()));
    let is_new = made.is_ok_and(|made| SystemTime::now().duration_since(made).is_ok_and(|age| age < NEW));
    !is_new && gputrace_recorder::is_written(path)
}

/// The traces that recorders of this user have open.
fn written() -> Vec<Place> {
    let us = rustix::process::geteuid().as_raw();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        // A program with its owner's rights (set-user-ID) is the work of who started it: all its users count.
        (entry.metadata().ok()?.uid() == us && users_of(pid).iter().all(|user| *user == us)).then_some(pid)
    });
    let mut places: Vec<Place> = processes.filter(|pid| is_recorder(*pid)).flat_map(files_of).collect();
    places.sort_by(|a, b| a.shown.cmp(&b.shown));
    places.dedup_by_key(|place| place.key);
    places
}

/// `gputrace recorder --ring ...`, as the library starts it.
fn is_recorder(pid: u32) -> bool {
    let command = of_proc(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = command.split(|byte| *byte == 0).skip(1);
    words.next() == Some(b"recorder") && words.any(|word| word.starts_with(b"--ring"))
}

fn files_of(recorder: u32) -> Vec<Place> {
    let folder = PathBuf::from(format!("/proc/{recorder}/fd"));
    let mut traces = vec![];
    let mut process = None;
    for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
        let path = entry.path();
        let Ok(link) = fs::read_link(&path) else { continue };
        if link.as_os_str().to_string_lossy().contains("[pidfd]") {
            process = process.or_else(|| process_behind(recorder, &entry.file_name().to_string_lossy()));
        } else if link.is_absolute() && begins_as_trace(&path) {
            let Ok(data) = fs::metadata(&path) else { continue };
            let key = (data.dev(), data.ino());
            let leads_there = fs::metadata(&link).is_ok_and(|data| (data.dev(), data.ino()) == key);
            let open = if leads_there { link.clone() } else { path };
            traces.push(Place { key, open, shown: link, is_written: true, process: None, job: None });
        }
    }
    let job = if traces.is_empty() { None } else { job_of(recorder) };
    for trace in &mut traces {
        trace.process = process;
        trace.job.clone_from(&job);
    }
    traces
}

fn job_of(recorder: u32) -> Option<String> {
    let environment = of_proc(format!("/proc/{recorder}/environ")).ok()?;
    let name = variable(variables::JOB_BEGAN).as_bytes();
    let mut entries = environment.split(|byte| *byte == 0);
    let value = entries.find_map(|entry| entry.strip_prefix(name)?.strip_prefix(b"="))?;
    Some(String::from_utf8_lossy(value).into_owned())
}

/// The process of a descriptor of it, as the `/proc` that we see numbers it (proc(5), fdinfo).
fn process_behind(recorder: u32, descriptor: &str) -> Option<u32> {
    let text = text_of_proc(format!("/proc/{recorder}/fdinfo/{descriptor}")).ok()?;
    let pid: i64 = text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()?;
    u32::try_from(pid).ok().filter(|pid| *pid > 0)
}

fn begins_as_trace(path: &Path) -> bool {
    let mut first = [0; 8];
    opened(path, Links::Followed, Access::Read, &Expected::regular())
        .is_ok_and(|mut file| file.read_exact(&mut first).is_ok())
        && looks_like_a_trace(&first)
}
