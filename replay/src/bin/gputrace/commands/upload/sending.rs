//! `gputrace record --upload`: traces are sent while they grow, by a thread of the gputrace that waits for the program.
//!
//! It runs at the lowest priority, and nobody waits for it before the program has ended: a store that is slow or gone costs the job
//! nothing, and what was not sent stays here.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use gputrace_objects::Upload;
use gputrace_recorder::{Job, Told};
use gputrace_replay::trace::words::quote;
use gputrace_schemas::reader::older_segments;

use super::{begun, destination};
use crate::objects;
use crate::show::{complain, shown};

/// Between two looks at what has grown.
const STEP: Duration = Duration::from_millis(500);
/// After a store refused or was not reached.
const AGAIN: Duration = Duration::from_secs(10);
/// Parts are sent of traces that are at least as large.
const LEAST: u64 = gputrace_objects::PART_BYTES;

/// What is sent, and where.
pub(crate) struct Sending {
    url: PathBuf,
    force: bool,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<Sent>>,
}

/// What is on its way, and what has arrived.
#[derive(Default)]
struct Sent {
    begun: BTreeMap<PathBuf, Upload>,
    /// Segments of bounded recordings, which are sent whole.
    segments: BTreeSet<PathBuf>,
}

/// How a recording grows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grows {
    /// In one file.
    InOneFile,
    /// In segments (`--keep`, `--max-size`): another file gets its name again and again.
    InSegments,
}

impl Sending {
    /// Begins to send what the recorders of a job write.
    pub(crate) fn start(url: &Path, force: bool, began: &str, grows: Grows) -> Sending {
        let is_over = Arc::new(AtomicBool::new(false));
        let (to, began, over) = (url.to_owned(), began.to_owned(), is_over.clone());
        let send = move || {
            // This thread alone (sched(7): threads have nice values of their own on Linux).
            let _ = rustix::process::nice(19);
            while_it_runs(&to, force, &began, &over, grows)
        };
        let thread = std::thread::Builder::new().name("upload".into()).spawn(send).ok();
        Sending { url: url.to_owned(), force, is_over, thread }
    }

    /// Sends what is missing of traces that have ended, and says what came of it; gives up when it is told to.
    pub(crate) fn finish(mut self, traces: &[PathBuf], gives_up: &mut dyn FnMut() -> bool) {
        self.is_over.store(true, Ordering::Relaxed);
        let thread = self.thread.take();
        let sent = Arc::new(Mutex::new(Vec::<PathBuf>::new()));
        let (done, to, url, force) = (sent.clone(), traces.to_vec(), self.url.clone(), self.force);
        let rest = move || {
            let Sent { mut begun, segments } =
                thread.and_then(|thread| thread.join().ok()).unwrap_or_default();
            for trace in to {
                let older = older_segments(&trace).into_iter().map(|(_, segment)| segment);
                let missing = older.filter(|segment| !segments.contains(segment));
                for error in missing.filter_map(|segment| rest_of(&segment, &url, force, None).err()) {
                    complain!("{error:#}");
                }
                match rest_of(&trace, &url, force, begun.remove(&trace)) {
                    Ok(object) => {
                        complain!("{} is {}", shown(&trace), shown(&object));
                        done.lock().unwrap_or_else(PoisonError::into_inner).push(trace);
                    }
                    Err(error) => complain!("{error:#}"),
                }
            }
        };
        if let Ok(thread) = std::thread::Builder::new().name("upload".into()).spawn(rest) {
            while !thread.is_finished() && !gives_up() {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        let sent = sent.lock().unwrap_or_else(PoisonError::into_inner);
        let left: Vec<String> =
            traces.iter().filter(|trace| !sent.contains(trace)).map(|trace| quote(&shown(trace))).collect();
        if !left.is_empty() {
            complain!("not sent: gputrace upload -o {} {}", quote(&shown(&self.url)), left.join(" "));
        }
    }
}

fn rest_of(trace: &Path, url: &Path, force: bool, begun: Option<Upload>) -> anyhow::Result<PathBuf> {
    let object = destination(url, trace, usize::MAX);
    let upload = match begun {
        Some(upload) => upload,
        None => begin(trace, &object, force)?,
    };
    upload.finish()?;
    Ok(object)
}

fn begin(trace: &Path, object: &Path, force: bool) -> anyhow::Result<Upload> {
    if !force && objects::exists(object)? {
        anyhow::bail!("{} exists; -F overwrites it", shown(object));
    }
    // The recorder made a file of ours here. In a folder of another user's, another file may have its name by now.
    let us = rustix::process::geteuid().as_raw();
    let is_ours = |file: std::fs::Metadata| file.is_file() && file.uid() == us;
    if !trace.symlink_metadata().is_ok_and(is_ours) {
        anyhow::bail!("{} is no longer the file that the recorder wrote: it is not sent", shown(trace));
    }
    begun(trace, object)
}

/// Sends whole parts of what has been written, until the program has ended. What it cannot do now is tried later.
fn while_it_runs(url: &Path, force: bool, began: &str, over: &AtomicBool, grows: Grows) -> Sent {
    let mut sent = Sent::default();
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(STEP);
        for trace in written(began) {
            if grows == Grows::InSegments {
                send_segments(&trace, url, force, &mut sent.segments, over);
                continue;
            }
            let begun = &mut sent.begun;
            let Ok(bytes) = std::fs::metadata(&trace).map(|data| data.len()) else { continue };
            if bytes < LEAST || over.load(Ordering::Relaxed) {
                continue;
            }
            let upload = match begun.remove(&trace) {
                Some(upload) => Ok(upload),
                None => begin(&trace, &destination(url, &trace, usize::MAX), force),
            };
            let advanced = upload.and_then(|mut upload| {
                let advanced = upload.advance(bytes);
                begun.insert(trace, upload);
                Ok(advanced?)
            });
            if advanced.is_err() {
                pause(AGAIN, over);
            }
        }
    }
    sent
}

/// Sends segments that have their end. The newest of the older ones may be about to get it.
fn send_segments(trace: &Path, url: &Path, force: bool, sent: &mut BTreeSet<PathBuf>, over: &AtomicBool) {
    let mut older = older_segments(trace);
    older.pop();
    for (_, segment) in older {
        if over.load(Ordering::Relaxed) {
            return;
        }
        if sent.contains(&segment) {
            continue;
        }
        let is_there = segment.exists();
        match rest_of(&segment, url, force, None) {
            Ok(_) => drop(sent.insert(segment)),
            // The recorder has removed it meanwhile.
            Err(_) if !is_there || !segment.exists() => {}
            Err(_) => return pause(AGAIN, over),
        }
    }
}

fn written(began: &str) -> Vec<PathBuf> {
    let told = Job::find(began).map(|job| job.told()).unwrap_or_default();
    let traces = told.into_iter().filter_map(|told| match told {
        Told::Began { trace, .. } => Some(trace),
        Told::Ended { .. } | Told::Failed { .. } => None,
    });
    traces.collect()
}

fn pause(time: Duration, over: &AtomicBool) {
    let mut left = time;
    while !left.is_zero() && !over.load(Ordering::Relaxed) {
        std::thread::sleep(STEP.min(left));
        left = left.saturating_sub(STEP);
    }
}
