//! Which request of one run is which of another.
//!
//! A request is known by its stack, its stream, its kind of pool, and by its size without what changed between the runs: 3 MiB
//! at batch 4 and 6 MiB at batch 8 are alike. A free is known by its request. The longest common order of both is found
//! first; where it has gaps, requests of one stack are matched again, those first whose sizes follow a law.

use std::ops::Range;

use rustc_hash::FxHashMap;

use super::common::{NONE, common};
use super::law::Basis;
use crate::cores::on_all_cores;
use crate::ops::{AllocId, Allocation, Op, OpStream, Pool, StackId};

/// Steps on each side of a gap that are matched again.
const WINDOW: usize = 48;
/// Most pairs of steps that are compared in one gap, and in all.
const MOST_PAIRS: usize = 1 << 22;
const MOST_PAIRS_IN_ALL: usize = 1 << 27;
/// A core takes so many gaps at a time.
const GAPS_AT_A_TIME: usize = 64;

/// Numbers for whatever a request is known by, shared by all runs.
#[derive(Default)]
pub(super) struct Interner {
    places: FxHashMap<Place, u32>,
    sized: FxHashMap<(u32, u64), u32>,
}

/// Where a request came from, so that it can be found in another process: no handles, no addresses.
#[derive(PartialEq, Eq, Hash)]
struct Place {
    stack: u64,
    stream: u16,
    pool: (u8, u16),
}

/// A run as a sequence of steps: requests and frees. When a free completes is the GPU's timing, and left out.
pub(super) struct Steps<'a> {
    stream: &'a OpStream,
    /// The request that a step makes or frees.
    requests: Vec<AllocId>,
    /// Whether it frees it.
    frees: Vec<bool>,
    /// Where each allocation came from: [`Interner`]'s number.
    pub(super) place_of: Vec<u32>,
}

impl<'a> Steps<'a> {
    pub(super) fn new(stream: &'a OpStream, interner: &mut Interner) -> Steps<'a> {
        let (mut requests, mut frees) = (vec![], vec![]);
        for op in &stream.ops {
            match op {
                Op::Alloc(id) => {
                    requests.push(*id);
                    frees.push(false);
                }
                Op::FreeRequested(id) => {
                    requests.push(*id);
                    frees.push(true);
                }
                Op::FreeCompleted(_) | Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
            }
        }
        Steps { stream, requests, frees, place_of: places(stream, interner) }
    }

    fn size(&self, step: usize) -> u64 {
        self.stream.allocation(self.requests[step]).requested
    }

    fn place(&self, step: usize) -> u32 {
        self.place_of[self.requests[step].0 as usize] << 1 | u32::from(self.frees[step])
    }
}

/// Streams and pools by the order in which they are first used: handles differ from process to process.
fn places(stream: &OpStream, interner: &mut Interner) -> Vec<u32> {
    let mut streams = FxHashMap::default();
    let mut pools = FxHashMap::default();
    let mut known = FxHashMap::default();
    let mut numbered = |allocation: &Allocation| {
        let next = streams.len() as u16;
        let on = *streams.entry(allocation.stream).or_insert(next);
        let next = pools.len() as u16;
        let pool = *pools.entry(allocation.pool).or_insert(next);
        let stack = hash(stream, allocation.stack);
        let place = Place { stack, stream: on, pool: (kind(stream.pool(allocation.pool)), pool) };
        let next = interner.places.len() as u32;
        *interner.places.entry(place).or_insert(next)
    };
    let place = |allocation: &Allocation| {
        let Allocation { stack, stream, pool, .. } = *allocation;
        *known.entry((stack, stream, pool)).or_insert_with(|| numbered(allocation))
    };
    stream.allocations.iter().map(place).collect()
}

fn kind(pool: Pool) -> u8 {
    match pool {
        Pool { id: (0, 0) } => 0,
        pool if pool.is_guessed() => 1,
        pool if pool.is_capture() => 2,
        _ => 3,
    }
}

/// The text of a stack. A function without a name is an address, which differs from process to process; folders differ between
/// copies of a program, and files and lines of generated code with what it was generated for.
fn hash(stream: &OpStream, stack: StackId) -> u64 {
    use std::hash::{Hash, Hasher};
    let mut hasher = rustc_hash::FxHasher::default();
    for frame in stream.stacks.frames_of(stack) {
        if is_generated(&frame.file) {
            frame.name.hash(&mut hasher);
            continue;
        }
        let file = frame.file.rsplit('/').next().unwrap_or_default();
        file.hash(&mut hasher);
        if !frame.name.starts_with("0x") {
            (&*frame.name, frame.line).hash(&mut hasher);
        }
    }
    hasher.finish()
}

/// A file that is named by what is in it, as torch.compile's are (`get_path` in torch/_inductor/codecache.py, PyTorch 2.0 to 2.11).
pub(crate) fn is_generated(file: &str) -> bool {
    let file = file.rsplit('/').next().unwrap_or_default();
    const LEAST_OF_A_HASH: usize = 32;
    let stem = file.strip_suffix(".py").unwrap_or_default();
    stem.len() >= LEAST_OF_A_HASH
        && stem.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
        && stem.bytes().any(|byte| byte.is_ascii_digit())
}

/// Matches the requests of a run to those of another: for each allocation of the first the one of the other, or [`NONE`].
pub(super) fn align(
    (base, at): (&Steps, &[u64]),
    (other, other_at): (&Steps, &[u64]),
    basis: &Basis,
    interner: &mut Interner,
) -> Vec<u32> {
    let primes = primes_of_change(at, other_at);
    let mut sized = |steps: &Steps| -> Vec<u32> {
        let token = |(place, allocation): (&u32, &Allocation)| {
            let next = interner.sized.len() as u32;
            *interner.sized.entry((*place, without(allocation.requested, &primes))).or_insert(next)
        };
        let tokens: Vec<u32> = steps.place_of.iter().zip(&steps.stream.allocations).map(token).collect();
        let is_free = steps.requests.iter().zip(&steps.frees);
        is_free.map(|(id, is_free)| tokens[id.0 as usize] << 1 | u32::from(*is_free)).collect()
    };
    let (before, after) = (sized(base), sized(other));
    let matched = common(&before, &after);
    let ratios = (0..).zip(basis.products()).map(|(product, powers)| {
        let is_plain = powers.iter().all(|power| *power <= 1);
        (
            basis.product_at(product, other_at) / basis.product_at(product, at),
            if is_plain { PLAIN } else { SQUARE },
        )
    });
    let aligner = Aligner { base, other, ratios: ratios.collect() };
    let matched = aligner.refined(matched);
    let mut found = vec![NONE; base.stream.allocations.len()];
    for (step, other_step) in matched.into_iter().enumerate() {
        if other_step != NONE && !base.frees[step] {
            found[base.requests[step].0 as usize] = other.requests[other_step as usize].0;
        }
    }
    found
}

/// The prime factors by which the variables changed.
fn primes_of_change(at: &[u64], other: &[u64]) -> Vec<u64> {
    let mut primes = vec![];
    for (one, other) in at.iter().zip(other) {
        let common = greatest_common_divisor(*one, *other).max(1);
        for mut rest in [one / common, other / common] {
            let mut prime = 2;
            while prime * prime <= rest {
                while rest.is_multiple_of(prime) {
                    primes.push(prime);
                    rest /= prime;
                }
                prime += 1;
            }
            primes.extend(Some(rest).filter(|rest| *rest > 1));
        }
    }
    primes.sort_unstable();
    primes.dedup();
    primes
}

pub(super) fn greatest_common_divisor(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}

fn without(mut size: u64, primes: &[u64]) -> u64 {
    if size == 0 {
        return 0;
    }
    for prime in primes {
        if *prime == 2 {
            size >>= size.trailing_zeros();
        }
        while size.is_multiple_of(*prime) {
            size /= prime;
        }
    }
    size
}

/// What it counts for two requests that a law gives both sizes: with a square less, of which there are fewer, and which more often
/// is by chance.
const PLAIN: u32 = 3;
const SQUARE: u32 = 2;

struct Aligner<'a> {
    base: &'a Steps<'a>,
    other: &'a Steps<'a>,
    /// By how much a size changes from base to other under each law of one product, and what that counts.
    ratios: Vec<(f64, u32)>,
}

impl Aligner<'_> {
    /// The steps about each gap, matched again.
    fn refined(&self, mut matched: Vec<u32>) -> Vec<u32> {
        let mut pairs_left = MOST_PAIRS_IN_ALL;
        let gaps = gaps(&matched, self.other.requests.len()).into_iter().map(|(before, after)| {
            let n_pairs = before.len() * after.len();
            let is_affordable = n_pairs <= MOST_PAIRS.min(pairs_left);
            pairs_left -= if is_affordable { n_pairs } else { 0 };
            (before, after, is_affordable)
        });
        let gaps: Vec<(Range<usize>, Range<usize>, bool)> = gaps.collect();
        let groups: Vec<&[_]> = gaps.chunks(GAPS_AT_A_TIME).collect();
        let again = |(before, after, is_affordable): &(Range<usize>, Range<usize>, bool)| {
            if *is_affordable {
                return self.best(before.clone(), after.clone());
            }
            let tokens = |steps: &Steps, range: &Range<usize>| -> Vec<u32> {
                range.clone().map(|step| steps.place(step)).collect()
            };
            let found = common(&tokens(self.base, before), &tokens(self.other, after));
            let start = after.start as u32;
            found.into_iter().map(|at| if at == NONE { NONE } else { at + start }).collect()
        };
        let found =
            on_all_cores(groups.len(), |group| Some(groups[group].iter().map(again).collect::<Vec<_>>()));
        for ((before, ..), found) in gaps.iter().zip(found.iter().flatten()) {
            matched[before.clone()].copy_from_slice(found);
        }
        matched
    }

    /// How well two steps of one place go together.
    fn score(&self, one: usize, other: usize) -> u32 {
        let (base, steps) = (self.base, self.other);
        let (size, other_size) = (base.size(one) as f64, steps.size(other) as f64);
        let follows = self.ratios.iter().filter(|(ratio, _)| (size * ratio - other_size).abs() < 1.0);
        let weight = follows.map(|(_, weight)| *weight).max().unwrap_or(0);
        1 + if base.frees[one] { weight.min(1) } else { weight }
    }

    /// The matching of two ranges with the largest sum of scores.
    fn best(&self, before: Range<usize>, after: Range<usize>) -> Vec<u32> {
        #[derive(Clone, Copy, PartialEq)]
        enum From {
            Both,
            Before,
            After,
        }
        let (n_before, n_after) = (before.len(), after.len());
        let mut from = vec![From::Before; (n_before + 1) * (n_after + 1)];
        from[..=n_after].fill(From::After);
        let mut scores = vec![0_u32; n_after + 1];
        // Nearly all pairs are of two places.
        let places_after: Vec<u32> = after.clone().map(|step| self.other.place(step)).collect();
        let rows = from.chunks_exact_mut(n_after + 1).skip(1);
        for (one, from) in before.clone().zip(rows) {
            let place = self.base.place(one);
            let (mut diagonal, mut left) = (scores[0], scores[0]);
            let columns = scores[1..].iter_mut().zip(&mut from[1..]).zip(&places_after);
            for (((above, from), place_after), other) in columns.zip(after.clone()) {
                let both = (*place_after == place).then(|| diagonal + self.score(one, other));
                let (score, step) = match both {
                    Some(both) if both >= left.max(*above) => (both, From::Both),
                    _ if left > *above => (left, From::After),
                    _ => (*above, From::Before),
                };
                diagonal = std::mem::replace(above, score);
                *from = step;
                left = score;
            }
        }
        let mut found = vec![NONE; n_before];
        let (mut row, mut column) = (n_before, n_after);
        while row > 0 && column > 0 {
            match from[row * (n_after + 1) + column] {
                From::Both => {
                    row -= 1;
                    column -= 1;
                    found[row] = (after.start + column) as u32;
                }
                From::Before => row -= 1,
                From::After => column -= 1,
            }
        }
        found
    }
}

/// Ranges of both sequences that are not matched, with what is around them. They do not touch each other.
fn gaps(matched: &[u32], n_after: usize) -> Vec<(Range<usize>, Range<usize>)> {
    let mut found: Vec<(Range<usize>, Range<usize>)> = vec![];
    let (mut step, mut at) = (0, 0);
    while step < matched.len() || at < n_after {
        if step < matched.len() && matched[step] as usize == at {
            step += 1;
            at += 1;
            continue;
        }
        let end = (step..matched.len()).find(|step| matched[*step] != NONE).unwrap_or(matched.len());
        let at_end = matched.get(end).map_or(n_after, |at| *at as usize);
        found.push((step..end, at..at_end));
        (step, at) = (end, at_end);
    }
    // Around a gap both run side by side, so that both ends move by the same number of steps.
    let mut wide: Vec<(Range<usize>, Range<usize>)> = vec![];
    for (index, (before, after)) in found.iter().enumerate() {
        let limit = wide.last().map_or(0, |(last, _)| last.end);
        let back = WINDOW.min(before.start.saturating_sub(limit)).min(after.start);
        let next = found.get(index + 1).map_or(matched.len(), |(next, _)| next.start);
        let forward = WINDOW.min(next - before.end);
        let this = (before.start - back..before.end + forward, after.start - back..after.end + forward);
        match wide.last_mut() {
            Some((last, last_after)) if last.end >= this.0.start => {
                last.end = this.0.end;
                last_after.end = this.1.end;
            }
            _ => wide.push(this),
        }
    }
    wide
}

/// What was live before the history of both runs began has no order: equal sizes are the same, and of what is left, where as
/// many are left of both, the largest is the largest.
pub(super) fn match_standing(base: &OpStream, other: &OpStream, matched: &mut [u32]) {
    let sorted = |stream: &OpStream| {
        let mut ids = stream.initial_allocs.clone();
        ids.sort_by_key(|id| (stream.allocation(*id).requested, *id));
        ids
    };
    let mut left = sorted(other);
    let mut unmatched = vec![];
    for id in sorted(base) {
        let size = base.allocation(id).requested;
        match left.binary_search_by_key(&size, |id| other.allocation(*id).requested) {
            Ok(index) => matched[id.0 as usize] = left.remove(index).0,
            Err(_) => unmatched.push(id),
        }
    }
    if unmatched.len() == left.len() {
        unmatched.iter().zip(&left).for_each(|(id, other)| matched[id.0 as usize] = other.0);
    }
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};

    use super::*;
    use crate::ops::{Builder, Frame, PoolIdx, Stacks, StreamIdx};

    /// Requests `place:size` in order, freed at the end, last first.
    fn stream(text: &str) -> OpStream {
        let mut builder = Builder::new(0);
        let mut stacks = Stacks::default();
        let mut ids = vec![];
        for word in text.split_whitespace() {
            let (name, size) = word.split_once(':').unwrap();
            let index = stacks.frames.len() as u32;
            stacks.frames.push(Frame { name: name.into(), file: "/job/train.py".into(), line: 1 });
            stacks.lists.push([index].into());
            ids.push(builder.alloc(Allocation {
                requested: size.parse().unwrap(),
                address: 0,
                stack: StackId(index),
                stream: StreamIdx(0),
                pool: PoolIdx::DEFAULT,
            }));
        }
        for id in ids.into_iter().rev() {
            builder.op(Op::FreeRequested(id));
        }
        builder.stream_mut().stacks = stacks.into();
        builder.finish()
    }

    /// What the requests of a run at batch 8 are in a run at batch 4.
    fn check(base: &str, other: &str, expected: Expect) {
        let (base, other) = (stream(base), stream(other));
        let mut interner = Interner::default();
        let steps = [&base, &other].map(|stream| Steps::new(stream, &mut interner));
        let found = align((&steps[0], &[8]), (&steps[1], &[4]), &Basis::new(1), &mut interner);
        let size = |index: u32| match other.allocations.get(index as usize) {
            Some(allocation) => allocation.requested.to_string(),
            None => "-".to_owned(),
        };
        expected.assert_eq(&found.into_iter().map(size).collect::<Vec<_>>().join(" "));
    }

    #[test]
    fn generated_code_is_known_by_its_functions() {
        assert!(is_generated("c52xk6w5dbews5cdhavx4m5lzjkfzgk52tio7ro2tmeigxy34v7a.py"));
        for file in [
            "train.py",
            "a_module_of_my_own_with_a_very_long_name_2.py",
            "modelingwithaverylongnameindeedbutnodigits.py",
            "",
        ] {
            assert!(!is_generated(file), "{file}");
        }
    }

    #[test]
    fn requests_are_matched_by_stack_and_order() {
        check("a:80 b:7 a:160", "a:40 b:7 a:80", expect!["40 7 80"]);
        check("a:80 ws:999 b:7 a:160", "a:40 b:7 a:80", expect!["40 - 7 80"]);
        check("a:80 b:7 a:160", "a:40 ws:999 b:7 a:80", expect!["40 7 80"]);
    }

    #[test]
    fn of_requests_with_one_stack_those_are_matched_whose_sizes_follow_a_law() {
        check("x:80 x:1000 x:60 x:200", "x:40 x:30 x:100", expect!["40 - 30 100"]);
        check("x:3000 x:80 x:60 x:200", "x:40 x:30 x:100", expect!["- 40 30 100"]);
        // Powers of two look alike without what changed.
        check("x:64 x:512 x:32 x:256", "x:32 x:16 x:128", expect!["32 - 16 128"]);
    }

    #[test]
    fn a_square_counts_less_than_a_law_without_one() {
        check("x:400", "x:200 x:100", expect!["200"]);
        check("x:400", "x:100 x:200", expect!["200"]);
        check("x:400 x:200", "x:100 x:100", expect!["100 100"]);
    }

    #[test]
    fn what_follows_no_law_is_matched_by_its_stack() {
        check("a:80 moe:1013 b:7", "a:40 moe:488 b:7", expect!["40 488 7"]);
    }

    #[test]
    fn functions_without_a_name_are_addresses_and_differ() {
        check("0x7f01:80 0x7f02:7", "0x1101:40 0x1102:7", expect!["40 7"]);
    }
}
