//! `gputrace whatif --plan`: the cheapest edits with which a training run fits a limit.

use gputrace_report::model::{Mood, Part, Section, Table, Value};
use gputrace_schemas::event::Bytes;
use gputrace_sim::bytes::iec;
use gputrace_sim::cores::on_all_cores;
use gputrace_sim::edits::{Chosen, Edits, Layout, Offload, Program, Sure, Way};
use gputrace_sim::ops::OpStream;
use gputrace_sim::policies::torch;
use gputrace_sim::whatif::{Laboratory, Question};
use gputrace_trace::import::Trace;
use gputrace_trace::source::Source;
use serde::Serialize;

use super::Reply;
use super::edits::{Answer, Asked, Outcome, answered, edited, understood};
use super::whatif::Bench;

const EXPANDABLE: &str = "expandable_segments:True";

/// The plan that was found.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Plan {
    /// Of plans.
    limit_bytes: u64,
    /// Of plans.
    device: u32,
    /// Of plans: index of the cheapest outcome that fits, or likely fits; null if none does.
    plan: Option<usize>,
}

/// The fields that only the outcomes of a plan have.
#[derive(Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Planned {
    /// Of a plan.
    cost: String,
    /// Of a plan: what kind of cost.
    costs: Rank,
    /// Of a plan: it fits with everything unknown against it.
    fits_at_worst: bool,
    /// Of a plan: reserved bytes without a limit.
    needed_bytes: u64,
}

/// What a plan costs. None of them changes what is computed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(into = "&'static str")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schemas", schemars(extend("enum" = ["nothing", "recomputation", "transfers", "more GPUs"])))]
enum Rank {
    Nothing,
    Recomputes,
    Moves,
    MoreGpus,
}

impl From<Rank> for &'static str {
    fn from(rank: Rank) -> &'static str {
        match rank {
            Rank::Nothing => "nothing",
            Rank::Recomputes => "recomputation",
            Rank::Moves => "transfers",
            Rank::MoreGpus => "more GPUs",
        }
    }
}

/// What became of one.
struct Tried {
    outcome: Outcome,
    planned: Planned,
}

impl Tried {
    fn is_likely(&self) -> bool {
        let figures = &self.outcome.answer.figures;
        figures.fits || figures.workspaces_missing.is_some()
    }

    /// Why that is not sure.
    fn because(&self) -> &'static str {
        match self.outcome.answer.figures.workspaces_missing {
            Some(_) => "its convolutions would have to use smaller workspaces",
            None => "its range exceeds the limit",
        }
    }

    fn fits(&self) -> &'static str {
        match (self.is_likely(), self.planned.fits_at_worst) {
            (true, true) => "yes",
            (true, false) => "likely",
            (false, _) => "no",
        }
    }

    /// As it would be asked for.
    fn in_words(&self) -> String {
        let Outcome { edits, answer, .. } = &self.outcome;
        let edits = if edits.is_empty() { "as recorded".to_owned() } else { edits.join(" ") };
        match &*answer.figures.options {
            "" => edits,
            options => format!("{edits}, {options}"),
        }
    }
}

/// Tries edits that change no result, the cheapest first.
///
/// # Errors
/// What cannot be answered, and why.
pub fn plan(path: &str, source: &Source, trace: &Trace, asked: &Asked) -> Result<Reply<Answer>, String> {
    let limit = asked.machine.limit.ok_or("--plan needs --limit")?.0;
    let largest =
        trace.devices.iter().filter(|stream| stream.settings.is_torch()).max_by_key(|it| it.n_requests());
    let stream = largest.ok_or("it has no requests of PyTorch's allocator")?;
    let tried = tried(source, stream, asked).map_err(|why| format!("cuda:{}: {why}", stream.device))?;
    let likely = tried.iter().position(Tried::is_likely);
    // Of those that cost as much or more, only what needs less is worth a row.
    let mut least = u64::MAX;
    let frontier = tried.iter().filter(|it| {
        let is_less = it.planned.needed_bytes < least;
        least = least.min(it.planned.needed_bytes);
        is_less
    });
    let table = Table::of(
        "plans",
        frontier,
        &[
            ("program", "program", &|it| Value::text(it.in_words())),
            ("needed_bytes", "needs", &|it| Value::Bytes(Bytes(it.planned.needed_bytes))),
            ("fits", "fits", &|it| Value::text(it.fits())),
            ("cost", "cost", &|it| Value::text(it.planned.cost.clone())),
        ],
    );
    let title = format!("What makes cuda:{} fit {}, cheapest first", stream.device, iec(limit));
    let mut section = Section::new("plans", title).table(table);
    section = match likely.map(|at| (at, &tried[at])) {
        Some((0, plan)) if plan.planned.fits_at_worst => {
            section.line(Mood::Good, "it fits without a change")
        }
        Some((_, plan)) if plan.planned.fits_at_worst => {
            section.line(Mood::Good, format!("the cheapest that fits: {}", plan.in_words()))
        }
        Some((_, plan)) => section.line(
            Mood::Warning,
            format!("the cheapest that likely fits: {}; {}", plan.in_words(), plan.because()),
        ),
        None => section.line(
            Mood::Bad,
            "none of these fits. A smaller batch, lower precision or an optimizer with less state would change the results",
        ),
    };
    if let Some(sure) = tried.iter().position(|it| it.planned.fits_at_worst).filter(|at| Some(*at) != likely)
    {
        section =
            section.line(Mood::Note, format!("the cheapest that surely fits: {}", tried[sure].in_words()));
    }
    let failed = stream.ooms.last().map(|oom| {
        format!(
            "the run ran out of memory: add the {} that it could not get, and what it would have requested later",
            iec(oom.rounded)
        )
    });
    section = section.warn(failed).line(
        Mood::Note,
        "contexts, code and libraries share the limit, as recorded (--other sets another amount); the needed amounts do not include them",
    );
    let plan = Plan { limit_bytes: limit, device: stream.device, plan: likely };
    let outcomes =
        tried.into_iter().map(|Tried { outcome, planned }| Outcome { planned: Some(planned), ..outcome });
    let answer =
        Answer { trace: path.to_owned(), plan: Some(plan), outcomes: outcomes.collect(), refused: vec![] };
    Ok(Reply { part: Part { title: path.to_owned(), sections: vec![section], ..Part::default() }, answer })
}

/// The recorded options of the allocator, and the same with expandable segments.
fn settings_of(stream: &OpStream) -> [String; 2] {
    let recorded = stream.settings.options.clone().unwrap_or_default();
    let expandable =
        if recorded.is_empty() { EXPANDABLE.to_owned() } else { format!("{recorded},{EXPANDABLE}") };
    [recorded, expandable]
}

/// Ways to change the program, with what they cost.
fn candidates(base: Edits) -> Vec<(Edits, Rank)> {
    let free = Edits { set_to_none: base.set_to_none.or(Some(true)), ..base };
    let fused = Edits { way: base.way.or(Some(Way::Fused)), ..free };
    let half = Edits { checkpoint: Some(Chosen::Every(2)), ..fused };
    let all = Edits { checkpoint: Some(Chosen::All), ..fused };
    let mut options = vec![];
    let mut add = |edits: Edits, rank: Rank| options.push((edits, rank));
    add(base, Rank::Nothing);
    add(fused, Rank::Nothing);
    if base.checkpoint.is_none() {
        add(half, Rank::Recomputes);
        add(all, Rank::Recomputes);
    }
    if base.offload.is_none() {
        add(Edits { offload: Some(Offload::Optimizer), ..free }, Rank::Moves);
        add(Edits { offload: Some(Offload::Activations), ..fused }, Rank::Moves);
        add(
            Edits {
                offload: Some(Offload::Optimizer),
                checkpoint: base.checkpoint.or(Some(Chosen::All)),
                ..free
            },
            Rank::Moves,
        );
    }
    if base.layout.is_none() {
        for n in [2, 4, 8] {
            add(Edits { layout: Some(Layout::Fsdp(n)), ..fused }, Rank::MoreGpus);
            add(
                Edits {
                    layout: Some(Layout::Fsdp(n)),
                    checkpoint: base.checkpoint.or(Some(Chosen::All)),
                    ..fused
                },
                Rank::MoreGpus,
            );
        }
    }
    options
}

fn tried(source: &Source, stream: &OpStream, asked: &Asked) -> Result<Vec<Tried>, String> {
    let understood = understood(source, stream)?;
    let program = Program::of(stream, &understood).map_err(|why| why.0)?;
    let bench = Bench::new(stream, asked.machine)?;
    let doubt = bench.doubt();
    let (candidates, settings) = (candidates(asked.edits), settings_of(stream));
    let found = on_all_cores(candidates.len(), |index| {
        let (edits, rank) = &candidates[index];
        // What cannot be known of this program is no plan for it; fused is of Adam alone.
        let others = Edits { way: asked.edits.way, ..*edits };
        let known =
            [*edits, others].into_iter().find_map(|edits| Some((edits, edited(&program, &edits).ok()?)));
        let (edits, edited) = known?;
        let changes = &edited[0].1;
        let sure = if doubt.is_some() { Sure::Guess } else { changes.sure() };
        let mut costs: Vec<String> = vec![];
        costs.extend(
            changes
                .recomputed_share
                .map(|share| format!("{:.0} % of the forward pass repeated", share * 100.0)),
        );
        costs.extend(
            (changes.moved_bytes.filter(|bytes| *bytes > 0))
                .map(|bytes| format!("{} to the host and back in each step", iec(bytes))),
        );
        if let Some(Layout::Fsdp(n)) = edits.layout {
            costs.push(format!("{n} GPUs"));
        }
        let cost = if costs.is_empty() { <&str>::from(*rank).to_owned() } else { costs.join(", ") };
        let name = edits.spelled();
        let of_setting = |options: &String| {
            let answer = answered(&bench, &edited, (torch::NAME, options), sure).ok()?;
            let question = bench.question(torch::NAME, options);
            let free = Question { limit: None, device_memory: None, ..question.clone() };
            let needed_bytes = Laboratory::of_prediction(&edited[0].0).guess(&free).ok()?.books.reserved.peak;
            // With as much less as is allocated may be off: under a limit, free memory is cut up as it has to be. And with the most of what is
            // not known.
            let margin = changes.margins(sure).allocated;
            let least = question.limit.map(|limit| (limit as f64 * (1.0 - margin)) as u64);
            let tight = Question { limit: least, ..question };
            let fits =
                |stream: &OpStream| Laboratory::of_prediction(stream).guess(&tight).is_ok_and(|it| it.fits());
            let fits_at_worst = answer.figures.fits && edited.iter().all(|(stream, _)| fits(stream));
            let outcome = Outcome {
                device: stream.device,
                edits: name.clone(),
                confidence: sure,
                answer,
                recomputed_share: changes.recomputed_share,
                moved_bytes: changes.moved_bytes,
                edited: None,
                planned: None,
            };
            let planned = Planned { cost: cost.clone(), costs: *rank, fits_at_worst, needed_bytes };
            Some(Tried { outcome, planned })
        };
        Some(settings.iter().filter_map(of_setting).collect::<Vec<Tried>>())
    });
    let mut found: Vec<Tried> = found.into_iter().flatten().collect();
    // Of one cost, the setting that was recorded comes before another.
    found.sort_by_key(|it| it.planned.costs);
    Ok(found)
}
