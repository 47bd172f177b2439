//! Pinned memory that PyTorch rounds up to a power of two.

use gputrace_schemas::event::Bytes;

use super::{Case, Cause, Facts, Fix, Kind};
use gputrace_trace::ledger::MemoryKind;
use gputrace_trace::words::bytes;

/// Less is no matter.
const LEAST: u64 = 1 << 30;

pub(super) const CAUSE: Cause = Cause {
    name: "pinned memory rounded up to a power of two",
    kind: Kind::Kept,
    needs: "a piece of PyTorch's pinned memory of at least 1 GiB, whose size is a power of two, and more than the devices hold",
    against: "sizes that are not a power of two, and pinned memory that is a small part",
    find,
};

fn find(facts: &Facts<'_>) -> Option<Case> {
    let ledger = &facts.story.ledger;
    let is_rounded =
        |kind, bytes: Bytes| kind == MemoryKind::Pinned && bytes.0 >= LEAST && bytes.0.is_power_of_two();
    let pinned = ledger.live().filter(|object| {
        is_rounded(object.kind, object.bytes) && ledger.sites.owner(object.owner).starts_with("PyTorch")
    });
    let most = pinned.max_by_key(|object| object.bytes)?;
    (most.bytes.0.saturating_mul(2) >= facts.all.0).then(|| Case {
        what: format!(
            "this line requested {} of page-locked host memory in one piece. PyTorch's pinned allocator rounds each request up to a power of two, so almost half of it may be unused",
            bytes(most.bytes)
        ),
        site: facts.site(most.site),
        bytes: Bytes(most.bytes.0 / 2),
        sure: "likely: the size is a power of two; the size that the program requested is not recorded".into(),
        fix: Fix::words(
            "choose a power of two as size, or pin the exact size yourself: `torch.cuda.cudart().cudaHostRegister`",
            format!("saves up to {}", bytes(Bytes(most.bytes.0 / 2))),
        ),
        verb: "report --all",
    })
}
