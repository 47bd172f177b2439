//! How much there is.

use super::SectionEntry;
use crate::model::{Section, Value};
use gputrace_analyse::story::Story;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let ledger = &story.ledger;
    let calls = ledger.counts.calls().map(|(_, counts)| counts.calls).sum();
    let section = Section::new("overview", "Overview")
        .fact("events", "events", Value::Count(ledger.run.n_events))
        .fact("lost_events", "lost", Value::Count(ledger.health.n_lost()))
        .fact("duration_ns", "first to last event", Value::Time(story.since_start(ledger.run.last)))
        .fact("calls", "driver calls", Value::Count(calls))
        .fact("blocks", "PyTorch blocks allocated", Value::Count(ledger.counts.blocks().count()))
        .warn(story.caveats());
    Some(section)
}
