//! `gputrace replay`: what other allocators would have made of the same requests.

use gputrace_schemas::event::Bytes;
use gputrace_sim::gap::Gap;
use gputrace_sim::ops::History;
use gputrace_sim::whatif::Question;
use serde_json::{Value as Json, json};

use super::Reply;
use super::whatif::{Bench, Machine, Simulated, named, self_check, self_check_json, warnings_json};
use gputrace_analyse::reactions::Reaction;
use gputrace_report::model::{Mood, Part, Section, Table, Value};
use gputrace_report::sections::gap;
use gputrace_trace::import::{LEFT, Trace};

/// Replays every device of a trace through each of `policies` (`NAME` or `NAME:OPTIONS`), or as it was recorded.
///
/// # Errors
/// What cannot be replayed, and why.
pub fn replay(path: &str, trace: &Trace, machine: Machine, policies: &[String]) -> Result<Reply, String> {
    let (mut sections, mut json) = (vec![], vec![]);
    for stream in &trace.devices {
        let bench = Bench::new(stream, machine)?;
        let recorded = (stream.settings.policy, stream.settings.options.as_deref().unwrap_or(""));
        let asked = policies.iter().map(|policy| policy.split_once(':').unwrap_or((policy, "")));
        let asked: Vec<_> = if policies.is_empty() { vec![recorded] } else { asked.collect() };
        let mut outcomes = vec![];
        for (policy, options) in asked {
            let simulated = bench.simulate(policy, options)?;
            let found = bench.laboratory.gap(&simulated.question).map_err(|error| error.to_string())?;
            outcomes.push((simulated, found));
        }
        json.extend(outcomes.iter().map(|(simulated, found)| outcome_json(&bench, simulated, found)));
        sections.push(outcomes_section(&bench, &outcomes));
        // Of one allocator per device: the first that was asked about.
        sections.extend(
            outcomes.first().map(|(simulated, found)| gap_section(stream.device, &simulated.question, found)),
        );
    }
    let mut json = json!({"schema": "gputrace.replay/1", "trace": path, "outcomes": json});
    if let Some(left) = trace.notes.iter().find(|note| note.starts_with(LEFT)) {
        json["left"] = left.as_str().into();
    }
    Ok(Reply { part: Part { title: path.to_owned(), sections, ..Part::default() }, json })
}

fn outcome_json(bench: &Bench, simulated: &Simulated, found: &Gap) -> Json {
    let mut json = simulated.json();
    json["device"] = bench.stream.device.into();
    json["fragmentation"] = gap::json(found);
    json["warnings"] = warnings_json(&bench.reactions);
    json["self_check"] = self_check_json(&bench.self_check);
    json
}

fn outcomes_section(bench: &Bench, outcomes: &[(Simulated, Gap)]) -> Section {
    let peak = |it: &Simulated| (it.peak_reserved(), it.peak_allocated());
    let table = Table::of(
        "outcomes",
        outcomes.iter().map(|(simulated, _)| simulated),
        &[
            ("peak_reserved_bytes", "reserved", &|it| Value::Bytes(Bytes(peak(it).0))),
            ("peak_allocated_bytes", "allocated", &|it| Value::Bytes(Bytes(peak(it).1))),
            ("unused_share", "unused", &|it| Value::share(peak(it).0.saturating_sub(peak(it).1), peak(it).0)),
            ("num_device_alloc", "mallocs", &|it| Value::Count(it.answer.outcome.books.n_device_alloc)),
            ("num_device_free", "frees", &|it| Value::Count(it.answer.outcome.books.n_device_free)),
            ("num_alloc_retries", "retries", &|it| {
                Value::Count(it.answer.outcome.counter("num_alloc_retries"))
            }),
            ("confidence", "sure", &|it| Value::text(it.answer.confidence.name())),
            ("policy", "policy", &|it| Value::text(named(&it.question))),
        ],
    );
    let stream = bench.stream;
    let title = format!("The requests of cuda:{}, replayed", stream.device);
    let mut section = Section::new("replay", title).table(table);
    for (simulated, _) in outcomes {
        let name = if outcomes.len() > 1 { named(&simulated.question) + ": " } else { String::new() };
        for (mood, text) in simulated.remarks() {
            section = section.line(mood, format!("{name}{text}"));
        }
    }
    section = section.fact("n_requests", "requests", Value::Count(stream.n_requests() as u64));
    section = match stream.settings.is_torch() || !stream.driver.is_empty() {
        true => self_check(section, &bench.self_check),
        false => section.line(
            Mood::Note,
            "no self-check: the log does not show what its allocator requested from the driver",
        ),
    };
    section = section.warn(bench.limit_note());
    if stream.history == History::StartsLate {
        section = section
            .line(Mood::Warning, "recording began when memory was already in use: what-ifs are approximate");
    }
    section.warn(bench.reactions.iter().map(Reaction::text))
}

fn gap_section(device: u32, question: &Question, found: &Gap) -> Section {
    let section = Section::new("gap", format!("Why more was reserved than in use on cuda:{device}"));
    let line = format!("with {}: {}", named(question), gap::in_words(found));
    let section = gap::taken_apart(section.line(Mood::Note, line), &[(device, found)]);
    match found.isolated + found.cached + found.stranded {
        0 => section,
        _ => section.line(Mood::Note, gap::SIMULATED),
    }
}
