//! One input that is far larger than those before it.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_trace::words::{bytes, count};

/// What a line requests usually is known from so many turns on.
const LEAST_TURNS: u64 = 8;
/// So many times what is usual.
const TIMES: u64 = 3;
/// And so much more than ever before: three halves.
const BEYOND_LARGEST: (u64, u64) = (3, 2);
/// The request is this part at least of what would have been in use with it: one in so many.
const LEAST: u64 = 8;

pub(super) const CAUSE: Cause = Cause {
    name: "an unusually large batch",
    kind: Kind::Peak,
    needs: "a failed request of three times what its line requested at most in each of eight earlier turns (steps, or calls of the model), as the median",
    against: "sizes that rise from turn to turn, and a first turn",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(ordinal, error) = facts.failure? else { return None };
    let asked = error.requested.unwrap_or(error.bytes);
    let usual = facts.found.usual.get(&ordinal).filter(|usual| usual.turns >= LEAST_TURNS)?;
    let is_odd = usual.median.0 > 0
        && asked.0 >= usual.median.0.saturating_mul(TIMES)
        && asked.0.saturating_mul(BEYOND_LARGEST.1) >= usual.largest.0.saturating_mul(BEYOND_LARGEST.0);
    let is_much = asked.0.saturating_mul(LEAST) >= error.allocated.0.saturating_add(asked.0);
    (is_odd && is_much).then(|| Case {
        what: format!(
            "this batch is the odd one: the line below requests {} times what it usually does ({}; at most {} in {} earlier turns), with {} in use",
            count(asked.0 / usual.median.0),
            bytes(usual.median),
            bytes(usual.largest),
            count(usual.turns),
            bytes(error.allocated)
        ),
        site: facts.site(error.site),
        bytes: Bytes(asked.0 - usual.median.0),
        sure: "certain of the sizes; what made this input so large is not recorded".into(),
        fix: Fix::words(
            "limit the largest input (crop it, cap boxes or tokens, sort by length), or work on such a batch in pieces, item by item",
            "",
        ),
        verb: "oom",
    })
}
