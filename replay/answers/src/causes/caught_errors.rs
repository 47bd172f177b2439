//! Tensors that a caught exception keeps, by its traceback, while the program tries again.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use crate::caught::CaughtOom;
use gputrace_schemas::event::Bytes;
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, time};

pub(super) const CAUSE: Cause = Cause {
    name: "tensors kept by a caught exception",
    kind: Kind::Kept,
    needs: "an out-of-memory error that was caught, and blocks of the failed attempt that were still allocated at the next error",
    against: "a failed attempt of which nothing is left",
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
            "an attempt failed at {}, its error was caught, and it still held {kept}",
            time(facts.story.since_start(caught.time))
        ),
        site: caught.went_on.clone(),
        bytes: held,
        sure: "certain: the blocks of that attempt were still allocated".into(),
        fix: Fix::words(
            "leave the `except` block before you try again, and keep no more of the error than its text (`str(error)`)",
            "",
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
