//! What happened to the process and its GPUs from outside: faults that NVML reported, and times in which the process was suspended.

use super::Ledger;
use crate::faults;
use gputrace_schemas::event::{Alive, Call, GpuFault, Nanos, StackRead, SuspendedBy};

/// Most notes kept.
const MAX_NOTES: usize = 1000;
/// Most faults and suspensions kept; all are counted.
const MAX_KEPT: usize = 256;
/// Step of a checkpoint that takes the memory from the GPU, and the one that brings it back ([`Action::Checkpoint`](gputrace_schemas::event::Action)).
const TAKEN: u64 = 2;
const RESTORED: u64 = 3;

/// Faults and suspensions, oldest first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Health {
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
}

impl Ledger {
    pub(super) fn note(&mut self, time: Nanos, text: &str) {
        if let Some(alive) = Alive::parse(text) {
            self.alive = Some((time, alive));
        } else if let Some(fault) = GpuFault::parse(text) {
            self.health.fault(time, fault);
        } else if let Some((by, begins)) = SuspendedBy::parse(text) {
            // A process that holds nothing is not listed by the driver, whether or not it was suspended.
            let is_meant = by != SuspendedBy::Checkpoint || !begins || self.holds_on_devices();
            if is_meant {
                self.health.suspend(time, by, begins);
            }
        } else if StackRead::parse(text).is_none() && self.notes.len() < MAX_NOTES {
            self.notes.push((time, text.to_owned()));
        }
    }

    fn holds_on_devices(&self) -> bool {
        self.devices.iter().any(|(device, books)| *device >= 0 && books.physical.now().bytes.0 > 0)
    }

    /// A checkpoint that the process took of itself.
    pub(super) fn checkpoint(&mut self, time: Nanos, call: &Call, pid: u32) {
        if call.result == Some(0) && call.handle == u64::from(pid) && matches!(call.extra, TAKEN | RESTORED) {
            self.health.suspend(time, SuspendedBy::Checkpoint, call.extra == TAKEN);
        }
    }
}
