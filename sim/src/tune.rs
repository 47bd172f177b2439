//! Settings of PyTorch's allocator: those that are worth a try, and the search for the one that reserves least.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::bounds::Bounds;
use crate::cores::on_all_cores;
use crate::device::Books;
use crate::effort;
use crate::policies::OptionError;
use crate::policies::torch::{parse, profile};
use crate::simulator::Outcome;
use crate::whatif::{Answer, Laboratory, Question};

/// Options to try, each with each of the other rows.
const AXES: [&[&str]; 4] = [
    &["", "expandable_segments:True"],
    &[
        "",
        "max_split_size_mb:32",
        "max_split_size_mb:64",
        "max_split_size_mb:128",
        "max_split_size_mb:256",
        "max_split_size_mb:512",
    ],
    &["", "roundup_power2_divisions:4", "roundup_power2_divisions:8", "roundup_power2_divisions:16"],
    &[
        "",
        "garbage_collection_threshold:0.6",
        "garbage_collection_threshold:0.8",
        "large_segment_size_mb:12",
        "large_segment_size_mb:64",
    ],
];

/// What people are advised to set, one at a time, so that each answers for itself.
const ADVISED: [&str; 9] = [
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.8",
    "expandable_segments:True,roundup_power2_divisions:8",
];

/// Most settings that are looked at again at other addresses.
const MOST_ANSWERED: usize = 12;
/// One more option has to save one part in so many: what is set must be understood, and kept, by people.
pub const WORTH_AN_OPTION: u64 = 32;

/// Every combination of options that a release accepts. Collection does nothing without a limit, and is left out there.
///
/// # Errors
/// When the release was not measured.
pub fn combinations(version: (u8, u8), has_limit: bool) -> Result<Vec<String>, OptionError> {
    let mut all = vec![String::new()];
    for axis in AXES {
        let with = |start: &String| axis.iter().map(|option| joined(start, option)).collect::<Vec<_>>();
        all = all.iter().flat_map(with).collect();
    }
    all.retain(|options| has_limit || !options.contains("garbage_collection"));
    accepted(version, all)
}

/// Settings that a replay under others may answer for, after those others: first one part, then the other.
pub fn in_two_parts(settings: &[String]) -> (Vec<&str>, Vec<&str>) {
    let may_make_no_difference = |options: &str| {
        ["max_split_size", "garbage_collection", "large_segment_size"]
            .iter()
            .any(|word| options.contains(word))
    };
    settings.iter().map(String::as_str).partition(|options| !may_make_no_difference(options))
}

/// The recorded setting, then the same without each of its options, then the usual advice: as far as a release accepts them.
///
/// # Errors
/// When the release was not measured.
pub fn advised(version: (u8, u8), recorded: &str) -> Result<Vec<String>, OptionError> {
    let parts = parts(recorded);
    let others = ADVISED.into_iter().map(str::to_owned);
    let others = others.filter(|options| options != recorded && !parts.contains(options));
    let others: Vec<String> = others.collect();
    accepted(version, std::iter::once(recorded.to_owned()).chain(parts).chain(others).collect())
}

/// For each option of a setting, the setting without it, in the recorded order; and the empty setting, last.
pub fn parts(options: &str) -> Vec<String> {
    let all: Vec<&str> = options.split(',').filter(|option| !option.trim().is_empty()).collect();
    let without = |left_out: usize| {
        let rest = all.iter().enumerate().filter(|(at, _)| *at != left_out).map(|(_, option)| *option);
        rest.collect::<Vec<_>>().join(",")
    };
    let mut parts: Vec<String> = (0..all.len()).map(without).collect();
    if all.len() > 1 {
        parts.push(String::new());
    }
    parts
}

fn joined(start: &str, option: &str) -> String {
    match (start, option) {
        (one, "") | ("", one) => one.to_owned(),
        (start, option) => format!("{start},{option}"),
    }
}

fn accepted(version: (u8, u8), mut settings: Vec<String>) -> Result<Vec<String>, OptionError> {
    let profile = profile(version).ok_or_else(|| {
        let (major, minor) = version;
        OptionError(format!("PyTorch {major}.{minor} was not measured; name another --torch-version"))
    })?;
    settings.retain(|options| parse(options, profile).is_ok());
    Ok(settings)
}

/// A setting that was simulated, at one guess of the addresses.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The options.
    pub options: String,
    /// Their result.
    pub outcome: Outcome,
}

impl Candidate {
    /// Smaller is better: finish at all, reserve little, call the driver rarely, set few options.
    pub(crate) fn rank(&self) -> (bool, u64, u64, usize) {
        let books = self.outcome.books;
        (!self.outcome.fits(), books.reserved.peak, books.n_device_alloc, n_options(&self.options))
    }
}

/// How many options a setting has.
#[must_use]
pub fn n_options(options: &str) -> usize {
    options.split(',').filter(|option| !option.is_empty()).count()
}

fn n_calls(books: &Books) -> u64 {
    books.n_device_alloc + books.n_device_free
}

/// The result of a search.
#[derive(Clone, Debug)]
pub struct Found {
    /// The setting with the smallest peak that is sure, or one with fewer options that reserves hardly more.
    pub options: String,
    /// Its answer.
    pub answer: Answer,
    /// Settings that no other beats in both peak and driver calls, smallest peak first.
    pub pareto: Vec<Candidate>,
    /// Settings that were simulated.
    pub n_tried: usize,
    /// Of a long run, no setting of two or more options was: one of those with fewer reserves so little more than was requested at once
    /// that no further option is worth it.
    pub is_plain_enough: bool,
}

/// Simulates all settings on all cores, and the best of them at other addresses too. None where none could be simulated.
///
/// # Errors
/// When the policy does not understand a setting.
pub fn search(
    laboratory: &Laboratory,
    settings: &[String],
    question: impl Fn(&str) -> Question + Sync,
) -> Result<Option<Found>, OptionError> {
    search_in_parts(laboratory, settings, question, effort::COMPOSED.most)
}

/// As [`search`], where a run of more than `long` ops is a long one.
fn search_in_parts(
    laboratory: &Laboratory,
    settings: &[String],
    question: impl Fn(&str) -> Question + Sync,
    long: usize,
) -> Result<Option<Found>, OptionError> {
    let never_fits = laboratory.never_fits(&question(""));
    let bar = Bar { never_fits, ..Bar::default() };
    let tried = |options: &str| {
        let mut seen = ((0, 0), 0);
        let is_beaten = |books: &Books| bar.beats(options, books, &mut seen);
        let (outcome, is_whole) = laboratory.guess_until(&question(options), is_beaten).ok()?;
        let candidate = Candidate { options: options.to_owned(), outcome };
        if is_whole {
            bar.raise(&candidate);
        }
        Some(Tried { candidate, is_whole, never_fits })
    };
    let (plain, composed): (Vec<String>, Vec<String>) =
        settings.iter().cloned().partition(|options| n_options(options) <= 1);
    let is_long = laboratory.stream().ops.len() > long;
    let parts = if is_long { [&plain[..], &composed] } else { [settings, &[]] };
    let requested = Bounds::of(laboratory.stream()).requested;
    let is_enough = |it: &Tried| {
        let peak = it.candidate.outcome.books.reserved.peak;
        it.is_whole
            && it.candidate.outcome.fits()
            && peak <= requested.saturating_add(requested / WORTH_AN_OPTION)
    };
    let (mut all, mut is_plain_enough) = (Vec::new(), false);
    for part in parts.into_iter().filter(|part| !part.is_empty()) {
        is_plain_enough = all.iter().any(is_enough);
        if is_plain_enough {
            break;
        }
        let (mut first, then) = in_two_parts(part);
        // What is set alone is seldom beaten by what is set together.
        first.sort_by_key(|options| n_options(options));
        all.extend(on_all_cores(first.len(), |index| tried(first[index])));
        all.extend(on_all_cores(then.len(), |index| tried(then[index])));
    }
    all.sort_by(|one, other| one.order().cmp(&other.order()));
    let n_tried = all.len();
    let whole = all.iter().filter(|tried| tried.is_whole).map(|tried| tried.candidate.clone());
    let pareto = pareto(whole.collect());
    let Some(best) = best(laboratory, &mut all, &question)? else { return Ok(None) };
    let (options, answer) = plainer(laboratory, all, best, question)?;
    Ok(Some(Found { options, answer, pareto, n_tried, is_plain_enough }))
}

/// Of settings with fewer options than the best, the one with the fewest that reserves hardly more, wherever memory lies; else the
/// best.
fn plainer(
    laboratory: &Laboratory,
    tried: Vec<Tried>,
    best: (String, Answer),
    question: impl Fn(&str) -> Question + Sync,
) -> Result<(String, Answer), OptionError> {
    let (runs_out, peak) = at_worst(&best.1);
    if runs_out {
        return Ok(best);
    }
    let enough = peak.saturating_add(peak / WORTH_AN_OPTION);
    let is_near = |it: &Candidate| it.outcome.fits() && it.outcome.books.reserved.peak <= enough;
    let is_plainer = |it: &Candidate| (1..n_options(&best.0)).contains(&n_options(&it.options));
    let near = tried.into_iter().map(|it| it.candidate).filter(|it| is_plainer(it) && is_near(it));
    let near: Vec<Candidate> = near.collect();
    // To their end, where they were ended.
    let whole = |index: usize| {
        let Candidate { options, .. } = &near[index];
        let outcome = laboratory.guess(&question(options)).ok()?;
        Some(Candidate { options: options.clone(), outcome })
    };
    let mut candidates = on_all_cores(near.len(), whole);
    candidates.retain(is_near);
    candidates.sort_by_key(|it| (n_options(&it.options), it.outcome.books.reserved.peak, it.options.clone()));
    for Candidate { options, .. } in candidates.into_iter().take(MOST_ANSWERED) {
        let answer = laboratory.answer(&question(&options))?;
        if at_worst(&answer) <= (false, enough) {
            return Ok((options, answer));
        }
    }
    Ok(best)
}

/// Whether memory runs out and what is reserved, at the unkindest addresses.
fn at_worst(answer: &Answer) -> (bool, u64) {
    (answer.n_oom.0 > 0 || !answer.outcome.fits(), answer.peak_reserved_range.1)
}

/// What a setting has to beat to be among the best.
#[derive(Default)]
struct Bar {
    /// No setting fits.
    never_fits: bool,
    /// Settings that were replayed to the end, and fitted, or where none can; with their driver calls.
    finished: Mutex<Vec<(Rank, u64)>>,
    /// How many there are.
    version: AtomicUsize,
}

impl Bar {
    fn raise(&self, candidate: &Candidate) {
        if let Ok(mut finished) = self.finished.lock()
            && candidate.outcome.fits() != self.never_fits
        {
            finished.push((
                Rank::of(&candidate.options, &candidate.outcome.books),
                n_calls(&candidate.outcome.books),
            ));
            self.version.store(finished.len(), Ordering::Relaxed);
        }
    }

    /// Whether one that is finished comes before this in every order that is asked for, whatever follows: what is counted only
    /// rises. `seen` is what was looked at last.
    fn beats(&self, options: &str, books: &Books, seen: &mut ((u64, u64), usize)) -> bool {
        let now = (books.reserved.peak, n_calls(books));
        let version = self.version.load(Ordering::Relaxed);
        if *seen == (now, version) {
            return false;
        }
        *seen = (now, version);
        let Ok(finished) = self.finished.lock() else { return false };
        let rank = Rank::of(options, books);
        finished.iter().any(|(other, n_calls)| *other < rank && (now.1 >= *n_calls || self.never_fits))
    }
}

/// Smaller is better, of settings that all fit, or none of which does: reserve little, call the driver rarely, set few options.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    peak: u64,
    n_device_alloc: u64,
    n_options: usize,
    options: String,
}

impl Rank {
    fn of(options: &str, books: &Books) -> Rank {
        Rank {
            peak: books.reserved.peak,
            n_device_alloc: books.n_device_alloc,
            n_options: n_options(options),
            options: options.to_owned(),
        }
    }
}

/// A setting whose replay may have been ended: then its numbers only rise.
struct Tried {
    candidate: Candidate,
    is_whole: bool,
    never_fits: bool,
}

impl Tried {
    /// Smaller is better; of what was ended, at best.
    fn order(&self) -> ((bool, u64, u64, usize), &str) {
        let (runs_out, peak, n_allocs, n_options) = self.candidate.rank();
        ((runs_out || self.never_fits, peak, n_allocs, n_options), &self.candidate.options)
    }
}

/// The best at the unkindest addresses. What was ended and may be it is replayed to its end.
fn best(
    laboratory: &Laboratory,
    tried: &mut [Tried],
    question: impl Fn(&str) -> Question,
) -> Result<Option<(String, Answer)>, OptionError> {
    let mut best: Option<(String, Answer)> = None;
    let mut waiting: Vec<usize> = (0..tried.len()).collect();
    let mut n_answered = 0;
    while n_answered < MOST_ANSWERED
        && let Some(next) = (0..waiting.len())
            .min_by(|one, other| tried[waiting[*one]].order().cmp(&tried[waiting[*other]].order()))
    {
        let it = &mut tried[waiting[next]];
        let ((runs_out, peak, ..), _) = it.order();
        let known = best.as_ref().map(|(_, answer)| at_worst(answer));
        if known.is_some_and(|known| known <= (runs_out, peak)) {
            break;
        }
        if !it.is_whole {
            it.candidate.outcome = laboratory.guess(&question(&it.candidate.options))?;
            it.is_whole = true;
            continue;
        }
        waiting.swap_remove(next);
        n_answered += 1;
        let options = it.candidate.options.clone();
        let answer = laboratory.answer(&question(&options))?;
        if known.is_none_or(|known| at_worst(&answer) < known) {
            best = Some((options, answer));
        }
    }
    Ok(best)
}

/// Of candidates that rise in peak, those that call the driver less than all before.
pub(crate) fn pareto(candidates: Vec<Candidate>) -> Vec<Candidate> {
    let mut fewest = u64::MAX;
    let mut kept = Vec::new();
    for candidate in candidates.into_iter().filter(|candidate| candidate.outcome.fits()) {
        let n_calls = n_calls(&candidate.outcome.books);
        if n_calls < fewest {
            fewest = n_calls;
            kept.push(candidate);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Allocation, Builder, Op, OpStream, PoolIdx, StackId, StreamIdx};
    use crate::policies::torch::NEWEST;

    #[test]
    fn what_is_advised_is_among_what_is_searched() {
        let searched = combinations(NEWEST, true).unwrap();
        for options in advised(NEWEST, "").unwrap() {
            assert!(searched.contains(&options), "{options}");
        }
    }

    #[test]
    fn what_was_set_comes_first_and_once_and_what_a_release_does_not_know_is_left_out() {
        let settings = advised(NEWEST, "max_split_size_mb:64").unwrap();
        assert_eq!(settings.len(), ADVISED.len() + 1);
        assert_eq!(settings[..3], ["max_split_size_mb:64", "", "expandable_segments:True"]);
        assert_eq!(advised(NEWEST, "no_such:1").unwrap()[1..], ADVISED);
    }

    /// Asks for `n` blocks; with holes, it gives every other one back and asks for larger ones.
    fn program(n: u64, has_holes: bool) -> OpStream {
        let mut builder = Builder::new(0);
        let (stack, stream, pool) = (StackId::NONE, StreamIdx(0), PoolIdx::DEFAULT);
        let block = |kib: u64| Allocation { requested: kib << 10, address: 0, stack, stream, pool };
        let blocks: Vec<_> = (0..n).map(|at| builder.alloc(block(2048 + 512 * (at % 7)))).collect();
        for id in blocks.into_iter().step_by(2).filter(|_| has_holes) {
            builder.op(Op::FreeRequested(id));
            builder.op(Op::FreeCompleted(id));
        }
        for at in 0..if has_holes { n / 4 } else { 0 } {
            builder.alloc(block(12288 + 512 * at));
        }
        builder.finish()
    }

    /// What is not tried of a long run would not have been advised.
    #[test]
    fn two_options_together_are_left_out_only_where_they_are_not_worth_it() {
        let settings = combinations(NEWEST, false).unwrap();
        let question = |options: &str| Question::torch(NEWEST, options);
        let mut n_left_out = 0;
        for (n, has_holes) in [(40, false), (41, true), (160, false), (160, true), (400, true)] {
            let stream = program(n, has_holes);
            let found = |long: usize| {
                let laboratory = Laboratory::new(&stream).unwrap();
                search_in_parts(&laboratory, &settings, question, long).unwrap().unwrap()
            };
            let (all, parts) = (found(usize::MAX), found(0));
            assert!(!all.is_plain_enough);
            if !parts.is_plain_enough {
                assert_eq!((&parts.options, parts.n_tried), (&all.options, all.n_tried), "{n}");
                continue;
            }
            n_left_out += 1;
            assert!(parts.n_tried < all.n_tried);
            let peak = |found: &Found| found.answer.peak_reserved_range.1;
            let enough = peak(&all) + peak(&all) / WORTH_AN_OPTION;
            assert!(peak(&parts) <= enough, "{n}: {} {}", peak(&parts), peak(&all));
        }
        assert!((1..5).contains(&n_left_out), "{n_left_out}");
    }

    #[test]
    fn a_release_that_was_not_measured_is_said_to_be() {
        let wrong = combinations((1, 0), true).unwrap_err();
        assert_eq!(wrong.0, "PyTorch 1.0 was not measured; name another --torch-version");
    }
}
