//! Memory that NCCL took, by communicator and by the program's call that made it take it.

use std::collections::BTreeMap;

use gputrace_schemas::event::{
    Call, CommId, Communicator, Nanos, NcclEnter, NcclExit, NcclOp, NcclTimed, NcclTiming,
};
use rustc_hash::{FxHashMap, FxHashSet};
use serde::{Deserialize, Serialize};

use super::Effect;
use super::amounts::Meter;
use super::driver::{Change, Object, Shelf};
use super::sites::SiteId;
use crate::Definitions;

/// The books of one communicator of a process.
#[derive(Clone, Debug, Default)]
pub struct CommBooks {
    /// Its facts in the trace.
    pub facts: Communicator,
    /// The place where it was created.
    pub made_at: Option<SiteId>,
    /// Memory of devices.
    pub device: Meter,
    /// Memory of the host that the driver knows.
    pub host: Meter,
    /// Memory of devices by the line of the program whose call made NCCL take it.
    pub causes: BTreeMap<SiteId, Meter>,
    /// Collectives, sends, receives and one-sided calls.
    pub n_calls: u64,
    /// When the newest of them was made.
    pub last_call: Option<Nanos>,
}

/// Launches of NCCL whose time on the GPU was to be measured (`gputrace record --nccl-timing`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct GpuTimed {
    /// Measured, and seen to end.
    pub finished: u64,
    /// Enqueued, and never seen to end: the process ended before, or they hung.
    pub unfinished: u64,
    /// Not measured: captured into a graph.
    pub captured: u64,
    /// Not measured: too many waited for the GPU.
    pub no_events: u64,
    /// Not measured: enqueued by a thread of NCCL's (`ncclInProgress`).
    pub in_progress: u64,
    /// Not measured: the driver refused.
    pub refused: u64,
}

impl GpuTimed {
    /// For people; `None` where nothing was to be measured.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        if *self == GpuTimed::default() {
            return None;
        }
        let mut parts = vec![format!("{} launches of NCCL timed on the GPU", self.finished)];
        for (n, what) in [
            (self.unfinished, "enqueued, but no end seen"),
            (self.captured, "not timed: captured into a graph"),
            (self.no_events, "not timed: too many waited for the GPU"),
            (self.in_progress, "not timed: NCCL launched them in a thread of its own"),
            (self.refused, "not timed: the driver refused an event"),
        ] {
            if n > 0 {
                parts.push(format!("{n} {what}"));
            }
        }
        Some(parts.join("; "))
    }
}

/// Communicators that one call may work for: as many as a process has devices, and more.
const MOST_AT_ONCE: usize = 1024;

/// The books of all communicators of a process.
#[derive(Clone, Debug, Default)]
pub(super) struct Communicators {
    pub(super) books: BTreeMap<CommId, CommBooks>,
    /// Where calls into NCCL were made from that have not returned, or whose work goes on behind the program's back.
    calls: FxHashMap<u64, (SiteId, bool)>,
    /// Communicators that a call works for at once: `ncclCommInitAll` makes one for each device, and the end of a group begins
    /// what all in it were asked for. Which of them memory is for shows by its device.
    several: FxHashMap<u64, Vec<CommId>>,
    /// Communicators that the calls of an open group are for.
    groups: FxHashMap<u32, Vec<CommId>>,
    /// Whose an object is, by its serial number.
    owners: FxHashMap<u64, (CommId, SiteId)>,
    pub(super) timed: GpuTimed,
    /// Launches that are not seen to end yet.
    launched: FxHashSet<u64>,
}

impl Communicators {
    pub(super) fn enter(
        &mut self,
        enter: &NcclEnter,
        time: Nanos,
        site: SiteId,
        facts: Option<&Communicator>,
    ) {
        use NcclOp::*;
        let makes = matches!(enter.op, CommInit | CommInitAll | CommSplit | CommShrink | CommGrow);
        self.calls.insert(enter.call, (site, makes));
        self.note_several(enter);
        if enter.comm == CommId(0) {
            return;
        }
        let books = self.books.entry(enter.comm).or_default();
        if let Some(facts) = facts {
            books.facts = facts.clone();
        }
        if makes {
            books.made_at = Some(site);
        }
        if enter.op.is_collective() || matches!(enter.op, Send | Receive | PutSignal | Signal | WaitSignal) {
            books.n_calls += 1;
            books.last_call = Some(time);
        }
    }

    fn note_several(&mut self, enter: &NcclEnter) {
        let is_new = |comms: &[CommId]| comms.len() < MOST_AT_ONCE && !comms.contains(&enter.comm);
        match enter.op {
            NcclOp::CommInitAll => {
                let n = u32::try_from(enter.count).unwrap_or(0).min(MOST_AT_ONCE as u32);
                let all = (0..n).filter_map(|rank| enter.comm.0.checked_add(rank)).map(CommId);
                self.several.insert(enter.call, all.collect());
            }
            NcclOp::GroupEnd if enter.group_depth <= 1 => {
                if let Some(comms) = self.groups.remove(&enter.group) {
                    self.several.insert(enter.call, comms);
                }
            }
            _ if enter.group != 0 && enter.comm != CommId(0) => {
                let comms = self.groups.entry(enter.group).or_default();
                if is_new(comms) {
                    comms.push(enter.comm);
                }
            }
            _ => {}
        }
    }

    /// For which communicator memory of a device is.
    fn comm_of(&self, call: &Call, object: &Object, definitions: &dyn Definitions) -> CommId {
        if call.comm != CommId(0) {
            return call.comm;
        }
        let is_its =
            |comm: &&CommId| definitions.communicator(**comm).is_some_and(|it| it.device == object.device);
        let mut its = self.several.get(&call.nccl_call).into_iter().flatten().filter(is_its);
        match (its.next(), its.next()) {
            (Some(comm), None) => *comm,
            _ => CommId(0),
        }
    }

    pub(super) fn exit(&mut self, exit: &NcclExit) {
        if self.calls.get(&exit.call).is_some_and(|(_, makes)| !makes) {
            self.calls.remove(&exit.call);
            self.several.remove(&exit.call);
        }
        match exit.timed {
            None => {}
            Some(NcclTimed::Enqueued) => {
                self.launched.insert(exit.call);
                self.timed.unfinished += 1;
            }
            Some(NcclTimed::Capture) => self.timed.captured += 1,
            Some(NcclTimed::NoEvents) => self.timed.no_events += 1,
            Some(NcclTimed::InProgress) => self.timed.in_progress += 1,
            Some(NcclTimed::Refused) => self.timed.refused += 1,
        }
    }

    /// The launch has ended; that of a group for one of its communicators.
    pub(super) fn ran(&mut self, timing: &NcclTiming) {
        if self.launched.remove(&timing.call) {
            self.timed.unfinished -= 1;
            self.timed.finished += 1;
        }
    }

    /// Books what a call changed.
    pub(super) fn call(&mut self, definitions: &dyn Definitions, time: Nanos, call: &Call, effect: &Effect) {
        for change in &effect.changes {
            match change {
                Change::Gained(object) => self.gained(time, call, object, definitions),
                Change::Freed(object) => self.lost(object),
                Change::Dropped(_) | Change::Mapped(_) | Change::Unmapped(_) => {}
                Change::Reserved(..) | Change::Unreserved(..) | Change::GraphsKeep(..) => {}
            }
        }
    }

    /// NCCL took `object` by `call`.
    fn gained(&mut self, time: Nanos, call: &Call, object: &Object, definitions: &dyn Definitions) {
        let comm = self.comm_of(call, object, definitions);
        if comm == CommId(0) {
            return;
        }
        let cause = self.calls.get(&call.nccl_call).map_or(object.site, |(site, _)| *site);
        let books = self.books.entry(comm).or_default();
        if let Some(facts) = definitions.communicator(comm).filter(|_| books.facts == Communicator::default())
        {
            books.facts = facts.clone();
        }
        match object.shelf() {
            Shelf::Physical(_) => {
                books.device.gain(time, object.bytes);
                books.causes.entry(cause).or_default().gain(time, object.bytes);
            }
            Shelf::Host => books.host.gain(time, object.bytes),
            Shelf::Managed(_) | Shelf::Graphs(_) | Shelf::Imported(_) => return,
        }
        self.owners.insert(object.serial, (comm, cause));
    }

    fn lost(&mut self, object: &Object) {
        let Some((comm, cause)) = self.owners.remove(&object.serial) else { return };
        let Some(books) = self.books.get_mut(&comm) else { return };
        match object.shelf() {
            Shelf::Host => books.host.lose(object.bytes),
            _ => {
                books.device.lose(object.bytes);
                books.causes.entry(cause).or_default().lose(object.bytes);
            }
        }
    }
}
