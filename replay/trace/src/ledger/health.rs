//! What happened to the process, its GPUs and its recording, as the recorder says: faults that NVML reported, times in which the process
//! was suspended, events that were lost.

use std::collections::BTreeMap;

use gputrace_schemas::event::{
    Action, Alive, Call, GpuFault, Lost, LostCause, Nanos, StackRead, SuspendedBy,
};

use super::Memory;
use crate::{Definitions, faults};

/// Most notes kept.
const MAX_NOTES: usize = 1000;
/// Most faults and suspensions kept; all are counted.
const MAX_KEPT: usize = 256;
/// Step of a checkpoint that takes the memory from the GPU, and the one that brings it back ([`Action::Checkpoint`]).
const TAKEN: u64 = 2;
const RESTORED: u64 = 3;

/// Faults, suspensions and what else the recorder says, oldest first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Health {
    /// Events that were lost, by cause.
    pub lost: BTreeMap<LostCause, u64>,
    /// Facts in words.
    pub notes: Vec<(Nanos, String)>,
    /// The newest heartbeat: when the recorder last saw the process alive, and what it saw.
    pub alive: Option<(Nanos, Alive)>,
    /// Faults of GPUs, with their times.
    pub faults: Vec<(Nanos, GpuFault)>,
    /// How many there were.
    pub n_faults: u64,
    /// Times in which the process was suspended.
    pub suspensions: Vec<Suspension>,
}

/// A time in which the process was suspended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Suspension {
    /// The cause.
    pub by: SuspendedBy,
    /// When it was seen to be.
    pub since: Nanos,
    /// When it was seen to go on; `None` if it did not.
    pub until: Option<Nanos>,
}

impl Health {
    /// Number of lost events.
    #[must_use]
    pub fn n_lost(&self) -> u64 {
        self.lost.values().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// What suspends the process now; where several do, what began last.
    #[must_use]
    pub fn suspended(&self) -> Option<&Suspension> {
        self.suspensions.iter().rev().find(|it| it.until.is_none())
    }

    /// The first critical fault, of which the others follow; else the last of all.
    #[must_use]
    pub fn worst(&self) -> Option<&(Nanos, GpuFault)> {
        self.faults.iter().find(|(_, fault)| faults::is_critical(fault)).or(self.faults.last())
    }

    fn fault(&mut self, time: Nanos, fault: GpuFault) {
        self.n_faults += 1;
        if self.faults.len() < MAX_KEPT {
            self.faults.push((time, fault));
        }
    }

    fn suspend(&mut self, time: Nanos, by: SuspendedBy, begins: bool) {
        let has_room = self.suspensions.len() < MAX_KEPT;
        let open = self.suspensions.iter_mut().rev().find(|it| it.by == by && it.until.is_none());
        match (open, begins) {
            (Some(open), false) => open.until = Some(time),
            (None, true) if has_room => {
                self.suspensions.push(Suspension { by, since: time, until: None });
            }
            // Told by the driver's call, and by the recorder that saw it.
            (Some(_), true) | (None, _) => {}
        }
    }
    pub(super) fn lost(&mut self, lost: &Lost) {
        let n = self.lost.entry(lost.cause).or_default();
        *n = n.saturating_add(lost.events);
    }

    pub(super) fn note(&mut self, time: Nanos, text: &str, memory: &Memory) {
        if let Some(alive) = Alive::parse(text) {
            self.alive = Some((time, alive));
        } else if let Some(fault) = GpuFault::parse(text) {
            self.fault(time, fault);
        } else if let Some((by, begins)) = SuspendedBy::parse(text) {
            // A process that holds nothing is not listed by the driver, whether or not it was suspended.
            if by != SuspendedBy::Checkpoint || !begins || memory.holds_on_devices() {
                self.suspend(time, by, begins);
            }
        } else if StackRead::parse(text).is_none() && self.notes.len() < MAX_NOTES {
            self.notes.push((time, text.to_owned()));
        }
    }

    /// A checkpoint, if it is one that the process took of itself.
    pub(super) fn call(&mut self, definitions: &dyn Definitions, time: Nanos, call: &Call) {
        let is_own = || call.handle == u64::from(definitions.process().pid);
        let is_told = call.result == Some(0) && matches!(call.extra, TAKEN | RESTORED);
        if call.action == Action::Checkpoint && is_told && is_own() {
            self.suspend(time, SuspendedBy::Checkpoint, call.extra == TAKEN);
        }
    }
}
