//! A line on the terminal while something takes long: what, how far it is, and for how many seconds.

use std::io::IsTerminal;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use gputrace_schemas::reader::progress as reading;
use gputrace_sim::progress as simulating;

use crate::show::{say_shown, shown, stderr_style};

/// What is done sooner than this needs no word.
const LONG: Duration = Duration::from_secs(1);

/// Whether such a line is on the terminal.
static IS_SHOWN: AtomicBool = AtomicBool::new(false);

/// Takes the line away, before others write where it is.
pub(crate) fn erase() {
    if IS_SHOWN.swap(false, Ordering::Relaxed) {
        say_shown(b"\r\x1b[K");
    }
}

/// Says what is being done, from a second on, until it is dropped. Nothing where the standard error is no terminal.
pub(crate) struct Working(Option<Line>);

struct Line {
    stop: Sender<()>,
    thread: JoinHandle<()>,
    before: (Option<reading::Told>, Option<simulating::Told>),
}

/// What a thread does, and how far it is: as one number, so that both are of the same moment.
#[derive(Default)]
struct Progress(AtomicU64);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Starting,
    Reading,
    Simulating,
}

/// More than this is not counted.
const MOST: u64 = (1 << 31) - 1;

impl Progress {
    fn is_at(&self, phase: Phase, done: usize, of: usize) {
        let number = |n: usize| (n as u64).min(MOST);
        let phase = if phase == Phase::Simulating { 1 << 63 } else { 0 };
        self.0.store(phase | number(done) << 32 | number(of), Ordering::Relaxed);
    }

    fn now(&self) -> (Phase, u64, u64) {
        let all = self.0.load(Ordering::Relaxed);
        let (done, of) = (all >> 32 & MOST, all & MOST);
        let phase = match (of, all >> 63) {
            (0, _) => Phase::Starting,
            (_, 0) => Phase::Reading,
            (..) => Phase::Simulating,
        };
        (phase, done, of)
    }

    /// In words. What is behind the last pass over a trace is not counted.
    fn words(&self) -> String {
        match self.now() {
            (Phase::Reading, done, of) if done < of => format!("reading, {} %, ", done * 100 / of),
            (Phase::Simulating, done, of) if done < of => format!("{done} of {of} done, "),
            (Phase::Starting, ..) => String::new(),
            (Phase::Reading | Phase::Simulating, ..) => "computing, ".to_owned(),
        }
    }
}

impl Working {
    /// On a file.
    pub(crate) fn on(path: &Path) -> Working {
        let is_plain = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        if is_plain || !std::io::stderr().is_terminal() {
            return Working(None);
        }
        let (stop, done) = channel::<()>();
        let (what, start, progress) = (shown(path), Instant::now(), Arc::new(Progress::default()));
        let (read, simulated) = (Arc::clone(&progress), Arc::clone(&progress));
        let tell = move || {
            let mut wait = LONG;
            while done.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
                wait = LONG;
                let line = line(&what, &progress.words(), start.elapsed(), stderr_style().width);
                IS_SHOWN.store(true, Ordering::Relaxed);
                say_shown(format!("\r\x1b[K{line}").as_bytes());
            }
            erase();
        };
        let Ok(thread) = std::thread::Builder::new().name("working".into()).spawn(tell) else {
            return Working(None);
        };
        let before = (
            reading::tell(Some(Arc::new(move |done, of| read.is_at(Phase::Reading, done, of)))),
            simulating::tell(Some(Arc::new(move |done, of| simulated.is_at(Phase::Simulating, done, of)))),
        );
        Working(Some(Line { stop, thread, before }))
    }
}

/// One line, no wider than the terminal: a line that wraps cannot be erased. The end of a path says which it is.
fn line(what: &str, words: &str, time: Duration, width: Option<usize>) -> String {
    let rest = format!(": {words}{} s", time.as_secs());
    let room = width.map_or(usize::MAX, |width| width.saturating_sub(rest.chars().count() + 1));
    let n = what.chars().count();
    match n <= room {
        true => what.to_owned() + &rest,
        false => {
            what.chars().skip(n + 1 - room.max(1)).fold("…".to_owned(), |all, c| all + &c.to_string()) + &rest
        }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        if let Some(Line { stop, thread, before: (read, simulated) }) = self.0.take() {
            reading::tell(read);
            simulating::tell(simulated);
            drop(stop);
            // It only writes.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_is_said_with_its_share() {
        let progress = Progress::default();
        assert_eq!(progress.words(), "");
        progress.is_at(Phase::Reading, 1, 8);
        assert_eq!(progress.words(), "reading, 12 %, ");
        progress.is_at(Phase::Reading, 8, 8);
        assert_eq!(progress.words(), "computing, ");
        progress.is_at(Phase::Simulating, 3, 40);
        assert_eq!(progress.words(), "3 of 40 done, ");
    }

    #[test]
    fn a_line_is_no_wider_than_the_terminal() {
        let line = |width| line("/a/long/folder/train.gtr", "reading, 12 %, ", Duration::from_secs(3), width);
        assert_eq!(line(None), "/a/long/folder/train.gtr: reading, 12 %, 3 s");
        assert_eq!(line(Some(32)), "…/train.gtr: reading, 12 %, 3 s");
        assert_eq!(line(Some(10)), "…: reading, 12 %, 3 s");
    }
}
