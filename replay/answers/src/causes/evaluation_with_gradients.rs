//! An evaluation that runs out of memory for a graph that it does not need.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::{bytes, count};

/// Fewer blocks are no graph of a model, unless it is one that was trained before.
const LEAST_BLOCKS: u64 = 8;
/// Less memory in modules is buffers, and no layers.
const LEAST_WEIGHTS: u64 = 1 << 14;
/// The graph is this part at least of what was held: one in so many.
const LEAST: u64 = 3;

pub(super) const CAUSE: Cause = Cause {
    name: "evaluation with gradients",
    kind: Kind::Kept,
    needs: "a failed request, a third of the memory in what a model's forward pass keeps, and a function around that evaluates by its name or calls `eval()`, and begins no backward pass, as the program's source shows",
    against: "modules without parameters, `torch.no_grad`, `torch.inference_mode`, a backward pass in these functions",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.failure?;
    let held = facts.held?;
    // Without parameters, nothing has a graph.
    let of_weights = facts.with(|holder| holder.signs.has(Sign::Model)).map_or(0, |(bytes, _)| bytes.0);
    if of_weights < LEAST_WEIGHTS {
        return None;
    }
    // A backward pass that was recorded is of a library's training, if the source has none.
    let infers = |holder: &Holder| match facts.has_stepped() {
        true => None,
        false => facts.sources.only_infers(&holder.own),
    };
    let by = |holder: &Holder| facts.sources.evaluated_by(&holder.own).or_else(|| infers(holder));
    let is_kept = |holder: &Holder| {
        (holder.signs.has(Sign::Forward) || holder.signs.has(Sign::Functional))
            && !holder.signs.has(Sign::Backward)
            && !holder.signs.has(Sign::NoGrad)
            && !holder.signs.has(Sign::Workspace)
    };
    let all: Vec<&Holder> =
        facts.holders().filter(|holder| is_kept(holder) && by(holder).is_some()).collect();
    let sum = all.iter().fold(0_u64, |sum, holder| sum.saturating_add(holder.bytes.0));
    let blocks = all.iter().map(|holder| holder.blocks).sum::<u64>();
    let most = all.first()?;
    // Without a graph, most of what the model made since would be gone.
    let has_graph = most.kept_since.saturating_mul(2) >= most.worked_since;
    let is_graph = has_graph && (blocks >= LEAST_BLOCKS || facts.has_stepped());
    if !is_graph || sum.saturating_mul(LEAST) < held.bytes.0 {
        return None;
    }
    let (function, place) = by(most)?;
    let (sum, held) = (Bytes(sum), held.bytes);
    Some(Case {
        what: format!(
            "{} of {} in use then are what a model keeps for a backward pass ({} blocks), and `{function}` begins none",
            bytes(sum),
            bytes(held),
            count(blocks)
        ),
        site: super::facts::called_at(&facts.site(most.site), Some(most)),
        bytes: sum,
        sure: "likely: by the program's source, neither this function nor what it called begins a backward pass or turns gradients off".into(),
        fix: Fix::words(
            format!("decorate `{function}` ({place}) with `@torch.no_grad()`, or call the model there under `torch.inference_mode()`"),
            format!("needs up to {} less at that moment", bytes(sum)),
        ),
        verb: "oom",
    })
}
