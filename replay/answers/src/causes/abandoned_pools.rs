//! Pools that keep memory for nobody: captures that failed, graphs that are gone.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use crate::leaks::{self, AbandonedPool};
use gputrace_report::summary::used_devices;
use gputrace_trace::words::{bytes, count};

/// Worth a verdict from this part of the device's peak on: one in so many.
const LEAST: u64 = 50;

pub(super) const CAUSE: Cause = Cause {
    name: "no graph can use it",
    kind: Kind::Abandoned,
    needs: "a private pool that was not released, and whose captures failed or whose graphs no longer exist",
    against: "a graph of the pool that can still be launched",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let pools: Vec<AbandonedPool> = leaks::abandoned(facts.story).collect();
    let most = pools.iter().max_by_key(|pool| pool.bytes)?;
    let all = pools.iter().fold(0_u64, |sum, pool| sum.saturating_add(pool.bytes.0));
    let peak = used_devices(facts.story).map(|(_, books)| books.physical.peak().0).max().unwrap_or(0);
    let others = match pools.len() {
        1 => String::new(),
        n => format!("; {} more such pools bring the total to {}", count(n as u64 - 1), bytes(Bytes(all))),
    };
    (all.saturating_mul(LEAST) >= peak).then(|| Case {
        what: format!(
            "{}: PyTorch's pool {} keeps {} that nothing can use: {}{others}",
            most.named.device,
            most.pool,
            bytes(most.bytes),
            most.why
        ),
        site: most.named.site.clone(),
        bytes: Bytes(all),
        sure: "certain: the trace has the pool's calls and the end of each graph".into(),
        fix: Fix::words(format!("fix the capture, or run without a graph: frees {}", bytes(Bytes(all))), ""),
        verb: "leaks",
    })
}
