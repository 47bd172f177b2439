//! What `gputrace ranks` says, in a fixed shape (`gputrace.ranks/1`) and for people.

use std::collections::{BTreeMap, BTreeSet};

use gputrace_schemas::event::{Bytes, Nanos};
use serde::Serialize;

use super::arrivals::Arrivals;
use super::calls::{Ending, Lane, Participant};
use super::clocks::Clocks;
use super::diagnose::{Diagnosis, diagnose};
use super::findings::{Finding, Kind, Place, Severity, rank_list, rank_names};
use super::gpu::GpuReport;
use super::jobs::{Job, RankSource, jobs};
use super::memory::{self, LogicalTime};
use super::waits::Standing;
use crate::answers::processes::{self, Node, Traced};
use crate::report::model::{Mood, Part, Report, Section, Table, Value};
use crate::report::words;
use crate::trace::source::Source;

/// `gputrace.ranks/1`.
#[derive(Serialize, Debug)]
pub struct Ranks {
    /// Which shape this is.
    pub schema: &'static str,
    /// In the order of their beginnings.
    pub jobs: Vec<JobReport>,
    /// Traces of processes that belong to no job: neither NCCL nor their environment names one.
    pub alone: Vec<String>,
    /// All of these processes and those that they descend from.
    pub processes: Vec<Node>,
}

/// How the communication of a job is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// All ranks called the same.
    Consistent,
    /// All that have a trace did, but not all have.
    Incomplete,
    /// Something is wrong.
    Inconsistent,
    /// There are no calls of NCCL.
    NoCalls,
}

/// A job.
#[derive(Serialize, Debug)]
pub struct JobReport {
    /// How its communication is.
    pub verdict: Verdict,
    /// What is wrong, worst first.
    pub findings: Vec<Finding>,
    /// What is worth knowing.
    pub notes: Vec<String>,
    /// Why numbers and findings may be wrong.
    pub doubts: Vec<String>,
    /// Calls that were compared.
    pub calls: u64,
    /// Ranks that there should be.
    pub n_ranks: u32,
    /// Ranks without a trace.
    pub missing: Vec<u32>,
    /// The ranks.
    pub ranks: Vec<RankReport>,
    /// Where they were at the end.
    pub standings: Vec<Standing>,
    /// The communicators, largest first.
    pub communicators: Vec<CommunicatorReport>,
    /// Who came late to collectives.
    pub arrivals: Vec<Arrivals>,
    /// What the GPUs say of them; left out where nobody measured (`gputrace record --nccl-timing`).
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
    /// Most bytes that the driver had handed out on its device.
    pub peak_bytes: Option<u64>,
    /// Who held how much then.
    pub owners_at_peak: Vec<OwnerBytes>,
}

/// An amount of somebody.
#[derive(Clone, Serialize, Debug)]
pub struct OwnerBytes {
    /// Whose.
    pub owner: String,
    /// How much.
    pub bytes: u64,
}

/// A communicator.
#[derive(Serialize, Debug)]
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
    /// Where it was made.
    pub place: Option<Place>,
    /// Collectives of the rank that made most, and of the one that made fewest.
    pub collectives: (u64, u64),
    /// Sends and receives of all ranks.
    pub peer_calls: u64,
}

/// All ranks at the same point.
#[derive(Serialize, Debug)]
pub struct MemoryReport {
    /// The communicator that counts.
    pub communicator: String,
    /// Collectives on it before that point.
    pub collectives_before: u64,
    /// The median of the ranks.
    pub median_bytes: u64,
    /// What each rank held.
    pub ranks: Vec<RankBytes>,
    /// Where ranks that are out of line differ.
    pub uneven: Vec<UnevenBytes>,
}

/// What a rank held.
#[derive(Serialize, Debug)]
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
pub struct UnevenBytes {
    /// In the job.
    pub rank: u32,
    /// Whose.
    pub owner: String,
    /// From where.
    pub place: String,
    /// What it holds.
    pub bytes: u64,
    /// What the median of the ranks holds there.
    pub median_bytes: u64,
}

/// A process on a GPU that is not its own.
#[derive(Serialize, Debug)]
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
    /// Most bytes that the driver had handed out to it there.
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
    /// Most that was used by everybody, as the driver says.
    pub used_bytes: Option<u64>,
    /// What was left at that moment; where the driver was not asked, at least so much, if no other process used the GPU.
    pub headroom_bytes: Option<u64>,
}

/// Rows of collectives on ranks.
const GPU_ROWS: usize = 48;
/// Rows of uneven places for each rank.
const UNEVEN_ROWS: usize = 5;

impl Ranks {
    /// Of these processes. `open` opens the trace of one of them once more.
    #[must_use]
    pub fn of(participants: &[Participant], open: &(dyn Fn(&str) -> Option<Source> + Sync)) -> Ranks {
        let (jobs, alone) = jobs(participants);
        fn traced(it: &Participant) -> Traced<'_> {
            Traced { process: &it.process, path: &it.path, threads: vec![] }
        }
        let report = |job: &Job| JobReport::of(participants, job, open);
        Ranks {
            schema: "gputrace.ranks/1",
            jobs: jobs.iter().map(report).collect(),
            processes: processes::tree(&participants.iter().map(traced).collect::<Vec<_>>()),
            alone: alone.into_iter().map(|idx| participants[idx].path.clone()).collect(),
        }
    }

    /// For people.
    #[must_use]
    pub fn report(&self) -> Report {
        let n = self.jobs.len();
        let mut parts: Vec<Part> = self.jobs.iter().enumerate().map(|(idx, job)| job.part(idx, n)).collect();
        if !self.alone.is_empty() {
            let mut section = Section::new("alone", "Not part of a job");
            for trace in &self.alone {
                section = section.line(Mood::Note, trace.clone());
            }
            let section =
                section.line(Mood::Note, "neither NCCL nor RANK and its like name a job that they belong to");
            parts.push(Part { sections: vec![section], ..Part::default() });
        }
        if let Some(section) = processes::section(&self.processes) {
            parts.push(Part { sections: vec![section], ..Part::default() });
        }
        Report { verb: "ranks", parts }
    }
}

impl JobReport {
    fn of(
        participants: &[Participant],
        job: &Job,
        open: &(dyn Fn(&str) -> Option<Source> + Sync),
    ) -> JobReport {
        let Diagnosis { findings, standings, arrivals, gpu, notes, n_calls } = diagnose(participants, job);
        let memory = memory::at_equal_logical_time(participants, job, open);
        let missing = job.missing();
        let is_wrong = findings.iter().any(|finding| finding.severity == Severity::Error);
        let verdict = match (is_wrong, job.communicators.is_empty(), missing.is_empty()) {
            (true, ..) => Verdict::Inconsistent,
            (false, true, _) => Verdict::NoCalls,
            (false, false, false) => Verdict::Incomplete,
            (false, false, true) => Verdict::Consistent,
        };
        let doubts = job.actors.iter().filter_map(|actor| {
            let doubts = participants[actor.participant].doubts.as_ref()?;
            Some(format!("rank {}: {doubts}", actor.rank))
        });
        JobReport {
            verdict,
            findings,
            notes,
            doubts: doubts.collect(),
            calls: n_calls,
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

    fn part(&self, idx: usize, n_jobs: usize) -> Part {
        let title = match n_jobs {
            1 => format!("{} ranks", self.n_ranks),
            _ => format!("job {} of {n_jobs}: {} ranks", idx + 1, self.n_ranks),
        };
        let mut sections = vec![self.verdict_section()];
        sections.extend(self.findings.iter().enumerate().map(|(idx, finding)| finding_section(idx, finding)));
        sections.push(self.standings_section());
        sections.extend(self.memory.as_ref().map(memory_section));
        sections.extend(self.strangers_section());
        sections.push(self.gpus_section());
        sections.push(self.communicators_section());
        sections.extend(self.gpu_section());
        sections.extend(self.arrivals_section());
        sections.push(self.ranks_section());
        Part { title, sections, ..Part::default() }
    }

    fn verdict_section(&self) -> Section {
        let n_wrong = self.findings.iter().filter(|finding| finding.severity == Severity::Error).count();
        let section = Section::new("verdict", "Communication");
        let mut section = match self.verdict {
            Verdict::Consistent => section.line(
                Mood::Good,
                format!("consistent: {} calls of {} ranks fit together", self.calls, self.ranks.len()),
            ),
            Verdict::Incomplete => section.line(
                Mood::Warning,
                format!("{} calls fit together, but {} has no trace", self.calls, rank_names(&self.missing)),
            ),
            Verdict::Inconsistent => {
                let findings = if n_wrong == 1 { "finding" } else { "findings" };
                section.line(Mood::Bad, format!("inconsistent: {n_wrong} {findings}"))
            }
            Verdict::NoCalls => section.line(Mood::Note, "no call into NCCL was recorded"),
        };
        for note in &self.notes {
            section = section.line(Mood::Note, note.clone());
        }
        for doubt in &self.doubts {
            section = section.line(Mood::Warning, doubt.clone());
        }
        section
    }

    fn standings_section(&self) -> Section {
        let mut table = Table::new(
            "standings",
            &[
                ("rank", "rank"),
                ("state", "at the end"),
                ("waits_for", "waits for"),
                ("collectives", "collectives"),
                ("last_call", "last call into NCCL"),
                ("idle_ns", "before its end"),
            ],
        );
        for standing in &self.standings {
            table.rows.push(vec![
                Value::Count(standing.rank.into()),
                Value::text(&*standing.state),
                Value::text(rank_list(&standing.waits_for)),
                Value::Count(standing.collectives),
                Value::text(
                    standing.last_call.as_ref().map_or_else(|| "none".to_owned(), |call| call.text()),
                ),
                standing.idle_ns.map_or(Value::Missing, |idle| Value::Time(Nanos(idle))),
            ]);
        }
        Section::new("standings", "Where each rank was at the end").table(table)
    }

    fn strangers_section(&self) -> Option<Section> {
        if self.strangers.is_empty() {
            return None;
        }
        let mut section = Section::new("strangers", "Processes on GPUs that are not theirs");
        for stranger in &self.strangers {
            let context = stranger.context_bytes.map_or_else(String::new, |bytes| {
                format!(" and a context of about {}", words::bytes(Bytes(bytes)))
            });
            let whose = match stranger.owners.as_slice() {
                [] => String::new(),
                owners => format!(", the GPU of {}", rank_names(owners)),
            };
            section = section.line(
                Mood::Warning,
                format!(
                    "rank {} (pid {}) has up to {}{context} on cuda:{} {}{whose}; first touched at {}",
                    stranger.rank,
                    stranger.pid,
                    words::bytes(Bytes(stranger.peak_bytes)),
                    stranger.device,
                    stranger.uuid.as_deref().unwrap_or("(unknown)"),
                    stranger.place.as_ref().map_or("an unknown place", |place| &place.text),
                ),
            );
            for line in stranger.stack.iter().take(8) {
                section = section.line(Mood::Note, format!("    {line}"));
            }
        }
        Some(section)
    }

    fn gpus_section(&self) -> Section {
        let mut table = Table::new(
            "gpus",
            &[
                ("gpu", "GPU"),
                ("ranks", "ranks"),
                ("total_bytes", "memory"),
                ("sum_of_peaks_bytes", "peaks together"),
                ("contexts_bytes", "contexts, about"),
                ("used_bytes", "most used"),
                ("headroom_bytes", "headroom"),
            ],
        );
        for gpu in &self.gpus {
            table.rows.push(vec![
                Value::text(format!(
                    "{} {} {}",
                    gpu.host,
                    gpu.name,
                    gpu.uuid.as_deref().unwrap_or("unknown")
                )),
                Value::text(rank_list(&gpu.ranks)),
                Value::bytes(gpu.total_bytes),
                Value::bytes(Some(gpu.sum_of_peaks_bytes)),
                Value::bytes(Some(gpu.contexts_bytes)),
                Value::bytes(gpu.used_bytes),
                Value::bytes(gpu.headroom_bytes),
            ]);
        }
        Section::new("gpus", "GPUs").table(table).line(
            Mood::Note,
            "peaks together: of all its processes, which need not have been at one time; most used: by everybody, as the driver \
             said when it was asked",
        )
    }

    fn communicators_section(&self) -> Section {
        let mut table = Table::new(
            "communicators",
            &[
                ("name", "communicator"),
                ("comm_hash", "NCCL's commId"),
                ("ranks", "ranks"),
                ("collectives", "collectives"),
                ("peer_calls", "sends and receives"),
                ("place", "made at"),
            ],
        );
        for communicator in &self.communicators {
            let (most, fewest) = communicator.collectives;
            let collectives = if most == fewest { most.to_string() } else { format!("{fewest} to {most}") };
            table.rows.push(vec![
                Value::text(&*communicator.name),
                communicator.comm_hash.as_ref().map_or(Value::Missing, |hash| Value::text(&**hash)),
                Value::text(rank_list(&communicator.ranks)),
                Value::text(collectives),
                Value::Count(communicator.peer_calls),
                Value::text(communicator.place.as_ref().map_or("", |place| &place.text)),
            ]);
        }
        Section::new("communicators", "Communicators").table(table)
    }

    /// What the GPUs say.
    fn gpu_section(&self) -> Option<Section> {
        let gpu = self.gpu.as_ref()?;
        let time = |ns: u64| Value::Time(Nanos(ns));
        let mut kinds = Table::new(
            "gpu_collectives",
            &[
                ("communicator", "communicator"),
                ("operation", "collective"),
                ("collectives", "timed"),
                ("rank", "rank"),
                ("mean_ns", "mean"),
                ("shortest_ns", "shortest"),
                ("longest_ns", "longest"),
                ("last", "came last"),
                ("place", "called at"),
            ],
        );
        for kind in &gpu.collectives {
            for rank in &kind.ranks {
                kinds.rows.push(vec![
                    Value::text(&*kind.communicator),
                    Value::text(&*kind.operation),
                    Value::Count(kind.collectives),
                    Value::Count(rank.rank.into()),
                    time(rank.mean_ns),
                    time(rank.shortest_ns),
                    time(rank.longest_ns),
                    Value::Count(rank.last),
                    Value::text(kind.place.as_ref().map_or("", |place| &place.text)),
                ]);
            }
        }
        let n_left = kinds.rows.len().saturating_sub(GPU_ROWS);
        kinds.rows.truncate(GPU_ROWS);
        kinds.left_out = (n_left > 0).then(|| format!("{n_left} more rows, which --json has"));
        let mut costs = Table::new(
            "gpu_arrivals",
            &[
                ("rank", "rank"),
                ("communicator", "communicator"),
                ("last", "came last"),
                ("collectives", "of"),
                ("cost_ns", "others waited"),
                ("most_ns", "at most"),
                ("place", "called at"),
            ],
        );
        for row in gpu.arrivals.iter().take(16) {
            costs.rows.push(vec![
                Value::Count(row.rank.into()),
                Value::text(&*row.communicator),
                Value::Count(row.last),
                Value::Count(row.collectives),
                time(row.cost_ns),
                time(row.most_ns),
                Value::text(row.place.as_ref().map_or("", |place| &place.text)),
            ]);
        }
        let mut section = Section::new("gpu", "Who comes last to collectives on the GPU")
            .table(costs)
            .table(kinds)
            .line(
                Mood::Note,
                "on the GPU, waiting for other ranks included: where it takes shortest, that rank came last, and the others \
                 waited for it alone until the second to last came",
            );
        for rank in &gpu.ranks {
            let Some(text) = rank.timed.text() else { continue };
            let unfinished = rank.first_unfinished.as_ref().map(|call| {
                let which = call.sequence.map_or_else(String::new, |number| {
                    format!(" {} {number} of {}", call.order.unwrap_or_default(), call.communicator)
                });
                let place =
                    call.place.as_ref().map_or_else(String::new, |place| format!(" at {}", place.text));
                format!("; the first that did not end: {}{which}{place}", call.operation)
            });
            let mood = if unfinished.is_some() { Mood::Warning } else { Mood::Note };
            section =
                section.line(mood, format!("rank {}: {text}{}", rank.rank, unfinished.unwrap_or_default()));
        }
        Some(section)
    }

    fn arrivals_section(&self) -> Option<Section> {
        if self.arrivals.is_empty() {
            return None;
        }
        let mut table = Table::new(
            "arrivals",
            &[
                ("rank", "rank"),
                ("communicator", "communicator"),
                ("last", "came last"),
                ("collectives", "of"),
                ("mean_late_ns", "after the median"),
                ("most_late_ns", "at most"),
                ("place", "called at"),
            ],
        );
        for row in self.arrivals.iter().take(16) {
            let late = |late: i64| match late {
                0.. => Value::Time(Nanos(late as u64)),
                _ => Value::text(format!("-{}", words::time(Nanos(late.unsigned_abs())))),
            };
            table.rows.push(vec![
                Value::Count(row.rank.into()),
                Value::text(&*row.communicator),
                Value::Count(row.last),
                Value::Count(row.collectives),
                late(row.mean_late_ns),
                late(row.most_late_ns),
                Value::text(row.place.as_ref().map_or("", |place| &place.text)),
            ]);
        }
        let clocks = match self.clock_uncertainty_ns {
            Some(0) => "all on one host: one clock".to_owned(),
            Some(ns) => format!("clocks of the hosts agree within {}", words::time(Nanos(ns))),
            None => {
                "the clocks of the hosts could not be aligned: arrivals at different hosts do not compare"
                    .to_owned()
            }
        };
        let title = match self.gpu {
            Some(_) => "Who comes late to collectives, by the host's clock",
            None => "Who comes late to collectives",
        };
        let section = Section::new("arrivals", title)
            .table(table)
            .line(Mood::Note, clocks)
            .line(
                Mood::Note,
                match self.gpu {
                    Some(_) => "when the host called: what the GPUs say above is better evidence",
                    None => {
                        "when the host called: programs run ahead of their GPUs, so this is weak evidence for who makes the \
                         others wait (gputrace record --nccl-timing measures it)"
                    }
                },
            );
        Some(section)
    }

    fn ranks_section(&self) -> Section {
        let mut table = Table::new(
            "ranks",
            &[
                ("rank", "rank"),
                ("known_from", "known from"),
                ("host", "host"),
                ("pid", "pid"),
                ("device", "device"),
                ("peak_bytes", "peak"),
                ("trace", "trace"),
            ],
        );
        for rank in &self.ranks {
            let source = match rank.known_from {
                RankSource::Nccl => "NCCL",
                RankSource::Environment => "environment",
                RankSource::Guessed => "a guess",
            };
            table.rows.push(vec![
                Value::Count(rank.rank.into()),
                Value::text(source),
                Value::text(&*rank.host),
                Value::Count(rank.pid.into()),
                rank.device.map_or(Value::Missing, |device| Value::text(format!("cuda:{device}"))),
                Value::bytes(rank.peak_bytes),
                Value::text(&*rank.trace),
            ]);
        }
        let section = Section::new("ranks", "Ranks").table(table);
        match self.missing.is_empty() {
            true => section,
            false => section.line(Mood::Warning, format!("no trace of {}", rank_names(&self.missing))),
        }
    }
}

fn finding_section(idx: usize, finding: &Finding) -> Section {
    let mood = if finding.severity == Severity::Error { Mood::Bad } else { Mood::Warning };
    let title = match finding.severity {
        Severity::Error => format!("{}. {}", idx + 1, capital(finding.kind.title())),
        Severity::Warning => capital(finding.kind.title()),
    };
    let mut section = Section::new(format!("finding_{}", idx + 1), title).line(mood, finding.text.clone());
    if finding.count > 1 && finding.kind != Kind::Straggler {
        section = section.line(Mood::Note, format!("{} times in all", finding.count));
    }
    for line in finding.stack.iter().take(12) {
        section = section.line(Mood::Note, format!("    {line}"));
    }
    if !finding.waiting.is_empty() {
        section =
            section.line(Mood::Note, format!("waiting because of it: {}", rank_names(&finding.waiting)));
    }
    section
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
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
        let n_collectives = || {
            memberships()
                .map(|membership| membership.lane(Lane::Collective).map_or(0, |lane| lane.len() as u64))
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
            collectives: (n_collectives().max().unwrap_or(0), n_collectives().min().unwrap_or(0)),
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
    }
}

fn memory_section(memory: &MemoryReport) -> Section {
    let mut table = Table::new(
        "memory",
        &[
            ("rank", "rank"),
            ("bytes", "held"),
            ("beyond_median_bytes", "against the median"),
            ("owners", "by owner"),
        ],
    );
    for rank in &memory.ranks {
        let owners: Vec<String> = rank
            .owners
            .iter()
            .map(|part| format!("{} {}", part.owner, words::bytes(Bytes(part.bytes))))
            .collect();
        table.rows.push(vec![
            Value::Count(rank.rank.into()),
            Value::Bytes(Bytes(rank.bytes)),
            Value::Difference(rank.beyond_median_bytes),
            Value::text(owners.join(", ")),
        ]);
    }
    let title = format!(
        "Memory of each rank at the same point: after {} collectives on {}, at its most before the next",
        memory.collectives_before, memory.communicator
    );
    let mut uneven = Table::new(
        "uneven",
        &[
            ("rank", "rank"),
            ("difference_bytes", "against the median"),
            ("bytes", "held"),
            ("owner", "owner"),
            ("place", "call site"),
        ],
    );
    for row in &memory.uneven {
        uneven.rows.push(vec![
            Value::Count(row.rank.into()),
            Value::Difference(row.bytes as i64 - row.median_bytes as i64),
            Value::Bytes(Bytes(row.bytes)),
            Value::text(&*row.owner),
            Value::text(&*row.place),
        ]);
    }
    let section = Section::new("memory", title).table(table);
    if uneven.rows.is_empty() {
        return section.line(Mood::Good, "no rank holds much more or less than the others");
    }
    section.line(Mood::Note, "what makes the difference:").table(uneven)
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
            let place = used.first_use.as_ref().map(|(_, site, _)| Place {
                function: site.function.clone(),
                file: site.file.clone(),
                line: site.line,
                text: site.to_string(),
            });
            strangers.push(Stranger {
                rank: actor.rank,
                pid: participant.process.pid,
                uuid: known.map(str::to_owned),
                device: used.ordinal,
                owners: owners.map(|other| other.rank).collect(),
                peak_bytes: used.peak.0,
                context_bytes: used.context.map(|bytes| bytes.0),
                place,
                stack: used.first_use.as_ref().map_or_else(Vec::new, |(_, _, stack)| stack.clone()),
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
