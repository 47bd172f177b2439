//! Which rank is late again and again by its own doing, as far as the times show at which hosts called.
//!
//! A rank that is late to a call is often late to the next one only because it was late to this one: hosts run ahead of their
//! GPUs, and one delay at the start stays. So what counts is what a rank takes from one call to the next:
//!
//! ```text
//!  hosts run ahead                        hosts wait for the GPU in between
//!  rank 0  A   B   C                      rank 0  A......B......C
//!  rank 1       A   B   C                 rank 1      A......B......C
//!          late once, and carried on              late each time: all go on from where the last came
//! ```
//! Both look alike where nothing varies. They differ in what the others' times follow, their own last call or that of the rank that
//! came last ([`Gaps::do_meet`]). Where that is not clear, no rank is blamed, and a note says what cannot be known.
//!
//! What stays is weak evidence: a host that calls last need not have the GPU that starts last, and a rank that shares its
//! processor with something else is late and not at fault. So a rank is named only above a floor, of which each part has a reason:
//!
//! - [`LEAST_OCCURRENCES`] of the same two calls in a row: fewer say nothing of "again and again".
//! - Typically later than every other rank, and by more than that varies (one standard deviation, from the median
//!   deviation, which single spikes do not move). This is the job's own noise: on a loaded machine it is large.
//! - [`LEAST_WAIT`] where hosts wait for each other: a process that is woken up may first wait while another has its time slice (2.8 ms
//!   with Linux' defaults, 4 ms where a tick is that long). [`LEAST_WORK`] where they do not.
//! - [`LEAST_SHARE`] of the time that these calls typically take.
//!
//! `tests/stragglers.rs` measures how often that is wrong, over generated jobs of 18 shapes: of 2160 healthy ones none has a
//! straggler, and of 960 with one above the floor each has exactly that one. It demands less than 0.5 % and 2 %. With
//! other seeds it was none of 9000, and one of 3200 was missed.

use std::collections::BTreeMap;

/// Times that one call must follow another for anything to be said of the two.
const LEAST_OCCURRENCES: usize = 20;
/// Least typical lateness where hosts wait for each other between the calls, nanoseconds.
const LEAST_WAIT: i64 = 5_000_000;
/// Least typical lateness where they do not: what a rank takes longer from one call to the next.
const LEAST_WORK: i64 = 1_000_000;
/// Least part of that time that the others lose: one in so many.
const LEAST_SHARE: i64 = 20;
/// So much more do times vary after the rank that came last than after a rank's own call before, as a mean square, where hosts do
/// not wait for each other: what two ranks vary adds up.
const CLEARLY_MORE: f64 = 2.0;
/// Times that are kept, of all ranks together: those of the newest calls.
const MAX_TIMES: usize = 1 << 20;
/// But of so many calls at least.
const MIN_COLUMNS: usize = 256;
/// A normal distribution's standard deviation, of its median deviation.
const DEVIATION: f64 = 1.4826;

/// Times of the newest calls that all ranks made, and what kinds of calls they were.
pub(super) struct Times {
    n_tracks: usize,
    base: i128,
    times: Vec<i64>,
    kinds: Vec<u32>,
}

/// A rank that is late again and again.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Habit {
    /// Which.
    pub(super) track: usize,
    /// Its kind of call that it comes late to at the highest cost.
    pub(super) kind: u32,
    /// How often all came to that call, after the same other call.
    pub(super) occurrences: u64,
    /// How often it came later than every other rank, by its own doing.
    pub(super) late: u64,
    /// By how much, typically, in nanoseconds.
    pub(super) typical: i64,
    /// What all others lose by its habits, as a part of the time of these calls.
    pub(super) share: f64,
    /// That the others wait for it each time; else it may be late by what it was late by at the start.
    pub(super) is_clear: bool,
}

impl Times {
    pub(super) fn new(n_tracks: usize) -> Times {
        Times { n_tracks, base: 0, times: vec![], kinds: vec![] }
    }

    /// All came to another call.
    pub(super) fn add(&mut self, times: &[i128], kinds: &[u32]) {
        if self.times.is_empty() {
            self.base = times.first().copied().unwrap_or(0);
        }
        let most = MAX_TIMES.max(MIN_COLUMNS * self.n_tracks);
        if self.times.len() >= 2 * most {
            let n = (most / self.n_tracks) * self.n_tracks;
            self.times.drain(..n);
            self.kinds.drain(..n);
        }
        let since = |time: &i128| i64::try_from(time - self.base).unwrap_or(i64::MAX);
        self.times.extend(times.iter().map(since));
        self.kinds.extend_from_slice(kinds);
    }

    fn row(&self, column: usize) -> &[i64] {
        &self.times[column * self.n_tracks..][..self.n_tracks]
    }

    fn n_columns(&self) -> usize {
        self.times.len() / self.n_tracks.max(1)
    }

    /// Ranks that are late again and again. Clocks differ by no more than `uncertainty`; `None` is not known.
    pub(super) fn habits(&self, uncertainty: Option<u64>) -> Vec<Habit> {
        let n_columns = self.n_columns();
        if self.n_tracks < 2 || n_columns <= LEAST_OCCURRENCES {
            return vec![];
        }
        let mut pairs: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
        let kind = |column: usize| self.kinds[column * self.n_tracks];
        for column in 1..n_columns {
            pairs.entry((kind(column - 1), kind(column))).or_default().push(column);
        }
        // Without what happened once: a job that took long to start is not to hide who is late ever after.
        let mut duration = 1;
        let mut lost = vec![0_i64; self.n_tracks];
        let mut worst: Vec<Option<(i64, Habit)>> = vec![None; self.n_tracks];
        for columns in pairs.values().filter(|columns| columns.len() >= LEAST_OCCURRENCES) {
            let gaps = Gaps { times: self, columns };
            duration += gaps.typical() * columns.len() as i64;
            for (track, lateness) in gaps.lateness(uncertainty) {
                let cost = lateness.typical * columns.len() as i64;
                lost[track] += cost;
                let habit = Habit {
                    track,
                    kind: self.kinds[columns[0] * self.n_tracks + track],
                    occurrences: columns.len() as u64,
                    late: lateness.late,
                    typical: lateness.typical,
                    share: 0.0,
                    is_clear: lateness.is_clear,
                };
                if worst[track].is_none_or(|(most, _)| cost > most) {
                    worst[track] = Some((cost, habit));
                }
            }
        }
        let is_worth_it = |habit: &Habit| lost[habit.track] >= duration / LEAST_SHARE;
        let share = |habit: Habit| Habit { share: lost[habit.track] as f64 / duration as f64, ..habit };
        worst.into_iter().flatten().map(|(_, habit)| habit).filter(is_worth_it).map(share).collect()
    }
}

/// One kind of call that follows another: from the column before to each of these.
struct Gaps<'a> {
    times: &'a Times,
    columns: &'a [usize],
}

/// How late a rank is.
struct Lateness {
    typical: i64,
    late: u64,
    is_clear: bool,
}

/// Whether the hosts wait for each other between two calls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Meeting {
    Yes,
    No,
    /// The times would be the same either way.
    Unclear,
}

impl Gaps<'_> {
    /// How long it typically is from one call to the other, on the rank where it is longest.
    fn typical(&self) -> i64 {
        let gap =
            |track: usize, column: usize| self.times.row(column)[track] - self.times.row(column - 1)[track];
        let gaps = |track: usize| self.columns.iter().map(|column| gap(track, *column)).collect::<Vec<_>>();
        (0..self.times.n_tracks).map(|track| median(&mut gaps(track))).max().unwrap_or(0)
    }

    /// Ranks that are typically later than every other, above the floor.
    fn lateness(&self, uncertainty: Option<u64>) -> Vec<(usize, Lateness)> {
        match self.do_meet(uncertainty.unwrap_or(0)) {
            Meeting::Yes => self.late_where_hosts_wait(uncertainty, true),
            // Times of one rank need no other's clock.
            Meeting::No => self.late(false, LEAST_WORK, true),
            Meeting::Unclear => {
                let late = self.late(false, LEAST_WORK, true);
                if late.is_empty() { self.late_where_hosts_wait(uncertainty, false) } else { late }
            }
        }
    }

    fn late_where_hosts_wait(&self, uncertainty: Option<u64>, is_clear: bool) -> Vec<(usize, Lateness)> {
        let Some(uncertainty) = uncertainty else { return vec![] };
        let least = LEAST_WAIT.max(2 * i64::try_from(uncertainty).unwrap_or(i64::MAX / 2));
        self.late(true, least, is_clear)
    }

    /// Ranks that are typically later than every other by so much: by the clock where hosts wait for each other, else by how
    /// long they take from one call to the next.
    fn late(&self, meets: bool, least: i64, is_clear: bool) -> Vec<(usize, Lateness)> {
        let n_tracks = self.times.n_tracks;
        let mut ahead: Vec<Vec<i64>> = vec![Vec::with_capacity(self.columns.len()); n_tracks];
        let mut own = vec![0; n_tracks];
        for column in self.columns {
            let (before, now) = (self.times.row(column - 1), self.times.row(*column));
            for (track, own) in own.iter_mut().enumerate() {
                *own = if meets { now[track] } else { now[track] - before[track] };
            }
            let (last, most, second) = two_largest(&own);
            for (track, ahead) in ahead.iter_mut().enumerate() {
                ahead.push(own[track] - if track == last { second } else { most });
            }
        }
        let judge = |(track, ahead): (usize, Vec<i64>)| {
            let late = ahead.iter().filter(|ahead| **ahead > 0).count() as u64;
            let typical = median(&mut ahead.clone());
            let mut deviations: Vec<i64> = ahead.iter().map(|ahead| (ahead - typical).abs()).collect();
            let noise = DEVIATION * median(&mut deviations) as f64;
            (typical >= least && typical as f64 >= noise)
                .then_some((track, Lateness { typical, late, is_clear }))
        };
        ahead.into_iter().enumerate().filter_map(judge).collect()
    }

    /// Whether the hosts wait for each other between the two calls: what follows more closely, a rank's call its own last one, or
    /// that of the rank that came last.
    fn do_meet(&self, uncertainty: u64) -> Meeting {
        let n_tracks = self.times.n_tracks;
        let mut after_own: Vec<Vec<i64>> = vec![vec![]; n_tracks];
        let mut after_last: Vec<Vec<i64>> = vec![vec![]; n_tracks];
        let (mut n, mut n_earlier) = (0_usize, 0_usize);
        for column in self.columns {
            let (before, now) = (self.times.row(column - 1), self.times.row(*column));
            let (last, most, _) = two_largest(before);
            for track in (0..n_tracks).filter(|track| *track != last) {
                after_own[track].push(now[track] - before[track]);
                after_last[track].push(now[track] - most);
                n += 1;
                // No rank calls before all have met.
                n_earlier += usize::from(now[track].saturating_add_unsigned(uncertainty) < most);
            }
        }
        let (after_last, after_own) = (spread(&mut after_last), spread(&mut after_own));
        match n_earlier * 10 <= n {
            true if after_last < after_own => Meeting::Yes,
            true if after_last <= CLEARLY_MORE * after_own => Meeting::Unclear,
            _ => Meeting::No,
        }
    }
}

/// How much values vary around the median of their rank: the mean square, without what single spikes add.
fn spread(of_tracks: &mut [Vec<i64>]) -> f64 {
    let mut deviations: Vec<i64> = vec![];
    for values in of_tracks.iter_mut().filter(|values| !values.is_empty()) {
        let middle = median(values);
        deviations.extend(values.iter().map(|value| (value - middle).abs()));
    }
    let most = 3.0 * DEVIATION * median(&mut deviations) as f64;
    let squares = deviations.iter().map(|deviation| (*deviation as f64).min(most).powi(2));
    squares.sum::<f64>() / deviations.len().max(1) as f64
}

/// Which is the largest, how large it is, and how large the next.
fn two_largest(values: &[i64]) -> (usize, i64, i64) {
    let (mut which, mut most, mut second) = (0, i64::MIN, i64::MIN);
    for (idx, value) in values.iter().copied().enumerate() {
        if value > most {
            (which, most, second) = (idx, value, most);
        } else {
            second = second.max(value);
        }
    }
    (which, most, second)
}

/// Of an even number the lower one; 0 of none.
fn median(values: &mut [i64]) -> i64 {
    if values.is_empty() {
        return 0;
    }
    let middle = (values.len() - 1) / 2;
    *values.select_nth_unstable(middle).1
}
