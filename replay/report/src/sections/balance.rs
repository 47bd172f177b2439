//! One process, several devices: which of them holds more, and what that is.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use crate::summary::used_devices;
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::{DeviceBooks, SiteId};
use gputrace_trace::owners::TORCH;
use gputrace_trace::words::bytes;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// Peaks that differ by less are even.
const EVEN: f64 = 0.2;
const ROWS: usize = 5;

/// The device that held most, and the one that held least; `None` where they are even, or only one was used. Caches
/// do not count: a process can have been lucky with one.
pub fn uneven(story: &Story) -> Option<(Use, Use)> {
    let used = used_devices(story).filter(|(ordinal, _)| *ordinal >= 0);
    let mut devices: Vec<_> = used.map(|(ordinal, books)| Use::of(story, ordinal, books)).collect();
    devices.sort_by_key(|device| (Reverse(device.total), device.ordinal));
    let other = devices.pop()?;
    let loaded = devices.into_iter().next()?;
    // What libraries take is the same on every device, and would hide that the program's own share is not.
    let is_even = is_even(loaded.total, other.total) && is_even(loaded.blocks, other.blocks);
    (!is_even).then_some((loaded, other))
}

fn build(story: &Story) -> Option<Section> {
    let (loaded, other) = uneven(story)?;
    let more = loaded.total.0 - other.total.0;
    let mut table = Table::new(
        "imbalance",
        &[
            ("more_bytes", "more"),
            ("loaded_bytes", "there"),
            ("other_bytes", "here"),
            ("call_site", "call site"),
        ],
    );
    for (site, there, here) in loaded.beyond(&other) {
        table.rows.push(vec![
            Value::Bytes(Bytes(there.0 - here.0)),
            Value::Bytes(there),
            Value::Bytes(here),
            Value::text(story.ledger.sites.site_name(site)),
        ]);
    }
    let (most, least) = (device_name(story, loaded.ordinal), device_name(story, other.ordinal));
    let section = Section::new("imbalance", "Uneven devices").line(
        Mood::Bad,
        format!(
            "{most} held up to {}, {least} up to {}: {} less. Held on the first and not on the second:",
            bytes(loaded.total),
            bytes(other.total),
            bytes(Bytes(more))
        ),
    );
    Some(section.table(table.keep(ROWS, 0)).warn(story.caveats()))
}

fn is_even(most: Bytes, least: Bytes) -> bool {
    most.0.saturating_sub(least.0) as f64 <= most.0 as f64 * EVEN
}

/// What each call site held at the peak: PyTorch's blocks when most were allocated, all else when the driver had handed
/// out most.
pub struct Use {
    /// The device.
    pub ordinal: i16,
    sites: BTreeMap<SiteId, Bytes>,
    /// All of it.
    pub total: Bytes,
    /// PyTorch's blocks alone.
    blocks: Bytes,
}

impl Use {
    fn of(story: &Story, ordinal: i16, books: &DeviceBooks) -> Use {
        let sites = &story.ledger.sites;
        let torch = books.torch.as_ref().filter(|torch| torch.blocks.peak().0 > 0);
        let of_torch = |id| sites.site(id).is_some_and(|site| sites.owner(site.owner) == TORCH);
        let driver = books.physical.sites().filter(|part| torch.is_none() || !of_torch(part.id));
        let blocks = torch.into_iter().flat_map(|torch| torch.blocks.sites());
        let sites: BTreeMap<_, _> = driver.chain(blocks).map(|part| (part.id, part.at_peak.bytes)).collect();
        let total = Bytes(sites.values().map(|bytes| bytes.0).sum());
        let blocks = torch.map(|torch| torch.blocks.peak()).unwrap_or_default();
        Use { ordinal, sites, total, blocks }
    }

    /// Call sites that held more than on the other device, with both amounts, most first.
    pub fn beyond(&self, other: &Use) -> Vec<(SiteId, Bytes, Bytes)> {
        let here = |site| other.sites.get(site).copied().unwrap_or_default();
        let compared = self.sites.iter().map(|(site, there)| (*site, *there, here(site)));
        let mut more: Vec<_> = compared.filter(|(_, there, here)| there > here).collect();
        more.sort_by_key(|(site, there, here)| (Reverse(there.0 - here.0), *site));
        more
    }
}
