//! One trace, understood: what every summary, report and statistic is made from.

use std::collections::HashMap;
use std::convert::Infallible;
use std::path::Path;

use gputrace_schemas::event::{Device, Nanos, Process, ThreadId};
use gputrace_schemas::reader::Damage;
use gputrace_sim::whatif::{RecordedGap, recorded_gaps};

use crate::analyse::categories::Categories;
use crate::analyse::lifetimes::Lifetimes;
use crate::analyse::lives::Lives;
use crate::import::{ImportError, Trace};
use crate::ledger::{Ledger, Unwatched, Watch};
use crate::trace::Recording;
use crate::trace::source::{Error, Source};

/// Longer traces are not replayed for a report: that takes seconds.
const MOST_REPLAYED: u64 = 400_000;
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
    /// What happened.
    pub ledger: Ledger,
    /// What of the file could not be read.
    pub damages: Vec<Damage>,
    /// The trace has its end.
    pub complete: bool,
    /// The process is still running: what comes next is not known.
    pub is_running: bool,
    /// What lifetimes show, where that was asked for.
    pub lifetimes: Option<Lifetimes>,
    /// Why PyTorch reserved more than was in use, where that was asked for.
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
        let mut lives = Lives::default();
        let mut story = Story::watched(source, &mut lives);
        let sites = &story.ledger.sites;
        story.lifetimes = Some(Lifetimes::of(lives, source.definitions(), sites, categories));
        story
    }

    /// Finds out why PyTorch reserved more than was in use, where that is much. `load` reads the same trace as requests.
    #[must_use]
    pub fn with_gaps(mut self, load: impl FnOnce() -> Result<Trace, ImportError>) -> Story {
        let is_asked = self.ledger.n_events <= MOST_REPLAYED && self.wasteful_devices().next().is_some();
        // What cannot be imported is shown by the verb that the report then names.
        let trace = is_asked.then(load).and_then(Result::ok);
        self.gaps = Some(trace.map_or(vec![], |trace| recorded_gaps(&trace.devices)));
        self
    }

    /// Devices of which PyTorch reserved much more than it ever had in use.
    pub fn wasteful_devices(&self) -> impl Iterator<Item = i16> {
        let devices = self.ledger.devices.iter().filter(|(_, books)| {
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
    pub fn within(source: &Source, (from, to): (Nanos, Nanos), watch: &mut dyn Watch) -> Story {
        let definitions = source.definitions();
        let ledger = Ledger::of(|ledger| {
            watch.begin(ledger);
            let mut is_before = from > Nanos(0);
            for event in source.events().take_while(|event| event.time <= to) {
                if is_before && event.time >= from {
                    is_before = false;
                    ledger.count_anew();
                }
                ledger.event(definitions, &event);
                if !is_before {
                    watch.event(ledger, &event);
                }
            }
            if is_before {
                ledger.count_anew();
            }
            Ok::<(), Infallible>(())
        });
        Story {
            path: source.path().to_owned(),
            process: definitions.process().clone(),
            devices: source.devices().to_vec(),
            threads: source.threads().into_iter().map(|(id, thread)| (id, thread.name)).collect(),
            ledger: ledger.unwrap_or_else(|never| match never {}),
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

    /// The device with this ordinal.
    #[must_use]
    pub fn device(&self, ordinal: i16) -> Option<&Device> {
        self.devices.iter().find(|device| device.ordinal == ordinal)
    }

    /// When the process began to be traced.
    pub(crate) fn start(&self) -> Nanos {
        let start = if self.process.start.0 > 0 { Some(self.process.start) } else { self.ledger.first };
        start.unwrap_or_default()
    }

    /// Time since then.
    #[must_use]
    pub fn since_start(&self, time: Nanos) -> Nanos {
        Nanos(time.0.saturating_sub(self.start().0))
    }

    /// Why its numbers may be wrong, in one line; shown wherever numbers are.
    #[must_use]
    pub fn doubts(&self) -> Option<String> {
        let mut doubts = Vec::new();
        for (cause, events) in &self.ledger.lost {
            doubts.push(format!("{events} events lost ({cause})"));
        }
        let unread: u64 = self.damages.iter().map(|damage| damage.bytes).sum();
        match self.damages.len() {
            0 => {}
            1 => doubts.push(format!("{unread} bytes of the trace unreadable")),
            n => doubts.push(format!("{unread} bytes of the trace unreadable in {n} places")),
        }
        if !self.complete {
            doubts.push("the trace has no end (its recorder was killed, or is still writing)".into());
        }
        (!doubts.is_empty()).then(|| format!("numbers may be wrong: {}", doubts.join("; ")))
    }
}
