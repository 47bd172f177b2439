//! The same program on several GPUs, one process each with the recorded batch: data parallel, with sharded state, fully sharded.
//!
//! What NCCL itself holds is not PyTorch's memory and not part of it.

use rustc_hash::FxHashMap;

use super::layers;
use super::optimizer::{Optimizer, Way, install};
use super::program::{NEVER, Phase, Program, Purpose, Step, Tensor};
use super::{Changes, End, Sure, Unfit, note_optimizer, unknown_optimizer};
use crate::ops::StreamIdx;

/// How a program is spread over processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// `DistributedDataParallel` with its defaults, over so many processes.
    Ddp(u64),
    /// The same with `ZeroRedundancyOptimizer`.
    Zero1(u64),
    /// `fully_shard` (FSDP2) of each layer that repeats and of the root.
    Fsdp(u64),
}

/// `dist._DEFAULT_FIRST_BUCKET_BYTES` and `bucket_cap_mb` of DistributedDataParallel (torch/nn/parallel/distributed.py).
const FIRST_BUCKET: u64 = 1 << 20;
const BUCKET: u64 = 25 << 20;
/// `broadcast_bucket_size` of the same.
const BROADCAST: u64 = 250 << 20;

/// Spreads a program. The optimizer is made for what this process updates.
///
/// # Errors
/// What the layout needs is not known.
pub(super) fn spread(
    program: &mut Program<'_>,
    layout: Layout,
    optimizer: Option<(Optimizer, Way)>,
    updates_again: bool,
    end: End,
    changes: &mut Changes,
) -> Result<(), Unfit> {
    match layout {
        Layout::Ddp(_) => {
            replicate(program);
            if updates_again {
                let (optimizer, way) = optimizer.ok_or_else(unknown_optimizer)?;
                install(program, optimizer, way, &|sizes| sizes);
                note_optimizer(optimizer, changes);
            }
            changes.note(Sure::Range, "DDP keeps a second copy of every gradient, in buckets of 1 MiB and 25 MiB; gradient_as_bucket_view=True would save that");
        }
        Layout::Zero1(n) => {
            let (optimizer, way) = optimizer.ok_or_else(unknown_optimizer)?;
            replicate(program);
            install(program, optimizer, way, &|sizes| largest_part(sizes, n));
            note_optimizer(optimizer, changes);
            changes.note(
                Sure::Range,
                format!("of {n} processes, the one with most optimizer state: each parameter goes as a whole to the process with the least"),
            );
        }
        Layout::Fsdp(n) => {
            let (optimizer, way) = optimizer.ok_or_else(unknown_optimizer)?;
            let n_layers = shard(program, n, end)?;
            install(program, optimizer, way, &|sizes| {
                sizes.into_iter().map(|bytes| part(bytes, n)).collect()
            });
            note_optimizer(optimizer, changes);
            changes.note(
                Sure::Range,
                format!("fully_shard of {n_layers} layers and of the root over {n} processes: rows that do not divide evenly are padded"),
            );
        }
    }
    changes.note(Sure::Certain, "NCCL's own buffers are not included: they are not PyTorch's memory");
    Ok(())
}

/// What DistributedDataParallel holds beside the program.
fn replicate(program: &mut Program<'_>) {
    let steps = program.steps.clone();
    let begin = steps[0].begin;
    let mut added: Vec<Tensor> = vec![];
    let mut at = begin - (1 << 20);
    let mut tick = || {
        at += 1;
        at
    };
    // Parameters are broadcast from the first process, several in one, two of these at a time.
    let parameters: Vec<u64> = (program.tensors.iter())
        .filter(|it| it.purpose == Purpose::Parameter && it.born < begin)
        .map(|it| it.bytes)
        .collect();
    let temporary =
        |bytes, born, freed| Program::tensor(bytes, Purpose::Temporary, Phase::Outside, born, freed);
    let mut in_flight: Vec<usize> = vec![];
    for bytes in buckets(&parameters, BROADCAST, BROADCAST) {
        added.push(temporary(bytes, tick(), NEVER));
        in_flight.push(added.len() - 1);
        if in_flight.len() > 2 {
            let first = in_flight.remove(0);
            added[first].free_at(tick());
        }
    }
    in_flight.into_iter().for_each(|index| added[index].free_at(tick()));
    // One bucket until the order is known in which gradients become ready, then those of 25 MiB.
    let mut ready = steps[0].gradients.clone();
    ready.sort_by_key(|index| program.tensors[*index].born);
    let ready: Vec<u64> = ready.into_iter().map(|index| program.tensors[index].bytes).collect();
    let bucket = |bytes, born, freed| Program::tensor(bytes, Purpose::Gradient, Phase::Outside, born, freed);
    let rebuilt = steps.get(1).map_or(NEVER, |step| step.begin + 1);
    added.push(bucket(ready.iter().sum(), tick(), rebuilt));
    if rebuilt != NEVER {
        for (offset, bytes) in (1..).zip(buckets(&ready, FIRST_BUCKET, BUCKET)) {
            added.push(bucket(bytes, rebuilt + offset, NEVER));
        }
    }
    program.tensors.append(&mut added);
    program.settle();
}

/// Tensors one after the other, until a bucket is full (`compute_bucket_assignment_by_size`, torch/csrc/distributed/c10d/reducer.cpp).
fn buckets(sizes: &[u64], first: u64, others: u64) -> Vec<u64> {
    let (mut buckets, mut open, mut limit) = (vec![], 0, first);
    for bytes in sizes {
        open += bytes;
        if open >= limit {
            buckets.push(open);
            (open, limit) = (0, others);
        }
    }
    buckets.extend((open > 0).then_some(open));
    buckets
}

/// Of the parts into which ZeroRedundancyOptimizer divides parameters (the largest first, each to the process that has least), the largest.
fn largest_part(mut sizes: Vec<u64>, n: u64) -> Vec<u64> {
    sizes.sort_by_key(|bytes| std::cmp::Reverse(*bytes));
    let mut parts: Vec<(u64, Vec<u64>)> = vec![(0, vec![]); n.clamp(1, 1 << 16) as usize];
    for bytes in sizes {
        if let Some(least) = parts.iter_mut().min_by_key(|(held, _)| *held) {
            least.0 += bytes;
            least.1.push(bytes);
        }
    }
    let most = parts.iter().map(|(held, _)| *held).max().unwrap_or(0);
    parts.into_iter().find(|(held, _)| *held == most).map(|(_, sizes)| sizes).unwrap_or_default()
}

/// Parameters that are gathered and given back together.
struct Group {
    /// Positions in the order of the parameters.
    members: Vec<usize>,
}

/// Shards parameters, gradients and state, and gathers a layer's parameters while it runs. Gives back how many layers there are.
fn shard(program: &mut Program<'_>, n: u64, end: End) -> Result<usize, Unfit> {
    let steps = program.steps.clone();
    let Some(first) = steps.iter().find(|step| !step.spans.is_empty()) else {
        return Err(Unfit(
            "no layers that repeat were found in the forward pass: it is not known what to shard separately"
                .into(),
        ));
    };
    if !program.knows_order {
        return Err(Unfit("the order of the parameters is not known: the program does not clear its gradients one after the other".into()));
    }
    let sizes: Vec<u64> = first.gradients.iter().map(|index| program.tensors[*index].bytes).collect();
    if steps.iter().any(|step| step.gradients.len() != sizes.len() || step.spans.len() != first.spans.len()) {
        return Err(Unfit("steps differ in their gradients or layers".into()));
    }
    let n_layers = first.spans.len();
    let mut groups: Vec<Group> = (0..n_layers).map(|_| Group { members: vec![] }).collect();
    let mut root = Group { members: vec![] };
    for (member, layer) in layers::of_gradients(program, first, &first.spans).into_iter().enumerate() {
        let group = layer.map_or(&mut root, |layer| &mut groups[layer]);
        group.members.push(member);
    }
    let (gather, scatter) = (program.new_stream(), program.new_stream());
    let mut sharding = Sharding { sizes, n, gather, scatter, added: vec![], end };
    sharding.init(program, &groups, &root);
    for step in &steps {
        sharding.step(program, step, &groups, &root);
    }
    program.tensors.append(&mut sharding.added);
    program.settle();
    Ok(n_layers)
}

/// Each process has as much of a parameter.
fn part(bytes: u64, n: u64) -> u64 {
    bytes.div_ceil(n).next_multiple_of(4)
}

/// What fully_shard does to a program.
struct Sharding {
    sizes: Vec<u64>,
    n: u64,
    gather: StreamIdx,
    scatter: StreamIdx,
    added: Vec<Tensor>,
    end: End,
}

impl Sharding {
    fn whole(&self, group: &Group) -> u64 {
        group.members.iter().map(|member| part(self.sizes[*member], self.n) * self.n).sum()
    }

    fn push(&mut self, bytes: u64, purpose: Purpose, phase: Phase, born: u64, freed: u64) -> usize {
        self.added.push(Program::tensor(bytes, purpose, phase, born, freed));
        self.added.len() - 1
    }

    /// Group after group, parameters are replaced by their parts.
    fn init(&mut self, program: &mut Program<'_>, layers: &[Group], root: &Group) {
        let begin = program.steps[0].begin;
        let mut at = begin - (1 << 24);
        let parameters = program.parameters_of(&self.sizes);
        for group in layers.iter().chain([root]) {
            for member in &group.members {
                at += 1;
                let bytes = part(self.sizes[*member], self.n);
                self.push(bytes, Purpose::Parameter, Phase::Model, at, NEVER);
            }
            for index in group.members.iter().filter_map(|member| parameters[*member]) {
                at += 1;
                program.tensors[index].free_at(at);
            }
        }
        if self.end != End::Most {
            self.shard_copies(program, begin);
        }
    }

    /// Copies of all parameters, as those of which a mean is kept, are sharded as they are.
    fn shard_copies(&self, program: &mut Program<'_>, begin: u64) {
        let copies: Vec<usize> = program
            .born_within(0, begin)
            .filter(|index| {
                let it = &program.tensors[*index];
                it.purpose == Purpose::Parameter && it.phase == Phase::Outside
            })
            .collect();
        // Size by size: others were made outside of the model, too.
        let mut left: FxHashMap<u64, Vec<usize>> = FxHashMap::default();
        for index in copies {
            left.entry(program.tensors[index].bytes).or_default().push(index);
        }
        let found: Option<Vec<usize>> =
            self.sizes.iter().map(|bytes| left.get_mut(bytes).and_then(Vec::pop)).collect();
        for index in found.into_iter().flatten() {
            let tensor = &mut program.tensors[index];
            tensor.bytes = part(tensor.bytes, self.n);
        }
    }

    /// The buffer of a group that is gathered, and its parameters from there.
    fn unshard(&mut self, group: &Group, at: &mut u64) -> (usize, Vec<usize>) {
        let buffer = self.buffer(group, at);
        (buffer, self.parameters(group, at))
    }

    fn buffer(&mut self, group: &Group, at: &mut u64) -> usize {
        *at += 1;
        let buffer = self.push(self.whole(group), Purpose::Temporary, Phase::Outside, *at, NEVER);
        self.added[buffer].stream = self.gather;
        buffer
    }

    fn parameters(&mut self, group: &Group, at: &mut u64) -> Vec<usize> {
        let part = |member: &usize| part(self.sizes[*member], self.n) * self.n;
        let sizes: Vec<u64> = group.members.iter().map(part).collect();
        let born = |bytes: u64| {
            *at += 1;
            self.push(bytes, Purpose::Parameter, Phase::Outside, *at, NEVER)
        };
        sizes.into_iter().map(born).collect()
    }

    fn free(&mut self, index: usize, at: &mut u64) {
        // What a layer shares with others, as a condition, may be freed in another order than the layers run.
        *at = (*at).max(self.added[index].born) + 1;
        self.added[index].free_at(*at);
    }

    fn step(&mut self, program: &mut Program<'_>, step: &Step, layers: &[Group], root: &Group) {
        let mut at = step.begin + 1;
        let (buffer, root_parameters) = self.unshard(root, &mut at);
        let mut last_buffer = Some(buffer);
        for (group, span) in layers.iter().zip(&step.spans) {
            let mut at = span.forward.0 - (1 << 20);
            let (buffer, parameters) = self.unshard(group, &mut at);
            if let Some(last) = last_buffer.replace(buffer) {
                self.free(last, &mut at);
            }
            let mut at = span.forward.1 + 1;
            parameters.into_iter().for_each(|index| self.free(index, &mut at));
        }
        // In the backward pass the next layer is gathered while one runs.
        let mut at = step.passes[0].0 - (1 << 20);
        if let Some(last) = last_buffer.take() {
            self.free(last, &mut at);
        }
        let mut prefetched = layers.last().map(|group| self.buffer(group, &mut at));
        let mut scattered: Option<usize> = None;
        for number in (0..layers.len()).rev() {
            let mut at = step.spans[number].backward.0 + 1;
            let parameters = self.parameters(&layers[number], &mut at);
            if let Some(buffer) = prefetched.take() {
                self.free(buffer, &mut at);
            }
            prefetched = (number > 0).then(|| self.buffer(&layers[number - 1], &mut at));
            // A group is reduced when the last of its gradients is there.
            let born = |member: &usize| program.tensors[step.gradients[*member]].born;
            let last = layers[number].members.iter().map(born).max().unwrap_or(0);
            let mut at = (step.spans[number].backward.1 - (1 << 20)).max(last);
            parameters.into_iter().for_each(|index| self.free(index, &mut at));
            self.reduce(program, step, &layers[number], &mut scattered, &mut at);
        }
        let over = program.tensors[program.born_within(step.passes[0].0, step.update)]
            .iter()
            .map(|it| it.born)
            .max();
        let mut at = over.unwrap_or(step.update - (1 << 24)) + (1 << 20);
        root_parameters.into_iter().for_each(|index| self.free(index, &mut at));
        self.reduce(program, step, root, &mut scattered, &mut at);
        if let Some(last) = scattered {
            self.free(last, &mut at);
        }
    }

    /// Gradients of a group are copied into one buffer and freed, and this process keeps its part of their sum.
    fn reduce(
        &mut self,
        program: &mut Program<'_>,
        step: &Step,
        group: &Group,
        scattered: &mut Option<usize>,
        at: &mut u64,
    ) {
        if let Some(last) = scattered.take() {
            self.free(last, at);
        }
        *at += 1;
        *scattered = Some(self.push(self.whole(group), Purpose::Temporary, Phase::Outside, *at, NEVER));
        let mut cleared = step.end;
        for member in &group.members {
            let gradient = &mut program.tensors[step.gradients[*member]];
            cleared = cleared.max(gradient.freed);
            *at += 1;
            gradient.free_at(*at);
        }
        *at += 1;
        let bytes = self.whole(group) / self.n;
        let part = self.push(bytes, Purpose::Gradient, Phase::Outside, *at, cleared);
        self.added[part].stream = self.scatter;
    }
}
