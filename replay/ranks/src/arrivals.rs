//! Who comes last to collectives, and how late; `lateness.rs` says who does so by its own doing.
//!
//! Weak evidence, and said so: a program runs ahead of its GPU, so the host that calls last need not be the GPU that
//! starts last.

use rustc_hash::FxHashMap;
use serde::Serialize;

use super::findings::Place;
use super::lateness::{Habit, Times};

/// How a rank arrived at the collectives of one communicator.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Arrivals {
    /// The communicator.
    pub communicator: String,
    /// Rank in the job.
    pub rank: u32,
    /// Collectives that all ranks came to.
    pub collectives: u64,
    /// How often it came last, beyond the uncertainty of clocks: also because it was late before.
    pub last: u64,
    /// How often it became late anew, and all others waited for it alone.
    pub late_anew: u64,
    /// The longest of that, nanoseconds.
    pub most_anew_ns: i64,
    /// To which collective that was.
    pub most_anew_sequence: u64,
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

/// What is called late at all: a wake-up takes tens of microseconds, and on a busy machine longer.
const NOISE: i128 = 100_000;
/// What is worth a word if it happens once: a second.
const LONG: i128 = 1_000_000_000;
/// And so many times as long as collectives are apart.
const UNUSUAL: i128 = 10;

/// Adds up arrivals of one communicator.
pub struct Tally {
    rows: Vec<Row>,
    n_columns: u64,
    /// Times of a column, in no order.
    column: Vec<i128>,
    before: Vec<i128>,
    times: Times,
    /// From the first collective to the newest, on the first rank.
    span: (i128, i128),
}

#[derive(Default)]
struct Row {
    last: u64,
    sum: i128,
    most: i128,
    latest: u64,
    /// How often it became late, the longest of that, and to which collective and kind of call.
    anew: u64,
    most_anew: (i128, u64, u32),
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
        let times = Times::new(rows.len());
        Tally { rows, n_columns: 0, column: vec![], before: vec![], times, span: (0, 0) }
    }

    /// All tracks came to collective `column`: their times on the common scale, and kinds of calls.
    pub fn add(&mut self, column: u64, times: &[i128], kinds: &[u32]) {
        self.times.add(times, kinds);
        self.anew(column, times, kinds);
        if times.is_empty() {
            return;
        }
        self.column.clear();
        self.column.extend_from_slice(times);
        // Of two the earlier: with it as the median the other's lateness is what it is.
        let (_, median, later) = self.column.select_nth_unstable((times.len() - 1) / 2);
        let median = *median;
        let (mut newest, mut before) = (median, median);
        for time in later {
            if *time >= newest {
                (newest, before) = (*time, newest);
            } else {
                before = before.max(*time);
            }
        }
        self.n_columns += 1;
        for (track, time) in times.iter().enumerate() {
            let row = &mut self.rows[track];
            let late = time - median;
            row.sum += late;
            *row.by_kind.entry(kinds[track]).or_default() += late;
            if late > row.most {
                (row.most, row.latest) = (late, column);
            }
            let ahead_of_others = time - before;
            let clock = row.uncertainty.map_or(i128::MAX, i128::from);
            if *time == newest && ahead_of_others > clock {
                row.last += 1;
            }
        }
    }

    /// Who has become late since the collective before: later than all others, and taking longer than all others.
    fn anew(&mut self, column: u64, times: &[i128], kinds: &[u32]) {
        if self.before.is_empty() {
            (self.before, self.span.0) = (times.to_vec(), times.first().copied().unwrap_or(0));
            self.before.fill(i128::MIN / 4);
        }
        self.span.1 = times.first().copied().unwrap_or(0);
        let gap = |track: usize| times[track] - self.before[track];
        let last = (0..times.len()).max_by_key(|track| times[*track]);
        if let Some(last) = last.filter(|_| times.len() > 1) {
            let others = || (0..times.len()).filter(|track| *track != last);
            let later = others().map(|other| times[last] - times[other]).min().unwrap_or(0);
            let longer = others().map(|other| gap(last) - gap(other)).min().unwrap_or(0);
            let row = &mut self.rows[last];
            let late = later.min(longer);
            if late > row.uncertainty.map_or(i128::MAX, |clock| i128::from(clock).max(NOISE)) {
                row.anew += 1;
                if late > row.most_anew.0 {
                    row.most_anew = (late, column, kinds[last]);
                }
            }
        }
        self.before.copy_from_slice(times);
    }

    /// Ranks that are late again and again by their own doing.
    pub(super) fn habits(&self) -> Vec<Habit> {
        let mut clocks = self.rows.iter().map(|row| row.uncertainty);
        self.times.habits(clocks.try_fold(0, |most, clock| Some(most.max(clock?))))
    }

    /// Ranks for which all others waited for long, once: how long, in which collective, and in which of the rank's kinds of calls.
    pub(super) fn late_once(&self) -> Vec<(usize, i64, u64, u32)> {
        let mean = (self.span.1 - self.span.0) / i128::from(self.n_columns.max(1));
        let is_long = |late: i128| late >= LONG && late >= UNUSUAL * mean;
        let rows = self.rows.iter().enumerate().filter(|(_, row)| is_long(row.most_anew.0));
        rows.map(|(track, row)| (track, row.most_anew.0 as i64, row.most_anew.1, row.most_anew.2)).collect()
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
                late_anew: row.anew,
                most_anew_ns: row.most_anew.0 as i64,
                most_anew_sequence: row.most_anew.1,
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
