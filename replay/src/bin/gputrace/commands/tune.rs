//! `gputrace tune`: the `PYTORCH_CUDA_ALLOC_CONF` line to use, and what it saves.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::answers::postmortem::{Postmortem, would_have_fit};
use gputrace_replay::answers::tune::advise;
use gputrace_replay::answers::tune::job::advise_all;
use gputrace_replay::answers::whatif::Machine;
use gputrace_replay::import::{self, Trace};
use gputrace_replay::report::model::Report;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::replay::{MachineArgs, replies};
use crate::show::{self, FILES, Named, ShowArgs, TRACES, complain};
use crate::working::Working;

pub(super) const VERB: Verb = Verb::new::<TuneArgs>("tune", run).of_replays();

/// Find the PYTORCH_CUDA_ALLOC_CONF that saves the most memory
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace tune train.gtr
  gputrace tune --torch-version 2.11 --device-memory 24GiB --json snapshot.pickle.gz
  gputrace tune --limit 80GB job/   # one setting for all ranks

How sure (docs/VERDICTS.md): exact, to the byte; interval, depends on unrecorded addresses; bound, the best case; guess, the \
replay of the recorded setting differs from the run.")]
pub(super) struct TuneArgs {
    #[arg(required = true, value_name = "TRACE|DIR", value_hint = FILES, help = TRACES)]
    traces: Vec<Named>,

    #[command(flatten)]
    machine: MachineArgs,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: TuneArgs = super::parsed(matches)?;
    let machine = args.machine.machine();
    let paths = show::paths(&args.traces)?;
    if paths.len() > 1 {
        return for_all(&paths, machine, &args.show, out);
    }
    let advise = |path: &str, trace: &Trace| {
        let mut reply = advise(path, trace, machine)?;
        if reply.answer.ran_out() {
            let source = Source::open(Path::new(path)).map_err(|error| error.to_string())?;
            let whether = would_have_fit(&Postmortem::of(&source), machine, &source);
            reply.part.sections.splice(0..0, whether);
        }
        Ok(reply)
    };
    let (report, mut answers, all_read) = replies("tune", &paths, advise);
    if let Some(answer) = answers.pop() {
        args.show.write_answer(&report, &answer, out)?;
    }
    Ok(show::exit_code(all_read))
}

/// One setting for the processes of a job.
fn for_all(
    paths: &[PathBuf],
    machine: Machine,
    show: &ShowArgs,
    out: &mut Screen,
) -> anyhow::Result<ExitCode> {
    let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
    let load = |path: &str| {
        let path = Path::new(path);
        let _working = Working::on(path);
        import::load(path).map_err(|error| error.to_string())
    };
    let (reply, unknown) = advise_all(&names, load, machine).map_err(anyhow::Error::msg)?;
    unknown.iter().for_each(|why| complain!("{why}"));
    let report = Report { verb: "tune", parts: vec![reply.part] };
    show.write_answer(&report, &reply.answer, out)?;
    Ok(show::exit_code(unknown.is_empty()))
}
