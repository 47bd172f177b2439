//! The first lines: what is wrong, who did it, in which call on which line, and how sure that is.

use super::findings::{CallText, Finding, Kind, Severity, rank_names};
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
            false => "; a trace is not complete, see below",
        };
        let base = match (is_either(finding), basis(finding.kind)) {
            (true, _) => "certain that the two do not fit together; which side is wrong cannot be known",
            (false, Basis::Calls) => "certain: the recorded calls of the ranks contradict each other",
            (false, Basis::Waits) if has_no_trace => {
                "certain that others wait for it there; only its own trace would say why"
            }
            (false, Basis::Waits) if finding.severity == Severity::Warning => {
                "it may still come: it works, or has not been away for long enough to call it a hang"
            }
            (false, Basis::Absence) if finding.kind == Kind::TraceStops => {
                "certain: its recorder wrote no more heartbeats; what the rank did since is not known"
            }
            (false, Basis::Waits) => "certain that others wait for it there; its own state below may say why",
            (false, Basis::Said) => "certain: it is in the trace",
            (false, Basis::Order) => "likely: it goes well only where the GPU can run both at once",
            (false, Basis::Times) if self.is_measured(finding) => "certain: it was measured on the GPUs",
            (false, Basis::Times) => "weak evidence: the clocks of the hosts, not the GPUs",
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

/// What a finding rests on.
enum Basis {
    /// Calls that do not fit together.
    Calls,
    /// That others wait for a rank that does not come.
    Waits,
    /// What NCCL or the driver said, or the program itself.
    Said,
    /// The order of calls on two communicators.
    Order,
    /// When something was called.
    Times,
    /// That there is no trace.
    Absence,
}

fn basis(kind: Kind) -> Basis {
    match kind {
        Kind::InitConflict
        | Kind::MissingCall
        | Kind::ExtraCall
        | Kind::SwappedCalls
        | Kind::OpMismatch
        | Kind::SizeMismatch
        | Kind::DtypeMismatch
        | Kind::RedopMismatch
        | Kind::RootMismatch
        | Kind::CaptureMismatch
        | Kind::WrongCommunicator
        | Kind::SwappedCommunicators
        | Kind::DeadlockCycle
        | Kind::UnmatchedSend
        | Kind::UnmatchedRecv
        | Kind::PeerSizeMismatch => Basis::Calls,
        Kind::MissingAtInit | Kind::MissingInSplit | Kind::MissingInShrink | Kind::RankStuck => Basis::Waits,
        Kind::RankExited
        | Kind::RankKilled
        | Kind::GroupIncomplete
        | Kind::Abort
        | Kind::AsyncError
        | Kind::FailedCall
        | Kind::OutOfMemory => Basis::Said,
        Kind::OrderInversion => Basis::Order,
        Kind::Straggler => Basis::Times,
        Kind::NoTrace | Kind::TraceStops => Basis::Absence,
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
        Kind::InitConflict => format!("{who} contradicted the others when {group} was made"),
        Kind::MissingAtInit => format!("{who} never came to the making of {group}"),
        Kind::MissingInSplit => format!("{who} never came to a split of {group}"),
        Kind::MissingInShrink => format!("{who} never came to a shrink of {group}"),
        Kind::MissingCall if finding.calls > 1 => {
            format!("{who} did not make {} calls on {group} that the others made", finding.calls)
        }
        Kind::ExtraCall if finding.calls > 1 => {
            format!("{who} made {} calls on {group} that the others did not make", finding.calls)
        }
        Kind::MissingCall => format!("{who} did not make a call on {group} that the others made"),
        Kind::ExtraCall => format!("{who} made a call on {group} that the others did not make"),
        Kind::SwappedCalls => format!("{who} made two calls on {group} in another order"),
        Kind::OpMismatch => format!("{who} called another operation on {group}"),
        Kind::SizeMismatch => format!("{who} called with another size on {group}"),
        Kind::DtypeMismatch => format!("{who} called with another datatype on {group}"),
        Kind::RedopMismatch => format!("{who} called with another reduction on {group}"),
        Kind::RootMismatch => format!("{who} called with another root on {group}"),
        Kind::CaptureMismatch => {
            format!("not all ranks captured a call on {group} into a graph, as {who} shows")
        }
        Kind::WrongCommunicator => format!("{who} called on {group}, the others on another communicator"),
        Kind::SwappedCommunicators => format!("{who} used two communicators in another order, {group} first"),
        Kind::DeadlockCycle => format!("{who} wait for each other on {group}"),
        Kind::UnmatchedSend => format!("no rank receives what {who} sent on {group}"),
        Kind::UnmatchedRecv => format!("no rank sends what {who} wants to receive on {group}"),
        Kind::PeerSizeMismatch => format!("{who} send and receive different sizes on {group}"),
        Kind::GroupIncomplete => format!("{who} opened a group of calls and never closed it"),
        Kind::Abort => format!("{who} gave up {group}"),
        Kind::AsyncError => format!("NCCL reported an error of {group} to {who}"),
        Kind::FailedCall => format!("a call of {who} failed"),
        Kind::OutOfMemory => format!("{who} ran out of memory"),
        Kind::RankExited => format!("{who} ended and did not come to a call on {group}"),
        Kind::RankKilled => format!("{who} was killed or crashed, and others wait for it on {group}"),
        Kind::RankStuck if finding.severity == Severity::Warning => {
            format!("{who} {has} not come to a call on {group} yet")
        }
        Kind::RankStuck => format!("{who} {does} not come to a call on {group}"),
        Kind::OrderInversion => format!("{who} use two communicators in different orders"),
        Kind::Straggler => format!("{who} {is} late again and again on {group}"),
        Kind::TraceStops => format!("the trace of {who} stops before the others"),
        Kind::NoTrace if finding.waiting.is_empty() => format!("{who} {has} no trace"),
        Kind::NoTrace => format!("all ranks wait, perhaps for {who}, which {has} no trace"),
    };
    let call = match finding.kind {
        // The call that they lack.
        Kind::MissingAtInit
        | Kind::MissingInSplit
        | Kind::MissingInShrink
        | Kind::MissingCall
        | Kind::RankExited
        | Kind::RankKilled
        | Kind::RankStuck
        | Kind::TraceStops
        | Kind::NoTrace => finding.others.as_ref(),
        Kind::InitConflict
        | Kind::ExtraCall
        | Kind::SwappedCalls
        | Kind::OpMismatch
        | Kind::SizeMismatch
        | Kind::DtypeMismatch
        | Kind::RedopMismatch
        | Kind::RootMismatch
        | Kind::CaptureMismatch
        | Kind::WrongCommunicator
        | Kind::SwappedCommunicators
        | Kind::DeadlockCycle
        | Kind::UnmatchedSend
        | Kind::UnmatchedRecv
        | Kind::PeerSizeMismatch
        | Kind::GroupIncomplete
        | Kind::Abort
        | Kind::AsyncError
        | Kind::FailedCall
        | Kind::OutOfMemory
        | Kind::OrderInversion
        | Kind::Straggler => finding.own.as_ref(),
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
