//! When to look at the state of a replay, and what to hold it against.

use super::repeats::{Repeat, Repeats};
use super::state::State;

/// A replay at the beginning of a window.
#[derive(Clone, Debug)]
pub(crate) struct Edge {
    /// The op that is next.
    pub(crate) op: usize,
    /// Some numbers of the state: where they differ, nothing else needs to be looked at.
    pub(crate) glance: [u64; 8],
    /// What is counted: what a window adds to it, an equal one adds.
    pub(crate) tallies: Vec<u64>,
    /// What an observer noted.
    pub(crate) noted: [u64; 2],
    /// Calls of the driver so far.
    pub(crate) n_calls: u64,
}

/// An [`Edge`] with its state.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) edge: Edge,
    /// The policy, the device and what is live.
    pub(crate) state: State,
    /// What chooses addresses; none where it does not say.
    pub(crate) space: Option<State>,
}

/// A stretch that is being replayed.
#[derive(Debug)]
pub(crate) struct Tracked {
    pub(crate) repeat: Repeat,
    /// The op before which the state is looked at next.
    next: usize,
    /// Windows from one look to the next.
    stride: usize,
    n_looks: usize,
    pub(crate) seen: Option<Seen>,
}

/// States come back after a few windows, or never: a state is held against all later ones until there were so many.
const MOST_HELD: usize = 64;
/// Looks without success after which they are half as many.
const PATIENCE: usize = 16;

impl Tracked {
    /// Whether the state at this look should be kept, to hold later ones against it: the first, second, fourth and so on (R. P. Brent, An improved
    /// Monte Carlo factorization algorithm, BIT 20, 1980).
    pub(crate) fn keeps(&self) -> bool {
        self.seen.is_none() || self.n_looks.is_power_of_two() || self.n_looks.is_multiple_of(MOST_HELD)
    }

    /// Looks again when windows have gone by that cost more than the look did, in ops.
    pub(crate) fn looked(&mut self, at: usize, cost: usize) {
        self.n_looks += 1;
        if self.n_looks.is_multiple_of(PATIENCE) {
            self.stride *= 2;
        }
        while self.stride * self.repeat.period < cost {
            self.stride *= 2;
        }
        self.next = at + self.stride * self.repeat.period;
    }

    /// The state has come back, and windows were skipped up to an op.
    pub(crate) fn skipped(&mut self, to: usize) {
        self.seen = None;
        self.n_looks = 0;
        self.next = to;
    }

    /// So many ops ahead are known to repeat. The last one shows that the one before it was followed as ever.
    pub(crate) fn n_ahead(&self, at: usize) -> usize {
        (self.repeat.end - 1).saturating_sub(at)
    }

    fn is_over(&self) -> bool {
        self.next + self.repeat.period >= self.repeat.end
    }
}

/// All stretches that a replay is in.
#[derive(Debug, Default)]
pub(crate) struct Trackers {
    /// Those that begin later, the next one last.
    ahead: Vec<Repeat>,
    pub(crate) tracked: Vec<Tracked>,
}

impl Trackers {
    /// For a replay that begins at an op.
    pub(crate) fn from(repeats: &Repeats, first: usize) -> Trackers {
        let mut trackers = Trackers {
            ahead: repeats.all().iter().rev().filter(|repeat| repeat.end > first).copied().collect(),
            tracked: Vec::new(),
        };
        trackers.go_to(first);
        trackers
    }

    /// The op before which something is to be looked at.
    pub(crate) fn next(&self) -> usize {
        let ahead = self.ahead.last().map_or(usize::MAX, |repeat| repeat.start);
        self.tracked.iter().map(|tracked| tracked.next).fold(ahead, usize::min)
    }

    /// The next one to be looked at before this op.
    pub(crate) fn due(&mut self, op: usize) -> Option<&mut Tracked> {
        self.tracked.iter_mut().find(|tracked| tracked.next == op)
    }

    /// The replay is at an op now.
    pub(crate) fn go_to(&mut self, op: usize) {
        while let Some(repeat) = self.ahead.pop_if(|repeat| repeat.start <= op) {
            self.tracked.push(Tracked { repeat, next: repeat.start, stride: 1, n_looks: 0, seen: None });
        }
        for tracked in &mut self.tracked {
            if tracked.next < op {
                tracked.next = tracked.repeat.edge_from(op);
            }
        }
        self.tracked.retain(|tracked| !tracked.is_over());
    }
}
