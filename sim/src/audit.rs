//! A checker so simple that it can be believed: two maps of address ranges, looked at after every step.
//!
//! It knows nothing of policies. It panics, because what it finds is always a bug of a policy or of the simulator.

use std::collections::BTreeMap;

use crate::placement::Placement;

/// Mapped and placed ranges, start to end.
#[derive(Debug, Default)]
pub struct Audit {
    mapped: BTreeMap<u64, u64>,
    placed: BTreeMap<u64, u64>,
}

impl Audit {
    /// The driver gave memory.
    pub fn mapped(&mut self, address: u64, bytes: u64) {
        assert!(!overlaps(&self.mapped, address, address + bytes), "mapped twice at {address:#x}");
        self.mapped.insert(address, address + bytes);
    }

    /// The driver got memory back: it must have been mapped, and nothing may live there.
    pub fn unmapped(&mut self, address: u64, bytes: u64) {
        let end = address + bytes;
        assert!(!overlaps(&self.placed, address, end), "unmapped at {address:#x} while in use");
        let mut at = address;
        while at < end {
            let (start, stop) = self.run_at(at).unwrap_or_else(|| panic!("unmapped at {at:#x}: not mapped"));
            self.mapped.remove(&start);
            if start < at {
                self.mapped.insert(start, at);
            }
            if stop > end {
                self.mapped.insert(end, stop);
            }
            at = stop;
        }
    }

    /// A request was served: it must lie in mapped memory, apart from everything else, and be large enough.
    pub fn placed(&mut self, placement: Placement, requested: u64) {
        let (start, end) = (placement.address, placement.address + placement.bytes);
        assert!(placement.bytes >= requested, "{requested} bytes requested, {} placed", placement.bytes);
        assert!(!overlaps(&self.placed, start, end), "placed at {start:#x} over something else");
        let mut at = start;
        while at < end {
            let (_, stop) = self.run_at(at).unwrap_or_else(|| panic!("placed at {at:#x}: not mapped"));
            at = stop;
        }
        self.placed.insert(start, end);
    }

    /// Nobody uses it any more.
    pub fn released(&mut self, placement: Placement) {
        let end = self.placed.remove(&placement.address);
        assert_eq!(end, Some(placement.address + placement.bytes), "released something that was not placed");
    }

    fn run_at(&self, at: u64) -> Option<(u64, u64)> {
        let (start, stop) = self.mapped.range(..=at).next_back()?;
        (*stop > at).then_some((*start, *stop))
    }
}

fn overlaps(ranges: &BTreeMap<u64, u64>, start: u64, end: u64) -> bool {
    ranges.range(..end).next_back().is_some_and(|(_, stop)| *stop > start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::SegmentId;

    fn placement(address: u64, bytes: u64) -> Placement {
        Placement { address, bytes, segment: SegmentId(0), handle: 0 }
    }

    #[test]
    #[should_panic(expected = "over something else")]
    fn two_requests_in_one_place_are_found() {
        let mut audit = Audit::default();
        audit.mapped(0, 4096);
        audit.placed(placement(0, 1024), 1000);
        audit.placed(placement(512, 1024), 1000);
    }

    #[test]
    #[should_panic(expected = "not mapped")]
    fn a_request_beyond_its_segment_is_found() {
        let mut audit = Audit::default();
        audit.mapped(0, 4096);
        audit.placed(placement(3584, 1024), 1000);
    }

    #[test]
    #[should_panic(expected = "while in use")]
    fn unmapping_what_is_in_use_is_found() {
        let mut audit = Audit::default();
        audit.mapped(0, 4096);
        audit.placed(placement(0, 512), 512);
        audit.unmapped(0, 4096);
    }
}
