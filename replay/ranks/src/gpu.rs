//! Who comes last to collectives on the GPU, and what that costs the others (`gputrace record --nccl-timing`).
//!
//! A collective of all with all ends on all ranks at about the same moment, and a rank that is there early waits inside of it:
//! so the rank on which it takes the shortest came last. Nothing of this depends on clocks of hosts.
//!
//! ```text
//! rank 0  |======waits======|==moves data==|      long
//! rank 1                    |==moves data==|      short: came last
//! ```

use std::collections::BTreeMap;

use gputrace_schemas::event::NcclOp;
use rustc_hash::FxHashMap;
use serde::Serialize;

use super::findings::Place;
use gputrace_trace::ledger::GpuTimed;

/// How much shorter it must be on a rank than on all others for that rank to have come last: what two timers of half a
/// microsecond cannot tell apart, and the skew with which ranks leave a collective. A judgement.
const SKEW: u64 = 10_000;
/// Least collectives to judge by.
const LEAST_COLLECTIVES: u64 = 10;
/// Least mean cost of a collective that is worth a word: 100 µs.
const LEAST_COST: u64 = 100_000;
/// Single collectives that are shown.
const WORST: usize = 16;

/// Measurements of the GPUs; left out where none was measured.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct GpuReport {
    /// The measurements of each rank.
    pub ranks: Vec<GpuRank>,
    /// How long collectives take on each rank.
    pub collectives: Vec<GpuCollective>,
    /// Last arrivals, and their cost.
    pub arrivals: Vec<GpuArrivals>,
    /// The collectives in which the others waited longest for one rank.
    pub waits: Vec<GpuWait>,
}

/// A rank's part.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct GpuRank {
    /// In the job.
    pub rank: u32,
    /// Launches.
    #[serde(flatten)]
    pub timed: GpuTimed,
    /// The oldest launch that was never seen to end.
    pub first_unfinished: Option<Unfinished>,
}

/// A launch that was never seen to end.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Unfinished {
    /// Communicator.
    pub communicator: String,
    /// Which of its calls, in which order.
    pub sequence: Option<u64>,
    /// `collective`, `send`, ...
    pub order: Option<&'static str>,
    /// The operation that launched it.
    pub operation: &'static str,
    /// From where.
    pub place: Option<Place>,
}

/// Collectives of one kind.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct GpuCollective {
    /// Communicator.
    pub communicator: String,
    /// The call with its arguments.
    pub operation: String,
    /// From where.
    pub place: Option<Place>,
    /// How many were measured on all ranks.
    pub collectives: u64,
    /// On each rank.
    pub ranks: Vec<GpuTime>,
}

/// On one rank.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct GpuTime {
    /// In the job.
    pub rank: u32,
    /// How often it came last.
    pub last: u64,
    /// Mean.
    pub mean_ns: u64,
    /// Shortest.
    pub shortest_ns: u64,
    /// Longest.
    pub longest_ns: u64,
}

/// How a rank's GPU arrived at the collectives of one communicator.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct GpuArrivals {
    /// Communicator.
    pub communicator: String,
    /// In the job.
    pub rank: u32,
    /// Collectives that were measured on all ranks, of those in which all wait for all.
    pub collectives: u64,
    /// How often it came last.
    pub last: u64,
    /// Nanoseconds that all others waited for it alone, in all.
    pub cost_ns: u64,
    /// Most of that in one collective.
    pub most_ns: u64,
    /// Which one that was.
    pub most_sequence: u64,
    /// The call to which it came late at the highest cost.
    pub place: Option<Place>,
    /// Most of what anybody waits for there is because of it, and it is worth a word.
    pub is_straggler: bool,
}

/// One collective.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct GpuWait {
    /// Communicator.
    pub communicator: String,
    /// Number on it.
    pub sequence: u64,
    /// The call with its arguments.
    pub operation: String,
    /// The rank that came last.
    pub last_rank: u32,
    /// From where it was called there.
    pub place: Option<Place>,
    /// How long all others waited for that rank alone.
    pub waited_ns: u64,
    /// Rank and nanoseconds on its GPU.
    pub durations_ns: BTreeMap<u32, u64>,
}

/// Adds up one communicator.
pub struct Tally {
    rows: Vec<Row>,
    kinds: BTreeMap<u32, Kind>,
    worst: Vec<(u64, u64, Vec<u64>, Vec<u32>)>,
    n_columns: u64,
}

#[derive(Clone, Default)]
struct Row {
    last: u64,
    cost: u64,
    most: (u64, u64),
    by_kind: FxHashMap<u32, u64>,
}

#[derive(Clone)]
struct Kind {
    n: u64,
    times: Vec<Times>,
}

#[derive(Clone, Copy)]
struct Times {
    last: u64,
    sum: u64,
    shortest: u64,
    longest: u64,
}

/// What the numbers of a tally are called.
pub struct Naming<'a> {
    /// Communicator.
    pub communicator: &'a str,
    /// Ranks in the job, by track.
    pub ranks: &'a [u32],
    /// A track's kind of call: what, and from where.
    pub kind: &'a dyn Fn(usize, u32) -> (String, Option<Place>),
}

impl Tally {
    /// For so many tracks.
    #[must_use]
    pub fn new(n_tracks: usize) -> Tally {
        Tally { rows: vec![Row::default(); n_tracks], kinds: BTreeMap::new(), worst: vec![], n_columns: 0 }
    }

    /// Whether all ranks wait for all in it: the root of others may be done long before the last has come.
    #[must_use]
    pub fn compares(op: NcclOp) -> bool {
        matches!(op, NcclOp::AllReduce | NcclOp::AllGather | NcclOp::ReduceScatter | NcclOp::AlltoAll)
    }

    /// Collective `column` took so long on each track, where it was of these kinds. `shows_last`: who came last shows in that.
    pub fn add(&mut self, column: u64, durations: &[u64], kinds: &[u32], shows_last: bool) {
        let last = if shows_last { last_of(durations) } else { None };
        if let Some(kind) = kinds.first() {
            let none = Times { last: 0, sum: 0, shortest: u64::MAX, longest: 0 };
            let kind =
                self.kinds.entry(*kind).or_insert_with(|| Kind { n: 0, times: vec![none; durations.len()] });
            kind.n += 1;
            for (track, (times, duration)) in kind.times.iter_mut().zip(durations).enumerate() {
                times.last += u64::from(last.is_some_and(|(who, _)| who == track));
                times.sum = times.sum.saturating_add(*duration);
                times.shortest = times.shortest.min(*duration);
                times.longest = times.longest.max(*duration);
            }
        }
        self.n_columns += u64::from(shows_last);
        let Some((track, cost)) = last else { return };
        let row = &mut self.rows[track];
        row.last += 1;
        row.cost = row.cost.saturating_add(cost);
        // Of two the earlier.
        if cost > row.most.0 {
            row.most = (cost, column);
        }
        *row.by_kind.entry(kinds[track]).or_default() += cost;
        if self.worst.len() < WORST || self.worst.last().is_some_and(|least| least.0 < cost) {
            let at = self.worst.partition_point(|other| other.0 >= cost);
            self.worst.insert(at, (cost, column, durations.to_vec(), kinds.to_vec()));
            self.worst.truncate(WORST);
        }
    }

    /// Whether there is enough to judge by.
    #[must_use]
    pub fn is_enough(&self) -> bool {
        self.n_columns >= LEAST_COLLECTIVES
    }

    /// Most of what anybody waits for there is because of it, and it is worth a word: also without the longest wait of each rank, for a
    /// delay at the start is none of that.
    fn is_straggler(&self, row: &Row) -> bool {
        let again = |row: &Row| row.cost - row.most.0;
        let all = self.rows.iter().map(again).fold(0, u64::saturating_add);
        again(row) > all / 2 && again(row) / self.n_columns.max(1) >= LEAST_COST
    }

    /// Adds what was found to the report; the rows of this communicator, most costly first.
    pub fn report(&self, naming: &Naming<'_>, to: &mut GpuReport) -> Vec<GpuArrivals> {
        let communicator = || naming.communicator.to_owned();
        for (kind, of) in &self.kinds {
            let (operation, place) = (naming.kind)(0, *kind);
            let time = |(times, rank): (&Times, &u32)| GpuTime {
                rank: *rank,
                last: times.last,
                mean_ns: times.sum / of.n.max(1),
                shortest_ns: times.shortest,
                longest_ns: times.longest,
            };
            let ranks = of.times.iter().zip(naming.ranks).map(time).collect();
            to.collectives.push(GpuCollective {
                communicator: communicator(),
                operation,
                place,
                collectives: of.n,
                ranks,
            });
        }
        for (waited_ns, sequence, durations, kinds) in &self.worst {
            let Some((track, _)) = last_of(durations) else { continue };
            let (operation, place) = (naming.kind)(track, kinds[track]);
            to.waits.push(GpuWait {
                communicator: communicator(),
                sequence: *sequence,
                operation,
                last_rank: naming.ranks[track],
                place,
                waited_ns: *waited_ns,
                durations_ns: naming.ranks.iter().copied().zip(durations.iter().copied()).collect(),
            });
        }
        to.waits.sort_by_key(|wait| std::cmp::Reverse(wait.waited_ns));
        to.waits.truncate(WORST);
        let row = |(track, row): (usize, &Row)| {
            let worst = row.by_kind.iter().max_by_key(|(kind, cost)| (**cost, std::cmp::Reverse(**kind)));
            GpuArrivals {
                communicator: communicator(),
                rank: naming.ranks[track],
                collectives: self.n_columns,
                last: row.last,
                cost_ns: row.cost,
                most_ns: row.most.0,
                most_sequence: row.most.1,
                place: worst.and_then(|(kind, _)| (naming.kind)(track, *kind).1),
                is_straggler: self.is_enough() && self.is_straggler(row),
            }
        };
        let mut rows: Vec<GpuArrivals> = self.rows.iter().enumerate().map(row).collect();
        rows.sort_by_key(|row| (std::cmp::Reverse(row.cost_ns), row.rank));
        if self.n_columns > 0 {
            to.arrivals.extend(rows.iter().cloned());
        }
        rows
    }
}

/// Who came last, and how long all others waited for it alone; `None` where that cannot be known.
fn last_of(durations: &[u64]) -> Option<(usize, u64)> {
    let (track, shortest) = durations.iter().enumerate().min_by_key(|(_, duration)| **duration)?;
    let others = durations.iter().enumerate().filter(|(other, _)| *other != track);
    let cost = others.map(|(_, duration)| duration - shortest).min()?;
    (cost > SKEW).then_some((track, cost))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_that_takes_the_shortest_came_last() {
        let mut tally = Tally::new(3);
        for column in 0..20 {
            let late = if column % 10 == 9 { 20_000_000 } else { 0 };
            tally.add(column, &[late + 50_000, 50_000, late + 52_000], &[0, 0, 0], true);
        }
        // The root of a broadcast is done early, which says nothing.
        tally.add(20, &[1, 90_000, 90_000], &[1, 1, 1], false);
        let mut report = GpuReport::default();
        let kind = |_, kind| (format!("kind {kind}"), None);
        let rows =
            tally.report(&Naming { communicator: "world", ranks: &[4, 5, 6], kind: &kind }, &mut report);
        let shown: Vec<_> =
            rows.iter().map(|row| (row.rank, row.last, row.cost_ns, row.is_straggler)).collect();
        assert_eq!(shown, [(5, 2, 40_000_000, true), (4, 0, 0, false), (6, 0, 0, false)]);
        assert_eq!((rows[0].collectives, rows[0].most_ns, rows[0].most_sequence), (20, 20_000_000, 9));
        let wait = &report.waits[0];
        assert_eq!((wait.last_rank, wait.sequence, wait.durations_ns[&6]), (5, 9, 20_052_000));
        let all: Vec<_> = report.collectives.iter().map(|one| (&*one.operation, one.collectives)).collect();
        assert_eq!(all, [("kind 0", 20), ("kind 1", 1)]);
        assert_eq!(
            (report.collectives[0].ranks[1].mean_ns, report.collectives[0].ranks[1].last),
            (50_000, 2)
        );
    }

    #[test]
    fn one_delay_is_no_straggler() {
        let mut tally = Tally::new(2);
        for column in 0..30 {
            let late = if column == 0 { 3_000_000_000 } else { 0 };
            tally.add(column, &[late + 50_000, 50_000], &[0, 0], true);
        }
        let kind = |_, _| (String::new(), None);
        let rows = tally.report(
            &Naming { communicator: "world", ranks: &[0, 1], kind: &kind },
            &mut GpuReport::default(),
        );
        assert_eq!((rows[0].rank, rows[0].cost_ns, rows[0].is_straggler), (1, 3_000_000_000, false));
    }

    #[test]
    fn ranks_that_leave_together_blame_nobody() {
        assert_eq!(last_of(&[100_000, 104_000]), None);
        assert_eq!(last_of(&[100_000]), None);
        assert_eq!(last_of(&[100_000, 250_000, 230_000]), Some((0, 130_000)));
    }
}
