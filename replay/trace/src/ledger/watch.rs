//! Analyses that follow the books event by event.

use gputrace_schemas::event::Event;

use super::Ledger;

/// Sees the books after every event, in one pass over a trace.
pub trait Watch {
    /// The pass begins, perhaps again: what was seen so far no longer counts.
    fn begin(&mut self, ledger: &mut Ledger);
    /// `event` has been booked.
    fn event(&mut self, ledger: &mut Ledger, event: &Event);
}

/// Two who watch together.
impl<A: Watch, B: Watch> Watch for (A, B) {
    fn begin(&mut self, ledger: &mut Ledger) {
        self.0.begin(ledger);
        self.1.begin(ledger);
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        self.0.event(ledger, event);
        self.1.event(ledger, event);
    }
}

/// One who is lent.
impl Watch for &mut dyn Watch {
    fn begin(&mut self, ledger: &mut Ledger) {
        (**self).begin(ledger);
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        (**self).event(ledger, event);
    }
}

/// Nobody.
pub struct Unwatched;

impl Watch for Unwatched {
    fn begin(&mut self, _ledger: &mut Ledger) {}
    fn event(&mut self, _ledger: &mut Ledger, _event: &Event) {}
}
