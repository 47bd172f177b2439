//! Activation checkpointing that the program has in its source and did not reach.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::holdings::Purpose;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "activation checkpointing that was not reached",
    kind: Kind::Peak,
    needs: "a failed request of PyTorch's while activations were a quarter of what was held, none of any checkpointed function, and a call of `checkpoint` under a condition in the source of a function that holds them",
    against: "a checkpointed function that ran",
    find,
};

/// Activations are worth a word from this part of what was held on: one in so many.
const LEAST: u64 = 4;

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Some(Failure::Torch(..)) = facts.failure else { return None };
    let held = facts.held?;
    if facts.lifetimes?.has_checkpointing {
        return None;
    }
    let most = held.holdings.iter().find(|it| it.purpose == Purpose::Activations)?;
    if most.bytes.0.saturating_mul(LEAST) < held.bytes.0 {
        return None;
    }
    let of_lines = facts.holders().filter(|it| it.site == most.site);
    let (place, condition) =
        of_lines.into_iter().find_map(|it| facts.sources.untaken(&it.own, "checkpoint"))?;
    let fix = match condition.contains("training") {
        true => format!("call `train()` of that model: under `eval()`, `{condition}` is false ({place})"),
        false => format!(
            "make `{condition}` true ({place}), such as by the model's `gradient_checkpointing_enable()`"
        ),
    };
    Some(Case {
        what: format!(
            "{} of {} in use are activations; the source checkpoints this at {place}, under `{condition}`, and no checkpointed function ran",
            bytes(most.bytes),
            bytes(held.bytes)
        ),
        site: if most.under.is_empty() { facts.site(most.site) } else { most.under.clone() },
        bytes: most.bytes,
        sure:
            "certain that no request came from a checkpointed function; that it was meant to run is a guess"
                .into(),
        fix: Fix::words(fix, ""),
        verb: "oom",
    })
}
