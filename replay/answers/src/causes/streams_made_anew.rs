//! Streams that are made anew for each piece of work: what is freed on one can only be used again on the same one.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;
use gputrace_sim::ops::{OpStream, StreamIdx};

use super::facts::device;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::lifetimes::StreamUse;
use gputrace_report::sections::cache;
use gputrace_trace::ledger::SiteId;
use gputrace_trace::ledger::pools::Pool;
use gputrace_trace::words::{bytes, count, time};

/// Fewer streams than this are a program's own few.
const LEAST_STREAMS: usize = 4;
/// As many as this are made anew, even where each is used to the end.
pub(super) const MANY_STREAMS: usize = 16;
/// A stream is left behind if nothing was asked for on it in this part of the requests, at the end: one in so many.
const LATE: u64 = 10;

pub(super) const CAUSE: Cause = Cause {
    name: "a new side stream each time",
    kind: Kind::Wasted,
    needs: "several streams on which one line requested memory, one after the other, and which hold much less than was reserved for them",
    against: "streams that take turns to the end, and a reserve that is in use",
    find,
};

/// A few side streams that asked for nothing more, and whose free memory serves no other stream.
pub(crate) const IDLE: Cause = Cause {
    name: "a side stream's idle cache",
    kind: Kind::Spare,
    needs: "side streams that requested nothing in the last part of the run, whose blocks are freed, and which had a quarter of the reserved memory",
    against: "streams that take turns to the end, segments that were released to the driver, and a reserve that is in use",
    find: idle,
};

fn idle(facts: &Facts<'_>) -> Option<Case> {
    let devices = cache::torches(facts.story).filter_map(|(ordinal, torch)| {
        let lifetimes = facts.lifetimes?;
        let of_device = lifetimes.streams.iter().filter(|used| used.device == ordinal);
        let goes_on = of_device.clone().any(|used| !is_left(facts, used));
        let left: Vec<&StreamUse> =
            of_device.filter(|used| used.stream != 0 && is_left(facts, used)).collect();
        let free: u64 = left.iter().map(|used| used.peak.0.saturating_sub(used.at_end.0)).sum();
        // What is not reserved beyond what is in use is no waste.
        let of_graphs = of_graphs(facts, ordinal, |pool| pool.reserved.now);
        let unused = torch.reserved.now.0.saturating_sub(torch.allocated.now.0);
        let free = free.min(unused).saturating_sub(of_graphs);
        let most = left.into_iter().max_by_key(|used| used.peak)?;
        (goes_on && free.saturating_mul(4) >= torch.reserved.peak.0 && free > 0).then_some((
            ordinal,
            Bytes(free),
            most,
        ))
    });
    let (ordinal, free, most) = devices.max_by_key(|(_, free, _)| *free)?;
    // Many streams are another cause.
    if facts.failure.is_some() || stranded(facts, ordinal).is_some() {
        return None;
    }
    Some(Case {
        what: format!(
            "{}: {} stay reserved for a side stream whose last request was at {}",
            device(ordinal),
            bytes(free),
            time(facts.story.since_start(most.until))
        ),
        site: facts.site(most.site),
        bytes: free,
        sure: "certain: memory that is free on a stream serves only that stream".into(),
        fix: Fix::words(
            "call `torch.cuda.empty_cache()` once after that work, or do it on the main stream",
            format!("frees up to {}", bytes(free)),
        ),
        verb: "report --all",
    })
}

/// What private pools have of a device. It is free for the graphs that use the pool, whatever stream they were captured on.
fn of_graphs(facts: &Facts<'_>, ordinal: i16, reserved: impl Fn(&Pool) -> Bytes) -> u64 {
    let pools = facts.story.ledger.torch_pools.pools.iter();
    pools.filter(|((device, _), _)| *device == ordinal).map(|(_, pool)| reserved(pool).0).sum()
}

/// What is free on streams that one line used one after the other, and how many these are.
pub(super) fn stranded<'a>(facts: &Facts<'a>, ordinal: i16) -> Option<(Bytes, Vec<&'a StreamUse>)> {
    let lifetimes = facts.lifetimes?;
    let mut by_site: BTreeMap<SiteId, Vec<&StreamUse>> = BTreeMap::new();
    for used in lifetimes.streams.iter().filter(|used| used.device == ordinal && used.stream != 0) {
        by_site.entry(used.site).or_default().push(used);
    }
    let free = |used: &StreamUse| used.peak.0.saturating_sub(used.at_end.0);
    let sum = |streams: &[&StreamUse]| streams.iter().map(|used| free(used)).sum::<u64>();
    let streams = by_site.into_values().max_by_key(|streams| sum(streams))?;
    // PyTorch hands out 32 streams in turn: who makes them anew in a long run comes back to each.
    let is_left = streams.len() >= MANY_STREAMS || streams.iter().any(|used| is_left(facts, used));
    (streams.len() >= LEAST_STREAMS && is_left).then(|| (Bytes(sum(&streams)), streams))
}

/// Nothing was asked for on it in the last part of the device's requests. Time would say less: the CPU runs ahead of the GPU.
fn is_left(facts: &Facts<'_>, used: &StreamUse) -> bool {
    let all = facts.lifetimes.into_iter().flat_map(|it| &it.streams).filter(|it| it.device == used.device);
    used.after.saturating_mul(LATE) >= all.map(|it| it.blocks).sum::<u64>()
}

/// Whether one of several streams was left behind.
pub(super) fn is_some_left(facts: &Facts<'_>, streams: &[Option<u64>]) -> bool {
    let used = facts.lifetimes.into_iter().flat_map(|it| &it.streams);
    used.filter(|used| streams.contains(&Some(used.stream)) && used.stream != 0)
        .any(|used| is_left(facts, used))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let devices = cache::torches(facts.story).filter_map(|(ordinal, torch)| {
        let (free, streams) = stranded(facts, ordinal)?;
        let unused = torch.reserved.peak.0.saturating_sub(torch.allocated.peak.0);
        // What is not reserved beyond what is in use is no waste.
        let of_graphs = of_graphs(facts, ordinal, |pool| pool.reserved.peak);
        let free = Bytes(free.0.min(unused).saturating_sub(of_graphs));
        Some((ordinal, torch, free, streams)).filter(|_| free.0 * 4 >= torch.reserved.peak.0)
    });
    let (ordinal, torch, free, streams) = devices.max_by_key(|(_, _, free, _)| *free)?;
    let n = count(streams.len() as u64);
    let handles: Vec<u64> = streams.iter().map(|used| used.stream).collect();
    let one = facts.reserved_if(ordinal, |requests| on_one_stream(requests, &handles));
    let worth = match one.filter(|one| *one < torch.reserved.peak) {
        Some(one) => format!("reserves {} instead of {}", bytes(one), bytes(torch.reserved.peak)),
        // One of them keeps what it had.
        None => {
            let largest = streams.iter().map(|used| used.peak.0).max().unwrap_or(0);
            let others: u64 = streams.iter().map(|used| used.peak.0).sum::<u64>().saturating_sub(largest);
            format!("needs up to {} less", bytes(free.min(Bytes(others))))
        }
    };
    Some(Case {
        what: format!(
            "{}: {} are free on {n} streams, and free memory serves only requests of its own stream: PyTorch reserved up to {} for at most {} in use",
            device(ordinal),
            bytes(free),
            bytes(torch.reserved.peak),
            bytes(torch.allocated.peak)
        ),
        site: facts.site(streams[0].site),
        bytes: free,
        sure: format!(
            "certain: this line requested memory on {n} streams, at most {} times each",
            count(most(&streams))
        ),
        fix: Fix::words("create the side streams once, outside the loop, and reuse them", worth),
        verb: "report --all",
    })
}

/// The same requests, with those on these streams on the first of them.
fn on_one_stream(requests: &mut OpStream, handles: &[u64]) {
    let all = (0_u16..).zip(&requests.streams);
    let merged: Vec<StreamIdx> =
        all.filter(|(_, handle)| handles.contains(handle)).map(|(idx, _)| StreamIdx(idx)).collect();
    let Some(first) = merged.first().copied() else { return };
    for request in requests.allocations.iter_mut().filter(|it| merged.contains(&it.stream)) {
        request.stream = first;
    }
}

fn most(streams: &[&StreamUse]) -> u64 {
    streams.iter().map(|used| used.blocks).max().unwrap_or(0)
}
