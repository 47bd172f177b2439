//! Activation checkpointing that covers only a part of the model.

use gputrace_schemas::event::Bytes;

use super::activations_beyond_card::is_activation;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::{bytes, count};

/// Layers have as many blocks of one line at least.
const LEAST_LAYERS: u64 = 4;

pub(super) const CAUSE: Cause = Cause {
    name: "activation checkpointing of only a part of the model",
    kind: Kind::Peak,
    needs: "functions that are computed again in the backward pass, and at the peak activations of several layers outside of these, half of all",
    against: "a model that is all covered, or not at all",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let (held, lifetimes) = (facts.held?, facts.lifetimes?);
    if !lifetimes.has_checkpointing {
        return None;
    }
    let is_outside = |holder: &&Holder| {
        is_activation(facts, holder) && !holder.signs.has(Sign::Checkpointed) && holder.blocks >= LEAST_LAYERS
    };
    let most = facts.holders().find(is_outside)?;
    let all = Bytes(facts.holders().filter(is_outside).map(|holder| holder.bytes.0).sum());
    (all.0.saturating_mul(2) >= held.bytes.0).then(|| Case {
        what: format!(
            "{} of {} are activations of layers that are not checkpointed ({} blocks of this line), while others of the model are",
            bytes(all),
            bytes(held.bytes),
            count(most.blocks)
        ),
        site: facts.site(most.site),
        bytes: all,
        sure: "certain: these were made outside of `torch.utils.checkpoint` and wait for the backward pass".into(),
        fix: Fix::words(
            "checkpoint these layers, too: `x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)`",
            format!("saves most of {}", bytes(all)),
        ),
        verb: "report --peak",
    })
}
