//! The turns of a program's training loop, which people call steps: the one definition that every report uses.
//!
//! The program may say so itself, by NVTX ranges named like `step 12`. Otherwise a step ends where the optimizer does
//! (`torch/optim`, in the lines of Python that asked for memory). Otherwise the calls for memory show it by their period:
//! where many places of the program allocated exactly as often, they did so once a step.

use std::cmp::Reverse;

use gputrace_schemas::event::{Event, EventKind, Frame, Mark, MarkAction, Nanos, StackId, ThreadId};
use rustc_hash::FxHashMap;

use super::phases::{general_name, step_of, step_rank};
use super::sites::SiteId;
use crate::trace::Definitions;

/// Fewer turns than this are not a loop.
const MIN_STEPS: usize = 2;
/// Fewer turns than this prove no period.
const MIN_PERIODS: usize = 4;
/// Places that must agree on the number of steps, and the part of all that they must be.
const AGREE: (usize, usize) = (3, 4);
/// Most times of allocations kept.
const MAX_TIMES: usize = 1 << 20;
/// Most steps kept.
const MAX_STEPS: usize = 1 << 18;

/// How steps were found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StepSource {
    /// NVTX ranges of this name.
    Ranges(String),
    /// Calls of the optimizer.
    Optimizer,
    /// This many of so many places that allocated more than a few times did so exactly as often.
    Period(u64, u64),
}

impl std::fmt::Display for StepSource {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StepSource::Ranges(name) => write!(to, "NVTX ranges '{name}'"),
            StepSource::Optimizer => write!(to, "calls of the optimizer"),
            StepSource::Period(agree, of) => {
                write!(to, "{agree} of {of} call sites allocated exactly as often")
            }
        }
    }
}

/// One turn of the loop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TrainingStep {
    /// What the program calls it, or its place in the order, from 0.
    pub number: u64,
    /// When it began.
    pub begin: Nanos,
    /// When it ended; that of the last one may be unknown.
    pub end: Option<Nanos>,
}

/// The steps of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Training {
    /// How they were found.
    pub source: StepSource,
    /// How many.
    pub n_steps: u64,
    /// Each of them, in order; the first ones where there are very many.
    pub steps: Vec<TrainingStep>,
}

impl Training {
    /// The step that was going on.
    #[must_use]
    pub fn at(&self, time: Nanos) -> Option<&TrainingStep> {
        let next = self.steps.partition_point(|step| step.begin <= time);
        let step = self.steps.get(next.checked_sub(1)?)?;
        step.end.is_none_or(|end| time <= end).then_some(step)
    }

    /// When the first whole step was over.
    #[must_use]
    pub fn first_end(&self) -> Option<Nanos> {
        self.steps.first()?.end
    }
}

/// Looks for steps while events pass.
#[derive(Debug, Default)]
pub(super) struct StepFinder {
    ranges: FxHashMap<String, Vec<TrainingStep>>,
    open: FxHashMap<ThreadId, Vec<Option<String>>>,
    optimizer_stacks: FxHashMap<StackId, bool>,
    in_optimizer: FxHashMap<ThreadId, bool>,
    optimizer_ends: Vec<Nanos>,
    first_block: Option<Nanos>,
    /// Of each call site of PyTorch's blocks (true), and of the driver's memory.
    times: FxHashMap<(bool, i16, SiteId), Vec<Nanos>>,
    n_times: usize,
}

impl StepFinder {
    pub(super) fn mark(&mut self, definitions: &dyn Definitions, event: &Event, mark: &Mark) {
        match mark.action {
            MarkAction::Push => {
                let step = definitions.text(mark.text).and_then(step_of);
                let opened = step.map(|(label, number)| {
                    let label = general_name(label).to_owned();
                    let steps = self.ranges.entry(label.clone()).or_default();
                    if steps.len() < MAX_STEPS {
                        let number = number.unwrap_or(steps.len() as u64);
                        steps.push(TrainingStep { number, begin: event.time, end: None });
                    }
                    label
                });
                self.open.entry(event.thread).or_default().push(opened);
            }
            MarkAction::Pop => {
                let Some(Some(label)) = self.open.get_mut(&event.thread).and_then(Vec::pop) else { return };
                let open = self.ranges.get_mut(&label).and_then(|steps| steps.last_mut());
                if let Some(step) = open.filter(|step| step.end.is_none()) {
                    step.end = Some(event.time);
                }
            }
            MarkAction::Start | MarkAction::End | MarkAction::Mark | MarkAction::NameThread => {}
        }
    }

    /// Memory of `device` was asked for or given back, from `site` where it was asked for.
    pub(super) fn memory(
        &mut self,
        definitions: &dyn Definitions,
        event: &Event,
        device: i16,
        asked: Option<SiteId>,
    ) {
        if let EventKind::BlockAlloc(_) = event.kind {
            self.first_block.get_or_insert(event.time);
        }
        let here = *self
            .optimizer_stacks
            .entry(event.stack)
            .or_insert_with(|| is_optimizer_step(definitions, event.stack));
        let before = self.in_optimizer.insert(event.thread, here).unwrap_or(false);
        match (before, here) {
            (false, true) if self.optimizer_ends.len() < MAX_STEPS => self.optimizer_ends.push(event.time),
            (true, true) => {
                if let Some(last) = self.optimizer_ends.last_mut() {
                    *last = event.time;
                }
            }
            _ => {}
        }
        if let Some(site) = asked
            && self.n_times < MAX_TIMES
        {
            self.n_times += 1;
            let is_block = matches!(event.kind, EventKind::BlockAlloc(_));
            self.times.entry((is_block, device, site)).or_default().push(event.time);
        }
    }

    /// The steps, by the best source that there is.
    pub(super) fn found(&self) -> Option<Training> {
        self.by_ranges().or_else(|| self.by_optimizer()).or_else(|| self.by_period())
    }

    fn by_ranges(&self) -> Option<Training> {
        let loops = self.ranges.iter().filter(|(_, steps)| steps.len() >= MIN_STEPS);
        let (name, steps) = loops.min_by_key(|(name, steps)| (step_rank(name), steps.len(), *name))?;
        let source = StepSource::Ranges(name.clone());
        Some(Training { source, n_steps: steps.len() as u64, steps: steps.clone() })
    }

    fn by_optimizer(&self) -> Option<Training> {
        if self.optimizer_ends.len() < MIN_STEPS {
            return None;
        }
        let mut begin = self.first_block.unwrap_or(self.optimizer_ends[0]);
        let step = |(number, end): (u64, &Nanos)| {
            let step = TrainingStep { number, begin, end: Some(*end) };
            begin = *end;
            step
        };
        let steps: Vec<_> = (0..).zip(&self.optimizer_ends).map(step).collect();
        Some(Training { source: StepSource::Optimizer, n_steps: steps.len() as u64, steps })
    }

    fn by_period(&self) -> Option<Training> {
        // PyTorch asks the driver when its cache is empty, which says nothing of the program's loop.
        let has_blocks = |device| self.times.keys().any(|(is_block, of, _)| *is_block && *of == device);
        let telling =
            self.times.iter().filter(|((is_block, device, _), _)| *is_block || !has_blocks(*device));
        let often: Vec<&Vec<Nanos>> =
            telling.map(|(_, times)| times).filter(|times| times.len() >= MIN_PERIODS).collect();
        let mut counts: FxHashMap<usize, usize> = FxHashMap::default();
        often.iter().for_each(|times| *counts.entry(times.len()).or_default() += 1);
        let (n_steps, agree) = counts.into_iter().max_by_key(|(n, sites)| (*sites, Reverse(*n)))?;
        if agree < AGREE.0 || agree * AGREE.1 < often.len() {
            return None;
        }
        let source = StepSource::Period(agree as u64, often.len() as u64);
        // A cut list of times says how often, not when.
        let is_whole = self.n_times < MAX_TIMES;
        // What comes first in a step of all that comes once in it.
        let first =
            often.iter().filter(|times| times.len() == n_steps).min_by_key(|times| times.first().copied());
        let begins = first.filter(|_| is_whole).map_or(&[][..], |times| times.as_slice());
        let ends = begins.iter().skip(1).map(|end| Some(*end)).chain([None]);
        let steps = (0..).zip(begins).zip(ends);
        let steps = steps.map(|((number, begin), end)| TrainingStep { number, begin: *begin, end }).collect();
        Some(Training { source, n_steps: n_steps as u64, steps })
    }
}

/// Whether an optimizer of PyTorch's is making its step there.
fn is_optimizer_step(definitions: &dyn Definitions, stack: StackId) -> bool {
    let Some(stack) = definitions.stack(stack) else { return false };
    stack.frames.iter().any(|id| match definitions.frame(*id) {
        Some(Frame::Python { function, file, .. }) => {
            let is_step = function == "step" || function.ends_with(".step");
            is_step
                && ["/torch/optim/", "/apex/optimizers/", "/bitsandbytes/optim/"]
                    .iter()
                    .any(|at| file.contains(at))
        }
        Some(Frame::Native { .. }) | None => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number, begin and end of a step in microseconds.
    type Shown = (u64, u64, Option<u64>);

    fn check(scene: &str, expected: Option<(StepSource, u64, &[Shown])>) {
        let training = crate::scene::ledger(scene).training;
        let found = training.as_ref().map(|training| {
            let step =
                |step: &TrainingStep| (step.number, step.begin.0 / 1000, step.end.map(|end| end.0 / 1000));
            let steps: Vec<_> = training.steps.iter().map(step).collect();
            (training.source.clone(), training.n_steps, steps)
        });
        assert_eq!(found, expected.map(|(source, n, steps)| (source, n, steps.to_vec())));
    }

    #[test]
    fn the_programs_own_names_count_first() {
        check(
            "push text=step_7
             push text=optimizer.step
             pop
             pop
             push text=step_8
             Alloc addr=a bytes=1
             pop",
            Some((StepSource::Ranges("step".into()), 2, &[(7, 1, Some(4)), (8, 5, Some(7))])),
        );
    }

    #[test]
    fn a_step_ends_where_the_optimizer_does() {
        check(
            "block addr=a bytes=512 allocated=512 by=forward@/job/train.py:3
             block addr=o bytes=512 allocated=1024 by=AdamW.step@/lib/torch/optim/adamw.py:9
             free addr=o bytes=512 allocated=512 by=AdamW.step@/lib/torch/optim/adamw.py:9
             block addr=b bytes=512 allocated=1024 by=forward@/job/train.py:3
             block addr=p bytes=512 allocated=1536 by=AdamW.step@/lib/torch/optim/adamw.py:9",
            Some((StepSource::Optimizer, 2, &[(0, 1, Some(3)), (1, 3, Some(5))])),
        );
    }

    #[test]
    fn without_names_the_period_of_allocations_tells() {
        let step = "Alloc addr=a bytes=1 by=one\nAlloc addr=b bytes=2 by=two\nAlloc addr=c bytes=4 by=three\n\
                    Free addr=a\nFree addr=b\nFree addr=c\n";
        let steps = [(0, 2, Some(8)), (1, 8, Some(14)), (2, 14, Some(20)), (3, 20, None)];
        check(
            &format!("Alloc addr=m bytes=64 by=model\n{}", step.repeat(4)),
            Some((StepSource::Period(3, 3), 4, &steps)),
        );
        check("Alloc addr=a bytes=1 by=one\nFree addr=a", None);
    }
}
