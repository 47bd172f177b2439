//! Reference cycles, which Python's collector breaks late.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::Sign;
use gputrace_trace::words::{bytes, count};

/// Worth a verdict from this part of the peak of PyTorch's blocks on: one in so many.
const LEAST: u64 = 20;
/// Collections after which more garbage may have waited when a request failed.
const RECURS: u64 = 2;

pub(super) const CAUSE: Cause = Cause {
    name: "reference cycles",
    kind: Kind::Kept,
    needs: "blocks that Python's garbage collector freed",
    against: "blocks that the program itself freed",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let lifetimes = facts.lifetimes?;
    let (cycles, peak) = (&lifetimes.cycles, lifetimes.devices.iter().map(|device| device.peak.0).max()?);
    let site = cycles.sites.first()?;
    // What waits when a request fails is collected later or never. Of what was collected once and before, one successor holds as much again: more
    // than that has piled up.
    let of_lines = || {
        let own = facts.holders().filter(|holder| cycles.sites.iter().any(|it| it.site == holder.site));
        own.map(|holder| holder.bytes.0).sum::<u64>()
    };
    let held = match (facts.failure, facts.held) {
        (Some(_), Some(held))
            if cycles.collections < RECURS && of_lines() < cycles.peak.0.saturating_mul(2) =>
        {
            cycles.held_at(held.device, held.time)
        }
        _ => cycles.peak,
    };
    // What has not been collected when a request fails may have been more.
    let most = if facts.failure.is_some() { "at least" } else { "up to" };
    (held.0.saturating_mul(LEAST) >= peak).then(|| Case {
        what: format!(
            "{most} {} of a peak of {} waited for Python's garbage collector: reference cycles held them",
            bytes(held),
            bytes(Bytes(peak))
        ),
        site: facts.site(site.site),
        bytes: held,
        sure: format!("certain: the collector freed {} of its blocks", count(site.blocks)),
        fix: Fix::words(
            match facts.holders().any(|holder| holder.site == site.site && holder.signs.has(Sign::Function)) {
                true => {
                    "pass the tensors of `forward` to `ctx.save_for_backward(...)`: an output stored on `ctx` refers to itself through its `grad_fn`"
                }
                false => "break the cycle in what this line creates: `weakref.proxy`, or `del` one of its references",
            },
            "",
        ),
        verb: "report --all",
    })
}
