//! One setting for all processes of a job: the process that needs most decides.
//!
//! Each process is asked which setting is best for it alone, and what is best for one is tried with all. No setting for all can do with less
//! than the process that needs most does with its own best: how far the answer is from that is said.

use std::cmp::Reverse;

use gputrace_schemas::event::Bytes;
use gputrace_sim::bytes::iec;
use gputrace_sim::policies::torch;
use gputrace_sim::tune::{WORTH_AN_OPTION, n_options};
use gputrace_sim::whatif::Confidence;
use serde::Serialize;

use super::super::Reply;
use super::super::whatif::{Bench, HowSure, Machine, Simulated, Warning};
use super::{Advice, Answer, BOTH_NAMES, WORTHWHILE, busiest};
use gputrace_report::model::{Mood, Part, Section, Shown, Table, Value};
use gputrace_trace::import::Trace;

/// Settings that are tried with all processes: those that are best for the processes that need most.
const MOST_SETTINGS: usize = 12;
/// Processes that are shown, those that need most.
const MOST_SHOWN: usize = 16;
/// Lines of one kind that are shown.
const MOST_LINES: usize = 4;

/// A process of the job, asked alone.
struct Process {
    path: String,
    advice: Advice,
}

impl Process {
    /// What it needs with the setting that is best for it alone.
    fn own_best(&self) -> Need {
        Need::of(&self.advice.best)
    }

    /// Bytes below which no setting comes that is known: where two options together were not tried, what was requested at once.
    fn floor(&self) -> u64 {
        let advice = &self.advice;
        let tried = advice.pareto.iter().map(|it| it.peak_reserved_bytes).min();
        let tried = tried.unwrap_or(u64::MAX).min(advice.best.figures.peak_reserved_range.0);
        if advice.is_plain_enough { tried.min(advice.bounds.requested_bytes) } else { tried }
    }
}

/// What a setting comes to at the unkindest addresses: whether memory runs out, and what is reserved.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Need {
    runs_out: bool,
    bytes: u64,
}

impl Need {
    fn of(simulated: &Simulated) -> Need {
        let figures = &simulated.figures;
        let runs_out = figures.n_guesses_out_of_memory > 0 || !figures.fits;
        Need { runs_out, bytes: figures.peak_reserved_range.1 }
    }
}

/// A setting with every process.
struct Setting {
    options: String,
    /// One for each process, in their order.
    all: Vec<Simulated>,
}

impl Setting {
    /// The process that needs most with it.
    fn worst(&self) -> usize {
        let need = |index: &usize| (Need::of(&self.all[*index]), Reverse(*index));
        (0..self.all.len()).max_by_key(need).unwrap_or(0)
    }

    fn need(&self) -> Need {
        Need::of(&self.all[self.worst()])
    }

    fn n_fit(&self) -> usize {
        self.all.iter().filter(|it| !Need::of(it).runs_out).count()
    }

    /// Of all processes, the least sure.
    fn confidence(&self) -> Confidence {
        self.all.iter().map(|it| it.confidence).max().unwrap_or(Confidence::Exact)
    }
}

/// Tries what is best for each process with all of them. `load` reads a trace, and is called twice for each: no two are held at once. With the
/// answer comes why nothing is known of which process.
///
/// # Errors
/// Why nothing is known of any of them.
pub fn advise_all(
    paths: &[String],
    load: impl Fn(&str) -> Result<Trace, String>,
    machine: Machine,
) -> Result<(Reply<Answer>, Vec<String>), String> {
    let (mut processes, mut unknown, mut n_without) = (vec![], vec![], 0);
    for path in paths {
        match load(path) {
            Ok(trace) if trace.devices.is_empty() => n_without += 1,
            read => match read.and_then(|trace| Advice::of_trace(&trace, machine)) {
                Ok(advice) => processes.push(Process { path: path.clone(), advice }),
                Err(why) => unknown.push(format!("{path}: {why}")),
            },
        }
    }
    if processes.is_empty() {
        return Err(match unknown.is_empty() {
            true => "none of them holds device memory".to_owned(),
            false => unknown.join("; "),
        });
    }
    processes
        .sort_by(|one, other| other.own_best().cmp(&one.own_best()).then_with(|| one.path.cmp(&other.path)));
    let (candidates, n_left_out) = candidates(&processes);
    let new = |options: &String| Setting { options: options.clone(), all: vec![] };
    let mut settings: Vec<Setting> = candidates.iter().map(new).collect();
    for process in &processes {
        let trace = load(&process.path)?;
        let bench = Bench::new(busiest(&trace)?, machine)?;
        for setting in &mut settings {
            setting.all.push(bench.simulate(torch::NAME, &setting.options)?);
        }
    }
    settings.sort_by(|one, other| (one.need(), &one.options).cmp(&(other.need(), &other.options)));
    let best = plainest(&settings);
    let job = Job { processes, settings, best, n_left_out, n_without, unknown: unknown.clone() };
    Ok((job.reply(), unknown))
}

/// What was recorded, and what is best for a process alone; and how many of those are too many.
fn candidates(processes: &[Process]) -> (Vec<String>, usize) {
    let mut all: Vec<String> = vec![];
    let recorded = processes.iter().map(|it| &it.advice.recorded.figures.options);
    let best = processes.iter().map(|it| &it.advice.best.figures.options);
    for options in recorded.chain(best) {
        if !all.contains(options) {
            all.push(options.clone());
        }
    }
    let n_left_out = all.len().saturating_sub(MOST_SETTINGS);
    all.truncate(MOST_SETTINGS);
    (all, n_left_out)
}

/// The first of settings that are sorted, or one with fewer options that needs hardly more.
fn plainest(settings: &[Setting]) -> usize {
    let Some(first) = settings.first().map(Setting::need) else { return 0 };
    let enough = Need { bytes: first.bytes.saturating_add(first.bytes / WORTH_AN_OPTION), ..first };
    let near = settings.iter().enumerate().filter(|(_, it)| !first.runs_out && it.need() <= enough);
    // What has no options at all is PyTorch as it comes: whether it is worth more is decided by what it saves.
    let near = near.filter(|(index, it)| *index == 0 || !it.options.is_empty());
    near.min_by_key(|(index, it)| (n_options(&it.options), *index)).map_or(0, |(index, _)| index)
}

/// What was found of a job.
struct Job {
    /// Those that need most first.
    processes: Vec<Process>,
    /// Those that need least first.
    settings: Vec<Setting>,
    /// Which of them.
    best: usize,
    n_left_out: usize,
    /// Processes that hold no device memory.
    n_without: usize,
    unknown: Vec<String>,
}

impl Job {
    fn best(&self) -> &Setting {
        &self.settings[self.best]
    }

    /// The process that decides.
    fn worst(&self) -> &Process {
        &self.processes[self.best().worst()]
    }

    /// What the job came to as it was recorded: the process that needed most, replayed with what it had.
    fn recorded(&self) -> &Simulated {
        let recorded = self.processes.iter().map(|it| &it.advice.recorded);
        recorded.max_by_key(|it| Need::of(it)).unwrap_or(&self.processes[0].advice.recorded)
    }

    /// Bytes below which no one setting for all comes.
    fn floor(&self) -> u64 {
        self.processes.iter().map(Process::floor).max().unwrap_or(0)
    }

    /// Whether it is worth it: it makes the job fit, or saves enough on the process that needs most, even where addresses are unkind.
    fn helps(&self) -> bool {
        let (recorded, best) = (Need::of(self.recorded()), self.best().need());
        if recorded.runs_out != best.runs_out {
            return !best.runs_out;
        }
        let saved = self.recorded().figures.peak_reserved_range.0.saturating_sub(best.bytes);
        !best.runs_out && saved as f64 >= WORTHWHILE * recorded.bytes as f64
    }

    fn reply(self) -> Reply<Answer> {
        let title = format!("{} processes: {} decides", self.processes.len(), self.worst().path);
        let sections = vec![self.advice(), self.settings(), self.shares()];
        Reply { part: Part { title, sections, ..Part::default() }, answer: self.answer() }
    }

    fn advice(&self) -> Section {
        let section = Section::new("advice", "What to set for all of them");
        let (recorded, best, worst) = (Need::of(self.recorded()), self.best().need(), self.worst());
        let command = format!("{}={}", self.worst().advice.variable, self.best().options);
        let section = if self.helps() {
            let saved = iec(recorded.bytes.saturating_sub(best.bytes));
            let good = match recorded.runs_out {
                true => "fits on all, although the recorded setting runs out of memory".to_owned(),
                false => format!("{saved} less reserved by the largest process"),
            };
            section.line(Mood::Command, command).line(Mood::Good, good)
        } else if best.runs_out {
            let of = self.processes.len();
            let least = self.settings.iter().map(|it| of - it.n_fit()).min().unwrap_or(of);
            section.line(
                Mood::Bad,
                format!("no setting makes all fit: at least {least} of {of} run out of memory"),
            )
        } else {
            let percent = WORTHWHILE * 100.0;
            let text =
                format!("no setting helps: the best would save the largest process less than {percent:.0} %");
            section.line(Mood::Note, text)
        };
        let bytes = |need: Need| Value::Bytes(Bytes(need.bytes));
        section
            .lines(some(self.of_each(|it| it.advice.doubt.clone().into_iter().collect()), Mood::Warning))
            .lines(self.remarks().into_iter().map(|text| (Mood::Note, text)))
            .fact("best_peak_reserved_bytes", "reserved at best, at most", bytes(best))
            .fact("decided_by", "by", Value::text(&*worst.path))
            .fact("replayed_peak_reserved_bytes", "the recorded setting, replayed", bytes(recorded))
            .fact("confidence", "how sure", Value::text(self.best().confidence().name()))
            .lines(some(
                self.of_each(|it| it.advice.warnings.iter().map(|it| it.text.clone()).collect()),
                Mood::Warning,
            ))
            .warn(self.unknown.iter().map(|why| format!("nothing is known of {why}")))
    }

    fn remarks(&self) -> Vec<String> {
        let best = self.best().need();
        let certain = match best.bytes.saturating_sub(self.floor()) {
            _ if best.runs_out => None,
            0 => Some("no single setting for all needs less".to_owned()),
            above => Some(format!("at most {} more than the best single setting for all", iec(above))),
        };
        let left_out = (self.n_left_out > 0).then(|| {
            format!(
                "{} more settings are best for a smaller process, and were not tried with all",
                self.n_left_out
            )
        });
        let without =
            (self.n_without > 0).then(|| format!("{} more traces hold no device memory", self.n_without));
        let is_deprecated = self.helps() && self.processes.iter().any(|it| it.advice.is_deprecated);
        let deprecated = is_deprecated.then(|| BOTH_NAMES.to_owned());
        certain.into_iter().chain(left_out).chain(without).chain(deprecated).collect()
    }

    /// What is said of each process, with its name.
    fn of_each(&self, say: impl Fn(&Process) -> Vec<String>) -> Vec<String> {
        let of =
            |it: &Process| say(it).into_iter().map(|text| format!("{}: {text}", it.path)).collect::<Vec<_>>();
        self.processes.iter().flat_map(of).collect()
    }

    fn settings(&self) -> Section {
        let path = |it: &&Setting| Value::text(&*self.processes[it.worst()].path);
        let rows: Vec<&Setting> = self.settings.iter().collect();
        let columns: &[Shown<'_, &Setting>] = &[
            ("most_reserved_bytes", "reserved at most", &|it| Value::Bytes(Bytes(it.need().bytes))),
            ("n_fit", "fit", &|it| Value::Count(it.n_fit() as u64)),
            ("trace", "by", &path),
            ("options", "setting", &|it| named(&it.options)),
        ];
        let title = format!("Best settings of single processes, tried with all {}", self.processes.len());
        Section::new("job_settings", title).table(Table::of("job_settings", &rows, columns))
    }

    fn shares(&self) -> Section {
        let all = self.best();
        let mut rows: Vec<(&Process, &Simulated)> = self.processes.iter().zip(&all.all).collect();
        rows.sort_by_key(|(process, with)| (Reverse(Need::of(with)), &process.path));
        let bytes = |it: &Simulated| Value::Bytes(Bytes(Need::of(it).bytes));
        let fits = |it: &Simulated| Value::text(if Need::of(it).runs_out { "no" } else { "yes" });
        let columns: &[Shown<'_, (&Process, &Simulated)>] = &[
            ("trace", "trace", &|it| Value::text(&*it.0.path)),
            ("peak_reserved_bytes", "with it", &|it| bytes(it.1)),
            ("fits", "fits", &|it| fits(it.1)),
            ("replayed_peak_reserved_bytes", "as recorded", &|it| bytes(&it.0.advice.recorded)),
            ("own_best_bytes", "with its own best", &|it| bytes(&it.0.advice.best)),
            ("own_best", "its own best", &|it| named(&it.0.advice.best.figures.options)),
        ];
        let rest = rows.len().saturating_sub(MOST_SHOWN);
        rows.truncate(MOST_SHOWN);
        let more = (rest > 0).then(|| (Mood::Note, format!("and {rest} that need less (--json has them)")));
        Section::new("processes", "Processes that need most")
            .table(Table::of("processes", &rows, columns))
            .lines(more)
    }

    fn answer(self) -> Answer {
        let (all, need) = (self.best(), self.best().need());
        let (best, helps) = (all.all[all.worst()].clone(), self.helps());
        let setting = |it: &Setting| OneForAll {
            options: it.options.clone(),
            most_reserved_bytes: it.need().bytes,
            fits: !it.need().runs_out,
            n_fit: it.n_fit(),
            trace: self.processes[it.worst()].path.clone(),
            confidence: it.confidence(),
        };
        let Process { path, advice } = self.worst();
        let job = OfJob {
            n_processes: self.processes.len(),
            most_reserved_bytes: need.bytes,
            fits: !need.runs_out,
            confidence: all.confidence(),
            least_for_any_setting_bytes: self.floor(),
            settings: self.settings.iter().map(setting).collect(),
            n_settings_left_out: self.n_left_out,
            processes: self.processes.iter().zip(&all.all).map(OfProcess::of).collect(),
            n_without_device_memory: self.n_without,
            unknown: self.unknown.clone(),
        };
        let (trace, advice, shares) = (Some(path.clone()), advice.clone(), best.figures.shares.clone());
        Answer { trace, helps, shares, best, advice, job: Some(job) }
    }
}

/// One setting for all processes of a job.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct OfJob {
    n_processes: usize,
    /// Of the process that needs most with `best`, at the unkindest addresses.
    most_reserved_bytes: u64,
    fits: bool,
    /// Of all processes, the least sure.
    #[serde(with = "HowSure")]
    confidence: Confidence,
    /// No single setting for all that is known needs less.
    least_for_any_setting_bytes: u64,
    settings: Vec<OneForAll>,
    n_settings_left_out: usize,
    /// Processes that need most with their own best first.
    processes: Vec<OfProcess>,
    n_without_device_memory: usize,
    /// Of which traces nothing is known, and why.
    unknown: Vec<String>,
}

/// A setting, tried with all processes.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct OneForAll {
    options: String,
    most_reserved_bytes: u64,
    fits: bool,
    /// Processes that fit with it.
    n_fit: usize,
    /// The process that needs most with it.
    trace: String,
    #[serde(with = "HowSure")]
    confidence: Confidence,
}

/// A process with the setting for all.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct OfProcess {
    trace: String,
    device: u32,
    most_reserved_bytes: u64,
    fits: bool,
    recorded_peak_reserved_bytes: u64,
    replayed_most_reserved_bytes: u64,
    own_best: String,
    own_best_most_reserved_bytes: u64,
    doubt: Option<String>,
    warnings: Vec<Warning>,
}

impl OfProcess {
    fn of((Process { path, advice }, with): (&Process, &Simulated)) -> OfProcess {
        OfProcess {
            trace: path.clone(),
            device: advice.device,
            most_reserved_bytes: Need::of(with).bytes,
            fits: !Need::of(with).runs_out,
            recorded_peak_reserved_bytes: advice.recorded_peak_reserved_bytes,
            replayed_most_reserved_bytes: Need::of(&advice.recorded).bytes,
            own_best: advice.best.figures.options.clone(),
            own_best_most_reserved_bytes: Need::of(&advice.best).bytes,
            doubt: advice.doubt.clone(),
            warnings: advice.warnings.clone(),
        }
    }
}

/// A setting, for people.
fn named(options: &str) -> Value {
    Value::text(if options.is_empty() { "(none)" } else { options })
}

/// The first of many lines, and how many there are.
fn some(mut lines: Vec<String>, mood: Mood) -> Vec<(Mood, String)> {
    let rest = lines.len().saturating_sub(MOST_LINES);
    lines.truncate(MOST_LINES);
    lines.extend((rest > 0).then(|| format!("and {rest} more of this kind (--json has them)")));
    lines.into_iter().map(|text| (mood, text)).collect()
}
