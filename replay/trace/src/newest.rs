//! A table whose newest entry is mostly the one that is needed next: the device, or the thread, of the event before. Otherwise it is mostly
//! one of the first: a program allocates on one thread and frees on another.

use std::hash::Hash;

use rustc_hash::FxHashMap;

/// This many entries are compared before a key is hashed.
const FIRST: usize = 4;

/// Entries by key, in the order of their first use. Finding the one that was found last needs no hash.
#[derive(Clone, Debug)]
pub struct Newest<K, V> {
    entries: Vec<(K, V)>,
    places: FxHashMap<K, usize>,
    newest: usize,
}

impl<K, V> Default for Newest<K, V> {
    fn default() -> Newest<K, V> {
        Newest { entries: vec![], places: FxHashMap::default(), newest: 0 }
    }
}

impl<K: Copy + Eq + Hash, V> Newest<K, V> {
    #[inline]
    fn place(&self, key: K) -> Option<usize> {
        match self.entries.get(self.newest) {
            Some((newest, _)) if *newest == key => Some(self.newest),
            _ => self.other_place(key),
        }
    }

    fn other_place(&self, key: K) -> Option<usize> {
        let first = self.entries.iter().take(FIRST).position(|(other, _)| *other == key);
        first.or_else(|| if self.entries.len() > FIRST { self.places.get(&key).copied() } else { None })
    }

    /// The value of a key.
    #[inline]
    #[must_use]
    pub fn get(&self, key: K) -> Option<&V> {
        self.entries.get(self.place(key)?).map(|(_, value)| value)
    }

    /// The same, to change it.
    #[inline]
    pub fn get_mut(&mut self, key: K) -> Option<&mut V> {
        self.newest = self.place(key)?;
        self.entries.get_mut(self.newest).map(|(_, value)| value)
    }

    /// All entries, in the order of their first use.
    pub fn iter(&self) -> impl Iterator<Item = (K, &V)> {
        self.entries.iter().map(|(key, value)| (*key, value))
    }

    /// The same, to change them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (K, &mut V)> {
        self.entries.iter_mut().map(|(key, value)| (*key, value))
    }
}

impl<K: Copy + Eq + Hash, V: Default> Newest<K, V> {
    /// The value of a key, or a new value.
    #[inline]
    pub fn of(&mut self, key: K) -> &mut V {
        self.newest = match self.place(key) {
            Some(place) => place,
            None => self.add(key),
        };
        &mut self.entries[self.newest].1
    }

    #[cold]
    fn add(&mut self, key: K) -> usize {
        let place = self.entries.len();
        self.entries.push((key, V::default()));
        self.places.insert(key, place);
        place
    }
}

impl<K, V> IntoIterator for Newest<K, V> {
    type Item = (K, V);
    type IntoIter = std::vec::IntoIter<(K, V)>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_its_own_entry_whichever_was_found_last() {
        let mut table: Newest<i16, u64> = Newest::default();
        assert_eq!(table.get(0), None);
        assert_eq!(table.get_mut(0), None);
        for key in [3, 3, -1, 3, 0, -1, -1] {
            *table.of(key) += 1;
        }
        assert_eq!(table.get(7), None);
        assert_eq!([3, -1, 0, 7].map(|key| table.get(key).copied()), [Some(3), Some(3), Some(1), None]);
        *table.get_mut(0).expect("it is there") = 9;
        table.iter_mut().for_each(|(_, n)| *n += 1);
        assert_eq!(table.iter().map(|(key, n)| (key, *n)).collect::<Vec<_>>(), [(3, 4), (-1, 4), (0, 10)]);
        assert_eq!(table.into_iter().collect::<Vec<_>>(), [(3, 4), (-1, 4), (0, 10)]);
    }

    #[test]
    fn a_key_behind_the_first_ones_is_found() {
        let mut table: Newest<usize, usize> = Newest::default();
        for round in 0..3 {
            for key in 0..3 * FIRST {
                assert_eq!(table.get(key).copied(), (round > 0).then_some(round));
                *table.of(key) += 1;
            }
        }
        assert_eq!(
            table.iter().map(|(key, n)| (key, *n)).collect::<Vec<_>>(),
            (0..3 * FIRST).map(|key| (key, 3)).collect::<Vec<_>>()
        );
    }
}
