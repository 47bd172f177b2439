//! What libraries handed out of memory that they have: NVSHMEM's symmetric heap.

use std::cmp::Reverse;

use gputrace_schemas::event::Bytes;

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use crate::summary::used_devices;
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::{DeviceBooks, OwnerId, Part, SiteId};
use gputrace_trace::owners::NVSHMEM;
use gputrace_trace::words::{bytes, count, time};

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// Call sites to show of each device.
const ROWS: usize = 10;

fn build(story: &Story) -> Option<Section> {
    let has_heap = |books: &DeviceBooks| books.heap.blocks.peak().0 > 0 || books.heap.n_refused > 0;
    let used: Vec<_> = used_devices(story).filter(|(_, books)| has_heap(books)).collect();
    if used.is_empty() {
        return None;
    }
    let mut rows: Vec<(i16, Part<SiteId>)> = vec![];
    for (ordinal, books) in &used {
        let mut sites: Vec<_> = books.heap.blocks.sites().collect();
        sites.sort_by_key(|part| (Reverse(part.at_peak.bytes), Reverse(part.peak), part.id));
        rows.extend(sites.into_iter().map(|part| (*ordinal, part)));
    }
    let table = Table::of(
        "heap_sites",
        &rows,
        &[
            ("device", "device", &|(ordinal, _)| Value::text(device_name(story, *ordinal))),
            ("bytes", "at the peak", &|(_, part)| Value::Bytes(part.at_peak.bytes)),
            ("peak_bytes", "own peak", &|(_, part)| Value::Bytes(part.peak)),
            ("live_bytes", "live at end", &|(_, part)| Value::Bytes(part.live.bytes)),
            ("objects", "allocated", &|(_, part)| Value::Count(part.gains)),
            ("call_site", "call site", &|(_, part)| Value::text(story.ledger.sites.site_name(part.id))),
        ],
    );
    let mut section = Section::new("heaps", "NVSHMEM's symmetric heap");
    for (ordinal, books) in &used {
        let (name, heap) = (device_name(story, *ordinal), &books.heap);
        let is_its = |part: &Part<OwnerId>| story.ledger.sites.owner(part.id) == NVSHMEM;
        let whole = books.physical.owners().find(is_its).map_or(Bytes(0), |part| part.peak);
        let text = format!(
            "{name}: {} at most, of the {} that NVSHMEM reserved from the driver at most",
            bytes(heap.blocks.peak()),
            bytes(whole)
        );
        section = section.line(Mood::Note, text);
        if let Some((when, asked, site)) = heap.refused {
            let text = format!(
                "{name}: {} refused, the last for {} at {} by {}: the heap was full (NVSHMEM_SYMMETRIC_SIZE)",
                match heap.n_refused {
                    1 => "1 request was".to_owned(),
                    n => format!("{} requests were", count(n)),
                },
                bytes(asked),
                time(story.since_start(when)),
                story.ledger.sites.site_name(site)
            );
            section = section.line(Mood::Warning, text);
        }
    }
    Some(section.table(table.keep(ROWS, 1)).warn(story.caveats()))
}
