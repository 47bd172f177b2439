//! What PyTorch's blocks were for.

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use gputrace_analyse::lifetimes::DeviceLifetimes;
use gputrace_analyse::story::Story;
use gputrace_trace::words::{bytes, time};

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let lifetimes = story.lifetimes.as_ref().filter(|lifetimes| !lifetimes.devices.is_empty())?;
    let mut section = Section::new("roles", "Roles of PyTorch's memory, at the peak of its blocks");
    if !lifetimes.has_stacks {
        let text = "not known: no block was recorded with a call stack";
        return Some(section.line(Mood::Note, text));
    }
    let mut rules: Vec<(&str, &str)> = vec![];
    for device in &lifetimes.devices {
        section = section.line(Mood::Note, moment(story, device)).table(table(device));
        for role in &device.roles {
            if !rules.contains(&(&role.name, &role.rule)) {
                rules.push((&role.name, &role.rule));
            }
        }
    }
    section = section.table(Table::of(
        "rules",
        &rules,
        &[
            ("role", "role", &|(name, _)| Value::text(*name)),
            ("rule", "rule", &|(_, rule)| Value::text(*rule)),
        ],
    ));
    if lifetimes.is_guessed {
        let text = "blocks without a stack were attributed to the backward pass, which runs in threads without Python";
        section = section.line(Mood::Note, text);
    }
    if lifetimes.devices.iter().all(|device| device.n_passes == 0) {
        let text = "no backward pass was seen: roles are those of inference, by call site, lifetime and reuse (docs/ROLES.md)";
        section = section.line(Mood::Note, text);
    }
    Some(section.warn(story.caveats()))
}

fn moment(story: &Story, device: &DeviceLifetimes) -> String {
    let passes = match device.n_passes {
        1 => "1 backward pass".to_owned(),
        n => format!("{n} backward passes"),
    };
    let at = time(story.since_start(device.peak_time));
    format!("{}: {} at {at}, {passes} in the trace", device_name(story, device.device), bytes(device.peak))
}

fn table(device: &DeviceLifetimes) -> Table {
    Table::of(
        "roles",
        &device.roles,
        &[
            ("device", "device", &|_| Value::text(format!("cuda:{}", device.device))),
            ("role", "role", &|it| Value::text(&*it.name)),
            ("bytes_at_peak", "at peak", &|it| Value::Bytes(it.at_peak)),
            ("share_of_peak", "share", &|it| Value::share(it.at_peak.0, device.peak.0)),
            ("peak_bytes", "own peak", &|it| Value::Bytes(it.peak)),
            ("peak_requested_bytes", "requested", &|it| Value::Bytes(it.peak_requested)),
            ("live_bytes", "live at end", &|it| Value::Bytes(it.at_end)),
            ("blocks", "blocks", &|it| Value::Count(it.blocks)),
        ],
    )
}
