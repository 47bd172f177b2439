//! Memory by the parts of the program that it names itself, and its steps.

use super::SectionEntry;
use crate::model::{Mood, Section, Table, Value};
use crate::summary::used_devices;
use gputrace_analyse::story::Story;
use gputrace_schemas::event::Nanos;
use gputrace_trace::ledger::{Books, OwnerId, Part, PhaseId, StepSource};
use gputrace_trace::words::{loops, time};

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };

const ROWS: usize = 20;

fn build(story: &Story) -> Option<Section> {
    let ledger = &story.ledger;
    let mut section = Section::new("phases", "Phases and steps");
    if let Some(training) = ledger.training() {
        let label = match training.source {
            StepSource::Period(..) => "steps or requests",
            StepSource::Ranges(_) | StepSource::Optimizer => "steps",
        };
        section = section.fact("n_steps", label, Value::Count(training.n_steps)).fact(
            "step_source",
            "found by",
            Value::text(training.source.to_string()),
        );
        let mut lengths: Vec<u64> =
            training.steps.iter().filter_map(|step| Some(step.end?.0 - step.begin.0)).collect();
        lengths.sort_unstable();
        if let Some(median) = lengths.get(lengths.len() / 2) {
            section = section.fact("median_step_ns", "median length", Value::Time(Nanos(*median)));
        }
        for (ordinal, books) in used_devices(story) {
            if let Some(step) = training.at(books.physical.peak_time()) {
                let at = time(story.since_start(books.physical.peak_time()));
                let text = format!("cuda:{ordinal}: the peak at {at} was in step {}", step.number);
                section = section.line(Mood::Note, text);
            }
        }
    }
    if let Some(loops) = loops(ledger.loops()) {
        section = section.line(Mood::Note, format!("the number of steps is not known: {loops}"));
    }
    if !ledger.phases.is_empty() {
        section = section.table(table(story).keep(ROWS, 2));
        let note = "phases are the NVTX ranges that were open when memory was requested. Threads without their own ranges (PyTorch's backward pass) count for the thread that last used NVTX";
        section = section.line(Mood::Note, note);
    }
    (!section.items.is_empty()).then(|| section.warn(story.caveats()))
}

/// PyTorch's segments are shown by the blocks in them, as in the table of call sites.
fn table(story: &Story) -> Table {
    let mut rows: Vec<(i16, &str, Part<OwnerId>)> = vec![];
    for (ordinal, books) in used_devices(story) {
        let blocks = books.torch.as_ref().map(|torch| &torch.phases).filter(|phases| phases.peak().0 > 0);
        let parts =
            |what, books: &Books| books.owners().map(|part| (ordinal, what, part)).collect::<Vec<_>>();
        rows.extend(blocks.into_iter().flat_map(|books| parts("PyTorch blocks", books)));
        rows.extend(parts("driver", &books.phases));
    }
    rows.sort_by_key(|(device, what, part)| {
        (std::cmp::Reverse(part.at_peak.bytes), std::cmp::Reverse(part.peak), *device, *what, part.id)
    });
    let path = |part: &Part<OwnerId>| match story.ledger.phases.path(PhaseId(part.id.0)) {
        "" => "(outside any range)",
        path => path,
    };
    Table::of(
        "phases",
        &rows,
        &[
            ("device", "device", &|(ordinal, ..)| Value::text(format!("cuda:{ordinal}"))),
            ("phase", "phase", &|(.., part)| Value::text(path(part))),
            ("bytes_at_peak", "at peak", &|(.., part)| Value::Bytes(part.at_peak.bytes)),
            ("peak_bytes", "own peak", &|(.., part)| Value::Bytes(part.peak)),
            ("live_bytes", "live at end", &|(.., part)| Value::Bytes(part.live.bytes)),
            ("objects", "allocations", &|(.., part)| Value::Count(part.gains)),
            ("what", "what", &|(_, what, _)| Value::text(*what)),
        ],
    )
}
