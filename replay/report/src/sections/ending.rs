//! How the process ended, as far as its trace shows.

use super::SectionEntry;
use crate::model::{Mood, Section, Value};
use gputrace_analyse::story::{End, Story};
use gputrace_trace::words::time;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let ledger = &story.ledger;
    let span = story.since_start(ledger.run.last);
    let mut section = Section::new("ending", "End")
        .fact("events", "events", Value::Count(ledger.run.n_events))
        .fact("duration_ns", "last event after", Value::Time(span));
    if let Some(end) = story.end() {
        let is_fine = matches!(end, End::Exit | End::Status(0) | End::Detached);
        let mood = if is_fine { Mood::Note } else { Mood::Bad };
        section = section.line(mood, format!("the process {}", end.text()));
    }
    let is_over = story.end() != Some(End::Detached);
    // Where the process runs on, it was inside of a call by chance.
    for open in ledger.counts.open_calls.iter().filter(|_| is_over) {
        let thread = story.threads.get(&open.thread).map_or("unknown", String::as_str);
        let site = ledger.sites.site_name(open.site);
        let text = format!(
            "the process ended inside {} on thread '{thread}' at {}, called from {site}: it crashed, was killed or exited there",
            ledger.sites.name(open.name),
            time(story.since_start(open.time)),
        );
        section = section.line(Mood::Bad, text);
    }
    if !story.complete {
        let text = "the trace has no end: the recorder was killed with the process, the disk was full, or the program still runs";
        section = section.line(Mood::Warning, text);
    }
    Some(section)
}
