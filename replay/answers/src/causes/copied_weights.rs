//! Saved weights that are copied to the device before a model loads them.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "saved weights copied to the GPU beside the model",
    kind: Kind::Kept,
    needs: "a failed request of a line that by the program's source moves all entries of a dict to the device, before `load_state_dict` of them in the same function",
    against: "entries that are loaded from the CPU",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let held = facts.held?;
    let line = held.failed_own.first().filter(|_| facts.is_own(error.site))?;
    let loads = facts.sources.loads_copy(line)?;
    let asked = error.requested.unwrap_or(error.bytes);
    let copied = facts.holders().filter(|holder| holder.site == error.site).map(|holder| holder.bytes.0);
    let copied = Bytes(copied.sum::<u64>().saturating_add(asked.0));
    Some(Case {
        what: format!(
            "this line copies saved weights to the GPU ({} with this request) while the model still holds its own; {} in use",
            bytes(copied),
            bytes(error.allocated)
        ),
        site: facts.site(error.site),
        bytes: copied,
        sure: "certain of the request; by the source, a model loads the copy afterwards".into(),
        fix: Fix::words(
            format!(
                "pass the weights from the CPU to `load_state_dict` ({loads}): it copies each into the parameter that the model has"
            ),
            format!("needs {} less at that moment", bytes(copied)),
        ),
        verb: "oom",
    })
}
