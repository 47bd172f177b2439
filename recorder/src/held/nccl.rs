//! Calls into NCCL that say something of what is held: those that are open, those that made communicators or took memory, and the
//! newest of each order of calls, which says how far a communicator has come.

use super::{Born, Table};
use gputrace_schemas::event::{CommId, Event, EventKind, NcclEnter, NcclExit, NcclOp, NcclSequence, UNKNOWN};
use std::collections::{HashMap, VecDeque};

/// `ncclInProgress`, nccl.h.
const IN_PROGRESS: i32 = 7;
/// The program's own operations that are kept.
const MOST_OPERATIONS: usize = 256;
/// Calls of one open group.
const MOST_GROUPED: usize = 4096;
/// Communicators and peers whose newest call is kept.
const MOST_ORDERS: usize = 65_536;
/// Calls that may be open.
const MOST_OPEN: usize = 65_536;

#[derive(Default)]
pub(super) struct Nccl {
    open: Table<u64, Open>,
    /// Calls that made communicators, by these.
    made: HashMap<CommId, Vec<Born>>,
    newest: HashMap<(CommId, NcclSequence), Vec<Born>>,
    operations: VecDeque<[Born; 2]>,
    groups: HashMap<u32, Vec<Born>>,
    /// Calls in which memory was taken that is held: how many objects, and the call.
    taken: Table<u64, (usize, Vec<Born>)>,
}

struct Open {
    born: Born,
    enter: NcclEnter,
}

impl Nccl {
    pub(super) fn enter(&mut self, order: u64, event: &Event, enter: &NcclEnter) {
        let born = Born { order, event: event.clone() };
        self.group(enter, &born);
        if self.open.len() < MOST_OPEN {
            self.open.insert(enter.call, Open { born, enter: *enter });
        }
    }

    pub(super) fn exit(&mut self, order: u64, event: &Event, exit: &NcclExit) {
        let born = Born { order, event: event.clone() };
        let Some(Open { born: began, enter }) = self.open.remove(&exit.call) else { return };
        self.group(&enter, &born);
        if enter.op == NcclOp::GroupEnd && enter.group_depth <= 1 {
            self.groups.remove(&enter.group);
        }
        if let Some((_, call)) = self.taken.get_mut(&exit.call) {
            call.push(born.clone());
        }
        if ![0, IN_PROGRESS].contains(&exit.result) {
            return;
        }
        use NcclOp::*;
        match enter.op {
            CommInit | CommInitAll | CommSplit | CommShrink | CommGrow => {
                self.made.entry(enter.comm).or_default().extend([began.clone(), born.clone()]);
            }
            CommDestroy | CommAbort => {
                self.made.remove(&enter.comm);
                self.newest.retain(|(comm, _), _| *comm != enter.comm);
                return;
            }
            RedOpCreate => {
                if self.operations.len() >= MOST_OPERATIONS {
                    self.operations.pop_front();
                }
                self.operations.push_back([began, born]);
                return;
            }
            _ => {}
        }
        let sequence = enter.op.sequence(enter.peer).filter(|_| enter.sequence != UNKNOWN);
        if let Some(sequence) = sequence
            && (self.newest.len() < MOST_ORDERS || self.newest.contains_key(&(enter.comm, sequence)))
        {
            self.newest.insert((enter.comm, sequence), vec![began, born]);
        }
    }

    /// Something was handed out.
    pub(super) fn born(&mut self, event: &Event) {
        let Some(number) = cause(event) else { return };
        if let Some((n, _)) = self.taken.get_mut(&number) {
            *n += 1;
        } else if let Some(open) = self.open.get(&number) {
            self.taken.insert(number, (1, vec![open.born.clone()]));
        }
    }

    /// It is held no more.
    pub(super) fn gone(&mut self, event: &Event) {
        let Some(number) = cause(event) else { return };
        if let Some((n, _)) = self.taken.get_mut(&number) {
            *n -= 1;
            if *n == 0 {
                self.taken.remove(&number);
            }
        }
    }

    pub(super) fn events(&self, to: &mut Vec<Born>) {
        to.extend(self.open.values().map(|open| open.born.clone()));
        to.extend(self.made.values().flatten().cloned());
        to.extend(self.newest.values().flatten().cloned());
        to.extend(self.operations.iter().flatten().cloned());
        to.extend(self.groups.values().flatten().cloned());
        to.extend(self.taken.values().flat_map(|(_, call)| call).cloned());
    }

    /// A call inside of a group that is open.
    fn group(&mut self, enter: &NcclEnter, born: &Born) {
        if enter.group != 0 {
            let calls = self.groups.entry(enter.group).or_default();
            if calls.len() < MOST_GROUPED {
                calls.push(born.clone());
            }
        }
    }
}

/// The call into NCCL in which something was handed out.
fn cause(event: &Event) -> Option<u64> {
    match &event.kind {
        EventKind::Call(call) => Some(call.nccl_call).filter(|call| *call != 0),
        _ => None,
    }
}
