//! Activation checkpointing (`torch.utils.checkpoint`, without reentrance): a layer keeps its inputs, and runs forward again in its backward pass.

use super::layers::{self, Stretch};
use super::nodes::{Class, Nodes};
use super::operations::Operations;
use super::program::{NEVER, Phase, Program, Purpose, Step, Tensor};
use super::{Changes, Chosen, OF_SIZES, Sure, Unfit};
use crate::bytes::iec;
use rustc_hash::{FxHashMap, FxHashSet};

/// Percent of what the forward pass keeps: where the layers keep less, they are not what is meant.
const LEAST_OF_LAYERS: u64 = 25;
/// Where what is called beside them keeps more, that may be what is meant.
const MOST_OF_OTHERS: u64 = 40;

/// Checkpoints layers of every step.
///
/// # Errors
/// No layer repeats.
pub(super) fn checkpoint(
    program: &mut Program<'_>,
    recorded: &Program<'_>,
    chosen: Chosen,
    changes: &mut Changes,
) -> Result<(), Unfit> {
    let of_others = match chosen {
        Chosen::All | Chosen::Every(_) => kept_by_other_layers(recorded)?,
        Chosen::Layers(..) => None,
    };
    let nodes = Nodes::of(program);
    let mut removed: FxHashSet<usize> = FxHashSet::default();
    let mut added: Vec<Tensor> = vec![];
    let (mut numbers, mut dropped) = (vec![], 0u64);
    let (mut again, mut forward) = (0, 0);
    let (mut of_layers, mut of_all) = (0u64, 0u64);
    let (mut is_uneven, mut is_shared) = (false, false);
    let (mut spared_most, mut sizes) = (0u64, (u64::MAX, 0));
    let mut names: Vec<String> = vec![];
    let steps: Vec<Step> = program.steps.iter().flat_map(|step| step.micro_batches(program)).collect();
    let n_steps = steps.len();
    for (number, step) in steps.into_iter().enumerate() {
        let is_warm = number > 0;
        let stretches = layers::of(program, &step);
        let is_kept = |it: &&Tensor| it.freed > step.passes[0].0 && it.freed <= step.update;
        let sum = |of: &mut dyn Iterator<Item = &Tensor>| of.filter(is_kept).map(|it| it.bytes).sum::<u64>();
        of_all += sum(&mut program.tensors[program.born_within(step.begin, step.passes[0].0)].iter());
        let members = stretches.iter().flat_map(|stretch| stretch.layers.iter().flatten());
        of_layers += sum(&mut members.map(|index| &program.tensors[*index]));
        let n: usize = stretches.iter().map(|stretch| stretch.layers.len()).sum();
        numbers.push(n);
        for stretch in &stretches {
            let (least, most) =
                kept_by_each(stretch, |index| sum(&mut std::iter::once(&program.tensors[index])));
            // Modules of one class are one layer each, of whatever size.
            if most / 2 > least && stretch.class.is_none() {
                is_uneven = true;
                changes.less = changes.less.max(most - least);
            }
            sizes = (sizes.0.min(least), sizes.1.max(most));
        }
        let mut spared = 0;
        is_shared |= stretches.iter().any(|stretch| shares_weights(program, &step, stretch));
        let mut first = 0;
        let own = &program.tensors[program.born_within(step.begin, step.passes[0].0 + 1)];
        // The first step waits for what is loaded once.
        if is_warm || n_steps == 1 {
            forward += own.last().map_or(0, |it| it.time).saturating_sub(own.first().map_or(0, |it| it.time));
        }
        for stretch in &stretches {
            let mut pass = Layers::of(program, &step, stretch, &nodes);
            for number in 0..stretch.layers.len() {
                let is_chosen = match chosen {
                    Chosen::All => true,
                    Chosen::Every(n) => (first + number) % n.max(1) == 0,
                    Chosen::Layers(from, to) => (from..=to).contains(&(first + number)),
                };
                if !is_chosen {
                    spared += sum(&mut stretch.layers[number]
                        .iter()
                        .map(|index| &pass.recorded[index - pass.first]));
                }
                if is_chosen {
                    again += if is_warm || n_steps == 1 { pass.time(number) } else { 0 };
                    pass.recompute(number, &mut removed, &mut added, &mut dropped);
                }
            }
            pass.finish();
            first += stretch.layers.len();
            let name = match &stretch.class {
                Some(class) => format!("{}, which calls {class}", stretch.name),
                None => stretch.name.clone(),
            };
            if !names.contains(&name) {
                names.push(name);
            }
        }
        spared_most = spared_most.max(spared);
    }
    let found =
        Found { numbers, names, of_layers, of_all, of_others, spared_most, is_uneven, is_shared, dropped };
    found.tell(chosen, &nodes, changes)?;
    if sizes.1 / 2 > sizes.0 {
        changes.margins.widen(OF_SIZES);
    }
    changes.recomputed_share = (forward > 0).then(|| (again as f64 / forward as f64).min(1.0));
    program.retain(|index, _| !removed.contains(&index));
    program.tensors.append(&mut added);
    program.settle();
    Ok(())
}

/// What was found in all steps of the layers that repeat.
struct Found {
    /// How many repeat in each step.
    numbers: Vec<usize>,
    names: Vec<String>,
    /// Bytes that these layers keep for the backward pass, and all that is kept.
    of_layers: u64,
    of_all: u64,
    /// What other layers keep that the same code calls.
    of_others: Option<u64>,
    /// What the layers that were not chosen keep in a step at most.
    spared_most: u64,
    is_uneven: bool,
    is_shared: bool,
    /// Blocks of a cache of keys and values that is not filled.
    dropped: u64,
}

impl Found {
    /// Says what is assumed and how sure it is.
    ///
    /// # Errors
    /// No layer repeats, not so many do, or others than these are meant.
    fn tell(&self, chosen: Chosen, nodes: &Nodes, changes: &mut Changes) -> Result<(), Unfit> {
        let most = self.numbers.iter().copied().max().unwrap_or(0);
        if most == 0 {
            return Err(Unfit(
                "no layers that repeat were found in the forward pass: it is not known what to checkpoint"
                    .into(),
            ));
        }
        if let Chosen::Layers(_, to) = chosen
            && to >= most
        {
            return Err(Unfit(format!("there are {most} layers, numbered from 0 to {}", most - 1)));
        }
        // What layers keep, of all that is kept: where that is little, others are meant, or these are not the layers.
        let share = self.of_layers.saturating_mul(100) / self.of_all.max(1);
        let last = most - 1;
        if share < LEAST_OF_LAYERS && !matches!(chosen, Chosen::Layers(..)) {
            return Err(Unfit(format!(
                "repeating layers keep {share} % of what the forward pass keeps, so most of the model is in no known layer. `gputrace layers` shows them, and --checkpoint layers:0..{last} selects them",
            )));
        }
        if share < 50 && !matches!(chosen, Chosen::Layers(..)) {
            changes.note(
                Sure::Guess,
                format!("repeating layers keep {share} % of what the forward pass keeps: the rest is assumed to be in no layer, as with --checkpoint layers:0..{last}"),
            );
        }
        self.tell_of_layers(most, last, nodes, changes);
        Ok(())
    }

    fn tell_of_layers(&self, most: usize, last: usize, nodes: &Nodes, changes: &mut Changes) {
        if let Some(others) = self.of_others {
            // Of every second layer, others may be meant where these count too.
            changes.less = changes.less.max(others + self.spared_most);
            changes.note(
            Sure::Guess,
            format!(
                "the code that calls the repeating layers also calls others, which keep {}: they are assumed to keep it, as with --checkpoint layers:0..{last}; at least: they and all layers are checkpointed",
                iec(others)
            ),
        );
        }
        if nodes.has_recurrences {
            changes.note(Sure::Guess, "the model has a recurrent network in one operation of cuDNN, whose workspaces are assumed to be as recorded");
        }
        let sure = if self.numbers.iter().all(|n| *n == most) { Sure::Range } else { Sure::Guess };
        changes.note(
            sure,
            format!(
                "{most} layers repeat in {}: each keeps its inputs and is recomputed in the backward pass",
                self.names.join("; ")
            ),
        );
        if sure == Sure::Guess {
            let least = self.numbers.iter().min().copied().unwrap_or(0);
            changes.note(Sure::Guess, format!("a step has {least} layers that repeat, and another {most}"));
        }
        if self.is_uneven {
            changes.note(
            Sure::Guess,
            "layers that repeat keep different amounts: it is assumed that each does what the others do; at least: the largest are several, of which one at a time is recomputed",
        );
        }
        if self.is_shared {
            changes.may_free_nothing = true;
            changes.note(
            Sure::Guess,
            "the layers share their weights, as the steps of a recurrent network do: if each call of a module in them is checkpointed, its inputs are kept too; at most: all that is kept now",
        );
        }
        if self.dropped > 0 {
            changes.note(
            Sure::Certain,
            "the cache of keys and values is not filled: libraries disable it under checkpointing, as it would be filled twice",
        );
        }
    }
}

/// What the layers of a stretch keep, at least and at most; `kept` says what of a tensor is kept. Where that differs much, a layer may be
/// several of what the code calls one.
fn kept_by_each(stretch: &Stretch, kept: impl Fn(usize) -> u64) -> (u64, u64) {
    let of_each = stretch.layers.iter().map(|layer| layer.iter().map(|index| kept(*index)).sum::<u64>());
    of_each.fold((u64::MAX, 0), |(least, most), it: u64| (it.min(least), it.max(most)))
}

/// Whether layers use the same weights: the gradients of all are made in the backward pass of one of them.
fn shares_weights(program: &Program<'_>, step: &Step, stretch: &Stretch) -> bool {
    let windows = layers::backward_of(program, step, stretch);
    let has_gradient = |(begin, done): &(u64, u64)| {
        let mut born = step.gradients.iter().map(|index| program.tensors[*index].born);
        born.any(|born| *begin <= born && born <= *done)
    };
    let n = windows.iter().filter(|window| has_gradient(window)).count();
    n > 0 && n * 2 < windows.len()
}

/// The layers of one stretch in one step.
struct Layers<'p, 'a> {
    program: &'p mut Program<'a>,
    step: &'p Step,
    layers: &'p [Vec<usize>],
    /// When the backward pass of each layer begins and ends.
    backward: Vec<(u64, u64)>,
    nodes: &'p Nodes,
    operations: Operations,
    /// The tensors of the forward pass as they were recorded, and the index of the first.
    recorded: Vec<Tensor>,
    first: usize,
    /// Inputs, and until when they are held.
    held: Vec<(usize, u64)>,
}

impl<'p, 'a> Layers<'p, 'a> {
    fn of(
        program: &'p mut Program<'a>,
        step: &'p Step,
        stretch: &'p Stretch,
        nodes: &'p Nodes,
    ) -> Layers<'p, 'a> {
        let backward = layers::backward_of(program, step, stretch);
        let forward = program.born_within(step.begin, step.passes[0].0);
        let (first, recorded) = (forward.start, program.tensors[forward].to_vec());
        let operations = Operations::of(program, step, nodes);
        let layers = &stretch.layers;
        Layers { program, step, layers, backward, nodes, operations, recorded, first, held: vec![] }
    }

    /// Holds inputs on.
    fn finish(self) {
        for (index, until) in self.held {
            let tensor = &mut self.program.tensors[index];
            if tensor.freed < until {
                tensor.free_at(until);
            }
        }
    }

    /// How long the layer's forward pass took, nanoseconds.
    fn time(&self, number: usize) -> u64 {
        let tensors = &self.program.tensors;
        let first = self.layers[number].first().map_or(0, |index| tensors[*index].time);
        let last = self.layers[number]
            .last()
            .map_or(0, |index| tensors[index + 1..].first().map_or(0, |it| it.time));
        last.saturating_sub(first)
    }

    /// Moves what a layer keeps to where it is made again.
    fn recompute(
        &mut self,
        number: usize,
        removed: &mut FxHashSet<usize>,
        added: &mut Vec<Tensor>,
        dropped: &mut u64,
    ) {
        let start = self.step.passes[0].0;
        let (begin, done) = self.backward[number];
        let layer = &self.layers[number];
        let is_saved = |tensor: &Tensor| tensor.freed > begin && tensor.freed <= self.step.update;
        let tensors = &mut self.program.tensors;
        let end = layer.iter().map(|index| tensors[*index].born).max().unwrap_or(0);
        let returned = layer.iter().copied().filter(|index| tensors[*index].freed > end).max();
        // What an operation behind the layer keeps is its input: it is held as recorded.
        let taken = returned.filter(|index| {
            let freed = tensors[*index].freed;
            let by = self.operations.at(freed).map(|at| self.nodes.frames(self.operations.all[at].stack));
            by.is_some_and(|by| by != self.nodes.frames(tensors[*index].stack))
        });
        let saved = layer.iter().filter(|index| is_saved(&tensors[**index]) && Some(**index) != taken);
        let Some(last) = saved.map(|index| tensors[*index].born).max() else { return };
        let from = layer.iter().map(|index| tensors[*index].born).min().unwrap_or(0);
        let before = number.checked_sub(1).map(|before| &self.layers[before]);
        let input = before.and_then(|layer| returned_by(&self.recorded, self.first, layer, from));
        if let Some(input) = input_to_keep(&self.recorded, from, (begin, done), input) {
            self.held.push((self.first + input, done));
        }
        // It runs forward again up to the last that it has to keep.
        let mut events: Vec<(u64, bool, usize)> = vec![];
        for index in layer {
            let tensor = &tensors[*index];
            if tensor.purpose == Purpose::Cache && is_saved(tensor) {
                removed.insert(*index);
                *dropped += tensor.bytes;
            } else if tensor.born <= last {
                events.push((tensor.born, true, *index));
                if tensor.freed <= start {
                    events.push((tensor.freed, false, *index));
                }
            }
        }
        events.sort_unstable();
        let n = events.len() as u64;
        let mut copies: FxHashMap<usize, Tensor> = FxHashMap::default();
        for (offset, (_, is_born, index)) in (1..).zip(events) {
            let (at, tensor) = (begin + offset, tensors[index]);
            if !is_born {
                if let Some(copy) = copies.get_mut(&index) {
                    copy.free_at(at);
                }
                continue;
            }
            let freed = if is_saved(&tensor) && Some(index) != taken {
                self.operations.released(tensor.freed)
            } else {
                begin + n + 1
            };
            let is_made_again = tensor.freed != NEVER && tensor.purpose != Purpose::Workspace;
            if is_made_again {
                copies.insert(index, tensor.within(at, freed.max(at + 1)));
            }
        }
        // Nothing holds it on when the layer has returned, but for what it returns: whatever takes that may keep it until its own backward
        // pass. Where the layer keeps it too, as behind a ReLU, the recording does not show that.
        let bytes = returned.map_or(0, |index| tensors[index].bytes);
        let is_kept_on = keeps_input(&self.recorded, self.nodes, end, bytes);
        for index in layer {
            if is_saved(&tensors[*index]) && Some(*index) != taken {
                let is_kept_on = is_kept_on && Some(*index) == returned;
                tensors[*index].free_at(if is_kept_on { begin.max(end + 1) } else { end + 1 });
            }
        }
        let mut copies: Vec<Tensor> = copies.into_values().collect();
        copies.sort_by_key(|copy| copy.born);
        added.append(&mut copies);
    }
}

/// Whether the operation that takes what a layer returned, of so many bytes, keeps it: sums and what passes on its input keep nothing. It is the
/// next that asks for memory, but for much smaller tensors, which are not made of it.
fn keeps_input(recorded: &[Tensor], nodes: &Nodes, end: u64, bytes: u64) -> bool {
    const SMALLER: u64 = 8;
    let mut next = recorded[recorded.partition_point(|it| it.born <= end)..].iter();
    let taker = next.find(|it| it.phase == Phase::Forward && it.bytes.saturating_mul(SMALLER) >= bytes);
    taker.is_some_and(|it| nodes.class(it.stack) != Class::Joins)
}

/// What a layer returned to its caller, who still holds it at a moment: an index of `recorded`, of which the first is `first`.
fn returned_by(recorded: &[Tensor], first: usize, layer: &[usize], at: u64) -> Option<usize> {
    let own = layer.iter().map(|index| index - first);
    own.filter(|index| recorded[*index].is_held_at(at)).max_by_key(|index| recorded[*index].born)
}

/// The input of a layer is held until its backward pass is over. Its first operations may keep it anyway; else it is what the layer before
/// returned, or the last that was made before and is still held: its index, if it has to be held on.
fn input_to_keep(
    recorded: &[Tensor],
    from: u64,
    (begin, done): (u64, u64),
    returned: Option<usize>,
) -> Option<usize> {
    /// Statistics and seeds are smaller.
    const SMALL: u64 = 4096;
    let is_before = |tensor: &Tensor| tensor.born < from && tensor.freed > from;
    let before = &recorded[..recorded.partition_point(|it| it.born < from)];
    let last = before.iter().enumerate().filter(|(_, it)| is_before(it));
    let last = last.max_by_key(|(_, it)| (it.bytes.min(SMALL), it.born))?;
    let (index, last) = returned.map_or(last, |index| (index, &recorded[index]));
    let is_kept = before
        .iter()
        .any(|it| is_before(it) && it.freed > begin && it.freed <= done && it.bytes >= last.bytes / 2);
    (!is_kept).then_some(index)
}

/// What the code that calls the repeating layers calls beside them, such as layers of other sizes, keeps. None where it is little.
///
/// # Errors
/// How much it keeps, where that is so much that they may be what is meant.
fn kept_by_other_layers(recorded: &Program<'_>) -> Result<Option<u64>, Unfit> {
    // One step shows it. The first also makes workspaces and state.
    let Some(step) = recorded.steps.get(1).or(recorded.steps.first()) else { return Ok(None) };
    let step = &step.micro_batches(recorded)[0];
    let kept = |of: &mut dyn Iterator<Item = &Tensor>| -> u64 {
        of.filter(|it| it.freed > step.passes[0].0 && it.freed <= step.update).map(|it| it.bytes).sum()
    };
    let of_all = kept(&mut recorded.tensors[recorded.born_within(step.begin, step.passes[0].0)].iter());
    let others = layers::of_same_calls(recorded, step, &layers::of(recorded, step));
    let of_others = kept(&mut others.iter().map(|index| &recorded.tensors[*index]));
    if of_others <= of_all / 10 {
        return Ok(None);
    }
    let share = of_others.saturating_mul(100) / of_all.max(1);
    if share > MOST_OF_OTHERS {
        return Err(Unfit(format!(
            "the code that calls the repeating layers also calls others, which keep {share} % of what the forward pass keeps: `gputrace layers` shows the repeating ones, and --checkpoint layers:A..B selects among them",
        )));
    }
    Ok(Some(of_others))
}
