//! Sizes by power of two.

use super::SectionEntry;
use crate::model::{Section, Table, Value};
use gputrace_analyse::story::Story;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let mut table = Table::new(
        "size_classes",
        &[("what", "what"), ("from_bytes", "from"), ("to_bytes", "to"), ("count", "number")],
    );
    let blocks = [("PyTorch block", story.ledger.counts.blocks())];
    let mut calls: Vec<_> = story.ledger.counts.calls().collect();
    calls.sort_by_key(|(id, _)| story.ledger.sites.name(*id));
    let calls = calls.iter().map(|(id, counts)| (story.ledger.sites.name(*id), &counts.sizes));
    for (what, sizes) in blocks.into_iter().chain(calls) {
        for (from, to, count) in sizes.buckets() {
            table.rows.push(vec![
                Value::text(what),
                Value::bytes(Some(from)),
                Value::bytes(Some(to)),
                Value::Count(count),
            ]);
        }
    }
    (!table.rows.is_empty())
        .then(|| Section::new("sizes", "Requested sizes").table(table).warn(story.caveats()))
}
