//! What NCCL itself said: calls that failed, and errors that it reported.

use crate::calls::{FailedCall, Lane};
use crate::findings::{CallText, Finding, Kind, Place, Severity};
use crate::jobs::Member;
use crate::show;
use gputrace_trace::words;

use super::Waits;

impl Waits<'_> {
    /// Errors that NCCL reported, whether or not a rank waits.
    pub(super) fn errors(&self, known: &[Finding], new: &[Finding]) -> Vec<Finding> {
        let mut findings = vec![];
        for (idx, joined) in self.job.communicators.iter().enumerate() {
            for (_, member) in joined.all() {
                let participant = &self.participants[member.participant];
                let membership = &participant.memberships[member.membership];
                let rank = self.job.rank(member);
                if let Some((time, error, place)) = membership.async_error {
                    let n = membership.lane(Lane::Collective).map_or(0, |sequence| sequence.len() as u64);
                    let last = n.saturating_sub(1);
                    let mut finding = Finding::new(Kind::AsyncError, Severity::Error, vec![rank]).on(
                        &self.job.communicators[idx].label,
                        Lane::Collective,
                        last,
                    );
                    finding.own = self.text_of(member, Lane::Collective, last as usize);
                    finding.text = format!(
                        "NCCL reported {} of {} to rank {rank} {} before its end{}; its latest of {n} collectives there: {}",
                        result_name(error),
                        joined.label,
                        show::nanos(participant.end.0.saturating_sub(time.0) as i64),
                        Place::of(participant, place)
                            .map_or_else(String::new, |place| format!(", queried at {}", place.text)),
                        finding.own.as_ref().map_or_else(|| "none".to_owned(), CallText::text),
                    );
                    findings.push(finding);
                }
            }
        }
        for (idx, actor) in self.job.actors.iter().enumerate() {
            let participant = self.participant(idx);
            for failed in &participant.failed_calls {
                let kind = failed.refused.map_or(Kind::FailedCall, |_| Kind::OutOfMemory);
                let already = |finding: &Finding| finding.kind == kind && finding.ranks == [actor.rank];
                if known.iter().chain(new).any(already) {
                    continue;
                }
                let mut finding = Finding::new(kind, Severity::Error, vec![actor.rank]);
                let joined = failed.membership.and_then(|membership| {
                    let member = Member { participant: actor.participant, membership };
                    self.job
                        .communicators
                        .iter()
                        .find(|joined| joined.all().any(|(_, other)| other == member))
                });
                finding.communicator = joined.map(|joined| joined.label.clone());
                if let Some((lane, n)) = failed.spot {
                    (finding.lane, finding.sequence) = (Some(lane.name()), Some(n));
                }
                let own = CallText {
                    rank: actor.rank,
                    call: failed.op.to_string(),
                    place: Place::of(participant, failed.place),
                    time_ns: failed.time.0,
                };
                finding.text = format!("rank {} {}", actor.rank, failure(failed, &own).1);
                finding.own = Some(own);
                findings.push(finding);
            }
        }
        findings
    }
}

/// What became of a call that failed: the kind of finding, and in words.
pub(super) fn failure(failed: &FailedCall, own: &CallText) -> (Kind, String) {
    let result = result_name(failed.result);
    match failed.refused {
        Some(refused) => {
            let (bytes, own) = (words::bytes(refused), own.text());
            (
                Kind::OutOfMemory,
                format!("ran out of memory in {own}: NCCL was refused {bytes} there, and returned {result}"),
            )
        }
        None => (Kind::FailedCall, format!("got {result} from {}", own.text())),
    }
}

/// `ncclResult_t` (nccl.h 2.32).
fn result_name(result: i32) -> String {
    const NAMES: [&str; 9] = [
        "success",
        "unhandled CUDA error",
        "system error",
        "internal error",
        "invalid argument",
        "invalid usage",
        "remote error",
        "in progress",
        "timeout",
    ];
    let name = usize::try_from(result).ok().and_then(|result| NAMES.get(result));
    name.map_or_else(|| format!("error {result}"), |name| format!("'{name}' ({result})"))
}
