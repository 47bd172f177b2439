//! `gputrace tune`: the `PYTORCH_CUDA_ALLOC_CONF` line to use, and what it saves.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::{ArgMatches, Args};
use gputrace_replay::analyse::reactions::{Reaction, reactions};
use gputrace_replay::import;
use gputrace_schemas::printable::{Screen, printable};
use gputrace_sim::bounds::{Bounds, offline_packing};
use gputrace_sim::bytes::iec;
use gputrace_sim::ops::OpStream;
use gputrace_sim::policies::torch;
use gputrace_sim::tune::{self, Found};
use gputrace_sim::whatif::{Answer, Laboratory, Shares};
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

/// Saving less than this much of the recorded peak is not worth a changed setting.
const WORTHWHILE: f64 = 0.01;
/// Largest trace for which the packing that knows the future is made, in allocations.
const MOST_PACKED: usize = 20_000;

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
    best: Found,
    bounds: Bounds,
    packing: Option<u64>,
    /// How the card was shared under the best setting, where one was asked about.
    shares: Option<Shares>,
    reactions: Vec<Reaction>,
}

fn advise(stream: &OpStream, machine: Machine) -> anyhow::Result<Advice> {
    let laboratory = Laboratory::new(stream).map_err(|why| anyhow!("it cannot be replayed: {why}"))?;
    let torch_version = laboratory.self_check(machine.torch_version).torch_version;
    let question = |options: &str| machine.question(stream, torch_version, torch::NAME, options);
    let recorded_options = stream.settings.options.clone().unwrap_or_default();
    let recorded = laboratory.answer(&question(&recorded_options))?;
    let settings = tune::combinations(torch_version, machine.limit.is_some())?;
    let found = tune::search(&laboratory, &settings, question)?;
    let found = found.ok_or_else(|| anyhow!("no setting could be simulated"))?;
    let shares = laboratory.shares(&question(&found.options), &found.answer.outcome);
    Ok(Advice {
        shares: shares.filter(|_| machine.is_of_a_card()),
        reactions: reactions(stream),
        device: stream.device,
        torch_version,
        recorded_options,
        recorded,
        best: found,
        bounds: Bounds::of(stream),
        packing: offline_packing(stream, MOST_PACKED),
    })
}

impl Advice {
    /// Whether another setting is worth it: it makes the program fit, or saves enough even where addresses are unkind.
    fn helps(&self) -> bool {
        let (recorded, best) = (&self.recorded, &self.best.answer);
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
            self.device, self.best.n_tried
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
            writeln!(out, "\n    PYTORCH_CUDA_ALLOC_CONF={}\n", self.best.options)?;
            if !self.recorded.outcome.fits() {
                writeln!(
                    out,
                    "fits, where the recorded setting runs out of memory; peak reserved {}",
                    iec(peak(&self.best.answer))
                )?;
            } else {
                let saved = peak(&self.recorded).saturating_sub(peak(&self.best.answer));
                writeln!(out, "peak reserved {}, {} less", iec(peak(&self.best.answer)), iec(saved))?;
            }
            let (low, high) = self.best.answer.peak_reserved_range;
            if low != high {
                writeln!(
                    out,
                    "between {} and {}, depending on addresses that the trace does not tell",
                    iec(low),
                    iec(high)
                )?;
            }
            writeln!(out, "confidence: {}", self.best.answer.confidence.name())?;
        } else if !self.best.answer.outcome.fits() {
            writeln!(out, "\nno setting makes it fit")?;
            writeln!(out, "{} must be in use at once, whatever the allocator", iec(self.bounds.requested))?;
        } else {
            writeln!(out, "\nno setting helps: the best would save less than {:.0} %", WORTHWHILE * 100.0)?;
        }
        if let Some(shares) = &self.shares {
            writeln!(out, "{}", shares_line(torch::NAME, shares))?;
        }
        writeln!(out, "\n{:>12} {:>8} {:>8}  setting", "reserved", "mallocs", "frees")?;
        for candidate in &self.best.pareto {
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
            .best
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
            "best": answer(&self.best.options, &self.best.answer),
            "pareto": pareto,
            "n_tried": self.best.n_tried,
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
