//! Layers: what a forward pass does again and again, found from the stacks of its requests.
//!
//! A model that calls one module after the other asks with the same stacks in the same order for each of them. The longest stretch that repeats
//! is found first; its stacks have their outermost frames in common, down to the call of a layer, and the frame inside of these walks down the
//! layer's code. Where its line goes back up, the next layer begins: that finds the first layer also where it does a little more than the others.

use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};

use super::calls::{self, Loop};
use super::program::{NEVER, Phase, Program, Purpose, Span, Step, Tensor};
use crate::stacks::{StackId, Stacks};

/// Distances that are tried as the length of a layer, the most frequent first.
const MOST_PERIODS: usize = 48;
/// A layer asks for memory at least so often.
const SHORTEST: usize = 2;
/// Stretches that are looked for in a forward pass: encoder, decoder, stages of a convolutional network.
const MOST_STRETCHES: usize = 8;

/// Layers that repeat keep more than one part in so many of what a forward pass keeps.
const LEAST_PART: u64 = 100;

/// Layers that repeat, in the order of the forward pass.
#[derive(Clone, Debug, Default)]
pub(super) struct Stretch {
    /// Of each layer, its tensors: indices that the program gives its tensors.
    pub(super) layers: Vec<Vec<usize>>,
    /// The frame that calls the layers, or where they are made of: for people.
    pub(super) name: String,
    /// The class of the modules, if each layer is the call of one.
    pub(super) class: Option<String>,
}

/// Layers of a step's forward pass.
pub(super) fn of(program: &Program<'_>, step: &Step) -> Vec<Stretch> {
    let forward: Vec<usize> = program
        .born_within(step.begin, step.passes[0].0)
        .filter(|index| {
            let it = &program.tensors[*index];
            // What stays is made once: workspaces, tables.
            it.phase == Phase::Forward && it.purpose != Purpose::Workspace && it.freed != NEVER
        })
        .collect();
    let stacks: Vec<StackId> = forward.iter().map(|index| program.tensors[*index].stack).collect();
    // What keeps next to nothing for the backward pass is no layer, and has no number: a frozen encoder, steps of an embedding.
    let kept: Vec<u64> = (forward.iter().map(|index| &program.tensors[*index]))
        .map(|it| if it.freed > step.passes[0].0 && it.freed <= step.update { it.bytes } else { 0 })
        .collect();
    let of_all: u64 = kept.iter().sum();
    let matters = |kept: u64| kept.saturating_mul(LEAST_PART) > of_all;
    let called = of_calls(program.stacks(), &stacks, &kept, &matters);
    let of_called: u64 = called.iter().flat_map(|it| &it.layers).flat_map(|layer| &kept[layer.clone()]).sum();
    let bytes: Vec<u64> = forward.iter().map(|index| program.tensors[*index].bytes).collect();
    let mut free: Vec<Range<usize>> = Vec::from([Range { start: 0, end: forward.len() }]);
    let mut found: Vec<(Range<usize>, Vec<Range<usize>>)> = vec![];
    while found.len() < MOST_STRETCHES {
        let best =
            free.iter().cloned().filter_map(|range| longest(&stacks, range)).max_by_key(|run| run.length);
        let Some(run) = best.map(|run| innermost(&stacks, &bytes, run)) else { break };
        let within = free.iter().find(|range| range.contains(&run.start)).cloned().unwrap_or(0..0);
        let layers = layers_of(program.stacks(), &stacks, &run, &within);
        let whole = layers[0].start..layers[layers.len() - 1].end;
        free.retain(|range| *range != within);
        free.extend(
            [within.start..whole.start, whole.end..within.end]
                .into_iter()
                .filter(|it| it.len() >= 2 * SHORTEST),
        );
        found.push((whole, layers));
    }
    found.sort_by_key(|(whole, _)| whole.start);
    found.retain(|(whole, _)| matters(kept[whole.clone()].iter().sum()));
    // Calls of modules are what people wrap. Without, or where these keep little, it is what repeats.
    let of_repeats: u64 = found.iter().flat_map(|(whole, _)| &kept[whole.clone()]).sum();
    let found = match of_called > 0 && of_called.saturating_mul(2) >= of_repeats {
        true => called,
        false => found.into_iter().map(|(_, layers)| Loop { layers, class: String::new() }).collect(),
    };
    let stretch = |Loop { layers, class }: Loop| {
        let own: Vec<StackId> = layers.iter().flat_map(|layer| &stacks[layer.clone()]).copied().collect();
        Stretch {
            name: name_of(program.stacks(), &own),
            class: (!class.is_empty()).then_some(class),
            layers: layers.into_iter().map(|layer| forward[layer].to_vec()).collect(),
        }
    };
    found.into_iter().map(stretch).collect()
}

/// Layers that are calls of modules, without classes that keep next to nothing.
fn of_calls(stacks: &Stacks, of: &[StackId], kept: &[u64], matters: &dyn Fn(u64) -> bool) -> Vec<Loop> {
    let mut found = calls::of(stacks, of, kept);
    let kept = |it: &Loop| it.layers.iter().flat_map(|layer| &kept[layer.clone()]).sum::<u64>();
    let mut of_classes: FxHashMap<String, u64> = FxHashMap::default();
    for it in &found {
        *of_classes.entry(it.class.clone()).or_insert(0) += kept(it);
    }
    found.retain(|it| kept(it) > 0 && of_classes.get(&it.class).is_some_and(|kept| matters(*kept)));
    found
}

/// Tensors of a forward pass that are in no layer, and that the code which calls the layers asks for as well: other layers, of other sizes.
pub(super) fn of_same_calls(program: &Program<'_>, step: &Step, stretches: &[Stretch]) -> Vec<usize> {
    let stacks = program.stacks();
    let stack = |index: &usize| program.tensors[*index].stack;
    // Beside modules of a class, those of other classes are not meant.
    let calls: FxHashSet<Vec<u32>> = stretches
        .iter()
        .filter(|stretch| stretch.class.is_none())
        .map(|stretch| {
            let of: Vec<StackId> = stretch.layers.iter().flatten().map(stack).collect();
            common_frames(stacks, &of)
        })
        .collect();
    let layers: FxHashSet<usize> =
        stretches.iter().flat_map(|stretch| stretch.layers.iter().flatten().copied()).collect();
    let is_called_so = |index: &usize| {
        calls.iter().any(|call| frames(stacks, stack(index)).take(call.len()).eq(call.iter().copied()))
    };
    let forward = program.born_within(step.begin, step.passes[0].0);
    forward.filter(|index| !layers.contains(index) && is_called_so(index)).collect()
}

/// When the backward pass of each layer of a stretch begins and ends: the tensors that it kept are freed by its end.
pub(super) fn backward_of(program: &Program<'_>, step: &Step, stretch: &Stretch) -> Vec<(u64, u64)> {
    let start = step.passes[0].0;
    let is_saved = |tensor: &&Tensor| tensor.freed > start && tensor.freed <= step.update;
    let saved = |layer: &[usize]| -> Vec<u64> {
        let tensors = layer.iter().map(|index| &program.tensors[*index]);
        tensors.filter(is_saved).map(|tensor| tensor.freed).collect()
    };
    let done: Vec<u64> =
        stretch.layers.iter().map(|layer| saved(layer).into_iter().max().unwrap_or(start)).collect();
    let begin = |layer: &[usize]| -> u64 {
        let first_freed = saved(layer).into_iter().min().unwrap_or(start);
        // The operation that frees it had begun before.
        let before = &program.tensors[program.born_within(start, first_freed)];
        let node = before.iter().rev().map(|it| it.node).find(|node| *node > 0).unwrap_or(0);
        before.iter().find(|it| it.node == node && node > 0).map_or(start, |it| it.born) - 1
    };
    // Where the next layer follows at once, that has to be done; else what is between them as well.
    let follows = |layer: &[usize], next: &[usize]| {
        let between = layer.last().zip(next.first()).map_or(0..0, |(last, next)| last + 1..*next);
        !program.tensors[between].iter().any(|it| it.phase == Phase::Forward && is_saved(&it))
    };
    let begins =
        stretch.layers.iter().enumerate().map(|(number, layer)| match stretch.layers.get(number + 1) {
            Some(next) if follows(layer, next) => done[number + 1],
            Some(_) => begin(layer).max(done[number + 1]),
            None => begin(layer),
        });
    begins.zip(done.iter().copied()).collect()
}

/// Notes in each step when its layers run, before other edits move what shows it.
pub(super) fn keep_spans(program: &mut Program<'_>) {
    for number in 0..program.steps.len() {
        let step = &program.steps[number];
        let mut spans = vec![];
        for stretch in of(program, step) {
            let backward = backward_of(program, step, &stretch);
            for (layer, backward) in stretch.layers.iter().zip(backward) {
                let first = layer.first().map_or(step.begin, |index| program.tensors[*index].born);
                let last = layer.last().map_or(step.begin, |index| program.tensors[*index].born);
                spans.push(Span { forward: (first - 1, last + 1), backward });
            }
        }
        program.steps[number].spans = spans;
    }
}

/// The layer of each gradient of a step, by the numbers of `spans`.
///
/// A gradient is made while its layer's backward pass runs. That span ends when the last tensor that the layer made is freed, which may be a
/// little before its first parameters have their gradients. Like layers have parameters of like sizes, one layer after the other: where the
/// order of the parameters is known, the sizes decide at the edges.
pub(super) fn of_gradients(program: &Program<'_>, step: &Step, spans: &[Span]) -> Vec<Option<usize>> {
    let gradients: Vec<&Tensor> = step.gradients.iter().map(|index| &program.tensors[*index]).collect();
    let mut of: Vec<Option<usize>> = gradients.iter().map(|it| innermost_span(spans, it.born)).collect();
    if !program.knows_order {
        return of;
    }
    let sizes: Vec<u64> = gradients.iter().map(|it| it.bytes).collect();
    let by_birth = of.clone();
    let middle = |layer: usize| -> Option<usize> {
        let own: Vec<usize> = (0..sizes.len()).filter(|at| by_birth[*at] == Some(layer)).collect();
        own.get(own.len() / 2).copied()
    };
    let middles: Vec<Option<usize>> = (0..spans.len()).map(middle).collect();
    let distance = |layer: usize| middles[layer + 1]?.checked_sub(middles[layer]?);
    let mut first = 0;
    while first + 1 < spans.len() {
        let run = run_of_equals(first, spans.len(), &distance);
        let (layers, period) = (run.layers, run.period);
        first = layers.end;
        let Some(begin) =
            (period > 0).then(|| begin_of(&sizes, &middles, &layers, period, &by_birth)).flatten()
        else {
            continue;
        };
        let own = begin..begin + layers.len() * period;
        for (at, layer) in of.iter_mut().enumerate() {
            if own.contains(&at) {
                *layer = Some(layers.start + (at - own.start) / period);
            } else if layer.is_some_and(|layer| layers.contains(&layer)) {
                *layer = None;
            }
        }
    }
    of
}

/// The shortest of the spans in whose backward pass a moment is.
fn innermost_span(spans: &[Span], at: u64) -> Option<usize> {
    let around = spans.iter().enumerate().filter(|(_, span)| span.is_backward(at));
    around.min_by_key(|(_, span)| span.backward.1 - span.backward.0).map(|(number, _)| number)
}

/// Layers whose parameters stand at about equal distances.
struct Equals {
    layers: Range<usize>,
    period: usize,
}

/// From a layer on; one layer where the next is elsewhere.
fn run_of_equals(first: usize, n: usize, distance: &dyn Fn(usize) -> Option<usize>) -> Equals {
    let mut found: FxHashMap<usize, usize> = FxHashMap::default();
    let mut last = first;
    // What is made before or after its layer moves the middle a little.
    let is_like = |one: usize, other: usize| one.abs_diff(other) * 4 <= other;
    while last + 1 < n {
        match (distance(first), distance(last)) {
            (Some(one), Some(other)) if is_like(other, one) => *found.entry(other).or_insert(0) += 1,
            _ => break,
        }
        last += 1;
    }
    let period = found.into_iter().max_by_key(|(period, n)| (*n, *period)).map_or(0, |(period, _)| period);
    Equals { layers: first..last + 1, period }
}

/// Where the parameters of layers begin: their sizes repeat from there on, and births disagree least.
fn begin_of(
    sizes: &[u64],
    middles: &[Option<usize>],
    layers: &Range<usize>,
    period: usize,
    by_birth: &[Option<usize>],
) -> Option<usize> {
    let length = layers.len() * period;
    let first = middles[layers.start]?;
    let repeats = |begin: usize| {
        let own = sizes.get(begin..begin + length)?;
        own.iter().zip(&own[period..]).all(|(one, next)| one == next).then_some(begin)
    };
    let disagree = |begin: &usize| {
        let layer = |at: usize| Some(layers.start + at / period);
        (0..length).filter(|at| by_birth[begin + at] != layer(*at)).count()
    };
    (first.saturating_sub(period)..=first).filter_map(repeats).min_by_key(disagree)
}

/// A stretch that repeats.
struct Run {
    start: usize,
    period: usize,
    /// All of it.
    length: usize,
}

fn longest(stacks: &[StackId], within: Range<usize>) -> Option<Run> {
    let here = &stacks[within.clone()];
    let mut last: FxHashMap<StackId, usize> = FxHashMap::default();
    let mut distances: FxHashMap<usize, usize> = FxHashMap::default();
    for (at, stack) in here.iter().enumerate() {
        if let Some(before) = last.insert(*stack, at) {
            *distances.entry(at - before).or_insert(0) += 1;
        }
    }
    let mut periods: Vec<(usize, usize)> = distances.into_iter().filter(|(it, _)| *it >= SHORTEST).collect();
    periods.sort_by_key(|(period, n)| (std::cmp::Reverse(*n), *period));
    periods.truncate(MOST_PERIODS);
    let mut best: Option<Run> = None;
    for (period, _) in periods {
        let mut since = 0;
        for at in 0..here.len() - period + 1 {
            if at + period < here.len() && here[at] == here[at + period] {
                continue;
            }
            let same = at - since;
            let length = same + period;
            let is_better = best.as_ref().is_none_or(|best| (length, best.period) > (best.length, period));
            // Whole layers, twice at least.
            if same >= period && is_better {
                best = Some(Run { start: within.start + since, period, length });
            }
            since = at + 1;
        }
    }
    best
}

/// Where the repeats of a run are of different sizes, as the levels of a network whose images shrink, the layers of one size within the first of
/// them, if they are most of it.
fn innermost(stacks: &[StackId], bytes: &[u64], run: Run) -> Run {
    let alike = |run: &Run| {
        let pairs = run.start..run.start + run.length - run.period;
        let n = pairs.len().max(1);
        pairs.filter(|at| bytes[*at] == bytes[at + run.period]).count() as f64 / n as f64
    };
    if alike(&run) > 0.5 {
        return run;
    }
    let inner = longest(stacks, run.start..run.start + run.period);
    inner.filter(|inner| inner.length * 5 >= run.period * 4 && alike(inner) > 0.9).unwrap_or(run)
}

/// Frames from the outermost.
pub(super) fn frames(stacks: &Stacks, stack: StackId) -> impl DoubleEndedIterator<Item = u32> + '_ {
    let list = stacks.lists.get(stack.0 as usize).map_or(&[][..], |list| list);
    list.iter().rev().copied()
}

fn common_frames(stacks: &Stacks, of: &[StackId]) -> Vec<u32> {
    let mut common: Vec<u32> = of.first().map(|stack| frames(stacks, *stack).collect()).unwrap_or_default();
    for stack in of {
        let same =
            common.iter().zip(frames(stacks, *stack)).take_while(|(one, other)| **one == *other).count();
        common.truncate(same);
    }
    common
}

/// The layers of a run, wherever they begin.
fn layers_of(stacks: &Stacks, of: &[StackId], run: &Run, within: &Range<usize>) -> Vec<Range<usize>> {
    let repeats = run.length / run.period;
    let by_period =
        || (0..repeats).map(|n| run.start + n * run.period..run.start + (n + 1) * run.period).collect();
    let window = &of[run.start..run.start + run.period];
    let common = common_frames(stacks, window);
    // The frame just inside of what all have in common.
    let inside = |stack: StackId| frames(stacks, stack).nth(common.len());
    let starts_so = |stack: StackId| frames(stacks, stack).take(common.len()).eq(common.iter().copied());
    let known: FxHashSet<u32> = window.iter().filter_map(|stack| inside(*stack)).collect();
    let is_one = |at: usize| starts_so(of[at]) && inside(of[at]).is_some_and(|frame| known.contains(&frame));
    let mut functions =
        known.iter().filter_map(|frame| stacks.frames.get(*frame as usize)).map(|it| (&it.name, &it.file));
    let first = functions.next();
    if first.is_none() || !functions.all(|other| Some(other) == first) {
        return by_period();
    }
    let mut start = run.start;
    while start > within.start && is_one(start - 1) {
        start -= 1;
    }
    let mut end = run.start + run.length;
    while end < within.end && is_one(end) {
        end += 1;
    }
    let line = |at: usize| {
        inside(of[at]).and_then(|frame| stacks.frames.get(frame as usize)).map_or(0, |frame| frame.line)
    };
    let mut bounds = vec![start];
    bounds.extend((start + 1..end).filter(|at| line(*at) < line(*at - 1)));
    bounds.push(end);
    let layers: Vec<Range<usize>> = bounds.windows(2).map(|two| two[0]..two[1]).collect();
    // A loop within a layer goes back up as well.
    let is_plausible = layers.len() + 1 >= repeats && layers.len() <= repeats + 2;
    if is_plausible { layers } else { by_period() }
}

/// The innermost Python function that all requests of the layers have in common.
fn name_of(stacks: &Stacks, of: &[StackId]) -> String {
    let common = common_frames(stacks, of);
    let frames = common.iter().rev().filter_map(|frame| stacks.frames.get(*frame as usize));
    let is_plumbing = |file: &str| file.ends_with("/torch/nn/modules/module.py");
    let frame = frames.into_iter().find(|frame| !is_plumbing(&frame.file));
    frame.map_or_else(
        || "the model".to_owned(),
        |frame| {
            let file = frame.file.rsplit('/').next().unwrap_or_default();
            format!("{} ({file}:{})", frame.name, frame.line)
        },
    )
}
