//! Makes a program smaller, as long as the simulator says that it still comes to the same (delta debugging).
//!
//! A unit is all that is done with one tensor, or one other step. Units are taken away in halves, quarters and so on down to one by one.
//! The limit follows: with less memory in use, less is where the same request fails. The result depends on the program alone,
//! unless the caller's time is up first.

use super::goal::{Goal, Judge, at_once, in_one_pool, on_one_stream};
use super::program::{Figures, Program, Step, Tensor};

/// Segments are a multiple of so many bytes (`kRoundLarge`, c10/cuda/CUDACachingAllocator.cpp).
const MIB: u64 = 1 << 20;

/// How far it has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Requests that are left.
    pub n_requests: usize,
    /// Programs that were tried.
    pub n_tried: u64,
}

/// What watches, and says whether time is left.
pub type Watcher<'a> = dyn FnMut(Progress) -> bool + 'a;

/// What was made of a program.
pub(super) struct Shrunk {
    /// The program.
    pub program: Program,
    /// Its figures.
    pub figures: Figures,
    /// Programs that were tried.
    pub n_tried: u64,
    /// Time was up before nothing more could be taken away.
    pub is_cut_short: bool,
}

/// Makes a program as small as it gets.
pub(super) fn shrunk(
    program: Program,
    figures: Figures,
    goal: &Goal,
    judge: &mut Judge,
    watcher: &mut Watcher<'_>,
) -> Shrunk {
    let mut shrinker = Shrinker { program, figures, goal, judge, watcher, n_tried: 0, is_over: false };
    shrinker.all();
    let Shrinker { program, figures, n_tried, is_over, .. } = shrinker;
    Shrunk { program: renumbered(program), figures, n_tried, is_cut_short: is_over }
}

struct Shrinker<'a, 'w> {
    program: Program,
    figures: Figures,
    goal: &'a Goal,
    judge: &'a mut Judge,
    watcher: &'a mut Watcher<'w>,
    n_tried: u64,
    is_over: bool,
}

impl Shrinker<'_, '_> {
    fn all(&mut self) {
        self.cut();
        for simpler in [at_once, on_one_stream, in_one_pool] {
            self.attempt(simpler(&self.program));
        }
        loop {
            let before = (self.program.n_requests(), self.program.steps.len());
            self.ask_for_more();
            self.units();
            self.merge();
            self.simplify();
            if self.is_over || (self.program.n_requests(), self.program.steps.len()) == before {
                break;
            }
        }
        self.ask_for_more();
        self.round_sizes();
        self.units();
        self.round_limit();
        self.attempt(with_streams_in_order(&self.program));
    }

    /// Takes a candidate if it still comes to the same. Its limit may be lower.
    fn attempt(&mut self, candidate: Program) -> bool {
        self.n_tried += 1;
        let progress = Progress { n_requests: self.program.n_requests(), n_tried: self.n_tried };
        if self.is_over || !(self.watcher)(progress) {
            self.is_over = true;
            return false;
        }
        if candidate == self.program {
            return false;
        }
        if let Some(figures) = self.judge.meets(&candidate, self.goal) {
            (self.program, self.figures) = (candidate, figures);
            return true;
        }
        let Some(limited) = self.with_lower_limit(&candidate) else { return false };
        match self.judge.meets(&limited, self.goal) {
            Some(figures) => {
                (self.program, self.figures) = (limited, figures);
                true
            }
            None => false,
        }
    }

    /// The candidate under the least limit at which all but its last request are served.
    fn with_lower_limit(&mut self, candidate: &Program) -> Option<Program> {
        let limit = candidate.limit.filter(|_| matches!(self.goal, Goal::Refusal(_)))?;
        let Step::Refused(_) = candidate.steps.last()? else { return None };
        let mut served = Program { limit: None, ..candidate.clone() };
        served.steps.retain(|step| !matches!(step, Step::Refused(_)));
        let most = self.judge.figures(&served)?.peak_reserved.max(2 * MIB);
        (most < limit).then(|| Program { limit: Some(most), ..candidate.clone() })
    }

    /// What depended on addresses may no longer do so: then it must stay that way.
    fn ask_for_more(&mut self) {
        let mut both = Judge::new();
        if self.judge.directions.len() < both.directions.len()
            && both.meets(&self.program, self.goal).is_some()
        {
            self.judge.directions = both.directions;
        }
    }

    /// Nothing after the moment that matters is needed.
    fn cut(&mut self) {
        let Goal::Peak { .. } = self.goal else { return };
        let (mut enough, mut too_few) = (self.program.steps.len(), 0);
        while enough - too_few > 1 {
            let middle = enough.midpoint(too_few);
            let mut candidate = self.program.clone();
            candidate.steps.truncate(middle);
            self.n_tried += 1;
            match self.judge.meets(&candidate, self.goal).is_some() {
                true => enough = middle,
                false => too_few = middle,
            }
        }
        let mut candidate = self.program.clone();
        candidate.steps.truncate(enough);
        self.attempt(candidate);
    }

    /// Takes units away, the oldest first.
    fn units(&mut self) {
        let mut size = units(&self.program).len().div_ceil(2).max(1);
        loop {
            let mut start = 0;
            let mut has_changed = false;
            loop {
                let all = units(&self.program);
                if start >= all.len() || self.is_over {
                    break;
                }
                let end = (start + size).min(all.len());
                match self.attempt(without(&self.program, &all[start..end])) {
                    true => has_changed = true,
                    false => start = end,
                }
            }
            match size {
                _ if self.is_over => return,
                1 if !has_changed => return,
                1 => {}
                _ => size = size.div_ceil(2).max(1),
            }
        }
    }

    /// Tensors that are kept to the end become one.
    fn merge(&mut self) {
        let mut size = kept(&self.program).len();
        while size > 1 && !self.is_over {
            let mut start = 0;
            while start + 1 < kept(&self.program).len() && !self.is_over {
                let all = kept(&self.program);
                let end = (start + size).min(all.len());
                if !self.merged(&all[start..end]) {
                    start = end;
                } else {
                    start += 1;
                }
            }
            size /= 2;
        }
    }

    /// One tensor in the place of the first of these, or of the last.
    fn merged(&mut self, group: &[u32]) -> bool {
        let [first, .., last] = group else { return false };
        let tensors = &self.program.tensors;
        let is_alike = |it: &u32| {
            let (one, other) = (tensors[*first as usize], tensors[*it as usize]);
            (one.stream, one.pool) == (other.stream, other.pool)
        };
        if !group.iter().all(is_alike) {
            return false;
        }
        let block = |it: &u32| tensors[*it as usize].bytes.next_multiple_of(512);
        let bytes = group.iter().map(block).sum();
        [*first, *last].into_iter().any(|place| {
            let mut candidate = self.program.clone();
            candidate.tensors[place as usize].bytes = bytes;
            let rest = |step: &Step| !step.tensor().is_some_and(|it| it != place && group.contains(&it));
            candidate.steps.retain(rest);
            self.attempt(candidate)
        })
    }

    /// What is done with a tensor becomes simpler, tensor by tensor.
    fn simplify(&mut self) {
        let dropped: Vec<u32> = self.program.steps.iter().filter_map(dropped).collect();
        for tensor in dropped {
            let mut candidate = self.program.clone();
            candidate.steps.retain(|step| *step != Step::Done(tensor));
            if !self.attempt(candidate.clone()) {
                let freed = |step: &mut Step| {
                    if *step == Step::Drop(tensor) {
                        *step = Step::Free(tensor);
                    }
                };
                candidate.steps.iter_mut().for_each(freed);
                self.attempt(candidate);
            }
        }
        let asked: Vec<u32> = self.program.steps.iter().filter_map(asked).collect();
        for tensor in asked {
            let Tensor { stream, pool, .. } = self.program.tensors[tensor as usize];
            if stream != 0 {
                let mut candidate = self.program.clone();
                candidate.tensors[tensor as usize].stream = 0;
                self.attempt(candidate);
            }
            if pool != 0 {
                let mut candidate = self.program.clone();
                candidate.tensors[tensor as usize].pool = 0;
                self.attempt(candidate);
            }
            // What is never given back needs no line that does.
            let is_given_back = |step: &Step| matches!(step, Step::Free(it) if *it == tensor);
            if let Some(at) = self.program.steps.iter().position(is_given_back) {
                let mut candidate = self.program.clone();
                candidate.steps.remove(at);
                self.attempt(candidate);
            }
            if self.is_over {
                return;
            }
        }
    }

    /// Sizes that are read more easily: all at once, else one by one.
    fn round_sizes(&mut self) {
        let last = self.program.steps.last().and_then(|step| step.tensor());
        let is_refusal = matches!(self.goal, Goal::Refusal(_));
        // What was refused was a request of just this size.
        let is_fixed = |tensor: u32| is_refusal && Some(tensor) == last;
        for unit in [64 * MIB, 16 * MIB, 2 * MIB, MIB, 64 << 10, 512] {
            if self.is_over {
                return;
            }
            let rounded = |bytes: u64| match bytes > unit && !bytes.is_multiple_of(unit) {
                true => [bytes.next_multiple_of(unit), bytes - bytes % unit],
                false => [bytes; 2],
            };
            for which in 0..2 {
                let mut candidate = self.program.clone();
                for (number, tensor) in (0..).zip(&mut candidate.tensors) {
                    if !is_fixed(number) {
                        tensor.bytes = rounded(tensor.bytes)[which];
                    }
                }
                self.attempt(candidate);
            }
            let asked: Vec<u32> = self.program.steps.iter().filter_map(asked).collect();
            for tensor in asked.into_iter().filter(|it| !is_fixed(*it)) {
                if self.is_over {
                    return;
                }
                for which in 0..2 {
                    let bytes = self.program.tensors[tensor as usize].bytes;
                    let mut candidate = self.program.clone();
                    candidate.tensors[tensor as usize].bytes = rounded(bytes)[which];
                    if self.attempt(candidate) {
                        break;
                    }
                }
            }
        }
    }

    /// Of the limits that come to the same the roundest.
    fn round_limit(&mut self) {
        if let Some(lower) = self.with_lower_limit(&self.program.clone()) {
            self.attempt(lower);
        }
        let (Some(limit), Goal::Refusal(_)) = (self.program.limit, self.goal) else { return };
        for unit in [1024 * MIB, 256 * MIB, 64 * MIB, 16 * MIB, 2 * MIB] {
            // No card should have to be larger than it must.
            let rounded = [limit.next_multiple_of(unit)];
            for rounded in rounded.into_iter().filter(|it| *it - limit <= limit / 4) {
                if self.attempt(Program { limit: Some(rounded), ..self.program.clone() }) {
                    return;
                }
            }
        }
    }
}

fn asked(step: &Step) -> Option<u32> {
    match step {
        Step::Alloc(tensor) => Some(*tensor),
        _ => None,
    }
}

fn dropped(step: &Step) -> Option<u32> {
    match step {
        Step::Drop(tensor) => Some(*tensor),
        _ => None,
    }
}

/// Tensors that nothing gives back, in the order in which they are asked for.
fn kept(program: &Program) -> Vec<u32> {
    let mut is_given_back = vec![false; program.tensors.len()];
    for step in &program.steps {
        if let Step::Free(tensor) | Step::Drop(tensor) = step {
            is_given_back[*tensor as usize] = true;
        }
    }
    program.steps.iter().filter_map(asked).filter(|tensor| !is_given_back[*tensor as usize]).collect()
}

/// Something that can be taken away: a tensor with all that is done with it, or a step.
#[derive(Clone, Copy)]
enum Unit {
    Tensor(u32),
    Step(usize),
}

/// All but the last step of a program, where that is the refusal.
fn units(program: &Program) -> Vec<Unit> {
    let last = program.steps.len().saturating_sub(1);
    let unit = |(at, step): (usize, &Step)| match step {
        Step::Refused(_) if at == last => None,
        Step::Alloc(tensor) | Step::Refused(tensor) => Some(Unit::Tensor(*tensor)),
        Step::Trim | Step::Release(_) => Some(Unit::Step(at)),
        Step::Free(_) | Step::Drop(_) | Step::Done(_) => None,
    };
    program.steps.iter().enumerate().filter_map(unit).collect()
}

fn without(program: &Program, units: &[Unit]) -> Program {
    let mut is_out = vec![false; program.tensors.len()];
    let mut steps_out = vec![false; program.steps.len()];
    for unit in units {
        match *unit {
            Unit::Tensor(tensor) => is_out[tensor as usize] = true,
            Unit::Step(at) => steps_out[at] = true,
        }
    }
    let mut other = Program { steps: vec![], ..program.clone() };
    let left = program.steps.iter().zip(&steps_out);
    let left = left.filter(|(step, out)| !**out && !step.tensor().is_some_and(|it| is_out[it as usize]));
    other.steps.extend(left.map(|(step, _)| *step));
    other
}

/// The same with streams numbered as they are first used, so that rows of streams read as loops.
fn with_streams_in_order(program: &Program) -> Program {
    let mut order: Vec<u16> = vec![0];
    for tensor in program.steps.iter().filter_map(|step| step.tensor()) {
        let stream = program.tensors[tensor as usize].stream;
        if !order.contains(&stream) {
            order.push(stream);
        }
    }
    let mut other = program.clone();
    for tensor in &mut other.tensors {
        tensor.stream = order.iter().position(|it| *it == tensor.stream).unwrap_or(0) as u16;
    }
    other
}

/// The same with numbers for what it uses alone.
pub(super) fn renumbered(program: Program) -> Program {
    let mut tensors = vec![];
    let mut number = vec![None; program.tensors.len()];
    let mut streams: Vec<u16> = vec![0];
    let mut pools: Vec<u16> = vec![0];
    for tensor in program.steps.iter().filter_map(|step| step.tensor()) {
        let known = program.tensors[tensor as usize];
        if number[tensor as usize].is_none() {
            number[tensor as usize] = Some(tensors.len() as u32);
            tensors.push(known);
            streams.push(known.stream);
            pools.push(known.pool);
        }
    }
    for list in [&mut streams, &mut pools] {
        list.sort_unstable();
        list.dedup();
    }
    let place = |list: &[u16], it: u16| list.binary_search(&it).unwrap_or(0) as u16;
    for tensor in &mut tensors {
        tensor.stream = place(&streams, tensor.stream);
        tensor.pool = place(&pools, tensor.pool);
    }
    let renumber = |tensor: u32| number[tensor as usize].unwrap_or(0);
    let steps = program.steps.iter().filter_map(|step| {
        Some(match *step {
            Step::Alloc(it) => Step::Alloc(renumber(it)),
            Step::Free(it) => Step::Free(renumber(it)),
            Step::Drop(it) => Step::Drop(renumber(it)),
            Step::Done(it) => Step::Done(renumber(it)),
            Step::Refused(it) => Step::Refused(renumber(it)),
            Step::Trim => Step::Trim,
            Step::Release(pool) => Step::Release(pools.binary_search(&pool).ok()? as u16),
        })
    });
    let steps = steps.collect();
    let kinds = pools.iter().map(|pool| program.pools[usize::from(*pool)]).collect();
    Program { tensors, steps, n_streams: streams.len() as u16, pools: kinds, ..program }
}
