//! Memory that a program takes in one go for later: blocks of a key-value cache, a pool.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_analyse::piles::{Course, Pile};
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, count};

pub(super) const CAUSE: Cause = Cause {
    name: "memory taken in advance (KV cache, pool)",
    kind: Kind::Beyond,
    needs: "a request that failed while equal blocks that one line had asked for in one go were two fifths of what was held at least",
    against: "parameters, and what a model makes as it runs",
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
    // A checkpoint, a model and a copy of it are made in one go, too.
    let is_own = |site: SiteId| {
        let made = |holder: &&Holder| {
            holder.site == site
                && holder.signs.has(Sign::Own)
                && ![Sign::Load, Sign::Model, Sign::Optimizer, Sign::Copy, Sign::Backward, Sign::Forward]
                    .into_iter()
                    .any(|sign| holder.signs.has(sign))
        };
        facts.holders().any(|holder| made(&holder))
    };
    let is_pile = |pile: &&Pile| {
        pile.course == Course::AtOnce && pile.is_equal && !lasting(pile.role) && is_own(pile.site)
    };
    let pile = held.piles.iter().find(is_pile).map(|pile| (pile.site, pile.bytes, pile.blocks));
    // One tensor for all layers is a pile of its own.
    let single = facts.holders().find(|holder| facts.role(holder) == "KV cache");
    let single = single.map(|holder| (holder.site, holder.bytes, holder.blocks));
    let (site, taken, blocks) = pile.into_iter().chain(single).max_by_key(|(_, bytes, _)| *bytes)?;
    if taken.0.saturating_mul(5) < held.bytes.0.saturating_mul(2) {
        return None;
    }
    let again = match failure {
        Failure::Torch(_, error) if error.site == site => {
            "; the request that failed is of the same line: a second one (an engine, a worker, a model) wants its share, too"
        }
        _ => "",
    };
    Some(Case {
        what: format!(
            "{} were taken in advance, {} blocks in one go, as a KV cache or a pool is{again}",
            bytes(taken),
            count(blocks)
        ),
        site: facts.site(site),
        bytes: taken,
        sure:
            "certain that they were asked for together and still held; likely that they were taken in advance"
                .into(),
        fix: Fix::words(
            "let it take a smaller part: lower `gpu_memory_utilization` (or the share that this line computes), so that all that share the \
             card fit",
            format!("half of it gives {} free", bytes(gputrace_schemas::event::Bytes(taken.0 / 2))),
        ),
        verb: "oom",
    })
}
