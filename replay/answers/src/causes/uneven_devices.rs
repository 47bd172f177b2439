//! One device holds more than another: outputs gathered, or a loss computed, on one of them.

use gputrace_schemas::event::Bytes;

use super::facts::device;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_report::sections::balance;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "work gathered on one of them",
    kind: Kind::Uneven,
    needs: "two devices that one process uses, and a line that held more on one of them",
    against: "caches, memory that libraries take on each device, and a device on which no model runs",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let (loaded, other) = balance::uneven(facts.story)?;
    // Where only one of them computes, it is the other's memory that is out of place.
    if super::stray_device::stray(facts)
        .is_some_and(|(held, main)| (loaded.ordinal, other.ordinal) == (main, held.device))
    {
        return None;
    }
    let (site, more, _) = loaded.beyond(&other).into_iter().next()?;
    Some(Case {
        what: format!(
            "{} held up to {}, {} up to {}",
            device(loaded.ordinal),
            bytes(loaded.total),
            device(other.ordinal),
            bytes(other.total)
        ),
        site: facts.site(site),
        bytes: Bytes(loaded.total.0.saturating_sub(other.total.0)),
        sure: format!("certain: this line held {} there and less here", bytes(more)),
        fix: Fix::words(
            "spread this line's work: one process per GPU (DistributedDataParallel), or compute the loss in `forward`",
            "",
        ),
        verb: "report --all",
    })
}
