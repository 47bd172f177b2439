//! Copies of the weights that autocast keeps until its region ends.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::bytes;

/// Smaller weights say nothing.
const LEAST_WEIGHT: u64 = 1 << 16;

pub(super) const CAUSE: Cause = Cause {
    name: "autocast's cache of converted weights",
    kind: Kind::Peak,
    needs: "no backward pass, and at the peak blocks of a model's code of half the sizes of the weights, for half of these at least",
    against: "a backward pass, which needs the copies",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let held = facts.held?;
    let device = facts.lifetimes?.devices.iter().find(|device| device.device == held.device)?;
    if device.n_passes > 0 {
        return None;
    }
    let mut weights: BTreeMap<u64, u64> = BTreeMap::new();
    for holder in facts.holders().filter(|holder| holder.signs.has(Sign::Model)) {
        for (size, n) in holder.sizes.iter().filter(|(size, _)| size.0 >= LEAST_WEIGHT) {
            *weights.entry(size.0).or_default() += n;
        }
    }
    let mut copies: BTreeMap<u64, u64> = BTreeMap::new();
    let is_copy = |holder: &&Holder| holder.signs.has(Sign::Forward) && !holder.signs.has(Sign::Model);
    for holder in facts.holders().filter(is_copy) {
        holder.sizes.iter().for_each(|(size, n)| *copies.entry(size.0).or_default() += n);
    }
    let all: u64 = weights.iter().map(|(size, n)| size * n).sum();
    let copied: u64 =
        weights.iter().map(|(size, n)| size / 2 * n.min(copies.get(&(size / 2)).unwrap_or(&0))).sum();
    let n_copied: u64 = weights.iter().map(|(size, n)| *n.min(copies.get(&(size / 2)).unwrap_or(&0))).sum();
    let most = facts
        .holders()
        .filter(is_copy)
        .find(|holder| holder.sizes.keys().any(|size| weights.contains_key(&(size.0 * 2))))?;
    let copied = Bytes(copied);
    (n_copied >= 8 && copied.0.saturating_mul(4) >= all && facts.is_much(copied)).then(|| {
        let region = match most.caller.as_str() {
            "" => String::new(),
            caller => format!(", called at {caller}"),
        };
        Case {
            what: format!(
                "{} are copies of the weights in half their width, made as the model runs{region}, and kept: `torch.autocast` caches them until \
                 its region ends",
                bytes(copied)
            ),
            site: facts.site(most.site),
            bytes: copied,
            sure: format!("likely: their sizes are half of those of {} of {} of weights, one by one", bytes(Bytes(copied.0 * 2)), bytes(Bytes(all))),
            fix: Fix::words(
                "`torch.autocast(..., cache_enabled=False)`, or shorter autocast regions, or convert the weights once (`model.bfloat16()`)",
                format!("saves {}", bytes(copied)),
            ),
            verb: "report --peak",
        }
    })
}
