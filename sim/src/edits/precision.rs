//! Other number formats, and adapters of low rank in place of trained matrices.
//!
//! Under autocast, matrix products run in 16 bits: their inputs and weights are cast (weights once, kept for the backward pass), their outputs are
//! half as large. Norms, losses and powers stay in 32 bits, and what is in between follows its inputs. Gradients of parameters are made in 16
//! bits and cast. All that is read off the names of autograd's nodes; that the recorded run is in 32 bits is assumed.

use rustc_hash::{FxHashMap, FxHashSet};

use super::gradients::{release_factors, without_gradients};
use super::holds::Holds;
use super::nodes::{Class, Nodes, Product, changed_in_place, operations, parts, products};
use super::program::{NEVER, Phase, Program, Purpose, Step, Tensor};
use super::{Changes, End, Sure, Unfit};

/// A number format.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Precision {
    /// `torch.autocast` with bfloat16.
    AutocastBf16,
    /// The same with float16.
    AutocastFp16,
    /// Model, gradients and state in bfloat16.
    Bf16,
    /// Everything in float32.
    Fp32,
}

/// So many requests in a row without a node of autograd are a part of the forward pass without a graph, as a frozen encoder.
const LEAST_WITHOUT_GRAPH: usize = 16;
/// Below this, tensors are statistics, indices and seeds, whose format does not matter.
const SMALL: u64 = 64 << 10;

/// Casts a program that runs in 32 bits.
///
/// # Errors
/// Why its formats are not known.
pub(super) fn cast(
    program: &mut Program<'_>,
    precision: Precision,
    end: End,
    changes: &mut Changes,
) -> Result<(), Unfit> {
    let nodes = Nodes::of(program);
    if precision == Precision::Fp32 {
        return Err(Unfit(
            "a trace does not show which tensors are in 16 bits, so their 32-bit sizes are not known".into(),
        ));
    }
    if !nodes.has_names {
        return Err(Unfit(
            "the trace has no names of autograd nodes: it is not known what runs in 16 bits".into(),
        ));
    }
    if nodes.has_casts {
        return Err(Unfit("the recorded run already casts between formats: record one in 32 bits".into()));
    }
    if nodes.has_recurrences {
        return Err(Unfit(
            "the model has a recurrent network in one cuDNN operation: it is not known what it keeps in 16 bits"
                .into(),
        ));
    }
    let mut casting = Casting { nodes, end, added: vec![] };
    for step in program.steps.clone() {
        match precision {
            Precision::Bf16 => casting.all(program, &step),
            Precision::AutocastBf16 | Precision::AutocastFp16 | Precision::Fp32 => {
                casting.autocast(program, &step)
            }
        }
    }
    if precision == Precision::Bf16 {
        for tensor in &mut program.tensors {
            let is_of_model =
                matches!(tensor.purpose, Purpose::Parameter | Purpose::Gradient | Purpose::State);
            if is_of_model && tensor.bytes > 8 {
                tensor.bytes = tensor.bytes.div_ceil(2);
            }
        }
    }
    program.tensors.append(&mut casting.added);
    program.settle();
    changes.note(Sure::Range, "the recorded run is assumed to be in 32 bits; the format of an operation follows from its autograd node, and other kernels may need other workspaces");
    if casting.nodes.has_convolutions {
        changes.note(
            Sure::Range,
            "cuDNN chooses the algorithm of a convolution by its format: its workspace is assumed to be half as large; at least: none, at most: as recorded",
        );
    }
    if precision != Precision::Bf16 {
        changes.note(
            Sure::Range,
            "sums, what passes on its input, and parts without a graph may be in either format: at least in 16 bits, at most in 32",
        );
    }
    if precision == Precision::Bf16 {
        changes.note(
            Sure::Range,
            "the loss, with what comes after the last product, and norms that are written out are assumed to be computed in 32 bits, as most libraries do; at least: in 16",
        );
    }
    Ok(())
}

struct Casting {
    nodes: Nodes,
    end: End,
    added: Vec<Tensor>,
}

/// The output of an operation that was last seen.
#[derive(Clone, Copy)]
struct Last {
    index: usize,
    is_half: bool,
}

impl Casting {
    fn temporary(&mut self, bytes: u64, born: u64, freed: u64) {
        self.added.push(Program::tensor(bytes, Purpose::Activation, Phase::Forward, born, freed));
    }

    /// Bytes of a workspace of a convolution, for which cuDNN may choose an algorithm that needs none, or as much.
    fn workspace(&self, bytes: u64) -> u64 {
        match self.end {
            End::Least => 0,
            End::Best => bytes.div_ceil(2),
            End::Most => bytes,
        }
    }

    /// Whether a tensor is of the program's own forward pass: of a module's, or of code around it that autograd has a node for, as a loss.
    fn is_of_forward(&self, it: &Tensor) -> bool {
        it.phase == Phase::Forward || it.phase == Phase::Outside && self.nodes.knows(it.stack)
    }

    /// Whether a tensor is a mask of a dropout, an element of 1 byte for each of 4.
    fn is_mask(tensors: &[Tensor], index: usize, own: &std::ops::Range<usize>) -> bool {
        let it = &tensors[index];
        let near = index.saturating_sub(2).max(own.start)..(index + 3).min(own.end);
        let mut near = near.map(|index| &tensors[index]);
        near.any(|other| other.stack == it.stack && other.bytes == it.bytes.saturating_mul(4))
    }

    /// Tensors of parts of a forward pass that have no graph. Which of them are in 16 bits, no node says.
    fn without_graph(&self, forward: &[Tensor]) -> FxHashSet<usize> {
        let is_one = |it: &Tensor| {
            it.phase == Phase::Forward
                && it.freed != NEVER
                && it.bytes >= SMALL
                && it.purpose != Purpose::Parameter
        };
        let own: Vec<usize> = (0..forward.len()).filter(|index| is_one(&forward[*index])).collect();
        let parts =
            own.chunk_by(|a, b| self.nodes.knows(forward[*a].stack) == self.nodes.knows(forward[*b].stack));
        let without = parts
            .filter(|part| part.len() >= LEAST_WITHOUT_GRAPH && !self.nodes.knows(forward[part[0]].stack));
        without.flatten().copied().collect()
    }

    /// Whether an operation makes 16 bits. `lasts`: the last one did; `any`: some one has; `joins`: a tensor in 32 bits may be a part.
    fn is_half(&self, class: Class, lasts: bool, any: bool, joins: bool) -> bool {
        match (class, self.end) {
            (Class::Half, _) => true,
            (Class::Full, _) | (Class::Gathers | Class::Follows | Class::Joins, End::Most) => false,
            (Class::Gathers, _) | (Class::Follows | Class::Joins, End::Least) => any,
            (Class::Follows, End::Best) => lasts,
            (Class::Joins, End::Best) => lasts && !joins,
        }
    }

    fn autocast(&mut self, program: &mut Program<'_>, step: &Step) {
        let products = products(program, step, &self.nodes);
        let by_output: FxHashMap<usize, Product> = products.into_iter().map(|it| (it.output, it)).collect();
        let grids = operations(program, step, &self.nodes, &|stack| self.nodes.is_grid(stack));
        let by_output_of_grid: FxHashMap<usize, Product> =
            grids.into_iter().map(|it| (it.output, it)).collect();
        let in_place = changed_in_place(program, step, &self.nodes);
        let own = program.born_within(step.begin, step.passes[0].0);
        let start = step.passes[0].0;
        let is_kept = |it: &Tensor| it.freed > start && it.freed != NEVER;
        let mut halves: FxHashSet<usize> = FxHashSet::default();
        let mut is_half_at: FxHashMap<u32, bool> = FxHashMap::default();
        // Until when variables hold tensors in 32 bits, by size: a sum may take one of them. What autograd alone keeps, no sum takes.
        let mut full: FxHashMap<u64, u64> = FxHashMap::default();
        let mut last: Option<Last> = None;
        let mut input: Option<usize> = None;
        let recorded: Vec<Tensor> = program.tensors[own.clone()].to_vec();
        let holds = Holds::of(program, own.clone(), start);
        let without_graph = self.without_graph(&recorded);
        for index in own.clone() {
            let it = recorded[index - own.start];
            if without_graph.contains(&(index - own.start)) {
                if self.end != End::Most {
                    program.tensors[index].bytes = it.bytes.div_ceil(2);
                }
                continue;
            }
            if !self.is_of_forward(&it)
                || it.freed == NEVER
                || it.bytes < SMALL
                || Casting::is_mask(&program.tensors, index, &own)
            {
                continue;
            }
            let class = self.nodes.class(it.stack);
            let joins =
                it.purpose != Purpose::Cache && full.get(&it.bytes).is_some_and(|until| *until > it.born);
            let is_half =
                self.is_half(class, last.is_some_and(|last| last.is_half), !halves.is_empty(), joins);
            match (class, last) {
                (Class::Half, Some(last)) => {
                    // Several products in a row take the same input: each casts it. What one call asks for after its first output, as an
                    // einsum of several operands, it makes of what it has cast.
                    let is_same_call = last.is_half && recorded[last.index - own.start].stack == it.stack;
                    let from = if last.is_half { input } else { Some(last.index) };
                    input = from;
                    if let Some(from) = from.filter(|_| !is_same_call) {
                        let whole = recorded[from - own.start];
                        let freed = if is_kept(&whole) { whole.freed } else { it.born + 2 };
                        self.temporary(whole.bytes.div_ceil(2), it.born - 1, freed);
                        // Beside the copy it stays in 32 bits if its own operation needs it.
                        let is_needed = self.nodes.saves_output(whole.stack) || in_place.contains(&from);
                        if is_kept(&whole) && program.tensors[from].freed != NEVER && !is_needed {
                            program.tensors[from].free_at(it.born + 3);
                        }
                    }
                    if let Some(product) = by_output.get(&index) {
                        self.temporary(product.weight.div_ceil(2), it.born - 2, product.node.1 + 3);
                    }
                }
                (Class::Full, Some(last)) if last.is_half => {
                    let whole = recorded[last.index - own.start];
                    let freed = if is_kept(&whole) { whole.freed } else { it.born + 2 };
                    self.temporary(whole.bytes, it.born - 1, freed);
                    if is_kept(&whole) {
                        program.tensors[last.index].free_at(it.born + 3);
                    }
                    input = None;
                }
                _ => input = if class == Class::Half { input } else { None },
            }
            // A grid is looked up in the format of the places, in 32 bits: each look-up casts the whole of it, and keeps that.
            if let Some(product) = by_output_of_grid.get(&index) {
                let bytes = input_bytes(program, product);
                let is_grid = |other: &&usize| {
                    let other = recorded[**other - own.start];
                    other.bytes == bytes && other.freed > it.born
                };
                if halves.iter().any(|other| is_grid(&other)) {
                    self.temporary(bytes, it.born - 1, product.node.1 + 3);
                }
            }
            if is_half {
                halves.insert(index);
            } else {
                let until = if is_kept(&it) { holds.until(program, index, End::Most) } else { it.freed };
                let held = full.entry(it.bytes).or_insert(0);
                *held = until.max(*held);
            }
            is_half_at.insert(self.nodes.frames(it.stack), is_half);
            // A workspace is freed before anything else is made, and what its product made is not: nothing is made of it.
            let next = recorded.get(index - own.start + 1).map_or(start, |next| next.born);
            let is_workspace = class == Class::Half
                && it.freed < next
                && last.is_some_and(|last| {
                    let made = recorded[last.index - own.start];
                    made.stack == it.stack && made.freed > it.freed
                });
            match is_workspace {
                true if self.nodes.is_convolution(it.stack) => {
                    halves.remove(&index);
                    program.tensors[index].bytes = self.workspace(it.bytes);
                }
                true => {}
                false => last = Some(Last { index, is_half }),
            }
        }
        for index in halves {
            program.tensors[index].bytes = program.tensors[index].bytes.div_ceil(2);
        }
        self.backward(program, step, &is_half_at);
    }

    /// Gradients have the format of what they are gradients of; those of parameters are cast to 32 bits.
    fn backward(&mut self, program: &mut Program<'_>, step: &Step, is_half_at: &FxHashMap<u32, bool>) {
        let parts = parts(program, step);
        let end = step.passes[step.passes.len() - 1].1;
        let own = program.born_within(step.passes[0].0, end + 1);
        let ends = node_ends(program, own.clone());
        let workspaces = self.workspaces(program, own.clone());
        for index in own {
            let it = program.tensors[index];
            if it.node == 0 || it.bytes < SMALL {
                continue;
            }
            if workspaces.contains(&index) {
                program.tensors[index].bytes = self.workspace(it.bytes);
                continue;
            }
            let is_half = is_half_at.get(&self.nodes.frames(it.stack)).copied().unwrap_or(false);
            let is_product = self.nodes.class(it.stack) == Class::Half;
            if it.purpose == Purpose::Gradient || parts.contains(&index) {
                if is_product {
                    self.temporary(it.bytes.div_ceil(2), it.born - 1, it.born + 1);
                }
                continue;
            }
            // Sums are made in 32 bits, whatever they are of.
            let is_staging =
                ends.get(&it.node).is_some_and(|(since, last)| it.born > *since && it.freed < *last);
            if is_half && !is_staging {
                program.tensors[index].bytes = it.bytes.div_ceil(2);
            }
        }
    }

    /// Workspaces of convolutions in a backward pass: freed before anything else is requested.
    fn workspaces(&self, program: &Program<'_>, own: std::ops::Range<usize>) -> FxHashSet<usize> {
        let is_one = |index: &usize| {
            let it = &program.tensors[*index];
            let next = program.tensors.get(index + 1).map_or(NEVER, |next| next.born);
            it.node > 0 && it.freed < next && self.nodes.is_convolution(it.stack)
        };
        own.filter(is_one).collect()
    }

    fn all(&mut self, program: &mut Program<'_>, step: &Step) {
        let end = step.passes[step.passes.len() - 1].1;
        let forward = program.born_within(step.begin, step.passes[0].0);
        let recorded: Vec<Tensor> = program.tensors[forward.clone()].to_vec();
        // Libraries compute losses and norms that they write out in 32 bits; so does who writes nothing of it at the most.
        let is_in_half = self.end == End::Least;
        let powers = operations(program, step, &self.nodes, &|stack| self.nodes.is_power_of_norm(stack));
        let end_of_power: FxHashMap<usize, u64> =
            powers.iter().map(|product| (product.output, product.node.1)).collect();
        let holds = Holds::of(program, forward.clone(), step.passes[0].0);
        let mut last: Option<usize> = None;
        // What was made since the last product.
        let mut tail: Vec<usize> = vec![];
        let mut has_products = false;
        let mut of_loss: FxHashSet<u32> = FxHashSet::default();
        let mut is_in_loss = false;
        for index in forward.clone() {
            let it = recorded[index - forward.start];
            // A loss that the program itself computes may cast what the model returned, or not.
            let is_outside = it.phase == Phase::Outside && is_in_half && self.nodes.knows(it.stack);
            let is_float = (it.phase == Phase::Forward || is_outside)
                && it.freed != NEVER
                && it.purpose != Purpose::Parameter;
            if !is_float
                || it.bytes < SMALL
                || Casting::is_mask(&recorded, index - forward.start, &(0..recorded.len()))
            {
                continue;
            }
            if self.nodes.is_loss(it.stack) && !is_in_half {
                if !is_in_loss {
                    // What a model returns is cast before anything else is done with it.
                    tail.retain(|_| has_products);
                    for index in &tail {
                        let whole = recorded[index - forward.start];
                        program.tensors[*index].bytes = whole.bytes;
                        of_loss.insert(self.nodes.frames(whole.stack));
                    }
                    let (first, freed) = match tail.first() {
                        Some(first) => (recorded[first - forward.start], 1 << 32),
                        None => (it, 4 << 32),
                    };
                    let cast = if tail.is_empty() {
                        last.map(|last| recorded[last - forward.start])
                    } else {
                        Some(first)
                    };
                    if let Some(cast) = cast {
                        self.temporary(cast.bytes, first.born - 1, first.born + freed);
                    }
                }
                is_in_loss = true;
                continue;
            }
            if self.nodes.is_power_of_norm(it.stack) && !is_in_half {
                // The norm keeps its input in 32 bits, and the sum that it is a norm of needs nobody to keep it.
                let until = end_of_power.get(&index).map_or(it.freed, |end| end + 3);
                self.temporary(it.bytes, it.born - 1, until);
                let input = last.filter(|last| recorded[last - forward.start].bytes == it.bytes);
                let is_sum =
                    |last: &usize| self.nodes.class(recorded[last - forward.start].stack) == Class::Joins;
                if let Some(input) = input.filter(is_sum).filter(|_| self.end == End::Best) {
                    let until = holds.until(program, input, End::Most);
                    let input = &mut program.tensors[input];
                    input.free_at(until.min(input.freed));
                }
                continue;
            }
            if self.nodes.is_root_of_norm(it.stack) && !is_in_half {
                self.temporary(it.bytes, it.born - 1, it.born + 2);
            }
            if self.nodes.class(it.stack) == Class::Half {
                tail.clear();
                (has_products, is_in_loss) = (true, false);
            } else {
                tail.push(index);
            }
            program.tensors[index].bytes = it.bytes.div_ceil(2);
            last = Some(index);
        }
        let backward = program.born_within(step.passes[0].0, end + 1);
        let ends = node_ends(program, backward.clone());
        let workspaces = self.workspaces(program, backward.clone());
        let mut last_of_loss: Option<Tensor> = None;
        for index in backward {
            let it = program.tensors[index];
            // What is for the model is halved with it.
            let is_of_model = matches!(it.purpose, Purpose::Gradient | Purpose::Parameter | Purpose::State);
            if it.node == 0 || it.bytes < SMALL || is_of_model || it.freed == NEVER {
                continue;
            }
            if workspaces.contains(&index) {
                program.tensors[index].bytes = self.workspace(it.bytes);
                continue;
            }
            let is_of_loss = self.nodes.is_loss(it.stack) || of_loss.contains(&self.nodes.frames(it.stack));
            if is_of_loss && !is_in_half {
                last_of_loss = Some(it);
                continue;
            }
            if let Some(last) = last_of_loss.take() {
                self.temporary(last.bytes.div_ceil(2), it.born - 1, last.freed);
                let own = program.born_within(last.born, last.born + 1);
                program.tensors[own].iter_mut().for_each(|tensor| tensor.free_at(it.born - 1));
            }
            let is_staging =
                ends.get(&it.node).is_some_and(|(since, last)| it.born > *since && it.freed < *last);
            let is_of_norm = self.nodes.is_power_of_norm(it.stack) || self.nodes.is_root_of_norm(it.stack);
            if !is_staging && (is_in_half || !is_of_norm) {
                program.tensors[index].bytes = it.bytes.div_ceil(2);
            }
        }
    }
}

/// Of each node with gradients of parameters: when the last of them was asked for, and when the next node begins.
fn node_ends(program: &Program<'_>, own: std::ops::Range<usize>) -> FxHashMap<u32, (u64, u64)> {
    let mut ends: FxHashMap<u32, (u64, u64)> = FxHashMap::default();
    let mut first: FxHashMap<u32, u64> = FxHashMap::default();
    for tensor in &program.tensors[own] {
        first.entry(tensor.node).or_insert(tensor.born);
        if tensor.purpose == Purpose::Gradient {
            ends.insert(tensor.node, (tensor.born, NEVER));
        }
    }
    for (node, (_, end)) in &mut ends {
        *end = first.get(&(node + 1)).copied().unwrap_or(NEVER);
    }
    ends
}

/// Adapters of low rank: the recorded parameters are frozen, and every matrix product within a module has two small matrices that are trained.
///
/// # Errors
/// The run shows no matrix products with parameters.
pub(super) fn adapt(
    program: &mut Program<'_>,
    rank: u64,
    end: End,
    changes: &mut Changes,
) -> Result<(), Unfit> {
    let nodes = Nodes::of(program);
    if !nodes.has_names {
        return Err(Unfit(
            "the trace has no names of autograd nodes: it is not known which operations are matrix products"
                .into(),
        ));
    }
    let mut removed: FxHashSet<usize> = FxHashSet::default();
    let mut n_adapted = 0;
    let mut added: Vec<Tensor> = vec![];
    let mut new_gradients: Vec<Vec<usize>> = vec![];
    let steps = program.steps.clone();
    let first = steps[0].begin;
    for (number, step) in steps.iter().enumerate() {
        let products: Vec<Product> = products(program, step, &nodes);
        // The output layer is left out, as adapters of all linear layers do: it is the last and the largest.
        let last = products.iter().map(|it| it.output).max();
        let adapted: Vec<Product> =
            products.into_iter().filter(|it| it.weight > SMALL && Some(it.output) != last).collect();
        n_adapted = n_adapted.max(adapted.len());
        let all: FxHashSet<usize> = step.gradients.iter().copied().collect();
        removed.extend(without_gradients(program, step, &all, None));
        release_factors(program, step, &all, end);
        let mut own = vec![];
        for product in &adapted {
            let output = program.tensors[product.output];
            let (inner, outer) = sides(product);
            let sides = [inner * rank * 4, outer * rank * 4];
            // Its output, the same scaled, and the sum, which takes the place of the recorded output.
            let at = output.born;
            added.push(Program::tensor(output.bytes, Purpose::Temporary, Phase::Forward, at + 1, at + 3));
            let scaled = at + 2;
            added.push(Program::tensor(output.bytes, Purpose::Temporary, Phase::Forward, scaled, at + 5));
            // The backward pass scales the gradient and multiplies it with both.
            let (begin, last) = product.node;
            added.push(Program::tensor(
                output.bytes,
                Purpose::Temporary,
                Phase::Backward,
                begin - 2,
                last + 2,
            ));
            let whole = end.of(0.0, 1.0, 1.0) > 0.0;
            if whole {
                added.push(Program::tensor(
                    input_bytes(program, product),
                    Purpose::Temporary,
                    Phase::Backward,
                    last + 1,
                    last + 5,
                ));
            }
            for (offset, bytes) in (3..).zip(sides) {
                if number == 0 {
                    added.push(Program::tensor(
                        bytes,
                        Purpose::Parameter,
                        Phase::Model,
                        first - 100_000 + added.len() as u64,
                        NEVER,
                    ));
                }
                own.push(added.len());
                added.push(Program::tensor(
                    bytes,
                    Purpose::Gradient,
                    Phase::Backward,
                    last + offset,
                    step.end + 1 + own.len() as u64,
                ));
            }
        }
        new_gradients.push(own);
    }
    if n_adapted == 0 {
        return Err(Unfit(
            "no matrix products with trained parameters were found: there is nothing to adapt".into(),
        ));
    }
    let n = program.tensors.len();
    program.tensors.append(&mut added);
    for (step, own) in program.steps.iter_mut().zip(new_gradients) {
        step.gradients = own.into_iter().map(|index| n + index).collect();
    }
    program.retain(|index, _| !removed.contains(&index));
    program.settle();
    changes.note(
        Sure::Range,
        format!("adapters of rank {rank} at {n_adapted} matrix products, all else frozen; the sides of matrices are inferred from their biases"),
    );
    Ok(())
}

/// Elements along the sides of a product's matrix: its bias is as long as one of them, else it is taken to be square. What is as large as the
/// matrix is not a bias but a part of its gradient, as where it is used twice.
fn sides(product: &Product) -> (u64, u64) {
    /// No layer is narrower.
    const NARROWEST: u64 = 8;
    let (elements, bias) = (product.weight / 4, product.bias / 4);
    let is_side = bias > 0 && elements.is_multiple_of(bias) && elements / bias >= NARROWEST;
    let outer = if is_side { bias } else { elements.isqrt().max(1) };
    ((elements / outer).max(1), outer)
}

/// The gradient of a product's input is as large as what its node asks for first.
fn input_bytes(program: &Program<'_>, product: &Product) -> u64 {
    let first = program.born_within(product.node.0, product.node.0 + 1);
    program.tensors[first].first().map_or(0, |it| it.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_shows_a_side_and_a_part_of_the_gradient_does_not() {
        let product = |weight, bias| Product { output: 0, weight, bias, node: (0, 0) };
        assert_eq!(sides(&product(4 * 768 * 3072, 4 * 3072)), (768, 3072));
        assert_eq!(sides(&product(4 * 768 * 768, 0)), (768, 768));
        assert_eq!(sides(&product(4 * 768 * 768, 4 * 768 * 768)), (768, 768));
    }
}
