//! `gputrace tune`: the `PYTORCH_CUDA_ALLOC_CONF` line to use, and what it saves.

use gputrace_schemas::event::Bytes;
use gputrace_sim::bounds::{self, offline_packing};
use gputrace_sim::bytes::iec;
use gputrace_sim::effort;
use gputrace_sim::ops::{DriverCall, OpStream};
use gputrace_sim::policies::torch;
use gputrace_sim::tune::{self, Candidate};
use serde::Serialize;

use super::Reply;
use super::whatif::{Bench, Machine, Shares, Simulated, Warning};
use gputrace_report::model::{Mood, Part, Section, Table, Value};
use gputrace_trace::import::{ATTACHED, LEFT, Trace};
use gputrace_trace::words::release;

pub mod job;

/// Saving less than this much of the recorded peak is not worth a changed setting.
const WORTHWHILE: f64 = 0.01;
/// Releases from this one on call `PYTORCH_CUDA_ALLOC_CONF` deprecated (c10/core/AllocatorConfig.cpp, 2.9).
const DEPRECATED: (u8, u8) = (2, 9);
/// Beside the deprecated name.
const BOTH_NAMES: &str =
    "PyTorch 2.9 and later call this name deprecated, but read it; PYTORCH_ALLOC_CONF works from 2.10 on";

/// Tries every setting with the requests of the busiest device.
///
/// # Errors
/// Why they cannot be replayed.
pub fn advise(path: &str, trace: &Trace, machine: Machine) -> Result<Reply<Answer>, String> {
    Ok(Advice::of_trace(trace, machine)?.reply(path))
}

/// The device that is asked about.
fn busiest(trace: &Trace) -> Result<&OpStream, String> {
    let busiest = trace.devices.iter().max_by_key(|stream| stream.ops.len());
    let stream = busiest.ok_or("it holds no device memory")?;
    if !stream.settings.is_torch() {
        return Err("its memory is not PyTorch's, and only PyTorch reads PYTORCH_CUDA_ALLOC_CONF; for other allocators: gputrace replay --policy"
            .into());
    }
    Ok(stream)
}

/// The most that the recorded allocator held of the driver, by its own calls.
pub(super) fn recorded_peak(stream: &OpStream) -> Bytes {
    let mut held = stream.initial.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.bytes));
    let mut peak = held;
    for event in &stream.driver {
        held = match event.call {
            DriverCall::Alloc | DriverCall::Map => held.saturating_add(event.bytes),
            DriverCall::Free | DriverCall::Unmap => held.saturating_sub(event.bytes),
        };
        peak = peak.max(held);
    }
    Bytes(peak)
}

/// The setting to use, and what it saves. Of several traces: of the process that decides, with the setting for all as `best`, and `job`.
#[derive(Clone, Serialize)]
#[serde(tag = "schema", rename = "gputrace.tune/1")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Answer {
    /// The process that decides, of several.
    #[serde(skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
    helps: bool,
    shares: Option<Shares>,
    best: Simulated,
    #[serde(flatten)]
    advice: Advice,
    /// If there are several traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<job::OfJob>,
}

impl Answer {
    /// A request failed, and nobody asked about another card.
    #[must_use]
    pub fn ran_out(&self) -> bool {
        self.advice.ran_out
    }
}

/// Which settings to use for a device's requests.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Advice {
    device: u32,
    torch_version: String,
    /// The environment variable to set.
    #[serde(skip)]
    variable: &'static str,
    #[serde(skip)]
    is_deprecated: bool,
    /// The most that was reserved in the run itself.
    recorded_peak_reserved_bytes: u64,
    /// The recorded setting, replayed on the machine that was asked about.
    recorded: Simulated,
    #[serde(skip)]
    best: Simulated,
    /// A request failed, and nobody asked about another card.
    #[serde(skip)]
    ran_out: bool,
    /// Settings that no other beats in both peak and driver calls.
    pareto: Vec<Setting>,
    n_tried: usize,
    /// Settings of two or more options were not simulated: they cannot be worth it.
    #[serde(skip)]
    is_plain_enough: bool,
    bounds: Bounds,
    warnings: Vec<Warning>,
    /// Why no figure is better than a guess.
    doubt: Option<String>,
}

/// A setting that was simulated.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Setting {
    options: String,
    peak_reserved_bytes: u64,
    num_device_alloc: u64,
    num_device_free: u64,
}

impl Setting {
    fn of(Candidate { options, outcome }: Candidate) -> Setting {
        Setting {
            options,
            peak_reserved_bytes: outcome.books.reserved.peak,
            num_device_alloc: outcome.books.n_device_alloc,
            num_device_free: outcome.books.n_device_free,
        }
    }
}

/// The least that any allocator needs.
#[derive(Clone, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Bounds {
    requested_bytes: u64,
    /// Rounded to 512 bytes.
    rounded_bytes: u64,
    /// With streams, pools, small and large blocks separate.
    separate_bytes: u64,
    /// In pages of 2 MiB.
    paged_bytes: u64,
    /// Enough if all lifetimes were known in advance.
    offline_packing_bytes: Option<u64>,
}

impl Bounds {
    fn of(stream: &OpStream) -> Bounds {
        let bounds::Bounds { requested, rounded, separate, paged } = bounds::Bounds::of(stream);
        Bounds {
            requested_bytes: requested,
            rounded_bytes: rounded,
            separate_bytes: separate,
            paged_bytes: paged,
            offline_packing_bytes: offline_packing(stream, effort::PACKING.most),
        }
    }
}

impl Advice {
    fn of_trace(trace: &Trace, machine: Machine) -> Result<Advice, String> {
        let mut advice = Advice::of(busiest(trace)?, machine)?;
        let since = trace.notes.iter().filter(|note| *note == ATTACHED || note.starts_with(LEFT));
        let doubts: Vec<String> = since.cloned().chain(advice.doubt).collect();
        advice.doubt = (!doubts.is_empty()).then(|| doubts.join("; "));
        Ok(advice)
    }

    fn of(stream: &OpStream, machine: Machine) -> Result<Advice, String> {
        let bench = Bench::new(stream, machine)?;
        let torch_version = bench.self_check.torch_version;
        let recorded = bench.simulate(torch::NAME, stream.settings.options.as_deref().unwrap_or_default())?;
        let question = |options: &str| bench.question(torch::NAME, options);
        let found = tune::combinations(torch_version, machine.limit.is_some())
            .and_then(|settings| tune::search(&bench.laboratory, &settings, question))
            .map_err(|error| error.to_string())?;
        let found = found.ok_or("no setting could be simulated")?;
        let variable = torch::variable_to_set(&stream.settings);
        Ok(Advice {
            device: stream.device,
            torch_version: release(torch_version),
            variable,
            is_deprecated: torch_version >= DEPRECATED && variable == torch::VARIABLES[0],
            recorded_peak_reserved_bytes: recorded_peak(stream).0,
            recorded,
            best: bench.simulated(question(&found.options), found.answer),
            ran_out: !stream.ooms.is_empty() && !machine.is_of_a_card(),
            pareto: found.pareto.into_iter().map(Setting::of).collect(),
            n_tried: found.n_tried,
            is_plain_enough: found.is_plain_enough,
            bounds: Bounds::of(stream),
            doubt: bench.doubt().or_else(|| bench.limit_note()),
            warnings: bench.warnings,
        })
    }

    /// Whether another setting is worth it: it makes the program fit, or saves enough even where addresses are unkind.
    fn helps(&self) -> bool {
        let (recorded, best) = (&self.recorded.figures, &self.best.figures);
        if recorded.fits != best.fits {
            return best.fits;
        }
        let saved = recorded.peak_reserved_range.0.saturating_sub(best.peak_reserved_range.1);
        best.fits && saved as f64 >= WORTHWHILE * recorded.peak_reserved_bytes as f64
    }

    fn reply(self, path: &str) -> Reply<Answer> {
        let title = format!("{path}, cuda:{}, PyTorch {}", self.device, self.torch_version);
        let sections = vec![self.advice(), self.settings(), self.least()];
        Reply { part: Part { title, sections, ..Part::default() }, answer: self.answer() }
    }

    fn answer(self) -> Answer {
        let (helps, best) = (self.helps(), self.best.clone());
        Answer { trace: None, helps, shares: best.figures.shares.clone(), best, advice: self, job: None }
    }

    fn advice(&self) -> Section {
        let section = Section::new("advice", "What to set");
        let (replayed, figures) = (&self.recorded.figures, &self.best.figures);
        let (recorded, best) = (replayed.peak_reserved_bytes, figures.peak_reserved_bytes);
        let command = format!("{}={}", self.variable, figures.options);
        let section = if self.helps() && replayed.fits {
            let saved = iec(recorded.saturating_sub(best));
            match self.ran_out {
                // Whether it would have fit is another question, answered before.
                true => section
                    .line(Mood::Command, command)
                    .line(Mood::Note, format!("{saved} less reserved, if there had been no limit")),
                false => {
                    section.line(Mood::Command, command).line(Mood::Good, format!("{saved} less reserved"))
                }
            }
        } else if self.helps() {
            section
                .line(Mood::Command, command)
                .line(Mood::Good, "fits, although the recorded setting runs out of memory")
        } else if figures.fits {
            let percent = WORTHWHILE * 100.0;
            section
                .line(Mood::Note, format!("no setting helps: the best would save less than {percent:.0} %"))
        } else {
            let least = iec(self.bounds.requested_bytes);
            let others = figures.shares.iter().flat_map(|shares| shares.others.iter().flatten());
            let others: u64 = others.map(|held| held.bytes).sum();
            let others = match others {
                0 => String::new(),
                _ => format!(", and the context and others take {} of the limit", iec(others)),
            };
            section.line(
                Mood::Bad,
                format!("no setting makes it fit: any allocator needs {least} at once{others}"),
            )
        };
        let least = self.pareto.first().filter(|it| it.peak_reserved_bytes < best && figures.fits);
        let least = least.map(|it| {
            let saved = iec(best - it.peak_reserved_bytes);
            (Mood::Note, format!("{} would save {saved} more, too little for one more option", it.options))
        });
        let deprecated = self.helps() && self.is_deprecated;
        let in_use = format!("{} in use", iec(replayed.peak_allocated_bytes));
        let is_as_recorded = recorded == self.recorded_peak_reserved_bytes;
        let replayed = if is_as_recorded { "" } else { "the run had another limit, or none; " };
        let recorded_peak = Value::Bytes(Bytes(self.recorded_peak_reserved_bytes));
        section
            .lines(self.doubt.clone().map(|doubt| (Mood::Warning, doubt)))
            .lines(self.best.remarks())
            .lines(least)
            .lines(deprecated.then(|| (Mood::Note, BOTH_NAMES.to_owned())))
            .fact("best_peak_reserved_bytes", "reserved at best", Value::Bytes(Bytes(best)))
            .fact("recorded_peak_reserved_bytes", "reserved as recorded", recorded_peak)
            .remark(
                "replayed_peak_reserved_bytes",
                "the recorded setting, replayed",
                Value::Bytes(Bytes(recorded)),
                format!("{replayed}{in_use}"),
            )
            .fact("confidence", "how sure", Value::text(self.best.confidence.name()))
            .warn(self.warnings.iter().map(|it| it.text.clone()))
    }

    fn settings(&self) -> Section {
        let options = |it: &Setting| Value::text(if it.options.is_empty() { "(none)" } else { &it.options });
        let table = Table::of(
            "pareto",
            &self.pareto,
            &[
                ("peak_reserved_bytes", "reserved", &|it| Value::Bytes(Bytes(it.peak_reserved_bytes))),
                ("num_device_alloc", "mallocs", &|it| Value::Count(it.num_device_alloc)),
                ("num_device_free", "frees", &|it| Value::Count(it.num_device_free)),
                ("options", "setting", &options),
            ],
        );
        let title = format!("Best in memory or in driver calls, of {} simulated settings", self.n_tried);
        let none = self.pareto.is_empty().then(|| (Mood::Note, "none of them fits".to_owned()));
        let plain = self.is_plain_enough.then(|| {
            let least = iec(self.bounds.requested_bytes);
            let why = format!(
                "two options together are not worth trying: {least} were in use at once, as requested, and one option alone comes within 3 % of that"
            );
            (Mood::Note, why)
        });
        Section::new("settings", title).table(table).lines(none).lines(plain)
    }

    fn least(&self) -> Section {
        let bytes = |bytes| Value::Bytes(Bytes(bytes));
        let Bounds { requested_bytes, rounded_bytes, separate_bytes, paged_bytes, offline_packing_bytes } =
            self.bounds;
        let streams = "with streams, pools, small and large blocks separate";
        let section = Section::new("bounds", "The least that any allocator needs")
            .fact("requested_bytes", "as requested", bytes(requested_bytes))
            .fact("rounded_bytes", "rounded to 512 bytes", bytes(rounded_bytes))
            .fact("separate_bytes", streams, bytes(separate_bytes))
            .fact("paged_bytes", "in pages of 2 MiB", bytes(paged_bytes));
        match offline_packing_bytes {
            Some(packing) => section.remark(
                "offline_packing_bytes",
                "if all lifetimes were known in advance",
                bytes(packing),
                "would be enough",
            ),
            None => section.line(Mood::Note, effort::PACKING.note()),
        }
    }
}
