//! The stacks that ops name, each once.

use std::collections::HashMap;
use std::sync::Arc;

use gputrace_schemas::event::{Frame as TraceFrame, StackId as TraceStackId};
use gputrace_sim::ops::{Frame, StackId, Stacks};
use rustc_hash::FxHashMap;

use crate::Definitions;
use crate::backward::place;

/// The stacks that ops name, each once.
#[derive(Default)]
pub(super) struct StackTable {
    pub(super) stacks: Stacks,
    known: FxHashMap<TraceStackId, StackId>,
    frames: FxHashMap<u32, u32>,
    words: HashMap<String, Arc<str>>,
}

impl StackTable {
    pub(super) fn id(&mut self, definitions: &dyn Definitions, stack: TraceStackId) -> StackId {
        if let Some(known) = self.known.get(&stack) {
            return *known;
        }
        let Some(listed) = definitions.stack(stack) else { return StackId::NONE };
        let node = listed.backward.as_deref().map_or("", |backward| backward.short_node());
        let node = (!node.is_empty()).then(|| self.word(node));
        let listed = place(definitions, listed).stack;
        let mut list = Vec::with_capacity(listed.frames.len());
        for id in &listed.frames {
            if let Some(known) = self.frames.get(&id.0) {
                list.push(*known);
                continue;
            }
            let Some(frame) = definitions.frame(*id) else { continue };
            let frame = self.frame(definitions, frame);
            self.stacks.frames.push(frame);
            let index = self.stacks.frames.len() as u32 - 1;
            self.frames.insert(id.0, index);
            list.push(index);
        }
        self.stacks.lists.push(list.into());
        let id = StackId(self.stacks.lists.len() as u32 - 1);
        self.stacks.nodes.extend(node.map(|node| (id, node)));
        self.known.insert(stack, id);
        id
    }

    fn frame(&mut self, definitions: &dyn Definitions, frame: &TraceFrame) -> Frame {
        match frame {
            TraceFrame::Python { function, file, line } => {
                Frame { name: self.word(function), file: self.word(file), line: *line }
            }
            TraceFrame::Native { address, module, function, file, line, .. } => {
                let module = module.and_then(|id| definitions.module(id));
                let path = module.map_or("", |module| &module.path);
                let name = if function.is_empty() { format!("{address:#x}") } else { function.clone() };
                let file = if file.is_empty() { path } else { file };
                Frame { name: self.word(&name), file: self.word(file), line: *line }
            }
        }
    }

    fn word(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.words.get(text) {
            return known.clone();
        }
        let word: Arc<str> = text.into();
        self.words.insert(text.to_owned(), word.clone());
        word
    }
}
