//! Memory that keeps growing, as opposed to memory that warms up, levels off, or goes up and down.
//!
//! A trace is cut into windows of equally many events. For each call site, the *least* that it held in each window
//! is kept: what a step takes and gives back never shows, what is kept does.
//!
//! ```text
//!   held    /\_  /\_/\_ __/\__    a step goes up and down; something stays each time
//!   least   ▁ ▁ ▂ ▂ ▃ ▃ ▄ ▄      rises
//! ```
//!
//! The first quarter is warm-up and does not count, nor does what follows the last allocation: programs free at their end.
//!
//! # The rule
//! In 32 to 64 windows, the trend is the median of the slopes of all pairs (Theil and Sen), and the confidence is
//! that of the one-sided test of Mann and Kendall, with the correction for ties: the probability that a series without a
//! trend would not rise as steadily. A site *rises* if the test says so at 99 %, it rose by more than twice what goes up and
//! down (four times, if more than one change in ten is a fall), at least four times, and still does in the last third.
//!
//! What rises is called growth only if nothing says that the rise is over, in 512 to 1,024 windows:
//! - It *stopped* if the time since its last rise is longer, by a quarter, than any time between two rises before.
//! - It *slows down* if the last third rose less than half as much as the first, by more than chance explains (Welch's t-test, 99 %).
//! - There are *too few* if fewer than [`MIN_RISES`] stand apart from each other: a program's stages look like that.
//! - The program was *getting ready* if three in four of the allocations beside the rise were made by functions that load, build or warm up:
//!   a server that has only started does nothing but grow, and through a staging buffer it does so as a leak in a loop does.
//!
//! - The program *only takes*, if it gave back less than a quarter as often as it asked: one that loads a model does nothing but grow. Those who
//!   know that it was at work all the same (`answers::leaks`) call it growth.
//!
//! - It was left *once or twice* (`repetition.rs`): the layers of one forward pass, an optimizer's state.
//!
//! What the repetitions of a line show is growth only if what it keeps is not level: the last of them are balanced by what it gives back, as in
//! a queue that is full, or there are none while the program works on.
//!
//! These six are shown as sites that rose, with the remark that it is not known whether they go on.
//!
//! Growth that is spread over many sites, none of which rises often enough, is found in the sum of what they keep, if
//! what the device holds at least grows with it. `make bench-leaks` measures how often the rule is wrong.

use std::cmp::Reverse;

use gputrace_schemas::event::{Bytes, Event, EventKind, Nanos, PjrtAction};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use crate::repetition::Repetition;
use gputrace_trace::ledger::{Account, Ledger, SiteId, Watch};

/// Windows at the end: this many at most, half of it at least.
const MAX_WINDOWS: usize = 1024;
/// The same for the trend: pairs of windows are compared.
const TREND_WINDOWS: usize = 64;
/// A trend in fewer windows than this proves nothing.
const MIN_WINDOWS: usize = 6;
/// Share of the windows that is warm-up.
const WARM_UP: f64 = 0.25;
/// Confidence from which a rise is called growth.
const SURE: f64 = 0.99;
/// The same for what falls often: each of its windows is a trial.
const VERY_SURE: f64 = 0.9999;
/// Share of the changes that may be falls.
const FALLS: f64 = 0.1;
/// Fewer rises are not a trend.
const TREND_RISES: usize = 4;
/// Fewer rises, that do not follow each other at once, are a program's stages: a copy of the weights, a few layers more.
pub const MIN_RISES: usize = 7;
/// Parts of the time that the rises are counted in.
const PARTS: usize = 48;
/// Fewer sites than this are judged one by one.
const MIN_PARTS: usize = 4;
/// A pause at the end may be this many times as long as the longest before. A leak that rose 32 times at random
/// pauses longer at its end in 1.5 % of the cases, one that rose 100 times in 0.4 %.
const LONGER: f64 = 1.25;
/// A series is level after so many of its longest pauses.
const LEVEL_PAUSES: u64 = 2;
/// Rises below this share of the mean one are noise beside the others.
const NOISE: f64 = 0.05;
/// Times what goes up and down that something must rise by.
const CALM: u64 = 2;
/// The same if it falls more often than [`FALLS`] allows.
const NOISY: u64 = 4;
/// What rises where this share of the allocations gets the program ready is no growth.
const READY: f64 = 0.75;
/// A rise of less than this share of the whole does not count.
const LITTLE: f64 = 1.0 / 12.0;

/// A call site in one account of one device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Place {
    /// Ordinal, or `HOST`.
    pub device: i16,
    /// In which books.
    pub account: Account,
    /// Its place.
    pub site: SiteId,
}

/// Watches how much every call site holds at least.
pub struct Growth {
    series: FxHashMap<Place, Vec<u64>>,
    totals: FxHashMap<(i16, Account), Vec<u64>>,
    /// Allocations in each window.
    births: Vec<Births>,
    now: Births,
    /// When each window ended.
    ends: Vec<Nanos>,
    n_windows: usize,
    /// Events in a window.
    length: u64,
    seen: u64,
    /// Whole windows before the one that the last allocation was in.
    n_before_last: usize,
    n_allocs: u64,
    n_frees: u64,
    /// Before the last allocation.
    n_frees_before: u64,
    /// What recurs, and what is left each time.
    repetition: Repetition,
}

/// Allocations, and those among them that get the program ready.
#[derive(Clone, Copy, Default)]
struct Births {
    all: u64,
    preparing: u64,
}

impl Default for Growth {
    fn default() -> Growth {
        Growth {
            series: FxHashMap::default(),
            totals: FxHashMap::default(),
            births: vec![],
            now: Births::default(),
            ends: vec![],
            n_windows: 0,
            length: 1,
            seen: 0,
            n_before_last: 0,
            n_allocs: 0,
            n_frees: 0,
            n_frees_before: 0,
            repetition: Repetition::default(),
        }
    }
}

impl Watch for Growth {
    fn begin(&mut self, ledger: &mut Ledger) {
        *self = Growth::default();
        self.repetition.begin(ledger);
    }

    fn event(&mut self, ledger: &mut Ledger, event: &Event) {
        // What was held when the trace begins was there: nothing rises by it.
        if ledger.run.is_before(event.time) {
            return;
        }
        if self.n_windows == 0 && self.seen == 0 && ledger.run.since.0 > 0 {
            for (_, _, books) in ledger.shelves() {
                books.begin_window();
            }
        }
        self.repetition.event(ledger, event);
        let is_alloc = match &event.kind {
            EventKind::BlockAlloc(_) => true,
            EventKind::Pjrt(pjrt) => pjrt.action == PjrtAction::Made,
            EventKind::Call(call) => call.action.gives() && call.result == Some(0),
            _ => false,
        };
        let is_free = match &event.kind {
            EventKind::BlockFree(_) => true,
            EventKind::Pjrt(pjrt) => pjrt.action == PjrtAction::Destroyed,
            EventKind::Call(call) => call.action.takes() && call.result == Some(0),
            _ => false,
        };
        self.n_frees += u64::from(is_free);
        if is_alloc {
            self.n_allocs += 1;
            self.now.all += 1;
            self.now.preparing += u64::from(ledger.sites.prepares(event.stack));
            self.n_frees_before = self.n_frees;
            self.n_before_last = self.n_windows;
        }
        self.seen += 1;
        if self.seen == self.length {
            self.seen = 0;
            self.close_window(ledger, event.time);
        }
    }
}

impl Growth {
    fn close_window(&mut self, ledger: &mut Ledger, end: Nanos) {
        for (device, account, books) in ledger.shelves() {
            for part in books.sites() {
                let series = self.series.entry(Place { device, account, site: part.id }).or_default();
                series.resize(self.n_windows, 0);
                series.push(part.low.0);
            }
            if books.peak().0 > 0 {
                let series = self.totals.entry((device, account)).or_default();
                series.resize(self.n_windows, 0);
                series.push(books.low().0);
            }
            books.begin_window();
        }
        self.births.push(std::mem::take(&mut self.now));
        self.ends.push(end);
        self.n_windows += 1;
        if self.n_windows == MAX_WINDOWS {
            let both = |pair: &[Births]| pair.iter().copied().reduce(Births::with).unwrap_or_default();
            self.births = self.births.chunks(2).map(both).collect();
            self.ends = self.ends.chunks(2).filter_map(|pair| pair.last().copied()).collect();
            let all = self.series.values_mut().chain(self.totals.values_mut());
            all.for_each(|series| *series = halved(series));
            self.n_windows /= 2;
            self.n_before_last /= 2;
            self.length *= 2;
        }
    }

    /// What recurs, and what is left each time.
    #[must_use]
    pub fn repetition(&self) -> &Repetition {
        &self.repetition
    }

    /// What rises, most first.
    #[must_use]
    pub fn rising(&self) -> Vec<Rising> {
        if !self.is_long_enough() {
            return vec![];
        }
        let judged = self.series.iter().filter_map(|(place, series)| {
            let (trend, course) = self.judge(self.judged(series))?;
            Some(Rising { place: *place, trend, course, n_windows: self.n_before_last })
        });
        let mut rising: Vec<_> = judged.collect();
        rising.sort_by_key(|rising| (Reverse(rising.trend.growth), rising.place));
        rising
    }

    /// Accounts that grow although no call site explains half of it, by [`Growth::rising`].
    #[must_use]
    pub fn spread(&self, rising: &[Rising]) -> Vec<Spread> {
        if !self.can_tell() {
            return vec![];
        }
        let mut accounts: Vec<_> = self.totals.iter().map(|(account, total)| (*account, total)).collect();
        accounts.sort_by_key(|(account, _)| *account);
        accounts
            .into_iter()
            .filter_map(|(account, total)| self.spread_of(account, self.judged(total), rising))
            .collect()
    }

    fn spread_of(
        &self,
        (device, account): (i16, Account),
        total: &[u64],
        rising: &[Rising],
    ) -> Option<Spread> {
        let n = total.len();
        let warm_up = warm_up(n);
        let (mut sum, mut parts) = (vec![0_u64; n], vec![]);
        for (place, series) in &self.series {
            if (place.device, place.account) != (device, account) {
                continue;
            }
            let mut padded = self.judged(series).to_vec();
            padded.resize(n, 0);
            if !is_rising(&padded[warm_up..]) {
                continue;
            }
            let kept = kept_to(&padded, n);
            let growth = kept[n - 1].saturating_sub(kept[warm_up]);
            sum.iter_mut().zip(&kept).for_each(|(sum, kept)| *sum = sum.saturating_add(*kept));
            if growth > 0 {
                parts.push((growth, place.site));
            }
        }
        let (trend, course) = self.judge(&sum)?;
        let explained = rising.iter().filter(|rising| {
            (rising.place.device, rising.place.account) == (device, account) && rising.course.goes_on()
        });
        let explained = explained.fold(0u64, |sum, rising| sum.saturating_add(rising.trend.growth));
        let least = kept_to(total, n);
        let grew = least[n - 1].saturating_sub(least[warm_up]);
        if parts.len() < MIN_PARTS
            || !course.goes_on()
            || explained >= trend.growth.div_ceil(2)
            || grew < trend.growth.div_ceil(2)
        {
            return None;
        }
        parts.sort_by_key(|(growth, site)| (Reverse(*growth), *site));
        Some(Spread { device, account, trend, parts, n_windows: n })
    }

    fn judge(&self, series: &[u64]) -> Option<(Trend, Course)> {
        let (trend, course) = judge(series)?;
        let course = match course {
            Course::GoesOn if self.is_preparing(series) => Course::Preparing,
            Course::GoesOn if !self.gives_back() => Course::OnlyTakes,
            course => course,
        };
        Some((trend, course))
    }

    /// Whether the program got ready while a series rose: each rise counts by how much it is. The least of a window shows what the one before
    /// it took.
    fn is_preparing(&self, series: &[u64]) -> bool {
        let rises = series.windows(2).zip(self.births.windows(2)).skip(warm_up(series.len()));
        let (mut rose, mut ready) = (0.0, 0.0);
        for (pair, births) in rises.filter(|(pair, _)| pair[1] > pair[0]) {
            let (rise, births) = ((pair[1] - pair[0]) as f64, births[0].with(births[1]));
            rose += rise;
            ready += rise * births.preparing as f64 / births.all.max(1) as f64;
        }
        rose > 0.0 && ready >= rose * READY
    }

    /// Whether what a place keeps stopped rising before a moment, though the program works on: what it still takes is balanced by what it gives
    /// back, as in a queue that is full, or it takes no more. Where a repetition leaves `each`.
    #[must_use]
    pub fn is_level(&self, place: Place, until: Nanos, each: Bytes) -> bool {
        let Some(series) = self.series.get(&place) else { return false };
        let series = self.judged(series);
        let n = self.ends.partition_point(|end| *end <= until).min(series.len());
        // The first calls of a program load kernels; what it allocates is a steadier clock.
        let clock = self.births.iter().scan(0, |sum: &mut u64, births| {
            *sum += births.all;
            Some(*sum)
        });
        is_level(&series[..n], &clock.take(n).collect::<Vec<u64>>(), each)
    }

    /// The windows that count: up to the last allocation.
    fn judged<'a>(&self, series: &'a [u64]) -> &'a [u64] {
        &series[..self.n_before_last.min(series.len())]
    }

    /// Whether the trace is long enough for any judgement, and freed enough for there to be steps in it: a program
    /// that loads a model does nothing but grow.
    #[must_use]
    pub fn can_tell(&self) -> bool {
        self.is_long_enough() && self.gives_back()
    }

    fn is_long_enough(&self) -> bool {
        self.n_before_last - warm_up(self.n_before_last) >= MIN_WINDOWS
    }

    fn gives_back(&self) -> bool {
        self.n_frees_before * 4 >= self.n_allocs
    }
}

/// A site that rises.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rising {
    /// Its place.
    pub place: Place,
    /// How.
    pub trend: Trend,
    /// Whether to the end.
    pub course: Course,
    /// Windows of the trace up to its last allocation, warm-up included.
    pub n_windows: usize,
}

/// An account that grows in many places.
#[derive(Clone, PartialEq, Debug)]
pub struct Spread {
    /// Ordinal, or `HOST`.
    pub device: i16,
    /// Which books.
    pub account: Account,
    /// How.
    pub trend: Trend,
    /// By how much each of its sites rose, most first.
    pub parts: Vec<(u64, SiteId)>,
    /// Windows of the trace up to its last allocation, warm-up included.
    pub n_windows: usize,
}

/// The fate of a rise.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize, Serialize)]
pub enum Course {
    /// It goes on to the end.
    GoesOn,
    /// It stopped after this share of the trace, and longer ago than it ever paused.
    Stopped(f64),
    /// It gets slower.
    Slows,
    /// It rose this often: too rarely to be told from stages of the program.
    TooFew(usize),
    /// The program was getting ready, and no work was seen after it.
    Preparing,
    /// It goes on to the end, in a program that gives next to nothing back.
    OnlyTakes,
    /// All of it was left in so many repetitions (1 or 2): the layers of one forward pass, the state of one optimizer.
    Once(u64),
}

impl Births {
    fn with(self, other: Births) -> Births {
        Births { all: self.all + other.all, preparing: self.preparing + other.preparing }
    }
}

impl Course {
    /// Whether it is growth.
    #[must_use]
    pub fn goes_on(self) -> bool {
        self == Course::GoesOn
    }
}

/// How a series rises.
#[derive(Clone, Copy, PartialEq, Debug, Deserialize, Serialize)]
pub struct Trend {
    /// Bytes by which it rose after the warm-up.
    pub growth: u64,
    /// Bytes for each window of the whole trace.
    pub per_window: f64,
    /// Probability that a series without a trend would not rise as steadily, 0 to 1.
    pub confidence: f64,
}

fn warm_up(n_windows: usize) -> usize {
    (n_windows as f64 * WARM_UP).ceil() as usize
}

/// How a series of least amounts rises, and whether to the end; `None` if it does not.
fn judge(series: &[u64]) -> Option<(Trend, Course)> {
    let (mut coarse, mut scale) = (series.to_vec(), 1.0);
    while coarse.len() > TREND_WINDOWS {
        coarse = halved(&coarse);
        scale *= 2.0;
    }
    let trend = trend(&coarse)?;
    if !outgrows(&series[warm_up(series.len())..], CALM) {
        return None;
    }
    Some((Trend { per_window: trend.per_window / scale, ..trend }, course(series)))
}

/// Whether a series that rises does so to the end.
fn course(series: &[u64]) -> Course {
    let warm_up = warm_up(series.len());
    let after = &series[warm_up..];
    let kept = kept(after);
    // What fell so early that less than two thirds of the time prove anything rose once.
    if kept.len() * 3 < after.len() * 2 {
        return Course::TooFew(1);
    }
    let rise = |idx: usize| kept[idx] - kept[idx - 1];
    let all: Vec<usize> = (1..kept.len()).filter(|idx| rise(*idx) > 0).collect();
    let growth = kept.last().map_or(0, |last| last - kept[0]);
    let noise = growth as f64 / all.len().max(1) as f64 * NOISE;
    let rises: Vec<usize> = all.into_iter().filter(|idx| rise(*idx) as f64 >= noise).collect();
    let Some(last) = rises.last() else { return Course::TooFew(0) };

    let pauses = std::iter::once(0).chain(rises.iter().copied());
    let longest = pauses.zip(&rises).map(|(before, after)| after - before).max().unwrap_or(0);
    // What is added at once can show in two neighbouring windows.
    if (kept.len() - 1 - last) as f64 > longest as f64 * LONGER + 1.0 {
        return Course::Stopped((warm_up + last) as f64 / series.len() as f64);
    }
    let part = |idx: usize| idx * PARTS / after.len();
    let mut parts: Vec<usize> = rises.iter().map(|idx| part(*idx)).collect();
    parts.dedup();
    if parts.len() < MIN_RISES {
        return Course::TooFew(parts.len());
    }
    let third = kept.len() / 3;
    // What goes up and down a lot has no steps to compare, and what held most before is full before long: there the means
    // decide.
    let is_sure = is_rising(after) && growth >= kept[0];
    match is_less(&kept[..=third], &kept[kept.len() - 1 - third..], is_sure) {
        true => Course::Slows,
        false => Course::GoesOn,
    }
}

/// Whether a series rose by no more than `each` for longer than two of its pauses: a repetition later, it would have risen twice. `clock` has the time
/// of each value. Where few rises show how long its pauses are, it takes one more.
fn is_level(series: &[u64], clock: &[u64], each: Bytes) -> bool {
    let mut kept = series.to_vec();
    for idx in (1..kept.len()).rev() {
        kept[idx - 1] = kept[idx - 1].min(kept[idx]);
    }
    let Some(end) = kept.last().copied() else { return false };
    // What is being replaced is there twice for a moment.
    let Some(before) = kept.iter().rposition(|held| end - held > each.0) else { return false };
    let all: Vec<usize> = (1..=before).filter(|idx| kept[*idx] > kept[*idx - 1]).collect();
    let noise = (kept[before] - kept[0]) as f64 / all.len().max(1) as f64 * NOISE;
    let rises = all.into_iter().filter(|idx| (kept[*idx] - kept[*idx - 1]) as f64 >= noise);
    let rises: Vec<u64> = rises.map(|idx| clock[idx]).collect();
    let Some(longest) = rises.windows(2).map(|pair| pair[1] - pair[0]).max() else { return false };
    let pauses = if rises.len() < MIN_RISES { LEVEL_PAUSES + 1 } else { LEVEL_PAUSES };
    // What is added at once can show in two neighbouring windows, at both ends.
    let window = clock[clock.len() - 1].div_ceil(clock.len() as u64);
    clock[clock.len() - 1] - clock[before] > longest.max(window) * pauses + 2 * window
}

/// Whether the second series rises less than half as fast as the first; if that is to be sure, by more than chance explains.
fn is_less(first: &[u64], second: &[u64], is_sure: bool) -> bool {
    const SAMPLES: usize = 12;
    let steps = |series: &[u64]| -> Vec<f64> {
        let at = |sample: usize| series[sample * (series.len() - 1) / SAMPLES] as f64;
        (0..SAMPLES).map(|sample| at(sample + 1) - at(sample)).collect()
    };
    let moments = |steps: &[f64]| {
        let mean = steps.iter().sum::<f64>() / SAMPLES as f64;
        let variance = steps.iter().map(|step| (step - mean).powi(2)).sum::<f64>() / (SAMPLES - 1) as f64;
        (mean, variance)
    };
    let ((before, spread_before), (after, spread_after)) = (moments(&steps(first)), moments(&steps(second)));
    let error = ((spread_before + spread_after) / SAMPLES as f64).sqrt();
    // 2.5 standard errors: 99 % of Student's distribution for 22 degrees of freedom.
    after * 2.0 < before && (!is_sure || before - after > 2.5 * error)
}

/// The trend of a series of least amounts; `None` if it does not grow. Windows may be shorter than a step, so the series is
/// judged as it is, and in windows two and four times as long.
fn trend(series: &[u64]) -> Option<Trend> {
    let mut series = series.to_vec();
    let mut scale = 1.0;
    for _ in 0..3 {
        let after = &series[warm_up(series.len())..];
        if after.len() < MIN_WINDOWS {
            return None;
        }
        if let Some(trend) = steady(after) {
            return Some(Trend { per_window: trend.per_window / scale, ..trend });
        }
        series = halved(&series);
        scale *= 2.0;
    }
    None
}

/// Whether a series rises steadily, as a growing call site does: its least values in windows are judged.
#[must_use]
pub fn steadily(series: &[u64]) -> bool {
    let window = series.len().div_ceil(TREND_WINDOWS).max(1);
    let least: Vec<u64> = series.chunks(window).filter_map(|chunk| chunk.iter().copied().min()).collect();
    least.len() >= MIN_WINDOWS && steady(&least).is_some()
}

/// Whether it rose by more than so many times what it ever held beyond what it kept: what goes up and down by chance keeps less.
fn outgrows(series: &[u64], times: u64) -> bool {
    let kept = kept(series);
    let noise = series.iter().zip(&kept).map(|(held, kept)| held - kept).max().unwrap_or(0);
    kept.last().is_some_and(|last| last - kept[0] > noise.saturating_mul(times))
}

/// Whether it hardly ever falls.
fn is_rising(series: &[u64]) -> bool {
    let changes = series.windows(2).filter(|pair| pair[0] != pair[1]).count();
    let falls = series.windows(2).filter(|pair| pair[1] < pair[0]).count();
    falls as f64 <= changes as f64 * FALLS
}

fn steady(series: &[u64]) -> Option<Trend> {
    let is_calm = is_rising(series);
    if !is_calm && !outgrows(series, NOISY) {
        return None;
    }
    let series = &kept(series);
    let (first, last) = (*series.first()?, *series.last()?);
    let growth = last.checked_sub(first).filter(|growth| *growth > 0)?;
    let rise_until = |idx: usize| (series[idx] - first) as f64;
    // A rise that ended is warm-up that took its time.
    let third = series.len() - series.len() / 3 - 1;
    if growth as f64 - rise_until(third) < growth as f64 * LITTLE {
        return None;
    }
    let confidence = mann_kendall(series);
    if confidence < if is_calm { SURE } else { VERY_SURE } || n_rises(series) < TREND_RISES {
        return None;
    }
    let per_window = theil_sen(series);
    // Where it rises rarely, most pairs are equal, and the median says nothing.
    let mean = growth as f64 / (series.len() - 1) as f64;
    Some(Trend { growth, per_window: if per_window > 0.0 { per_window } else { mean }, confidence })
}

/// What is never given back later, as far as the series proves it: after its last large fall (half of what it rose, or
/// more), it may be about to fall again.
///
/// ```text
///   held   ╱╱╱╱│╱╱╱╱│╱╱╱╱     garbage that is collected at times, and a leak
///   kept   ▁▁▁▁▂▂▂▂▃          the last tooth proves nothing
/// ```
fn kept(series: &[u64]) -> Vec<u64> {
    let (least, most) =
        (series.iter().min().copied().unwrap_or(0), series.iter().max().copied().unwrap_or(0));
    let large = (most - least).div_ceil(2).max(1);
    let fall = |pair: &[u64]| pair[0].saturating_sub(pair[1]);
    let last_fall = series.windows(2).rposition(|pair| fall(pair) >= large);
    let end = last_fall.or_else(|| last_turn(series)).map_or(series.len(), |idx| idx + 2);
    let mut kept = series[..end].to_vec();
    for idx in (1..kept.len()).rev() {
        kept[idx - 1] = kept[idx - 1].min(kept[idx]);
    }
    kept
}

/// The last fall of a series that falls again and again by about as much, if it is about to do so once more.
fn last_turn(series: &[u64]) -> Option<usize> {
    let fall = |pair: &[u64]| pair[0].saturating_sub(pair[1]);
    let largest = series.windows(2).map(fall).max().filter(|largest| *largest > 0)?;
    let falls = series.windows(2).enumerate().filter(|(_, pair)| fall(pair) >= largest.div_ceil(2));
    let falls: Vec<usize> = falls.map(|(idx, _)| idx).collect();
    let mut between: Vec<usize> = falls.windows(2).map(|pair| pair[1] - pair[0]).collect();
    between.sort_unstable();
    let usual = *between.get(between.len() / 2).filter(|_| between.len() >= 2)?;
    falls.last().copied().filter(|last| series.len() - last <= usual * 2 + 1)
}

/// As [`kept`], as long as the series: after the last that is proved, it holds what it held then.
fn kept_to(series: &[u64], n: usize) -> Vec<u64> {
    let mut kept = kept(series);
    kept.resize(n, kept.last().copied().unwrap_or(0));
    kept
}

/// How often it rises. Something added at once can show in two or three neighbouring windows, so few neighbouring rises count
/// as one; four do not happen at once.
fn n_rises(series: &[u64]) -> usize {
    let rises: Vec<bool> = series.windows(2).map(|pair| pair[1] > pair[0]).collect();
    let runs = rises.split(|rises| !rises).map(<[bool]>::len);
    runs.map(|run| if run >= TREND_RISES { run } else { run.min(1) }).sum()
}

/// Least of each two neighbours; an odd one at the end stays.
fn halved(series: &[u64]) -> Vec<u64> {
    series.chunks(2).map(|pair| pair.iter().copied().min().unwrap_or(0)).collect()
}

/// One-sided confidence that the series rises: Φ((S - 1) / σ), S = Σ sign(xj - xi), σ² = (n(n-1)(2n+5) - Σ t(t-1)(2t+5)) / 18
/// over groups of t equal values.
fn mann_kendall(series: &[u64]) -> f64 {
    let n = series.len() as f64;
    let mut sum = 0i64;
    for (idx, early) in series.iter().enumerate() {
        sum +=
            series[idx + 1..].iter().map(|late| (late > early) as i64 - (late < early) as i64).sum::<i64>();
    }
    let mut sorted = series.to_vec();
    sorted.sort_unstable();
    let ties: f64 = sorted.chunk_by(|a, b| a == b).map(|group| weight(group.len() as f64)).sum();
    let variance = (weight(n) - ties) / 18.0;
    if sum <= 0 || variance <= 0.0 {
        return 0.0;
    }
    normal((sum - 1) as f64 / variance.sqrt())
}

fn weight(n: f64) -> f64 {
    n * (n - 1.0) * (2.0 * n + 5.0)
}

/// The standard normal distribution function, to 1e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.17).
fn normal(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z.abs());
    let series = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let tail = series.iter().rev().fold(0.0, |sum, factor| (sum + factor) * t);
    let tail = tail * (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    if z < 0.0 { tail } else { 1.0 - tail }
}

/// Median of the slopes of all pairs.
fn theil_sen(series: &[u64]) -> f64 {
    let mut slopes = Vec::with_capacity(series.len() * series.len() / 2);
    for (idx, early) in series.iter().enumerate() {
        let later = series[idx + 1..].iter().zip(1..);
        slopes.extend(later.map(|(late, distance)| (*late as f64 - *early as f64) / f64::from(distance)));
    }
    slopes.sort_by(f64::total_cmp);
    slopes.get(slopes.len() / 2).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(value: impl Fn(u64) -> u64) -> Vec<u64> {
        (0..48).map(value).collect()
    }

    #[test]
    fn only_what_keeps_rising_grows() {
        let grows = |value: fn(u64) -> u64| trend(&series(value)).is_some();
        assert!(grows(|t| t * 100), "a leak");
        assert!(grows(|t| 1_000_000 + t / 4 * 512), "a leak in some windows only");
        assert!(grows(|t| t * 100 + t % 4 * 1000), "a leak under a step of four windows");
        assert!(!grows(|_| 4096), "nothing happens");
        assert!(!grows(|t| t.min(12) * 100), "a warm-up");
        assert!(!grows(|t| t.min(30) * 100), "a long warm-up");
        assert!(!grows(|t| 5000 + t % 7 * 100), "a step of seven windows");
        assert!(!grows(|t| if t > 30 { 9000 } else { 10 }), "one more object");
        assert!(!grows(|t| 9000 - t * 100), "it shrinks");
        assert!(!grows(|t| (t * 2_654_435_761) % 4096), "noise");
    }

    #[test]
    fn what_stopped_longer_ago_than_it_ever_paused_is_level() {
        let clock: Vec<u64> = (1..=48).collect();
        let is_level = |value: fn(u64) -> u64| super::is_level(&series(value), &clock, Bytes(100));
        assert!(is_level(|t| t.min(30) * 100), "a queue that is full");
        assert!(is_level(|t| t.min(30) * 100 + if t > 35 { t % 2 * 100 } else { 0 }), "new before old");
        assert!(is_level(|t| (t / 4).min(4) * 100), "four captures, then work");
        assert!(!is_level(|t| t * 100), "a leak");
        assert!(!is_level(|t| t / 6 * 100), "a leak in each epoch");
        assert!(!is_level(|t| (t / 10).min(3) * 100), "a leak of three epochs, and a longer end");
        assert!(!is_level(|t| t.min(30) * 100 + t.saturating_sub(44) * 100), "a leak after a pause");
        assert!(!is_level(|t| if t < 40 { t.min(20) * 100 } else { 0 }), "all was given back");
        assert!(!is_level(|_| 100) && !super::is_level(&[], &[], Bytes(1)));
    }

    #[test]
    fn the_slope_is_that_of_the_leak() {
        let trend = trend(&series(|t| 7 + t * 100)).unwrap();
        assert_eq!((trend.growth, trend.per_window), (3500, 100.0));
        assert!(trend.confidence > 0.9999, "{trend:?}");
        let under_steps = super::trend(&series(|t| t * 100 + t % 2 * 1000)).unwrap();
        assert!((under_steps.per_window - 100.0).abs() < 5.0, "{under_steps:?}");
    }

    #[test]
    fn the_test_agrees_with_the_books() {
        // S = 15 and σ² = 28.33 for six rising values: z = 2.63, one-sided p = 0.0043 (Kendall's table).
        assert!((mann_kendall(&[1, 2, 3, 4, 5, 6]) - 0.9957).abs() < 1e-4);
        assert_eq!(mann_kendall(&[3, 3, 3]), 0.0);
        assert!((normal(1.96) - 0.975).abs() < 1e-4 && (normal(-1.96) - 0.025).abs() < 1e-4);
    }

    #[test]
    fn sizes_that_no_device_has_are_judged_too() {
        let hostile = |t: u64| if t.is_multiple_of(3) { u64::MAX - t } else { u64::MAX / 48 * t };
        assert!(judge(&series(hostile)).is_none());
        assert!(!outgrows(&series(hostile), NOISY) && course(&series(hostile)) != Course::GoesOn);
        assert!(judge(&series(|t| u64::MAX / 48 * t)).is_some());
    }
}
