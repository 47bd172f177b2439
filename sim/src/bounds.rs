//! What no allocator can beat: lower bounds from the live sets alone, and a packing that knows the future.

use std::collections::{BTreeMap, BTreeSet};

use crate::device::PAGE;
use crate::ops::{AllocId, Op, OpStream, PoolIdx, StreamIdx};
use crate::policies::torch::{MIN_BLOCK, SMALL_REQUEST};

/// Lower bounds on reserved memory, bytes, each above the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// LB0: the most bytes that were requested and in use at once.
    pub requested: u64,
    /// LB1: the same with each request rounded up to 512 bytes.
    pub rounded: u64,
    /// LB2: LB1 of each (stream, pool, small or large) by itself, summed: what keeping them apart costs.
    pub separate: u64,
    /// LB3: LB2 in whole pages of 2 MiB.
    pub paged: u64,
}

impl Bounds {
    /// Walks the stream once.
    pub fn of(stream: &OpStream) -> Bounds {
        let mut requested = Peak::default();
        let mut rounded = Peak::default();
        let mut separate: BTreeMap<(StreamIdx, PoolIdx, bool), Peak> = BTreeMap::new();
        for_each_change(stream, |id, is_live| {
            let allocation = stream.allocation(id);
            let bytes = round(allocation.requested);
            requested.change(allocation.requested, is_live);
            rounded.change(bytes, is_live);
            let key = (allocation.stream, allocation.pool, bytes <= SMALL_REQUEST);
            separate.entry(key).or_default().change(bytes, is_live);
        });
        Bounds {
            requested: requested.most,
            rounded: rounded.most,
            separate: separate.values().map(|peak| peak.most).sum(),
            paged: separate.values().map(|peak| peak.most.next_multiple_of(PAGE)).sum(),
        }
    }
}

/// How high a single segment must be if all lifetimes were known in advance, bytes: the best of several first-fit packings
/// (largest first, largest area first, earliest first). An upper bound on the optimum, and never below LB1.
///
/// Traces of more than `most` allocations are not packed, because the time grows with the square of how many overlap.
pub fn offline_packing(stream: &OpStream, most: usize) -> Option<u64> {
    if stream.allocations.len() > most {
        return None;
    }
    Some(pack(&lives(stream), None).height)
}

/// From when to when an allocation is in use, counted in changes of what is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Life {
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// Rounded.
    pub(crate) bytes: u64,
}

/// All lives, by [`AllocId`].
pub(crate) fn lives(stream: &OpStream) -> Vec<Life> {
    let end = stream.ops.len() as u32 + 1;
    let mut lives: Vec<Life> = stream
        .allocations
        .iter()
        .map(|allocation| Life { start: 0, end, bytes: round(allocation.requested) })
        .collect();
    let mut time = 0u32;
    for_each_change(stream, |id, is_live| {
        time += 1;
        let life = &mut lives[id.0 as usize];
        if is_live { life.start = time } else { life.end = time }
    });
    lives
}

/// Where lives lie in one range of memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Packing {
    /// Length of the range.
    pub(crate) height: u64,
    /// By life.
    pub(crate) offsets: Vec<u64>,
}

/// The lowest of several first-fit packings. Lives that come again after each `period` must be shorter than it; they lie apart
/// from those of the turns before and after, too.
pub(crate) fn pack(lives: &[Life], period: Option<u32>) -> Packing {
    let area = |life: &Life| u128::from(life.bytes) * u128::from(life.end - life.start);
    let mut orders: [Vec<usize>; 3] = std::array::from_fn(|_| (0..lives.len()).collect());
    orders[0].sort_by_key(|n| std::cmp::Reverse((lives[*n].bytes, lives[*n].end - lives[*n].start)));
    orders[1].sort_by_key(|n| std::cmp::Reverse(area(&lives[*n])));
    orders[2].sort_by_key(|n| lives[*n].start);
    let packings = orders.iter().map(|order| first_fit(lives, order, period));
    packings.min_by_key(|packing| packing.height).unwrap_or_default()
}

fn first_fit(lives: &[Life], order: &[usize], period: Option<u32>) -> Packing {
    let mut placed: Vec<(u64, Life)> = Vec::with_capacity(order.len());
    let mut packing = Packing { height: 0, offsets: vec![0; lives.len()] };
    for n in order {
        let life = lives[*n];
        let mut below: Vec<(u64, u64)> = placed
            .iter()
            .filter(|(_, other)| overlap(&life, other, period))
            .map(|(offset, other)| (*offset, offset + other.bytes))
            .collect();
        below.sort_unstable();
        let mut offset = 0;
        for (start, end) in below {
            if start >= offset + life.bytes {
                break;
            }
            offset = offset.max(end);
        }
        packing.height = packing.height.max(offset + life.bytes);
        packing.offsets[*n] = offset;
        placed.push((offset, life));
    }
    packing
}

fn overlap(one: &Life, other: &Life, period: Option<u32>) -> bool {
    let at_once = |late: u32| one.start < other.end + late && other.start + late < one.end;
    let turned = |late: u32| one.start + late < other.end && other.start < one.end + late;
    at_once(0) || period.is_some_and(|period| at_once(period) || turned(period))
}

/// Calls `change` whenever an allocation comes to be or is no longer used by any stream. A trim waits for the streams.
fn for_each_change(stream: &OpStream, mut change: impl FnMut(AllocId, bool)) {
    for id in &stream.initial_allocs {
        change(*id, true);
    }
    let mut pending = BTreeSet::new();
    for op in &stream.ops {
        match *op {
            Op::Alloc(id) => change(id, true),
            Op::FreeRequested(id) => {
                pending.insert(id);
            }
            Op::FreeCompleted(id) => {
                if pending.remove(&id) {
                    change(id, false);
                }
            }
            Op::Trim => std::mem::take(&mut pending).into_iter().for_each(|id| change(id, false)),
            Op::ReleasePool(_) | Op::ChangePool(..) | Op::Oom(_) => {}
        }
    }
}

/// What is handed out for a request at least.
pub(crate) fn round(bytes: u64) -> u64 {
    bytes.next_multiple_of(MIN_BLOCK).max(MIN_BLOCK)
}

#[derive(Clone, Copy, Debug, Default)]
struct Peak {
    now: u64,
    most: u64,
}

impl Peak {
    fn change(&mut self, bytes: u64, is_live: bool) {
        if is_live {
            self.now += bytes;
            self.most = self.most.max(self.now);
        } else {
            self.now -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Allocation, Builder, StackId};

    #[test]
    fn knowing_the_future_packs_what_cannot_be_packed_online() {
        //  t:     0    1    2    3
        //  1 KiB  a    a
        //  1 KiB  b              d        b is freed first, then c (2 KiB) comes: offline, c lies over b and a's successor
        //  2 KiB            c    c
        let mut builder = Builder::new(0);
        let alloc = |builder: &mut Builder, requested| {
            let stream = StreamIdx(0);
            builder.alloc(Allocation {
                requested,
                address: 0,
                stack: StackId::NONE,
                stream,
                pool: PoolIdx::DEFAULT,
            })
        };
        let free = |builder: &mut Builder, id| {
            builder.op(Op::FreeRequested(id));
            builder.op(Op::FreeCompleted(id));
        };
        let a = alloc(&mut builder, 1024);
        let b = alloc(&mut builder, 1000);
        free(&mut builder, a);
        let c = alloc(&mut builder, 2048);
        free(&mut builder, b);
        free(&mut builder, c);
        let stream = builder.finish();
        let bounds = Bounds::of(&stream);
        assert_eq!((bounds.requested, bounds.rounded, bounds.separate), (3048, 3072, 3072));
        assert_eq!(bounds.paged, 2 << 20);
        assert_eq!(offline_packing(&stream, 10), Some(3072));
        assert_eq!(offline_packing(&stream, 2), None);
    }
}
