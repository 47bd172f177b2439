//! Free addresses as ranges, start to end, that join with their neighbours.

use std::collections::BTreeMap;

/// Start to end.
pub(super) type Ranges = BTreeMap<u64, u64>;

/// Takes a range out of the one range that holds it all.
pub(super) fn take(ranges: &mut Ranges, start: u64, end: u64) -> bool {
    if start >= end {
        return true;
    }
    match ranges.range(..=start).next_back().map(|(from, to)| (*from, *to)) {
        Some((from, to)) if to >= end => {
            ranges.remove(&from);
            if from < start {
                ranges.insert(from, start);
            }
            if end < to {
                ranges.insert(end, to);
            }
            true
        }
        _ => false,
    }
}

/// Takes whatever there is of a range.
pub(super) fn take_any(ranges: &mut Ranges, start: u64, end: u64) {
    let mut touched: Vec<(u64, u64)> = Vec::new();
    for (from, to) in ranges.range(..end).rev() {
        if *to <= start {
            break;
        }
        touched.push((*from, *to));
    }
    for (from, to) in touched {
        take(ranges, from.max(start), to.min(end));
    }
}

/// Gives a range back, joined with its neighbours.
pub(super) fn give(ranges: &mut Ranges, start: u64, end: u64) {
    let (mut from, mut to) = (start, end);
    if let Some((before, stop)) = ranges.range(..start).next_back().map(|(before, stop)| (*before, *stop))
        && stop == start
    {
        ranges.remove(&before);
        from = before;
    }
    if let Some(stop) = ranges.remove(&end) {
        to = stop;
    }
    ranges.insert(from, to);
}
