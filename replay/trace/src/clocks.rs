//! The times of several traces on one clock.

use gputrace_schemas::event::{Nanos, Process};

/// When each process began to be traced, counted from the first one: by the clock of the machine where all ran since the same boot, else
/// by the time of day, on which clocks of several machines agree only to milliseconds.
#[must_use]
pub fn origins(processes: &[&Process]) -> Vec<Nanos> {
    let processes = || processes.iter().copied();
    let boot = processes().next().map_or("", |process| &process.boot);
    let is_one_machine = !boot.is_empty() && processes().all(|process| process.boot == boot);
    let start = |process: &Process| if is_one_machine { process.start.0 } else { process.start_realtime };
    let first = processes().map(start).filter(|start| *start > 0).min().unwrap_or(0);
    processes().map(|process| Nanos(start(process).saturating_sub(first))).collect()
}
