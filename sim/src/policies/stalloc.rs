//! STAlloc (arXiv 2507.16274, "Enhancing Memory Efficiency in Large-Scale Model Training with Spatio-temporal Planning"; v1 was
//! called STWeaver): a run is profiled, its requests get offsets in one preallocated range, and the n-th request of a turn
//! goes to the n-th offset. What was not foreseen goes to an allocator of its own.
//!
//! A model of it: the profile is the trace itself, turns are found by the repetition of sizes instead of hooks in the
//! training loop, offsets come from the best of three first-fit packings ([`crate::plan`]), and what was not foreseen goes to
//! best fit in segments of its own; STAlloc also lets it use idle parts of the planned range.

use std::collections::BTreeMap;

use crate::device::{Device, PAGE, Placement, Segment};
use crate::plan::{Plan, Slot};
use crate::policies::best_fit::BestFit;
use crate::policies::{Fidelity, OutOfMemory, Policy, PolicyEntry, Request, key_values};

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "stalloc",
    summary: "STAlloc: offsets planned for a whole training step, best fit for the rest",
    options: "none",
    fidelity: Fidelity::Model,
    build: |build| {
        key_values(build.options, &[])?;
        Ok(Box::new(Stalloc {
            plan: build.profile.map(Plan::of).unwrap_or_default(),
            pool: Pool::Unasked,
            used: BTreeMap::new(),
            fallback: BestFit::default(),
            n_requests: 0,
            n_planned: 0,
            n_fallback: 0,
        }))
    },
};

enum Pool {
    Unasked,
    Mapped(Segment),
    Refused,
}

struct Stalloc {
    plan: Plan,
    pool: Pool,
    /// Parts of the planned range that are in use: offset and end.
    used: BTreeMap<u64, u64>,
    fallback: BestFit,
    n_requests: usize,
    n_planned: u64,
    n_fallback: u64,
}

impl Stalloc {
    fn pool(&mut self, device: &mut Device) -> Option<Segment> {
        if let Pool::Unasked = self.pool {
            let bytes = self.plan.bytes.next_multiple_of(PAGE);
            let segment = (bytes > 0 && device.is_within_limit(bytes)).then(|| device.map(bytes)).flatten();
            self.pool = segment.map_or(Pool::Refused, Pool::Mapped);
        }
        match self.pool {
            Pool::Mapped(segment) => Some(segment),
            Pool::Unasked | Pool::Refused => None,
        }
    }

    /// What the program really holds may differ from what was planned: another turn may free later.
    fn is_free(&self, slot: Slot) -> bool {
        let below = self.used.range(..slot.offset + slot.bytes).next_back();
        below.is_none_or(|(_, end)| *end <= slot.offset)
    }

    fn planned(&mut self, device: &mut Device, request: Request, n: usize) -> Option<Placement> {
        let slot = self.plan.slot(n)?;
        let pool = self.pool(device)?;
        if slot.bytes < request.bytes || !self.is_free(slot) {
            return None;
        }
        self.used.insert(slot.offset, slot.offset + slot.bytes);
        let address = pool.address + slot.offset;
        Some(Placement { address, bytes: slot.bytes, segment: pool.id, handle: 0 })
    }
}

impl Policy for Stalloc {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let n = self.n_requests;
        self.n_requests += 1;
        if let Some(placement) = self.planned(device, request, n) {
            self.n_planned += 1;
            return Ok(placement);
        }
        self.n_fallback += 1;
        if let Some(placement) = self.fallback.serve(device, request.bytes) {
            return Ok(placement);
        }
        self.trim(device);
        self.fallback.serve_after_trim(device, request.bytes).ok_or_else(|| OutOfMemory::plain(request.bytes))
    }

    fn free(&mut self, _device: &mut Device, placement: Placement) {
        match self.pool {
            Pool::Mapped(pool) if placement.segment == pool.id => {
                self.used.remove(&(placement.address - pool.address));
            }
            Pool::Mapped(_) | Pool::Unasked | Pool::Refused => self.fallback.give(placement),
        }
    }

    fn trim(&mut self, device: &mut Device) {
        for placement in device.synchronize() {
            self.free(device, placement);
        }
        self.fallback.give_back(device);
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("planned_bytes", self.plan.bytes),
            ("planned_requests", self.n_planned),
            ("fallback_requests", self.n_fallback),
        ]
    }
}
