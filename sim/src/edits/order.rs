//! Many events in the order of their moments.

/// Distance of two recorded moments, so that an edit has room for its own between them.
pub(super) const GAP: u64 = 1 << 32;

/// Events by moment, and by `key` where they share one. Recorded moments are [`GAP`] apart, so nearly every event has a place of its own: one
/// pass deals them out, and only those of one place are compared.
pub(super) fn ordered<T: Copy, K: Ord>(
    events: Vec<T>,
    moment: impl Fn(&T) -> u64,
    key: impl Fn(&T) -> K,
) -> Vec<T> {
    let place = |event: &T| (moment(event) / GAP) as usize;
    let n_places = events.iter().map(&place).max().map_or(0, |last| last + 1);
    let is_dense = n_places <= 4 * events.len() && events.len() < u32::MAX as usize;
    let Some(first) = events.first().copied().filter(|_| is_dense) else {
        let mut events = events;
        events.sort_by_key(|event| (moment(event), key(event)));
        return events;
    };
    // Where the events of each place begin, and after they were dealt out, where they end.
    let mut ends = vec![0u32; n_places + 1];
    for event in &events {
        ends[place(event) + 1] += 1;
    }
    let mut sum = 0;
    for end in &mut ends {
        sum += *end;
        *end = sum;
    }
    let mut dealt = vec![first; events.len()];
    for event in &events {
        let next = &mut ends[place(event)];
        dealt[*next as usize] = *event;
        *next += 1;
    }
    let mut begin = 0;
    for end in ends.into_iter().take(n_places) {
        if end - begin > 1 {
            dealt[begin as usize..end as usize].sort_by_key(|event| (moment(event), key(event)));
        }
        begin = end;
    }
    dealt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_in_order_wherever_their_moments_lie() {
        let mut dice = 1u64;
        let mut throw = |below: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (dice >> 33) % below
        };
        for (n, distance) in [(0, 1), (1, 1), (1000, GAP / 3), (1000, GAP), (1000, 9 * GAP)] {
            let events: Vec<(u64, u64)> = (0..n).map(|_| (throw(500) * distance, throw(3))).collect();
            let mut sorted = events.clone();
            sorted.sort_unstable();
            assert_eq!(ordered(events, |event| event.0, |event| event.1), sorted, "{distance}");
        }
    }
}
