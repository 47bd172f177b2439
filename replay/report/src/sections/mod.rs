//! What there is to say. A section is one file here and one line in [`SECTIONS`], [`STATISTICS`] or [`FIGURES`].

pub mod balance;
pub mod cache;
mod call_sites;
mod calls;
mod communicators;
mod cycles;
mod ending;
mod figures;
pub mod gap;
pub mod health;
mod heaps;
mod hidden;
mod holders;
mod jax;
mod kinds;
pub(crate) mod memory;
mod next;
mod oom;
mod overview;
mod owners;
mod peak_makers;
mod phases;
mod pinned;
pub mod pools;
mod roles;
mod sizes;
mod trust;

use crate::model::{Mood, Section};
use gputrace_analyse::story::Story;

/// A section: made from a story, unless it has nothing to say about it.
#[derive(Clone, Copy)]
pub struct SectionEntry {
    pub(super) build: fn(&Story) -> Vec<Section>,
}

impl SectionEntry {
    /// What it has to say about a story.
    #[must_use]
    pub fn of(&self, story: &Story) -> Vec<Section> {
        (self.build)(story)
    }
}

/// When a section of the report is shown to people. Programs get all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    /// Always.
    Always,
    /// Where everything is asked for (`--all`).
    OnDemand,
}

/// The output of `gputrace report`, in this order: what a person whose job just died needs first.
pub const SECTIONS: &[(Shown, SectionEntry)] = &[
    (Shown::Always, oom::ENTRY),
    (Shown::Always, jax::OOM),
    (Shown::Always, health::ENTRY),
    (Shown::OnDemand, ending::ENTRY),
    (Shown::Always, memory::ENTRY),
    (Shown::Always, owners::ENTRY),
    (Shown::OnDemand, pinned::ENTRY),
    (Shown::OnDemand, hidden::ENTRY),
    (Shown::Always, roles::ENTRY),
    (Shown::Always, jax::ENTRY),
    (Shown::Always, heaps::ENTRY),
    (Shown::OnDemand, communicators::ENTRY),
    (Shown::Always, balance::ENTRY),
    (Shown::Always, cache::EMPTIED),
    (Shown::Always, cache::MISFITS),
    (Shown::OnDemand, gap::ENTRY),
    (Shown::Always, pools::ENTRY),
    (Shown::Always, call_sites::ENTRY),
    (Shown::OnDemand, phases::ENTRY),
    (Shown::OnDemand, peak_makers::ENTRY),
    (Shown::Always, cycles::ENTRY),
    (Shown::Always, trust::ENTRY),
    (Shown::OnDemand, next::ENTRY),
];

/// The output of `gputrace report` about a story: everything, or what is always shown and the titles of the rest.
#[must_use]
pub fn of_report(story: &Story, wanted: Shown) -> Vec<Section> {
    let (mut sections, mut more) = (vec![], vec![]);
    for (shown, entry) in SECTIONS {
        match wanted == Shown::OnDemand || *shown == Shown::Always {
            true => sections.extend(entry.of(story)),
            false => more.extend(entry.of(story).into_iter().map(|section| section.title)),
        }
    }
    if !more.is_empty() {
        let titles = more.join("; ");
        sections.push(Section::new("more", "More with --all").line(Mood::Note, titles));
    }
    sections
}

/// The output of `gputrace stats`.
pub const STATISTICS: &[SectionEntry] = &[
    overview::ENTRY,
    calls::ENTRY,
    sizes::ENTRY,
    kinds::ENTRY,
    owners::ENTRY,
    jax::ENTRY,
    hidden::WHOLE,
    pools::ENTRY,
    phases::ENTRY,
    call_sites::TOTALS,
    trust::ENTRY,
];

/// The output of `gputrace stats` for a part of the time.
pub const COUNTS: &[SectionEntry] = &[calls::ENTRY, sizes::ENTRY];

/// The output of `gputrace stats` for a moment.
pub const STANDING: &[SectionEntry] = &[kinds::ENTRY, pools::ENTRY];

/// The output of `gputrace oom` before it looks at how memory was cut up.
pub const POSTMORTEM: &[SectionEntry] =
    &[oom::ENTRY, jax::OOM, owners::AT_OOM, holders::ENTRY, call_sites::LONG_LIST];

/// The output of `gputrace summary` for people.
pub const FIGURES: &[SectionEntry] = &[figures::ENTRY, owners::ENTRY, hidden::ENTRY];

/// `cuda:0 NVIDIA H200`.
pub fn device_name(story: &Story, ordinal: i16) -> String {
    match (ordinal, story.device(ordinal)) {
        (gputrace_schemas::event::NO_DEVICE, _) => "unknown device".into(),
        (gputrace_schemas::event::HOST, _) => "host, pinned memory".into(),
        (_, Some(device)) if !device.name.is_empty() => format!("cuda:{ordinal} {}", device.name),
        _ => format!("cuda:{ordinal}"),
    }
}
