//! A trace, reduced to what a job of many processes is judged by: a table of a few megabytes at most, which is read in place of
//! the trace wherever its answer is the same. docs/SQL.md has its shape.
//!
//! ```text
//! trace ─ one pass ─┬ ranks::collect ─> Participant ┐
//!                   ├ held, between ──> pictures    ├─ write ─> rows ─> x.summary.parquet ─ read ─> Summary ─> ranks, diff, leaks, ...
//!                   └ growth, lives ──> answers     ┘
//! ```
//! What verbs compute with is kept as they have it (`state`), what they say as they say it (`answer`): no verdict is made twice.
#![forbid(unsafe_code)]

mod between;
mod held;
mod read;
mod rows;
mod series;
#[cfg(test)]
mod tests;
mod write;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use gputrace_schemas::event::{Event, EventKind, Nanos, Process};
use gputrace_sim::effort;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use gputrace_analyse::budget::budgets;
use gputrace_analyse::categories::Categories;
use gputrace_analyse::growth::Growth;
use gputrace_analyse::lifetimes::{DeviceLifetimes, Lifetimes};
use gputrace_analyse::live::{self, Picture};
use gputrace_analyse::lives::Lives;
use gputrace_analyse::story::Story;
use gputrace_answers::Reply;
use gputrace_answers::budget;
use gputrace_answers::diff::Side;
use gputrace_answers::leaks::Found;
use gputrace_answers::postmortem::Postmortem;
use gputrace_answers::verdict::verdict;
use gputrace_answers::whatif::Machine;
use gputrace_ranks::calls::Participant;
use gputrace_ranks::collect::Collector;
use gputrace_report::model::Part;
use gputrace_report::processes::Traced;
use gputrace_report::sections::{FIGURES, STATISTICS, Shown, of_report};
use gputrace_report::summary::ProcessSummary;
use gputrace_trace::import::{ImportError, Requests, Trace};
use gputrace_trace::ledger::{Ledger, Watch};
use gputrace_trace::source::Source;

use between::Span;
use held::Held;
pub use read::{Error, Summary, Then, again};

/// How names of summaries end.
pub const ENDING: &str = ".summary.parquet";
/// Blocks whose lives are kept: roles and cycles follow from all of them, and each needs 64 bytes.
const MOST_LIVES: usize = 1 << 20;

/// Roles of processes that serve: of these there is a budget.
const SERVING: [&str; 2] = ["weights", "KV cache"];

/// Whether a file is a summary, by its name.
#[must_use]
pub fn is_summary(path: &Path) -> bool {
    let name = path.to_string_lossy();
    // A link to an object may carry a signature.
    let name = if name.contains("://") { name.split('?').next().unwrap_or_default() } else { &name };
    name.ends_with(ENDING)
}

/// A summary that can be written.
pub struct Reduced {
    /// The file.
    pub bytes: Vec<u8>,
    /// A name for it, made of what it says.
    pub name: String,
}

/// Reduces a trace, in one pass over its events; those of a server's budget and of remedies for a lack of memory come on top.
///
/// # Errors
/// The table could not be written.
pub fn reduce(source: &Source) -> io::Result<Reduced> {
    write::summary(&understood(source))
}

/// The answer about a process where several are shown together.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Head {
    /// Its trace.
    pub path: String,
    /// The process.
    pub process: Process,
    /// Names of its threads that made events.
    threads: Vec<String>,
    /// It has communicators.
    pub is_of_job: bool,
    /// It maps memory that others made.
    pub maps_others: bool,
}

impl Head {
    /// Of a story.
    #[must_use]
    pub fn of(story: &Story) -> Head {
        let mut threads: Vec<String> =
            story.threads.values().filter(|name| !name.is_empty()).cloned().collect();
        threads.sort_unstable();
        let (path, process) = (story.path.clone(), story.process.clone());
        let is_of_job = story.ledger.communicators().next().is_some();
        let maps_others = story.ledger.devices().values().any(|books| books.imported.peak().0 > 0);
        Head { path, process, threads, is_of_job, maps_others }
    }

    /// For the tree of processes.
    #[must_use]
    pub fn traced(&self) -> Traced<'_> {
        let threads = self.threads.iter().map(String::as_str).collect();
        Traced { process: &self.process, path: &self.path, threads }
    }
}

/// All that a summary is made of.
struct Understood<'a> {
    source: &'a Source,
    story: Story,
    participant: Participant,
    held: Held,
    peaks: Vec<Picture>,
    ends: Vec<Picture>,
    leaks: Found,
    answers: Vec<(&'static str, Part)>,
    /// What `summary` says of it, for programs.
    figures: ProcessSummary,
    /// What `budget` says of a process that serves, for programs.
    budget: Option<Json>,
    /// What PyTorch's blocks were for, by device.
    roles: Vec<DeviceLifetimes>,
    /// What is not in it, and why.
    left_out: Vec<String>,
}

fn understood(source: &Source) -> Understood<'_> {
    let mut reducer = Reducer::new(source);
    let mut story = Story::watched(source, &mut reducer);
    let Reducer { collector, mut held, growth, lives, tracked, .. } = reducer;
    for (device, (membership, n_before)) in tracked {
        held.close(device, Span { membership, n_before, until: Nanos(u64::MAX) });
    }
    held.check(&story.ledger);
    let participant = collector.finish(&story);
    let peaks = held.peaks();
    let devices: Vec<i16> = story.ledger.devices().keys().copied().collect();
    let ends = devices.iter().map(|device| live::picture(&story.ledger, *device, story.ledger.run.last));
    let ends: Vec<Picture> = ends.filter(|picture| !picture.held.is_empty()).collect();
    let leaks = Found::of(&story, source.definitions(), &growth);
    let mut left_out = vec![];
    for (device, _) in held.devices.iter().filter(|(_, device)| !device.is_sure) {
        left_out.push(format!("cuda:{device}: memory held at its peak, and between collectives"));
    }
    let stats = STATISTICS.iter().flat_map(|entry| entry.of(&story)).collect();
    let figures = FIGURES.iter().flat_map(|entry| entry.of(&story)).collect();
    let mut answers = vec![
        ("stats", gputrace_report::part(&story, stats)),
        ("summary", gputrace_report::part(&story, figures)),
    ];
    let figures = ProcessSummary::of(&story);
    let (mut roles, mut budget) = (vec![], None);
    match lives {
        Some(lives) => {
            let lifetimes = Lifetimes::of(lives, source.definitions(), &story.ledger, &Categories::default());
            story.lifetimes = Some(lifetimes);
            // Without this replay the verdict would be another.
            let is_short = effort::SUMMARY.covers(story.ledger.run.n_events as usize);
            let requests = IfShort::new(source, is_short);
            let found = Postmortem::of_story(story, source, &growth);
            let verdict = verdict(&found, &requests);
            let part = |story: &Story, shown| Part {
                verdict: Some(verdict.clone()),
                ..gputrace_report::part(story, of_report(story, shown))
            };
            let brief = part(&found.story, Shown::Always);
            story = found.story.with_gaps(&requests);
            match requests.is_missed.get() {
                true => left_out.push(
                    "report: its verdict replays requests, and traces of more than a million events are not replayed".into(),
                ),
                false => answers.extend([("report", brief), ("report --all", part(&story, Shown::OnDemand))]),
            }
            roles = story.lifetimes.take().map_or_else(Vec::new, |lifetimes| lifetimes.devices);
            let serves = roles.iter().flat_map(|it| &it.roles).any(|it| SERVING.contains(&&*it.name));
            match (serves, is_short) {
                (true, true) => budget = of_server(source, &mut answers, &mut left_out),
                (true, false) => {
                    left_out.push("budget: the budget of a server with more than a million events".into())
                }
                (false, _) => {
                    left_out.push("budget: the budget of a program that does not serve requests".into())
                }
            }
        }
        None => left_out.push(
            "report: it depends on the lifetimes of all blocks, which are more than a million; so do roles"
                .into(),
        ),
    }
    Understood {
        source,
        story,
        participant,
        held,
        peaks,
        ends,
        leaks,
        answers,
        figures,
        budget,
        roles,
        left_out,
    }
}

/// The requests of a trace that is short enough to be replayed here.
struct IfShort<'a> {
    source: &'a Source,
    /// Why it is not.
    long: Option<ImportError>,
    /// They were asked for, and not had.
    is_missed: Cell<bool>,
}

impl<'a> IfShort<'a> {
    fn new(source: &'a Source, is_short: bool) -> IfShort<'a> {
        let long = || ImportError::Open {
            path: source.path().into(),
            cause: io::Error::other("it is too long to be replayed"),
        };
        IfShort { source, long: (!is_short).then(long), is_missed: Cell::new(false) }
    }
}

impl Requests for IfShort<'_> {
    fn requests(&self) -> Result<&Trace, &ImportError> {
        match &self.long {
            None => self.source.requests(),
            Some(long) => {
                self.is_missed.set(true);
                Err(long)
            }
        }
    }
}

/// What `budget` says of it when it is asked for nothing more.
fn of_server(
    source: &Source,
    answers: &mut Vec<(&'static str, Part)>,
    left_out: &mut Vec<String>,
) -> Option<Json> {
    let found = budgets(source, &Categories::default(), None);
    let found = found.map_err(|why| left_out.push(format!("budget: {why}"))).ok()?;
    let trace = source.requests().map_err(ToString::to_string);
    let Reply { part, answer } = budget::reply(&found, &trace, Machine::default(), &[]);
    answers.push(("budget", part));
    serde_json::to_value(answer).ok()
}

impl Understood<'_> {
    /// One side of a comparison: at the peaks or at the end.
    fn side(&self, pictures: &[Picture]) -> Side {
        Side::of(self.source.definitions(), &self.story, pictures)
    }
}

/// Watches for everything at once.
struct Reducer<'a> {
    source: &'a Source,
    collector: Collector<'a>,
    held: Held,
    growth: Growth,
    lives: Option<Lives>,
    /// On which communicator of each device calls are counted, and how many there were.
    tracked: BTreeMap<i16, (usize, u64)>,
}

impl<'a> Reducer<'a> {
    fn new(source: &'a Source) -> Reducer<'a> {
        Reducer {
            source,
            collector: Collector::new(source),
            held: Held::default(),
            growth: Growth::default(),
            lives: Some(Lives::default()),
            tracked: BTreeMap::new(),
        }
    }

    /// A call into NCCL: perhaps a collective, between two of which ranks are compared.
    fn called(&mut self, event: &Event) {
        let is_call = matches!(event.kind, EventKind::NcclEnter(_));
        for (device, (membership, n)) in self.collector.marks() {
            let known = self.tracked.insert(device, (membership, n));
            if known == Some((membership, n)) {
                continue;
            }
            // The first that is seen of a communicator may be a call of it.
            let n_before = known.filter(|(of, _)| *of == membership).map_or(0, |(_, n)| n);
            if n < n_before {
                self.held.forget(device, membership, n);
                continue;
            }
            if is_call && n == n_before + 1 {
                self.held.close(device, Span { membership, n_before, until: event.time });
            }
            match is_call && n > n_before {
                true => self.held.begin(device, event.time),
                false => self.held.lose_track(device),
            }
        }
    }
}

impl Watch for Reducer<'_> {
    fn begin(&mut self, ledger: &mut Ledger) {
        *self = Reducer::new(self.source);
        self.collector.begin(ledger);
        self.growth.begin(ledger);
        if let Some(lives) = &mut self.lives {
            lives.begin(ledger);
        }
        ledger.keep_steps();
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        self.collector.event(ledger, event);
        self.held.event(ledger, event);
        self.growth.event(ledger, event);
        if let Some(lives) = &mut self.lives {
            lives.event(ledger, event);
            if lives.list.len() > MOST_LIVES {
                self.lives = None;
            }
        }
        if matches!(event.kind, EventKind::NcclEnter(_) | EventKind::NcclExit(_) | EventKind::NcclTiming(_)) {
            self.called(event);
        }
    }
}
