//! Memory of CUDA graphs: what their nodes are, and that they were launched. A graph's events are kept until it and its executable
//! graphs are gone, and what they took was given back.

use super::{Born, driver_call};
use gputrace_schemas::event::{Action, Call, Event, ThreadId};
use std::collections::{BTreeMap, HashMap};

/// Graphs that are remembered: the oldest is forgotten first.
const MOST_GRAPHS: usize = 4096;
/// Events of one graph.
const MOST_NODES: usize = 65_536;

#[derive(Default)]
pub(super) struct Graphs {
    n_graphs: u64,
    groups: BTreeMap<u64, Group>,
    by_graph: HashMap<u64, u64>,
    by_exec: HashMap<u64, u64>,
    by_address: HashMap<u64, u64>,
    /// What threads have captured that are not at the end of their capture.
    captured: HashMap<ThreadId, Vec<Born>>,
}

/// A graph and what was made of it.
#[derive(Default)]
struct Group {
    events: Vec<Born>,
    /// The newest end of each address that was taken back outside of the graph.
    frees: HashMap<u64, Born>,
    /// Executable graphs that are there, and whether they were launched.
    execs: HashMap<u64, bool>,
    has_graph: bool,
    was_launched: bool,
}

impl Graphs {
    /// Whether there is nothing else in the call.
    pub(super) fn call(&mut self, order: u64, event: &Event, call: &Call) -> bool {
        let born = || Born { order, event: event.clone() };
        match call.action {
            Action::GraphAlloc | Action::GraphFree => {
                let id = self.group(call.handle);
                if call.action == Action::GraphAlloc {
                    self.by_address.insert(call.addr, id);
                }
                self.add(id, born());
                true
            }
            Action::AllocAsync | Action::FreeAsync if call.captured => {
                let captured = self.captured.entry(event.thread).or_default();
                if captured.len() < MOST_NODES {
                    captured.push(born());
                }
                true
            }
            Action::CaptureEnd => {
                let captured = std::mem::take(&mut self.captured);
                if !captured.is_empty() {
                    let id = self.group(call.handle);
                    for node in captured.into_values().flatten() {
                        if let Some(call) = driver_call(&node.event) {
                            self.by_address.insert(call.addr, id);
                        }
                        self.add(id, node);
                    }
                    self.add(id, born());
                }
                false
            }
            Action::GraphInstantiate => {
                if let Some(id) = self.by_graph.get(&call.extra).copied() {
                    self.by_exec.insert(call.handle, id);
                    self.add(id, born());
                    if let Some(group) = self.groups.get_mut(&id) {
                        group.execs.insert(call.handle, false);
                    }
                }
                true
            }
            Action::GraphLaunch => {
                if let Some(id) = self.by_exec.get(&call.handle).copied()
                    && let Some(group) = self.groups.get_mut(&id)
                {
                    group.was_launched = true;
                    if group.execs.insert(call.handle, true) == Some(false) {
                        self.add(id, born());
                    }
                }
                true
            }
            Action::GraphExecDestroy => {
                if let Some(id) = self.by_exec.remove(&call.handle) {
                    self.add(id, born());
                    if let Some(group) = self.groups.get_mut(&id) {
                        group.execs.remove(&call.handle);
                    }
                    self.forget(id);
                }
                true
            }
            Action::GraphDestroy => {
                if let Some(id) = self.by_graph.remove(&call.handle) {
                    self.add(id, born());
                    if let Some(group) = self.groups.get_mut(&id) {
                        group.has_graph = false;
                    }
                    self.forget(id);
                }
                true
            }
            Action::GraphMemTrim => {
                for group in self.groups.values_mut() {
                    group.was_launched &= !group.execs.is_empty();
                }
                let over: Vec<u64> = self.groups.keys().copied().collect();
                over.into_iter().for_each(|id| self.forget(id));
                false
            }
            Action::Free | Action::FreeAsync => {
                let group = self.by_address.get(&call.addr).and_then(|id| self.groups.get_mut(id));
                if let Some(group) = group {
                    group.frees.insert(call.addr, born());
                }
                false
            }
            Action::Alloc | Action::AllocAsync | Action::AllocManaged => {
                // The driver uses a graph's address again when the graph is gone.
                self.by_address.remove(&call.addr);
                false
            }
            _ => false,
        }
    }

    pub(super) fn events(&self, to: &mut Vec<Born>) {
        for group in self.groups.values() {
            to.extend(group.events.iter().chain(group.frees.values()).cloned());
        }
        to.extend(self.captured.values().flatten().cloned());
    }

    fn group(&mut self, graph: u64) -> u64 {
        if let Some(id) = self.by_graph.get(&graph) {
            return *id;
        }
        self.n_graphs += 1;
        let id = self.n_graphs;
        self.by_graph.insert(graph, id);
        self.groups.insert(id, Group { has_graph: true, ..Group::default() });
        if self.groups.len() > MOST_GRAPHS
            && let Some((oldest, _)) = self.groups.pop_first()
        {
            self.unlink(oldest);
        }
        id
    }

    fn add(&mut self, id: u64, born: Born) {
        if let Some(group) = self.groups.get_mut(&id)
            && group.events.len() < MOST_NODES
        {
            group.events.push(born);
        }
    }

    /// Forgets a graph that is gone with all that was made of it, unless its memory is still there.
    fn forget(&mut self, id: u64) {
        let is_gone = |group: &Group| !group.has_graph && group.execs.is_empty() && !group.was_launched;
        if self.groups.get(&id).is_some_and(is_gone) {
            self.groups.remove(&id);
            self.unlink(id);
        }
    }

    fn unlink(&mut self, id: u64) {
        for links in [&mut self.by_graph, &mut self.by_exec, &mut self.by_address] {
            links.retain(|_, of| *of != id);
        }
    }
}
