//! Blocks that the program gave back, and that another stream still uses: `record_stream` keeps them from being used again.

use gputrace_schemas::event::Bytes;

use super::facts::device;
use super::{Case, Cause, Facts, Failure, Fix, Kind};
use gputrace_report::sections::cache;
use gputrace_trace::ledger::TorchBooks;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "freed blocks that another stream still uses (`record_stream`)",
    kind: Kind::Wasted,
    needs: "a quarter of the reserved memory that the program had freed, while PyTorch waited for other streams before it reused it",
    against: "blocks that can be reused as soon as they are freed",
    find,
};

/// The most that waited, at least: what was requested counts until all streams are done, what is allocated until it is given back.
pub(super) fn waiting(torch: &TorchBooks) -> Option<Bytes> {
    let waiting = torch.requested.peak.0.saturating_sub(torch.allocated.peak.0);
    // Blocks given back in a capture are counted in the same way.
    let is_known = torch.n_frees_in_capture == 0
        && torch.n_unknown_requests == 0
        && torch.requested.peak <= torch.reserved.peak;
    (is_known && waiting.saturating_mul(4) >= torch.reserved.peak.0).then_some(Bytes(waiting))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let devices =
        cache::torches(facts.story).filter_map(|(ordinal, torch)| Some((ordinal, torch, waiting(torch)?)));
    let (ordinal, torch, most) = devices.max_by_key(|(.., waiting)| *waiting)?;
    if matches!(facts.failure, Some(Failure::Jax(..))) {
        return None;
    }
    // The side stream's busiest line is the one whose blocks had to wait, unless it shows where memory was bought in their place.
    let bought = cache::misfit_sites(torch).first().map(|(site, _)| *site);
    let streams = facts.lifetimes?.streams.iter().filter(|used| used.device == ordinal && used.stream != 0);
    let site = bought.or_else(|| Some(streams.max_by_key(|used| used.blocks)?.site))?;
    Some(Case {
        what: format!(
            "{}: at least {} were freed but still in use on another stream; PyTorch reserved up to {} for at most {} allocated",
            device(ordinal),
            bytes(most),
            bytes(torch.reserved.peak),
            bytes(torch.allocated.peak)
        ),
        site: facts.site(site),
        bytes: most,
        sure: "certain: PyTorch completed these frees only after events on other streams".into(),
        fix: Fix::words(
            "reuse a few buffers after an event of the other stream, or let the CPU run ahead less (FSDP: `limit_all_gathers=True`)",
            "",
        ),
        verb: "report --all",
    })
}
