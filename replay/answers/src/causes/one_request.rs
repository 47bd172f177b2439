//! One request that alone is more than the card holds, or most of it.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::Holder;
use gputrace_trace::words::{bytes, count};

/// A tensor is repeated at most so many times: larger multiples are by chance.
const MOST_TIMES: u64 = 256;

pub(super) const CAUSE: Cause = Cause {
    name: "one request larger than the card",
    kind: Kind::Beyond,
    needs: "a request that failed, of more than half of the device, and that with what was in use is more than the device",
    against: "more in use than was asked for, or enough on the device for both",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let failure = facts.failure?;
    let asked = failure.asked()?;
    let known = facts.story.device(failure.device()).map(|device| device.total).filter(|total| total.0 > 0);
    let (site, total, used) = match failure {
        Failure::Torch(_, error) => {
            (error.site, error.device.map(|(_, total)| total).or(known), error.allocated)
        }
        Failure::Jax(_, error) => (facts.jax_line(error), known, Bytes(0)),
        Failure::Refused(refused) => (refused.site, known, refused.tracked),
    };
    let total = total?;
    // What JAX held is not in its error.
    let is_beyond = asked.0.saturating_add(used.0) > total.0;
    if asked.0.saturating_mul(2) <= total.0 || used >= asked || !(is_beyond || used == Bytes(0)) {
        return None;
    }
    let sure = match is_beyond {
        true => "certain: the request and what was in use are more than the device",
        false => "likely: the request is most of the device; how much of the rest was in use is not known",
    };
    let than = if asked >= total {
        format!("the card has {} in all, and no setting makes it fit", bytes(total))
    } else {
        format!("{} of the card's {} were in use", bytes(used), bytes(total))
    };
    let (times, fix) = match multiple(facts, asked) {
        Some((times, holder)) => (
            format!(
                "; it is exactly {} times the {} that {} made: likely a `repeat`, or an `expand` made dense",
                count(times),
                bytes(Bytes(asked.0 / times)),
                facts.site(holder.site)
            ),
            "keep the smaller tensor and broadcast it: `unsqueeze`/`expand` instead of `repeat`, and no `.contiguous()` or `reshape` of it",
        ),
        None => (
            String::new(),
            "build it in pieces, or not at all: reduce without the dense tensor (`scatter_reduce`, `index_add`), or a smaller size there",
        ),
    };
    Some(Case {
        what: format!("this one request is too large: {than}{times}"),
        site: facts.site(site),
        // Nothing else of the process matters.
        bytes: asked,
        sure: sure.into(),
        fix: Fix::words(fix, ""),
        verb: "oom",
    })
}

/// A block that the request is a whole number of times of: the largest.
fn multiple<'a>(facts: &Facts<'a>, asked: Bytes) -> Option<(u64, &'a Holder)> {
    let sizes = |holder: &'a Holder| holder.sizes.keys().map(move |size| (*size, holder));
    let blocks = facts.holders().flat_map(sizes).filter(|(size, _)| size.0 > 0);
    let whole = blocks
        .filter(|(size, _)| asked.0.is_multiple_of(size.0) && (2..=MOST_TIMES).contains(&(asked.0 / size.0)));
    let (size, holder) = whole.max_by_key(|(size, holder)| (*size, holder.since))?;
    Some((asked.0 / size.0, holder))
}
