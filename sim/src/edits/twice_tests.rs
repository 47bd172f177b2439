//! Tensors and parameters that a program uses twice.

use std::sync::Arc;

use super::program::{Known, NEVER, Phase, Program, Purpose, Understood};
use super::tests::{BACK, LAYER, LOSS, MIB, MODEL, NONE, SCRATCH, Script, peak_of, stacks};
use super::{Edits, End, Offload};
use crate::ops::{Builder, OpStream, StackId};
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

/// Two layers of 10 and 11 MiB: the second takes what the first made and keeps, 8 MiB. The first one's backward pass frees that.
fn with_shortcut() -> (OpStream, Understood) {
    const SHORTCUT: u32 = 6;
    let mut it = script();
    for mib in [10, 11] {
        it.ask(mib, MODEL, Purpose::Parameter, Phase::Model);
    }
    for _ in 0..2 {
        let input = it.ask(6, LAYER, Purpose::Activation, Phase::Forward);
        let made = it.ask(8, LAYER, Purpose::Activation, Phase::Forward);
        let output = it.ask(4, SCRATCH, Purpose::Activation, Phase::Forward);
        let loss = it.ask(1, LOSS, Purpose::Activation, Phase::Forward);
        let first = it.ask(4, LOSS, Purpose::Temporary, Phase::Backward);
        it.free(output);
        let back = it.ask(8, SHORTCUT, Purpose::Temporary, Phase::Backward);
        let of_second = it.ask(11, SHORTCUT, Purpose::Gradient, Phase::Backward);
        it.free(first);
        let scratch = it.ask(3, BACK, Purpose::Temporary, Phase::Backward);
        for _ in 0..2 {
            let passing = it.ask(3, BACK, Purpose::Temporary, Phase::Backward);
            it.free(passing);
        }
        it.free(made);
        let of_first = it.ask(10, BACK, Purpose::Gradient, Phase::Backward);
        it.free(input);
        it.free(back);
        it.free(scratch);
        it.passes.push((first, of_first));
        it.free(loss);
        it.free(of_first);
        it.free(of_second);
    }
    let mut stacks = stacks();
    stacks.lists.push([2, 0].into());
    stacks.nodes.insert(StackId(SHORTCUT), Arc::from("ConvolutionBackward0"));
    recorded(it, stacks)
}

#[test]
fn a_trained_shortcut_keeps_what_a_frozen_layer_made() {
    let (stream, understood) = with_shortcut();
    let program = Program::of(&stream, &understood).expect("it can be edited");
    let edits = Edits { freeze: Some(0.5), ..NONE };
    let (edited, _) = edits.apply(&program, End::Best).expect("it can be made");
    let is_kept = |mib: u64| {
        let step = &edited.steps[1];
        let own = &edited.tensors[edited.born_within(step.begin, step.passes[0].0)];
        let it = own.iter().find(|it| it.bytes == mib * MIB).expect("it was made");
        it.freed != NEVER && it.freed > step.passes[0].0
    };
    assert_eq!((is_kept(8), is_kept(6)), (true, false));
}

/// A layer whose input of 8 MiB is not in order: each pass copies it.
fn that_puts_in_order() -> (OpStream, Understood) {
    let mut it = script();
    it.ask(2, MODEL, Purpose::Parameter, Phase::Model);
    for _ in 0..2 {
        let copy = it.ask(8, LAYER, Purpose::Temporary, Phase::Forward);
        let kept = it.ask(4, LAYER, Purpose::Activation, Phase::Forward);
        it.free(copy);
        let loss = it.ask(1, LOSS, Purpose::Activation, Phase::Forward);
        let first = it.ask(4, LOSS, Purpose::Temporary, Phase::Backward);
        it.free(kept);
        let copy = it.ask(8, BACK, Purpose::Temporary, Phase::Backward);
        let gradient = it.ask(2, BACK, Purpose::Gradient, Phase::Backward);
        it.free(copy);
        it.free(first);
        it.passes.push((first, gradient));
        it.free(loss);
        it.free(gradient);
    }
    recorded(it, stacks())
}

#[test]
fn what_comes_back_from_the_host_takes_the_place_of_a_copy_in_order() {
    let (stream, understood) = that_puts_in_order();
    let program = Program::of(&stream, &understood).expect("it can be edited");
    let edits = Edits { offload: Some(Offload::Activations), ..NONE };
    let (edited, _) = edits.apply(&program, End::Best).expect("it can be made");
    let copies = edited.tensors.iter().filter(|it| it.bytes == 8 * MIB && it.phase == Phase::Backward);
    assert_eq!(copies.count(), edited.steps.len());
}

/// Steps that keep 8 MiB; a variable holds 20 MiB until the next forward pass has begun. An evaluation of eight requests comes before a step.
fn that_evaluates() -> (OpStream, Understood) {
    let mut it = script();
    it.ask(2, MODEL, Purpose::Parameter, Phase::Model);
    let mut output = None;
    for step in 0..3 {
        if step == 2 {
            for _ in 0..4 {
                for line in [LAYER, SCRATCH] {
                    let passing = it.ask(8, line, Purpose::Temporary, Phase::Forward);
                    it.free(passing);
                }
            }
        }
        let kept = it.ask(8, LAYER, Purpose::Activation, Phase::Forward);
        let made = it.ask(20, SCRATCH, Purpose::Activation, Phase::Forward);
        output.replace(made).into_iter().for_each(|before| it.free(before));
        let first = it.ask(40, LOSS, Purpose::Temporary, Phase::Backward);
        let gradient = it.ask(2, BACK, Purpose::Gradient, Phase::Backward);
        it.free(kept);
        it.free(first);
        it.passes.push((first, gradient));
        it.free(gradient);
    }
    output.into_iter().for_each(|output| it.free(output));
    recorded(it, stacks())
}

#[test]
fn evaluation_between_steps_is_not_a_part_of_a_micro_batch() {
    let peak = |accumulate| peak_of(that_evaluates(), Edits { accumulate, ..NONE });
    // The parameter, what is kept, the output, the loss's temporary and the gradient; in a later micro-batch an earlier gradient as well.
    assert_eq!(peak(None), 2 + 8 + 20 + 40 + 2);
    assert_eq!(peak(Some(2)), 2 + 8 + 20 + 40 + 2 + 2);
}
