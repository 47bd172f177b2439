//! Faults of the GPUs of a job's ranks, and ranks that were suspended ([`crate::troubles`]): added to the findings about these ranks.

use super::calls::Participant;
use super::findings::Finding;
use super::jobs::Job;

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
