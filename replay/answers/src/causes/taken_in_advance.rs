//! Memory that a program takes in one go for later: blocks of a key-value cache, a pool.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::piles::Course;
use gputrace_trace::words::{bytes, count};

pub(super) const CAUSE: Cause = Cause {
    name: "memory taken in advance (KV cache, pool)",
    kind: Kind::Beyond,
    needs: "a request that failed while equal blocks that one line had asked for in one go were two fifths of what was held at least",
    against: "parameters, and what a model makes as it runs",
    claims: None,
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let failure = facts.failure?;
    let held = facts.held?;
    let lasting = |role: u16| {
        let names = facts.lifetimes.map_or(&[][..], |lifetimes| &lifetimes.role_names);
        names.get(usize::from(role)).is_some_and(|(name, _)| {
            matches!(name.as_str(), "parameters" | "weights" | "gradients" | "optimizer state")
        })
    };
    let pile = held.piles.iter().find(|pile| pile.course == Course::AtOnce && !lasting(pile.role))?;
    if pile.bytes.0.saturating_mul(5) < held.bytes.0.saturating_mul(2) {
        return None;
    }
    let again = match failure {
        Failure::Torch(_, error) if error.site == pile.site => {
            "; the request that failed is of the same line: a second one (an engine, a worker, a model) wants its share, too"
        }
        _ => "",
    };
    Some(Case {
        what: format!(
            "{} were taken in advance, {} blocks in one go, as a KV cache or a pool is{again}",
            bytes(pile.bytes),
            count(pile.blocks)
        ),
        site: facts.site(pile.site),
        bytes: pile.bytes,
        sure: "certain that they were asked for together and still held; likely that they were taken in advance".into(),
        fix: Fix::words(
            "let it take a smaller part: lower `gpu_memory_utilization` (or the share that this line computes), so that all that share the \
             card fit",
            format!("half of it gives {} free", bytes(gputrace_schemas::event::Bytes(pile.bytes.0 / 2))),
        ),
        verb: "oom",
    })
}
