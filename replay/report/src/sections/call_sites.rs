//! The places in the program that hold the memory.

use gputrace_schemas::event::Nanos;

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use crate::summary::used_devices;
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::{DeviceBooks, Part, SiteId, is_arena};
use gputrace_trace::owners::TORCH;
use gputrace_trace::words::time;

/// At the last out-of-memory error, or else at the peak.
pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };
/// The same with more rows.
pub(super) const TOTALS: SectionEntry =
    SectionEntry { build: |story| build_long(story).into_iter().collect() };

/// The same with the rows that a post-mortem needs.
pub(super) const LONG_LIST: SectionEntry =
    SectionEntry { build: |story| section(story, MIDDLE).into_iter().collect() };

const SHORT: usize = 10;
const MIDDLE: usize = 20;
const LONG: usize = 50;

fn build(story: &Story) -> Option<Section> {
    section(story, SHORT)
}

fn build_long(story: &Story) -> Option<Section> {
    section(story, LONG)
}

fn section(story: &Story, n_rows: usize) -> Option<Section> {
    let mut result = Section::new("call_sites", "Top call sites");
    let mut any = false;
    for (ordinal, books) in used_devices(story) {
        let at_oom = ran_out(story, ordinal, books);
        let table = table(story, ordinal, books, at_oom).keep(n_rows, 1);
        if table.rows.is_empty() {
            continue;
        }
        any = true;
        let moment = match (at_oom, &books.torch) {
            (true, _) => "at its last out-of-memory error".to_owned(),
            (false, Some(torch)) if torch.blocks.peak().0 > 0 => format!(
                "at the peak: the driver's at {}, PyTorch's blocks at {} (when PyTorch had most allocated)",
                time(story.since_start(books.physical.peak_time())),
                time(story.since_start(torch.blocks.peak_time()))
            ),
            (false, _) if books.pjrt.is_some() => {
                let buffers = books.pjrt.as_ref().map_or(Nanos(0), |pjrt| pjrt.buffers.peak_time());
                format!(
                    "at the peak: the driver's at {}, JAX's buffers at {} (when they held most)",
                    time(story.since_start(books.physical.peak_time())),
                    time(story.since_start(buffers))
                )
            }
            (false, _) => format!("at the peak, at {}", time(story.since_start(books.physical.peak_time()))),
        };
        result = result.line(Mood::Note, format!("{}, {moment}", device_name(story, ordinal))).table(table);
    }
    any.then(|| result.warn(story.caveats()))
}

/// Somebody ran out of memory on the device.
pub(super) fn ran_out(story: &Story, ordinal: i16, books: &DeviceBooks) -> bool {
    let torch = books.torch.as_ref().is_some_and(|torch| torch.n_ooms > 0);
    let refused = story.ledger.refusals.iter();
    let jax = books.pjrt.as_ref().is_some_and(|pjrt| pjrt.n_ooms > 0);
    torch || jax || refused.filter(|refusal| refusal.device == ordinal).any(|refusal| refusal.is_final)
}

/// PyTorch's segments are shown by the blocks in them, which are theirs that asked; everything else by itself.
fn table(story: &Story, ordinal: i16, books: &DeviceBooks, at_oom: bool) -> Table {
    let sites = &story.ledger.sites;
    let held = |part: Part<SiteId>| (part.id, if at_oom { part.at_mark } else { part.at_peak });
    let blocks = books.torch.as_ref().filter(|torch| torch.blocks.peak().0 > 0).map(|torch| &torch.blocks);
    let of_torch = |id| sites.site(id).is_some_and(|site| sites.owner(site.owner) == TORCH);
    let is_shown = |id| (blocks.is_none() || !of_torch(id)) && !is_arena(&story.ledger, ordinal, id);
    let driver = books.physical.sites().filter(|part| is_shown(part.id)).map(held);
    let buffers = books.pjrt.iter().flat_map(|pjrt| pjrt.buffers.sites()).map(held);
    let blocks = blocks.into_iter().flat_map(|blocks| blocks.sites()).map(held);
    let mut rows: Vec<_> = driver.map(|(id, held)| (id, held, "")).collect();
    rows.extend(blocks.map(|(id, held)| (id, held, "PyTorch block")));
    rows.extend(buffers.map(|(id, held)| (id, held, "JAX buffer")));
    rows.retain(|(_, held, _)| held.bytes.0 > 0);
    rows.sort_by_key(|(id, held, _)| (std::cmp::Reverse(held.bytes), *id));
    let mut table = Table::new(
        "call_sites",
        &[
            ("device", "device"),
            ("bytes", "bytes"),
            ("objects", "number"),
            ("owner", "owner"),
            ("call_site", "call site"),
        ],
    );
    for (id, held, kind) in rows {
        let Some(site) = sites.site(id) else { continue };
        let owner = if kind.is_empty() { sites.owner(site.owner) } else { kind };
        table.rows.push(vec![
            Value::text(format!("cuda:{ordinal}")),
            Value::Bytes(held.bytes),
            Value::Count(held.objects),
            Value::text(owner),
            Value::text(site.to_string()),
        ]);
    }
    table
}
