//! Memory that outlives the work that it was made for: a cache that is an attribute, a dataset after its last epoch.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_trace::words::{bytes, time};

pub(super) const CAUSE: Cause = Cause {
    name: "left idle after its work",
    kind: Kind::Kept,
    needs: "at least a fifth of the peak that a function allocated and ran a model with, and that stayed long after its last call",
    against: "captured graphs, which use memory without requesting any; later calls of the function; a caller that uses what it returned, by the program's source",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let ledger = &facts.story.ledger;
    if facts.failure.is_some() || ledger.torch_pools.pools.values().any(|pool| !pool.graphs.is_empty()) {
        return None;
    }
    let idle = facts.lifetimes?.idle.iter().max_by_key(|idle| idle.bytes)?;
    // Gradients, state and weights are used by what reads them.
    let holder = facts.holders().find(|holder| holder.site == idle.site);
    let role = holder.map_or("", |holder| facts.role(holder));
    if holder.is_some_and(|holder| facts.sources.uses_result(&holder.own, &idle.function)) {
        return None;
    }
    if matches!(role, "parameters" | "weights" | "gradients" | "optimizer state" | "workspaces") {
        return None;
    }
    // What it worked with while it ran may be the next-highest moment.
    let peak = facts.held.filter(|held| held.device == idle.device).map_or(Bytes(0), |held| held.bytes);
    let lower = peak.0.saturating_sub(idle.peak_without.0);
    let worth = match lower {
        0 => {
            format!("frees {} from then on; PyTorch's own peak was before that, and stays", bytes(idle.bytes))
        }
        lower => format!(
            "frees {} from then on; the peak is about {} lower, at {}",
            bytes(idle.bytes),
            bytes(Bytes(lower)),
            bytes(idle.peak_without)
        ),
    };
    Some(Case {
        what: format!(
            "{} lie idle at the peak: `{}` allocated them here, last requested memory at {}, and other code ran without it since",
            bytes(idle.bytes),
            idle.function,
            time(facts.story.since_start(idle.over))
        ),
        site: facts.site(idle.site),
        bytes: idle.bytes,
        sure: "likely: the function was not called again; whether anything reads the memory is not recorded"
            .into(),
        fix: Fix::words(
            format!(
                "drop it when `{}` returns: no attribute or global should keep it (`self.… = None`, `del`)",
                idle.function
            ),
            worth,
        ),
        verb: "report --peak",
    })
}
