//! A CUDA graph for each shape, each with a pool of its own.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, count};

/// Fewer graphs are a program's own few.
const LEAST_POOLS: usize = 4;

pub(super) const CAUSE: Cause = Cause {
    name: "a CUDA graph, and a pool, for each input shape",
    kind: Kind::Kept,
    needs: "several private pools that one line captured graphs into, one each, and that keep memory",
    against: "graphs that share a pool",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let mut by_site: BTreeMap<SiteId, (usize, u64)> = BTreeMap::new();
    let pools = facts.story.ledger.torch_pools.pools.values();
    for pool in pools.filter(|pool| pool.graphs.len() == 1 && pool.reserved.peak.0 > 0) {
        let Some(graph) = pool.graphs.first() else { continue };
        let of = by_site.entry(graph.site).or_default();
        (of.0, of.1) = (of.0 + 1, of.1 + pool.reserved.peak.0);
    }
    let (site, (n, reserved)) = by_site.into_iter().max_by_key(|(_, (_, bytes))| *bytes)?;
    let reserved = Bytes(reserved);
    (n >= LEAST_POOLS && facts.is_much(reserved)).then(|| Case {
        what: format!(
            "{} are reserved in the private pools of {} CUDA graphs, captured here one after the other, each with a pool of its own: one for \
             each new input shape, and none is shared",
            bytes(reserved),
            count(n as u64)
        ),
        site: facts.site(site),
        bytes: reserved,
        sure: "certain that each graph has a pool of its own; likely that shapes differ".into(),
        fix: Fix::words(
            "pad inputs to a few lengths, so that graphs are used again, and share one pool: `torch.cuda.graph(g, pool=pool)` with one \
             `torch.cuda.graph_pool_handle()`",
            format!("one pool keeps about {}", bytes(Bytes(reserved.0 / n.max(1) as u64))),
        ),
        verb: "report --all",
    })
}
