//! Where a trace begins of which older parts were removed.

use gputrace_schemas::event::{Event, Mark, Nanos};

use super::Ledger;
use super::counts::Counts;
use super::training::Change;
use crate::Definitions;

impl Ledger {
    /// Counts begin where every event is there.
    pub(super) fn count_event(&mut self, definitions: &dyn Definitions, time: Nanos) {
        if self.first.is_none() {
            self.since = definitions.process().since;
        }
        if self.since > Nanos(0) && !self.counts_anew && time > self.since {
            self.counts_anew = true;
            self.count_anew();
        }
        self.n_events += 1;
    }

    /// Whether an event only explains what is held where the trace begins.
    #[must_use]
    pub fn is_before_since(&self, event: &Event) -> bool {
        self.is_before_that(event.time)
    }

    /// The same for a time.
    pub(super) fn is_before_that(&self, time: Nanos) -> bool {
        time <= self.since && self.since > Nanos(0)
    }

    /// Memory came or went: a turn of a loop may show by it. What only explains what is held says nothing of how the program works.
    pub(super) fn found_memory(&mut self, definitions: &dyn Definitions, event: &Event, change: &Change) {
        if !self.is_before_since(event) {
            self.finder.memory(definitions, event, change);
        }
    }

    /// The same of a mark.
    pub(super) fn found_mark(&mut self, definitions: &dyn Definitions, event: &Event, mark: &Mark) {
        if !self.is_before_since(event) {
            self.finder.mark(definitions, event, mark);
        }
    }

    /// Calls and sizes are counted from here on; the books stay.
    pub fn count_anew(&mut self) {
        self.counts = Counts::default();
        self.n_events = 0;
    }
}
