//! What PyTorch's blocks are for: parameters, gradients, optimizer state, activations, ..., inferred from where they were
//! asked for and from how long they lived.
//!
//! ```text
//!  model     parameters  ├───────────────────────────────────────
//!  forward   activations        ├────────┤         ├───────┤
//!  backward  gradients                 ├─────────┤       ├───────
//!            temporaries         ├┤   ├┤  ├┤          ├┤   ├┤
//!  optimizer state                         ├─────────────────────
//!                        births: ffffffbbbbbbooooofffffbbbbbboooo
//! ```
//! A backward pass is a run of births in the backward pass. Every role's rule is said where the role is shown.

use gputrace_schemas::event::{Bytes, Frame, Stack, StackId};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::categories::Categories;
use crate::lives::{Life, Lives, NEVER};
use crate::serving::{self, Blocks};
use gputrace_trace::Definitions;
use gputrace_trace::by_stack::ByStack;
use gputrace_trace::ledger::{SiteId, Sites};

macro_rules! roles {
    ($( $role:ident $name:literal $rule:literal, )*) => {
        /// What a block is for.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Role { $( #[doc = $rule] $role, )* }
        impl Role {
            /// All of them.
            pub const ALL: &'static [Role] = &[ $( Role::$role, )* ];
            /// For people and JSON.
            #[must_use]
            pub fn name(self) -> &'static str { match self { $( Role::$role => $name, )* } }
            /// How it is recognised.
            #[must_use]
            pub fn rule(self) -> &'static str { match self { $( Role::$role => $rule, )* } }
        }
    };
}

roles! {
    Parameters "parameters" "requested before the first backward pass, held during all of them, and allocated by a module (or as large as some gradient)",
    Gradients "gradients" "requested in a backward pass and still held after it",
    Optimizer "optimizer state" "requested by an optimizer and held until the next backward pass, or to the end",
    Activations "activations" "requested outside backward passes, held when one began, and freed before another began",
    Temporaries "temporaries" "freed before the next backward pass began, or in the one that requested it",
    KvCache "KV cache" "requested by code of a key-value cache. Without a backward pass, also several blocks of a size that larger ones replace token by token, or equal blocks, one or two per layer of the weights, requested together after them",
    Weights "weights" "no backward pass was seen; allocated by a module or a loader, or (if none is known) requested before the first request to the server, and held to the end",
    Serving "activations of inference" "no backward pass was seen; requested in a pattern that recurs to the end, and freed within one step or request",
    Workspaces "workspaces" "requested by PyTorch for cuBLAS (without native frames: of exactly that size), and held to the end",
    Kept "other, kept" "held over several backward passes, or to the end, and none of the above: buffers, inputs, caches, results",
    Before "from before the recording" "held when the recording began, so its call site and time are not known",
    Unknown "unknown (held long)" "no backward pass was seen; held over many requests or to the end, and neither call site nor lifetime shows its purpose",
}

/// What a stack shows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hint {
    Backward,
    Optimizer,
    Model,
    Forward,
    Cache,
    Workspace,
    /// The engine itself was seen, by whose threads most of a backward pass is made.
    Engine,
    /// Native frames were recorded.
    Native,
    /// In a backward pass that `torch.autograd.grad` began.
    Derivative,
}

/// A line of Python in a file with `file` in its path, in one of the functions (any, if none is named).
struct Line {
    hint: Hint,
    file: &'static str,
    functions: &'static [&'static str],
}

/// PyTorch 1.11 to 2.11, and what is often used with it.
#[rustfmt::skip]
const LINES: &[Line] = &[
    Line { hint: Hint::Backward, file: "/torch/_tensor.py", functions: &["backward"] },
    Line { hint: Hint::Backward, file: "/torch/autograd/__init__.py", functions: &["backward", "grad"] },
    Line { hint: Hint::Backward, file: "/torch/autograd/graph.py", functions: &["_engine_run_backward"] },
    Line { hint: Hint::Backward, file: "/torch/autograd/function.py", functions: &["BackwardCFunction.apply"] },
    Line { hint: Hint::Derivative, file: "/torch/autograd/__init__.py", functions: &["grad"] },
    Line { hint: Hint::Optimizer, file: "/torch/optim/", functions: &[] },
    Line { hint: Hint::Optimizer, file: "/apex/optimizers/", functions: &[] },
    Line { hint: Hint::Optimizer, file: "/bitsandbytes/optim/", functions: &[] },
    Line { hint: Hint::Optimizer, file: "/torchao/optim/", functions: &[] },
    Line { hint: Hint::Optimizer, file: "/deepspeed/ops/adam/", functions: &[] },
    Line { hint: Hint::Optimizer, file: "/transformer_engine/pytorch/optimizers/", functions: &[] },
    Line { hint: Hint::Model, file: "/torch/nn/modules/", functions: &["__init__", "_apply", "to", "cuda", "to_empty", "convert", "reset_parameters", "load_state_dict", "_load_from_state_dict"] },
    Line { hint: Hint::Model, file: "/torch/nn/parameter.py", functions: &[] },
    Line { hint: Hint::Model, file: "/torch/nn/init.py", functions: &[] },
    Line { hint: Hint::Model, file: "/torch/distributed/fsdp/", functions: &["_init_param_handle_from_module", "__init__", "flatten_tensors_into_flat_param"] },
    Line { hint: Hint::Model, file: "/transformers/modeling_utils.py", functions: &["from_pretrained", "_load_pretrained_model", "_load_state_dict_into_meta_model"] },
    Line { hint: Hint::Model, file: "/diffusers/models/modeling_utils.py", functions: &["from_pretrained"] },
    Line { hint: Hint::Model, file: "/safetensors/", functions: &[] },
    Line { hint: Hint::Model, file: "/vllm/model_executor/model_loader/", functions: &[] },
    Line { hint: Hint::Forward, file: "/torch/nn/modules/module.py", functions: &["_call_impl", "_wrapped_call_impl"] },
    Line { hint: Hint::Cache, file: "/transformers/cache_utils.py", functions: &[] },
    Line { hint: Hint::Cache, file: "/sglang/srt/mem_cache/", functions: &[] },
];
/// Beside the optimizers, and none: means of weights, and rates.
const NO_OPTIMIZERS: [&str; 2] = ["/torch/optim/swa_utils.py", "/torch/optim/lr_scheduler.py"];
/// In the name of a Python function, in any file.
const CACHE_WORDS: [&str; 3] = ["kv_cache", "KVCache", "kvcache"];
/// Such a name counts if it is one of so many Python functions from the innermost on: what sizes a cache by running the model once (vLLM's
/// `EngineCore._initialize_kv_caches`) is around all that the model asks for then.
const CACHE_DEPTH: usize = 6;
/// In the name of a native function: the engine that runs the backward pass (torch/csrc/autograd/engine.cpp).
const ENGINE: &str = "torch::autograd::Engine::";
/// In the name of a native function: what PyTorch gets for cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp).
const WORKSPACE_WORDS: [&str; 3] = ["CUDABlasWorkspace", "CUDABlasLtWorkspace", "CUDABlasHandle"];
/// What that is, where native functions were not recorded: on Hopper, and elsewhere (the same file, 2.1 to 2.11).
const WORKSPACE_BYTES: [u64; 2] = [32 << 20, 8_519_680];
/// Handles of cuBLAS that a process has for one stream: one for each thread that multiplies matrices on it.
const MOST_HANDLES: i32 = 4;
/// Births of others that do not end a backward pass: other threads, hooks.
const MOST_FOREIGN: u32 = 2;

/// What the frames of a stack show together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Facts(u16);

impl Facts {
    pub(super) fn has(self, hint: Hint) -> bool {
        self.0 & (1 << hint as u8) != 0
    }

    fn add(&mut self, hint: Hint) {
        self.0 |= 1 << hint as u8;
    }

    fn of(definitions: &dyn Definitions, stack: &Stack) -> Facts {
        let mut facts = Facts::default();
        if stack.backward.is_some() {
            facts.add(Hint::Backward);
            facts.add(Hint::Engine);
        }
        let caller = stack.backward.as_ref().and_then(|backward| definitions.stack(backward.caller));
        if caller.is_some_and(|caller| Facts::of(definitions, caller).has(Hint::Derivative)) {
            facts.add(Hint::Derivative);
        }
        let mut depth = 0;
        for frame in stack.frames.iter().filter_map(|id| definitions.frame(*id)) {
            match frame {
                Frame::Python { function, file, .. } => {
                    facts.python(function, file);
                    if depth < CACHE_DEPTH && CACHE_WORDS.iter().any(|word| function.contains(word)) {
                        facts.add(Hint::Cache);
                    }
                    depth += 1;
                }
                Frame::Native { function, .. } => facts.native(function),
            }
        }
        facts
    }

    fn python(&mut self, function: &str, file: &str) {
        let is = |name: &&str| function == *name || function.ends_with(&format!(".{name}"));
        let is_beside = NO_OPTIMIZERS.iter().any(|other| file.ends_with(other));
        let lines = LINES.iter().filter(|line| line.hint != Hint::Optimizer || !is_beside);
        for line in lines.filter(|line| file.contains(line.file)) {
            if line.functions.is_empty() || line.functions.iter().any(is) {
                self.add(line.hint);
            }
        }
    }

    fn native(&mut self, function: &str) {
        self.add(Hint::Native);
        if function.contains(ENGINE) {
            self.add(Hint::Backward);
            self.add(Hint::Engine);
        }
        if WORKSPACE_WORDS.iter().any(|word| function.contains(word)) {
            self.add(Hint::Workspace);
        }
    }
}

/// Whether a correct program makes once what is requested there: gradients, optimizer state, parameters.
#[must_use]
pub fn is_made_once(definitions: &dyn Definitions, stack: StackId) -> bool {
    let facts = definitions.stack(stack).map_or(Facts::default(), |stack| Facts::of(definitions, stack));
    [Hint::Backward, Hint::Optimizer, Hint::Model].into_iter().any(|hint| facts.has(hint))
}

/// In which parts of a training program a stack is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Places {
    /// In a backward pass.
    pub backward: bool,
    /// In an optimizer.
    pub optimizer: bool,
    /// Where a model is made, loaded or moved.
    pub model: bool,
    /// In the forward pass of a module.
    pub forward: bool,
}

/// In which parts of a training program a stack is, as far as its frames show.
#[must_use]
pub fn places(definitions: &dyn Definitions, stack: StackId) -> Places {
    let facts = definitions.stack(stack).map_or(Facts::default(), |stack| Facts::of(definitions, stack));
    Places {
        backward: facts.has(Hint::Backward),
        optimizer: facts.has(Hint::Optimizer),
        model: facts.has(Hint::Model),
        forward: facts.has(Hint::Forward),
    }
}

/// Whether a request is of the size of a workspace of cuBLAS.
pub(crate) fn is_workspace_size(requested: Bytes) -> bool {
    WORKSPACE_BYTES.contains(&requested.0)
}

/// Whether PyTorch asked there for a workspace of cuBLAS: by its native frames, or by the very size inside an operation.
#[must_use]
pub fn is_workspace(definitions: &dyn Definitions, stack: StackId, requested: Bytes) -> bool {
    let facts = definitions.stack(stack).map_or(Facts::default(), |stack| Facts::of(definitions, stack));
    let is_inside = facts.has(Hint::Forward) || facts.has(Hint::Backward);
    facts.has(Hint::Workspace)
        || !facts.has(Hint::Native) && is_inside && WORKSPACE_BYTES.contains(&requested.0)
}

/// Stacks that had more blocks of a workspace's size on one stream at a time than it has handles of cuBLAS: whatever else their requests are,
/// they are not workspaces. PyTorch keeps one for each stream and handle.
#[must_use]
pub(crate) fn not_workspaces(lives: &Lives) -> FxHashSet<(StackId, Bytes)> {
    /// A stack with the size of its requests, the device and the stream.
    type Asker = (StackId, Bytes, i16, Option<u64>);
    let mut moments: FxHashMap<Asker, Vec<(u32, i32)>> = FxHashMap::default();
    for life in lives.list.iter().filter(|life| is_workspace_size(life.requested)) {
        let moments =
            moments.entry((life.stack, life.requested, life.device, lives.stream(life))).or_default();
        moments.extend([(life.born, 1), (life.died, -1)]);
    }
    let most = |mut moments: Vec<(u32, i32)>| {
        moments.sort_unstable();
        moments.into_iter().fold((0, 0), |(now, most): (i32, i32), (_, by)| (now + by, most.max(now + by))).1
    };
    let all = moments.into_iter().filter(|(_, moments)| moments.len() > MOST_HANDLES as usize);
    all.filter(|(_, moments)| most(moments.clone()) > MOST_HANDLES)
        .map(|((stack, size, ..), _)| (stack, size))
        .collect()
}

/// A backward pass of a device: births from `start` to `end`, then another than its own at `over`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Pass {
    start: u32,
    end: u32,
    over: u32,
}

/// The roles of all lives, by index: numbers in the user's categories, then in [`Role::ALL`].
pub struct Roles {
    /// The role of each life.
    pub of_lives: Vec<u16>,
    /// Names and rules, by number.
    pub names: Vec<(String, String)>,
    /// Backward passes, by device.
    pub n_passes: FxHashMap<i16, usize>,
    /// The first and the last birth of each, by device.
    pub passes: FxHashMap<i16, Vec<(u32, u32)>>,
    /// Blocks without any frame were taken for those of the backward pass.
    pub is_guessed: bool,
}

/// Finds the role of every life.
pub fn roles(lives: &Lives, definitions: &dyn Definitions, sites: &Sites, categories: &Categories) -> Roles {
    let mut seen = ByStack::default();
    let mut facts_of = |id: StackId| {
        seen.get_or(id, || {
            definitions.stack(id).map_or(Facts::default(), |stack| Facts::of(definitions, stack))
        })
    };
    let facts: Vec<Facts> = lives.list.iter().map(|life| facts_of(life.stack)).collect();
    // The engine's threads run no Python: where only Python frames were recorded, their stacks are empty.
    let is_marked = facts.iter().any(|facts| facts.has(Hint::Engine));
    let has_frames = |life: &Life| definitions.stack(life.stack).is_some_and(|it| !it.frames.is_empty());
    let mut bare = FxHashSet::default();
    // What is from before has no frames for another reason, and native frames would show the engine.
    let is_native = facts.iter().any(|facts| facts.has(Hint::Native));
    let others = if is_native { FxHashSet::default() } else { not_workspaces(lives) };
    if !is_marked && !is_native && lives.list.iter().any(has_frames) {
        let without = lives.list.iter().filter(|life| !has_frames(life) && !life.is_from_before);
        bare = without.map(|life| life.stack).collect();
    }
    let mut names: Vec<(String, String)> = categories.names().to_vec();
    let first = names.len() as u16;
    names.extend(Role::ALL.iter().map(|role| (role.name().to_owned(), role.rule().to_owned())));
    let mut roles = Roles {
        of_lives: vec![0; lives.list.len()],
        names,
        n_passes: FxHashMap::default(),
        passes: FxHashMap::default(),
        is_guessed: !bare.is_empty(),
    };
    for device in lives.devices() {
        let own = own(lives, device);
        let in_backward = |idx: usize| {
            let life = &lives.list[idx];
            !life.is_from_before && (facts[idx].has(Hint::Backward) || bare.contains(&life.stack))
        };
        let passes =
            passes(own.iter().map(|idx| (lives.list[*idx as usize].born, in_backward(*idx as usize))));
        roles.n_passes.insert(device, passes.len());
        roles.passes.insert(device, passes.iter().map(|pass| (pass.start, pass.end)).collect());
        let begins_step =
            |idx: &u32| in_backward(*idx as usize) && !facts[*idx as usize].has(Hint::Derivative);
        let has_other = own.iter().any(begins_step);
        let judge = Judge { passes: &passes, others: &others, has_other };
        let found = match passes.is_empty() {
            true => judge.untrained(&own, lives, &facts),
            false => judge.all(&own, lives, |idx| (facts[idx], in_backward(idx))),
        };
        // Of what is from before, only what its own frames or a gradient of its size show is known.
        let shown = |idx: usize, role: Role| {
            let is_shown = has_frames(&lives.list[idx]) || role == Role::Parameters;
            if lives.list[idx].is_from_before && !is_shown { Role::Before } else { role }
        };
        for (idx, role) in own.iter().zip(found) {
            let role = shown(*idx as usize, role);
            roles.of_lives[*idx as usize] = first + role as u16;
        }
    }
    if !categories.is_empty() {
        let mut known: FxHashMap<(StackId, SiteId, Role), Vec<usize>> = FxHashMap::default();
        for (number, life) in roles.of_lives.iter_mut().zip(&lives.list) {
            let role = Role::ALL[usize::from(*number - first)];
            let candidates = known
                .entry((life.stack, life.site, role))
                .or_insert_with(|| categories.candidates(life, role.name(), definitions, sites));
            *number = categories.choose(candidates, life).unwrap_or(*number);
        }
    }
    roles
}

/// Which lives are those of a device.
fn own(lives: &Lives, device: i16) -> Vec<u32> {
    let is_own = |life: &Life| life.device == device;
    let mut own = Vec::with_capacity(lives.list.iter().filter(|life| is_own(life)).count());
    own.extend((0..).zip(&lives.list).filter(|(_, life)| is_own(life)).map(|(idx, _)| idx));
    own
}

fn passes(births: impl Iterator<Item = (u32, bool)>) -> Vec<Pass> {
    let mut passes: Vec<Pass> = vec![];
    let mut foreign = MOST_FOREIGN + 1;
    for (born, in_backward) in births {
        match (in_backward, passes.last_mut()) {
            (true, Some(pass)) if foreign <= MOST_FOREIGN => {
                (pass.end, pass.over, foreign) = (born, NEVER, 0)
            }
            (true, _) => {
                passes.push(Pass { start: born, end: born, over: NEVER });
                foreign = 0;
            }
            (false, Some(pass)) => {
                foreign = foreign.saturating_add(1);
                if pass.over == NEVER {
                    pass.over = born;
                }
            }
            (false, None) => {}
        }
    }
    passes
}

struct Judge<'a> {
    passes: &'a [Pass],
    /// Stacks that request no workspaces, though blocks of that size.
    others: &'a FxHashSet<(StackId, Bytes)>,
    /// Not all passes were begun by `torch.autograd.grad`: what those leave is for a later one (`create_graph=True`).
    has_other: bool,
}

impl Judge<'_> {
    /// Where there is no backward pass.
    fn untrained(&self, own: &[u32], lives: &Lives, facts: &[Facts]) -> Vec<Role> {
        let mut roles = serving::roles(Blocks { lives: &lives.list, facts, own });
        for (role, idx) in roles.iter_mut().zip(own) {
            let (life, facts) = (&lives.list[*idx as usize], facts[*idx as usize]);
            if !facts.has(Hint::Cache) {
                *role = self.by_place(life, facts, false).unwrap_or(*role);
            }
        }
        roles
    }

    fn all(&self, own: &[u32], lives: &Lives, fact: impl Fn(usize) -> (Facts, bool)) -> Vec<Role> {
        let life = |idx: &u32| &lives.list[*idx as usize];
        let mut roles: Vec<Option<Role>> = own
            .iter()
            .map(|idx| {
                let (facts, in_backward) = fact(*idx as usize);
                self.by_place(life(idx), facts, in_backward)
            })
            .collect();
        self.find_cleared(own, lives, &mut roles);
        let gradients: FxHashSet<u64> = (own.iter().zip(&roles))
            .filter(|(_, role)| **role == Some(Role::Gradients))
            .map(|(idx, _)| life(idx).requested.0)
            .collect();
        let mut votes: FxHashMap<SiteId, FxHashMap<Role, u32>> = FxHashMap::default();
        for (idx, role) in own.iter().zip(&mut roles).filter(|(_, role)| role.is_none()) {
            let life = life(idx);
            *role = self.by_life(life, fact(*idx as usize).0, &gradients);
            if let Some(role) = role {
                *votes.entry(life.site).or_default().entry(*role).or_default() += 1;
            }
        }
        // What is held at the end, after the last backward pass, is what its call site mostly made before.
        let undecided = |life: &Life, facts: Facts| {
            let votes = votes.get(&life.site);
            let most = votes.and_then(|votes| votes.iter().max_by_key(|(role, n)| (**n, **role)));
            match most {
                Some((role, _)) => *role,
                None if facts.has(Hint::Model) => Role::Parameters,
                None if facts.has(Hint::Forward) => Role::Activations,
                None => Role::Kept,
            }
        };
        let all = own.iter().zip(roles);
        all.map(|(idx, role)| role.unwrap_or_else(|| undecided(life(idx), fact(*idx as usize).0))).collect()
    }

    /// Gradients that are cleared before anything else is asked for, as after a fused optimizer's step, end with the last temporaries of
    /// their pass. They are those that the same code asked for in another pass, where something came in between.
    fn find_cleared(&self, own: &[u32], lives: &Lives, roles: &mut [Option<Role>]) {
        let life_of = |idx: &u32| &lives.list[*idx as usize];
        let is_cleared = |life: &Life| {
            let next = self.passes.get(self.n_begun(life.born));
            life.died != NEVER && next.is_none_or(|next| life.died <= next.end)
        };
        let known: FxHashSet<(StackId, u64)> = (own.iter().zip(roles.iter()))
            .filter(|(idx, role)| **role == Some(Role::Gradients) && is_cleared(life_of(idx)))
            .map(|(idx, _)| (life_of(idx).stack, life_of(idx).requested.0))
            .collect();
        for (idx, role) in own.iter().zip(roles).filter(|(_, role)| **role == Some(Role::Temporaries)) {
            let life = life_of(idx);
            let is_last =
                self.pass_of(life.born).is_some_and(|pass| life.born <= pass.end && life.died > pass.end);
            if is_last && known.contains(&(life.stack, life.requested.0)) {
                *role = Some(Role::Gradients);
            }
        }
    }

    /// Where the place alone is enough, or the place and the passes around it.
    fn by_place(&self, life: &Life, facts: Facts, in_backward: bool) -> Option<Role> {
        let is_workspace = facts.has(Hint::Workspace) || self.is_like_workspace(life, facts, in_backward);
        if is_workspace && life.died == NEVER {
            return Some(Role::Workspaces);
        }
        if facts.has(Hint::Optimizer) {
            let next = self.passes.get(self.n_begun(life.born));
            let outlives = life.died == NEVER || next.is_some_and(|next| life.died > next.start);
            return Some(if outlives { Role::Optimizer } else { Role::Temporaries });
        }
        if in_backward {
            let over = self.pass_of(life.born).map_or(NEVER, |pass| pass.over);
            let outlives = life.died == NEVER || life.died > over;
            return Some(match outlives {
                true if self.has_other && facts.has(Hint::Derivative) => Role::Activations,
                true => Role::Gradients,
                false => Role::Temporaries,
            });
        }
        facts.has(Hint::Cache).then_some(Role::KvCache)
    }

    /// A block of that very size, asked for where no gradient and no parameter is: held over a later backward pass, or made
    /// while a module ran.
    fn is_like_workspace(&self, life: &Life, facts: Facts, in_backward: bool) -> bool {
        let is_held_on = self.passes.last().is_some_and(|pass| pass.start > life.born);
        let is_elsewhere = if in_backward { is_held_on } else { facts.has(Hint::Forward) };
        let is_of_size =
            is_workspace_size(life.requested) && !self.others.contains(&(life.stack, life.requested));
        !facts.has(Hint::Native) && is_of_size && is_elsewhere
    }

    fn pass_of(&self, born: u32) -> Option<&Pass> {
        self.passes.get(self.n_begun(born).checked_sub(1)?)
    }

    /// Passes that had begun by then; they are in order of time.
    fn n_begun(&self, time: u32) -> usize {
        self.passes.partition_point(|pass| pass.start <= time)
    }

    /// By the backward passes that began while it was held; `None` where the trace ends too early to know.
    fn by_life(&self, life: &Life, facts: Facts, gradients: &FxHashSet<u64>) -> Option<Role> {
        let from = self.n_begun(life.born);
        let to = self.passes.partition_point(|pass| pass.start < life.died);
        // Parameters are made before a module runs.
        let has_gradient = !facts.has(Hint::Forward) && gradients.contains(&life.requested.0);
        let is_model = facts.has(Hint::Model) || has_gradient;
        let through_all = from == 0 && to == self.passes.len() && to > 0;
        let outlasts = self.passes.last().is_some_and(|pass| life.died > pass.over || life.died == NEVER);
        match to.saturating_sub(from) {
            0 if life.died == NEVER => None,
            0 => Some(Role::Temporaries),
            _ if through_all && outlasts && is_model => Some(Role::Parameters),
            1 if life.died == NEVER && !facts.has(Hint::Forward) => Some(Role::Kept),
            1 => Some(Role::Activations),
            _ if facts.has(Hint::Model) => Some(Role::Parameters),
            _ => Some(Role::Kept),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lifetimes::Lifetimes;
    use crate::story::Story;
    use gputrace_trace::scene::recording;
    use gputrace_trace::source::Source;

    const MODEL: &str = "Module._apply@/v/torch/nn/modules/module.py:900,<module>@/job/a.py:1";
    const FORWARD: &str = "Linear.forward@/v/torch/nn/modules/linear.py:9,Module._call_impl@/v/torch/nn/modules/module.py:1700,<module>@/job/a.py:5";
    const OPTIMIZER: &str = "Adam._init_group@/v/torch/optim/adam.py:150,<module>@/job/a.py:7";

    /// Two steps of training; the backward pass is told as `back` says.
    fn training(back: &str, categories: &str) -> Lifetimes {
        let step = format!(
            "block addr=x bytes=1M by=load@/job/a.py:4
             block addr=act bytes=4M by={FORWARD}
             block addr=tmp bytes=8M by={FORWARD}
             free addr=tmp bytes=8M
             block addr=out bytes=512 by={FORWARD}
             block addr=b1 bytes=2M {back}
             block addr=grad bytes=3M {back}
             free addr=act bytes=4M
             block addr=b2 bytes=2M {back}
             free addr=b1 bytes=2M
             free addr=b2 bytes=2M
             free addr=out bytes=512
             free addr=x bytes=1M"
        );
        let scene = format!(
            "block addr=w bytes=3M by={MODEL}
             {step}
             block addr=m bytes=6M by={OPTIMIZER}
             block addr=scratch bytes=5M by={OPTIMIZER}
             free addr=scratch bytes=5M
             free addr=grad bytes=3M
             {step}
             block addr=scratch bytes=5M by={OPTIMIZER}
             free addr=scratch bytes=5M"
        );
        let source = Source::of("train.gtr", recording(&scene));
        let categories = Categories::parse(categories).unwrap();
        Story::with_lifetimes(&source, &categories).lifetimes.unwrap()
    }

    fn shown(lifetimes: &Lifetimes) -> Vec<String> {
        let mut shown: Vec<_> = lifetimes.devices[0]
            .roles
            .iter()
            .map(|role| format!("{} {} M in {}", role.name, role.peak.0 as f64 / 1048576.0, role.blocks))
            .collect();
        shown.sort();
        shown
    }

    const EXPECTED: [&str; 5] = [
        "activations 5.00048828125 M in 6",
        "gradients 3 M in 2",
        "optimizer state 6 M in 1",
        "parameters 3 M in 1",
        "temporaries 8 M in 8",
    ];

    #[test]
    fn roles_follow_from_places_and_lifetimes() {
        let engine = "by=torch::autograd::Engine::evaluate_function@libtorch_cpu.so";
        let found = training(engine, "");
        assert_eq!(shown(&found), EXPECTED);
        assert_eq!((found.devices[0].n_passes, found.is_guessed), (2, false));
    }

    #[test]
    fn derivatives_with_a_graph_of_their_own_are_no_gradients_of_parameters() {
        let engine = "by=torch::autograd::Engine::evaluate_function@libtorch_cpu.so";
        let derivative = "by=grad@/v/site-packages/torch/autograd/__init__.py:503,step@/job/train.py:9";
        let square = format!("block addr=sum bytes=1M by={MODEL}\nfree addr=sum bytes=1M\n");
        let squares = square.repeat(16);
        let step = format!(
            "block addr=a bytes=1M by={MODEL}
             block addr=u_x bytes=4M {derivative}
             {squares}
             block addr=grad bytes=3M {engine}
             free addr=u_x bytes=4M
             block addr=last bytes=2M {engine}
             free addr=last bytes=2M
             free addr=a bytes=1M
             block addr=scratch bytes=5M by={OPTIMIZER}
             free addr=scratch bytes=5M
             free addr=grad bytes=3M\n"
        );
        let source = Source::of("train.gtr", recording(&step.repeat(3)));
        let found = Story::with_lifetimes(&source, &Categories::default()).lifetimes.unwrap();
        let shown = shown(&found);
        assert!(shown.iter().any(|it| it.starts_with("gradients 3 M")), "{shown:?}");
        assert!(shown.iter().any(|it| it.starts_with("activations 5 M")), "{shown:?}");
    }

    #[test]
    fn a_backward_pass_without_stacks_is_guessed_and_said_so() {
        let found = training("", "");
        assert_eq!(shown(&found), EXPECTED);
        assert!(found.is_guessed);
    }

    #[test]
    fn the_users_categories_come_first() {
        let found =
            training("by=x^N", "scratch: stack=*adam.py* role=temporaries\nbig: min=7MiB\nx: site=load*");
        let shown = shown(&found);
        assert_eq!(shown[1..3], ["big 8 M in 2", "gradients 3 M in 2"]);
        assert!(
            shown.contains(&"scratch 5 M in 2".to_owned()) && shown.contains(&"x 1 M in 2".to_owned()),
            "{shown:?}"
        );
    }
}
