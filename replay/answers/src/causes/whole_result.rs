//! Buffers for a whole result, which a loop fills part by part: stitched volumes, and the maps that count overlaps.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::{bytes, count};

/// A loop runs the model for so many blocks at least.
const LEAST_WORK: u64 = 8;
/// More buffers of one size are a list of results.
const MOST_BUFFERS: u64 = 8;
/// They are worth a word from this part of what was held on: two fifths.
const MUCH: (u64, u64) = (2, 5);

pub(super) const CAUSE: Cause = Cause {
    name: "full-size buffers that a loop fills part by part",
    kind: Kind::Peak,
    needs: "a failed request of a function that itself holds two buffers of equal size, or requests as much again as one, while a model has run for parts since they were allocated",
    against: "buffers that a model allocates, weights, and buffers that the program keeps from call to call",
    find,
};

fn is_buffer(facts: &Facts<'_>, holder: &Holder) -> bool {
    let signs = [
        Sign::Forward,
        Sign::Functional,
        Sign::Backward,
        Sign::Optimizer,
        Sign::Model,
        Sign::Load,
        Sign::Copy,
        Sign::Workspace,
    ];
    let is_lasting =
        matches!(facts.role(holder), "parameters" | "gradients" | "optimizer state" | "KV cache" | "weights");
    holder.signs.has(Sign::Own)
        && !is_lasting
        && !signs.into_iter().any(|sign| holder.signs.has(sign))
        && holder.worked_since >= LEAST_WORK
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let held = facts.held?;
    let function = |site| {
        let site = facts.story.ledger.sites.site(site)?;
        Some((site.function.clone(), site.file.clone()))
    };
    let own = function(error.site)?;
    let asked = error.requested.unwrap_or(error.bytes);
    let growing = facts.growing();
    let is_growing =
        |holder: &Holder| growing.iter().any(|it| it.place.is_some_and(|place| place.site == holder.site));
    let mut sizes: BTreeMap<Bytes, (u64, &Holder)> = BTreeMap::new();
    for holder in facts.holders().filter(|holder| is_buffer(facts, holder) && !is_growing(holder)) {
        if function(holder.site).as_ref() == Some(&own) {
            for (size, n) in &holder.sizes {
                sizes.entry(*size).or_insert((0, holder)).0 += n;
            }
        }
    }
    let (size, (n, first)) = sizes.into_iter().next_back()?;
    // Before the first backward pass, as many as the model has layers are what these left.
    if held.is_one_pass(first, n) && !facts.has_stepped() {
        return None;
    }
    // A script keeps its buffers from call to call.
    let is_enough = n >= 2 && own.0 != "<module>" || size == asked;
    let sum = Bytes(size.0.saturating_mul(n));
    let is_much = sum.0.saturating_mul(MUCH.1) >= held.bytes.0.saturating_mul(MUCH.0);
    let more = match asked == size {
        true => format!(", and the line below requests {} more", bytes(asked)),
        false => format!("; the line below requests {}", bytes(asked)),
    };
    (is_enough && is_much && n <= MOST_BUFFERS).then(|| Case {
        what: format!(
            "{} of {} in use are {} of {} for the whole result, allocated at {} and filled part by part by a loop that runs the model{more}",
            bytes(sum),
            bytes(held.bytes),
            if n == 1 { "a buffer".to_owned() } else { format!("{} buffers", count(n)) },
            bytes(size),
            facts.site(first.site)
        ),
        site: facts.site(error.site),
        bytes: sum,
        sure: "certain of sizes and lines; that parts fill them is likely: the model ran while they were held".into(),
        fix: Fix::words(
            "allocate these on the CPU (`device=\"cpu\"`) and copy each part there; count overlaps in one channel; write the last step in place (`div_`)",
            format!("needs up to {} less at that moment", bytes(sum)),
        ),
        verb: "oom",
    })
}
