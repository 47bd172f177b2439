//! The buckets of `DistributedDataParallel`, beside the gradients.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::Sign;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "DDP's buckets beside the gradients",
    kind: Kind::Peak,
    needs: "blocks that `DistributedDataParallel` made itself, as large as the gradients that are held beside them, a twelfth of all at least",
    against: "gradients that are views of the buckets",
    claims: None,
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let held = facts.held?;
    let buckets = |holder: &&gputrace_analyse::held::Holder| holder.signs.has(Sign::Buckets);
    let sum = Bytes(facts.holders().filter(buckets).map(|holder| holder.bytes.0).sum());
    let gradients = held.sum(|holder| holder.signs.has(Sign::Backward) && facts.role(holder) == "gradients");
    let twice = gradients.min(sum);
    if twice.0.saturating_mul(12) < held.bytes.0 || twice.0.saturating_mul(2) < gradients.0 {
        return None;
    }
    // The line that wrapped the model, else the one that called it.
    let wrapped = facts.holders().filter(buckets).min_by_key(|holder| holder.since)?;
    Some(Case {
        what: format!(
            "{} are buckets in which DistributedDataParallel reduces gradients, beside {} of gradients: these are there twice",
            bytes(sum),
            bytes(gradients)
        ),
        site: facts.site(wrapped.site),
        bytes: twice,
        sure:
            "certain: DistributedDataParallel's own code made them, and the gradients are blocks of their own"
                .into(),
        fix: Fix::words(
            "`DistributedDataParallel(..., gradient_as_bucket_view=True)`",
            format!("saves about {}", bytes(twice)),
        ),
        verb: "report --peak",
    })
}
