//! `backward(create_graph=True)`: each parameter refers to its gradient, and the gradient's graph to the parameter.

use super::{Case, Cause, Facts, Kind};
use crate::causes::facts::Grown;
use gputrace_analyse::held::Sign;
use gputrace_trace::ledger::Account;

pub(super) const CAUSE: Cause = Cause {
    name: "gradients kept with their graph (`create_graph=True`)",
    kind: Kind::Grew,
    needs: "what is made in the backward pass is left in several steps",
    against: "gradients that are made once, or anew in each step",
    claims: Some(claims),
    find,
};

fn claims(grown: &Grown<'_>) -> bool {
    grown.account() == Some(Account::Blocks) && grown.has(Sign::Backward)
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.growth_of(
        &CAUSE,
        "what the backward pass makes is kept each time: with `backward(create_graph=True)` use `torch.autograd.grad`, or set `p.grad = None` \
         after the step; else drop what refers to the gradients",
    )
}
