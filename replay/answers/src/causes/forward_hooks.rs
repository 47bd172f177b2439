//! A hook of a module that keeps what it sees.

use super::{Case, Cause, Facts, Kind};
use crate::causes::facts::Grown;
use gputrace_analyse::held::Sign;

pub(super) const CAUSE: Cause = Cause {
    name: "tensors kept by a hook of a module",
    kind: Kind::Grew,
    needs: "what a function of the program made, called by `Module.__call__` beside `forward`, is left each time",
    against: "what the module's own `forward` makes",
    claims: Some(claims),
    find,
};

fn claims(grown: &Grown<'_>) -> bool {
    grown.has(Sign::Hook) && !grown.has(Sign::Backward)
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.growth_of(
        &CAUSE,
        "a hook keeps what it sees on the GPU: copy it to the CPU (`.detach().cpu()`), or remove the hook (`handle.remove()`)",
    )
}
