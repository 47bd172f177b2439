//! Other optimizers: their state and what they allocate while they update, as `torch.optim` does it (2.0 to 2.11).
//!
//! Every optimizer of `torch.optim` makes its state for one parameter after the other at its first step. Then
//! - `for-loop` (`_single_tensor_*`) has temporaries of one parameter at a time, and a variable that holds the last one on;
//! - `foreach` (`_multi_tensor_*`) has each temporary for all parameters at once;
//! - `fused` has none, and keeps a step count of 4 bytes for each parameter on the GPU.

use rustc_hash::FxHashMap;

use super::kernels::{Kernel, kernels};
use super::program::{NEVER, Phase, Program, Purpose, Step, Tensor, peak_of};
use crate::ops::OpStream;

/// An optimizer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Optimizer {
    /// `SGD` without momentum: no state.
    Sgd,
    /// `SGD` with momentum: a buffer as large as each parameter.
    Momentum,
    /// `Adam`: two.
    Adam,
    /// `AdamW`: two.
    AdamW,
    /// `Adafactor`: a row and a column of each matrix, everything of a vector.
    Adafactor,
    /// Adam with states of 8 bits (bitsandbytes): two bytes for each element, and scales for blocks of 256.
    Adam8bit,
}

/// How `torch.optim` updates parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// All parameters at once, operation by operation.
    Foreach,
    /// One parameter after the other.
    ForLoop,
    /// In one kernel.
    Fused,
}

/// What is recorded of the optimizer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Recorded {
    /// None where it is not one of those that are known.
    pub(super) optimizer: Option<Optimizer>,
    pub(super) way: Option<Way>,
}

impl Recorded {
    /// By the files of `torch.optim` and its functions, and by the size of the state.
    pub(super) fn of(program: &Program<'_>, stream: &OpStream) -> Recorded {
        let of_update: Vec<&Tensor> = program.tensors.iter().filter(|it| it.phase == Phase::Update).collect();
        if of_update.is_empty() {
            return Recorded { optimizer: Some(Optimizer::Sgd), way: None };
        }
        let has = |word: &str| {
            let is_such = stream.stacks.having(|frame| {
                frame.file.contains("/torch/optim/")
                    && (frame.file.ends_with(word) || frame.name.contains(word))
            });
            of_update.iter().any(|it| is_such.get(it.stack.0 as usize) == Some(&true))
        };
        let optimizer = match () {
            () if has("_adafactor.py") => Some(Optimizer::Adafactor),
            () if has("adamw.py") => Some(Optimizer::AdamW),
            () if has("/adam.py") => Some(Optimizer::Adam),
            () if has("/sgd.py") => Some(Optimizer::Momentum),
            () => None,
        };
        let way = match () {
            () if has("_multi_tensor_") => Some(Way::Foreach),
            () if has("_single_tensor_") => Some(Way::ForLoop),
            () if optimizer.is_some() => Some(Way::Fused),
            () => None,
        };
        Recorded { optimizer, way }
    }
}

/// What the optimizer held at most as recorded, and as [`install`] has it, where the two differ by more than half a percent of the program's
/// peak: then these rules are not those of the recorded optimizer, and what follows from them is not certain.
pub(super) fn not_reproduced(recorded: &Program<'_>) -> Option<(u64, u64)> {
    let again = match recorded.optimizer {
        Recorded { optimizer: Some(optimizer), way } => {
            made(recorded, optimizer, way.unwrap_or(Way::Foreach), &|sizes| sizes)
        }
        Recorded { optimizer: None, .. } => vec![],
    };
    let was = peak_of(recorded.tensors.iter().filter(|tensor| tensor.phase == Phase::Update)).0;
    let is = peak_of(&again).0;
    (was.abs_diff(is).saturating_mul(200) > recorded.peak().0).then_some((was, is))
}

/// Bytes of the state that the optimizer holds at the end of a step, for each gradient in their order: every optimizer of `torch.optim` makes
/// its state for one parameter after the other. `None` where it does not hold equally many tensors for each.
pub(super) fn recorded_states(program: &Program<'_>, step: &Step) -> Option<Vec<Vec<u64>>> {
    let states = state_tensors(program, step)?;
    let bytes = |index: &usize| program.tensors[*index].bytes;
    Some(states.iter().map(|own| own.iter().map(bytes).collect()).collect())
}

/// The same states as indices.
pub(super) fn state_tensors(program: &Program<'_>, step: &Step) -> Option<Vec<Vec<usize>>> {
    let is_state = |it: &Tensor| it.purpose == Purpose::State && it.is_held_at(step.end);
    let all = program.tensors.iter().enumerate().filter(|(_, it)| is_state(it));
    let all: Vec<usize> = all.map(|(index, _)| index).collect();
    let n = step.gradients.len();
    let of_each = all.len().checked_div(n)?;
    let states = (0..n).map(|number| all[number * of_each..][..of_each].to_vec());
    all.len().is_multiple_of(n).then(|| states.collect())
}

/// Whether the recorded optimizer made its state for the parameters in the order of their gradients. Where it made none, there is no order.
pub(super) fn is_in_order(program: &Program<'_>) -> bool {
    let Some(step) = program.steps.iter().find(|step| !step.gradients.is_empty()) else { return true };
    if program.optimizer.optimizer == Some(Optimizer::Adafactor) {
        return true;
    }
    let gradients = step.gradients.iter().map(|index| program.tensors[*index].bytes);
    let is_as_large = |(own, bytes): (Vec<u64>, u64)| own.iter().max().is_none_or(|most| *most == bytes);
    recorded_states(program, step).is_some_and(|states| states.into_iter().zip(gradients).all(is_as_large))
}

/// Takes the recorded optimizer's tensors out, and puts those of another in. `owned` chooses and orders what is updated here, of the sizes of
/// all gradients.
pub(super) fn install(
    program: &mut Program<'_>,
    optimizer: Optimizer,
    way: Way,
    owned: &dyn Fn(Vec<u64>) -> Vec<u64>,
) {
    let mut added = made(program, optimizer, way, owned);
    program.retain(|_, tensor| tensor.phase != Phase::Update);
    program.tensors.append(&mut added);
    program.optimizer = Recorded { optimizer: Some(optimizer), way: Some(way) };
    program.settle();
}

/// The tensors of an optimizer in all steps, in their order.
fn made(
    program: &Program<'_>,
    optimizer: Optimizer,
    way: Way,
    owned: &dyn Fn(Vec<u64>) -> Vec<u64>,
) -> Vec<Tensor> {
    let mut made: FxHashMap<Weight, usize> = FxHashMap::default();
    let mut added: Vec<Tensor> = vec![];
    let vector = common_vector(program);
    for step in &program.steps {
        let sizes = weights(program, step, optimizer, owned);
        let mut tape = Tape { at: step.update, added: &mut added };
        let mut seen: FxHashMap<Weight, usize> = FxHashMap::default();
        for weight in &sizes {
            let n = seen.entry(*weight).or_insert(0);
            *n += 1;
            let known = made.entry(*weight).or_insert(0);
            if *n > *known {
                *known += 1;
                for state in states(optimizer, way, *weight, vector) {
                    tape.born(state, Purpose::State);
                }
            }
        }
        temporaries(&mut tape, optimizer, way, &sizes, vector);
    }
    added
}

/// Bytes of what is updated, and the kernel of a convolution.
type Weight = (u64, Option<Kernel>);

/// What a step updates. Kernels matter to Adafactor alone, and are not known of parts that are updated here.
fn weights(
    program: &Program<'_>,
    step: &Step,
    optimizer: Optimizer,
    owned: &dyn Fn(Vec<u64>) -> Vec<u64>,
) -> Vec<Weight> {
    let all: Vec<u64> = gradients(program, step).collect();
    let own = owned(all.clone());
    let is_all = own == all && all.len() == step.gradients.len();
    match optimizer == Optimizer::Adafactor && is_all {
        true => {
            let gradients = step.gradients.iter().map(|index| &program.tensors[*index]);
            let gradients: Vec<_> = gradients.map(|it| (it.stack, it.bytes)).collect();
            own.into_iter().zip(kernels(program.stacks(), &gradients)).collect()
        }
        false => own.into_iter().map(|bytes| (bytes, None)).collect(),
    }
}

/// Bytes of the gradients of a step that its backward passes made.
fn gradients<'p>(program: &'p Program<'_>, step: &'p Step) -> impl Iterator<Item = u64> + 'p {
    let all = step.gradients.iter().map(|index| &program.tensors[*index]);
    all.filter(|it| it.phase != Phase::Update).map(|it| it.bytes)
}

/// Puts tensors one after the other at one moment.
struct Tape<'a> {
    at: u64,
    added: &'a mut Vec<Tensor>,
}

impl Tape<'_> {
    fn tick(&mut self) -> u64 {
        self.at += 1;
        self.at
    }

    fn born(&mut self, bytes: u64, purpose: Purpose) -> usize {
        let at = self.tick();
        self.added.push(Program::tensor(bytes, purpose, Phase::Update, at, NEVER));
        self.added.len() - 1
    }

    fn temporary(&mut self, bytes: u64) -> usize {
        self.born(bytes, Purpose::Temporary)
    }

    fn free(&mut self, index: usize) {
        let at = self.tick();
        self.added[index].free_at(at);
    }
}

/// Bytes of each state tensor of a parameter.
fn states(optimizer: Optimizer, way: Way, weight: Weight, vector: u64) -> Vec<u64> {
    let (bytes, _) = weight;
    let mut states = match optimizer {
        Optimizer::Sgd => vec![],
        Optimizer::Momentum => vec![bytes],
        Optimizer::Adam | Optimizer::AdamW => vec![bytes, bytes],
        Optimizer::Adafactor => match factors(weight, vector) {
            Some([rows, columns, _]) => vec![rows, columns],
            None => vec![bytes],
        },
        // bitsandbytes keeps what has fewer than 4,096 elements in 32 bits, and a scale of 32 bits for each block of 256.
        Optimizer::Adam8bit if bytes / 4 < 4096 => vec![bytes, bytes],
        Optimizer::Adam8bit => {
            let elements = bytes / 4;
            let scales = elements.div_ceil(256) * 4;
            vec![elements, elements, scales, scales]
        }
    };
    if way == Way::Fused && matches!(optimizer, Optimizer::Adam | Optimizer::AdamW) {
        states.insert(0, 4);
    }
    states
}

fn temporaries(tape: &mut Tape<'_>, optimizer: Optimizer, way: Way, sizes: &[Weight], vector: u64) {
    match (optimizer, way) {
        (Optimizer::Sgd | Optimizer::Momentum | Optimizer::Adam8bit, _) | (_, Way::Fused) => {}
        // `exp_avg_sq_sqrt = torch._foreach_sqrt(exp_avg_sqs)`: one for each parameter, all at once.
        (Optimizer::Adam | Optimizer::AdamW, Way::Foreach) => {
            let roots: Vec<usize> = sizes.iter().map(|(bytes, _)| tape.temporary(*bytes)).collect();
            roots.into_iter().for_each(|root| tape.free(root));
        }
        // `denom = (exp_avg_sq.sqrt() / bias_correction2_sqrt).add_(eps)`; the variable holds it until the next parameter's.
        (Optimizer::Adam | Optimizer::AdamW, Way::ForLoop) => {
            let mut last = None;
            for (bytes, _) in sizes {
                let root = tape.temporary(*bytes);
                let denominator = tape.temporary(*bytes);
                tape.free(root);
                last.into_iter().for_each(|last| tape.free(last));
                last = Some(denominator);
            }
            last.into_iter().for_each(|last| tape.free(last));
        }
        // `update` is the outer product of row and column, or a clone of the variance; the norm of the columns is summed in parts first.
        (Optimizer::Adafactor, _) => {
            let (mut last, mut means) = (None, [None; 2]);
            for weight in sizes {
                let factors = factors(*weight, vector);
                // The variables hold the means of the last matrix until those of the next are there.
                if let Some([rows, columns, _]) = factors {
                    for (mean, bytes) in means.iter_mut().zip([rows, columns]) {
                        let before = mean.replace(tape.temporary(bytes));
                        before.into_iter().for_each(|before| tape.free(before));
                    }
                }
                let update = tape.temporary(weight.0);
                if let Some([.., mean_of_row]) = factors {
                    let mean = tape.temporary(mean_of_row);
                    tape.free(mean);
                }
                last.into_iter().for_each(|last| tape.free(last));
                last = Some(update);
            }
            last.into_iter().chain(means.into_iter().flatten()).for_each(|it| tape.free(it));
        }
    }
}

/// Bytes of 32,768 elements: no layer is wider.
const LONGEST_VECTOR: u64 = 4 << 15;

/// The size that most gradients have: that of the biases and scales of a layer.
fn common_vector(program: &Program<'_>) -> u64 {
    let mut n: FxHashMap<u64, usize> = FxHashMap::default();
    for bytes in program.steps.first().into_iter().flat_map(|step| gradients(program, step)) {
        *n.entry(bytes).or_insert(0) += 1;
    }
    // A model without biases has more matrices of one size than vectors.
    let is_vector = |(bytes, _): &(u64, usize)| *bytes <= LONGEST_VECTOR;
    n.into_iter()
        .filter(is_vector)
        .max_by_key(|(bytes, n)| (*n, std::cmp::Reverse(*bytes)))
        .map_or(4, |(bytes, _)| bytes)
        .max(4)
}

/// Bytes of a row and a column of a weight, and of the mean of the row; or none for a vector.
fn factors((bytes, kernel): Weight, vector: u64) -> Option<[u64; 3]> {
    match kernel {
        Some(kernel) => Some(kernel.factors(bytes)),
        None => matrix(bytes, vector).map(|(rows, columns)| [rows, columns, 4]),
    }
}

/// Bytes of a row and a column of a matrix, or none for a vector. Shapes are not recorded: one side is taken to be as long as the vectors of
/// which the model has most, and what is not larger than 16 of them is a vector itself.
fn matrix(bytes: u64, vector: u64) -> Option<(u64, u64)> {
    let is_matrix = bytes > vector.saturating_mul(16) && bytes.is_multiple_of(vector);
    is_matrix.then(|| (bytes / vector * 4, vector))
}
