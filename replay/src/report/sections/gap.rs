//! Why PyTorch reserved more than was in use.

use gputrace_schemas::event::Bytes;
use gputrace_sim::whatif::RecordedGap;

use super::next::quote;
use super::{SectionEntry, device_name};
use crate::report::model::{Mood, Section, Table, Value};
use crate::report::words::{bytes, count};
use crate::story::Story;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// Call sites to show.
const ROWS: usize = 8;

fn build(story: &Story) -> Option<Section> {
    let section = Section::new("gap", "Why PyTorch reserved more than was in use");
    let gaps = story.gaps.as_ref()?;
    if gaps.is_empty() {
        story.wasteful_devices().next()?;
        let command = format!("gputrace replay {}", quote(&story.path));
        return Some(section.line(Mood::Note, "what says why:").line(Mood::Command, command));
    }
    let mut parts = Table::new(
        "gap",
        &[
            ("device", "device"),
            ("bytes", "bytes"),
            ("share", "of reserved"),
            ("part", "part"),
            ("meaning", "meaning"),
        ],
    );
    let mut pins = Table::new(
        "pins",
        &[
            ("device", "device"),
            ("stranded_bytes", "free beside"),
            ("alone_bytes", "held alone"),
            ("in_use_bytes", "its own"),
            ("call_site", "call site that holds segments"),
        ],
    );
    for gap in gaps {
        add_parts(&mut parts, gap);
        add_pins(&mut pins, gap);
    }
    let section = gaps.iter().fold(section, |section, gap| {
        let (mood, line) = in_words(story, gap);
        section.line(mood, line)
    });
    Some(section.table(parts).table(pins.keep(ROWS, 1)).warn(story.doubts()))
}

fn add_parts(table: &mut Table, gap: &RecordedGap) {
    for (name, meaning, bytes) in gap.found.parts().into_iter().filter(|(_, _, bytes)| *bytes > 0) {
        table.rows.push(vec![
            Value::text(format!("cuda:{}", gap.device)),
            Value::Bytes(Bytes(bytes)),
            Value::share(bytes, gap.found.reserved),
            Value::text(name),
            Value::text(meaning),
        ]);
    }
}

fn add_pins(table: &mut Table, gap: &RecordedGap) {
    for pin in &gap.found.pins {
        table.rows.push(vec![
            Value::text(format!("cuda:{}", gap.device)),
            Value::Bytes(Bytes(pin.stranded)),
            Value::Bytes(Bytes(pin.alone)),
            Value::Bytes(Bytes(pin.in_use)),
            Value::text(pin.place()),
        ]);
    }
}

fn in_words(story: &Story, gap: &RecordedGap) -> (Mood, String) {
    let (found, check) = (&gap.found, &gap.self_check);
    let text = format!(
        "{}: {} for {} in use when most was reserved, found by replaying the requests: {} of {} addresses match",
        device_name(story, i16::try_from(gap.device).unwrap_or(i16::MAX)),
        bytes(Bytes(found.reserved)),
        bytes(Bytes(found.in_use)),
        count(check.n_matching as u64),
        count(check.n_requests as u64),
    );
    (if check.is_perfect() { Mood::Note } else { Mood::Warning }, text)
}
