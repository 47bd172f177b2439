//! The one door for a trace of any kind: its events (gputrace's own from its file, a PyTorch snapshot's from memory), the books of them
//! in one pass, and its requests, which are read once and kept.

use std::borrow::Cow;
use std::convert::Infallible;
use std::io;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::OnceLock;

use gputrace_schemas::event::{Device, Event, Nanos, Thread, ThreadId};
use gputrace_schemas::reader::{self, Damage, Trace};

use crate::files;
use crate::import::{self, Gathering, ImportError, Requests};
use crate::ledger::{Ledger, Watch};
use crate::redact;
use crate::{Definitions, Recording};

/// Why a file cannot be read as a trace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not a trace of gputrace.
    #[error(transparent)]
    Trace(#[from] reader::Error),
    /// It is a pickle, but not a snapshot of PyTorch.
    #[error(transparent)]
    Snapshot(#[from] ImportError),
}

/// A trace that can be read from its beginning to its end, as often as needed.
pub struct Source {
    path: String,
    kind: Kind,
    /// Definitions to show instead of the trace's own.
    redacted: Option<Box<Recording>>,
    requests: OnceLock<Result<import::Trace, ImportError>>,
}

enum Kind {
    Trace(Box<Trace>),
    Prefix(Box<Trace>),
    Recording(Box<Recording>),
}

impl Source {
    fn new(path: String, kind: Kind) -> Source {
        Source { path, kind, redacted: None, requests: OnceLock::new() }
    }

    /// Opens a gputrace trace or a PyTorch snapshot, plain or gzip; the first bytes show which it is.
    ///
    /// # Errors
    /// It cannot be read, or is neither. Damage of a trace is an error only if none of its events can be read.
    pub fn open(path: &Path) -> Result<Source, Error> {
        let name = path.display().to_string();
        if !import::is_pickle(path) {
            let trace = files::trace(path)?;
            return match trace.damages().into_iter().next().filter(|_| trace.n_events() == 0) {
                Some(damage) => Err(reader::Error::NoEvents { file: name, damage }.into()),
                None => Ok(Source::new(name, Kind::Trace(Box::new(trace)))),
            };
        }
        let (recording, requests) = import::snapshot(path)?;
        let source = Source::new(name, Kind::Recording(Box::new(recording)));
        Ok(Source { requests: OnceLock::from(Ok(requests)), ..source })
    }

    /// Opens the first `length` bytes of a trace that is still being written, as if they were all of it.
    ///
    /// # Errors
    /// As [`Source::open`].
    pub fn open_prefix(path: &Path, length: u64) -> Result<Source, Error> {
        let kind = Kind::Prefix(Box::new(Trace::open_prefix(path, length)?));
        Ok(Source::new(path.display().to_string(), kind))
    }

    /// A trace in memory.
    #[must_use]
    pub fn of(path: &str, recording: Recording) -> Source {
        Source::new(path.to_owned(), Kind::Recording(Box::new(recording)))
    }

    /// The same trace without what should not be shown to others; see [`crate::redact`].
    #[must_use]
    pub fn redacted(self) -> Source {
        let definitions = match &self.kind {
            Kind::Trace(trace) | Kind::Prefix(trace) => {
                redact::definitions(&Recording::definitions_of(trace))
            }
            Kind::Recording(recording) => redact::definitions(recording),
        };
        let shown = Source::new("trace".to_owned(), self.kind).without_requests();
        Source { redacted: Some(Box::new(definitions)), ..shown }
    }

    /// The same trace, of which nothing is replayed: its requests cannot be had.
    #[must_use]
    pub fn without_requests(self) -> Source {
        let unavailable =
            ImportError::Open { path: (&self.path).into(), cause: io::ErrorKind::NotFound.into() };
        Source { requests: OnceLock::from(Err(unavailable)), ..self }
    }

    /// The file, as named by the user.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// What its events name by number.
    #[must_use]
    pub fn definitions(&self) -> &dyn Definitions {
        match (&self.redacted, &self.kind) {
            (Some(redacted), _) => &**redacted,
            (None, Kind::Trace(trace) | Kind::Prefix(trace)) => &**trace,
            (None, Kind::Recording(recording)) => &**recording,
        }
    }

    /// The events in the order of their times.
    pub fn events(&self) -> Box<dyn Iterator<Item = Cow<'_, Event>> + '_> {
        let events: Box<dyn Iterator<Item = Cow<'_, Event>> + '_> = match &self.kind {
            Kind::Trace(trace) | Kind::Prefix(trace) => Box::new(trace.events().map(Cow::Owned)),
            Kind::Recording(recording) => Box::new(recording.events.iter().map(Cow::Borrowed)),
        };
        match self.redacted {
            Some(_) => Box::new(events.map(|event| Cow::Owned(redact::event(&event)))),
            None => events,
        }
    }

    /// Shows each event in the order of their times, until `see` breaks.
    fn each(&self, see: &mut dyn FnMut(&Event) -> ControlFlow<()>) {
        let is_redacted = self.redacted.is_some();
        let mut shown = |event: &Event| if is_redacted { see(&redact::event(event)) } else { see(event) };
        match &self.kind {
            Kind::Trace(trace) | Kind::Prefix(trace) => import::each(trace, &mut shown),
            Kind::Recording(recording) => _ = recording.events.iter().try_for_each(shown),
        }
    }

    /// The books of the trace up to a time. What is counted, and what is watched, begins at another.
    pub fn books(&self, (from, to): (Nanos, Nanos), watch: &mut dyn Watch) -> Ledger {
        let definitions = self.definitions();
        let ledger = Ledger::of(|ledger| {
            watch.begin(ledger);
            let mut is_before = from > Nanos(0);
            self.each(&mut |event| {
                if event.time > to {
                    return ControlFlow::Break(());
                }
                if is_before && event.time >= from {
                    is_before = false;
                    ledger.count_anew();
                }
                ledger.event(definitions, event);
                if !is_before {
                    watch.event(ledger, event);
                }
                ControlFlow::Continue(())
            });
            if is_before {
                ledger.count_anew();
            }
            Ok::<(), Infallible>(())
        });
        ledger.unwrap_or_else(|never| match never {})
    }

    /// The books of all of it, for a caller that will want [`Requests::requests`] too: those are gathered in the same pass where they can
    /// be, and kept.
    pub fn books_and_requests(&self, watch: &mut dyn Watch) -> Ledger {
        let all = (Nanos(0), Nanos(u64::MAX));
        let (Kind::Trace(trace) | Kind::Prefix(trace), None) = (&self.kind, self.requests.get()) else {
            return self.books(all, watch);
        };
        let mut gathering = Gathering::new(&**trace, &|see| import::each(trace, see), trace.mappings());
        let mut ledger = gathering.books();
        watch.begin(&mut ledger);
        gathering.begin(&mut ledger);
        import::each(trace, &mut |event| {
            ledger.event(&**trace, event);
            watch.event(&mut ledger, event);
            gathering.event(&mut ledger, event);
            ControlFlow::Continue(())
        });
        if ledger.is_mistaken() {
            return self.books(all, watch);
        }
        ledger.finish();
        if let Some(gathered) = gathering.finish(&ledger) {
            let requests = import::with_notes(gathered, Path::new(&self.path), trace, !self.is_complete());
            // Nobody else has asked meanwhile, or got the same.
            let _ = self.requests.set(requests);
        }
        ledger
    }

    /// When the process began to be traced.
    #[must_use]
    pub fn start(&self) -> Nanos {
        let start = Some(self.definitions().process().start).filter(|start| start.0 > 0);
        start.or_else(|| Some(self.events().next()?.time)).unwrap_or_default()
    }

    /// The devices of the process.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        self.definitions().devices()
    }

    /// The threads of the process.
    #[must_use]
    pub fn threads(&self) -> Vec<(ThreadId, Thread)> {
        let of = |recording: &Recording| {
            recording.threads.iter().map(|(id, thread)| (*id, thread.clone())).collect::<Vec<_>>()
        };
        match (&self.redacted, &self.kind) {
            (Some(redacted), _) => of(redacted),
            (None, Kind::Recording(recording)) => of(recording),
            (None, Kind::Trace(trace) | Kind::Prefix(trace)) => {
                (0..).map(ThreadId).zip(trace.threads().iter().cloned()).collect()
            }
        }
    }

    /// Parts that could not be read so far.
    #[must_use]
    pub fn damages(&self) -> Vec<Damage> {
        match &self.kind {
            Kind::Trace(trace) | Kind::Prefix(trace) => trace.damages(),
            Kind::Recording(_) => vec![],
        }
    }

    /// It was opened as the beginning of a trace that is still being written.
    #[must_use]
    pub fn is_prefix(&self) -> bool {
        matches!(self.kind, Kind::Prefix(_))
    }

    /// The trace has its end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        match &self.kind {
            Kind::Trace(trace) => trace.is_complete(),
            Kind::Prefix(_) | Kind::Recording(_) => true,
        }
    }
}

impl Requests for Source {
    fn requests(&self) -> Result<&import::Trace, &ImportError> {
        let read = || {
            let path = Path::new(&self.path);
            match &self.kind {
                Kind::Trace(trace) => import::of_open(path, trace, !trace.is_complete()),
                Kind::Prefix(trace) => import::of_open(path, trace, false),
                Kind::Recording(recording) => import::of_recording(recording)
                    .map_err(|source| ImportError::TooMany { path: path.into(), source }),
            }
        };
        self.requests.get_or_init(read).as_ref()
    }
}
