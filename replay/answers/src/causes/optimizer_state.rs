//! An optimizer's state, made at its first step: what fitted for forward and backward pass no longer does.

use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_analyse::held::Sign;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "the optimizer's state, made at its first step",
    kind: Kind::Beyond,
    needs: "a request that failed at a line of the optimizer, or while its state was two fifths of what was held, and nothing grows",
    against: "temporaries of the step, and growth",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let held = facts.held?;
    if !facts.growing().is_empty() {
        return None;
    }
    let is_state = |holder: &gputrace_analyse::held::Holder| {
        holder.signs.has(Sign::Optimizer) && !holder.signs.has(Sign::Foreach)
    };
    let (state, most) = facts.with(is_state)?;
    let is_there = most.site == error.site;
    if !is_there && state.0.saturating_mul(5) < held.bytes.0.saturating_mul(2) {
        return None;
    }
    let when = if is_there { ", and the step was still making more" } else { "" };
    Some(Case {
        what: format!(
            "{} of {} in use are state of the optimizer, which its first step makes{when}",
            bytes(state),
            bytes(held.bytes)
        ),
        site: facts.site(most.site),
        bytes: state,
        sure: "certain: the optimizer's own code asked for it".into(),
        fix: Fix::words(
            "an optimizer with less state (8-bit Adam, Adafactor, SGD), or shard it (`ZeroRedundancyOptimizer`, FSDP)",
            format!("8-bit state is about {}", bytes(gputrace_schemas::event::Bytes(state.0 / 4))),
        ),
        verb: "oom",
    })
}
