//! A workspace of cuBLAS for each stream and handle: PyTorch makes one the first time that a stream multiplies matrices.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use crate::causes::facts::Grown;
use gputrace_analyse::held::Sign;
use gputrace_trace::words::{bytes, count};

/// Fewer streams than this are a program's own few.
const LEAST_STREAMS: usize = 3;

pub(super) const CAUSE: Cause = Cause {
    name: "a workspace of cuBLAS for each stream",
    kind: Kind::Kept,
    needs: "blocks that PyTorch asked for as workspaces, on several streams",
    against: "one or two streams, whose workspaces any program has",
    claims: Some(claims),
    find,
};

fn claims(grown: &Grown<'_>) -> bool {
    grown.has(Sign::Workspace) && grown.holder.is_some_and(|holder| holder.streams.len() >= LEAST_STREAMS)
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let is_workspace = |holder: &gputrace_analyse::held::Holder| holder.signs.has(Sign::Workspace);
    let (held, most) = facts.with(is_workspace)?;
    let mut streams: Vec<Option<u64>> =
        facts.holders().filter(|it| is_workspace(it)).flat_map(|it| it.streams.clone()).collect();
    streams.sort_unstable();
    streams.dedup();
    let n_blocks: u64 = facts.holders().filter(|it| is_workspace(it)).map(|it| it.blocks).sum();
    (streams.len() >= LEAST_STREAMS && facts.is_much(held)).then(|| Case {
        what: format!(
            "{} are workspaces of cuBLAS: one for each of {} streams that the line below ran the model on, and each handle ({} blocks); they stay",
            bytes(held),
            count(streams.len() as u64),
            count(n_blocks)
        ),
        // The line that chose the stream is the model's caller's.
        site: if most.caller.is_empty() { facts.site(most.site) } else { most.caller.clone() },
        bytes: held,
        sure: "certain: each is of the size that PyTorch asks for, on a stream of its own".into(),
        fix: Fix::words(
            "make a few streams once and use them again, instead of a new `torch.cuda.Stream()` each time; or the smallest workspaces: `export CUBLAS_WORKSPACE_CONFIG=:16:8`",
            format!("one stream keeps {}", bytes(Bytes(held.0 / streams.len() as u64))),
        ),
        verb: "report --all",
    })
}
