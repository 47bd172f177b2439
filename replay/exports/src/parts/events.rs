//! What to export, and the events of it in order, each with the books just after it.

use std::io;

use gputrace_schemas::event::{Event, EventKind, Nanos, Process};
use rustc_hash::FxHashSet;

use gputrace_analyse::live::{Native, When};
use gputrace_trace::clocks;
use gputrace_trace::ledger::{Ledger, OwnerId, asked_about};
use gputrace_trace::owners::TORCH;
use gputrace_trace::source::Source;

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
    pub(crate) fn source(&self) -> &'a Source {
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
        EventKind::Wait(wait) => asked_about(wait),
        _ => None,
    });
    asked.collect()
}

/// When each trace began, counted from the first one: [`clocks::origins`].
pub(crate) fn origins(sources: &[Source]) -> Vec<Nanos> {
    let processes: Vec<&Process> = sources.iter().map(|source| source.definitions().process()).collect();
    clocks::origins(&processes)
}

/// A process, for people.
pub(crate) fn process_name(process: &Process) -> String {
    let rank = process.rank.map_or_else(String::new, |rank| format!("rank {rank} "));
    format!("{rank}{}", process.command.join(" "))
}

/// Memory of an owner; PyTorch's in two parts as soon as its blocks are seen.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Part {
    Owner(OwnerId),
    Allocated(OwnerId),
    Cached(OwnerId),
}

impl Part {
    pub(crate) fn name(self, ledger: &Ledger) -> &str {
        match self {
            Part::Owner(owner) => ledger.sites.owner(owner),
            Part::Allocated(_) => "PyTorch allocated",
            Part::Cached(_) => "PyTorch cached",
        }
    }
}

/// What a device holds, by owner. The parts add up to what the driver had handed out.
pub(crate) fn parts_by_owner(ledger: &Ledger, device: i16) -> Vec<(Part, u64)> {
    let torch = ledger.torch(device).filter(|torch| torch.allocations > 0);
    let mut parts = vec![];
    let Some(books) = ledger.devices().get(&device) else { return parts };
    for part in books.physical.owners() {
        match torch {
            Some(torch) if ledger.sites.owner(part.id) == TORCH => {
                let allocated = torch.allocated.now.0.min(part.now.0);
                parts.push((Part::Allocated(part.id), allocated));
                parts.push((Part::Cached(part.id), part.now.0 - allocated));
            }
            _ => parts.push((Part::Owner(part.id), part.now.0)),
        }
    }
    parts
}
