//! What would have made it fit: the requests up to the error, replayed with other settings.
//!
//! A verdict is worth as much as the replay, so that is tried first: the recorded setting must put every block where the
//! program had it, and must run out at the same request. A trace does not say how high a limit was, nor always which CUDA
//! graphs share a pool, nor where the driver would have put memory in another run. What is not known is tried both ways, and
//! where that makes a difference the verdict is "perhaps".

use gputrace_schemas::event::Bytes;
use gputrace_sim::bounds::Bounds;
use gputrace_sim::cores::on_all_cores;
use gputrace_sim::ops::{OpStream, PoolIdx, StreamIdx};
use gputrace_sim::simulator::Outcome;
use gputrace_sim::tune;
use gputrace_sim::whatif::{Answer, Confidence, Laboratory, Question, SelfCheck};

use crate::answers::whatif;
use crate::report::model::{Mood, Section, Table, Value};

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
    /// From the least to the most, and of many some.
    fn worlds(self) -> Vec<World> {
        match self {
            Capacity::Device(bytes) => vec![World::Device(bytes.0)],
            Capacity::Limit(least, most) => {
                let n_steps = (most.0 - least.0.min(most.0)) / STEP;
                let n_tried = n_steps.min(MOST_LIMITS);
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
    let check = laboratory.self_check(torch_version);
    let version = check.torch_version;
    let recorded = stream.settings.options.clone().unwrap_or_default();
    let as_recorded = Question::torch(version, &recorded);
    let others = others_that_it_can_have_been(stream);
    let others: Vec<Laboratory<'_>> =
        others.iter().filter_map(|stream| Laboratory::new(stream).ok()).collect();
    let laboratories: Vec<&Laboratory<'_>> = std::iter::once(&laboratory).chain(&others).collect();
    let all = capacity.worlds();
    let is_as_recorded = |laboratory: &&Laboratory<'_>, world: &World| {
        let replayed = laboratory.check_under(&world.ask(&as_recorded));
        replayed
            .is_ok_and(|(check, outcome)| explains(&check) && outcome.oom.is_some() && !outcome.is_cut_short)
    };
    // From the highest limit on: a replay that it does not stop answers for lower ones, too.
    let mut explaining: Vec<(&Laboratory<'_>, World)> = laboratories
        .iter()
        .rev()
        .flat_map(|laboratory| all.iter().rev().map(move |world| (*laboratory, *world)))
        .filter(|(laboratory, world)| is_as_recorded(laboratory, world))
        .collect();
    explaining.reverse();
    let doubt = match explaining.is_empty() {
        false => whatif::guessed_pools(stream),
        true => whatif::doubt(stream, &check)
            .or_else(|| Some(other_end(&laboratory, all.last().copied(), &as_recorded))),
    };
    let worlds = match doubt.is_some() {
        true => all.iter().map(|world| (&laboratory, *world)).collect(),
        false => explaining,
    };
    let settings = tune::advised(version, &recorded).map_err(|error| error.0)?;
    let remedy_with = |options: &str| remedy(&worlds, Question::torch(version, options));
    let (first, then) = tune::in_two_parts(&settings);
    let mut remedies = on_all_cores(first.len(), |index| remedy_with(first[index]));
    remedies.extend(then.into_iter().filter_map(remedy_with));
    remedies.sort_by_key(|remedy| settings.iter().position(|options| *options == remedy.options));
    if remedies.is_empty() {
        return Err("no setting of its allocator can be simulated".into());
    }
    // It ran out: where it is said to fit, what is said of the others is worth no more.
    let fits_as_recorded = remedies.first().is_some_and(|recorded| recorded.verdict == Verdict::Fits);
    let doubt = doubt.or_else(|| {
        fits_as_recorded.then(|| "in the replay the recorded setting fits, and the program ran out".into())
    });
    remedies[1..].sort_by_key(|remedy| (remedy.verdict, remedy.peak_reserved));
    Ok(Trial { remedies, doubt })
}

/// What a setting would have made of it in all of these worlds; none where it cannot be simulated.
fn remedy(worlds: &[(&Laboratory<'_>, World)], question: Question) -> Option<Remedy> {
    let mut laboratories: Vec<&Laboratory<'_>> = worlds.iter().map(|(laboratory, _)| *laboratory).collect();
    laboratories.dedup_by(|one, other| std::ptr::eq(*one, *other));
    let unlimited: Vec<Outcome> =
        laboratories.iter().filter_map(|laboratory| laboratory.guess(&question).ok()).collect();
    let first = unlimited.first()?;
    let peak = |outcome: &Outcome| outcome.books.reserved.peak;
    // Where the driver's refusals are repeated, the request that failed is not in the peak.
    let is_whole = unlimited.iter().all(Outcome::fits);
    let least = worlds.iter().map(|(_, world)| world.bytes()).min().unwrap_or(u64::MAX);
    let is_below = |most: u64| is_whole && is_never_met(most, least);
    // Wherever memory lies: that is asked only where it can make a limit of no matter.
    let (verdict, confidence) = match unlimited.iter().map(peak).max().is_some_and(is_below) {
        true => {
            let answers: Vec<Answer> =
                laboratories.iter().filter_map(|laboratory| laboratory.answer(&question).ok()).collect();
            let most = answers.iter().map(|answer| answer.peak_reserved_range.1).max();
            let is_one = unlimited.iter().all(|outcome| peak(outcome) == peak(first));
            let of_the_peak = answers.first().map(|answer| answer.confidence).filter(|_| is_one);
            match most.is_some_and(is_below) {
                true => (Verdict::Fits, of_the_peak),
                false => in_all(worlds, &question),
            }
        }
        false => in_all(worlds, &question),
    };
    Some(Remedy {
        peak_reserved: Bytes(peak(first)),
        confidence: confidence.unwrap_or(Confidence::Interval),
        options: question.options,
        verdict,
    })
}

/// A limit that is never met changes nothing, wherever memory lies.
fn is_never_met(most: u64, limit: u64) -> bool {
    most as f64 * (1.0 + Laboratory::ELSEWHERE) <= limit as f64
}

/// Whether it fits in all of these worlds, and how sure that is.
fn in_all(worlds: &[(&Laboratory<'_>, World)], question: &Question) -> (Verdict, Option<Confidence>) {
    let (mut n_out, mut n_all) = (0, 0);
    let mut middle = vec![];
    // From the highest limit on, as above.
    for (laboratory, world) in worlds.iter().rev() {
        let asked = world.ask(question);
        if let Ok(outcome) = laboratory.guess(&asked) {
            (n_out, n_all) = (n_out + usize::from(!outcome.fits()), n_all + 1);
            middle.push((*laboratory, asked));
        }
    }
    if (1..n_all).contains(&n_out) {
        return (Verdict::Perhaps, Some(Confidence::Interval));
    }
    middle.reverse();
    // Another run has memory elsewhere.
    let answer =
        middle.get(middle.len() / 2).and_then(|(laboratory, asked)| laboratory.elsewhere(asked).ok());
    let confidence = answer.as_ref().map(|answer| answer.confidence);
    if let Some(answer) = answer {
        (n_out, n_all) = (n_out + answer.n_oom.0, n_all + answer.n_oom.1);
    }
    match n_out {
        0 => (Verdict::Fits, confidence),
        n if n == n_all => (Verdict::RunsOut, confidence),
        _ => (Verdict::Perhaps, Some(Confidence::Interval)),
    }
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
            "with the recorded setting the same requests fit in the replay: other memory of the device came or went".into()
        }
        Some(oom) => format!(
            "with the recorded setting the replay runs out earlier than the program, at request {}: more was free then than \
             at the error",
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
        Err(why) => return section.line(Mood::Note, format!("this cannot be replayed: {why}")),
    };
    let options = |it: &Remedy| if it.options.is_empty() { "(none)".to_owned() } else { it.options.clone() };
    let table = Table::of(
        "settings",
        &remedies,
        &[
            ("peak_reserved_bytes", "reserved", &|it| Value::Bytes(it.peak_reserved)),
            ("verdict", "verdict", &|it| Value::text(it.verdict.name())),
            ("confidence", "sure", &|it| {
                Value::text(if doubt.is_some() { Confidence::Guess.name() } else { it.confidence.name() })
            }),
            ("options", "PYTORCH_CUDA_ALLOC_CONF", &|it| Value::text(options(it))),
        ],
    );
    let section = section.fact("capacity_bytes", "PyTorch could have", Value::Bytes(capacity.least())).fact(
        "capacity_at_most_bytes",
        "at most",
        Value::Bytes(capacity.most()),
    );
    let best = remedies[1..].iter().find(|remedy| remedy.verdict != Verdict::RunsOut);
    let section = match (&doubt, best) {
        (Some(doubt), _) => {
            section.line(Mood::Warning, format!("cannot tell what would have helped: {doubt}"))
        }
        (None, Some(best)) if leak.is_some() => {
            let left = capacity.most().0.saturating_sub(best.peak_reserved.0);
            let steps = match leak.flatten().filter(|each| each.0 > 0) {
                Some(each) => format!("by about {} steps", left / each.0),
                None => "by as much as it saves".to_owned(),
            };
            let options = &best.options;
            section.line(
                Mood::Note,
                format!("what grows grows on: {options} would only postpone the end, {steps}"),
            )
        }
        (None, Some(best)) => {
            let perhaps = match best.verdict {
                Verdict::Perhaps => {
                    "perhaps (it hangs on how high the limit was, --limit, and on where memory lies)"
                }
                Verdict::Fits | Verdict::RunsOut => "this setting would have",
            };
            section
                .line(Mood::Good, format!("{perhaps}:"))
                .line(Mood::Command, format!("export PYTORCH_CUDA_ALLOC_CONF={}", best.options))
        }
        (None, None) => section
            .line(Mood::Bad, "no setting of the allocator: the program needs less memory, or more of it"),
    };
    let section = match stream.map(Bounds::of) {
        Some(bounds) if best.is_none() && doubt.is_none() => section.remark(
            "needed_bytes",
            "in use at once",
            Value::Bytes(Bytes(bounds.requested)),
            "the most that was requested at one time, without the request that failed",
        ),
        _ => section,
    };
    section.table(table).line(
        Mood::Note,
        "replayed up to the end of the trace: what a program that went on would have asked for is not known",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use gputrace_sim::ops::{Allocation, Builder, Pool, RecordedOom, StackId};

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_limit_is_tried_from_the_least_to_the_most_that_it_can_have_been() {
        let limits = |least, most| {
            Capacity::Limit(Bytes(least), Bytes(most))
                .worlds()
                .iter()
                .map(|world| world.bytes())
                .collect::<Vec<_>>()
        };
        assert_eq!(limits(20 * MIB, 20 * MIB), [20 * MIB]);
        assert_eq!(limits(20 * MIB, 22 * MIB - 1), [20 * MIB, 21 * MIB]);
        let many = limits(20 * MIB, 140 * MIB - 1);
        assert_eq!((many.len(), many.first(), many.last()), (13, Some(&(20 * MIB)), Some(&(139 * MIB))));
        assert_eq!(Capacity::Device(Bytes(7)).worlds(), [World::Device(7)]);
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
            let remedy = remedy(&worlds, question.clone()).unwrap();
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
            remedy(&worlds, question.clone()).unwrap().verdict
        };
        assert_eq!(of(&[80, 90]), Verdict::Fits);
        assert_eq!(of(&[50, 60]), Verdict::RunsOut);
        assert_eq!(of(&[50, 70]), Verdict::Perhaps);
    }
}
