//! Frames of stacks: addresses and places in Python code, and what is learned of them later.

use super::modules::Modules;
use crate::decode::Code;
use crate::item::Item;
use crate::python_lines::line_at;
use crate::symbols::{self, Resolved};
use gputrace_schemas::event::{Frame, FrameId};
use std::collections::{HashMap, HashSet};

/// All frames by number, and the numbers of addresses and of places.
#[derive(Default)]
pub(super) struct Frames {
    known: Vec<Frame>,
    natives: HashMap<u64, FrameId>,
    /// By code object and instruction.
    pythons: HashMap<(u64, u64), FrameId>,
    codes: HashMap<u64, Code>,
    /// Addresses whose functions are known, or cannot be.
    resolved: HashSet<u64>,
    /// The frames that stand before a frame because they were inlined into it.
    inlined: HashMap<FrameId, Vec<FrameId>>,
}

impl Frames {
    pub(super) fn native(&mut self, address: u64, modules: &Modules, items: &mut Vec<Item>) -> FrameId {
        if let Some(id) = self.natives.get(&address) {
            return *id;
        }
        let module = modules.at(address);
        let (function, file) = (String::new(), String::new());
        let id = self.add(Frame::Native { address, module, function, file, line: 0, inlined: false }, items);
        self.natives.insert(address, id);
        id
    }

    pub(super) fn python(&mut self, code: u64, instruction: u64, items: &mut Vec<Item>) -> FrameId {
        if let Some(id) = self.pythons.get(&(code, instruction)) {
            return *id;
        }
        let id = self.add(python_frame(self.codes.get(&code), instruction), items);
        self.pythons.insert((code, instruction), id);
        id
    }

    pub(super) fn add(&mut self, frame: Frame, items: &mut Vec<Item>) -> FrameId {
        let id = FrameId(self.known.len() as u32);
        items.push(Item::Frame(id, frame.clone()));
        self.known.push(frame);
        id
    }

    fn redefine(&mut self, id: FrameId, frame: Frame, items: &mut Vec<Item>) {
        if let Some(known) = self.known.get_mut(id.0 as usize).filter(|known| **known != frame) {
            known.clone_from(&frame);
            items.push(Item::Frame(id, frame));
        }
    }

    /// A code object of Python.
    pub(super) fn code(&mut self, code: Code, items: &mut Vec<Item>) {
        if self.codes.contains_key(&code.id) {
            return;
        }
        // Frames of it that came first, from a thread whose own copy was lost.
        let early = self.pythons.iter().filter(|((of, _), _)| *of == code.id);
        let early: Vec<(FrameId, u64)> = early.map(|((_, instruction), id)| (*id, *instruction)).collect();
        for (id, instruction) in early {
            self.redefine(id, python_frame(Some(&code), instruction), items);
        }
        self.codes.insert(code.id, code);
    }

    /// Those addresses of some frames whose functions were not looked for yet.
    pub(super) fn unresolved<'a>(&self, frames: impl Iterator<Item = &'a FrameId>) -> Vec<u64> {
        let address = |id: &FrameId| match self.known.get(id.0 as usize)? {
            Frame::Native { address, .. } => Some(*address),
            Frame::Python { .. } => None,
        };
        let mut wanted: Vec<u64> = frames.filter_map(address).collect();
        wanted.sort_unstable();
        wanted.dedup();
        wanted.retain(|address| !self.resolved.contains(address));
        wanted
    }

    /// An address was looked up: its frame becomes the outermost function, after those that were inlined into it.
    pub(super) fn resolved(&mut self, resolved: Resolved, items: &mut Vec<Item>) {
        let address = resolved.0;
        self.resolved.insert(address);
        let Some(id) = self.natives.get(&address).copied() else { return };
        let Some((outermost, inner)) = symbols::frames(resolved) else { return };
        self.redefine(id, outermost, items);
        let inner: Vec<FrameId> = inner.into_iter().map(|frame| self.add(frame, items)).collect();
        if !inner.is_empty() {
            self.inlined.insert(id, inner);
        }
    }

    /// The frames of a stack with those that were inlined into them.
    pub(super) fn unfold(&self, frames: &[FrameId]) -> Vec<FrameId> {
        symbols::unfold(frames, &self.inlined)
    }
}

/// A Python frame; the file and line are unknown where the code object is.
fn python_frame(code: Option<&Code>, instruction: u64) -> Frame {
    match code {
        Some(code) => Frame::Python {
            function: code.name.clone(),
            file: code.file.clone(),
            // The low half is the offset in bytes, the high half holds marks.
            line: line_at(code.python, &code.lines, code.first_line, instruction as i32).unwrap_or(0),
        },
        None => Frame::Python { function: String::new(), file: String::new(), line: 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line::Line;

    fn functions(items: &[Item]) -> Vec<(u32, &str)> {
        let of = |item| match item {
            &Item::Frame(id, Frame::Native { ref function, .. } | Frame::Python { ref function, .. }) => {
                Some((id.0, function.as_str()))
            }
            _ => None,
        };
        items.iter().filter_map(of).collect()
    }

    #[test]
    fn a_frame_that_came_before_its_code_is_written_again() {
        let (mut frames, mut items) = (Frames::default(), Vec::new());
        frames.python(3, 0, &mut items);
        let (name, file) = ("f".to_owned(), "a.py".to_owned());
        frames.code(Code { id: 3, name, file, lines: Vec::new(), first_line: 1, python: 0x30c }, &mut items);
        frames.python(3, 0, &mut items);
        assert_eq!(functions(&items), [(0, ""), (0, "f")]);
    }

    #[test]
    fn an_inlined_function_gets_a_frame_before_its_callers() {
        let (mut frames, mut items) = (Frames::default(), Vec::new());
        let id = frames.native(0x10, &Modules::default(), &mut items);
        assert_eq!(frames.unresolved([id].iter()), [0x10]);
        let line = |function: &str| Line { function: function.to_owned(), ..Line::default() };
        frames.resolved((0x10, None, vec![line("inner"), line("outer")]), &mut items);
        assert_eq!(functions(&items), [(0, ""), (0, "outer"), (1, "inner")]);
        assert_eq!(frames.unfold(&[id]), [FrameId(1), id]);
        assert_eq!(frames.unresolved([id].iter()), [0; 0]);
    }
}
