//! Models or adapters that are loaded one after the other, and of which the old ones stay.

use super::{Case, Cause, Facts, Kind};
use crate::causes::facts::Grown;
use gputrace_analyse::held::Sign;

pub(super) const CAUSE: Cause = Cause {
    name: "models loaded again, and the old ones kept",
    kind: Kind::Grew,
    needs: "parameters that are put on the GPU in several rounds, with work in between, and stay",
    against: "parameters that are made in one go",
    claims: Some(claims),
    find,
};

fn claims(grown: &Grown<'_>) -> bool {
    !grown.has(Sign::Backward) && (grown.has(Sign::Model) || grown.has(Sign::Load))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.growth_of(
        &CAUSE,
        "something refers to the model before when the next is loaded: `del` it, and what holds it (callbacks, optimizers, closures), or \
         move it with `.cpu()`, before that line",
    )
}
