//! What was held at one moment, as sections: for `--at`, `--range`, `--step`, `--peak` and `--end` of verbs that otherwise
//! speak of the whole trace.

use std::collections::BTreeMap;

use gputrace_schemas::event::Nanos;

use crate::live::{CACHED, Holder, Level, Parts, Picture, View, When, owner};
use crate::report::model::{Mood, Section, Table, Value};
use crate::report::render::text::{bytes, time};

/// Rows of a table, and how many are left at least where it is cut.
const ROWS: (usize, usize) = (20, 1);

/// Owners, call sites and, where they were asked for, roles.
#[must_use]
pub fn sections(view: &View, when: When, parts: Parts) -> Vec<Section> {
    let mut sections = vec![held(view, when)];
    if view.pictures.is_empty() {
        return sections;
    }
    let owner = |holder: &Holder| match holder.level {
        Level::Cached => CACHED.to_owned(),
        Level::Driver | Level::Block => owner(&view.story.ledger, holder).to_owned(),
    };
    sections.push(by(view, ("owners", "Memory by owner", "owner"), |holder| Some(owner(holder))));
    if parts == Parts::Roles {
        let role = |holder: &Holder| {
            (holder.level == Level::Block).then(|| view.parts.get(holder.part as usize).cloned())?
        };
        sections.push(by(view, ("roles", "PyTorch's blocks by role", "role"), role));
    }
    let site = |holder: &Holder| match (holder.level, view.story.ledger.sites.site(holder.site)) {
        (Level::Cached, _) => None,
        (Level::Block, Some(site)) => Some(format!("PyTorch block: {site}")),
        (Level::Driver, Some(site)) => Some(format!("{}: {site}", owner(holder))),
        (Level::Block | Level::Driver, None) => Some(format!("{}: unknown", owner(holder))),
    };
    sections.push(by(view, ("call_sites", "Who held it: top call sites", "call site"), site));
    sections
}

fn held(view: &View, when: When) -> Section {
    let clock = |at: Nanos| if at.0 == u64::MAX { "the end".to_owned() } else { time(at) };
    let which = match when {
        When::Peak => "the peak".to_owned(),
        When::End => "the end".to_owned(),
        When::At(_) => "the moment asked for".to_owned(),
        When::Within(from, to) => format!("most between {} and {}", clock(from), clock(to)),
        When::Step(number) => format!("most in step {number}"),
    };
    let line = |picture: &Picture| {
        let at = time(view.story.since_start(picture.time));
        format!("cuda:{}: {} held at {at} ({which})", picture.device, bytes(picture.total()))
    };
    let section = Section::new("moment", "What was held");
    let section = match view.pictures.is_empty() {
        true => section.line(Mood::Note, "nothing was held then"),
        false => view.pictures.iter().fold(section, |section, it| section.line(Mood::Note, line(it))),
    };
    section.warn(view.story.doubts())
}

/// Sums by device and name, most first; what has no name is left out.
fn by(
    view: &View,
    (name, title, column): (&'static str, &'static str, &'static str),
    key: impl Fn(&Holder) -> Option<String>,
) -> Section {
    let mut table = Table::new(
        name,
        &[
            ("device", "device"),
            ("bytes", "bytes"),
            ("share", "share"),
            ("objects", "number"),
            ("name", column),
        ],
    );
    for picture in &view.pictures {
        let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for (holder, (bytes, objects)) in &picture.held {
            let Some(key) = key(holder) else { continue };
            let sum = sums.entry(key).or_default();
            *sum = (sum.0.saturating_add(bytes.0), sum.1 + objects);
        }
        let mut rows: Vec<_> = sums.into_iter().collect();
        rows.sort_by(|a, b| b.1.0.cmp(&a.1.0).then_with(|| a.0.cmp(&b.0)));
        for (key, (bytes, objects)) in rows {
            table.rows.push(vec![
                Value::text(format!("cuda:{}", picture.device)),
                Value::bytes(Some(bytes)),
                Value::share(bytes, picture.total().0),
                Value::Count(objects),
                Value::text(key),
            ]);
        }
    }
    Section::new(name, title).table(table.keep(ROWS.0, ROWS.1)).warn(view.story.doubts())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::categories::Categories;
    use crate::live::view;
    use crate::report::model::Item;
    use crate::scene::recording;
    use crate::source::Source;

    const SCENE: &str = "Alloc addr=s bytes=2M by=libc10_cuda.so
         block addr=s bytes=1M requested=1M reserved=2M by=f@/job/a.py:2
         Create handle=n bytes=100 by=libnccl.so.2
         free addr=s bytes=1M reserved=2M";

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
