//! The peak of every device, and what PyTorch made of it.

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use crate::summary::{torch_summary, used_devices};
use gputrace_analyse::story::Story;
use gputrace_schemas::event::Bytes;
use gputrace_trace::ledger::{DeviceBooks, Moment};
use gputrace_trace::words::bytes;

/// How the line with PyTorch's own peaks begins, after the device's name.
pub(crate) const TORCH_PEAKS: &str = "PyTorch's peaks";

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let section = Section::new("memory", "Memory");
    let mut table = Table::new(
        "devices",
        &[
            ("device", "device"),
            ("peak_bytes", "peak"),
            ("peak_time_ns", "at"),
            ("peak_share", "share"),
            ("live_bytes", "live at end"),
            ("torch_allocated_bytes", "torch allocated"),
            ("torch_reserved_bytes", "torch reserved"),
            ("failed", "refused"),
        ],
    );
    let mut lines = vec![];
    for (ordinal, books) in used_devices(story) {
        let name = device_name(story, ordinal);
        table.rows.push(row(story, ordinal, books));
        lines.extend(beside(&name, books));
        lines.extend(torch_lines(story, &name, books));
    }
    let host = story.ledger.host();
    if host.peak().0 > 0 {
        let text = format!(
            "pinned host memory: peak {}, live at end {}",
            bytes(host.peak()),
            bytes(host.live().bytes)
        );
        lines.push((Mood::Note, text));
    }
    if table.rows.is_empty() && lines.is_empty() {
        return Some(section.line(Mood::Note, "no device memory was allocated").warn(story.caveats()));
    }
    Some(section.table(table).warn(story.caveats()).lines(lines))
}

fn row(story: &Story, ordinal: i16, books: &DeviceBooks) -> Vec<Value> {
    let physical = &books.physical;
    let total = story.device(ordinal).map_or(0, |device| device.total.0);
    let torch = books.torch.as_ref().filter(|torch| torch.allocations > 0);
    vec![
        Value::text(device_name(story, ordinal)),
        Value::Bytes(physical.peak()),
        Value::Time(story.since_start(physical.peak_time())),
        Value::share(physical.at(Moment::Peak).bytes.0, total),
        Value::Bytes(physical.live().bytes),
        Value::bytes(torch.map(|torch| torch.at_device_peak.0.0)),
        Value::bytes(torch.map(|torch| torch.at_device_peak.1.0)),
        Value::Count(books.failed),
    ]
}

/// What is not in the peak.
fn beside(name: &str, books: &DeviceBooks) -> Vec<(Mood, String)> {
    let mut lines = vec![];
    let others = [
        (&books.managed, "managed memory, on the device or the host"),
        (&books.graphs, "memory of CUDA graphs, which exists while they run"),
    ];
    for (books, what) in others.into_iter().filter(|(books, _)| books.peak().0 > 0) {
        let (peak, live) = (bytes(books.peak()), bytes(books.live().bytes));
        let text = format!("{name}: beside the peak, {what}: peak {peak}, live at end {live}");
        lines.push((Mood::Note, text));
    }
    if books.dropped.objects > 0 {
        let text = format!(
            "{name}: {} in {} objects was freed with its context",
            bytes(books.dropped.bytes),
            books.dropped.objects
        );
        lines.push((Mood::Note, text));
    }
    lines
}

fn torch_lines(story: &Story, name: &str, books: &DeviceBooks) -> Vec<(Mood, String)> {
    let Some(torch) = &books.torch else { return vec![] };
    let summary = torch_summary(story, torch);
    let mut lines = vec![];
    let known = |bytes: Option<u64>| bytes.map_or("unknown".into(), |n| self::bytes(Bytes(n)));
    let text = format!(
        "{name}: {TORCH_PEAKS}: requested {}, allocated {}, reserved {}",
        known(summary.peak_requested_bytes),
        known(summary.peak_allocated_bytes),
        known(summary.peak_reserved_bytes),
    );
    lines.push((Mood::Note, text));
    let (allocated, reserved) = torch.at_device_peak;
    let unused = reserved.0.saturating_sub(allocated.0);
    if torch.allocations > 0 && unused > reserved.0 / 4 {
        let text = format!(
            "{name}: at the peak, {} of PyTorch's {} was reserved but not allocated ({:.0} %)",
            bytes(Bytes(unused)),
            bytes(reserved),
            unused as f64 / reserved.0 as f64 * 100.0
        );
        lines.push((Mood::Warning, text));
    }
    lines.extend(summary.notes.into_iter().map(|note| (Mood::Note, format!("{name}: {note}"))));
    lines
}
