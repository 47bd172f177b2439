//! What waited for Python's collector of reference cycles.

use super::SectionEntry;
use crate::model::{Mood, Section, Table, Value};
use gputrace_analyse::story::Story;
use gputrace_trace::words::{bytes, time};

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// Call sites to show.
const ROWS: usize = 10;

fn build(story: &Story) -> Option<Section> {
    let cycles = story.lifetimes.as_ref().map(|lifetimes| &lifetimes.cycles).filter(|it| it.blocks > 0)?;
    let sites = &story.ledger.sites;
    let table = Table::of(
        "call_sites",
        &cycles.sites,
        &[
            ("device", "device", &|it| Value::text(format!("cuda:{}", it.device))),
            ("bytes", "bytes", &|it| Value::Bytes(it.bytes)),
            ("blocks", "blocks", &|it| Value::Count(it.blocks)),
            ("held_for_ns", "held for", &|it| Value::Time(it.held_for)),
            ("collected", "collected objects", &|it| it.kind.map_or(Value::Missing, Value::text)),
            ("call_site", "requested by", &|it| Value::text(sites.site_name(it.site))),
        ],
    );
    let longest = cycles.sites.iter().map(|row| row.held_for).max().unwrap_or_default();
    let headline = format!(
        "{} waited for Python's garbage collector: reference cycles held them, for up to {}",
        bytes(cycles.bytes),
        time(longest)
    );
    let section = Section::new("reference_cycles", "Reference cycles")
        .line(Mood::Warning, headline)
        .fact("bytes", "freed by the collector", Value::Bytes(cycles.bytes))
        .fact("peak_bytes", "peak", Value::Bytes(cycles.peak))
        .fact("blocks", "blocks", Value::Count(cycles.blocks))
        .fact("collections", "collections", Value::Count(cycles.collections))
        .table(table.keep(ROWS, 1))
        .line(
            Mood::Note,
            "measured: when the collector ran, and how long each block was held; the last use of a block is not known",
        );
    let section = match cycles.n_threads {
        0 | 1 => section,
        n => section.line(
            Mood::Note,
            format!("{n} threads freed memory meanwhile: blocks that the others freed are counted as well"),
        ),
    };
    Some(section.warn(story.caveats()))
}
