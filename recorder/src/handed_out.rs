//! What the driver has handed out to the process, by device: a few of the ledger's numbers while the process runs, for
//! [`crate::nvml_process`].

use crate::drain::{Happened, Stamped};
use crate::nvml_process::HandedOut;
use gputrace_ring::record::{Action, Call};
use std::collections::HashMap;

/// Pieces of memory that are remembered: beyond, a process asks the driver too often to be told by its changes.
const MOST: usize = 1 << 18;

/// The books.
#[derive(Default)]
pub(crate) struct HandedOutBooks {
    pieces: HashMap<(Kind, u64), (i16, u64)>,
    totals: HashMap<i16, u64>,
    changes: Vec<HandedOut>,
}

/// What the number of a piece is.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Address,
    Handle,
}

impl HandedOutBooks {
    /// Takes note of a call, at its time.
    pub(crate) fn event(&mut self, stamped: &Stamped, time: u64) {
        let Happened::Call { call, action, result: Some(0), .. } = &stamped.what else { return };
        if call.flags & (Call::HOST | Call::CAPTURED) != 0 {
            return;
        }
        let device = i16::from(call.device);
        match action {
            Action::Alloc => self.add((Kind::Address, call.addr), device, call.bytes, time),
            Action::Create => self.add((Kind::Handle, call.handle), device, call.bytes, time),
            Action::Free => self.remove((Kind::Address, call.addr), time),
            Action::Release => self.remove((Kind::Handle, call.handle), time),
            // Memory of pools, graphs and arrays comes and goes without a call that says how much; a context takes all
            // of its memory with it, which then shows as changes that do not agree.
            _ => {}
        }
    }

    /// What has changed since this was asked last.
    pub(crate) fn take(&mut self) -> Vec<HandedOut> {
        std::mem::take(&mut self.changes)
    }

    fn add(&mut self, piece: (Kind, u64), device: i16, bytes: u64, time: u64) {
        if self.pieces.len() < MOST && self.pieces.insert(piece, (device, bytes)).is_none() {
            let total = self.totals.entry(device).or_default();
            *total = total.saturating_add(bytes);
            self.changes.push(HandedOut { time, device, bytes: *total });
        }
    }

    fn remove(&mut self, piece: (Kind, u64), time: u64) {
        if let Some((device, bytes)) = self.pieces.remove(&piece) {
            let total = self.totals.entry(device).or_default();
            *total = total.saturating_sub(bytes);
            self.changes.push(HandedOut { time, device, bytes: *total });
        }
    }
}
