//! `backend:cudaMallocAsync`: CUDA's stream-ordered pools, as PyTorch configures them (nothing is given back before a trim).
//!
//! Where the driver puts what is not documented. This is the best that it could do: pages that can be moved behind any
//! addresses, shared by all streams.

use super::paged::{Contiguous, paged};
use crate::policies::{Fidelity, PolicyEntry};

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "cuda_async",
    summary: "cudaMallocAsync: the least that it can reserve, because its placement is not public",
    options: "none",
    fidelity: Fidelity::Model,
    build: |build| {
        super::key_values(build.options, &[])?;
        Ok(Box::new(paged(build, Contiguous::Never)?))
    },
};
