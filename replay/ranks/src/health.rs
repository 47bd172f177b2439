//! Faults of the GPUs of a job's ranks, and ranks that were suspended: added to what is said of these ranks.

use gputrace_schemas::event::Nanos;
use gputrace_trace::faults;
use gputrace_trace::ledger::Health;
use serde::{Deserialize, Serialize};

use super::calls::Participant;
use super::findings::Finding;
use super::jobs::Job;

/// Faults of a rank that are kept, the first of them.
const MOST: usize = 8;

/// What happened to a process from outside.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Trouble {
    /// When.
    pub time: Nanos,
    /// In a sentence's words.
    pub text: String,
}

/// What may explain that a process is late or ended: critical faults of its GPUs, and what suspends it.
pub(super) fn troubles(process: &gputrace_schemas::event::Process, health: &Health) -> Vec<Trouble> {
    let critical = health.faults.iter().filter(|(_, fault)| faults::is_critical(fault));
    let of_gpu =
        critical.map(|(time, fault)| Trouble { time: *time, text: faults::text(process, *time, fault) });
    let suspended = health.suspended().map(|it| Trouble {
        time: it.since,
        text: format!("suspended {} since {}", it.by.text(), faults::clock(process, it.since)),
    });
    suspended.into_iter().chain(of_gpu).take(MOST).collect()
}

/// Adds them to the findings about their ranks; what no finding is about becomes a note.
pub(super) fn tell(
    participants: &[Participant],
    job: &Job,
    findings: &mut [Finding],
    notes: &mut Vec<String>,
) {
    for actor in &job.actors {
        let troubles = &participants[actor.participant].troubles;
        let Some(first) = troubles.first() else { continue };
        let more = match troubles.len() - 1 {
            0 => String::new(),
            n => format!(", and {n} more"),
        };
        let text = format!("rank {}: {}{more}", actor.rank, first.text);
        let mut is_told = false;
        for finding in findings.iter_mut().filter(|finding| finding.ranks.contains(&actor.rank)) {
            finding.text += &format!(". {}", super::show::capital(&text));
            is_told = true;
        }
        if !is_told {
            notes.push(text);
        }
    }
}
