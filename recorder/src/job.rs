//! What the recorders of a job tell `gputrace record`, which started the job and says at its end what came of it.
//!
//! They add to a file in `/dev/shm` (else `/tmp`) that is named after the moment the job began, which all of them know. Where
//! it is not there (another host, another container, no `gputrace record`) nothing is told, and no trace misses anything.

use crate::opened::{self, Access, Expected, Links};
use crate::ticks::Moment;
use gputrace_schemas::printable::printable;
use gputrace_schemas::reader::open_regular;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Where it may lie, the first that can be written first.
pub(crate) const FOLDERS: [&str; 2] = ["/dev/shm", "/tmp"];
/// More than the recorders of any job say: some hundred bytes each.
const MOST_TOLD: u64 = 64 << 20;
/// Behind each field, and behind the last one of what is told at once. No name of a file has the first in it, and no field
/// begins with the second.
const FIELD: u8 = 0;
const LINE: u8 = b'\n';

/// What `variables::JOB_BEGAN` of the ring is for a job that begins now.
#[must_use]
pub fn job_begins() -> String {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos());
    format!("{nanos},{}", crate::ticks::monotonic())
}

pub(crate) fn began_at(text: &str) -> Option<Moment> {
    let (nanos, monotonic) = text.split_once(',')?;
    let realtime = UNIX_EPOCH.checked_add(Duration::from_nanos(nanos.parse().ok()?))?;
    Some(Moment { realtime, monotonic: monotonic.parse().ok()? })
}

/// The job's file.
#[derive(Debug)]
pub struct Job {
    path: PathBuf,
    began: Moment,
}

/// A message of a recorder.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Told {
    /// It records.
    Began {
        /// The process.
        pid: u32,
        /// Its trace.
        trace: PathBuf,
        /// The ring that it drains.
        ring: PathBuf,
        /// The file that was there under the name that the trace was to have.
        instead_of: Option<PathBuf>,
    },
    /// The trace is as whole as it will be.
    Ended {
        /// The process.
        pid: u32,
        /// Its trace.
        trace: PathBuf,
        /// How many events it has.
        n_events: u64,
        /// How many it lacks: lost, damaged or not written.
        n_lost: u64,
        /// Its size.
        bytes: u64,
        /// Why the end of it is missing, if it is.
        error: Option<String>,
    },
    /// There is no trace.
    Failed {
        /// Why.
        why: String,
    },
}

impl Job {
    /// Makes the file of the job that began at this moment (see [`job_begins`]). `None` where there is no room for it.
    #[must_use]
    pub fn make(began: &str) -> Option<Job> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let began = began_at(began)?;
        let name = name(began)?;
        let mut paths = FOLDERS.iter().map(|folder| Path::new(folder).join(&name));
        paths.find(|path| options.open(path).is_ok()).map(|path| Job { path, began })
    }

    /// The file that [`Job::make`] made.
    #[must_use]
    pub fn find(began: &str) -> Option<Job> {
        let began = began_at(began)?;
        find(began).map(|path| Job { path, began })
    }

    /// All that was told up to now.
    #[must_use]
    pub fn told(&self) -> Vec<Told> {
        let expected = ours().with_bytes(0..=MOST_TOLD);
        opened::read(&self.path, Links::Refused, &expected).map(|bytes| parse(&bytes)).unwrap_or_default()
    }

    /// The rings that this process of the job made and that are still there, in the order of their names. Numbers of processes
    /// come again: what was left before the job began is not of it.
    #[must_use]
    pub fn rings_of(&self, pid: u32) -> Vec<PathBuf> {
        let begin = format!("gputrace.{pid}.");
        let us = rustix::process::geteuid().as_raw();
        let earliest = self.began.realtime.checked_sub(COARSE).unwrap_or(UNIX_EPOCH);
        let mut rings = Vec::new();
        for folder in FOLDERS {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                let name = entry.file_name();
                let is_ring =
                    name.to_str().is_some_and(|name| name.starts_with(&begin) && name.ends_with(".ring"));
                let is_of_the_job = |data: fs::Metadata| {
                    data.is_file() && data.uid() == us && data.modified().is_ok_and(|made| made >= earliest)
                };
                if is_ring && entry.metadata().is_ok_and(is_of_the_job) {
                    rings.push(entry.path());
                }
            }
        }
        rings.sort();
        rings
    }

    /// Removes the file.
    pub fn end(&self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// What a trace that was begun has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// Its process runs on.
    Runs,
    /// It will not grow any more.
    Done,
}

impl State {
    /// Of a trace that no recorder has said to have ended, and whose process and ring these are.
    #[must_use]
    pub fn of(pid: u32, trace: &Path, ring: &Path) -> Option<State> {
        let is_written = crate::output::is_written(trace);
        if is_written && crate::output::is_running(trace, pid) {
            return Some(State::Runs);
        }
        // A recorder that finishes removes the ring before it lets go of the trace.
        (!is_written && (!ring.exists() || is_left(ring))).then_some(State::Done)
    }
}

/// Whether a ring is there that no recorder drains.
#[must_use]
pub fn is_left(ring: &Path) -> bool {
    // Only its user may open a ring, and its recorder has this lock of it.
    let is_drained = |file: File| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock));
    ring.is_file() && !open_regular(ring).is_ok_and(is_drained)
}

/// A file's time is that of the last tick of the kernel's clock, 10 ms ago at most; the job's is exact.
const COARSE: Duration = Duration::from_secs(1);

fn name(began: Moment) -> Option<String> {
    let nanos = began.realtime.duration_since(UNIX_EPOCH).ok()?.as_nanos();
    Some(format!("gputrace.job.{nanos}.{}", began.monotonic))
}

fn find(began: Moment) -> Option<PathBuf> {
    let name = name(began)?;
    let us = rustix::process::geteuid().as_raw();
    // Another user may have created a file of that name. Callers check the owner again after opening.
    let is_ours = |path: &PathBuf| path.symlink_metadata().is_ok_and(|it| it.is_file() && it.uid() == us);
    FOLDERS.iter().map(|folder| Path::new(folder).join(&name)).find(is_ours)
}

/// Tells the job that began at this moment, if anybody listens.
pub(crate) fn tell(began: Option<Moment>, told: &Told) {
    let Some(path) = began.and_then(find) else { return };
    // What others put there under this name is left alone.
    if let Ok(mut file) = opened::opened(&path, Links::Refused, Access::Append, &ours()) {
        // One write, which nobody else's lands in.
        let _ = file.write_all(&words(told));
    }
}

/// A file that this user made.
fn ours() -> Expected {
    Expected::regular().of(&[rustix::process::geteuid().as_raw()]).with_one_name()
}

/// The recorder has the working folder of its process, which may be another than that of who reads.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn words(told: &Told) -> Vec<u8> {
    let number = |n: &u64| n.to_string().into_bytes();
    let path = |path: &Path| path.as_os_str().as_bytes().to_vec();
    let fields = match told {
        Told::Began { pid, trace, ring, instead_of } => {
            let instead_of = instead_of.as_deref().map(path).unwrap_or_default();
            vec![b"began".to_vec(), number(&u64::from(*pid)), path(trace), path(ring), instead_of]
        }
        Told::Ended { pid, trace, n_events, n_lost, bytes, error } => {
            let error = error.as_deref().map(printable).unwrap_or_default().into_owned().into_bytes();
            let numbers = [number(n_events), number(n_lost), number(bytes)];
            let begin = vec![b"ended".to_vec(), number(&u64::from(*pid)), path(trace)];
            [begin, numbers.to_vec(), vec![error]].concat()
        }
        Told::Failed { why } => vec![b"failed".to_vec(), printable(why).into_owned().into_bytes()],
    };
    let mut line: Vec<u8> = fields.into_iter().flat_map(|field| [field, vec![FIELD]].concat()).collect();
    line.push(LINE);
    line
}

fn parse(mut bytes: &[u8]) -> Vec<Told> {
    let mut all = Vec::new();
    while let Some(end) = bytes.windows(2).position(|pair| pair == [FIELD, LINE]) {
        let (line, rest) = bytes.split_at(end);
        all.extend(parse_line(&line.split(|byte| *byte == FIELD).collect::<Vec<_>>()));
        bytes = rest.get(2..).unwrap_or_default();
    }
    all
}

fn parse_line(fields: &[&[u8]]) -> Option<Told> {
    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
    let path = |field: &[u8]| PathBuf::from(std::ffi::OsString::from_vec(field.to_vec()));
    let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse::<u64>().ok();
    let pid = |field: &[u8]| u32::try_from(number(field)?).ok();
    let unless_empty = |field: &&[u8]| !field.is_empty();
    match *fields {
        [b"began", of, trace, ring, instead_of] => Some(Told::Began {
            pid: pid(of)?,
            trace: path(trace),
            ring: path(ring),
            instead_of: Some(instead_of).filter(unless_empty).map(path),
        }),
        [b"ended", of, trace, n_events, n_lost, bytes, error] => Some(Told::Ended {
            pid: pid(of)?,
            trace: path(trace),
            n_events: number(n_events)?,
            n_lost: number(n_lost)?,
            bytes: number(bytes)?,
            error: Some(error).filter(unless_empty).map(text),
        }),
        [b"failed", why] => Some(Told::Failed { why: text(why) }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_heard_in_order_and_only_while_somebody_listens() {
        let began = job_begins();
        let moment = began_at(&began);
        let all = [
            Told::Began { pid: 7, trace: "/a\nb.gtr".into(), ring: "/dev/shm/r".into(), instead_of: None },
            Told::Began { pid: 8, trace: "/c".into(), ring: "/r".into(), instead_of: Some("/d".into()) },
            Told::Failed { why: "no room\n".to_owned() },
            Told::Ended {
                pid: 7,
                trace: "/a\nb.gtr".into(),
                n_events: 3,
                n_lost: 2,
                bytes: 1,
                error: Some("full".to_owned()),
            },
        ];
        all.iter().for_each(|told| tell(moment, told)); // to nobody
        let job = Job::make(&began).expect("room");
        assert!(
            Job::make(&began).is_some_and(|other| other.path != job.path),
            "two jobs of one name share no file"
        );
        all.iter().for_each(|told| tell(moment, told));
        let mut heard = Job::find(&began).expect("there").told();
        assert_eq!(heard.remove(2), Told::Failed { why: r"no room\u{a}".to_owned() });
        assert_eq!(heard, [&all[0], &all[1], &all[3]].map(Clone::clone));
        job.end();
        Job::find(&began).into_iter().for_each(|other| other.end());
        assert!(Job::find(&began).is_none());
    }

    #[test]
    fn a_file_that_another_user_made_under_the_jobs_name_hides_nothing() {
        if rustix::process::geteuid().as_raw() != 0 {
            gputrace_skip::skip("a job's file of another user", "only root can make one");
            return;
        }
        let began = job_begins();
        let decoy = Job::make(&began).expect("room");
        std::os::unix::fs::chown(&decoy.path, Some(65_534), None).expect("root may");
        let job = Job::make(&began).expect("room in the other folder");
        let told = Told::Failed { why: "x".to_owned() };
        tell(began_at(&began), &told);
        let heard = Job::find(&began).map(|found| found.told());
        let untouched = fs::metadata(&decoy.path).expect("there").len();
        job.end();
        decoy.end();
        assert_eq!((heard, untouched), (Some(vec![told]), 0));
    }

    #[test]
    fn a_ring_that_was_left_before_the_job_is_not_of_it() {
        let job = Job::make(&job_begins()).expect("room");
        // No process has such a number.
        let pid = u32::MAX - std::process::id();
        let rings = ["1", "2"].map(|ticks| job.path.with_file_name(format!("gputrace.{pid}.{ticks}.ring")));
        let files = rings.each_ref().map(|ring| fs::File::create(ring).expect("a file"));
        let hour = Duration::from_secs(3600);
        files[0].set_modified(SystemTime::now() - hour).expect("an older file");
        assert_eq!(job.rings_of(pid), [rings[1].clone()]);
        assert!(job.rings_of(pid - 1).is_empty());
        job.end();
        rings.iter().for_each(|ring| fs::remove_file(ring).expect("there"));
    }

    #[test]
    fn what_is_not_whole_is_not_heard() {
        let told = Told::Failed { why: "x".to_owned() };
        let mut bytes = words(&told);
        bytes.extend(b"ended\0many\0x\0\0\0\0\0\nbegan\0");
        assert_eq!(parse(&bytes), [told]);
    }
}
