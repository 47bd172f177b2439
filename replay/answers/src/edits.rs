//! `gputrace whatif`: the same program with another optimizer, other gradients, activations, precision or layout.

use gputrace_analyse::roles::{Places, Role, places};
use gputrace_report::model::{Mood, Part, Section, Table, Value};
use gputrace_schemas::event::{Bytes, StackId};
use gputrace_sim::bytes::iec;
use gputrace_sim::cores::{both, on_all_cores};
use gputrace_sim::edits::{Changes, Edits, End, Known, Phase, Program, Purpose, Sure, Understood, Unfit};
use gputrace_sim::ops::{AllocId, OpStream};
use gputrace_sim::simulator::Outcome;
use gputrace_sim::whatif::Laboratory;
use gputrace_trace::import::Trace;
use gputrace_trace::source::Source;
use rustc_hash::FxHashMap;
use serde_json::{Value as Json, json};

use super::Reply;
use super::reproduce::Lived;
use super::whatif::{Bench, Machine, Totals, named};

/// What the trace knows about each request of a stream: roles, and the parts of a training step.
///
/// # Errors
/// Why that is not known.
pub fn understood(source: &Source, stream: &OpStream) -> Result<Understood, String> {
    let lived = Lived::of(source, stream).ok_or(
        "its requests are not blocks of PyTorch's allocator: `whatif` needs a training run of PyTorch",
    )?;
    Ok(understood_from(&lived, source, stream))
}

/// The same, where the lives of its blocks are known.
pub(super) fn understood_from(lived: &Lived, source: &Source, stream: &OpStream) -> Understood {
    let unknown = Known { purpose: Purpose::Other, phase: Phase::Outside, time: 0 };
    let mut of = vec![unknown; stream.allocations.len()];
    let mut seen: FxHashMap<StackId, Places> = FxHashMap::default();
    let mut births: FxHashMap<u32, AllocId> = FxHashMap::default();
    for (id, life, role) in lived.requests() {
        let places = *seen.entry(life.stack).or_insert_with(|| places(source.definitions(), life.stack));
        of[id.0 as usize] = Known { purpose: purpose(role), phase: phase(places), time: life.since.0 };
        births.insert(life.born, id);
    }
    let device = i16::try_from(stream.device).unwrap_or(i16::MAX);
    let passes = lived.roles.passes.get(&device).into_iter().flatten();
    let passes = passes.filter_map(|(first, last)| Some((*births.get(first)?, *births.get(last)?)));
    Understood { of, passes: passes.collect() }
}

fn purpose(role: Role) -> Purpose {
    match role {
        Role::Parameters | Role::Weights => Purpose::Parameter,
        Role::Gradients => Purpose::Gradient,
        Role::Optimizer => Purpose::State,
        Role::Activations | Role::Serving => Purpose::Activation,
        Role::Temporaries => Purpose::Temporary,
        Role::KvCache => Purpose::Cache,
        Role::Workspaces => Purpose::Workspace,
        Role::Kept | Role::Before | Role::Unknown => Purpose::Other,
    }
}

/// The backward pass shows the stacks of the forward pass, too.
fn phase(places: Places) -> Phase {
    match places {
        Places { optimizer: true, .. } => Phase::Update,
        Places { backward: true, .. } => Phase::Backward,
        Places { forward: true, .. } => Phase::Forward,
        Places { model: true, .. } => Phase::Model,
        Places { .. } => Phase::Outside,
    }
}

/// An edit that saves less of the peak does not help.
const HELPS: f64 = 0.01;
/// A difference of the allocated peak that does not change how memory is reserved.
const AS_MUCH: f64 = 0.02;

/// What is asked of a program.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Edits that are made together.
    pub edits: Edits,
    /// Allocators, `NAME` or `NAME:OPTIONS`; none for the recorded one.
    pub policies: Vec<String>,
    /// What the trace may not say about the machine.
    pub machine: Machine,
}

/// Answers by device, and why there are none of other devices.
type OfDevices<T> = (Vec<(u32, T)>, Vec<String>);

/// What `answer` says of each device of PyTorch's allocator, and why it cannot of others.
///
/// # Errors
/// Why it cannot of any.
pub(super) fn of_devices<T>(
    trace: &Trace,
    answer: impl Fn(&OpStream) -> Result<T, String>,
) -> Result<OfDevices<T>, String> {
    let (mut found, mut refusals) = (vec![], vec![]);
    for stream in trace.devices.iter().filter(|stream| stream.settings.is_torch()) {
        match answer(stream) {
            Ok(answer) => found.push((stream.device, answer)),
            Err(why) => refusals.push(format!("cuda:{}: {why}", stream.device)),
        }
    }
    // A device that only holds a few buffers has no training step, and need not have one.
    if found.is_empty() {
        let none = "it has no requests of PyTorch's allocator".to_owned();
        return Err(refusals.into_iter().next().unwrap_or(none));
    }
    Ok((found, refusals))
}

/// Edits the program of a trace, device by device, and says what becomes of it.
///
/// # Errors
/// What cannot be answered, and why.
pub fn whatif(path: &str, source: &Source, trace: &Trace, asked: &Asked) -> Result<Reply, String> {
    let (devices, refusals) = of_devices(trace, |stream| Device::of(source, stream, asked))?;
    let outcomes: Vec<Json> = (devices.iter())
        .flat_map(|(_, device)| device.answers.iter().map(|answer| device.json(answer)))
        .collect();
    let sections = devices.iter().flat_map(|(_, device)| device.sections()).collect();
    let json = json!({
        "schema": "gputrace.whatif/1",
        "trace": path,
        "outcomes": outcomes,
        "refused": refusals,
    });
    Ok(Reply { part: Part { title: path.to_owned(), sections, ..Part::default() }, json })
}

/// The program with edits, and where the ends of what is not known differ also with the least and the most of it; the likeliest first.
pub(super) fn edited(program: &Program<'_>, edits: &Edits) -> Result<Vec<(OpStream, Changes)>, Unfit> {
    let apply = |end: End| edits.apply(program, end).map(|(program, changes)| (program.stream(), changes));
    let best = apply(End::Best)?;
    if best.1.sure() == Sure::Certain || edits.has_one_end() {
        return Ok(vec![best]);
    }
    let others = on_all_cores(2, |index| Some(apply([End::Least, End::Most][index])));
    std::iter::once(Ok(best)).chain(others).collect()
}

/// One device's program and what became of it.
struct Device {
    device: u32,
    recorded: Peaks,
    edits: Vec<String>,
    changes: Changes,
    sure: Sure,
    doubt: Option<String>,
    answers: Vec<Answered>,
}

/// The peaks of a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Peaks {
    reserved: u64,
    allocated: u64,
    requested: u64,
}

impl Peaks {
    fn of(outcome: &Outcome) -> Peaks {
        let books = &outcome.books;
        Peaks {
            reserved: books.reserved.peak,
            allocated: books.allocated.peak,
            requested: books.requested.peak,
        }
    }
}

/// The edited program under one allocator.
pub(super) struct Answered {
    policy: String,
    /// Standard fields of a replay.
    json: Json,
    peaks: Peaks,
    reserved: (u64, u64),
    pub(super) fits: bool,
    allocated: (u64, u64),
    remarks: Vec<(Mood, String)>,
}

impl Answered {
    /// Standard fields of a replay, with the ranges.
    pub(super) fn json(&self) -> Json {
        let mut json = self.json.clone();
        json["peak_reserved_range"] = json!([self.reserved.0, self.reserved.1]);
        json["peak_allocated_range"] = json!([self.allocated.0, self.allocated.1]);
        json
    }
}

impl Device {
    fn of(source: &Source, stream: &OpStream, asked: &Asked) -> Result<Device, String> {
        let understood = understood(source, stream)?;
        let program = Program::of(stream, &understood).map_err(|why| why.0)?;
        let (edited, bench) = both(|| edited(&program, &asked.edits), || Bench::new(stream, asked.machine));
        let (bench, edited) = (bench?, edited.map_err(|why| why.0)?);
        let recorded_policy = (stream.settings.policy, stream.settings.options.as_deref().unwrap_or(""));
        let policies = asked.policies.iter().map(|policy| policy.split_once(':').unwrap_or((policy, "")));
        let policies: Vec<_> =
            if asked.policies.is_empty() { vec![recorded_policy] } else { policies.collect() };
        let changes = edited[0].1.clone();
        let doubt = bench.doubt();
        let sure = if doubt.is_some() { Sure::Guess } else { changes.sure() };
        let as_recorded = bench.question(recorded_policy.0, recorded_policy.1);
        let recorded = bench.laboratory.guess(&as_recorded).map_err(|error| error.to_string())?;
        let mut answers = vec![];
        for (policy, options) in policies {
            answers.push(answered(&bench, &edited, (policy, options), sure)?);
        }
        Ok(Device {
            device: stream.device,
            recorded: Peaks::of(&recorded),
            edits: asked.edits.spelled(),
            changes,
            sure,
            doubt,
            answers,
        })
    }

    fn sections(&self) -> Vec<Section> {
        let bytes = |bytes: u64| Value::Bytes(Bytes(bytes));
        let name = self.edits.join(" ");
        let recorded = ("as recorded".to_owned(), self.recorded, None, "");
        let edited = self.answers.iter().map(|answer| {
            let what =
                if self.answers.len() > 1 { format!("{name}, {}", answer.policy) } else { name.clone() };
            (what, answer.peaks, Some(answer), self.sure.name())
        });
        let rows: Vec<_> = std::iter::once(recorded).chain(edited).collect();
        let table = Table::of(
            "outcomes",
            &rows,
            &[
                ("what", "program", &|(what, ..)| Value::text(what.clone())),
                ("peak_reserved_bytes", "reserved", &|(_, peaks, ..)| bytes(peaks.reserved)),
                ("least_reserved_bytes", "at least", &|(_, _, answer, _)| {
                    Value::bytes(answer.map(|it| it.reserved.0))
                }),
                ("most_reserved_bytes", "at most", &|(_, _, answer, _)| {
                    Value::bytes(answer.map(|it| it.reserved.1))
                }),
                ("peak_allocated_bytes", "allocated", &|(_, peaks, ..)| bytes(peaks.allocated)),
                ("sure", "sure", &|(.., sure)| Value::text(*sure)),
            ],
        );
        let title = format!("The program of cuda:{} with {name}", self.device);
        let mut section = Section::new("whatif", title).table(table);
        section = section.lines(self.answers.first().map(|answer| self.in_words(answer)));
        for answer in &self.answers {
            section = section.lines(answer.remarks.iter().cloned());
        }
        section = section.warn(self.doubt.clone());
        let changed = Table::of(
            "at_peak",
            &self.changes.at_peak,
            &[
                ("purpose", "purpose", &|(purpose, ..)| Value::text(*purpose)),
                ("recorded_bytes", "recorded", &|(_, before, _)| bytes(*before)),
                ("edited_bytes", "edited", &|(_, _, after)| bytes(*after)),
            ],
        );
        let mood = |sure: Sure| if sure == Sure::Guess { Mood::Warning } else { Mood::Note };
        let notes = self.changes.notes.iter().map(|(sure, text)| (mood(*sure), text.clone()));
        let cost = self.changes.recomputed_share.map(|share| {
            (
                Mood::Note,
                format!(
                    "{:.0} % of the forward pass is repeated, by the clock of the program's thread",
                    share * 100.0
                ),
            )
        });
        section = section.lines(cost);
        let changed =
            Section::new("at_peak", "Memory held at the peak, as requested").table(changed).lines(notes);
        vec![section, changed]
    }

    /// Whether it helps, and where the peak is.
    fn in_words(&self, answer: &Answered) -> (Mood, String) {
        let (before, after) = (self.recorded.allocated, answer.peaks.allocated);
        let (was, is) = self.changes.peak_in;
        let percent = |part: u64| format!("{:.1} %", 100.0 * part as f64 / before.max(1) as f64);
        let moved = if was == is {
            format!("the peak stays in {is}")
        } else {
            format!("the peak moves from {was} to {is}")
        };
        match before.checked_sub(after) {
            Some(saved) if saved as f64 >= before as f64 * HELPS => (
                Mood::Good,
                format!("saves {} of the allocated peak ({}); {moved}", iec(saved), percent(saved)),
            ),
            Some(_) => (Mood::Bad, format!("does not help: {moved}, which holds as much as before")),
            None => {
                let more = after - before;
                (
                    Mood::Bad,
                    format!("needs {} more at the allocated peak ({}); {moved}", iec(more), percent(more)),
                )
            }
        }
    }

    fn json(&self, answer: &Answered) -> Json {
        let mut json = answer.json();
        let notes = self.changes.notes.iter().map(|(sure, text)| json!({"sure": sure.name(), "text": text}));
        let at_peak = self.changes.at_peak.iter().map(|(purpose, before, after)| {
            json!({"purpose": purpose, "recorded_bytes": before, "edited_bytes": after})
        });
        json["device"] = self.device.into();
        json["edits"] = json!(self.edits);
        json["confidence"] = self.sure.name().into();
        json["recorded"] = json!({
            "peak_reserved_bytes": self.recorded.reserved,
            "peak_allocated_bytes": self.recorded.allocated,
            "peak_requested_bytes": self.recorded.requested,
        });
        json["peak_in"] = json!({"recorded": self.changes.peak_in.0, "edited": self.changes.peak_in.1});
        json["at_peak"] = at_peak.collect();
        json["notes"] = notes.collect();
        json["doubt"] = json!(self.doubt);
        json["recomputed_share"] = json!(self.changes.recomputed_share);
        json["moved_bytes"] = json!(self.changes.moved_bytes);
        json
    }
}

/// Replays the likeliest program with all that a replay says, and the others for their peaks.
pub(super) fn answered(
    bench: &Bench<'_>,
    edited: &[(OpStream, Changes)],
    (policy, options): (&str, &str),
    sure: Sure,
) -> Result<Answered, String> {
    let question = bench.question(policy, options);
    let best = Bench {
        stream: &edited[0].0,
        laboratory: Laboratory::of_prediction(&edited[0].0),
        self_check: bench.self_check.clone(),
        reactions: vec![],
        machine: bench.machine,
        totals: Totals::Reproduced,
    };
    let answer =
        best.laboratory.answer(&question).map_err(|error| format!("{}: {error}", named(&question)))?;
    let (mut reserved, peaks) = (answer.peak_reserved_range, Peaks::of(&answer.outcome));
    let mut allocated = (peaks.allocated, peaks.allocated);
    for (stream, _) in edited[1..].iter().filter(|_| sure != Sure::Certain) {
        let other = Laboratory::of_prediction(stream).guess(&question).map_err(|error| error.to_string())?;
        let other = Peaks::of(&other);
        reserved = (reserved.0.min(other.reserved), reserved.1.max(other.reserved));
        allocated = (allocated.0.min(other.allocated), allocated.1.max(other.allocated));
    }
    // Where as much is in use as before, as much may be reserved as before: how free memory is cut up depends on small tensors.
    if sure != Sure::Certain {
        let before = bench.laboratory.guess(&question).map_err(|error| error.to_string())?;
        let before = Peaks::of(&before);
        if before.allocated.abs_diff(peaks.allocated) as f64 <= AS_MUCH * before.allocated as f64 {
            reserved = (reserved.0.min(before.reserved), reserved.1.max(before.reserved));
        }
    }
    let margins = edited[0].1.margins(sure);
    let simulated = best.simulated(question, answer);
    Ok(Answered {
        policy: named(&simulated.question),
        fits: simulated.fits(),
        json: simulated.json(),
        peaks,
        reserved: scaled(reserved, margins.reserved),
        allocated: scaled(allocated, margins.allocated),
        remarks: simulated.remarks(),
    })
}

fn scaled((low, high): (u64, u64), by: f64) -> (u64, u64) {
    ((low as f64 * (1.0 - by)) as u64, (high as f64 * (1.0 + by)).ceil() as u64)
}
