//! Values that stand for themselves by number.

use std::hash::Hash;

use rustc_hash::FxHashMap;

/// Values, each once, in the order of their first appearance.
#[derive(Debug)]
pub struct Interned<T> {
    /// The values, by number.
    pub values: Vec<T>,
    ids: FxHashMap<T, u32>,
}

impl<T> Default for Interned<T> {
    fn default() -> Interned<T> {
        Interned { values: vec![], ids: FxHashMap::default() }
    }
}

impl<T: Clone + Eq + Hash> Interned<T> {
    /// The index of a value.
    pub fn id(&mut self, value: T) -> u32 {
        *self.ids.entry(value).or_insert_with_key(|value| {
            self.values.push(value.clone());
            u32::try_from(self.values.len() - 1).expect("fewer than stacks, whose ids are 32 bits")
        })
    }
}
