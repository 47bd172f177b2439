//! What each communicator of NCCL holds, and which lines of the program made it take that.

use gputrace_schemas::event::{Bytes, CommId};

use super::SectionEntry;
use crate::model::{Mood, Section, Table, Value};
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::CommBooks;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// Lines that are shown.
const MAX_CAUSES: usize = 20;

fn build(story: &Story) -> Option<Section> {
    let mut books: Vec<(CommId, &CommBooks)> = story.ledger.communicators().collect();
    books.sort_by_key(|(id, books)| (std::cmp::Reverse(books.device.peak), *id));
    let number = |n: Option<u32>| n.map_or(Value::Missing, |n| Value::Count(n.into()));
    let when = |time| Value::Time(story.since_start(time));
    let site = |site| story.ledger.sites.site_name(site);
    let table = Table::of(
        "communicators",
        &books,
        &[
            ("communicator", "communicator", &|(id, it)| Value::text(name(*id, it))),
            ("peak_bytes", "peak", &|(_, it)| Value::Bytes(it.device.peak)),
            ("live_bytes", "at end", &|(_, it)| Value::Bytes(it.device.now)),
            ("host_peak_bytes", "of the host", &|(_, it)| Value::Bytes(it.host.peak)),
            ("rank", "rank", &|(_, it)| number(it.facts.rank)),
            ("n_ranks", "of", &|(_, it)| number(it.facts.n_ranks)),
            ("comm_hash", "NCCL's commId", &|(_, it)| {
                it.facts.comm_hash.map_or(Value::Missing, |hash| Value::text(format!("{hash:#x}")))
            }),
            ("calls", "calls", &|(_, it)| Value::Count(it.n_calls)),
            ("last_call_ns", "last used", &|(_, it)| it.last_call.map_or(Value::Missing, when)),
            ("made_at", "created at", &|(_, it)| Value::text(it.made_at.map_or_else(String::new, site))),
        ],
    );
    if table.rows.is_empty() {
        return None;
    }
    let section = Section::new("communicators", "Memory of NCCL by communicator").table(table);
    let section = match unused(&books) {
        Some(text) => section.line(Mood::Note, text),
        None => section,
    };
    let section = match story.ledger.gpu_timed().text() {
        Some(text) => section.line(Mood::Note, text),
        None => section,
    };
    Some(section.table(causes(story, &books)).warn(story.caveats()))
}

fn causes(story: &Story, books: &[(CommId, &CommBooks)]) -> Table {
    let mut table = Table::new(
        "communicator_causes",
        &[("communicator", "communicator"), ("peak_bytes", "peak"), ("cause", "for the call at")],
    );
    for (id, books) in books {
        for (site, meter) in &books.causes {
            table.rows.push(vec![
                Value::text(name(*id, books)),
                Value::Bytes(meter.peak),
                Value::text(story.ledger.sites.site_name(*site)),
            ]);
        }
    }
    let bytes = |row: &Vec<Value>| match row[1] {
        Value::Bytes(bytes) => bytes,
        _ => Bytes(0),
    };
    table.rows.sort_by_key(|row| std::cmp::Reverse(bytes(row)));
    table.keep(MAX_CAUSES, 1)
}

fn name(id: CommId, books: &CommBooks) -> String {
    match books.facts.config.name.as_str() {
        "" => format!("#{}", id.0),
        name => format!("#{} {name}", id.0),
    }
}

/// Memory of communicators that were never used.
fn unused(books: &[(CommId, &CommBooks)]) -> Option<String> {
    let idle = books.iter().filter(|(_, books)| books.n_calls == 0 && books.device.peak.0 > 0);
    let (n, bytes) =
        idle.fold((0, 0u64), |(n, sum), (_, books)| (n + 1, sum.saturating_add(books.device.peak.0)));
    let verb = if n == 1 { "was" } else { "were" };
    (n > 0).then(|| {
        format!("{n} of them {verb} never used, with {} in total", gputrace_trace::words::bytes(Bytes(bytes)))
    })
}
