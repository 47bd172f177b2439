//! Ticks of the ring's clock to nanoseconds of `CLOCK_MONOTONIC`.
//!
//! Pairs of both clocks are taken while the process runs; a time between two pairs is interpolated. Nothing is ever
//! extrapolated beyond the newest pair while more are to come, so a later tick never gets an earlier time: the order
//! of a free and of the next allocation of the same address survives the translation.

use gputrace_ring::clock::{Calibration, Clock, Ticks, nanos};
use std::time::{Duration, SystemTime};

/// `CLOCK_MONOTONIC` (linux/time.h).
const CLOCK_MONOTONIC: i32 = 1;
/// Least distance of two pairs: the reading error of a pair, under 1 µs, is then less than 50 ppm of the slope.
const LEAST_DISTANCE: u64 = 20_000_000;
/// How far the slope since the ring was made may be from the slope measured now, before the ring's pair is taken for
/// one of another boot.
const TOLERANCE: f64 = 0.01;

/// Now, in nanoseconds of `CLOCK_MONOTONIC`.
pub(crate) fn monotonic() -> u64 {
    nanos(CLOCK_MONOTONIC)
}

/// A moment on both clocks: one of them names times on disk, the other is never set.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// `CLOCK_REALTIME`.
    pub realtime: SystemTime,
    /// Nanoseconds of `CLOCK_MONOTONIC`.
    pub monotonic: u64,
}

impl Moment {
    /// Now.
    #[must_use]
    pub fn now() -> Moment {
        Moment { realtime: SystemTime::now(), monotonic: monotonic() }
    }

    /// So much earlier.
    pub(crate) fn before(self, age: Duration) -> Option<Moment> {
        let monotonic = self.monotonic.saturating_sub(u64::try_from(age.as_nanos()).ok()?);
        Some(Moment { realtime: self.realtime.checked_sub(age)?, monotonic })
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Pair {
    ticks: u64,
    nanos: u64,
}

/// The translation.
pub(crate) struct Timeline {
    clock: Clock,
    /// Ascending in both, at least two unless the clock is the monotonic one.
    pairs: Vec<Pair>,
}

impl Timeline {
    /// Takes the first pairs. A ring that was not made just now (`is_new`) may be of another boot: to find out takes 20 ms.
    pub(crate) fn new(clock: Clock, ring: Calibration, is_new: bool) -> Timeline {
        if clock == Clock::Monotonic {
            return Timeline { clock, pairs: Vec::new() };
        }
        let begin = Pair { ticks: ring.ticks.0, nanos: ring.monotonic };
        let first = Pair::take(clock);
        if is_new && begin.ticks < first.ticks && begin.nanos < first.nanos {
            return Timeline { clock, pairs: vec![begin, first] };
        }
        std::thread::sleep(Duration::from_nanos(LEAST_DISTANCE));
        Timeline { clock, pairs: Timeline::begin(begin, first, Pair::take(clock)) }
    }

    /// The ring's own pair, unless it is not of this boot: then times count from it at today's speed.
    fn begin(ring: Pair, first: Pair, second: Pair) -> Vec<Pair> {
        let slope = slope(first, second);
        if ring.ticks < first.ticks && ring.nanos < first.nanos {
            let distance = first.nanos - ring.nanos;
            let same = ((self::slope(ring, first) - slope) / slope).abs() < TOLERANCE;
            if same {
                return vec![ring, second];
            }
            // Too close for a slope of its own.
            if distance < LEAST_DISTANCE
                && ((self::slope(ring, second) - slope) / slope).abs() < 2.0 * TOLERANCE
            {
                return vec![ring, second];
            }
        }
        let end = Pair { ticks: ring.ticks.saturating_add(1 << 32), nanos: 0 };
        let nanos = ring.nanos.saturating_add((slope * (1_u64 << 32) as f64) as u64);
        vec![ring, Pair { nanos, ..end }]
    }

    /// Takes another pair, if the last one is long enough ago.
    pub(crate) fn update(&mut self) {
        self.take_after(LEAST_DISTANCE);
    }

    /// Takes another pair now, so that everything up to now is settled. The slope of a short last piece is less exact,
    /// but so are its times only by what the clocks were read apart.
    pub(crate) fn close(&mut self) {
        self.take_after(0);
    }

    fn take_after(&mut self, distance: u64) {
        if self.clock == Clock::Monotonic {
            return;
        }
        let pair = Pair::take(self.clock);
        if let Some(last) = self.pairs.last()
            && pair.nanos > last.nanos.saturating_add(distance)
            && pair.ticks > last.ticks
        {
            self.pairs.push(pair);
            self.thin();
        }
    }

    /// A trace of days must not keep every pair: the older half keeps every second one. Events that old have all been
    /// translated, but for those that are late by minutes.
    fn thin(&mut self) {
        const MOST: usize = 1 << 14;
        if self.pairs.len() > MOST {
            let half = self.pairs.len() / 2;
            let mut at = 0;
            self.pairs.retain(|_| {
                at += 1;
                at > half || at % 2 == 1
            });
        }
    }

    /// Ticks up to which times are final.
    pub(crate) fn settled(&self) -> u64 {
        match self.clock {
            Clock::Monotonic => u64::MAX,
            Clock::Tsc => self.pairs.last().map_or(0, |pair| pair.ticks),
        }
    }

    /// Now, in ticks.
    pub(crate) fn now(&self) -> u64 {
        self.clock.now().0
    }

    /// As many ticks as the nanoseconds.
    pub(crate) fn ticks_in(&self, nanos: u64) -> u64 {
        match self.pairs.as_slice() {
            [.., before, last] => (nanos as f64 / slope(*before, *last)) as u64,
            _ => nanos,
        }
    }

    /// As many nanoseconds as the ticks.
    pub(crate) fn nanos_in(&self, ticks: u64) -> u64 {
        match self.pairs.as_slice() {
            [.., before, last] => (ticks as f64 * slope(*before, *last)) as u64,
            _ => ticks,
        }
    }

    /// Nanoseconds of `CLOCK_MONOTONIC` at this tick.
    pub(crate) fn nanos(&self, ticks: u64) -> u64 {
        let at = self.pairs.partition_point(|pair| pair.ticks <= ticks);
        let at = at.clamp(1, self.pairs.len().max(2) - 1);
        let (Some(before), Some(after)) = (self.pairs.get(at - 1), self.pairs.get(at)) else { return ticks };
        // 128 bits: exact, and no overflow for ticks that a damaged ring made up.
        let span = i128::from(after.nanos) - i128::from(before.nanos);
        let width = i128::from(after.ticks) - i128::from(before.ticks);
        let nanos =
            i128::from(before.nanos) + (i128::from(ticks) - i128::from(before.ticks)) * span / width.max(1);
        nanos.clamp(0, i128::from(u64::MAX)) as u64
    }
}

impl Pair {
    /// Both clocks, read as closely together as five tries allow.
    fn take(clock: Clock) -> Pair {
        let mut best = (u64::MAX, Pair { ticks: 0, nanos: 0 });
        for _ in 0..5 {
            let before = monotonic();
            let Ticks(ticks) = clock.now();
            let after = monotonic();
            let width = after.saturating_sub(before);
            if width < best.0 {
                best = (width, Pair { ticks, nanos: before + width / 2 });
            }
        }
        best.1
    }
}

/// Nanoseconds a tick.
fn slope(from: Pair, to: Pair) -> f64 {
    let ticks = to.ticks.saturating_sub(from.ticks).max(1);
    to.nanos.saturating_sub(from.nanos).max(1) as f64 / ticks as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(pairs: &[(u64, u64)]) -> Timeline {
        let pairs = pairs.iter().map(|(ticks, nanos)| Pair { ticks: *ticks, nanos: *nanos }).collect();
        Timeline { clock: Clock::Tsc, pairs }
    }

    #[test]
    fn a_later_tick_never_gets_an_earlier_time() {
        let line = timeline(&[(1_000, 50), (4_000, 1_050), (7_001, 1_999), (20_000, 9_999)]);
        let mut before = 0;
        for ticks in 0..30_000 {
            let now = line.nanos(ticks);
            assert!(now >= before, "{ticks}");
            before = now;
        }
        assert_eq!([1_000, 4_000, 7_001, 20_000].map(|ticks| line.nanos(ticks)), [50, 1_050, 1_999, 9_999]);
        assert!(line.nanos(u64::MAX) > 9_999, "no overflow");
    }

    #[test]
    fn a_ring_of_another_boot_keeps_its_own_beginning() {
        let pair = |ticks, nanos| Pair { ticks, nanos };
        let (first, second) = (pair(1_000_000, 400_000), pair(101_000_000, 40_400_000));
        let pairs = Timeline::begin(pair(9_000_000_000, 77), first, second);
        let line = Timeline { clock: Clock::Tsc, pairs };
        assert_eq!(line.nanos(9_000_000_000), 77);
        assert!(line.nanos(9_000_000_000 + 1_000_000).abs_diff(77 + 400_000) <= 1);
    }

    #[test]
    fn times_are_those_of_the_monotonic_clock() {
        for is_new in [false, true] {
            times_are_monotonic(is_new);
        }
    }

    fn times_are_monotonic(is_new: bool) {
        let clock = Clock::of_this_machine();
        let mut line = Timeline::new(clock, Calibration::take(clock), is_new);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(25));
            let before = monotonic();
            let ticks = line.now();
            let after = monotonic();
            std::thread::sleep(Duration::from_millis(25));
            line.update();
            assert!(ticks <= line.settled());
            let found = line.nanos(ticks);
            // Milliseconds: the machine may take us off the processor between any two reads.
            assert!(found + 5_000_000 > before && found < after + 5_000_000, "{before} {found} {after}");
        }
    }
}
