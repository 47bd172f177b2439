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
/// What the turn requested is this part at least of what would have been in use with it: one in so many.
const LEAST: u64 = 8;

pub(super) const CAUSE: Cause = Cause {
    name: "an unusually large batch",
    kind: Kind::Peak,
    needs: "a failed request of three times what its line requested at most in each of eight earlier turns (steps, or calls of the model), as the median",
    against: "sizes that rise from turn to turn, a first turn, and a result that grows with the square of its input",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(ordinal, error) = facts.failure? else { return None };
    let asked = error.requested.unwrap_or(error.bytes);
    let usual = facts.found.usual.get(&ordinal).filter(|usual| usual.turns >= LEAST_TURNS)?;
    let is_odd = usual.median.0 > 0
        && asked.0 >= usual.median.0.saturating_mul(TIMES)
        && asked.0.saturating_mul(BEYOND_LARGEST.1) >= usual.largest.0.saturating_mul(BEYOND_LARGEST.0);
    // The line may need little of what such a batch does.
    let all = error.allocated.0.saturating_add(asked.0);
    let is_of_line = asked.0.saturating_mul(LEAST) >= all;
    let of_turn = asked.0.saturating_add(if is_of_line { 0 } else { usual.held.0 });
    let is_much = of_turn.saturating_mul(LEAST) >= all;
    let usually = (u128::from(of_turn) * u128::from(usual.median.0) / u128::from(asked.0.max(1))) as u64;
    let held = match is_of_line {
        true => String::new(),
        false => format!(", {} of it requested in this turn", bytes(usual.held)),
    };
    (is_odd && is_much && usual.square.is_none()).then(|| Case {
        what: format!(
            "the line below requests {} times what it usually does ({}; at most {} in {} earlier turns), with {} in use{held}",
            count(asked.0 / usual.median.0),
            bytes(usual.median),
            bytes(usual.largest),
            count(usual.turns),
            bytes(error.allocated)
        ),
        site: facts.site(error.site),
        bytes: Bytes(of_turn.saturating_sub(usually)),
        sure: "certain of the sizes; what made this input so large is not recorded".into(),
        fix: Fix::words(
            "make this input smaller: fewer items in the batch of this call, a crop, a cap on boxes or tokens (padded: items x the longest), sorting by length; or work on it in pieces",
            "",
        ),
        verb: "oom",
    })
}
