//! `gputrace tune`: the `PYTORCH_CUDA_ALLOC_CONF` line to use, and what it saves.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, anyhow, bail};
use clap::{ArgMatches, Args};
use gputrace_replay::analyse::reactions::{Reaction, reactions};
use gputrace_replay::import;
use gputrace_schemas::printable::{Screen, printable};
use gputrace_sim::bounds::{Bounds, offline_packing};
use gputrace_sim::bytes::iec;
use gputrace_sim::ops::OpStream;
use gputrace_sim::policies::torch::{parse, profile};
use gputrace_sim::simulator::Outcome;
use gputrace_sim::whatif::{Answer, Laboratory, Question, Shares};
use serde_json::{Value, json};

use super::Verb;
use super::replay::{Machine, shares_json, shares_line, warnings_json};

pub(super) const VERB: Verb = Verb::new::<TuneArgs>("tune", run);

/// Finds the PYTORCH_CUDA_ALLOC_CONF line that saves most memory
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace tune train.gtr
  gputrace tune --torch-version 2.11 --device-memory 24GiB --json snapshot.pickle.gz")]
pub(super) struct TuneArgs {
    /// gputrace trace or PyTorch snapshot (plain or .gz)
    #[arg(value_name = "TRACE")]
    trace: PathBuf,

    #[command(flatten)]
    machine: Machine,

    /// Print one JSON object, bytes as integers
    #[arg(long)]
    json: bool,
}

/// Options that are tried, each with each of the other rows. Those that the release refuses are left out.
const AXES: [&[&str]; 4] = [
    &["", "expandable_segments:True"],
    &[
        "",
        "max_split_size_mb:32",
        "max_split_size_mb:64",
        "max_split_size_mb:128",
        "max_split_size_mb:256",
        "max_split_size_mb:512",
    ],
    &["", "roundup_power2_divisions:4", "roundup_power2_divisions:8", "roundup_power2_divisions:16"],
    &[
        "",
        "garbage_collection_threshold:0.6",
        "garbage_collection_threshold:0.8",
        "large_segment_size_mb:12",
        "large_segment_size_mb:64",
    ],
];

/// Saving less than this much of the recorded peak is not worth a changed setting.
const WORTHWHILE: f64 = 0.01;
/// Most settings that are looked at again at other addresses.
const MOST_ANSWERED: usize = 12;
/// Largest trace for which the packing that knows the future is made, in allocations.
const MOST_PACKED: usize = 20_000;

struct Candidate {
    options: String,
    outcome: Outcome,
}

impl Candidate {
    /// Smaller is better: finish at all, reserve little, call the driver rarely, set few options.
    fn rank(&self) -> (bool, u64, u64, usize) {
        let books = self.outcome.books;
        let n_options = self.options.split(',').filter(|option| !option.is_empty()).count();
        (!self.outcome.fits(), books.reserved.peak, books.n_device_alloc, n_options)
    }

    /// Peak and driver calls: what is traded.
    fn cost(&self) -> (u64, u64) {
        (
            self.outcome.books.reserved.peak,
            self.outcome.books.n_device_alloc + self.outcome.books.n_device_free,
        )
    }
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: TuneArgs = super::parsed(matches)?;
    let trace = import::load(&args.trace)?;
    let busiest = trace.devices.iter().max_by_key(|stream| stream.ops.len());
    let Some(stream) = busiest else { bail!("{}: it holds no device memory at all", args.trace.display()) };
    let advice = advise(stream, args.machine).with_context(|| args.trace.display().to_string())?;
    if args.json {
        writeln!(out.json(), "{}", advice.json())?;
    } else {
        advice.print(out)?;
    }
    Ok(ExitCode::SUCCESS)
}

struct Advice {
    device: u32,
    torch_version: (u8, u8),
    recorded_options: String,
    recorded: Answer,
    best_options: String,
    best: Answer,
    /// Not beaten in both peak and driver calls, smallest peak first.
    pareto: Vec<Candidate>,
    n_tried: usize,
    bounds: Bounds,
    packing: Option<u64>,
    /// How the card was shared under the best setting, where one was asked about.
    shares: Option<Shares>,
    reactions: Vec<Reaction>,
}

fn advise(stream: &OpStream, machine: Machine) -> anyhow::Result<Advice> {
    let laboratory = Laboratory::new(stream).map_err(|why| anyhow!("it cannot be replayed: {why}"))?;
    let torch_version = laboratory.self_check(machine.torch_version).torch_version;
    let question = |options: &str| machine.question(stream, torch_version, "torch", options);
    let recorded_options = stream.settings.options.clone().unwrap_or_default();
    let recorded = laboratory.answer(&question(&recorded_options))?;
    let mut candidates =
        search(&laboratory, option_strings(torch_version, machine.limit.is_some())?, question)?;
    let n_tried = candidates.len();
    candidates.sort_by_key(Candidate::rank);
    let (best_options, best) = best(&laboratory, &candidates, question)?;
    let shares = laboratory.shares(&question(&best_options), &best.outcome);
    Ok(Advice {
        shares: shares.filter(|_| machine.is_of_a_card()),
        reactions: reactions(stream),
        device: stream.device,
        torch_version,
        recorded_options,
        recorded,
        best_options,
        best,
        pareto: pareto(candidates),
        n_tried,
        bounds: Bounds::of(stream),
        packing: offline_packing(stream, MOST_PACKED),
    })
}

/// Every combination of `AXES` that the release accepts. Collection does nothing without a limit.
fn option_strings(version: (u8, u8), has_limit: bool) -> anyhow::Result<Vec<String>> {
    let profile = profile(version).ok_or_else(|| {
        anyhow!("PyTorch {}.{} was not measured; name another --torch-version", version.0, version.1)
    })?;
    let mut all = vec![String::new()];
    for axis in AXES {
        all = all
            .iter()
            .flat_map(|start| {
                axis.iter().map(move |option| match (start.as_str(), *option) {
                    (start, "") => start.to_string(),
                    ("", option) => option.to_string(),
                    (start, option) => format!("{start},{option}"),
                })
            })
            .collect();
    }
    all.retain(|options| {
        parse(options, profile).is_ok() && (has_limit || !options.contains("garbage_collection"))
    });
    Ok(all)
}

/// Simulates all options on all cores. The order of the result does not depend on the number of cores.
fn search(
    laboratory: &Laboratory,
    options: Vec<String>,
    question: impl Fn(&str) -> Question + Sync,
) -> anyhow::Result<Vec<Candidate>> {
    let next = AtomicUsize::new(0);
    let found = Mutex::new(Vec::new());
    let work = || {
        while let Some(options) = options.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Ok(outcome) = laboratory.guess(&question(options))
                && let Ok(mut found) = found.lock()
            {
                found.push(Candidate { options: options.clone(), outcome });
            }
        }
    };
    let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..n_threads {
            scope.spawn(work);
        }
    });
    let mut found = found.into_inner().map_err(|_| anyhow!("a simulation failed"))?;
    found.sort_by(|one, other| one.options.cmp(&other.options));
    Ok(found)
}

/// The setting with the smallest peak that is sure: a candidate was simulated at one guess of the addresses only.
fn best(
    laboratory: &Laboratory,
    candidates: &[Candidate],
    question: impl Fn(&str) -> Question,
) -> anyhow::Result<(String, Answer)> {
    let at_worst =
        |answer: &Answer| (answer.n_oom.0 > 0 || !answer.outcome.fits(), answer.peak_reserved_range.1);
    let mut best: Option<(String, Answer)> = None;
    for Candidate { options, outcome } in candidates.iter().take(MOST_ANSWERED) {
        let known = best.as_ref().map(|(_, answer)| at_worst(answer));
        if known.is_some_and(|known| known <= (!outcome.fits(), outcome.books.reserved.peak)) {
            break;
        }
        let answer = laboratory.answer(&question(options))?;
        if known.is_none_or(|known| at_worst(&answer) < known) {
            best = Some((options.clone(), answer));
        }
    }
    best.ok_or_else(|| anyhow!("no setting could be simulated"))
}

/// Of candidates that rise in peak, those that call the driver less than all before.
fn pareto(candidates: Vec<Candidate>) -> Vec<Candidate> {
    let mut fewest = u64::MAX;
    let mut kept = Vec::new();
    for candidate in candidates.into_iter().filter(|candidate| candidate.outcome.fits()) {
        if candidate.cost().1 < fewest {
            fewest = candidate.cost().1;
            kept.push(candidate);
        }
    }
    kept
}

impl Advice {
    /// Whether another setting is worth it: it makes the program fit, or saves enough even where addresses are unkind.
    fn helps(&self) -> bool {
        let (recorded, best) = (&self.recorded, &self.best);
        if recorded.outcome.fits() != best.outcome.fits() {
            return best.outcome.fits();
        }
        let saved = recorded.peak_reserved_range.0.saturating_sub(best.peak_reserved_range.1);
        best.outcome.fits() && saved as f64 >= WORTHWHILE * recorded.outcome.books.reserved.peak as f64
    }

    fn print(&self, out: &mut dyn Write) -> anyhow::Result<()> {
        let (major, minor) = self.torch_version;
        let peak = |answer: &Answer| answer.outcome.books.reserved.peak;
        writeln!(
            out,
            "device {}, PyTorch {major}.{minor}, {} settings simulated",
            self.device, self.n_tried
        )?;
        writeln!(
            out,
            "as recorded: peak reserved {}, {} in use",
            iec(peak(&self.recorded)),
            iec(self.recorded.outcome.books.allocated.peak)
        )?;
        for reaction in &self.reactions {
            writeln!(out, "warning: {}", printable(&reaction.text()))?;
        }
        if self.helps() {
            writeln!(out, "\n    PYTORCH_CUDA_ALLOC_CONF={}\n", self.best_options)?;
            if !self.recorded.outcome.fits() {
                writeln!(
                    out,
                    "fits, where the recorded setting runs out of memory; peak reserved {}",
                    iec(peak(&self.best))
                )?;
            } else {
                let saved = peak(&self.recorded).saturating_sub(peak(&self.best));
                writeln!(out, "peak reserved {}, {} less", iec(peak(&self.best)), iec(saved))?;
            }
            let (low, high) = self.best.peak_reserved_range;
            if low != high {
                writeln!(
                    out,
                    "between {} and {}, depending on addresses that the trace does not tell",
                    iec(low),
                    iec(high)
                )?;
            }
            writeln!(out, "confidence: {}", self.best.confidence.name())?;
        } else if !self.best.outcome.fits() {
            writeln!(out, "\nno setting makes it fit")?;
            writeln!(out, "{} must be in use at once, whatever the allocator", iec(self.bounds.requested))?;
        } else {
            writeln!(out, "\nno setting helps: the best would save less than {:.0} %", WORTHWHILE * 100.0)?;
        }
        if let Some(shares) = &self.shares {
            writeln!(out, "{}", shares_line("torch", shares))?;
        }
        writeln!(out, "\n{:>12} {:>8} {:>8}  setting", "reserved", "mallocs", "frees")?;
        for candidate in &self.pareto {
            let books = candidate.outcome.books;
            let options = if candidate.options.is_empty() { "(none)" } else { &candidate.options };
            writeln!(
                out,
                "{:>12} {:>8} {:>8}  {options}",
                iec(books.reserved.peak),
                books.n_device_alloc,
                books.n_device_free
            )?;
        }
        writeln!(out, "\nno allocator can do with less than")?;
        let bounds = self.bounds;
        writeln!(out, "{:>12}  as requested", iec(bounds.requested))?;
        writeln!(out, "{:>12}  rounded to 512 bytes", iec(bounds.rounded))?;
        writeln!(out, "{:>12}  with streams, pools, small and large kept apart", iec(bounds.separate))?;
        writeln!(out, "{:>12}  in pages of 2 MiB", iec(bounds.paged))?;
        if let Some(packing) = self.packing {
            writeln!(out, "{:>12}  would do if all lifetimes were known in advance", iec(packing))?;
        }
        Ok(())
    }

    fn json(&self) -> Value {
        let answer = |options: &str, answer: &Answer| {
            let books = answer.outcome.books;
            json!({
                "options": options,
                "confidence": answer.confidence.name(),
                "fits": answer.outcome.fits(),
                "peak_reserved_bytes": books.reserved.peak,
                "peak_reserved_range": [answer.peak_reserved_range.0, answer.peak_reserved_range.1],
                "peak_allocated_bytes": books.allocated.peak,
                "num_device_alloc": books.n_device_alloc,
                "num_device_free": books.n_device_free,
            })
        };
        let pareto: Vec<Value> = self
            .pareto
            .iter()
            .map(|candidate| {
                let books = candidate.outcome.books;
                json!({
                    "options": candidate.options,
                    "peak_reserved_bytes": books.reserved.peak,
                    "num_device_alloc": books.n_device_alloc,
                    "num_device_free": books.n_device_free,
                })
            })
            .collect();
        json!({
            "schema": "gputrace.tune/1",
            "device": self.device,
            "torch_version": format!("{}.{}", self.torch_version.0, self.torch_version.1),
            "helps": self.helps(),
            "recorded": answer(&self.recorded_options, &self.recorded),
            "best": answer(&self.best_options, &self.best),
            "pareto": pareto,
            "n_tried": self.n_tried,
            "shares": self.shares.as_ref().map(shares_json),
            "warnings": warnings_json(&self.reactions),
            "bounds": {
                "requested_bytes": self.bounds.requested,
                "rounded_bytes": self.bounds.rounded,
                "separate_bytes": self.bounds.separate,
                "paged_bytes": self.bounds.paged,
                "offline_packing_bytes": self.packing,
            },
        })
    }
}
