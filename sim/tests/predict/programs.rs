//! Programs that ask for memory as training and serving do, at any batch and length, with what makes prediction hard.

use std::collections::HashMap;
use std::sync::Arc;

use gputrace_sim::ops::{
    AllocId, Allocation, Builder, Frame, Op, OpStream, PoolIdx, StackId, Stacks, StreamIdx,
};

/// Xorshift; numbers below a bound.
#[derive(Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        for _ in 0..8 {
            random.below(2);
        }
        random
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % bound
    }

    pub(crate) fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    pub(crate) fn is(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// What a program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    Transformer,
    Checkpointed,
    Accumulated,
    ConvNet,
    /// A library asks for a workspace at some sizes only.
    Workspaces,
    Contrastive,
    VaryingLengths,
    /// The lengths are those of other data in each run.
    OtherData,
    Experts,
    Recurrent,
    GrowingCache,
    StaticCache,
}

pub(crate) const KINDS: [Kind; 12] = [
    Kind::Transformer,
    Kind::Checkpointed,
    Kind::Accumulated,
    Kind::ConvNet,
    Kind::Workspaces,
    Kind::Contrastive,
    Kind::VaryingLengths,
    Kind::OtherData,
    Kind::Experts,
    Kind::Recurrent,
    Kind::GrowingCache,
    Kind::StaticCache,
];

/// A program: everything but batch and length.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) kind: Kind,
    pub(crate) seed: u64,
    layers: u64,
    width: u64,
    heads: u64,
    vocabulary: u64,
    /// Attention keeps its matrix.
    has_matrix: bool,
    /// Rows are padded to so many elements.
    padding: u64,
    /// All of the backward pass has one stack.
    has_one_backward: bool,
    /// The least batch at which a convolution takes a workspace.
    workspace_from: u64,
    has_side_stream: bool,
}

/// A run being written.
struct Run {
    builder: Builder,
    stacks: Stacks,
    known: HashMap<String, StackId>,
    side: StreamIdx,
}

impl Run {
    fn stack(&mut self, site: &str) -> StackId {
        if let Some(known) = self.known.get(site) {
            return *known;
        }
        let name: Arc<str> = site.into();
        let line = site.bytes().map(u32::from).sum();
        self.stacks.frames.push(Frame { name, file: "/job/model.py".into(), line });
        self.stacks.lists.push([self.stacks.frames.len() as u32 - 1].into());
        let id = StackId(self.stacks.lists.len() as u32 - 1);
        self.known.insert(site.to_owned(), id);
        id
    }

    fn ask(&mut self, site: &str, bytes: u64) -> AllocId {
        self.ask_on(site, bytes, StreamIdx(0))
    }

    fn ask_on(&mut self, site: &str, bytes: u64, stream: StreamIdx) -> AllocId {
        let stack = self.stack(site);
        let requested = bytes.max(1);
        self.builder.alloc(Allocation { requested, address: 0, stack, stream, pool: PoolIdx::DEFAULT })
    }

    /// To the end.
    fn keep(&mut self, site: &str, bytes: u64) {
        self.ask(site, bytes);
    }

    fn ask_and_keep(&mut self, site: &str, bytes: u64, kept: &mut Vec<AllocId>) {
        let id = self.ask(site, bytes);
        kept.push(id);
    }

    fn size(&mut self, id: AllocId) -> u64 {
        self.builder.stream_mut().allocation(id).requested
    }

    fn free(&mut self, id: AllocId) {
        self.builder.op(Op::FreeRequested(id));
        self.builder.op(Op::FreeCompleted(id));
    }

    fn temporary(&mut self, site: &str, bytes: u64) {
        let id = self.ask(site, bytes);
        self.free(id);
    }

    fn finish(mut self) -> OpStream {
        self.builder.stream_mut().stacks = self.stacks.into();
        self.builder.finish()
    }
}

impl Program {
    pub(crate) fn new(kind: Kind, seed: u64) -> Program {
        let mut random = Random::new(seed);
        let heads = random.of(&[4, 8, 12]);
        Program {
            kind,
            seed,
            layers: 2 + random.below(5),
            width: heads * random.of(&[32, 64, 80]),
            heads,
            vocabulary: random.of(&[1000, 8192, 32000, 50257]),
            has_matrix: random.is(50),
            padding: random.of(&[1, 1, 1, 128]),
            has_one_backward: random.is(50),
            workspace_from: random.of(&[0, 6, 12, 40]),
            has_side_stream: random.is(30),
        }
    }

    /// Whether what happens at `target` happens at the largest of `runs`, too: nobody can know of a workspace that no run had.
    pub(crate) fn is_foreseeable(&self, largest: u64, target: u64) -> bool {
        self.kind != Kind::Workspaces || !(largest + 1..=target).contains(&self.workspace_from)
    }

    /// What it asks for. `data` says which data it is given.
    pub(crate) fn run(&self, batch: u64, length: u64, steps: u64, data: u64) -> OpStream {
        let mut builder = Builder::new(0);
        let side = builder.stream(0x7000).unwrap();
        let mut run = Run { builder, stacks: Stacks::default(), known: HashMap::new(), side };
        match self.kind {
            Kind::ConvNet | Kind::Workspaces => self.convolutions(&mut run, batch, length, steps),
            Kind::Recurrent => self.recurrent(&mut run, batch, length, steps),
            Kind::GrowingCache | Kind::StaticCache => self.generate(&mut run, batch, length, steps),
            _ => self.transformer(&mut run, batch, length, steps, data),
        }
        run.finish()
    }

    fn parameters(&self, run: &mut Run) -> Vec<u64> {
        let width = self.width;
        let mut sizes = vec![self.vocabulary * width * 4];
        for _ in 0..self.layers {
            sizes.extend([
                3 * width * width * 4,
                width * 4,
                width * width * 4,
                8 * width * width * 4,
                width * 4,
            ]);
        }
        sizes.iter().for_each(|size| run.keep("init", *size));
        sizes
    }

    /// Adam's moments are made in the first step.
    fn optimise(&self, run: &mut Run, parameters: &[u64], step: u64) {
        for size in parameters {
            if step == 0 {
                run.ask("adam_first", *size);
                run.ask("adam_second", *size);
            }
            run.temporary("adam_update", *size);
        }
    }

    fn transformer(&self, run: &mut Run, batch: u64, length: u64, steps: u64, data: u64) {
        let parameters = self.parameters(run);
        let mut lengths =
            Random::new(if self.kind == Kind::OtherData { data * 77 + batch } else { self.seed });
        let micro = if self.kind == Kind::Accumulated { 2 } else { 1 };
        for step in 0..steps {
            let length = match self.kind {
                Kind::VaryingLengths => (length * (4 + lengths.below(5)) / 8).max(1),
                Kind::OtherData => (length * (8 + lengths.below(5)) / 12).max(1),
                _ => length,
            };
            let mut gradients = vec![];
            for index in 0..micro {
                let made = self.forward_backward(run, batch, length, data * 1000 + step);
                for (number, size) in parameters.iter().enumerate() {
                    if index == 0 {
                        gradients.push(run.ask(self.backward(number as u64), *size));
                    } else {
                        run.temporary(self.backward(number as u64), *size);
                    }
                }
                run.free(made);
            }
            self.optimise(run, &parameters, step);
            gradients.into_iter().for_each(|id| run.free(id));
        }
    }

    fn backward(&self, number: u64) -> &'static str {
        if self.has_one_backward {
            return "backward";
        }
        ["backward_a", "backward_b", "backward_c", "backward_d"][number as usize % 4]
    }

    /// Gives the loss back, which is freed last.
    fn forward_backward(&self, run: &mut Run, batch: u64, length: u64, data: u64) -> AllocId {
        let hidden = batch * length * self.width * 4;
        let tokens = run.ask("tokens", batch * length * 8);
        if self.has_side_stream {
            let copy = run.ask_on("prefetch", batch * length * 8, run.side);
            run.free(copy);
        }
        let mut input = run.ask("embed", hidden);
        let mut saved: Vec<Vec<AllocId>> = vec![];
        for layer in 0..self.layers {
            let mut kept = self.layer(run, batch, length, data * 64 + layer);
            let output = run.ask("residual", hidden);
            if self.kind == Kind::Checkpointed {
                kept.drain(..).for_each(|id| run.free(id));
            }
            kept.push(input);
            saved.push(kept);
            input = output;
        }
        let logits = match self.kind {
            Kind::Contrastive => run.ask("similarity", batch * batch * 4),
            _ => run.ask("logits", batch * length * self.vocabulary * 4),
        };
        let size = run.size(logits);
        run.temporary("log_softmax", size);
        let loss = run.ask("loss", 4);
        let gradient = run.ask(self.backward(0), size);
        run.free(logits);
        let mut gradient_of_hidden = run.ask(self.backward(1), hidden);
        run.free(gradient);
        run.free(input);
        for (layer, kept) in saved.into_iter().enumerate().rev() {
            if self.kind == Kind::Checkpointed {
                let again = self.layer(run, batch, length, data * 64 + layer as u64);
                again.into_iter().rev().for_each(|id| run.free(id));
            }
            let next = run.ask(self.backward(2), hidden);
            if self.has_matrix {
                run.temporary(self.backward(3), batch * self.heads * length * length * 2);
            }
            run.free(gradient_of_hidden);
            gradient_of_hidden = next;
            kept.into_iter().rev().for_each(|id| run.free(id));
        }
        run.free(gradient_of_hidden);
        run.free(tokens);
        loss
    }

    fn layer(&self, run: &mut Run, batch: u64, length: u64, data: u64) -> Vec<AllocId> {
        let hidden = batch * length * self.width * 4;
        let mut kept = vec![run.ask("norm", hidden), run.ask("qkv", 3 * hidden)];
        if self.has_matrix {
            kept.push(run.ask("scores", batch * self.heads * length * length * 2));
        } else {
            let padded = length.next_multiple_of(self.padding);
            kept.push(run.ask("log_sum_exp", batch * self.heads * padded * 4));
        }
        run.temporary("project", hidden);
        if self.kind == Kind::Experts {
            // Tokens choose among four experts.
            let mut random = Random::new(self.seed * 131 + data * 17 + batch);
            let n_tokens = batch * length;
            let mut left = n_tokens;
            for expert in 0..4 {
                let mean = left / (4 - expert);
                let here = if expert == 3 { left } else { mean * (85 + random.below(31)) / 100 };
                kept.push(run.ask("expert", here * self.width * 4 * 4));
                left -= here.min(left);
            }
        } else {
            kept.push(run.ask("up", 4 * hidden));
            kept.push(run.ask("activation", 4 * hidden));
        }
        kept
    }

    /// `side` is that of the images.
    fn convolutions(&self, run: &mut Run, batch: u64, side: u64, steps: u64) {
        let mut random = Random::new(self.seed + 5);
        let channels: Vec<u64> = (0..self.layers + 2).map(|layer| 16 << (layer / 2).min(4)).collect();
        let weights: Vec<u64> = channels.iter().map(|it| it * it * 9 * 4).collect();
        weights.iter().for_each(|size| run.keep("init", *size));
        let workspaces: Vec<(bool, u64)> =
            channels.iter().map(|_| (random.is(60), (1 + random.below(24)) << 20)).collect();
        for step in 0..steps {
            let images = run.ask("load", batch * 3 * side * side * 4);
            let mut kept = vec![];
            for (layer, channels) in channels.iter().enumerate() {
                let side = (side >> (layer / 2)).max(1);
                let (has, bytes) = workspaces[layer];
                let is_here = self.kind == Kind::Workspaces && has && batch >= self.workspace_from;
                let workspace = is_here.then(|| run.ask("conv", bytes));
                kept.push(run.ask("conv", batch * channels * side * side * 4));
                workspace.into_iter().for_each(|id| run.free(id));
                kept.push(run.ask("batch_norm", batch * channels * side * side * 4));
                run.ask_and_keep("statistics", channels * 4, &mut kept);
            }
            let mut gradients = vec![];
            for (layer, size) in weights.iter().enumerate().rev() {
                let side = (side >> (layer / 2)).max(1);
                let of_input = run.ask(self.backward(0), batch * channels[layer] * side * side * 4);
                gradients.push(run.ask(self.backward(1), *size));
                run.free(of_input);
                (0..3).filter_map(|_| kept.pop()).collect::<Vec<_>>().into_iter().for_each(|id| run.free(id));
            }
            run.free(images);
            self.optimise(run, &weights, step);
            gradients.into_iter().for_each(|id| run.free(id));
        }
    }

    /// One loop turn for each position.
    fn recurrent(&self, run: &mut Run, batch: u64, length: u64, steps: u64) {
        let parameters = self.parameters(run);
        let state = batch * self.width * 4;
        for step in 0..steps {
            let mut kept = vec![];
            for _ in 0..length / 8 {
                run.temporary("gates", 4 * state);
                run.ask_and_keep("cell", 4 * state, &mut kept);
                run.ask_and_keep("state", state, &mut kept);
            }
            let gradients: Vec<_> = parameters.iter().map(|size| run.ask(self.backward(0), *size)).collect();
            for id in kept.into_iter().rev() {
                run.temporary(self.backward(1), state);
                run.free(id);
            }
            self.optimise(run, &parameters, step);
            gradients.into_iter().for_each(|id| run.free(id));
        }
    }

    fn generate(&self, run: &mut Run, batch: u64, length: u64, steps: u64) {
        self.parameters(run);
        let one = batch * self.width * 2;
        for _ in 0..steps {
            let caches = (0..2 * self.layers).map(|_| match self.kind {
                Kind::StaticCache => run.ask("cache", 4 * length * one),
                _ => run.ask("cache", length * one),
            });
            let mut caches: Vec<AllocId> = caches.collect();
            for token in 1..=24 {
                for cache in &mut caches {
                    run.temporary("qkv", 3 * one);
                    if self.kind == Kind::GrowingCache {
                        let longer = run.ask("cat", (length + token) * one);
                        run.free(std::mem::replace(cache, longer));
                    }
                    run.temporary("attention", batch * self.heads * (length + token) * 4);
                }
                run.temporary("logits", batch * self.vocabulary * 4);
            }
            caches.into_iter().for_each(|id| run.free(id));
        }
    }
}
