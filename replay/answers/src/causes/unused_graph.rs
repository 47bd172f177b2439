//! A model that is called with gradients, and of whose result only detached values are used.

use std::collections::BTreeSet;

use gputrace_schemas::event::Bytes;

use super::facts::called_at;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::{bytes, count};

/// The graph is this part at least of what was held: one in so many.
const LEAST: u64 = 4;
/// A graph keeps this part at least of what its model made since: one in so many.
const KEPT: u64 = 3;
/// Fewer blocks are no graph of a model.
const LEAST_BLOCKS: u64 = 4;

pub(super) const CAUSE: Cause = Cause {
    name: "a graph that nothing uses",
    kind: Kind::Peak,
    needs: "a quarter of the peak in what a model's forward pass keeps, in a program that trains; by its source, a line calls the model with gradients and uses only detached values of the result",
    against: "`torch.no_grad`, a result that is returned or kept, and a backward pass that begins with it",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let held = facts.held.filter(|_| facts.failure.is_none() && facts.has_stepped())?;
    let is_kept = |holder: &&Holder| {
        let is_other = [Sign::Backward, Sign::NoGrad, Sign::Workspace, Sign::Model, Sign::Optimizer];
        (holder.signs.has(Sign::Forward) || holder.signs.has(Sign::Functional))
            && !is_other.into_iter().any(|sign| holder.signs.has(sign))
    };
    let unused = facts.holders().filter(is_kept);
    let unused = unused.filter_map(|holder| Some((holder, facts.sources.unused_graph(&holder.own)?)));
    let unused: Vec<(&Holder, String)> = unused.collect();
    let (most, _) = unused.first()?;
    let sum = unused.iter().fold(0_u64, |sum, (holder, _)| sum.saturating_add(holder.bytes.0));
    let blocks: u64 = unused.iter().map(|(holder, _)| holder.blocks).sum();
    // Without a graph, most of what the model made since would be gone.
    let has_graph = most.kept_since.saturating_mul(KEPT) >= most.worked_since && blocks >= LEAST_BLOCKS;
    if !has_graph || sum.saturating_mul(LEAST) < held.bytes.0 || !facts.growing().is_empty() {
        return None;
    }
    let calls: BTreeSet<&str> = unused.iter().map(|(_, call)| call.as_str()).collect();
    let calls = calls.into_iter().collect::<Vec<_>>().join(", ");
    Some(Case {
        what: format!(
            "{} of the peak of {} were allocated in calls of a model at {calls} ({} blocks), and nothing uses the graph of these calls",
            bytes(Bytes(sum)),
            bytes(held.bytes),
            count(blocks)
        ),
        site: called_at(&facts.site(most.site), Some(most)),
        bytes: Bytes(sum),
        sure: "likely: by the source, only detached values and numbers of their results are used".into(),
        fix: Fix::words(format!("call the model at {calls} under `torch.no_grad()`"), ""),
        verb: "report --peak",
    })
}
