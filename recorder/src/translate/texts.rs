//! Texts that records name: of marks, of compiled programs, of errors.

use crate::item::Item;
use gputrace_schemas::event::TextId;
use std::collections::HashMap;

/// Texts that a trace keeps: a program that gives every mark a name of its own (`emit_nvtx` does) fills no memory.
const MOST_TEXTS: usize = 1 << 18;

/// Texts by the shim's id; empty ones were not defined yet.
#[derive(Default)]
pub(super) struct Texts(HashMap<u64, (TextId, String)>);

impl Texts {
    pub(super) fn define(&mut self, id: u64, text: String, items: &mut Vec<Item>) {
        let number = self.id(id);
        // Each thread sends a text once, so several threads send it several times.
        if let Some((_, known)) = self.0.get_mut(&id).filter(|(_, known)| known.is_empty()) {
            known.clone_from(&text);
            items.push(Item::Text(number, text));
        }
    }

    /// Its number, which may come before its definition; 0 for none, and where there are too many.
    pub(super) fn id(&mut self, id: u64) -> TextId {
        if id == 0 || (self.are_full() && !self.0.contains_key(&id)) {
            return TextId(0);
        }
        let next = TextId(self.0.len() as u32 + 1);
        self.0.entry(id).or_insert_with(|| (next, String::new())).0
    }

    /// What it says, as far as that is known.
    pub(super) fn get(&self, id: u64) -> Option<&str> {
        self.0.get(&id).map(|(_, text)| text.as_str())
    }

    /// Whether there were more texts than are kept: marks have lost their names.
    pub(super) fn are_full(&self) -> bool {
        self.0.len() >= MOST_TEXTS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_several_threads_send_is_written_once() {
        let (mut texts, mut items) = (Texts::default(), Vec::new());
        assert_eq!(texts.id(7), TextId(1), "named before its definition");
        for _ in 0..2 {
            texts.define(7, "step".to_owned(), &mut items);
        }
        assert!(matches!(items.as_slice(), [Item::Text(TextId(1), text)] if text == "step"));
    }

    #[test]
    fn of_too_many_texts_the_first_keep_their_numbers() {
        let mut texts = Texts::default();
        for id in 1..=MOST_TEXTS as u64 {
            texts.id(id);
        }
        assert!(texts.are_full());
        assert_eq!([texts.id(1), texts.id(MOST_TEXTS as u64 + 1)], [TextId(1), TextId(0)]);
    }
}
