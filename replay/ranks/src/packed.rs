//! Calls, packed for a summary: what repeats is said once. A training loop makes the same calls again and again, so their kinds are
//! a few copies of what came before; when each began is kept to the nanosecond, as the time since the one before.

use gputrace_schemas::event::Nanos;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::calls::Sequence;

/// Calls that must repeat for a copy to be shorter than saying them.
const LEAST: usize = 4;

/// The calls of a [`Sequence`].
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Packed {
    /// Number of the first known call; left out where it is 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    first: u64,
    /// Two numbers each: 0 and a kind; or how many calls follow that are as those before, and how far before.
    kinds: Vec<(u32, u32)>,
    /// When the first began, and how much later each of the others.
    enters: Vec<i64>,
    /// Nanoseconds on the GPU of those that were measured, in their order.
    gpu: Vec<(u64, u64)>,
}

impl From<Sequence> for Packed {
    fn from(calls: Sequence) -> Packed {
        let mut before = 0;
        let enters = calls.enters.iter().map(|enter| {
            let later = enter.0.wrapping_sub(before) as i64;
            before = enter.0;
            later
        });
        let enters = enters.collect();
        let mut gpu: Vec<(u64, u64)> = calls.gpu.iter().map(|(call, time)| (*call, time.0)).collect();
        gpu.sort_unstable();
        Packed { first: calls.first, kinds: packed(&calls.kinds), enters, gpu }
    }
}

impl From<Packed> for Sequence {
    /// As many calls as both lists have.
    fn from(packed: Packed) -> Sequence {
        let mut kinds: Vec<u32> = vec![];
        for (length, what) in packed.kinds {
            let (length, back) = (length as usize, what as usize);
            if length == 0 {
                kinds.push(what);
            } else if back > 0 && back <= kinds.len() {
                for _ in 0..length.min(packed.enters.len().saturating_sub(kinds.len())) {
                    kinds.push(kinds[kinds.len() - back]);
                }
            }
        }
        let mut time = 0_u64;
        let enters = packed.enters.iter().map(|later| {
            time = time.wrapping_add(*later as u64);
            Nanos(time)
        });
        let mut enters: Vec<Nanos> = enters.collect();
        let n = kinds.len().min(enters.len());
        kinds.truncate(n);
        enters.truncate(n);
        let gpu = packed.gpu.into_iter().map(|(call, time)| (call, Nanos(time)));
        Sequence { first: packed.first, kinds, enters, gpu: gpu.collect() }
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// Copies of what came before, and what is new.
fn packed(kinds: &[u32]) -> Vec<(u32, u32)> {
    let mut seen: FxHashMap<&[u32], usize> = FxHashMap::default();
    let (mut packed, mut at) = (vec![], 0);
    while at < kinds.len() {
        let next = kinds.get(at..at + LEAST);
        let before = next.and_then(|next| seen.insert(next, at));
        let same = before.map_or(0, |before| {
            kinds[before..].iter().zip(&kinds[at..]).take_while(|(one, other)| one == other).count()
        });
        match (before, u32::try_from(same), before.map(|before| u32::try_from(at - before))) {
            (Some(_), Ok(length), Some(Ok(back))) if same >= LEAST => {
                packed.push((length, back));
                at += same;
            }
            _ => {
                packed.push((0, kinds[at]));
                at += 1;
            }
        }
    }
    packed
}

/// A map as pairs: keys that are no texts.
pub(super) mod pairs {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(crate) fn serialize<K: Serialize, V: Serialize, S: Serializer>(
        map: &BTreeMap<K, V>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(map)
    }

    pub(crate) fn deserialize<'de, K, V, D>(from: D) -> Result<BTreeMap<K, V>, D::Error>
    where
        K: Deserialize<'de> + Ord,
        V: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Ok(<Vec<(K, V)>>::deserialize(from)?.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn back_again(kinds: &[u32]) -> usize {
        let enters = (0..kinds.len() as u64).map(|n| Nanos((n * n) % 97 + n)).collect();
        let gpu = [(1, Nanos(5)), (7, Nanos(9))].into_iter().collect();
        let calls = Sequence { first: 12, kinds: kinds.to_vec(), enters, gpu };
        let packed = Packed::from(calls.clone());
        let n = packed.kinds.len();
        let again = Sequence::from(packed);
        assert_eq!((again.first, &again.kinds), (calls.first, &calls.kinds));
        assert_eq!((&again.enters, &again.gpu), (&calls.enters, &calls.gpu));
        n
    }

    #[test]
    fn a_loop_is_said_once_and_nothing_is_lost() {
        let step = [0, 1, 1, 2, 1, 1, 3, 3, 3, u32::MAX];
        let kinds: Vec<u32> = step.iter().copied().cycle().take(5000).collect();
        assert!(back_again(&kinds) < 20);
        assert!(back_again(&[7; 100]) < 6);
        assert_eq!(back_again(&(0..50).collect::<Vec<_>>()), 50);
        assert_eq!(back_again(&[]), 0);
    }

    #[test]
    fn what_is_no_copy_of_anything_is_left_out() {
        let kinds = vec![(5, 1), (0, 3), (2, 1), (3, 9)];
        let packed = Packed { first: 0, kinds, enters: vec![1, 2], gpu: vec![] };
        let calls = Sequence::from(packed);
        assert_eq!((calls.kinds, calls.enters), (vec![3, 3], vec![Nanos(1), Nanos(3)]));
    }
}
