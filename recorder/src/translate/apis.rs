//! Functions that were called.

use crate::item::Item;
use gputrace_schemas::event::{Api, ApiId};
use std::collections::HashMap;

/// Functions by their number in the hook table.
#[derive(Default)]
pub(super) struct Apis(HashMap<u64, (ApiId, Api)>);

impl Apis {
    pub(super) fn define(&mut self, number: u64, api: Api, items: &mut Vec<Item>) {
        let id = self.id(number);
        if let Some((_, known)) = self.0.get_mut(&number).filter(|(_, known)| *known != api) {
            known.clone_from(&api);
            items.push(Item::Api(id, api));
        }
    }

    pub(super) fn id(&mut self, number: u64) -> ApiId {
        let next = ApiId(self.0.len() as u32);
        self.0.entry(number).or_insert_with(|| (next, Api::default())).0
    }
}
