//! What would have made it fit: the requests up to the error, replayed with other settings.
//!
//! A verdict is worth as much as the replay, so that is tried first: the recorded setting must put every block where the
//! program had it, and must run out at the same request. A trace does not say how high a limit was, nor always which CUDA
//! graphs share a pool, nor where the driver would have put memory in another run. What is not known is tried both ways, and
//! where that makes a difference the verdict is "perhaps".

use gputrace_schemas::event::Bytes;
use gputrace_sim::bounds::Bounds;
use gputrace_sim::cores::on_all_cores;
use gputrace_sim::effort;
use gputrace_sim::ops::{OpStream, PoolIdx, StreamIdx};
use gputrace_sim::policies::ADDRESS_TIES;
use gputrace_sim::policies::torch::{VARIABLES, variable_to_set};
use gputrace_sim::simulator::Outcome;
use gputrace_sim::tune;
use gputrace_sim::whatif::{Answer, Confidence, Laboratory, Question, SelfCheck};

use gputrace_analyse::doubts;
use gputrace_report::model::{Mood, Section, Table, Value};

/// How much PyTorch could have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Capacity {
    /// So much was on the device for it: the driver refuses what goes beyond.
    Device(Bytes),
    /// PyTorch refused itself what went beyond a limit, which was at least the first and at most the second: a trace does not
    /// say how high it was, only that a segment did not fit under it.
    Limit(Bytes, Bytes),
}

impl Capacity {
    /// What it surely could have.
    fn least(self) -> Bytes {
        match self {
            Capacity::Device(bytes) | Capacity::Limit(bytes, _) => bytes,
        }
    }

    /// What it perhaps could have.
    fn most(self) -> Bytes {
        match self {
            Capacity::Device(bytes) | Capacity::Limit(_, bytes) => bytes,
        }
    }

    /// All that it can have been, as far as that can make a difference: PyTorch obtains memory in multiples of [`STEP`].
    /// From the least to the most, and of many some: `most_steps` from one to the other.
    fn worlds(self, most_steps: u64) -> Vec<World> {
        match self {
            Capacity::Device(bytes) => vec![World::Device(bytes.0)],
            Capacity::Limit(least, most) => {
                let n_steps = (most.0 - least.0.min(most.0)) / STEP;
                let n_tried = n_steps.min(most_steps);
                let steps = (0..=n_tried).map(|at| at * n_steps / n_tried.max(1));
                steps.map(|step| World::Limit(least.0 + step * STEP)).collect()
            }
        }
    }
}

/// Segments have a multiple of so many bytes (`kRoundLarge` and `kSmallBuffer`, c10/cuda/CUDACachingAllocator.cpp; a setting
/// of `large_segment_size_mb` can be an odd number of MiB).
const STEP: u64 = 1 << 20;
/// Steps from the least to the largest limit that are tried.
const MOST_LIMITS: u64 = 12;
/// The same where each replay takes long: the least, the largest, and one between.
const FEW_LIMITS: u64 = 2;
/// Settings of a long run that are tried at other addresses.
const MOST_JUDGED: usize = 3;

/// One thing that the capacity can have been, bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum World {
    /// Of the device.
    Device(u64),
    /// Of a limit.
    Limit(u64),
}

impl World {
    fn bytes(self) -> u64 {
        let (World::Device(bytes) | World::Limit(bytes)) = self;
        bytes
    }

    fn limit(self) -> Option<u64> {
        match self {
            World::Device(_) => None,
            World::Limit(bytes) => Some(bytes),
        }
    }

    fn ask(self, question: &Question) -> Question {
        let question = question.clone();
        match self {
            World::Device(bytes) => Question { device_memory: Some(bytes), ..question },
            World::Limit(bytes) => Question { limit: Some(bytes), ..question },
        }
    }
}

/// What another setting would have made of the same requests.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Remedy {
    /// `PYTORCH_CUDA_ALLOC_CONF`; empty for none.
    pub options: String,
    /// Whether it fits.
    pub verdict: Verdict,
    /// Most reserved, in a world without limit.
    pub peak_reserved: Bytes,
    /// How sure that is.
    pub confidence: Confidence,
}

/// How sure a setting is that serves all requests up to the error.
pub(crate) const AS_FAR_AS_RECORDED: &str = "as far as recorded";

impl Remedy {
    /// How sure it is, in a word. What a setting makes of the requests up to the error can be exact. Whether the program would have gone on
    /// is not in the trace: the step that failed has no end.
    #[must_use]
    pub fn sure(&self) -> &'static str {
        match (self.verdict, self.confidence) {
            (Verdict::Fits, Confidence::Exact) => AS_FAR_AS_RECORDED,
            (_, confidence) => confidence.name(),
        }
    }
}

/// Whether a setting fits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Verdict {
    /// It fits.
    Fits,
    /// It hangs on what a trace does not say.
    Perhaps,
    /// It runs out, too.
    RunsOut,
}

impl Verdict {
    /// For people and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Fits => "fits",
            Verdict::Perhaps => "perhaps",
            Verdict::RunsOut => "runs out",
        }
    }
}

/// What the replay is worth as a witness of what other settings would have done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Trial {
    remedies: Vec<Remedy>,
    /// Why it is none: the recorded run, or its failure, is not what the replay of the recorded setting gives.
    doubt: Option<String>,
}

impl Trial {
    /// The recorded setting, and the first that fits, or perhaps does; why none can be told.
    pub(super) fn best(&self) -> Result<(Option<&Remedy>, Option<&Remedy>), &str> {
        let fits = self.remedies.iter().skip(1).find(|remedy| remedy.verdict != Verdict::RunsOut);
        self.doubt.as_deref().map_or_else(|| Ok((self.remedies.first(), fits)), Err)
    }

    /// The recorded setting, and a part of it with which everything fits: without one of its options, or without any.
    pub(super) fn without_an_option(&self) -> Option<(&Remedy, &Remedy)> {
        let recorded = self.remedies.first().filter(|_| self.doubt.is_none())?;
        let parts = tune::parts(&recorded.options);
        // The longest part first: each option that stays was somebody's choice.
        let fits = |part: &String| {
            self.remedies[1..].iter().find(|it| it.options == *part && it.verdict == Verdict::Fits)
        };
        Some((recorded, parts.iter().find_map(fits)?))
    }
}

/// Replays the requests up to the error with other settings, where so much may be reserved.
///
/// # Errors
/// Why the history cannot be replayed.
pub(super) fn remedies(
    stream: &OpStream,
    capacity: Capacity,
    torch_version: Option<(u8, u8)>,
) -> Result<Trial, String> {
    let laboratory = Laboratory::new(stream)?;
    let recorded = stream.settings.options.clone().unwrap_or_default();
    let is_long = !effort::REMEDIES.covers(stream.ops.len());
    let all = capacity.worlds(if is_long { FEW_LIMITS } else { MOST_LIMITS });
    let limits: Vec<u64> = all.iter().filter_map(|world| world.limit()).collect();
    // Where it is known of which release, all limits on the way of one replay: of the check itself, or beside it where that is of a
    // device of known size.
    let known = torch_version.or(stream.settings.torch_version).map(|it| Question::torch(it, &recorded));
    let check = std::thread::scope(|scope| {
        let limited = scope.spawn(|| known.map(|known| laboratory.check_limits(&known, &limits)));
        if stream.settings.device_memory.is_none() {
            _ = limited.join();
        }
        laboratory.self_check(torch_version)
    });
    let version = check.torch_version;
    let as_recorded = Question::torch(version, &recorded);
    let others = others_that_it_can_have_been(stream);
    let others: Vec<Laboratory<'_>> =
        others.iter().filter_map(|stream| Laboratory::new(stream).ok()).collect();
    let laboratories: Vec<&Laboratory<'_>> = std::iter::once(&laboratory).chain(&others).collect();
    on_all_cores(laboratories.len(), |index| laboratories[index].check_limits(&as_recorded, &limits).ok());
    let is_as_recorded = |laboratory: &&Laboratory<'_>, world: &World| {
        let replayed = laboratory.check_under(&world.ask(&as_recorded));
        replayed
            .is_ok_and(|(check, outcome)| explains(&check) && outcome.oom.is_some() && !outcome.is_cut_short)
    };
    let explaining: Vec<(&Laboratory<'_>, World)> = laboratories
        .iter()
        .flat_map(|laboratory| all.iter().map(move |world| (*laboratory, *world)))
        .filter(|(laboratory, world)| is_as_recorded(laboratory, world))
        .collect();
    let doubt = match explaining.is_empty() {
        false => doubts::guessed_pools(stream),
        true => doubts::doubt(stream, &check)
            .or_else(|| Some(other_end(&laboratory, all.last().copied(), &as_recorded))),
    };
    let worlds = match doubt.is_some() {
        true => all.iter().map(|world| (&laboratory, *world)).collect(),
        false => explaining,
    };
    let settings = tune::advised(version, &recorded).map_err(|error| error.0)?;
    let trial_of = |options: &str| Tried::of(&worlds, Question::torch(version, options));
    let (first, then) = tune::in_two_parts(&settings);
    let mut tried = on_all_cores(first.len(), |index| trial_of(first[index]));
    tried.extend(on_all_cores(then.len(), |index| trial_of(then[index])));
    tried.sort_by_key(|it| settings.iter().position(|options| *options == it.question.options));
    let mut remedies = if is_long {
        judged_as_needed(&worlds, &tried, doubt.is_some())
    } else {
        on_all_cores(tried.len(), |index| Some(tried[index].judged(&worlds)))
    };
    if remedies.is_empty() {
        return Err("none of its allocator's settings can be simulated".into());
    }
    // It ran out: where it is said to fit, what is said of the others is worth no more.
    let fits_as_recorded = remedies.first().is_some_and(|recorded| recorded.verdict == Verdict::Fits);
    let doubt = doubt.or_else(|| {
        fits_as_recorded
            .then(|| "the recorded setting fits in the replay, although the program ran out of memory".into())
    });
    remedies[1..].sort_by_key(|remedy| (remedy.verdict, remedy.peak_reserved));
    Ok(Trial { remedies, doubt })
}

/// A setting, replayed where memory is thought to have lain.
struct Tried<'a> {
    question: Question,
    /// Most reserved, in a world without limit: wherever the trace leaves open what it was.
    peaks: Vec<u64>,
    /// Addresses decided somewhere in these replays.
    has_ties: bool,
    /// What comes of it in all worlds; none where no limit is ever met, with room for memory that lies elsewhere.
    in_worlds: Option<InWorlds<'a>>,
}

impl<'a> Tried<'a> {
    /// None where it cannot be simulated.
    fn of(worlds: &[(&'a Laboratory<'a>, World)], question: Question) -> Option<Tried<'a>> {
        let limits: Vec<u64> = worlds.iter().filter_map(|(_, world)| world.limit()).collect();
        let replayed = laboratories(worlds).into_iter().map(|it| it.guess_with_limits(&question, &limits));
        let unlimited: Vec<Outcome> = replayed.filter_map(Result::ok).collect();
        let peaks: Vec<u64> = unlimited.iter().map(|outcome| outcome.books.reserved.peak).collect();
        // Where the driver's refusals are repeated, the request that failed is not in the peak.
        let is_whole = unlimited.iter().all(Outcome::fits);
        let is_below_all = is_whole && is_never_met(*peaks.iter().max()?, worlds);
        let has_ties = unlimited.iter().any(has_ties);
        let in_worlds = (!is_below_all).then(|| InWorlds::of(worlds, &question));
        Some(Tried { question, peaks, has_ties, in_worlds })
    }

    fn verdict(&self) -> Verdict {
        self.in_worlds.as_ref().map_or(Verdict::Fits, InWorlds::verdict)
    }

    fn remedy(&self, verdict: Verdict, confidence: Option<Confidence>) -> Remedy {
        Remedy {
            peak_reserved: Bytes(self.peaks[0]),
            confidence: confidence.unwrap_or(Confidence::Interval),
            options: self.question.options.clone(),
            verdict,
        }
    }

    fn hangs_on_addresses(&self) -> bool {
        self.has_ties || self.in_worlds.as_ref().is_some_and(|it| it.has_ties)
    }

    /// At other addresses too: another run has memory elsewhere.
    fn judged(&self, worlds: &[(&'a Laboratory<'a>, World)]) -> Remedy {
        let (verdict, confidence) = match &self.in_worlds {
            Some(in_worlds) => in_worlds.judged(),
            None => {
                let answers: Vec<Answer> = laboratories(worlds)
                    .into_iter()
                    .filter_map(|laboratory| laboratory.answer(&self.question).ok())
                    .collect();
                let most = answers.iter().map(|answer| answer.peak_reserved_range.1).max();
                let is_one = self.peaks.iter().all(|peak| *peak == self.peaks[0]);
                match most.is_some_and(|most| is_never_met(most, worlds)) {
                    true => {
                        (Verdict::Fits, answers.first().map(|answer| answer.confidence).filter(|_| is_one))
                    }
                    false => InWorlds::of(worlds, &self.question).judged(),
                }
            }
        };
        self.remedy(verdict, confidence)
    }
}

/// A setting in each world that the run can have been in.
struct InWorlds<'a> {
    /// In how many it ran out.
    n_out: usize,
    /// The worlds that could be replayed, from the lowest limit on.
    asked: Vec<(&'a Laboratory<'a>, Question)>,
    /// Addresses decided in one of them.
    has_ties: bool,
}

impl<'a> InWorlds<'a> {
    fn of(worlds: &[(&'a Laboratory<'a>, World)], question: &Question) -> InWorlds<'a> {
        let mut all = InWorlds { n_out: 0, asked: vec![], has_ties: false };
        // From the highest limit on: a replay that it does not stop answers for lower ones, too.
        for (laboratory, world) in worlds.iter().rev() {
            let asked = world.ask(question);
            if let Ok(outcome) = laboratory.guess(&asked) {
                all.n_out += usize::from(!outcome.fits());
                all.has_ties |= has_ties(&outcome);
                all.asked.push((*laboratory, asked));
            }
        }
        all.asked.reverse();
        all
    }

    fn verdict(&self) -> Verdict {
        verdict(self.n_out, self.asked.len())
    }

    /// Whether it fits in all of them, and how sure that is.
    fn judged(&self) -> (Verdict, Option<Confidence>) {
        if self.verdict() == Verdict::Perhaps {
            return (Verdict::Perhaps, Some(Confidence::Interval));
        }
        // Another run has memory elsewhere.
        let middle = self.asked.get(self.asked.len() / 2);
        let Some(answer) = middle.and_then(|(laboratory, asked)| laboratory.elsewhere(asked).ok()) else {
            return (self.verdict(), None);
        };
        match verdict(self.n_out + answer.n_oom.0, self.asked.len() + answer.n_oom.1) {
            Verdict::Perhaps => (Verdict::Perhaps, Some(Confidence::Interval)),
            sure => (sure, Some(answer.confidence)),
        }
    }
}

fn verdict(n_out: usize, of: usize) -> Verdict {
    match n_out {
        0 => Verdict::Fits,
        n if n == of => Verdict::RunsOut,
        _ => Verdict::Perhaps,
    }
}

fn has_ties(outcome: &Outcome) -> bool {
    outcome.has_counter(ADDRESS_TIES) && outcome.counter(ADDRESS_TIES) > 0
}

fn laboratories<'a>(worlds: &[(&'a Laboratory<'a>, World)]) -> Vec<&'a Laboratory<'a>> {
    let mut laboratories: Vec<&Laboratory<'_>> = worlds.iter().map(|(laboratory, _)| *laboratory).collect();
    laboratories.dedup_by(|one, other| std::ptr::eq(*one, *other));
    laboratories
}

/// Of a long run: other addresses are tried of the best setting until one fits there too, and of a few. What is said of the rest is sure
/// only where no address decided anything.
fn judged_as_needed<'a>(
    worlds: &[(&'a Laboratory<'a>, World)],
    tried: &[Tried<'a>],
    is_doubted: bool,
) -> Vec<Remedy> {
    let mut remedies: Vec<Remedy> = tried
        .iter()
        .map(|it| match it.hangs_on_addresses() || is_doubted {
            true => it.remedy(it.verdict(), None),
            false => it.judged(worlds),
        })
        .collect();
    // The first is the recorded one, which is known to run out.
    let mut others: Vec<usize> = (1..tried.len()).collect();
    others.sort_by_key(|index| (tried[*index].verdict(), tried[*index].peaks[0]));
    let mut n_judged = 0;
    for index in others.into_iter().filter(|_| !is_doubted) {
        if tried[index].hangs_on_addresses() {
            if n_judged == MOST_JUDGED {
                break;
            }
            remedies[index] = tried[index].judged(worlds);
            n_judged += 1;
        }
        if remedies[index].verdict == Verdict::Fits {
            break;
        }
    }
    remedies
}

/// A limit that is never met changes nothing, wherever memory lies.
fn is_never_met(most: u64, worlds: &[(&Laboratory<'_>, World)]) -> bool {
    let limit = worlds.iter().map(|(_, world)| world.bytes()).min().unwrap_or(u64::MAX);
    most as f64 * (1.0 + Laboratory::ELSEWHERE) <= limit as f64
}

/// The same requests, where a trace does not tell everything: with all CUDA graphs in one pool, and with those that failed on
/// another stream, where it is not known on which.
fn others_that_it_can_have_been(stream: &OpStream) -> Vec<OpStream> {
    let mut others: Vec<OpStream> = with_one_pool(stream).into_iter().collect();
    if stream.ooms.iter().any(|oom| oom.stream.is_none()) {
        for other in (1..stream.streams.len().min(MOST_STREAMS)).map(|index| StreamIdx(index as u16)) {
            let mut there = stream.clone();
            there.ooms.iter_mut().for_each(|oom| oom.stream = oom.stream.or(Some(other)));
            others.push(there);
        }
    }
    others
}

/// Streams that a failed request may have been of, of which some are tried.
const MOST_STREAMS: usize = 5;

/// None where they are in one anyway, or known not to be.
fn with_one_pool(stream: &OpStream) -> Option<OpStream> {
    if stream.knows_pools {
        return None;
    }
    let pools = (0u16..).zip(&stream.pools).filter(|(_, pool)| pool.is_capture());
    let captures: Vec<PoolIdx> = pools.map(|(pool, _)| PoolIdx(pool)).collect();
    let (first, others) = captures.split_first().filter(|(_, others)| !others.is_empty())?;
    let mut pooled = stream.clone();
    let of = |pool: &mut PoolIdx| {
        if others.contains(pool) {
            *pool = *first;
        }
    };
    pooled.allocations.iter_mut().for_each(|allocation| of(&mut allocation.pool));
    pooled.ooms.iter_mut().for_each(|oom| of(&mut oom.pool));
    pooled.initial.iter_mut().for_each(|segment| of(&mut segment.pool));
    Some(pooled)
}

/// The replay of the recorded setting is the recorded run.
fn explains(check: &SelfCheck) -> bool {
    check.n_matching == check.n_requests
}

/// Why the replay of the recorded setting does not end as the program did, in the world where it has most.
fn other_end(laboratory: &Laboratory<'_>, world: Option<World>, recorded: &Question) -> String {
    let outcome = world.and_then(|world| laboratory.guess(&world.ask(recorded)).ok());
    match outcome.and_then(|outcome| outcome.oom.filter(|_| outcome.is_cut_short)) {
        None => {
            "the same requests with the recorded setting fit in the replay: other memory of the device changed".into()
        }
        Some(oom) => format!(
            "the replay with the recorded setting runs out earlier than the program, at request {}: more was free then than at the error",
            oom.request + 1
        ),
    }
}

/// What would have made it fit. The first of the remedies is the recorded setting; `leak` is what grows with each step, where
/// that is what used memory up, and it is known.
pub(super) fn remedies_section(
    device: i16,
    capacity: Capacity,
    trial: Result<Trial, String>,
    stream: Option<&OpStream>,
    leak: Option<Option<Bytes>>,
) -> Section {
    let section = Section::new("remedies", format!("What would have made it fit on cuda:{device}"));
    let Trial { remedies, doubt } = match trial {
        Ok(trial) => trial,
        Err(why) => return section.line(Mood::Note, format!("it cannot be replayed: {why}")),
    };
    let options = |it: &Remedy| if it.options.is_empty() { "(none)".to_owned() } else { it.options.clone() };
    let table = Table::of(
        "settings",
        &remedies,
        &[
            ("peak_reserved_bytes", "reserved", &|it| Value::Bytes(it.peak_reserved)),
            ("verdict", "verdict", &|it| Value::text(it.verdict.name())),
            ("confidence", "sure", &|it| {
                Value::text(if doubt.is_some() { Confidence::Guess.name() } else { it.sure() })
            }),
            ("options", "setting", &|it| Value::text(options(it))),
        ],
    );
    let section = section.fact("capacity_bytes", "PyTorch's limit", Value::Bytes(capacity.least())).fact(
        "capacity_at_most_bytes",
        "at most",
        Value::Bytes(capacity.most()),
    );
    let best = remedies[1..].iter().find(|remedy| remedy.verdict != Verdict::RunsOut);
    let variable = stream.map_or(VARIABLES[0], |stream| variable_to_set(&stream.settings));
    let section = match (&doubt, best) {
        (Some(doubt), _) => {
            section.line(Mood::Warning, format!("cannot tell what would have helped: {doubt}"))
        }
        (None, Some(best)) if leak.is_some() => {
            let left = capacity.most().0.saturating_sub(best.peak_reserved.0);
            let steps = match leak.flatten().filter(|each| each.0 > 0) {
                Some(each) => format!("by about {} steps", left / each.0),
                None => "by the amount that it saves".to_owned(),
            };
            let options = options(best);
            section.line(
                Mood::Note,
                format!("the growth would continue: {options} would only postpone the error, {steps}"),
            )
        }
        (None, Some(best)) => {
            let perhaps = match best.verdict {
                Verdict::Perhaps => "perhaps (it depends on the limit, --limit, and on addresses)",
                Verdict::Fits | Verdict::RunsOut => {
                    "this setting would have served all requests up to the error, and the failed one"
                }
            };
            section
                .line(Mood::Good, format!("{perhaps}:"))
                .line(Mood::Command, format!("export {variable}={}", best.options))
        }
        (None, None) => {
            section.line(Mood::Bad, "no allocator setting would help: the program needs to use less memory")
        }
    };
    let section = match stream.map(Bounds::of) {
        Some(bounds) if best.is_none() && doubt.is_none() => section.remark(
            "needed_bytes",
            "in use at once",
            Value::Bytes(Bytes(bounds.requested)),
            "the most requested at one time, without the failed request",
        ),
        _ => section,
    };
    section
        .table(table)
        .line(Mood::Note, "replayed up to the end of the trace; later requests of the program are not known")
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_sim::ops::{Allocation, Builder, Op, Pool, RecordedOom, StackId};

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_limit_is_tried_from_the_least_to_the_most_that_it_can_have_been() {
        let limits = |least, most| {
            Capacity::Limit(Bytes(least), Bytes(most))
                .worlds(MOST_LIMITS)
                .iter()
                .map(|world| world.bytes())
                .collect::<Vec<_>>()
        };
        assert_eq!(limits(20 * MIB, 20 * MIB), [20 * MIB]);
        assert_eq!(limits(20 * MIB, 22 * MIB - 1), [20 * MIB, 21 * MIB]);
        let many = limits(20 * MIB, 140 * MIB - 1);
        assert_eq!((many.len(), many.first(), many.last()), (13, Some(&(20 * MIB)), Some(&(139 * MIB))));
        assert_eq!(Capacity::Device(Bytes(7)).worlds(MOST_LIMITS), [World::Device(7)]);
    }

    fn stream(requests: &[(u64, u16, PoolIdx)], failed: RecordedOom, n_graphs: u64) -> OpStream {
        let mut builder = Builder::new(0);
        for handle in 0..3 {
            builder.stream(handle).unwrap();
        }
        for graph in 1..=n_graphs {
            builder.pool((graph, 0)).unwrap();
        }
        for (mib, stream, pool) in requests {
            let allocation = Allocation {
                requested: mib * MIB,
                address: 0,
                stack: StackId::NONE,
                stream: StreamIdx(*stream),
                pool: *pool,
            };
            builder.alloc(allocation);
        }
        builder.oom(failed);
        builder.finish()
    }

    /// A request of 4 MiB.
    fn failed(stream: Option<StreamIdx>, pool: PoolIdx) -> RecordedOom {
        RecordedOom { rounded: 4 * MIB, device_free: 0, stream, pool, stack: StackId::NONE }
    }

    #[test]
    fn what_a_trace_does_not_say_is_tried_both_ways() {
        let known = stream(&[(4, 0, PoolIdx::DEFAULT)], failed(Some(StreamIdx(0)), PoolIdx::DEFAULT), 1);
        assert!(others_that_it_can_have_been(&known).is_empty());
        // The stream of the request that failed, where nobody told.
        let unknown = stream(&[(4, 0, PoolIdx::DEFAULT)], failed(None, PoolIdx::DEFAULT), 0);
        let streams: Vec<_> =
            others_that_it_can_have_been(&unknown).iter().map(|stream| stream.ooms[0].stream).collect();
        assert_eq!(streams, [Some(StreamIdx(1)), Some(StreamIdx(2))]);
        // Two graphs, whose pools may be one.
        let graphs =
            stream(&[(4, 0, PoolIdx(1)), (4, 0, PoolIdx(2))], failed(Some(StreamIdx(0)), PoolIdx(2)), 2);
        let [pooled] = &others_that_it_can_have_been(&graphs)[..] else { panic!("one") };
        let pools: Vec<_> =
            pooled.allocations.iter().map(|it| it.pool).chain([pooled.ooms[0].pool]).collect();
        assert_eq!(pools, [PoolIdx(1); 3]);
        assert!(pooled.pools.iter().all(|pool: &Pool| !pool.is_guessed()));
    }

    #[test]
    fn a_limit_is_met_where_any_world_meets_it() {
        let failed = failed(Some(StreamIdx(0)), PoolIdx::DEFAULT);
        let less = stream(&[(30, 0, PoolIdx::DEFAULT)], failed, 0);
        let more = stream(&[(30, 0, PoolIdx::DEFAULT), (30, 0, PoolIdx::DEFAULT)], failed, 0);
        let (less, more) = (Laboratory::new(&less).unwrap(), Laboratory::new(&more).unwrap());
        let question = Question::torch((2, 11), "");
        let of = |laboratories: &[&Laboratory<'_>]| {
            let limit = World::Limit(60 * MIB);
            let worlds: Vec<_> = laboratories.iter().map(|it| (*it, limit)).collect();
            let remedy = Tried::of(&worlds, question.clone()).unwrap().judged(&worlds);
            (remedy.verdict, remedy.confidence)
        };
        assert_eq!(of(&[&less]), (Verdict::Fits, Confidence::Exact));
        assert_eq!(of(&[&less, &more]), (Verdict::Perhaps, Confidence::Interval));
        assert_eq!(of(&[&more]), (Verdict::RunsOut, Confidence::Exact));
    }

    #[test]
    fn a_verdict_that_hangs_on_the_limit_is_perhaps() {
        let failed = failed(Some(StreamIdx(0)), PoolIdx::DEFAULT);
        // 30 MiB in a segment of their own, then 12 of a segment of 12.
        let stream = stream(&[(30, 0, PoolIdx::DEFAULT), (12, 0, PoolIdx::DEFAULT)], failed, 0);
        let laboratory = Laboratory::new(&stream).unwrap();
        let question = Question::torch((2, 11), "");
        let of = |limits: &[u64]| {
            let worlds: Vec<_> = limits.iter().map(|mib| (&laboratory, World::Limit(mib * MIB))).collect();
            Tried::of(&worlds, question.clone()).unwrap().judged(&worlds).verdict
        };
        assert_eq!(of(&[80, 90]), Verdict::Fits);
        assert_eq!(of(&[50, 60]), Verdict::RunsOut);
        assert_eq!(of(&[50, 70]), Verdict::Perhaps);
    }

    /// What is said of a long run without having been tried everywhere is never surer than, and where it is sure the same as, what
    /// comes of trying all.
    #[test]
    fn what_is_not_tried_is_not_called_sure() {
        let (mut n_sure, mut n_left_open, mut n_fit) = (0, 0, 0);
        for seed in 0..60 {
            let stream = a_program_that_runs_out(seed);
            let laboratory = Laboratory::new(&stream).unwrap();
            let unlimited = laboratory.guess(&Question::torch((2, 11), "")).unwrap().books.reserved.peak;
            let limit = |percent: u64| (&laboratory, World::Limit(unlimited * percent / 100));
            let worlds = [limit(80 + seed % 15), limit(82 + seed % 15)];
            let settings = tune::advised((2, 11), "").unwrap();
            let tried: Vec<Tried<'_>> = settings
                .iter()
                .filter_map(|options| Tried::of(&worlds, Question::torch((2, 11), options)))
                .collect();
            let all: Vec<Remedy> = tried.iter().map(|it| it.judged(&worlds)).collect();
            let needed = judged_as_needed(&worlds, &tried, false);
            for (needed, all) in needed.iter().zip(&all) {
                assert_eq!((&needed.options, needed.peak_reserved), (&all.options, all.peak_reserved));
                if needed.confidence == Confidence::Exact {
                    assert_eq!(needed, all, "seed {seed}");
                    n_sure += 1;
                } else {
                    n_left_open +=
                        usize::from(needed.verdict != all.verdict || needed.confidence != all.confidence);
                }
            }
            let best = |remedies: &[Remedy]| {
                remedies[1..].iter().filter(|it| it.verdict == Verdict::Fits).map(|it| it.peak_reserved).min()
            };
            // The first that fits, of those that are named in order of what they reserve, was tried at other addresses too.
            let fits: Vec<&Remedy> = needed[1..].iter().filter(|it| it.verdict == Verdict::Fits).collect();
            if let Some(first) = fits.iter().min_by_key(|it| it.peak_reserved) {
                let same = all.iter().find(|it| it.options == first.options).unwrap();
                assert!(same.verdict != Verdict::RunsOut, "seed {seed}: {first:?}, {same:?}");
                n_fit += usize::from(best(&all).is_some());
            }
        }
        assert!(
            n_sure > 50 && n_left_open > 0 && n_fit > 5,
            "{n_sure} sure, {n_left_open} left open, {n_fit} fit"
        );
    }

    fn a_program_that_runs_out(seed: u64) -> OpStream {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut below = |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % n
        };
        let mut builder = Builder::new(0);
        let mut live = vec![];
        for _ in 0..150 {
            let requested = (1 + below(24)) * MIB / (1 << below(3));
            let (stream, pool) = (StreamIdx(0), PoolIdx::DEFAULT);
            live.push(builder.alloc(Allocation {
                requested,
                address: 0,
                stack: StackId::NONE,
                stream,
                pool,
            }));
            while live.len() as u64 > 10 + below(20) {
                let gone = live.swap_remove(below(live.len() as u64) as usize);
                builder.op(Op::FreeRequested(gone));
                builder.op(Op::FreeCompleted(gone));
            }
        }
        builder.finish()
    }
}
