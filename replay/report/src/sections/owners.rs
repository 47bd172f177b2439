//! Whose memory it was.

use super::SectionEntry;
use super::call_sites::ran_out;
use crate::model::{Section, Table, Value};
use crate::summary::used_devices;
use gputrace_analyse::story::Story;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// At the last out-of-memory error.
pub(super) const AT_OOM: SectionEntry = SectionEntry { build: |story| at_oom(story).into_iter().collect() };

fn at_oom(story: &Story) -> Option<Section> {
    let mut table = Table::new(
        "owners_at_oom",
        &[("device", "device"), ("owner", "owner"), ("bytes", "held then"), ("peak_bytes", "own peak")],
    );
    for (ordinal, books) in used_devices(story).filter(|(ordinal, books)| ran_out(story, *ordinal, books)) {
        let mut parts: Vec<_> = books.physical.owners().filter(|part| part.at_mark.bytes.0 > 0).collect();
        parts.sort_by_key(|part| (std::cmp::Reverse(part.at_mark.bytes), part.id));
        for part in parts {
            table.rows.push(vec![
                Value::text(format!("cuda:{ordinal}")),
                Value::text(story.ledger.sites.owner(part.id)),
                Value::Bytes(part.at_mark.bytes),
                Value::Bytes(part.peak),
            ]);
        }
    }
    (!table.rows.is_empty()).then(|| {
        Section::new("owners_at_oom", "Owners of the device's memory then").table(table).warn(story.caveats())
    })
}

fn build(story: &Story) -> Option<Section> {
    let mut table = Table::new(
        "owners",
        &[
            ("device", "device"),
            ("owner", "owner"),
            ("bytes_at_peak", "at peak"),
            ("share_of_peak", "share"),
            ("peak_bytes", "own peak"),
            ("live_bytes", "live at end"),
        ],
    );
    for (ordinal, books) in used_devices(story) {
        for owner in crate::summary::owners(story, books) {
            table.rows.push(vec![
                Value::text(format!("cuda:{ordinal}")),
                Value::text(owner.owner),
                Value::bytes(Some(owner.bytes_at_peak)),
                Value::share(owner.bytes_at_peak, books.physical.peak().0),
                Value::bytes(Some(owner.peak_bytes)),
                Value::bytes(Some(owner.live_bytes)),
            ]);
        }
    }
    if table.rows.is_empty() {
        return None;
    }
    Some(Section::new("owners", "Memory by owner").table(table).warn(story.caveats()))
}
