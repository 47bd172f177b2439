//! Other processes that hold much of the card.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_trace::ledger::Wall;
use gputrace_trace::words::bytes;

/// Others hold much of a device from this part of it on: one in so many.
const MUCH: u64 = 4;

pub(super) const CAUSE: Cause = Cause {
    name: "other processes on the card",
    kind: Kind::Elsewhere,
    needs: "a request that the device had no room for, while other processes held a quarter of it and more than was requested",
    against: "a limit of PyTorch's own",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let failure = facts.failure?;
    let Failure::Torch(ordinal, error) = failure else { return None };
    let (free, total) = error.device.filter(|_| error.wall() == Wall::Device)?;
    // The process's own context and code, as far as NVML told.
    let books = facts.story.ledger.devices().get(&ordinal);
    let own = books
        .into_iter()
        .flat_map(|books| &books.samples.kept)
        .filter_map(|sampled| Some(sampled.process_used?.0.saturating_sub(sampled.tracked.0)));
    let own = own.max();
    let elsewhere = total.0.saturating_sub(free.0).saturating_sub(error.tracked.0);
    let elsewhere = elsewhere.saturating_sub(own.unwrap_or(0));
    let is_much = elsewhere.saturating_mul(MUCH) >= total.0 && total.0 > 0;
    let is_enough = failure.asked().is_some_and(|asked| elsewhere >= asked.0);
    (is_much && is_enough).then(|| Case {
        what: format!(
            "{} in use, {} more reserved, and other processes held {} of the device's {}",
            bytes(error.allocated),
            bytes(Bytes(error.reserved.0.saturating_sub(error.allocated.0))),
            bytes(Bytes(elsewhere)),
            bytes(total)
        ),
        site: facts.site(error.site),
        bytes: Bytes(elsewhere),
        sure: match own {
            Some(_) => "certain: the driver's own figure at that moment, without the memory of this process",
            None => {
                "the driver's own figure at that moment, without the memory of this process; its own context is included"
            }
        }
        .into(),
        fix: Fix::words(
            "end or move the other processes (`gputrace oom` lists those that NVML names), or wait for them",
            format!("{} would have been free", bytes(Bytes(elsewhere + free.0))),
        ),
        verb: "oom",
    })
}
