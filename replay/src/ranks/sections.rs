//! What `gputrace ranks` says, for people.

use gputrace_schemas::event::{Bytes, Nanos};

use super::findings::{Finding, Kind, Severity, rank_list, rank_names};
use super::jobs::RankSource;
use super::report::{JobReport, MemoryReport, Ranks, Verdict};
use crate::answers::processes;
use crate::report::model::{Mood, Part, Report, Section, Table, Value};
use crate::report::words;

/// Rows of collectives on ranks.
const GPU_ROWS: usize = 48;

impl Ranks {
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
