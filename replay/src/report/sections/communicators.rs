//! What each communicator of NCCL holds, and which lines of the program made it take that.

use gputrace_schemas::event::{Bytes, CommId};

use super::SectionEntry;
use crate::ledger::CommBooks;
use crate::report::model::{Mood, Section, Table, Value};
use crate::story::Story;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// Lines that are shown.
const MAX_CAUSES: usize = 20;

fn build(story: &Story) -> Option<Section> {
    let mut table = Table::new(
        "communicators",
        &[
            ("communicator", "communicator"),
            ("peak_bytes", "peak"),
            ("live_bytes", "at end"),
            ("host_peak_bytes", "of the host"),
            ("rank", "rank"),
            ("n_ranks", "of"),
            ("comm_hash", "NCCL's commId"),
            ("calls", "calls"),
            ("last_call_ns", "last used"),
            ("made_at", "made at"),
        ],
    );
    let mut books: Vec<(CommId, &CommBooks)> = story.ledger.communicators().collect();
    books.sort_by_key(|(id, books)| (std::cmp::Reverse(books.device.peak), *id));
    for (id, books) in &books {
        let facts = &books.facts;
        table.rows.push(vec![
            Value::text(name(*id, books)),
            Value::Bytes(books.device.peak),
            Value::Bytes(books.device.now),
            Value::Bytes(books.host.peak),
            facts.rank.map_or(Value::Missing, |rank| Value::Count(rank.into())),
            facts.n_ranks.map_or(Value::Missing, |n| Value::Count(n.into())),
            facts.comm_hash.map_or(Value::Missing, |hash| Value::text(format!("{hash:#x}"))),
            Value::Count(books.n_calls),
            books.last_call.map_or(Value::Missing, |time| Value::Time(story.since_start(time))),
            Value::text(books.made_at.map_or_else(String::new, |site| story.ledger.sites.site_name(site))),
        ]);
    }
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
    Some(section.table(causes(story, &books)).warn(story.doubts()))
}

fn causes(story: &Story, books: &[(CommId, &CommBooks)]) -> Table {
    let mut table = Table::new(
        "communicator_causes",
        &[
            ("communicator", "communicator"),
            ("peak_bytes", "took at most"),
            ("cause", "because of the call at"),
        ],
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
        format!("{n} of them {verb} never used, with {} together", crate::report::words::bytes(Bytes(bytes)))
    })
}
