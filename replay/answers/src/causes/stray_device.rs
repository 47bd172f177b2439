//! Memory on a device that the process does not compute on: tensors that came to lie there by a default.

use std::cmp::Reverse;

use super::facts::device;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{HeldAt, Holder, Sign};
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "memory on a GPU that the process does not compute on",
    kind: Kind::Kept,
    needs: "a model that runs on one device, and blocks of the same process on another, of which no model, no backward pass and no optimizer allocated any",
    against: "any of these on that device",
    find,
};

fn is_computed(holder: &Holder) -> bool {
    [Sign::Forward, Sign::Functional, Sign::Backward, Sign::Optimizer, Sign::Workspace]
        .into_iter()
        .any(|sign| holder.signs.has(sign))
}

/// What lies on devices that the process does not compute on, most first, and a device that it does compute on.
pub(super) fn stray<'a>(facts: &Facts<'a>) -> Option<(&'a HeldAt, i16)> {
    let lifetimes = facts.lifetimes?;
    let all = || lifetimes.at_peak.iter().chain(&lifetimes.at_end).chain(&lifetimes.at_failure);
    let computes = |device: i16| {
        let has_passes = lifetimes.devices.iter().any(|it| it.device == device && it.n_passes > 0);
        has_passes
            || all().filter(|held| held.device == device).any(|held| held.holders.iter().any(is_computed))
    };
    let peak =
        |device: i16| lifetimes.at_peak.iter().find(|it| it.device == device).map_or(0, |it| it.bytes.0);
    let main = lifetimes.at_peak.iter().filter(|held| computes(held.device));
    let main = main.max_by_key(|held| held.bytes)?.device;
    let stray = lifetimes.at_peak.iter().filter(|held| !computes(held.device) && held.bytes.0 > 0);
    let stray = stray.max_by_key(|held| (held.bytes, Reverse(held.device)))?;
    // A device that holds more than the one that computes is there for that: data, or a cache.
    (stray.bytes.0 <= peak(main)).then_some((stray, main))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let (held, main) = stray(facts)?;
    let most = held.holders.first()?;
    let is_loaded = most.signs.has(Sign::Load);
    let what = if is_loaded { "a checkpoint loaded there" } else { "most of it from the line below" };
    facts.failure.is_none().then(|| Case {
        what: format!(
            "{} holds {} of this process ({what}), although all models run on {}",
            device(held.device),
            bytes(held.bytes),
            device(main)
        ),
        site: facts.site(most.site),
        bytes: held.bytes,
        sure: "likely: no model, backward pass or optimizer held anything on that device at its peak, at the end or at a failure".into(),
        fix: Fix::words(
            match is_loaded {
                true => {
                    "`torch.load(..., map_location=\"cpu\")`, or the process's own device: without it, tensors return to the GPU that they were saved from"
                }
                false => {
                    "pass the process's own device there (`device=`, `.to(device)`), or call `torch.cuda.set_device` or set `CUDA_VISIBLE_DEVICES` first"
                }
            },
            format!("frees {} and a CUDA context on {}", bytes(held.bytes), device(held.device)),
        ),
        verb: "report --all",
    })
}
