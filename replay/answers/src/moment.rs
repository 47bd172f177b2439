//! What was held at one moment, as sections: for `--at`, `--range`, `--step`, `--peak` and `--end` of verbs that otherwise
//! speak of the whole trace.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Nanos};

use gputrace_analyse::live::{
    ARENA, CACHED, Holder, Level, Lines, NO_STACK, Parts, Picture, View, When, owner,
};
use gputrace_report::model::{Mood, Section, Table, Value};
use gputrace_trace::words::{bytes, time};

/// Rows of a table, and how many are left at least where it is cut.
const ROWS: (usize, usize) = (20, 1);
/// Stacks of a device.
const STACKS: usize = 10;

/// Owners, call sites and, where they were requested, roles.
#[must_use]
pub fn sections(view: &View, when: When, parts: Parts) -> Vec<Section> {
    let mut sections = vec![held(view, when)];
    if view.pictures.is_empty() {
        return sections;
    }
    let owner = |holder: &Holder| match holder.level {
        Level::Cached => CACHED.to_owned(),
        Level::Arena => ARENA.to_owned(),
        Level::Driver | Level::Block | Level::Buffer => owner(&view.story.ledger, holder).to_owned(),
    };
    sections.push(by(view, ("owners", "Memory by owner", "owner"), |holder| Some(owner(holder))));
    if parts == Parts::Roles {
        let role = |holder: &Holder| {
            (holder.level == Level::Block).then(|| view.parts.get(holder.part as usize).cloned())?
        };
        sections.push(by(view, ("roles", "PyTorch's blocks by role", "role"), role));
    }
    let site = |holder: &Holder| match (holder.level, view.story.ledger.sites.site(holder.site)) {
        (Level::Cached | Level::Arena, _) => None,
        (Level::Buffer, Some(site)) => Some(format!("JAX buffer: {site}")),
        (Level::Block, Some(site)) => Some(format!("PyTorch block: {site}")),
        (Level::Driver, Some(site)) => Some(format!("{}: {site}", owner(holder))),
        (Level::Block | Level::Buffer | Level::Driver, None) => Some(format!("{}: unknown", owner(holder))),
    };
    sections.push(by(view, ("call_sites", "Top call sites", "call site"), site));
    sections
}

/// The stacks that held most, frame by frame, outermost first.
#[must_use]
pub fn stacks(view: &View, lines: &mut Lines) -> Section {
    let mut section = Section::new("stacks", "Largest stacks, outermost frame first");
    for picture in &view.pictures {
        let sums = sums(picture, |holder| {
            let owner = owner(&view.story.ledger, holder).to_owned();
            (!holder.level.is_rest()).then_some((owner, holder.stack))
        });
        for ((owner, stack), (sum, objects)) in sums.iter().take(STACKS) {
            let heading = format!("cuda:{}: {} in {objects} ({owner})", picture.device, bytes(Bytes(*sum)));
            section = section.line(Mood::Note, heading);
            let frames: Vec<String> = lines.of(*stack).iter().map(|line| format!("    {line}")).collect();
            let frames = if frames.is_empty() { vec![format!("    {NO_STACK}")] } else { frames };
            section = section.lines(frames.into_iter().map(|frame| (Mood::Note, frame)));
        }
        if let Some((hidden, n)) = rest(&sums) {
            let text = format!("cuda:{}: {n} more stacks with {} in total", picture.device, bytes(hidden));
            section = section.line(Mood::Note, text);
        }
    }
    section.warn(view.story.caveats())
}

/// Bytes and objects of each key, most first; what has none is left out.
fn sums<K: Ord>(picture: &Picture, key: impl Fn(&Holder) -> Option<K>) -> Vec<(K, (u64, u64))> {
    let mut sums: BTreeMap<K, (u64, u64)> = BTreeMap::new();
    for (holder, (bytes, objects)) in &picture.held {
        let Some(key) = key(holder) else { continue };
        let sum = sums.entry(key).or_default();
        *sum = (sum.0.saturating_add(bytes.0), sum.1 + objects);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    sums.sort_by(|a, b| b.1.0.cmp(&a.1.0).then_with(|| a.0.cmp(&b.0)));
    sums
}

fn rest<T>(sums: &[(T, (u64, u64))]) -> Option<(Bytes, usize)> {
    let hidden = sums.get(STACKS..).filter(|hidden| !hidden.is_empty())?;
    let bytes = hidden.iter().fold(0u64, |sum, (_, (bytes, _))| sum.saturating_add(*bytes));
    Some((Bytes(bytes), hidden.len()))
}

/// A moment as it was asked for.
#[must_use]
pub fn in_words(when: When) -> String {
    let clock = |at: Nanos| if at.0 == u64::MAX { "the end".to_owned() } else { time(at) };
    match when {
        When::Peak => "the peak".to_owned(),
        When::End => "the end".to_owned(),
        When::At(at) => format!("the last event up to {}", time(at)),
        When::Within(from, to) => format!("peak between {} and {}", clock(from), clock(to)),
        When::Step(number) => format!("peak of step {number}"),
    }
}

fn held(view: &View, when: When) -> Section {
    let which = in_words(when);
    let line = |picture: &Picture| {
        let at = time(view.story.since_start(picture.time));
        format!("cuda:{}: {} held at {at} ({which})", picture.device, bytes(picture.total()))
    };
    let section = Section::new("moment", "Memory held");
    let section = match view.pictures.is_empty() {
        true => section.line(Mood::Note, "nothing was held then"),
        false => section.lines(view.pictures.iter().map(|picture| (Mood::Note, line(picture)))),
    };
    section.warn(view.story.caveats())
}

/// [`sums`] of each device, by name.
fn by(
    view: &View,
    (name, title, column): (&'static str, &'static str, &'static str),
    key: impl Fn(&Holder) -> Option<String>,
) -> Section {
    let rows = view.pictures.iter().flat_map(|picture| {
        sums(picture, &key).into_iter().map(move |(key, (bytes, objects))| (picture, key, bytes, objects))
    });
    let table = Table::of(
        name,
        &rows.collect::<Vec<_>>(),
        &[
            ("device", "device", &|(picture, ..)| Value::text(format!("cuda:{}", picture.device))),
            ("bytes", "bytes", &|(_, _, bytes, _)| Value::bytes(Some(*bytes))),
            ("share", "share", &|(picture, _, bytes, _)| Value::share(*bytes, picture.total().0)),
            ("objects", "number", &|(.., objects)| Value::Count(*objects)),
            ("name", column, &|(_, key, ..)| Value::text(&**key)),
        ],
    );
    let caveats = view.story.caveats().filter(|_| !table.rows.is_empty());
    Section::new(name, title).table(table.keep(ROWS.0, ROWS.1)).warn(caveats)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_analyse::categories::Categories;
    use gputrace_analyse::live::view;
    use gputrace_report::model::Item;
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    const SCENE: &str = "Alloc addr=s bytes=2M by=libc10_cuda.so
         block addr=s bytes=1M requested=1M reserved=2M by=f@/job/a.py:2
         Create handle=n bytes=100 by=libnccl.so.2
         free addr=s bytes=1M reserved=2M";

    #[test]
    fn stacks_show_what_lies_between_the_lines_of_python() {
        let scene =
            "block addr=a bytes=3K requested=3K by=f@/job/a.py:2,at::empty@libtorch_cpu.so,main@/job/a.py:9
                     block addr=b bytes=1K requested=1K
                     Create handle=n bytes=100 by=libnccl.so.2";
        let source = Source::of("train.gtr", recording(scene));
        let view = view(&source, When::Peak, Parts::None, &Categories::default());
        let section =
            stacks(&view, &mut Lines::new(source.definitions(), gputrace_analyse::live::Native::Shown));
        let line = |item: &Item| match item {
            Item::Line(_, text) => text.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            section.items.iter().map(line).collect::<Vec<_>>(),
            [
                "cuda:0: 3.00 KiB in 1 (PyTorch)",
                "    main (a.py:9)",
                "    at::empty (libtorch_cpu.so)",
                "    f (a.py:2)",
                "cuda:0: 1.00 KiB in 1 (PyTorch)",
                "    (no stack recorded)",
                "cuda:0: 100 B in 1 (NCCL)",
                "    libnccl.so.2+0x10 (libnccl.so.2)",
            ]
        );
    }

    fn shown(when: When) -> Vec<String> {
        let source = Source::of("train.gtr", recording(SCENE));
        let view = view(&source, when, Parts::Roles, &Categories::default());
        let mut shown = vec![];
        for section in sections(&view, when, Parts::Roles) {
            for item in &section.items {
                let Item::Table(table) = item else { continue };
                shown.extend(table.rows.iter().map(|row| match (&row[1], &row[4]) {
                    (Value::Bytes(bytes), Value::Text(name)) => format!("{} {name}", bytes.0),
                    _ => panic!("{row:?}"),
                }));
            }
        }
        shown
    }

    #[test]
    fn owners_add_up_to_what_was_held_then() {
        assert_eq!(
            shown(When::At(Nanos(2_000))),
            [
                "1048576 (reserved by PyTorch, used by nobody)",
                "1048576 PyTorch",
                "100 NCCL",
                "1048576 temporaries",
                "1048576 PyTorch block: f (/job/a.py:2)",
                "100 NCCL: libnccl.so.2+0x10",
            ]
        );
        assert_eq!(
            shown(When::At(Nanos(9_000)))[..2],
            ["2097152 (reserved by PyTorch, used by nobody)", "100 NCCL"]
        );
    }
}
