//! Tensors that a caught exception keeps, by its traceback, while the program tries again.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use crate::caught::CaughtOom;
use gputrace_trace::words::{bytes, time};

pub(super) const CAUSE: Cause = Cause {
    name: "tensors kept by a caught exception",
    kind: Kind::Kept,
    needs: "an out-of-memory error that was caught, and blocks of its attempt that were still there at the next one",
    against: "nothing of the attempt left",
    claims: None,
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(ordinal, _) = facts.failure? else { return None };
    let held = |kept: &&CaughtOom| kept.device == ordinal && kept.kept_bytes().0 > 0;
    let caught = facts.found.caught.iter().rev().find(held)?;
    let kept = bytes(caught.kept_bytes());
    Some(Case {
        what: format!(
            "an attempt that had failed at {}, and was caught, still held {kept}",
            time(facts.story.since_start(caught.time))
        ),
        site: caught.went_on.clone(),
        bytes: caught.kept_bytes(),
        sure: "certain: what the attempt had allocated was still there".into(),
        fix: Fix::words(
            "leave the `except` block before trying again",
            format!("gives back {kept}, as recorded"),
        ),
        verb: "oom",
    })
}
