//! Small programs, written out request by request.

use std::sync::Arc;

use super::*;
use crate::ops::{
    AllocId, Allocation, Builder, Frame, Op, OpStream, PoolIdx, RecordedOom, StackId, StreamIdx,
};
use crate::stacks::Stacks;
use crate::whatif::{Laboratory, Question};

pub(super) const MIB: u64 = 1 << 20;
/// Stacks of the program below.
pub(super) const MODEL: u32 = 0;
pub(super) const LAYER: u32 = 1;
pub(super) const SCRATCH: u32 = 2;
pub(super) const BACK: u32 = 3;
const ADAM: u32 = 4;
pub(super) const LOSS: u32 = 5;

pub(super) fn stacks() -> Stacks {
    let frame = |name: &str, file: &str, line| Frame { name: name.into(), file: file.into(), line };
    let frames = vec![
        frame("<module>", "/job/train.py", 1),
        frame("Model.forward", "/job/model.py", 10),
        frame("Layer.forward", "/job/model.py", 20),
        frame("Layer.forward", "/job/model.py", 21),
        frame("Adam._init_group", "/v/torch/optim/adam.py", 178),
        frame("_multi_tensor_adam", "/v/torch/optim/adam.py", 791),
        frame("cross_entropy", "/v/torch/nn/functional.py", 3504),
    ];
    let lists: Vec<Box<[u32]>> = vec![
        [0].into(),
        [3, 1, 0].into(),
        [2, 1, 0].into(),
        [3, 1, 0].into(),
        [5, 4, 0].into(),
        [6, 0].into(),
    ];
    let mut stacks = Stacks { frames, lists, ..Stacks::default() };
    stacks.nodes.insert(StackId(BACK), Arc::from("AddmmBackward0"));
    stacks
}

/// Writes a program.
pub(super) struct Script {
    pub(super) builder: Builder,
    pub(super) of: Vec<Known>,
    pub(super) passes: Vec<(AllocId, AllocId)>,
}

impl Script {
    pub(super) fn ask(&mut self, mib: u64, stack: u32, purpose: Purpose, phase: Phase) -> AllocId {
        let (stream, pool) = (StreamIdx(0), PoolIdx::DEFAULT);
        let stack = StackId(stack);
        self.of.push(Known { purpose, phase, time: self.of.len() as u64 * 1000 });
        self.builder.alloc(Allocation { requested: mib * MIB, address: 0, stack, stream, pool })
    }

    pub(super) fn free(&mut self, id: AllocId) {
        self.builder.op(Op::FreeRequested(id));
        self.builder.op(Op::FreeCompleted(id));
    }
}

/// Three layers of 10 MiB of parameters each. A layer keeps 8 MiB and has 4 MiB for a while. Adam has two states, and as much for a while as there
/// are parameters. Three steps.
///
/// ```text
///  forward   scratch 4 ├┤  kept 8 ├─────── ... ─────┤
///  backward                       scratch 8 ├──┤ gradient 10 ├──────┤
///  update                                             state 20 ├───────, roots 10 ├┤
/// ```
fn training() -> (OpStream, Understood) {
    trained(3)
}

/// The same with so many temporaries of the optimizer. Weight decay needs three more.
fn trained(n_roots: usize) -> (OpStream, Understood) {
    trained_with(n_roots, 0)
}

/// The same with so much that is made before the first step, and freed after the last, as what the constructor of Adagrad makes.
fn trained_with(n_roots: usize, early_mib: u64) -> (OpStream, Understood) {
    let mut it = Script { builder: Builder::new(0), of: vec![], passes: vec![] };
    for _ in 0..3 {
        it.ask(10, MODEL, Purpose::Parameter, Phase::Model);
    }
    let early = (early_mib > 0).then(|| it.ask(early_mib, LOSS, Purpose::State, Phase::Outside));
    for step in 0..3 {
        let input = it.ask(8, LOSS, Purpose::Other, Phase::Outside);
        let mut kept = vec![];
        for _ in 0..3 {
            let scratch = it.ask(4, SCRATCH, Purpose::Temporary, Phase::Forward);
            it.free(scratch);
            kept.push(it.ask(8, LAYER, Purpose::Activation, Phase::Forward));
        }
        let loss = it.ask(1, LOSS, Purpose::Activation, Phase::Forward);
        let (mut gradients, mut ends) = (vec![], vec![]);
        for kept in kept.into_iter().rev() {
            let scratch = it.ask(8, BACK, Purpose::Temporary, Phase::Backward);
            gradients.push(it.ask(10, BACK, Purpose::Gradient, Phase::Backward));
            it.free(kept);
            ends.extend([scratch, gradients[gradients.len() - 1]]);
            it.free(scratch);
        }
        it.passes.push((ends[0], ends[ends.len() - 1]));
        it.free(loss);
        if step == 0 {
            for _ in 0..6 {
                it.ask(10, ADAM, Purpose::State, Phase::Update);
            }
        }
        let roots: Vec<AllocId> =
            (0..n_roots).map(|_| it.ask(10, ADAM, Purpose::Temporary, Phase::Update)).collect();
        roots.into_iter().for_each(|root| it.free(root));
        gradients.into_iter().rev().for_each(|gradient| it.free(gradient));
        it.free(input);
    }
    early.into_iter().for_each(|id| it.free(id));
    let mut stream = it.builder.finish();
    stream.stacks = Arc::new(stacks());
    (stream, Understood { of: it.of, passes: it.passes })
}

#[test]
fn an_optimizer_that_is_not_reproduced_makes_no_edit_certain() {
    let sure = |n_roots| {
        let (stream, understood) = trained(n_roots);
        let program = Program::of(&stream, &understood).expect("it can be edited");
        let edits = Edits { optimizer: Some(Optimizer::Sgd), ..Edits::default() };
        edits.apply(&program, End::Best).expect("it can be made").1.sure()
    };
    assert_eq!([sure(3), sure(6)], [Sure::Certain, Sure::Range]);
}

#[test]
fn gradients_that_do_not_match_the_state_make_keeping_them_a_guess() {
    // Weights beside the model's, as of a mean of them, look like state.
    let sure = |early_mib| {
        let (stream, understood) = trained_with(3, early_mib);
        let program = Program::of(&stream, &understood).expect("it can be edited");
        let edits = Edits { set_to_none: Some(false), ..Edits::default() };
        edits.apply(&program, End::Best).expect("it can be made").1.sure()
    };
    assert_eq!([sure(0), sure(30)], [Sure::Certain, Sure::Guess]);
}

/// MiB requested at most, under edits.
fn peak(edits: Edits) -> u64 {
    peak_of(training(), edits)
}

pub(super) fn peak_of(program: (OpStream, Understood), edits: Edits) -> u64 {
    peak_at(program, edits, End::Best)
}

fn peak_at((stream, understood): (OpStream, Understood), edits: Edits, end: End) -> u64 {
    let program = Program::of(&stream, &understood).expect("it can be edited");
    let (edited, _) = edits.apply(&program, end).expect("they can be made");
    let edited = edited.stream();
    let laboratory = Laboratory::of_prediction(&edited);
    let outcome = laboratory.guess(&Question::torch((2, 11), "")).expect("a policy");
    outcome.books.requested.peak / MIB
}

pub(super) const NONE: Edits = Edits {
    optimizer: None,
    way: None,
    set_to_none: None,
    accumulate: None,
    freeze: None,
    lora: None,
    checkpoint: None,
    offload: None,
    precision: None,
    layout: None,
};

#[test]
fn a_program_without_edits_is_the_recorded_one() {
    let (stream, understood) = training();
    let program = Program::of(&stream, &understood).expect("it can be edited");
    let same = program.stream();
    assert_eq!(same.ops, stream.ops);
    assert_eq!(same.allocations, stream.allocations);
    // Parameters, state, gradients, roots and the input.
    assert_eq!(peak(NONE), 30 + 60 + 30 + 30 + 8);
}

#[test]
fn layers_hold_what_their_code_asked_for() {
    let (stream, understood) = training();
    let found = Program::of(&stream, &understood).expect("it can be edited").layers();
    let mib = |it: &Layer| {
        let known = [it.parameters.expect("known"), it.gradients, it.state.expect("known")];
        [known, [it.kept, it.forward, it.backward]]
            .concat()
            .iter()
            .map(|bytes| bytes / MIB)
            .collect::<Vec<_>>()
    };
    assert_eq!(found.layers.iter().map(mib).collect::<Vec<_>>(), vec![vec![10, 10, 20, 8, 4, 8]; 3]);
    // The input and the loss.
    assert_eq!(mib(&found.rest), [0, 0, 0, 9, 0, 0]);
    assert_eq!((found.step, found.n_steps), (1, 3));
    assert_eq!(found.layers.iter().map(|it| it.number).collect::<Vec<_>>(), [0, 1, 2]);
    let share: f64 = found.layers.iter().filter_map(|it| it.share).sum();
    assert!(share > 0.5 && share <= 1.0, "{share}");
}

#[test]
fn each_allocation_of_a_layer_is_of_that_layer_in_every_step() {
    let (stream, understood) = training();
    let of = Program::of(&stream, &understood).expect("it can be edited").layers_of_allocations();
    let mut mib = vec![[0; 6]; 3];
    for (index, layer) in of.iter().enumerate() {
        let purposes = [
            Purpose::Parameter,
            Purpose::Gradient,
            Purpose::State,
            Purpose::Activation,
            Purpose::Temporary,
            Purpose::Other,
        ];
        let purpose = purposes.iter().position(|it| *it == understood.of[index].purpose).expect("known");
        if let Some(layer) = layer {
            mib[*layer][purpose] += stream.allocations[index].requested / MIB;
        }
    }
    // Parameters and states are made once, the rest in each of three steps: scratch of the backward pass is the layer's, too.
    assert_eq!(mib, vec![[10, 30, 20, 24, 36, 0]; 3]);
}

#[test]
fn optimizers_have_their_state_and_their_temporaries() {
    let optimizer = |optimizer| peak(Edits { optimizer: Some(optimizer), ..NONE });
    assert_eq!(optimizer(Optimizer::AdamW), peak(NONE));
    // The first layer's backward pass: parameters, gradients, the input, the loss, what it kept, scratch.
    assert_eq!(optimizer(Optimizer::Sgd), 30 + 30 + 8 + 1 + 8 + 8);
    assert_eq!(optimizer(Optimizer::Momentum), 30 + 30 + 8 + 1 + 8 + 8 + 30);
    let way = |way| peak(Edits { way: Some(way), ..NONE });
    assert_eq!(way(Way::Fused), 30 + 60 + 30 + 8 + 1 + 8 + 8);
    // The last parameter's denominator, the next one's, and its root.
    assert_eq!(way(Way::ForLoop), 30 + 60 + 30 + 8 + 30);
}

#[test]
fn gradients_that_stay_are_held_through_the_forward_pass() {
    // Roots are beside gradients anyway; in the backward pass those of the first step, and the new one until it is added.
    let sgd = Edits { optimizer: Some(Optimizer::Sgd), ..NONE };
    assert_eq!(peak(Edits { set_to_none: Some(false), ..sgd }), 30 + 30 + 8 + 24 + 1 + 8 + 10);
    assert_eq!(peak(Edits { accumulate: Some(4), ..sgd }), 30 + 30 + 8 + 24 + 1 + 8 + 10);
    assert_eq!(peak(Edits { set_to_none: Some(true), ..NONE }), peak(NONE));
}

#[test]
fn what_is_made_before_the_first_step_is_held_through_all_micro_batches() {
    let peak = |accumulate| peak_of(trained_with(3, 70), Edits { accumulate, ..NONE });
    assert_eq!(peak(None), 30 + 70 + 60 + 30 + 30 + 8);
    // Beside gradients that stay: what a micro-batch keeps, the loss, and in its backward pass scratch and the new gradient.
    assert_eq!(peak(Some(4)), 30 + 70 + 60 + 30 + 8 + 24 + 1 + 8 + 10);
}

#[test]
fn checkpointed_layers_keep_their_inputs() {
    let sgd = Edits { optimizer: Some(Optimizer::Sgd), ..NONE };
    // With gradients that stay, the peak is where the last layer's backward pass begins: all layers keep 8.
    let before = peak(Edits { set_to_none: Some(false), ..sgd });
    let under = |chosen| peak(Edits { set_to_none: Some(false), checkpoint: Some(chosen), ..sgd });
    // What the first layer keeps is the second's input; the last is made again.
    assert_eq!((before, under(Chosen::All)), (111, 111));
}

#[test]
fn what_a_checkpointed_layer_returns_is_held_where_the_next_operation_keeps_it() {
    let first = Edits {
        optimizer: Some(Optimizer::Sgd),
        set_to_none: Some(false),
        checkpoint: Some(Chosen::Layers(0, 0)),
        ..NONE
    };
    let (mut stream, understood) = training();
    assert_eq!(peak_of((stream.clone(), understood.clone()), first), 111 - 8);
    // A norm keeps what it takes.
    let mut stacks = stacks();
    let norm = StackId(stacks.lists.len() as u32);
    stacks.lists.push([2, 1, 0].into());
    stacks.nodes.insert(norm, Arc::from("NativeLayerNormBackward0"));
    stream.stacks = Arc::new(stacks);
    assert_eq!(peak_of((stream, understood), first), 111);
}

/// An encoder of 10 MiB of parameters, which keeps 8, and a decoder of as much that looks up twice what the encoder made: each time the
/// look-up keeps 20 MiB, and its gradient of 30 MiB is added to that of the other. Two steps.
fn recurrent() -> (OpStream, Understood) {
    const LOOK: u32 = 6;
    const LOOK_BACK: u32 = 7;
    let mut it = Script { builder: Builder::new(0), of: vec![], passes: vec![] };
    for _ in 0..2 {
        it.ask(10, MODEL, Purpose::Parameter, Phase::Model);
    }
    for _ in 0..2 {
        let encoded = it.ask(8, LAYER, Purpose::Activation, Phase::Forward);
        let mut turns = vec![];
        for _ in 0..2 {
            let looked = it.ask(20, LOOK, Purpose::Activation, Phase::Forward);
            turns.push([looked, it.ask(4, SCRATCH, Purpose::Activation, Phase::Forward)]);
        }
        let mut sum = None;
        let mut of_decoder = None;
        for [looked, kept] in turns.into_iter().rev() {
            let back = it.ask(4, LOSS, Purpose::Temporary, Phase::Backward);
            let purpose = if of_decoder.is_some() { Purpose::Temporary } else { Purpose::Gradient };
            let own = it.ask(10, LOSS, purpose, Phase::Backward);
            it.free(kept);
            match of_decoder {
                Some(_) => it.free(own),
                None => {
                    it.passes.push((back, back));
                    of_decoder = Some(own);
                }
            }
            let grid = it.ask(30, LOOK_BACK, Purpose::Temporary, Phase::Backward);
            it.free(looked);
            it.free(back);
            match sum {
                Some(_) => it.free(grid),
                None => sum = Some(grid),
            }
        }
        let of_encoder = it.ask(10, BACK, Purpose::Gradient, Phase::Backward);
        it.passes.last_mut().expect("it has begun").1 = of_encoder;
        it.free(encoded);
        sum.into_iter().for_each(|sum| it.free(sum));
        it.free(of_encoder);
        of_decoder.into_iter().for_each(|own| it.free(own));
    }
    let mut stream = it.builder.finish();
    let mut stacks = stacks();
    stacks.lists.extend([Box::from([6, 1, 0]), Box::from([6, 1, 0])]);
    stacks.nodes.insert(StackId(LOOK_BACK), Arc::from("GridSampler2DBackward0"));
    stacks.nodes.insert(StackId(LOSS), Arc::from("ConvolutionBackward0"));
    stream.stacks = Arc::new(stacks);
    (stream, Understood { of: it.of, passes: it.passes })
}

#[test]
fn what_looks_up_a_frozen_encoder_keeps_nothing() {
    // In the backward pass of the first turn: the decoder's gradient, that of the second look-up, and this one's, until it is added.
    assert_eq!(peak_of(recurrent(), NONE), 20 + 8 + 20 + 4 + 10 + 2 * 30);
    // In the forward pass: what the encoder made, and the first look-up.
    assert_eq!(peak_of(recurrent(), Edits { freeze: Some(0.5), ..NONE }), 20 + 8 + 20);
}

#[test]
fn a_frozen_part_has_no_gradients_and_no_state() {
    // One of three: two gradients, their state and roots.
    assert_eq!(peak(Edits { freeze: Some(0.34), ..NONE }), 30 + 40 + 20 + 20 + 8);
}

#[test]
fn data_parallel_training_holds_buckets_beside_gradients() {
    assert_eq!(peak(Edits { layout: Some(Layout::Ddp(2)), ..NONE }), peak(NONE) + 30);
    // Of three parameters, two go to one process.
    assert_eq!(peak(Edits { layout: Some(Layout::Zero1(2)), ..NONE }), 30 + 30 + 40 + 30 + 20 + 8);
}

#[test]
fn a_run_that_ends_with_a_backward_pass_would_have_had_its_update_there() {
    let (mut stream, understood) = training();
    let (_, last) = understood.passes[2];
    let at = stream.ops.iter().position(|op| *op == Op::Alloc(last)).expect("it was asked for");
    stream.ops.truncate(at + 1);
    stream.allocations.truncate(last.0 as usize + 1);
    let understood = Understood { of: understood.of[..=last.0 as usize].to_vec(), ..understood };
    let program = Program::of(&stream, &understood).expect("it can be edited");
    let all = [
        Edits { optimizer: Some(Optimizer::AdamW), ..NONE },
        Edits { accumulate: Some(2), ..NONE },
        Edits { set_to_none: Some(false), ..NONE },
        Edits { layout: Some(Layout::Zero1(2)), ..NONE },
        Edits { checkpoint: Some(Chosen::All), offload: Some(Offload::Optimizer), ..NONE },
    ];
    for edits in all {
        let (edited, _) = edits.apply(&program, End::Best).expect("they can be made");
        assert!(edited.stream().ops.len() > 10, "{:?}", edits.spelled());
    }
}

/// A fourth step asks for more than the others, and runs out in its forward pass.
fn that_runs_out() -> (OpStream, Understood) {
    let (mut stream, mut understood) = training();
    for _ in 0..3 {
        let id = AllocId(stream.allocations.len() as u32);
        let (stack, pool) = (StackId(LAYER), PoolIdx::DEFAULT);
        let stream_of_it = StreamIdx(0);
        stream.allocations.push(Allocation {
            requested: 100 * MIB,
            address: 0,
            stack,
            stream: stream_of_it,
            pool,
        });
        understood.of.push(Known { purpose: Purpose::Other, phase: Phase::Forward, time: 1 << 40 });
        stream.ops.push(Op::Alloc(id));
    }
    stream.ops.push(Op::Oom(0));
    stream.ooms.push(RecordedOom {
        rounded: 100 * MIB,
        device_free: 0,
        stream: None,
        pool: PoolIdx::DEFAULT,
        stack: StackId(LAYER),
    });
    (stream, understood)
}

#[test]
fn activations_of_a_step_that_ran_out_are_not_edited() {
    let (stream, understood) = that_runs_out();
    let program = Program::of(&stream, &understood).expect("a training run");
    let checkpoint = Edits { checkpoint: Some(Chosen::All), ..Edits::default() };
    let why = checkpoint.apply(&program, End::Best).err().expect("the fourth step has no backward pass").0;
    assert!(why.starts_with("the peak is in a step that ran out of memory"), "{why}");
    // The optimizer's state is known without it.
    let sgd = Edits { optimizer: Some(Optimizer::Sgd), ..Edits::default() };
    let (_, changes) = sgd.apply(&program, End::Best).expect("another optimizer");
    assert_eq!(changes.sure(), Sure::Guess);
    // An error in a step whose peak is lower hides nothing.
    let (mut stream, understood) = training();
    stream.ops.push(Op::Oom(0));
    stream.ooms.push(RecordedOom {
        rounded: 500 * MIB,
        device_free: 0,
        stream: None,
        pool: PoolIdx::DEFAULT,
        stack: StackId(LAYER),
    });
    let program = Program::of(&stream, &understood).expect("a training run");
    assert!(checkpoint.apply(&program, End::Best).is_ok());
}

/// Two steps. An inner pass makes derivatives of so many MiB, which the pass that makes the gradient needs (`create_graph=True`).
fn that_differentiates_twice(kept_mib: u64) -> (OpStream, Understood) {
    let mut it = Script { builder: Builder::new(0), of: vec![], passes: vec![] };
    it.ask(10, MODEL, Purpose::Parameter, Phase::Model);
    for _ in 0..2 {
        let kept = it.ask(8, LAYER, Purpose::Activation, Phase::Forward);
        let derivative = it.ask(kept_mib, BACK, Purpose::Activation, Phase::Backward);
        it.passes.push((derivative, derivative));
        for _ in 0..6 {
            let scratch = it.ask(1, SCRATCH, Purpose::Temporary, Phase::Forward);
            it.free(scratch);
        }
        let gradient = it.ask(10, BACK, Purpose::Gradient, Phase::Backward);
        it.passes.push((gradient, gradient));
        it.free(derivative);
        it.free(kept);
        it.free(gradient);
    }
    let mut stream = it.builder.finish();
    stream.stacks = Arc::new(stacks());
    (stream, Understood { of: it.of, passes: it.passes })
}

#[test]
fn a_graph_that_an_inner_pass_keeps_is_not_edited() {
    let offloaded = |kept_mib| {
        let (stream, understood) = that_differentiates_twice(kept_mib);
        let program = Program::of(&stream, &understood).expect("a training run");
        let edits = Edits { offload: Some(Offload::Activations), ..NONE };
        edits.apply(&program, End::Best).map(|_| ()).map_err(|why| why.0)
    };
    assert_eq!(offloaded(1), Ok(()));
    let why = offloaded(30).expect_err("its graph is not known");
    assert!(why.starts_with("the recorded run differentiates twice"), "{why}");
}

/// A sum of 8 MiB, and a norm of it that is written out: a power for a while, and what is kept. Then as much for a while as is named.
fn that_writes_a_norm_out(scratch_mib: u64) -> (OpStream, Understood) {
    const SUM: u32 = 6;
    const POWER: u32 = 7;
    const ROOT: u32 = 8;
    let mut it = Script { builder: Builder::new(0), of: vec![], passes: vec![] };
    it.ask(10, MODEL, Purpose::Parameter, Phase::Model);
    for _ in 0..2 {
        let sum = it.ask(8, SUM, Purpose::Activation, Phase::Forward);
        let power = it.ask(8, POWER, Purpose::Temporary, Phase::Forward);
        it.free(power);
        let normed = it.ask(8, ROOT, Purpose::Activation, Phase::Forward);
        let scratch = it.ask(scratch_mib, SCRATCH, Purpose::Temporary, Phase::Forward);
        it.free(scratch);
        let gradient = it.ask(10, BACK, Purpose::Gradient, Phase::Backward);
        it.free(normed);
        let back = it.ask(8, ROOT, Purpose::Temporary, Phase::Backward);
        let of_power = it.ask(8, POWER, Purpose::Temporary, Phase::Backward);
        it.passes.push((gradient, of_power));
        it.free(back);
        it.free(sum);
        it.free(of_power);
        it.free(gradient);
    }
    let mut stream = it.builder.finish();
    let mut stacks = stacks();
    let first = stacks.frames.len() as u32;
    for line in [5, 6] {
        stacks.frames.push(Frame { name: "Norm.forward".into(), file: "/job/norm.py".into(), line });
    }
    stacks.lists.extend([Box::from([3, 0]), Box::from([first, 1, 0]), Box::from([first + 1, 1, 0])]);
    stacks.nodes.insert(StackId(SUM), Arc::from("AddBackward0"));
    stacks.nodes.insert(StackId(POWER), Arc::from("PowBackward0"));
    stacks.nodes.insert(StackId(ROOT), Arc::from("RsqrtBackward0"));
    stream.stacks = Arc::new(stacks);
    (stream, Understood { of: it.of, passes: it.passes })
}

#[test]
fn a_norm_that_is_written_out_keeps_its_input_in_32_bits() {
    let (stream, understood) = that_writes_a_norm_out(200);
    let program = Program::of(&stream, &understood).expect("a training run");
    let edits = Edits { precision: Some(Precision::Bf16), optimizer: Some(Optimizer::Sgd), ..NONE };
    let peak = |end| edits.apply(&program, end).expect("it can be cast").0.peak().0 / MIB;
    // Beside half of the parameters and of what is there for a while: all in 16 bits, or the input as it was and the rest in 16.
    assert_eq!(peak(End::Least), 5 + 100 + 4 + 4);
    assert_eq!(peak(End::Most), 5 + 100 + 4 + 8 + 4);
}

#[test]
fn what_is_not_a_training_run_is_refused() {
    let (mut stream, understood) = training();
    let none = Understood { passes: vec![], ..understood.clone() };
    assert!(Program::of(&stream, &none).is_err());
    assert!(Program::of(&stream, &Understood::default()).is_err());
    stream.history = crate::ops::History::StartsLate;
    assert!(Program::of(&stream, &understood).is_err());
}

/// Three layers keep so many MiB each. Their caller also calls something that keeps as much as is named, and a loss outside of it keeps so much.
struct Kept {
    layers: [u64; 3],
    beside: u64,
    loss: u64,
    /// The layers use one weight: its gradient is made in the backward pass of the last.
    is_shared: bool,
}

const EVEN: Kept = Kept { layers: [8, 8, 8], beside: 1, loss: 1, is_shared: false };

fn that_keeps(kept: &Kept) -> (OpStream, Understood) {
    const BESIDE: u32 = 6;
    let mut it = Script { builder: Builder::new(0), of: vec![], passes: vec![] };
    for _ in 0..3 {
        it.ask(10, MODEL, Purpose::Parameter, Phase::Model);
    }
    for _ in 0..2 {
        let beside = it.ask(kept.beside, BESIDE, Purpose::Activation, Phase::Forward);
        let mut own = vec![];
        for mib in kept.layers {
            let scratch = it.ask(4, SCRATCH, Purpose::Temporary, Phase::Forward);
            it.free(scratch);
            own.push(it.ask(mib, LAYER, Purpose::Activation, Phase::Forward));
        }
        let loss = it.ask(kept.loss, LOSS, Purpose::Activation, Phase::Forward);
        let (mut gradients, mut asked) = (vec![], vec![]);
        for own in own.into_iter().rev() {
            let scratch = it.ask(8, BACK, Purpose::Temporary, Phase::Backward);
            asked.push(scratch);
            if !kept.is_shared || gradients.is_empty() {
                gradients.push(it.ask(10, BACK, Purpose::Gradient, Phase::Backward));
            }
            it.free(own);
            it.free(scratch);
        }
        let last = it.ask(1, BACK, Purpose::Temporary, Phase::Backward);
        it.free(last);
        it.passes.push((asked[0], last));
        it.free(loss);
        it.free(beside);
        gradients.into_iter().rev().for_each(|gradient| it.free(gradient));
    }
    let mut stream = it.builder.finish();
    let mut stacks = stacks();
    let frame = stacks.frames.len() as u32;
    stacks.frames.push(Frame { name: "Beside.forward".into(), file: "/job/model.py".into(), line: 30 });
    stacks.lists.push([frame, 1, 0].into());
    stream.stacks = Arc::new(stacks);
    (stream, Understood { of: it.of, passes: it.passes })
}

/// How sure checkpointing is, by how many MiB less it may be, and whether it may free nothing.
fn checkpointed(kept: &Kept, chosen: Chosen) -> Result<(Sure, u64, bool), String> {
    let (stream, understood) = that_keeps(kept);
    let program = Program::of(&stream, &understood).expect("it can be edited");
    let edits = Edits { checkpoint: Some(chosen), ..NONE };
    let (_, changes) = edits.apply(&program, End::Best).map_err(|why| why.0)?;
    Ok((changes.sure(), changes.less / MIB, changes.may_free_nothing))
}

#[test]
fn layers_that_keep_different_amounts_may_be_several() {
    assert_eq!(checkpointed(&EVEN, Chosen::All), Ok((Sure::Range, 0, false)));
    let uneven = Kept { layers: [8, 8, 30], ..EVEN };
    assert_eq!(checkpointed(&uneven, Chosen::All), Ok((Sure::Guess, 22, false)));
}

#[test]
fn layers_that_share_their_weights_may_free_nothing() {
    let shared = Kept { is_shared: true, ..EVEN };
    assert_eq!(checkpointed(&shared, Chosen::All), Ok((Sure::Guess, 0, true)));
}

#[test]
fn what_is_called_beside_layers_may_be_checkpointed_too() {
    let beside = Kept { beside: 12, ..EVEN };
    assert_eq!(checkpointed(&beside, Chosen::All), Ok((Sure::Guess, 12, false)));
    // Whether the second is chosen depends on whether the other counts.
    assert_eq!(checkpointed(&beside, Chosen::Every(2)), Ok((Sure::Guess, 12 + 8, false)));
    assert_eq!(checkpointed(&beside, Chosen::Layers(0, 2)), Ok((Sure::Range, 0, false)));
    let why = checkpointed(&Kept { beside: 20, ..EVEN }, Chosen::All).expect_err("it may be what is meant");
    assert!(why.contains("also calls others, which keep 44 %"), "{why}");
}

#[test]
fn layers_that_keep_less_than_half_are_checkpointed_as_a_guess() {
    let loss = |loss| checkpointed(&Kept { loss, ..EVEN }, Chosen::All);
    assert_eq!(loss(40), Ok((Sure::Guess, 0, false)));
    let why = loss(100).expect_err("most of the model is in no layer");
    assert!(why.starts_with("repeating layers keep 19 %"), "{why}");
}

#[test]
fn steps_of_different_sizes_leave_the_place_of_new_state_open() {
    let (mut stream, understood) = training();
    let sure = |stream: &OpStream| {
        let program = Program::of(stream, &understood).expect("it can be edited");
        let edits = Edits { optimizer: Some(Optimizer::Sgd), ..NONE };
        edits.apply(&program, End::Best).expect("it can be made").1.sure()
    };
    assert_eq!(sure(&stream), Sure::Certain);
    let last = stream.allocations.iter().rposition(|it| it.stack == StackId(LAYER)).expect("a layer");
    stream.allocations[last].requested += MIB;
    assert_eq!(sure(&stream), Sure::Range);
}

const CONVOLUTION: u32 = 6;
const NORM: u32 = 7;
const DIFFERENCE: u32 = 8;

/// A convolution makes 8 MiB and has a workspace of as much as is named. A norm keeps that and makes 8, and a loss outside of modules keeps 8
/// more. Then 100 MiB for a while. The convolution's backward pass has such a workspace, too.
fn that_convolves(workspace_mib: u64) -> (OpStream, Understood) {
    let mut it = Script { builder: Builder::new(0), of: vec![], passes: vec![] };
    it.ask(10, MODEL, Purpose::Parameter, Phase::Model);
    for _ in 0..2 {
        let made = it.ask(8, CONVOLUTION, Purpose::Activation, Phase::Forward);
        let workspace = it.ask(workspace_mib, CONVOLUTION, Purpose::Temporary, Phase::Forward);
        it.free(workspace);
        let normed = it.ask(8, NORM, Purpose::Activation, Phase::Forward);
        let scratch = it.ask(100, SCRATCH, Purpose::Other, Phase::Outside);
        it.free(scratch);
        let again = it.ask(8, CONVOLUTION, Purpose::Activation, Phase::Forward);
        let loss = it.ask(8, DIFFERENCE, Purpose::Activation, Phase::Outside);
        let scratch = it.ask(100, LOSS, Purpose::Other, Phase::Outside);
        it.free(scratch);
        let difference = it.ask(8, DIFFERENCE, Purpose::Temporary, Phase::Backward);
        it.free(loss);
        let back = it.ask(8, CONVOLUTION, Purpose::Temporary, Phase::Backward);
        it.free(difference);
        it.free(again);
        let back_of_norm = it.ask(8, NORM, Purpose::Temporary, Phase::Backward);
        it.free(back);
        it.free(normed);
        let gradient = it.ask(10, CONVOLUTION, Purpose::Gradient, Phase::Backward);
        let workspace = it.ask(workspace_mib, CONVOLUTION, Purpose::Temporary, Phase::Backward);
        it.free(workspace);
        let last = it.ask(1, CONVOLUTION, Purpose::Temporary, Phase::Backward);
        it.passes.push((difference, last));
        it.free(last);
        it.free(back_of_norm);
        it.free(made);
        it.free(gradient);
    }
    let mut stream = it.builder.finish();
    let mut stacks = stacks();
    for line in [40, 41] {
        let frame = stacks.frames.len() as u32;
        stacks.frames.push(Frame { name: "Model.forward".into(), file: "/job/model.py".into(), line });
        stacks.lists.push([frame, 0].into());
    }
    let frame = stacks.frames.len() as u32;
    stacks.frames.push(Frame { name: "loss".into(), file: "/job/train.py".into(), line: 9 });
    stacks.lists.push([frame, 0].into());
    stacks.nodes.insert(StackId(CONVOLUTION), Arc::from("ConvolutionBackward0"));
    stacks.nodes.insert(StackId(NORM), Arc::from("NativeGroupNormBackward0"));
    stacks.nodes.insert(StackId(DIFFERENCE), Arc::from("AbsBackward0"));
    stream.stacks = Arc::new(stacks);
    (stream, Understood { of: it.of, passes: it.passes })
}

/// MiB requested at most under autocast.
fn autocast((stream, understood): (OpStream, Understood), end: End) -> u64 {
    let program = Program::of(&stream, &understood).expect("it can be edited");
    let edits = Edits { precision: Some(Precision::AutocastBf16), ..NONE };
    edits.apply(&program, end).expect("it can be cast").0.peak().0 / MIB
}

#[test]
fn a_workspace_of_a_convolution_is_not_its_output_and_may_not_be_needed() {
    let peaks = |mib| [End::Least, End::Best, End::Most].map(|end| autocast(that_convolves(mib), end));
    // Parameters, the norm's copy, its output, a convolution of it and the loss in 16 bits, or that in 32, and what is there for a while.
    assert_eq!(peaks(2), [10 + 8 + 4 + 4 + 4 + 100, 10 + 8 + 4 + 4 + 4 + 100, 10 + 8 + 4 + 4 + 8 + 100]);
    // In the backward pass: parameters, that copy, the gradients of the norm and of the parameter, and the workspace.
    assert_eq!(peaks(1000), [130, 10 + 8 + 8 + 10 + 500, 10 + 8 + 8 + 10 + 1000]);
}

/// A linear layer with a bias keeps 8 MiB. Its backward pass makes 8 for its input, 10 for its matrix, 1 for its bias, and needs 50 to sum
/// that.
fn that_sums_a_bias() -> (OpStream, Understood) {
    let mut it = Script { builder: Builder::new(0), of: vec![], passes: vec![] };
    for mib in [10, 1] {
        it.ask(mib, MODEL, Purpose::Parameter, Phase::Model);
    }
    for _ in 0..2 {
        let kept = it.ask(8, LAYER, Purpose::Activation, Phase::Forward);
        let scratch = it.ask(4, SCRATCH, Purpose::Temporary, Phase::Forward);
        it.free(scratch);
        let input = it.ask(8, BACK, Purpose::Temporary, Phase::Backward);
        let matrix = it.ask(10, BACK, Purpose::Gradient, Phase::Backward);
        let bias = it.ask(1, BACK, Purpose::Gradient, Phase::Backward);
        let staging = it.ask(50, BACK, Purpose::Temporary, Phase::Backward);
        it.passes.push((input, staging));
        it.free(staging);
        it.free(kept);
        it.free(input);
        it.free(matrix);
        it.free(bias);
    }
    let mut stream = it.builder.finish();
    stream.stacks = Arc::new(stacks());
    (stream, Understood { of: it.of, passes: it.passes })
}

#[test]
fn what_was_brought_back_is_freed_before_a_bias_is_summed() {
    assert_eq!(peak_of(that_sums_a_bias(), NONE), 11 + 8 + 8 + 10 + 1 + 50);
    let offloaded = Edits { offload: Some(Offload::Activations), ..NONE };
    assert_eq!(peak_of(that_sums_a_bias(), offloaded), 11 + 8 + 10 + 1 + 50);
}

/// Three layers of 3 MiB with a bias keep 8 MiB each. The backward pass of one makes 8 for its input, 2 for its matrix, 1 for its bias, and
/// needs 50 to sum that.
fn that_sums_biases() -> (OpStream, Understood) {
    let mut it = Script { builder: Builder::new(0), of: vec![], passes: vec![] };
    for _ in 0..3 {
        it.ask(3, MODEL, Purpose::Parameter, Phase::Model);
    }
    for _ in 0..2 {
        let mut kept = vec![];
        for _ in 0..3 {
            let scratch = it.ask(4, SCRATCH, Purpose::Temporary, Phase::Forward);
            it.free(scratch);
            kept.push(it.ask(8, LAYER, Purpose::Activation, Phase::Forward));
        }
        let loss = it.ask(1, LOSS, Purpose::Activation, Phase::Forward);
        let (mut gradients, mut ends) = (vec![], vec![]);
        for kept in kept.into_iter().rev() {
            let input = it.ask(8, BACK, Purpose::Temporary, Phase::Backward);
            gradients.extend([2, 1].map(|mib| it.ask(mib, BACK, Purpose::Gradient, Phase::Backward)));
            let staging = it.ask(50, BACK, Purpose::Temporary, Phase::Backward);
            ends.extend([input, staging]);
            it.free(staging);
            it.free(kept);
            it.free(input);
        }
        it.passes.push((ends[0], ends[ends.len() - 1]));
        it.free(loss);
        gradients.into_iter().rev().for_each(|gradient| it.free(gradient));
    }
    let mut stream = it.builder.finish();
    stream.stacks = Arc::new(stacks());
    (stream, Understood { of: it.of, passes: it.passes })
}

#[test]
fn what_a_layer_made_again_is_freed_before_a_bias_is_summed() {
    let again = Edits { checkpoint: Some(Chosen::Layers(2, 2)), ..NONE };
    let (mut stream, understood) = that_sums_biases();
    let with_bias = peak_of((stream.clone(), understood.clone()), again);
    let mut stacks = stacks();
    stacks.nodes.insert(StackId(BACK), Arc::from("MmBackward0"));
    stream.stacks = Arc::new(stacks);
    let without = peak_of((stream, understood), again);
    // Parameters, what two layers keep, the loss, the gradient of an input, and the sum. In the last layer's backward pass what was made again is
    // gone before a bias is summed, so the next layer's has more: its gradients.
    assert_eq!((with_bias, without), (9 + 16 + 1 + 8 + 50 + 6, 9 + 16 + 1 + 8 + 50 + 3 + 8));
}

/// One layer of 10 MiB, whose gradient stays from the first step on and is freed after the last: what later backward passes compute is added to
/// it. The forward pass has 30 MiB for a while. `is_copied`: the first gradient is a copy of what was computed.
fn that_zeroes(is_copied: bool) -> (OpStream, Understood) {
    let mut it = Script { builder: Builder::new(0), of: vec![], passes: vec![] };
    it.ask(10, MODEL, Purpose::Parameter, Phase::Model);
    let mut gradient = None;
    for step in 0..3 {
        let scratch = it.ask(30, SCRATCH, Purpose::Temporary, Phase::Forward);
        it.free(scratch);
        let kept = it.ask(8, LAYER, Purpose::Activation, Phase::Forward);
        let computed = match (step, is_copied) {
            (0, false) => it.ask(10, BACK, Purpose::Gradient, Phase::Backward),
            _ => it.ask(10, BACK, Purpose::Temporary, Phase::Backward),
        };
        let mut last = computed;
        if step == 0 && is_copied {
            last = it.ask(10, LOSS, Purpose::Gradient, Phase::Backward);
        }
        gradient = gradient.or(Some(last));
        if gradient != Some(computed) {
            it.free(computed);
        }
        it.free(kept);
        it.passes.push((computed, last));
        let root = it.ask(1, ADAM, Purpose::Temporary, Phase::Update);
        it.free(root);
    }
    gradient.into_iter().for_each(|gradient| it.free(gradient));
    let mut stream = it.builder.finish();
    stream.stacks = Arc::new(stacks());
    (stream, Understood { of: it.of, passes: it.passes })
}

#[test]
fn gradients_that_are_freed_with_the_model_were_kept() {
    for is_copied in [false, true] {
        let peak = |set_to_none| peak_of(that_zeroes(is_copied), Edits { set_to_none, ..NONE });
        assert_eq!((peak(None), peak(Some(true))), (10 + 10 + 30, 10 + 30), "{is_copied}");
    }
}

#[test]
fn gradients_may_be_cleared_just_before_the_backward_pass() {
    let edits = Edits { set_to_none: Some(true), ..NONE };
    let peak = |end| peak_at(that_zeroes(false), edits, end);
    assert_eq!((peak(End::Best), peak(End::Most)), (10 + 30, 10 + 10 + 30));
    assert!(!edits.has_one_end());
}
