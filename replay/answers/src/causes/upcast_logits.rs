//! A copy in twice the width of what was just made: logits upcast to float32.

use gputrace_schemas::event::Bytes;

use super::activations_beyond_card::is_activation;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "a large result upcast to float32 (logits)",
    kind: Kind::Peak,
    needs: "at the peak, two blocks of a model's code, together two fifths of the total, of which the later one is exactly twice as large",
    against: "smaller blocks, and layers that have several of them",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let held = facts.held?;
    let is_of_step = |holder: &&Holder| {
        let is_step = is_activation(facts, holder)
            || matches!(facts.role(holder), "temporaries" | "activations of inference" | "activations");
        // Gradients of what is wide are wide, too.
        is_step && !holder.signs.has(Sign::Backward) && !holder.signs.has(Sign::Workspace)
    };
    let blocks = || {
        let step = facts.holders().filter(is_of_step);
        step.flat_map(|holder| holder.sizes.iter().map(move |(size, n)| (holder, *size, *n)))
    };
    let (wide, size, _) = blocks()
        .filter(|(_, size, n)| *n <= 2 && size.0.saturating_mul(4) >= held.bytes.0)
        .max_by_key(|(_, size, _)| *size)?;
    let (narrow, ..) = blocks().find(|(holder, half, n)| {
        half.0.checked_mul(2) == Some(size.0)
            && *n <= 2
            && holder.since <= wide.since
            && holder.site != wide.site
    })?;
    // `one_hot` makes integers of 64 bits of what was there.
    if facts.site(wide.site).contains("one_hot") {
        return None;
    }
    let both = Bytes(size.0 + size.0 / 2);
    (both.0.saturating_mul(5) >= held.bytes.0.saturating_mul(2)).then(|| Case {
        what: format!(
            "{} of the peak of {} are one result twice: {} from {}, and a copy at twice the width, {}, allocated here",
            bytes(both),
            bytes(held.bytes),
            bytes(Bytes(size.0 / 2)),
            facts.site(narrow.site),
            bytes(size)
        ),
        site: facts.site(wide.site),
        bytes: both,
        sure: "likely: the later block is exactly twice as large, as with `.float()` of a 16-bit tensor".into(),
        fix: Fix::words(
            "upcast only what you use (`logits[:, -1].float()`), compute only those logits, or use a loss that works in chunks",
            format!("the copy is {}", bytes(size)),
        ),
        verb: "report --peak",
    })
}
