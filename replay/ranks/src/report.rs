//! What `gputrace ranks` says, in a fixed shape: `gputrace.ranks/1`. `sections.rs` says it to people.

use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::Bytes;
use serde::Serialize;

use super::arrivals::Arrivals;
use super::calls::{Ending, Lane, Participant};
use super::clocks::Clocks;
use super::diagnose::{Diagnosis, diagnose};
use super::findings::{Finding, Place, Severity};
use super::gpu::GpuReport;
use super::health;
use super::jobs::{Job, RankSource, jobs};
use super::live;
use super::memory::{self, LogicalTime};
use super::shared::{self, Shared};
use super::waits::Standing;
use super::window::Window;
use gputrace_report::processes::{self, Node, Traced};

/// `gputrace.ranks/1`.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Ranks {
    /// Which shape this is.
    pub schema: &'static str,
    /// In the order of their beginnings.
    pub jobs: Vec<JobReport>,
    /// Traces of processes that belong to no job: neither NCCL nor their environment names one.
    pub alone: Vec<String>,
    /// Memory of one process that others map; left out where none is.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shared: Vec<Shared>,
    /// All of these processes and those that they descend from.
    pub processes: Vec<Node>,
}

/// How the communication of a job is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub enum Verdict {
    /// All ranks called the same.
    Consistent,
    /// All that have a trace did, but not all have.
    Incomplete,
    /// Something is wrong.
    Inconsistent,
    /// No call into NCCL was recorded.
    NoCalls,
    /// The job runs, and ranks wait for one that nothing keeps, as far as is known, or that calls something else.
    Hangs,
    /// The job runs, and ranks wait for one that works, or has not been away for long.
    Waits,
}

/// A job.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct JobReport {
    /// How its communication is.
    pub verdict: Verdict,
    /// It was running when its traces were read; left out where it was not.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub running: bool,
    /// The faults, worst first.
    pub findings: Vec<Finding>,
    /// Notes.
    pub notes: Vec<String>,
    /// Why numbers and findings may be wrong.
    pub doubts: Vec<String>,
    /// Calls that were compared.
    pub calls: u64,
    /// From when on, where a trace does not have them from the beginning; left out where all have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
    /// Ranks that there should be.
    pub n_ranks: u32,
    /// Ranks without a trace.
    pub missing: Vec<u32>,
    /// The ranks.
    pub ranks: Vec<RankReport>,
    /// Their positions at the end.
    pub standings: Vec<Standing>,
    /// The communicators, largest first.
    pub communicators: Vec<CommunicatorReport>,
    /// Late arrivals at collectives.
    pub arrivals: Vec<Arrivals>,
    /// Measurements of the GPUs; left out where none was measured (`gputrace record --nccl-timing`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuReport>,
    /// How far the clocks of its hosts may be off from each other, nanoseconds; 0 on one host, null unknown.
    pub clock_uncertainty_ns: Option<u64>,
    /// All ranks at the same point of the program.
    pub memory: Option<MemoryReport>,
    /// Processes on GPUs that are not theirs.
    pub strangers: Vec<Stranger>,
    /// Its GPUs.
    pub gpus: Vec<Gpu>,
}

/// A rank.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct RankReport {
    /// In the job.
    pub rank: u32,
    /// How that is known.
    pub known_from: RankSource,
    /// The trace.
    pub trace: String,
    /// Host.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Device ordinal in the process.
    pub device: Option<i16>,
    /// Which GPU that is.
    pub uuid: Option<String>,
    /// How the process ended.
    pub ending: Ending,
    /// Most bytes that the driver had allocated on its device.
    pub peak_bytes: Option<u64>,
    /// Owners and their bytes then.
    pub owners_at_peak: Vec<OwnerBytes>,
}

/// An amount of an owner.
#[derive(Clone, Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct OwnerBytes {
    /// Its owner.
    pub owner: String,
    /// How much.
    pub bytes: u64,
}

/// A communicator.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct CommunicatorReport {
    /// For people: the program's name for it, or a number.
    pub name: String,
    /// NCCL's own hash, as `commId` in its log and RAS.
    pub comm_hash: Option<String>,
    /// Ranks in it.
    pub n_ranks: u32,
    /// Its members' ranks in the job.
    pub ranks: Vec<u32>,
    /// What it was made from.
    pub parent: Option<String>,
    /// The place where it was created.
    pub place: Option<Place>,
    /// Collectives of the rank that made most, and of the one that made fewest.
    pub collectives: (u64, u64),
    /// Sends and receives of all ranks.
    pub peer_calls: u64,
}

/// All ranks at the same point.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct MemoryReport {
    /// The communicator that counts.
    pub communicator: String,
    /// Collectives on it before that point.
    pub collectives_before: u64,
    /// The median of the ranks.
    pub median_bytes: u64,
    /// Memory that each rank held.
    pub ranks: Vec<RankBytes>,
    /// Differences of the ranks that are out of line.
    pub uneven: Vec<UnevenBytes>,
    /// Ranks of which that is not known: their summaries lack it, or their traces are gone. Left out where there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<u32>,
}

/// Memory that a rank held.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct RankBytes {
    /// In the job.
    pub rank: u32,
    /// When, on its host's clock.
    pub time_ns: u64,
    /// How much.
    pub bytes: u64,
    /// How much more than the median.
    pub beyond_median_bytes: i64,
    /// By owner.
    pub owners: Vec<OwnerBytes>,
}

/// A place that holds another amount on one rank.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct UnevenBytes {
    /// In the job.
    pub rank: u32,
    /// Its owner.
    pub owner: String,
    /// From where.
    pub place: String,
    /// Memory that it holds.
    pub bytes: u64,
    /// Memory that the median of the ranks holds there.
    pub median_bytes: u64,
}

/// A process on a GPU that is not its own.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Stranger {
    /// Its rank.
    pub rank: u32,
    /// Process id.
    pub pid: u32,
    /// The GPU.
    pub uuid: Option<String>,
    /// Its ordinal in the process.
    pub device: i16,
    /// Ranks whose GPU it is.
    pub owners: Vec<u32>,
    /// Most bytes that the driver had allocated to it there.
    pub peak_bytes: u64,
    /// About what its context takes there.
    pub context_bytes: Option<u64>,
    /// What touched the GPU first.
    pub place: Option<Place>,
    /// That in full, innermost first.
    pub stack: Vec<String>,
}

/// A GPU.
#[derive(Serialize, Debug)]
#[cfg_attr(feature = "schemas", derive(schemars::JsonSchema))]
pub struct Gpu {
    /// Its host.
    pub host: String,
    /// Which.
    pub uuid: Option<String>,
    /// Name.
    pub name: String,
    /// Its memory.
    pub total_bytes: Option<u64>,
    /// Ranks that used it.
    pub ranks: Vec<u32>,
    /// Peaks of its processes, added up: they need not have been at one time.
    pub sum_of_peaks_bytes: u64,
    /// About what their contexts take.
    pub contexts_bytes: u64,
    /// Most that all processes used, as the driver says.
    pub used_bytes: Option<u64>,
    /// What was left at that moment; where the driver was not asked, at least so much, if no other process used the GPU.
    pub headroom_bytes: Option<u64>,
}
/// Rows of uneven places for each rank.
const UNEVEN_ROWS: usize = 5;

impl Ranks {
    /// Of these processes. `open` opens the trace or summary of one of them again.
    #[must_use]
    pub fn of(participants: &[Participant], open: &memory::Open<'_>) -> Ranks {
        let (jobs, alone) = jobs(participants);
        fn traced(it: &Participant) -> Traced<'_> {
            Traced { process: &it.process, path: &it.path, threads: vec![] }
        }
        let report = |job: &Job| JobReport::of(participants, job, open);
        Ranks {
            schema: "gputrace.ranks/1",
            jobs: jobs.iter().map(report).collect(),
            shared: shared::shared(participants, |idx| called(participants, &jobs, idx)),
            processes: processes::tree(&participants.iter().map(traced).collect::<Vec<_>>()),
            alone: alone.into_iter().map(|idx| participants[idx].path.clone()).collect(),
        }
    }
}

/// What a process is called: its rank where there is one job, else its trace.
fn called(participants: &[Participant], jobs: &[Job], idx: usize) -> String {
    let actor = match jobs {
        [job] => job.actors.iter().find(|actor| actor.participant == idx),
        _ => None,
    };
    match actor {
        Some(actor) => format!("rank {}", actor.rank),
        None => participants[idx].path.rsplit('/').next().unwrap_or_default().to_owned(),
    }
}

impl JobReport {
    fn of(participants: &[Participant], job: &Job, open: &memory::Open<'_>) -> JobReport {
        let Diagnosis { mut findings, standings, arrivals, gpu, mut notes, n_calls, window } =
            diagnose(participants, job);
        health::tell(participants, job, &mut findings, &mut notes);
        let memory = memory::at_equal_logical_time(participants, job, open);
        let missing = job.missing();
        let is_wrong = findings.iter().any(|finding| finding.severity == Severity::Error);
        let running = job.actors.iter().any(|actor| participants[actor.participant].is_alive());
        let waits = |severity: Severity| {
            let of = findings.iter().filter(|finding| finding.severity == severity);
            running && of.into_iter().any(|finding| finding.kind.is_wait() && !finding.waiting.is_empty())
        };
        let stopped = job
            .actors
            .iter()
            .any(|actor| live::stopped_before(&participants[actor.participant], participants).is_some());
        let verdict = match (is_wrong, job.communicators.is_empty(), missing.is_empty() && !stopped) {
            _ if waits(Severity::Error) => Verdict::Hangs,
            (false, ..) if waits(Severity::Warning) => Verdict::Waits,
            (true, ..) => Verdict::Inconsistent,
            (false, true, _) => Verdict::NoCalls,
            (false, false, false) => Verdict::Incomplete,
            (false, false, true) => Verdict::Consistent,
        };
        let doubts = job.actors.iter().filter_map(|actor| {
            let doubts = participants[actor.participant].doubts_so_far()?;
            Some(format!("rank {}: {doubts}", actor.rank))
        });
        JobReport {
            verdict,
            running,
            findings,
            notes,
            doubts: doubts.collect(),
            calls: n_calls,
            window,
            n_ranks: job.n_ranks,
            missing,
            ranks: ranks(participants, job),
            standings,
            communicators: communicators(participants, job),
            arrivals,
            gpu,
            clock_uncertainty_ns: Clocks::of(participants, job).uncertainty(),
            memory: memory.as_ref().map(memory_report),
            strangers: strangers(participants, job),
            gpus: gpus(participants, job),
        }
    }
}

fn ranks(participants: &[Participant], job: &Job) -> Vec<RankReport> {
    let rank = |actor: &super::jobs::Actor| {
        let participant = &participants[actor.participant];
        let used = participant.memory.iter().find(|used| Some(used.ordinal) == actor.device);
        RankReport {
            rank: actor.rank,
            known_from: actor.source,
            trace: participant.path.clone(),
            host: participant.process.host.clone(),
            pid: participant.process.pid,
            device: actor.device,
            uuid: actor.device.and_then(|device| participant.uuid(device)).map(str::to_owned),
            ending: participant.ending,
            peak_bytes: used.map(|used| used.peak.0),
            owners_at_peak: used.map_or_else(Vec::new, |used| owners(&used.owners_at_peak)),
        }
    };
    job.actors.iter().map(rank).collect()
}

fn owners(owners: &[(String, Bytes)]) -> Vec<OwnerBytes> {
    let held = owners.iter().filter(|(_, bytes)| bytes.0 > 0);
    held.map(|(owner, bytes)| OwnerBytes { owner: owner.clone(), bytes: bytes.0 }).collect()
}

fn communicators(participants: &[Participant], job: &Job) -> Vec<CommunicatorReport> {
    let report = |joined: &super::jobs::Joined| {
        let memberships = || {
            joined.all().map(|(_, member)| &participants[member.participant].memberships[member.membership])
        };
        let peer_calls =
            memberships().flat_map(|membership| &membership.lanes).filter_map(|(lane, sequence)| {
                matches!(lane, Lane::Send(_) | Lane::Receive(_)).then_some(sequence.len() as u64)
            });
        let place = joined.all().find_map(|(_, member)| {
            let participant = &participants[member.participant];
            Place::of(participant, participant.memberships[member.membership].place)
        });
        let mut ranks: Vec<u32> = joined.all().map(|(_, member)| job.rank(member)).collect();
        ranks.sort_unstable();
        CommunicatorReport {
            name: joined.label.clone(),
            comm_hash: joined.hash.map(|hash| format!("{hash:#x}")),
            n_ranks: joined.n_ranks,
            ranks,
            parent: joined.parent.map(|parent| job.communicators[parent].label.clone()),
            place,
            collectives: joined.collectives(participants),
            peer_calls: peer_calls.sum(),
        }
    };
    job.communicators.iter().map(report).collect()
}

fn memory_report(logical: &LogicalTime) -> MemoryReport {
    let median = logical.median();
    let rank = |rank: &memory::RankMemory| RankBytes {
        rank: rank.rank,
        time_ns: rank.time.0,
        bytes: rank.total().0,
        beyond_median_bytes: rank.total().0 as i64 - median.0 as i64,
        owners: owners(&rank.owners()),
    };
    let uneven = |row: memory::Uneven| UnevenBytes {
        rank: row.rank,
        owner: row.holding.owner,
        place: row.holding.place,
        bytes: row.bytes.0,
        median_bytes: row.median.0,
    };
    MemoryReport {
        communicator: logical.communicator.clone(),
        collectives_before: logical.n_before,
        median_bytes: median.0,
        ranks: logical.ranks.iter().map(rank).collect(),
        uneven: logical.uneven(UNEVEN_ROWS).into_iter().map(uneven).collect(),
        unknown: logical.unknown.clone(),
    }
}

fn strangers(participants: &[Participant], job: &Job) -> Vec<Stranger> {
    let uuid = |actor: &super::jobs::Actor| participants[actor.participant].uuid(actor.device?);
    let mut strangers = vec![];
    let mut seen = BTreeSet::new();
    for actor in &job.actors {
        let participant = &participants[actor.participant];
        let own: BTreeSet<i16> = job
            .actors
            .iter()
            .filter(|other| other.participant == actor.participant)
            .filter_map(|other| other.device)
            .collect();
        if own.is_empty() || !seen.insert(actor.participant) {
            continue;
        }
        for used in participant.memory.iter().filter(|used| used.ordinal >= 0 && !own.contains(&used.ordinal))
        {
            if used.first_use.is_none() && used.peak.0 == 0 {
                continue;
            }
            let known = participant.uuid(used.ordinal);
            let host = &participant.process.host;
            let owners = job.actors.iter().filter(|other| {
                known.is_some()
                    && uuid(other) == known
                    && participants[other.participant].process.host == *host
            });
            let place = used.first_use.as_ref().map(|(site, _)| Place::from(site));
            strangers.push(Stranger {
                rank: actor.rank,
                pid: participant.process.pid,
                uuid: known.map(str::to_owned),
                device: used.ordinal,
                owners: owners.map(|other| other.rank).collect(),
                peak_bytes: used.peak.0,
                context_bytes: used.context.map(|bytes| bytes.0),
                place,
                stack: used.first_use.as_ref().map_or_else(Vec::new, |(_, stack)| stack.clone()),
            });
        }
    }
    strangers
}

fn gpus(participants: &[Participant], job: &Job) -> Vec<Gpu> {
    let mut gpus: BTreeMap<(String, String), Gpu> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for actor in &job.actors {
        let participant = &participants[actor.participant];
        if !seen.insert(actor.participant) {
            continue;
        }
        for used in participant.memory.iter().filter(|used| used.ordinal >= 0) {
            let device = participant.devices.iter().find(|device| device.ordinal == used.ordinal);
            let host = participant.process.host.clone();
            // Ordinals of two processes need not be the same GPU: what has no UUID stands for itself.
            let unknown = || format!("pid {} cuda:{}", participant.process.pid, used.ordinal);
            let key = participant.uuid(used.ordinal).map_or_else(unknown, str::to_owned);
            let gpu = gpus.entry((host.clone(), key)).or_insert_with(|| Gpu {
                host,
                uuid: participant.uuid(used.ordinal).map(str::to_owned),
                name: device.map_or_else(String::new, |device| device.name.clone()),
                total_bytes: device.map(|device| device.total.0).filter(|total| *total > 0),
                ranks: vec![],
                sum_of_peaks_bytes: 0,
                contexts_bytes: 0,
                used_bytes: None,
                headroom_bytes: None,
            });
            // A process is told of devices on which it never has anything.
            if used.peak.0 > 0 || used.context.is_some_and(|context| context.0 > 0) {
                gpu.ranks.push(actor.rank);
            }
            gpu.sum_of_peaks_bytes = gpu.sum_of_peaks_bytes.saturating_add(used.peak.0);
            gpu.contexts_bytes = gpu.contexts_bytes.saturating_add(used.context.unwrap_or_default().0);
            gpu.used_bytes = gpu.used_bytes.max(used.device_used.map(|bytes| bytes.0));
        }
    }
    let mut gpus: Vec<Gpu> = gpus.into_values().filter(|gpu| !gpu.ranks.is_empty()).collect();
    for gpu in &mut gpus {
        let used = gpu.used_bytes.unwrap_or(gpu.sum_of_peaks_bytes.saturating_add(gpu.contexts_bytes));
        gpu.headroom_bytes = gpu.total_bytes.map(|total| total.saturating_sub(used));
    }
    gpus.sort_by(|a, b| (a.ranks.first(), &a.uuid).cmp(&(b.ranks.first(), &b.uuid)));
    gpus
}
