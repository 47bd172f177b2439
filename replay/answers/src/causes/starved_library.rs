//! A library that the driver refuses, while PyTorch's cache has as much lying idle.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "PyTorch's cache starves a library",
    kind: Kind::Wasted,
    needs: "a refused request of a library other than PyTorch, and PyTorch segments without a live block that are as large",
    against: "segments that are in use",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Refused(refused) = facts.failure? else { return None };
    let idle = facts.found.fragmentation.get(&refused.device)?.wholly_free();
    let owner = facts.story.ledger.sites.owner(refused.owner);
    (idle >= refused.bytes).then(|| Case {
        what: format!("PyTorch's cache kept {} unused when {owner} requested {} from the driver", bytes(idle), bytes(refused.bytes)),
        site: facts.site(refused.site),
        bytes: idle,
        sure: "certain: these segments had no live block when the driver refused".into(),
        fix: Fix::words(
            "call `torch.cuda.empty_cache()` before that line, or limit PyTorch: `torch.cuda.set_per_process_memory_fraction`",
            format!("frees {}", bytes(idle)),
        ),
        verb: "oom",
    })
}
