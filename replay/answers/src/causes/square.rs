//! A result that grows with the square of what it is made of: a broadcast, or all pairs.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_trace::words::{bytes, count};

/// The request is this part at least of what would have been in use with it: one in so many.
const LEAST: u64 = 8;
/// Scores of attention have a cause of their own.
const ATTENTION: [&str; 3] = ["attention", "attn", "scaled_dot_product"];

pub(super) const CAUSE: Cause = Cause {
    name: "a broadcast or pairwise result, quadratic in its input",
    kind: Kind::Peak,
    needs: "a failed request that is larger than that of its line in an earlier turn by the square of what at least three other lines' are, which are most of those that differ",
    against: "requests that all grow alike, as with a larger batch; attention",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(ordinal, error) = facts.failure? else { return None };
    let asked = error.requested.unwrap_or(error.bytes);
    let usual = facts.found.usual.get(&ordinal)?;
    let square = usual.square?;
    let site = facts.site(error.site);
    let name = site.to_ascii_lowercase();
    let is_much = asked.0.saturating_mul(LEAST) >= error.allocated.0.saturating_add(asked.0);
    if !is_much || ATTENTION.iter().any(|word| name.contains(word)) {
        return None;
    }
    // What it is made of may be of that size, too.
    let of_size = || facts.holders().filter(|holder| holder.sizes.contains_key(&asked));
    let alike: u64 = of_size().filter_map(|holder| holder.sizes.get(&asked)).sum();
    let beside = of_size().max_by_key(|holder| holder.since).map_or_else(String::new, |last| {
        format!("; {} of that size in use, the last allocated at {}", count(alike), facts.site(last.site))
    });
    Some(Case {
        what: format!(
            "this request grows with the square of its input: it is {} times what the line requested in an earlier turn ({}), while {} other lines request {} times as much as then{beside}",
            count((square.times * square.times).round() as u64),
            bytes(usual.median),
            count(square.lines),
            tenths(square.times),
        ),
        site,
        bytes: Bytes(asked.0.saturating_mul(alike.saturating_add(1))),
        sure: "certain of the sizes; whether the line wants all pairs is not recorded".into(),
        fix: Fix::words(
            "check the shapes: `(N,)` with `(N, 1)` broadcasts to `(N, N)` (`squeeze(-1)`, `view_as`); if all pairs are wanted, work in chunks",
            "",
        ),
        verb: "oom",
    })
}

/// `16` and `2.5`.
fn tenths(times: f64) -> String {
    let text = format!("{times:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}
