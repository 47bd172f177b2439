//! What is wrong with a job's communication, in a fixed shape.

use gputrace_schemas::event::Nanos;
use serde::Serialize;

use super::calls::{CallKind, Lane, Participant, PlaceId};
use gputrace_trace::ledger::Site;
pub(crate) use gputrace_trace::words::{rank_list, rank_names, ranks_wait};

/// What kind of trouble.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub enum Kind {
    /// A rank gave NCCL another rank or number of ranks than fits.
    InitConflict,
    /// Ranks wait in the making of a communicator for one that never came.
    MissingAtInit,
    /// Ranks wait in a split for one that never came.
    MissingInSplit,
    /// Ranks wait in a shrink for one that never came.
    MissingInShrink,
    /// A rank did not make a call that the others made.
    MissingCall,
    /// A rank made a call that the others did not make.
    ExtraCall,
    /// A rank made two calls in the other order.
    SwappedCalls,
    /// A rank called another operation.
    OpMismatch,
    /// Other number of elements.
    SizeMismatch,
    /// Other datatype.
    DtypeMismatch,
    /// Other reduction.
    RedopMismatch,
    /// Other root.
    RootMismatch,
    /// Captured into a graph on some ranks only.
    CaptureMismatch,
    /// A rank made a call on another communicator than the others.
    WrongCommunicator,
    /// Ranks use two communicators in different orders and wait for each other.
    SwappedCommunicators,
    /// Ranks wait for each other in a circle.
    DeadlockCycle,
    /// No rank receives what a rank sends.
    UnmatchedSend,
    /// No rank sends what a rank wants to receive.
    UnmatchedRecv,
    /// What is sent and what is received differ in size.
    PeerSizeMismatch,
    /// A group was opened and never closed: what is in it was never started.
    GroupIncomplete,
    /// A rank gave the communicator up.
    Abort,
    /// NCCL reported an error of a communicator.
    AsyncError,
    /// A call failed.
    FailedCall,
    /// A rank ran out of memory and the others wait for it.
    OutOfMemory,
    /// A rank ended by itself and the others wait for it.
    RankExited,
    /// A rank was killed before the others, who wait for it.
    RankKilled,
    /// A rank is somewhere else and the others wait for it.
    RankStuck,
    /// Ranks use two communicators in different orders.
    OrderInversion,
    /// A rank comes last again and again.
    Straggler,
    /// A rank has no trace.
    NoTrace,
    /// The recorder of a rank, or its machine, ended before the others.
    TraceStops,
}

impl Kind {
    /// It is about a rank that others may wait for, and not about one that calls nothing of NCCL or comes late.
    #[must_use]
    pub fn is_wait(self) -> bool {
        !matches!(self, Kind::Straggler | Kind::NoTrace | Kind::OrderInversion | Kind::TraceStops)
    }

    /// Name for people.
    #[must_use]
    pub fn title(self) -> &'static str {
        let About(title, ..) = self.about();
        title
    }

    /// What is the same in all findings of this kind.
    #[must_use]
    pub fn about(self) -> About {
        match self {
            Kind::InitConflict => About("conflicting init", Basis::Calls, Call::Own),
            Kind::MissingAtInit => About("missing at init", Basis::Waits, Call::Others),
            Kind::MissingInSplit => About("missing in split", Basis::Waits, Call::Others),
            Kind::MissingInShrink => About("missing in shrink", Basis::Waits, Call::Others),
            Kind::MissingCall => About("missing call", Basis::Calls, Call::Others),
            Kind::ExtraCall => About("extra call", Basis::Calls, Call::Own),
            Kind::SwappedCalls => About("swapped calls", Basis::Calls, Call::Own),
            Kind::OpMismatch => About("other operation", Basis::Calls, Call::Own),
            Kind::SizeMismatch => About("other size", Basis::Calls, Call::Own),
            Kind::DtypeMismatch => About("other datatype", Basis::Calls, Call::Own),
            Kind::RedopMismatch => About("other reduction", Basis::Calls, Call::Own),
            Kind::RootMismatch => About("other root", Basis::Calls, Call::Own),
            Kind::CaptureMismatch => About("captured on some ranks only", Basis::Calls, Call::Own),
            Kind::WrongCommunicator => About("wrong communicator", Basis::Calls, Call::Own),
            Kind::SwappedCommunicators => About("communicators in another order", Basis::Calls, Call::Own),
            Kind::DeadlockCycle => About("deadlock", Basis::Calls, Call::Own),
            Kind::UnmatchedSend => About("send without receive", Basis::Calls, Call::Own),
            Kind::UnmatchedRecv => About("receive without send", Basis::Calls, Call::Own),
            Kind::PeerSizeMismatch => About("send and receive differ", Basis::Calls, Call::Own),
            Kind::GroupIncomplete => About("group never closed", Basis::Said, Call::Own),
            Kind::Abort => About("abort", Basis::Said, Call::Own),
            Kind::AsyncError => About("asynchronous error", Basis::Said, Call::Own),
            Kind::FailedCall => About("failed call", Basis::Said, Call::Own),
            Kind::OutOfMemory => About("out of memory", Basis::Said, Call::Own),
            Kind::RankExited => About("rank exited", Basis::Said, Call::Others),
            Kind::RankKilled => About("rank was killed", Basis::Said, Call::Others),
            Kind::RankStuck => About("rank is elsewhere", Basis::Waits, Call::Others),
            Kind::OrderInversion => About("communicators in different orders", Basis::Order, Call::Own),
            Kind::Straggler => About("straggler", Basis::Times, Call::Own),
            Kind::NoTrace => About("no trace", Basis::Absence, Call::Others),
            Kind::TraceStops => About("trace stops", Basis::Absence, Call::Others),
        }
    }
}

/// Name for people, what a finding rests on, and the call that its headline has.
#[derive(Clone, Copy)]
pub struct About(pub &'static str, pub Basis, pub Call);

/// What a finding rests on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Basis {
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

/// Whose call shows what is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// That of the ranks that the finding is about.
    Own,
    /// That of the others, which these lack.
    Others,
}

/// How bad.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub enum Severity {
    /// The job hangs, or computes something else than it should.
    Error,
    /// It may, or it is slow.
    Warning,
}

/// A place of the program.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Place {
    /// Function.
    pub function: String,
    /// Source file, empty if unknown.
    pub file: String,
    /// Line in it, 0 if unknown.
    pub line: u32,
    /// For people.
    pub text: String,
}

impl Place {
    /// A place of a participant; `None` where it is not known.
    #[must_use]
    pub fn of(participant: &Participant, id: PlaceId) -> Option<Place> {
        participant.places.get(id as usize).filter(|_| id != 0).map(Place::from)
    }

    /// `train.py:12`, or the function where no line is known.
    #[must_use]
    pub fn line_text(&self) -> String {
        match self.line {
            0 => self.function.clone(),
            line => format!("{}:{line}", short_path(&self.file)),
        }
    }
}

impl From<&Site> for Place {
    fn from(site: &Site) -> Place {
        // Sentences have the name of the file; its path is in `file`, and in the stack below.
        let short = Site { file: short_path(&site.file).to_owned(), ..site.clone() };
        Place {
            function: site.function.clone(),
            file: site.file.clone(),
            line: site.line,
            text: short.to_string(),
        }
    }
}

/// The name of a file; `package/__init__.py` where that alone says nothing.
pub(super) fn short_path(path: &str) -> &str {
    let mut slashes = path.rmatch_indices('/').map(|(idx, _)| idx + 1);
    let last = slashes.next().unwrap_or(0);
    if path[last..].starts_with("__") { &path[slashes.next().unwrap_or(0)..] } else { &path[last..] }
}

/// A call as a rank made it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct CallText {
    /// Rank in the job of who made it.
    pub rank: u32,
    /// The call: `all_reduce(1024 float32, sum)`.
    pub call: String,
    /// From where.
    pub place: Option<Place>,
    /// When it began, nanoseconds of the host's clock.
    pub time_ns: u64,
}

impl CallText {
    /// Of one call.
    #[must_use]
    pub fn of(rank: u32, participant: &Participant, kind: &CallKind, time: Nanos) -> CallText {
        CallText {
            rank,
            call: kind.signature.to_string(),
            place: Place::of(participant, kind.place),
            time_ns: time.0,
        }
    }

    /// `all_reduce(1024 float32, sum) at main (train.py:12)`.
    #[must_use]
    pub fn text(&self) -> String {
        match &self.place {
            Some(place) => format!("{} at {}", self.call, place.text),
            None => self.call.clone(),
        }
    }
}

fn is_one(n: &u64) -> bool {
    *n == 1
}

/// Something that is wrong.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Finding {
    /// Its kind.
    pub kind: Kind,
    /// How bad.
    pub severity: Severity,
    /// On which communicator.
    pub communicator: Option<String>,
    /// Among which of its calls.
    pub lane: Option<&'static str>,
    /// The number of the call, from 0, as the majority of the ranks counts.
    pub sequence: Option<u64>,
    /// Ranks in the job.
    pub ranks: Vec<u32>,
    /// No side has more ranks: it may as well be the others.
    pub undecided: bool,
    /// Their call.
    pub own: Option<CallText>,
    /// The call of the others.
    pub others: Option<CallText>,
    /// Where they are, in full, innermost first.
    pub stack: Vec<String>,
    /// Ranks that wait because of it.
    pub waiting: Vec<u32>,
    /// In a job that runs: for how long the wait has lasted, nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub for_ns: Option<u64>,
    /// In a job that runs: how many calls the ranks that wait are ahead, at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ahead: Option<u64>,
    /// Calls in a row that it is about.
    #[serde(skip_serializing_if = "is_one")]
    pub calls: u64,
    /// How often.
    pub count: u64,
    /// In a sentence.
    pub text: String,
}

impl Finding {
    /// Of this kind about these ranks, with nothing else known yet.
    #[must_use]
    pub fn new(kind: Kind, severity: Severity, ranks: Vec<u32>) -> Finding {
        Finding {
            kind,
            severity,
            communicator: None,
            lane: None,
            sequence: None,
            ranks,
            undecided: false,
            own: None,
            others: None,
            stack: vec![],
            waiting: vec![],
            for_ns: None,
            ahead: None,
            calls: 1,
            count: 1,
            text: String::new(),
        }
    }

    /// Where: communicator, lane and number.
    #[must_use]
    pub fn on(mut self, communicator: &str, lane: Lane, sequence: u64) -> Finding {
        self.communicator = Some(communicator.to_owned());
        self.lane = Some(lane.name());
        self.sequence = Some(sequence);
        self
    }
}
