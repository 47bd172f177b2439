//! When gradients exist: cleared or zeroed, accumulated over several micro-batches, or not computed at all.

use rustc_hash::{FxHashMap, FxHashSet};

use super::holds::Holds;
use super::program::{NEVER, Phase, Program, Purpose, Step, Tensor};
use super::{End, Optimizer, Unfit};

/// Copies of a micro-batch beyond this many change nothing: each asks for the same.
const MOST_COPIES: u64 = 3;

/// Gradients that are zeroed and not freed (`set_to_none=False`): those of the first step stay, and what a later backward pass computes is added
/// to them and freed at once.
pub(super) fn keep_gradients(program: &mut Program<'_>) {
    let ends = ends_of_nodes(program);
    let steps = program.steps.clone();
    for (number, step) in steps.iter().enumerate() {
        for index in &step.gradients {
            let tensor = &mut program.tensors[*index];
            match number {
                0 => tensor.free_at(NEVER),
                _ => tensor.free_at(end_of(tensor, &ends)),
            }
        }
    }
    // What is added to is no gradient of a later step.
    program.steps.iter_mut().skip(1).for_each(|step| step.gradients.clone_from(&steps[0].gradients));
    program.settle();
}

/// Whether the gradients of a step are as large as the state says that they should be: Adam keeps two tensors for each, SGD with momentum
/// one. Less of them is known where others' weights are taken for state, or requests of a backward pass for no gradients.
pub(super) fn are_all_known(program: &Program<'_>) -> bool {
    let of_each = match program.optimizer.optimizer {
        Some(Optimizer::Adam | Optimizer::AdamW) => 2,
        Some(Optimizer::Momentum) => 1,
        _ => return true,
    };
    let Some(step) = program.steps.last() else { return true };
    let is_state = |it: &&Tensor| it.purpose == Purpose::State && it.is_held_at(step.end);
    let state: u64 = program.tensors.iter().filter(is_state).map(|it| it.bytes).sum();
    let gradients: u64 = step.gradients.iter().map(|index| program.tensors[*index].bytes).sum();
    state == 0 || state.abs_diff(gradients * of_each) <= state / 100
}

/// Whether much of the model has no gradients, as a frozen tower, a mean of the weights or another model beside it. Buffers are small.
pub(super) fn has_untrained(program: &Program<'_>) -> bool {
    let Some(step) = program.steps.iter().find(|step| !step.gradients.is_empty()) else { return false };
    let sizes: Vec<u64> = step.gradients.iter().map(|index| program.tensors[*index].bytes).collect();
    let bytes = |index: usize| program.tensors[index].bytes;
    let trained: u64 = program.parameters_of(&sizes).into_iter().flatten().map(bytes).sum();
    let is_held = |it: &&Tensor| it.purpose == Purpose::Parameter && it.is_held_at(step.begin);
    let all: u64 = program.tensors.iter().filter(is_held).map(|it| it.bytes).sum();
    all.saturating_sub(trained) > all / 20
}

/// Gradients that are freed with each step (`set_to_none=True`). A trace does not show where `zero_grad` runs while it only
/// writes zeros. Most programs call it after the step or before the forward pass. Some do just before the backward pass, and hold gradients longest.
///
/// # Errors
/// The gradients of later steps are not to be found.
pub(super) fn clear_gradients(program: &mut Program<'_>, end: End) -> Result<(), Unfit> {
    let first = program.steps[0].clone();
    // Those that are kept may be freed with the model, before the program ends.
    let next = program.steps.get(1).map_or(NEVER, |step| step.passes[0].1);
    if first.gradients.iter().all(|index| program.tensors[*index].freed < next) {
        return Ok(());
    }
    // A later step's gradient is what was asked for at the same place, in the same turn.
    let turns = |from: u64, to: u64, program: &Program<'_>| {
        let mut turns: FxHashMap<(u32, u64), Vec<usize>> = FxHashMap::default();
        for index in program.born_within(from, to + 1) {
            let tensor = &program.tensors[index];
            if tensor.phase == Phase::Backward {
                turns.entry((tensor.stack.0, tensor.bytes)).or_default().push(index);
            }
        }
        turns
    };
    let of_first = turns(first.passes[0].0, first.passes[0].1, program);
    let turn_of = |index: usize, program: &Program<'_>| {
        let tensor = &program.tensors[index];
        let key = (tensor.stack.0, tensor.bytes);
        Some((key, of_first.get(&key)?.iter().position(|it| *it == index)?))
    };
    // A gradient whose elements lie in another order than its parameter's was copied from what the backward pass computed; what is added to a
    // gradient is not.
    let copied_from = |index: usize, program: &Program<'_>| {
        let gradient = program.tensors[index];
        let own = program.born_within(first.passes[0].0, gradient.born);
        own.filter(|other| {
            let it = &program.tensors[*other];
            it.bytes == gradient.bytes && it.phase == Phase::Backward && it.is_held_at(gradient.born)
        })
        .min_by_key(|other| program.tensors[*other].freed)
    };
    let mut added: Vec<Tensor> = vec![];
    for number in 0..program.steps.len() {
        let step = program.steps[number].clone();
        let here = turns(step.passes[0].0, step.passes[0].1, program);
        let found = |index: usize, program: &Program<'_>| {
            let (key, turn) = turn_of(index, program)?;
            here.get(&key)?.get(turn).copied()
        };
        let mut own = vec![];
        for index in &first.gradients {
            let copied = || found(copied_from(*index, program)?, program);
            if let Some(found) = found(*index, program) {
                own.push(found);
            } else if let Some(source) = copied() {
                own.push(program.tensors.len() + added.len());
                added.push(program.tensors[*index].within(program.tensors[source].freed - 1, NEVER));
            } else {
                return Err(Unfit(format!(
                    "the gradients of step {} were not found among its requests",
                    number + 1
                )));
            }
        }
        let n = program.tensors.len();
        let backward = program.steps.get(number + 1).map(|next| next.passes[0].0);
        let cleared = match backward {
            Some(backward) if end == End::Most => backward - 1 - own.len() as u64,
            _ => step.end,
        };
        for (offset, index) in (1..).zip(&own) {
            let tensor = match index.checked_sub(n) {
                Some(new) => &mut added[new],
                None => &mut program.tensors[*index],
            };
            tensor.purpose = Purpose::Gradient;
            tensor.free_at(cleared + offset);
        }
        program.steps[number].gradients = own;
    }
    program.tensors.append(&mut added);
    program.settle();
    Ok(())
}

/// Forward and backward pass run `n` times before the optimizer: the gradients of the first stay, those of the others are added to them.
///
/// # Errors
/// The run accumulates already.
pub(super) fn accumulate(program: &mut Program<'_>, n: u64) -> Result<(), Unfit> {
    if let Some(step) = program.steps.iter().find(|step| step.passes.len() > 1) {
        return Err(Unfit(format!(
            "the recorded run already accumulates over {} backward passes: record one that does not",
            step.passes.len()
        )));
    }
    let copies = (n - 1).min(MOST_COPIES);
    if copies == 0 {
        return Ok(());
    }
    let ends = ends_of_nodes(program);
    let steps = program.steps.clone();
    let mut added: Vec<Tensor> = vec![];
    for (number, step) in steps.iter().enumerate() {
        // The first step also makes workspaces; what repeats is the next.
        let donor = if number == 0 && steps.len() > 1 { &steps[1] } else { step };
        let length = donor.passes[0].1 + 1;
        let gradients: FxHashSet<usize> = donor.gradients.iter().copied().collect();
        let after = steps.get(steps.partition_point(|it| it.begin <= donor.begin));
        let next = after.map_or(NEVER, |it| it.begin);
        let own: Vec<usize> = program.born_within(donor.begin, length + 1).collect();
        // Moments of the donor in order, so that each copy is a stretch of consecutive moments before the update.
        let mut moments: Vec<u64> = vec![];
        for index in &own {
            let tensor = &program.tensors[*index];
            let freed = if gradients.contains(index) { end_of(tensor, &ends) } else { tensor.freed };
            moments.push(tensor.born);
            moments.push(freed);
            if freed != NEVER && freed > next {
                // Freed when a variable is assigned again: as far into the next micro-batch.
                moments.push(as_in_next(freed, after, donor));
            }
        }
        moments.sort_unstable();
        moments.dedup();
        let stretch = moments.len() as u64 + 2;
        let at = |copy: u64, moment: u64| {
            let rank = moments.partition_point(|it| *it < moment) as u64;
            step.update - (copies + 1 - copy) * stretch + 1 + rank
        };
        for index in &own {
            let tensor = program.tensors[*index];
            let is_gradient = gradients.contains(index);
            let freed = if is_gradient { end_of(&tensor, &ends) } else { tensor.freed };
            if freed == NEVER {
                continue;
            }
            let is_late = freed > donor.update;
            for copy in 0..copies {
                let death = match is_late {
                    false => at(copy, freed),
                    true if copy + 1 == copies => match donor.update == step.update {
                        true => freed,
                        false => step.end + 1,
                    },
                    true => at(copy + 1, as_in_next(freed, after, donor)),
                };
                let mut copied = tensor.within(at(copy, tensor.born), death);
                if is_gradient {
                    copied.purpose = Purpose::Temporary;
                }
                added.push(copied);
            }
        }
        // What the first micro-batch leaves in variables is freed in the second.
        let gradients: FxHashSet<usize> = step.gradients.iter().copied().collect();
        let after = steps.get(number + 1);
        let next_update = after.map_or(NEVER, |it| it.update);
        for index in program.born_within(step.begin, step.passes[0].1 + 1) {
            let tensor = &mut program.tensors[index];
            // A variable is assigned again in the next step. What lives longer is not one: the optimizer makes state before the first step.
            let is_variable = tensor.freed > step.update
                && tensor.freed <= next_update
                && !matches!(tensor.purpose, Purpose::State | Purpose::Parameter);
            if is_variable && !gradients.contains(&index) && tensor.freed != NEVER {
                tensor.free_at(at(0, as_in_next(tensor.freed, after, donor)));
            }
        }
    }
    program.tensors.append(&mut added);
    program.settle();
    Ok(())
}

/// The moment of a step that is as a moment of the next one: as far from where its forward pass begins, or from where that ends if this is nearer.
/// What a model returns is freed when its next forward pass is over, whatever ran before that, as an evaluation.
fn as_in_next(moment: u64, next: Option<&Step>, step: &Step) -> u64 {
    let Some(next) = next.filter(|next| moment > next.begin) else { return step.begin };
    let (start, next_start) = (step.passes[0].0, next.passes[0].0);
    match moment - next.begin < next_start.abs_diff(moment) {
        true => step.begin + (moment - next.begin),
        false => (start + moment).saturating_sub(next_start).max(step.begin),
    }
}

/// The first `share` of the parameters are not trained: they have no gradients and no state, the backward pass ends at the first that is, and
/// what the forward pass kept for the rest is freed at once. Gives back how many gradients there are no more in a step.
///
/// # Errors
/// The order of the parameters is not known.
pub(super) fn freeze(
    program: &mut Program<'_>,
    is_frozen: &dyn Fn(usize, usize) -> bool,
    end: End,
) -> Result<usize, Unfit> {
    if !program.knows_order {
        return Err(Unfit(
            "the order of the parameters is not known: the program does not clear its gradients one after the other".into(),
        ));
    }
    let mut removed: FxHashSet<usize> = FxHashSet::default();
    let (steps, mut n_frozen) = (program.steps.clone(), 0);
    for (number, step) in steps.iter().enumerate() {
        let n = step.gradients.len();
        let in_order = in_order_of_model(program, &step.gradients);
        let (frozen, trained): (Vec<usize>, Vec<usize>) = (0..n).partition(|number| is_frozen(*number, n));
        n_frozen = n_frozen.max(frozen.len());
        let frozen: FxHashSet<usize> = frozen.into_iter().map(|number| in_order[number]).collect();
        let trained: Vec<usize> = trained.into_iter().map(|number| in_order[number]).collect();
        let Some(last) = last_of(program, step, &trained) else {
            return Err(Unfit("nothing would be trained".into()));
        };
        let inputs = inputs_of_trained(program, step, &trained, end);
        removed.extend(without_gradients(program, step, &frozen, Some(last)));
        removed.extend(without_frozen_branches(program, step, &trained, last, end));
        release_factors(program, step, &frozen, end);
        release_unsaved(program, step, last, end);
        for (index, until) in inputs {
            let tensor = &mut program.tensors[index];
            tensor.free_at(until.max(tensor.freed));
        }
        let trained: FxHashSet<usize> = trained.into_iter().collect();
        program.steps[number].gradients.retain(|index| trained.contains(index));
    }
    program.retain(|index, _| !removed.contains(&index));
    program.settle();
    Ok(n_frozen)
}

/// The last operation that makes one of these gradients, or adds to it, as where a loop uses a parameter again and again: the gradient is the
/// first that was made, and the others were freed at once.
fn last_of(program: &Program<'_>, step: &Step, gradients: &[usize]) -> Option<u32> {
    let own = gradients.iter().map(|index| &program.tensors[*index]);
    let mut made: FxHashMap<(u32, u64), u64> = FxHashMap::default();
    let mut last = None;
    for it in own {
        last = last.max(Some(it.node));
        let first = made.entry((it.stack.0, it.bytes)).or_insert(it.born);
        *first = it.born.min(*first);
    }
    let (start, end) = (step.passes[0].0, step.passes[step.passes.len() - 1].1);
    let pass = &program.tensors[program.born_within(start, end + 1)];
    for (at, it) in pass.iter().enumerate() {
        let is_again = made.get(&(it.stack.0, it.bytes)).is_some_and(|first| *first < it.born);
        if is_again && it.node > 0 && it.purpose == Purpose::Temporary {
            // What goes to the next operation is freed when that has begun.
            let next = pass[at..].iter().find(|other| other.node > it.node).map_or(NEVER, |other| other.born);
            last = last.max((it.freed < next).then_some(it.node));
        }
    }
    last
}

/// Gradients in the order of the model's parameters. An optimizer with groups clears them group by group, and each group is in that order: the
/// births of its gradients descend, as the backward pass goes from the last parameter to the first. Groups are merged by them.
fn in_order_of_model(program: &Program<'_>, cleared: &[usize]) -> Vec<usize> {
    let births: Vec<u64> = cleared.iter().map(|index| program.tensors[*index].born).collect();
    let groups = groups_of(&births);
    if groups.len() < 2 {
        return cleared.to_vec();
    }
    // The gradient of a parameter that is used twice, first and last, may be born out of turn: those after it in its group come after it.
    let mut keys = births;
    for group in &groups {
        let mut most = 0;
        for at in group.clone().rev() {
            most = most.max(keys[at]);
            keys[at] = most;
        }
    }
    let mut order: Vec<usize> = (0..cleared.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(keys[*at]));
    order.into_iter().map(|at| cleared[at]).collect()
}

/// Where births that descend begin again near the top, a group begins, unless it covers another part of the backward pass: then it is another
/// part of the model.
fn groups_of(births: &[u64]) -> Vec<std::ops::Range<usize>> {
    let whole = std::iter::once(0..births.len());
    let (Some(least), Some(most)) = (births.iter().min(), births.iter().max()) else {
        return whole.collect();
    };
    let jump = (most - least) / 2;
    // A single one out of turn is no group.
    let least_members = (births.len() / 10).max(2);
    let mut groups: Vec<std::ops::Range<usize>> = vec![];
    let mut begin = 0;
    for at in 1..births.len() {
        if births[at] > births[at - 1].saturating_add(jump) && at - begin >= least_members {
            groups.push(begin..at);
            begin = at;
        }
    }
    groups.push(begin..births.len());
    let middle = |group: &std::ops::Range<usize>| {
        let mut own = births[group.clone()].to_vec();
        own.sort_unstable();
        (own[own.len() / 4], own[own.len() * 3 / 4])
    };
    let is_beside = |two: &[std::ops::Range<usize>]| {
        let (one, other) = (middle(&two[0]), middle(&two[1]));
        one.0 < other.1 && other.0 < one.1
    };
    match groups.windows(2).all(is_beside) && groups[groups.len() - 1].len() >= least_members {
        true => groups,
        false => whole.collect(),
    }
}

/// Which operation of a backward pass frees what the forward pass kept.
struct Kept {
    /// First requests of the operations and their numbers, in order.
    nodes: Vec<(u64, u32)>,
    /// Positions in `nodes`, and tensors of the forward pass that are freed there.
    tensors: Vec<(usize, usize)>,
    /// The backward pass.
    pass: (u64, u64),
    holds: Holds,
    end: End,
}

impl Kept {
    fn of(program: &Program<'_>, step: &Step, which: End) -> Kept {
        let (start, end) = (step.passes[0].0, step.passes[step.passes.len() - 1].1);
        let mut nodes: Vec<(u64, u32)> = vec![];
        for it in program.tensors[program.born_within(start, end + 1)].iter().filter(|it| it.node > 0) {
            if nodes.last().is_none_or(|(_, node)| *node != it.node) {
                nodes.push((it.born, it.node));
            }
        }
        let is_kept = |it: &Tensor| {
            let is_own =
                it.phase == Phase::Forward && matches!(it.purpose, Purpose::Activation | Purpose::Cache);
            is_own && it.freed > start && it.freed <= end + (8 << 32)
        };
        let node_at = |freed: u64| nodes.partition_point(|(begun, _)| *begun <= freed).checked_sub(1);
        let forward = program.born_within(step.begin, start);
        let kept = forward.clone().filter(|index| is_kept(&program.tensors[*index]));
        let tensors =
            kept.filter_map(|index| Some((node_at(program.tensors[index].freed)?, index))).collect();
        let holds = Holds::of(program, forward, start);
        Kept { nodes, tensors, pass: (start, end), holds, end: which }
    }

    /// Frees a tensor of the forward pass when no variable holds it any more.
    fn release(&self, program: &mut Program<'_>, index: usize) {
        let until = self.holds.until(program, index, self.end);
        program.tensors[index].free_at(until);
    }
}

/// Inputs of trained operations that a frozen operation freed, as it ran after them: a shortcut or a pyramid of features takes what a frozen
/// layer made, and keeps it for the gradient of its own weight. Which tensor that is shows in its size alone, that of the gradient of the
/// input. Gives back each with the moment when the trained operation frees it.
fn inputs_of_trained(
    program: &Program<'_>,
    step: &Step,
    trained: &[usize],
    end: End,
) -> FxHashMap<usize, u64> {
    let of_trained: FxHashSet<u32> = trained.iter().map(|index| program.tensors[*index].node).collect();
    let kept = Kept::of(program, step, end);
    let bytes = |index: usize| program.tensors[index].bytes;
    let mut inputs: FxHashMap<usize, u64> = FxHashMap::default();
    for (at, (begun, node)) in kept.nodes.iter().enumerate() {
        let over = kept.nodes.get(at + 1).map_or(kept.pass.1 + 1, |(born, _)| *born);
        let mut own = program.tensors[program.born_within(*begun, over)].iter();
        let gradient = own.find(|it| it.node == *node && it.purpose != Purpose::Gradient);
        let Some(gradient) = gradient.filter(|_| of_trained.contains(node)) else { continue };
        let of_size = kept.tensors.iter().filter(|(_, index)| bytes(*index) == gradient.bytes);
        let from_here = of_size.filter(|(other, _)| *other >= at);
        // What it keeps alone is freed with it. Else the newest is nearest to it.
        let is_freed_here = from_here.clone().any(|(other, _)| *other == at);
        if let Some((_, index)) = from_here.filter(|_| !is_freed_here).max_by_key(|(_, index)| *index) {
            inputs.insert(*index, over - 1);
        }
    }
    inputs
}

/// Tensors of a backward pass that there are no more where a branch of the model has no trained parameter, as the first of two towers: what
/// the forward pass kept for it is freed soon after it was made. A tensor is of no use to the backward pass if it was made before the first that
/// a trained layer keeps.
fn without_frozen_branches(
    program: &mut Program<'_>,
    step: &Step,
    trained: &[usize],
    last: u32,
    end: End,
) -> FxHashSet<usize> {
    let of_trained: FxHashSet<u32> = trained.iter().map(|index| program.tensors[*index].node).collect();
    let kept = Kept::of(program, step, end);
    let born = |index: usize| program.tensors[index].born;
    let of_trained_nodes = kept.tensors.iter().filter(|(node, _)| of_trained.contains(&kept.nodes[*node].1));
    let Some(first) = of_trained_nodes.map(|(_, index)| born(*index)).min() else {
        return FxHashSet::default();
    };
    let mut newest = vec![0; kept.nodes.len()];
    for (node, index) in &kept.tensors {
        newest[*node] = born(*index).max(newest[*node]);
    }
    let mut is_over: FxHashSet<u32> = FxHashSet::default();
    let mut is_frozen = false;
    for (newest, (_, node)) in newest.iter().zip(&kept.nodes) {
        is_frozen = match (of_trained.contains(node), *newest) {
            (true, _) => false,
            (false, 0) => is_frozen,
            (false, newest) => newest < first,
        };
        if is_frozen {
            is_over.insert(*node);
        }
    }
    let unused = unused_operations(program, &kept, &of_trained, last);
    for (node, index) in &kept.tensors {
        let number = kept.nodes[*node].1;
        let is_of_frozen = is_over.contains(&number) && program.tensors[*index].born < first;
        if is_of_frozen || unused.contains(&number) {
            kept.release(program, *index);
        }
    }
    is_over.extend(unused);
    let of_pass = program.born_within(kept.pass.0, kept.pass.1 + 1);
    of_pass.filter(|index| is_over.contains(&program.tensors[*index].node)).collect()
}

/// Operations before the node `last` whose gradients only frozen parameters would take: what the first of them makes is held until after
/// that node, and others at the same place add to it, as where a loop looks up what a frozen encoder made. With them go those that make
/// gradients for them alone.
fn unused_operations(
    program: &Program<'_>,
    kept: &Kept,
    of_trained: &FxHashSet<u32>,
    last: u32,
) -> FxHashSet<u32> {
    let own: Vec<&[Tensor]> = (0..kept.nodes.len())
        .map(|at| {
            let next = kept.nodes.get(at + 1).map_or(kept.pass.1 + 1, |(born, _)| *born);
            &program.tensors[program.born_within(kept.nodes[at].0, next)]
        })
        .collect();
    let begins = |at: usize| kept.nodes.get(at).map_or(kept.pass.1 + 1, |(born, _)| *born);
    let mut unused: FxHashSet<u32> = FxHashSet::default();
    let Some(n) = kept.nodes.iter().position(|(_, node)| *node == last) else { return unused };
    let over = begins(n + 1);
    let has_parameter = |at: usize| {
        of_trained.contains(&kept.nodes[at].1) || own[at].iter().any(|it| it.purpose == Purpose::Gradient)
    };
    // What is made here and outlives its operation.
    let made = |at: usize| own[at].iter().filter(move |it| it.node > 0 && it.freed > begins(at + 1));
    let mut added_to: FxHashSet<(u32, u64)> = FxHashSet::default();
    for at in (0..n).filter(|at| !has_parameter(*at)) {
        let is_held = made(at).next().is_some() && made(at).all(|it| it.freed > over && it.freed != NEVER);
        let adds = || own[at].iter().any(|it| added_to.contains(&(it.stack.0, it.bytes)));
        if is_held || adds() {
            unused.insert(kept.nodes[at].1);
        }
        if is_held {
            added_to.extend(made(at).map(|it| (it.stack.0, it.bytes)));
        }
    }
    for at in (0..n).rev().filter(|at| !has_parameter(*at)) {
        let is_next = kept.nodes.get(at + 1).is_some_and(|(_, next)| unused.contains(next));
        if is_next && made(at).next().is_some() && made(at).all(|it| it.freed <= begins(at + 2)) {
            unused.insert(kept.nodes[at].1);
        }
    }
    unused
}

/// A product of two tensors, element by element, keeps each for the gradient of the other: where one is a frozen parameter, as the weight of an
/// RMSNorm that is written out, the other is not kept.
pub(super) fn release_factors(program: &mut Program<'_>, step: &Step, frozen: &FxHashSet<usize>, end: End) {
    let names = &program.stacks().nodes;
    let is_called =
        |tensor: &Tensor, start: &str| names.get(&tensor.stack).is_some_and(|name| name.starts_with(start));
    let kept = Kept::of(program, step, end);
    let products: FxHashSet<u32> = program.tensors[program.born_within(kept.pass.0, kept.pass.1 + 1)]
        .iter()
        .filter(|it| it.node > 0 && is_called(it, "Mul"))
        .map(|it| it.node)
        .collect();
    // The product's own gradient, or one that was cast on its way: the parameter was cast before it was multiplied.
    let product_of = |index: &usize| {
        let it = &program.tensors[*index];
        match is_called(it, "ToCopy") {
            true => it.node.checked_sub(1).filter(|before| products.contains(before)),
            false => Some(it.node).filter(|own| products.contains(own)),
        }
    };
    let of_products: FxHashSet<u32> = frozen.iter().filter_map(product_of).collect();
    for (node, index) in &kept.tensors {
        if of_products.contains(&kept.nodes[*node].1) {
            kept.release(program, *index);
        }
    }
}

/// Tensors of a backward pass that there are no more when some gradients are not computed, and nothing runs after the node `last`.
pub(super) fn without_gradients(
    program: &Program<'_>,
    step: &Step,
    frozen: &FxHashSet<usize>,
    last: Option<u32>,
) -> FxHashSet<usize> {
    let (start, end) = (step.passes[0].0, step.passes[step.passes.len() - 1].1);
    let tensors = &program.tensors;
    let of_pass = || {
        program
            .born_within(start, end + 1)
            .map(|index| (index, &tensors[index]))
            .filter(|(_, it)| it.node > 0)
    };
    let mut removed: FxHashSet<usize> = frozen.clone();
    // Of nodes with a removed gradient: when the last of them was asked for, and whether another gradient is left.
    let mut nodes: FxHashMap<u32, (u64, bool)> = FxHashMap::default();
    // A parameter that is used twice has a part of its gradient from each use, freed when their sum is there.
    let mut sums: FxHashMap<u64, Vec<u64>> = FxHashMap::default();
    for index in frozen {
        sums.entry(tensors[*index].bytes).or_default().push(tensors[*index].born);
    }
    for (index, tensor) in of_pass() {
        let is_part = sums.get(&tensor.bytes).is_some_and(|sums| {
            sums.iter().any(|sum| tensor.born < *sum && *sum < tensor.freed && is_soon(tensor.freed, *sum))
        });
        if is_part {
            removed.insert(index);
        }
        if removed.contains(&index) || is_part {
            let node = nodes.entry(tensor.node).or_insert((0, false));
            node.0 = node.0.max(tensor.born);
        } else if tensor.purpose == Purpose::Gradient {
            nodes.entry(tensor.node).or_insert((0, false)).1 = true;
        }
    }
    let mut next_node: FxHashMap<u32, u64> = FxHashMap::default();
    for (_, tensor) in of_pass() {
        let first = next_node.entry(tensor.node).or_insert(tensor.born);
        *first = (*first).min(tensor.born);
    }
    for (index, tensor) in of_pass() {
        if last.is_some_and(|last| tensor.node > last) {
            removed.insert(index);
        }
        // What it took to sum a bias's gradient is asked for after it, and freed in the node.
        if let Some((since, false)) = nodes.get(&tensor.node) {
            let next = next_node.get(&(tensor.node + 1)).copied().unwrap_or(NEVER);
            if *since > 0 && tensor.born > *since && tensor.freed < next {
                removed.insert(index);
            }
        }
    }
    removed
}

/// Moments are of recorded events: a handful of them apart.
fn is_soon(later: u64, earlier: u64) -> bool {
    const EVENTS: u64 = 8 << 32;
    later - earlier < EVENTS
}

/// What the forward pass kept for nodes after `last` is freed soon after it was made, as where nothing needs a gradient.
fn release_unsaved(program: &mut Program<'_>, step: &Step, last: u32, end: End) {
    let (start, end_of_pass) = (step.passes[0].0, step.passes[step.passes.len() - 1].1);
    let of_pass = program.born_within(start, end_of_pass + 1);
    let over =
        program.tensors[of_pass].iter().filter(|it| it.node == last).map(|it| it.born).max().unwrap_or(0);
    let of_forward = program.born_within(step.begin, start);
    let holds = Holds::of(program, of_forward.clone(), start);
    // The inputs of the last node are freed with it.
    let over = over + (4 << 32);
    for index in of_forward {
        let tensor = &program.tensors[index];
        let is_own =
            tensor.phase == Phase::Forward && matches!(tensor.purpose, Purpose::Activation | Purpose::Cache);
        if is_own && tensor.freed > over && tensor.freed <= end_of_pass + (8 << 32) {
            let until = holds.until(program, index, end);
            program.tensors[index].free_at(until);
        }
    }
}

/// For each node of a backward pass, the moment after which it has ended: before the first birth of the next.
fn ends_of_nodes(program: &Program<'_>) -> Vec<u64> {
    let n = program.tensors.iter().map(|tensor| tensor.node).max().unwrap_or(0) as usize;
    let mut ends = vec![0; n + 1];
    for tensor in program.tensors.iter().filter(|tensor| tensor.node > 0) {
        let end = &mut ends[tensor.node as usize];
        *end = (*end).max(tensor.born + 2);
    }
    // The input of a node is freed after its last request and before the next node's.
    ends
}

/// When a gradient that is added to another is freed: when its node has ended.
fn end_of(tensor: &Tensor, ends: &[u64]) -> u64 {
    ends.get(tensor.node as usize).copied().filter(|end| *end > tensor.born).unwrap_or(tensor.born + 1)
}

#[cfg(test)]
mod tests {
    use super::groups_of;

    #[test]
    fn groups_of_an_optimizer_begin_again_at_the_top() {
        // The last layer first.
        let one: Vec<u64> = (0..40).rev().collect();
        assert_eq!(groups_of(&one).len(), 1);
        // Matrices, then vectors.
        let two: Vec<u64> =
            (0..20).rev().map(|at| 2 * at).chain((0..20).rev().map(|at| 2 * at + 1)).collect();
        assert_eq!(groups_of(&two).iter().map(|group| group.len()).collect::<Vec<_>>(), [20, 20]);
        // Two towers, one after the other, and a parameter out of turn.
        let towers: Vec<u64> = (0..20).rev().chain((20..40).rev()).collect();
        assert_eq!(groups_of(&towers).len(), 1);
        let early: Vec<u64> = std::iter::once(0).chain((1..40).rev()).collect();
        assert_eq!(groups_of(&early).len(), 1);
    }
}
