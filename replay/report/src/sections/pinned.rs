//! Memory of the host that the driver pinned: who has it.

use std::cmp::Reverse;

use gputrace_schemas::event::{Bytes, HOST};

use super::SectionEntry;
use crate::model::{Section, Table, Value};
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::{Part, SiteId, is_pinned_cache};

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// Call sites to show.
const ROWS: usize = 10;

fn build(story: &Story) -> Option<Section> {
    let ledger = &story.ledger;
    let (host, blocks) = (ledger.host(), ledger.host_blocks());
    if host.peak().0 == 0 {
        return None;
    }
    let owner = |site: SiteId| ledger.sites.site(site).map(|site| site.owner);
    let is_cache = |site| owner(site).is_some_and(|owner| is_pinned_cache(ledger, HOST, owner));
    let pinned = host.sites().filter(|part| !is_cache(part.id));
    let mut rows: Vec<Part<SiteId>> = pinned.chain(blocks.sites()).collect();
    rows.sort_by_key(|part| (Reverse(part.peak), Reverse(part.live.bytes), part.id));
    let table = Table::of(
        "pinned_sites",
        &rows,
        &[
            ("owner", "owner", &|part| {
                Value::text(owner(part.id).map_or("", |owner| ledger.sites.owner(owner)))
            }),
            ("peak_bytes", "own peak", &|part| Value::Bytes(part.peak)),
            ("live_bytes", "live at end", &|part| Value::Bytes(part.live.bytes)),
            ("objects", "allocated", &|part| Value::Count(part.gains)),
            ("call_site", "call site", &|part| Value::text(ledger.sites.site_name(part.id))),
        ],
    );
    let mut section = Section::new("pinned", "Pinned host memory by call site")
        .fact("peak_bytes", "peak", Value::Bytes(host.peak()))
        .fact("live_bytes", "live at end", Value::Bytes(host.live().bytes));
    if blocks.peak().0 > 0 {
        let cached = host.sites().filter(|part| is_cache(part.id)).map(|part| part.live.bytes.0);
        let unused = cached.fold(0, u64::saturating_add).saturating_sub(blocks.live().bytes.0);
        let remark = "PyTorch keeps it for the next request";
        section = section.remark("unused_bytes", "of that in no block", Value::Bytes(Bytes(unused)), remark);
    }
    Some(section.table(table.keep(ROWS, 1)).warn(story.caveats()))
}
