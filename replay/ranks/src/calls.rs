//! What one process did with NCCL, kept small enough for a job of many processes: a call is one number and its time.

use std::collections::BTreeMap;

use gputrace_schemas::event::{Alive, Bytes, Communicator, Device, Nanos, NcclOp, Process};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

use gputrace_trace::ledger::{GpuTimed, Site};

pub use super::places::PlaceId;

/// What a process did with one device.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct DeviceUse {
    /// Ordinal in the process.
    pub ordinal: i16,
    /// Most bytes that the driver had allocated.
    pub peak: Bytes,
    /// Owners and their bytes then, most first.
    pub owners_at_peak: Vec<(String, Bytes)>,
    /// About what the context takes.
    pub context: Option<Bytes>,
    /// Most bytes that all processes used of the device, as the driver says.
    pub device_used: Option<Bytes>,
    /// At the peak, collectives that had been called on the process's largest communicator, and which that is.
    pub mark: Option<(usize, u64)>,
    /// First use of the device: from where, and from where in full.
    pub first_use: Option<(Site, Vec<String>)>,
}

/// A reduction, comparable between ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Deserialize, Serialize)]
pub enum Reduction {
    /// The call has none.
    None,
    /// One of NCCL's own: 0 sum, 1 product, 2 maximum, 3 minimum, 4 average.
    Own(i32),
    /// `ncclRedOpCreatePreMulSum` with this datatype and residence. The factor may differ between ranks.
    PreMulSum(i32, u64),
    /// One that the program made, but how was not seen.
    Unseen,
}

/// What was called with which arguments, as far as they must agree between ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Deserialize, Serialize)]
pub struct Signature {
    /// The operation.
    pub op: NcclOp,
    /// Elements, as the function counts them.
    pub count: u64,
    /// `ncclDataType_t`; -1 none.
    pub datatype: i32,
    /// Reduction.
    pub reduction: Reduction,
    /// Root; -1 where there is none. Peers of sends and receives are not here.
    pub root: i32,
    /// Captured into a graph.
    pub captured: bool,
}

/// `ncclDataType_t` (nccl.h 2.32): name and bytes.
const DATATYPES: [(&str, u64); 12] = [
    ("int8", 1),
    ("uint8", 1),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
    ("bfloat16", 2),
    ("float8e4m3", 1),
    ("float8e5m2", 1),
];

/// `ncclRedOp_t` (nccl.h 2.32).
const REDUCTIONS: [&str; 5] = ["sum", "prod", "max", "min", "avg"];

impl Signature {
    /// Bytes of `count` elements; `None` for a datatype that is not known.
    #[must_use]
    pub fn bytes(&self) -> Option<Bytes> {
        let (_, bytes) = DATATYPES.get(usize::try_from(self.datatype).ok()?)?;
        Some(Bytes(self.count.saturating_mul(*bytes)))
    }

    /// What must be equal on all ranks. What only moves data may name it as it likes, as long as the bytes are equal;
    /// of what makes communicators, only that it is done must agree.
    #[must_use]
    pub fn normal(&self) -> Signature {
        let moves = matches!(
            self.op,
            NcclOp::AllGather
                | NcclOp::Broadcast
                | NcclOp::AlltoAll
                | NcclOp::Gather
                | NcclOp::Scatter
                | NcclOp::Send
                | NcclOp::Receive
        );
        if let Some(bytes) = self.bytes().filter(|_| moves) {
            return Signature { count: bytes.0, datatype: 1, ..*self };
        }
        if self.op.is_collective() {
            return *self;
        }
        Signature { count: 0, datatype: -1, reduction: Reduction::None, root: -1, captured: false, ..*self }
    }

    /// `float32`, or the number of a datatype that is not known.
    fn datatype_name(&self) -> String {
        let known = usize::try_from(self.datatype).ok().and_then(|datatype| DATATYPES.get(datatype));
        known.map_or_else(|| format!("datatype {}", self.datatype), |(name, _)| (*name).to_owned())
    }

    /// `sum`.
    fn reduction_name(&self) -> String {
        match self.reduction {
            Reduction::None => "none".into(),
            Reduction::Own(number) => usize::try_from(number)
                .ok()
                .and_then(|number| REDUCTIONS.get(number))
                .map_or_else(|| format!("reduction {number}"), |name| (*name).to_owned()),
            Reduction::PreMulSum(..) => "premulsum".into(),
            Reduction::Unseen => "a custom reduction".into(),
        }
    }
}

impl std::fmt::Display for Signature {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(to, "{}", self.op)?;
        if self.datatype < 0 {
            return Ok(());
        }
        write!(to, "({} {}", self.count, self.datatype_name())?;
        if self.reduction != Reduction::None {
            write!(to, ", {}", self.reduction_name())?;
        }
        if self.root >= 0 {
            write!(to, ", root {}", self.root)?;
        }
        write!(to, "){}", if self.captured { " in a graph" } else { "" })
    }
}

/// What was called from where.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Deserialize, Serialize)]
pub struct CallKind {
    /// What.
    pub signature: Signature,
    /// From where.
    pub place: PlaceId,
}

/// Calls of one kind of order, oldest first.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(from = "super::packed::Packed", into = "super::packed::Packed")]
pub struct Sequence {
    /// Number of the first call that is known: a recording that keeps only its newest part has none of those before.
    pub first: u64,
    /// Which [`CallKind`] each known call is, or [`LOST_CALL`].
    pub kinds: Vec<u32>,
    /// When each of them began.
    pub enters: Vec<Nanos>,
    /// How long the GPU took for those where that was measured. What was launched together with others is with the first
    /// of them.
    pub gpu: FxHashMap<u64, Nanos>,
}

/// A number that was counted but whose call is not in the trace.
pub const LOST_CALL: u32 = u32::MAX;
/// Holes that are filled at most: more are not believed.
const MAX_HOLE: u64 = 1_000_000;

impl Sequence {
    /// Books call number `n`. A number that comes again was freed by the call that had it.
    pub fn set(&mut self, n: u64, kind: u32, enter: Nanos) {
        let len = self.len() as u64;
        if n > len && n - len <= MAX_HOLE {
            let n_known = (n - self.first) as usize;
            self.kinds.resize(n_known, LOST_CALL);
            self.enters.resize(n_known, enter);
        }
        self.push(n, kind, enter);
    }

    /// Books call number `n` from before the time that a recording has kept. Of such calls only the newest are left, so those between
    /// them are not known to have been made here.
    pub fn carry(&mut self, n: u64, kind: u32, enter: Nanos) {
        if n != self.len() as u64 {
            self.truncate(0);
        }
        self.push(n, kind, enter);
    }

    fn push(&mut self, n: u64, kind: u32, enter: Nanos) {
        self.truncate(n);
        if self.kinds.is_empty() || self.len() as u64 != n {
            self.truncate(0);
            self.first = n;
        }
        self.kinds.push(kind);
        self.enters.push(enter);
    }

    /// Forgets calls from number `n` on.
    pub fn truncate(&mut self, n: u64) {
        let n_known = usize::try_from(n.saturating_sub(self.first)).unwrap_or(usize::MAX);
        self.kinds.truncate(n_known);
        self.enters.truncate(n_known);
        self.first = self.first.min(n);
    }

    /// How many there were, those before the first known one included.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::try_from(self.first).unwrap_or(usize::MAX).saturating_add(self.kinds.len())
    }

    /// None at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of the first known call, as a position.
    #[must_use]
    pub fn start(&self) -> usize {
        self.len() - self.kinds.len()
    }

    /// Which [`CallKind`] call number `n` is, if that is known.
    #[must_use]
    pub fn kind(&self, n: usize) -> Option<u32> {
        self.kinds.get(n.checked_sub(self.start())?).copied()
    }

    /// When call number `n` began, if that is known.
    #[must_use]
    pub fn enter(&self, n: usize) -> Option<Nanos> {
        self.enters.get(n.checked_sub(self.start())?).copied()
    }

    /// The known calls: number, kind and when each began.
    pub fn calls(&self) -> impl Iterator<Item = (usize, u32, Nanos)> {
        let known = self.kinds.iter().zip(&self.enters);
        known.zip(self.start()..).map(|((kind, enter), n)| (n, *kind, *enter))
    }
}

/// Which calls are counted together; see [`gputrace_schemas::event::NcclSequence`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Deserialize, Serialize)]
pub enum Lane {
    /// Collectives.
    Collective,
    /// Split, shrink and others that make or end communicators and windows.
    Management,
    /// Sends to a peer.
    Send(i32),
    /// Receives from a peer.
    Receive(i32),
    /// One-sided calls.
    OneSided,
}

impl Lane {
    /// Name in JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Lane::Collective => "collective",
            Lane::Management => "management",
            Lane::Send(_) => "send",
            Lane::Receive(_) => "recv",
            Lane::OneSided => "one_sided",
        }
    }
}

/// How a communicator ended on a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct Closing {
    /// Destroy, abort or revoke.
    pub op: NcclOp,
    /// When that call began.
    pub time: Nanos,
    /// From where.
    pub place: PlaceId,
}

/// A communicator as one process knows it: as one rank of it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Membership {
    /// Its facts in the trace, in its newest form.
    pub facts: Communicator,
    /// Its parent among the process's memberships.
    pub parent: Option<usize>,
    /// When the call that made it began, when it was over, and its result.
    pub created: (Option<Nanos>, Option<Nanos>, Option<i32>),
    /// From where it was made.
    pub place: PlaceId,
    /// PyTorch made it as its default group, as its lines of Python say.
    pub is_default_group: bool,
    /// Kinds of calls made on it.
    pub kinds: Vec<CallKind>,
    /// Its calls.
    #[serde(with = "super::packed::pairs")]
    pub lanes: BTreeMap<Lane, Sequence>,
    /// How it ended.
    pub closing: Option<Closing>,
    /// First error that NCCL reported of it without being requested one: when, which, and from where it was asked.
    pub async_error: Option<(Nanos, i32, PlaceId)>,
    #[serde(skip)]
    known: FxHashMap<CallKind, u32>,
}

impl Membership {
    /// A communicator of which nothing is known yet but these facts.
    #[must_use]
    pub fn new(facts: Communicator) -> Membership {
        Membership {
            facts,
            parent: None,
            created: (None, None, None),
            place: 0,
            is_default_group: false,
            kinds: vec![],
            lanes: BTreeMap::new(),
            closing: None,
            async_error: None,
            known: FxHashMap::default(),
        }
    }

    /// The number of a kind of call.
    pub fn kind(&mut self, kind: CallKind) -> u32 {
        *self.known.entry(kind).or_insert_with(|| {
            self.kinds.push(kind);
            self.kinds.len() as u32 - 1
        })
    }

    /// Calls of a lane.
    #[must_use]
    pub fn lane(&self, lane: Lane) -> Option<&Sequence> {
        self.lanes.get(&lane)
    }

    /// When its newest call began that was not about the communicator itself.
    #[must_use]
    pub fn newest_call(&self) -> Option<Nanos> {
        let lanes = self.lanes.iter().filter(|(lane, _)| **lane != Lane::Management);
        lanes.filter_map(|(_, sequence)| sequence.enters.last().copied()).max()
    }

    /// One of its calls: what, from where, and when.
    #[must_use]
    pub fn call(&self, lane: Lane, position: usize) -> Option<(CallKind, Nanos)> {
        let sequence = self.lanes.get(&lane)?;
        let kind = self.kinds.get(sequence.kind(position)? as usize)?;
        Some((*kind, sequence.enter(position)?))
    }
}

/// A call that had not returned when the process ended, or a group that was never closed.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct OpenCall {
    /// What.
    pub op: NcclOp,
    /// On which of the process's memberships, where it is one.
    pub membership: Option<usize>,
    /// Which of its calls.
    pub spot: Option<(Lane, u64)>,
    /// Peer of a send or receive, or rank in the new communicator.
    pub peer: i32,
    /// For the end of a group, and for a group that was not closed, what is in it.
    pub group: Vec<(usize, Lane, u64)>,
    /// Since when.
    pub since: Nanos,
    /// From where.
    pub place: PlaceId,
    /// From where in full, innermost first.
    pub stack: Vec<String>,
}

/// A launch that the GPU was never seen to end.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct UnfinishedCall {
    /// The operation that launched it.
    pub op: NcclOp,
    /// On which of the process's memberships, and which of its calls, where it is one.
    pub spot: Option<(usize, Lane, u64)>,
    /// When.
    pub time: Nanos,
    /// From where.
    pub place: PlaceId,
}

/// A call that NCCL refused or that went wrong.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct FailedCall {
    /// What.
    pub op: NcclOp,
    /// On which of the process's memberships.
    pub membership: Option<usize>,
    /// Which number it would have had.
    pub spot: Option<(Lane, u64)>,
    /// `ncclResult_t`.
    pub result: i32,
    /// Bytes that the driver refused NCCL during the call: what the result is about.
    pub refused: Option<Bytes>,
    /// When it began.
    pub time: Nanos,
    /// From where.
    pub place: PlaceId,
}

/// Something that a process did last.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct LastSeen {
    /// When.
    pub time: Nanos,
    /// What, for people.
    pub what: String,
    /// From where, innermost first.
    pub stack: Vec<String>,
    /// From where.
    pub place: PlaceId,
}

/// Where a thread was, as the recorder read from outside after a silence.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ReadStack {
    /// When.
    pub time: Nanos,
    /// For how long nothing had come of the process.
    pub silent: Nanos,
    /// The kernel's number of the thread; that of the process for its main thread.
    pub tid: u32,
    /// Its name.
    pub name: String,
    /// It changed while it was read.
    pub is_torn: bool,
    /// The program's line.
    pub place: PlaceId,
    /// All lines, innermost first.
    pub stack: Vec<String>,
}

/// The Python function in which a main thread was at every reading of its stack in the last silence of its process, called from the same
/// lines each time.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize, Serialize)]
pub struct SameFunction {
    /// `function (file)`.
    pub function: String,
    /// How often it was read.
    pub n_readings: u32,
    /// For how long nothing had come of the process at the first and at the last reading.
    pub first: Nanos,
    /// See `first`.
    pub last: Nanos,
}

/// How a process ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub enum Ending {
    /// By itself.
    Exit,
    /// It was killed or crashed.
    Killed,
    /// The trace does not say: its recorder was killed too, or is still writing.
    Unknown,
}

/// One process of a job.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Participant {
    /// Its trace.
    pub path: String,
    /// The process.
    pub process: Process,
    /// Its devices.
    pub devices: Vec<Device>,
    /// Why its trace may say less than happened.
    pub doubts: Option<String>,
    /// Places of the program; the first is not known.
    pub places: Vec<Site>,
    /// Communicators that it was in.
    pub memberships: Vec<Membership>,
    /// Calls that it ended in.
    pub open_calls: Vec<OpenCall>,
    /// Groups that it never closed: what they hold was never started.
    pub open_groups: Vec<OpenCall>,
    /// Launches whose time on the GPU was to be measured.
    pub gpu_timed: GpuTimed,
    /// The oldest of them that was never seen to end, and what launched it.
    pub unfinished: Option<UnfinishedCall>,
    /// Calls that failed, the first few.
    pub failed_calls: Vec<FailedCall>,
    /// The newest call into NCCL.
    pub last_call: Option<LastSeen>,
    /// The newest event that has a stack.
    pub last_event: Option<LastSeen>,
    /// The last out-of-memory error.
    pub out_of_memory: Option<LastSeen>,
    /// Out-of-memory errors, the first few and the last, oldest first.
    #[serde(default)]
    pub ooms: Vec<LastSeen>,
    /// Time of the first event.
    pub first: Nanos,
    /// When it was last known to be there.
    pub end: Nanos,
    /// When it was still alive, as far as is known: where it was killed on a busy machine, its end was seen later than it was.
    pub alive_at: Nanos,
    /// The newest heartbeats, oldest first, each with its time.
    #[serde(default)]
    pub beats: Vec<(Nanos, Alive)>,
    /// Stacks that its recorder read last, the main thread's first.
    #[serde(default)]
    pub read_stacks: Vec<ReadStack>,
    /// Where its main thread was each time that they were read.
    #[serde(default)]
    pub same_function: Option<SameFunction>,
    /// Faults of its GPUs, and what suspends it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<super::troubles::Trouble>,
    /// How it ended.
    pub ending: Ending,
    /// The same in words, of it.
    pub ended: String,
    /// Memory that it held on each device.
    pub memory: Vec<super::calls::DeviceUse>,
    /// What it gives to others, or has of them.
    pub shares: super::shares::Shares,
    /// Its recorder was writing the trace when that was read.
    #[serde(skip)]
    pub is_written: bool,
    /// The same, but the recorder has written nothing for longer than it may: the machine is overloaded, or the recorder is stopped.
    #[serde(skip)]
    pub recorder_is_late: bool,
    /// The summary that it was read from, where it was not read from its trace.
    #[serde(skip)]
    pub summary: Option<String>,
}

impl Participant {
    /// A place, for people; empty where it is not known.
    #[must_use]
    pub fn place(&self, id: PlaceId) -> String {
        if id == 0 {
            String::new()
        } else {
            self.places.get(id as usize).map(ToString::to_string).unwrap_or_default()
        }
    }

    /// The UUID of one of its devices.
    #[must_use]
    pub fn uuid(&self, ordinal: i16) -> Option<&str> {
        let device = self.devices.iter().find(|device| device.ordinal == ordinal)?;
        Some(device.uuid.as_str()).filter(|uuid| !uuid.is_empty())
    }

    /// Ranks of its job, as the launcher that gave it its rank says.
    #[must_use]
    pub fn world_size(&self) -> Option<u32> {
        const SIZES: [(&str, &str); 4] = [
            ("RANK", "WORLD_SIZE"),
            ("SLURM_PROCID", "SLURM_NTASKS"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("PMI_RANK", "PMI_SIZE"),
        ];
        let launcher = SIZES.iter().find(|(rank, _)| self.variable(rank).is_some());
        let (_, size) = launcher.unwrap_or(&SIZES[0]);
        self.variable(size)?.parse().ok().filter(|size| *size > 0)
    }

    /// Whether its numbers refer to what is there; for one that was read from a file.
    ///
    /// # Errors
    /// Which do not.
    pub fn check(&self) -> Result<(), &'static str> {
        let (n_places, n_memberships) = (self.places.len(), self.memberships.len());
        let place = |place: PlaceId| (place as usize) < n_places.max(1);
        let member = |idx: Option<usize>| idx.is_none_or(|idx| idx < n_memberships);
        let spot = |(idx, ..): &(usize, Lane, u64)| *idx < n_memberships;
        let open =
            |call: &OpenCall| member(call.membership) && place(call.place) && call.group.iter().all(spot);
        let seen = |seen: &Option<LastSeen>| seen.as_ref().is_none_or(|seen| place(seen.place));
        for (idx, membership) in self.memberships.iter().enumerate() {
            // A communicator comes after the one that it was made from.
            if membership.parent.is_some_and(|parent| parent >= n_memberships || parent == idx) {
                return Err("a communicator was created from one that it does not have");
            }
            let n_kinds = membership.kinds.len() as u32;
            let kinds = membership.lanes.values().flat_map(|calls| &calls.kinds);
            if kinds.into_iter().any(|kind| *kind >= n_kinds && *kind != LOST_CALL) {
                return Err("a call is of a kind that it does not have");
            }
            let closing = membership.closing.iter().map(|closing| closing.place);
            let errors = membership.async_error.iter().map(|(.., place)| *place);
            let mut all = membership.kinds.iter().map(|kind| kind.place).chain(closing).chain(errors);
            if !all.all(place) || !place(membership.place) {
                return Err("a call has a call site that it does not have");
            }
        }
        let failed = |call: &FailedCall| member(call.membership) && place(call.place);
        let unfinished = self.unfinished.as_ref();
        let is_whole = self.open_calls.iter().chain(&self.open_groups).all(open)
            && self.failed_calls.iter().all(failed)
            && unfinished.is_none_or(|call| place(call.place) && call.spot.iter().all(spot))
            && self.read_stacks.iter().all(|read| place(read.place))
            && self.ooms.iter().all(|seen| place(seen.place))
            && [&self.last_call, &self.last_event, &self.out_of_memory].into_iter().all(seen)
            && self.memory.iter().all(|used| member(used.mark.map(|(idx, _)| idx)));
        if is_whole { Ok(()) } else { Err("something refers to what it does not have") }
    }

    /// A variable of its environment that was kept.
    #[must_use]
    pub fn variable(&self, name: &str) -> Option<&str> {
        self.process.environment.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}
