//! Differences that belong together: several calls in a row that a rank made alone, or did not make, are one difference.

use std::collections::BTreeMap;

use super::align::{Difference, Kind, Token, Track};

/// Calls in a row, alike on each of some tracks.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Run {
    /// How they differ.
    pub(super) kind: Kind,
    /// The first column that they are about.
    pub(super) column: u64,
    /// The tracks that differ so.
    pub(super) tracks: Vec<usize>,
    /// The differences of the first of them, in order.
    pub(super) differences: Vec<Difference>,
    /// What was called: of what is missing, what the majority called.
    pub(super) tokens: Vec<Token>,
}

/// Puts differences together; in the order of columns.
pub(super) fn runs<T: Track>(differences: &[Difference], tracks: &[T]) -> Vec<Run> {
    let mut by_track: BTreeMap<usize, Vec<Vec<Difference>>> = BTreeMap::new();
    for difference in differences {
        let runs = by_track.entry(difference.track).or_default();
        match runs.last_mut() {
            Some(run) if run.last().is_some_and(|last| follows(last, difference)) => run.push(*difference),
            _ => runs.push(vec![*difference]),
        }
    }
    let token = |difference: &Difference| {
        let spot = match difference.kind {
            Kind::Missing => difference.majority,
            Kind::Changed | Kind::Extra | Kind::Swapped => difference.own,
        };
        spot.map_or(Token { call: 0, place: 0 }, |spot| tracks[spot.track].token(spot.position))
    };
    let mut alike: BTreeMap<(u64, Kind, Vec<Token>), Run> = BTreeMap::new();
    for (track, run) in
        by_track.into_iter().flat_map(|(track, runs)| runs.into_iter().map(move |run| (track, run)))
    {
        let (column, kind) = (run[0].column, run[0].kind);
        let tokens: Vec<Token> = run.iter().map(token).collect();
        let known = alike.entry((column, kind, tokens.clone()));
        let known = known.or_insert_with(|| Run { kind, column, tracks: vec![], differences: run, tokens });
        known.tracks.push(track);
    }
    alike.into_values().collect()
}

/// Nothing that fits lies between the two.
fn follows(last: &Difference, next: &Difference) -> bool {
    let positions = last.own.zip(next.own).map(|(last, next)| (last.position, next.position));
    match (last.kind, next.kind) {
        (Kind::Missing, Kind::Missing) => {
            next.column == last.column + 1 && positions.is_none_or(|(last, next)| last == next)
        }
        (Kind::Extra, Kind::Extra) => {
            next.column == last.column && positions.is_some_and(|(last, next)| next == last + 1)
        }
        _ => false,
    }
}
