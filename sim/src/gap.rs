//! Why more is reserved than is in use: the gap at the moment when most is reserved, taken apart.
//!
//! ```text
//!   reserved = in use as requested
//!            + rounding         requests rounded up (to 512 bytes, or as roundup_power2_divisions says)
//!            + surplus          what was too little, or not allowed, to be split off a block
//!            + waiting          given back by the program, still in use by a stream
//!            + segment_rounding rest of the segment that was obtained just then
//!            + isolated         free, but of another stream or pool than the request that made the peak
//!            + cached           whole free segments that did not fit that request
//!            + stranded         free in segments that something live holds
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;

use crate::device::{Device, Placement, SegmentId};
use crate::ops::{AllocId, Frame, Op, OpStream, PoolIdx, StreamIdx};
use crate::simulator::{Observer, Skip};

/// Most call sites kept.
const MOST_PINS: usize = 10;

/// The gap between reserved and in use, in bytes. See the formula above.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gap {
    /// The most that was reserved.
    pub reserved: u64,
    /// In use then, as requested.
    pub in_use: u64,
    /// Requests rounded up.
    pub rounding: u64,
    /// Not split off.
    pub surplus: u64,
    /// Waiting for streams.
    pub waiting: u64,
    /// Rest of the newest segment.
    pub segment_rounding: u64,
    /// Free on other streams or pools.
    pub isolated: u64,
    /// Whole segments free.
    pub cached: u64,
    /// Free beside something live.
    pub stranded: u64,
    /// Call sites that hold the segments of `stranded` and `isolated`, most first.
    pub pins: Vec<Pin>,
}

impl Gap {
    /// Name in reports and JSON, meaning, and bytes of each part of the gap.
    pub fn parts(&self) -> [(&'static str, &'static str, u64); 7] {
        [
            ("rounding", "requests rounded up", self.rounding),
            ("surplus", "not split off blocks", self.surplus),
            ("waiting", "freed, waiting for streams", self.waiting),
            ("segment_rounding", "rest of the newest segment", self.segment_rounding),
            ("isolated", "free, of other streams or pools", self.isolated),
            ("cached", "wholly free segments that did not fit", self.cached),
            ("stranded", "free beside a block in use", self.stranded),
        ]
    }
}

/// A call site whose blocks keep segments from being freed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The innermost line of the user's Python, else of any Python, else the innermost function.
    pub site: Option<Frame>,
    /// Bytes in use of its blocks in those segments.
    pub in_use: u64,
    /// Free bytes in segments that only it holds.
    pub alone: u64,
    /// Free bytes in segments that it holds, alone or with others.
    pub stranded: u64,
}

impl Pin {
    /// The call site in words.
    pub fn place(&self) -> String {
        self.site.as_ref().map_or("unknown".into(), |it| format!("{}:{} {}", it.file, it.line, it.name))
    }
}

/// Finds the request at which most is reserved.
#[derive(Default)]
pub(crate) struct PeakFinder {
    reserved: u64,
    op: Option<usize>,
}

impl PeakFinder {
    /// Index of the op; none where nothing was served.
    pub(crate) fn op(&self) -> Option<usize> {
        self.op
    }
}

impl Observer for PeakFinder {
    fn placed(&mut self, op: usize, _id: AllocId, _at: Placement, device: &Device) -> ControlFlow<()> {
        let reserved = device.books.reserved.current;
        if reserved > self.reserved {
            self.reserved = reserved;
            self.op = Some(op);
        }
        ControlFlow::Continue(())
    }

    /// What comes again is no new peak.
    fn edge(&self) -> Option<[u64; 2]> {
        Some([0; 2])
    }
}

/// Takes the gap apart at a request.
pub(crate) struct Dissection<'a, F> {
    stream: &'a OpStream,
    at: usize,
    /// What the policy makes of a request, bytes.
    rounded: F,
    placements: HashMap<AllocId, Placement>,
    owners: HashMap<SegmentId, (StreamIdx, PoolIdx)>,
    pub(crate) found: Gap,
}

impl<'a, F: Fn(u64) -> u64> Dissection<'a, F> {
    pub(crate) fn new(stream: &'a OpStream, at: usize, rounded: F) -> Dissection<'a, F> {
        let (placements, owners) = (HashMap::new(), HashMap::new());
        Dissection { stream, at, rounded, placements, owners, found: Gap::default() }
    }

    fn dissect(&mut self, last: AllocId, device: &Device, is_new: bool) {
        let asked = self.stream.allocation(last);
        let newest = self.placements[&last].segment;
        let mut found = Gap { reserved: device.books.reserved.current, ..Gap::default() };
        let (live, waiting) = self.blocks(device);
        let mut holders: BTreeMap<SegmentId, Vec<AllocId>> = BTreeMap::new();
        for id in live {
            let (placement, requested) = (self.placements[&id], self.stream.allocation(id).requested);
            let rounded = (self.rounded)(requested).clamp(requested.min(placement.bytes), placement.bytes);
            found.rounding += rounded.saturating_sub(requested);
            found.surplus += placement.bytes - rounded;
            holders.entry(placement.segment).or_default().push(id);
        }
        found.waiting = waiting.iter().map(|id| self.placements[id].bytes).sum();
        let mut pins: HashMap<Option<Frame>, Pin> = HashMap::new();
        for (segment, mapped, active) in device.segments() {
            let free = mapped.saturating_sub(active);
            let owner = self.owners.get(&segment);
            let held = holders.get(&segment);
            if is_new && segment == newest {
                found.segment_rounding += free;
            } else if owner.is_some_and(|owner| *owner != (asked.stream, asked.pool)) {
                found.isolated += free;
                self.pin(held.map_or(&[], |held| held), free, &mut pins);
            } else if active == 0 {
                found.cached += free;
            } else {
                found.stranded += free;
                self.pin(held.map_or(&[], |held| held), free, &mut pins);
            }
        }
        let gap: u64 = found.parts().iter().map(|(_, _, bytes)| bytes).sum();
        found.in_use = found.reserved.saturating_sub(gap);
        found.pins = pins.into_values().filter(|pin| pin.stranded > 0).collect();
        found.pins.sort_by_key(|pin| {
            let line = pin.site.as_ref().map(|site| (site.file.clone(), site.line, site.name.clone()));
            (std::cmp::Reverse((pin.stranded, pin.alone)), line)
        });
        found.pins.truncate(MOST_PINS);
        self.found = found;
    }

    /// Blocks in use, and blocks that wait for streams, in the order of their requests.
    fn blocks(&self, device: &Device) -> (Vec<AllocId>, Vec<AllocId>) {
        let mut freed = HashSet::new();
        for op in &self.stream.ops[..self.at] {
            if let Op::FreeRequested(id) = op {
                freed.insert(*id);
            }
        }
        let mut placed: Vec<AllocId> = self.placements.keys().copied().collect();
        placed.sort_unstable();
        let waiting = placed.iter().copied().filter(|id| device.is_pending(*id)).collect();
        let live = placed.into_iter().filter(|id| !freed.contains(id)).collect();
        (live, waiting)
    }

    fn pin(&self, held: &[AllocId], free: u64, pins: &mut HashMap<Option<Frame>, Pin>) {
        let mut by_site: HashMap<Option<&Frame>, u64> = HashMap::new();
        for id in held {
            let site = self.stream.stacks.site(self.stream.allocation(*id).stack);
            *by_site.entry(site).or_default() += self.placements[id].bytes;
        }
        let is_alone = by_site.len() == 1;
        for (site, in_use) in by_site {
            let site = site.cloned();
            let pin = pins.entry(site.clone()).or_insert(Pin { site, in_use: 0, alone: 0, stranded: 0 });
            pin.in_use += in_use;
            pin.alone += if is_alone { free } else { 0 };
            pin.stranded += free;
        }
    }
}

impl<F: Fn(u64) -> u64> Observer for Dissection<'_, F> {
    fn placed(&mut self, op: usize, id: AllocId, placement: Placement, device: &Device) -> ControlFlow<()> {
        let allocation = self.stream.allocation(id);
        let is_new = !self.owners.contains_key(&placement.segment);
        self.owners.entry(placement.segment).or_insert((allocation.stream, allocation.pool));
        self.placements.insert(id, placement);
        if op < self.at {
            return ControlFlow::Continue(());
        }
        self.dissect(id, device, is_new);
        ControlFlow::Break(())
    }

    fn edge(&self) -> Option<[u64; 2]> {
        Some([0; 2])
    }

    fn reach(&self, _: &Skip, _: [u64; 2]) -> usize {
        self.at
    }

    fn skipped(&mut self, _: &Skip, _: [u64; 2], renamed: &[(AllocId, AllocId, Placement)]) {
        self.placements.extend(renamed.iter().map(|(_, id, placement)| (*id, *placement)));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::ops::{Allocation, Builder, StackId, Stacks};
    use crate::policies::torch::NEWEST;
    use crate::whatif::{Laboratory, Question};

    const MIB: u64 = 1 << 20;

    /// Requests as (bytes, stream, line of main.py), and whether each is given back at once.
    fn gap(requests: &[(u64, u64, u32, bool)]) -> Gap {
        let mut builder = Builder::new(0);
        let frame = |line| Frame { name: "step".into(), file: "main.py".into(), line };
        let frames = requests.iter().map(|(_, _, line, _)| frame(*line)).collect();
        let lists = (0..requests.len() as u32).map(|index| [index].into()).collect();
        for (index, (requested, stream, _, is_freed)) in (0u32..).zip(requests) {
            let stream = builder.stream(*stream).unwrap();
            let (stack, pool) = (StackId(index), PoolIdx::DEFAULT);
            let id = builder.alloc(Allocation { requested: *requested, address: 0, stack, stream, pool });
            if *is_freed {
                builder.op(Op::FreeRequested(id));
                builder.op(Op::FreeCompleted(id));
            }
        }
        builder.stream_mut().stacks = Arc::new(Stacks { frames, lists, ..Stacks::default() });
        let stream = builder.finish();
        let question = Question::torch(NEWEST, "");
        Laboratory::new(&stream).unwrap().gap(&question).unwrap()
    }

    //  2M small  | 400 |  free ...        |   stranded
    // 16M side   | free                   |   isolated
    // 20M        | 5M  |  free 15M        |   stranded
    // 16M        | free                   |   cached
    // 18M        | 17.5M             | .5 |   surplus
    #[test]
    fn every_byte_of_the_gap_has_one_cause() {
        let found = gap(&[
            (400, 0, 1, false),
            (15 * MIB, 7, 2, true),
            (5 * MIB, 0, 3, false),
            (16 * MIB, 0, 4, true),
            (35 * MIB / 2, 0, 5, false),
        ]);
        let pin = |line, in_use, alone| Pin {
            site: Some(Frame { name: "step".into(), file: "main.py".into(), line }),
            in_use,
            alone,
            stranded: alone,
        };
        let expected = Gap {
            reserved: 72 * MIB,
            in_use: 400 + 5 * MIB + 35 * MIB / 2,
            rounding: 112,
            surplus: MIB / 2,
            waiting: 0,
            segment_rounding: 0,
            isolated: 16 * MIB,
            cached: 16 * MIB,
            stranded: 15 * MIB + 2 * MIB - 512,
            pins: vec![pin(3, 5 * MIB, 15 * MIB), pin(1, 512, 2 * MIB - 512)],
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn the_rest_of_the_segment_that_made_the_peak_is_its_rounding() {
        let found = gap(&[(5 * MIB, 0, 1, false)]);
        assert_eq!((found.reserved, found.segment_rounding, found.stranded), (20 * MIB, 15 * MIB, 0));
        assert_eq!(found.in_use, 5 * MIB);
    }

    #[test]
    fn nothing_served_has_no_gap() {
        assert_eq!(gap(&[]), Gap::default());
    }
}
