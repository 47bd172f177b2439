//! Stacks of calls, each once, and the one line of a stack to show.

use std::sync::Arc;

/// Index into [`Stacks::lists`]; [`StackId::NONE`] where no stack was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StackId(pub u32);

impl StackId {
    /// No stack was recorded.
    pub const NONE: StackId = StackId(u32::MAX);
}

/// A line of a stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Function.
    pub name: Arc<str>,
    /// Source file.
    pub file: Arc<str>,
    /// Line, from 1; 0 where unknown.
    pub line: u32,
}

/// All stacks of a trace, each once.
#[derive(Clone, Debug, Default)]
pub struct Stacks {
    /// All frames.
    pub frames: Vec<Frame>,
    /// All stacks, innermost frame first: indices into `frames`.
    pub lists: Vec<Box<[u32]>>,
}

impl Stacks {
    /// The frames of a stack, innermost first.
    pub fn frames_of(&self, stack: StackId) -> impl Iterator<Item = &Frame> {
        let list = self.lists.get(stack.0 as usize).map_or(&[][..], |list| list);
        list.iter().filter_map(|frame| self.frames.get(*frame as usize))
    }

    /// The line to show for a stack: the innermost of the user's Python, else of any Python, else the innermost.
    pub fn site(&self, stack: StackId) -> Option<&Frame> {
        let is_python = |frame: &&Frame| frame.file.ends_with(".py") || frame.file.starts_with('<');
        let frames = || self.frames_of(stack);
        let own = frames().filter(is_python).find(|frame| python_package(&frame.file).is_none());
        own.or_else(|| frames().find(is_python)).or_else(|| frames().next())
    }
}

/// The Python file came with an installed package or with the interpreter; gives the package's name.
#[must_use]
pub fn python_package(file: &str) -> Option<&str> {
    for folder in ["/site-packages/", "/dist-packages/"] {
        if let Some((_, inside)) = file.rsplit_once(folder) {
            return inside.split('/').next().map(|package| package.trim_end_matches(".py"));
        }
    }
    let standard = file.starts_with('<') || file.contains("/lib/python3.");
    standard.then_some("Python")
}
