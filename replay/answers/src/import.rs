//! `gputrace import`: what a snapshot holds and whether it is understood.

use gputrace_sim::ops::{History, Op, OpStream};
use gputrace_sim::whatif::Laboratory;
use serde_json::{Value as Json, json};

use super::Reply;
use super::whatif::{self_check, self_check_json};
use gputrace_report::model::{Mood, Part, Section, Value};
use gputrace_trace::import::Trace;

/// What a trace holds.
#[must_use]
pub fn contents(path: &str, trace: &Trace) -> Reply {
    let (mut sections, devices): (Vec<Section>, Vec<Json>) = trace.devices.iter().map(device).unzip();
    if !trace.notes.is_empty() {
        let section = Section::new("notes", "How it was read");
        sections.push(section.lines(trace.notes.iter().map(|note| (Mood::Note, note.clone()))));
    }
    let json =
        json!({"schema": "gputrace.import/1", "trace": path, "notes": trace.notes, "devices": devices});
    Reply { part: Part { title: path.to_owned(), sections, ..Part::default() }, json }
}

fn device(stream: &OpStream) -> (Section, Json) {
    let history = match &stream.history {
        History::Complete => "complete".into(),
        History::StartsLate => format!("starts late, with {} allocations live", stream.initial_allocs.len()),
        History::Broken(why) => format!("cannot be replayed: {why}"),
    };
    let check = Laboratory::new(stream).ok().map(|laboratory| laboratory.self_check(None));
    let n_trims = stream.ops.iter().filter(|op| **op == Op::Trim).count();
    let json = json!({
        "device": stream.device,
        "n_requests": stream.n_requests(),
        "n_streams": stream.streams.len(),
        "n_pools": stream.pools.len(),
        "n_driver_calls": stream.driver.len(),
        "n_trims": n_trims,
        "n_ooms": stream.ooms.len(),
        "history": history,
        "self_check": check.as_ref().map(self_check_json),
    });
    let count = |count: usize| Value::Count(count as u64);
    let section = Section::new("device", format!("cuda:{}", stream.device))
        .fact("n_requests", "requests", count(stream.n_requests()))
        .fact("n_streams", "streams", count(stream.streams.len()))
        .fact("n_pools", "pools", count(stream.pools.len()))
        .fact("n_driver_calls", "driver calls", count(stream.driver.len()))
        .fact("n_trims", "cache flushes", count(n_trims))
        .fact("n_ooms", "out-of-memory errors", count(stream.ooms.len()))
        .fact("history", "history", Value::text(history));
    (if let Some(check) = &check { self_check(section, check) } else { section }, json)
}
