//! `gputrace diff`: what one run held more than another.

use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::Bytes;
use serde::{Deserialize, Serialize};

use gputrace_analyse::live::{ARENA, CACHED, Level, Lines, Native, Picture, owner};
use gputrace_analyse::story::Story;
use gputrace_report::model::{Mood, Section, Table, Value};
use gputrace_report::summary::{torch_summary, used_devices};
use gputrace_trace::Definitions;
use gputrace_trace::ledger::Site;

/// Pairs of lines of one function that are compared; beyond it they are taken in order.
const MOST_PAIRS: usize = 1 << 20;

/// The key of the comparison.
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
        ("site", By::Site, "Call sites: the lines that allocated"),
        ("owner", By::Owner, "Owners"),
        ("size", By::Size, "Sizes of objects"),
    ];
}

/// One side of a comparison: what was held at a moment, and the figures.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Side {
    /// The trace.
    pub path: String,
    /// Why its numbers may be wrong.
    pub doubts: Option<String>,
    /// Peaks, by device and number in [`FIGURES`].
    figures: Vec<(i16, usize, u64)>,
    held: Vec<Holding>,
    /// Objects by their size: bytes, and how many.
    sizes: Vec<(u64, u64)>,
}

/// Memory held from one call stack.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Holding {
    /// On which device.
    pub device: i16,
    /// Its owner.
    pub owner: String,
    /// In which way.
    pub level: Level,
    /// The line of the program.
    pub site: Option<Site>,
    /// From where, outermost first; never empty.
    pub lines: Vec<String>,
    /// How much.
    pub bytes: u64,
    /// How many.
    pub objects: u64,
}

/// What is compared of each device.
const FIGURES: [&str; 4] =
    ["peak of the device", "PyTorch reserved", "PyTorch allocated", "PyTorch requested"];

impl Side {
    /// Of a trace, and what it held at a moment.
    #[must_use]
    pub fn of(definitions: &dyn Definitions, story: &Story, pictures: &[Picture]) -> Side {
        let mut lines = Lines::new(definitions, Native::Hidden);
        let mut side = Side {
            path: story.path.clone(),
            doubts: story.caveats(),
            figures: figures(story),
            held: vec![],
            sizes: vec![],
        };
        for picture in pictures {
            side.sizes.extend(picture.sizes.iter().map(|(bytes, n)| (bytes.0, *n)));
            side.held.extend(picture.held.iter().map(|(holder, (bytes, objects))| Holding {
                device: holder.device,
                owner: owner(&story.ledger, holder).to_owned(),
                level: holder.level,
                site: story.ledger.sites.site(holder.site).cloned(),
                lines: lines.of_holder(holder).iter().map(ToString::to_string).collect(),
                bytes: bytes.0,
                objects: *objects,
            }));
        }
        side
    }

    /// Memory held.
    #[must_use]
    pub fn held(&self) -> &[Holding] {
        &self.held
    }

    /// Objects by their size: bytes, and how many.
    #[must_use]
    pub fn sizes(&self) -> &[(u64, u64)] {
        &self.sizes
    }

    /// Peaks of the devices: ordinal, what, and bytes.
    pub fn figures(&self) -> impl Iterator<Item = (i16, &'static str, u64)> {
        let named = |(device, what, bytes): &(i16, usize, u64)| Some((*device, *FIGURES.get(*what)?, *bytes));
        self.figures.iter().filter_map(named)
    }
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
    let by_key = |side: &Side| -> BTreeMap<(i16, usize), u64> {
        side.figures.iter().map(|(device, what, bytes)| ((*device, *what), *bytes)).collect()
    };
    let (one, other) = (by_key(before), by_key(after));
    let keys: BTreeSet<(i16, usize)> = one.keys().chain(other.keys()).copied().collect();
    let of = |side: &BTreeMap<_, u64>, key: &_| side.get(key).copied().unwrap_or(0);
    let change = |key: (i16, usize)| {
        let bytes = (of(&one, &key), of(&other, &key));
        Some(Change { device: format!("cuda:{}", key.0), what: FIGURES.get(key.1)?, bytes })
    };
    keys.into_iter().filter_map(change).collect()
}

fn figures(story: &Story) -> Vec<(i16, usize, u64)> {
    let mut figures = vec![];
    for (device, books) in used_devices(story) {
        figures.push((device, 0, books.physical.peak().0));
        let Some(torch) = books.torch.as_ref().map(|torch| torch_summary(story, torch)) else { continue };
        let torch = [torch.peak_reserved_bytes, torch.peak_allocated_bytes, torch.peak_requested_bytes];
        figures.extend((1..).zip(torch).filter_map(|(what, bytes)| Some((device, what, bytes?))));
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

/// Memory held more and less, most changed first.
#[must_use]
pub fn section(before: &Side, after: &Side, by: By, n_rows: usize) -> Section {
    let mut rows = match by {
        By::Site => aligned(sites(before), sites(after)),
        By::Stack | By::Owner | By::Size => paired(sums(before, by), sums(after, by)),
    };
    rows.retain(|(_, before, after)| before != after);
    rows.sort_by(|(a, b, c), (d, e, f)| e.abs_diff(*f).cmp(&b.abs_diff(*c)).then_with(|| a.cmp(d)));
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
            ("key", column, &|it| Value::text(&*it.0)),
        ],
    );
    let n_left_out = rows.len().saturating_sub(n_rows);
    if n_left_out > 0 {
        table.left_out = Some(format!("{n_left_out} more with smaller changes"));
    }
    let section = Section::new(name, title);
    match table.rows.is_empty() {
        true => section.line(Mood::Good, "no difference"),
        false => section.table(table),
    }
}

/// What is held of each key by one side and the other.
fn paired(one: BTreeMap<String, u64>, mut other: BTreeMap<String, u64>) -> Vec<(String, u64, u64)> {
    let mut rows: Vec<_> = one
        .into_iter()
        .map(|(key, bytes)| {
            let after = other.remove(&key).unwrap_or(0);
            (key, bytes, after)
        })
        .collect();
    rows.extend(other.into_iter().map(|(key, bytes)| (key, 0, bytes)));
    rows
}

fn sums(side: &Side, by: By) -> BTreeMap<String, u64> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    let mut add = |key: String, bytes: u64| {
        let sum = sums.entry(key).or_default();
        *sum = sum.saturating_add(bytes);
    };
    if by == By::Size {
        side.sizes.iter().for_each(|(bytes, n)| add(size_class(*bytes), bytes.saturating_mul(*n)));
    }
    for it in &side.held {
        match by {
            By::Stack => {
                let stack: Vec<&str> = it.lines.iter().rev().map(String::as_str).collect();
                add(format!("{}: {}", it.owner, stack.join(" < ")), it.bytes);
            }
            By::Owner => add(it.owner.clone(), it.bytes),
            By::Size if it.level == Level::Cached => add(CACHED.to_owned(), it.bytes),
            By::Size if it.level == Level::Arena => add(ARENA.to_owned(), it.bytes),
            By::Site | By::Size => {}
        }
    }
    sums
}

/// A call site of one side.
struct Held {
    line: u32,
    name: String,
    bytes: u64,
}

/// What call sites hold, by all that names them but the line, in the order of their lines: an edit moves lines.
fn sites(side: &Side) -> BTreeMap<String, Vec<Held>> {
    let mut groups: BTreeMap<String, BTreeMap<(u32, String), u64>> = BTreeMap::new();
    for it in &side.held {
        let (group, line, name) = match &it.site {
            Some(site) => (Site { line: 0, ..site.clone() }.to_string(), site.line, site.to_string()),
            None => {
                let outermost = it.lines.first().cloned().unwrap_or_default();
                (outermost.clone(), 0, outermost)
            }
        };
        let group = groups.entry(format!("{}: {group}", it.owner)).or_default();
        let sum = group.entry((line, format!("{}: {name}", it.owner))).or_default();
        *sum = sum.saturating_add(it.bytes);
    }
    let held = |((line, name), bytes)| Held { line, name, bytes };
    groups.into_iter().map(|(group, of)| (group, of.into_iter().map(held).collect())).collect()
}

/// Sites of both sides that are the same, as far as function, order and size tell.
fn aligned(
    mut one: BTreeMap<String, Vec<Held>>,
    mut other: BTreeMap<String, Vec<Held>>,
) -> Vec<(String, u64, u64)> {
    let groups: BTreeSet<String> = one.keys().chain(other.keys()).cloned().collect();
    let mut rows = vec![];
    for group in groups {
        let (before, after) =
            (one.remove(&group).unwrap_or_default(), other.remove(&group).unwrap_or_default());
        for (before, after) in align(&before, &after) {
            rows.push(match (before, after) {
                (Some(before), Some(after)) if before.line != after.line => {
                    (format!("{}, before at line {}", after.name, before.line), before.bytes, after.bytes)
                }
                (before, after) => {
                    let name = after.or(before).map_or_else(String::new, |held| held.name.clone());
                    (name, before.map_or(0, |held| held.bytes), after.map_or(0, |held| held.bytes))
                }
            });
        }
    }
    rows
}

type Pair<'a> = (Option<&'a Held>, Option<&'a Held>);

/// Which lines of a function are the same on both sides: in order, so that the differences are least in sum. Of equal ones, those
/// whose lines are the same.
fn align<'a>(before: &'a [Held], after: &'a [Held]) -> Vec<Pair<'a>> {
    let is_same =
        before.len() == after.len() && before.iter().zip(after).all(|(one, other)| one.line == other.line);
    if is_same || before.len().saturating_mul(after.len()) > MOST_PAIRS {
        return before.iter().map(Some).zip(after.iter().map(Some)).chain(rest(before, after)).collect();
    }
    // Least sum of differences, and lines moved, from each pair of places on.
    let width = after.len() + 1;
    let mut least = vec![(0_u64, 0_u64); (before.len() + 1) * width];
    let pair =
        |one: &Held, other: &Held| (one.bytes.abs_diff(other.bytes), u64::from(one.line != other.line));
    let plus = |a: (u64, u64), b: (u64, u64)| (a.0.saturating_add(b.0), a.1 + b.1);
    for at in (0..=before.len()).rev() {
        for to in (0..=after.len()).rev() {
            let gone = before.get(at).map(|one| plus((one.bytes, 0), least[(at + 1) * width + to]));
            let new = after.get(to).map(|other| plus((other.bytes, 0), least[at * width + to + 1]));
            let both = before.get(at).zip(after.get(to));
            let both = both.map(|(one, other)| plus(pair(one, other), least[(at + 1) * width + to + 1]));
            if let Some(best) = [both, gone, new].into_iter().flatten().min() {
                least[at * width + to] = best;
            }
        }
    }
    let (mut at, mut to, mut pairs) = (0, 0, vec![]);
    while at < before.len() || to < after.len() {
        let best = least[at * width + to];
        match (before.get(at), after.get(to)) {
            (Some(one), Some(other)) if plus(pair(one, other), least[(at + 1) * width + to + 1]) == best => {
                pairs.push((Some(one), Some(other)));
                (at, to) = (at + 1, to + 1);
            }
            (Some(one), _) if plus((one.bytes, 0), least[(at + 1) * width + to]) == best => {
                pairs.push((Some(one), None));
                at += 1;
            }
            (_, other) => {
                pairs.push((None, other));
                to += 1;
            }
        }
    }
    pairs
}

/// What is more on one side.
fn rest<'a>(before: &'a [Held], after: &'a [Held]) -> impl Iterator<Item = Pair<'a>> {
    let gone = before.iter().skip(after.len()).map(|one| (Some(one), None));
    gone.chain(after.iter().skip(before.len()).map(|other| (None, Some(other))))
}

/// `<= 4 MiB`.
fn size_class(bytes: u64) -> String {
    let upper = bytes.max(512).checked_next_power_of_two().unwrap_or(u64::MAX);
    format!("<= {}", gputrace_trace::words::bytes(Bytes(upper)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_analyse::live::{When, pictures};
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    fn side(scene: &str) -> Side {
        let source = Source::of("train.gtr", recording(scene));
        let (story, pictures) = pictures(&source, When::Peak);
        Side::of(source.definitions(), &story, &pictures)
    }

    #[test]
    fn what_changed_is_told_by_place_owner_and_size() {
        let before = side("Alloc addr=a bytes=4M by=main@/job/train\nAlloc addr=n bytes=2M by=libnccl.so.2");
        let after =
            side("Alloc addr=a bytes=6M by=main@/job/train\nAlloc addr=b bytes=1K by=other@/job/train");
        let rows = |by| {
            let section = section(&before, &after, by, 10);
            let gputrace_report::model::Item::Table(table) = &section.items[0] else { panic!("{section:?}") };
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

    fn by(before: &str, after: &str, by: By) -> Vec<String> {
        let section = section(&side(before), &side(after), by, 10);
        let table = section.items.iter().find_map(|item| match item {
            gputrace_report::model::Item::Table(table) => Some(table),
            _ => None,
        });
        let row = |row: &Vec<Value>| match (&row[0], &row[3]) {
            (Value::Difference(bytes), Value::Text(key)) => format!("{bytes:+} {key}"),
            _ => panic!("{row:?}"),
        };
        table.map_or_else(Vec::new, |table| table.rows.iter().map(row).collect())
    }

    #[test]
    fn an_inserted_line_changes_nothing_but_itself() {
        let scene = |shift: u32, more: &str| {
            let at = |line: u32| line + shift;
            format!(
                "Alloc addr=a bytes=4M by=step@/job/a.py:{}\nAlloc addr=b bytes=2M by=step@/job/a.py:{}
                 Alloc addr=c bytes=1M by=step@/job/a.py:{}\n{more}",
                at(10),
                at(11),
                at(12)
            )
        };
        assert_eq!(by(&scene(0, ""), &scene(1, ""), By::Site), Vec::<String>::new());
        let inserted = scene(1, "Alloc addr=n bytes=64K by=step@/job/a.py:10");
        assert_eq!(by(&scene(0, ""), &inserted, By::Site), ["+65536 application: step (/job/a.py:10)"]);
        // The last of three grows, and all have moved.
        let grown = scene(5, "").replace("bytes=1M", "bytes=3M");
        assert_eq!(
            by(&scene(0, ""), &grown, By::Site),
            ["+2097152 application: step (/job/a.py:17), before at line 12"]
        );
    }

    #[test]
    fn sizes_are_those_of_the_objects() {
        // Of one stack, a large and a small one: no object has their mean.
        let two = "Alloc addr=a bytes=64M by=f@/job/a.py:1\nAlloc addr=b bytes=1M by=f@/job/a.py:1";
        let one = "Alloc addr=a bytes=64M by=f@/job/a.py:1";
        assert_eq!(by(two, one, By::Size), ["-1048576 <= 1.00 MiB"]);
    }
}
