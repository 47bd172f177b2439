//! Where each request would be put by somebody who has seen one turn of the program's loop before.
//!
//! ```text
//!  bytes                ┌─ one turn, packed once ─┐
//!    turn  │ start-up │ a   b  c │ a   b  c │ a   b  c │ (none)
//!          │ packed   ├──────────┴──────────┴──────────┤
//!  resident│ what is live from before the turns on, back to back
//! ```
//! What comes after the turns, or outlives its own by a whole one, has no place. Without a loop that most requests belong to
//! nothing has.

use crate::bounds::{Life, Packing, lives, pack, round};
use crate::effort;
use crate::ops::{AllocId, Op, OpStream};

/// Fewer turns than this are no loop.
const FEWEST_TURNS: usize = 3;

/// A place in the planned range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Bytes from the start of the range.
    pub offset: u64,
    /// Bytes, rounded to 512.
    pub bytes: u64,
}

/// The planned place of each request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// By number of the request, failed ones and what was live before the history included.
    slots: Vec<Option<Slot>>,
    /// Length of the planned range.
    pub bytes: u64,
}

impl Plan {
    /// Plans a whole run.
    pub fn of(stream: &OpStream) -> Plan {
        let requests = requests(stream);
        let keys: Vec<u64> = requests
            .iter()
            .map(|id| id.map_or(u64::MAX, |id| round(stream.allocation(id).requested)))
            .collect();
        let is_the_program = |turns: &Turns| 2 * (turns.end - turns.begin) >= keys.len();
        let turns = Turns::find(&keys).filter(is_the_program);
        let Some(turns) = turns.filter(|turns| effort::PACKING.covers(turns.period)) else {
            return Plan::default();
        };
        let lives = lives(stream);
        let life = |n: usize| requests[n].map(|id| lives[id.0 as usize]);
        let Some((begin, end)) = turns.typical(&life) else { return Plan::default() };

        let mut plan = Plan { slots: vec![None; requests.len()], bytes: 0 };
        let is_resident = |life: &Life| life.start < begin && life.end >= end;
        let mut once = Vec::new();
        for n in 0..turns.begin {
            match life(n) {
                Some(life) if is_resident(&life) => {
                    plan.slots[n] = Some(Slot { offset: plan.bytes, bytes: life.bytes });
                    plan.bytes += life.bytes;
                }
                Some(life) => once.push((n, life)),
                None => {}
            }
        }

        let first = turns.begin + turns.n() / 2 * turns.period;
        let repeated: Vec<(usize, Life)> = (0..turns.period)
            .filter_map(|index| Some((index, life(first + index)?)))
            .filter(|(_, life)| life.end - life.start < end - begin)
            .collect();
        let packing = pack(&only_lives(&repeated), Some(end - begin));
        for ((index, life), offset) in repeated.iter().zip(&packing.offsets) {
            let slot = Slot { offset: plan.bytes + offset, bytes: life.bytes };
            (turns.begin + index..turns.end).step_by(turns.period).for_each(|n| plan.slots[n] = Some(slot));
        }
        let once_packing = if effort::PACKING.covers(once.len()) {
            pack(&only_lives(&once), None)
        } else {
            Packing::default()
        };
        for ((n, life), offset) in once.iter().zip(&once_packing.offsets) {
            plan.slots[*n] = Some(Slot { offset: plan.bytes + offset, bytes: life.bytes });
        }
        plan.bytes += packing.height.max(once_packing.height);
        plan
    }

    /// Where the request of a number is to go.
    pub fn slot(&self, n: usize) -> Option<Slot> {
        *self.slots.get(n)?
    }
}

fn only_lives<T>(numbered: &[(T, Life)]) -> Vec<Life> {
    numbered.iter().map(|(_, life)| *life).collect()
}

/// What is asked for, in order; none where the request had failed.
fn requests(stream: &OpStream) -> Vec<Option<AllocId>> {
    let before = stream.initial_allocs.iter().map(|id| Some(*id));
    let ops = stream.ops.iter().filter_map(|op| match op {
        Op::Alloc(id) => Some(Some(*id)),
        Op::Oom(_) => Some(None),
        _ => None,
    });
    before.chain(ops).collect()
}

/// Requests that come again and again: from `begin` to `end`, each `period` after the last time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turns {
    begin: usize,
    end: usize,
    period: usize,
}

impl Turns {
    /// The longest stretch of turns that begins near one of a few places.
    fn find(keys: &[u64]) -> Option<Turns> {
        let found = [0, 1, 2, 3].map(|quarter| Turns::around(keys, keys.len() * quarter / 4));
        found.into_iter().flatten().max_by_key(|turns| turns.end - turns.begin)
    }

    fn around(keys: &[u64], anchor: usize) -> Option<Turns> {
        let borders = borders(&keys[anchor..]);
        let is_twice = |length: usize| 2 * (length - borders[length - 1] as usize) <= length;
        let length = (1..=borders.len()).rev().find(|length| is_twice(*length))?;
        let period = length - borders[length - 1] as usize;
        let more = (0..anchor).rev().take_while(|n| keys[*n] == keys[n + period]).count();
        let begin = anchor - more;
        let turns = (anchor + length - begin) / period;
        let end = begin + turns * period;
        (turns >= FEWEST_TURNS).then_some(Turns { begin, end, period })
    }

    fn n(&self) -> usize {
        (self.end - self.begin) / self.period
    }

    /// When the turn in the middle begins and ends.
    fn typical(&self, life: &impl Fn(usize) -> Option<Life>) -> Option<(u32, u32)> {
        let first = self.begin + self.n() / 2 * self.period;
        let start = |n: usize| Some(life(n)?.start);
        Some((start(first)?, start(first + self.period).or_else(|| start(self.end - 1))?))
    }
}

/// For each prefix, how long a shorter one also ends it (Knuth, Morris and Pratt).
fn borders(keys: &[u64]) -> Vec<u32> {
    let mut borders = vec![0u32; keys.len()];
    for n in 1..keys.len() {
        let mut length = borders[n - 1] as usize;
        while length > 0 && keys[length] != keys[n] {
            length = borders[length - 1] as usize;
        }
        borders[n] = (length + usize::from(keys[length] == keys[n])) as u32;
    }
    borders
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Allocation, Builder, PoolIdx, StackId, StreamIdx};

    /// `a4` asks for 4 KiB and calls it a, `-a` gives the last a back.
    fn plan(text: &str) -> Plan {
        let mut builder = Builder::new(0);
        let mut live = std::collections::HashMap::new();
        for word in text.split_whitespace() {
            if let Some(name) = word.strip_prefix('-') {
                let id = live[name];
                builder.op(Op::FreeRequested(id));
                builder.op(Op::FreeCompleted(id));
                continue;
            }
            let (name, kib) = word.split_at(1);
            let requested = kib.parse::<u64>().unwrap() << 10;
            let (stack, stream, pool) = (StackId::NONE, StreamIdx(0), PoolIdx::DEFAULT);
            live.insert(name, builder.alloc(Allocation { requested, address: 0, stack, stream, pool }));
        }
        Plan::of(&builder.finish())
    }

    fn offsets(plan: &Plan) -> Vec<Option<u64>> {
        plan.slots.iter().map(|slot| slot.map(|slot| slot.offset >> 10)).collect()
    }

    //  2  | b     c     c        c lies where a was, as b goes before a third KiB is needed
    //  1  | a  a  .  c  c
    //  0  | w  w  w  w  w
    #[test]
    fn every_turn_uses_the_places_of_the_one_that_was_packed() {
        let plan = plan(&format!("w4 {}", "a1 b1 -a c2 -b -c ".repeat(4)));
        assert_eq!(plan.bytes, 7 << 10);
        let places = offsets(&plan);
        assert_eq!(places[0], Some(0), "what is there all the time lies below");
        assert!(places[1..].chunks(3).all(|turn| turn == &places[1..4] && turn.iter().all(Option::is_some)));
    }

    #[test]
    fn what_goes_in_the_next_turn_lies_apart_from_its_successor() {
        let plan = plan(&format!("w4 k1 {}", "a3 -k k1 -a ".repeat(4)));
        let places = offsets(&plan);
        let (a, k) = (places[2].unwrap(), places[3].unwrap());
        assert!(a.abs_diff(k) >= 1 && plan.bytes == 8 << 10, "{places:?}");
    }

    #[test]
    fn what_outlives_a_turn_has_no_place_and_neither_has_a_run_without_turns() {
        let kept = plan(&"a1 k2 -a ".repeat(4));
        assert_eq!(offsets(&kept)[4..6], [Some(0), None]);
        assert_eq!(plan("a1 b2 c3 -a -b d4"), Plan::default());
    }
}
