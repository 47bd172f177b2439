//! Faults of the process's GPUs that NVML reported, and times in which the process was suspended.

use super::SectionEntry;
use crate::model::{Mood, Section};
use gputrace_analyse::story::Story;
use gputrace_schemas::event::{FaultKind, Nanos};
use gputrace_trace::faults;
use gputrace_trace::words::{count, time};

/// Faults that are listed, the newest of them.
const SHOWN: usize = 8;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| of(story).into_iter().collect() };

/// `None` where there is nothing of either.
#[must_use]
pub fn of(story: &Story) -> Option<Section> {
    let health = &story.ledger.health;
    if health.faults.is_empty() && health.suspensions.is_empty() {
        return None;
    }
    let mut section = Section::new("health", "GPU faults and suspensions");
    let hidden = health.n_faults.saturating_sub(SHOWN as u64);
    if hidden > 0 {
        section = section.line(Mood::Note, format!("{} earlier faults are not listed", count(hidden)));
    }
    for (at, fault) in health.faults.iter().skip(health.faults.len().saturating_sub(SHOWN)) {
        let is_bad = matches!(
            fault.kind,
            FaultKind::Xid | FaultKind::Lost | FaultKind::Uncorrected | FaultKind::RemapFailed
        );
        let text = format!(
            "{}, {} after the start",
            faults::text(&story.process, *at, fault),
            time(story.since_start(*at))
        );
        section = section.line(if is_bad { Mood::Bad } else { Mood::Warning }, text);
    }
    for suspension in &health.suspensions {
        let clock = |at: Nanos| faults::clock(&story.process, at);
        let (by, since) = (suspension.by.text(), clock(suspension.since));
        let text = match suspension.until {
            Some(until) => {
                let long = time(Nanos(until.0.saturating_sub(suspension.since.0)));
                format!("suspended {by}, from {since} to {}, for {long}", clock(until))
            }
            None => format!("suspended {by}, since {since}"),
        };
        section = section.line(Mood::Warning, text);
    }
    Some(section)
}
