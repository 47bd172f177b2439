//! GMLake (ASPLOS 2024), at the level of its 2 MiB chunks: a request of at least `frag_limit` may be stitched together from
//! cached runs, the largest first; smaller ones need one run. Cached stitched blocks and their clean-up are not modelled.

use super::paged::{Contiguous, paged};
use crate::policies::{Fidelity, PolicyEntry};

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "gmlake",
    summary: "GMLake: large requests are stitched together from cached chunks",
    options: "frag_limit=BYTES (512MiB)",
    fidelity: Fidelity::Model,
    build: |build| Ok(Box::new(paged(build, Contiguous::Below(512 << 20))?)),
};
