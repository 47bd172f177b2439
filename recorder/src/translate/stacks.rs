//! Call stacks.

use super::frames::Frames;
use super::modules::Modules;
use crate::item::Item;
use crate::merge_stack::{MergedFrame, merge_stack};
use gputrace_ring::record::StackDef;
use gputrace_schemas::event::{FrameId, Stack, StackId};
use std::collections::HashMap;

/// Stacks by the id of the ring.
#[derive(Default)]
pub(super) struct Stacks {
    known: HashMap<u64, Known>,
    n_stacks: u32,
    n_collisions: u64,
}

struct Known {
    id: StackId,
    /// Without functions that were inlined: their names come later.
    stack: Option<Stack>,
    /// As it was written last, if that is different.
    shown: Option<Stack>,
    used: bool,
}

/// A stack as the ring defines it.
pub(super) struct Definition<'a> {
    pub(super) id: u64,
    pub(super) native: &'a [u64],
    /// Code objects and instructions.
    pub(super) python: &'a [(u64, u64)],
    pub(super) truncated: bool,
}

impl Stacks {
    /// Whether the definition is new.
    pub(super) fn define(
        &mut self,
        definition: &Definition<'_>,
        frames: &mut Frames,
        modules: &Modules,
        items: &mut Vec<Item>,
    ) -> bool {
        let Definition { id, native, python, truncated } = *definition;
        let is_entry: Vec<bool> = python.iter().map(|(_, place)| place & StackDef::ENTRY != 0).collect();
        // Our own frames stand between a program and the library whose functions we wrap.
        let is_ours = |word: &u64| modules.is_ours(word & !StackDef::INTERPRETER);
        let native: Vec<u64> = native.iter().copied().filter(|word| !is_ours(word)).collect();
        let merged = merge_stack(&native, &is_entry).into_iter().filter_map(|frame| match frame {
            MergedFrame::Native(at) => {
                Some(frames.native(native.get(at)? & !StackDef::INTERPRETER, modules, items))
            }
            MergedFrame::Python(at) => {
                python.get(at).map(|(code, place)| frames.python(*code, *place, items))
            }
        });
        let stack = Stack { frames: merged.collect(), truncated, backward: None };
        let known = self.known(id);
        match &known.stack {
            // Each thread sends a stack once, so several threads send it several times.
            Some(other) => {
                self.n_collisions += u64::from(*other != stack);
                false
            }
            None => {
                known.stack = Some(stack.clone());
                items.push(Item::Stack(known.id, stack));
                true
            }
        }
    }

    fn known(&mut self, id: u64) -> &mut Known {
        let n_stacks = &mut self.n_stacks;
        self.known.entry(id).or_insert_with(|| {
            *n_stacks += 1;
            Known { id: StackId(*n_stacks), stack: None, shown: None, used: false }
        })
    }

    /// The number of a stack that an event names.
    pub(super) fn id(&mut self, id: u64) -> StackId {
        if id == 0 || id == StackDef::EMPTY {
            return StackId(0);
        }
        // Its definition was lost, or another thread's copy is on its way.
        let known = self.known(id);
        known.used = true;
        known.id
    }

    /// The number of a stack that the ring does not have.
    pub(super) fn new_id(&mut self) -> StackId {
        self.n_stacks += 1;
        StackId(self.n_stacks)
    }

    /// A stack as it was written last.
    pub(super) fn written(&self, id: u64) -> Option<&Stack> {
        self.known.get(&id).and_then(|known| known.shown.as_ref().or(known.stack.as_ref()))
    }

    /// Whether a stack was written again, with functions that were inlined.
    pub(super) fn is_unfolded(&self, id: u64) -> bool {
        self.known.get(&id).is_some_and(|known| known.shown.is_some())
    }

    /// Stacks that had the same 64-bit id and other frames.
    pub(super) fn n_collisions(&self) -> u64 {
        self.n_collisions
    }

    /// The frames of stacks that events name.
    pub(super) fn used_frames(&self) -> impl Iterator<Item = &FrameId> {
        let used = self.known.values().filter(|known| known.used);
        used.flat_map(|known| known.stack.iter().flat_map(|stack| &stack.frames))
    }

    /// Writes the stacks again in which functions were inlined: these have frames of their own.
    pub(super) fn unfold(&mut self, frames: &Frames, items: &mut Vec<Item>) {
        for known in self.known.values_mut().filter(|known| known.used) {
            let Some(stack) = &known.stack else { continue };
            let frames = frames.unfold(&stack.frames);
            let stack = Stack { frames, truncated: stack.truncated, backward: None };
            if known.shown.as_ref().or(known.stack.as_ref()) != Some(&stack) {
                items.push(Item::Stack(known.id, stack.clone()));
                known.shown = Some(stack);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::Code;
    use gputrace_schemas::event::{Frame, Module};

    fn defined(stacks: &mut Stacks, native: &[u64], python: &[(u64, u64)]) -> Vec<String> {
        let (mut frames, mut modules, mut items) = (Frames::default(), Modules::default(), Vec::new());
        let (path, start, end) = ("/opt/libgputrace.so".to_owned(), 0x1000, 0x2000);
        modules.add(vec![Module { path, start, end, ..Module::default() }], &mut items);
        for (id, name) in [(1, "f"), (2, "g")] {
            let (name, file) = (name.to_owned(), "a.py".to_owned());
            let code = Code { id, name, file, lines: Vec::new(), first_line: 1, python: 0x30c };
            frames.code(code, &mut items);
        }
        let definition = Definition { id: 5, native, python, truncated: false };
        stacks.define(&definition, &mut frames, &modules, &mut items);
        let name = |item: &Item| match item {
            Item::Frame(_, Frame::Native { address, .. }) => Some(format!("{address:#x}")),
            Item::Frame(_, Frame::Python { function, .. }) => Some(function.clone()),
            _ => None,
        };
        items.iter().filter_map(name).collect()
    }

    #[test]
    fn python_frames_stand_where_the_interpreter_ran_them() {
        let native = [0x10, 0x20 | StackDef::INTERPRETER, 0x30];
        let python = [(1, 0), (2, StackDef::ENTRY)];
        let frames = defined(&mut Stacks::default(), &native, &python);
        assert_eq!(frames, ["0x10", "f", "g", "0x30"]);
    }

    #[test]
    fn our_own_frames_are_left_out() {
        assert_eq!(defined(&mut Stacks::default(), &[0x10, 0x1800, 0x30], &[]), ["0x10", "0x30"]);
    }

    #[test]
    fn another_stack_of_the_same_id_is_counted_and_not_believed() {
        let mut stacks = Stacks::default();
        for native in [[0x10, 0x20], [0x10, 0x20], [0x10, 0x30]] {
            let (mut frames, mut items) = (Frames::default(), Vec::new());
            for (id, name) in [(1, "f"), (2, "g")] {
                let (name, file) = (name.to_owned(), "a.py".to_owned());
                let code = Code { id, name, file, lines: Vec::new(), first_line: 1, python: 0x30c };
                frames.code(code, &mut items);
            }
            let definition = Definition { id: 5, native: &native, python: &[], truncated: false };
            // Addresses get their numbers in the order in which they come.
            frames.native(0x10, &Modules::default(), &mut items);
            frames.native(0x20, &Modules::default(), &mut items);
            stacks.define(&definition, &mut frames, &Modules::default(), &mut items);
        }
        assert_eq!(stacks.n_collisions(), 1);
        assert_eq!(stacks.written(5).map(|stack| stack.frames.clone()), Some(vec![FrameId(0), FrameId(1)]));
    }
}
