//! What happened to a process from outside and may explain that it is late or ended.

use gputrace_schemas::event::{Nanos, Process};
use gputrace_trace::faults;
use gputrace_trace::ledger::Health;
use serde::{Deserialize, Serialize};

/// Faults of a rank that are kept, the first of them.
const MOST: usize = 8;

/// Events of a process from outside.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Trouble {
    /// When.
    pub time: Nanos,
    /// In a sentence's words.
    pub text: String,
}

/// What may explain that a process is late or ended: critical faults of its GPUs, and what suspends it.
pub(super) fn troubles(process: &Process, health: &Health) -> Vec<Trouble> {
    let critical = health.faults.iter().filter(|(_, fault)| faults::is_critical(fault));
    let of_gpu =
        critical.map(|(time, fault)| Trouble { time: *time, text: faults::text(process, *time, fault) });
    let suspended = health.suspended().map(|it| Trouble {
        time: it.since,
        text: format!("suspended {} since {}", it.by.text(), faults::clock(process, it.since)),
    });
    suspended.into_iter().chain(of_gpu).take(MOST).collect()
}
