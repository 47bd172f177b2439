//! A workspace of cuBLAS for each stream and handle: PyTorch makes one the first time that a stream multiplies matrices.

use gputrace_schemas::event::Bytes;

use super::streams_made_anew::{MANY_STREAMS, is_some_left};
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::Sign;
use gputrace_trace::words::{bytes, count};

/// Fewer streams than this are a program's own few.
const LEAST_STREAMS: usize = 3;

pub(super) const CAUSE: Cause = Cause {
    name: "one cuBLAS workspace per stream",
    kind: Kind::Kept,
    needs: "blocks that PyTorch requested as workspaces, on several streams",
    against: "streams of captured graphs; one or two streams, whose workspaces any program has; a few streams that take turns to the end",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let is_workspace = |holder: &gputrace_analyse::held::Holder| holder.signs.has(Sign::Workspace);
    let (held, most) = facts.with(is_workspace)?;
    let mut streams: Vec<Option<u64>> =
        facts.holders().filter(|it| is_workspace(it)).flat_map(|it| it.streams.clone()).collect();
    streams.sort_unstable();
    streams.dedup();
    let n_blocks: u64 = facts.holders().filter(|it| is_workspace(it)).map(|it| it.blocks).sum();
    // A few that take turns to the end are a program's own.
    let is_made_anew = streams.len() >= MANY_STREAMS || is_some_left(facts, &streams);
    // A capture has a stream and a workspace of its own: as many as there are graphs.
    let n_graphs = facts.story.ledger.torch_pools.pools.values().map(|pool| pool.graphs.len()).sum::<usize>();
    let is_of_graphs = n_graphs > 0 && streams.len() < MANY_STREAMS.max(n_graphs + LEAST_STREAMS);
    (streams.len() >= LEAST_STREAMS && is_made_anew && !is_of_graphs && facts.is_much(held)).then(|| Case {
        what: format!(
            "{} are cuBLAS workspaces, one for each of the {} streams on which the line below ran the model ({} blocks); they are never freed",
            bytes(held),
            count(streams.len() as u64),
            count(n_blocks)
        ),
        // The line that chose the stream is the model's caller's.
        site: if most.caller.is_empty() { facts.site(most.site) } else { most.caller.clone() },
        bytes: held,
        sure: "certain: each has the size that PyTorch requests, on its own stream".into(),
        fix: Fix::words(
            "reuse a few streams instead of a new `torch.cuda.Stream()` each time, or shrink workspaces: `export CUBLAS_WORKSPACE_CONFIG=:16:8`",
            format!("one stream keeps {}", bytes(Bytes(held.0 / streams.len() as u64))),
        ),
        verb: "report --all",
    })
}
