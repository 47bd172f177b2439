//! Communicators, each as it was described last.

use crate::item::Item;
use gputrace_schemas::event::{CommConfig, CommId, Communicator};
use std::collections::HashMap;

/// Their names and those of their networks.
#[derive(Default)]
pub(super) struct Communicators(HashMap<CommId, (String, String)>);

impl Communicators {
    /// Names are sent once: when the rest is known, the program's structure is gone.
    pub(super) fn define(&mut self, id: CommId, mut communicator: Communicator, items: &mut Vec<Item>) {
        let CommConfig { name, net_name, .. } = &mut communicator.config;
        let (known, known_net) = self.0.entry(id).or_default();
        for (new, old) in [(name, known), (net_name, known_net)] {
            if new.is_empty() {
                new.clone_from(old);
            } else {
                old.clone_from(new);
            }
        }
        items.push(Item::Communicator(id, Box::new(communicator)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_was_sent_once_stays() {
        let (mut communicators, mut items) = (Communicators::default(), Vec::new());
        for name in ["tensor parallel", ""] {
            let mut described = Communicator::default();
            name.clone_into(&mut described.config.name);
            communicators.define(CommId(1), described, &mut items);
        }
        let names = items.iter().filter_map(|item| match item {
            Item::Communicator(_, communicator) => Some(communicator.config.name.as_str()),
            _ => None,
        });
        assert_eq!(names.collect::<Vec<_>>(), ["tensor parallel"; 2]);
    }
}
