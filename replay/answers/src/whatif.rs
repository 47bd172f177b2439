//! The same requests under other allocators: what `replay`, `tune` and `oom` have in common.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;
use gputrace_sim::bytes::iec;
use gputrace_sim::ops::{Frame, Op, OpStream};
use gputrace_sim::policies::torch;
use gputrace_sim::simulator::Outcome;
use gputrace_sim::whatif::{self, Answer, Confidence, Laboratory, Other, Question};
use serde::Serialize;

use super::tune::recorded_peak;
use gputrace_analyse::doubts::doubt;
use gputrace_analyse::reactions::{Reaction, reactions};
use gputrace_report::model::{Mood, Section, Value};
use gputrace_trace::words::release;

/// What the trace may not say about the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// PyTorch release to imitate; none for the one that explains the trace best.
    pub torch_version: Option<(u8, u8)>,
    /// Memory of the device; none for what the trace says.
    pub device_memory: Option<Bytes>,
    /// The most that the process may hold.
    pub limit: Option<Bytes>,
    /// What others than the allocator hold of it; none for what the trace says, at each moment.
    pub other: Option<Bytes>,
}

impl Machine {
    /// Whether something has to fit.
    pub(super) fn is_of_a_card(self) -> bool {
        self.limit.is_some() || self.device_memory.is_some()
    }

    fn question(self, stream: &OpStream, torch_version: (u8, u8), policy: &str, options: &str) -> Question {
        Question {
            policy: policy.into(),
            options: options.into(),
            torch_version,
            device_memory: self.device_memory.map(|bytes| bytes.0).or(stream.settings.device_memory),
            limit: self.limit.map(|bytes| bytes.0),
            other: match self.other {
                Some(bytes) => Other::Bytes(bytes.0),
                None if self.is_of_a_card() => Other::Recorded,
                None => Other::Ignored,
            },
        }
    }
}

/// A device's requests, ready to be replayed on a machine.
pub(super) struct Bench<'a> {
    pub(super) stream: &'a OpStream,
    pub(super) laboratory: Laboratory<'a>,
    pub(super) self_check: whatif::SelfCheck,
    /// What the replay cannot follow.
    pub(super) warnings: Vec<Warning>,
    pub(super) machine: Machine,
    /// Whether the totals of the recorded setting come out.
    pub(super) totals: Totals,
}

/// Whether the replay of the recorded setting comes to the totals that were recorded: the peak of what was reserved, and the calls of the
/// driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Totals {
    /// It does.
    Reproduced,
    /// It does under a limit of its own, which the program must have set: at least this many bytes.
    UnderLimit(u64),
    /// It does not: reserved as recorded, and as replayed.
    Missed(u64, u64),
}

impl Totals {
    fn of(stream: &OpStream, laboratory: &Laboratory<'_>, check: &whatif::SelfCheck) -> Totals {
        let options = stream.settings.options.clone().unwrap_or_default();
        let as_recorded = Question {
            policy: stream.settings.policy.to_owned(),
            device_memory: stream.settings.device_memory,
            ..Question::torch(check.torch_version, &options)
        };
        let recorded = recorded_peak(stream).0;
        let replayed = |limit: Option<u64>| {
            let question = Question { limit, ..as_recorded.clone() };
            laboratory.guess(&question).ok()
        };
        // A log without calls of the driver has no totals to be held against, and what a run that ran out would have reserved without its
        // limit is another question.
        let ran_out = stream.ops.iter().any(|op| matches!(op, Op::Oom(_)));
        let Some(outcome) = replayed(None).filter(|_| !stream.driver.is_empty() && !ran_out) else {
            return Totals::Reproduced;
        };
        let is_as_recorded = |outcome: &Outcome| outcome.books.reserved.peak == recorded;
        if is_as_recorded(&outcome) {
            return Totals::Reproduced;
        }
        // The limit was as high as what was reserved, and lower than what the replay reserves without one.
        let limited = replayed(Some(recorded)).filter(|outcome| is_as_recorded(outcome) && outcome.fits());
        match limited {
            Some(_) if recorded < outcome.books.reserved.peak => Totals::UnderLimit(recorded),
            Some(_) | None => Totals::Missed(recorded, outcome.books.reserved.peak),
        }
    }
}

impl<'a> Bench<'a> {
    /// # Errors
    /// Why the requests cannot be replayed.
    pub(super) fn new(stream: &'a OpStream, machine: Machine) -> Result<Bench<'a>, String> {
        let asks = stream.ops.iter().any(|op| matches!(op, Op::Alloc(_) | Op::Oom(_)));
        if !asks && !stream.initial_allocs.is_empty() {
            return Err(format!(
                "device {} cannot be replayed: it has no history of requests, only memory held before: call torch.cuda.memory._record_memory_history() before the program allocates",
                stream.device
            ));
        }
        let laboratory = Laboratory::new(stream)
            .map_err(|why| format!("device {} cannot be replayed: {why}", stream.device))?;
        let self_check = laboratory.self_check(machine.torch_version);
        let totals = Totals::of(stream, &laboratory, &self_check);
        let warnings = reactions(stream).iter().map(Warning::of).collect();
        Ok(Bench { stream, laboratory, self_check, warnings, machine, totals })
    }

    pub(super) fn question(&self, policy: &str, options: &str) -> Question {
        let asked = self.machine.question(self.stream, self.self_check.torch_version, policy, options);
        match self.totals {
            Totals::UnderLimit(limit) if self.has_own_limit() => Question { limit: Some(limit), ..asked },
            Totals::UnderLimit(_) | Totals::Reproduced | Totals::Missed(..) => asked,
        }
    }

    /// The run had a limit of its own, and no other was asked about.
    fn has_own_limit(&self) -> bool {
        matches!(self.totals, Totals::UnderLimit(_)) && !self.machine.is_of_a_card()
    }

    /// What a reader must know of the limit under which the run is replayed.
    pub(super) fn limit_note(&self) -> Option<String> {
        let Totals::UnderLimit(limit) = self.totals else { return None };
        let limit = iec(limit);
        Some(match self.has_own_limit() {
            true => format!(
                "replayed under a limit of {limit}: the recorded totals match only under a limit, as set by set_per_process_memory_fraction; the exact limit is not in the trace (--limit sets it)"
            ),
            false => format!("the program had its own limit of {limit} or slightly more"),
        })
    }

    /// Why no answer is better than a guess.
    pub(super) fn doubt(&self) -> Option<String> {
        let missed = || match self.totals {
            Totals::Missed(recorded, replayed) => Some(format!(
                "the replay of the recorded setting reserves {}, and the program reserved {}",
                iec(replayed),
                iec(recorded)
            )),
            Totals::Reproduced | Totals::UnderLimit(_) => None,
        };
        doubt(self.stream, &self.self_check).or_else(missed).map(|why| format!("a guess: {why}"))
    }

    /// # Errors
    /// When the policy does not understand its options.
    pub(super) fn simulate(&self, policy: &str, options: &str) -> Result<Simulated, String> {
        let question = self.question(policy, options);
        match self.laboratory.answer(&question) {
            Ok(answer) => Ok(self.simulated(question, answer)),
            Err(error) => Err(format!("{}: {error}", named(&question))),
        }
    }

    pub(super) fn simulated(&self, question: Question, mut answer: Answer) -> Simulated {
        if answer.confidence == Confidence::Exact && self.doubt().is_some() {
            answer.confidence = Confidence::Guess;
        }
        // How high the program's own limit was is not known, and other settings may depend on it.
        let is_recorded = question.options == self.stream.settings.options.as_deref().unwrap_or_default();
        if answer.confidence == Confidence::Exact && self.has_own_limit() && !is_recorded {
            answer.confidence = Confidence::Interval;
        }
        let shares = self.laboratory.shares(&question, &answer.outcome);
        let shares = shares.filter(|_| self.machine.is_of_a_card());
        let confidence = answer.confidence;
        let missing = self.laboratory.workspaces_missing(&question, &answer.outcome);
        let figures = Figures { workspaces_missing: missing, ..Figures::of(question, answer, shares) };
        Simulated { confidence, n_requests: self.stream.n_requests(), figures }
    }
}

/// What became of the requests under one allocator.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Simulated {
    /// How sure it is.
    #[serde(with = "HowSure")]
    pub confidence: Confidence,
    /// What a replay says.
    #[serde(flatten)]
    pub figures: Figures,
    #[serde(skip)]
    n_requests: usize,
}

/// How sure a replay is: docs/VERDICTS.md.
#[derive(Serialize)]
#[serde(remote = "Confidence", rename_all = "lowercase")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) enum HowSure {
    Exact,
    Interval,
    Bound,
    Guess,
}

/// The figures of a replay.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Figures {
    pub(super) policy: String,
    pub(super) options: String,
    torch_version: String,
    device_memory_bytes: Option<u64>,
    limit_bytes: Option<u64>,
    /// Every request is served by the best guess.
    pub fits: bool,
    pub(super) peak_reserved_bytes: u64,
    /// Smallest and largest peak among all guesses of the addresses.
    pub(super) peak_reserved_range: (u64, u64),
    pub(super) peak_allocated_bytes: u64,
    peak_active_bytes: u64,
    pub(super) peak_requested_bytes: u64,
    peak_inactive_split_bytes: u64,
    pub(super) num_device_alloc: u64,
    pub(super) num_device_free: u64,
    pub(super) num_alloc_retries: u64,
    num_ooms: u64,
    /// The policy's own numbers.
    counters: BTreeMap<&'static str, u64>,
    /// Ways in which unknown addresses were guessed.
    pub n_guesses: usize,
    /// How many of them ran out of memory.
    pub n_guesses_out_of_memory: usize,
    oom: Option<Oom>,
    /// If it fails at the workspace of a convolution and all else is served without such workspaces: how many are missing. PyTorch then takes
    /// another algorithm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workspaces_missing: Option<u64>,
    pub(super) shares: Option<Shares>,
}

/// The request that failed.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
struct Oom {
    request: u64,
    requested_bytes: u64,
    segment_bytes: u64,
    reserved_bytes: u64,
    allocated_bytes: u64,
    message: String,
}

/// How the memory was shared at the tightest moment.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Shares {
    pub(super) limit_bytes: u64,
    fits: bool,
    reserved_bytes: u64,
    pub(super) others: Option<Vec<Held>>,
    free_bytes: u64,
    refused_bytes: Option<u64>,
    #[serde(skip)]
    is_charge_known: bool,
}

/// What another than the allocator held.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct Held {
    owner: String,
    pub(super) bytes: u64,
}

/// What the replay cannot follow.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Warning {
    kind: &'static str,
    count: u64,
    call_site: Option<CallSite>,
    pub(super) text: String,
}

impl Warning {
    fn of(reaction: &Reaction) -> Warning {
        let call_site = reaction.site.as_ref().map(CallSite::of);
        Warning { kind: reaction.kind.name(), count: reaction.count, call_site, text: reaction.text() }
    }
}

/// A line of the program.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct CallSite {
    pub(super) function: String,
    pub(super) file: String,
    pub(super) line: u32,
}

impl CallSite {
    pub(super) fn of(site: &Frame) -> CallSite {
        CallSite { function: site.name.to_string(), file: site.file.to_string(), line: site.line }
    }
}

/// Of how many requests the replay of the recorded setting knows the address.
#[derive(Clone, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub(super) struct SelfCheck {
    matching: usize,
    of: usize,
    torch_version: String,
}

impl SelfCheck {
    pub(super) fn of(check: &whatif::SelfCheck) -> SelfCheck {
        let torch_version = release(check.torch_version);
        SelfCheck { matching: check.n_matching, of: check.n_requests, torch_version }
    }
}

impl Figures {
    fn of(question: Question, answer: Answer, shares: Option<whatif::Shares>) -> Figures {
        let (outcome, books) = (&answer.outcome, &answer.outcome.books);
        Figures {
            policy: question.policy,
            options: question.options,
            torch_version: release(question.torch_version),
            device_memory_bytes: question.device_memory,
            limit_bytes: question.limit,
            fits: outcome.fits(),
            peak_reserved_bytes: books.reserved.peak,
            peak_reserved_range: answer.peak_reserved_range,
            peak_allocated_bytes: books.allocated.peak,
            peak_active_bytes: books.active.peak,
            peak_requested_bytes: books.requested.peak,
            peak_inactive_split_bytes: books.inactive_split.peak,
            num_device_alloc: books.n_device_alloc,
            num_device_free: books.n_device_free,
            num_alloc_retries: outcome.counter("num_alloc_retries"),
            num_ooms: outcome.counter("num_ooms"),
            counters: outcome.counters.iter().copied().collect(),
            n_guesses: answer.n_oom.1,
            n_guesses_out_of_memory: answer.n_oom.0,
            shares: shares.map(Shares::of),
            workspaces_missing: None,
            oom: answer.outcome.oom.map(|oom| Oom {
                request: oom.request,
                requested_bytes: oom.requested,
                segment_bytes: oom.error.segment_bytes,
                reserved_bytes: oom.reserved,
                allocated_bytes: oom.allocated,
                message: oom.error.message,
            }),
        }
    }

    /// As it would be given to `--policy`.
    pub(super) fn named(&self) -> String {
        name(&self.policy, &self.options)
    }
}

impl Shares {
    pub(super) fn of(shares: whatif::Shares) -> Shares {
        Shares {
            limit_bytes: shares.limit,
            fits: shares.fits,
            reserved_bytes: shares.reserved,
            free_bytes: shares.free(),
            refused_bytes: shares.refused,
            is_charge_known: shares.is_charge_known,
            others: shares
                .others
                .map(|others| others.into_iter().map(|(owner, bytes)| Held { owner, bytes }).collect()),
        }
    }
}

impl Simulated {
    /// What its figures alone do not say: how sure they are, whether it fits, where it fails.
    pub(super) fn remarks(&self) -> Vec<(Mood, String)> {
        let Figures { shares, oom, limit_bytes, device_memory_bytes, counters, .. } = &self.figures;
        let missing = self.figures.workspaces_missing;
        let worst = if missing.is_some() { Mood::Warning } else { Mood::Bad };
        let (low, high) = self.figures.peak_reserved_range;
        let (low, high) = (iec(low), iec(high));
        let range = (low != high)
            .then(|| format!("reserved {low} to {high}, depending on addresses that are not in the trace"));
        let shares =
            shares.as_ref().map(|shares| (if shares.fits { Mood::Good } else { worst }, self.shared(shares)));
        let oom = oom.as_ref().map(|oom| {
            let asked = iec(oom.requested_bytes);
            let (reserved, in_use) = (iec(oom.reserved_bytes), iec(oom.allocated_bytes));
            let at = format!("{} of {}", oom.request + 1, self.n_requests);
            format!("out of memory at request {at}: {asked} requested, {reserved} reserved, {in_use} in use")
        });
        let missing = missing.map(|n| {
            let workspaces = if n == 1 { "workspace" } else { "workspaces" };
            let text = format!(
                "that request is the workspace of a convolution: PyTorch then takes another algorithm, usually a slower one. Everything else fits without {n} such {workspaces}; how much memory the other algorithm needs is not in the trace"
            );
            (Mood::Note, text)
        });
        let capped = limit_bytes.zip(*device_memory_bytes).filter(|(limit, card)| limit > card);
        let capped = capped.map(|(limit, card)| {
            let (limit, card) = (iec(limit), iec(card));
            let text = format!(
                "a limit of {limit} is more than the card has: {card} is used; --device-memory asks about another card"
            );
            (Mood::Warning, text)
        });
        let counts = |name: &str| counters.get(name).is_some_and(|n| *n > 0);
        let is_undefined = counts("pools_lost") || counts("failed_assertions");
        let undefined =
            "PyTorch deletes, or fails to count, a released pool that is in use: the behaviour is undefined";
        capped
            .into_iter()
            .chain(range.map(|text| (Mood::Note, text)))
            .chain(shares)
            .chain(oom.map(|text| (worst, text)))
            .chain(missing)
            .chain(is_undefined.then(|| (Mood::Warning, undefined.to_owned())))
            .collect()
    }

    /// How the card was shared, in a line.
    fn shared(&self, shares: &Shares) -> String {
        let policy = &*self.figures.policy;
        let policy = if policy == torch::NAME { "PyTorch" } else { policy };
        let verdict = match (shares.fits, self.figures.workspaces_missing) {
            (true, _) => "fits",
            (false, Some(_)) => "may fit",
            (false, None) => "does not fit",
        };
        let (limit, reserved) = (iec(shares.limit_bytes), iec(shares.reserved_bytes));
        let mut line = format!("{verdict}: limit {limit} = {policy} {reserved}");
        for Held { owner, bytes } in shares.others.iter().flatten() {
            line += &format!(" + {owner} {}", iec(*bytes));
        }
        line += &format!(" + free {}", iec(shares.free_bytes));
        if let Some(refused) = shares.refused_bytes {
            line += &format!(", and {} more were requested", iec(refused));
        }
        line + match (&shares.others, shares.is_charge_known) {
            (None, _) => {
                "; the CUDA context and other libraries also need memory, which this trace does not show (--other BYTES)"
            }
            (Some(_), false) => {
                "; the CUDA context and code also need memory, which the driver did not report (--other BYTES)"
            }
            (Some(_), true) => "",
        }
    }
}

/// As it would be given to `--policy`.
pub(super) fn named(question: &Question) -> String {
    name(&question.policy, &question.options)
}

pub(super) fn name(policy: &str, options: &str) -> String {
    match options {
        "" => policy.to_owned(),
        options => format!("{policy}:{options}"),
    }
}

/// How well the recorded allocator is understood.
pub(super) fn self_check(section: Section, check: &whatif::SelfCheck) -> Section {
    let whatif::SelfCheck { torch_version, n_matching, n_requests, .. } = check;
    let text = format!("{n_matching} of {n_requests} addresses match as PyTorch {}", release(*torch_version));
    let first = check.first.map(|first| {
        let (op, bytes) = (first.op, first.requested);
        let (recorded, simulated) = (first.recorded, first.simulated);
        format!(
            "first difference at event {op}: {bytes} bytes were at {recorded:#x}, simulated at {simulated:#x}"
        )
    });
    section.remark("self_check", "self-check", Value::text(text), first.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_sim::ops::{Allocation, Builder, PoolIdx, StackId, StreamIdx};
    use gputrace_sim::stacks::Stacks;

    const MIB: u64 = 1 << 20;

    /// 60 MiB, and for a moment 300 for a function of that name.
    fn remarks(function: &str, limit_mib: u64) -> String {
        let frame = Frame { name: function.into(), file: "train.py".into(), line: 7 };
        let mut builder = Builder::new(0);
        let mut alloc = |mib| {
            let (stack, stream, pool) = (StackId(0), StreamIdx(0), PoolIdx::DEFAULT);
            builder.alloc(Allocation { requested: mib * MIB, address: 0, stack, stream, pool })
        };
        let (_, workspace) = (alloc(60), alloc(300));
        builder.op(Op::FreeRequested(workspace));
        builder.op(Op::FreeCompleted(workspace));
        let mut stream = builder.finish();
        stream.stacks = Stacks { frames: vec![frame], lists: vec![[0].into()], ..Stacks::default() }.into();
        let machine = Machine { limit: Some(Bytes(limit_mib * MIB)), ..Machine::default() };
        let simulated = Bench::new(&stream, machine).unwrap().simulate(torch::NAME, "").unwrap();
        simulated.remarks().into_iter().map(|(_, text)| text + "\n").collect()
    }

    #[test]
    fn without_the_workspaces_of_convolutions_a_run_may_fit() {
        let text = remarks("Conv2d._conv_forward", 200);
        assert!(text.starts_with("may fit: limit 200.00 MiB"), "{text}");
        assert!(text.contains("Everything else fits without 1 such workspace;"), "{text}");
        assert!(remarks("Linear.forward", 200).starts_with("does not fit: "));
        assert!(remarks("Conv2d._conv_forward", 400).starts_with("fits: "));
        assert!(remarks("Conv2d._conv_forward", 40).starts_with("does not fit: "));
    }
}
