//! The driver's own figures, and the part of them that no call handed out: contexts, code, pools, and the unexplained rest.

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use gputrace_analyse::story::Story;
use gputrace_analyse::unaccounted::{Trend, trend};
use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_trace::ledger::{Cause, DeviceBooks, Sampled};
use gputrace_trace::words::{bytes, time};

/// The moments that matter.
pub(super) const ENTRY: SectionEntry =
    SectionEntry { build: |story| build(story, SHORT).into_iter().collect() };
/// The same with more of what it grew for.
pub(super) const WHOLE: SectionEntry =
    SectionEntry { build: |story| build(story, LONG).into_iter().collect() };

const SHORT: usize = 5;
const LONG: usize = 50;
/// Smaller steps of growth are the driver's bookkeeping.
const LEAST: Bytes = Bytes(2 << 20);

fn build(story: &Story, n_rows: usize) -> Option<Section> {
    let sampled: Vec<_> = sampled_devices(story).collect();
    let contexts = contexts(story, n_rows == LONG);
    let found = found(&story.ledger.health.notes);
    if sampled.is_empty() && contexts.rows.is_empty() && found.is_none() {
        return None;
    }
    let mut section = Section::new("driver_figures", "The driver's own figures (sampled from NVML)");
    for (ordinal, books) in &sampled {
        section = section.table(moments(story, *ordinal, books));
    }
    for (ordinal, books) in &sampled {
        section = section.table(growth(story, *ordinal, books).keep(n_rows, 1));
    }
    section = section.table(contexts);
    if let Some((mood, text)) = found {
        section = section.line(mood, text);
    }
    if sampled.is_empty() {
        return Some(section.warn(story.caveats()));
    }
    let note = "context, code, pools, graphs and peers are estimates: the increase in charged memory when the process created or loaded them; unaccounted is the signed remainder";
    section = section.line(Mood::Note, note);
    for (ordinal, books) in &sampled {
        section = section.warn(contexts_elsewhere(story, *ordinal, books));
        if let Some(trend) = trend(story, &books.samples) {
            let (mood, text) = in_words(&device_name(story, *ordinal), &trend);
            section = section.line(mood, text);
        }
    }
    Some(section.warn(story.caveats()))
}

/// How the recorder knows which of NVML's processes this one is, unless NVML knows it by its number: from
/// `nvml.process=WAY NUMBER`, or `nvml.process=unknown: WHY`.
fn found(notes: &[(Nanos, String)]) -> Option<(Mood, String)> {
    let noted = notes.iter().rev().find_map(|(_, note)| note.strip_prefix("nvml.process="))?;
    if let Some(why) = noted.strip_prefix("unknown: ") {
        let text = format!("the memory that the driver charged to this process is not known: {why}");
        return Some((Mood::Warning, text));
    }
    let of = |number: &str, why: &str| {
        let text = format!(
            "charged is NVML's figure of its process {number}, {why}; NVML knows this process by another number, as in containers"
        );
        Some((Mood::Note, text))
    };
    if let Some(number) = noted.strip_prefix("only process ") {
        return of(number, "the only one on a device where this process had memory");
    }
    of(
        noted.strip_prefix("by its changes ")?,
        "the one whose memory changed as allocations of this process did",
    )
}

/// Devices on which the process was charged anything: those too that it has nothing but a context on.
fn sampled_devices(story: &Story) -> impl Iterator<Item = (i16, &DeviceBooks)> {
    let devices = story.ledger.devices().iter().filter(|(_, books)| books.samples.first.is_some());
    devices.map(|(ordinal, books)| (*ordinal, books))
}

/// Contexts and where they were made; where there is one on one device, only if everything is wanted.
fn contexts(story: &Story, everything: bool) -> Table {
    let sites = &story.ledger.sites;
    let when = |time| Value::Time(story.since_start(time));
    let contexts: Vec<_> = story.ledger.contexts().collect();
    let mut table = Table::of(
        "contexts",
        &contexts,
        &[
            ("device", "device", &|it| Value::text(format!("cuda:{}", it.device))),
            ("context", "context", &|it| Value::text(if it.is_primary { "primary" } else { "separate" })),
            ("since_ns", "created at", &|it| when(it.since)),
            ("until_ns", "destroyed at", &|it| it.until.map_or(Value::Missing, when)),
            ("owner", "by", &|it| Value::text(sites.owner(it.owner))),
            ("call_site", "from", &|it| Value::text(sites.site_name(it.site))),
        ],
    );
    if table.rows.len() < 2 && !everything {
        table.rows.clear();
    }
    table
}

/// The samples at the moments that matter, one row each.
fn moments(story: &Story, ordinal: i16, books: &DeviceBooks) -> Table {
    let mut columns = vec![
        ("device", "device"),
        ("moment", "moment"),
        ("time_ns", "at"),
        ("process_bytes", "charged"),
        ("tracked_bytes", "allocated"),
        ("rounding_bytes", "page rounding"),
    ];
    let used = |cause: &Cause| {
        let largest = books.samples.kept.iter().map(|sampled| sampled.of(*cause)).max();
        largest.is_some_and(|bytes| bytes.0 > 0) || *cause == Cause::Context || *cause == Cause::Code
    };
    let causes: Vec<Cause> = Cause::ALL.into_iter().filter(used).collect();
    columns.extend(causes.iter().map(|cause| (key(*cause), cause.name())));
    columns.push(("unaccounted_bytes", "unaccounted"));
    let mut table = Table::new("driver_figures", &columns);
    for (moment, sampled) in gputrace_analyse::unaccounted::moments(story, books) {
        let mut row = vec![
            Value::text(format!("cuda:{ordinal}")),
            Value::text(moment),
            Value::Time(story.since_start(sampled.time)),
            Value::bytes(sampled.process_used.map(|bytes| bytes.0)),
            Value::Bytes(sampled.tracked),
            Value::Bytes(sampled.rounding),
        ];
        row.extend(causes.iter().map(|cause| Value::Bytes(sampled.of(*cause))));
        row.push(sampled.unaccounted().map_or(Value::Missing, Value::Difference));
        table.rows.push(row);
    }
    table
}

fn key(cause: Cause) -> &'static str {
    match cause {
        Cause::Context => "context_bytes",
        Cause::Code => "code_bytes",
        Cause::Graph => "graph_bytes",
        Cause::Pool => "pool_bytes",
        Cause::Peer => "peer_bytes",
    }
}

/// When the charge grew beyond what was handed out, and what was going on.
fn growth(story: &Story, ordinal: i16, books: &DeviceBooks) -> Table {
    let sites = &story.ledger.sites;
    Table::of(
        "hidden_growth",
        books.samples.steps.iter().filter(|step| step.bytes >= LEAST),
        &[
            ("device", "device", &|_| Value::text(format!("cuda:{ordinal}"))),
            ("bytes", "grew by", &|it| Value::Bytes(it.bytes)),
            ("time_ns", "at", &|it| Value::Time(story.since_start(it.to))),
            ("cause", "for (estimate)", &|it| {
                Value::text(it.cause.map_or("nothing that was seen", Cause::name))
            }),
            ("owner", "by", &|it| it.owner.map_or(Value::Missing, |owner| Value::text(sites.owner(owner)))),
            ("times", "calls", &|it| Value::Count(it.times)),
            ("call_site", "first from", &|it| {
                let site = it.site.and_then(|site| sites.site(site));
                site.map_or(Value::Missing, |site| Value::text(site.to_string()))
            }),
        ],
    )
}

/// A context that the process holds on a device and hardly uses: often a mistake.
fn contexts_elsewhere(story: &Story, ordinal: i16, books: &DeviceBooks) -> Option<String> {
    let last: Sampled = books.samples.largest?;
    let is_idle = books.allocs == 0 && books.torch.is_none();
    let context = story.ledger.contexts().find(|context| context.device == ordinal)?;
    is_idle.then(|| {
        let site = story.ledger.sites.site_name(context.site);
        format!(
            "this process holds a context on {} ({}) and never allocated there; it was created at {} from {site}",
            device_name(story, ordinal),
            bytes(last.process_used.unwrap_or_default()),
            time(story.since_start(context.since)),
        )
    })
}

fn in_words(device: &str, trend: &Trend) -> (Mood, String) {
    let size = |bytes: i64| {
        let sign = if bytes < 0 { "-" } else { "" };
        format!("{sign}{}", self::bytes(Bytes(bytes.unsigned_abs())))
    };
    let text = format!(
        "{device}: unaccounted: {}{} at the peak, {} at the end; {}",
        trend.first_step.map_or_else(String::new, |first| format!("{} after the first step, ", size(first))),
        size(trend.peak),
        size(trend.end),
        match trend.bytes_per_hour {
            0 => "it does not grow after the warm-up".to_owned(),
            rate => format!("{} per hour after the warm-up", size(rate)),
        },
    );
    let mood = if trend.is_growing || trend.is_negative { Mood::Warning } else { Mood::Note };
    let why = match (trend.is_growing, trend.is_negative) {
        (true, _) => "; it keeps growing: something takes memory that is not recorded",
        (false, true) => "; less is charged than was allocated: frees were not seen, or memory is shared",
        (false, false) => "",
    };
    (mood, text + why)
}
