//! Traces for other tools. A format is one file here and one line in [`EXPORTS`].
//!
//! Formats of one moment (flame graphs, profiles) show who held what, and add up to what `gputrace summary` says; formats
//! of the whole history are written event by event, so that a trace of any size needs no more memory than its live blocks.

use std::io::{self, Write};

use gputrace_schemas::event::{Event, EventKind, Nanos};

use crate::ledger::{Ledger, OUT_OF_MEMORY};
use crate::live::{Native, When};
use crate::source::Source;

mod chrome;
mod csv;
mod folded;
mod jsonl;
mod perfetto;
mod pprof;
mod speedscope;
mod torch_pickle;

/// What to export.
pub struct Request<'a> {
    /// The trace.
    pub source: &'a Source,
    /// The moment, for formats of one moment.
    pub when: When,
    /// Only this device, or all.
    pub device: Option<i16>,
    /// Whether native frames are shown beside lines of Python.
    pub native: Native,
}

impl Request<'_> {
    fn wants(&self, device: i16) -> bool {
        self.device.is_none_or(|wanted| wanted == device)
    }
}

/// A format.
pub trait Export: Sync {
    /// What `--format` calls it.
    fn name(&self) -> &'static str;
    /// What files of it end with, without the dot.
    fn extension(&self) -> &'static str;
    /// What it shows and who opens it.
    fn summary(&self) -> &'static str;
    /// Writes it.
    ///
    /// # Errors
    /// Those of `out`.
    fn export(&self, request: &Request, out: &mut dyn Write) -> io::Result<()>;
}

/// Every format.
pub const EXPORTS: &[&dyn Export] = &[
    &folded::Folded,
    &speedscope::Speedscope,
    &pprof::Pprof,
    &chrome::Chrome,
    &perfetto::Perfetto,
    &csv::Csv,
    &jsonl::Jsonl,
    &torch_pickle::TorchPickle,
];

/// Books the trace event by event, and shows what each did ([`Ledger::steps`]).
fn each_event(
    source: &Source,
    mut see: impl FnMut(&Ledger, &Event, Nanos) -> io::Result<()>,
) -> io::Result<()> {
    let definitions = source.definitions();
    let mut ledger = Ledger::default();
    ledger.keep_steps();
    let start = definitions.process().start;
    for event in source.events() {
        ledger.event(definitions, &event);
        let start = if start.0 > 0 { start } else { ledger.first.unwrap_or_default() };
        see(&ledger, &event, Nanos(event.time.0.saturating_sub(start.0)))?;
    }
    Ok(())
}

/// What changed of the memory that a device holds, by name: PyTorch's part is split in allocated and cached, so that the
/// parts add up to what the driver had handed out.
fn parts_by_owner(ledger: &Ledger, device: i16) -> Vec<(String, u64)> {
    let torch = ledger.torch(device).filter(|torch| torch.allocations > 0);
    let mut parts = vec![];
    let Some(books) = ledger.devices.get(&device) else { return parts };
    for part in books.physical.owners() {
        let owner = ledger.sites.owner(part.id);
        match torch {
            Some(torch) if owner == crate::owners::TORCH => {
                let allocated = torch.allocated.now.0.min(part.now.0);
                parts.push(("PyTorch allocated".into(), allocated));
                parts.push(("PyTorch cached".into(), part.now.0 - allocated));
            }
            _ => parts.push((owner.to_owned(), part.now.0)),
        }
    }
    parts
}

/// A request that failed: on which device, and for how much.
fn oom(kind: &EventKind) -> Option<(i16, u64)> {
    match kind {
        EventKind::BlockOom(oom) => Some((oom.device, oom.bytes.0)),
        EventKind::Call(call) if call.result == Some(OUT_OF_MEMORY) => Some((call.device, call.bytes.0)),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
