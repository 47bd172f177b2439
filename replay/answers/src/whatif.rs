//! The same requests under other allocators: what `replay`, `tune` and `oom` have in common.

use gputrace_schemas::event::Bytes;
use gputrace_sim::bytes::iec;
use gputrace_sim::ops::OpStream;
use gputrace_sim::policies::torch;
use gputrace_sim::whatif::{Answer, Confidence, Laboratory, Other, Question, SelfCheck, Shares};
use serde_json::{Map, Value as Json, json};

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
    fn is_of_a_card(self) -> bool {
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
}

impl<'a> Bench<'a> {
    /// # Errors
    /// Why the requests cannot be replayed.
    pub(super) fn new(stream: &'a OpStream, machine: Machine) -> Result<Bench<'a>, String> {
        let laboratory = Laboratory::new(stream)
            .map_err(|why| format!("device {} cannot be replayed: {why}", stream.device))?;
        let self_check = laboratory.self_check(machine.torch_version);
        Ok(Bench { stream, laboratory, self_check, reactions: reactions(stream), machine })
    }

    pub(super) fn question(&self, policy: &str, options: &str) -> Question {
        self.machine.question(self.stream, self.self_check.torch_version, policy, options)
    }

    /// Why no answer is better than a guess.
    pub(super) fn doubt(&self) -> Option<String> {
        doubt(self.stream, &self.self_check).map(|why| format!("a guess: {why}"))
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
        let range = (low != high).then(|| {
            format!("reserved {low} to {high}, depending on addresses that the trace does not hold")
        });
        let shares = self
            .shares
            .as_ref()
            .map(|shares| (if shares.fits { Mood::Good } else { Mood::Bad }, self.shared(shares)));
        let oom = outcome.oom.as_ref().map(|oom| {
            let (asked, reserved, in_use) = (iec(oom.requested), iec(oom.reserved), iec(oom.allocated));
            let at = format!("{} of {}", oom.request + 1, self.n_requests);
            format!("out of memory at request {at}: {asked} asked for, {reserved} reserved, {in_use} in use")
        });
        let is_undefined = outcome.counter("pools_lost") + outcome.counter("failed_assertions") > 0;
        let undefined = "PyTorch deletes, or fails to count, a released pool that is in use: what it does then is undefined";
        range
            .map(|text| (Mood::Note, text))
            .into_iter()
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
            line += &format!(", and {} more were asked for", iec(refused));
        }
        line + match (&shares.others, shares.is_charge_known) {
            (None, _) => {
                "; the CUDA context and other libraries need their part, which this trace does not hold (--other BYTES)"
            }
            (Some(_), false) => {
                "; the CUDA context and code need their part, which the driver did not report (--other BYTES)"
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
