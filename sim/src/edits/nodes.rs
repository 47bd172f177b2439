//! Operations: which request of a forward pass belongs to which node of autograd, by the stacks that both have.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::program::{NEVER, Phase, Program, Purpose, Step};
use crate::stacks::{StackId, Stacks};

/// In which precision an operation runs under autocast (the lists of `torch.autocast` for CUDA).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Class {
    /// Matrix products, convolutions, attention: in 16 bits.
    Half,
    /// Norms, losses, powers: in 32 bits.
    Full,
    /// In the precision of their inputs.
    Follows,
    /// In that of a tensor from further back: indexing, gathering.
    Gathers,
    /// In that of their most precise input: sums of two tensors, and what autograd keeps nothing for.
    Joins,
}

/// The beginnings of autograd's names.
const HALF: &[&str] = &[
    "Addmm",
    "Mm",
    "Bmm",
    "Baddbmm",
    "Addbmm",
    "Addmv",
    "Mv",
    "Linear",
    "Convolution",
    "CudnnConvolution",
    "ScaledDotProduct",
    "Prelu",
    "Einsum",
];
const RECURRENT: &[&str] = &["CudnnRnn", "ThnnFused"];
const FULL: &[&str] = &[
    "NativeLayerNorm",
    "NativeGroupNorm",
    "LayerNorm",
    "FusedRmsNorm",
    "LinalgVectorNorm",
    "Norm",
    "Softmax",
    "LogSoftmax",
    "NllLoss",
    "CrossEntropy",
    "MseLoss",
    "SmoothL1Loss",
    "HuberLoss",
    "BinaryCrossEntropy",
    "KlDiv",
    "CtcLoss",
    "CudnnCtcLoss",
    "Pow",
    "ExpBackward",
    "Expm1",
    "Log",
    "Rsqrt",
    "Reciprocal",
    "Sum",
    "Prod",
    "Cumsum",
    "Cumprod",
    "Acos",
    "Asin",
    "Cosh",
    "Sinh",
    "Tan0",
    "TanBackward",
    "Erfinv",
    "Softplus",
    "Softmin",
    "DistBackward",
    "Cdist",
    "Pdist",
    "Renorm",
    "Grid",
    "CudnnGrid",
];
const GATHERS: &[&str] = &["Index", "Gather", "Scatter", "Take", "Segment"];
/// Of those in 32 bits, the ones whose backward pass needs what they made: it is kept beside a copy in 16 bits.
const SAVES_OUTPUT: &[&str] = &["Softmax", "LogSoftmax", "ExpBackward", "Rsqrt", "Reciprocal"];
/// Activations that may change their input in place, and then need it in the backward pass.
const IN_PLACE: &[&str] = &["Relu", "LeakyRelu", "Elu", "Hardtanh", "Threshold"];
/// Products that add a vector to each row: its gradient is summed when the operation itself has returned (`validate_outputs` in
/// torch/csrc/autograd/engine.cpp).
const ADDS_VECTOR: &[&str] = &["Addmm"];
const CONVOLUTION: &[&str] = &["Convolution", "CudnnConvolution"];
/// Those that a loss is made of.
const LOSS: &[&str] = &["LogSoftmax", "NllLoss", "CrossEntropy", "BinaryCrossEntropy", "KlDiv"];

/// What stacks show of operations.
pub(super) struct Nodes {
    /// By the number that stacks with the same frames share.
    classes: FxHashMap<u32, Class>,
    losses: FxHashSet<u32>,
    grids: FxHashSet<u32>,
    saves_output: FxHashSet<u32>,
    activations: FxHashSet<u32>,
    adds_vector: FxHashSet<u32>,
    convolutions: FxHashSet<u32>,
    /// Lines of norms that are written out: those that make a power of the input, and those that multiply with the root.
    powers: FxHashSet<u32>,
    roots: FxHashSet<u32>,
    /// Of each stack, that number.
    frames: Vec<u32>,
    /// Names of nodes show that the program runs under autocast already.
    pub(super) has_casts: bool,
    pub(super) has_names: bool,
    pub(super) has_convolutions: bool,
    /// Recurrent networks in one operation, whose inner memory is its own.
    pub(super) has_recurrences: bool,
}

impl Nodes {
    pub(super) fn of(program: &Program<'_>) -> Nodes {
        let stacks = program.stacks();
        let mut numbers: FxHashMap<&[u32], u32> = FxHashMap::default();
        let mut number = |list| {
            let next = numbers.len() as u32;
            *numbers.entry(list).or_insert(next)
        };
        let frames: Vec<u32> = stacks.lists.iter().map(|list| number(&list[..])).collect();
        let starts = |name: &str, list: &[&str]| list.iter().any(|start| name.starts_with(start));
        let mut classes: FxHashMap<u32, Class> = FxHashMap::default();
        let mut has_casts = false;
        let [mut losses, mut grids, mut saves_output, mut activations] = <[FxHashSet<u32>; 4]>::default();
        let [mut powers, mut roots, mut adds_vector, mut convolutions] = <[FxHashSet<u32>; 4]>::default();
        for (stack, name) in &stacks.nodes {
            let Some(frames) = frames.get(stack.0 as usize) else { continue };
            let class = match &**name {
                name if starts(name, HALF) => Class::Half,
                name if starts(name, FULL) => Class::Full,
                name if starts(name, GATHERS) => Class::Gathers,
                name if name.starts_with("Add") || name.starts_with("Sub") => Class::Joins,
                _ => Class::Follows,
            };
            has_casts |= name.starts_with("ToCopy");
            if starts(name, LOSS) {
                losses.insert(*frames);
            }
            if name.contains("GridSampler") {
                grids.insert(*frames);
            }
            if starts(name, SAVES_OUTPUT) {
                saves_output.insert(*frames);
            }
            if starts(name, IN_PLACE) {
                activations.insert(*frames);
            }
            if starts(name, ADDS_VECTOR) {
                adds_vector.insert(*frames);
            }
            if starts(name, CONVOLUTION) {
                convolutions.insert(*frames);
            }
            if name.starts_with("Pow") {
                powers.insert(*frames);
            }
            if name.starts_with("Rsqrt") {
                roots.insert(*frames);
            }
            let known = classes.entry(*frames).or_insert(class);
            // A line may do several things: a product decides.
            if class == Class::Half || *known == Class::Follows {
                *known = class;
            }
        }
        // A function that does both is a norm. One that only takes powers may be anything.
        let functions = |of: &FxHashSet<u32>| -> FxHashSet<(Arc<str>, Arc<str>)> {
            let lists = stacks.lists.iter().zip(&frames).filter(|(_, frames)| of.contains(frames));
            lists.filter_map(|(list, _)| function(stacks, list)).collect()
        };
        let (with_powers, with_roots) = (functions(&powers), functions(&roots));
        let mut is_of_norm: FxHashMap<u32, bool> = FxHashMap::default();
        for (list, frames) in stacks.lists.iter().zip(&frames) {
            let both = |it| with_powers.contains(&it) && with_roots.contains(&it);
            is_of_norm.entry(*frames).or_insert_with(|| function(stacks, list).is_some_and(both));
        }
        let is_of_norm = |frames: &u32| is_of_norm.get(frames).copied().unwrap_or(false);
        powers.retain(is_of_norm);
        roots.retain(is_of_norm);
        let has = |list: &[&str]| stacks.nodes.values().any(|name| starts(name, list));
        Nodes {
            has_convolutions: has(CONVOLUTION),
            has_recurrences: has(RECURRENT),
            has_names: !stacks.nodes.is_empty(),
            classes,
            losses,
            grids,
            saves_output,
            activations,
            adds_vector,
            convolutions,
            powers,
            roots,
            frames,
            has_casts,
        }
    }

    pub(super) fn frames(&self, stack: StackId) -> u32 {
        self.frames.get(stack.0 as usize).copied().unwrap_or(u32::MAX)
    }

    pub(super) fn class(&self, stack: StackId) -> Class {
        self.classes.get(&self.frames(stack)).copied().unwrap_or(Class::Joins)
    }

    /// Whether the backward pass has a node for it.
    pub(super) fn knows(&self, stack: StackId) -> bool {
        self.classes.contains_key(&self.frames(stack))
    }

    /// Whether it looks up places of a grid, of which a trained one has a gradient as large as itself.
    pub(super) fn is_grid(&self, stack: StackId) -> bool {
        self.grids.contains(&self.frames(stack))
    }

    /// Whether its backward pass needs what it made.
    pub(super) fn saves_output(&self, stack: StackId) -> bool {
        self.saves_output.contains(&self.frames(stack))
    }

    /// Whether a norm that is written out takes a power of its input here.
    pub(super) fn is_power_of_norm(&self, stack: StackId) -> bool {
        self.powers.contains(&self.frames(stack))
    }

    /// Whether such a norm multiplies its input with the root of its mean power here.
    pub(super) fn is_root_of_norm(&self, stack: StackId) -> bool {
        self.roots.contains(&self.frames(stack))
    }

    /// Whether a gradient of a vector that it adds is summed when it has returned.
    pub(super) fn adds_vector(&self, stack: StackId) -> bool {
        self.adds_vector.contains(&self.frames(stack))
    }

    pub(super) fn is_convolution(&self, stack: StackId) -> bool {
        self.convolutions.contains(&self.frames(stack))
    }

    pub(super) fn is_loss(&self, stack: StackId) -> bool {
        self.losses.contains(&self.frames(stack))
    }
}

/// The innermost function of a stack, and its file.
fn function(stacks: &Stacks, list: &[u32]) -> Option<(Arc<str>, Arc<str>)> {
    let frame = stacks.frames.get(*list.first()? as usize)?;
    Some((frame.name.clone(), frame.file.clone()))
}

/// A matrix product of a forward pass and its node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// Its output: index of a tensor.
    pub(super) output: usize,
    /// Bytes of the gradients of its parameters, the largest first.
    pub(super) weight: u64,
    /// Of the others, together.
    pub(super) bias: u64,
    /// First and last request of its node.
    pub(super) node: (u64, u64),
}

/// What a node of a backward pass asks for.
struct Made {
    node: u32,
    /// The first and the last.
    requests: (u64, u64),
    /// Bytes of gradients of parameters.
    gradients: Vec<u64>,
}

/// The products of a step, each with its node: the last of a line in the forward pass is the first in the backward pass.
pub(super) fn products(program: &Program<'_>, step: &Step, nodes: &Nodes) -> Vec<Product> {
    operations(program, step, nodes, &|stack| nodes.class(stack) == Class::Half)
}

/// The same of other operations.
pub(super) fn operations(
    program: &Program<'_>,
    step: &Step,
    nodes: &Nodes,
    is_one: &dyn Fn(StackId) -> bool,
) -> Vec<Product> {
    let parts = parts(program, step);
    let mut forward: FxHashMap<u32, Vec<usize>> = FxHashMap::default();
    for index in program.born_within(step.begin, step.passes[0].0) {
        let it = &program.tensors[index];
        if it.phase == Phase::Forward && it.freed != NEVER && is_one(it.stack) {
            forward.entry(nodes.frames(it.stack)).or_default().push(index);
        }
    }
    let mut backward: FxHashMap<u32, Vec<Made>> = FxHashMap::default();
    let end = step.passes[step.passes.len() - 1].1;
    for index in program.born_within(step.passes[0].0, end + 1) {
        let it = &program.tensors[index];
        if it.node == 0 || !is_one(it.stack) {
            continue;
        }
        let own = backward.entry(nodes.frames(it.stack)).or_default();
        if own.last().is_none_or(|made| made.node != it.node) {
            own.push(Made { node: it.node, requests: (it.born, it.born), gradients: vec![] });
        }
        if let Some(made) = own.last_mut() {
            made.requests.1 = it.born;
            if it.purpose == Purpose::Gradient || parts.contains(&index) {
                made.gradients.push(it.bytes);
            }
        }
    }
    let mut products = vec![];
    for (frames, own) in forward {
        let Some(nodes) = backward.get(&frames) else { continue };
        // One output for each node: the largest of each turn.
        let n = nodes.len();
        if own.len() < n {
            continue;
        }
        let per = own.len() / n;
        for (number, Made { requests, gradients, .. }) in nodes.iter().rev().enumerate() {
            let turn = &own[number * per..(number + 1) * per];
            let output = turn.iter().copied().max_by_key(|index| program.tensors[*index].bytes);
            let weight = gradients.iter().copied().max().unwrap_or(0);
            let bias = gradients.iter().sum::<u64>() - weight;
            products.extend(output.map(|output| Product { output, weight, bias, node: *requests }));
        }
    }
    products.sort_by_key(|product| product.output);
    products
}

/// Outputs of norms and others in 32 bits that an activation changes in place: it asks for nothing in the forward pass, and its node comes just
/// before theirs.
pub(super) fn changed_in_place(program: &Program<'_>, step: &Step, nodes: &Nodes) -> FxHashSet<usize> {
    let forward = &program.tensors[program.born_within(step.begin, step.passes[0].0)];
    let asks: FxHashSet<u32> = forward.iter().map(|it| nodes.frames(it.stack)).collect();
    let end = step.passes[step.passes.len() - 1].1;
    let backward = &program.tensors[program.born_within(step.passes[0].0, end + 1)];
    let is_in_place = |stack: StackId| {
        let frames = nodes.frames(stack);
        nodes.activations.contains(&frames) && !asks.contains(&frames)
    };
    let in_place: FxHashSet<u32> =
        backward.iter().filter(|it| it.node > 0 && is_in_place(it.stack)).map(|it| it.node).collect();
    let is_changed = |product: &Product| {
        let first = program.born_within(product.node.0, product.node.0 + 1);
        program.tensors[first].first().is_some_and(|it| in_place.contains(&(it.node.saturating_sub(1))))
    };
    let in_full = operations(program, step, nodes, &|stack| nodes.class(stack) == Class::Full);
    in_full.iter().filter(|product| is_changed(product)).map(|product| product.output).collect()
}

/// Parts of gradients of parameters that are used more than once: freed when their sum is there.
pub(super) fn parts(program: &Program<'_>, step: &Step) -> FxHashSet<usize> {
    const EVENTS: u64 = 8 << 32;
    let mut sums: FxHashMap<u64, Vec<u64>> = FxHashMap::default();
    for index in &step.gradients {
        let gradient = &program.tensors[*index];
        sums.entry(gradient.bytes).or_default().push(gradient.born);
    }
    let end = step.passes[step.passes.len() - 1].1;
    sums.values_mut().for_each(|sums| sums.sort_unstable());
    let is_part = |index: &usize| {
        let it = &program.tensors[*index];
        // The last sum that was asked for while it was held.
        let last = |sums: &Vec<u64>| sums[..sums.partition_point(|sum| *sum < it.freed)].last().copied();
        it.node > 0
            && it.purpose != Purpose::Gradient
            && sums.get(&it.bytes).and_then(last).is_some_and(|sum| it.born < sum && it.freed - sum < EVENTS)
    };
    program.born_within(step.passes[0].0, end + 1).filter(is_part).collect()
}
