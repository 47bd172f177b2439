//! What two sequences have in common, in an order that both have.
//!
//! A histogram finds it best, and takes a time that grows with the square where much differs. Long sequences are therefore cut first,
//! at tokens of which both have the same number: of those the first is the first, the second the second, as far as that keeps the order.
//!
//! ```text
//!   before  a b c a b c a b c      a, b, c: 3 of each on both sides, in order
//!   after   a b w c a b w c a b c  w: on one side alone
//! ```

use std::ops::Range;

use imara_diff::{Algorithm, Diff, Token};
use rustc_hash::FxHashMap;

/// No index.
pub(super) const NONE: u32 = u32::MAX;
/// Sequences of so many tokens together are cut before they are compared.
const LONG: usize = 1 << 16;

/// For each token before the index of the same token after, in an order that both have, or [`NONE`].
pub(super) fn common(before: &[u32], after: &[u32]) -> Vec<u32> {
    let mut matching = Matching { before, after, matched: vec![NONE; before.len()], ranges: vec![] };
    if before.len() + after.len() <= LONG {
        matching.diff(Algorithm::Histogram, 0..before.len(), 0..after.len());
    } else {
        matching.cut(0..before.len(), 0..after.len());
    }
    while let Some((one, other)) = matching.ranges.pop() {
        if one.len() + other.len() <= LONG {
            matching.diff(Algorithm::Histogram, one, other);
        } else {
            matching.cut(one, other);
        }
    }
    matching.matched
}

struct Matching<'a> {
    before: &'a [u32],
    after: &'a [u32],
    matched: Vec<u32>,
    /// What is left to be compared.
    ranges: Vec<(Range<usize>, Range<usize>)>,
}

impl Matching<'_> {
    fn diff(&mut self, algorithm: Algorithm, one: Range<usize>, other: Range<usize>) {
        // As many numbers as there are tokens here: the time hangs on the largest.
        let mut numbers: FxHashMap<u32, u32> = FxHashMap::default();
        let mut numbered = |tokens: &[u32]| -> Vec<Token> {
            let number = |token: &u32| {
                let next = numbers.len() as u32;
                Token(*numbers.entry(*token).or_insert(next))
            };
            tokens.iter().map(number).collect()
        };
        let (before, after) = (numbered(&self.before[one.clone()]), numbered(&self.after[other.clone()]));
        let mut diff = Diff::default();
        diff.compute_with(algorithm, &before, &after, numbers.len() as u32);
        let mut kept = (0..after.len() as u32).filter(|index| !diff.is_added(*index));
        for (index, at) in one.enumerate() {
            if !diff.is_removed(index as u32) {
                self.matched[at] = kept.next().map_or(NONE, |index| index + other.start as u32);
            }
        }
    }

    /// Matches the ends that are alike and the anchors between, and leaves what lies between those.
    fn cut(&mut self, mut one: Range<usize>, mut other: Range<usize>) {
        while !one.is_empty() && !other.is_empty() && self.before[one.start] == self.after[other.start] {
            self.matched[one.start] = other.start as u32;
            (one.start, other.start) = (one.start + 1, other.start + 1);
        }
        while !one.is_empty() && !other.is_empty() && self.before[one.end - 1] == self.after[other.end - 1] {
            (one.end, other.end) = (one.end - 1, other.end - 1);
            self.matched[one.end] = other.end as u32;
        }
        if one.len() + other.len() <= LONG {
            return self.leave(one, other);
        }
        let anchors = anchors(&self.before[one.clone()], &self.after[other.clone()]);
        if anchors.is_empty() {
            return self.diff(Algorithm::Myers, one, other);
        }
        let (mut first, mut second) = (one.start, other.start);
        for (at, at_other) in anchors {
            let (at, at_other) = (one.start + at as usize, other.start + at_other as usize);
            self.matched[at] = at_other as u32;
            self.leave(first..at, second..at_other);
            (first, second) = (at + 1, at_other + 1);
        }
        self.leave(first..one.end, second..other.end);
    }

    fn leave(&mut self, one: Range<usize>, other: Range<usize>) {
        if !one.is_empty() && !other.is_empty() {
            self.ranges.push((one, other));
        }
    }
}

/// Indexes of tokens of which both have the same number, ascending on both sides: the most of them that can be.
fn anchors(before: &[u32], after: &[u32]) -> Vec<(u32, u32)> {
    let n_tokens = before.iter().chain(after).max().map_or(0, |most| *most as usize + 1);
    let mut numbers = vec![(0_u32, 0_u32); n_tokens];
    before.iter().for_each(|token| numbers[*token as usize].0 += 1);
    after.iter().for_each(|token| numbers[*token as usize].1 += 1);
    // Where the indexes of each token begin among those of all, and these, ascending.
    let mut next = Vec::with_capacity(n_tokens);
    let mut sum = 0;
    for (_, number) in &numbers {
        next.push(sum);
        sum += number;
    }
    let first = next.clone();
    let mut indexes = vec![0_u32; after.len()];
    for (index, token) in (0..).zip(after) {
        let next = &mut next[*token as usize];
        indexes[*next as usize] = index;
        *next += 1;
    }
    let mut next = first;
    let pairs = (0..).zip(before).filter_map(|(index, token)| {
        let (number, other) = numbers[*token as usize];
        let next = &mut next[*token as usize];
        *next += 1;
        (number == other).then(|| (index, indexes[*next as usize - 1]))
    });
    ascending(&pairs.collect::<Vec<_>>())
}

/// The most pairs whose second numbers ascend; the first do.
fn ascending(pairs: &[(u32, u32)]) -> Vec<(u32, u32)> {
    // Of each length, the sequence that ends lowest: its last pair. And before each pair the one that it follows.
    let mut last: Vec<u32> = vec![];
    let mut follows = Vec::with_capacity(pairs.len());
    let end = |pair: u32| pairs[pair as usize].1;
    for (pair, (_, at)) in (0..).zip(pairs) {
        let length = match last.last() {
            Some(highest) if end(*highest) < *at => last.len(),
            _ => last.partition_point(|pair| end(*pair) < *at),
        };
        follows.push(length.checked_sub(1).map_or(NONE, |shorter| last[shorter]));
        if length == last.len() {
            last.push(pair);
        } else {
            last[length] = pair;
        }
    }
    let mut found = Vec::with_capacity(last.len());
    let mut pair = last.last().copied().unwrap_or(NONE);
    while pair != NONE {
        found.push(pairs[pair as usize]);
        pair = follows[pair as usize];
    }
    found.reverse();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Turns of a loop with many places; `extra` says after which place of which turn something else is asked for.
    fn turns(n: u32, extra: impl Fn(u32, u32) -> bool) -> Vec<u32> {
        const PLACES: u32 = 1000;
        let turn =
            |turn: u32| (0..PLACES).flat_map(move |place| [place, PLACES + turn % 7]).collect::<Vec<_>>();
        let with = |(turn, tokens): (u32, Vec<u32>)| -> Vec<u32> {
            let more = |(index, token): (u32, u32)| {
                [Some(token), extra(turn, index).then_some(5000)].into_iter().flatten()
            };
            (0..).zip(tokens).flat_map(more).collect()
        };
        (0..n).map(|it| (it, turn(it))).flat_map(with).collect()
    }

    /// How many tokens are matched; each with its like, in order.
    fn n_matched(before: &[u32], after: &[u32]) -> usize {
        let matched = common(before, after);
        let pairs: Vec<(usize, u32)> =
            matched.into_iter().enumerate().filter(|(_, it)| *it != NONE).collect();
        assert!(pairs.iter().all(|(one, other)| before[*one] == after[*other as usize]));
        assert!(pairs.windows(2).all(|two| two[0].1 < two[1].1));
        pairs.len()
    }

    #[test]
    fn in_long_sequences_all_is_found_that_both_have() {
        let plain = turns(100, |_, _| false);
        assert!(plain.len() > LONG);
        assert_eq!(n_matched(&plain, &plain), plain.len());
        let more = turns(100, |turn, index| (turn + index) % 97 == 0);
        assert_eq!(n_matched(&plain, &more), plain.len());
        assert_eq!(n_matched(&more, &plain), plain.len());
        let others = turns(100, |turn, index| (turn + index) % 89 == 0);
        assert!(n_matched(&more, &others) >= plain.len());
    }

    #[test]
    fn a_run_with_more_turns_has_all_of_the_shorter() {
        let (short, long) = (turns(70, |_, _| false), turns(100, |turn, _| turn == 3));
        assert_eq!(n_matched(&short, &long), short.len());
    }

    #[test]
    fn nothing_in_common_is_nothing() {
        let (one, other): (Vec<u32>, Vec<u32>) = ((0..100_000).collect(), (100_000..200_000).collect());
        assert_eq!(n_matched(&one, &other), 0);
        assert_eq!(n_matched(&[], &other), 0);
    }

    #[test]
    fn what_went_the_other_way_about_costs_the_fewer() {
        assert_eq!(ascending(&[(0, 5), (1, 6), (2, 0), (3, 7), (4, 1)]), [(0, 5), (1, 6), (3, 7)]);
    }
}
