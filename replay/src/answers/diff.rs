//! `gputrace diff`: what one run held more than another.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;

use crate::analyse::live::{Holder, Level, Lines, Native, Picture, owner};
use crate::analyse::summary::{torch_summary, used_devices};
use crate::report::model::{Mood, Section, Table, Value};
use crate::story::Story;
use crate::trace::source::Source;

/// What is compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    /// Call stacks, whole.
    Stack,
    /// Call sites: where the program asked.
    Site,
    /// Owners.
    Owner,
    /// Sizes of objects, by powers of two.
    Size,
}

impl By {
    /// All, each with its name and what it means.
    pub const ALL: &[(&str, By, &str)] = &[
        ("stack", By::Stack, "Call stacks, whole"),
        ("site", By::Site, "Call sites: where the program asked"),
        ("owner", By::Owner, "Owners"),
        ("size", By::Size, "Sizes of objects"),
    ];
}

/// One side of a comparison: what was held at a moment, and the figures.
pub struct Side {
    /// The trace.
    pub source: Source,
    /// What happened.
    pub story: Story,
    /// What was held.
    pub pictures: Vec<Picture>,
}

/// Figures of one side and the other.
#[derive(Clone, Debug)]
pub struct Change {
    /// `cuda:0`.
    pub device: String,
    /// Which figure.
    pub what: &'static str,
    /// Before and after.
    pub bytes: (u64, u64),
}

impl Change {
    /// By how much of what it was it grew; nothing where there was nothing.
    #[must_use]
    pub fn increase(&self) -> f64 {
        let (before, after) = self.bytes;
        match (before, after) {
            (0, 0) => 0.0,
            (0, _) => f64::INFINITY,
            _ => after as f64 / before as f64 - 1.0,
        }
    }
}

/// The peaks of both, by device.
#[must_use]
pub fn peaks(before: &Side, after: &Side) -> Vec<Change> {
    let (one, other) = (figures(&before.story), figures(&after.story));
    let mut keys: Vec<_> = one.keys().chain(other.keys()).collect();
    keys.sort_unstable();
    keys.dedup();
    let of = |side: &BTreeMap<_, u64>, key: &_| side.get(key).copied().unwrap_or(0);
    let change = |key: &(i16, &'static str)| Change {
        device: format!("cuda:{}", key.0),
        what: key.1.trim_start_matches(|digit: char| digit.is_ascii_digit()),
        bytes: (of(&one, key), of(&other, key)),
    };
    keys.into_iter().map(change).collect()
}

/// The digits keep the order.
fn figures(story: &Story) -> BTreeMap<(i16, &'static str), u64> {
    let mut figures = BTreeMap::new();
    for (device, books) in used_devices(story) {
        figures.insert((device, "1peak of the device"), books.physical.peak().0);
        let Some(torch) = books.torch.as_ref().map(|torch| torch_summary(story, torch)) else { continue };
        let torch = [
            ("2PyTorch reserved", torch.peak_reserved_bytes),
            ("3PyTorch allocated", torch.peak_allocated_bytes),
            ("4PyTorch requested", torch.peak_requested_bytes),
        ];
        figures.extend(torch.into_iter().filter_map(|(what, bytes)| Some(((device, what), bytes?))));
    }
    figures
}

/// The peaks as a section.
#[must_use]
pub fn peaks_section(changes: &[Change], doubts: Option<String>) -> Section {
    let increase = |it: &Change| match it.increase() {
        increase if increase.is_finite() => Value::Share(increase),
        _ => Value::Missing,
    };
    let table = Table::of(
        "peaks",
        changes,
        &[
            ("device", "device", &|it| Value::text(&*it.device)),
            ("what", "peak", &|it| Value::text(it.what)),
            ("before_bytes", "before", &|it| Value::bytes(Some(it.bytes.0))),
            ("after_bytes", "after", &|it| Value::bytes(Some(it.bytes.1))),
            ("difference_bytes", "difference", &|it| Value::Difference(difference(it.bytes.0, it.bytes.1))),
            ("increase", "increase", &increase),
        ],
    );
    Section::new("peaks", "Peaks").table(table).warn(doubts)
}

fn difference(before: u64, after: u64) -> i64 {
    i64::try_from(i128::from(after) - i128::from(before)).unwrap_or(if after > before {
        i64::MAX
    } else {
        i64::MIN
    })
}

/// What is held more and less, most changed first.
#[must_use]
pub fn section(before: &Side, after: &Side, by: By, n_rows: usize) -> Section {
    let (one, other) = (sums(before, by), sums(after, by));
    let mut rows: Vec<(&String, u64, u64)> = vec![];
    for (key, bytes) in &one {
        rows.push((key, *bytes, other.get(key).copied().unwrap_or(0)));
    }
    rows.extend(other.iter().filter(|(key, _)| !one.contains_key(*key)).map(|(key, bytes)| (key, 0, *bytes)));
    rows.retain(|(_, before, after)| before != after);
    rows.sort_by_key(|(key, before, after)| (Reverse(before.abs_diff(*after)), *key));
    let (name, title, column) = match by {
        By::Stack => ("by_stack", "By call stack", "call stack"),
        By::Site => ("by_site", "By call site", "call site"),
        By::Owner => ("by_owner", "By owner", "owner"),
        By::Size => ("by_size", "By size of object", "size"),
    };
    let mut table = Table::of(
        name,
        rows.iter().take(n_rows),
        &[
            ("difference_bytes", "difference", &|it| Value::Difference(difference(it.1, it.2))),
            ("before_bytes", "before", &|it| Value::bytes(Some(it.1))),
            ("after_bytes", "after", &|it| Value::bytes(Some(it.2))),
            ("key", column, &|it| Value::text(it.0)),
        ],
    );
    let n_left_out = rows.len().saturating_sub(n_rows);
    if n_left_out > 0 {
        table.left_out = Some(format!("{n_left_out} more that changed less"));
    }
    let section = Section::new(name, title);
    match table.rows.is_empty() {
        true => section.line(Mood::Good, "no difference"),
        false => section.table(table),
    }
}

fn sums(side: &Side, by: By) -> BTreeMap<String, u64> {
    let mut lines = Lines::new(side.source.definitions(), Native::Hidden);
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for picture in &side.pictures {
        for (holder, (bytes, objects)) in &picture.held {
            let key = match by {
                By::Stack => {
                    let stack: Vec<_> =
                        lines.of_holder(holder).iter().rev().map(ToString::to_string).collect();
                    format!("{}: {}", owner(&side.story.ledger, holder), stack.join(" < "))
                }
                By::Site => site(side, holder, &mut lines),
                By::Owner => owner(&side.story.ledger, holder).to_owned(),
                By::Size if holder.level == Level::Cached => crate::analyse::live::CACHED.to_owned(),
                By::Size => size_class(bytes.0 / (*objects).max(1)),
            };
            let sum = sums.entry(key).or_default();
            *sum = sum.saturating_add(bytes.0);
        }
    }
    sums
}

fn site(side: &Side, holder: &Holder, lines: &mut Lines) -> String {
    let sites = &side.story.ledger.sites;
    let owner = owner(&side.story.ledger, holder);
    match sites.site(holder.site) {
        Some(site) => format!("{owner}: {site}"),
        None => format!("{owner}: {}", lines.of_holder(holder)[0]),
    }
}

/// `<= 4 MiB`; objects from one stack are taken together, by their mean.
fn size_class(bytes: u64) -> String {
    let upper = bytes.max(512).checked_next_power_of_two().unwrap_or(u64::MAX);
    format!("<= {}", crate::report::words::bytes(Bytes(upper)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analyse::live::{When, pictures};
    use crate::scene::recording;

    fn side(scene: &str) -> Side {
        let source = Source::of("train.gtr", recording(scene));
        let (story, pictures) = pictures(&source, When::Peak);
        Side { source, story, pictures }
    }

    #[test]
    fn what_changed_is_told_by_place_owner_and_size() {
        let before = side("Alloc addr=a bytes=4M by=main@/job/train\nAlloc addr=n bytes=2M by=libnccl.so.2");
        let after =
            side("Alloc addr=a bytes=6M by=main@/job/train\nAlloc addr=b bytes=1K by=other@/job/train");
        let rows = |by| {
            let section = section(&before, &after, by, 10);
            let crate::report::model::Item::Table(table) = &section.items[0] else { panic!("{section:?}") };
            let row = |row: &Vec<Value>| match (&row[0], &row[3]) {
                (Value::Difference(bytes), Value::Text(key)) => format!("{bytes:+} {key}"),
                _ => panic!("{row:?}"),
            };
            table.rows.iter().map(row).collect::<Vec<_>>()
        };
        assert_eq!(rows(By::Owner), ["+2098176 application", "-2097152 NCCL"]);
        assert_eq!(
            rows(By::Size),
            ["+6291456 <= 8.00 MiB", "-4194304 <= 4.00 MiB", "-2097152 <= 2.00 MiB", "+1024 <= 1.00 KiB"]
        );
        assert_eq!(rows(By::Site)[1], "+2097152 application: main (train)");
        let changes = peaks(&before, &after);
        assert_eq!((changes[0].what, changes[0].bytes), ("peak of the device", (6 << 20, (6 << 20) + 1024)));
    }

    #[test]
    fn an_increase_is_relative_to_what_was() {
        let change =
            |before, after| Change { device: String::new(), what: "", bytes: (before, after) }.increase();
        assert_eq!(
            (change(100, 105), change(0, 0), change(0, 1)),
            (0.050000000000000044, 0.0, f64::INFINITY)
        );
        assert!(change(100, 90) < 0.0);
    }
}
