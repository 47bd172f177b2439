//! Memory that NCCL took, by communicator and by the program's call that made it take it.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Call, CommId, Communicator, Nanos, NcclEnter, NcclOp};
use rustc_hash::FxHashMap;

use super::amounts::Meter;
use super::driver::{Object, Shelf};
use super::sites::SiteId;

/// The books of one communicator of a process.
#[derive(Clone, Debug, Default)]
pub struct CommBooks {
    /// What the trace says of it.
    pub facts: Communicator,
    /// Where it was made.
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

/// The books of all communicators of a process.
#[derive(Clone, Debug, Default)]
pub(super) struct Communicators {
    pub(super) books: BTreeMap<CommId, CommBooks>,
    /// Where calls into NCCL were made from that have not returned, or whose work goes on behind the program's back.
    calls: FxHashMap<u64, (SiteId, bool)>,
    /// Whose an object is, by its serial number.
    owners: FxHashMap<u64, (CommId, SiteId)>,
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

    pub(super) fn exit(&mut self, call: u64) {
        if self.calls.get(&call).is_some_and(|(_, makes)| !makes) {
            self.calls.remove(&call);
        }
    }

    /// NCCL took `object` by `call`.
    pub(super) fn gained(&mut self, time: Nanos, call: &Call, object: &Object, facts: Option<&Communicator>) {
        if call.comm == CommId(0) {
            return;
        }
        let cause = self.calls.get(&call.nccl_call).map_or(object.site, |(site, _)| *site);
        let books = self.books.entry(call.comm).or_default();
        if let Some(facts) = facts.filter(|_| books.facts == Communicator::default()) {
            books.facts = facts.clone();
        }
        match object.shelf() {
            Shelf::Physical(_) => {
                books.device.gain(time, object.bytes);
                books.causes.entry(cause).or_default().gain(time, object.bytes);
            }
            Shelf::Host => books.host.gain(time, object.bytes),
            Shelf::Managed(_) | Shelf::Graphs(_) | Shelf::Nowhere => return,
        }
        self.owners.insert(object.serial, (call.comm, cause));
    }

    pub(super) fn lost(&mut self, object: &Object) {
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
