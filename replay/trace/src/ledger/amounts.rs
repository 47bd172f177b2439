//! Amounts that remember what they were at chosen moments, at a constant cost per change.
//!
//! To know who owned what at the peak, one could copy every amount at every new peak. Instead each amount keeps its
//! value from just before its first change after the moment; as long as it did not change, its value now is the answer:
//!
//! ```text
//!  total   1 2 3 . . 2 .        new peak at 3: the moment's number becomes 3
//!  owner a 1 . 2 . . 1 .        first change after it: at_peak = 2, stamp = 3
//!  owner b . 1 . . . . .        never changed since: at the peak it was what it is now
//! ```

use gputrace_schemas::event::{Bytes, Nanos};

use super::sites::{OwnerId, SiteId};

/// A moment that every amount of some [`Books`] remembers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    /// The first instant at which the total was the largest ever.
    Peak = 0,
    /// The newest call of [`Books::remember`]: the last out-of-memory error.
    Mark = 1,
}

const MOMENTS: usize = 2;

/// Bytes and objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Held {
    /// Bytes.
    pub bytes: Bytes,
    /// Number of objects.
    pub objects: u64,
}

impl Held {
    pub(super) fn add(&mut self, bytes: Bytes) {
        self.bytes.0 = self.bytes.0.saturating_add(bytes.0);
        self.objects += 1;
    }

    fn subtract(&mut self, bytes: Bytes) {
        self.bytes.0 = self.bytes.0.saturating_sub(bytes.0);
        self.objects = self.objects.saturating_sub(1);
    }
}

/// How much an owner or a place holds, held at most, and held at each [`Moment`]. The fields that most changes need come first, in one
/// line of the processor's cache.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Amount {
    now: Held,
    peak: Bytes,
    /// Least bytes since the window of number `low_in` began.
    low: Bytes,
    /// Objects ever got.
    gains: u64,
    /// [`Numbers::all`] at its last change.
    at_change: u32,
    low_in: u32,
    at: [Held; MOMENTS],
    stamps: [u32; MOMENTS],
    /// Gone with its context in the teardown of this number.
    dropped: Held,
    dropped_in: u32,
}

/// Numbers that some [`Books`] have reached. They only grow.
#[derive(Clone, Copy, Debug, Default)]
struct Numbers {
    moments: [u32; MOMENTS],
    /// Of the window that [`Part::low`] is about.
    window: u32,
    /// Of the teardown that is going on; a gain ends it.
    teardown: u32,
}

impl Numbers {
    /// One number that changes with each moment and window.
    fn all(&self) -> u32 {
        self.moments.iter().fold(self.window, |sum, moment| sum.wrapping_add(*moment))
    }
}

impl Amount {
    #[inline(always)]
    fn change(&mut self, numbers: &Numbers, change: Change) {
        if self.at_change != numbers.all() {
            self.remember(numbers);
        }
        match change {
            Change::Gain(bytes) => {
                self.now.add(bytes);
                self.gains += 1;
                self.peak = self.peak.max(self.now.bytes);
            }
            Change::Loss(bytes) => self.now.subtract(bytes),
            Change::Drop(bytes) => {
                self.now.subtract(bytes);
                if self.dropped_in != numbers.teardown {
                    (self.dropped, self.dropped_in) = (Held::default(), numbers.teardown);
                }
                self.dropped.add(bytes);
            }
        }
        self.low = self.low.min(self.now.bytes);
    }

    /// Keeps what it was at the moments since its last change, and when the window began.
    #[cold]
    fn remember(&mut self, numbers: &Numbers) {
        self.at_change = numbers.all();
        if self.low_in != numbers.window {
            (self.low, self.low_in) = (self.now.bytes, numbers.window);
        }
        for ((at, stamp), moment) in self.at.iter_mut().zip(&mut self.stamps).zip(&numbers.moments) {
            if stamp != moment {
                (*at, *stamp) = (self.now, *moment);
            }
        }
    }

    fn low(&self, window: u32) -> Bytes {
        if self.low_in == window { self.low } else { self.now.bytes }
    }

    /// What it holds, and what it held when its context went away if nothing came after that.
    fn at_end(&self, teardown: u32) -> Held {
        let mut held = self.now;
        if self.dropped_in == teardown {
            held.bytes.0 = held.bytes.0.saturating_add(self.dropped.bytes.0);
            held.objects += self.dropped.objects;
        }
        held
    }

    fn at(&self, moments: &[u32; MOMENTS], moment: Moment) -> Held {
        let idx = moment as usize;
        if self.stamps[idx] == moments[idx] { self.at[idx] } else { self.now }
    }
}

#[derive(Clone, Copy)]
enum Change {
    Gain(Bytes),
    Loss(Bytes),
    Drop(Bytes),
}

/// A total with its parts by owner and by call site.
#[derive(Clone, Debug, Default)]
pub struct Books {
    total: Amount,
    peak_time: Nanos,
    numbers: Numbers,
    is_torn_down: bool,
    owners: Parts,
    sites: Parts,
}

/// Amounts by number. As long as there is only one, it is the total, and is not booked a second time.
#[derive(Clone, Debug, Default)]
enum Parts {
    #[default]
    None,
    One(usize),
    Many(Vec<Amount>),
}

impl Parts {
    /// The amount to book a change of part `idx` in, before it is booked in `total`; none if the total says it all.
    #[inline]
    fn slot(&mut self, idx: usize, total: &Amount) -> Option<&mut Amount> {
        let is_known = match self {
            Parts::None => false,
            Parts::One(only) => *only == idx,
            Parts::Many(amounts) => idx < amounts.len(),
        };
        if !is_known {
            self.add(idx, total);
        }
        match self {
            Parts::None | Parts::One(_) => None,
            Parts::Many(amounts) => amounts.get_mut(idx),
        }
    }

    #[cold]
    fn add(&mut self, idx: usize, total: &Amount) {
        let mut amounts = match std::mem::take(self) {
            Parts::None => return *self = Parts::One(idx),
            Parts::One(only) => {
                let mut amounts = vec![Amount::default(); only + 1];
                amounts[only] = *total;
                amounts
            }
            Parts::Many(amounts) => amounts,
        };
        if idx >= amounts.len() {
            amounts.resize(idx + 1, Amount::default());
        }
        *self = Parts::Many(amounts);
    }

    /// The amounts, and the number of the first.
    fn amounts<'a>(&'a self, total: &'a Amount) -> (usize, &'a [Amount]) {
        match self {
            Parts::None => (0, &[]),
            Parts::One(only) => (*only, std::slice::from_ref(total)),
            Parts::Many(amounts) => (0, amounts),
        }
    }
}

/// One part of some [`Books`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part<Id> {
    /// Its owner.
    pub id: Id,
    /// Memory that it holds now.
    pub now: Bytes,
    /// Most bytes it ever held, whenever that was.
    pub peak: Bytes,
    /// Memory that it held at the total's peak.
    pub at_peak: Held,
    /// Memory that it held at the marked moment.
    pub at_mark: Held,
    /// Memory that it holds now, or held when its context went away, if nothing came after that: programs leave it to the exit
    /// of the process to free what they do not need to free.
    pub live: Held,
    /// Least bytes that it held since [`Books::begin_window`].
    pub low: Bytes,
    /// Objects that it ever got.
    pub gains: u64,
}

impl Books {
    /// `owner` got an object of `bytes` from `site`.
    pub fn gain(&mut self, time: Nanos, owner: OwnerId, site: SiteId, bytes: Bytes) {
        let before = self.total.peak;
        if std::mem::take(&mut self.is_torn_down) {
            self.numbers.teardown += 1;
        }
        self.change(owner, site, Change::Gain(bytes));
        if self.total.peak > before {
            self.peak_time = time;
            // Numbers start at 1: a fresh amount, stamped 0, was empty at every moment so far, as it says.
            self.numbers.moments[Moment::Peak as usize] += 1;
        }
    }

    /// `owner` freed an object of `bytes` that came from `site`.
    pub fn lose(&mut self, owner: OwnerId, site: SiteId, bytes: Bytes) {
        self.change(owner, site, Change::Loss(bytes));
    }

    /// An object of `owner` that came from `site` went away with its context.
    pub fn drop_from(&mut self, owner: OwnerId, site: SiteId, bytes: Bytes) {
        if !self.is_torn_down {
            self.is_torn_down = true;
            // Amounts are stamped 0 until something of theirs is dropped.
            self.numbers.teardown = self.numbers.teardown.max(1);
        }
        self.change(owner, site, Change::Drop(bytes));
    }

    /// Makes this instant the [`Moment::Mark`].
    pub fn remember(&mut self) {
        self.numbers.moments[Moment::Mark as usize] += 1;
    }

    #[inline(always)]
    fn change(&mut self, owner: OwnerId, site: SiteId, change: Change) {
        for (parts, idx) in [(&mut self.owners, owner.0), (&mut self.sites, site.0)] {
            if let Some(amount) = parts.slot(idx as usize, &self.total) {
                amount.change(&self.numbers, change);
            }
        }
        self.total.change(&self.numbers, change);
    }

    /// Forgets the least amounts: [`Part::low`] begins anew.
    pub fn begin_window(&mut self) {
        self.numbers.window += 1;
    }

    /// Least bytes held since [`Books::begin_window`].
    #[must_use]
    pub fn low(&self) -> Bytes {
        self.total.low(self.numbers.window)
    }

    /// Memory held now.
    #[must_use]
    pub fn now(&self) -> Held {
        self.total.now
    }

    /// Memory held now, or when the context went away, if nothing came after that.
    #[must_use]
    pub fn live(&self) -> Held {
        self.total.at_end(self.numbers.teardown)
    }

    /// Most bytes ever held.
    #[must_use]
    pub fn peak(&self) -> Bytes {
        self.total.peak
    }

    /// When [`Books::peak`] was first reached.
    #[must_use]
    pub fn peak_time(&self) -> Nanos {
        self.peak_time
    }

    /// Memory held at `moment`.
    #[must_use]
    pub fn at(&self, moment: Moment) -> Held {
        self.total.at(&self.numbers.moments, moment)
    }

    /// Parts by owner, in the order of their first appearance; those who never held anything are left out.
    pub fn owners(&self) -> impl Iterator<Item = Part<OwnerId>> {
        self.parts(&self.owners, OwnerId)
    }

    /// Parts by call site; those that never held anything are left out.
    pub fn sites(&self) -> impl Iterator<Item = Part<SiteId>> {
        self.parts(&self.sites, SiteId)
    }

    fn parts<'a, Id>(
        &'a self,
        parts: &'a Parts,
        id: impl Fn(u32) -> Id + 'a,
    ) -> impl Iterator<Item = Part<Id>> + 'a {
        let (first, amounts) = parts.amounts(&self.total);
        amounts.iter().zip(first as u32..).filter(|(amount, _)| amount.peak.0 > 0).map(
            move |(amount, idx)| Part {
                id: id(idx),
                now: amount.now.bytes,
                peak: amount.peak,
                at_peak: amount.at(&self.numbers.moments, Moment::Peak),
                at_mark: amount.at(&self.numbers.moments, Moment::Mark),
                live: amount.at_end(self.numbers.teardown),
                low: amount.low(self.numbers.window),
                gains: amount.gains,
            },
        )
    }
}

/// A quantity without parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    /// Bytes now.
    pub now: Bytes,
    /// Most bytes ever.
    pub peak: Bytes,
    /// When that was first so.
    pub peak_time: Nanos,
}

impl Meter {
    /// More.
    pub fn gain(&mut self, time: Nanos, bytes: Bytes) {
        self.set(time, Bytes(self.now.0.saturating_add(bytes.0)));
    }

    /// Less.
    pub fn lose(&mut self, bytes: Bytes) {
        self.now.0 = self.now.0.saturating_sub(bytes.0);
    }

    /// Somebody else counts; this is what they say.
    pub fn set(&mut self, time: Nanos, bytes: Bytes) {
        self.now = bytes;
        if bytes > self.peak {
            (self.peak, self.peak_time) = (bytes, time);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: (OwnerId, SiteId) = (OwnerId(0), SiteId(0));
    const B: (OwnerId, SiteId) = (OwnerId(1), SiteId(1));

    fn parts(books: &Books) -> Vec<(u64, u64, u64, u64)> {
        books.owners().map(|p| (p.peak.0, p.at_peak.bytes.0, p.at_mark.bytes.0, p.live.bytes.0)).collect()
    }

    #[test]
    fn parts_at_the_peak_add_up_to_the_peak() {
        //  t:  1 2 3 4 5 6
        //  a   1 . 3 . 1 .
        //  b   . 2 . 0 . 1     peak 5 at t=3
        let mut books = Books::default();
        books.gain(Nanos(1), A.0, A.1, Bytes(1));
        books.gain(Nanos(2), B.0, B.1, Bytes(2));
        books.gain(Nanos(3), A.0, A.1, Bytes(2));
        books.lose(B.0, B.1, Bytes(2));
        books.lose(A.0, A.1, Bytes(2));
        books.gain(Nanos(6), B.0, B.1, Bytes(1));
        assert_eq!((books.peak(), books.peak_time(), books.now().bytes), (Bytes(5), Nanos(3), Bytes(2)));
        assert_eq!(parts(&books), [(3, 3, 0, 1), (2, 2, 0, 1)]);
    }

    #[test]
    fn an_owner_that_came_after_the_peak_had_nothing_at_it() {
        let mut books = Books::default();
        books.gain(Nanos(1), A.0, A.1, Bytes(9));
        books.lose(A.0, A.1, Bytes(9));
        books.gain(Nanos(2), B.0, B.1, Bytes(1));
        assert_eq!(parts(&books), [(9, 9, 0, 0), (1, 0, 0, 1)]);
    }

    #[test]
    fn what_a_context_took_with_it_was_live_at_the_end_unless_something_follows() {
        let mut books = Books::default();
        books.gain(Nanos(1), A.0, A.1, Bytes(4));
        books.gain(Nanos(2), B.0, B.1, Bytes(2));
        books.lose(B.0, B.1, Bytes(2));
        books.drop_from(A.0, A.1, Bytes(4));
        assert_eq!((books.now().bytes, books.live().bytes), (Bytes(0), Bytes(4)));
        assert_eq!(parts(&books), [(4, 4, 0, 4), (2, 2, 0, 0)]);
        books.gain(Nanos(3), B.0, B.1, Bytes(1));
        assert_eq!(parts(&books), [(4, 4, 0, 0), (2, 2, 0, 1)]);
        books.drop_from(B.0, B.1, Bytes(1));
        assert_eq!(parts(&books), [(4, 4, 0, 0), (2, 2, 0, 1)]);
    }

    #[test]
    fn a_mark_keeps_what_was_held_then() {
        let mut books = Books::default();
        books.gain(Nanos(1), A.0, A.1, Bytes(4));
        books.remember();
        books.gain(Nanos(2), B.0, B.1, Bytes(8));
        books.lose(A.0, A.1, Bytes(4));
        assert_eq!(books.at(Moment::Mark).bytes, Bytes(4));
        assert_eq!(parts(&books), [(4, 4, 4, 0), (8, 8, 0, 8)]);
    }
}
