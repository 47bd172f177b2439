//! What to export, and the events of it in order, each with the books just after it.

use std::io;

use gputrace_schemas::event::{Event, EventKind, Nanos, Process, WaitAction};
use rustc_hash::FxHashSet;

use crate::analyse::live::{Native, When};
use crate::ledger::Ledger;
use crate::trace::source::Source;

/// What to export.
pub struct Request<'a> {
    /// The trace; several, where a format [takes](super::super::Export::takes) them.
    pub sources: &'a [Source],
    /// The moment, for formats of one moment.
    pub when: When,
    /// Only this device, or all.
    pub device: Option<i16>,
    /// Whether native frames are shown beside lines of Python.
    pub native: Native,
    /// What to show the difference to, where a format takes it.
    pub before: Option<&'a Source>,
    /// Also memory that is not PyTorch's, where a format leaves it out otherwise.
    pub non_torch: bool,
}

impl<'a> Request<'a> {
    /// One trace as a whole.
    #[must_use]
    pub fn of(sources: &'a [Source]) -> Request<'a> {
        Request {
            sources,
            when: When::Peak,
            device: None,
            native: Native::Hidden,
            before: None,
            non_torch: false,
        }
    }

    pub(crate) fn wants(&self, device: i16) -> bool {
        self.device.is_none_or(|wanted| wanted == device)
    }

    /// The trace of a format that takes one.
    pub(in crate::exports) fn source(&self) -> &'a Source {
        &self.sources[0]
    }
}

/// Books a trace event by event, and shows what each did ([`Ledger::steps`]) and when it was; `origin` is
/// the time of its beginning.
pub(crate) fn each_event(
    source: &Source,
    origin: Nanos,
    mut see: impl FnMut(&Ledger, &Event, Nanos) -> io::Result<()>,
) -> io::Result<()> {
    let definitions = source.definitions();
    let mut ledger = Ledger::knowing(own_events(source));
    ledger.keep_steps();
    let start = source.start();
    for event in source.events() {
        ledger.event(definitions, &event);
        let time = origin.0.saturating_add(event.time.0.saturating_sub(start.0));
        see(&ledger, &event, Nanos(time))?;
    }
    Ok(())
}

/// The stream events that PyTorch's allocator asks for at some time: what is written down cannot be taken back when the trace
/// shows later that a free waited for one.
fn own_events(source: &Source) -> FxHashSet<u64> {
    let asked = source.events().filter_map(|event| match &event.kind {
        EventKind::Wait(wait) if wait.action != WaitAction::Record => Some(wait.event),
        _ => None,
    });
    asked.collect()
}

/// When each trace began, counted from the first one: by the clock of the machine where all ran since the same boot, else
/// by the time of day, which clocks of several machines agree on only to milliseconds.
pub(crate) fn origins(sources: &[Source]) -> Vec<Nanos> {
    let processes = || sources.iter().map(|source| source.definitions().process());
    let boot = processes().next().map_or("", |process| &process.boot);
    let is_one_machine = !boot.is_empty() && processes().all(|process| process.boot == boot);
    let start = |process: &Process| if is_one_machine { process.start.0 } else { process.start_realtime };
    let first = processes().map(start).filter(|start| *start > 0).min().unwrap_or(0);
    processes().map(|process| Nanos(start(process).saturating_sub(first))).collect()
}

/// What changed of the memory that a device holds, by name: PyTorch's part is split in allocated and cached, so that the
/// parts add up to what the driver had handed out.
pub(crate) fn parts_by_owner(ledger: &Ledger, device: i16) -> Vec<(String, u64)> {
    let torch = ledger.torch(device).filter(|torch| torch.allocations > 0);
    let mut parts = vec![];
    let Some(books) = ledger.devices.get(&device) else { return parts };
    for part in books.physical.owners() {
        let owner = ledger.sites.owner(part.id);
        match torch {
            Some(torch) if owner == crate::trace::owners::TORCH => {
                let allocated = torch.allocated.now.0.min(part.now.0);
                parts.push(("PyTorch allocated".into(), allocated));
                parts.push(("PyTorch cached".into(), part.now.0 - allocated));
            }
            _ => parts.push((owner.to_owned(), part.now.0)),
        }
    }
    parts
}
