//! `empty_cache` by habit.

use gputrace_schemas::event::{Bytes, Nanos};
use gputrace_sim::stacks::python_package;

use super::facts::device;
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_report::sections::cache;
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, count, time};

/// It costs something from this part of the recorded time on: one in so many.
const COSTLY: u64 = 50;

pub(super) const CAUSE: Cause = Cause {
    name: "`empty_cache` in the loop",
    kind: Kind::Churned,
    needs: "at least three calls from one line, half of the released memory reserved again, and a fiftieth of the recorded time in the driver for both",
    against: "calls by a library itself, as when PyTorch captures a graph or cuDNN tries its algorithms",
    find: |facts| find(facts, true),
};

/// The same where it costs little.
pub(crate) const CHEAP: Cause = Cause {
    name: "`empty_cache` now and then",
    kind: Kind::Spare,
    needs: "as `empty_cache` in the loop, and less time",
    against: "as `empty_cache` in the loop",
    find: |facts| find(facts, false),
};

fn find(facts: &Facts<'_>, is_costly: bool) -> Option<Case> {
    let sites = &facts.story.ledger.sites;
    let is_own = |site: SiteId| {
        let Some(site) = sites.site(site) else { return true };
        // `torch.cuda.graph` empties the cache before each capture, and cuDNN's benchmark without any function of Python's.
        let is_called =
            site.file.is_empty() || !site.file.ends_with(".py") || site.inside.ends_with("empty_cache");
        let pools = facts.story.ledger.torch_pools.pools.values();
        let captures = pools.flat_map(|pool| &pool.graphs).filter_map(|graph| sites.site(graph.site));
        let is_capture = captures.into_iter().any(|it| it.file == site.file && it.line == site.line);
        is_called && !is_capture && (site.file.is_empty() || python_package(&site.file).is_none())
    };
    let devices = cache::torches(facts.story).filter_map(|(ordinal, torch)| {
        let habits = cache::habits(&torch.cache);
        let (site, trims) = habits.into_iter().find(|(site, _)| is_own(*site))?;
        Some((ordinal, torch, site, trims))
    });
    let (ordinal, torch, site, trims) = devices.max_by_key(|(.., trims)| trims.given.bytes)?;
    let again = torch.cache.bought_again;
    let cost = trims.given.time.0.saturating_add(again.time.0);
    let ledger = &facts.story.ledger;
    let recorded = ledger.run.last.0.saturating_sub(ledger.run.first.unwrap_or_default().0);
    if (cost.saturating_mul(COSTLY) >= recorded) != is_costly {
        return None;
    }
    Some(Case {
        what: format!(
            "{}: memory was released to the driver {} times, and PyTorch reserved {} of it again",
            device(ordinal),
            count(trims.times),
            bytes(again.bytes)
        ),
        site: facts.site(site),
        bytes: Bytes(0),
        sure: "certain: each call is in the trace; a library may have made it".into(),
        fix: Fix::words(
            "remove the call, unless other processes need that memory: it does not lower the peak",
            format!("saves {} of {}, as measured", time(Nanos(cost)), time(Nanos(recorded))),
        ),
        verb: "report --all",
    })
}
