//! What a device held over time, in bounded room: a row of exact states.
//!
//! As long as there is room every change is kept. Then two neighbouring stretches of the same number of changes become one,
//! of which the lowest, the highest, the last state and that with most in PyTorch's blocks stay, again and again: no spike and no
//! dip of the device is ever lost, and every state that is shown was so, holder by holder, at its very instant.
//!
//! ```text
//!  bytes   .  x      .              changes, six to a stretch
//!        .   . .   x  .             kept of each stretch: lowest, highest, last
//!       x       x x    x
//! ```

use std::io;
use std::ops::Range;

use gputrace_schemas::event::{Bytes, Nanos};

use super::shapes::Row;
use super::tape::Changes;

/// How much is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Room {
    /// States.
    pub states: usize,
    /// Changes of holders in all of them.
    pub rows: usize,
}

/// How high a state is: first what the driver had handed out, then what PyTorch's blocks held, as where the peak is looked for.
pub(super) type Height = (Bytes, Bytes);

/// An instant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct State {
    /// When.
    pub time: Nanos,
    /// After which change, from 0.
    pub change: u64,
    /// What became of the holders since the state before ends here, in [`States::rows`].
    rows_end: usize,
    height: Height,
}

/// States, one after the other, and what became of the holders between them.
#[derive(Clone, Debug, Default)]
pub(super) struct States {
    pub states: Vec<State>,
    pub rows: Vec<Row>,
}

impl States {
    /// What became of the holders from the state before to this one.
    pub(super) fn rows_of(&self, idx: usize) -> &[Row] {
        let begin = idx.checked_sub(1).and_then(|before| self.states.get(before)).map_or(0, |it| it.rows_end);
        self.states.get(idx).and_then(|state| self.rows.get(begin..state.rows_end)).unwrap_or_default()
    }

    /// Takes away all from there on.
    fn split_off(&mut self, from: usize) -> States {
        let begin =
            from.checked_sub(1).and_then(|before| self.states.get(before)).map_or(0, |it| it.rows_end);
        let (mut states, rows) = (self.states.split_off(from), self.rows.split_off(begin));
        states.iter_mut().for_each(|state| state.rows_end -= begin);
        States { states, rows }
    }
}

/// The states of one device.
pub(super) struct History {
    room: Room,
    /// Changes in a stretch: 1 where all are kept.
    pub stretch: u64,
    /// Changes that there were.
    pub n_changes: u64,
    /// The kept part.
    pub kept: States,
    /// Where the stretch that is going on begins.
    tail: usize,
    /// From when to when every state stays, as long as there is as much room for these as for all others.
    focus: Option<(Nanos, Nanos)>,
    n_focused: usize,
    n_focused_rows: usize,
    /// All changes, where they are written down.
    changes: Option<Box<Changes>>,
}

impl History {
    pub(super) fn new(room: Room) -> History {
        History {
            room,
            stretch: 1,
            n_changes: 0,
            kept: States::default(),
            tail: 0,
            focus: None,
            n_focused: 0,
            n_focused_rows: 0,
            changes: None,
        }
    }

    /// The same, with all changes written down there.
    pub(super) fn on(self, changes: Changes) -> History {
        History { changes: Some(Box::new(changes)), ..self }
    }

    /// No change follows.
    pub(super) fn finish(&mut self) {
        self.changes.iter_mut().for_each(|changes| changes.finish());
    }

    /// The same with every state between two times, where there is that much room for these; `None` where changes were not written down.
    ///
    /// # Errors
    /// They cannot be read again.
    pub(super) fn part(&self, (from, to): (Nanos, Nanos), room: Room) -> io::Result<Option<History>> {
        let Some(changes) = &self.changes else { return Ok(None) };
        let states = &self.kept.states;
        let begin = states.partition_point(|state| state.time < from);
        let end = states.partition_point(|state| state.time <= to).max(begin);
        let first = begin.checked_sub(1).map_or(0, |before| states[before].change + 1);
        // The state that follows on the part is what has changed since the part's last.
        let last = states.get(end).map_or(u64::MAX, |state| state.change);
        let rows_before = begin.checked_sub(1).map_or(0, |before| states[before].rows_end);
        let mut kept =
            States { states: states[..begin].to_vec(), rows: self.kept.rows[..rows_before].to_vec() };
        let (mut n_states, mut is_room) = (0, true);
        let mut since = kept.rows.len();
        changes.from(first, |change, time, rows| {
            kept.rows.extend_from_slice(rows);
            let is_inside = (from..=to).contains(&time);
            if is_inside || change == last {
                sum_up(&mut kept.rows, since);
                since = kept.rows.len();
                n_states += usize::from(is_inside);
                kept.states.push(State { time, change, rows_end: since, height: (Bytes(0), Bytes(0)) });
            }
            is_room = n_states <= room.states && kept.rows.len() - rows_before <= room.rows;
            is_room && change < last
        })?;
        if !is_room {
            return Ok(Some(self.with(self.kept.clone(), None)));
        }
        let after = (end + 1).min(states.len());
        let rows_at = after.checked_sub(1).map_or(0, |before| states[before].rows_end);
        let moved = |state: &State| State { rows_end: state.rows_end - rows_at + since, ..*state };
        kept.states.extend(states[after..].iter().map(moved));
        kept.rows.extend_from_slice(&self.kept.rows[rows_at..]);
        Ok(Some(self.with(kept, Some((from, to)))))
    }

    /// The same with other states, to be shown.
    fn with(&self, kept: States, focus: Option<(Nanos, Nanos)>) -> History {
        let (stretch, n_changes, tail) = (self.stretch, self.n_changes, kept.states.len());
        History { stretch, n_changes, kept, tail, focus, ..History::new(self.room) }
    }

    /// The same, with every state between two times.
    pub(super) fn focused(room: Room, focus: Option<(Nanos, Nanos)>) -> History {
        History { focus, ..History::new(room) }
    }

    /// From when to when every state is there, where that was asked for and there was room.
    pub(super) fn focus(&self) -> Option<(Nanos, Nanos)> {
        self.focus
    }

    /// One event changed these.
    pub(super) fn change(&mut self, time: Nanos, rows: &[Row], height: Height) {
        if let Some(changes) = &mut self.changes {
            changes.add(time, rows);
        }
        self.kept.rows.extend_from_slice(rows);
        let rows_end = self.kept.rows.len();
        self.kept.states.push(State { time, change: self.n_changes, rows_end, height });
        self.n_changes += 1;
        if self.n_changes.is_multiple_of(self.stretch) {
            let stretch = self.kept.split_off(self.tail);
            self.keep(&stretch, 0..stretch.states.len());
            self.tail = self.kept.states.len();
            if self.n_focused > self.room.states || self.n_focused_rows > self.room.rows {
                self.focus = None;
                self.shrink();
            }
            let n_states = self.kept.states.len() - self.n_focused;
            let n_rows = self.kept.rows.len() - self.n_focused_rows;
            if n_states > self.room.states || n_rows > self.room.rows {
                self.shrink();
            }
        }
    }

    /// Keeps about half of it.
    pub(super) fn shrink(&mut self) {
        self.stretch *= 2;
        let before = std::mem::take(&mut self.kept);
        (self.tail, self.n_focused, self.n_focused_rows) = (0, 0, 0);
        let stretch = self.stretch;
        let is_whole = self.n_changes.is_multiple_of(stretch);
        let mut begin = 0;
        for together in before.states.chunk_by(|a, b| a.change / stretch == b.change / stretch) {
            let end = begin + together.len();
            if end == before.states.len() && !is_whole {
                self.tail = self.kept.states.len();
            }
            self.keep(&before, begin..end);
            begin = end;
        }
        if is_whole {
            self.tail = self.kept.states.len();
        }
    }

    /// Of states that follow on one another, keeps the lowest, the highest, the fullest and the last.
    fn keep(&mut self, all: &States, group: Range<usize>) {
        let states = &all.states[group.clone()];
        let Some(last) = states.len().checked_sub(1) else { return };
        let (mut lowest, mut highest, mut fullest) = (0, 0, 0);
        for (idx, state) in states.iter().enumerate() {
            if state.height < states[lowest].height {
                lowest = idx;
            }
            if state.height > states[highest].height {
                highest = idx;
            }
            if state.height.1 > states[fullest].height.1 {
                fullest = idx;
            }
        }
        let mut begin = self.kept.rows.len();
        for (idx, state) in states.iter().enumerate() {
            self.kept.rows.extend_from_slice(all.rows_of(group.start + idx));
            let is_focused = self.focus.is_some_and(|(from, to)| (from..=to).contains(&state.time));
            if is_focused || [lowest, highest, fullest, last].contains(&idx) {
                sum_up(&mut self.kept.rows, begin);
                let rows_end = self.kept.rows.len();
                if is_focused {
                    self.n_focused += 1;
                    self.n_focused_rows += rows_end - begin;
                }
                self.kept.states.push(State { rows_end, ..*state });
                begin = rows_end;
            }
        }
    }
}

/// Of the rows from there on, makes one for each holder that changed.
fn sum_up(rows: &mut Vec<Row>, from: usize) {
    if rows.len() - from < 2 {
        return;
    }
    // In the order of their holders; which of one holder's comes first does not matter to a sum.
    rows[from..].sort_unstable_by_key(|row| row.holder);
    let mut to = from;
    for idx in from + 1..rows.len() {
        let row = rows[idx];
        if rows[to].holder == row.holder {
            rows[to].bytes += row.bytes;
            rows[to].objects += row.objects;
        } else {
            to += usize::from(rows[to].bytes != 0 || rows[to].objects != 0);
            rows[to] = row;
        }
    }
    to += usize::from(rows[to].bytes != 0 || rows[to].objects != 0);
    rows.truncate(to);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Holders 0 to 4 take turns to gain and lose.
    fn history(room: Room, n: u64) -> (History, Vec<u64>) {
        let (mut history, mut held, mut totals) = (History::new(room), [0i64; 5], vec![]);
        let mut seed = 1u64;
        for change in 0..n {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (holder, wanted) = ((seed >> 33) % 5, ((seed >> 40) % 1000) as i64);
            let bytes = wanted - held[holder as usize];
            held[holder as usize] = wanted;
            let total = held.iter().sum::<i64>() as u64;
            totals.push(total);
            let row = Row { holder: holder as u32, bytes, objects: 0 };
            history.change(Nanos(change), &[row], (Bytes(total), Bytes(0)));
        }
        (history, totals)
    }

    #[test]
    fn every_state_that_stays_is_exact_and_no_extreme_is_lost() {
        for n in [1, 2, 63, 64, 65, 1000, 4097, 20_000] {
            let (history, totals) = history(Room { states: 300, rows: 700 }, n);
            let mut held = 0;
            for (idx, state) in history.kept.states.iter().enumerate() {
                held += history.kept.rows_of(idx).iter().map(|row| row.bytes).sum::<i64>();
                assert_eq!(held as u64, totals[state.change as usize], "n={n}, change {}", state.change);
            }
            let shown = |stretch: &[u64], from: u64| {
                let of = |wanted: &u64| {
                    history.kept.states.iter().any(|state| {
                        (from..from + history.stretch).contains(&state.change) && state.height.0.0 == *wanted
                    })
                };
                of(stretch.iter().max().unwrap()) && of(stretch.iter().min().unwrap())
            };
            for (from, stretch) in
                (0..).step_by(history.stretch as usize).zip(totals.chunks(history.stretch as usize))
            {
                assert!(shown(stretch, from), "n={n}: an extreme from {from} on is lost");
            }
            assert_eq!(history.kept.states.last().unwrap().change, n - 1);
            assert!(
                history.kept.states.len() <= 303 + history.stretch as usize,
                "n={n}: {}",
                history.kept.states.len()
            );
        }
    }

    #[test]
    fn every_state_of_the_part_that_is_looked_at_stays() {
        let focus = (Nanos(7000), Nanos(7100));
        let mut all = History::focused(Room { states: 300, rows: 700 }, Some(focus));
        for change in 0..20_000 {
            let bytes = 1 - 2 * (change as i64 % 2);
            let height = (Bytes(1 - change % 2), Bytes(0));
            all.change(Nanos(change), &[Row { holder: 0, bytes, objects: 0 }], height);
        }
        let inside = all.kept.states.iter().filter(|state| (7000..=7100).contains(&state.change)).count();
        assert_eq!((inside, all.focus()), (101, Some(focus)));
        assert!(all.stretch > 1 && all.kept.states.len() < 500, "{} {}", all.stretch, all.kept.states.len());
        let mut too_much =
            History::focused(Room { states: 300, rows: 700 }, Some((Nanos(0), Nanos(u64::MAX))));
        for change in 0..20_000 {
            too_much.change(Nanos(change), &[], (Bytes(change), Bytes(0)));
        }
        assert!(
            too_much.focus().is_none() && too_much.kept.states.len() < 500,
            "{}",
            too_much.kept.states.len()
        );
    }

    #[test]
    fn a_short_history_is_kept_whole() {
        let (history, totals) = history(Room { states: 300, rows: 700 }, 300);
        assert_eq!((history.stretch, history.kept.states.len()), (1, totals.len()));
    }
}
