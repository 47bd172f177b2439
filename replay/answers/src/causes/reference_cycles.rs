//! Reference cycles, which Python's collector breaks late.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::Sign;
use gputrace_trace::words::{bytes, count};

/// Worth a verdict from this part of the peak of PyTorch's blocks on: one in so many.
const LEAST: u64 = 20;

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
    (cycles.peak.0.saturating_mul(LEAST) >= peak).then(|| Case {
        what: format!(
            "up to {} of a peak of {} waited for Python's garbage collector: reference cycles held them",
            bytes(cycles.peak),
            bytes(Bytes(peak))
        ),
        site: facts.site(site.site),
        bytes: cycles.peak,
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
