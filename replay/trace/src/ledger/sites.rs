//! Where events come from, as small numbers: owners, call sites and the names of functions.
//!
//! A trace has many stacks and few places in the program; books are kept by place, so that their size does not grow with
//! the trace.

use std::fmt;

use gputrace_schemas::event::{
    Action, ApiId, Backward, Call, Event, Frame, FrameId, HOST, Stack, StackId, ThreadId,
};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::phases::PhaseId;
use crate::Definitions;
use crate::backward::{place, python_line, python_lines};
use crate::by_stack::ByStack;
use crate::interned::Interned;
use crate::owners::{self, Owner};
use crate::preparing;

/// Index of an owner in [`Sites`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Deserialize, Serialize)]
pub struct OwnerId(pub u32);

/// Index of a call site in [`Sites`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SiteId(pub u32);

/// Index of a function's name in [`Sites`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NameId(pub u32);

/// A place in the program.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Deserialize, Serialize)]
pub struct Site {
    /// The owner that requested there.
    pub owner: OwnerId,
    /// Function; a file and offset where its name is not known; empty where there is no stack.
    pub function: String,
    /// Source file, empty if unknown.
    pub file: String,
    /// Line in it, 0 if unknown.
    pub line: u32,
    /// The innermost function of a library on the way, where it says more: `conv2d` under `train.py:12`.
    pub inside: String,
    /// What of PyTorch's backward pass it was: `backward of AddmmBackward0`, where the line is the forward operation's.
    pub mark: String,
}

impl fmt::Display for Site {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.function.is_empty(), self.file.is_empty()) {
            (true, true) => write!(to, "(no stack recorded)")?,
            (false, true) => write!(to, "{}", self.function)?,
            (_, false) if self.line > 0 => write!(to, "{} ({}:{})", self.function, self.file, self.line)?,
            (_, false) if self.function.starts_with(&self.file) => write!(to, "{}", self.function)?,
            (_, false) => write!(to, "{} ({})", self.function, self.file)?,
        }
        if !self.inside.is_empty() {
            write!(to, " in {}", self.inside)?;
        }
        if !self.mark.is_empty() {
            write!(to, " ({})", self.mark)?;
        }
        Ok(())
    }
}

/// What is known about one stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Origin {
    /// Who asked.
    pub(super) owner: OwnerId,
    /// From where.
    pub(super) site: SiteId,
    /// PyTorch's caching allocator asked.
    pub(super) torch: bool,
    /// A native frame says so; without one it is a guess.
    pub(super) native: bool,
    /// It asked through a CUDA runtime.
    pub(super) through_runtime: bool,
    /// JAX asked.
    pub(super) jax: bool,
    /// In which phase of the program; not known here.
    pub(super) phase: PhaseId,
    /// The program got ready there.
    pub(super) prepares: bool,
    /// The call of the model whose code asked.
    pub(super) model_call: Option<ModelCall>,
}

/// That the code of a model asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ModelCall {
    /// The line that called the outermost model on the stack, by its number: [`Sites::line`].
    pub caller: u32,
    /// The line of that model that it was in, as a number of the same kind.
    pub inside: u32,
    /// That model called no other.
    pub is_leaf: bool,
}

/// A line of Python.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Deserialize, Serialize)]
pub struct Line {
    /// Its function.
    pub function: String,
    /// Its file.
    pub file: String,
    /// Its number.
    pub line: u32,
}

/// All places seen so far.
#[derive(Debug, Default)]
pub struct Sites {
    owners: Interned<String>,
    sites: Interned<Site>,
    names: Interned<String>,
    /// Of stacks of NCCL's threads in the second.
    origins: [ByStack<Origin>; 2],
    threads: FxHashMap<ThreadId, bool>,
    /// The newest of them: mostly the same one asks again.
    newest_thread: Option<(ThreadId, bool)>,
    calls: FxHashMap<(ApiId, StackId), NameId>,
    lines: Interned<Line>,
}

impl Sites {
    /// The name of an owner.
    #[must_use]
    pub fn owner(&self, id: OwnerId) -> &str {
        self.owners.values.get(id.0 as usize).map_or(owners::UNKNOWN, |name| name)
    }

    /// A call site.
    #[must_use]
    pub fn site(&self, id: SiteId) -> Option<&Site> {
        self.sites.values.get(id.0 as usize)
    }

    /// A call site in words.
    #[must_use]
    pub fn site_name(&self, id: SiteId) -> String {
        self.site(id).map(ToString::to_string).unwrap_or_default()
    }

    /// The place that a stack leads to, where an event had it.
    #[must_use]
    pub fn site_of(&self, stack: StackId) -> SiteId {
        self.origins[0].get(stack).map_or(SiteId(u32::MAX), |origin| origin.site)
    }

    /// Whether the program got ready there, by the names of its functions.
    #[must_use]
    pub fn prepares(&self, stack: StackId) -> bool {
        self.origins[0].get(stack).is_some_and(|origin| origin.prepares)
    }

    /// The call of the outermost model in whose code a stack is; none in the backward pass.
    #[must_use]
    pub fn model_call(&self, stack: StackId) -> Option<ModelCall> {
        self.origins[0].get(stack)?.model_call
    }

    /// A line that calls a model, or of one.
    #[must_use]
    pub fn line(&self, number: u32) -> Option<&Line> {
        self.lines.values.get(number as usize)
    }

    /// All stacks that were seen there.
    pub fn stacks_of(&self, id: SiteId) -> impl Iterator<Item = StackId> {
        let all = self.origins.iter().flat_map(ByStack::iter);
        all.filter(move |(_, origin)| origin.site == id).map(|(stack, _)| stack)
    }

    /// A function's name.
    #[must_use]
    pub fn name(&self, id: NameId) -> &str {
        self.names.values.get(id.0 as usize).map_or("", |name| name)
    }

    /// Who made an event of `stack` on `thread`.
    pub(super) fn origin(
        &mut self,
        definitions: &dyn Definitions,
        stack: StackId,
        thread: ThreadId,
    ) -> Origin {
        let is_nccl = match self.newest_thread {
            Some((newest, known)) if newest == thread => known,
            _ => self.is_nccl(definitions, thread),
        };
        self.newest_thread = Some((thread, is_nccl));
        if let Some(origin) = self.origins[usize::from(is_nccl)].get(stack) {
            return *origin;
        }
        let thread = definitions.thread(thread).map_or("", |thread| &thread.name);
        let frames = definitions.stack(stack);
        let owner = owners::owner(definitions, frames, if is_nccl { thread } else { "" });
        let site = frames.map_or_else(Site::default, |frames| site(definitions, frames, &owner));
        let (native, torch) = (owner.frame.is_some(), owner.name == owners::TORCH);
        let jax = owner.name == owners::JAX;
        let through_runtime = owner.through_runtime;
        let owner = OwnerId(self.owners.id(owner.name));
        let site = SiteId(self.sites.id(Site { owner, ..site }));
        let prepares = frames.is_some_and(|frames| preparing::prepares(definitions, frames));
        let model_call = frames.and_then(|frames| model_call(definitions, frames));
        let model_call = model_call.map(|(caller, inside, is_leaf)| ModelCall {
            caller: self.lines.id(caller),
            inside: self.lines.id(inside),
            is_leaf,
        });
        let phase = PhaseId::default();
        let origin = Origin { owner, site, torch, native, through_runtime, jax, phase, prepares, model_call };
        self.origins[usize::from(is_nccl)].insert(stack, origin);
        origin
    }

    fn is_nccl(&mut self, definitions: &dyn Definitions, thread: ThreadId) -> bool {
        let is_nccl =
            || definitions.thread(thread).is_some_and(|thread| owners::is_nccl_thread(&thread.name));
        *self.threads.entry(thread).or_insert_with(is_nccl)
    }

    /// Who made a call, and what the program called.
    pub(super) fn of_call(
        &mut self,
        definitions: &dyn Definitions,
        event: &Event,
        call: &Call,
    ) -> (Origin, NameId) {
        let origin = self.origin(definitions, event.stack, event.thread);
        let origin = self.sharpen(origin, call);
        (origin, self.call_name(definitions, call.api, event.stack, origin))
    }

    /// Without native frames, a request made inside PyTorch's `allocate` is PyTorch's. What PyTorch pins is its cache of pinned memory.
    fn sharpen(&mut self, origin: Origin, call: &Call) -> Origin {
        let is_within = call.in_allocate && !origin.native;
        let pins = matches!(call.action, Action::AllocHost | Action::HostRegister)
            || (call.action, call.device) == (Action::HeapAlloc, HOST);
        if pins && (is_within || self.owner(origin.owner) == owners::TORCH_ELSEWHERE) {
            return self.owned_by(origin, owners::TORCH_PINNED);
        }
        if is_within { self.torch_at(origin) } else { origin }
    }

    /// The same place, but PyTorch's allocator asked.
    fn torch_at(&mut self, origin: Origin) -> Origin {
        Origin { torch: true, ..self.owned_by(origin, owners::TORCH) }
    }

    /// The same place, where what is asked for has another owner.
    fn owned_by(&mut self, origin: Origin, owner: &str) -> Origin {
        let owner = OwnerId(self.owners.id(owner.to_owned()));
        let site = self.site(origin.site).cloned().unwrap_or_default();
        let site = SiteId(self.sites.id(Site { owner, ..site }));
        Origin { owner, site, jax: false, ..origin }
    }

    /// What the program called: the runtime's function where the call came through one, else the driver's.
    fn call_name(
        &mut self,
        definitions: &dyn Definitions,
        api: ApiId,
        stack: StackId,
        origin: Origin,
    ) -> NameId {
        if let Some(name) = self.calls.get(&(api, stack)) {
            return *name;
        }
        let known = definitions.api(api);
        let runtime = known.map_or("", |api| &api.runtime_name);
        let name = if origin.through_runtime && !runtime.is_empty() {
            runtime_symbol(definitions, stack).unwrap_or_else(|| runtime.to_owned())
        } else {
            known.map_or_else(|| format!("function {}", api.0), |api| api.name.clone())
        };
        let name = NameId(self.names.id(name));
        self.calls.insert((api, stack), name);
        name
    }
}

/// The file of `Module.__call__`.
const MODULE: &str = "/torch/nn/modules/module.py";

/// The line that calls the outermost model on a stack, the line of that model, and whether that calls no other. A model is what is called by
/// `Module.__call__`, or what has a function `forward`.
fn model_call(definitions: &dyn Definitions, stack: &Stack) -> Option<(Line, Line, bool)> {
    if stack.backward.is_some() {
        return None;
    }
    let lines: Vec<_> =
        python_lines(definitions, stack).filter(|(_, file, _)| !file.contains(MODULE)).collect();
    let is_forward = |(function, ..): &(&str, &str, u32)| function.rsplit('.').next() == Some("forward");
    let called = calls(definitions, stack);
    let is_by_call = |idx: usize| called.contains(&idx);
    let outermost = (0..lines.len()).rev().find(|idx| is_forward(&lines[*idx]) || is_by_call(*idx))?;
    let caller = lines.get(outermost + 1)?;
    let n_models = (0..=outermost).filter(|idx| is_forward(&lines[*idx]) || is_by_call(*idx)).count();
    let line = |(function, file, line): &(&str, &str, u32)| Line {
        function: (*function).to_owned(),
        file: (*file).to_owned(),
        line: *line,
    };
    Some((line(caller), line(&lines[outermost]), n_models == 1))
}

/// Which lines of a stack, without those of `Module.__call__` itself, are called by it.
fn calls(definitions: &dyn Definitions, stack: &Stack) -> Vec<usize> {
    let (mut n, mut called) = (0_usize, vec![]);
    for (function, file, _) in python_lines(definitions, stack) {
        match file.contains(MODULE) {
            true if function.ends_with("_call_impl") && n > 0 => called.push(n - 1),
            true => {}
            false => n += 1,
        }
    }
    called
}

/// The function of the CUDA runtime that was called, shared or inside the program: the outermost of its frames that has an exported name. One
/// function of the driver serves several of the runtime (`cudaHostAlloc`, `cudaMallocHost`).
fn runtime_symbol(definitions: &dyn Definitions, stack: StackId) -> Option<String> {
    let mut found = None;
    for id in &definitions.stack(stack)?.frames {
        let Some(Frame::Native { module: Some(module), function, .. }) = definitions.frame(*id) else {
            continue;
        };
        let Some(module) = definitions.module(*module) else { continue };
        let passes = owners::is_plumbing(module) || (module.has_runtime && is_part_of_runtime(function));
        if !passes {
            break;
        }
        if module.has_runtime && is_runtime_function(function) {
            found = Some(function.clone());
        }
    }
    found
}

/// A function of the CUDA runtime, public or not: a static one keeps its inner names (seen with 12.9 and 13.0).
fn is_part_of_runtime(function: &str) -> bool {
    is_runtime_function(function)
        || function.starts_with("libcudart_static_")
        || function.starts_with("__cudart")
}

fn is_runtime_function(function: &str) -> bool {
    let rest = function.strip_prefix("cuda").unwrap_or_default();
    rest.starts_with(|first: char| first.is_ascii_uppercase())
        && rest.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// The place of the program that a stack shows; `None` without a stack.
#[must_use]
pub fn call_site(definitions: &dyn Definitions, stack: StackId) -> Option<Site> {
    let frames = definitions.stack(stack)?;
    Some(site(definitions, frames, &owners::owner(definitions, Some(frames), "")))
}

/// The place to show: the innermost line of the user's Python, else of any Python, else the function that asked.
fn site(definitions: &dyn Definitions, stack: &Stack, owner: &Owner) -> Site {
    let place = place(definitions, stack);
    if let Some((function, file, line)) = python_line(definitions, place.stack) {
        let innermost = python_lines(definitions, place.stack).next();
        let inside = innermost.filter(|inner| *inner != (function, file, line));
        return Site {
            function: function.to_owned(),
            file: file.to_owned(),
            line,
            inside: inside.map_or_else(String::new, |(function, _, _)| function.to_owned()),
            mark: place.mark,
            ..Site::default()
        };
    }
    native_site(definitions, stack, owner)
}

fn native_site(definitions: &dyn Definitions, stack: &Stack, owner: &Owner) -> Site {
    let executable = &definitions.process().executable;
    let frame = |id: &FrameId| definitions.frame(*id);
    let path =
        |module: &Option<_>| module.and_then(|id| definitions.module(id)).map_or("", |module| &module.path);
    let function = |id: &FrameId| match frame(id) {
        Some(Frame::Native { function, .. }) => function.as_str(),
        Some(Frame::Python { .. }) | None => "",
    };
    // Autograd's threads run no Python; the node says which operation went backward.
    let told = stack.backward.as_deref().map(Backward::short_node).filter(|node| !node.is_empty());
    if let Some(node) = told.or_else(|| stack.frames.iter().find_map(|id| autograd_node(function(id)))) {
        return Site { function: node.to_owned(), file: "backward".to_owned(), ..Site::default() };
    }
    let outside = &stack.frames[owner.frame.unwrap_or(0).min(stack.frames.len())..];
    let n_runtime = outside.iter().take_while(|id| is_part_of_runtime(function(id))).count();
    let outside = if n_runtime < outside.len() { &outside[n_runtime..] } else { outside };
    let own = |with_headers: bool| {
        outside.iter().filter_map(frame).find(|frame| {
            matches!(frame, Frame::Native { module, function, file, .. }
                if path(module) == executable && !function.is_empty() && (with_headers || !is_toolkit_header(file)))
        })
    };
    let own = own(false).or_else(|| own(true));
    let in_torch = || stack.frames.iter().find(|id| torch_operation(function(id)).is_some()).and_then(frame);
    match own.or_else(in_torch).or_else(|| outside.first().and_then(frame)) {
        Some(Frame::Native { address, module, function, file, line, .. }) => {
            let bias = module.and_then(|id| definitions.module(id)).map_or(0, |module| module.bias);
            let module = owners::file_name(path(module));
            let function = match (function.is_empty(), module.is_empty()) {
                (false, _) => torch_operation(function).unwrap_or(function).to_owned(),
                (true, false) => format!("{module}+{:#x}", address.wrapping_sub(bias)),
                (true, true) => format!("{address:#x}"),
            };
            let file = if file.is_empty() { module.to_owned() } else { file.clone() };
            Site { function, file, line: *line, ..Site::default() }
        }
        Some(Frame::Python { .. }) | None => Site::default(),
    }
}

/// A header of CUDA's or of the compiler's, with functions that are compiled into the program: `cudaMalloc<float>` of `cuda_runtime.h`.
fn is_toolkit_header(file: &str) -> bool {
    let Some((folder, name)) = file.rsplit_once('/') else { return false };
    let is_installed = folder.contains("/targets/")
        || folder.contains("/cuda")
        || file.starts_with("/usr/include/")
        || folder.contains("/c++/");
    is_installed && (folder.contains("/include") || name.ends_with(".h"))
}

/// `at::native::mul` from `at::native::mul(at::Tensor const&, ...)`: an operation of PyTorch's, except those that
/// every other one calls to get its memory.
fn torch_operation(function: &str) -> Option<&str> {
    let rest = function.strip_prefix("at::native::").or_else(|| function.strip_prefix("at::_ops::"))?;
    let name = rest.split(['(', '<', ':']).next().filter(|name| !name.is_empty())?;
    let is_plumbing = ["empty", "resize", "new_empty", "structured_", "create_out", "(anonymous"];
    let end = function.len() - rest.len() + name.len();
    (!is_plumbing.iter().any(|start| name.starts_with(start))).then(|| &function[..end])
}

/// `AddmmBackward0` from `torch::autograd::generated::AddmmBackward0::apply(...)`, or of another namespace of PyTorch's.
fn autograd_node(function: &str) -> Option<&str> {
    let rest = function.strip_prefix("torch::autograd::")?;
    let (node, _) = rest.split_once("::apply(")?;
    let node = node.rsplit("::").next()?;
    (!node.is_empty() && node != "Node").then_some(node)
}

#[cfg(test)]
mod tests {
    use crate::scene::ledger;

    /// The call site of a block of PyTorch's with this stack.
    fn site_of(by: &str) -> String {
        let books = ledger(&format!(
            "Alloc addr=a bytes=2M by=libc10_cuda.so
             block addr=a bytes=512 requested=400 allocated=512 reserved=2M by={by}"
        ));
        let torch = books.torch(0).expect("PyTorch on the first device");
        let part = torch.blocks.sites().next().expect("one block");
        books.sites.site_name(part.id)
    }

    #[test]
    fn a_block_of_the_backward_pass_belongs_to_the_line_of_the_forward_pass() {
        let forward = "linear@/x/site-packages/torch/nn/functional.py:7,f@/job/a.py:2,main@/job/a.py:9";
        let by =
            format!("mm@libtorch.so^torch::autograd::generated::MmBackward0^{forward}^main@/job/a.py:10");
        assert_eq!(site_of(&by), "f (/job/a.py:2) in linear (backward of MmBackward0)");
    }

    #[test]
    fn a_block_of_an_operation_that_undoes_none_belongs_to_the_line_that_called_backward() {
        let by = "add@libtorch.so^torch::autograd::AccumulateGrad^^main@/job/a.py:10";
        assert_eq!(site_of(by), "main (/job/a.py:10) (AccumulateGrad in backward)");
    }

    #[test]
    fn a_block_without_python_belongs_to_the_operation() {
        let by = "malloc@libc10_cuda.so,at::native::empty_cuda@libtorch_cuda.so,at::native::mul@libtorch_cpu.so,run@libtorch_cpu.so";
        assert_eq!(site_of(by), "at::native::mul (libtorch_cpu.so)");
    }
}
