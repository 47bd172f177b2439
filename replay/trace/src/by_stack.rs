//! Something for each stack, found without hashing: traces number their stacks from 1 on.

use gputrace_schemas::event::StackId;
use rustc_hash::FxHashMap;

/// Larger numbers than this are hashed: a damaged trace may name any.
const MOST_DENSE: u32 = 1 << 20;

/// A table by stack.
#[derive(Clone, Debug)]
pub struct ByStack<T> {
    dense: Vec<Option<T>>,
    others: FxHashMap<StackId, T>,
}

impl<T> Default for ByStack<T> {
    fn default() -> ByStack<T> {
        ByStack { dense: vec![], others: FxHashMap::default() }
    }
}

impl<T> ByStack<T> {
    /// The value of a stack.
    #[inline]
    #[must_use]
    pub fn get(&self, stack: StackId) -> Option<&T> {
        match self.dense.get(stack.0 as usize) {
            Some(known) => known.as_ref(),
            None => self.others.get(&stack),
        }
    }

    /// Makes something known of a stack.
    pub fn insert(&mut self, stack: StackId, value: T) {
        if stack.0 >= MOST_DENSE {
            self.others.insert(stack, value);
            return;
        }
        let at = stack.0 as usize;
        if at >= self.dense.len() {
            self.dense.resize_with(at + 1, || None);
        }
        self.dense[at] = Some(value);
    }

    /// All stacks of which something is known; those with small numbers first, ascending.
    pub fn iter(&self) -> impl Iterator<Item = (StackId, &T)> {
        let dense = (0..).zip(&self.dense).filter_map(|(id, known)| Some((StackId(id), known.as_ref()?)));
        dense.chain(self.others.iter().map(|(id, known)| (*id, known)))
    }
}

impl<T: Copy> ByStack<T> {
    /// The value of a stack, found out now if needed.
    #[inline]
    pub fn get_or(&mut self, stack: StackId, find: impl FnOnce() -> T) -> T {
        if let Some(known) = self.get(stack) {
            return *known;
        }
        let found = find();
        self.insert(stack, found);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_numbers_are_found() {
        let mut table = ByStack::default();
        let ids = [0, 7, MOST_DENSE - 1, MOST_DENSE, u32::MAX].map(StackId);
        for id in ids {
            assert_eq!(table.get(id), None);
            assert_eq!(table.get_or(id, || id.0), id.0);
            assert_eq!(table.get_or(id, || unreachable!()), id.0);
        }
        assert_eq!(table.get(StackId(8)), None);
        let all: Vec<StackId> = table.iter().map(|(id, _)| id).collect();
        assert_eq!((all.len(), &all[..3]), (5, &ids[..3]));
    }
}
