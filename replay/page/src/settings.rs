//! What-ifs: the same requests under other settings of PyTorch's allocator, on the axis of the recorded ones.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_sim::ops::OpStream;
use gputrace_sim::tune;
use gputrace_sim::whatif::{Laboratory, Question};
use serde_json::{Value as Json, json};

use super::columns::Columns;
use super::watch::{Device, MOST_REQUESTS};
use gputrace_analyse::doubts::doubt;
use gputrace_trace::import::Requests;

/// Points of a curve.
const MOST_POINTS: usize = 4000;

/// One device under every setting that was tried.
pub(super) struct Settings {
    device: i16,
    /// Requests in one point, of which the highest counts.
    stretch: usize,
    /// When each point begins.
    times: Vec<Nanos>,
    allocated: Vec<Bytes>,
    reserved: Vec<Bytes>,
    tried: Vec<Tried>,
    /// Why the replay is not known to be what was recorded.
    doubt: Option<String>,
}

struct Tried {
    options: String,
    peak: u64,
    is_recorded: bool,
    runs_out: bool,
    reserved: Vec<Bytes>,
}

/// Tries what people are advised to set, where the trace is short enough.
pub(super) fn of(trace: &dyn Requests, devices: &BTreeMap<i16, &Device>) -> Vec<Settings> {
    let is_short = |device: &Device| !device.requests.is_empty() && !device.has_more_requests;
    if !devices.values().copied().any(is_short) {
        return vec![];
    }
    // What cannot be imported is said by `gputrace tune`.
    let Ok(trace) = trace.requests() else { return vec![] };
    let of_device = |stream: &OpStream| {
        let ordinal = i16::try_from(stream.device).ok()?;
        settings(ordinal, devices.get(&ordinal).copied().filter(|device| is_short(device))?, stream)
    };
    trace.devices.iter().filter_map(of_device).collect()
}

fn settings(ordinal: i16, device: &Device, stream: &OpStream) -> Option<Settings> {
    let requests = &device.requests;
    // Only then is the n-th request of the replay known to be the n-th of the books.
    let n_served = stream.ops.iter().filter(|op| matches!(op, gputrace_sim::ops::Op::Alloc(_))).count();
    if !stream.settings.is_torch() || n_served != requests.len() || n_served > MOST_REQUESTS {
        return None;
    }
    let laboratory = Laboratory::new(stream).ok()?;
    let check = laboratory.self_check(None);
    let recorded = stream.settings.options.as_deref().unwrap_or_default();
    let stretch = requests.len().div_ceil(MOST_POINTS).max(1);
    let mut tried = vec![];
    for options in tune::advised(check.torch_version, recorded).ok()? {
        let question = Question::torch(check.torch_version, &options);
        let Ok((outcome, reserved)) = laboratory.reserved_over_time(&question) else { continue };
        tried.push(Tried {
            peak: outcome.books.reserved.peak,
            is_recorded: options == recorded,
            runs_out: !outcome.fits(),
            reserved: highest(reserved.into_iter().map(Bytes), stretch),
            options,
        });
    }
    Some(Settings {
        device: ordinal,
        stretch,
        times: requests.iter().step_by(stretch).map(|(time, ..)| *time).collect(),
        allocated: highest(requests.iter().map(|(_, allocated, _)| *allocated), stretch),
        reserved: highest(requests.iter().map(|(.., reserved)| *reserved), stretch),
        tried,
        doubt: doubt(stream, &check),
    })
}

fn highest(values: impl Iterator<Item = Bytes>, stretch: usize) -> Vec<Bytes> {
    let values: Vec<Bytes> = values.collect();
    values.chunks(stretch).map(|values| values.iter().copied().max().unwrap_or_default()).collect()
}

impl Settings {
    pub(super) fn write(&self, start: u64, columns: &mut Columns) -> Json {
        let curve = |curve: &[Bytes], columns: &mut Columns| columns.add(curve.iter().map(|bytes| bytes.0));
        let tried: Vec<Json> = self
            .tried
            .iter()
            .map(|it| {
                json!({
                    "options": it.options,
                    "peak_reserved_bytes": it.peak,
                    "is_recorded": it.is_recorded,
                    "runs_out": it.runs_out,
                    "reserved": curve(&it.reserved, columns),
                })
            })
            .collect();
        json!({
            "device": self.device,
            "stretch": self.stretch,
            "doubt": self.doubt,
            "time": columns.add(self.times.iter().map(|time| time.0.saturating_sub(start))),
            "allocated": curve(&self.allocated, columns),
            "reserved": curve(&self.reserved, columns),
            "tried": tried,
        })
    }
}
