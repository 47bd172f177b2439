//! No allocator at all: every request is its own `cudaMalloc`, every free its own `cudaFree`
//! (`PYTORCH_NO_CUDA_MEMORY_CACHING=1`).

use crate::device::{Device, Placement};
use crate::policies::{Fidelity, OutOfMemory, Policy, PolicyEntry, Request, key_values};
use crate::skip::State;

pub(super) const ENTRY: PolicyEntry = PolicyEntry {
    name: "direct",
    summary: "every request is its own cudaMalloc (PYTORCH_NO_CUDA_MEMORY_CACHING=1)",
    options: "none",
    fidelity: Fidelity::Exact,
    build: |build| {
        key_values(build.options, &[])?;
        Ok(Box::new(Direct))
    },
};

struct Direct;

impl Policy for Direct {
    fn alloc(&mut self, device: &mut Device, request: Request) -> Result<Placement, OutOfMemory> {
        let segment = device.is_within_limit(request.bytes).then(|| device.map(request.bytes)).flatten();
        let segment = segment.ok_or_else(|| OutOfMemory::plain(request.bytes))?;
        Ok(Placement { address: segment.address, bytes: request.bytes, segment: segment.id, handle: 0 })
    }

    fn free(&mut self, device: &mut Device, placement: Placement) {
        device.unmap(placement.segment);
    }

    fn trim(&mut self, _device: &mut Device) {}

    fn write(&self, to: &mut State, live: &[Placement]) -> bool {
        let _ = (to, live);
        true
    }
}
