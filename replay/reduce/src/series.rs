//! An amount over time in bounded room: the least, the most and the last of each stretch of equally many events. Where there is no
//! room for more, two stretches become one.
//!
//! ```text
//!  bytes  /\   /\__      stretch   0    1    2    3
//!       _/  \_/    \     most      2    3    3    2
//!                        least     0    1    1    1
//! ```

use gputrace_schemas::event::Nanos;

/// Stretches at the end: this many at most, half of it at least.
pub(super) const MOST: u32 = 256;

/// Which stretch it is, for all amounts of a trace.
#[derive(Clone, Debug)]
pub(super) struct Clock {
    /// The stretch that is going on.
    pub now: u32,
    /// Events in each.
    length: u64,
    seen: u64,
    /// From when to when each was.
    pub times: Vec<(Nanos, Nanos)>,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock { now: 0, length: 1, seen: 0, times: vec![] }
    }
}

impl Clock {
    /// An event comes. Whether two stretches have become one, so that every amount must [`Amount::halve`].
    pub(super) fn event(&mut self, time: Nanos) -> bool {
        let mut is_halved = false;
        if self.seen == self.length {
            (self.seen, self.now) = (0, self.now + 1);
            if self.now == MOST {
                (self.now, self.length, is_halved) = (MOST / 2, self.length * 2, true);
                let join =
                    |pair: &[(Nanos, Nanos)]| (pair[0].0, pair.last().map_or(pair[0].1, |last| last.1));
                self.times = self.times.chunks(2).map(join).collect();
            }
        }
        self.seen += 1;
        match self.times.get_mut(self.now as usize) {
            Some(stretch) => stretch.1 = time,
            None => self.times.push((time, time)),
        }
        is_halved
    }
}

/// A stretch in which an amount changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Point {
    /// Which.
    pub stretch: u32,
    /// At its end.
    pub last: u64,
    /// At least.
    pub least: u64,
    /// At most.
    pub most: u64,
}

/// An amount over time. In stretches without a point it is what it was at the end of the point before.
#[derive(Clone, Debug, Default)]
pub(super) struct Amount {
    pub now: u64,
    /// Most ever.
    pub peak: u64,
    points: Vec<Point>,
}

impl Amount {
    /// It becomes so much.
    pub(super) fn set(&mut self, clock: &Clock, bytes: u64) {
        match self.points.last_mut() {
            Some(point) if point.stretch == clock.now => {
                point.last = bytes;
                point.least = point.least.min(bytes);
                point.most = point.most.max(bytes);
            }
            _ => self.points.push(Point {
                stretch: clock.now,
                last: bytes,
                least: bytes.min(self.now),
                most: bytes.max(self.now),
            }),
        }
        self.now = bytes;
        self.peak = self.peak.max(bytes);
    }

    /// More, or less.
    pub(super) fn add(&mut self, clock: &Clock, bytes: i64) {
        self.set(clock, self.now.saturating_add_signed(bytes));
    }

    /// Two stretches become one.
    pub(super) fn halve(&mut self) {
        let mut halved: Vec<Point> = Vec::with_capacity(self.points.len() / 2 + 1);
        for point in &self.points {
            let stretch = point.stretch / 2;
            match halved.last_mut() {
                Some(before) if before.stretch == stretch => {
                    before.last = point.last;
                    before.least = before.least.min(point.least);
                    before.most = before.most.max(point.most);
                }
                _ => halved.push(Point { stretch, ..*point }),
            }
        }
        self.points = halved;
    }

    /// Every stretch of the clock.
    pub(super) fn whole(&self, clock: &Clock) -> Vec<Point> {
        let mut points = self.points.iter().peekable();
        let mut held = 0;
        let stretch = |stretch: u32| match points.next_if(|point| point.stretch == stretch) {
            Some(point) => {
                held = point.last;
                *point
            }
            None => Point { stretch, last: held, least: held, most: held },
        };
        (0..clock.times.len() as u32).map(stretch).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_peak_and_no_dip_is_lost_however_long_the_trace() {
        let (mut clock, mut amount) = (Clock::default(), Amount::default());
        for n in 0..100_000_u64 {
            if clock.event(Nanos(n)) {
                amount.halve();
            }
            if n % 2 == 0 {
                amount.set(&clock, if n == 77_776 { 900 } else { 50 + n % 4 });
            }
        }
        let whole = amount.whole(&clock);
        assert!(whole.len() <= MOST as usize && whole.len() >= MOST as usize / 2);
        assert_eq!(whole.iter().map(|point| point.most).max(), Some(900));
        assert_eq!((whole[0].least, whole[1].least, amount.peak), (0, 50, 900));
        assert_eq!(
            clock.times.first().zip(clock.times.last()).map(|(a, b)| (a.0, b.1)),
            Some((Nanos(0), Nanos(99_999)))
        );
        assert!(clock.times.windows(2).all(|pair| pair[0].1 < pair[1].0));
    }

    #[test]
    fn what_did_not_change_is_what_it_was() {
        let (mut clock, mut amount) = (Clock::default(), Amount::default());
        for n in 0..4 {
            clock.event(Nanos(n));
            if n == 1 {
                amount.add(&clock, 5);
            }
        }
        let whole = amount.whole(&clock);
        let shown: Vec<_> = whole.iter().map(|it| (it.last, it.least, it.most)).collect();
        assert_eq!(shown, [(0, 0, 0), (5, 0, 5), (5, 5, 5), (5, 5, 5)]);
    }
}
