//! What to type next.

use super::SectionEntry;
use crate::model::{Mood, Section};
use gputrace_analyse::story::Story;
use gputrace_trace::words::quote;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let path = quote(&story.path);
    let section = Section::new("next", "Next").line(Mood::Command, format!("gputrace stats {path}"));
    let troubled = !story.ledger.findings.is_empty()
        || story.doubts().is_some()
        || !story.ledger.health.notes.is_empty();
    Some(if troubled { section.line(Mood::Command, format!("gputrace doctor {path}")) } else { section })
}
