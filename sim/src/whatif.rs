//! Asks what another allocator would have made of a trace, and how sure the answer is.
//!
//! Where device addresses decide (PyTorch up to 2.11, equal free blocks) and the simulated allocator makes other driver
//! calls than the recorded one, the addresses are not known. The best guess is then accompanied by many others, and
//! the answer is an interval.

use std::borrow::Cow;
use std::ops::ControlFlow;
use std::sync::OnceLock;

use crate::addresses::{AddressSpace, Bump, Direction, Recorded, Shuffled};
use crate::cores::on_all_cores;
use crate::device::{Books, Device, Placement};
use crate::driver::{Continued, Disturbance, Knowledge};
use crate::effort;
use crate::gap::{Dissection, Gap, PeakFinder};
use crate::ops::{AllocId, Allocation, History, Op, OpStream, OtherChange, Others};
use crate::policies::torch::{self, Latitude, NEWEST, PROFILES};
use crate::policies::{ADDRESS_TIES, Build, Fidelity, OptionError, Policy, PolicyEntry, by_name};
use crate::replays::{Addresses, Replay, Replays};
use crate::simulator::{Observer, Outcome, Skip, Unobserved, run_knowing, run_with_limits};
use crate::skip::{self, Repeats};

/// What to simulate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Question {
    /// Name in [`POLICIES`](crate::policies::POLICIES).
    pub policy: String,
    /// The policy's options.
    pub options: String,
    /// The PyTorch release, where the policy depends on it.
    pub torch_version: (u8, u8),
    /// Memory of the device, bytes; none for unlimited.
    pub device_memory: Option<u64>,
    /// The most that the process may reserve, bytes. Where others are counted, they and the allocator share it.
    pub limit: Option<u64>,
    /// Memory that others hold of the device.
    pub other: Other,
}

impl Question {
    /// What PyTorch's allocator of a release would have made of it, in a world without limit.
    pub fn torch(version: (u8, u8), options: &str) -> Question {
        Question {
            policy: torch::NAME.into(),
            options: options.into(),
            torch_version: version,
            device_memory: None,
            limit: None,
            other: Other::Ignored,
        }
    }

    /// The same where so much may be reserved, bytes.
    fn under(&self, limit: u64) -> Question {
        Question { limit: Some(limit), ..self.clone() }
    }
}

/// What others than the simulated allocator hold of the device: contexts, code, other libraries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Other {
    /// It is not counted.
    #[default]
    Ignored,
    /// What the trace says, at each moment; not counted where it says nothing.
    Recorded,
    /// So many bytes all the time.
    Bytes(u64),
}

/// How the memory that a process may use is shared at its tightest moment, or where the simulated allocator ran out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shares {
    /// All that there is, bytes.
    pub limit: u64,
    /// Whether it was enough.
    pub fits: bool,
    /// Reserved by the simulated allocator, bytes.
    pub reserved: u64,
    /// Who else held how many bytes, most first; none where nobody told.
    pub others: Option<Vec<(String, u64)>>,
    /// Contexts and code are among them.
    pub is_charge_known: bool,
    /// What the allocator asked the driver for when it ran out, bytes.
    pub refused: Option<u64>,
}

impl Shares {
    /// Memory that nobody held, bytes.
    pub fn free(&self) -> u64 {
        let others = self.others.iter().flatten().map(|(_, bytes)| bytes);
        others.fold(self.limit.saturating_sub(self.reserved), |free, bytes| free.saturating_sub(*bytes))
    }
}

/// How sure an answer is; the surest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confidence {
    /// The real allocator would have done the same, to the byte.
    Exact,
    /// It depends on addresses that the trace does not tell; the range says how much.
    Interval,
    /// A model of an allocator that is not public: what it could at best do.
    Bound,
    /// The replay of what was recorded is not what was recorded.
    Guess,
}

impl Confidence {
    /// As written in `--json`.
    pub fn name(self) -> &'static str {
        match self {
            Confidence::Exact => "exact",
            Confidence::Interval => "interval",
            Confidence::Bound => "bound",
            Confidence::Guess => "guess",
        }
    }
}

/// Writes down what is reserved.
struct Reserved(Vec<u64>);

impl Observer for Reserved {
    fn placed(&mut self, _op: usize, _id: AllocId, _at: Placement, device: &Device) -> ControlFlow<()> {
        self.0.push(device.books.reserved.current);
        ControlFlow::Continue(())
    }

    fn edge(&self) -> Option<[u64; 2]> {
        Some([self.0.len() as u64, 0])
    }

    fn skipped(&mut self, skip: &Skip, [since, _]: [u64; 2], _: &[(AllocId, AllocId, Placement)]) {
        let of_a_cycle = since as usize..self.0.len();
        for _ in 0..skip.times() {
            self.0.extend_from_within(of_a_cycle.clone());
        }
    }
}

/// What would have been.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The best guess.
    pub outcome: Outcome,
    /// How sure it is.
    pub confidence: Confidence,
    /// Smallest and largest peak of reserved bytes among all guesses.
    pub peak_reserved_range: (u64, u64),
    /// How many guesses ran out of memory, of how many.
    pub n_oom: (usize, usize),
}

/// How well the recorded allocator is understood: a replay of what was recorded, held against what was recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfCheck {
    /// The release that was simulated.
    pub torch_version: (u8, u8),
    /// Requests that were served at the recorded address.
    pub n_matching: usize,
    /// Requests.
    pub n_requests: usize,
    /// Driver calls that the recorded allocator did not make.
    pub n_strayed: u64,
    /// The first request that was not.
    pub first: Option<Divergence>,
}

impl SelfCheck {
    /// Whether everything matched.
    pub fn is_perfect(&self) -> bool {
        self.n_matching == self.n_requests && self.n_strayed == 0
    }
}

/// A request that the simulated allocator served elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// Index of the op.
    pub op: usize,
    /// Bytes requested.
    pub requested: u64,
    /// Where it really was.
    pub recorded: u64,
    /// Where the simulation put it.
    pub simulated: u64,
}

/// A trace, ready to be asked about.
pub struct Laboratory<'a> {
    stream: &'a OpStream,
    /// Found when they are first of use.
    repeats: OnceLock<Repeats>,
    simulates_all: bool,
    knowledge: Knowledge,
    replays: Replays,
    effort: usize,
    /// Replays that are made beside its guesses, for one answer with them.
    n_beside: usize,
}

/// At most so many guesses, and at least so many where a trace is so long that the time is felt.
const GUESSES: std::ops::RangeInclusive<usize> = 8..=64;
/// So many of the fewest guesses, other replays may stand for.
const LEAST_BESIDE: usize = 6;
/// Where wholly unknown addresses make more difference than this, only addresses near the best guess are reported:
/// recorded addresses say much about the others.
const WIDEST: f64 = 0.03;

impl<'a> Laboratory<'a> {
    /// Prepares a trace.
    ///
    /// # Errors
    /// When its history cannot be replayed; the text says why.
    pub fn new(stream: &'a OpStream) -> Result<Laboratory<'a>, String> {
        match &stream.history {
            History::Broken(why) => Err(why.clone()),
            History::Complete | History::StartsLate => Ok(Laboratory {
                stream,
                repeats: OnceLock::new(),
                simulates_all: !skip::is_on(),
                knowledge: Knowledge::of(stream),
                replays: Replays::default(),
                effort: effort::GUESSES.most,
                n_beside: 0,
            }),
        }
    }

    /// Where the requests repeat.
    fn repeats(&self) -> &Repeats {
        self.repeats
            .get_or_init(|| if self.simulates_all { Repeats::default() } else { Repeats::of(self.stream) })
    }

    /// What is replayed.
    pub(crate) fn stream(&self) -> &'a OpStream {
        self.stream
    }

    /// Prepares what was predicted and not recorded: no addresses are known, and no history has holes.
    #[must_use]
    pub fn of_prediction(stream: &'a OpStream) -> Laboratory<'a> {
        let (knowledge, replays, repeats) = (Knowledge::of(stream), Replays::default(), OnceLock::new());
        Laboratory {
            stream,
            repeats,
            simulates_all: !skip::is_on(),
            knowledge,
            replays,
            effort: effort::GUESSES_OF_PREDICTION.most,
            n_beside: 0,
        }
    }

    /// The same with every op of every replay simulated, those too that are known to come out as before. The answers are the same.
    #[must_use]
    pub fn simulating_all(self) -> Laboratory<'a> {
        Laboratory { simulates_all: true, ..self }
    }

    /// The same where so many replays with other sizes are part of the answer: where the time is felt, there are so many guesses fewer.
    pub(crate) fn beside(self, n_beside: usize) -> Laboratory<'a> {
        Laboratory { n_beside, ..self }
    }

    /// Replays the recorded configuration under the release that explains it best: the one that is named, or the newest
    /// of those that match most addresses.
    pub fn self_check(&self, torch_version: Option<(u8, u8)>) -> SelfCheck {
        let settings = &self.stream.settings;
        if let Some(version) = torch_version.or(settings.torch_version) {
            return self.check_as(version);
        }
        let least = settings.torch_at_least.unwrap_or(PROFILES[0].version);
        let mut best = self.check_as(NEWEST);
        if !settings.is_torch() {
            return best;
        }
        for candidate in PROFILES.iter().rev().filter(|it| it.version >= least && it.version < NEWEST) {
            if best.is_perfect() {
                break;
            }
            let check = self.check_as(candidate.version);
            if check.n_matching > best.n_matching {
                best = check;
            }
        }
        best
    }

    fn check_as(&self, torch_version: (u8, u8)) -> SelfCheck {
        let settings = &self.stream.settings;
        let options = settings.options.clone().unwrap_or_default();
        let question = Question {
            policy: settings.policy.to_owned(),
            device_memory: settings.device_memory,
            ..Question::torch(torch_version, &options)
        };
        match self.check_under(&question) {
            Ok((check, _)) => check,
            Err(_) => SelfCheck { torch_version, n_matching: 0, n_requests: 0, n_strayed: 0, first: None },
        }
    }

    /// Replays a question at the recorded addresses, and holds it against what was recorded: whether that is how it was.
    ///
    /// # Errors
    /// When there is no such policy or it does not understand its options.
    pub fn check_under(&self, question: &Question) -> Result<(SelfCheck, Outcome), OptionError> {
        // What others held is not counted here, whatever the question says.
        let question = &Question { other: Other::Ignored, ..question.clone() };
        self.check_limits(question, &[])?;
        let known = self.replays.answering(question, Addresses::Recorded);
        let known = known.and_then(|known| Some((known.check?, known.outcome)));
        known.ok_or_else(|| OptionError("its replay was not kept".into()))
    }

    /// Replays a question at the recorded addresses, and on the way the same with lower limits: until one is met, the runs are one. What
    /// comes of each is kept for who asks ([`Laboratory::check_under`]).
    ///
    /// # Errors
    /// As [`Laboratory::check_under`].
    pub fn check_limits(&self, question: &Question, limits: &[u64]) -> Result<(), OptionError> {
        let stream = self.stream;
        let Some((question, limits)) = self.left(question, limits, Addresses::Recorded) else {
            return Ok(());
        };
        let torch_version = question.torch_version;
        let mut policy = self.build(&question.policy, &question.options, torch_version)?;
        let mut device = device(&question, Box::new(Recorded::new(&stream.driver)), None);
        let check = SelfCheck { torch_version, n_matching: 0, n_requests: 0, n_strayed: 0, first: None };
        let mut comparison = Comparison { stream, check, newest: Vec::new() };
        let (outcome, below) = run_with_limits(
            (stream, self.repeats()),
            true,
            &mut *policy,
            &mut device,
            &mut comparison,
            &limits,
        );
        let keep = |question: &Question, latitude, check: SelfCheck, outcome, n_strayed| {
            let check = Some(SelfCheck { n_strayed, ..check });
            let replay = Replay { outcome, has_parted: false, check };
            self.replays.keep(question, Addresses::Recorded, latitude, &replay);
        };
        for it in below {
            keep(&question.under(it.limit), it.latitude, it.observer.check, it.outcome, it.n_strayed);
        }
        keep(&question, policy.latitude(), comparison.check, outcome, device.n_strayed());
        Ok(())
    }

    /// What must be replayed to know what comes of a question and of the same under lower limits, of which the replay is the first.
    fn left(&self, question: &Question, limits: &[u64], at: Addresses) -> Option<(Question, Vec<u64>)> {
        // On a device of known size a limit is a fraction of it, and what others hold counts towards one.
        let can_fork = question.device_memory.is_none() && question.other == Other::Ignored;
        let mut limits: Vec<u64> = limits
            .iter()
            .copied()
            .filter(|limit| can_fork && question.limit.is_none_or(|own| *limit < own))
            .filter(|limit| self.replays.answering(&question.under(*limit), at).is_none())
            .collect();
        limits.sort_unstable();
        limits.dedup();
        if self.replays.answering(question, at).is_none() {
            return Some((question.clone(), limits));
        }
        let highest = limits.pop()?;
        Some((question.under(highest), limits))
    }

    fn build(
        &self,
        policy: &str,
        options: &str,
        torch_version: (u8, u8),
    ) -> Result<Box<dyn Policy>, OptionError> {
        (by_name(policy)?.build)(Build {
            options,
            torch_version,
            n_streams: self.stream.streams.len(),
            n_pools: self.stream.pools.len(),
            profile: Some(self.stream),
        })
    }

    /// Replays a question, unless a replay that was made tells what comes of it.
    fn replay(&self, question: &Question, addresses: Addresses) -> Result<Replay, OptionError> {
        if let Some(known) = self.replays.answering(question, addresses) {
            return Ok(known);
        }
        let (replay, latitude) = self.replay_anew(question, addresses, &mut Unobserved)?;
        self.replays.keep(question, addresses, latitude, &replay);
        Ok(replay)
    }

    /// As [`Laboratory::guess`], and on the way what comes of the same under lower limits: until one is met, the runs are one. That is kept
    /// for who asks.
    ///
    /// # Errors
    /// As [`Laboratory::guess`].
    pub fn guess_with_limits(&self, question: &Question, limits: &[u64]) -> Result<Outcome, OptionError> {
        if let Some((first, limits)) = self.left(question, limits, Addresses::Best) {
            let mut policy = self.build(&first.policy, &first.options, first.torch_version)?;
            let others = self.others(&first);
            let mut device = device(&first, self.space(Addresses::Best), others.as_deref());
            let (outcome, below) = run_with_limits(
                (self.stream, self.repeats()),
                false,
                &mut *policy,
                &mut device,
                &mut Unobserved,
                &limits,
            );
            let keep = |question: &Question, latitude, outcome, n_strayed: u64| {
                let replay = Replay { outcome, has_parted: n_strayed > 0, check: None };
                self.replays.keep(question, Addresses::Best, latitude, &replay);
            };
            for it in below {
                keep(&first.under(it.limit), it.latitude, it.outcome, it.n_strayed);
            }
            keep(&first, policy.latitude(), outcome, device.n_strayed());
        }
        self.guess(question)
    }

    fn replay_anew(
        &self,
        question: &Question,
        addresses: Addresses,
        observer: &mut impl Observer,
    ) -> Result<(Replay, Option<Latitude>), OptionError> {
        let space = self.space(addresses);
        let mut policy = self.build(&question.policy, &question.options, question.torch_version)?;
        let others = self.others(question);
        let mut device = device(question, space, others.as_deref());
        let outcome = run_knowing(self.stream, self.repeats(), &mut *policy, &mut device, observer);
        let replay = Replay { outcome, has_parted: device.n_strayed() > 0, check: None };
        Ok((replay, policy.latitude()))
    }

    fn others(&self, question: &Question) -> Option<Cow<'_, Others>> {
        match question.other {
            Other::Ignored => None,
            Other::Recorded => self.stream.others.as_ref().map(Cow::Borrowed),
            Other::Bytes(bytes) => Some(Cow::Owned(Others {
                names: vec!["others".to_owned()],
                changes: vec![OtherChange { before_op: 0, name: 0, bytes }],
                is_charge_known: true,
            })),
        }
    }

    /// How the memory of a question was shared; none where there is no end to it.
    pub fn shares(&self, question: &Question, outcome: &Outcome) -> Option<Shares> {
        let limit = question.limit.into_iter().chain(question.device_memory).min()?;
        let oom = outcome.oom.as_ref();
        let at = oom.map_or(outcome.tightest, |oom| oom.held);
        let others = self.others(question);
        let named = others.as_ref().map(|others| {
            let held = others.names.iter().cloned().zip(others.at(at.op));
            let mut held: Vec<(String, u64)> = held.filter(|(_, bytes)| *bytes > 0).collect();
            held.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
            held
        });
        Some(Shares {
            limit,
            fits: outcome.fits(),
            reserved: at.reserved,
            others: named,
            is_charge_known: others.is_some_and(|others| others.is_charge_known),
            refused: oom.map(|oom| oom.error.segment_bytes),
        })
    }

    /// Simulates one question without looking at other addresses. For searches.
    ///
    /// # Errors
    /// When the policy does not understand its options.
    pub fn guess(&self, question: &Question) -> Result<Outcome, OptionError> {
        Ok(self.replay(question, Addresses::Best)?.outcome)
    }

    /// As [`Laboratory::guess`], but ends where the books say that nobody will ask for the rest. Whether it did not.
    pub(crate) fn guess_until(
        &self,
        question: &Question,
        is_enough: impl FnMut(&Books) -> bool,
    ) -> Result<(Outcome, bool), OptionError> {
        if let Some(known) = self.replays.answering(question, Addresses::Best) {
            return Ok((known.outcome, true));
        }
        let mut until = Until { is_enough, was_enough: false };
        let (replay, latitude) = self.replay_anew(question, Addresses::Best, &mut until)?;
        if !until.was_enough {
            self.replays.keep(question, Addresses::Best, latitude, &replay);
        }
        Ok((replay.outcome, !until.was_enough))
    }

    /// As [`Laboratory::guess`], with somebody who watches and may go on where there is no room. Nothing of it is kept.
    pub(crate) fn guess_watched(
        &self,
        question: &Question,
        observer: &mut impl Observer,
    ) -> Result<Outcome, OptionError> {
        Ok(self.replay_anew(question, Addresses::Best, observer)?.0.outcome)
    }

    #[cfg(test)]
    pub(crate) fn n_replays(&self) -> usize {
        self.replays.n()
    }

    /// Whether one request alone is for more than there is, so that no setting of PyTorch's makes it fit.
    pub(crate) fn never_fits(&self, question: &Question) -> bool {
        // A limit becomes a fraction and then bytes again.
        const ROUNDING: u64 = 1 << 20;
        let end = question.limit.into_iter().chain(question.device_memory).min();
        let served = self.stream.allocations.iter().map(|allocation| allocation.requested);
        let largest = served.chain(self.stream.ooms.iter().map(|oom| oom.rounded)).max();
        question.policy == torch::NAME
            && largest > end.map(|end| end.saturating_add(ROUNDING))
            && end.is_some()
    }

    /// What would have been reserved after each request that was served, at the best guess of the addresses.
    ///
    /// # Errors
    /// When there is no such policy or it does not understand its options.
    pub fn reserved_over_time(&self, question: &Question) -> Result<(Outcome, Vec<u64>), OptionError> {
        let mut policy = self.build(&question.policy, &question.options, question.torch_version)?;
        let space = Box::new(Continued::new(&self.knowledge, None));
        let others = self.others(question);
        let mut reserved = Reserved(Vec::with_capacity(self.stream.n_requests()));
        let device = &mut device(question, space, others.as_deref());
        let outcome = run_knowing(self.stream, self.repeats(), &mut *policy, device, &mut reserved);
        Ok((outcome, reserved.0))
    }

    /// Takes apart why more was reserved than was in use when most was reserved, at the best guess of the addresses.
    ///
    /// # Errors
    /// When there is no such policy or it does not understand its options.
    pub fn gap(&self, question: &Question) -> Result<Gap, OptionError> {
        let watched = |observer: &mut dyn FnMut(&mut dyn Policy, &mut Device)| {
            let mut policy = self.build(&question.policy, &question.options, question.torch_version)?;
            let space = Box::new(Continued::new(&self.knowledge, None));
            let others = self.others(question);
            observer(&mut *policy, &mut device(question, space, others.as_deref()));
            Ok(())
        };
        let mut peak = PeakFinder::default();
        watched(&mut |policy, device| {
            run_knowing(self.stream, self.repeats(), policy, device, &mut peak);
        })?;
        let Some(at) = peak.op() else { return Ok(Gap::default()) };
        let policy = self.build(&question.policy, &question.options, question.torch_version)?;
        let rounded = |bytes| policy.rounded(bytes).unwrap_or(u64::MAX);
        let mut dissection = Dissection::new(self.stream, at, rounded);
        watched(&mut |policy, device| {
            run_knowing(self.stream, self.repeats(), policy, device, &mut dissection);
        })?;
        Ok(dissection.found)
    }

    /// Simulates a question and says how sure the outcome is.
    ///
    /// # Errors
    /// When there is no such policy or it does not understand its options.
    pub fn answer(&self, question: &Question) -> Result<Answer, OptionError> {
        let Replay { outcome, has_parted, .. } = self.replay(question, Addresses::Best)?;
        let hangs_on_addresses = has_parted && !self.knowledge.is_sure();
        self.judged(question, outcome, hangs_on_addresses)
    }

    /// Which question's [`Answer::peak_reserved_range`] ends lowest, and at most at `most` bytes, with its answer; of equals the first.
    /// Costs less than all answers: where the best guess alone is above another's range, nothing further is tried.
    #[must_use]
    pub fn least_reserving(&self, questions: &[Question], most: u64) -> Option<(usize, Answer)> {
        let mut replayed = on_all_cores(questions.len(), |index| {
            let replay = self.replay(&questions[index], Addresses::Best).ok()?;
            Some((replay.outcome.books.reserved.peak, index, replay))
        });
        replayed.sort_by_key(|(peak, index, _)| (*peak, *index));
        let mut best: Option<(u64, usize, Answer)> = None;
        for (peak, index, Replay { outcome, has_parted, .. }) in replayed {
            if peak > best.as_ref().map_or(most, |(least, ..)| *least) {
                break;
            }
            let hangs_on_addresses = has_parted && !self.knowledge.is_sure();
            let Ok(answer) = self.judged(&questions[index], outcome, hangs_on_addresses) else { continue };
            let end = answer.peak_reserved_range.1;
            if end <= most && best.as_ref().is_none_or(|(least, first, _)| (end, index) < (*least, *first)) {
                best = Some((end, index, answer));
            }
        }
        best.map(|(_, index, answer)| (index, answer))
    }

    /// As [`Laboratory::answer`], for another run of the same program: what lay where in the recorded one holds for that
    /// alone.
    ///
    /// # Errors
    /// As [`Laboratory::answer`].
    pub fn elsewhere(&self, question: &Question) -> Result<Answer, OptionError> {
        let outcome = self.guess(question)?;
        self.judged(question, outcome, true)
    }

    /// How much more may be reserved in another run of the same program, as a part of the peak, before [`Laboratory::elsewhere`]
    /// has to be asked. Chosen and not measured: where the guesses of an answer lie further apart, the answer is no longer
    /// narrow ([`Answer::peak_reserved_range`]) either.
    pub const ELSEWHERE: f64 = WIDEST;

    fn judged(
        &self,
        question: &Question,
        outcome: Outcome,
        hangs_on_addresses: bool,
    ) -> Result<Answer, OptionError> {
        let entry = by_name(&question.policy)?;
        let peak = outcome.books.reserved.peak;
        let certain = |outcome: Outcome| {
            let n_oom = (usize::from(!outcome.fits()), 1);
            let confidence = self.certain_confidence(entry);
            Answer { outcome, confidence, peak_reserved_range: (peak, peak), n_oom }
        };
        let depends = outcome.has_counter(ADDRESS_TIES) && outcome.counter(ADDRESS_TIES) > 0;
        if !depends || !hangs_on_addresses {
            return Ok(certain(outcome));
        }
        let guesses = self.guesses(question);
        if guesses.iter().all(|guess| same(&guess.outcome, &outcome)) {
            return Ok(certain(outcome));
        }
        let range = |informed_only: bool| {
            let kept = guesses.iter().filter(|guess| guess.is_informed || !informed_only);
            kept.map(|guess| guess.outcome.books.reserved.peak)
                .fold((peak, peak), |(low, high), peak| (low.min(peak), high.max(peak)))
        };
        let (low, high) = range(false);
        let is_narrow = high as f64 <= low as f64 * (1.0 + WIDEST);
        let n_oom = guesses.iter().filter(|guess| !guess.outcome.fits()).count();
        Ok(Answer {
            n_oom: (n_oom + usize::from(!outcome.fits()), guesses.len() + 1),
            outcome,
            confidence: Confidence::Interval,
            peak_reserved_range: if is_narrow { (low, high) } else { range(true) },
        })
    }

    fn certain_confidence(&self, entry: &PolicyEntry) -> Confidence {
        match (entry.fidelity, &self.stream.history) {
            (Fidelity::Model, _) => Confidence::Bound,
            (Fidelity::Exact, History::Complete) => Confidence::Exact,
            // Where the live blocks lay at the start would have been different, too.
            (Fidelity::Exact, _) => Confidence::Interval,
        }
    }

    /// The same question at other addresses, on all cores.
    fn guesses(&self, question: &Question) -> Vec<Guess> {
        let affordable = self.effort / self.stream.ops.len().max(1);
        let n_guesses = affordable
            .clamp(*GUESSES.start(), *GUESSES.end())
            .min(affordable.max(GUESSES.start() - self.n_beside.min(LEAST_BESIDE)));
        on_all_cores(n_guesses, |index| {
            let outcome = self.replay(question, Addresses::Guess(index)).ok()?.outcome;
            Some(Guess { outcome, is_informed: is_informed(index) })
        })
    }

    fn space(&self, addresses: Addresses) -> Box<dyn AddressSpace + '_> {
        match addresses {
            Addresses::Recorded => Box::new(Recorded::new(&self.stream.driver)),
            Addresses::Best => Box::new(Continued::new(&self.knowledge, None)),
            Addresses::Guess(index) => self.guessed_space(index),
        }
    }

    /// A family of address spaces: one in two near the best guess, the others as if nothing were known.
    fn guessed_space(&self, index: usize) -> Box<dyn AddressSpace + '_> {
        let seed = index as u64 + 1;
        match index {
            0 => Box::new(Bump::new(Direction::Ascending)),
            1 => Box::new(Bump::new(Direction::Descending)),
            _ if is_informed(index) => {
                // The rule is broken as often as in the recorded run, or more often.
                let rate = (self.knowledge.surprises * [1.0, 2.0][index / 2 % 2]).max(0.05);
                Box::new(Continued::new(&self.knowledge, Some(Disturbance::new(seed, rate))))
            }
            _ => Box::new(Shuffled::new(seed)),
        }
    }
}

/// Whether a guess is near the best one.
fn is_informed(index: usize) -> bool {
    index > 1 && index.is_multiple_of(2)
}

fn device<'a>(
    question: &Question,
    space: Box<dyn AddressSpace + 'a>,
    others: Option<&'a Others>,
) -> Device<'a> {
    let device = Device::new(question.device_memory.unwrap_or(u64::MAX), question.limit, space);
    match others {
        Some(others) => device.beside(others),
        None => device,
    }
}

/// The gap of a run as it was recorded, found by replaying it under its own settings.
#[derive(Clone, Debug)]
pub struct RecordedGap {
    /// On which device.
    pub device: u32,
    /// The gap.
    pub found: Gap,
    /// How far the replay is the recorded run.
    pub self_check: SelfCheck,
}

/// The gaps of all devices on which PyTorch's allocator was recorded and can be replayed.
pub fn recorded_gaps(devices: &[OpStream]) -> Vec<RecordedGap> {
    let streams = devices.iter().filter(|stream| stream.settings.is_torch());
    let gap = |stream| {
        let laboratory = Laboratory::new(stream).ok()?;
        let self_check = laboratory.self_check(None);
        let options = stream.settings.options.as_deref().unwrap_or_default();
        let question = Question {
            device_memory: stream.settings.device_memory,
            ..Question::torch(self_check.torch_version, options)
        };
        let found = laboratory.gap(&question).ok()?;
        Some(RecordedGap { device: stream.device, found, self_check })
    };
    streams.filter_map(gap).collect()
}

struct Guess {
    outcome: Outcome,
    is_informed: bool,
}

/// Whether two runs cannot be told apart by what is reported.
fn same(one: &Outcome, other: &Outcome) -> bool {
    let numbers = |outcome: &Outcome| {
        let books = outcome.books;
        let torch = ["num_alloc_retries", "num_ooms"].map(|name| outcome.counter(name));
        let peaks = [books.reserved.peak, books.allocated.peak, books.active.peak, books.requested.peak];
        (peaks, books.n_device_alloc, books.n_device_free, torch, outcome.oom.as_ref().map(|oom| oom.request))
    };
    numbers(one) == numbers(other)
}

/// Ends a run.
struct Until<F> {
    is_enough: F,
    was_enough: bool,
}

impl<F: FnMut(&Books) -> bool> Observer for Until<F> {
    fn placed(&mut self, _: usize, _: AllocId, _: Placement, device: &Device) -> ControlFlow<()> {
        self.was_enough = (self.is_enough)(&device.books);
        if self.was_enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// What is enough stays enough: the request after a skip is soon enough.
    fn edge(&self) -> Option<[u64; 2]> {
        Some([0; 2])
    }
}

#[derive(Clone)]
struct Comparison<'a> {
    stream: &'a OpStream,
    check: SelfCheck,
    /// Where the newest requests were served: what comes again is served there again.
    newest: Vec<u64>,
}

impl Comparison<'_> {
    /// So many addresses are remembered.
    const MOST: usize = 1 << 16;

    fn compare(&mut self, op: usize, id: AllocId, simulated: u64) {
        let Allocation { address: recorded, requested, .. } = *self.stream.allocation(id);
        self.check.n_requests += 1;
        if simulated == recorded {
            self.check.n_matching += 1;
        } else if self.check.first.is_none() {
            self.check.first = Some(Divergence { op, requested, recorded, simulated });
        }
    }

    /// Where the requests since a number of them were served, if that is remembered.
    fn since(&self, n_requests: u64) -> Option<&[u64]> {
        let n_since = self.check.n_requests - n_requests as usize;
        Some(&self.newest[self.newest.len().checked_sub(n_since)?..])
    }
}

impl Observer for Comparison<'_> {
    fn placed(&mut self, op: usize, id: AllocId, placement: Placement, _device: &Device) -> ControlFlow<()> {
        if self.newest.len() == Comparison::MOST {
            self.newest.clear();
        }
        self.newest.push(placement.address);
        self.compare(op, id, placement.address);
        ControlFlow::Continue(())
    }

    fn edge(&self) -> Option<[u64; 2]> {
        Some([self.check.n_requests as u64, 0])
    }

    fn reach(&self, skip: &Skip, [since, _]: [u64; 2]) -> usize {
        if self.since(since).is_some() { skip.to } else { skip.from }
    }

    fn skipped(&mut self, skip: &Skip, [since, _]: [u64; 2], _: &[(AllocId, AllocId, Placement)]) {
        let of_a_cycle = self.since(since).unwrap_or_default().to_vec();
        let ops = (skip.from..).zip(&self.stream.ops[skip.from..skip.to]);
        let requests =
            ops.filter_map(|(op, what)| if let Op::Alloc(id) = what { Some((op, *id)) } else { None });
        for ((op, id), simulated) in requests.zip(of_a_cycle.iter().cycle()) {
            self.compare(op, id, *simulated);
        }
        // What is remembered from before the skip is no longer the newest.
        self.newest.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Allocation, Builder, PoolIdx, StackId, StreamIdx};

    const MIB: u64 = 1 << 20;

    fn asked(limit: u64, other: Other) -> (Shares, Outcome) {
        let mut builder = Builder::new(0);
        for _ in 0..2 {
            builder.alloc(Allocation {
                requested: 16 * MIB,
                address: 0,
                stack: StackId::NONE,
                stream: StreamIdx(0),
                pool: PoolIdx::DEFAULT,
            });
        }
        let change = |before_op, name, mib| OtherChange { before_op, name, bytes: mib * MIB };
        builder.stream_mut().others = Some(Others {
            names: vec!["CUDA context".into(), "NCCL".into()],
            changes: vec![change(0, 0, 100), change(0, 1, 8), change(1, 1, 0)],
            is_charge_known: true,
        });
        let stream = builder.finish();
        let laboratory = Laboratory::new(&stream).unwrap();
        let question = Question { limit: Some(limit), other, ..Question::torch(NEWEST, "") };
        let outcome = laboratory.answer(&question).unwrap().outcome;
        (laboratory.shares(&question, &outcome).unwrap(), outcome)
    }

    //            1st block   2nd block
    //  PyTorch   16          32
    //  context   100         100
    //  NCCL      8           -
    #[test]
    fn others_have_their_part_of_a_limit_at_each_moment() {
        let (shares, _) = asked(132 * MIB, Other::Recorded);
        assert!(shares.fits && shares.free() == 0, "{shares:?}");
        assert_eq!(shares.others.unwrap(), [("CUDA context".into(), 100 * MIB)]);
        let (shares, outcome) = asked(123 * MIB, Other::Recorded);
        assert_eq!((shares.fits, shares.refused), (false, Some(16 * MIB)));
        assert_eq!(outcome.oom.unwrap().request, 0, "NCCL's part counts while it holds it");
        let (shares, outcome) = asked(131 * MIB, Other::Recorded);
        assert_eq!((shares.fits, shares.reserved), (false, 16 * MIB));
        assert_eq!(outcome.oom.unwrap().request, 1);
    }

    #[test]
    fn what_others_hold_can_be_told_or_left_out() {
        let (shares, _) = asked(32 * MIB, Other::Ignored);
        assert!(shares.fits && shares.others.is_none());
        assert!(asked(33 * MIB, Other::Bytes(MIB)).0.fits);
        assert!(!asked(33 * MIB, Other::Bytes(2 * MIB)).0.fits);
    }
}
