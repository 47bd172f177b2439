//! The turns of a program's training loop, which people call steps: the one definition that every report uses.
//!
//! The program may say so itself, by NVTX ranges named like `step 12`. Otherwise a step ends where the optimizer does
//! (`torch/optim`, in the lines of Python that asked for memory). Otherwise the calls for memory show it by their period
//! (`loops.rs`). Where several loops may be meant, none is: their turns are said instead.

use gputrace_schemas::event::{Event, EventKind, Mark, MarkAction, Nanos, StackId, ThreadId};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use super::loops::{Place, Turns, turns};
use super::phases::{general_name, step_of, step_rank};
use super::run::Run;
use super::sites::SiteId;
use crate::Definitions;
use crate::backward::python_lines;
use crate::by_stack::ByStack;
use crate::newest::Newest;

/// Fewer turns than this are not a loop.
const MIN_STEPS: usize = 2;
/// Most times of allocations kept.
const MAX_TIMES: usize = 1 << 20;
/// Most steps kept.
const MAX_STEPS: usize = 1 << 18;

/// How steps were found.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
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
                write!(to, "{agree} of {of} call sites that allocated exactly as often")
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

/// Memory came or went.
pub(super) enum Change {
    /// This place requested memory of a device.
    Asked(i16, SiteId),
    /// Memory was freed. For a block of PyTorch's: its device, and the place that had requested it.
    GivenBack(Option<(i16, SiteId)>),
}

/// What a stack shows of steps.
#[derive(Clone, Copy, Debug)]
struct StackFacts {
    /// The line that called an optimizer: its index in [`StepFinder::optimizers`].
    optimizer: Option<u32>,
    is_in_module: bool,
}

/// What a process shows of its steps.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Found {
    pub training: Option<Training>,
    /// Loops of so many turns each, of which one may be that of the steps.
    pub perhaps: Vec<u64>,
}

/// Looks for steps while events pass.
#[derive(Debug, Default)]
pub(super) struct StepFinder {
    /// Nobody asks for steps: nothing is kept.
    pub(super) is_off: bool,
    /// What was found, once all events are booked.
    pub(super) result: Found,
    ranges: FxHashMap<String, Vec<TrainingStep>>,
    open: FxHashMap<ThreadId, Vec<Option<String>>>,
    stacks: ByStack<StackFacts>,
    /// The same for the newest event of each thread.
    in_optimizer: Newest<ThreadId, Option<u32>>,
    /// The lines that call an optimizer, and when it was done.
    optimizers: Vec<(String, Vec<Nanos>)>,
    first_block: Option<Nanos>,
    /// Call sites of each device by [`SiteId`]: of the driver's memory, and of PyTorch's blocks.
    places: [Newest<i16, Vec<Place>>; 2],
    /// Who requested the driver's memory that is held, by address.
    held: FxHashMap<u64, (i16, SiteId)>,
    n_times: usize,
}

impl StepFinder {
    pub(super) fn mark(&mut self, definitions: &dyn Definitions, event: &Event, mark: &Mark, run: &Run) {
        if self.is_off || run.is_before(event.time) {
            return;
        }
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

    /// Memory was requested or freed: a turn of a loop may show by it. What only explains what is held where the trace begins says
    /// nothing of how the program works.
    pub(super) fn memory(
        &mut self,
        definitions: &dyn Definitions,
        event: &Event,
        change: &Change,
        run: &Run,
    ) {
        if self.is_off || run.is_before(event.time) {
            return;
        }
        let (is_block, addr) = match &event.kind {
            EventKind::BlockAlloc(block) => {
                self.first_block.get_or_insert(event.time);
                (true, block.addr)
            }
            EventKind::BlockFree(block) => (true, block.addr),
            EventKind::Call(call) => (false, call.addr),
            _ => return,
        };
        let facts = match self.stacks.get(event.stack) {
            Some(known) => *known,
            None => self.look_at(definitions, event.stack),
        };
        let here = facts.optimizer;
        let before = std::mem::replace(self.in_optimizer.of(event.thread), here);
        if let Some((_, ends)) = here.and_then(|caller| self.optimizers.get_mut(caller as usize)) {
            if before == here {
                ends.pop();
            }
            if ends.len() < MAX_STEPS {
                ends.push(event.time);
            }
        }
        match *change {
            Change::Asked(device, site) if self.n_times < MAX_TIMES => {
                self.n_times += 1;
                if self.n_times == MAX_TIMES {
                    // A cut list of times says neither how often nor when.
                    (self.places, self.held) = Default::default();
                    return;
                }
                if !is_block {
                    self.held.insert(addr, (device, site));
                }
                self.place(is_block, device, site).asked(event.time, facts.is_in_module);
            }
            Change::Asked(..) => {}
            Change::GivenBack(block) => {
                let asked = if is_block { block } else { self.held.remove(&addr) };
                let place = asked.and_then(|(device, site)| {
                    self.places[usize::from(is_block)].get_mut(device)?.get_mut(site.0 as usize)
                });
                if let Some(place) = place {
                    place.given_back();
                }
            }
        }
    }

    fn place(&mut self, is_block: bool, device: i16, site: SiteId) -> &mut Place {
        let (places, idx) = (self.places[usize::from(is_block)].of(device), site.0 as usize);
        if idx >= places.len() {
            places.resize_with(idx + 1, Place::default);
        }
        &mut places[idx]
    }

    #[cold]
    fn look_at(&mut self, definitions: &dyn Definitions, stack: StackId) -> StackFacts {
        let optimizer = caller_of_optimizer(definitions, stack).map(|line| self.optimizer(line));
        let facts = StackFacts { optimizer, is_in_module: is_in_module(definitions, stack) };
        self.stacks.insert(stack, facts);
        facts
    }

    fn optimizer(&mut self, line: String) -> u32 {
        let known = self.optimizers.iter().position(|(caller, _)| *caller == line);
        known.unwrap_or_else(|| {
            self.optimizers.push((line, vec![]));
            self.optimizers.len() - 1
        }) as u32
    }

    /// No event follows.
    pub(super) fn finish(&mut self) {
        *self = StepFinder { result: self.found(), ..StepFinder::default() };
    }

    /// The steps, by the best source that there is.
    pub(super) fn found(&self) -> Found {
        if let Some(training) = self.by_ranges() {
            return Found { training: Some(training), perhaps: vec![] };
        }
        let (by_optimizer, by_period) = (self.by_optimizer(), self.by_period());
        match (&by_optimizer.training, &by_period.training) {
            (Some(optimizer), Some(period)) if is_rare(optimizer) && !is_every_so_many(optimizer, period) => {
                Found { training: None, perhaps: vec![optimizer.n_steps, period.n_steps] }
            }
            // As rare as none of the loops.
            (Some(optimizer), None)
                if is_rare(optimizer)
                    && by_period.perhaps.first().is_some_and(|n| *n > optimizer.n_steps + 1) =>
            {
                let perhaps = [vec![optimizer.n_steps], by_period.perhaps].concat();
                Found { training: None, perhaps }
            }
            (None, _) if by_optimizer.perhaps.is_empty() => by_period,
            _ => by_optimizer,
        }
    }

    fn by_ranges(&self) -> Option<Training> {
        let loops = self.ranges.iter().filter(|(_, steps)| steps.len() >= MIN_STEPS);
        let (name, steps) = loops.min_by_key(|(name, steps)| (step_rank(name), steps.len(), *name))?;
        let source = StepSource::Ranges(name.clone());
        Some(Training { source, n_steps: steps.len() as u64, steps: steps.clone() })
    }

    fn by_optimizer(&self) -> Found {
        let ends = self.optimizers.iter().map(|(_, ends)| ends).filter(|ends| ends.len() >= MIN_STEPS);
        let mut ends: Vec<&Vec<Nanos>> = ends.collect();
        // Several in turn, as of a generator and its critic: a step ends with the last.
        ends.sort_by_key(|ends| (ends.len(), ends.last().copied()));
        let (Some(fewest), Some(most)) = (ends.first(), ends.last()) else { return Found::default() };
        if most.len() - fewest.len() > 1 {
            let mut perhaps: Vec<u64> = ends.iter().map(|ends| ends.len() as u64).collect();
            perhaps.dedup();
            return Found { training: None, perhaps };
        }
        let mut begin = self.first_block.unwrap_or(most[0]);
        let step = |(number, end): (u64, &Nanos)| {
            let step = TrainingStep { number, begin, end: Some(*end) };
            begin = *end;
            step
        };
        let steps: Vec<_> = (0..).zip(*most).map(step).collect();
        let training = Training { source: StepSource::Optimizer, n_steps: steps.len() as u64, steps };
        Found { training: Some(training), perhaps: vec![] }
    }

    fn by_period(&self) -> Found {
        let [driver, blocks] = &self.places;
        // PyTorch asks the driver when its cache is empty, which says nothing of the program's loop.
        let telling = driver.iter().filter(|(device, _)| blocks.get(*device).is_none());
        let by_device = |of: &mut Vec<(i16, &Vec<Place>)>| of.sort_by_key(|(device, _)| *device);
        let (mut telling, mut blocks): (Vec<_>, Vec<_>) = (telling.collect(), blocks.iter().collect());
        by_device(&mut telling);
        by_device(&mut blocks);
        let all = telling.into_iter().chain(blocks).flat_map(|(_, places)| places);
        let places: Vec<&Place> = all.filter(|place| !place.times.is_empty()).collect();
        match turns(&places) {
            Turns::None => Found::default(),
            Turns::Perhaps(turns) => Found { training: None, perhaps: turns },
            Turns::Told { begins, agree, of } => {
                let source = StepSource::Period(agree as u64, of as u64);
                let ends = begins.iter().skip(1).map(|end| Some(*end)).chain([None]);
                let steps = (0..).zip(begins).zip(ends);
                let step =
                    |((number, begin), end): ((u64, &Nanos), _)| TrainingStep { number, begin: *begin, end };
                let steps: Vec<_> = steps.map(step).collect();
                let training = Training { source, n_steps: begins.len() as u64, steps };
                Found { training: Some(training), perhaps: vec![] }
            }
        }
    }
}

/// Whether a model is being called there (`Module.__call__`, torch/nn/modules/module.py).
pub fn is_in_module(definitions: &dyn Definitions, stack: StackId) -> bool {
    let Some(stack) = definitions.stack(stack) else { return false };
    python_lines(definitions, stack).any(|(function, file, _)| {
        function.ends_with("_call_impl") && file.contains("/torch/nn/modules/module.py")
    })
}

/// Whether an optimizer asked for memory so rarely that it may have done so for some of its steps only.
fn is_rare(optimizer: &Training) -> bool {
    const FEW: u64 = 8;
    optimizer.n_steps < FEW
}

/// Whether the optimizer comes in each turn of the loop, or in every so many: one that asks for memory now and then does not show
/// its steps.
fn is_every_so_many(optimizer: &Training, period: &Training) -> bool {
    if period.n_steps <= optimizer.n_steps + 1 {
        return true;
    }
    let ends = optimizer.steps.iter().filter_map(|step| step.end);
    let turns: Vec<usize> = ends.map(|end| period.steps.partition_point(|turn| turn.begin <= end)).collect();
    let usual = turns[0];
    let n_usual = turns.windows(2).filter(|pair| pair[1] - pair[0] == usual).count();
    n_usual * 10 >= (turns.len() - 1) * 9 && period.steps.len() - turns[turns.len() - 1] <= usual
}

/// The line that called an optimizer of PyTorch's, where that is making its step.
fn caller_of_optimizer(definitions: &dyn Definitions, stack: StackId) -> Option<String> {
    const OPTIMIZERS: [&str; 3] = ["/torch/optim/", "/apex/optimizers/", "/bitsandbytes/optim/"];
    let mut lines = python_lines(definitions, definitions.stack(stack)?);
    let is_step = |function: &str, file: &str| {
        (function == "step" || function.ends_with(".step")) && OPTIMIZERS.iter().any(|at| file.contains(at))
    };
    lines.find(|(function, file, _)| is_step(function, file))?;
    let caller = lines.find(|(_, file, _)| !file.contains("/torch/"));
    Some(caller.map_or_else(String::new, |(_, file, line)| format!("{file}:{line}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number, begin and end of a step in microseconds.
    type Shown = (u64, u64, Option<u64>);

    fn check(scene: &str, expected: Option<(StepSource, u64, &[Shown])>) {
        let training = crate::scene::ledger(scene).training().cloned();
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

    fn scene(turns: u64, turn: impl Fn(u64) -> Vec<&'static str>) -> String {
        let lines = (0..turns).flat_map(|n| turn(n).into_iter().enumerate().collect::<Vec<_>>());
        lines
            .map(|(n, by)| format!("block addr=a{n} bytes=512 by={by}\nfree addr=a{n} bytes=512\n"))
            .collect()
    }

    fn found(scene: &str) -> (Option<u64>, Vec<u64>) {
        let ledger = crate::scene::ledger(scene);
        (ledger.training().map(|training| training.n_steps), ledger.loops().to_vec())
    }

    const CRITIC: &str = "Adam.step@/lib/torch/optim/adam.py:9,train@/job/gan.py:20";
    const MAKER: &str = "Adam.step@/lib/torch/optim/adam.py:9,train@/job/gan.py:30";
    const WORK: [&str; 3] = ["f@/job/gan.py:2", "g@/job/gan.py:3", "h@/job/gan.py:4"];

    #[test]
    fn two_optimizers_in_turn_are_one_step() {
        let all = |n: u64, every: u64| {
            [&[CRITIC][..], if n.is_multiple_of(every) { &[MAKER][..] } else { &[] }].concat()
        };
        assert_eq!(found(&scene(12, |n| [WORK.to_vec(), all(n, 1)].concat())), (Some(12), vec![]));
        assert_eq!(found(&scene(12, |n| [WORK.to_vec(), all(n, 3)].concat())), (None, vec![4, 12]));
    }

    #[test]
    fn an_optimizer_that_asks_for_memory_now_and_then_does_not_count_steps() {
        let rarely = |n| if [0, 17].contains(&n) { vec![MAKER] } else { vec![] };
        assert_eq!(found(&scene(40, |n| [WORK.to_vec(), rarely(n)].concat())), (None, vec![2, 40]));
        // Gradients of three batches are added up.
        let third = |n| if n % 3 == 2 { vec![MAKER] } else { vec![] };
        assert_eq!(found(&scene(39, |n| [WORK.to_vec(), third(n)].concat())), (Some(13), vec![]));
    }

    #[test]
    fn a_log_at_every_tenth_step_is_not_the_step() {
        let log = ["log@/job/a.py:8", "log@/job/a.py:9", "log@/job/a.py:10"];
        let with_log = |n: u64, at: u64| [&WORK[..], if n % 10 == at { &log[..] } else { &[] }].concat();
        assert_eq!(found(&scene(150, |n| with_log(n, 0))), (Some(150), vec![]));
        // At the end of every tenth: so looks an epoch, too.
        assert_eq!(found(&scene(150, |n| with_log(n, 9))), (None, vec![15, 150]));
    }
}
