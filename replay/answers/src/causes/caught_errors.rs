//! Tensors that a caught exception keeps, by its traceback, while the program tries again.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use crate::caught::CaughtOom;
use gputrace_schemas::event::Bytes;
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, time};

pub(super) const CAUSE: Cause = Cause {
    name: "tensors kept by a caught exception",
    kind: Kind::Kept,
    needs: "an out-of-memory error that was caught, and blocks of its attempt that were still there at the next one",
    against: "nothing of the attempt left",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(ordinal, _) = facts.failure? else { return None };
    // Of several attempts, one inside of the other, the one that holds most until now.
    let is_there =
        |kept: &&CaughtOom| kept.device == ordinal && kept.is_user_code && still_held(facts, kept).0 > 0;
    let caught = facts.found.caught.iter().filter(is_there).max_by_key(|kept| still_held(facts, kept))?;
    let held = still_held(facts, caught);
    let kept = bytes(held);
    Some(Case {
        what: format!(
            "an attempt that had failed at {}, and was caught, still held {kept}",
            time(facts.story.since_start(caught.time))
        ),
        site: caught.went_on.clone(),
        bytes: held,
        sure: "certain: what the attempt had allocated was still there".into(),
        fix: Fix::words(
            "leave the `except` block before trying again",
            format!("gives back {kept}, as recorded"),
        ),
        verb: "oom",
    })
}

/// What an attempt had kept when memory ran out again, as far as its lines still hold as much at the failure.
fn still_held(facts: &Facts<'_>, kept: &CaughtOom) -> Bytes {
    let now = |site: SiteId| {
        facts.holders().filter(|holder| holder.site == site).map(|holder| holder.bytes.0).sum::<u64>()
    };
    Bytes(kept.kept.iter().map(|(site, held)| held.bytes.0.min(now(*site))).sum())
}
