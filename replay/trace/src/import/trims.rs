//! `empty_cache`, which a snapshot does not record: it follows from segments that were given back without need.

use gputrace_sim::ops::{DriverCall, DriverEvent, Op, OpStream, RecordedSegment};

/// Whether the request after a burst could have been served from one of the cached segments of that burst. Then it was
/// not that request that flushed them.
fn would_have_hit(stream: &OpStream, burst: &[DriverEvent]) -> bool {
    let Some(Op::Alloc(id)) = burst.first().and_then(|event| stream.ops.get(event.before_op as usize)) else {
        return false;
    };
    let request = stream.allocation(*id);
    let is_small = request.requested <= 1 << 20;
    let fits = |segment: &RecordedSegment| {
        let same_half = (segment.bytes == gputrace_sim::device::PAGE) == is_small;
        same_half
            && segment.stream == request.stream
            && segment.bytes >= request.requested.next_multiple_of(512)
    };
    let freed = burst.iter().filter(|event| event.call == DriverCall::Free);
    freed.filter_map(|event| stream.segments.get(event.segment as usize)).any(fits)
}

/// Segments that were given back although the driver had not refused anything: the program called `empty_cache`.
///
/// A burst right before a new segment is a failed request's flush only if the new segment would have made the total
/// larger than it ever was, and none of the segments given back would have done; otherwise there was no reason to.
pub(super) fn insert_trims(stream: &mut OpStream) {
    let is_back = |event: &DriverEvent| matches!(event.call, DriverCall::Free | DriverCall::Unmap);
    let signed =
        |event: &DriverEvent| if is_back(event) { -(event.bytes as i64) } else { event.bytes as i64 };
    let at_start: i64 = stream.initial.iter().map(|segment| segment.bytes as i64).sum();
    let (mut total, mut most) = (at_start, at_start);
    for event in &stream.driver {
        total += signed(event);
        most = most.max(total);
    }
    let options = stream.settings.options.clone().unwrap_or_default();
    let gives_back_early = options.contains("garbage_collection") || options.contains("max_split");
    let mut trims = Vec::new();
    let mut total = at_start;
    let mut index = 0;
    while index < stream.driver.len() {
        let event = stream.driver[index];
        if !is_back(&event) {
            total += signed(&event);
            index += 1;
            continue;
        }
        let burst = stream.driver[index..]
            .iter()
            .take_while(|other| is_back(other) && other.before_op == event.before_op)
            .count();
        let next = stream.driver.get(index + burst).filter(|next| next.before_op == event.before_op);
        let is_within_request = match next {
            Some(_) if gives_back_early => true,
            Some(next) => {
                total + next.bytes as i64 > most
                    && !would_have_hit(stream, &stream.driver[index..index + burst])
            }
            None => matches!(stream.ops.get(event.before_op as usize), Some(Op::Oom(_))),
        };
        if !is_within_request {
            trims.push((event.before_op, index));
        }
        total += stream.driver[index..index + burst].iter().map(signed).sum::<i64>();
        index += burst;
    }
    let places: Vec<(u32, Op)> = trims.iter().map(|(before, _)| (*before, Op::Trim)).collect();
    stream.insert_ops(&places);
}
