//! Calls by function: how many, for how much, how long.

use super::SectionEntry;
use crate::report::model::{Section, Table, Value};
use crate::story::Story;
use gputrace_schemas::event::Nanos;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let mut table = Table::new(
        "functions",
        &[
            ("function", "function"),
            ("calls", "calls"),
            ("failed", "failed"),
            ("bytes", "bytes asked for"),
            ("largest_bytes", "largest"),
            ("duration_ns", "time in it"),
            ("median_bound_ns", "median <="),
            ("p99_bound_ns", "99 % <="),
            ("longest_ns", "longest"),
        ],
    );
    let mut calls: Vec<_> = story.ledger.calls().collect();
    let name = |id| story.ledger.sites.name(id);
    calls.sort_by(|(a, x), (b, y)| (y.calls, name(*a)).cmp(&(x.calls, name(*b))));
    for (id, counts) in calls {
        let gives = counts.sizes.count() > 0;
        table.rows.push(vec![
            Value::text(name(id)),
            Value::Count(counts.calls),
            Value::Count(counts.failed),
            Value::bytes(gives.then_some(counts.sizes.sum())),
            Value::bytes(gives.then_some(counts.sizes.max())),
            Value::Time(counts.time()),
            Value::Time(Nanos(counts.durations.quantile_bound(0.5))),
            Value::Time(Nanos(counts.durations.quantile_bound(0.99))),
            Value::Time(Nanos(counts.durations.max())),
        ]);
    }
    (!table.rows.is_empty()).then(|| {
        Section::new("calls", "Calls into the driver, by the function that the program called")
            .table(table)
            .warn(story.doubts())
    })
}
