//! Stacks of calls, each once, and the one line of a stack to show.

use std::sync::Arc;

use rustc_hash::FxHashMap;

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
    /// The autograd node of each stack of a backward pass, where it is known: `ConvolutionBackward0`.
    pub nodes: FxHashMap<StackId, Arc<str>>,
}

impl Stacks {
    /// The frames of a stack, innermost first.
    pub fn frames_of(&self, stack: StackId) -> impl Iterator<Item = &Frame> {
        let list = self.lists.get(stack.0 as usize).map_or(&[][..], |list| list);
        list.iter().filter_map(|frame| self.frames.get(*frame as usize))
    }

    /// For each stack, whether it has such a frame; each frame is looked at once.
    pub fn having(&self, is_such: impl Fn(&Frame) -> bool) -> Vec<bool> {
        let is_such: Vec<bool> = self.frames.iter().map(is_such).collect();
        let has = |list: &[u32]| list.iter().any(|frame| is_such.get(*frame as usize) == Some(&true));
        self.lists.iter().map(|list| has(list)).collect()
    }

    /// The line to show for a stack: the innermost of the user's Python, else of any Python, else the innermost.
    pub fn site(&self, stack: StackId) -> Option<&Frame> {
        let is_python = |frame: &&Frame| frame.file.ends_with(".py") || frame.file.starts_with('<');
        let frames = || self.frames_of(stack);
        let own = frames().filter(is_python).find(|frame| python_package(&frame.file).is_none());
        own.or_else(|| frames().find(is_python)).or_else(|| frames().next())
    }
}

/// Frameworks that people also have outside of `site-packages` (`pip install --target`, `pip install -e`, images that build them), by what
/// lies in their folders: torch 2.4 to 2.15, jax 0.4 to 0.9, CuPy 13 and 14. Names that a program's own folder could have are left out.
const FRAMEWORKS: &[(&str, &[&str])] = &[
    (
        "torch",
        &[
            "nn/",
            "optim/",
            "autograd/",
            "cuda/",
            "amp/",
            "ao/",
            "accelerator/",
            "distributed/",
            "fx/",
            "_dynamo/",
            "_inductor/",
            "_functorch/",
            "_higher_order_ops/",
            "_library/",
            "_subclasses/",
            "_ops.py",
            "_tensor.py",
            "_compile.py",
            "_utils.py",
            "storage.py",
            "functional.py",
            "serialization.py",
            "utils/_",
            "utils/checkpoint.py",
            "utils/data/",
        ],
    ),
    ("jax", &["_src/"]),
    ("jaxlib", &[""]),
    ("cupy", &["_", "cuda/", "linalg/", "random/"]),
];

/// The Python file came with an installed package or with the interpreter; gives the package's name.
#[must_use]
pub fn python_package(file: &str) -> Option<&str> {
    for folder in ["/site-packages/", "/dist-packages/"] {
        if let Some((_, inside)) = file.rsplit_once(folder) {
            return inside.split('/').next().map(|package| package.trim_end_matches(".py"));
        }
    }
    for (package, inside) in FRAMEWORKS {
        let folders = file.match_indices(package).filter(|(at, _)| file[..*at].ends_with('/'));
        let mut rests = folders.filter_map(|(at, _)| file[at + package.len()..].strip_prefix('/'));
        if rests.any(|rest| inside.iter().any(|start| rest.starts_with(start))) {
            return Some(package);
        }
    }
    let standard = file.starts_with('<') || file.contains("/lib/python3.");
    standard.then_some("Python")
}

#[cfg(test)]
mod tests {
    use super::python_package;

    #[test]
    fn a_framework_is_no_program_wherever_it_lies() {
        for (file, package) in [
            ("/usr/lib/python3/dist-packages/torch/nn/modules/module.py", Some("torch")),
            ("/opt/libraries/torch/nn/modules/linear.py", Some("torch")),
            ("/opt/pytorch/pytorch/torch/_tensor.py", Some("torch")),
            ("/opt/pytorch/vision/torch/utils/_contextlib.py", Some("torch")),
            ("/opt/jax/jax/_src/pjit.py", Some("jax")),
            ("/usr/lib/python3.12/contextlib.py", Some("Python")),
            ("<frozen runpy>", Some("Python")),
            ("/job/torch/train.py", None),
            ("/job/torch/utils/batches.py", None),
            ("/job/mytorch/nn/layers.py", None),
            ("/job/nn/torch.py", None),
            ("train.py", None),
        ] {
            assert_eq!(python_package(file), package, "{file}");
        }
    }
}
