//! Memory of the driver's that is asked for again and again, and not given back: C and C++, libraries, IPC handles.

use super::{Case, Cause, Facts, Kind};
use crate::causes::facts::Grown;
use gputrace_trace::ledger::{Account, MemoryKind};

pub(super) const CAUSE: Cause = Cause {
    name: "memory never freed",
    kind: Kind::Grew,
    needs: "what a line got from the driver, a library's heap or another process is left each time",
    against: "PyTorch's or JAX's own memory, which a cache keeps",
    claims: Some(claims),
    find,
};

fn claims(grown: &Grown<'_>) -> bool {
    grown.account().is_some_and(|account| !matches!(account, Account::Blocks | Account::Buffers))
}

fn find(facts: &Facts<'_>) -> Option<Case> {
    let grown = facts.grown()?;
    let place = grown.site.place?;
    if grown.site.named.owner.starts_with("PyTorch") {
        return facts.growth_of(
            &CAUSE,
            "something refers to what is pinned there (`pin_memory`): `del` it, or pin one buffer and copy into it",
        );
    }
    let object =
        facts.story.ledger.live().find(|object| object.site == place.site && object.device == place.device);
    let call = match object.map(|object| object.kind)? {
        MemoryKind::Linear | MemoryKind::Managed => "`cudaFree`",
        MemoryKind::Async => "`cudaFreeAsync`",
        MemoryKind::Virtual | MemoryKind::HostVirtual => "`cuMemUnmap` and `cuMemRelease`",
        MemoryKind::Array => "`cudaFreeArray`",
        MemoryKind::Graph => "a free node, or `cudaGraphExecDestroy`",
        MemoryKind::Pinned => "`cudaFreeHost`",
        MemoryKind::Registered => "`cudaHostUnregister`",
        MemoryKind::Imported => "`cudaIpcCloseMemHandle`",
    };
    facts.growth_of(&CAUSE, &format!("give back what is asked for there: {call}"))
}
