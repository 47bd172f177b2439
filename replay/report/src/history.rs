//! What a snapshot or a bounded recording does not hold, which stands before all that it does.

use gputrace_schemas::event::Bytes;

use crate::model::{Mood, Section, Value};
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::Held;
use gputrace_trace::words::{bytes, count};

/// The section's name.
pub const NAME: &str = "recording";
/// The line of code that records a history.
pub const RECORD: &str =
    "torch.cuda.memory._record_memory_history(max_entries=1_000_000)  # before the model is made";
/// The line that writes it.
pub const DUMP: &str = "torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")  # where you want to know";

/// The first lines of a report on what does not begin with the program: a snapshot, or what is left of a bounded recording.
#[must_use]
pub fn section(story: &Story) -> Option<Section> {
    if let Some(since) = story.since() {
        let section = Section::new(NAME, "What this recording still has").fact(
            "since_ns",
            "all events since",
            Value::Time(story.since_start(since)),
        );
        if story.process.is_rest() {
            return Some(section.line(Mood::Warning, REST));
        }
        let segment = Value::Count(story.process.segment.into());
        return Some(section.fact("segment", "first segment", segment).line(Mood::Note, LEFT));
    }
    let what = in_words(story)?;
    let section = Section::new(NAME, "What this snapshot has").line(Mood::Warning, what);
    Some(section.line(Mood::Command, RECORD).line(Mood::Command, DUMP))
}

/// What is to be known of a recording whose beginning was removed.
const LEFT: &str = "older segments were removed (--keep, --max-size). Memory from before is shown if it was still held then, with its own times and stacks; peaks, counts and rates cover only the time since";

/// What is to be known of a trace of a ring that a recorder before had read in part.
const REST: &str = "the recorder of this process was killed, and this is what it had not read. Its own trace ends before; up to a second between the two is in neither. Memory and stacks from before are not known here";

/// The same in a sentence.
#[must_use]
pub fn in_words(story: &Story) -> Option<String> {
    let before = story.before();
    if before.is_empty() {
        return None;
    }
    if story.is_one_moment() {
        return Some(
            "this snapshot has no history: it shows what each line holds now, but not what happened before"
                .into(),
        );
    }
    let held = before_bytes(story);
    Some(format!(
        "the history of this snapshot starts late: {} blocks{} were already held, and the lines that requested them are not known",
        count(held.objects),
        if held.bytes.0 > 0 { format!(" ({})", bytes(held.bytes)) } else { String::new() },
    ))
}

/// What was held when the history began.
fn before_bytes(story: &Story) -> Held {
    let objects = story.before().iter().fold(0, |sum, before| sum + before.n_blocks);
    let lifetimes = story.lifetimes.as_ref();
    let bytes = lifetimes.map_or(0, |lifetimes| lifetimes.from_before.0);
    Held { bytes: Bytes(bytes), objects }
}
