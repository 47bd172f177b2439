//! A checkpoint that was loaded onto the GPU, and is still there beside the model that was made from it.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::Sign;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "checkpoint loaded onto the GPU and kept",
    kind: Kind::Kept,
    needs: "blocks that `torch.load` made, held at the moment, and others of the same sizes",
    against: "no second block of these sizes: the model uses what was loaded",
    claims: None,
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let is_loaded = |holder: &gputrace_analyse::held::Holder| holder.signs.has(Sign::Load);
    let (loaded, most) = facts.with(is_loaded)?;
    let sizes = |is_wanted: bool| {
        let mut sizes: BTreeMap<Bytes, u64> = BTreeMap::new();
        for holder in facts.holders().filter(|holder| is_loaded(holder) == is_wanted) {
            holder.sizes.iter().for_each(|(size, n)| *sizes.entry(*size).or_default() += n);
        }
        sizes
    };
    let (of_load, others) = (sizes(true), sizes(false));
    let twice = of_load.iter().map(|(size, n)| size.0 * n.min(others.get(size).unwrap_or(&0)));
    let twice: u64 = twice.sum();
    let is_twice = twice.saturating_mul(2) >= loaded.0;
    (is_twice && facts.is_much(loaded)).then(|| Case {
        what: format!(
            "{} that `torch.load` put on the GPU are still held, beside tensors of the same sizes: the checkpoint, and what was made of it",
            bytes(loaded)
        ),
        site: facts.site(most.site),
        bytes: loaded,
        sure: format!("likely: {} of it have a twin of the same size", bytes(Bytes(twice))),
        fix: Fix::words(
            "`torch.load(..., map_location=\"cpu\")` there, or `del` the checkpoint once it is loaded",
            format!("gives back {}", bytes(loaded)),
        ),
        verb: "report --peak",
    })
}
