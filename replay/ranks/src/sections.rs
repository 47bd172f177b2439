//! What `gputrace ranks` says, for people.

use std::collections::{BTreeMap, HashMap};

use gputrace_schemas::event::{Bytes, Nanos};

use super::findings::{Finding, Kind, Place, Severity, rank_list, rank_names};
use super::gpu::{GpuCollective, GpuTime};
use super::jobs::RankSource;
use super::live::HANG_AFTER;
use super::report::{
    CommunicatorReport, Gpu, JobReport, MemoryReport, OwnerBytes, RankBytes, RankReport, Ranks, UnevenBytes,
    Verdict,
};
use super::shared::{Known, Shared};
use super::show;
use super::waits::Standing;
use gputrace_report::model::{Mood, Part, Report, Section, Shown, Table, Value};
use gputrace_report::processes;
use gputrace_trace::words;

/// Findings of one kind about the same ranks of a communicator that are shown: what went wrong once goes on to do so.
const ALIKE_SHOWN: usize = 3;
/// Findings that are shown.
const FINDINGS_SHOWN: usize = 20;
/// Rows of collectives on ranks.
const GPU_ROWS: usize = 48;

impl Ranks {
    /// For people.
    #[must_use]
    pub fn report(&self) -> Report {
        let n = self.jobs.len();
        let mut parts: Vec<Part> = self.jobs.iter().enumerate().map(|(idx, job)| job.part(idx, n)).collect();
        parts.extend(
            shared_section(&self.shared).map(|section| Part { sections: vec![section], ..Part::default() }),
        );
        if !self.alone.is_empty() {
            let mut section = Section::new("alone", "Not part of a job");
            for trace in &self.alone {
                section = section.line(Mood::Note, trace.clone());
            }
            let section = section
                .line(
                    Mood::Note,
                    "no NCCL communicator assigns them to a job; without one, RANK, WORLD_SIZE and MASTER_ADDR do, which torchrun and Slurm set",
                );
            parts.push(Part { sections: vec![section], ..Part::default() });
        }
        if let Some(section) = processes::section(&self.processes) {
            parts.push(Part { sections: vec![section], ..Part::default() });
        }
        Report { verb: "ranks", parts }
    }
}

/// Memory that one process made and others map.
fn shared_section(shared: &[Shared]) -> Option<Section> {
    if shared.is_empty() {
        return None;
    }
    let table = Table::of(
        "shared",
        shared,
        &[
            ("bytes", "bytes", &|it| it.bytes.map_or(Value::Missing, |bytes| Value::Bytes(Bytes(bytes)))),
            ("pieces", "pieces", &|it| Value::Count(it.pieces)),
            ("exporter", "created by", &|it| Value::text(it.exporter.as_deref().unwrap_or("not known"))),
            ("importers", "mapped by", &|it| Value::text(it.importers.join(", "))),
            ("gpu", "GPU", &|it| it.gpu.as_deref().map_or(Value::Missing, Value::text)),
            ("call_site", "shared first by", &|it| Value::text(&*it.call_site)),
        ],
    );
    let section = Section::new("shared", "Memory that processes share")
        .line(
            Mood::Note,
            "each byte counts once, for the process that created it; processes that map it do not count it",
        )
        .table(table);
    let is = |known| shared.iter().any(|it| it.known == known);
    let section = match is(Known::OnlyOne) {
        true => section.line(
            Mood::Note,
            "memory passed by file descriptor has no name that both ends see: it probably belongs to the only other process that exported any",
        ),
        false => section,
    };
    Some(match is(Known::No) {
        true => section.line(
            Mood::Note,
            "not known: a process without a trace here created it, or it was passed by file descriptor and several processes exported some",
        ),
        false => section,
    })
}

impl JobReport {
    fn part(&self, idx: usize, n_jobs: usize) -> Part {
        let title = match n_jobs {
            1 => format!("{} ranks", self.n_ranks),
            _ => format!("job {} of {n_jobs}: {} ranks", idx + 1, self.n_ranks),
        };
        let mut sections = vec![self.verdict_section()];
        sections.extend(self.finding_sections());
        sections.push(self.standings_section());
        sections.extend(self.memory.as_ref().map(memory_section));
        sections.extend(self.strangers_section());
        sections.extend((!self.gpus.is_empty()).then(|| self.gpus_section()));
        sections.push(self.communicators_section());
        sections.extend(self.gpu_section());
        sections.extend(self.arrivals_section());
        sections.push(self.ranks_section());
        Part { title, sections, ..Part::default() }
    }

    fn verdict_section(&self) -> Section {
        let n_wrong = self.findings.iter().filter(|finding| finding.severity == Severity::Error).count();
        let section = self.with_headline(Section::new("verdict", "Communication"));
        let mut section = match self.verdict {
            Verdict::Consistent => section.line(
                Mood::Good,
                format!(
                    "consistent{}{}: {} calls of {} ranks match{}",
                    self.window.as_ref().map_or_else(String::new, |it| format!(" since {}", it.since)),
                    if self.running { " until now" } else { "" },
                    words::count(self.calls),
                    self.ranks.len(),
                    self.behind()
                ),
            ),
            Verdict::Incomplete => section.line(
                Mood::Warning,
                format!(
                    "incomplete: {} calls match, but {}",
                    words::count(self.calls),
                    match self.missing.len() {
                        0 => "not every trace continues to the end".to_owned(),
                        1 => format!("{} has no trace", rank_names(&self.missing)),
                        _ => format!("{} have no trace", rank_names(&self.missing)),
                    }
                ),
            ),
            Verdict::Inconsistent => {
                let findings = if n_wrong == 1 { "finding" } else { "findings" };
                section.line(Mood::Bad, format!("inconsistent: {n_wrong} {findings}"))
            }
            Verdict::Hangs => {
                section.line(Mood::Bad, format!("the job hangs{}", self.so_far(Severity::Error)))
            }
            Verdict::Waits => section.line(
                Mood::Warning,
                format!(
                    "the job is waiting{}; it becomes a hang if the late rank stays idle for {}",
                    self.so_far(Severity::Warning),
                    words::time(Nanos(HANG_AFTER))
                ),
            ),
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

    /// Which communicator's ranks have not made the same number of calls yet.
    fn behind(&self) -> String {
        let uneven = self.communicators.iter().find(|it| it.collectives.0 != it.collectives.1);
        uneven.map_or_else(String::new, |it| {
            let (most, fewest) = it.collectives;
            format!(
                "; on {}, a rank has made {} calls and another {}",
                it.name,
                words::count(fewest),
                words::count(most)
            )
        })
    }

    /// For how long ranks have waited.
    fn so_far(&self, severity: Severity) -> String {
        let of = self.findings.iter().filter(|finding| finding.severity == severity);
        let longest = of.filter_map(|finding| finding.for_ns).max();
        longest.map_or_else(String::new, |ns| format!(", for {} so far", words::time(Nanos(ns))))
    }

    /// The first of those that are alike, in their order, and how many there are of each.
    fn finding_sections(&self) -> Vec<Section> {
        let (mut sections, mut n_alike, mut left_out) = (vec![], HashMap::new(), BTreeMap::new());
        for (idx, finding) in self.findings.iter().enumerate() {
            let n = n_alike.entry((finding.kind, &finding.communicator, &finding.ranks)).or_insert(0);
            *n += 1;
            if *n <= ALIKE_SHOWN && sections.len() < FINDINGS_SHOWN {
                sections.push(finding_section(idx, finding));
            } else {
                *left_out.entry(finding.kind.title()).or_insert(0_u64) += 1;
            }
        }
        if !left_out.is_empty() {
            let n: u64 = left_out.values().sum();
            let of_kinds: Vec<String> =
                left_out.iter().map(|(title, n)| format!("{} {title}", words::count(*n))).collect();
            let text =
                format!("{} more findings, listed by --json: {}", words::count(n), of_kinds.join(", "));
            sections.push(
                Section::new("more_findings", "More findings of the same kinds").line(Mood::Note, text),
            );
        }
        sections
    }

    fn standings_section(&self) -> Section {
        // Without arguments, which findings and --json have: the lines are what one looks for.
        let operation = |it: &Standing| {
            let call = it.last_call.as_ref().map_or("none", |call| &call.call);
            call.split('(').next().unwrap_or_default().to_owned()
        };
        let line = |it: &Standing| {
            let place = it.last_call.as_ref().and_then(|call| call.place.as_ref());
            place.map_or_else(String::new, Place::line_text)
        };
        let stands = |it: &Standing| it.stands_in.as_deref().map_or(Value::Missing, Value::text);
        let ago = |it: &Standing| it.idle_ns.map_or(Value::Missing, duration);
        let columns: [Shown<'_, Standing>; 8] = [
            ("rank", "rank", &|it| Value::Count(it.rank.into())),
            ("state", if self.running { "now" } else { "at the end" }, &|it| Value::text(&*it.state)),
            ("waits_for", "waits for", &|it| Value::text(rank_list(&it.waits_for))),
            ("collectives", "calls", &|it| Value::Count(it.collectives)),
            ("last_call", "last NCCL call", &|it| Value::text(operation(it))),
            ("place", "line", &|it| Value::text(line(it))),
            ("idle_ns", "ago", &ago),
            ("stands_in", "main thread in", &stands),
        ];
        // The last where it is known of any.
        let is_known = self.standings.iter().any(|it| it.stands_in.is_some());
        let n_columns = if is_known { columns.len() } else { columns.len() - 1 };
        let table = Table::of("standings", &self.standings, &columns[..n_columns]);
        let title = if self.running { "Where each rank is" } else { "Where each rank was at the end" };
        Section::new("standings", title).table(table)
    }

    fn strangers_section(&self) -> Option<Section> {
        if self.strangers.is_empty() {
            return None;
        }
        let mut section = Section::new("strangers", "Processes on other ranks' GPUs");
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
                section = section.line(Mood::Note, format!("    {}", short_frame(line)));
            }
        }
        Some(section)
    }

    fn gpus_section(&self) -> Section {
        let which = |it: &Gpu| format!("{} {} {}", it.host, it.name, it.uuid.as_deref().unwrap_or("unknown"));
        let table = Table::of(
            "gpus",
            &self.gpus,
            &[
                ("gpu", "GPU", &|it| Value::text(which(it))),
                ("ranks", "ranks", &|it| Value::text(rank_list(&it.ranks))),
                ("total_bytes", "memory", &|it| Value::bytes(it.total_bytes)),
                ("sum_of_peaks_bytes", "peaks together", &|it| Value::bytes(Some(it.sum_of_peaks_bytes))),
                ("contexts_bytes", "contexts, about", &|it| Value::bytes(Some(it.contexts_bytes))),
                ("used_bytes", "most used", &|it| Value::bytes(it.used_bytes)),
                ("headroom_bytes", "headroom", &|it| Value::bytes(it.headroom_bytes)),
            ],
        );
        Section::new("gpus", "GPUs").table(table).line(
            Mood::Note,
            "peaks together: sum over all its processes, which may have peaked at different times; most used: by all processes, from the driver when it was asked",
        )
    }

    fn communicators_section(&self) -> Section {
        let hash = |it: &CommunicatorReport| it.comm_hash.clone().map_or(Value::Missing, Value::Text);
        let collectives = |it: &CommunicatorReport| match it.collectives {
            (most, fewest) if most == fewest => most.to_string(),
            (most, fewest) => format!("{fewest} to {most}"),
        };
        let table = Table::of(
            "communicators",
            &self.communicators,
            &[
                ("name", "communicator", &|it| Value::text(it.name.trim_start_matches("the group of "))),
                ("comm_hash", "commId", &hash),
                ("ranks", "ranks", &|it| Value::text(rank_list(&it.ranks))),
                ("collectives", "collectives", &|it| Value::text(collectives(it))),
                ("peer_calls", "sends, receives", &|it| Value::Count(it.peer_calls)),
                ("place", "created at", &|it| {
                    Value::text(it.place.as_ref().map_or_else(String::new, Place::line_text))
                }),
            ],
        );
        Section::new("communicators", "Communicators").table(table)
    }

    /// What the GPUs say.
    fn gpu_section(&self) -> Option<Section> {
        let gpu = self.gpu.as_ref()?;
        let ranks: Vec<(&GpuCollective, &GpuTime)> =
            gpu.collectives.iter().flat_map(|kind| kind.ranks.iter().map(move |rank| (kind, rank))).collect();
        let mut kinds = Table::of(
            "gpu_collectives",
            &ranks,
            &[
                ("communicator", "communicator", &|(kind, _)| Value::text(&*kind.communicator)),
                ("operation", "collective", &|(kind, _)| Value::text(&*kind.operation)),
                ("collectives", "timed", &|(kind, _)| Value::Count(kind.collectives)),
                ("rank", "rank", &|(_, it)| Value::Count(it.rank.into())),
                ("mean_ns", "mean", &|(_, it)| duration(it.mean_ns)),
                ("shortest_ns", "shortest", &|(_, it)| duration(it.shortest_ns)),
                ("longest_ns", "longest", &|(_, it)| duration(it.longest_ns)),
                ("last", "came last", &|(_, it)| Value::Count(it.last)),
                ("place", "called at", &|(kind, _)| place(&kind.place)),
            ],
        );
        let n_left = kinds.rows.len().saturating_sub(GPU_ROWS);
        kinds.rows.truncate(GPU_ROWS);
        kinds.left_out = (n_left > 0).then(|| format!("{n_left} more rows, listed by --json"));
        let costs = Table::of(
            "gpu_arrivals",
            gpu.arrivals.iter().take(16),
            &[
                ("rank", "rank", &|it| Value::Count(it.rank.into())),
                ("communicator", "communicator", &|it| Value::text(&*it.communicator)),
                ("last", "came last", &|it| Value::Count(it.last)),
                ("collectives", "of", &|it| Value::Count(it.collectives)),
                ("cost_ns", "others waited", &|it| duration(it.cost_ns)),
                ("most_ns", "at most", &|it| duration(it.most_ns)),
                ("place", "called at", &|it| place(&it.place)),
            ],
        );
        let mut section = Section::new("gpu", "Last arrivals at collectives, on the GPU")
            .table(costs)
            .table(kinds)
            .line(
                Mood::Note,
                "times on the GPU include waiting for other ranks: the rank with the shortest time came last, and the others waited for it alone until the second to last came",
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
        let is_worth_it = |it: &Finding| it.kind == Kind::Straggler;
        if self.arrivals.is_empty() || (self.gpu.is_none() && !self.findings.iter().any(is_worth_it)) {
            return None;
        }
        let late = |late: i64| match late {
            0.. => duration(late as u64),
            _ => Value::text(show::nanos(late)),
        };
        let table = Table::of(
            "arrivals",
            self.arrivals.iter().take(16),
            &[
                ("rank", "rank", &|it| Value::Count(it.rank.into())),
                ("communicator", "communicator", &|it| Value::text(&*it.communicator)),
                ("last", "came last", &|it| Value::Count(it.last)),
                ("late_anew", "anew", &|it| Value::Count(it.late_anew)),
                ("collectives", "of", &|it| Value::Count(it.collectives)),
                ("mean_late_ns", "after the median", &|it| late(it.mean_late_ns)),
                ("most_late_ns", "at most", &|it| late(it.most_late_ns)),
                ("place", "called at", &|it| place(&it.place)),
            ],
        );
        let clocks = match self.clock_uncertainty_ns {
            Some(0) => "all on one host: one clock".to_owned(),
            Some(ns) => format!("host clocks agree within {}", words::time(Nanos(ns))),
            None => {
                "host clocks could not be aligned: arrivals on different hosts cannot be compared".to_owned()
            }
        };
        let title = match self.gpu {
            Some(_) => "Late arrivals at collectives, by host clock",
            None => "Late arrivals at collectives",
        };
        let section = Section::new("arrivals", title)
            .table(table)
            .line(Mood::Note, clocks)
            .line(Mood::Note, "new: it came last, and not only because it was late to the previous collective")
            .line(
                Mood::Note,
                match self.gpu {
                    Some(_) => "these are times of calls on the host: the GPU times above are better evidence",
                    None => {
                        "these are times of calls on the host. Programs run ahead of their GPUs, so this is weak evidence for which rank delays the others (gputrace record --nccl-timing measures it)"
                    }
                },
            );
        Some(section)
    }

    fn ranks_section(&self) -> Section {
        let source = |it: &RankReport| match it.known_from {
            RankSource::Nccl => "NCCL",
            RankSource::Environment => "environment",
            RankSource::Guessed => "a guess",
        };
        let device = |device: i16| Value::text(format!("cuda:{device}"));
        let table = Table::of(
            "ranks",
            &self.ranks,
            &[
                ("rank", "rank", &|it| Value::Count(it.rank.into())),
                ("known_from", "known from", &|it| Value::text(source(it))),
                ("host", "host", &|it| Value::text(&*it.host)),
                ("pid", "pid", &|it| Value::text(it.pid.to_string())),
                ("device", "device", &|it| it.device.map_or(Value::Missing, device)),
                ("peak_bytes", "peak", &|it| Value::bytes(it.peak_bytes)),
                ("trace", "trace", &|it| Value::text(&*it.trace)),
            ],
        );
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
        Severity::Error => format!("{}. {}", idx + 1, show::capital(finding.kind.title())),
        Severity::Warning => show::capital(finding.kind.title()),
    };
    let mut section = Section::new(format!("finding_{}", idx + 1), title).line(mood, finding.text.clone());
    if finding.count > 1 && finding.kind != Kind::Straggler {
        section = section.line(Mood::Note, format!("{} times in total", finding.count));
    }
    for line in finding.stack.iter().take(12) {
        section = section.line(Mood::Note, format!("    {}", short_frame(line)));
    }
    if !finding.waiting.is_empty() {
        section =
            section.line(Mood::Note, format!("waiting because of it: {}", rank_names(&finding.waiting)));
    }
    section
}

/// A line of a stack with the last folder of its file only, so that it fits on a line: `all_reduce (distributed/distributed_c10d.py:2501)`.
fn short_frame(line: &str) -> String {
    let Some((function, path)) = line.rsplit_once(" (") else { return line.to_owned() };
    let second = path.rmatch_indices('/').nth(1).map_or(0, |(idx, _)| idx + 1);
    format!("{function} ({}", &path[second..])
}

/// Nanoseconds.
fn duration(ns: u64) -> Value {
    Value::Time(Nanos(ns))
}

fn place(place: &Option<Place>) -> Value {
    Value::text(place.as_ref().map_or("", |place| &place.text))
}

fn memory_section(memory: &MemoryReport) -> Section {
    let owners = |it: &RankBytes| {
        let part = |part: &OwnerBytes| format!("{} {}", part.owner, words::bytes(Bytes(part.bytes)));
        it.owners.iter().map(part).collect::<Vec<_>>().join(", ")
    };
    let table = Table::of(
        "memory",
        &memory.ranks,
        &[
            ("rank", "rank", &|it| Value::Count(it.rank.into())),
            ("bytes", "held", &|it| Value::Bytes(Bytes(it.bytes))),
            ("beyond_median_bytes", "from the median", &|it| Value::Difference(it.beyond_median_bytes)),
            ("owners", "by owner", &|it| Value::text(owners(it))),
        ],
    );
    let collectives = if memory.collectives_before == 1 { "collective" } else { "collectives" };
    let when = format!(
        "each rank's maximum between {} {collectives} on {} and the next",
        words::count(memory.collectives_before),
        memory.communicator
    );
    let unknown = (!memory.unknown.is_empty()).then(|| {
        let whose = rank_names(&memory.unknown);
        let why = "a summary lacks it, or a trace is missing or begins later";
        (Mood::Warning, format!("not known for {whose}: {why}"))
    });
    let difference = |it: &UnevenBytes| Value::Difference(it.bytes as i64 - it.median_bytes as i64);
    let uneven = Table::of(
        "uneven",
        &memory.uneven,
        &[
            ("rank", "rank", &|it| Value::Count(it.rank.into())),
            ("difference_bytes", "from the median", &difference),
            ("bytes", "held", &|it| Value::Bytes(Bytes(it.bytes))),
            ("owner", "owner", &|it| Value::text(&*it.owner)),
            ("place", "call site", &|it| Value::text(&*it.place)),
        ],
    );
    let section = Section::new("memory", "Memory of each rank at the same point")
        .table(table)
        .line(Mood::Note, when)
        .lines(unknown);
    if uneven.rows.is_empty() {
        return section.line(Mood::Good, "no rank holds much more or less than the others");
    }
    section.line(Mood::Note, "the difference comes from:").table(uneven)
}
