//! What may be wrong with the trace, and what is wrong with the program's calls.

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use crate::sharing::Sharing;
use crate::summary::used_devices;
use gputrace_analyse::story::Story;
use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_trace::ledger::Ledger;
use gputrace_trace::words::time;

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

fn build(story: &Story) -> Option<Section> {
    let ledger = &story.ledger;
    let mut section = Section::new("trust", "Limits of these numbers");
    for (cause, events) in &ledger.health.lost {
        section = section.line(Mood::Warning, format!("{events} events were lost: {cause}"));
    }
    for damage in &story.damages {
        section = section.line(Mood::Warning, format!("{}: {damage}", story.path));
    }
    section = section.table(Table::of(
        "findings",
        ledger.findings.iter(),
        &[
            ("count", "times", &|it| Value::Count(it.count)),
            ("what", "problem", &|it| Value::text(it.first.text())),
            ("first_time_ns", "first at", &|it| Value::Time(story.since_start(it.time))),
            ("about", "first address", &|it| Value::text(format!("{:#x}", it.first.about()))),
            ("thread", "thread", &|it| Value::text(story.threads.get(&it.thread).map_or("", String::as_str))),
        ],
    ));
    if ledger.counts.n_after_shutdown > 0 {
        let text = format!(
            "{} frees came after the driver had shut down and did nothing (usual at the end of a process)",
            ledger.counts.n_after_shutdown
        );
        section = section.line(Mood::Note, text);
    }
    if let Some(least) = stacks_min_size(ledger) {
        let text =
            format!("PyTorch blocks of less than {least} bytes were recorded without stacks (--min-size)");
        section = section.line(Mood::Note, text);
    }
    if let Some(why) = python_frames_unseen(ledger) {
        let text = format!("no stack has Python frames: {why}");
        section = section.line(Mood::Warning, text);
    }
    if let Some(why) = mappings_unread(ledger) {
        let text = format!("native frames are addresses without names: {why} (/proc/PID/maps)");
        section = section.line(Mood::Warning, text);
    }
    if let Some(late) = names_late(ledger) {
        let text = format!(
            "{late} addresses of native frames have no names, because there was no time to look them up (a busy machine, or slow disks): `gputrace symbolise` finds them on a machine that has the files"
        );
        section = section.line(Mood::Warning, text);
    }
    if let Some(began) = attached_late(ledger) {
        let at = time(story.since_start(began));
        let but = torch_before(ledger).map_or_else(String::new, |known| {
            format!(", except PyTorch's own ({known}; their call sites are not known)")
        });
        let text = format!(
            "the library was loaded at {at}, while the process ran. Earlier allocations are in no other number here{but}; freeing them counts as \"freed without a recorded allocation\""
        );
        section = section.table(before_attach(story)).line(Mood::Warning, text);
    }
    section = section.lines(shared(story).into_iter().map(|text| (Mood::Note, text)));
    section = section.lines(said(ledger).map(|text| {
        let text = match text.starts_with("could not write") {
            true => text.to_owned(),
            false => format!("gputrace reported this, but could not write it to standard error: {text}"),
        };
        (Mood::Warning, text)
    }));
    if !ledger.health.notes.is_empty() {
        let notes = match ledger.health.notes.len() {
            1 => "1 note".to_owned(),
            n => format!("{n} notes"),
        };
        let text = format!("{notes} of the recording: `gputrace doctor {}`", story.path);
        section = section.line(Mood::Note, text);
    }
    (!section.items.is_empty()).then_some(section)
}

/// When the library came into a process that ran already.
fn attached_late(ledger: &Ledger) -> Option<Nanos> {
    ledger.health.notes.iter().find(|(_, note)| note.starts_with("attach.late=")).map(|(time, _)| *time)
}

/// What PyTorch's allocator said that it had handed out before.
fn torch_before(ledger: &Ledger) -> Option<&str> {
    let told = ledger.health.notes.iter().find_map(|(_, note)| note.strip_prefix("torch.before="))?;
    told.starts_with(|first: char| first.is_ascii_digit()).then_some(told)
}

/// The one figure that there is of what the process was given before: the driver's, as soon as it was asked, without what was handed out
/// by then.
fn before_attach(story: &Story) -> Table {
    let devices = story.ledger.devices().iter();
    let charged: Vec<_> = devices
        .filter_map(|(ordinal, books)| {
            let first = books.samples.first?;
            Some((*ordinal, first.time, first.process_used?, first.tracked))
        })
        .collect();
    Table::of(
        "before_attach",
        &charged,
        &[
            ("device", "device", &|it| Value::text(device_name(story, it.0))),
            ("owner", "owner", &|_| Value::text("before attach")),
            ("bytes", "bytes", &|it| Value::Bytes(Bytes(it.2.0.saturating_sub(it.3.0)))),
            ("time_ns", "charged by the driver at", &|it| Value::Time(story.since_start(it.1))),
        ],
    )
}

/// Devices that are parts of cards, or under MPS, and those that NVML does not know.
fn shared(story: &Story) -> Vec<String> {
    let used = used_devices(story).filter(|(ordinal, _)| *ordinal >= 0);
    used.flat_map(|(ordinal, _)| Sharing::of(story, ordinal).sentences(&device_name(story, ordinal)))
        .collect()
}

/// What the recording says about stacks that were not wanted.
fn stacks_min_size(ledger: &Ledger) -> Option<u64> {
    let told = ledger.health.notes.iter().find_map(|(_, note)| note.strip_prefix("stacks.min_size="))?;
    told.parse().ok()
}

/// Messages of the library and the recorder that standard error did not take.
fn said(ledger: &Ledger) -> impl Iterator<Item = &str> {
    ledger.health.notes.iter().filter_map(|(_, note)| note.strip_prefix("gputrace.said="))
}

/// Why no address of the process can be named.
fn mappings_unread(ledger: &Ledger) -> Option<&str> {
    ledger.health.notes.iter().find_map(|(_, note)| note.strip_prefix("mappings=unread: "))
}

/// How many addresses the recorder had no time for.
fn names_late(ledger: &Ledger) -> Option<u64> {
    let told = ledger.health.notes.iter().find_map(|(_, note)| note.strip_prefix("symbols.late="))?;
    told.split(':').next()?.parse().ok()
}

/// Why Python ran and no stack shows it.
fn python_frames_unseen(ledger: &Ledger) -> Option<&str> {
    ledger.health.notes.iter().find_map(|(_, note)| note.strip_prefix("python.frames=unseen: "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_trace::scene::recording;

    #[test]
    fn what_standard_error_did_not_take_is_in_the_report() {
        let scene = "Alloc addr=a bytes=1K by=app\nnote gputrace.said=the recorder was killed";
        let story = Story::of("t.gtr", &recording(scene));
        let shown = format!("{:?}", build(&story));
        assert!(shown.contains("could not write it to standard error: the recorder was killed"), "{shown}");
    }

    #[test]
    fn what_came_before_the_library_did_is_one_row_by_the_drivers_figure() {
        let scene = "note attach.late=6 words: this process ran already\nAlloc addr=a bytes=1M by=app\nsample used=52M";
        let story = Story::of("t.gtr", &recording(scene));
        let shown = format!("{:?}", build(&story));
        assert!(shown.contains("the library was loaded at"), "{shown}");
        assert!(
            shown.contains("before attach")
                && shown.contains(&format!("{:?}", Value::Bytes(Bytes(51 << 20)))),
            "{shown}"
        );
    }

    #[test]
    fn what_pytorchs_allocator_listed_of_before_is_said() {
        for (note, is_said) in [
            ("7 blocks and 2 segments, as PyTorch's allocator lists them", true),
            ("unseen: it is another", false),
        ] {
            let scene = format!(
                "note attach.late=6 words: this process ran already\nnote torch.before={note}\nAlloc addr=a bytes=1M by=app"
            );
            let shown = format!("{:?}", build(&Story::of("t.gtr", &recording(&scene))));
            assert_eq!(shown.contains("except PyTorch's own (7 blocks and 2 segments"), is_said, "{shown}");
        }
    }

    #[test]
    fn names_that_there_was_no_time_for_are_counted() {
        let scene =
            "Alloc addr=a bytes=1K by=app\nnote symbols.late=12: names that there was no time to look up";
        let shown = format!("{:?}", build(&Story::of("t.gtr", &recording(scene))));
        assert!(
            shown.contains("12 addresses of native frames have no names, because there was no time"),
            "{shown}"
        );
    }

    #[test]
    fn addresses_without_names_have_their_reason() {
        let scene = "Alloc addr=a bytes=1K by=app\nnote mappings=unread: the process had ended";
        let story = Story::of("t.gtr", &recording(scene));
        let shown = format!("{:?}", build(&story));
        assert!(
            shown.contains("native frames are addresses without names: the process had ended"),
            "{shown}"
        );
    }
}
