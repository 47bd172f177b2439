//! One trace, understood: what every summary, report and statistic is made from.

use std::collections::HashMap;
use std::path::Path;

use gputrace_schemas::event::{Device, Nanos, Process, ThreadId};
use gputrace_schemas::reader::Damage;
use gputrace_sim::effort;
use gputrace_sim::whatif::{RecordedGap, recorded_gaps};

use crate::categories::Categories;
use crate::lifetimes::Lifetimes;
use crate::lives::Lives;
use gputrace_trace::import::Requests;
use gputrace_trace::ledger::{Ledger, Unwatched, Watch};
use gputrace_trace::source::{Error, Source};
use gputrace_trace::{Before, Recording};

/// Much is this share of what was reserved.
const WASTEFUL: f64 = 0.1;

/// A process and its books.
pub struct Story {
    /// The file, as named by the user.
    pub path: String,
    /// The process.
    pub process: Process,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Names of its threads, with their ids.
    pub threads: HashMap<ThreadId, String>,
    /// The events.
    pub ledger: Ledger,
    /// Parts of the file that could not be read.
    pub damages: Vec<Damage>,
    /// The trace has its end.
    pub complete: bool,
    /// The process is still running: what comes next is not known.
    pub is_running: bool,
    /// The results of the lifetimes, where that was requested.
    pub lifetimes: Option<Lifetimes>,
    /// Why PyTorch reserved more than was in use, where that was requested.
    pub gaps: Option<Vec<RecordedGap>>,
}

impl Story {
    /// Reads a gputrace trace or a PyTorch snapshot.
    ///
    /// # Errors
    /// The file is neither. Damage is not an error; it is kept in [`Story::damages`].
    pub fn read(path: &Path) -> Result<Story, Error> {
        Ok(Story::of_source(&Source::open(path)?))
    }

    /// As [`Story::of_source`], with what lifetimes show: needs memory for every block.
    #[must_use]
    pub fn with_lifetimes(source: &Source, categories: &Categories) -> Story {
        Story::with_lifetimes_and(source, categories, &mut Unwatched)
    }

    /// The same, with somebody else who watches in the same pass.
    pub fn with_lifetimes_and(source: &Source, categories: &Categories, watch: &mut dyn Watch) -> Story {
        let mut both = (Lives::default(), watch);
        let mut story = Story::watched(source, &mut both);
        story.lifetimes = Some(Lifetimes::of(both.0, source.definitions(), &story.ledger, categories));
        story
    }

    /// Finds out why PyTorch reserved more than was in use, where that is much. It is replayed for that.
    #[must_use]
    pub fn with_gaps(mut self, trace: &dyn Requests) -> Story {
        let is_short = effort::VERDICT.covers(self.ledger.run.n_events as usize);
        let is_asked = is_short && self.wasteful_devices().next().is_some();
        // What cannot be imported is shown by the verb that the report then names.
        let trace = is_asked.then(|| trace.requests()).and_then(Result::ok);
        self.gaps = Some(trace.map_or(vec![], |trace| recorded_gaps(&trace.devices)));
        self
    }

    /// Devices of which PyTorch reserved much more than it ever had in use.
    pub fn wasteful_devices(&self) -> impl Iterator<Item = i16> {
        let devices = self.ledger.devices().iter().filter(|(_, books)| {
            books.torch.as_ref().is_some_and(|torch| {
                let (reserved, allocated) = (torch.reserved.peak.0, torch.allocated.peak.0);
                reserved.saturating_sub(allocated) as f64 >= reserved as f64 * WASTEFUL && reserved > 0
            })
        });
        devices.map(|(device, _)| *device)
    }

    /// Understands a trace that is open.
    #[must_use]
    pub fn of_source(source: &Source) -> Story {
        Story::watched(source, &mut Unwatched)
    }

    /// Understands a trace, and lets `watch` follow how the books change.
    pub fn watched(source: &Source, watch: &mut dyn Watch) -> Story {
        Story::within(source, (Nanos(0), Nanos(u64::MAX)), watch)
    }

    /// Understands a trace up to a time. What is counted, and what is watched, begins at another.
    pub fn within(source: &Source, within: (Nanos, Nanos), watch: &mut dyn Watch) -> Story {
        Story::with_books(source, source.books(within, watch))
    }

    /// Understands a trace whose books are kept already.
    #[must_use]
    pub fn with_books(source: &Source, ledger: Ledger) -> Story {
        Story {
            path: source.path().to_owned(),
            process: source.definitions().process().clone(),
            devices: source.devices().to_vec(),
            threads: source.threads().into_iter().map(|(id, thread)| (id, thread.name)).collect(),
            ledger,
            damages: source.damages(),
            complete: source.is_complete(),
            is_running: source.is_prefix(),
            lifetimes: None,
            gaps: None,
        }
    }

    /// Understands a trace in memory.
    #[must_use]
    pub fn of(path: &str, recording: &Recording) -> Story {
        Story::of_source(&Source::of(path, recording.clone()))
    }

    /// What a user would write for the trace: `-` for what came by the standard input, of which a program keeps an open file.
    #[must_use]
    pub fn named(&self) -> &str {
        if self.path.starts_with("/proc/self/fd/") { "-" } else { &self.path }
    }

    /// The device with this ordinal.
    #[must_use]
    pub fn device(&self, ordinal: i16) -> Option<&Device> {
        self.devices.iter().find(|device| device.ordinal == ordinal)
    }

    /// When the process began to be traced.
    pub fn start(&self) -> Nanos {
        let start = if self.process.start.0 > 0 { Some(self.process.start) } else { self.ledger.run.first };
        start.unwrap_or_default()
    }

    /// Time since then.
    #[must_use]
    pub fn since_start(&self, time: Nanos) -> Nanos {
        Nanos(time.0.saturating_sub(self.start().0))
    }

    /// From when on there is every event, where older segments of a bounded recording were removed.
    #[must_use]
    pub fn since(&self) -> Option<Nanos> {
        Some(self.process.since).filter(|since| since.0 > 0)
    }

    /// What a snapshot does not hold, by device; empty where everything is from its beginning.
    #[must_use]
    pub fn before(&self) -> Vec<Before> {
        self.ledger.health.notes.iter().filter_map(|(_, note)| Before::of_note(note)).collect()
    }

    /// It is a snapshot without a history: it shows who holds what at one moment.
    #[must_use]
    pub fn is_one_moment(&self) -> bool {
        let before = self.before();
        !before.is_empty() && before.iter().all(|before| !before.has_history)
    }

    /// How the process ended; none where its trace does not say.
    #[must_use]
    pub fn end(&self) -> Option<End> {
        let mut newest_first = self.ledger.health.notes.iter().rev();
        newest_first.find_map(|(_, note)| End::parse(note.strip_prefix("process.end=")?))
    }

    /// How long the process ran before somebody attached to it, where that is how its trace began; `None` inside where nobody knows.
    #[must_use]
    pub fn attached_after(&self) -> Option<Option<Nanos>> {
        let told = |name| self.ledger.health.notes.iter().find_map(|(_, note)| note.strip_prefix(name));
        told("attach.before=")?;
        Some(told("attach.after_ns=").and_then(|age| age.parse().ok()).map(Nanos))
    }

    /// Whether everything that was held when somebody attached is known: the library slept in the process from its start.
    fn is_known_before(&self) -> bool {
        let told = |(_, note): &(_, String)| note.strip_prefix("attach.before=").map(str::to_owned);
        let told = self.ledger.health.notes.iter().find_map(told).unwrap_or_default();
        !told.starts_with("0 known") && told.ends_with(" 0 not remembered")
    }

    /// What to know of its numbers, in one line; shown wherever numbers are: since when they are known, and why they may be wrong.
    #[must_use]
    pub fn caveats(&self) -> Option<String> {
        let since = self.attached_after().map(|after| {
            let after = after.map_or_else(String::new, |after| format!(" {} after the start", span(after)));
            match self.is_known_before() {
                true => {
                    format!("attached{after}: of memory allocated before, only what was still held is known")
                }
                false => format!("attached{after}: earlier allocations and frees are not known"),
            }
        });
        let rest = self.process.is_rest().then(|| {
            "left by a recorder that was killed: earlier allocations and frees are not known".to_owned()
        });
        let caveats: Vec<String> = since.into_iter().chain(rest).chain(self.doubts()).collect();
        (!caveats.is_empty()).then(|| caveats.join("; "))
    }

    /// Whether none of its events could be read, and there were some: nothing can be concluded from what is not there.
    #[must_use]
    pub fn is_unreadable(&self) -> bool {
        self.ledger.run.n_events == 0 && !self.damages.is_empty()
    }

    /// Whether events are missing, lost or unreadable, other than at the end.
    #[must_use]
    pub fn has_holes(&self) -> bool {
        !self.ledger.health.lost.is_empty() || !self.damages.is_empty()
    }

    /// Why its numbers may be wrong, in one line.
    #[must_use]
    pub fn doubts(&self) -> Option<String> {
        let mut doubts = Vec::new();
        for (cause, events) in &self.ledger.health.lost {
            doubts.push(format!("{events} events lost ({cause})"));
        }
        let unread: u64 = self.damages.iter().map(|damage| damage.bytes).sum();
        match self.damages.len() {
            0 => {}
            1 => doubts.push(format!("{unread} bytes of the trace unreadable")),
            n => doubts.push(format!("{unread} bytes of the trace unreadable in {n} places")),
        }
        if !self.complete {
            doubts.push(NO_END.into());
        }
        (!doubts.is_empty()).then(|| format!("numbers may be wrong: {}", doubts.join("; ")))
    }
}

/// What [`Story::doubts`] says of a trace without its end.
pub const NO_END: &str = "the trace has no end (its recorder was killed, or is still writing)";

/// A long time by its two largest units: `3 d 4 h`.
fn span(time: Nanos) -> String {
    let seconds = time.0 / 1_000_000_000;
    let units = [(86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")];
    let Some(at) = units.iter().position(|(unit, _)| seconds >= *unit) else {
        return "less than a second".into();
    };
    let mut left = seconds;
    let parts = units.iter().skip(at).take(2).filter_map(|(unit, name)| {
        let n = left / unit;
        left %= unit;
        (n > 0).then(|| format!("{n} {name}"))
    });
    parts.collect::<Vec<String>>().join(" ")
}

/// How a process ended, as its recorder saw it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// It came to its exit.
    Exit,
    /// By `_exit`, or by the system call itself, with this status.
    Status(i32),
    /// A signal ended it.
    Signal(i32),
    /// It never came to its exit, and nobody told the recorder more.
    Unseen,
    /// It did not end: somebody has detached from it.
    Detached,
}

impl End {
    fn parse(note: &str) -> Option<End> {
        let number = |text: &str| text.parse().ok();
        match note.split_once(' ') {
            None if note == "exit" => Some(End::Exit),
            None if note == "killed" => Some(End::Unseen),
            None if note == "detached" => Some(End::Detached),
            Some(("_exit", status)) => number(status).map(End::Status),
            Some(("signal", signal)) => number(signal).map(End::Signal),
            _ => None,
        }
    }

    /// Whether the process ended itself.
    #[must_use]
    pub fn is_own(self) -> bool {
        matches!(self, End::Exit | End::Status(_))
    }

    /// What happened, for a sentence about "the process".
    #[must_use]
    pub fn text(self) -> String {
        match self {
            End::Exit => "exited by itself".into(),
            End::Status(status) => {
                format!("called `_exit` with status {status}, without its exit handlers")
            }
            End::Signal(signal) => format!("was killed by signal {signal}{}", name_of(signal)),
            End::Unseen => "was killed, crashed, or called `_exit`".into(),
            End::Detached => "continues: `gputrace detach` ended the recording".into(),
        }
    }
}

/// Names of signals that end programs (signal(7), x86-64 and aarch64).
fn name_of(signal: i32) -> String {
    let name = match signal {
        2 => "SIGINT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        13 => "SIGPIPE",
        15 => "SIGTERM",
        _ => return String::new(),
    };
    format!(" ({name})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_recorder_wrote_of_the_end_is_told_in_words() {
        let told = ["exit", "_exit 1", "signal 9", "signal 63", "killed", "signal", "later"]
            .map(|note| End::parse(note).map(|end| (end.is_own(), end.text())));
        let words = told.map(|end| end.map_or_else(String::new, |(own, text)| format!("{own}: {text}")));
        assert_eq!(
            words,
            [
                "true: exited by itself",
                "true: called `_exit` with status 1, without its exit handlers",
                "false: was killed by signal 9 (SIGKILL)",
                "false: was killed by signal 63",
                "false: was killed, crashed, or called `_exit`",
                "",
                "",
            ]
        );
    }
}
