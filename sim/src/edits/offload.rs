//! Memory of the host in place of the GPU's.

use super::program::{NEVER, Phase, Program, Purpose, Step, Tensor};
use super::{Changes, End, Sure, Unfit};

/// What the forward pass keeps goes to pinned memory (`torch.autograd.graph.save_on_cpu`): each operation of the backward pass copies what it kept
/// back when it runs, and frees it when it has run.
///
/// # Errors
/// Nothing is kept.
pub(super) fn activations(program: &mut Program<'_>, end: End, changes: &mut Changes) -> Result<(), Unfit> {
    let mut added: Vec<Tensor> = vec![];
    let mut moved = 0u64;
    let weight = program
        .steps
        .iter()
        .flat_map(|step| &step.gradients)
        .map(|index| program.tensors[*index].bytes)
        .max();
    let steps: Vec<Step> = program.steps.iter().flat_map(|step| step.micro_batches(program)).collect();
    for step in steps {
        let start = step.passes[0].0;
        let last = step.passes[step.passes.len() - 1].1;
        let births: Vec<u64> =
            program.tensors[program.born_within(step.begin, start)].iter().map(|it| it.born).collect();
        // First requests of the operations of the backward pass.
        let mut nodes: Vec<u64> = vec![];
        let mut node = 0;
        for it in &program.tensors[program.born_within(start, last + 1)] {
            if it.node != node && it.node > 0 {
                nodes.push(it.born);
                node = it.node;
            }
        }
        let mut sum = 0;
        for index in program.born_within(step.begin, start) {
            let it = program.tensors[index];
            let is_kept = matches!(it.phase, Phase::Forward)
                && matches!(it.purpose, Purpose::Activation | Purpose::Cache)
                && it.freed > start
                && it.freed <= step.update;
            if !is_kept {
                continue;
            }
            sum += it.bytes;
            let begun = nodes.partition_point(|begun| *begun <= it.freed);
            let back = if begun == 0 { start } else { nodes[begun - 1] };
            let mut copy = it.within(back - 1, it.freed);
            copy.node = 0;
            added.push(copy);
            let next = births.partition_point(|birth| *birth <= it.born);
            program.tensors[index].free_at(births.get(next + 1).map_or(start - 1, |birth| birth + 1));
        }
        // Parameters that an operation keeps are copied back as well: at most the largest of them at a time.
        let copied = match (end, weight) {
            (End::Most, Some(bytes)) => bytes,
            (End::Least | End::Best | End::Most, _) => 0,
        };
        added.push(Program::tensor(copied, Purpose::Temporary, Phase::Backward, start, last.max(start + 1)));
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
        format!("{mib} MiB go to pinned host memory and back in every step; at most, an operation also copies its largest parameter back"),
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
