//! Memory of the host in place of the GPU's.

use super::holds::Holds;
use super::nodes::Nodes;
use super::operations::Operations;
use super::program::{NEVER, Phase, Program, Purpose, Step, Tensor};
use super::{Changes, End, Sure, Unfit};

/// What the forward pass keeps goes to pinned memory (`torch.autograd.graph.save_on_cpu`): each operation of the backward pass copies back what it
/// kept itself when it runs, and frees it when it has run. Two operations that keep one tensor copy it twice.
///
/// # Errors
/// Nothing is kept.
pub(super) fn activations(program: &mut Program<'_>, end: End, changes: &mut Changes) -> Result<(), Unfit> {
    let nodes = Nodes::of(program);
    let mut added: Vec<Tensor> = vec![];
    let mut moved = 0u64;
    let steps: Vec<Step> = program.steps.iter().flat_map(|step| step.micro_batches(program)).collect();
    for step in steps {
        let start = step.passes[0].0;
        let operations = Operations::of(program, &step, &nodes);
        let forward = program.born_within(step.begin, start);
        let holds = Holds::of(program, forward.clone(), start);
        let mut brought_back = vec![0; operations.all.len()];
        let mut sum = 0;
        for index in forward {
            let it = program.tensors[index];
            let is_kept = matches!(it.phase, Phase::Forward)
                && matches!(it.purpose, Purpose::Activation | Purpose::Cache)
                && it.freed > start
                && it.freed <= step.update;
            if !is_kept {
                continue;
            }
            sum += it.bytes;
            let operation = operations.at(it.freed);
            let back = operation.map_or(start, |at| operations.all[at].born);
            // What was brought back is a variable of the operation: it is freed when that returns.
            let freed = operations.released(it.freed);
            if let Some(at) = operation {
                brought_back[at] = it.bytes.max(brought_back[at]);
            }
            let mut copy = it.within(back - 1, freed);
            copy.node = 0;
            added.push(copy);
            let until = holds.until(program, index, end);
            // A tensor whose elements are not in the order of its shape, as in channels_last or transposed, is put in order on the GPU before
            // it leaves.
            if let Some(taken) = holds.taken_at(program, index).filter(|_| end == End::Most) {
                added.push(it.within(taken + 1, taken + 2));
            }
            program.tensors[index].free_at(until);
        }
        for (operation, brought) in operations.all.iter().zip(brought_back) {
            let temporary = |bytes| {
                Program::tensor(
                    bytes,
                    Purpose::Temporary,
                    Phase::Backward,
                    operation.born - 2,
                    operation.over.min(operation.returns),
                )
            };
            // What a product multiplies the gradient with: a weight, and its input, which is as large as the gradient that it makes of it.
            // What comes back is in order: it takes the place of the copy that the operation makes of an input that is not.
            let is_missing = |bytes: &u64| brought < bytes - bytes / 10 && !operation.copies_input;
            let shares_input = operation.input.filter(is_missing);
            if operation.weight > 0 {
                added.push(temporary(operation.weight));
                added.extend(shares_input.map(temporary));
            } else if end == End::Most && operation.keeps {
                added.extend(shares_input.map(temporary));
            }
        }
        moved = moved.max(sum);
    }
    if moved == 0 {
        return Err(Unfit(
            "nothing is kept from the forward to the backward pass: there is nothing to offload".into(),
        ));
    }
    added.retain(|tensor| tensor.bytes > 0);
    program.tensors.append(&mut added);
    program.settle();
    changes.moved_bytes = Some(moved);
    let mib = moved.div_ceil(1 << 20);
    changes.note(
        Sure::Range,
        format!("{mib} MiB go to pinned host memory and back in every step; a product also copies its weight back, and its input where another operation keeps that too"),
    );
    changes.note(
        Sure::Range,
        "at most, every tensor is transposed or channels_last, and put in order on the GPU before it leaves, and variables hold it until their function returns",
    );
    Ok(())
}

/// The optimizer's state and its update are on the CPU: the GPU has neither.
pub(super) fn optimizer(program: &mut Program<'_>, changes: &mut Changes) {
    let state: u64 = (program.tensors.iter())
        .filter(|it| it.phase == Phase::Update && it.purpose == Purpose::State && it.freed == NEVER)
        .map(|it| it.bytes)
        .sum();
    let gradients = program.steps.first().into_iter().flat_map(|step| &step.gradients);
    let gradients: u64 = gradients.map(|index| program.tensors[*index].bytes).sum();
    program.retain(|_, tensor| tensor.phase != Phase::Update);
    program.settle();
    changes.moved_bytes = Some(gradients);
    changes.note(
        Sure::Certain,
        format!("{} MiB of state are kept on the CPU, which updates the parameters: gradients go there and parameters come back in every step", state.div_ceil(1 << 20)),
    );
}
