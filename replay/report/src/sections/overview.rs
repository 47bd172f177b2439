//! How much there is.

use super::SectionEntry;
use crate::model::{Section, Value};
use gputrace_analyse::story::Story;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let ledger = &story.ledger;
    let calls = ledger.calls().map(|(_, counts)| counts.calls).sum();
    let section = Section::new("overview", "Overview")
        .fact("events", "events", Value::Count(ledger.n_events))
        .fact("lost_events", "lost", Value::Count(ledger.n_lost()))
        .fact("duration_ns", "from the start to the last", Value::Time(story.since_start(ledger.last)))
        .fact("calls", "calls into the driver", Value::Count(calls))
        .fact("blocks", "PyTorch blocks handed out", Value::Count(ledger.block_sizes().count()))
        .warn(story.caveats());
    Some(section)
}
