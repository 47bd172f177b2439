//! `gputrace replay`: what another allocator would have made of the same requests.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::{ArgMatches, Args};
use gputrace_replay::analyse::reactions::{Reaction, reactions};
use gputrace_replay::import::{self, Trace};
use gputrace_schemas::printable::{Screen, printable};
use gputrace_sim::bytes::{self, iec};
use gputrace_sim::gap::Gap;
use gputrace_sim::ops::{History, OpStream};
use gputrace_sim::policies::{POLICIES, torch};
use gputrace_sim::whatif::{Answer, Laboratory, Other, Question, SelfCheck, Shares};
use serde_json::{Value, json};

use super::Verb;
use crate::show::{self, complain};

pub(super) const VERB: Verb = Verb::new::<ReplayArgs>("replay", run);

/// Replays a trace through simulated allocators
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace replay train.gtr
  gputrace replay --policy torch --policy torch:expandable_segments:True train.gtr
  gputrace replay --limit 40GiB train.gtr
  gputrace replay --limit 24GiB --other 1.5GiB snapshot.pickle.gz")]
pub(super) struct ReplayArgs {
    /// gputrace traces or PyTorch snapshots (plain or .gz)
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,

    /// Allocator to simulate, NAME or NAME:OPTIONS; may be given several times. For `torch`, OPTIONS is what
    /// PYTORCH_CUDA_ALLOC_CONF would hold [default: torch as recorded]. `--policy help` lists them all
    #[arg(long, value_name = "NAME[:OPTIONS]")]
    policy: Vec<String>,

    #[command(flatten)]
    machine: Machine,

    /// Print one JSON object, bytes as integers
    #[arg(long)]
    json: bool,
}

/// What the trace may not say about the machine.
#[derive(Args, Clone, Copy, Default)]
pub(super) struct Machine {
    /// PyTorch release to imitate [default: the one that explains the trace best]
    #[arg(long, value_name = "X.Y", value_parser = version)]
    pub(super) torch_version: Option<(u8, u8)>,

    /// Memory of the device [default: what the trace says, or unlimited]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    pub(super) device_memory: Option<u64>,

    /// The most that the process may hold: whether it would fit on such a card. Others than the allocator have their
    /// part of it (see --other)
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    pub(super) limit: Option<u64>,

    /// What others hold of --limit or --device-memory: the CUDA context, code, NCCL, cuBLAS... [default: what the trace
    /// says, at each moment; a snapshot says nothing]
    #[arg(long, value_name = "BYTES", value_parser = bytes::parse)]
    pub(super) other: Option<u64>,
}

impl Machine {
    /// What these options ask about an allocator.
    pub(super) fn question(
        self,
        stream: &OpStream,
        torch_version: (u8, u8),
        policy: &str,
        options: &str,
    ) -> Question {
        Question {
            policy: policy.into(),
            options: options.into(),
            torch_version,
            device_memory: self.device_memory.or(stream.settings.device_memory),
            limit: self.limit,
            other: match self.other {
                Some(bytes) => Other::Bytes(bytes),
                None if self.is_of_a_card() => Other::Recorded,
                None => Other::Ignored,
            },
        }
    }

    /// Whether something has to fit.
    pub(super) fn is_of_a_card(self) -> bool {
        self.limit.is_some() || self.device_memory.is_some()
    }
}

fn version(text: &str) -> Result<(u8, u8), String> {
    let wrong = || format!("`{text}` is no release; write X.Y, such as 2.11");
    let mut parts = text.split(['.', '+']);
    let major = parts.next().and_then(|part| part.parse().ok()).ok_or_else(wrong)?;
    let minor = parts.next().and_then(|part| part.parse().ok()).ok_or_else(wrong)?;
    Ok((major, minor))
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ReplayArgs = super::parsed(matches)?;
    if args.policy.iter().any(|policy| policy == "help") {
        return list_policies(out);
    }
    let mut reports = Vec::new();
    for path in &args.traces {
        let trace = import::load(path)?;
        for note in &trace.notes {
            complain!("{}: {note}", path.display());
        }
        if trace.devices.is_empty() {
            bail!("{}: it holds no device memory at all", path.display());
        }
        let report = replay(&trace, &args).with_context(|| path.display().to_string())?;
        if args.json {
            reports.push(report_json(path, &report));
        } else {
            report_table(out, path, &report)?;
        }
    }
    match reports.len() {
        0 => {}
        1 => writeln!(out.json(), "{}", reports[0])?,
        _ => writeln!(out.json(), "{}", json!({"schema": "gputrace.replay/1", "traces": reports}))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn list_policies(out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    for entry in POLICIES {
        writeln!(out, "{:<12} {}", entry.name, entry.summary)?;
        writeln!(out, "{:<12}   options: {}", "", entry.options)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// One simulated allocator on one device.
struct Row<'a> {
    device: &'a OpStream,
    question: Question,
    answer: Answer,
    fragmentation: Gap,
    self_check: SelfCheck,
    /// How the card was shared, where one was asked about.
    shares: Option<Shares>,
    reactions: Vec<Reaction>,
}

fn replay<'a>(trace: &'a Trace, args: &ReplayArgs) -> anyhow::Result<Vec<Row<'a>>> {
    let mut rows = Vec::new();
    for stream in &trace.devices {
        let laboratory = Laboratory::new(stream)
            .map_err(|why| anyhow!("device {} cannot be replayed: {why}", stream.device))?;
        let self_check = laboratory.self_check(args.machine.torch_version);
        let reactions = reactions(stream);
        for question in questions(stream, args, self_check.torch_version) {
            let answer =
                laboratory.answer(&question).with_context(|| format!("--policy {}", named(&question)))?;
            let fragmentation = laboratory.gap(&question)?;
            let shares = laboratory.shares(&question, &answer.outcome);
            rows.push(Row {
                device: stream,
                question,
                answer,
                fragmentation,
                self_check: self_check.clone(),
                shares: shares.filter(|_| args.machine.is_of_a_card()),
                reactions: reactions.clone(),
            });
        }
    }
    Ok(rows)
}

fn questions(stream: &OpStream, args: &ReplayArgs, torch_version: (u8, u8)) -> Vec<Question> {
    let question =
        |policy: &str, options: &str| args.machine.question(stream, torch_version, policy, options);
    if args.policy.is_empty() {
        return vec![question(stream.settings.policy, stream.settings.options.as_deref().unwrap_or(""))];
    }
    let named = args.policy.iter().map(|policy| policy.split_once(':').unwrap_or((policy, "")));
    named.map(|(policy, options)| question(policy, options)).collect()
}

/// As it was given on the command line.
pub(super) fn named(question: &Question) -> String {
    match question.options.as_str() {
        "" => question.policy.clone(),
        options => format!("{}:{options}", question.policy),
    }
}

fn report_json(path: &std::path::Path, rows: &[Row]) -> Value {
    let outcomes: Vec<Value> = rows.iter().map(row_json).collect();
    json!({"schema": "gputrace.replay/1", "trace": path.display().to_string(), "outcomes": outcomes})
}

fn row_json(row: &Row) -> Value {
    let Row { device, question, answer, fragmentation, self_check, shares, reactions } = row;
    let (outcome, books) = (&answer.outcome, &answer.outcome.books);
    let counters: serde_json::Map<String, Value> =
        outcome.counters.iter().map(|(name, value)| ((*name).into(), json!(value))).collect();
    let oom = outcome.oom.as_ref().map(|oom| {
        json!({
            "request": oom.request,
            "requested_bytes": oom.requested,
            "segment_bytes": oom.error.segment_bytes,
            "reserved_bytes": oom.reserved,
            "allocated_bytes": oom.allocated,
            "message": oom.error.message,
        })
    });
    json!({
        "device": device.device,
        "policy": question.policy,
        "options": question.options,
        "torch_version": format!("{}.{}", question.torch_version.0, question.torch_version.1),
        "device_memory_bytes": question.device_memory,
        "limit_bytes": question.limit,
        "confidence": answer.confidence.name(),
        "peak_reserved_bytes": books.reserved.peak,
        "peak_reserved_range": [answer.peak_reserved_range.0, answer.peak_reserved_range.1],
        "peak_allocated_bytes": books.allocated.peak,
        "peak_active_bytes": books.active.peak,
        "peak_requested_bytes": books.requested.peak,
        "peak_inactive_split_bytes": books.inactive_split.peak,
        "num_device_alloc": books.n_device_alloc,
        "num_device_free": books.n_device_free,
        "num_alloc_retries": outcome.counter("num_alloc_retries"),
        "num_ooms": outcome.counter("num_ooms"),
        "counters": counters,
        "fragmentation": fragmentation_json(fragmentation),
        "n_guesses": answer.n_oom.1,
        "n_guesses_out_of_memory": answer.n_oom.0,
        "oom": oom,
        "shares": shares.as_ref().map(shares_json),
        "warnings": warnings_json(reactions),
        "self_check": {
            "matching": self_check.n_matching,
            "of": self_check.n_requests,
            "torch_version": format!("{}.{}", self_check.torch_version.0, self_check.torch_version.1),
        },
    })
}

/// How the card was shared.
pub(super) fn shares_json(shares: &Shares) -> Value {
    let other = |(owner, bytes): &(String, u64)| json!({"owner": owner, "bytes": bytes});
    json!({
        "limit_bytes": shares.limit,
        "fits": shares.fits,
        "reserved_bytes": shares.reserved,
        "others": shares.others.as_ref().map(|others| others.iter().map(other).collect::<Vec<_>>()),
        "free_bytes": shares.free(),
        "refused_bytes": shares.refused,
    })
}

/// How the card was shared, in a line.
pub(super) fn shares_line(policy: &str, shares: &Shares) -> String {
    let policy = if policy == torch::NAME { "PyTorch" } else { policy };
    let verdict = if shares.fits { "fits" } else { "does not fit" };
    let mut line = format!("{verdict}: limit {} = {policy} {}", iec(shares.limit), iec(shares.reserved));
    for (owner, bytes) in shares.others.iter().flatten() {
        line += &format!(" + {owner} {}", iec(*bytes));
    }
    line += &format!(" + free {}", iec(shares.free()));
    if let Some(refused) = shares.refused {
        line += &format!(", and {} more were asked for", iec(refused));
    }
    match (&shares.others, shares.is_charge_known) {
        (None, _) => {
            line += "; the CUDA context and other libraries need their part, of which this trace does not tell (--other BYTES)";
        }
        (Some(_), false) => {
            line +=
                "; the CUDA context and code need their part, which the driver did not tell (--other BYTES)"
        }
        (Some(_), true) => {}
    }
    line
}

/// What the replay cannot follow.
pub(super) fn warnings_json(reactions: &[Reaction]) -> Vec<Value> {
    let warning = |reaction: &Reaction| {
        let site = reaction.site.as_ref();
        let site = site.map(|site| json!({"function": *site.name, "file": *site.file, "line": site.line}));
        json!({"kind": reaction.kind.name(), "count": reaction.count, "call_site": site, "text": reaction.text()})
    };
    reactions.iter().map(warning).collect()
}

fn fragmentation_json(fragmentation: &Gap) -> Value {
    let mut parts: serde_json::Map<String, Value> = fragmentation
        .parts()
        .iter()
        .map(|(name, _, bytes)| (format!("{name}_bytes"), json!(bytes)))
        .collect();
    let pins = fragmentation.pins.iter().map(|pin| {
        let site = pin.site.as_ref();
        json!({
            "function": site.map(|site| &*site.name),
            "file": site.map(|site| &*site.file),
            "line": site.map(|site| site.line),
            "in_use_bytes": pin.in_use,
            "stranded_alone_bytes": pin.alone,
            "stranded_bytes": pin.stranded,
        })
    });
    parts.insert("reserved_bytes".into(), json!(fragmentation.reserved));
    parts.insert("in_use_bytes".into(), json!(fragmentation.in_use));
    parts.insert("pins".into(), pins.collect());
    Value::Object(parts)
}

/// How this differs from what `gputrace oom` calls by the same words.
const MEASURED: &str = "simulated; `gputrace oom` measures, when memory ran out, stranded and wholly free (cached) bytes, each with its part of isolated";

/// Why more was reserved than was in use.
fn fragmentation_table(out: &mut dyn Write, row: &Row) -> anyhow::Result<()> {
    let fragmentation = &row.fragmentation;
    let (reserved, in_use) = (fragmentation.reserved, fragmentation.in_use);
    writeln!(
        out,
        "\nwhen most was reserved, with {}: {} for {} in use",
        named(&row.question),
        iec(reserved),
        iec(in_use)
    )?;
    for (name, meaning, bytes) in fragmentation.parts().into_iter().filter(|(_, _, bytes)| *bytes > 0) {
        writeln!(
            out,
            "{:>12} {:>6.1}%  {}: {meaning}",
            iec(bytes),
            100.0 * bytes as f64 / reserved.max(1) as f64,
            name.replace('_', " ")
        )?;
    }
    if fragmentation.isolated + fragmentation.cached + fragmentation.stranded > 0 {
        writeln!(out, "{MEASURED}")?;
    }
    if !fragmentation.pins.is_empty() {
        writeln!(
            out,
            "segments are held by (free bytes beside its blocks, of which held by it alone, its own bytes)"
        )?;
    }
    for pin in &fragmentation.pins {
        let (stranded, alone, in_use) = (iec(pin.stranded), iec(pin.alone), iec(pin.in_use));
        writeln!(out, "{stranded:>12} {alone:>12} {in_use:>12}  {}", printable(&pin.place()))?;
    }
    Ok(())
}

fn report_table(out: &mut dyn Write, path: &std::path::Path, rows: &[Row]) -> anyhow::Result<()> {
    let mut device = None;
    for row in rows {
        if device != Some(row.device.device) {
            device = Some(row.device.device);
            header(out, path, row)?;
        }
        let books = &row.answer.outcome.books;
        let peak = books.reserved.peak;
        let unused = 100.0 * (peak - books.allocated.peak.min(peak)) as f64 / peak.max(1) as f64;
        writeln!(
            out,
            "{:>12} {:>12} {:>6.1}% {:>8} {:>8} {:>7}  {:<9} {}",
            iec(peak),
            iec(books.allocated.peak),
            unused,
            books.n_device_alloc,
            books.n_device_free,
            row.answer.outcome.counter("num_alloc_retries"),
            row.answer.confidence.name(),
            named(&row.question),
        )?;
        let (low, high) = row.answer.peak_reserved_range;
        if low != high {
            writeln!(
                out,
                "{:>12} to {} depending on addresses that the trace does not tell",
                iec(low),
                iec(high)
            )?;
        }
        if let Some(shares) = &row.shares {
            writeln!(out, "{:>12} {}", "", shares_line(&row.question.policy, shares))?;
        }
        if let Some(oom) = &row.answer.outcome.oom {
            writeln!(
                out,
                "{:>12} out of memory at request {} of {}: {} asked for, {} reserved, {} in use",
                "",
                oom.request + 1,
                row.device.n_requests(),
                iec(oom.requested),
                iec(oom.reserved),
                iec(oom.allocated),
            )?;
        }
        let outcome = &row.answer.outcome;
        if outcome.counter("pools_lost") + outcome.counter("failed_assertions") > 0 {
            writeln!(
                out,
                "{:>12} PyTorch deletes, or fails to count, a released pool that is in use: what it does then is undefined",
                "",
            )?;
        }
    }
    // Of one allocator a device: the first that was asked about.
    let mut told = None;
    for row in rows.iter().filter(|row| told.replace(row.device.device) != Some(row.device.device)) {
        fragmentation_table(out, row)?;
    }
    Ok(())
}

fn header(out: &mut dyn Write, path: &std::path::Path, row: &Row) -> anyhow::Result<()> {
    let check = &row.self_check;
    let (major, minor) = check.torch_version;
    writeln!(
        out,
        "{}, device {}, {} requests",
        show::shown(path),
        row.device.device,
        row.device.n_requests()
    )?;
    let is_torch = row.device.settings.is_torch();
    if is_torch || !row.device.driver.is_empty() {
        writeln!(
            out,
            "self-check as PyTorch {major}.{minor}: {} of {} addresses match",
            check.n_matching, check.n_requests
        )?;
    } else {
        writeln!(out, "no self-check: the log does not say what its allocator asked of the driver")?;
    }
    if let Some(first) = check.first.filter(|_| is_torch || !row.device.driver.is_empty()) {
        writeln!(
            out,
            "  first at event {}: {} bytes were at {:#x}, simulated at {:#x}",
            first.op, first.requested, first.recorded, first.simulated
        )?;
    }
    if row.device.history == History::StartsLate {
        writeln!(out, "  recording began when memory was in use: what-ifs are approximate")?;
    }
    for reaction in &row.reactions {
        writeln!(out, "  warning: {}", printable(&reaction.text()))?;
    }
    writeln!(
        out,
        "{:>12} {:>12} {:>7} {:>8} {:>8} {:>7}  {:<9} policy",
        "reserved", "allocated", "unused", "mallocs", "frees", "retries", "sure"
    )?;
    Ok(())
}
