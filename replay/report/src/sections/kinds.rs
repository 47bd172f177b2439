//! Memory by kind.

use super::SectionEntry;
use crate::model::{Section, Table, Value};
use crate::summary::used_devices;
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::MemoryKind;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let table = kinds(story);
    (!table.rows.is_empty())
        .then(|| Section::new("kinds", "Memory by kind").table(table).warn(story.caveats()))
}

/// Physical memory, address ranges and mappings: three different things, not to be added.
fn kinds(story: &Story) -> Table {
    let mut table = Table::new(
        "kinds",
        &[
            ("device", "device"),
            ("kind", "kind"),
            ("peak_bytes", "peak"),
            ("peak_time_ns", "at"),
            ("live_bytes", "at end"),
            ("meaning", "meaning"),
        ],
    );
    for (ordinal, books) in used_devices(story) {
        let kinds = books.kinds.iter().map(|(kind, meter)| (kind.name(), meter, meaning(*kind)));
        let ranges = [
            ("address ranges", &books.reserved_addresses, "reserved addresses; no memory"),
            (
                "kept by graphs",
                &books.graphs_kept,
                "from a graph's first launch until trimmed (estimate); not in the peak",
            ),
            ("mappings", &books.mapped, "memory made visible, own and imported; no memory of its own"),
        ];
        for (kind, meter, meaning) in kinds.chain(ranges).filter(|(_, meter, _)| meter.peak.0 > 0) {
            table.rows.push(vec![
                Value::text(format!("cuda:{ordinal}")),
                Value::text(kind),
                Value::Bytes(meter.peak),
                Value::Time(story.since_start(meter.peak_time)),
                Value::Bytes(meter.now),
                Value::text(meaning),
            ]);
        }
    }
    table
}

fn meaning(kind: MemoryKind) -> &'static str {
    match kind {
        MemoryKind::Linear => "cudaMalloc and similar calls",
        MemoryKind::Virtual => "cuMemCreate",
        MemoryKind::Async => "cudaMallocAsync: in use; free memory of its pools is not known",
        MemoryKind::Array => "estimated from the shape: the driver does not report it",
        MemoryKind::Managed => "on the device or the host; not in the peak",
        MemoryKind::Graph => "exists while its graph runs; not in the peak",
        MemoryKind::Pinned | MemoryKind::Registered | MemoryKind::HostVirtual => "on the host",
        MemoryKind::Imported => "of another process",
    }
}
