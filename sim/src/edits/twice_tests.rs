//! Tensors and parameters that a program uses twice.

use std::sync::Arc;

use super::program::{Known, Phase, Program, Purpose, Understood};
use super::tests::{BACK, LAYER, LOSS, MODEL, Script, stacks};
use crate::ops::{Builder, OpStream};
use crate::stacks::Stacks;

fn script() -> Script {
    Script { builder: Builder::new(0), of: Vec::<Known>::new(), passes: vec![] }
}

fn recorded(it: Script, stacks: Stacks) -> (OpStream, Understood) {
    let mut stream = it.builder.finish();
    stream.stacks = Arc::new(stacks);
    (stream, Understood { of: it.of, passes: it.passes })
}

/// A parameter of 10 MiB that is used first and last. Its gradient is the sum of two parts, and the last request of the backward pass. The
/// optimizer requests nothing.
fn that_ties() -> (OpStream, Understood) {
    let mut it = script();
    it.ask(10, MODEL, Purpose::Parameter, Phase::Model);
    for _ in 0..3 {
        let kept = it.ask(8, LAYER, Purpose::Activation, Phase::Forward);
        let first = it.ask(10, LOSS, Purpose::Temporary, Phase::Backward);
        let back = it.ask(4, LOSS, Purpose::Temporary, Phase::Backward);
        it.free(kept);
        let second = it.ask(10, BACK, Purpose::Gradient, Phase::Backward);
        it.free(back);
        let sum = it.ask(10, BACK, Purpose::Gradient, Phase::Backward);
        it.free(first);
        it.free(second);
        it.passes.push((first, sum));
        it.free(sum);
    }
    recorded(it, stacks())
}

#[test]
fn parts_of_a_sum_at_the_end_of_a_backward_pass_are_not_gradients() {
    let (stream, understood) = that_ties();
    let program = Program::of(&stream, &understood).expect("it can be edited");
    let n: Vec<usize> = program.steps.iter().map(|step| step.gradients.len()).collect();
    assert_eq!(n, [1, 1, 1]);
}
