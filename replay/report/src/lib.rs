//! Reports: sections made from books, shown by renderers.
//!
//! ```text
//! trace -> Story (ledger) -> sections -> Report -> render: text, json
//! ```
//! A section never reads the trace, only the ledger; a renderer never computes.
#![forbid(unsafe_code)]

pub mod brief;
pub mod fold;
pub mod history;
mod kept;
pub mod model;
pub mod processes;
pub mod render;
pub mod sections;
pub mod sharing;
pub mod summary;

use gputrace_analyse::story::Story;
use model::{Part, Section};

/// The report on one story. It begins with what the file does not hold.
#[must_use]
pub fn part(story: &Story, mut sections: Vec<Section>) -> Part {
    sections.splice(0..0, history::section(story));
    Part {
        title: title(story),
        trace: Some(story.path.clone()),
        pid: Some(story.process.pid),
        rank: story.process.rank,
        command: story.process.command.clone(),
        verdict: None,
        sections,
    }
}

fn title(story: &Story) -> String {
    let command = match story.process.command.join(" ") {
        command if command.is_empty() => story.process.executable.clone(),
        command => command,
    };
    // A snapshot does not say which process it is of.
    let rank = story.process.rank.map(|rank| format!("rank {rank}"));
    let pid = (story.process.pid > 0).then(|| format!("pid {}", story.process.pid));
    match [rank, pid].into_iter().flatten().collect::<Vec<_>>().join(", ") {
        who if who.is_empty() && command.is_empty() => story.named().to_owned(),
        who if who.is_empty() => format!("{}: {command}", story.named()),
        who => format!("{} ({who}): {command}", story.named()),
    }
}

#[cfg(test)]
mod tests;
