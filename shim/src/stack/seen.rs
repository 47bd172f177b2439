//! Ids whose definitions a thread has sent: a cache, so forgetting one only costs sending it again.

/// Sets of eight ids, one cache line each: 8,192 ids, 64 KiB a thread. A set that overflows forgets one of its ids;
/// with 2,000 live ids that happens to one in ten thousand (Poisson, mean 2 a set, more than 8).
const SETS: usize = 1024;
const WAYS: usize = 8;

/// Ids in the order in which they were met, a power of two: more than a training step has. It is read as it is written,
/// in order, so that it is in the caches where the set is not.
const RECENT: usize = 4096;

/// A set of ids. Zeroed memory is an empty one.
#[repr(C, align(64))]
pub(crate) struct Seen {
    ids: [[u64; WAYS]; SETS],
    /// What the recorder has lost so far, an odd number; ids sent before do not count. 0 in an empty set.
    definitions: u32,
    /// Which way of a full set gives way next.
    next: u32,
    /// Ids that were in the set when they were met, the last in the slot before `n_met`.
    recent: [u64; RECENT],
    n_met: u32,
    /// A program does the same again and again: what number the next id had when it was met before, if so.
    guess: u32,
    /// What number an id had when it was last looked for in the set, at the same place as the id.
    met_at: [[u32; WAYS]; SETS],
}

impl Seen {
    /// Whether `id` was missing; then it is in.
    #[inline]
    pub(crate) fn insert(&mut self, id: u64, definitions: u32) -> bool {
        let is_guessed = self.recent.get(self.guess as usize % RECENT) == Some(&id);
        if !is_guessed || definitions != self.definitions {
            return self.look_up(id, definitions);
        }
        self.guess = self.guess.wrapping_add(1);
        self.meet(id);
        false
    }

    #[inline]
    fn meet(&mut self, id: u64) {
        if let Some(slot) = self.recent.get_mut(self.n_met as usize % RECENT) {
            *slot = id;
        }
        self.n_met = self.n_met.wrapping_add(1);
    }

    #[inline(never)]
    #[unsafe(link_section = "gputrace_hot")]
    fn look_up(&mut self, id: u64, definitions: u32) -> bool {
        if definitions != self.definitions {
            self.begin(definitions);
        }
        let set = set_of(id);
        let (Some(ids), Some(met_at)) = (self.ids.get_mut(set), self.met_at.get_mut(set)) else {
            return true;
        };
        let known = ids.iter().position(|known| *known == id);
        let way =
            known.or_else(|| ids.iter().position(|known| *known == 0)).unwrap_or(self.next as usize % WAYS);
        if let (Some(known), Some(met_at)) = (ids.get_mut(way), met_at.get_mut(way)) {
            *known = id;
            self.guess = met_at.wrapping_add(1);
            *met_at = self.n_met;
        }
        self.meet(id);
        if known.is_none() {
            self.next = self.next.wrapping_add(1);
        }
        known.is_none()
    }

    #[cold]
    #[inline(never)]
    fn begin(&mut self, definitions: u32) {
        // A new thread's set is empty as it is: writing to it would cost a page fault for each of its 24 pages.
        if self.definitions != 0 {
            self.ids.fill([0; WAYS]);
            self.recent.fill(0);
        }
        self.definitions = definitions;
    }

    /// Takes `id` out, which was the last to be put in.
    pub(crate) fn remove(&mut self, id: u64) {
        let last = self.recent.get_mut(self.n_met.wrapping_sub(1) as usize % RECENT);
        if let Some(last) = last.filter(|last| **last == id) {
            *last = 0;
        }
        let Some(set) = self.ids.get_mut(set_of(id)) else { return };
        if let Some(slot) = set.iter_mut().find(|known| **known == id) {
            *slot = 0;
        }
    }
}

/// Ids are hashes, and odd: their high bits choose.
#[inline(always)]
fn set_of(id: u64) -> usize {
    (id >> 54) as usize
}

#[cfg(test)]
mod tests {
    extern crate std;
    use super::*;
    use std::{boxed::Box, vec::Vec};

    fn empty() -> Box<Seen> {
        let zeroed = Box::<Seen>::new_zeroed();
        // SAFETY: zeroed memory is an empty set.
        unsafe { zeroed.assume_init() }
    }

    #[test]
    fn an_id_is_new_once() {
        let mut seen = empty();
        assert_eq!([seen.insert(7, 1), seen.insert(7, 1), seen.insert(9, 1)], [true, false, true]);
    }

    #[test]
    fn an_id_is_new_again_when_the_recorder_lost_it_or_it_was_not_written() {
        let mut seen = empty();
        seen.insert(7, 1);
        assert!(seen.insert(7, 3));
        seen.remove(7);
        assert!(seen.insert(7, 3));
    }

    #[test]
    fn an_id_that_was_taken_out_is_new_although_it_is_the_one_expected_next() {
        let mut seen = empty();
        for id in [1, 3, 5, 1, 3] {
            seen.insert(id, 1);
        }
        // All after 5 were met before in this order, so a new 7 must not be taken for what came then.
        assert!(seen.insert(7, 1));
        seen.remove(7);
        for id in [1, 3] {
            assert!(!seen.insert(id, 1), "{id}");
        }
        assert!(seen.insert(7, 1));
    }

    #[test]
    fn an_id_is_known_if_and_only_if_it_was_put_in_before_in_any_order() {
        let mut seen = empty();
        let mut known = std::collections::HashSet::new();
        let mut state = 1_u64;
        for step in 0..200_000_u64 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Steps that repeat, now and then something else.
            let number = if state >> 60 == 0 { state >> 32 & 1023 } else { step % 700 };
            let id = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
            let is_new = seen.insert(id, 2 * (step / 50_000) as u32 + 1);
            if step % 50_000 == 0 {
                known.clear();
            }
            assert_eq!(is_new, known.insert(id), "step {step}");
            if is_new && state >> 40 & 7 == 0 {
                seen.remove(id);
                known.remove(&id);
            }
        }
    }

    #[test]
    fn two_thousand_ids_rarely_push_each_other_out() {
        let mut seen = empty();
        let ids: Vec<u64> = (1..=2000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).collect();
        for id in &ids {
            seen.insert(*id, 1);
        }
        let n_new = ids.iter().filter(|id| seen.insert(**id, 1)).count();
        assert!(n_new < 20, "{n_new} of 2000 were forgotten");
    }
}
