//! Memory that a program takes in one go for later: blocks of a key-value cache, a pool.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_analyse::libraries::When;
use gputrace_analyse::piles::{Course, Pile};
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, count};

pub(super) const CAUSE: Cause = Cause {
    name: "preallocated memory (KV cache, pool)",
    kind: Kind::Beyond,
    needs: "a request that failed while equal blocks that one line had requested in one go were at least two fifths of the memory in use",
    against: "parameters, and what a model allocates as it runs",
    find,
};

/// A cache that fills as the model runs.
pub(super) const FILLED: Cause = Cause {
    name: "the KV cache of long or many sequences",
    kind: Kind::Beyond,
    needs: "a request that failed while blocks of a key-value cache, requested as the model ran, were two fifths of the memory in use",
    against: "a cache that was requested in one go",
    find: filled,
};

fn filled(facts: &Facts<'_>) -> Option<Case> {
    facts.failure?;
    let held = facts.held?;
    let (all, most) = facts.with(|holder| facts.role(holder) == "KV cache" && is_filled(holder))?;
    let offered = most.offer(When::Grows);
    let is_named = offered.is_some() || facts.site(most.site).to_lowercase().contains("cache");
    // Else, few blocks of a model that runs are activations of its layers.
    if !is_named && most.rising_sizes <= held.n_layers() {
        return None;
    }
    (all.0.saturating_mul(5) >= held.bytes.0.saturating_mul(2)).then(|| Case {
        what: format!(
            "{} of {} in use then are a key-value cache, requested while the model ran ({} blocks)",
            bytes(all),
            bytes(held.bytes),
            count(most.blocks)
        ),
        site: facts.site(most.site),
        bytes: all,
        sure: match is_named {
            true => "certain that the cache's own code requested them; which sequences they are of is not recorded",
            false => "likely: as the model ran, this line replaced its blocks by larger ones",
        }
        .into(),
        fix: Fix::words(
            offered.unwrap_or("keep fewer or shorter sequences, or bound the cache (a sliding window)"),
            "",
        ),
        verb: "oom",
    })
}

/// Whether models ran while it was requested.
fn is_filled(holder: &Holder) -> bool {
    holder.signs.has(Sign::Forward) && holder.worked_since > holder.blocks
}

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
    let single = facts.holders().find(|holder| facts.role(holder) == "KV cache" && !is_filled(holder));
    let single = single.map(|holder| (holder.site, holder.bytes, holder.blocks));
    let (site, taken, blocks) = pile.into_iter().chain(single).max_by_key(|(_, bytes, _)| *bytes)?;
    if taken.0.saturating_mul(5) < held.bytes.0.saturating_mul(2) {
        return None;
    }
    let again = match failure {
        Failure::Torch(_, error) if error.site == site => {
            "; the failed request is from the same line: a second engine, worker or model also wants its share"
        }
        _ => "",
    };
    Some(Case {
        what: format!(
            "{} were preallocated, {} blocks in one go, like a KV cache or a pool{again}",
            bytes(taken),
            count(blocks)
        ),
        site: facts.site(site),
        bytes: taken,
        sure:
            "certain that they were requested together and are still held; likely that they were preallocated"
                .into(),
        fix: Fix::words(
            "lower `gpu_memory_utilization` (or the share that this line computes), so all that share the card fit",
            format!("half of it frees {}", bytes(gputrace_schemas::event::Bytes(taken.0 / 2))),
        ),
        verb: "oom",
    })
}
