//! Why PyTorch reserved more than was in use.

use gputrace_schemas::event::Bytes;
use gputrace_sim::bytes::iec;
use gputrace_sim::gap::Gap;
use gputrace_sim::whatif::RecordedGap;

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use gputrace_analyse::story::Story;
use gputrace_trace::words::{count, quote};

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

/// Call sites to show.
const ROWS: usize = 10;
/// How the parts differ from what `gputrace oom` calls by the same words.
pub const SIMULATED: &str = "these parts are simulated; `gputrace oom` measures stranded and wholly free (cached) bytes at the error, each including its part of isolated";

fn build(story: &Story) -> Option<Section> {
    let section = Section::new("gap", "Why PyTorch reserved more than was in use");
    let gaps = story.gaps.as_ref()?;
    if gaps.is_empty() {
        story.wasteful_devices().next()?;
        let command = format!("gputrace replay {}", quote(&story.path));
        return Some(section.line(Mood::Note, "to see why:").line(Mood::Command, command));
    }
    let found: Vec<(u32, &Gap)> = gaps.iter().map(|gap| (gap.device, &gap.found)).collect();
    let section = section.lines(gaps.iter().map(|gap| checked(story, gap)));
    Some(taken_apart(section, &found).warn(story.caveats()))
}

fn checked(story: &Story, gap: &RecordedGap) -> (Mood, String) {
    let check = &gap.self_check;
    let text = format!(
        "{}: {}, found by replaying the requests: {} of {} addresses match",
        device_name(story, i16::try_from(gap.device).unwrap_or(i16::MAX)),
        in_words(&gap.found),
        count(check.n_matching as u64),
        count(check.n_requests as u64),
    );
    (if check.is_perfect() { Mood::Note } else { Mood::Warning }, text)
}

/// How large it is.
pub fn in_words(found: &Gap) -> String {
    format!("{} for {} in use when most was reserved", iec(found.reserved), iec(found.in_use))
}

/// What it consists of, on each device, and which call sites hold the segments.
pub fn taken_apart(section: Section, gaps: &[(u32, &Gap)]) -> Section {
    let cuda = |device: u32| Value::text(format!("cuda:{device}"));
    let parts =
        gaps.iter().flat_map(|(device, found)| found.parts().map(|part| (*device, found.reserved, part)));
    let parts: Vec<_> = parts.filter(|(.., (_, _, bytes))| *bytes > 0).collect();
    let parts = Table::of(
        "gap",
        &parts,
        &[
            ("device", "device", &|(device, ..)| cuda(*device)),
            ("bytes", "bytes", &|(.., (_, _, bytes))| Value::Bytes(Bytes(*bytes))),
            ("share", "of reserved", &|(_, reserved, (_, _, bytes))| Value::share(*bytes, *reserved)),
            ("part", "part", &|(.., (name, ..))| Value::text(*name)),
            ("meaning", "meaning", &|(.., (_, meaning, _))| Value::text(*meaning)),
        ],
    );
    let pins = gaps.iter().flat_map(|(device, found)| found.pins.iter().map(|pin| (*device, pin)));
    let pins = Table::of(
        "pins",
        &pins.collect::<Vec<_>>(),
        &[
            ("device", "device", &|(device, _)| cuda(*device)),
            ("stranded_bytes", "free beside", &|(_, pin)| Value::Bytes(Bytes(pin.stranded))),
            ("alone_bytes", "pins alone", &|(_, pin)| Value::Bytes(Bytes(pin.alone))),
            ("in_use_bytes", "its own", &|(_, pin)| Value::Bytes(Bytes(pin.in_use))),
            ("call_site", "call site that holds segments", &|(_, pin)| Value::text(pin.place())),
        ],
    );
    section.table(parts).table(pins.keep(ROWS, 1))
}
