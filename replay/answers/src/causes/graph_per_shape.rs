//! A CUDA graph for each shape, each with a pool of its own.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_trace::ledger::SiteId;
use gputrace_trace::words::{bytes, count};

/// Fewer graphs are a program's own few.
const LEAST_POOLS: usize = 4;

pub(super) const CAUSE: Cause = Cause {
    name: "a CUDA graph and a private pool for each input shape",
    kind: Kind::Kept,
    needs: "several private pools, each with one graph captured from the same line, that keep memory",
    against: "graphs that share a pool",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let mut by_site: BTreeMap<SiteId, (usize, u64, u64)> = BTreeMap::new();
    let pools = facts.story.ledger.torch_pools.pools.values();
    for pool in pools.filter(|pool| pool.graphs.len() == 1 && pool.reserved.peak.0 > 0) {
        let Some(graph) = pool.graphs.first() else { continue };
        let of = by_site.entry(graph.site).or_default();
        let own = pool.reserved.peak.0;
        *of = (of.0 + 1, of.1 + own, of.2.max(own));
    }
    let (site, (n, reserved, largest)) = by_site.into_iter().max_by_key(|(_, (_, bytes, _))| *bytes)?;
    let reserved = Bytes(reserved);
    (n >= LEAST_POOLS && facts.is_much(reserved)).then(|| Case {
        what: format!(
            "{} are reserved in the private pools of {} CUDA graphs. This line captures one graph for each new input shape, and no two share a pool",
            bytes(reserved),
            count(n as u64)
        ),
        site: facts.site(site),
        bytes: reserved,
        sure: "certain that each graph has its own pool; likely that the shapes differ".into(),
        fix: Fix::words(
            "pad inputs to a few lengths to reuse graphs, and share a pool: `torch.cuda.graph(g, pool=torch.cuda.graph_pool_handle())`, with the largest graph captured first",
            // How much they share depends on the order of the captures.
            format!("one pool keeps at least {}", bytes(Bytes(largest))),
        ),
        verb: "report --all",
    })
}
