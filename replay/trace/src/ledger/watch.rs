//! Analyses that follow the books event by event.

use gputrace_schemas::event::Event;

use std::convert::Infallible;

use gputrace_schemas::event::Nanos;

use super::Ledger;
use crate::source::Source;

/// Sees the books after every event, in one pass over a trace.
pub trait Watch {
    /// The pass begins, perhaps again: what was seen so far no longer counts.
    fn begin(&mut self, ledger: &mut Ledger);
    /// `event` has been booked.
    fn event(&mut self, ledger: &mut Ledger, event: &Event);
}

impl Ledger {
    /// The books of a trace up to a time. What is counted, and what is watched, begins at another.
    pub fn watched(source: &Source, (from, to): (Nanos, Nanos), watch: &mut dyn Watch) -> Ledger {
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
        ledger.unwrap_or_else(|never| match never {})
    }
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
