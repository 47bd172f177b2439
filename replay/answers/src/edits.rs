//! `gputrace whatif`: the same program with another optimizer, other gradients, activations, precision or layout.

use gputrace_analyse::roles::{Places, Role, places};
use gputrace_report::model::{Mood, Part, Section, Table, Value};
use gputrace_schemas::event::{Bytes, StackId};
use gputrace_sim::bytes::iec;
use gputrace_sim::cores::{both, on_all_cores};
use gputrace_sim::edits::{Changes, Edits, End, Known, Phase, Program, Purpose, Sure, Understood, Unfit};
use gputrace_sim::ops::{AllocId, OpStream};
use gputrace_sim::simulator::Outcome as Replayed;
use gputrace_sim::whatif::Laboratory;
use gputrace_trace::import::Trace;
use gputrace_trace::source::Source;
use rustc_hash::FxHashMap;
use serde::Serialize;

use super::Reply;
use super::plans::{Plan, Planned};
use super::reproduce::Lived;
use super::whatif::{Bench, Figures, Machine, Totals, named};

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
pub fn whatif(path: &str, source: &Source, trace: &Trace, asked: &Asked) -> Result<Reply<Answer>, String> {
    let (devices, refused) = of_devices(trace, |stream| Device::of(source, stream, asked))?;
    let sections = devices.iter().flat_map(|(_, device)| device.sections()).collect();
    let outcomes = devices.into_iter().flat_map(|(_, device)| device.outcomes()).collect();
    let answer = Answer { trace: path.to_owned(), plan: None, outcomes, refused };
    Ok(Reply { part: Part { title: path.to_owned(), sections, ..Part::default() }, answer })
}

/// The same program under edits, or plans that fit a limit.
#[derive(Serialize)]
#[serde(tag = "schema", rename = "gputrace.whatif/1")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Answer {
    pub(super) trace: String,
    #[serde(flatten)]
    pub(super) plan: Option<Plan>,
    pub(super) outcomes: Vec<Outcome>,
    /// Devices whose program cannot be edited, and why.
    pub(super) refused: Vec<String>,
}

/// What became of an edited program under an allocator.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Outcome {
    pub(super) device: u32,
    /// Each as it is given to `gputrace whatif`.
    pub(super) edits: Vec<String>,
    /// How sure the edits are: docs/WHATIF.md.
    #[serde(with = "HowSure")]
    pub(super) confidence: Sure,
    #[serde(flatten)]
    pub(super) answer: Answered,
    /// The part of the forward pass's time that is repeated.
    pub(super) recomputed_share: Option<f64>,
    /// Bytes that go to the host and back in each step.
    pub(super) moved_bytes: Option<u64>,
    #[serde(flatten)]
    pub(super) edited: Option<Edited>,
    #[serde(flatten)]
    pub(super) planned: Option<Planned>,
}

/// How sure an edit is.
#[derive(Serialize)]
#[serde(remote = "Sure", rename_all = "lowercase")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
enum HowSure {
    Certain,
    Range,
    Guess,
}

/// What edits change.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Edited {
    /// The program without edits, replayed under the recorded setting.
    recorded: Peaks,
    peak_in: PeakIn,
    /// What is held at the two peaks.
    at_peak: Vec<AtPeak>,
    notes: Vec<Remark>,
    /// Why no answer about this trace is better than a guess.
    doubt: Option<String>,
}

/// The part of a training step in which most is requested.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct PeakIn {
    recorded: &'static str,
    edited: &'static str,
}

/// What is held for a purpose at the two peaks.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct AtPeak {
    purpose: &'static str,
    recorded_bytes: u64,
    edited_bytes: u64,
}

/// How sure a part of an edit is, and why.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Remark {
    #[serde(with = "HowSure")]
    sure: Sure,
    text: String,
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
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Peaks {
    peak_reserved_bytes: u64,
    peak_allocated_bytes: u64,
    peak_requested_bytes: u64,
}

impl Peaks {
    fn of(outcome: &Replayed) -> Peaks {
        let books = &outcome.books;
        Peaks {
            peak_reserved_bytes: books.reserved.peak,
            peak_allocated_bytes: books.allocated.peak,
            peak_requested_bytes: books.requested.peak,
        }
    }
}

/// The edited program under one allocator.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Answered {
    #[serde(flatten)]
    pub(super) figures: Figures,
    /// At least and at most.
    peak_allocated_range: (u64, u64),
    #[serde(skip)]
    remarks: Vec<(Mood, String)>,
}

impl Device {
    fn of(source: &Source, stream: &OpStream, asked: &Asked) -> Result<Device, String> {
        let understood = understood(source, stream)?;
        let program = Program::of(stream, &understood).map_err(|why| why.0)?;
        let recorded_policy = (stream.settings.policy, stream.settings.options.as_deref().unwrap_or(""));
        let replay_recorded = || {
            let bench = Bench::new(stream, asked.machine)?;
            let as_recorded = bench.question(recorded_policy.0, recorded_policy.1);
            let recorded = bench.laboratory.guess(&as_recorded).map_err(|error| error.to_string())?;
            Ok::<_, String>((bench, recorded))
        };
        let (edited, recorded) = both(|| edited(&program, &asked.edits), replay_recorded);
        let ((bench, recorded), edited) = (recorded?, edited.map_err(|why| why.0)?);
        let policies = asked.policies.iter().map(|policy| policy.split_once(':').unwrap_or((policy, "")));
        let policies: Vec<_> =
            if asked.policies.is_empty() { vec![recorded_policy] } else { policies.collect() };
        let changes = edited[0].1.clone();
        let doubt = bench.doubt();
        let sure = if doubt.is_some() { Sure::Guess } else { changes.sure() };
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
        let Peaks { peak_reserved_bytes, peak_allocated_bytes, .. } = self.recorded;
        let recorded = ("as recorded".to_owned(), (peak_reserved_bytes, peak_allocated_bytes), None, "");
        let edited = self.answers.iter().map(|Answered { figures, .. }| {
            let what =
                if self.answers.len() > 1 { format!("{name}, {}", figures.named()) } else { name.clone() };
            let peaks = (figures.peak_reserved_bytes, figures.peak_allocated_bytes);
            (what, peaks, Some(figures.peak_reserved_range), self.sure.name())
        });
        let rows: Vec<_> = std::iter::once(recorded).chain(edited).collect();
        let table = Table::of(
            "outcomes",
            &rows,
            &[
                ("what", "program", &|(what, ..)| Value::text(what.clone())),
                ("peak_reserved_bytes", "reserved", &|(_, peaks, ..)| bytes(peaks.0)),
                ("least_reserved_bytes", "at least", &|(_, _, range, _)| Value::bytes(range.map(|it| it.0))),
                ("most_reserved_bytes", "at most", &|(_, _, range, _)| Value::bytes(range.map(|it| it.1))),
                ("peak_allocated_bytes", "allocated", &|(_, peaks, ..)| bytes(peaks.1)),
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
        let (before, after) = (self.recorded.peak_allocated_bytes, answer.figures.peak_allocated_bytes);
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

    fn outcomes(self) -> Vec<Outcome> {
        let Device { device, recorded, edits, changes, sure, doubt, answers } = self;
        let Changes { notes, at_peak, peak_in, recomputed_share, moved_bytes, .. } = changes;
        let at_peak = at_peak.into_iter().map(|(purpose, recorded_bytes, edited_bytes)| AtPeak {
            purpose,
            recorded_bytes,
            edited_bytes,
        });
        let edited = Edited {
            recorded,
            peak_in: PeakIn { recorded: peak_in.0, edited: peak_in.1 },
            at_peak: at_peak.collect(),
            notes: notes.into_iter().map(|(sure, text)| Remark { sure, text }).collect(),
            doubt,
        };
        let outcome = |answer: Answered| Outcome {
            device,
            edits: edits.clone(),
            confidence: sure,
            answer,
            recomputed_share,
            moved_bytes,
            edited: Some(edited.clone()),
            planned: None,
        };
        answers.into_iter().map(outcome).collect()
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
        warnings: vec![],
        machine: bench.machine,
        totals: Totals::Reproduced,
    };
    let others: &[_] = if sure == Sure::Certain { &[] } else { &edited[1..] };
    let replay = |index: usize| match index.checked_sub(1) {
        None => best.laboratory.answer(&question).map(|answer| (Peaks::of(&answer.outcome), Some(answer))),
        Some(other) => {
            let outcome = Laboratory::of_prediction(&others[other].0).guess(&question);
            outcome.map(|outcome| (Peaks::of(&outcome), None))
        }
    };
    let replayed = on_all_cores(1 + others.len(), |index| Some(replay(index)));
    let replayed: Vec<_> = replayed
        .into_iter()
        .collect::<Result<_, _>>()
        .map_err(|error| format!("{}: {error}", named(&question)))?;
    let mut replayed = replayed.into_iter();
    let Some((peaks, Some(answer))) = replayed.next() else {
        return Err(format!("{}: its replay did not end", named(&question)));
    };
    let mut reserved = answer.peak_reserved_range;
    let mut allocated = (peaks.peak_allocated_bytes, peaks.peak_allocated_bytes);
    for (other, _) in replayed {
        reserved = with(reserved, other.peak_reserved_bytes);
        allocated = with(allocated, other.peak_allocated_bytes);
    }
    // Where as much is in use as before, as much may be reserved as before: how free memory is cut up depends on small tensors.
    if sure != Sure::Certain {
        let before = bench.laboratory.guess(&question).map_err(|error| error.to_string())?;
        let (before, now) = (Peaks::of(&before), peaks.peak_allocated_bytes);
        let was = before.peak_allocated_bytes;
        if was.abs_diff(now) as f64 <= AS_MUCH * was as f64 {
            reserved = with(reserved, before.peak_reserved_bytes);
        }
        let changes = &edited[0].1;
        if changes.may_free_nothing {
            reserved = with(reserved, before.peak_reserved_bytes);
            allocated = with(allocated, before.peak_allocated_bytes);
        }
        reserved.0 = reserved.0.saturating_sub(changes.less);
        allocated.0 = allocated.0.saturating_sub(changes.less);
    }
    let margins = edited[0].1.margins(sure);
    let simulated = best.simulated(question, answer);
    let remarks = simulated.remarks();
    let mut figures = simulated.figures;
    figures.peak_reserved_range = scaled(reserved, margins.reserved);
    Ok(Answered { figures, peak_allocated_range: scaled(allocated, margins.allocated), remarks })
}

fn with((low, high): (u64, u64), other: u64) -> (u64, u64) {
    (low.min(other), high.max(other))
}

fn scaled((low, high): (u64, u64), by: f64) -> (u64, u64) {
    ((low as f64 * (1.0 - by)) as u64, (high as f64 * (1.0 + by)).ceil() as u64)
}
