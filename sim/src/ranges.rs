//! Free memory as ranges that join with their neighbours: what most allocators but PyTorch's are built from.

use std::collections::{BTreeMap, BTreeSet};

use crate::device::{Device, Placement, Segment, SegmentId};
use crate::skip::State;

/// A free range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) segment: SegmentId,
}

impl Range {
    /// The placement of its first `bytes`.
    pub(super) fn front(self, bytes: u64) -> Placement {
        Placement { address: self.address, bytes, segment: self.segment, handle: 0 }
    }
}

/// Which of the ranges that fit is taken. Ties go to the lowest address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    Best,
    First,
    Worst,
}

/// Free ranges. Two of one segment never touch.
#[derive(Clone, Debug, Default)]
pub(super) struct Ranges {
    by_address: BTreeMap<u64, (u64, SegmentId)>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Ranges {
    /// Gives a range back, joined with its neighbours of the same segment. Returns what it became.
    pub(super) fn give(&mut self, mut range: Range) -> Range {
        if let Some((&address, &(bytes, segment))) = self.by_address.range(..range.address).next_back()
            && segment == range.segment
            && address + bytes == range.address
        {
            self.remove(address);
            range.address = address;
            range.bytes += bytes;
        }
        let end = range.address + range.bytes;
        if let Some(&(bytes, segment)) = self.by_address.get(&end)
            && segment == range.segment
        {
            self.remove(end);
            range.bytes += bytes;
        }
        self.by_address.insert(range.address, (range.bytes, range.segment));
        self.by_size.insert((range.bytes, range.address));
        range
    }

    /// Takes a whole range out.
    pub(super) fn take(&mut self, bytes: u64, fit: Fit) -> Option<Range> {
        let address = match fit {
            Fit::Best => self.by_size.range((bytes, 0)..).next()?.1,
            Fit::Worst => {
                let largest = self.by_size.last().filter(|(size, _)| *size >= bytes)?.0;
                self.by_size.range((largest, 0)..).next()?.1
            }
            Fit::First => *self.by_address.iter().find(|(_, (size, _))| *size >= bytes)?.0,
        };
        self.remove(address)
    }

    /// Takes the first `bytes` of a range and gives the rest back.
    pub(super) fn place(&mut self, bytes: u64, fit: Fit) -> Option<Placement> {
        let range = self.take(bytes, fit)?;
        Some(self.split(range, bytes))
    }

    /// Uses the first `bytes` of a range that was taken and gives the rest back.
    pub(super) fn split(&mut self, range: Range, bytes: u64) -> Placement {
        if range.bytes > bytes {
            self.give(Range { address: range.address + bytes, bytes: range.bytes - bytes, ..range });
        }
        range.front(bytes)
    }

    /// Takes the range that starts at an address out.
    pub(super) fn remove(&mut self, address: u64) -> Option<Range> {
        let (bytes, segment) = self.by_address.remove(&address)?;
        self.by_size.remove(&(bytes, address));
        Some(Range { address, bytes, segment })
    }

    /// All ranges, from low to high addresses.
    pub(super) fn iter(&self) -> impl Iterator<Item = Range> {
        self.by_address.iter().map(|(&address, &(bytes, segment))| Range { address, bytes, segment })
    }

    /// Writes where they are. The device's segments show of which one each is.
    pub(super) fn write(&self, to: &mut State) {
        to.put_all(self.iter().flat_map(|range| [range.address, range.bytes]));
    }

    /// Moves everything of `other` here.
    pub(super) fn absorb(&mut self, other: &mut Ranges) {
        for range in std::mem::take(other).iter() {
            self.give(range);
        }
    }
}

/// Segments that a policy holds, so that it can tell a whole free one.
#[derive(Clone, Debug, Default)]
pub(super) struct Segments(BTreeMap<SegmentId, u64>);

impl Segments {
    /// A new segment as a free range, or none where the device is full or the limit reached.
    pub(super) fn map(&mut self, device: &mut Device, bytes: u64) -> Option<Range> {
        if !device.is_within_limit(bytes) {
            return None;
        }
        let Segment { id, address } = device.map(bytes)?;
        self.0.insert(id, bytes);
        Some(Range { address, bytes, segment: id })
    }

    /// From the oldest to the newest.
    pub(super) fn ids(&self) -> impl Iterator<Item = SegmentId> {
        self.0.keys().copied()
    }

    /// Writes how long they are, from the oldest to the newest.
    pub(super) fn write(&self, to: &mut State) {
        to.put_all(self.0.values().copied());
    }

    /// Gives back every segment that is one free range. Whether there was any.
    pub(super) fn unmap_whole(&mut self, device: &mut Device, ranges: &mut Ranges) -> bool {
        let whole: Vec<Range> =
            ranges.iter().filter(|range| self.0.get(&range.segment) == Some(&range.bytes)).collect();
        for range in &whole {
            ranges.remove(range.address);
            self.0.remove(&range.segment);
            device.unmap(range.segment);
        }
        !whole.is_empty()
    }
}

/// The range of a placement.
pub(super) fn range_of(placement: Placement) -> Range {
    Range { address: placement.address, bytes: placement.bytes, segment: placement.segment }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(address: u64, bytes: u64, segment: u32) -> Range {
        Range { address, bytes, segment: SegmentId(segment) }
    }

    #[test]
    fn neighbours_join_only_within_a_segment() {
        //  0    10   20   30
        //  | a  | b  | c  |     a and b are of one segment
        let mut ranges = Ranges::default();
        ranges.give(range(0, 10, 1));
        ranges.give(range(20, 10, 2));
        assert_eq!(ranges.give(range(10, 10, 1)), range(0, 20, 1));
        assert_eq!(ranges.iter().collect::<Vec<_>>(), [range(0, 20, 1), range(20, 10, 2)]);
    }

    #[test]
    fn fits_differ_in_what_they_take() {
        let ranges = || {
            let mut ranges = Ranges::default();
            for (index, bytes) in [8, 32, 16, 16].into_iter().enumerate() {
                ranges.give(range(index as u64 * 100, bytes, index as u32));
            }
            ranges
        };
        let taken = |fit| ranges().take(10, fit).map(|range| range.address);
        assert_eq!(
            (taken(Fit::Best), taken(Fit::First), taken(Fit::Worst)),
            (Some(200), Some(100), Some(100))
        );
        assert_eq!(ranges().take(33, Fit::Best), None);
    }
}
