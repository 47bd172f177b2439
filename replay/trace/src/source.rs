//! A trace of any kind, event by event: gputrace's own from its file, a PyTorch snapshot from memory.

use std::borrow::Cow;
use std::path::Path;

use gputrace_schemas::event::{Device, Event, Nanos, Thread, ThreadId};
use gputrace_schemas::reader::{self, Damage, Trace};

use crate::files;
use crate::import::{self, ImportError};
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

/// Opens a trace of gputrace's own.
pub(crate) fn open(path: &Path) -> Result<Trace, reader::Error> {
    let name = path.display().to_string();
    let file = files::open(path).map_err(|source| reader::Error::Io { file: name.clone(), source })?;
    Trace::read(file, &name)
}

/// A trace that can be read from its beginning to its end, as often as needed.
pub struct Source {
    path: String,
    kind: Kind,
    /// Definitions to show instead of the trace's own.
    redacted: Option<Box<Recording>>,
}

enum Kind {
    Trace(Box<Trace>),
    Prefix(Box<Trace>),
    Recording(Box<Recording>),
}

impl Source {
    /// Opens a gputrace trace or a PyTorch snapshot, plain or gzip; the first bytes show which it is.
    ///
    /// # Errors
    /// It cannot be read, or is neither. Damage of a trace is not an error.
    pub fn open(path: &Path) -> Result<Source, Error> {
        let kind = if import::is_pickle(path) {
            Kind::Recording(Box::new(import::recording(path)?))
        } else {
            Kind::Trace(Box::new(open(path)?))
        };
        Ok(Source { path: path.display().to_string(), kind, redacted: None })
    }

    /// Opens the first `length` bytes of a trace that is still being written, as if they were all of it.
    ///
    /// # Errors
    /// As [`Source::open`].
    pub fn open_prefix(path: &Path, length: u64) -> Result<Source, Error> {
        let kind = Kind::Prefix(Box::new(Trace::open_prefix(path, length)?));
        Ok(Source { path: path.display().to_string(), kind, redacted: None })
    }

    /// A trace in memory.
    #[must_use]
    pub fn of(path: &str, recording: Recording) -> Source {
        Source { path: path.to_owned(), kind: Kind::Recording(Box::new(recording)), redacted: None }
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
        Source { path: "trace".to_owned(), redacted: Some(Box::new(definitions)), ..self }
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

    /// What could not be read so far.
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
