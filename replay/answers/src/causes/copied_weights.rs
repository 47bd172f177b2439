//! Copies of the weights that are kept: the best of each epoch, an average, `deepcopy` of a model.

use super::{Case, Cause, Facts, Kind};
use crate::causes::facts::Grown;
use gputrace_analyse::held::Sign;

pub(super) const CAUSE: Cause = Cause {
    name: "copies of the weights kept",
    kind: Kind::Grew,
    needs: "what `copy.deepcopy` made, or blocks of the sizes of the parameters, is left each time",
    against: "parameters themselves, gradients, and the optimizer's state",
    claims: Some(claims),
    find,
};

fn claims(grown: &Grown<'_>) -> bool {
    let is_made =
        [Sign::Backward, Sign::Optimizer, Sign::Forward, Sign::Load].into_iter().any(|sign| grown.has(sign));
    !is_made && (grown.has(Sign::Copy) || grown.is_of_weights)
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.growth_of(
        &CAUSE,
        "keep only the best copy of the weights, on the CPU (`v.cpu()` of each) or on disk: `torch.save(model.state_dict(), path)`",
    )
}
