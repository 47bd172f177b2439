//! `gputrace replay`: what other allocators would have made of the same requests.

use gputrace_schemas::event::Bytes;
use gputrace_sim::gap::Gap;
use gputrace_sim::ops::History;
use serde::Serialize;

use super::Reply;
use super::whatif::{Bench, Machine, SelfCheck, Simulated, Warning, self_check};
use gputrace_report::model::{Mood, Part, Section, Table, Value};
use gputrace_report::sections::gap;
use gputrace_trace::import::{LEFT, Trace};

/// What the same requests would have been under each policy.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "schema", rename = "gputrace.replay/1")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Answer {
    /// The file.
    pub trace: String,
    /// One per device and policy.
    pub outcomes: Vec<Outcome>,
    /// Since when it is complete, if older segments of a bounded recording were removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    left: Option<String>,
}

/// What became of a device's requests under a policy.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Outcome {
    /// The replay.
    #[serde(flatten)]
    pub simulated: Simulated,
    device: u32,
    fragmentation: Fragmentation,
    /// Where the program might have gone another way.
    pub warnings: Vec<Warning>,
    self_check: SelfCheck,
    #[serde(skip)]
    gap: Gap,
}

/// What was reserved when most was, by what it was.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Fragmentation {
    reserved_bytes: u64,
    in_use_bytes: u64,
    rounding_bytes: u64,
    surplus_bytes: u64,
    waiting_bytes: u64,
    segment_rounding_bytes: u64,
    isolated_bytes: u64,
    cached_bytes: u64,
    stranded_bytes: u64,
    pins: Vec<Pin>,
}

/// A call site that holds segments.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Pin {
    function: Option<String>,
    file: Option<String>,
    line: Option<u32>,
    in_use_bytes: u64,
    stranded_alone_bytes: u64,
    stranded_bytes: u64,
}

impl Fragmentation {
    fn of(gap: &Gap) -> Fragmentation {
        let pin = |pin: &gputrace_sim::gap::Pin| Pin {
            function: pin.site.as_ref().map(|site| site.name.to_string()),
            file: pin.site.as_ref().map(|site| site.file.to_string()),
            line: pin.site.as_ref().map(|site| site.line),
            in_use_bytes: pin.in_use,
            stranded_alone_bytes: pin.alone,
            stranded_bytes: pin.stranded,
        };
        Fragmentation {
            reserved_bytes: gap.reserved,
            in_use_bytes: gap.in_use,
            rounding_bytes: gap.rounding,
            surplus_bytes: gap.surplus,
            waiting_bytes: gap.waiting,
            segment_rounding_bytes: gap.segment_rounding,
            isolated_bytes: gap.isolated,
            cached_bytes: gap.cached,
            stranded_bytes: gap.stranded,
            pins: gap.pins.iter().map(pin).collect(),
        }
    }
}

/// Replays every device of a trace through each of `policies` (`NAME` or `NAME:OPTIONS`), or as it was recorded.
///
/// # Errors
/// What cannot be replayed, and why.
pub fn replay(
    path: &str,
    trace: &Trace,
    machine: Machine,
    policies: &[String],
) -> Result<Reply<Answer>, String> {
    let (mut sections, mut outcomes) = (vec![], vec![]);
    for stream in &trace.devices {
        let bench = Bench::new(stream, machine)?;
        let recorded = (stream.settings.policy, stream.settings.options.as_deref().unwrap_or(""));
        let asked = policies.iter().map(|policy| policy.split_once(':').unwrap_or((policy, "")));
        let asked: Vec<_> = if policies.is_empty() { vec![recorded] } else { asked.collect() };
        let of = |(policy, options): (&str, &str)| Outcome::of(&bench, policy, options);
        let of_device = asked.into_iter().map(of).collect::<Result<Vec<_>, _>>()?;
        sections.push(outcomes_section(&bench, &of_device));
        // Of one allocator per device: the first that was asked about.
        sections.extend(of_device.first().map(gap_section));
        outcomes.extend(of_device);
    }
    let left = trace.notes.iter().find(|note| note.starts_with(LEFT)).cloned();
    let answer = Answer { trace: path.to_owned(), outcomes, left };
    Ok(Reply { part: Part { title: path.to_owned(), sections, ..Part::default() }, answer })
}

impl Outcome {
    fn of(bench: &Bench, policy: &str, options: &str) -> Result<Outcome, String> {
        let simulated = bench.simulate(policy, options)?;
        let question = bench.question(policy, options);
        let gap = bench.laboratory.gap(&question).map_err(|error| error.to_string())?;
        Ok(Outcome {
            simulated,
            device: bench.stream.device,
            fragmentation: Fragmentation::of(&gap),
            warnings: bench.warnings.clone(),
            self_check: SelfCheck::of(&bench.self_check),
            gap,
        })
    }
}

fn outcomes_section(bench: &Bench, outcomes: &[Outcome]) -> Section {
    let table = Table::of(
        "outcomes",
        outcomes.iter().map(|it| &it.simulated),
        &[
            ("peak_reserved_bytes", "reserved", &|it| Value::Bytes(Bytes(it.figures.peak_reserved_bytes))),
            ("peak_allocated_bytes", "allocated", &|it| Value::Bytes(Bytes(it.figures.peak_allocated_bytes))),
            ("unused_share", "unused", &|it| {
                let reserved = it.figures.peak_reserved_bytes;
                Value::share(reserved.saturating_sub(it.figures.peak_allocated_bytes), reserved)
            }),
            ("num_device_alloc", "mallocs", &|it| Value::Count(it.figures.num_device_alloc)),
            ("num_device_free", "frees", &|it| Value::Count(it.figures.num_device_free)),
            ("num_alloc_retries", "retries", &|it| Value::Count(it.figures.num_alloc_retries)),
            ("confidence", "sure", &|it| Value::text(it.confidence.name())),
            ("policy", "policy", &|it| Value::text(it.figures.named())),
        ],
    );
    let stream = bench.stream;
    let title = format!("The requests of cuda:{}, replayed", stream.device);
    let mut section = Section::new("replay", title).table(table);
    for Outcome { simulated, .. } in outcomes {
        let name = if outcomes.len() > 1 { simulated.figures.named() + ": " } else { String::new() };
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
    section.warn(bench.warnings.iter().map(|it| it.text.clone()))
}

fn gap_section(Outcome { simulated, device, gap: found, .. }: &Outcome) -> Section {
    let section = Section::new("gap", format!("Why more was reserved than in use on cuda:{device}"));
    let line = format!("with {}: {}", simulated.figures.named(), gap::in_words(found));
    let section = gap::taken_apart(section.line(Mood::Note, line), &[(*device, found)]);
    match found.isolated + found.cached + found.stranded {
        0 => section,
        _ => section.line(Mood::Note, gap::SIMULATED),
    }
}
