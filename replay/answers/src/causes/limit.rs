//! A limit that the program set for PyTorch.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use crate::remedies::Verdict;
use gputrace_trace::ledger::Wall;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "a limit that the program set",
    kind: Kind::Beyond,
    needs: "a request to PyTorch that failed although the device had room for it, while nothing grows",
    against: "a driver that refused, growth up to the limit, or a setting of the allocator with which it fits",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    // A setting with which it fits is the better answer, and one with which it perhaps does is not.
    if facts.remedy().is_some_and(|(_, best)| best.verdict == Verdict::Fits) {
        return None;
    }
    Some(Case {
        what: under(facts)?,
        site: facts.site(error.site),
        // What fills the limit explains more.
        bytes: Bytes(0),
        sure: "certain: the device had room, and PyTorch did not ask the driver".into(),
        fix: Fix::words("raise `torch.cuda.set_per_process_memory_fraction`, or use less memory", ""),
        verb: "oom",
    })
}

/// How much was in use under a limit, in words; nothing where the card itself was full.
pub(super) fn under(facts: &Facts<'_>) -> Option<String> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let (free, total) = error.device.filter(|_| error.wall() == Wall::Limit)?;
    Some(format!(
        "{} in use under the limit that the program set, although {} of the device's {} were free",
        bytes(error.allocated),
        bytes(free),
        bytes(total)
    ))
}
