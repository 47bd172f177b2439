//! Outputs of JAX's functions that the caller keeps.

use super::{Case, Cause, Facts, Kind};
use crate::causes::facts::Grown;
use gputrace_trace::ledger::Account;

pub(super) const CAUSE: Cause = Cause {
    name: "outputs of JAX kept by the caller",
    kind: Kind::Grew,
    needs: "buffers of JAX that one line makes are left each time",
    against: "buffers that are donated or deleted",
    claims: Some(claims),
    find,
};

fn claims(grown: &Grown<'_>) -> bool {
    grown.account() == Some(Account::Buffers)
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    facts.growth_of(
        &CAUSE,
        "the caller keeps each result on the GPU: keep `float(x)` or `jax.device_get(x)`, or donate the old one (`donate_argnums`)",
    )
}
