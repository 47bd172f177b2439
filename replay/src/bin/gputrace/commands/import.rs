//! `gputrace import`: what a snapshot holds and whether it is understood.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::import;
use gputrace_schemas::printable::{Screen, printable};
use gputrace_sim::ops::{History, Op, OpStream};
use gputrace_sim::whatif::{Laboratory, SelfCheck};
use serde_json::{Value, json};

use super::Verb;
use crate::show;

pub(super) const VERB: Verb = Verb::new::<ImportArgs>("import", run);

/// Reads PyTorch snapshots and says what they hold and how well they are understood
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace import snapshot.pickle
  gputrace import --json rank*.pickle.gz")]
pub(super) struct ImportArgs {
    /// PyTorch snapshots (plain or .gz)
    #[arg(required = true, value_name = "SNAPSHOT")]
    snapshots: Vec<PathBuf>,

    /// Print one JSON object a snapshot
    #[arg(long)]
    json: bool,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ImportArgs = super::parsed(matches)?;
    for path in &args.snapshots {
        let trace = import::load(path)?;
        let devices: Vec<Summary> = trace.devices.iter().map(Summary::of).collect();
        if args.json {
            let devices: Vec<Value> = devices.iter().map(Summary::json).collect();
            let path = path.display().to_string();
            writeln!(
                out.json(),
                "{}",
                json!({"schema": "gputrace.import/1", "trace": path, "notes": trace.notes, "devices": devices})
            )?;
        } else {
            writeln!(out, "{}", show::shown(path))?;
            trace.notes.iter().try_for_each(|note| writeln!(out, "  {}", printable(note)))?;
            devices.iter().try_for_each(|device| device.print(out))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct Summary<'a> {
    stream: &'a OpStream,
    check: Option<SelfCheck>,
}

impl Summary<'_> {
    fn of(stream: &OpStream) -> Summary<'_> {
        Summary { stream, check: Laboratory::new(stream).ok().map(|laboratory| laboratory.self_check(None)) }
    }

    fn history(&self) -> String {
        match &self.stream.history {
            History::Complete => "complete".into(),
            History::StartsLate => {
                format!("starts late, with {} allocations live", self.stream.initial_allocs.len())
            }
            History::Broken(why) => format!("cannot be replayed: {why}"),
        }
    }

    fn count(&self, wanted: impl Fn(&Op) -> bool) -> usize {
        self.stream.ops.iter().filter(|op| wanted(op)).count()
    }

    fn print(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let stream = self.stream;
        writeln!(
            out,
            "  device {}: {} requests on {} streams, {} pools",
            stream.device,
            stream.n_requests(),
            stream.streams.len(),
            stream.pools.len()
        )?;
        writeln!(out, "    history {}", self.history())?;
        writeln!(
            out,
            "    {} driver calls, {} cache flushes, {} out-of-memory errors",
            stream.driver.len(),
            self.count(|op| *op == Op::Trim),
            stream.ooms.len()
        )?;
        if let Some(check) = &self.check {
            let (major, minor) = check.torch_version;
            writeln!(
                out,
                "    self-check as PyTorch {major}.{minor}: {} of {} addresses match",
                check.n_matching, check.n_requests
            )?;
        }
        Ok(())
    }

    fn json(&self) -> Value {
        let stream = self.stream;
        json!({
            "device": stream.device,
            "n_requests": stream.n_requests(),
            "n_streams": stream.streams.len(),
            "n_pools": stream.pools.len(),
            "n_driver_calls": stream.driver.len(),
            "n_trims": self.count(|op| *op == Op::Trim),
            "n_ooms": stream.ooms.len(),
            "history": self.history(),
            "self_check": self.check.as_ref().map(|check| json!({
                "matching": check.n_matching,
                "of": check.n_requests,
                "torch_version": format!("{}.{}", check.torch_version.0, check.torch_version.1),
            })),
        })
    }
}
