//! Activations of one step that are more than the card holds: too large a batch, or a larger input than before.

use super::facts::called_at;
use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_analyse::holdings::{Holding, Purpose};
use gputrace_analyse::libraries::When;
use gputrace_trace::ledger::Wall;
use gputrace_trace::words::bytes;

/// An input is larger than before from so many percent on.
const LARGER: u64 = 105;

pub(super) const CAUSE: Cause = Cause {
    name: "one step's activations are larger than the card",
    kind: Kind::Beyond,
    needs: "a request that failed while activations of that step were most of the memory in use, and nothing grows",
    against: "growth, a failed attempt that is kept, or an earlier step of the same sizes that succeeded",
    find,
};

pub(super) fn is_activation(facts: &Facts<'_>, holder: &Holder) -> bool {
    let is_other = [Sign::Model, Sign::Optimizer, Sign::Load, Sign::Workspace, Sign::Backward, Sign::Buckets]
        .into_iter()
        .any(|sign| holder.signs.has(sign));
    let role = facts.role(holder);
    // Between its layers, the program's own line may call functions: one result for each layer of the first pass.
    let is_between = holder.blocks > 2
        && holder.signs.has(Sign::Own)
        && !facts.has_stepped()
        && facts.held.is_some_and(|held| held.is_one_pass(holder, holder.blocks));
    let is_lasting = matches!(
        role,
        "parameters"
            | "weights"
            | "gradients"
            | "optimizer state"
            | "KV cache"
            | "workspaces"
            | "other, kept"
    );
    !is_other
        && !is_lasting
        && (is_between
            || holder.signs.has(Sign::Forward)
            || holder.signs.has(Sign::Functional)
            || role.starts_with("activations"))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let held = facts.held?;
    let is_kept = facts.found.caught.iter().any(|it| it.is_user_code && it.kept_bytes().0 > 0);
    if !facts.growing().is_empty() || is_kept || error.wall() == Wall::Limit {
        return None;
    }
    // Scores of attention, and what the graph of a loop keeps, have remedies of their own.
    let is_known = |it: &&Holding| {
        matches!(it.purpose, Purpose::Attention | Purpose::GraphOfLoop | Purpose::GraphRetained)
    };
    if held.holdings.iter().find(is_known).is_some_and(|it| it.bytes.0.saturating_mul(2) >= held.bytes.0) {
        return None;
    }
    let (sum, most) = facts.with(|holder| is_activation(facts, holder))?;
    if sum.0.saturating_mul(2) < held.bytes.0 {
        return None;
    }
    // Layers of one line have several sizes: the largest counts.
    let rose = |holder: &&Holder| {
        let now = holder.sizes.keys().max().copied().unwrap_or_default();
        holder.before.0 > 0 && now.0.saturating_mul(100) >= holder.before.0.saturating_mul(LARGER)
    };
    let larger = || facts.holders().filter(|holder| is_activation(facts, holder)).filter(rose);
    let sum_larger: u64 = larger().map(|holder| holder.bytes.0).sum();
    // In the first step, what a line asked for before was for another layer.
    let is_larger = sum_larger.saturating_mul(4) >= sum.0 && facts.has_stepped();
    let most = if is_larger { larger().next().unwrap_or(most) } else { most };
    let now = most.sizes.keys().max().copied().unwrap_or_default();
    // Steps of these sizes went well before: something else is in the way.
    let is_new = most.before.0 == 0 || most.blocks > 1 && !facts.has_stepped();
    if !is_larger && !is_new || super::one_request::twice(facts).is_some() {
        return None;
    }
    // With another setting it would have gone well.
    if facts.fits_with_setting() {
        return None;
    }
    let input = match is_larger {
        true => format!(
            ", of a larger input: this line requested up to {} in earlier steps, and {} now",
            bytes(most.before),
            bytes(now)
        ),
        false => ", the first one".to_owned(),
    };
    let offered = facts.holders().filter(|holder| is_activation(facts, holder)).find_map(|holder| {
        holder.offer(When::AtPeak).or_else(|| holder.offer(When::ForBackward).filter(|_| facts.has_stepped()))
    });
    let part = sum.0 as f64 / held.bytes.0.max(1) as f64 * 100.0;
    Some(Case {
        what: format!(
            "{} of {} in use ({part:.0} %) are activations of one step{input}; nothing grows, so the step does not fit",
            bytes(sum),
            bytes(held.bytes)
        ),
        site: called_at(&facts.site(most.site), Some(most)),
        bytes: sum,
        sure: "likely: most of the memory in use was allocated by the model in this step, and no line grows from step to step".into(),
        fix: Fix::words(
            match (is_larger, n_models(facts) > 1, offered) {
                (.., Some(offered)) => offered,
                (true, ..) => "use a smaller batch for the largest input, or limit the input size; or use activation checkpointing",
                (false, true, _) => "run a model that is not trained (a teacher) under `torch.no_grad()`; else use a smaller batch, or activation checkpointing (`torch.utils.checkpoint`)",
                (false, false, _) => "use a smaller batch (try half first), or activation checkpointing (`torch.utils.checkpoint`)",
            },
            // The step was not over: what half of it needs is not in the trace.
            "",
        ),
        verb: "oom",
    })
}

/// Lines of the program that moved a model to the device.
fn n_models(facts: &Facts<'_>) -> usize {
    let is_moved =
        |holder: &&Holder| holder.signs.has(Sign::Model) && facts.site(holder.site).contains(" in Module.");
    let mut sites: Vec<_> = facts.holders().filter(is_moved).map(|holder| holder.site).collect();
    sites.sort_unstable();
    sites.dedup();
    sites.len()
}
