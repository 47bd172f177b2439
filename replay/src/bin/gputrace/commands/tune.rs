//! `gputrace tune`: the `PYTORCH_CUDA_ALLOC_CONF` line to use, and what it saves.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::answers::tune::advise;
use gputrace_replay::import::Trace;
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::replay::{MachineArgs, replies};
use crate::show::{self, ShowArgs};

pub(super) const VERB: Verb = Verb::new::<TuneArgs>("tune", run);

/// Finds the PYTORCH_CUDA_ALLOC_CONF line that saves most memory
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace tune train.gtr
  gputrace tune --torch-version 2.11 --device-memory 24GiB --json snapshot.pickle.gz

How sure: exact, to the byte; interval, it hangs on addresses that no trace holds; bound, at best; guess, the replay of the recorded
setting is not the run (docs/VERDICTS.md).")]
pub(super) struct TuneArgs {
    /// gputrace trace or PyTorch snapshot (plain or .gz)
    #[arg(value_name = "TRACE|DIR")]
    trace: PathBuf,

    #[command(flatten)]
    machine: MachineArgs,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: TuneArgs = super::parsed(matches)?;
    let machine = args.machine.machine();
    let advise = |path: &str, trace: &Trace| advise(path, trace, machine);
    let (report, mut json, all_read) = replies("tune", &[show::only(&args.trace)?], advise);
    if let Some(json) = json.pop() {
        args.show.write_as(&report, &json, out)?;
    }
    Ok(show::exit_code(all_read))
}
