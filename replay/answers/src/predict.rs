//! `gputrace predict`: what a program would need at another batch, length or size, from runs at some.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;
use gputrace_sim::bytes::iec;
use gputrace_sim::ops::{History, OpStream};
use gputrace_sim::predict::law::{Powers, Standing};
use gputrace_sim::predict::{Model, Open, Prediction, Run, Share, Threads, Why, largest as largest_of};
use gputrace_sim::whatif::{Confidence, Laboratory, Question};
use serde::Serialize;

use super::Reply;
use super::checked::Checked;
use super::curve::{self, Measured, Needed, Predicted, Room};
use super::whatif::{Bench, CallSite, Machine, SelfCheck, Simulated, Totals, Warning, named};
use gputrace_report::model::{Mood, Part, Section, Table, Value};
use gputrace_trace::import::Trace;
use gputrace_trace::words::{count, release};

mod fit;

pub use fit::Fit;

/// Rows of what grows with what, call sites of each, and lines of what is not known.
const MOST_SHARES: usize = 8;
const MOST_SITES: usize = 3;
const MOST_OPEN: usize = 6;
/// How far a peak may lie from what the laws say where a compiler generates other code for each size. Chosen: the largest error seen, of a
/// compiled GPT at twelve times the batch, was 9.2 %.
const GENERATED: f64 = 1.15;
/// The same for every other doubt. Chosen; where cuDNN was told how much memory is free, 18 answers about programs on an H100 lay at most 5.4 %
/// beyond the replays, and ranges reach 11 % further there in any case.
const DOUBTED: f64 = 1.05;
/// Nobody plans with a range whose ends are so many times each other.
const TOO_WIDE: f64 = 2.0;
/// Why a program with convolutions is never certain far from its runs.
const MAY_CHOOSE: &str =
    "libraries choose convolution algorithms by size, and none of the runs is near this one";
/// Runs of one program have more in common than this part.
const MOST_UNKNOWN: f64 = 0.9;

/// Of one program, more of what is live at the peak follows laws than not. Chosen: of six pairs of different programs that were recorded without
/// stacks 76 to 99 % follow none, and of 44 programs on an H100 27 % at most.
const MOST_LAWLESS: f64 = 0.75;
/// Where stacks are known, what is of one program is in every run for the most part.
const LEAST_MATCHED: f64 = 0.5;

/// Names and values, in the order in which they were given.
pub type Values = Vec<(String, u64)>;

/// A run that was recorded.
pub struct Recorded {
    /// The file, for people.
    pub path: String,
    /// The value of each variable.
    pub values: Values,
    /// The requests to its devices.
    pub trace: Trace,
    /// The names of its GPUs, where the trace holds them.
    pub gpus: Vec<String>,
}

/// What to predict.
#[derive(Default)]
pub struct Asked {
    /// Points; variables that are left out are those of the largest run.
    pub at: Vec<Values>,
    /// The variable of which to find the largest value that fits.
    pub fit: Option<String>,
    /// Allocators, `NAME` or `NAME:OPTIONS`; none for the recorded one.
    pub policies: Vec<String>,
    /// What the traces may not say about the machine.
    pub machine: Machine,
    /// `fit` requests the recorded setting alone, and not for those that are advised.
    pub is_as_recorded: bool,
    /// Values of `fit` that were run under the recorded setting.
    pub checked: Option<Checked>,
}

/// What a larger run needs, and the largest that fits. Of a job: of the rank that needs most, with what all ranks come to.
#[derive(Serialize)]
#[serde(tag = "schema", rename = "gputrace.predict/1")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Answer {
    /// What is predicted of a process.
    #[serde(flatten)]
    pub process: OfProcess,
    /// Of a job.
    #[serde(flatten)]
    pub(super) job: Option<OfJob>,
}

impl Answer {
    /// What is predicted of a process that is not part of a job.
    #[must_use]
    pub fn of_process(Reply { part, answer: process }: Reply<OfProcess>) -> Reply<Answer> {
        Reply { part, answer: Answer { process, job: None } }
    }
}

/// What is predicted of a process.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct OfProcess {
    /// Of a job: the rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rank: Option<u32>,
    variables: Vec<String>,
    runs: Vec<OfRun>,
    /// The run that is continued.
    pub base: String,
    /// Predictions for `--at`, one per setting.
    pub(super) outcomes: Vec<Outcome>,
    /// Results of `--fit`, one per setting.
    pub fits: Vec<Fit>,
}

/// What is predicted of each rank of a job.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct OfJob {
    /// Of a job: each rank with a trace of every run.
    pub(super) ranks: Vec<OfProcess>,
    /// Of a job: which ranks lack a trace of which run.
    pub(super) missing_ranks: Vec<Missing>,
}

/// Ranks without a trace of a run.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Missing {
    pub(super) run: String,
    pub(super) ranks: Vec<u32>,
}

/// A run that was recorded.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct OfRun {
    trace: String,
    values: BTreeMap<String, u64>,
    /// What each device of the run had reserved at most, as recorded.
    devices: Vec<curve::OfDevice>,
}

/// What becomes of the program at a point under an allocator.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Outcome {
    /// Of a job: the rank that needs most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rank: Option<u32>,
    device: u32,
    pub(super) values: BTreeMap<String, u64>,
    #[serde(skip)]
    at: Vec<u64>,
    #[serde(flatten)]
    pub(super) simulated: Simulated,
    #[serde(skip)]
    remarks: Vec<(Mood, String)>,
    pub(super) certain: bool,
    pub(super) sure: Sure,
    #[serde(flatten)]
    pub(super) needed: Needed,
    /// The range without the doubts that make it wider.
    peak_reserved_replays: (u64, u64),
    pub(super) peak_allocated_range: (u64, u64),
    pub(super) fits_at_best: bool,
    pub(super) fits_at_worst: bool,
    recorded_device_is_too_small: bool,
    /// More than the memory of the card on which it was recorded.
    #[serde(skip)]
    too_large_for: Option<u64>,
    /// The runs decide it, to within 1 %.
    #[serde(skip)]
    is_decided: bool,
    #[serde(skip)]
    may_choose: bool,
    pub(super) reasons: Vec<String>,
    /// What would narrow a range that is more than twice as high as low.
    too_wide: Option<String>,
    open: Vec<Unknown>,
    grows: Vec<Grows>,
    requests: Requests,
    warnings: Vec<Warning>,
    self_check: SelfCheck,
}

/// How sure an answer is, in a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(into = "&'static str")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schemas", schemars(extend("enum" = ["certain", "range", "bound", "guess"])))]
pub(super) enum Sure {
    Certain,
    Range,
    Bound,
    Guess,
}

impl From<Sure> for &'static str {
    fn from(sure: Sure) -> &'static str {
        match sure {
            Sure::Certain => "certain",
            Sure::Range => "range",
            Sure::Bound => "bound",
            Sure::Guess => "guess",
        }
    }
}

/// A part of what is not known.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Unknown {
    kind: &'static str,
    text: String,
    n_requests: usize,
    bytes_range: (u64, u64),
    call_site: Option<CallSite>,
}

/// What of the memory at the peak grows with what.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Grows {
    per: String,
    unit_bytes: Option<f64>,
    bytes: u64,
    sites: Vec<Site>,
}

/// The part of a call site.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Site {
    call_site: Option<CallSite>,
    unit_bytes: f64,
    bytes: u64,
    number: u64,
}

/// Requests of the run that is continued, and how many were found in others.
#[derive(Clone, Copy, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Requests {
    base: usize,
    in_every_run: usize,
    only_in_others: usize,
}

/// Predicts what a program requests, device by device, and what becomes of it.
///
/// # Errors
/// What cannot be predicted, and why.
pub fn predict(recorded: &[Recorded], asked: &Asked) -> Result<Reply<OfProcess>, String> {
    let names = names(recorded)?;
    let points = recorded.iter().map(|run| ordered(&names, &run.values, None, &run.path));
    let points = points.collect::<Result<Vec<_>, _>>()?;
    let mut ordinals: Vec<u32> =
        recorded.iter().flat_map(|run| run.trace.devices.iter().map(|stream| stream.device)).collect();
    ordinals.sort_unstable();
    ordinals.dedup();
    let (mut sections, mut outcomes, mut fits, mut base) = (vec![], vec![], vec![], None);
    for ordinal in ordinals {
        let streams = recorded.iter().map(|run| device(run, ordinal)).collect::<Result<Vec<_>, _>>()?;
        let measured = points.iter().zip(&streams).map(|(at, stream)| Measured::of(at, stream)).collect();
        let runs = points.iter().zip(&streams).map(|(at, stream)| Run { at: at.clone(), stream });
        let runs: Vec<Run> = runs.collect();
        let of_base = streams[largest_of(&runs)];
        let (model, bench) = std::thread::scope(|scope| {
            let bench = scope.spawn(|| Bench::new(of_base, asked.machine));
            (Model::on(runs, threads(recorded)), bench.join())
        });
        let model = model.map_err(|why| format!("cuda:{ordinal}: {why}"))?;
        base.get_or_insert(model.base_index());
        let unknown = model.unknown_share();
        if unknown > MOST_UNKNOWN {
            return Err(format!(
                "the runs look like different programs: {:.0} % of the memory that the largest run requests on cuda:{ordinal} is in no other run; name runs of one program, recorded with stacks",
                unknown * 100.0
            ));
        }
        let bench = bench.map_err(|_| format!("cuda:{ordinal}: the replay of the largest run failed"))??;
        let doubts = doubts(recorded, &streams, &bench, &model);
        let oracle = Oracle { names: &names, model: &model, bench: &bench, measured, doubts };
        let targets = targets(&names, &asked.at, &model)?;
        let settings = oracle.settings(&asked.policies);
        if let Some(variable) = &asked.fit {
            let (section, found) = oracle.fit(variable, &targets, &settings, asked)?;
            sections.push(section);
            fits.extend(found);
        }
        if !asked.at.is_empty() {
            let answers = oracle.answers(&targets, &settings)?;
            sections.extend(oracle.sections(&answers));
            outcomes.extend(answers);
        }
    }
    let base = recorded[base.ok_or("the runs hold no device memory")?].path.clone();
    let title = format!("extrapolated from {base}");
    let runs = recorded.iter().map(|run| OfRun {
        trace: run.path.clone(),
        values: run.values.iter().cloned().collect(),
        devices: run.trace.devices.iter().map(curve::OfDevice::of).collect(),
    });
    let answer = OfProcess { rank: None, variables: names, runs: runs.collect(), base, outcomes, fits };
    Ok(Reply { part: Part { title, sections, ..Part::default() }, answer })
}

/// All variables, each with a value in every run.
fn names(recorded: &[Recorded]) -> Result<Vec<String>, String> {
    let mut names: Vec<String> = vec![];
    for (name, _) in recorded.iter().flat_map(|run| &run.values) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    match names.is_empty() {
        true => Err("no run has values; write batch=4:small.gtr".into()),
        false => Ok(names),
    }
}

/// Values in the order of the names; those that are left out are of `otherwise`.
fn ordered(
    names: &[String],
    values: &Values,
    otherwise: Option<&[u64]>,
    of: &str,
) -> Result<Vec<u64>, String> {
    if let Some((unknown, _)) = values.iter().find(|(name, _)| !names.contains(name)) {
        return Err(format!("no run has a value of `{unknown}`; known values: {}", names.join(", ")));
    }
    let is_twice = |(index, (name, _)): &(usize, &(String, u64))| {
        values[..*index].iter().any(|(known, _)| known == name)
    };
    if let Some((_, (twice, _))) = values.iter().enumerate().find(is_twice) {
        return Err(format!(
            "{of} has two values of `{twice}`; write one, and repeat --at for several points"
        ));
    }
    let value = |(index, name): (usize, &String)| {
        let given = values.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
        let value = given.or_else(|| Some(otherwise?[index]));
        value.ok_or_else(|| format!("{of} has no value of `{name}`; add it: {name}=..."))
    };
    names.iter().enumerate().map(value).collect()
}

/// What the GPU of all runs runs at a time.
fn threads(recorded: &[Recorded]) -> Threads {
    let mut names = recorded.iter().flat_map(|run| &run.gpus);
    match names.next() {
        Some(first) if names.all(|name| name == first) && recorded.iter().all(|run| !run.gpus.is_empty()) => {
            Threads::of(first)
        }
        _ => Threads::default(),
    }
}

fn device(run: &Recorded, ordinal: u32) -> Result<&OpStream, String> {
    let stream = run.trace.devices.iter().find(|stream| stream.device == ordinal);
    stream.ok_or_else(|| {
        format!("{}: no memory of cuda:{ordinal} was recorded, unlike in another run", run.path)
    })
}

fn targets(names: &[String], at: &[Values], model: &Model) -> Result<Vec<Vec<u64>>, String> {
    let base = &model.base().at;
    if at.is_empty() {
        return Ok(vec![base.clone()]);
    }
    at.iter().map(|values| ordered(names, values, Some(base), "--at")).collect()
}

/// Why no answer can be certain, whatever the laws say.
struct Doubts {
    reasons: Vec<String>,
    /// By which factor a range is wider because of them.
    factor: f64,
    /// The runs may not be of one program at all.
    is_guess: bool,
}

fn doubts(recorded: &[Recorded], streams: &[&OpStream], bench: &Bench, model: &Model) -> Doubts {
    let is_generated = model.has_generated_code();
    let mut reasons = reasons(recorded, streams, bench);
    let strangers = strangers(model);
    let is_guess = strangers.is_some();
    reasons.extend(strangers);
    if is_generated {
        reasons.push("compiled code requests memory, and different code is generated for each size".into());
    }
    let factor = match reasons.is_empty() {
        true => 1.0,
        false if is_generated => GENERATED,
        false => DOUBTED,
    };
    Doubts { reasons, factor, is_guess }
}

/// What speaks against the runs being of one program.
fn strangers(model: &Model) -> Option<String> {
    let ((n_matched, n), lawless) = (model.n_matched(), model.lawless_share());
    let remedy = "name runs of one program that differ only in these values";
    if lawless <= MOST_LAWLESS {
        return None;
    }
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    if !model.has_stacks() {
        return Some(format!(
            "a guess: the runs look like different programs, or like one whose sizes depend on its data: {} of the memory live at the peak follows no law, and without call stacks requests are matched by their order; {remedy}, recorded with stacks",
            percent(lawless)
        ));
    }
    let matched = n_matched as f64 / n.max(1) as f64;
    (matched < LEAST_MATCHED).then(|| {
        format!(
            "a guess: the runs look like different programs: by their call stacks, {} of the largest run's requests are in every run, and {} of the memory live at the peak follows no law; {remedy}",
            percent(matched),
            percent(lawless)
        )
    })
}

fn reasons(recorded: &[Recorded], streams: &[&OpStream], bench: &Bench) -> Vec<String> {
    let mut doubts: Vec<String> = bench.doubt().into_iter().collect();
    for run in recorded {
        doubts.extend(run.trace.notes.iter().map(|note| format!("{}: {note}", run.path)));
    }
    let differ = |what: &str, words: Vec<Option<String>>| {
        let mut known: Vec<&String> = words.iter().flatten().collect();
        known.sort();
        known.dedup();
        let listed = || known.iter().map(|it| it.as_str()).collect::<Vec<_>>().join("; ");
        (known.len() > 1).then(|| format!("the runs have different {what}: {}", listed()))
    };
    let gpus = recorded.iter().map(|run| (!run.gpus.is_empty()).then(|| run.gpus.join(", ")));
    doubts.extend(differ("GPUs, which may choose other algorithms", gpus.collect()));
    let memory = streams.iter().map(|stream| stream.settings.device_memory.map(iec));
    doubts.extend(differ("device memory", memory.collect()));
    let releases = streams.iter().map(|stream| stream.settings.torch_version.map(release));
    doubts.extend(differ("PyTorch releases", releases.collect()));
    let options = streams.iter().map(|stream| {
        let options = stream.settings.options.as_deref().unwrap_or_default();
        Some(if options.is_empty() { "(none)".to_owned() } else { options.to_owned() })
    });
    doubts.extend(differ("allocator settings", options.collect()));
    let numbers = recorded.iter().map(|run| Some(run.trace.devices.len().to_string()));
    doubts.extend(differ("numbers of devices", numbers.collect()));
    if streams.iter().any(|stream| stream.history == History::StartsLate) {
        doubts.push("recording began when memory was already in use".into());
    }
    doubts.extend(bench.warnings.iter().map(|warning| warning.text.clone()));
    doubts
}

/// One device's program, to be asked.
struct Oracle<'a> {
    names: &'a [String],
    model: &'a Model<'a>,
    bench: &'a Bench<'a>,
    measured: Vec<Measured>,
    doubts: Doubts,
}

/// A range that is as much wider as there is reason to doubt it.
fn doubted((low, high): (u64, u64), doubts: &Doubts) -> (u64, u64) {
    match doubts.reasons.is_empty() {
        true => (low, high),
        false => ((low as f64 / doubts.factor) as u64, (high as f64 * doubts.factor) as u64),
    }
}

/// A policy and its options.
type Setting = (String, String);

impl Oracle<'_> {
    fn settings(&self, policies: &[String]) -> Vec<Setting> {
        let settings = &self.bench.stream.settings;
        let recorded = (settings.policy.to_owned(), settings.options.clone().unwrap_or_default());
        let split = |policy: &String| {
            let (name, options) = policy.split_once(':').unwrap_or((policy, ""));
            (name.to_owned(), options.to_owned())
        };
        if policies.is_empty() { vec![recorded] } else { policies.iter().map(split).collect() }
    }

    fn answers(&self, targets: &[Vec<u64>], settings: &[Setting]) -> Result<Vec<Outcome>, String> {
        let mut answers = vec![];
        for at in targets {
            let prediction = self.model.predict(at).map_err(|why| why.to_string())?;
            for setting in settings {
                answers.push(self.answer(&prediction, setting)?);
            }
        }
        Ok(answers)
    }

    fn answer(&self, prediction: &Prediction, setting: &Setting) -> Result<Outcome, String> {
        let mut question = self.bench.question(&setting.0, &setting.1);
        let forecast = |question: &Question| {
            prediction.forecast(question).map_err(|error| format!("{}: {error}", named(question)))
        };
        let mut found = forecast(&question)?;
        let machine = self.bench.machine;
        let is_asked = machine.limit.is_some() || machine.device_memory.is_some();
        let mut too_large_for = None;
        if !found.fits.1 && !is_asked {
            // What it needs, and not where it would stop.
            too_large_for = question.device_memory.take();
            found = forecast(&question)?;
        }
        let unlimited =
            (!found.fits.1 && is_asked).then(|| forecast(&curve::unlimited(&question))).transpose()?;
        let card = too_large_for.or(question.device_memory);
        let laboratory = Laboratory::new(&prediction.best)?;
        let bench = Bench {
            stream: &prediction.best,
            laboratory,
            self_check: self.bench.self_check.clone(),
            warnings: vec![],
            machine,
            totals: Totals::Reproduced,
        };
        let mut simulated = bench.simulated(question, found.answer.clone());
        let room = simulated.figures.shares.as_ref().map(|shares| Room::of(machine, shares));
        let room = room.or(card.map(Room::recorded));
        let mut needed = Needed::of(&found, unlimited.as_ref(), room);
        needed.range = doubted(needed.range, &self.doubts);
        let (known, remarks) = (&prediction.known, simulated.remarks());
        let certain = found.is_sure && self.doubts.reasons.is_empty();
        let sure = self.sure(certain, simulated.confidence);
        let (low, high) = found.reserved;
        if simulated.confidence == Confidence::Exact && !(certain && low == high) {
            simulated.confidence = Confidence::Interval;
        }
        simulated.figures.peak_reserved_range = doubted((low, high), &self.doubts);
        let may_choose = known.may_choose.then(|| MAY_CHOOSE.to_owned());
        let (n_matched, n) = self.model.n_matched();
        Ok(Outcome {
            rank: None,
            device: self.bench.stream.device,
            values: self.names.iter().cloned().zip(known.at.iter().copied()).collect(),
            at: known.at.clone(),
            remarks,
            certain,
            sure,
            needed,
            peak_reserved_replays: found.replayed,
            peak_allocated_range: doubted(found.allocated, &self.doubts),
            fits_at_best: found.fits.0,
            fits_at_worst: found.fits.1,
            recorded_device_is_too_small: too_large_for.is_some(),
            too_large_for,
            is_decided: found.is_sure,
            may_choose: known.may_choose,
            reasons: self.doubts.reasons.iter().cloned().chain(may_choose).collect(),
            too_wide: self.too_wide(simulated.figures.peak_reserved_range, &known.at),
            open: known.open.iter().map(|open| self.open(open)).collect(),
            grows: known.shares.iter().map(|share| self.grows(share)).collect(),
            requests: Requests { base: n, in_every_run: n_matched, only_in_others: self.model.n_left_out() },
            warnings: self.bench.warnings.clone(),
            self_check: SelfCheck::of(&self.bench.self_check),
            simulated,
        })
    }

    fn values(&self, at: &[u64]) -> String {
        let values = self.names.iter().zip(at).map(|(name, value)| format!("{name}={value}"));
        values.collect::<Vec<_>>().join(",")
    }

    fn sure(&self, is_certain: bool, confidence: Confidence) -> Sure {
        match (is_certain, confidence) {
            _ if self.doubts.is_guess => Sure::Guess,
            (_, Confidence::Guess) => Sure::Guess,
            (_, Confidence::Bound) => Sure::Bound,
            (true, _) => Sure::Certain,
            (false, _) => Sure::Range,
        }
    }

    fn sections(&self, answers: &[Outcome]) -> Vec<Section> {
        let mut sections = vec![self.outcomes(answers)];
        let first = answers.first();
        sections.extend(first.map(|answer| self.grown(answer)));
        sections.extend(first.and_then(unknown));
        sections
    }

    fn outcomes(&self, answers: &[Outcome]) -> Section {
        let bytes = |bytes: u64| Value::Bytes(Bytes(bytes));
        let table = Table::of(
            "outcomes",
            answers,
            &[
                ("at", "at", &|it| Value::text(self.values(&it.at))),
                ("peak_reserved_bytes", "reserved", &|it| bytes(it.simulated.figures.peak_reserved_bytes)),
                ("least_reserved_bytes", "at least", &|it| bytes(it.simulated.figures.peak_reserved_range.0)),
                ("most_reserved_bytes", "at most", &|it| bytes(it.simulated.figures.peak_reserved_range.1)),
                ("peak_allocated_bytes", "allocated", &|it| bytes(it.simulated.figures.peak_allocated_bytes)),
                ("sure", "sure", &|it| Value::text(<&str>::from(it.sure))),
                ("policy", "policy", &|it| Value::text(it.simulated.figures.named())),
            ],
        );
        let device = self.bench.stream.device;
        let (n_matched, n) = self.model.n_matched();
        let base = self.values(&self.model.base().at);
        let predicted = answers.iter().map(|answer| Predicted {
            at: answer.at.clone(),
            policy: answer.simulated.figures.named(),
            needed: answer.needed.clone(),
            is_certain: answer.sure == Sure::Certain,
        });
        let predicted: Vec<Predicted> = predicted.collect();
        let section = Section::new("predict", format!("Predicted memory on cuda:{device}")).table(table);
        let mut section = curve::drawn(section, self.names, &predicted, &self.measured).remark(
            "n_matched",
            "requests",
            Value::Count(n as u64),
            format!("of the run at {base}; {} of them are in every run", count(n_matched as u64)),
        );
        for answer in answers {
            let name = match answers.len() {
                1 => String::new(),
                _ => {
                    format!("{}, {}: ", self.values(&answer.at), answer.simulated.figures.named())
                }
            };
            for (mood, text) in &answer.remarks {
                section = section.line(*mood, format!("{name}{text}"));
            }
            if let Some(memory) = answer.too_large_for {
                let text = format!("{name}more than the {} of the card it was recorded on", iec(memory));
                section = section.line(Mood::Bad, text);
            }
        }
        section.warn(self.doubts.reasons.iter().cloned())
    }

    fn grown(&self, answer: &Outcome) -> Section {
        let at = self.values(&answer.at);
        let all = answer.grows.iter().fold(0, |sum: u64, share| sum.saturating_add(share.bytes));
        let table = Table::of(
            "grows",
            &answer.grows,
            &[
                ("per", "per", &|it| Value::text(&*it.per)),
                ("unit_bytes", "each", &|it| Value::bytes(it.unit_bytes.map(|unit| unit.round() as u64))),
                ("bytes", "together", &|it| Value::Bytes(Bytes(it.bytes))),
                ("share", "share", &|it| Value::share(it.bytes, all)),
                ("sites", "most of it in", &|it| Value::text(sites(it))),
            ],
        );
        let title = format!("How memory scales: live at the peak of {at}, as requested");
        Section::new("grows", title).table(table.keep(MOST_SHARES, 2))
    }

    fn grows(&self, share: &Share) -> Grows {
        let sites = share.sites.iter().map(|it| Site {
            call_site: it.site.as_ref().map(CallSite::of),
            unit_bytes: it.unit,
            bytes: it.bytes,
            number: it.number,
        });
        let unit_bytes = share.product.map(|_| share.unit);
        Grows { per: self.product(share), unit_bytes, bytes: share.bytes, sites: sites.collect() }
    }

    fn product(&self, share: &Share) -> String {
        match share.product {
            None => "no law known".into(),
            Some(product) => product_name(&self.model.basis().products()[product], self.names),
        }
    }

    /// What to do about a range that nobody can plan with.
    fn too_wide(&self, (low, high): (u64, u64), at: &[u64]) -> Option<String> {
        let factor = high as f64 / low.max(1) as f64;
        let base = &self.model.base().at;
        let between = base.iter().zip(at).map(|(base, at)| {
            let middle = (*base as f64 * *at as f64).sqrt().round() as u64;
            if base == at { *base } else { middle }
        });
        let between: Vec<u64> = between.collect();
        (factor > TOO_WIDE && between != *base).then(|| {
            format!(
                "the range is too wide for planning (× {factor:.1}): one more run in between, for example at {}, would narrow it",
                self.values(&between)
            )
        })
    }

    fn open(&self, open: &Open) -> Unknown {
        let call_site = open.site.as_ref().map(CallSite::of);
        let text = self.why(open, call_site.as_ref());
        Unknown {
            kind: kind(&open.why),
            text,
            n_requests: open.n_requests,
            bytes_range: open.bytes,
            call_site,
        }
    }

    fn why(&self, open: &Open, site: Option<&CallSite>) -> String {
        let n = count(open.n_requests as u64);
        let (low, high) = (iec(open.bytes.0), iec(open.bytes.1));
        let at = site.map(|site| format!(", most at {}", place(site))).unwrap_or_default();
        let names = |variables: &[usize]| {
            let names = variables.iter().map(|index| self.names[*index].as_str()).collect::<Vec<_>>();
            if names.is_empty() { self.names.join(" or ") } else { names.join(" or ") }
        };
        match &open.why {
            Why::Size(Standing::Ambiguous, variables) => format!(
                "{n} requests, {low} to {high} in total{at}: one run at another {}, all else equal, would decide",
                names(variables)
            ),
            Why::Size(Standing::Unchecked, variables) => format!(
                "{n} requests, {low} to {high} in total{at}: two points fit many laws; one run at a third {} would decide",
                names(variables)
            ),
            Why::Size(Standing::Unmatched, _) => format!(
                "{n} requests, up to {high} in total{at}: only the largest run made them, as when libraries choose other algorithms at other sizes; a run near the predicted size would decide"
            ),
            Why::Size(Standing::Lawless | Standing::Checked, _) => format!(
                "{n} requests, {low} to {high} in total{at}: their sizes follow no law of {}; they may depend on the data",
                self.names.join(", ")
            ),
            Why::Missing => format!(
                "{n} requests, up to {high} in total{at}: none of the runs made them, but such convolutions copy large tensors; a run near the predicted size would decide"
            ),
            Why::Full => format!(
                "{n} requests{at}: partial sums, which grow until they fill the GPU: {low} to {high} in total"
            ),
            Why::Number => format!(
                "{n} requests{at}: more of them are live together in larger runs, and their number is extrapolated: {low} to {high}"
            ),
            Why::Others => {
                format!("libraries and contexts hold different amounts in each run: {low} to {high} there")
            }
        }
    }
}

fn unknown(answer: &Outcome) -> Option<Section> {
    let Outcome { open, may_choose, is_decided, too_wide, .. } = answer;
    if open.is_empty() && !may_choose {
        return None;
    }
    let mood = if *is_decided { Mood::Note } else { Mood::Warning };
    let section = Section::new("unknown", "Uncertain in these runs")
        .lines(open.iter().take(MOST_OPEN).map(|open| (mood, open.text.clone())));
    let more = open.len().saturating_sub(MOST_OPEN);
    let section = section.lines((more > 0).then(|| (Mood::Note, format!("and {more} more"))));
    let section = section.lines(may_choose.then(|| (Mood::Note, MAY_CHOOSE.to_owned())));
    let none = "it changes the peak by at most 1 %";
    let section = section.warn(too_wide.clone());
    Some(section.lines(is_decided.then(|| (Mood::Good, none.to_owned()))))
}

fn kind(why: &Why) -> &'static str {
    match why {
        Why::Size(Standing::Checked | Standing::Lawless, _) => "no_law",
        Why::Size(Standing::Unchecked, _) => "unchecked",
        Why::Size(Standing::Ambiguous, _) => "ambiguous",
        Why::Size(Standing::Unmatched, _) => "one_run_only",
        Why::Full => "full_gpu",
        Why::Number => "number",
        Why::Others => "others",
        Why::Missing => "no_run",
    }
}

/// `batch × seq²`.
fn product_name(powers: &Powers, names: &[String]) -> String {
    let factor = |(name, power): (&String, &u8)| match power {
        0 => None,
        1 => Some(name.clone()),
        2 => Some(format!("{name}²")),
        power => Some(format!("{name}^{power}")),
    };
    let factors: Vec<String> = names.iter().zip(powers).filter_map(factor).collect();
    if factors.is_empty() { "constant".into() } else { factors.join(" × ") }
}

/// The call sites with most of it, with what each adds for every unit.
fn sites(share: &Grows) -> String {
    let words = share.sites.iter().take(MOST_SITES).map(|site| {
        let place = site.call_site.as_ref().map_or("unknown".into(), place);
        format!("{} in {place}", iec(site.unit_bytes.round() as u64))
    });
    let more = share.sites.len().saturating_sub(MOST_SITES);
    let more = (more > 0).then(|| format!("{more} more"));
    words.chain(more).collect::<Vec<_>>().join(", ")
}

fn place(CallSite { function, file, line }: &CallSite) -> String {
    let file = file.rsplit('/').next().unwrap_or_default();
    match line {
        0 => format!("{function} ({file})"),
        line => format!("{function} ({file}:{line})"),
    }
}
