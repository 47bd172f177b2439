//! What an address that was really handed out says about everything that was not recorded.

use super::REGION;
use super::holes::{Ranges, give, take_any};
use super::rule::{Driver, Place};
use crate::ops::Nearby;
use crate::placement::PAGE;

/// Something about a process's address space that an allocation gave away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// Something else lies between these addresses.
    Taken(u64, u64),
    /// Nothing lies between these addresses any more, and there is room for their alignment.
    Free(u64, u64),
    /// Somebody else has pages within a region.
    HoleTaken {
        /// Where.
        start: u64,
        /// At least so much.
        bytes: u64,
    },
    /// CUDA's context gave back what it held from this address on.
    ContextGave(u64),
    /// All this is one region.
    Spans(u64, u64),
    /// Somebody else made a region.
    Foreign {
        /// Where it starts.
        start: u64,
        /// Up to where its maker uses it.
        used: u64,
        /// Where it ends.
        end: u64,
        /// Whether it was preferred to regions that are known.
        is_newest: bool,
    },
    /// This was seen to happen.
    Seen(Nearby),
}

/// A [`Fact`] and since when it is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// From this recorded `cudaMalloc` or `cudaFree` of the allocator on.
    pub call: u32,
    /// From this op on.
    pub op: u32,
    /// What is true.
    pub fact: Fact,
}

impl Driver {
    /// Serves a request at the address where it really was, and infers from it what else must have been taken or free.
    pub fn learn(&mut self, address: u64, bytes: u64) -> Vec<Fact> {
        let bytes = bytes.next_multiple_of(PAGE);
        let end = address + bytes.next_multiple_of(REGION);
        let mut facts = Vec::new();
        if let Some(given_back) = self.of_context(address) {
            let fact = Fact::ContextGave(given_back);
            self.note(fact);
            facts.push(fact);
        }
        // Each round takes at least a page away from what the rule prefers.
        for _ in 0..4096 {
            let place = self.place(bytes);
            if let Some(place) = place.filter(|place| place.address() == address) {
                self.settle(place, bytes);
                self.learned.predicted += u64::from(facts.is_empty());
                break;
            }
            let is_known = self.regions.iter().any(|it| (it.start..it.end).contains(&address));
            let covering = self.regions.iter().any(|it| it.start <= address && address + bytes <= it.end);
            let overlapping = self.regions.iter().any(|it| it.start < address + bytes && address < it.end);
            // The driver fills a region upwards and makes new ones downwards: what begins where a foreign region
            // ends is more of it.
            let continues = !is_known && self.regions.iter().any(|it| it.is_foreign && it.end == address);
            let fact = match place {
                _ if continues => Fact::Spans(address - REGION, (address + bytes).next_multiple_of(REGION)),
                _ if overlapping && !covering => {
                    Fact::Spans(address / REGION * REGION, (address + bytes).next_multiple_of(REGION))
                }
                _ if !is_known && !address.is_multiple_of(REGION) => Fact::Foreign {
                    start: address / REGION * REGION,
                    used: address,
                    end: (address + bytes).next_multiple_of(REGION),
                    is_newest: matches!(place, Some(Place::Hole(..))),
                },
                Some(Place::Hole(index, hole)) if !is_known || self.is_in_older(address, index) => {
                    Fact::HoleTaken { start: hole, bytes: PAGE }
                }
                Some(Place::New(above)) if above > address && self.is_free(address, end - address) => {
                    Fact::Taken(end, above + (end - address) + REGION)
                }
                _ if is_known => {
                    // A hole that was thought full.
                    self.reuse(address, bytes);
                    break;
                }
                // The slack that the rule asks for lies below, because a region goes to the top.
                _ => Fact::Free(address.saturating_sub(REGION), end),
            };
            self.note(fact);
            facts.push(fact);
            if let Fact::Free(..) = fact {
                self.settle(Place::New(address), bytes);
                break;
            }
            if let Fact::Foreign { .. } = fact {
                self.reuse(address, bytes);
                break;
            }
        }
        joined(facts)
    }

    /// Takes over what was learned elsewhere about the same process.
    pub fn note(&mut self, fact: Fact) {
        match fact {
            Fact::Taken(start, end) => {
                self.learned.gaps += 1;
                take_any(&mut self.gaps, start, end);
            }
            Fact::Free(start, end) => {
                self.learned.freed += 1;
                self.vacate(start, end);
            }
            Fact::ContextGave(start) => {
                self.learned.freed += 1;
                if let Some(index) = self.context.iter().position(|(held, _)| *held == start) {
                    let (start, bytes) = self.context.remove(index);
                    self.free(start, bytes);
                }
            }
            Fact::Seen(what) => self.saw(what, |driver, _, bytes| driver.alloc(bytes)),
            Fact::Spans(start, end) => {
                self.learned.spans += 1;
                self.span(start, end);
            }
            Fact::HoleTaken { start, bytes } => {
                self.learned.holes += 1;
                if let Some(region) = self.regions.iter_mut().find(|it| (it.start..it.end).contains(&start)) {
                    region.take(start, bytes);
                }
            }
            Fact::Foreign { start, used, end, is_newest } => {
                self.learned.regions += 1;
                if !self.regions.iter().any(|it| it.start < end && start < it.end) {
                    take_any(&mut self.gaps, start, end);
                    let index = if is_newest { self.regions.len() } else { 0 };
                    self.insert_region(index, start, end);
                    self.regions[index].take(start, used - start);
                    self.regions[index].is_foreign = true;
                }
            }
        }
    }

    /// Takes over what was learned elsewhere about the same process, at the recorded addresses.
    pub(super) fn follow(&mut self, fact: Fact) {
        match fact {
            Fact::Seen(what) => self.saw(what, |driver, address, bytes| {
                driver.learn(address, bytes);
                Some(address)
            }),
            fact => self.note(fact),
        }
    }

    fn vacate(&mut self, start: u64, end: u64) {
        take_any(&mut self.gaps, start, end);
        give(&mut self.gaps, start, end);
        for region in &self.regions {
            take_any(&mut self.gaps, region.start, region.end);
        }
    }

    /// Follows what happened beside the allocator; `place` says where somebody else's memory is to be.
    pub(super) fn saw(&mut self, what: Nearby, mut place: impl FnMut(&mut Driver, u64, u64) -> Option<u64>) {
        match what {
            Nearby::Allocated { address, bytes } if bytes < PAGE => {
                let page = address / PAGE * PAGE;
                let users = self.shared.entry(page).or_default();
                *users += 1;
                self.others.insert(address, (page, 0));
                if *users == 1
                    && let Some(got) = place(self, page, PAGE)
                {
                    self.others.insert(page | 1, (got, PAGE));
                }
            }
            Nearby::Allocated { address, bytes } => {
                if let Some(got) = place(self, address, bytes) {
                    self.others.insert(address, (got, bytes));
                }
            }
            Nearby::Freed { address } => match self.others.remove(&address) {
                Some((page, 0)) => {
                    let users = self.shared.entry(page).or_default();
                    *users = users.saturating_sub(1);
                    if *users == 0
                        && let Some((got, bytes)) = self.others.remove(&(page | 1))
                    {
                        self.free(got, bytes);
                    }
                }
                Some((got, bytes)) => self.free(got, bytes),
                None => {}
            },
            Nearby::Mapped { start, end } => take_any(&mut self.gaps, start, end),
            // Regions that were given back are known to be gaps already; the rest was somebody's mapping.
            Nearby::Unmapped { start, end } => self.vacate(start, end),
        }
    }

    /// Serves a request where it really was, as [`Driver::learn`]. A mapping that was read there before the call was seen
    /// was the request's own.
    pub(super) fn learn_seen(&mut self, address: u64, bytes: u64) -> Vec<Fact> {
        let is_in_region = self.regions.iter().any(|it| (it.start..it.end).contains(&address));
        let end = address.saturating_add(bytes.next_multiple_of(REGION));
        let mut facts = Vec::new();
        if !is_in_region && address.is_multiple_of(REGION) && !self.is_free(address, end - address) {
            let own = Fact::Seen(Nearby::Unmapped { start: address.saturating_sub(REGION), end });
            self.note(own);
            facts.push(own);
        }
        facts.extend(self.learn(address, bytes));
        facts
    }

    /// Makes one region of everything between two addresses. It is as new as the newest of its parts.
    fn span(&mut self, mut start: u64, mut end: u64) {
        let mut holes = Ranges::new();
        let mut index = 0;
        let mut parts = Vec::new();
        self.regions.retain(|region| {
            let is_part = region.start < end && start < region.end;
            if is_part {
                parts.push(region.clone());
            }
            !is_part
        });
        for part in &parts {
            start = start.min(part.start);
            end = end.max(part.end);
        }
        take_any(&mut self.gaps, start, end);
        give(&mut holes, start, end);
        for part in parts {
            take_any(&mut holes, part.start, part.end);
            for (from, to) in part.holes {
                give(&mut holes, from, to);
            }
            index = self.regions.len();
        }
        self.insert_region(index, start, end);
        self.regions[index].holes = holes;
        self.regions[index].is_foreign = true;
        self.regions[index].measure();
    }

    /// Whether the address is in the region of that index or an older one: where the rule would go on looking.
    fn is_in_older(&self, address: u64, index: usize) -> bool {
        self.regions[..=index].iter().any(|it| (it.start..it.end).contains(&address))
    }

    /// Where what the context holds around an address begins.
    fn of_context(&self, address: u64) -> Option<u64> {
        let mut held =
            self.context.iter().filter(|(start, bytes)| (*start..start + bytes).contains(&address));
        held.next().map(|(start, _)| *start)
    }

    fn reuse(&mut self, address: u64, bytes: u64) {
        if let Some(region) = self.regions.iter_mut().find(|it| (it.start..it.end).contains(&address)) {
            take_any(&mut region.holes, address, (address + bytes).min(region.end));
            region.measure();
        }
    }
}

/// Neighbouring pages that somebody took, as what they probably are: one allocation.
fn joined(facts: Vec<Fact>) -> Vec<Fact> {
    let mut joined: Vec<Fact> = Vec::new();
    for fact in facts {
        match (joined.last_mut(), fact) {
            (Some(Fact::HoleTaken { start, bytes }), Fact::HoleTaken { start: next, bytes: more })
                if *start + *bytes == next =>
            {
                *bytes += more;
            }
            _ => joined.push(fact),
        }
    }
    joined
}

/// Whether something had to be assumed to explain an address.
pub(super) fn surprise(learned: &[Fact]) -> bool {
    learned.iter().any(|fact| !matches!(fact, Fact::Seen(_)))
}
