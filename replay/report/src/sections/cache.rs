//! What PyTorch's cache cost: `empty_cache` in a loop, and segments bought although as much lay unused.

use std::cmp::Reverse;

use gputrace_schemas::event::{Bytes, Nanos};

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use crate::summary::used_devices;
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::{CacheBooks, Misfits, SiteId, TorchBooks, Trims};
use gputrace_trace::words::{bytes, count, quote, time};

/// Memory given back only to be bought again.
pub(super) const EMPTIED: SectionEntry = SectionEntry { build: |story| emptied(story).into_iter().collect() };

/// Memory bought although as much lay unused.
pub(super) const MISFITS: SectionEntry = SectionEntry { build: |story| misfits(story).into_iter().collect() };

/// Giving back this often is a habit; once or twice is an `empty_cache` between two phases.
const HABIT: u64 = 3;
/// Fragmentation is reported from this share of the peak of reserved bytes.
const WORTH_REPORTING: f64 = 0.25;
const ROWS: usize = 8;
/// Sizes of one line that keep changing are at least so many.
const FEW_SIZES: usize = 4;

/// The call sites that free by habit what is then bought again, most first.
pub fn habits(cache: &CacheBooks) -> Vec<(SiteId, Trims)> {
    let habits = cache.trims.iter().filter(|(_, trims)| trims.times >= HABIT);
    let mut habits: Vec<(SiteId, Trims)> = habits.map(|(site, trims)| (*site, *trims)).collect();
    habits.sort_by_key(|(site, trims)| (Reverse(trims.given.bytes), *site));
    let given: u64 = habits.iter().map(|(_, trims)| trims.given.bytes.0).sum();
    if cache.bought_again.bytes.0 * 2 < given { vec![] } else { habits }
}

/// The call sites for which much was bought although as much was unused, most first.
pub fn misfit_sites(torch: &TorchBooks) -> Vec<(SiteId, &Misfits)> {
    let bought: u64 = torch.cache.misfits.values().map(|misfits| misfits.bought.bytes.0).sum();
    let (reserved, allocated) = (torch.reserved.peak, torch.allocated.peak);
    let unused = reserved.0.saturating_sub(allocated.0).min(bought);
    if bought == 0 || (unused as f64) < reserved.0 as f64 * WORTH_REPORTING {
        return vec![];
    }
    let mut sites: Vec<_> = torch.cache.misfits.iter().map(|(site, misfits)| (*site, misfits)).collect();
    sites.sort_by_key(|(site, misfits)| (Reverse(misfits.bought.bytes), *site));
    sites
}

fn emptied(story: &Story) -> Option<Section> {
    let mut table = Table::new(
        "emptied",
        &[
            ("device", "device"),
            ("times", "times"),
            ("segments", "segments"),
            ("bytes", "released"),
            ("time_ns", "took"),
            ("call_site", "call site"),
        ],
    );
    let mut lines = vec![];
    for (ordinal, torch) in torches(story) {
        let cache = &torch.cache;
        let habits = habits(cache);
        let Some((worst, _)) = habits.first() else { continue };
        lines.push((Mood::Bad, advice(story, ordinal, cache, &habits, *worst)));
        for (site, trims) in habits {
            table.rows.push(vec![
                Value::text(format!("cuda:{ordinal}")),
                Value::Count(trims.times),
                Value::Count(trims.given.segments),
                Value::Bytes(trims.given.bytes),
                Value::Time(trims.given.time),
                Value::text(story.ledger.sites.site_name(site)),
            ]);
        }
    }
    let section = Section::new("emptied", "Released and reserved again").lines(lines);
    (!table.rows.is_empty()).then(|| section.table(table.keep(ROWS, 3)).warn(story.caveats()))
}

fn advice(
    story: &Story,
    ordinal: i16,
    cache: &CacheBooks,
    habits: &[(SiteId, Trims)],
    worst: SiteId,
) -> String {
    let times: u64 = habits.iter().map(|(_, trims)| trims.times).sum();
    let giving: u64 = habits.iter().map(|(_, trims)| trims.given.time.0).sum();
    let again = cache.bought_again;
    let what_to_do = match story.ledger.sites.site(worst) {
        Some(site) if site.inside.contains("empty_cache") => "; remove the call",
        Some(_) | None => "",
    };
    format!(
        "{}: {} released memory {} times, and PyTorch reserved {} of it again: {} in the driver{what_to_do}",
        device_name(story, ordinal),
        story.ledger.sites.site_name(worst),
        count(times),
        bytes(again.bytes),
        time(Nanos(giving.saturating_add(again.time.0))),
    )
}

fn misfits(story: &Story) -> Option<Section> {
    let mut table = Table::new(
        "misfits",
        &[
            ("device", "device"),
            ("segments", "segments"),
            ("bytes", "reserved"),
            ("sizes", "sizes"),
            ("smallest_bytes", "from"),
            ("largest_bytes", "to"),
            ("call_site", "call site"),
        ],
    );
    let (mut lines, mut most_sizes) = (vec![], 0);
    for (ordinal, torch) in torches(story) {
        let cache = &torch.cache;
        let bought: u64 = cache.misfits.values().map(|misfits| misfits.bought.bytes.0).sum();
        let segments: u64 = cache.misfits.values().map(|misfits| misfits.bought.segments).sum();
        let (reserved, allocated) = (torch.reserved.peak, torch.allocated.peak);
        let sites = misfit_sites(torch);
        if sites.is_empty() {
            continue;
        }
        let text = format!(
            "{}: {} of {} segments ({}) were reserved while PyTorch had that much free, but in blocks too small or on other streams. It reserved up to {} for at most {} allocated",
            device_name(story, ordinal),
            count(segments),
            count(cache.bought.segments),
            bytes(Bytes(bought)),
            bytes(reserved),
            bytes(allocated)
        );
        lines.push((Mood::Bad, text));
        for (site, misfits) in sites {
            most_sizes = most_sizes.max(misfits.sizes.len());
            table.rows.push(vec![
                Value::text(format!("cuda:{ordinal}")),
                Value::Count(misfits.bought.segments),
                Value::Bytes(misfits.bought.bytes),
                Value::Count(misfits.sizes.len() as u64),
                misfits.sizes.first().map_or(Value::Missing, |size| Value::Bytes(*size)),
                misfits.sizes.last().map_or(Value::Missing, |size| Value::Bytes(*size)),
                Value::text(story.ledger.sites.site_name(site)),
            ]);
        }
    }
    let section =
        Section::new("misfits", "Segments reserved while enough memory was free (external fragmentation)")
            .lines(lines);
    (!table.rows.is_empty()).then(|| {
        section
            .table(table.keep(ROWS, 2))
            .line(
                Mood::Note,
                match most_sizes {
                    0..FEW_SIZES => "free memory was on other streams, in other pools, or in small blocks; to see what would help:",
                    _ => "sizes keep changing, so requests do not fit the segments of the previous step; to see what would help:",
                },
            )
            .line(Mood::Command, format!("gputrace tune {}", quote(&story.path)))
            .warn(story.caveats())
    })
}

/// Devices with PyTorch's books.
pub fn torches(story: &Story) -> impl Iterator<Item = (i16, &TorchBooks)> {
    used_devices(story).filter_map(|(ordinal, books)| Some((ordinal, books.torch.as_ref()?)))
}
