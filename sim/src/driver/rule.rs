//! The rule itself: regions, their holes, and where the next request goes.

use std::collections::{BTreeSet, HashMap};

use super::REGION;
use super::holes::{Ranges, give, take, take_any};
use crate::addresses::AddressSpace;
use crate::placement::PAGE;
use crate::skip::State;

/// 512 bytes: what small requests are rounded to.
const SMALL_STEP: u64 = 512;

/// A region of CUDA's context that has room left.
struct ContextRegion {
    /// Bytes from the end of the free addresses to its start.
    distance: u64,
    bytes: u64,
    /// What the context uses of it, from its start.
    used: u64,
}

/// Oldest first. Measured on an H200 under driver 580: the same in 14 processes that make nothing but a context, and
/// in PyTorch's that make no stream before their first allocation. In every one of PyTorch's, addresses that the context
/// held in the second region went to the program later: it is given back as a whole, presumably when a kernel needs
/// more local memory than there is.
const CONTEXT: [ContextRegion; 2] = [
    ContextRegion { distance: 480 << 20, bytes: REGION, used: 8 << 20 },
    ContextRegion { distance: 0, bytes: 416 << 20, used: 414 << 20 },
];

#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) holes: Ranges,
    /// Bytes of the largest hole.
    largest: u64,
    /// Somebody else made it, as far as is known.
    pub(super) is_foreign: bool,
}

impl Region {
    fn find(&self, bytes: u64) -> Option<u64> {
        if self.largest < bytes {
            return None;
        }
        let fits =
            self.holes.iter().map(|(start, end)| (end - start, *start)).filter(|(size, _)| *size >= bytes);
        fits.min().map(|(_, start)| start)
    }

    pub(super) fn take(&mut self, start: u64, bytes: u64) -> bool {
        let taken = take(&mut self.holes, start, start + bytes);
        self.measure();
        taken
    }

    pub(super) fn give(&mut self, start: u64, bytes: u64) {
        give(&mut self.holes, start, start + bytes);
        self.measure();
    }

    pub(super) fn measure(&mut self) {
        self.largest = self.holes.iter().map(|(start, end)| end - start).max().unwrap_or(0);
    }

    fn is_empty(&self) -> bool {
        self.largest == self.end - self.start
    }
}

/// Blocks of 2 MiB that small requests share.
#[derive(Clone, Debug, Default)]
struct SmallBlocks {
    /// Where they start.
    blocks: BTreeSet<u64>,
    /// (start, bytes), the oldest first.
    holes: Vec<(u64, u64)>,
}

impl SmallBlocks {
    fn holds(&self, address: u64) -> bool {
        self.blocks.contains(&(address / PAGE * PAGE))
    }

    pub(super) fn place(&mut self, bytes: u64) -> Option<u64> {
        let fits = self.holes.iter().enumerate().filter(|(_, (_, hole))| *hole >= bytes);
        let (index, _) = fits.min_by_key(|(_, (_, hole))| *hole)?;
        let (start, hole) = self.holes.remove(index);
        if hole > bytes {
            self.holes.push((start + bytes, hole - bytes));
        }
        Some(start)
    }

    /// Begins a block with a request.
    fn fill(&mut self, block: u64, bytes: u64) -> u64 {
        self.blocks.insert(block);
        self.holes.push((block + bytes, PAGE - bytes));
        block
    }

    /// Takes an allocation back, joined with its neighbours. The block, if nothing is left in it.
    pub(super) fn give(&mut self, address: u64, bytes: u64) -> Option<u64> {
        let block = address / PAGE * PAGE;
        let behind = address + bytes;
        let (mut start, mut end) = (address, behind);
        self.holes.retain(|(hole, bytes)| {
            let is_before = hole + bytes == address && *hole >= block;
            let is_after = *hole == behind && *hole < block + PAGE;
            if is_before {
                start = *hole;
            } else if is_after {
                end = hole + bytes;
            }
            !is_before && !is_after
        });
        if end - start < PAGE {
            self.holes.push((start, end - start));
            return None;
        }
        self.blocks.remove(&block);
        Some(block)
    }
}

/// Where the rule would put a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// In an existing region (by index) at this address.
    Hole(usize, u64),
    /// In a new region at this address.
    New(u64),
}

impl Place {
    pub(super) fn address(self) -> u64 {
        match self {
            Place::Hole(_, address) | Place::New(address) => address,
        }
    }
}

/// What [`Driver::learn`] had to assume, in counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Learned {
    /// Allocations that were where the rule says.
    pub predicted: u64,
    /// Gaps of the address space that something else must have taken.
    pub gaps: u64,
    /// Holes in regions that something else must have taken.
    pub holes: u64,
    /// Regions that turned out to be larger.
    pub spans: u64,
    /// Regions that somebody else had made.
    pub regions: u64,
    /// Places that were thought taken and were free.
    pub freed: u64,
}

/// The driver's view of one process's addresses.
#[derive(Clone, Debug)]
pub struct Driver {
    /// Oldest first.
    pub(super) regions: Vec<Region>,
    pub(super) gaps: Ranges,
    /// Memory of others by its recorded address: where it is, and how much.
    pub(super) others: HashMap<u64, (u64, u64)>,
    /// Small allocations of others in the pages that they share.
    pub(super) shared: HashMap<u64, u32>,
    /// Where small requests go.
    small: SmallBlocks,
    /// What CUDA's context holds of regions that are known: where, and how much.
    pub(super) context: Vec<(u64, u64)>,
    /// Things that must have been assumed so far.
    pub learned: Learned,
}

/// Nothing is placed below this.
const FLOOR: u64 = 1 << 32;

impl Driver {
    /// A process whose free addresses end at `top`.
    pub fn new(top: u64) -> Driver {
        Driver {
            regions: Vec::new(),
            gaps: Ranges::from([(FLOOR, top.max(FLOOR + REGION))]),
            others: HashMap::new(),
            shared: HashMap::new(),
            small: SmallBlocks::default(),
            context: Vec::new(),
            learned: Learned::default(),
        }
    }

    /// A process whose free addresses end at `top` and whose context begins at `context`.
    fn with_context(top: u64, context: u64) -> Driver {
        let mut driver = Driver::new(top);
        for (index, region) in CONTEXT.into_iter().enumerate() {
            let start = context + region.distance;
            driver.insert_region(index, start, start + region.bytes);
            driver.regions[index].take(start, region.used);
            driver.context.push((start, region.used));
        }
        driver
    }

    /// A process that has nothing but CUDA's context and whose first allocation is at `address`. Where a process's
    /// addresses begin is chance, by multiples of pages, and the driver works in multiples of [`REGION`]: the first
    /// address tells that one number, or contradicts what is known of the context. Then only the allocation's own region
    /// is sure, and free addresses end there.
    pub fn with_first(address: u64, bytes: u64) -> Driver {
        Driver::with_first_below(address, bytes, 0, None)
            .unwrap_or_else(|| Driver::new(address.saturating_add(bytes).next_multiple_of(REGION)))
    }

    /// The same where something else has taken `below` bytes under the context, or free addresses are known to end at
    /// `ceiling`.
    pub(super) fn with_first_below(
        address: u64,
        bytes: u64,
        below: u64,
        ceiling: Option<u64>,
    ) -> Option<Driver> {
        const ELSEWHERE: u64 = 1 << 46;
        let expected = Driver::with_context(ELSEWHERE - below, ELSEWHERE).alloc(bytes)?;
        let context = address.wrapping_sub(expected).wrapping_add(ELSEWHERE);
        let is_possible =
            context.is_multiple_of(REGION) && (FLOOR + REGION + below..1 << 57).contains(&context);
        is_possible.then(|| Driver::with_context(ceiling.unwrap_or(context - below), context))
    }

    /// Notes that something else takes these addresses.
    pub fn occupy(&mut self, start: u64, end: u64) {
        take_any(&mut self.gaps, start, end);
    }

    pub(super) fn place(&self, bytes: u64) -> Option<Place> {
        let newest_first = self.regions.iter().enumerate().rev();
        let mut holes =
            newest_first.filter_map(|(index, region)| Some(Place::Hole(index, region.find(bytes)?)));
        holes.next().or_else(|| {
            let region = bytes.next_multiple_of(REGION);
            let mut highest =
                self.gaps.iter().rev().filter(|(start, end)| **end - **start >= region + REGION);
            highest.next().map(|(_, end)| Place::New((end - region) / REGION * REGION))
        })
    }

    /// Serves a request.
    pub fn alloc(&mut self, bytes: u64) -> Option<u64> {
        let small = bytes.next_multiple_of(SMALL_STEP);
        if small < PAGE {
            return self.small.place(small).or_else(|| {
                let block = self.alloc(PAGE)?;
                Some(self.small.fill(block, small))
            });
        }
        let bytes = bytes.next_multiple_of(PAGE);
        let place = self.place(bytes)?;
        self.settle(place, bytes);
        Some(place.address())
    }

    pub(super) fn settle(&mut self, place: Place, bytes: u64) {
        match place {
            Place::Hole(index, address) => {
                self.regions[index].take(address, bytes);
            }
            Place::New(address) => {
                let end = address + bytes.next_multiple_of(REGION);
                take_any(&mut self.gaps, address, end);
                let index = self.regions.len();
                self.insert_region(index, address, end);
                self.regions[index].take(address, bytes);
            }
        }
    }

    pub(super) fn insert_region(&mut self, index: usize, start: u64, end: u64) {
        let region = Region {
            start,
            end,
            holes: Ranges::from([(start, end)]),
            largest: end - start,
            is_foreign: false,
        };
        self.regions.insert(index, region);
    }

    /// Takes an allocation back.
    pub fn free(&mut self, address: u64, bytes: u64) {
        if self.small.holds(address) {
            let Some(block) = self.small.give(address, bytes.next_multiple_of(SMALL_STEP)) else { return };
            return self.free(block, PAGE);
        }
        let bytes = bytes.next_multiple_of(PAGE);
        let Some(index) = self.regions.iter().position(|it| (it.start..it.end).contains(&address)) else {
            return;
        };
        let region = &mut self.regions[index];
        region.give(address, bytes.min(region.end - address));
        if region.is_empty() {
            let region = self.regions.remove(index);
            give(&mut self.gaps, region.start, region.end);
        }
    }

    /// Lets something else take the place that the rule would choose next, or a part of it that spoils it.
    pub fn disturb(&mut self, bytes: u64) {
        match self.place(bytes.next_multiple_of(PAGE)) {
            Some(Place::Hole(index, hole)) => {
                self.regions[index].take(hole, PAGE);
            }
            Some(Place::New(address)) => {
                let end = address + bytes.next_multiple_of(REGION);
                self.occupy(end - REGION, end);
            }
            None => {}
        }
    }

    pub(super) fn is_free(&self, address: u64, bytes: u64) -> bool {
        self.gaps.range(..=address).next_back().is_some_and(|(_, end)| *end >= address + bytes)
    }
}

impl AddressSpace for Driver {
    fn map(&mut self, bytes: u64, _op: u32) -> Option<u64> {
        self.alloc(bytes)
    }

    fn unmap(&mut self, address: u64, bytes: u64) {
        self.free(address, bytes);
    }

    fn reserve(&mut self, bytes: u64) -> u64 {
        // Reservations go below everything else; only their order among themselves can matter.
        let region = bytes.next_multiple_of(REGION);
        let mut highest = self.gaps.iter().rev().filter(|(start, end)| **end - **start >= region + REGION);
        let end = highest.next().map_or(FLOOR, |(_, end)| *end);
        let address = end.saturating_sub(region) / REGION * REGION;
        take_any(&mut self.gaps, address, address + region);
        address
    }

    fn unreserve(&mut self, address: u64, bytes: u64) {
        give(&mut self.gaps, address, address + bytes.next_multiple_of(REGION));
    }

    fn write(&self, to: &mut State) -> bool {
        let Driver { regions, gaps, others, shared, small, context, learned } = self;
        let ranges =
            |ranges: &Ranges| ranges.iter().flat_map(|(start, end)| [*start, *end]).collect::<Vec<_>>();
        to.put(regions.len() as u64);
        for region in regions {
            to.put_all([region.start, region.end, region.largest, u64::from(region.is_foreign)]);
            to.put_all(ranges(&region.holes));
        }
        to.put_all(ranges(gaps));
        let mut others: Vec<(u64, (u64, u64))> = others.iter().map(|(at, it)| (*at, *it)).collect();
        others.sort_unstable();
        to.put_all(others.into_iter().flat_map(|(at, (start, bytes))| [at, start, bytes]));
        let mut shared: Vec<(u64, u32)> = shared.iter().map(|(at, n)| (*at, *n)).collect();
        shared.sort_unstable();
        to.put_all(shared.into_iter().flat_map(|(at, n)| [at, u64::from(n)]));
        to.put_all(small.blocks.iter().copied());
        to.put_all(small.holes.iter().flat_map(|(start, bytes)| [*start, *bytes]));
        to.put_all(context.iter().flat_map(|(start, bytes)| [*start, *bytes]));
        let Learned { predicted, gaps, holes, spans, regions, freed } = *learned;
        to.put_all([predicted, gaps, holes, spans, regions, freed]);
        true
    }
}
