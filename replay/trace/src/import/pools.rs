//! Finds out which pool a segment belonged to where the trace does not say: segments of private pools that were gone
//! before the snapshot was taken.
//!
//! PyTorch's own rules decide. The recorded configuration is replayed at the recorded addresses; where the simulated
//! allocator takes a block that the real one did not take, one of the two segments was in a pool that this request
//! could not use. Of the possible assignments the one that explains the longest part of the history is kept.

use std::ops::ControlFlow;

use gputrace_sim::addresses::Recorded;
use gputrace_sim::device::{Device, Placement};
use gputrace_sim::ops::{AllocId, DriverCall, Op, OpStream, Pool, PoolIdx, RecordedSegment};
use gputrace_sim::policies::torch::{NEWEST, Torch, parse, profile};
use gputrace_sim::simulator::{Observer, run};

/// Give up after replaying this many ops in total for each op of the stream, plus a constant: 100 replays of a long
/// trace, many more of a short one.
const REPLAYS: usize = 100;
const FREE_OPS: usize = 50_000_000;

/// Fills in the pools of segments and allocations, and says where released pools were emptied. Returns a note if a
/// part of the history stays unexplained.
pub(super) fn infer(stream: &mut OpStream) -> Option<String> {
    let unknown: Vec<u32> = (0u32..)
        .zip(&stream.segments)
        .filter(|(_, segment)| segment.pool.is_none())
        .map(|(index, _)| index)
        .collect();
    apply(stream);
    // Garbage is collected below a limit that is not known: what looks like a pool is its work.
    let options = stream.settings.options.as_deref().unwrap_or_default();
    if unknown.is_empty() || options.contains("garbage_collection_threshold") {
        insert_releases(stream);
        stream.segment_of = Vec::new();
        return None;
    }
    let note = search(stream, &unknown);
    insert_releases(stream);
    stream.segment_of = Vec::new();
    note
}

fn search(stream: &mut OpStream, unknown: &[u32]) -> Option<String> {
    let mut budget = stream.ops.len().saturating_mul(REPLAYS).saturating_add(FREE_OPS);
    let is_unknown = |segment: u32| unknown.binary_search(&segment).is_ok();
    let mut miss = first_miss(stream, &mut budget)?;
    loop {
        let candidates: Vec<u32> = [Some(miss.recorded), miss.simulated]
            .into_iter()
            .flatten()
            .filter(|it| is_unknown(*it))
            .collect();
        let mut best: Option<(usize, u32, PoolIdx, Option<Miss>)> = None;
        for segment in candidates {
            for pool in pools_to_try(stream, segment) {
                let before = stream.segments[segment as usize].pool;
                assign(stream, segment, pool);
                let next = first_miss(stream, &mut budget);
                let reached = next.map_or(usize::MAX, |next| next.op);
                if reached > miss.op && best.as_ref().is_none_or(|(most, ..)| reached > *most) {
                    best = Some((reached, segment, pool, next));
                }
                assign(stream, segment, before.unwrap_or(PoolIdx::DEFAULT));
            }
        }
        let Some((_, segment, pool, next)) = best else {
            return Some(format!(
                "the pools of some segments are not known; from request {} on, the replay is a guess",
                miss.op
            ));
        };
        assign(stream, segment, pool);
        match next {
            None => return None,
            Some(_) if budget == 0 => {
                return Some("the search for the pools of some segments was abandoned".into());
            }
            Some(next) => miss = next,
        }
    }
}

/// The other pools that exist, and one that is not known yet.
fn pools_to_try(stream: &mut OpStream, segment: u32) -> Vec<PoolIdx> {
    let now = stream.segments[segment as usize].pool.unwrap_or(PoolIdx::DEFAULT);
    let is_used = |pool: PoolIdx| stream.segments.iter().any(|other| other.pool == Some(pool));
    let hidden = stream.pools.len() as u16;
    let has_unused = (1..hidden).any(|pool| !is_used(PoolIdx(pool)));
    if !has_unused && hidden < u16::MAX {
        // Its id is gone with it. Nothing says that it belonged to a CUDA graph.
        stream.pools.push(Pool::guessed(hidden));
    }
    let created = |segment: u32| {
        let event = stream.driver.iter().find(|event| event.segment == segment);
        event.map_or(0, |event| i64::from(event.before_op))
    };
    let (when, stream_of) = (created(segment), stream.segments[segment as usize].stream);
    // Pools are used in stretches: one whose segments were made by the same stream at about the same time is likelier.
    let distance = |pool: &PoolIdx| {
        let members = (0u32..).zip(&stream.segments);
        let members = members.filter(|(other, it)| *other != segment && it.pool == Some(*pool));
        let nearest =
            members.map(|(other, it)| (it.stream != stream_of, (created(other) - when).abs())).min();
        nearest.unwrap_or((true, i64::MAX))
    };
    let mut pools: Vec<PoolIdx> =
        (0..stream.pools.len() as u16).map(PoolIdx).filter(|pool| *pool != now).collect();
    pools.sort_by_cached_key(distance);
    pools
}

fn assign(stream: &mut OpStream, segment: u32, pool: PoolIdx) {
    stream.segments[segment as usize].pool = Some(pool);
    for (allocation, in_segment) in stream.allocations.iter_mut().zip(&stream.segment_of) {
        if *in_segment == segment {
            allocation.pool = pool;
        }
    }
}

/// Gives every allocation the pool of its segment; the default one where that is unknown.
fn apply(stream: &mut OpStream) {
    for (allocation, segment) in stream.allocations.iter_mut().zip(&stream.segment_of) {
        let segment: Option<&RecordedSegment> = stream.segments.get(*segment as usize);
        allocation.pool = segment.and_then(|segment| segment.pool).unwrap_or(PoolIdx::DEFAULT);
    }
    let pool_of = |segment: u32| stream.segments[segment as usize].pool.unwrap_or(PoolIdx::DEFAULT);
    let pools: Vec<PoolIdx> = (0..stream.initial.len() as u32).map(pool_of).collect();
    for (segment, pool) in stream.initial.iter_mut().zip(pools) {
        segment.pool = pool;
    }
}

#[derive(Clone, Copy)]
struct Miss {
    op: usize,
    recorded: u32,
    simulated: Option<u32>,
}

struct Watch<'a> {
    stream: &'a OpStream,
    miss: Option<Miss>,
}

impl Observer for Watch<'_> {
    fn placed(&mut self, op: usize, id: AllocId, placement: Placement, _device: &Device) -> ControlFlow<()> {
        if placement.address == self.stream.allocation(id).address {
            return ControlFlow::Continue(());
        }
        let recorded = self.stream.segment_of[id.0 as usize];
        self.miss = Some(Miss { op, recorded, simulated: segment_at(self.stream, op, placement.address) });
        ControlFlow::Break(())
    }
}

/// The recorded segment that held an address at a time.
fn segment_at(stream: &OpStream, op: usize, address: u64) -> Option<u32> {
    let holds = |segment: u32| {
        let segment = &stream.segments[segment as usize];
        (segment.address..segment.address + segment.bytes).contains(&address)
    };
    let until = stream.driver.partition_point(|event| event.before_op as usize <= op);
    let obtained = stream.driver[..until].iter().rev();
    let mut obtained = obtained.filter(|event| matches!(event.call, DriverCall::Alloc | DriverCall::Map));
    let found = obtained.find(|event| holds(event.segment)).map(|event| event.segment);
    found.or_else(|| (0..stream.initial.len() as u32).find(|segment| holds(*segment)))
}

/// Where a replay of the recorded configuration first goes another way.
fn first_miss(stream: &OpStream, budget: &mut usize) -> Option<Miss> {
    let mut trial = stream.clone();
    insert_releases(&mut trial);
    let version = stream.settings.torch_version.or(stream.settings.torch_at_least).unwrap_or(NEWEST);
    let profile = profile(version)?;
    let options = parse(stream.settings.options.as_deref().unwrap_or(""), profile).unwrap_or_default();
    let mut policy = Torch::new(options, *profile, trial.streams.len(), trial.pools.len());
    let mut device = Device::new(u64::MAX, None, Box::new(Recorded::new(&trial.driver)));
    let mut watch = Watch { stream: &trial, miss: None };
    run(&trial, &mut policy, &mut device, &mut watch);
    *budget = budget.saturating_sub(watch.miss.map_or(trial.ops.len(), |miss| miss.op));
    watch.miss
}

/// A private pool whose segments are given back had been dropped before.
fn insert_releases(stream: &mut OpStream) {
    let mut is_released = vec![false; stream.pools.len()];
    is_released[0] = true;
    let mut places = Vec::new();
    for event in &stream.driver {
        if !matches!(event.call, DriverCall::Free | DriverCall::Unmap) {
            continue;
        }
        let pool = stream.segments[event.segment as usize].pool.unwrap_or(PoolIdx::DEFAULT);
        if !std::mem::replace(&mut is_released[usize::from(pool.0)], true) {
            let before = event.before_op;
            let is_trim = before > 0 && stream.ops.get(before as usize - 1) == Some(&Op::Trim);
            places.push((before - u32::from(is_trim), Op::ReleasePool(pool)));
        }
    }
    stream.insert_ops(&places);
}
