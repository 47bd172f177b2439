//! Contexts of processes that the program started, and that ask for no memory: loader workers that touched CUDA.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_analyse::story::Story;
use gputrace_trace::ledger::Context;
use gputrace_trace::words::{bytes, count};

pub(super) const CAUSE: Cause = Cause {
    name: "CUDA contexts of child processes that never allocate",
    kind: Kind::Kept,
    needs: "traces of child processes that hold a context and request next to no memory, and whose contexts are at least a twentieth of what this process holds",
    against: "processes that use the GPU",
    find,
};

/// What a process asked for is next to nothing beside its context: one in so many bytes of it.
const LITTLE: u64 = 8;

/// The context of a process that asked for next to nothing on any device, and what NVML charged it for.
fn idle(story: &Story) -> Option<(&Context, Bytes)> {
    let context = story.ledger.contexts().find(|context| context.device >= 0)?;
    let charged =
        story.ledger.devices().get(&context.device).and_then(|books| books.samples.largest?.process_used)?;
    let asked: u64 = story.ledger.devices().values().map(|books| books.physical.peak().0).sum();
    (asked.saturating_mul(LITTLE) <= charged.0).then_some((context, charged))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let children: Vec<_> = facts.beside.iter().filter_map(|story| Some((story, idle(story)?))).collect();
    let (story, (context, each)) = *children.first()?;
    let all = Bytes(children.iter().map(|(_, (_, charged))| charged.0).sum());
    facts.is_much(all).then(|| Case {
        what: format!(
            "{} child processes hold a CUDA context each and hardly allocate: {} together, and {} in process {}",
            count(children.len() as u64),
            bytes(all),
            bytes(each),
            story.process.pid
        ),
        site: story.ledger.sites.site_name(context.site),
        bytes: all,
        sure: "certain: their traces have a context, its size from NVML, and hardly a request for memory".into(),
        fix: Fix::words(
            "make no CUDA call in these processes (`worker_init_fn`, `Dataset`, `collate_fn`), or start them with `CUDA_VISIBLE_DEVICES=`",
            format!("frees {}", bytes(all)),
        ),
        verb: "report --all",
    })
}
