//! Stacks of PyTorch's backward pass: their frames are those of another stack, and they name the forward operation and the caller.

use super::stacks::Stacks;
use crate::autograd::{Autograd, Context, RELEASES};
use crate::item::Item;
use crate::line::demangle;
use gputrace_schemas::event::{Backward, StackId};
use std::collections::HashMap;

/// What autograd does, and the stacks that came of it.
#[derive(Default)]
pub(super) struct Backwards {
    pub(super) autograd: Autograd,
    /// By the ring's id of the stack that has the frames.
    stacks: HashMap<(u64, Context), StackId>,
}

impl Backwards {
    /// The release of PyTorch, which decides what can be read of its backward pass. Returns a note where that is nothing.
    pub(super) fn release(&mut self, version: &str) -> Option<String> {
        self.autograd.release(version);
        let (first, last) = (RELEASES.start(), RELEASES.end());
        let known = format!("{}.{} to {}.{}", first.0, first.1, last.0, last.1);
        let note = format!("torch.backward=unseen: PyTorch {version} is none of {known}");
        self.autograd.is_other_release().then_some(note)
    }

    /// The stack of an event in this context.
    pub(super) fn id(
        &mut self,
        id: u64,
        context: Context,
        stacks: &mut Stacks,
        items: &mut Vec<Item>,
    ) -> StackId {
        if context == Context::default() {
            return stacks.id(id);
        }
        let key = (id, context);
        if let Some(known) = self.stacks.get(&key) {
            return *known;
        }
        for part in [key.0, key.1.forward, key.1.caller] {
            stacks.id(part);
        }
        let stack = stacks.new_id();
        self.write(stack, &key, stacks, items);
        self.stacks.insert(key, stack);
        stack
    }

    /// A stack was defined, perhaps after what names it: another thread's copy of the definition.
    pub(super) fn defined(&self, id: u64, stacks: &mut Stacks, items: &mut Vec<Item>) {
        for (key, stack) in self.stacks.iter().filter(|((of, _), _)| *of == id) {
            self.write(*stack, key, stacks, items);
        }
    }

    /// Stacks were written again.
    pub(super) fn unfold(&self, stacks: &mut Stacks, items: &mut Vec<Item>) {
        for (key, stack) in &self.stacks {
            if stacks.is_unfolded(key.0) {
                self.write(*stack, key, stacks, items);
            }
        }
    }

    fn write(
        &self,
        stack: StackId,
        (id, context): &(u64, Context),
        stacks: &mut Stacks,
        items: &mut Vec<Item>,
    ) {
        let mut written = stacks.written(*id).cloned().unwrap_or_default();
        written.backward = Some(Box::new(Backward {
            node: class_name(self.autograd.class_name(context.class)),
            forward: stacks.id(context.forward),
            caller: stacks.id(context.caller),
            is_caller_inferred: context.is_caller_inferred,
        }));
        items.push(Item::Stack(stack, written));
    }
}

/// `torch::autograd::generated::AddmmBackward0` of a class's mangled name.
fn class_name(mangled: &str) -> String {
    if mangled.is_empty() { String::new() } else { demangle(&format!("_Z{mangled}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::translate::frames::Frames;
    use crate::translate::modules::Modules;
    use crate::translate::stacks::Definition;

    #[test]
    fn a_stack_whose_definition_comes_later_gets_its_frames_then() {
        let (mut backwards, mut stacks, mut items) = (Backwards::default(), Stacks::default(), Vec::new());
        let context = Context { class: 0, forward: 3, caller: 0, is_caller_inferred: false };
        let id = backwards.id(5, context.clone(), &mut stacks, &mut items);
        assert_eq!(backwards.id(5, context, &mut stacks, &mut items), id, "the same again");
        let definition = Definition { id: 5, native: &[0x10], python: &[], truncated: false };
        stacks.define(&definition, &mut Frames::default(), &Modules::default(), &mut items);
        backwards.defined(5, &mut stacks, &mut items);
        let frames = items.iter().filter_map(|item| match item {
            Item::Stack(of, stack) if *of == id => Some(stack.frames.len()),
            _ => None,
        });
        assert_eq!(frames.collect::<Vec<_>>(), [0, 1]);
    }
}
