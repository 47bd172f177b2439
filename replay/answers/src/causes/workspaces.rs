//! A workspace of cuBLAS for each stream and handle: PyTorch makes one the first time that a stream multiplies matrices.

use gputrace_schemas::event::Bytes;

use super::streams_made_anew::{MANY_STREAMS, is_some_left};
use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::held::{Holder, Sign};
use gputrace_trace::words::{bytes, count};

/// Fewer streams than this are a program's own few.
const LEAST_STREAMS: usize = 3;
/// Requests on each stream that show that it was used for more than its block.
const LEAST_USES: u64 = 8;
/// Smaller workspaces are no cause of anything: `:16:8` is 128 KiB.
const LEAST_WORKSPACE: u64 = 128 << 10;

pub(super) const CAUSE: Cause = Cause {
    name: "one cuBLAS workspace per stream",
    kind: Kind::Kept,
    needs: "blocks that PyTorch requested as workspaces, on several streams; or, of another size, one block on each of sixteen streams from one line that requests much less at all other times, and that never requests one twice on a stream",
    against: "streams of captured graphs; one or two streams, whose workspaces any program has; a few streams that take turns to the end",
    find,
};

/// One block for each stream, all of one size.
fn is_one_a_stream(holder: &Holder) -> bool {
    holder.sizes.len() == 1 && holder.blocks == holder.streams.len() as u64
}

/// Blocks as PyTorch makes workspaces of a size that the user set: one for each of many streams that are used on, by a line of the program.
fn is_of_other_size(facts: &Facts<'_>, holder: &Holder) -> bool {
    let used = || {
        let all = facts.lifetimes.into_iter().flat_map(|it| &it.streams);
        all.filter(|used| holder.streams.contains(&Some(used.stream)))
    };
    let size = holder.sizes.keys().next().copied().unwrap_or_default();
    // What else the streams were used for is much smaller, and each was used again after its block was there.
    let is_again = used().filter(|used| used.blocks >= LEAST_USES).count() == holder.streams.len();
    let is_largest = used().all(|used| used.peak.0.saturating_sub(size.0) < size.0);
    holder.streams.len() >= MANY_STREAMS
        && is_one_a_stream(holder)
        && size.0 >= LEAST_WORKSPACE
        && !holder.signs.has(Sign::Model)
        // The line requests and frees the results of its products, too.
        && holder.before.0 > 0
        && holder.before < size
        && is_again
        && is_largest
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let is_known = facts.holders().any(|holder| holder.signs.has(Sign::Workspace) && is_one_a_stream(holder));
    let is_workspace =
        |holder: &Holder| holder.signs.has(Sign::Workspace) || !is_known && is_of_other_size(facts, holder);
    let (held, most) = facts.with(is_workspace)?;
    let mut streams: Vec<Option<u64>> =
        facts.holders().filter(|it| is_workspace(it)).flat_map(|it| it.streams.clone()).collect();
    streams.sort_unstable();
    streams.dedup();
    // cuBLASLt has one of its own for each stream.
    let is_beside = |holder: &Holder| {
        !is_workspace(holder)
            && holder.signs.has(Sign::Forward)
            && is_one_a_stream(holder)
            && holder.blocks == streams.len() as u64
            && holder.streams.iter().all(|stream| streams.contains(stream))
    };
    let beside = facts.with(is_beside).map_or(0, |(bytes, _)| bytes.0);
    let (held, whose) = match beside {
        0 => (held, "cuBLAS workspaces"),
        beside => (Bytes(held.0.saturating_add(beside)), "workspaces of cuBLAS and cuBLASLt"),
    };
    let all = facts.holders().filter(|it| is_workspace(it) || is_beside(it));
    let n_blocks: u64 = all.map(|it| it.blocks).sum();
    // A few that take turns to the end are a program's own.
    let is_made_anew = streams.len() >= MANY_STREAMS || is_some_left(facts, &streams);
    // A capture has a stream and a workspace of its own: as many as there are graphs.
    let n_graphs = facts.story.ledger.torch_pools.pools.values().map(|pool| pool.graphs.len()).sum::<usize>();
    let is_of_graphs = n_graphs > 0 && streams.len() < MANY_STREAMS.max(n_graphs + LEAST_STREAMS);
    (streams.len() >= LEAST_STREAMS && is_made_anew && !is_of_graphs && facts.is_much(held)).then(|| Case {
        what: format!(
            "{} are {whose}, one for each of the {} streams on which the line below ran the model ({} blocks); they are never freed",
            bytes(held),
            count(streams.len() as u64),
            count(n_blocks)
        ),
        // The line that chose the stream is the model's caller's.
        site: if most.caller.is_empty() { facts.site(most.site) } else { most.caller.clone() },
        bytes: held,
        sure: match most.signs.has(Sign::Workspace) {
            true => "likely: each has the size that PyTorch requests, and is alone on its stream",
            false => {
                "likely: one block of this size on each stream, never a second one, though the streams were used again (`CUBLAS_WORKSPACE_CONFIG` sets their size)"
            }
        }
        .into(),
        fix: Fix::words(
            "reuse a few streams instead of a new `torch.cuda.Stream()` each time, or shrink workspaces: `export CUBLAS_WORKSPACE_CONFIG=:16:8`",
            worth(facts, held, streams.len() as u64),
        ),
        verb: "report --all",
    })
}

/// What one stream keeps, and what that makes of the peak.
fn worth(facts: &Facts<'_>, all: Bytes, n_streams: u64) -> String {
    let one = Bytes(all.0 / n_streams.max(1));
    let keeps = format!("one stream keeps {}", bytes(one));
    match facts.held.filter(|_| facts.failure.is_none()) {
        Some(held) => {
            let lower = all.0 - one.0;
            let peak = Bytes(held.bytes.0.saturating_sub(lower));
            format!("{keeps}: the peak is about {} lower, at {}", bytes(Bytes(lower)), bytes(peak))
        }
        None => keeps,
    }
}
