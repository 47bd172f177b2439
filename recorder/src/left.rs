//! What recordings left behind in memory: rings that no recorder drains, and logs of recorders that had nowhere else to write.
//!
//! A ring takes 32 MiB until somebody makes a trace of it. `gputrace ps` and `doctor` list rings, `gputrace recover` makes the traces.

use crate::job::{FOLDERS, is_left};
use crate::liveness::{Asker, Claim, Liveness};
use crate::map_file::MapFile;
use crate::opened::{self, Access, Expected, Links, opened};
use crate::{Error, process};
use gputrace_schemas::printable::printable;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Less than this is free in `/dev/shm`, and a ring of the usual 32 MiB may soon not fit.
const SHORT: u64 = 64 << 20;
/// A file that has been no ring for so long will not become one: its process ended while it made it.
const HALF_MADE: Duration = Duration::from_secs(600);
/// Most bytes that are read of a log.
const MOST_LOG: u64 = 64 << 10;

/// Rings and messages that are left on this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left {
    /// Rings of this user's, in the order of their names.
    pub rings: Vec<Ring>,
    /// Logs of this user's recorders.
    pub logs: Vec<Log>,
    /// Rings of other users', which are neither opened nor known to be without a recorder.
    pub n_of_others: usize,
}

/// A ring that no recorder drains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    /// The file.
    pub path: PathBuf,
    /// The process that wrote to it, as it numbers itself; 0 where the ring does not say.
    pub pid: u32,
    /// The name of its process, where that still runs here.
    pub program: Option<String>,
    /// Since it was made.
    pub age: Duration,
    /// Bytes of memory that it takes.
    pub bytes: u64,
    /// The fate of its process.
    pub process: Fate,
}

/// The fate of the process of a ring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It has ended: `gputrace recover` makes a trace.
    Ended,
    /// It runs: `gputrace recover RING` goes on recording it.
    Runs,
    /// That cannot be seen from here, or the file is not a ring that can be read: why.
    Unknown(String),
    /// It ended before it had made the ring: there is nothing in it.
    NothingRecorded,
}

/// What a recorder said that could say it nowhere else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// The file.
    pub path: PathBuf,
    /// The traced process, by the name of the file.
    pub pid: u32,
    /// Its length.
    pub bytes: u64,
}

impl Left {
    /// Looks for them.
    #[must_use]
    pub fn find() -> Left {
        let us = rustix::process::geteuid().as_raw();
        let mut left = Left::default();
        for (path, data) in files() {
            let Some((pid, kind)) = named(&path) else { continue };
            match kind {
                Kind::Ring if data.uid() != us => left.n_of_others += 1,
                Kind::Ring if is_left(&path) => left.rings.push(Ring::of(path, pid, &data)),
                Kind::Log if data.uid() == us => left.logs.push(Log { path, pid, bytes: data.len() }),
                Kind::Ring | Kind::Log => {}
            }
        }
        left.rings.sort_by(|a, b| a.path.cmp(&b.path));
        left.logs.sort_by(|a, b| a.path.cmp(&b.path));
        left
    }
}

impl Ring {
    fn of(path: PathBuf, pid: u32, data: &fs::Metadata) -> Ring {
        let (mut pid, mut made) = (pid, data.modified().ok());
        let process = match MapFile::open(&path) {
            Ok(file) => {
                let header = file.header();
                pid = Claim::of(header).pid;
                let realtime = Duration::from_nanos(file.map().calibration().realtime);
                made = SystemTime::UNIX_EPOCH.checked_add(realtime).or(made);
                fate(&file)
            }
            Err(Error::NotARing { .. }) if is_half_made(data, pid) => Fate::NothingRecorded,
            Err(error) => Fate::Unknown(error.with_cause()),
        };
        let program = (process == Fate::Runs && process::proc_is_ours()).then(|| name(pid)).flatten();
        let age = made.and_then(|made| SystemTime::now().duration_since(made).ok()).unwrap_or_default();
        Ring { path, pid, program, age, bytes: data.blocks().saturating_mul(512), process }
    }
}

fn name(pid: u32) -> Option<String> {
    opened::text_of_proc(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end_matches('\n').to_owned())
}

fn fate(file: &MapFile) -> Fate {
    match Liveness::find(file, Asker::default()) {
        Ok(liveness) if liveness.is_gone() => Fate::Ended,
        Ok(_) => Fate::Runs,
        Err(error) => Fate::Unknown(error.with_cause()),
    }
}

/// The bytes that make it a ring are written last: without them no thread has begun to record.
fn is_half_made(data: &fs::Metadata, pid: u32) -> bool {
    let is_old = data
        .modified()
        .ok()
        .and_then(|at| SystemTime::now().duration_since(at).ok())
        .is_some_and(|age| age > HALF_MADE);
    is_old && process::proc_is_ours() && process::stat(pid).is_none()
}

impl Log {
    /// What it says, made fit for a terminal; the end of it is missing where it is very long.
    ///
    /// # Errors
    /// It cannot be read, or is not what was found.
    pub fn text(&self) -> io::Result<String> {
        let expected = Expected::regular().of(&[rustix::process::geteuid().as_raw()]).with_one_name();
        let file = opened(&self.path, Links::Refused, Access::Read, &expected)?;
        let mut bytes = vec![];
        file.take(MOST_LOG).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes);
        Ok(text.lines().map(|line| printable(line).into_owned()).collect::<Vec<_>>().join("\n"))
    }

    /// Whether the process runs that its recorder belonged to, so more may follow. In doubt it does.
    #[must_use]
    pub fn may_grow(&self) -> bool {
        !process::proc_is_ours() || process::stat(self.pid).is_some()
    }
}

/// A sentence for the recorder of `own` to say where `/dev/shm` is short of room and rings of processes that are gone are part of why.
pub(crate) fn shortage(own: &Path) -> Option<String> {
    let shm = rustix::fs::statvfs("/dev/shm").ok()?;
    let free = shm.f_bavail.saturating_mul(shm.f_frsize);
    if free >= SHORT || !process::proc_is_ours() {
        return None;
    }
    let us = rustix::process::geteuid().as_raw();
    let is_of_the_gone = |(path, data): &(PathBuf, fs::Metadata)| {
        let is_own = data.uid() == us && path.starts_with("/dev/shm") && path != own;
        is_own
            && matches!(named(path), Some((pid, Kind::Ring)) if process::stat(pid).is_none())
            && is_left(path)
    };
    let rings: Vec<u64> =
        files().filter(is_of_the_gone).map(|(_, data)| data.blocks().saturating_mul(512)).collect();
    let (n, bytes) = (rings.len(), rings.iter().sum::<u64>());
    (n > 0).then(|| {
        format!(
            "/dev/shm has only {} MiB free, and rings of {n} processes that have ended use {} MiB of it: `gputrace recover` makes traces of them and frees the memory",
            free >> 20,
            bytes >> 20
        )
    })
}

#[derive(Clone, Copy)]
enum Kind {
    Ring,
    Log,
}

/// Process and kind of `gputrace.PID.TICKS.ring` and `gputrace.PID.TICKS.log`.
fn named(path: &Path) -> Option<(u32, Kind)> {
    let mut parts = path.file_name()?.to_str()?.strip_prefix("gputrace.")?.split('.');
    let (pid, ticks, kind) = (parts.next()?, parts.next()?, parts.next()?);
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
    let kind = match kind {
        "ring" => Kind::Ring,
        "log" => Kind::Log,
        _ => return None,
    };
    (parts.next().is_none() && is_number(pid) && is_number(ticks)).then_some((pid.parse().ok()?, kind))
}

/// Regular files in the folders of rings; links are not followed.
fn files() -> impl Iterator<Item = (PathBuf, fs::Metadata)> {
    let entries = FOLDERS.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let files = entries.filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)));
    files.filter(|(_, data)| data.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_and_logs_are_known_by_their_names() {
        let is = |name: &str| named(Path::new(name)).map(|(pid, kind)| (pid, matches!(kind, Kind::Ring)));
        assert_eq!(is("/dev/shm/gputrace.12.34.ring"), Some((12, true)));
        assert_eq!(is("/dev/shm/gputrace.12.34.log"), Some((12, false)));
        for other in [
            "gputrace.12.ring",
            "gputrace.12.34.56.ring",
            "gputrace.job.12.34",
            "gputrace.+1.34.ring",
            "gputrace.99999999999.34.ring",
            "gputrace.12.34.ring.part",
            "gputrace..34.ring",
            "x.12.34.ring",
        ] {
            assert_eq!(is(other), None, "{other}");
        }
    }
}
