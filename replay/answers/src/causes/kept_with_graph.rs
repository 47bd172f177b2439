//! Outputs or losses that are kept with the graph that made them: what the layers saved for the backward pass stays, too.

use super::{Case, Cause, Facts, Kind};
use crate::causes::facts::Grown;
use gputrace_analyse::held::Sign;
use gputrace_trace::ledger::Account;

pub(super) const CAUSE: Cause = Cause {
    name: "outputs or losses kept with their graph",
    kind: Kind::Grew,
    needs: "what is made inside of a model, or by a library's function beside it, is left at each call",
    against: "a hook, or a line of the program's own that makes it",
    claims: Some(claims),
    find,
};

fn claims(grown: &Grown<'_>) -> bool {
    let is_computed = grown.has(Sign::Forward) || grown.has(Sign::Functional) || grown.n_in_model > 0;
    grown.account() == Some(Account::Blocks)
        && is_computed
        && ![Sign::Backward, Sign::Hook, Sign::Model, Sign::Load, Sign::Workspace]
            .into_iter()
            .any(|sign| grown.has(sign))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.growth_of(
        &CAUSE,
        "what is made there is never let go: keep `x.item()` or `x.detach().cpu()`, or evaluate under `torch.inference_mode()`",
    )
}
