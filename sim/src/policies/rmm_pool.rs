//! RAPIDS' `pool_memory_resource` (rmm @ 5d50a37b): 256-byte units, a free list a stream, best fit with the lowest address of
//! equals, memory taken from other streams' lists before the pool grows. Nothing is ever given back.

use std::collections::HashMap;

use crate::device::{Device, Placement};
use crate::policies::{Fidelity, OutOfMemory, Policy, PolicyEntry, Request, amount, key_values};
use crate::ranges::{Fit, Ranges, Segments, range_of};
use crate::skip::State;

/// CUDA_ALLOCATION_ALIGNMENT.
const UNIT: u64 = 256;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "rmm_pool",
    summary: "RAPIDS memory manager, pool: grows by doubling, never shrinks",
    options: "initial=BYTES (0), maximum=BYTES (none)",
    fidelity: Fidelity::Model,
    build: |build| {
        let mut policy = RmmPool {
            lists: vec![Ranges::default(); build.n_streams.max(1)],
            owner: HashMap::new(),
            segments: Segments::default(),
            initial: 0,
            maximum: None,
        };
        for (key, value) in key_values(build.options, &["initial", "maximum"])? {
            match key {
                "initial" => policy.initial = amount(key, value)?,
                _ => policy.maximum = Some(amount(key, value)?),
            }
        }
        Ok(Box::new(policy))
    },
};

struct RmmPool {
    lists: Vec<Ranges>,
    /// The stream that a placement was made on, by address.
    owner: HashMap<u64, usize>,
    segments: Segments,
    initial: u64,
    maximum: Option<u64>,
}

impl RmmPool {
    fn find(&mut self, stream: usize, wanted: u64) -> Option<Placement> {
        if let Some(placement) = self.lists[stream].place(wanted, Fit::Best) {
            return Some(placement);
        }
        // From another stream's list, after waiting for that stream; the remainder stays there.
        let others: Vec<usize> = (0..self.lists.len()).filter(|other| *other != stream).collect();
        for other in &others {
            if let Some(placement) = self.lists[*other].place(wanted, Fit::Best) {
                return Some(placement);
            }
        }
        for other in others {
            let mut list = std::mem::take(&mut self.lists[other]);
            self.lists[stream].absorb(&mut list);
            if let Some(placement) = self.lists[stream].place(wanted, Fit::Best) {
                return Some(placement);
            }
        }
        None
    }

    fn grow(&mut self, device: &mut Device, stream: usize, wanted: u64) -> bool {
        let current = device.books.reserved.current;
        let initial = std::mem::take(&mut self.initial);
        let mut bytes = match self.maximum {
            _ if initial > 0 => initial.max(wanted),
            Some(maximum) => ((maximum.saturating_sub(current)) / 2).max(wanted),
            None => current.max(wanted),
        }
        .next_multiple_of(UNIT);
        loop {
            let is_allowed = self.maximum.is_none_or(|maximum| current + bytes <= maximum);
            if is_allowed && let Some(range) = self.segments.map(device, bytes) {
                self.lists[stream].give(range);
                return true;
            }
            if bytes == wanted {
                return false;
            }
            bytes = (bytes / 2).max(wanted).next_multiple_of(UNIT);
        }
    }
}

impl Policy for RmmPool {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let wanted = request.bytes.next_multiple_of(UNIT);
        let stream = usize::from(request.stream.0);
        let mut placement = self.find(stream, wanted);
        if placement.is_none() && self.grow(device, stream, wanted) {
            placement = self.find(stream, wanted);
        }
        let placement = placement.ok_or_else(|| OutOfMemory::plain(wanted))?;
        self.owner.insert(placement.address, stream);
        Ok(placement)
    }

    fn free(&mut self, _device: &mut Device, placement: Placement) {
        let stream = self.owner.remove(&placement.address).unwrap_or(0);
        self.lists[stream].give(range_of(placement));
    }

    fn trim(&mut self, _device: &mut Device) {}

    fn write(&self, to: &mut State, live: &[Placement]) -> bool {
        let _ = live;
        self.lists.iter().for_each(|list| list.write(to));
        self.segments.write(to);
        let mut owners: Vec<(u64, usize)> =
            self.owner.iter().map(|(address, stream)| (*address, *stream)).collect();
        owners.sort_unstable();
        to.put_all(owners.into_iter().flat_map(|(address, stream)| [address, stream as u64]));
        to.put(self.initial);
        true
    }
}
