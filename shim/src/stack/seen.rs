//! Ids whose definitions a thread has sent: a cache, so forgetting one only costs sending it again.

/// Sets of eight ids, one cache line each: 8,192 ids, 64 KiB a thread. A set that overflows forgets one of its ids;
/// with 2,000 live ids that happens to one in ten thousand (Poisson, mean 2 a set, more than 8).
const SETS: usize = 1024;
const WAYS: usize = 8;

/// A set of ids. Zeroed memory is an empty one.
#[repr(C, align(64))]
pub(crate) struct Seen {
    ids: [[u64; WAYS]; SETS],
    /// What the recorder has lost so far; ids sent before do not count.
    definitions: u32,
    /// Which way of a full set gives way next.
    next: u32,
}

impl Seen {
    /// Whether `id` was missing; then it is in.
    #[inline]
    pub(crate) fn insert(&mut self, id: u64, definitions: u32) -> bool {
        if definitions != self.definitions {
            self.ids.fill([0; WAYS]);
            self.definitions = definitions;
        }
        let Some(set) = self.ids.get_mut(set_of(id)) else { return true };
        if set.contains(&id) {
            return false;
        }
        let way = set.iter().position(|known| *known == 0).unwrap_or((self.next as usize) % WAYS);
        self.next = self.next.wrapping_add(1);
        if let Some(slot) = set.get_mut(way) {
            *slot = id;
        }
        true
    }

    /// Takes `id` out.
    pub(crate) fn remove(&mut self, id: u64) {
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
        assert_eq!([seen.insert(7, 0), seen.insert(7, 0), seen.insert(9, 0)], [true, false, true]);
    }

    #[test]
    fn an_id_is_new_again_when_the_recorder_lost_it_or_it_was_not_written() {
        let mut seen = empty();
        seen.insert(7, 0);
        assert!(seen.insert(7, 1));
        seen.remove(7);
        assert!(seen.insert(7, 1));
    }

    #[test]
    fn two_thousand_ids_rarely_push_each_other_out() {
        let mut seen = empty();
        let ids: Vec<u64> = (1..=2000u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).collect();
        for id in &ids {
            seen.insert(*id, 0);
        }
        let n_new = ids.iter().filter(|id| seen.insert(**id, 0)).count();
        assert!(n_new < 20, "{n_new} of 2000 were forgotten");
    }
}
