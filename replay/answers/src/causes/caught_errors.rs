//! Tensors that a caught exception keeps, by its traceback, while the program tries again.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use crate::caught::CaughtOom;
use crate::code::How;
use gputrace_schemas::event::Bytes;
use gputrace_trace::words::{bytes, count, time};

pub(super) const CAUSE: Cause = Cause {
    name: "tensors kept by a caught exception",
    kind: Kind::Kept,
    needs: "an out-of-memory error that was caught, and blocks of the failed attempt that were still allocated at the next error",
    against: "a failed attempt of which nothing is left",
    find,
};

/// What is kept explains a failed request that is at most so many times as large.
const LEAST: u64 = 16;

fn find(facts: &Facts<'_>) -> Option<Case> {
    let all = attempts(facts);
    let most = all.iter().copied().max_by_key(|it| it.still.bytes)?;
    let held = Bytes(all.iter().fold(0, |sum: u64, it| sum.saturating_add(it.still.bytes.0)));
    let kept = bytes(held);
    let when = time(facts.story.since_start(most.time));
    let what = match all.len() {
        1 => format!("an attempt failed at {when}, its error was caught, and it still held {kept}"),
        n => {
            let is_most = most.still.bytes.0.saturating_mul(3) >= held.0.saturating_mul(2);
            let most =
                if is_most { format!(", most of it the one that failed at {when}") } else { String::new() };
            format!(
                "{} attempts failed, their errors were caught, and they still held {kept}{most}",
                count(n as u64)
            )
        }
    };
    // Outside of the block, only a reference of the program's own keeps an error.
    let (site, fix) = match &most.tried_again_at {
        Some(line) if !line.is_empty() => (
            line.clone(),
            "something keeps the error after its `except` block: store its text (`str(error)`) instead, or call `error.with_traceback(None)`",
        ),
        Some(_) | None => (
            most.went_on.clone(),
            "leave the `except` block before you try again, and keep no more of the error than its text (`str(error)`)",
        ),
    };
    // What keeps the error keeps what its frames had.
    let keeper = facts.holders().filter_map(|it| Some((it, facts.keeper(it)?)));
    let keeper = keeper.into_iter().find(|(_, keeper)| keeper.how == How::Exception);
    let (site, fix) = match keeper {
        Some((holder, keeper)) => {
            (format!("{}{}", facts.site(holder.site), keeper.behind()), keeper.instead(false))
        }
        None => (site, fix.to_owned()),
    };
    Some(Case {
        what,
        site,
        bytes: held,
        sure: match most.tried_again_at {
            // A loop that goes on looks the same: what its earlier turns keep may be counted, too.
            Some(_) => "likely: what the failed calls allocated was still there when the program tried again",
            None => "certain: the blocks of that attempt were still allocated",
        }
        .into(),
        fix: Fix::words(fix, ""),
        verb: "oom",
    })
}

/// Those that still held something at the failure.
fn attempts<'a>(facts: &Facts<'a>) -> Vec<&'a CaughtOom> {
    let Some(Failure::Torch(ordinal, error)) = facts.failure else { return vec![] };
    // A workspace that was made meanwhile does not explain that so much more could not be had.
    let least = error.requested.unwrap_or(error.bytes).0 / LEAST;
    let is_there =
        |kept: &&CaughtOom| kept.device == ordinal && kept.is_user_code && kept.still.bytes.0 > least;
    facts.found.caught.iter().filter(is_there).collect()
}

/// What the largest of them held: about the most that one more holds until it fails.
pub(super) fn largest(facts: &Facts<'_>) -> Bytes {
    attempts(facts).iter().map(|it| it.still.bytes).max().unwrap_or_default()
}
