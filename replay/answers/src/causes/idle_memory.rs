//! Memory that outlives the work that it was made for: a cache that is an attribute, a dataset after its last epoch.

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_trace::words::{bytes, time};

pub(super) const CAUSE: Cause = Cause {
    name: "idle after the work that it was made for",
    kind: Kind::Kept,
    needs: "a fifth of the peak at least that a function made and ran a model beside, and that stayed long after its last call",
    against: "captured graphs, which use memory without asking for any; calls of the function later on",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let ledger = &facts.story.ledger;
    if facts.failure.is_some() || ledger.torch_pools.pools.values().any(|pool| !pool.graphs.is_empty()) {
        return None;
    }
    let idle = facts.lifetimes?.idle.iter().max_by_key(|idle| idle.bytes)?;
    // Gradients, state and weights are used by what reads them.
    let role =
        facts.holders().find(|holder| holder.site == idle.site).map_or("", |holder| facts.role(holder));
    if matches!(role, "parameters" | "weights" | "gradients" | "optimizer state" | "workspaces") {
        return None;
    }
    Some(Case {
        what: format!(
            "{} lie idle at the peak: `{}` made them here, asked for memory last at {}, and others went on without it",
            bytes(idle.bytes),
            idle.function,
            time(facts.story.since_start(idle.over))
        ),
        site: facts.site(idle.site),
        bytes: idle.bytes,
        sure: "likely: no call of that function is seen afterwards; that nothing reads them is not recorded"
            .into(),
        fix: Fix::words(
            format!(
                "let go of it when `{}` returns: no attribute or global should keep it (`self.… = None`, `del`)",
                idle.function
            ),
            format!("gives back {}", bytes(idle.bytes)),
        ),
        verb: "report --peak",
    })
}
