//! One trace, understood: what every summary, report and statistic is made from.

use std::collections::HashMap;
use std::path::Path;

use gputrace_schemas::event::{Device, Nanos, Process, ThreadId};
use gputrace_schemas::reader::{Damage, Error, Trace};

use crate::ledger::Ledger;
use crate::trace::{Definitions, Recording};

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
}

impl Story {
    /// Reads a trace.
    ///
    /// # Errors
    /// The file is no trace of this version. Damage is no error; it is kept in [`Story::damages`].
    pub fn read(path: &Path) -> Result<Story, Error> {
        let trace = Trace::open(path)?;
        let ledger = Ledger::of(|ledger| {
            trace.events().for_each(|event| ledger.event(&trace, &event));
            Ok::<(), Error>(())
        })?;
        let threads = (0..).map(ThreadId).zip(trace.threads()).map(|(id, thread)| (id, thread.name.clone()));
        Ok(Story {
            path: path.display().to_string(),
            process: trace.process().clone(),
            devices: trace.devices().to_vec(),
            threads: threads.collect(),
            ledger,
            damages: trace.damages(),
            complete: trace.is_complete(),
        })
    }

    /// Understands a trace in memory.
    #[must_use]
    pub fn of(path: &str, recording: &Recording) -> Story {
        let ledger = Ledger::of(|ledger| {
            recording.events.iter().for_each(|event| ledger.event(recording, event));
            Ok::<(), std::convert::Infallible>(())
        });
        Story {
            path: path.to_owned(),
            process: recording.process().clone(),
            devices: recording.devices.clone(),
            threads: recording.threads.iter().map(|(id, thread)| (*id, thread.name.clone())).collect(),
            ledger: ledger.unwrap_or_else(|never| match never {}),
            damages: vec![],
            complete: true,
        }
    }

    /// The device with this ordinal.
    #[must_use]
    pub fn device(&self, ordinal: i16) -> Option<&Device> {
        self.devices.iter().find(|device| device.ordinal == ordinal)
    }

    /// Time since the process began to be traced.
    #[must_use]
    pub fn since_start(&self, time: Nanos) -> Nanos {
        let start = if self.process.start.0 > 0 { Some(self.process.start) } else { self.ledger.first };
        Nanos(time.0.saturating_sub(start.unwrap_or_default().0))
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
