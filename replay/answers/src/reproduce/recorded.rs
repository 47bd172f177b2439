//! The recorded requests of a device as a program, and what the recording says became of them.

use gputrace_sim::ops::{AllocId, DriverCall, Op, OpStream, PoolChange, PoolIdx};
use gputrace_sim::policies::torch::{self, Torch, parse, profile};

use super::goal::{Goal, Judge};
use super::program::{Figures, PoolKind, Program, Step, Tensor};

/// The recorded facts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// Reserved when the request failed, or at most, bytes.
    pub reserved: u64,
    /// Bytes of the request that failed.
    pub refused: Option<u64>,
    /// It was request so many, counted from 1.
    pub request: u64,
    /// It failed at a limit, or on a device, of so many bytes, as far as the recording tells.
    pub capacity: Option<u64>,
}

/// A program that is as long as the recording.
pub(super) struct Whole {
    /// The program.
    pub program: Program,
    /// Its figures.
    pub figures: Figures,
    /// The recording.
    pub recorded: Recorded,
    /// The part to keep.
    pub goal: Goal,
    /// Whether addresses may go either way.
    pub judge: Judge,
    /// Parts of the recording that the program cannot repeat.
    pub notes: Vec<String>,
}

/// The program of a device's requests, up to the refusal, or to where most was reserved.
///
/// # Errors
/// Why the simulator does not come to what was recorded.
pub(super) fn whole(
    stream: &OpStream,
    version: (u8, u8),
    roles: &[Option<&'static str>],
) -> Result<Whole, String> {
    let profile = *profile(version).ok_or("the simulator does not know this PyTorch release")?;
    let recorded_options = stream.settings.options.as_deref().unwrap_or_default();
    let options = parse(recorded_options, &profile).map_err(|error| error.0)?;
    let mut program = Program {
        tensors: tensors(stream, roles),
        steps: vec![],
        n_streams: stream.streams.len() as u16,
        pools: pools(stream),
        profile,
        options,
        limit: None,
    };
    let mut notes = notes(stream);
    // The last refusal is where the program ended. One that it survived may be the only one that a replay comes to.
    let refusals: Vec<usize> = (0..stream.ops.len())
        .rev()
        .filter(|at| matches!(stream.ops[*at], Op::Oom(oom) if stream.ooms[oom as usize].rounded > 0))
        .collect();
    let mut judge = Judge::new();
    let mut why = None;
    for at in refusals.iter().take(1).chain(refusals.last().filter(|_| refusals.len() > 1)) {
        match refused(stream, &program, *at, &mut judge) {
            Ok((program, figures, recorded)) => {
                let Some(reasons) = judge.reasons(&program) else {
                    why = Some("the refusal depends on device addresses".to_owned());
                    continue;
                };
                if program.limit != recorded.capacity {
                    notes.push("the limit of the recorded process is not in the trace; the program uses one that gives the same refusal".to_owned());
                }
                return Ok(Whole { program, figures, recorded, goal: Goal::Refusal(reasons), judge, notes });
            }
            Err(error) => why = why.or(Some(error)),
        }
    }
    if let Some(why) = why {
        return Err(why);
    }
    program.steps = steps(stream, stream.ops.len(), &mut program.tensors);
    let (figures, recorded) = at_most(stream, &mut program, &mut judge)?;
    let goal = Goal::Peak { reserved: figures.peak_reserved, allocated: figures.peak_allocated };
    Ok(Whole { program, figures, recorded, goal, judge, notes })
}

/// The program up to a refusal, with the limit under which it is that.
fn refused(
    stream: &OpStream,
    program: &Program,
    at: usize,
    judge: &mut Judge,
) -> Result<(Program, Figures, Recorded), String> {
    let Op::Oom(oom) = stream.ops[at] else { return Err("no request was refused".into()) };
    let oom = stream.ooms[oom as usize];
    let mut program = program.clone();
    program.steps = steps(stream, at + 1, &mut program.tensors);
    let reserved = reserved_until(stream, at);
    let peak = peak_until(stream, at);
    let torch = Torch::new(program.options.clone(), program.profile, 1, 1);
    let segment = torch::segment_bytes(torch.rounded(oom.rounded), program.options.large_segment);
    let is_by_driver = oom.device_free > 0 && oom.device_free < segment;
    // A threshold does nothing without a limit. Here a limit stands for the device, and would wake it.
    if is_by_driver {
        program.options.gc_threshold = 0.0;
    }
    program.options.memory_fraction = 1.0;
    let capacity = is_by_driver.then(|| reserved.saturating_add(oom.device_free));
    let most = reserved.saturating_add(segment).saturating_sub(1).max(peak);
    let tried = [capacity, Some(peak.max(reserved)), Some(most), Some(peak.midpoint(most.max(peak)))];
    let request =
        stream.ops[..=at].iter().filter(|op| matches!(op, Op::Alloc(_) | Op::Oom(_))).count() as u64;
    let recorded = Recorded { reserved, refused: Some(oom.rounded), request, capacity };
    let mut nearest: Option<(u64, Program, Figures)> = None;
    for directions in
        [judge.directions.clone(), judge.directions[..1].to_vec(), judge.directions[1..].to_vec()]
    {
        let mut alike = Judge { directions, n_steps: 0 };
        for limit in tried.into_iter().flatten() {
            let candidate = Program { limit: Some(limit), ..program.clone() };
            let Some(figures) = alike.as_written(&candidate) else { continue };
            let found = figures.at_refusal.map_or(0, |(reserved, _)| reserved);
            let off = found.abs_diff(reserved);
            if nearest.as_ref().is_none_or(|(least, ..)| off < *least) {
                nearest = Some((off, candidate, figures));
            }
            if off == 0 {
                break;
            }
        }
        judge.n_steps += alike.n_steps;
        if nearest.is_some() {
            judge.directions = alike.directions;
            break;
        }
    }
    let (_, program, figures) = nearest.ok_or(
        "the simulator does not refuse the request that was refused, whatever the limit: the recording lacks what decided it",
    )?;
    Ok((program, figures, recorded))
}

/// What a program without a refusal comes to, under the limit that it must have had, if it had one.
fn at_most(
    stream: &OpStream,
    program: &mut Program,
    judge: &mut Judge,
) -> Result<(Figures, Recorded), String> {
    let reserved = peak_until(stream, stream.ops.len());
    let recorded = Recorded { reserved, refused: None, request: 0, capacity: None };
    let gc_threshold = program.options.gc_threshold;
    program.options.memory_fraction = 1.0;
    let mut found = None;
    for directions in
        [judge.directions.clone(), judge.directions[..1].to_vec(), judge.directions[1..].to_vec()]
    {
        judge.directions = directions;
        for limit in [None, Some(reserved)] {
            program.limit = limit;
            program.options.gc_threshold = if limit.is_some() { gc_threshold } else { 0.0 };
            if let Some(figures) = judge.as_written(program) {
                if figures.peak_reserved == reserved || stream.driver.is_empty() {
                    return Ok((figures, recorded));
                }
                found = found.or(Some((figures, program.clone(), judge.directions.clone())));
            }
        }
    }
    let (figures, nearest, directions) =
        found.ok_or("the simulator does not reach the end of the recorded requests")?;
    (*program, judge.directions) = (nearest, directions);
    Ok((figures, recorded))
}

fn tensors(stream: &OpStream, roles: &[Option<&'static str>]) -> Vec<Tensor> {
    let tensor = |(index, allocation): (usize, &gputrace_sim::ops::Allocation)| Tensor {
        bytes: allocation.requested,
        stream: allocation.stream.0,
        pool: allocation.pool.0,
        role: roles.get(index).copied().flatten(),
    };
    stream.allocations.iter().enumerate().map(tensor).collect()
}

fn pools(stream: &OpStream) -> Vec<PoolKind> {
    let has = |pool: u16, wanted: PoolChange| stream.ops.contains(&Op::ChangePool(PoolIdx(pool), wanted));
    let kind = |number: u16| match stream.pool(PoolIdx(number)) {
        pool if pool.is_capture() || pool.is_guessed() || !stream.knows_pools => PoolKind::Graph,
        _ => PoolKind::MemPool {
            serves_others: has(number, PoolChange::ServeOthers),
            is_whole: has(number, PoolChange::KeepWhole),
        },
    };
    (0..stream.pools.len() as u16).map(kind).collect()
}

/// The ops before one of them as steps. What was there before the recording began is asked for first.
fn steps(stream: &OpStream, until: usize, tensors: &mut Vec<Tensor>) -> Vec<Step> {
    let mut steps: Vec<Step> = stream.initial_allocs.iter().map(|id| Step::Alloc(id.0)).collect();
    let mut is_there = vec![false; stream.allocations.len()];
    stream.initial_allocs.iter().for_each(|id| is_there[id.0 as usize] = true);
    let mut is_dropped = vec![false; stream.allocations.len()];
    let mut is_released = vec![false; stream.pools.len()];
    for (at, op) in stream.ops[..until].iter().enumerate() {
        match *op {
            Op::Alloc(AllocId(id)) => {
                is_there[id as usize] = true;
                steps.push(Step::Alloc(id));
            }
            Op::FreeRequested(id) if std::mem::take(&mut is_there[id.0 as usize]) => {
                let is_done = stream.ops[..until].get(at + 1) == Some(&Op::FreeCompleted(id));
                is_dropped[id.0 as usize] = !is_done;
                steps.push(if is_done { Step::Free(id.0) } else { Step::Drop(id.0) });
            }
            Op::FreeCompleted(id) if std::mem::take(&mut is_dropped[id.0 as usize]) => {
                steps.push(Step::Done(id.0));
            }
            Op::FreeRequested(_) | Op::FreeCompleted(_) => {}
            Op::Trim => steps.push(Step::Trim),
            Op::ReleasePool(pool) if !std::mem::replace(&mut is_released[usize::from(pool.0)], true) => {
                steps.push(Step::Release(pool.0));
            }
            // The options of a pool are arguments of its constructor.
            Op::ReleasePool(_) | Op::ChangePool(..) => {}
            Op::Oom(oom) => {
                let oom = stream.ooms[oom as usize];
                if oom.rounded > 0 {
                    let (stream, pool) = (oom.stream.map_or(0, |stream| stream.0), oom.pool.0);
                    tensors.push(Tensor { bytes: oom.rounded, stream, pool, role: None });
                    steps.push(Step::Refused(tensors.len() as u32 - 1));
                }
            }
        }
    }
    steps
}

/// What was reserved when an op was done, bytes.
fn reserved_until(stream: &OpStream, op: usize) -> u64 {
    *reserved(stream, op).last().unwrap_or(&0)
}

/// The most that was reserved until an op was done, bytes.
fn peak_until(stream: &OpStream, op: usize) -> u64 {
    reserved(stream, op).into_iter().max().unwrap_or(0)
}

fn reserved(stream: &OpStream, op: usize) -> Vec<u64> {
    let mut held = stream.initial.iter().fold(0u64, |sum, segment| sum.saturating_add(segment.bytes));
    let mut all = vec![held];
    for event in stream.driver.iter().take_while(|event| event.before_op as usize <= op) {
        held = match event.call {
            DriverCall::Alloc | DriverCall::Map => held.saturating_add(event.bytes),
            DriverCall::Free | DriverCall::Unmap => held.saturating_sub(event.bytes),
        };
        all.push(held);
    }
    all
}

fn notes(stream: &OpStream) -> Vec<String> {
    let mut notes = vec![];
    if !stream.initial_allocs.is_empty() {
        notes.push("memory held when the recording began is requested first, in address order".to_owned());
    }
    if !stream.restored.is_empty() {
        notes.push("blocks that graphs return to their pools are requested again".to_owned());
    }
    let is_changed = |op: &Op| matches!(op, Op::ChangePool(_, PoolChange::ServeNoOthers));
    if stream.ops.iter().any(is_changed) {
        notes.push("a pool that stops serving others continues to serve them".to_owned());
    }
    notes
}
