//! The whole state of a replay, as numbers of which equal ones mean equal futures.

/// What later decisions read, written down by all parts of a replay in one order. Two replays that wrote the same do the same with the same
/// requests.
///
/// What only names something is left out, and what only counts or rises. Where an order decides and not a number, as with numbers of blocks,
/// the place in that order is written; where a distance decides, as with ages, the distance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    words: Vec<u64>,
}

impl State {
    /// Writes a number.
    #[inline]
    pub fn put(&mut self, word: u64) {
        self.words.push(word);
    }

    /// Writes some, with how many they are.
    pub fn put_all(&mut self, words: impl IntoIterator<Item = u64>) {
        let at = self.words.len();
        self.words.push(0);
        self.words.extend(words);
        self.words[at] = (self.words.len() - at - 1) as u64;
    }

    /// How many ops could have been simulated meanwhile, with much to spare: a word takes 4 ns to write and compare, and an op 120.
    pub(crate) fn cost(&self) -> usize {
        self.words.len() / 8
    }

    /// Writes an amount that may be none.
    pub fn put_option(&mut self, amount: Option<u64>) {
        self.put(u64::from(amount.is_some()));
        self.put(amount.unwrap_or(0));
    }
}
