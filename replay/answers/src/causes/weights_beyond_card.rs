//! Weights that alone are more than the card holds.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::{Sign, Signs};
use gputrace_analyse::holdings::Purpose;
use gputrace_schemas::event::Bytes;
use gputrace_trace::ledger::Wall;
use gputrace_trace::words::bytes;

/// Weights are nearly all of the memory in use: so many of ten parts.
const NEARLY_ALL: u64 = 9;

pub(super) const CAUSE: Cause = Cause {
    name: "weights that alone are larger than the card",
    kind: Kind::Beyond,
    needs: "a failed request for weights, where nine tenths of the memory in use are weights that were made in one go",
    against: "models that are loaded one after the other, a checkpoint or a copy beside the model, work of a model in between, and others on the card",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let held = facts.held?;
    let is_weights =
        |role: &str, signs: Signs| matches!(role, "parameters" | "weights") || signs.has(Sign::Model);
    let weights = held.sum(|holder| is_weights(facts.role(holder), holder.signs));
    let is_own = facts.holders().any(|it| it.site == error.site && is_weights(facts.role(it), it.signs));
    let has_worked = facts.holders().any(|it| it.signs.has(Sign::Forward) || it.signs.has(Sign::Backward));
    let is_copied =
        held.holdings.iter().any(|it| matches!(it.purpose, Purpose::Copy | Purpose::Loaded | Purpose::State));
    let is_all = weights.0.saturating_mul(10) >= held.bytes.0.saturating_mul(NEARLY_ALL);
    let asked = error.requested.unwrap_or(error.bytes);
    // Others on the card, or a limit, may leave less. A snapshot does not say how large the card is.
    let needed = Bytes(held.bytes.0.saturating_add(asked.0));
    let total = error.device.map_or(0, |(_, total)| total.0);
    if needed.0.saturating_mul(10) < total.saturating_mul(NEARLY_ALL) || error.wall() == Wall::Limit {
        return None;
    }
    (is_own && is_all && !has_worked && !is_copied && facts.growing().is_empty()).then(|| Case {
        what: format!(
            "{} of {} in use are weights, and this request is for more of them: the model alone does not fit",
            bytes(weights),
            bytes(held.bytes)
        ),
        site: facts.site(error.site),
        bytes: needed,
        sure: "likely: weights are nearly all of it, and no model has run yet".into(),
        fix: Fix::words(
            "convert before you move (`model.to(torch.bfloat16).to(\"cuda\")`, `from_pretrained(dtype=torch.bfloat16)`), quantize, or shard it (`device_map=\"auto\"`, FSDP)",
            "float32 needs twice as much as bfloat16",
        ),
        verb: "oom",
    })
}
