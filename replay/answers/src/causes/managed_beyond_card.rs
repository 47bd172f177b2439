//! More managed memory than the card has: pages move to and fro.

use gputrace_schemas::event::Bytes;

use super::facts::device;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_report::summary::used_devices;
use gputrace_trace::words::bytes;

pub(super) const CAUSE: Cause = Cause {
    name: "managed memory larger than the card",
    kind: Kind::Beyond,
    needs: "managed and device memory that together exceeded the card",
    against: "managed memory that fits",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let beyond = used_devices(facts.story).filter_map(|(ordinal, books)| {
        let total = facts.story.device(ordinal)?.total;
        let managed = books.managed.peak();
        let more = managed.0.checked_sub(total.0).filter(|_| total.0 > 0)?;
        Some((ordinal, books, managed, total, Bytes(more)))
    });
    let (ordinal, books, managed, total, more) = beyond.max_by_key(|(.., more)| *more)?;
    let most = books.managed.sites().max_by_key(|part| (part.at_peak.bytes, std::cmp::Reverse(part.id)))?;
    Some(Case {
        what: format!(
            "{} of managed memory on {}, which has {}: {} do not fit, and pages move between card and host",
            bytes(managed),
            device(ordinal),
            bytes(total),
            bytes(more)
        ),
        site: facts.site(most.id),
        bytes: more,
        sure: "certain that it does not fit; which pages move is not recorded".into(),
        fix: Fix::words(
            "work on parts that fit, and prefetch each (`cudaMemPrefetchAsync`) before you use it",
            "",
        ),
        verb: "report --all",
    })
}
