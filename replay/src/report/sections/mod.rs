//! What there is to say. A section is one file here and one line in [`SECTIONS`], [`STATISTICS`] or [`FIGURES`].

mod balance;
mod cache;
mod call_sites;
mod calls;
mod communicators;
mod cycles;
mod ending;
mod figures;
pub(crate) mod gap;
mod hidden;
mod holders;
mod kinds;
mod memory;
mod next;
mod oom;
mod overview;
mod owners;
mod peak_makers;
mod phases;
mod roles;
mod sizes;
mod trust;

use crate::report::model::Section;
use crate::story::Story;

/// A section: made from a story, unless it has nothing to say about it.
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

/// What `gputrace report` says, in this order: what a person whose job just died needs first.
pub const SECTIONS: &[SectionEntry] = &[
    oom::ENTRY,
    ending::ENTRY,
    memory::ENTRY,
    owners::ENTRY,
    hidden::ENTRY,
    roles::ENTRY,
    communicators::ENTRY,
    balance::ENTRY,
    cache::EMPTIED,
    cache::MISFITS,
    gap::ENTRY,
    call_sites::ENTRY,
    phases::ENTRY,
    peak_makers::ENTRY,
    cycles::ENTRY,
    trust::ENTRY,
    next::ENTRY,
];

/// What `gputrace stats` says.
pub const STATISTICS: &[SectionEntry] = &[
    overview::ENTRY,
    calls::ENTRY,
    sizes::ENTRY,
    kinds::ENTRY,
    owners::ENTRY,
    hidden::WHOLE,
    phases::ENTRY,
    call_sites::TOTALS,
    trust::ENTRY,
];

/// What `gputrace stats` counts in a part of the time.
pub const COUNTS: &[SectionEntry] = &[calls::ENTRY, sizes::ENTRY];

/// What `gputrace oom` says before it looks at how memory was cut up.
pub const POSTMORTEM: &[SectionEntry] = &[oom::ENTRY, owners::AT_OOM, holders::ENTRY, call_sites::LONG_LIST];

/// What `gputrace summary` says to people.
pub const FIGURES: &[SectionEntry] = &[figures::ENTRY, owners::ENTRY, hidden::ENTRY];

/// `cuda:0 NVIDIA H200`.
fn device_name(story: &Story, ordinal: i16) -> String {
    match (ordinal, story.device(ordinal)) {
        (gputrace_schemas::event::NO_DEVICE, _) => "unknown device".into(),
        (_, Some(device)) if !device.name.is_empty() => format!("cuda:{ordinal} {}", device.name),
        _ => format!("cuda:{ordinal}"),
    }
}
