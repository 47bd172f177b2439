//! A checkpoint that was loaded onto the GPU, and is still there beside the model that was made from it.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::bytes;

/// So much of what was loaded has a twin at least: one in so many. A checkpoint has the optimizer's state, too.
const TWINS: u64 = 4;

pub(super) const CAUSE: Cause = Cause {
    name: "checkpoint loaded onto the GPU and kept",
    kind: Kind::Kept,
    needs: "blocks that `torch.load` made, held at the moment, and parameters of the same sizes",
    against: "no parameters of these sizes beside it: the model uses what was loaded",
    claims: None,
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let is_loaded = |holder: &Holder| holder.signs.has(Sign::Load);
    let (loaded, most) = facts.with(is_loaded)?;
    // Gradients and the optimizer's state have the sizes of parameters, too: only those are twins.
    let is_parameter = |holder: &Holder| {
        !is_loaded(holder)
            && ![Sign::Backward, Sign::Optimizer, Sign::Forward]
                .into_iter()
                .any(|sign| holder.signs.has(sign))
            && (holder.signs.has(Sign::Model) || matches!(facts.role(holder), "parameters" | "weights"))
    };
    let sizes = |is_wanted: &dyn Fn(&Holder) -> bool| {
        let mut sizes: BTreeMap<Bytes, u64> = BTreeMap::new();
        for holder in facts.holders().filter(|holder| is_wanted(holder)) {
            holder.sizes.iter().for_each(|(size, n)| *sizes.entry(*size).or_default() += n);
        }
        sizes
    };
    let (of_load, others) = (sizes(&is_loaded), sizes(&is_parameter));
    let twice = of_load.iter().map(|(size, n)| size.0 * n.min(others.get(size).unwrap_or(&0)));
    let twice: u64 = twice.sum();
    let is_twice = twice.saturating_mul(TWINS) >= loaded.0;
    let twice = Bytes(twice);
    (is_twice && facts.is_much(twice)).then(|| Case {
        what: format!(
            "{} are there twice: `torch.load` put {} on the GPU, and that is still held beside the model that was made from it",
            bytes(twice),
            bytes(loaded)
        ),
        site: facts.site(most.site),
        bytes: twice,
        sure: format!("likely: {} of it have parameters of the same sizes beside them", bytes(twice)),
        fix: Fix::words(
            "`torch.load(..., map_location=\"cpu\")` there, or `del` the checkpoint once it is loaded",
            format!("gives back {} at least", bytes(twice)),
        ),
        verb: "report --peak",
    })
}
