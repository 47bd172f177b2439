//! Calls in a row, and what their caller holds.

use std::sync::Arc;

use super::End;
use super::holds::Holds;
use super::program::{Known, Phase, Program, Purpose, Understood};
use crate::ops::{AllocId, Allocation, Builder, Frame, Op, OpStream, PoolIdx, StackId, StreamIdx};
use crate::stacks::Stacks;

const MIB: u64 = 1 << 20;

/// A stack of lines of `Block.forward`, and of what it calls there.
#[derive(Clone, Copy)]
enum Call {
    /// A convolution at a line.
    Convolution(u32),
    /// A norm at a line.
    Norm(u32),
    /// An operation of `Block.forward` itself.
    Own(u32),
}

fn stacks(calls: &[Call]) -> Stacks {
    let frame = |name: &str, file: &str, line| Frame { name: name.into(), file: file.into(), line };
    let mut frames = vec![
        frame("Model.forward", "/job/model.py", 5),
        frame("Conv2d.forward", "/v/torch/nn/modules/conv.py", 554),
        frame("BatchNorm.forward", "/v/torch/nn/modules/batchnorm.py", 193),
    ];
    let mut lists: Vec<Box<[u32]>> = vec![];
    for call in calls {
        let (line, inner) = match *call {
            Call::Convolution(line) => (line, Some(1)),
            Call::Norm(line) => (line, Some(2)),
            Call::Own(line) => (line, None),
        };
        let known = frames.iter().position(|frame| &*frame.name == "Block.forward" && frame.line == line);
        let at = known.unwrap_or_else(|| {
            frames.push(frame("Block.forward", "/job/model.py", line));
            frames.len() - 1
        });
        lists.push(inner.into_iter().chain([at as u32, 0]).collect());
    }
    Stacks { frames, lists, ..Stacks::default() }
}

/// A forward pass of such calls, each of which autograd keeps to the backward pass.
fn forward(calls: &[Call]) -> (OpStream, Understood) {
    let mut builder = Builder::new(0);
    let mut of = vec![];
    let mut ask = |stack: u32, phase, purpose| {
        of.push(Known { purpose, phase, time: 0 });
        let (stream, pool, stack) = (StreamIdx(0), PoolIdx::DEFAULT, StackId(stack));
        builder.alloc(Allocation { requested: MIB, address: 0, stack, stream, pool })
    };
    let kept: Vec<AllocId> =
        (0..calls.len()).map(|at| ask(at as u32, Phase::Forward, Purpose::Activation)).collect();
    let gradient = ask(u32::MAX, Phase::Backward, Purpose::Gradient);
    for id in kept.into_iter().rev() {
        builder.op(Op::FreeRequested(id));
        builder.op(Op::FreeCompleted(id));
    }
    let mut stream = builder.finish();
    stream.stacks = Arc::new(stacks(calls));
    (stream, Understood { of, passes: vec![(gradient, gradient)] })
}

/// How many of the later requests are made while variables hold the first.
fn held_through(calls: &[Call], end: End) -> usize {
    let (stream, understood) = forward(calls);
    let program = Program::of(&stream, &understood).expect("it can be edited");
    let start = program.steps[0].passes[0].0;
    let until = Holds::of(&program, 0..calls.len(), start).until(&program, 0, end);
    program.tensors[1..calls.len()].iter().filter(|it| it.born < until).count()
}

#[test]
fn a_caller_holds_what_it_passes_until_the_call_returns() {
    use Call::{Convolution, Norm, Own};
    let straight = [Convolution(10), Norm(11), Norm(11), Own(12), Convolution(13)];
    assert_eq!(held_through(&straight, End::Least), 1);
    // x = norm(x)
    assert_eq!(held_through(&straight, End::Best), 2);
    // y = norm(x)
    assert_eq!(held_through(&straight, End::Most), 4);
    // The last operation of a block: its caller passes it to the next block, and holds it until that returns.
    let blocks = [Own(12), Convolution(10), Norm(11), Own(12), Convolution(10), Norm(11)];
    assert_eq!(held_through(&blocks, End::Best), 3);
    assert_eq!(held_through(&blocks, End::Most), 3);
}
