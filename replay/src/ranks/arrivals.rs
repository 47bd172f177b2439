//! Who comes last to collectives, and how late.
//!
//! Weak evidence, and said so: a program runs ahead of its GPU, so the host that calls last need not be the GPU that
//! starts last.

use rustc_hash::FxHashMap;
use serde::Serialize;

use super::findings::Place;

/// How a rank arrived at the collectives of one communicator.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Arrivals {
    /// The communicator.
    pub communicator: String,
    /// Rank in the job.
    pub rank: u32,
    /// Collectives that all ranks came to.
    pub collectives: u64,
    /// How often it came last, beyond what clocks can tell.
    pub last: u64,
    /// Mean nanoseconds after the median of the ranks.
    pub mean_late_ns: i64,
    /// Most nanoseconds after the median of the ranks.
    pub most_late_ns: i64,
    /// How far its clock may be off from the others'; null is not known.
    pub clock_uncertainty_ns: Option<u64>,
    /// Where it lost most of that time: the call that it came to late.
    pub place: Option<Place>,
    /// Number of the collective that it came to latest.
    pub latest_sequence: u64,
}

/// Adds up arrivals of one communicator.
pub struct Tally {
    rows: Vec<Row>,
    n_columns: u64,
    sorted: Vec<i128>,
}

#[derive(Default)]
struct Row {
    last: u64,
    sum: i128,
    most: i128,
    latest: u64,
    by_kind: FxHashMap<u32, i128>,
    uncertainty: Option<u64>,
}

/// What a rank's row is about: its rank in the job, and the place of one of its kinds of calls.
pub struct Naming<'a> {
    /// The communicator.
    pub communicator: &'a str,
    /// Ranks in the job, by track.
    pub ranks: &'a [u32],
    /// The place of a track's kind of call.
    pub place: &'a dyn Fn(usize, u32) -> Option<Place>,
}

impl Tally {
    /// For tracks whose clocks are so uncertain.
    #[must_use]
    pub fn new(uncertainties: impl Iterator<Item = Option<u64>>) -> Tally {
        let rows: Vec<Row> = uncertainties.map(|uncertainty| Row { uncertainty, ..Row::default() }).collect();
        Tally { rows, n_columns: 0, sorted: vec![] }
    }

    /// All tracks came to collective `column`: their times on the common scale, and kinds of calls.
    pub fn add(&mut self, column: u64, times: &[i128], kinds: &[u32]) {
        self.sorted.clear();
        self.sorted.extend_from_slice(times);
        self.sorted.sort_unstable();
        let n = self.sorted.len();
        // Of two the earlier: with it as the median the other's lateness is what it is.
        let median = self.sorted[(n - 1) / 2];
        self.n_columns += 1;
        for (track, time) in times.iter().enumerate() {
            let row = &mut self.rows[track];
            let late = time - median;
            row.sum += late;
            *row.by_kind.entry(kinds[track]).or_default() += late;
            if late > row.most {
                (row.most, row.latest) = (late, column);
            }
            let ahead_of_others = time - self.sorted[n.saturating_sub(2)];
            let clock = row.uncertainty.map_or(i128::MAX, i128::from);
            if *time == self.sorted[n - 1] && ahead_of_others > clock {
                row.last += 1;
            }
        }
    }

    /// The rows, latest first.
    #[must_use]
    pub fn rows(&self, naming: &Naming<'_>) -> Vec<Arrivals> {
        let n = i128::from(self.n_columns.max(1));
        let row = |(track, row): (usize, &Row)| {
            let worst = row.by_kind.iter().max_by_key(|(kind, late)| (**late, std::cmp::Reverse(**kind)));
            Arrivals {
                communicator: naming.communicator.to_owned(),
                rank: naming.ranks[track],
                collectives: self.n_columns,
                last: row.last,
                mean_late_ns: (row.sum / n) as i64,
                most_late_ns: row.most as i64,
                clock_uncertainty_ns: row.uncertainty,
                place: worst.and_then(|(kind, _)| (naming.place)(track, *kind)),
                latest_sequence: row.latest,
            }
        };
        let mut rows: Vec<Arrivals> = self.rows.iter().enumerate().map(row).collect();
        rows.sort_by_key(|row| (std::cmp::Reverse(row.mean_late_ns), row.rank));
        rows
    }
}

/// Least collectives to judge by.
const LEAST_COLLECTIVES: u64 = 10;
/// Least mean lateness that is worth a word: a millisecond.
const LEAST_LATE: i64 = 1_000_000;

impl Arrivals {
    /// It comes last more often than not, and by much.
    #[must_use]
    pub fn is_straggler(&self) -> bool {
        let certain =
            self.clock_uncertainty_ns.is_some_and(|uncertainty| self.mean_late_ns > 2 * uncertainty as i64);
        certain
            && self.collectives >= LEAST_COLLECTIVES
            && self.last * 2 > self.collectives
            && self.mean_late_ns >= LEAST_LATE
    }
}
