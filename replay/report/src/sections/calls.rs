//! Calls by function: how many, for how much, how long.

use super::SectionEntry;
use crate::model::{Section, Table, Value};
use gputrace_analyse::story::Story;
use gputrace_schemas::event::Nanos;
use gputrace_trace::ledger::CallCounts;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let mut calls: Vec<_> = story.ledger.counts.calls().collect();
    let name = |id| story.ledger.sites.name(id);
    calls.sort_by(|(a, x), (b, y)| (y.calls, name(*a)).cmp(&(x.calls, name(*b))));
    let asked = |of: &CallCounts, bytes| Value::bytes((of.sizes.count() > 0).then_some(bytes));
    let table = Table::of(
        "functions",
        &calls,
        &[
            ("function", "function", &|(id, _)| Value::text(name(*id))),
            ("calls", "calls", &|(_, it)| Value::Count(it.calls)),
            ("failed", "failed", &|(_, it)| Value::Count(it.failed)),
            ("bytes", "bytes requested", &|(_, it)| asked(it, it.sizes.sum())),
            ("largest_bytes", "largest", &|(_, it)| asked(it, it.sizes.max())),
            ("duration_ns", "time in it", &|(_, it)| Value::Time(it.time())),
            ("median_bound_ns", "median <=", &|(_, it)| Value::Time(Nanos(it.durations.quantile_bound(0.5)))),
            ("p99_bound_ns", "99 % <=", &|(_, it)| Value::Time(Nanos(it.durations.quantile_bound(0.99)))),
            ("longest_ns", "longest", &|(_, it)| Value::Time(Nanos(it.durations.max()))),
        ],
    );
    (!table.rows.is_empty()).then(|| {
        Section::new("calls", "Driver calls, by the function that the program called")
            .table(table)
            .warn(story.caveats())
    })
}
