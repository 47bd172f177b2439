//! The same requests under other allocators: what `replay`, `tune` and `oom` have in common.

use gputrace_schemas::event::Bytes;
use gputrace_sim::bytes::iec;
use gputrace_sim::ops::{Op, OpStream};
use gputrace_sim::policies::torch;
use gputrace_sim::simulator::Outcome;
use gputrace_sim::whatif::{Answer, Confidence, Laboratory, Other, Question, SelfCheck, Shares};
use serde_json::{Map, Value as Json, json};

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
    pub(super) self_check: SelfCheck,
    /// What the replay cannot follow.
    pub(super) reactions: Vec<Reaction>,
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
    fn of(stream: &OpStream, laboratory: &Laboratory<'_>, check: &SelfCheck) -> Totals {
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
        Ok(Bench { stream, laboratory, self_check, reactions: reactions(stream), machine, totals })
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
        Simulated { question, answer, n_requests: self.stream.n_requests(), shares }
    }
}

/// What became of the requests under one allocator.
pub(super) struct Simulated {
    pub(super) question: Question,
    pub(super) answer: Answer,
    n_requests: usize,
    /// How the card was shared, where one was asked about.
    pub(super) shares: Option<Shares>,
}

impl Simulated {
    pub(super) fn peak_reserved(&self) -> u64 {
        self.answer.outcome.books.reserved.peak
    }

    pub(super) fn peak_allocated(&self) -> u64 {
        self.answer.outcome.books.allocated.peak
    }

    pub(super) fn fits(&self) -> bool {
        self.answer.outcome.fits()
    }

    /// What its figures alone do not say: how sure they are, whether it fits, where it fails.
    pub(super) fn remarks(&self) -> Vec<(Mood, String)> {
        let (outcome, (low, high)) = (&self.answer.outcome, self.answer.peak_reserved_range);
        let (low, high) = (iec(low), iec(high));
        let range = (low != high)
            .then(|| format!("reserved {low} to {high}, depending on addresses that are not in the trace"));
        let shares = self
            .shares
            .as_ref()
            .map(|shares| (if shares.fits { Mood::Good } else { Mood::Bad }, self.shared(shares)));
        let oom = outcome.oom.as_ref().map(|oom| {
            let (asked, reserved, in_use) = (iec(oom.requested), iec(oom.reserved), iec(oom.allocated));
            let at = format!("{} of {}", oom.request + 1, self.n_requests);
            format!("out of memory at request {at}: {asked} requested, {reserved} reserved, {in_use} in use")
        });
        let capped =
            (self.question.limit.zip(self.question.device_memory)).filter(|(limit, card)| limit > card);
        let capped = capped.map(|(limit, card)| {
            let (limit, card) = (iec(limit), iec(card));
            let text = format!(
                "a limit of {limit} is more than the card has: {card} is used; --device-memory asks about another card"
            );
            (Mood::Warning, text)
        });
        let is_undefined = outcome.counter("pools_lost") + outcome.counter("failed_assertions") > 0;
        let undefined =
            "PyTorch deletes, or fails to count, a released pool that is in use: the behaviour is undefined";
        capped
            .into_iter()
            .chain(range.map(|text| (Mood::Note, text)))
            .chain(shares)
            .chain(oom.map(|text| (Mood::Bad, text)))
            .chain(is_undefined.then(|| (Mood::Warning, undefined.to_owned())))
            .collect()
    }

    /// How the card was shared, in a line.
    fn shared(&self, shares: &Shares) -> String {
        let policy = &*self.question.policy;
        let policy = if policy == torch::NAME { "PyTorch" } else { policy };
        let verdict = if shares.fits { "fits" } else { "does not fit" };
        let mut line = format!("{verdict}: limit {} = {policy} {}", iec(shares.limit), iec(shares.reserved));
        for (owner, bytes) in shares.others.iter().flatten() {
            line += &format!(" + {owner} {}", iec(*bytes));
        }
        line += &format!(" + free {}", iec(shares.free()));
        if let Some(refused) = shares.refused {
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

    pub(super) fn json(&self) -> Json {
        let Simulated { question, answer, .. } = self;
        let (outcome, books) = (&answer.outcome, &answer.outcome.books);
        let counters = outcome.counters.iter().map(|(name, value)| ((*name).to_owned(), json!(value)));
        let oom = outcome.oom.as_ref().map(|oom| {
            json!({
                "request": oom.request,
                "requested_bytes": oom.requested,
                "segment_bytes": oom.error.segment_bytes,
                "reserved_bytes": oom.reserved,
                "allocated_bytes": oom.allocated,
                "message": oom.error.message,
            })
        });
        json!({
            "policy": question.policy,
            "options": question.options,
            "torch_version": release(question.torch_version),
            "device_memory_bytes": question.device_memory,
            "limit_bytes": question.limit,
            "confidence": answer.confidence.name(),
            "fits": outcome.fits(),
            "peak_reserved_bytes": books.reserved.peak,
            "peak_reserved_range": [answer.peak_reserved_range.0, answer.peak_reserved_range.1],
            "peak_allocated_bytes": books.allocated.peak,
            "peak_active_bytes": books.active.peak,
            "peak_requested_bytes": books.requested.peak,
            "peak_inactive_split_bytes": books.inactive_split.peak,
            "num_device_alloc": books.n_device_alloc,
            "num_device_free": books.n_device_free,
            "num_alloc_retries": outcome.counter("num_alloc_retries"),
            "num_ooms": outcome.counter("num_ooms"),
            "counters": counters.collect::<Map<_, _>>(),
            "n_guesses": answer.n_oom.1,
            "n_guesses_out_of_memory": answer.n_oom.0,
            "oom": oom,
            "shares": self.shares.as_ref().map(shares_json),
        })
    }
}

/// As it would be given to `--policy`.
pub(super) fn named(question: &Question) -> String {
    match question.options.as_str() {
        "" => question.policy.clone(),
        options => format!("{}:{options}", question.policy),
    }
}

fn shares_json(shares: &Shares) -> Json {
    let other = |(owner, bytes): &(String, u64)| json!({"owner": owner, "bytes": bytes});
    json!({
        "limit_bytes": shares.limit,
        "fits": shares.fits,
        "reserved_bytes": shares.reserved,
        "others": shares.others.as_ref().map(|others| others.iter().map(other).collect::<Vec<_>>()),
        "free_bytes": shares.free(),
        "refused_bytes": shares.refused,
    })
}

/// What the replay cannot follow, for programs.
pub(super) fn warnings_json(reactions: &[Reaction]) -> Json {
    let warning = |reaction: &Reaction| {
        let site = reaction.site.as_ref();
        let site = site.map(|site| json!({"function": *site.name, "file": *site.file, "line": site.line}));
        json!({"kind": reaction.kind.name(), "count": reaction.count, "call_site": site, "text": reaction.text()})
    };
    reactions.iter().map(warning).collect()
}

/// How well the recorded allocator is understood.
pub(super) fn self_check(section: Section, check: &SelfCheck) -> Section {
    let SelfCheck { torch_version, n_matching, n_requests, .. } = check;
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

/// The same for programs.
pub(super) fn self_check_json(check: &SelfCheck) -> Json {
    json!({
        "matching": check.n_matching,
        "of": check.n_requests,
        "torch_version": release(check.torch_version),
    })
}
