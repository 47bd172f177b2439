//! What JAX, and others that use PJRT, held in their allocator's memory, what their executables need beside it, and why there
//! was not enough.

use gputrace_schemas::event::{Bytes, PjrtOrigin};

use super::{SectionEntry, device_name};
use crate::model::{Mood, Section, Table, Value};
use crate::summary::used_devices;
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::{DeviceBooks, Executable, PjrtBooks, PjrtOom};
use gputrace_trace::owners::JAX;
use gputrace_trace::words::{bytes, count, time};

pub(super) const ENTRY: SectionEntry = SectionEntry { build: |story| build(story).into_iter().collect() };
pub(super) const OOM: SectionEntry = SectionEntry { build: ran_out };

const EXECUTABLES: usize = 8;

fn build(story: &Story) -> Option<Section> {
    let used: Vec<_> = used_devices(story)
        .filter_map(|(ordinal, books)| Some((ordinal, books, books.pjrt.as_ref()?)))
        .filter(|(_, _, pjrt)| pjrt.n_made() > 0)
        .collect();
    if used.is_empty() {
        return None;
    }
    let name = |ordinal: &i16| Value::text(device_name(story, *ordinal));
    let held = Table::of(
        "buffers",
        &used,
        &[
            ("device", "device", &|(ordinal, ..)| name(ordinal)),
            ("peak_bytes", "buffers at most", &|(_, _, pjrt)| Value::Bytes(pjrt.buffers.peak())),
            ("peak_time_ns", "at", &|(_, _, pjrt)| Value::Time(story.since_start(pjrt.buffers.peak_time()))),
            ("most_bytes", "with temporaries", &|(_, _, pjrt)| {
                pjrt.most.as_ref().map_or(Value::Missing, |most| Value::Bytes(most.total()))
            }),
            ("allocator_bytes", "JAX's allocator holds", &|(_, books, _)| {
                Value::Bytes(allocator(story, books))
            }),
            ("live_bytes", "live at end", &|(_, _, pjrt)| Value::Bytes(pjrt.buffers.live().bytes)),
            ("executions", "executions", &|(_, _, pjrt)| Value::Count(pjrt.executions)),
        ],
    );
    let mut section = Section::new("jax", "JAX's buffers (PJRT)").table(held);
    for (ordinal, _, pjrt) in &used {
        section = section.lines(origins(&device_name(story, *ordinal), pjrt).map(|line| (Mood::Note, line)));
        if let Some(most) = &pjrt.most
            && let Some(executable) = story.ledger.executables().get(most.executable)
        {
            let text = format!(
                "{}: {} needed most: {} of buffers and {} of temporaries",
                device_name(story, *ordinal),
                executable.name,
                bytes(most.buffers),
                bytes(most.temporary)
            );
            section = section.line(Mood::Note, text);
        }
    }
    let table = executables(story);
    let section = if table.rows.is_empty() { section } else { section.table(table.keep(EXECUTABLES, 1)) };
    Some(section.warn(story.caveats()))
}

/// What JAX's allocator had of a device when it had most.
fn allocator(story: &Story, books: &DeviceBooks) -> Bytes {
    let owners = books.physical.owners();
    let jax = owners.filter(|part| story.ledger.sites.owner(part.id) == JAX);
    Bytes(jax.fold(0, |sum, part| sum.saturating_add(part.peak.0)))
}

fn origins(device: &str, pjrt: &PjrtBooks) -> impl Iterator<Item = String> {
    let made: Vec<_> = pjrt
        .made
        .iter()
        .map(|(origin, held)| format!("{} {}", count(held.objects), word(*origin, held.objects)))
        .collect();
    let donated = match pjrt.donated.objects {
        0 => String::new(),
        n => format!("; {} ({}) were donated to executions", count(n), bytes(pjrt.donated.bytes)),
    };
    let views = match pjrt.n_views {
        0 => String::new(),
        n => format!("; {} more are views of other memory", count(n)),
    };
    let unserved = (pjrt.unserved.objects > 0).then(|| {
        format!(
            "{device}: {} ({}) of a failed execution never had memory, and may be in \"at most\"",
            count(pjrt.unserved.objects),
            bytes(pjrt.unserved.bytes)
        )
    });
    std::iter::once(format!("{device}: buffers created: {}{donated}{views}", made.join(", "))).chain(unserved)
}

fn word(origin: PjrtOrigin, n: u64) -> &'static str {
    match (origin, n) {
        (PjrtOrigin::FromHost, _) => "from the host",
        (PjrtOrigin::Uninitialized, _) => "uninitialized",
        (PjrtOrigin::View, 1) => "view",
        (PjrtOrigin::View, _) => "views",
        (PjrtOrigin::Execute, 1) => "result of an execution",
        (PjrtOrigin::Execute, _) => "results of executions",
        (PjrtOrigin::Copy, 1) => "copy",
        (PjrtOrigin::Copy, _) => "copies",
        (PjrtOrigin::Transfer, _) => "transferred",
        (PjrtOrigin::Dependency, _) => "passed on",
        (PjrtOrigin::Compile | PjrtOrigin::Unknown, _) => "otherwise",
    }
}

/// Those with most temporaries first.
fn executables(story: &Story) -> Table {
    let mut all: Vec<&Executable> = story.ledger.executables().iter().collect();
    all.sort_by_key(|it| (std::cmp::Reverse((it.figures.temporary, it.executions)), it.name.clone()));
    let known = |bytes: Option<Bytes>| bytes.map_or(Value::Missing, Value::Bytes);
    Table::of(
        "executables",
        all,
        &[
            ("executable", "executable", &|it| Value::text(&*it.name)),
            ("temporary_bytes", "temporaries", &|it| known(it.figures.temporary)),
            ("argument_bytes", "arguments", &|it| known(it.figures.arguments)),
            ("output_bytes", "results", &|it| known(it.figures.outputs)),
            ("aliased_bytes", "in donated memory", &|it| known(it.figures.aliased)),
            ("executions", "executions", &|it| Value::Count(it.executions)),
            ("compiled", "compiled", &|it| Value::Count(it.n_compiled)),
            ("call_site", "first launched at", &|it| {
                it.site.map_or(Value::Missing, |site| Value::text(story.ledger.sites.site_name(site)))
            }),
        ],
    )
}

/// One section for each device on which JAX ran out.
fn ran_out(story: &Story) -> Vec<Section> {
    let failed = used_devices(story).filter_map(|(ordinal, books)| {
        let pjrt = books.pjrt.as_ref()?;
        let oom = pjrt.ooms.last()?;
        Some(failure(story, ordinal, books, pjrt, oom).warn(story.caveats()))
    });
    failed.collect()
}

fn failure(story: &Story, ordinal: i16, books: &DeviceBooks, pjrt: &PjrtBooks, oom: &PjrtOom) -> Section {
    let executable = oom.executable.and_then(|at| story.ledger.executables().get(at));
    let asked = oom.bytes.map_or_else(|| "memory".to_owned(), bytes);
    let by = executable.map_or_else(String::new, |it| format!(" for {}", it.name));
    let when = time(story.since_start(oom.time));
    let device = device_name(story, ordinal);
    let allocator = allocator(story, books);
    let rest = Bytes(allocator.0.saturating_sub(oom.buffers.0));
    let mut section = Section::new("jax_oom", "OUT OF MEMORY")
        .line(Mood::Bad, format!("JAX could not get {asked}{by} on {device} at {when}"))
        .fact("device", "device", Value::text(&*device))
        .fact("time_ns", "at", Value::Time(story.since_start(oom.time)))
        .fact("requested_bytes", "requested", oom.bytes.map_or(Value::Missing, Value::Bytes))
        .fact("buffers_bytes", "held by buffers", Value::Bytes(oom.buffers))
        .remark(
            "allocator_bytes",
            "held by JAX's allocator",
            Value::Bytes(allocator),
            format!("{} of it in no buffer: temporaries, and free", bytes(rest)),
        )
        .fact("tracked_bytes", "held by the process", Value::Bytes(oom.tracked));
    if let Some(temporary) = executable.and_then(|it| it.figures.temporary) {
        section = section.fact("temporary_bytes", "its temporaries", Value::Bytes(temporary));
    }
    let site = story.ledger.sites.site_name(oom.site);
    section = section.fact("call_site", "from", Value::text(site));
    if !oom.said.is_empty() {
        section = section.line(Mood::Note, format!("JAX said: {}", oom.said));
    }
    if pjrt.n_ooms > 1 {
        let text = format!("{} such errors on this device; this is the last", count(pjrt.n_ooms));
        section = section.line(Mood::Note, text);
    }
    match pjrt.n_made().saturating_sub(oom.made_before) {
        _ if story.is_running => section,
        0 => section.line(Mood::Note, "no buffer was created after it"),
        n => section.line(
            Mood::Note,
            format!("the program continued: {} more buffers were created after it", count(n)),
        ),
    }
}
