//! What was written, for people and programs.

use gputrace_report::model::{Mood, Section, Value};
use gputrace_schemas::event::Bytes;
use gputrace_sim::bytes::iec;
use gputrace_trace::words;
use serde_json::{Value as Json, json};

use super::{Goal, Reproduction};

/// The section about a program with this number of lines.
#[must_use]
pub fn section(device: u32, of: &Reproduction, n_lines: usize) -> Section {
    let n_requests = of.program.n_requests();
    let title = format!("A program with the requests of cuda:{device}");
    let mut section = Section::new("reproduction", title)
        .fact("n_lines", "lines", Value::Count(n_lines as u64))
        .remark(
            "n_requests",
            "requests",
            Value::Count(n_requests as u64),
            format!("of {}", words::count(of.n_before as u64)),
        )
        .fact("torch_version", "PyTorch", Value::text(words::release(of.program.profile.version)));
    if let Some(limit) = of.program.limit {
        section = section.fact("limit_bytes", "limit", Value::Bytes(Bytes(limit)));
    }
    section = match of.goal {
        Goal::Refusal(reasons) => {
            let refused = iec(of.recorded.refused.unwrap_or(0));
            let at = words::count(of.recorded.request);
            section
                .line(Mood::Note, format!("fails as request {at} did: {refused} are refused"))
                .line(Mood::Note, format!("why: {}", reasons.words()))
        }
        Goal::Peak { reserved, allocated } => section.line(
            Mood::Note,
            format!(
                "nothing was refused; reaches the same peaks: {} reserved, {} allocated",
                iec(reserved),
                iec(allocated)
            ),
        ),
    };
    section.lines(remarks(of))
}

fn remarks(of: &Reproduction) -> Vec<(Mood, String)> {
    let mut all = vec![];
    if let Goal::Refusal(reasons) = of.goal
        && reasons.is_no_fault()
    {
        let text = "the allocator is not the cause: more was requested than was available; `gputrace oom` shows who held the rest";
        all.push((Mood::Note, text.to_owned()));
    }
    if !of.is_as_recorded() {
        let found = match of.goal {
            Goal::Refusal(_) => of.whole.at_refusal.map_or(0, |(reserved, _)| reserved),
            Goal::Peak { .. } => of.whole.peak_reserved,
        };
        let text = format!(
            "not to the byte: the recorded run reserved {}, and the simulator {}",
            iec(of.recorded.reserved),
            iec(found)
        );
        all.push((Mood::Warning, text));
    }
    if !of.is_sure {
        let text = "the outcome depends on device addresses, which may differ in another run";
        all.push((Mood::Warning, text.to_owned()));
    }
    if of.is_cut_short {
        let text = "time ran out before the program was minimal; a larger --seconds may give a shorter one";
        all.push((Mood::Note, text.to_owned()));
    }
    all.extend(of.notes.iter().map(|note| (Mood::Note, note.clone())));
    all
}

/// The same for programs.
#[must_use]
pub fn json(device: u32, of: &Reproduction, n_lines: usize) -> Json {
    let (kind, why) = match of.goal {
        Goal::Refusal(reasons) => ("refusal", Some(reasons.words())),
        Goal::Peak { .. } => ("peak", None),
    };
    json!({
        "device": device,
        "kind": kind,
        "why": why,
        "torch_version": words::release(of.program.profile.version),
        "limit_bytes": of.program.limit,
        "n_lines": n_lines,
        "n_requests": of.program.n_requests(),
        "n_requests_before": of.n_before,
        "n_tried": of.n_tried,
        "refused_bytes": of.recorded.refused,
        "refused_request": of.recorded.refused.map(|_| of.recorded.request),
        "recorded_reserved_bytes": of.recorded.reserved,
        "simulated_reserved_bytes": of.whole.at_refusal.map_or(of.whole.peak_reserved, |(reserved, _)| reserved),
        "is_as_recorded": of.is_as_recorded(),
        "is_sure": of.is_sure,
        "is_complete": !of.is_cut_short,
        "notes": of.notes,
    })
}
