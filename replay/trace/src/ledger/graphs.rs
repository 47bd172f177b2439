//! Memory of CUDA graphs: how much of a device they keep.
//!
//! A node that allocates reserves an address when it is made. Memory is behind it from the first launch of an executable
//! graph, and what no launch uses any more is kept for others until the program trims it (CUDA C Programming Guide,
//! "Graph Memory Nodes", Physical Memory Footprint). Nodes are taken to run in the order in which they were made: an
//! estimate, where branches of a graph run side by side.

use gputrace_schemas::event::{Action, Bytes, Call, Event, ThreadId};
use rustc_hash::FxHashMap;

/// Graphs take memory in pages of this size.
const PAGE: u64 = 2 << 20;

/// A node that gives memory out or takes it back.
#[derive(Clone, Copy, Debug)]
enum Node {
    Alloc { addr: u64, device: i16, bytes: u64 },
    Free(u64),
}

/// What graphs hold of a device.
#[derive(Clone, Copy, Debug, Default)]
struct Pool {
    used: u64,
    kept: u64,
}

/// The graphs of a process.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    nodes: FxHashMap<u64, Vec<Node>>,
    execs: FxHashMap<u64, Vec<Node>>,
    captured: FxHashMap<ThreadId, Vec<Node>>,
    /// Memory that launches gave out and that is in use: by address.
    live: FxHashMap<u64, (i16, u64)>,
    pools: FxHashMap<i16, Pool>,
}

impl Graphs {
    /// A call that succeeded; the device whose graphs keep another amount now, and how much that is.
    pub(super) fn call(&mut self, event: &Event, call: &Call) -> Option<(i16, Bytes)> {
        let alloc = Node::Alloc {
            addr: call.addr,
            device: call.device,
            bytes: call.bytes.0.div_ceil(PAGE).saturating_mul(PAGE),
        };
        match call.action {
            Action::GraphAlloc => self.nodes.entry(call.handle).or_default().push(alloc),
            Action::GraphFree => self.nodes.entry(call.handle).or_default().push(Node::Free(call.addr)),
            Action::AllocAsync if call.captured => self.captured.entry(event.thread).or_default().push(alloc),
            Action::FreeAsync if call.captured => {
                self.captured.entry(event.thread).or_default().push(Node::Free(call.addr));
            }
            Action::CaptureEnd => {
                // Other threads may have captured into the same graph.
                let captured = std::mem::take(&mut self.captured).into_values().flatten();
                self.nodes.entry(call.handle).or_default().extend(captured);
            }
            Action::GraphInstantiate => {
                if let Some(nodes) = self.nodes.get(&call.extra).filter(|nodes| !nodes.is_empty()) {
                    self.execs.insert(call.handle, nodes.clone());
                }
            }
            Action::GraphLaunch => return self.launch(call.handle),
            Action::GraphExecDestroy => {
                self.execs.remove(&call.handle);
            }
            Action::GraphDestroy => {
                self.nodes.remove(&call.handle);
            }
            Action::Free | Action::FreeAsync => self.freed(call.addr),
            Action::GraphMemTrim => {
                let pool = self.pools.get_mut(&call.device)?;
                pool.kept = pool.used;
                return Some((call.device, Bytes(pool.kept)));
            }
            _ => {}
        }
        None
    }

    fn launch(&mut self, exec: u64) -> Option<(i16, Bytes)> {
        let nodes = self.execs.get(&exec)?.clone();
        let mut device = None;
        for node in nodes {
            match node {
                Node::Alloc { addr, device: of, bytes } => {
                    device = Some(of);
                    // Launched again: the same memory.
                    if self.live.insert(addr, (of, bytes)).is_none() {
                        let pool = self.pools.entry(of).or_default();
                        pool.used = pool.used.saturating_add(bytes);
                        pool.kept = pool.kept.max(pool.used);
                    }
                }
                Node::Free(addr) => self.freed(addr),
            }
        }
        let device = device?;
        Some((device, Bytes(self.pools.get(&device)?.kept)))
    }

    fn freed(&mut self, addr: u64) {
        if let Some((device, bytes)) = self.live.remove(&addr)
            && let Some(pool) = self.pools.get_mut(&device)
        {
            pool.used = pool.used.saturating_sub(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    fn check(scene: &str, peak: u64, now: u64) {
        let ledger = crate::scene::ledger(scene);
        let kept = ledger.devices()[&0].graphs_kept;
        assert_eq!((kept.peak.0 >> 20, kept.now.0 >> 20), (peak, now), "{scene}");
    }

    const GRAPH: &str = "GraphAlloc addr=a bytes=4M handle=g
        GraphFree addr=a handle=g
        GraphAlloc addr=b bytes=2M handle=g
        GraphInstantiate handle=e extra=g
        ";

    #[test]
    fn memory_is_there_from_the_first_launch_and_kept_until_trimmed() {
        check(GRAPH, 0, 0);
        check(&format!("{GRAPH}GraphLaunch handle=e"), 4, 4);
        // `b` is still in use.
        check(&format!("{GRAPH}GraphLaunch handle=e\nGraphMemTrim dev=0"), 4, 2);
        check(&format!("{GRAPH}GraphLaunch handle=e\nFreeAsync addr=b\nGraphMemTrim dev=0"), 4, 0);
        check(
            &format!("{GRAPH}GraphLaunch handle=e\nGraphExecDestroy handle=e\nGraphDestroy handle=g"),
            4,
            4,
        );
    }

    #[test]
    fn captured_allocations_belong_to_the_graph() {
        check(
            "CaptureBegin stream=1
             AllocAsync addr=a bytes=1M stream=1 captured=1
             FreeAsync addr=a stream=1 captured=1
             CaptureEnd stream=1 handle=g
             GraphInstantiate handle=e extra=g
             GraphLaunch handle=e",
            2,
            2,
        );
    }
}
