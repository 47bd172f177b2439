//! A model in float64: twice the memory of float32, of all that it computes.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "a model in float64",
    kind: Kind::Spare,
    needs: "weights that `Module.double` made, still held, while a model's code holds most of the memory",
    against: "weights that were converted back",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let held = facts.held?;
    let (_, converted) = facts.with(|holder| holder.signs.has(Sign::Double))?;
    let is_of_model = |holder: &Holder| {
        [Sign::Forward, Sign::Functional, Sign::Backward, Sign::Optimizer, Sign::Double]
            .into_iter()
            .any(|sign| holder.signs.has(sign))
            && !holder.signs.has(Sign::Workspace)
    };
    let all = held.sum(is_of_model);
    let half = Bytes(all.0 / 2);
    (all.0.saturating_mul(2) >= held.bytes.0).then(|| Case {
        what: format!(
            "{} of {} in use belong to a model whose weights are float64 (`Module.double`): float32 takes half",
            bytes(all),
            bytes(held.bytes)
        ),
        site: facts.site(converted.site),
        bytes: half,
        sure: "certain that `Module.double` made the weights; that the model computes in their type is likely".into(),
        fix: Fix::words(
            "use float32: leave out `.double()`, and convert the data (`torch.from_numpy(x).float()`; NumPy's default is float64)",
            format!("needs up to {} less at that moment", bytes(half)),
        ),
        verb: if facts.failure.is_some() { "oom" } else { "report --peak" },
    })
}
