//! A recorded program as tensors with a birth and a death, so that edits can add, remove and move them.

use std::collections::VecDeque;
use std::ops::Range;

use rustc_hash::FxHashMap;

use super::Unfit;
use super::optimizer::Recorded;
use super::order::{GAP, ordered};
use crate::ops::{AllocId, Allocation, History, Op, OpStream, PoolIdx, StackId, StreamIdx};
use crate::predict::is_generated;

/// A moment that never comes: the tensor is held to the end.
pub(super) const NEVER: u64 = u64::MAX;
/// What a backward pass kept is freed within so much of its last request.
pub(super) const LATE: u64 = 8 * GAP;

/// What a tensor is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// A parameter.
    Parameter,
    /// A gradient that outlives its backward pass.
    Gradient,
    /// State of the optimizer.
    State,
    /// Kept by the forward pass for the backward pass.
    Activation,
    /// Freed soon after.
    Temporary,
    /// A cache of keys and values.
    Cache,
    /// Workspaces of libraries.
    Workspace,
    /// Inputs, buffers, results, and what is not known.
    Other,
}

/// In which part of a training step a tensor was requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// While the model was made or moved.
    Model,
    /// In the forward pass of a module.
    Forward,
    /// In a backward pass.
    Backward,
    /// By an optimizer.
    Update,
    /// By none of them.
    Outside,
}

/// The facts known about one recorded request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Known {
    /// What it was for.
    pub purpose: Purpose,
    /// In which part of a step it was made.
    pub phase: Phase,
    /// When it was made, nanoseconds of the trace's clock.
    pub time: u64,
}

/// The facts known about a recorded training run beside its requests.
#[derive(Clone, Debug, Default)]
pub struct Understood {
    /// Of each allocation of the stream, by its number.
    pub of: Vec<Known>,
    /// The first and the last request of each backward pass, in order.
    pub passes: Vec<(AllocId, AllocId)>,
}

/// A backward pass keeps this part of the peak or more for a later one, if it has a graph of its own: one in so many.
const LEAST_OF_SECOND_GRAPH: u64 = 20;

/// A tensor of the program. Moments only order events; they are not times.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Tensor {
    /// Bytes requested.
    pub(super) bytes: u64,
    pub(super) stack: StackId,
    pub(super) stream: StreamIdx,
    pub(super) pool: PoolIdx,
    pub(super) purpose: Purpose,
    pub(super) phase: Phase,
    pub(super) born: u64,
    pub(super) freed: u64,
    /// When no stream uses it any more; at once where that is the moment of the free.
    done: u64,
    /// Which operation of the backward pass made it; 0 outside of backward passes.
    pub(super) node: u32,
    /// When it was recorded, nanoseconds.
    pub(super) time: u64,
}

impl Tensor {
    pub(super) fn is_held_at(&self, moment: u64) -> bool {
        self.born <= moment && moment < self.freed
    }

    /// The same from another moment to another.
    pub(super) fn within(self, born: u64, freed: u64) -> Tensor {
        Tensor { born, freed, done: freed, ..self }
    }

    pub(super) fn free_at(&mut self, moment: u64) {
        (self.freed, self.done) = (moment, moment);
    }
}

/// A training step: forward and backward passes, then the optimizer.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// Its forward pass begins here.
    pub(super) begin: u64,
    /// Where its backward passes begin and end.
    pub(super) passes: Vec<(u64, u64)>,
    /// The optimizer's requests come here, after the backward pass.
    pub(super) update: u64,
    /// Its optimizer has ended, gradients are still held.
    pub(super) end: u64,
    /// Its gradients in the order of the parameters: indices into [`Program::tensors`].
    pub(super) gradients: Vec<usize>,
    /// Its layers, where they were looked for.
    pub(super) spans: Vec<Span>,
}

impl Step {
    /// A step of its own for each backward pass: forward and backward of one micro-batch. Gradients are those of the whole step.
    pub(super) fn micro_batches(&self, program: &Program<'_>) -> Vec<Step> {
        let last = self.passes.len() - 1;
        let micro_batch = |(number, pass): (usize, &(u64, u64))| {
            let after = if number == 0 { self.begin } else { self.passes[number - 1].1 };
            let update = if number == last { self.update } else { pass.1 + LATE };
            let begin = program.forward_begin(after, pass.0, update);
            Step { begin, passes: vec![*pass], update, ..self.clone() }
        };
        self.passes.iter().enumerate().map(micro_batch).collect()
    }
}

/// From when to when a layer runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    pub(super) forward: (u64, u64),
    pub(super) backward: (u64, u64),
}

impl Span {
    /// Whether a moment is in the layer's backward pass.
    pub(super) fn is_backward(&self, at: u64) -> bool {
        self.backward.0 < at && at <= self.backward.1
    }
}

/// The most bytes that tensors hold at one moment, and that moment. Of one moment, frees come first.
pub(super) fn peak_of<'t>(tensors: impl IntoIterator<Item = &'t Tensor, IntoIter: Clone>) -> (u64, u64) {
    let tensors = tensors.into_iter();
    let n = tensors.size_hint().1.unwrap_or(0);
    let (mut births, mut frees) = (Vec::with_capacity(n), Vec::with_capacity(n));
    births.extend(tensors.clone().map(|tensor| (tensor.born, tensor.bytes)));
    frees.extend(tensors.filter(|it| it.freed != NEVER).map(|it| (it.freed, it.bytes)));
    if !births.is_sorted_by_key(|(at, _)| *at) {
        births = ordered(births, |(at, _)| *at, |_| ());
    }
    let mut frees = ordered(frees, |(at, _)| *at, |_| ()).into_iter().peekable();
    let (mut held, mut most) = (0u64, (0, 0));
    for (at, bytes) in births {
        while let Some((_, freed)) = frees.next_if(|(freed, _)| *freed <= at) {
            held = held.saturating_sub(freed);
        }
        held += bytes;
        if held > most.0 {
            most = (held, at);
        }
    }
    most
}

/// A program that can be edited.
#[derive(Clone)]
pub struct Program<'a> {
    base: &'a OpStream,
    pub(super) tensors: Vec<Tensor>,
    pub(super) steps: Vec<Step>,
    pub(super) optimizer: Recorded,
    /// The order of gradients is the order in which the program cleared them, which is that of its parameters.
    pub(super) knows_order: bool,
    /// Requests that are not of a tensor: trims, changes of pools.
    marks: Vec<(u64, Op)>,
    /// When the amounts of others changed, as in [`OpStream::others`].
    others: Vec<u64>,
    /// Streams that the recorded program did not have.
    n_new_streams: u16,
    pub(super) lost_requests: usize,
    /// Passes that make derivatives for a later one, and no gradients.
    inner_passes: Vec<(u64, u64)>,
}

fn moment(op: usize) -> u64 {
    (op as u64 + 1) * GAP
}

/// Backward passes, each with its first and its last moment.
type Passes = Vec<(u64, u64)>;

impl<'a> Program<'a> {
    /// A recorded training run, ready to be edited.
    ///
    /// # Errors
    /// Why edits of it cannot be known.
    pub fn of(stream: &'a OpStream, understood: &Understood) -> Result<Program<'a>, Unfit> {
        match &stream.history {
            History::Broken(why) => return Err(Unfit(why.clone())),
            History::StartsLate => {
                return Err(Unfit(
                    "the recording began when memory was already in use: record the program from its start"
                        .into(),
                ));
            }
            History::Complete => {}
        }
        if understood.of.len() != stream.allocations.len() {
            return Err(Unfit("the roles of its tensors are not known".into()));
        }
        if understood.passes.is_empty() {
            return Err(Unfit(
                "it has no backward pass: `whatif` needs a PyTorch training run with call stacks".into(),
            ));
        }
        let mut program = Program {
            base: stream,
            tensors: tensors(stream, understood),
            steps: vec![],
            optimizer: Recorded::default(),
            knows_order: false,
            marks: vec![],
            others: vec![],
            n_new_streams: 0,
            lost_requests: stream.ooms.len(),
            inner_passes: vec![],
        };
        let marks = stream
            .ops
            .iter()
            .enumerate()
            .filter(|(_, op)| matches!(op, Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..)));
        program.marks = marks.map(|(index, op)| (moment(index), *op)).collect();
        let changes = stream.others.iter().flat_map(|others| &others.changes);
        program.others = changes.map(|change| moment(change.before_op as usize) - 1).collect();
        let passes: Vec<(u64, u64)> = understood
            .passes
            .iter()
            .map(|(first, last)| {
                let at = |id: &AllocId| program.tensors[id.0 as usize].born;
                (at(first), at(last))
            })
            .collect();
        let (passes, inner_passes) = program.passes_of_steps(passes);
        program.inner_passes = inner_passes;
        program.number_nodes(&passes);
        program.mark_parts_of_last_sums(&passes);
        program.find_steps(&passes);
        program.optimizer = Recorded::of(&program, stream);
        Ok(program)
    }

    /// Those that make gradients, and those that make derivatives for a later one (`create_graph=True`), which are a part of the step's
    /// forward pass.
    fn passes_of_steps(&self, passes: Passes) -> (Passes, Passes) {
        let makes = |(start, end): (u64, u64), purpose: Purpose| {
            let own = self.born_within(start - 1, end + 1);
            self.tensors[own].iter().any(|tensor| tensor.purpose == purpose)
        };
        let is_own =
            |pass: &(u64, u64)| makes(*pass, Purpose::Gradient) || !makes(*pass, Purpose::Activation);
        match passes.iter().any(is_own) {
            true => passes.into_iter().partition(is_own),
            false => (passes, vec![]),
        }
    }

    pub(super) fn stacks(&self) -> &'a crate::stacks::Stacks {
        &self.base.stacks
    }

    /// Whether requests are served from pools of their own, as those of CUDA graphs are.
    pub(super) fn has_private_pools(&self) -> bool {
        self.tensors.iter().any(|tensor| tensor.pool != PoolIdx::DEFAULT)
    }

    /// Whether code that was generated for this very program asks for memory, as that of torch.compile does.
    pub(super) fn is_generated(&self) -> bool {
        self.base.stacks.frames.iter().any(|frame| is_generated(&frame.file))
    }

    /// Whether `torch.amp.GradScaler` is used.
    pub(super) fn scales_gradients(&self) -> bool {
        self.base.stacks.frames.iter().any(|frame| frame.file.ends_with("/torch/amp/grad_scaler.py"))
    }

    /// Whether all steps but the first ask for the same sizes in the same order.
    pub(super) fn steps_are_equal(&self) -> bool {
        let sizes = |step: &Step| {
            let own = self.born_within(step.begin, step.update);
            self.tensors[own].iter().map(|tensor| tensor.bytes)
        };
        self.steps
            .iter()
            .skip(1)
            .zip(self.steps.iter().skip(2))
            .all(|(one, other)| sizes(one).eq(sizes(other)))
    }

    /// By which part the peaks of the recorded steps differ, without the first, which makes the optimizer's state.
    pub(super) fn spread_of_steps(&self) -> f64 {
        let mut events: Vec<(u64, i64)> = (self.tensors.iter())
            .flat_map(|it| [(it.born, it.bytes as i64), (it.freed, -(it.bytes as i64))])
            .filter(|(at, _)| *at != NEVER)
            .collect();
        events.sort_unstable();
        let mut peaks = vec![0_i64; self.steps.len()];
        let (mut held, mut number) = (0_i64, 0);
        for (at, bytes) in events {
            held += bytes;
            while self.steps.get(number).is_some_and(|step| step.end < at) {
                number += 1;
            }
            match self.steps.get(number) {
                Some(step) if step.begin <= at => peaks[number] = peaks[number].max(held),
                Some(_) => {}
                None => break,
            }
        }
        let later = || peaks.iter().skip(1).copied();
        let (least, most) = (later().min().unwrap_or(0), later().max().unwrap_or(0));
        (most - least) as f64 / most.max(1) as f64
    }

    /// Whether a step has several backward passes.
    pub(super) fn accumulates(&self) -> bool {
        self.steps.iter().any(|step| step.passes.len() > 1)
    }

    /// Whether a backward pass keeps for a later one of its step what is no gradient: gradients of gradients.
    pub(super) fn differentiates_twice(&self) -> bool {
        let kept = |pass: &(u64, u64), last: u64, is_of_graph: fn(Purpose) -> bool| -> u64 {
            let own = &self.tensors[self.born_within(pass.0, pass.1 + 1)];
            let is_kept = |it: &&Tensor| {
                it.phase == Phase::Backward
                    && is_of_graph(it.purpose)
                    && it.freed > pass.1 + LATE
                    && it.freed <= last + LATE
            };
            own.iter().filter(is_kept).map(|it| it.bytes).sum()
        };
        let of_step = |step: &Step| -> u64 {
            let last = step.passes.last().map_or(0, |pass| pass.1);
            let is_of_graph =
                |purpose| matches!(purpose, Purpose::Activation | Purpose::Temporary | Purpose::Other);
            let own: u64 = step.passes.iter().map(|pass| kept(pass, last, is_of_graph)).sum();
            // No gradients are made in these, whatever else looks like them.
            let inner = self.inner_passes.iter().filter(|pass| step.begin < pass.1 && pass.1 <= last);
            let inner: u64 = inner.map(|pass| kept(pass, last, |_| true)).sum();
            own + inner
        };
        let most = self.steps.iter().map(of_step).max().unwrap_or(0);
        most > 0 && most.saturating_mul(LEAST_OF_SECOND_GRAPH) >= self.peak().0
    }

    pub(super) fn has_failed(&self) -> bool {
        self.lost_requests > 0
    }

    /// Whether the peak is in a step that ran out of memory before its end: no backward pass shows what its activations were for.
    pub(super) fn peaks_in_unfinished_step(&self) -> bool {
        let Some(failed) = self.base.ops.iter().rposition(|op| matches!(op, Op::Oom(_))).map(moment) else {
            return false;
        };
        let ends = self.steps.iter().map(|step| step.end).filter(|end| end.saturating_add(GAP) < failed);
        let peak = self.peak().1;
        ends.max().unwrap_or(0) < peak && peak <= failed
    }

    /// A stream of its own, as for communication.
    pub(super) fn new_stream(&mut self) -> StreamIdx {
        self.n_new_streams += 1;
        StreamIdx((self.base.streams.len() as u16).saturating_add(self.n_new_streams - 1))
    }

    /// A new tensor on the default stream.
    pub(super) fn tensor(bytes: u64, purpose: Purpose, phase: Phase, born: u64, freed: u64) -> Tensor {
        Tensor {
            bytes,
            stack: StackId::NONE,
            stream: StreamIdx(0),
            pool: PoolIdx::DEFAULT,
            purpose,
            phase,
            born,
            freed,
            done: freed,
            node: 0,
            time: 0,
        }
    }

    /// Numbers the operations of backward passes. One ends when another stack asks, or when something from before it is freed: PyTorch
    /// releases what an operation saved, and its input, as soon as it has run.
    fn number_nodes(&mut self, passes: &[(u64, u64)]) {
        let mut number = 0;
        let mut events: Vec<(u64, usize, bool)> = vec![];
        let in_pass = |at: u64| {
            let n_begun = passes.partition_point(|(start, _)| *start <= at);
            n_begun > 0 && at <= passes[n_begun - 1].1
        };
        for (index, tensor) in self.tensors.iter().enumerate() {
            if tensor.phase == Phase::Backward && in_pass(tensor.born) {
                events.push((tensor.born, index, true));
            }
            if in_pass(tensor.freed) {
                events.push((tensor.freed, index, false));
            }
        }
        events.sort_unstable();
        let (mut stack, mut since, mut has_ended) = (None, 0, true);
        let mut ends = passes.iter().map(|(_, end)| *end).peekable();
        for (at, index, is_born) in events {
            while ends.next_if(|end| *end < at).is_some() {
                has_ended = true;
            }
            let tensor = &mut self.tensors[index];
            match is_born {
                true => {
                    if stack != Some(tensor.stack) || has_ended {
                        (number, stack, since, has_ended) = (number + 1, Some(tensor.stack), at, false);
                    }
                    tensor.node = number;
                }
                false => has_ended |= tensor.born < since,
            }
        }
    }

    fn find_steps(&mut self, passes: &[(u64, u64)]) {
        let births = |phase: Phase| {
            let mut births: Vec<u64> =
                self.tensors.iter().filter(|it| it.phase == phase).map(|it| it.born).collect();
            births.sort_unstable();
            births
        };
        let updates = births(Phase::Update);
        let mut cleared: Vec<u64> = (self.tensors.iter())
            .filter(|it| it.purpose == Purpose::Gradient && it.freed != NEVER)
            .map(|it| it.freed)
            .collect();
        cleared.sort_unstable();
        let first_after =
            |list: &[u64], after: u64| list.get(list.partition_point(|at| *at <= after)).copied();
        let is_between = |list: &[u64], from: u64, to: u64| first_after(list, from).is_some_and(|at| at < to);
        let is_seen = |from: u64, to: u64| is_between(&updates, from, to) || is_between(&cleared, from, to);
        let shows_updates = passes.windows(2).any(|two| is_seen(two[0].1, two[1].0));
        let mut groups: Vec<Vec<(u64, u64)>> = vec![];
        for (index, pass) in passes.iter().enumerate() {
            let is_new = index == 0 || !shows_updates || is_seen(passes[index - 1].1, pass.0);
            match groups.last_mut() {
                Some(group) if !is_new => group.push(*pass),
                _ => groups.push(vec![*pass]),
            }
        }
        let mut forward: Vec<u64> = births(Phase::Forward);
        forward.extend(births(Phase::Outside));
        forward.sort_unstable();
        // Where nothing comes after the last backward pass, the optimizer would come at the very end.
        let events = self.tensors.iter().flat_map(|it| [it.born, it.freed]).filter(|at| *at != NEVER);
        let over = events.max().unwrap_or(0) + GAP;
        let mut from =
            self.tensors.iter().filter(|it| it.phase == Phase::Model).map(|it| it.born).max().unwrap_or(0);
        for (index, passes) in groups.clone().into_iter().enumerate() {
            let last = passes[passes.len() - 1].1;
            let next_pass = groups.get(index + 1).map_or(NEVER, |next| next[0].0);
            let next_forward = first_after(&forward, last).unwrap_or(NEVER).min(next_pass);
            let own = |list: &[u64]| -> Vec<u64> {
                let begin = list.partition_point(|at| *at <= last);
                list[begin..].iter().copied().take_while(|at| *at < next_pass).collect()
            };
            let (own_updates, own_cleared) = (own(&updates), own(&cleared));
            // Gradients may be cleared in the next forward pass or after it: the optimizer comes before that.
            let cleared = own_cleared.first().copied().unwrap_or(NEVER).min(next_forward);
            let update = own_updates.first().copied();
            let update = update.unwrap_or(cleared.min(over));
            let end = match own_updates.last() {
                Some(last_born) => {
                    // What the optimizer made for a while is freed before it returns.
                    let own = &self.tensors[self.born_within(own_updates[0], *last_born + 1)];
                    let temporaries = own.iter().filter(|it| it.phase == Phase::Update);
                    let freed =
                        temporaries.map(|it| it.freed).filter(|at| *at < next_pass).max().unwrap_or(0);
                    let first_cleared = first_after(&own_cleared, *last_born).unwrap_or(NEVER);
                    (*last_born).max(freed.min(first_cleared - 1))
                }
                None => update - 1,
            };
            // Freed with a step are the loss and what else its variables hold.
            let begin = first_after(&forward, from).unwrap_or(passes[0].0).min(passes[0].0);
            let gradients = self.gradients_of(&passes, end);
            self.steps.push(Step {
                begin: begin - 1,
                passes,
                update: update - 1,
                end: end + 1,
                gradients,
                spans: vec![],
            });
            from = end;
        }
        self.order_alike();
    }

    /// Every step has its gradients in the order of the first: those of the last are often freed when the program ends, in another order.
    fn order_alike(&mut self) {
        let by_birth = |step: &Step| {
            let mut own = step.gradients.clone();
            own.sort_unstable();
            own
        };
        let Some(first) = self.steps.iter().find(|step| !step.gradients.is_empty()) else { return };
        let own = by_birth(first);
        let ranks: Vec<usize> =
            first.gradients.iter().map(|index| own.partition_point(|it| it < index)).collect();
        let sizes = |own: &[usize]| own.iter().map(|index| self.tensors[*index].bytes).collect::<Vec<_>>();
        let of_first = sizes(&own);
        let alike = |step: &Step| {
            let own = by_birth(step);
            let ordered = ranks.iter().filter_map(|rank| own.get(*rank).copied()).collect();
            if sizes(&own) == of_first { ordered } else { step.gradients.clone() }
        };
        let ordered: Vec<Vec<usize>> = self.steps.iter().map(alike).collect();
        for (step, gradients) in self.steps.iter_mut().zip(ordered) {
            step.gradients = gradients;
        }
    }

    /// In the order of their frees where they are cleared one after the other, else against the order of their births: the backward pass goes
    /// from the last parameter to the first.
    fn gradients_of(&mut self, passes: &[(u64, u64)], end: u64) -> Vec<usize> {
        let (start, last) = (passes[0].0, passes[passes.len() - 1].1);
        let tensors = &self.tensors;
        let mut own: Vec<usize> = self
            .born_within(start, last + 1)
            .filter(|index| tensors[*index].purpose == Purpose::Gradient && tensors[*index].freed > end)
            .collect();
        let is_cleared = own.iter().all(|index| tensors[*index].freed != NEVER);
        match is_cleared {
            true => own.sort_by_key(|index| tensors[*index].freed),
            false => own.reverse(),
        }
        self.knows_order |= is_cleared && !own.is_empty();
        own
    }

    /// Tensors that are asked for from one moment to before another, as indices. They are in the order of their births.
    pub(super) fn born_within(&self, from: u64, to: u64) -> Range<usize> {
        let at = |moment: u64| self.tensors.partition_point(|tensor| tensor.born < moment);
        at(from)..at(to).max(at(from))
    }

    /// The parameter of each gradient, of these sizes, as indices: gradients come in the order of the parameters, and each has the next
    /// parameter of its size.
    pub(super) fn parameters_of(&self, gradients: &[u64]) -> Vec<Option<usize>> {
        let begin = self.steps.first().map_or(0, |step| step.begin);
        let mut left: FxHashMap<u64, VecDeque<usize>> = FxHashMap::default();
        let is_parameter = |index: &usize| self.tensors[*index].purpose == Purpose::Parameter;
        for index in self.born_within(0, begin).filter(is_parameter) {
            left.entry(self.tensors[index].bytes).or_default().push_back(index);
        }
        gradients.iter().map(|bytes| left.get_mut(bytes)?.pop_front()).collect()
    }

    /// Where the forward pass begins that a backward pass at `start` belongs to: evaluation before it keeps nothing for that.
    fn forward_begin(&self, after: u64, start: u64, update: u64) -> u64 {
        /// Temporaries before the first tensor that is kept.
        const BEFORE: usize = 8;
        let own = self.born_within(after, start);
        let is_kept = |it: &Tensor| it.phase == Phase::Forward && it.freed > start && it.freed <= update;
        let Some(first) = own.clone().find(|index| is_kept(&self.tensors[*index])) else { return after };
        let held = self.tensors[first].born;
        let is_again = |it: &Tensor| it.phase == Phase::Forward && it.stack == self.tensors[first].stack;
        if !self.tensors[own.start..first].iter().any(is_again) {
            return after;
        }
        let before = self.tensors[own.start..first].iter().rev().take(BEFORE);
        let begin = before.take_while(|it| it.freed > held || it.phase == Phase::Outside).last();
        begin.map_or(held, |it| it.born) - 1
    }

    /// Removes tensors.
    pub(super) fn retain(&mut self, mut is_kept: impl FnMut(usize, &Tensor) -> bool) {
        let mut moved: Vec<Option<usize>> = vec![None; self.tensors.len()];
        let mut kept = Vec::with_capacity(self.tensors.len());
        for (index, tensor) in self.tensors.iter().enumerate() {
            if is_kept(index, tensor) {
                moved[index] = Some(kept.len());
                kept.push(*tensor);
            }
        }
        self.tensors = kept;
        for step in &mut self.steps {
            step.gradients = step.gradients.iter().filter_map(|index| moved[*index]).collect();
        }
    }

    /// Gives moments their room again and puts the tensors in order, after an edit.
    pub(super) fn settle(&mut self) {
        self.sort();
        const FREED: u8 = 0;
        const DONE: u8 = 1;
        const MARK: u8 = 2;
        const OTHER: u8 = 3;
        const BORN: u8 = 4;
        const BOUND: u8 = 5;
        // Births are in order already: only the rest has to be put in order.
        let mut events: Vec<(u64, u8, u32)> = Vec::with_capacity(self.tensors.len() + 1024);
        for (index, tensor) in (0..).zip(&self.tensors) {
            if tensor.freed != NEVER {
                events.push((tensor.freed, FREED, index));
            }
            if tensor.done != NEVER && tensor.done != tensor.freed {
                events.push((tensor.done, DONE, index));
            }
        }
        events.extend((0..).zip(&self.marks).map(|(index, (at, _))| (*at, MARK, index)));
        events.extend((0..).zip(&self.others).map(|(index, at)| (*at, OTHER, index)));
        let mut bounds: Vec<&mut u64> = vec![];
        for step in &mut self.steps {
            bounds.extend([&mut step.begin, &mut step.update, &mut step.end]);
            bounds.extend(step.passes.iter_mut().flat_map(|(start, end)| [start, end]));
            bounds.extend(step.spans.iter_mut().flat_map(|span| {
                let Span { forward, backward } = span;
                [&mut forward.0, &mut forward.1, &mut backward.0, &mut backward.1]
            }));
        }
        events.extend((0..).zip(&bounds).map(|(index, at)| (**at, BOUND, index)));
        let mut events =
            ordered(events, |(at, ..)| *at, |(_, kind, index)| (*kind, *index)).into_iter().peekable();
        let (mut rank, mut next) = (0, 0);
        loop {
            let birth = self.tensors.get(next).map(|tensor| (tensor.born, BORN));
            let event = events.next_if(|(at, kind, _)| birth.is_none_or(|birth| (*at, *kind) < birth));
            let at = moment(rank);
            rank += 1;
            let Some((_, kind, index)) = event else {
                let Some(born) = self.tensors.get_mut(next) else { break };
                born.born = at;
                next += 1;
                continue;
            };
            let index = index as usize;
            match kind {
                FREED => {
                    let tensor = &mut self.tensors[index];
                    if tensor.done == tensor.freed {
                        tensor.done = at;
                    }
                    tensor.freed = at;
                }
                DONE => self.tensors[index].done = at,
                MARK => self.marks[index].0 = at,
                OTHER => self.others[index] = at,
                _ => *bounds[index] = at,
            }
        }
    }

    fn sort(&mut self) {
        if self.tensors.is_sorted_by_key(|tensor| tensor.born) {
            return;
        }
        let mut order: Vec<usize> = (0..self.tensors.len()).collect();
        order.sort_by_key(|index| self.tensors[*index].born);
        let mut moved = vec![0; order.len()];
        for (new, old) in order.iter().enumerate() {
            moved[*old] = new;
        }
        self.tensors = order.into_iter().map(|old| self.tensors[old]).collect();
        let gradients = self.steps.iter_mut().flat_map(|step| &mut step.gradients);
        gradients.for_each(|index| *index = moved[*index]);
    }

    /// The most bytes requested at one moment, and that moment.
    pub(super) fn peak(&self) -> (u64, u64) {
        peak_of(&self.tensors)
    }

    /// In which part of a step a moment is.
    pub(super) fn part_at(&self, at: u64) -> &'static str {
        let step = self.steps.partition_point(|step| step.begin <= at);
        let Some(step) = step.checked_sub(1).map(|index| &self.steps[index]) else {
            return "the construction of the model";
        };
        match () {
            () if at < step.passes[0].0 => "the forward pass",
            () if at <= step.update => "the backward pass",
            () if at <= step.end => "the optimizer's step",
            () => "between two steps",
        }
    }

    /// Bytes held at a moment, by purpose.
    pub(super) fn held_at(&self, at: u64) -> FxHashMap<&'static str, u64> {
        let mut held = FxHashMap::default();
        for tensor in self.tensors.iter().filter(|it| it.is_held_at(at)) {
            *held.entry(tensor.purpose.name()).or_insert(0) += tensor.bytes;
        }
        held
    }

    /// The requests of the program as it is now.
    #[must_use]
    pub fn stream(&self) -> OpStream {
        let base = self.base;
        let is_in_order = self.tensors.is_sorted_by_key(|tensor| tensor.born);
        debug_assert!(is_in_order, "an edit ends with `settle`");
        /// Of one moment and one tensor, a free is requested before it is completed.
        #[derive(Clone, Copy)]
        enum End {
            Both,
            Requested,
            Completed,
            Mark(Op),
        }
        let mut ends: Vec<(u64, u32, End)> = Vec::with_capacity(self.tensors.len() + self.marks.len());
        let mut allocations = Vec::with_capacity(self.tensors.len());
        for tensor in self.tensors.iter().filter(|it| it.bytes > 0) {
            let id = allocations.len() as u32;
            let Tensor { bytes: requested, stack, stream, pool, .. } = *tensor;
            allocations.push(Allocation { requested, address: 0, stack, stream, pool });
            match (tensor.freed, tensor.done) {
                (NEVER, NEVER) => {}
                (freed, done) if freed == done => ends.push((freed, id, End::Both)),
                (freed, NEVER) => ends.push((freed, id, End::Requested)),
                (NEVER, done) => ends.push((done, id, End::Completed)),
                (freed, done) => ends.extend([(freed, id, End::Requested), (done, id, End::Completed)]),
            }
        }
        ends.extend(self.marks.iter().map(|(at, op)| (*at, u32::MAX, End::Mark(*op))));
        // Stable, so that of one moment the earlier tensor comes first.
        let mut ends = ordered(ends, |(at, ..)| *at, |_| ()).into_iter().peekable();
        let mut births = (0..).zip(self.tensors.iter().filter(|it| it.bytes > 0)).peekable();
        let mut ops: Vec<Op> = Vec::with_capacity(allocations.len() * 3 + self.marks.len());
        let mut moments: Vec<u64> = vec![];
        let keeps_moments = !self.others.is_empty();
        loop {
            let birth = births.peek().map(|(id, tensor)| (tensor.born, *id));
            let n_before = ops.len();
            let at = match ends.next_if(|(at, id, _)| birth.is_none_or(|birth| (*at, *id) < birth)) {
                Some((at, id, end)) => {
                    let id = AllocId(id);
                    match end {
                        End::Both => ops.extend([Op::FreeRequested(id), Op::FreeCompleted(id)]),
                        End::Requested => ops.push(Op::FreeRequested(id)),
                        End::Completed => ops.push(Op::FreeCompleted(id)),
                        End::Mark(op) => ops.push(op),
                    }
                    at
                }
                None => {
                    let Some((id, tensor)) = births.next() else { break };
                    ops.push(Op::Alloc(AllocId(id)));
                    tensor.born
                }
            };
            if keeps_moments {
                moments.extend(std::iter::repeat_n(at, ops.len() - n_before));
            }
        }
        let last = base.streams.last().copied().unwrap_or(0);
        let new = (1..=u64::from(self.n_new_streams)).map(|number| last.saturating_add(number));
        let streams: Vec<u64> = base.streams.iter().copied().chain(new).collect();
        let mut others = base.others.clone();
        for (change, at) in others.iter_mut().flat_map(|others| &mut others.changes).zip(&self.others) {
            change.before_op = moments.partition_point(|moment| moment < at) as u32;
        }
        OpStream {
            device: base.device,
            ops,
            allocations,
            restored: vec![],
            streams,
            pools: base.pools.clone(),
            knows_pools: base.knows_pools,
            ooms: vec![],
            driver: vec![],
            surroundings: None,
            others,
            queries: base.queries.clone(),
            segments: vec![],
            segment_of: vec![],
            initial: vec![],
            initial_allocs: vec![],
            final_layout: vec![],
            history: History::Complete,
            settings: base.settings.clone(),
            stacks: base.stacks.clone(),
        }
    }
}

impl Purpose {
    /// For people and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Purpose::Parameter => "parameters",
            Purpose::Gradient => "gradients",
            Purpose::State => "optimizer state",
            Purpose::Activation => "activations",
            Purpose::Temporary => "temporaries",
            Purpose::Cache => "KV cache",
            Purpose::Workspace => "workspaces",
            Purpose::Other => "other",
        }
    }
}

fn tensors(stream: &OpStream, understood: &Understood) -> Vec<Tensor> {
    let known = stream.allocations.iter().zip(&understood.of);
    let mut tensors: Vec<Tensor> = known
        .map(|(allocation, known)| Tensor {
            bytes: allocation.requested,
            stack: allocation.stack,
            stream: allocation.stream,
            pool: allocation.pool,
            purpose: known.purpose,
            phase: known.phase,
            born: 0,
            freed: NEVER,
            done: NEVER,
            node: 0,
            time: known.time,
        })
        .collect();
    for (index, op) in stream.ops.iter().enumerate() {
        let at = moment(index);
        match *op {
            Op::Alloc(id) => tensors[id.0 as usize].born = at,
            Op::FreeRequested(id) => {
                let tensor = &mut tensors[id.0 as usize];
                // Nearly every free is completed at once.
                let is_done = stream.ops.get(index + 1) == Some(&Op::FreeCompleted(id));
                (tensor.freed, tensor.done) = (at, if is_done { at } else { NEVER });
            }
            Op::FreeCompleted(id) => {
                let tensor = &mut tensors[id.0 as usize];
                if tensor.done == NEVER {
                    tensor.done = at;
                }
            }
            Op::Trim | Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
        }
    }
    tensors
}
