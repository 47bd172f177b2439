//! Data of the program's own that stay on the GPU: a dataset, a replay buffer, a table.

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_analyse::piles::Course;
use gputrace_schemas::event::Bytes;
use gputrace_trace::words::{bytes, count};

/// A few large tensors.
const MOST_BLOCKS: u64 = 64;

pub(super) const CAUSE: Cause = Cause {
    name: "data kept on the GPU",
    kind: Kind::Beyond,
    needs: "a request that failed while tensors that lines of the program itself made, outside of any model, were two fifths of what was held",
    against: "growth, weights, and what a model makes",
    claims: None,
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.failure?;
    let held = facts.held?;
    let is_data = |holder: &Holder| {
        let is_other = [
            Sign::Forward,
            Sign::Backward,
            Sign::Optimizer,
            Sign::Model,
            Sign::Load,
            Sign::Copy,
            Sign::Workspace,
        ]
        .into_iter()
        .any(|sign| holder.signs.has(sign));
        holder.signs.has(Sign::Own)
            && !is_other
            && holder.blocks <= MOST_BLOCKS
            && facts.role(holder) != "KV cache"
    };
    let most = facts.holders().find(|holder| is_data(holder))?;
    let all = Bytes(
        facts
            .holders()
            .filter(|holder| holder.site == most.site && is_data(holder))
            .map(|it| it.bytes.0)
            .sum(),
    );
    // What was taken in one go has a cause of its own.
    let is_pile = held.piles.iter().any(|pile| pile.site == most.site && pile.course == Course::AtOnce);
    let total = facts.story.device(held.device).map_or(0, |device| device.total.0);
    let is_much = !is_pile && all.0.saturating_mul(5) >= total;
    (is_much && facts.growing().is_empty() && all.0.saturating_mul(5) >= held.bytes.0.saturating_mul(2)).then(|| Case {
        what: format!(
            "{} of {} in use are tensors that this line of the program made itself ({} blocks) and that stay",
            bytes(all),
            bytes(held.bytes),
            count(most.blocks)
        ),
        site: facts.site(most.site),
        bytes: all,
        sure: "certain that they are held; that they are data is a guess from where they were made".into(),
        fix: Fix::words(
            "keep them on the CPU, and move what a step needs (`batch.to(\"cuda\", non_blocking=True)`), or make them smaller (a smaller type, \
             fewer)",
            format!("gives back up to {}", bytes(all)),
        ),
        verb: "oom",
    })
}
