//! A CUDA graph for each shape, each with a pool of its own.

use std::collections::BTreeMap;

use gputrace_schemas::event::Bytes;
use gputrace_sim::ops::{Op, OpStream, PoolChange, PoolIdx};

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
    find: |facts| find(facts, false),
};

/// The same of graphs of one size: no shape is padded.
pub(super) const ALIKE: Cause = Cause {
    name: "CUDA graphs that share no pool",
    kind: Kind::Kept,
    needs: "as a graph and a pool for each input shape, with pools of about one size",
    against: "graphs that share a pool",
    find: |facts| find(facts, true),
};

/// Pools are of one size if each has this part of the largest: seven eighths.
const ALIKE_PART: (u64, u64) = (7, 8);

/// The pools of the graphs that one line captured.
#[derive(Default)]
struct Of {
    pools: Vec<(u64, u64)>,
    reserved: u64,
    largest: u64,
    smallest: u64,
}

fn find(facts: &Facts<'_>, is_alike: bool) -> Option<Case> {
    let mut by_site: BTreeMap<(i16, SiteId), Of> = BTreeMap::new();
    let pools = facts.story.ledger.torch_pools.pools.iter();
    for ((device, id), pool) in pools.filter(|(_, pool)| pool.graphs.len() == 1 && pool.reserved.peak.0 > 0) {
        let Some(graph) = pool.graphs.first() else { continue };
        let of = by_site.entry((*device, graph.site)).or_default();
        let own = pool.reserved.peak.0;
        (of.reserved, of.largest) = (of.reserved.saturating_add(own), of.largest.max(own));
        of.smallest = if of.pools.is_empty() { own } else { of.smallest.min(own) };
        of.pools.push(*id);
    }
    let ((device, site), of) = by_site.into_iter().max_by_key(|(_, of)| of.reserved)?;
    let (n, reserved) = (of.pools.len(), Bytes(of.reserved));
    let is_of_kind =
        (of.smallest.saturating_mul(ALIKE_PART.1) >= of.largest.saturating_mul(ALIKE_PART.0)) == is_alike;
    let (captures, sure, pad) = match is_alike {
        true => ("captures them one by one", "certain that each graph has its own pool", ""),
        false => (
            "captures one graph for each new input shape",
            "certain that each graph has its own pool; likely that the shapes differ",
            "pad inputs to a few lengths to reuse graphs, and ",
        ),
    };
    let largest_first = if is_alike { "" } else { ", and capture the largest first" };
    (n >= LEAST_POOLS && is_of_kind && facts.is_much(reserved)).then(|| Case {
        what: format!(
            "{} are reserved in the private pools of {} CUDA graphs. This line {captures}, and no two share a pool",
            bytes(reserved),
            count(n as u64)
        ),
        site: facts.site(site),
        bytes: reserved,
        sure: sure.into(),
        fix: Fix::words(
            format!("{pad}share a pool: make one handle before all captures (`pool = torch.cuda.graph_pool_handle()`), and pass it to each (`torch.cuda.graph(g, pool=pool)`){largest_first}"),
            worth(facts, device, &of),
        ),
        verb: "report --all",
    })
}

/// How much they share depends on the order of the captures: with the largest first, it is not known how the others fit into what that left.
fn worth(facts: &Facts<'_>, device: i16, of: &Of) -> String {
    let least = format!("one pool keeps at least {}", bytes(Bytes(of.largest)));
    let before = facts.story.ledger.devices().get(&device).and_then(|books| books.torch.as_ref());
    let before = before.map_or(0, |torch| torch.reserved.peak.0);
    let as_captured = facts.reserved_if(device, |requests| in_one_pool(requests, &of.pools));
    let kept = as_captured.map(|it| of.reserved.saturating_sub(before.saturating_sub(it.0)));
    match kept.filter(|kept| *kept > of.largest) {
        Some(kept) if kept >= of.reserved => format!("{least}, and as much as now in this order of captures"),
        Some(kept) => format!("{least}, and {} in this order of captures", bytes(Bytes(kept))),
        None => least,
    }
}

/// The same requests, with those for these pools in the first of them.
fn in_one_pool(requests: &mut OpStream, ids: &[(u64, u64)]) {
    let all = (0_u16..).zip(&requests.pools);
    let merged: Vec<PoolIdx> =
        all.filter(|(_, pool)| ids.contains(&pool.id)).map(|(idx, _)| PoolIdx(idx)).collect();
    let Some(first) = merged.first().copied() else { return };
    for request in requests.allocations.iter_mut().filter(|it| merged.contains(&it.pool)) {
        request.pool = first;
    }
    // It is dropped with the last graph.
    let mut left = requests.ops.iter().filter(|op| is_release(op, &merged)).count();
    requests.ops.iter_mut().for_each(|op| {
        if is_release(op, &merged) {
            left -= 1;
            *op = if left == 0 {
                Op::ReleasePool(first)
            } else {
                Op::ChangePool(first, PoolChange::ServeNoOthers)
            };
        }
    });
}

fn is_release(op: &Op, pools: &[PoolIdx]) -> bool {
    matches!(op, Op::ReleasePool(pool) if pools.contains(pool))
}
