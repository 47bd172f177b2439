//! When a process ran, as far as its trace shows: of some traces older parts were removed.

use gputrace_schemas::event::Nanos;

use crate::Definitions;

/// When the events of a process were, and how many.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Run {
    /// Number of events.
    pub n_events: u64,
    /// From when on the trace has every event; 0 from its beginning. Counts begin there.
    pub since: Nanos,
    /// Time of the first event.
    pub first: Option<Nanos>,
    /// Time of the last event.
    pub last: Nanos,
    counts_anew: bool,
}

impl Run {
    /// An event comes; whether counts begin with it, as every event is there from it on.
    pub(super) fn event(&mut self, definitions: &dyn Definitions, time: Nanos) -> bool {
        if self.first.is_none() {
            self.since = definitions.process().since;
            self.first = Some(time);
        }
        let begins = self.since > Nanos(0) && !self.counts_anew && time > self.since;
        if begins {
            (self.counts_anew, self.n_events) = (true, 0);
        }
        self.n_events += 1;
        self.last = self.last.max(time);
        begins
    }

    /// Whether an event of that time only explains what is held where the trace begins.
    #[must_use]
    pub fn is_before(&self, time: Nanos) -> bool {
        time <= self.since && self.since > Nanos(0)
    }
}
