//! Operations of a backward pass, one after the other: what each makes, and when it has returned.

use rustc_hash::FxHashSet;

use super::nodes::{Class, Nodes, parts};
use super::program::{LATE, NEVER, Phase, Program, Purpose, Step};
use crate::stacks::StackId;

/// Operations of a backward pass that ask for memory, in their order.
pub(super) struct Operations {
    pub(super) all: Vec<Operation>,
}

pub(super) struct Operation {
    /// Of its first request.
    pub(super) stack: StackId,
    pub(super) born: u64,
    /// The next one begins.
    pub(super) over: u64,
    /// It has returned, and what was brought back for it is freed, before the gradient of a vector is summed. Else never.
    pub(super) returns: u64,
    /// Bytes of the largest gradient of a parameter, where it is a matrix product or convolution with one.
    pub(super) weight: u64,
    /// Bytes of the gradient of its input.
    pub(super) input: Option<u64>,
    /// It may keep its input.
    pub(super) keeps: bool,
    /// What is taken for the gradient of its input is a copy of the input, as in the forward pass: its elements are put in order.
    pub(super) copies_input: bool,
}

impl Operations {
    pub(super) fn of(program: &Program<'_>, step: &Step, nodes: &Nodes) -> Operations {
        let (start, last) = (step.passes[0].0, step.passes[step.passes.len() - 1].1);
        let of_parameters = parts(program, step);
        let own = program.born_within(start, last + 1);
        let copies: FxHashSet<(u32, u64)> = program.tensors[program.born_within(step.begin, start)]
            .iter()
            .filter(|it| it.phase == Phase::Forward && it.freed < start)
            .map(|it| (nodes.frames(it.stack), it.bytes))
            .collect();
        let mut all: Vec<Operation> = vec![];
        let mut copied: Vec<(usize, u64)> = vec![];
        let mut number = 0;
        for index in own {
            let it = &program.tensors[index];
            if it.node == 0 {
                continue;
            }
            if it.node != number {
                number = it.node;
                if let Some(before) = all.last_mut() {
                    before.over = it.born - 1;
                }
                let class = nodes.class(it.stack);
                let over = last.max(start) + 1;
                all.push(Operation {
                    stack: it.stack,
                    born: it.born,
                    over,
                    returns: NEVER,
                    weight: 0,
                    input: None,
                    keeps: class != Class::Joins,
                    copies_input: false,
                });
            }
            let at = all.len().saturating_sub(1);
            let Some(operation) = all.last_mut() else { continue };
            if it.purpose == Purpose::Gradient || of_parameters.contains(&index) {
                // The matrix's gradient comes first.
                if operation.weight > it.bytes && nodes.adds_vector(it.stack) {
                    operation.returns = it.born - 1;
                }
                if nodes.class(it.stack) == Class::Half {
                    operation.weight = it.bytes.max(operation.weight);
                }
            } else if operation.input.is_none() {
                operation.input = Some(it.bytes);
                copied.push((at, it.freed));
            }
        }
        let n = all.len();
        for (at, freed) in copied {
            let it = &mut all[at];
            let key = (nodes.frames(it.stack), it.input.unwrap_or(0));
            // Nothing is requested after the last: what it made is freed a little later.
            let over = if at + 1 == n { it.over + LATE } else { it.over };
            it.copies_input = freed <= over && copies.contains(&key);
        }
        Operations { all }
    }

    /// The operation that runs at a moment.
    pub(super) fn at(&self, moment: u64) -> Option<usize> {
        self.all.partition_point(|it| it.born <= moment).checked_sub(1)
    }

    /// When a tensor is freed that was recorded as freed at a moment, if it is no longer autograd's own, but what a hook made for the operation
    /// (`saved_tensors_hooks`): a variable of the operation, which goes when that returns.
    pub(super) fn released(&self, freed: u64) -> u64 {
        self.at(freed).map_or(freed, |at| self.all[at].returns.min(freed))
    }
}
