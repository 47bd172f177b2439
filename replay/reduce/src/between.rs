//! What a device held at most between two collectives, for every two: so that all ranks can be compared at the same point of the
//! program, whichever rank turns out to hold most.
//!
//! A state is kept as what changed since the one before. Where there are too many, the lower half of them goes.

use gputrace_schemas::event::{Bytes, Nanos};

use super::held::{Device, Place, SINCE_CALL, SINCE_START};

/// Changes that are kept of a device.
const MOST_CHANGES: usize = 1 << 18;

/// Between which collectives of which communicator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    /// Of the process's communicators.
    pub membership: usize,
    /// Collectives called on it before.
    pub n_before: u64,
    /// When the next was called.
    pub until: Nanos,
}

/// What a device held at most in a span.
#[derive(Clone, Debug)]
pub(super) struct State {
    pub membership: usize,
    pub n_before: u64,
    pub time: Nanos,
    height: (Bytes, Bytes),
    /// Places, and what they hold more or less than in the state before.
    pub changes: Vec<(u32, i64)>,
}

/// The states of a device.
#[derive(Clone, Debug, Default)]
pub(super) struct Between {
    /// When the newest collective was called.
    pub since: Nanos,
    /// That is known, and nothing has happened since that is not followed.
    pub is_whole: bool,
    pub states: Vec<State>,
    n_changes: usize,
    /// Of states that went, behind those that are kept.
    carried: Vec<(u32, i64)>,
}

impl Between {
    /// These calls were taken back: what was held before and between them is one span, and not known.
    pub(super) fn forget(&mut self, membership: usize, from: u64) {
        while let Some(state) = self.states.pop_if(|it| it.membership == membership && it.n_before >= from) {
            self.n_changes -= state.changes.len();
            self.carried = joined(state.changes, &self.carried);
        }
    }

    fn add(&mut self, state: State) {
        let changes = joined(std::mem::take(&mut self.carried), &state.changes);
        self.n_changes += changes.len();
        self.states.push(State { changes, ..state });
        if self.n_changes > MOST_CHANGES && self.states.len() > 1 {
            self.thin();
        }
    }

    /// Keeps the higher half; of equal ones, the earlier.
    fn thin(&mut self) {
        let mut order: Vec<usize> = (0..self.states.len()).collect();
        order.sort_by_key(|idx| (std::cmp::Reverse(self.states[*idx].height), *idx));
        let mut stays = vec![false; self.states.len()];
        order.iter().take(self.states.len() / 2).for_each(|idx| stays[*idx] = true);
        let mut carried = vec![];
        let mut kept = Vec::with_capacity(self.states.len() / 2);
        for (state, stays) in std::mem::take(&mut self.states).into_iter().zip(stays) {
            let changes = joined(std::mem::take(&mut carried), &state.changes);
            match stays {
                true => kept.push(State { changes, ..state }),
                false => carried = changes,
            }
        }
        self.n_changes = kept.iter().map(|state| state.changes.len()).sum();
        (self.states, self.carried) = (kept, carried);
    }
}

/// Both changes, one after the other.
fn joined(mut one: Vec<(u32, i64)>, other: &[(u32, i64)]) -> Vec<(u32, i64)> {
    if one.is_empty() {
        return other.to_vec();
    }
    one.extend_from_slice(other);
    one.sort_by_key(|(place, _)| *place);
    one.dedup_by(|next, before| {
        let is_same = next.0 == before.0;
        before.1 += if is_same { next.1 } else { 0 };
        is_same
    });
    one.retain(|(_, bytes)| *bytes != 0);
    one
}

impl Device {
    /// Keeps what was held at most in a span that is over.
    pub(super) fn keep(&mut self, id: i16, span: Span, places: &mut [Place]) {
        let which = if span.n_before == 0 { SINCE_START } else { SINCE_CALL };
        let best = self.best[which];
        // Of two events at one time nobody can tell which was inside.
        let is_sharp = best.time < span.until && self.between.since < span.until;
        let is_known = span.n_before == 0 || self.between.is_whole;
        if !self.is_sure || !is_sharp || !is_known || self.has_dropped {
            return;
        }
        let all: Vec<u32> = match which {
            SINCE_START => {
                (0..places.len() as u32).filter(|idx| places[*idx as usize].device == id).collect()
            }
            _ => std::mem::take(&mut self.changed),
        };
        let (mut changes, mut open) = (vec![], vec![]);
        for idx in all {
            let place = &mut places[idx as usize];
            let bytes = place.at(which, self);
            if bytes != place.kept {
                changes.push((idx, bytes as i64 - place.kept as i64));
                place.kept = bytes;
            }
            place.is_changed = place.now() != bytes;
            if place.is_changed {
                open.push(idx);
            }
        }
        self.changed = open;
        changes.sort_unstable();
        let Span { membership, n_before, .. } = span;
        self.between.add(State { membership, n_before, time: best.time, height: best.height, changes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(n_before: u64, height: u64, changes: &[(u32, i64)]) -> State {
        let height = (Bytes(height), Bytes(0));
        State { membership: 0, n_before, time: Nanos(n_before), height, changes: changes.to_vec() }
    }

    fn sums(between: &Between) -> Vec<(u64, i64, i64)> {
        let (mut a, mut b) = (0, 0);
        let each = |state: &State| {
            state
                .changes
                .iter()
                .for_each(|(place, bytes)| *(if *place == 0 { &mut a } else { &mut b }) += bytes);
            (state.n_before, a, b)
        };
        between.states.iter().map(each).collect()
    }

    #[test]
    fn the_states_that_stay_are_what_they_were() {
        let mut between = Between::default();
        for n in 0..8 {
            let up = if n % 2 == 0 { 10 } else { -10 };
            between.add(state(n, if n % 2 == 0 { 20 } else { 10 }, &[(0, up), (1, 1)]));
        }
        let before = sums(&between);
        between.thin();
        let stays: Vec<_> = before.into_iter().filter(|(n, ..)| n % 2 == 0).collect();
        assert_eq!(sums(&between), stays);
        // What went behind the last is in the next that comes.
        between.add(state(8, 20, &[(0, 10), (1, 1)]));
        assert_eq!(sums(&between).last(), Some(&(8, 10, 9)));
        between.forget(0, 6);
        assert_eq!(sums(&between).last(), Some(&(4, 10, 5)));
    }
}
