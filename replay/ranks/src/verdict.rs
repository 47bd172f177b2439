//! The first lines: what is wrong, who did it, in which call on which line, and how sure that is.

use super::findings::{About, Basis, Call, CallText, Finding, Kind, Severity, rank_names};
use super::report::JobReport;
use gputrace_report::model::{Mood, Section};

impl JobReport {
    /// What is wrong first, and how sure that is; `None` where nothing is.
    pub(super) fn headline(&self) -> Option<(Mood, String, String)> {
        let first = self.findings.first()?;
        let mood = if first.severity == Severity::Error { Mood::Bad } else { Mood::Warning };
        Some((mood, headline(first), self.certainty(first)))
    }

    /// How sure a finding is.
    fn certainty(&self, finding: &Finding) -> String {
        let has_no_trace = finding.ranks.iter().any(|rank| self.missing.contains(rank));
        let missing = match self.missing.as_slice() {
            [] => String::new(),
            _ if has_no_trace => String::new(),
            [one] => format!("; rank {one} has no trace and may be part of it"),
            several => format!("; {} have no trace and may be part of it", rank_names(several)),
        };
        let doubts = match self.doubts.is_empty() {
            true => "",
            false => "; a trace is incomplete, see below",
        };
        let About(_, basis, _) = finding.kind.about();
        let base = match (is_either(finding), basis) {
            (true, _) => "certain that the two do not match; which side is wrong cannot be determined",
            (false, Basis::Calls) => "certain: the recorded calls of the ranks contradict each other",
            (false, Basis::Waits) if has_no_trace => {
                "certain that others wait for it there; only its own trace would show why"
            }
            (false, Basis::Waits) if finding.severity == Severity::Warning => {
                "it may still come: it is working, or has not been idle for long enough to call it a hang"
            }
            (false, Basis::Absence) if finding.kind == Kind::TraceStops => {
                "certain: its recorder wrote no more heartbeats; it is not known what the rank did since"
            }
            (false, Basis::Waits) => {
                "certain that others wait for it there; its own state below may show why"
            }
            (false, Basis::Said) => "certain: it is in the trace",
            (false, Basis::Order) => "likely: it works only if the GPU can run both at once",
            (false, Basis::Times) if self.is_measured(finding) => "certain: it was measured on the GPUs",
            (false, Basis::Times) => "weak evidence: host clocks, not GPU times",
            (false, Basis::Absence) => "not certain: its trace is missing",
        };
        format!("{base}{missing}{doubts}")
    }

    /// A straggler on the GPU.
    fn is_measured(&self, finding: &Finding) -> bool {
        let mut arrivals = self.gpu.iter().flat_map(|gpu| &gpu.arrivals);
        arrivals.any(|row| row.is_straggler && finding.ranks == [row.rank])
    }

    /// The lines of a section that begins with the verdict.
    pub(super) fn with_headline(&self, section: Section) -> Section {
        match self.headline() {
            None => section,
            Some((mood, what, how_sure)) => section.line(mood, what).line(Mood::Note, how_sure),
        }
    }
}

/// There are two sides, and which is right is not known. In a circle all are on one.
fn is_either(finding: &Finding) -> bool {
    finding.undecided && finding.kind != Kind::DeadlockCycle
}

/// Who did what, and in which call.
#[must_use]
pub fn headline(finding: &Finding) -> String {
    let who = match finding.ranks.as_slice() {
        [] => "a rank".to_owned(),
        ranks => rank_names(ranks),
    };
    let (is, does, has) = match finding.ranks.len() {
        0 | 1 => ("is", "does", "has"),
        _ => ("are", "do", "have"),
    };
    let group = finding.communicator.as_deref().unwrap_or("a communicator");
    let what = match finding.kind {
        Kind::InitConflict => format!("{who} contradicted the others when {group} was created"),
        Kind::MissingAtInit => format!("{who} never joined the creation of {group}"),
        Kind::MissingInSplit => format!("{who} never joined a split of {group}"),
        Kind::MissingInShrink => format!("{who} never joined a shrink of {group}"),
        Kind::MissingCall if finding.calls > 1 => {
            format!("{who} did not make {} calls on {group} that the others made", finding.calls)
        }
        Kind::ExtraCall if finding.calls > 1 => {
            format!("{who} made {} calls on {group} that the others did not make", finding.calls)
        }
        Kind::MissingCall => format!("{who} did not make a call on {group} that the others made"),
        Kind::ExtraCall => format!("{who} made a call on {group} that the others did not make"),
        Kind::SwappedCalls => format!("{who} made two calls on {group} in a different order"),
        Kind::OpMismatch => format!("{who} called a different operation on {group}"),
        Kind::SizeMismatch => format!("{who} called with a different size on {group}"),
        Kind::DtypeMismatch => format!("{who} called with a different datatype on {group}"),
        Kind::RedopMismatch => format!("{who} called with a different reduction on {group}"),
        Kind::RootMismatch => format!("{who} called with a different root on {group}"),
        Kind::CaptureMismatch => {
            format!("not all ranks captured a call on {group} into a graph, as {who} shows")
        }
        Kind::WrongCommunicator => format!("{who} called on {group}, the others on another communicator"),
        Kind::SwappedCommunicators => {
            format!("{who} used two communicators in a different order, {group} first")
        }
        Kind::DeadlockCycle => format!("{who} wait for each other on {group}"),
        Kind::UnmatchedSend => format!("no rank receives what {who} sent on {group}"),
        Kind::UnmatchedRecv => format!("no rank sends what {who} waits to receive on {group}"),
        Kind::PeerSizeMismatch => format!("{who} send and receive different sizes on {group}"),
        Kind::GroupIncomplete => format!("{who} opened a group of calls and never closed it"),
        Kind::Abort => format!("{who} aborted {group}"),
        Kind::AsyncError => format!("NCCL reported an error of {group} to {who}"),
        Kind::FailedCall => format!("a call of {who} failed"),
        Kind::OutOfMemory => format!("{who} ran out of memory"),
        Kind::RankExited => format!("{who} exited without reaching a call on {group}"),
        Kind::RankKilled => format!("{who} was killed or crashed, and others wait for it on {group}"),
        Kind::RankStuck if finding.severity == Severity::Warning => {
            format!("{who} {has} not reached a call on {group} yet")
        }
        Kind::RankStuck => format!("{who} {does} not reach a call on {group}"),
        Kind::OrderInversion => format!("{who} use two communicators in different orders"),
        Kind::Straggler => format!("{who} {is} repeatedly late on {group}"),
        Kind::TraceStops => format!("the trace of {who} stops before the others"),
        Kind::NoTrace if finding.waiting.is_empty() => format!("{who} {has} no trace"),
        Kind::NoTrace => format!("all ranks wait, perhaps for {who}, which {has} no trace"),
    };
    let call = match finding.kind.about() {
        About(.., Call::Own) => finding.own.as_ref(),
        About(.., Call::Others) => finding.others.as_ref(),
    };
    let either = if is_either(finding) { "either side may be wrong: " } else { "" };
    match call.map(CallText::headline).filter(|call| !call.is_empty()) {
        Some(call) => format!("{either}{what}: {}", call.strip_prefix("out of memory: ").unwrap_or(&call)),
        None => format!("{either}{what}"),
    }
}

impl CallText {
    fn headline(&self) -> String {
        match (&self.place, self.call.is_empty()) {
            (Some(place), true) => place.text.clone(),
            _ => self.text(),
        }
    }
}
