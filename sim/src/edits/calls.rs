//! Layers as people wrap them: modules of one class that a loop of their caller calls one after the other.
//!
//! PyTorch's `Module._call_impl` stands in the stack between a caller and the module's own code. The stacks of a forward pass, in their order,
//! are therefore a tree of calls. From its root down, a line that calls modules of the same class more than once is a loop over layers. Where
//! nearly all of what they keep is kept by modules that they call in loops themselves, as the blocks of a network's stages, those are the layers.

use std::iter;
use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::stacks::{Frame, StackId, Stacks};

/// A layer asks for memory at least so often, on average.
const LEAST_REQUESTS: usize = 2;
/// Where PyTorch calls the code of a module.
const CALLER: &str = "/torch/nn/modules/module.py";
/// Percent of what layers keep: modules within them that keep as much are the layers.
const NEARLY_ALL: u64 = 90;

/// Requests that follow each other: positions in the forward pass.
type Run = Range<usize>;

/// Layers of one class that one line calls.
pub(super) struct Loop {
    pub(super) layers: Vec<Run>,
    /// The class, as Python names it.
    pub(super) class: String,
}

/// A forward pass: of each request its frames, from the outermost, and the bytes that the backward pass needs.
struct Forward<'a> {
    stacks: &'a Stacks,
    frames: Vec<Vec<u32>>,
    kept: Vec<u64>,
}

/// Layers in the order of the forward pass, those together that follow each other in one loop.
pub(super) fn of(stacks: &Stacks, of: &[StackId], kept: &[u64]) -> Vec<Loop> {
    // What another edit has added has no stack: it belongs to what is around it.
    let known: Vec<usize> = (0..of.len()).filter(|at| of[*at] != StackId::NONE).collect();
    let frames = known.iter().map(|at| super::layers::frames(stacks, of[*at]).collect()).collect();
    let forward = Forward { stacks, frames, kept: known.iter().map(|at| kept[*at]).collect() };
    let mut found = forward.below(&[iter::once(0..known.len()).collect()], 0);
    forward.add_single(&mut found);
    let numbered = (0..).zip(found);
    let mut layers: Vec<(usize, u32, Run)> = numbered
        .flat_map(|(number, (class, layers))| layers.into_iter().map(move |layer| (number, class, layer)))
        .collect();
    layers.sort_by_key(|(.., layer)| layer.start);
    let class = |frame: u32| {
        forward.frame(frame).map_or("", |it| it.name.strip_suffix(".forward").unwrap_or(&it.name)).to_owned()
    };
    let recorded = |layer: &Run| known[layer.start]..known[layer.end - 1] + 1;
    let loops = layers.chunk_by(|(one, ..), (other, ..)| one == other);
    let loops = loops.map(|own| Loop {
        class: class(own[0].1),
        layers: own.iter().map(|(.., layer)| recorded(layer)).collect(),
    });
    loops.collect()
}

/// Of a class, named by one of its frames, the layers that one line calls.
type Found = Vec<(u32, Vec<Run>)>;

impl Forward<'_> {
    fn frame(&self, frame: u32) -> Option<&Frame> {
        self.stacks.frames.get(frame as usize)
    }

    fn at(&self, position: usize, depth: usize) -> Option<u32> {
        self.frames[position].get(depth).copied()
    }

    fn line(&self, position: usize, depth: usize) -> u32 {
        self.at(position, depth).and_then(|frame| self.frame(frame)).map_or(0, |it| it.line)
    }

    fn is_same_function(&self, one: Option<u32>, other: Option<u32>) -> bool {
        let function =
            |frame: Option<u32>| frame.and_then(|it| self.frame(it)).map(|it| (&it.name, &it.file));
        one.is_some() && (one == other || function(one) == function(other))
    }

    fn kept(&self, calls: impl IntoIterator<Item = Run>) -> u64 {
        calls.into_iter().flatten().map(|position| self.kept[position]).sum()
    }

    /// Loops over layers among requests that have so many outer frames in common. A group is what one call of their caller asks for there.
    fn below(&self, groups: &[Vec<Run>], depth: usize) -> Found {
        let mut depth = depth;
        let positions = || groups.iter().flatten().cloned().flatten();
        let Some(first) = positions().next() else { return vec![] };
        loop {
            let frame = self.at(first, depth);
            let runs: Vec<Run> = groups.iter().flatten().cloned().collect();
            let is_split = || self.calls_of_lines(&runs, depth).len() > runs.len();
            if !positions().all(|position| self.at(position, depth) == frame) || is_split() {
                break;
            }
            if frame.is_none() {
                return vec![];
            }
            depth += 1;
        }
        let calls = self.calls(groups, depth);
        let mut functions: Vec<u32> = vec![];
        for position in positions() {
            let frame = self.at(position, depth);
            let is_known = functions.iter().any(|it| self.is_same_function(Some(*it), frame));
            functions.extend(frame.filter(|_| !is_known));
        }
        let mut found = vec![];
        for function in functions {
            let is_own = |call: &Run| self.is_same_function(Some(function), self.at(call.start, depth));
            let of_groups: Vec<Vec<Run>> = calls
                .iter()
                .map(|calls| calls.iter().filter(|call| is_own(call)).cloned().collect())
                .collect();
            let own: Vec<Run> = of_groups.iter().flatten().cloned().collect();
            let inner = self.within(&own, depth);
            let is_loop = of_groups.iter().any(|calls| calls.len() > 1);
            let n_requests: usize = own.iter().map(|call| call.len()).sum();
            let is_layer = is_loop
                && n_requests >= LEAST_REQUESTS * own.len()
                && own.iter().all(|call| self.is_module(call.start, depth))
                && own.iter().any(|call| self.calls_modules(call, depth));
            let of_inner = self.kept(inner.iter().flat_map(|(_, layers)| layers.iter().cloned()));
            if is_layer && of_inner * 100 < self.kept(own.iter().cloned()) * NEARLY_ALL {
                found.push((function, own));
            } else {
                found.extend(inner);
            }
        }
        found
    }

    /// Loops in the calls of a function whose frame is this deep, by the lines of the function.
    fn within(&self, calls: &[Run], depth: usize) -> Found {
        let mut lines: Vec<u32> = vec![];
        let mut of_lines: FxHashMap<u32, Vec<Vec<Run>>> = FxHashMap::default();
        for (number, call) in calls.iter().enumerate() {
            let mut start = call.start;
            while start < call.end {
                let frame = self.at(start, depth);
                let end = (start..call.end).find(|at| self.at(*at, depth) != frame).unwrap_or(call.end);
                if let Some(frame) = frame {
                    let groups = of_lines.entry(frame).or_insert_with(|| {
                        lines.push(frame);
                        vec![vec![]; calls.len()]
                    });
                    groups[number].push(start..end);
                }
                start = end;
            }
        }
        lines.into_iter().flat_map(|frame| self.below(&of_lines[&frame], depth + 1)).collect()
    }

    /// Calls of functions whose frames are this deep, of each group: a call ends where another function or the caller goes on, or where the line
    /// goes back up to one where calls begin.
    fn calls(&self, groups: &[Vec<Run>], depth: usize) -> Vec<Vec<Run>> {
        let mut runs: Vec<Vec<Run>> = vec![];
        let mut begins: FxHashSet<Option<u32>> = FxHashSet::default();
        for group in groups {
            let mut own = vec![];
            for run in group {
                let mut start = run.start;
                while start < run.end {
                    let frame = self.at(start, depth);
                    let is_other = |at: &usize| !self.is_same_function(frame, self.at(*at, depth));
                    let end = (start + 1..run.end).find(is_other).unwrap_or(run.end);
                    if frame.is_some() {
                        begins.insert(frame);
                        own.push(start..end);
                    }
                    start = end;
                }
            }
            runs.push(own);
        }
        let split = |run: &Run| -> Vec<Run> {
            let goes_up = |at: &usize| self.line(*at, depth) < self.line(*at - 1, depth);
            let ups: Vec<usize> = (run.start + 1..run.end).filter(goes_up).collect();
            // A call may do more before where others begin, and passes by there; the arguments of a call may be on later lines than the call.
            let is_begin = |(number, at): &(usize, usize)| {
                let end = ups.get(number + 1).copied().unwrap_or(run.end);
                begins.contains(&self.at(*at, depth))
                    || (*at..end).any(|at| begins.contains(&self.at(at, depth)))
            };
            let mut bounds = vec![run.start];
            bounds.extend(ups.iter().copied().enumerate().filter(is_begin).map(|(_, at)| at));
            bounds.push(run.end);
            bounds.windows(2).map(|two| two[0]..two[1]).collect()
        };
        let pieces: Vec<Vec<Run>> = runs.iter().map(|own| own.iter().flat_map(split).collect()).collect();
        let all: Vec<Run> = pieces.iter().flatten().cloned().collect();
        let mut of_functions: Vec<Vec<Run>> = vec![];
        for piece in all {
            let frame = self.at(piece.start, depth);
            let known =
                of_functions.iter_mut().find(|it| self.is_same_function(frame, self.at(it[0].start, depth)));
            match known {
                Some(known) => known.push(piece),
                None => of_functions.push(vec![piece]),
            }
        }
        let mut calls: Vec<Run> =
            of_functions.iter().flat_map(|own| self.calls_of_lines(own, depth)).collect();
        calls.sort_by_key(|call| call.start);
        let between = |own: &Vec<Run>| -> Vec<Run> {
            let (Some(first), Some(last)) = (own.first(), own.last()) else { return vec![] };
            let start = calls.partition_point(|call| call.start < first.start);
            calls[start..].iter().take_while(|call| call.start < last.end).cloned().collect()
        };
        pieces.iter().map(between).collect()
    }

    /// Calls in runs of one function. Where each of several runs has as many calls of one line, these are turns of a loop in its code.
    fn calls_of_lines(&self, runs: &[Run], depth: usize) -> Vec<Run> {
        let calls: Vec<Vec<Run>> =
            runs.iter().map(|run| self.calls_of_one_line(run.clone(), depth)).collect();
        let is_loop_within = runs.len() > 1 && calls.iter().all(|own| own.len() == calls[0].len());
        if is_loop_within { runs.to_vec() } else { calls.into_iter().flatten().collect() }
    }

    /// Calls of a module whose code begins with a line that does all or nearly all: the same requests come again, without a loop further in.
    fn calls_of_one_line(&self, run: Run, depth: usize) -> Vec<Run> {
        if !self.is_module(run.start, depth) {
            return vec![run];
        }
        let first = &self.frames[run.start];
        // The calls in a line have frames of their own.
        let is_further = |at: &usize| self.line(*at, depth) != self.line(run.start, depth);
        let end = run.clone().find(is_further).unwrap_or(run.end);
        // An operation may ask for several tensors.
        let mut steps: Vec<usize> = vec![run.start];
        steps.extend((run.start + 1..end).filter(|at| self.frames[*at] != self.frames[*at - 1]));
        let n_common =
            |at: &usize| first.iter().zip(&self.frames[*at]).take_while(|(one, other)| one == other).count();
        let n_common = steps.iter().map(n_common).min().unwrap_or(0);
        let within = first.get(depth + 1..n_common).unwrap_or_default();
        let is_loop_within = !within.iter().all(|it| self.is_caller(*it));
        if is_loop_within {
            return vec![run];
        }
        let repeats = |n: &usize| {
            let is_again = |step: usize| self.frames[steps[step]] == self.frames[steps[step % n]];
            steps.len().is_multiple_of(*n) && (*n..steps.len()).all(is_again)
        };
        let Some(n_steps) = (2..=steps.len() / 2).find(repeats) else { return vec![run] };
        let mut bounds: Vec<usize> = steps.into_iter().step_by(n_steps).collect();
        bounds.push(run.end);
        bounds.windows(2).map(|two| two[0]..two[1]).collect()
    }

    fn is_caller(&self, frame: u32) -> bool {
        self.frame(frame).is_some_and(|it| it.file.ends_with(CALLER))
    }

    /// Whether the frame at this depth is a module's own code, of a class that is not one of PyTorch's building blocks. Wrappers may stand between
    /// it and what calls it, as those of transformers for checkpoints and old arguments.
    fn is_module(&self, position: usize, depth: usize) -> bool {
        let frame = |depth: usize| self.at(position, depth).and_then(|it| self.frame(it));
        let is_caller = |depth: &usize| self.at(position, *depth).is_some_and(|it| self.is_caller(it));
        let is_forward =
            |depth: &usize| frame(*depth).is_some_and(|it| it.name.rsplit('.').next() == Some("forward"));
        let Some(caller) = (0..depth).rev().find(is_caller).filter(|_| !is_caller(&depth)) else {
            return false;
        };
        let own = (caller + 1..self.frames[position].len()).take_while(|depth| !is_caller(depth));
        let code = own.clone().find(is_forward).or(own.clone().next());
        code == Some(depth)
            && frame(depth).is_some_and(|it| {
                !it.file.contains("/torch/nn/") || it.file.ends_with("/torch/nn/modules/transformer.py")
            })
    }

    /// Whether a module calls others: a norm that is written out is no layer.
    fn calls_modules(&self, call: &Run, depth: usize) -> bool {
        call.clone().any(|at| {
            self.frames[at].get(depth + 1..).unwrap_or_default().iter().any(|it| self.is_caller(*it))
        })
    }

    /// Modules of these classes that another line calls once, as the only block of a stage.
    fn add_single(&self, found: &mut Found) {
        // Without the name of its class, a method may be of any.
        let named =
            found.iter().filter(|(frame, _)| self.frame(*frame).is_some_and(|it| it.name.contains('.')));
        let classes: Vec<u32> = named.map(|(frame, _)| *frame).collect();
        let mut is_free = vec![true; self.frames.len()];
        found
            .iter()
            .flat_map(|(_, layers)| layers.iter().cloned().flatten())
            .for_each(|at| is_free[at] = false);
        // Of a request, the outermost frame that is of one of the classes, and what calls that.
        let single = |at: usize| -> Option<(u32, &[u32])> {
            let frames = self.frames.get(at).filter(|_| is_free[at])?;
            let is_of =
                |frame: u32| classes.iter().copied().find(|it| self.is_same_function(Some(*it), Some(frame)));
            let (depth, class) =
                frames.iter().enumerate().find_map(|(depth, it)| Some((depth, is_of(*it)?)))?;
            (depth > 0 && self.is_module(at, depth)).then_some((class, &frames[..depth]))
        };
        let mut start = 0;
        while start < self.frames.len() {
            let own = (start < self.frames.len()).then(|| single(start)).flatten();
            let end = (start + 1..self.frames.len()).find(|at| own.is_none() || single(*at) != own);
            let end = end.unwrap_or(self.frames.len());
            if let Some((class, caller)) = own {
                let calls = self.calls(&[iter::once(start..end).collect()], caller.len()).remove(0);
                found.push((class, calls));
            }
            start = end;
        }
    }
}
