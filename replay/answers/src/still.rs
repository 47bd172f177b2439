//! What a snapshot without a history shows: its segments with their streams, and the sizes of its blocks.
//!
//! It is one moment. What was before, and whether memory that is free now is used again, is not in it: facts, and a cause only where streams
//! say enough.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;
use gputrace_sim::ops::{LayoutSegment, OpStream};
use gputrace_trace::words::{bytes, count};

/// A fact is worth a word from this part of what was reserved, or in use, on: one in so many.
const LEAST: u64 = 4;
/// Smaller blocks are left out of the sizes.
const LEAST_BLOCK: u64 = 1 << 16;
/// One tensor is most of what is in use from this part of it on: half.
const MOST: u64 = 2;
/// Sizes that are there equally often, and how often at least, and the part of what is in use that they must have: nine tenths.
const LEAST_SIZES: usize = 3;
const LEAST_SETS: u64 = 8;
const MOST_OF_ALL: (u64, u64) = (9, 10);
/// Sizes that are named.
const NAMED: usize = 3;

/// What a device's memory looked like at one moment.
#[derive(Default)]
pub(crate) struct Still {
    reserved: u64,
    live: u64,
    /// In segments without a block.
    free_whole: u64,
    /// In segments that blocks share.
    free_between: u64,
    largest_between: u64,
    /// Free on streams other than the default one, and how many these are.
    free_aside: u64,
    n_aside: u64,
    /// Requested sizes, each with its number.
    sizes: BTreeMap<u64, u64>,
}

impl Still {
    /// Of the device that reserved most; none without segments.
    pub(crate) fn of(devices: &[OpStream]) -> Option<Still> {
        let all = devices.iter().map(Still::of_device);
        all.filter(|it| it.reserved > 0).max_by_key(|it| it.reserved)
    }

    fn of_device(stream: &OpStream) -> Still {
        let mut still = Still::default();
        let mut aside: BTreeMap<u64, u64> = BTreeMap::new();
        let segments: &[LayoutSegment] =
            if stream.initial.is_empty() { &stream.final_layout } else { &stream.initial };
        for segment in segments {
            let free = segment.blocks.iter().filter(|block| block.alloc.is_none());
            let (largest, free) =
                free.fold((0, 0), |(largest, sum), block| (block.bytes.max(largest), sum + block.bytes));
            still.reserved += segment.bytes;
            still.live += segment.bytes.saturating_sub(free);
            if free >= segment.bytes {
                still.free_whole += free;
            } else {
                still.free_between += free;
                still.largest_between = still.largest_between.max(largest);
            }
            let handle = stream.streams.get(usize::from(segment.stream.0)).copied().unwrap_or(0);
            if handle != 0 && free > 0 {
                *aside.entry(handle).or_default() += free;
            }
            for id in segment.blocks.iter().filter_map(|block| block.alloc) {
                let size = stream.allocation(id).requested;
                if size >= LEAST_BLOCK {
                    *still.sizes.entry(size).or_default() += 1;
                }
            }
        }
        (still.free_aside, still.n_aside) = (aside.values().sum(), aside.len() as u64);
        still
    }

    fn is_much(&self, part: u64) -> bool {
        part.saturating_mul(LEAST) >= self.reserved && part > 0
    }

    /// What is free on side streams, in words, where that is much: it serves no other stream.
    pub(crate) fn aside(&self) -> Option<String> {
        self.is_much(self.free_aside).then(|| {
            format!(
                "{} of {} reserved are free on {}, where only requests of that stream can use them",
                bytes(Bytes(self.free_aside)),
                bytes(Bytes(self.reserved)),
                if self.n_aside == 1 {
                    "a side stream".to_owned()
                } else {
                    format!("{} side streams", count(self.n_aside))
                }
            )
        })
    }

    /// What sizes and free memory show, in words.
    pub(crate) fn facts(&self) -> Vec<String> {
        let mut facts = vec![];
        let most = self.sizes.last_key_value().filter(|(size, _)| size.saturating_mul(MOST) >= self.live);
        if let Some((size, _)) = most {
            facts.push(format!(
                "one tensor of {} is most of the {} in use",
                bytes(Bytes(*size)),
                bytes(Bytes(self.live))
            ));
        }
        facts.extend(self.sets());
        if self.is_much(self.free_whole) {
            facts.push(format!(
                "{} of {} reserved are segments without any block, which `torch.cuda.empty_cache()` returns",
                bytes(Bytes(self.free_whole)),
                bytes(Bytes(self.reserved))
            ));
        }
        if self.is_much(self.free_between) {
            facts.push(format!(
                "{} of {} reserved are free beside blocks of the same segments, the largest piece {}",
                bytes(Bytes(self.free_between)),
                bytes(Bytes(self.reserved)),
                bytes(Bytes(self.largest_between))
            ));
        }
        facts
    }

    /// Sizes of which there are equally many.
    fn sets(&self) -> Option<String> {
        let mut by_number: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for (size, n) in self.sizes.iter().rev() {
            by_number.entry(*n).or_default().push(*size);
        }
        let sum = |n: u64, sizes: &[u64]| sizes.iter().map(|size| size.saturating_mul(n)).sum::<u64>();
        let (n, sizes) = by_number.into_iter().max_by_key(|(n, sizes)| sum(*n, sizes))?;
        let is_most = sum(n, &sizes).saturating_mul(MOST_OF_ALL.1) >= self.live.saturating_mul(MOST_OF_ALL.0);
        (is_most && n >= LEAST_SETS && sizes.len() >= LEAST_SIZES).then(|| {
            let named: Vec<String> = sizes.iter().take(NAMED).map(|size| bytes(Bytes(*size))).collect();
            format!(
                "{} blocks of each of {} sizes ({}) are {} of the {} in use: equal layers of one model, or equal models that are kept (with gradients and Adam, four blocks for each weight)",
                count(n),
                count(sizes.len() as u64),
                named.join(", "),
                bytes(Bytes(sum(n, &sizes))),
                bytes(Bytes(self.live))
            )
        })
    }
}
