//! Reports: sections made from books, shown by renderers.
//!
//! ```text
//! trace -> Story (ledger) -> sections -> Report -> render: text, json
//! ```
//! A section never reads the trace, only the ledger; a renderer never computes.

pub mod model;
pub mod render;
pub mod sections;

use crate::story::Story;
use model::{Part, Report};
use sections::SectionEntry;

/// A report of `verb` about these traces: every section of `sections` that has something to say about each.
#[must_use]
pub fn about(verb: &'static str, sections: &[SectionEntry], stories: &[Story]) -> Report {
    let part = |story: &Story| Part {
        title: title(story),
        trace: Some(story.path.clone()),
        pid: Some(story.process.pid),
        rank: story.process.rank,
        command: story.process.command.clone(),
        sections: sections.iter().flat_map(|entry| (entry.build)(story)).collect(),
    };
    Report { verb, parts: stories.iter().map(part).collect() }
}

fn title(story: &Story) -> String {
    let command = match story.process.command.join(" ") {
        command if command.is_empty() => story.process.executable.clone(),
        command => command,
    };
    let rank = story.process.rank.map_or_else(String::new, |rank| format!("rank {rank}, "));
    format!("{} ({rank}pid {}): {command}", story.path, story.process.pid)
}

#[cfg(test)]
mod tests;
