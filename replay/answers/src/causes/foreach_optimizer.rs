//! The `foreach` implementation of an optimizer works on lists of all parameters, and needs temporaries as large as these.

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::Sign;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "temporaries of the optimizer's `foreach` implementation",
    kind: Kind::Beyond,
    needs: "a request that failed, or a peak, in an optimizer's step, while blocks of `_multi_tensor_*` were held",
    against: "the optimizer's state, which stays whatever the implementation",
    claims: None,
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    // A peak is no fault.
    facts.failure?;
    let (held, most) = facts.with(|holder| holder.signs.has(Sign::Foreach))?;
    facts.is_much(held).then(|| Case {
        what: format!(
            "the optimizer's step held {} of temporaries: it works on all parameters at once (`foreach`)",
            bytes(held)
        ),
        site: facts.site(most.site),
        bytes: held,
        sure: "certain: they were held when the request failed".into(),
        fix: Fix::words(
            "pass `fused=True` to the optimizer, or `foreach=False`",
            format!("needs {} less at that moment", bytes(held)),
        ),
        verb: "oom",
    })
}
