//! A setting of PyTorch's allocator that the program has, and without which its requests fit.

use gputrace_schemas::event::Bytes;
use gputrace_sim::policies::OptionError;
use gputrace_sim::tune;

use super::external_fragmentation::{self, Wasted, setting};
use super::facts::device;
use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_trace::words::bytes;

/// The part of what lies unused that goes without the option: one in so many.
const LEAST: u64 = 2;

pub(super) const CAUSE: Cause = Cause {
    name: "the allocator's own setting",
    kind: Kind::Wasted,
    needs: "options in `PYTORCH_CUDA_ALLOC_CONF`, and the same requests replayed without one of them: a failed request is served, or half of the unused memory is not reserved",
    against: "a replay that is not the recorded run",
    find: |facts| at_failure(facts).or_else(|| without_failure(facts).cloned()),
};

/// The same of a reserve that stopped growing on a card with room for it.
pub(super) const WITH_ROOM: Cause = Cause {
    name: "the allocator's own setting, with room on the card",
    kind: Kind::Spare,
    needs: "options in `PYTORCH_CUDA_ALLOC_CONF`, and the same requests replayed without one of them: half of the unused memory is not reserved, and that is more than was in use",
    against: "a replay that is not the recorded run",
    find: |facts| replayed(facts, external_fragmentation::wasted_with_room(facts)?),
};

/// The options of the first that the second lacks.
fn left_out(recorded: &str, part: &str) -> String {
    let stays: Vec<&str> = part.split(',').collect();
    let goes: Vec<&str> = recorded.split(',').filter(|option| !stays.contains(option)).collect();
    goes.join(",")
}

pub(super) fn at_failure(facts: &Facts<'_>) -> Option<Case> {
    let Failure::Torch(_, error) = facts.failure? else { return None };
    let (recorded, part) = facts.trial()?.as_ref().ok()?.without_an_option()?;
    let (fix, sure) = setting(facts, Some(recorded), part);
    let unused = error.reserved.0.saturating_sub(error.allocated.0);
    Some(Case {
        what: format!(
            "{} in use and {} more reserved under `{}`; without it, this request and all before it are served",
            bytes(error.allocated),
            bytes(Bytes(unused)),
            left_out(&recorded.options, &part.options)
        ),
        site: facts.site(error.site),
        // It alone makes the request fit.
        bytes: Bytes(unused).max(facts.missing().unwrap_or_default()),
        sure,
        fix: Some(fix),
        verb: "oom",
    })
}

/// The same of a run in which no request failed.
pub(super) fn without_failure<'a>(facts: &'a Facts<'_>) -> Option<&'a Case> {
    facts.own_setting.get_or_init(|| replayed(facts, external_fragmentation::wasted(facts)?)).as_ref()
}

fn replayed(facts: &Facts<'_>, (ordinal, torch, site): Wasted<'_>) -> Option<Case> {
    let stream = facts.stream_of(ordinal)?;
    let recorded = stream.settings.options.clone().filter(|options| !options.is_empty())?;
    let (reserved, allocated) = (torch.reserved.peak, torch.allocated.peak);
    let unused = Bytes(reserved.0.saturating_sub(allocated.0));
    let most = Bytes(reserved.0 - unused.0 / LEAST);
    let parts = |_, recorded: &str| -> Result<Vec<String>, OptionError> { Ok(tune::parts(recorded)) };
    let found = external_fragmentation::best_setting(stream, most, parts)?;
    let fix = Fix {
        what: external_fragmentation::command(Some(stream), &found.options),
        worth: format!("reserves {} instead of {}", bytes(found.reserved), bytes(reserved)),
    };
    Some(Case {
        what: format!(
            "{}: under `{}`, PyTorch reserved up to {} for at most {} in use",
            device(ordinal),
            left_out(&recorded, &found.options),
            bytes(reserved),
            bytes(allocated)
        ),
        site: facts.site(site),
        bytes: unused,
        sure: found.sure,
        fix: Some(fix),
        verb: "tune",
    })
}
