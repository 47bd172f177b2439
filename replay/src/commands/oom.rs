//! `gputrace oom`: why a program ran out of memory.

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::import::{self, ImportError, Trace};
use gputrace_replay::postmortem::{Postmortem, remedies, remedies_section};
use gputrace_replay::report;
use gputrace_replay::report::model::{Report, Section};
use gputrace_replay::source::Source;
use gputrace_schemas::event::Bytes;

use super::Verb;
use super::replay::Machine;
use crate::show::{ShowArgs, TraceArgs};

pub(super) const VERB: Verb = Verb::new::<OomArgs>("oom", run);

/// Shows why a program ran out of memory: what was asked for, who held what, and what would have made it fit
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace oom train.gtr
  gputrace oom --limit 40GiB --json snapshot.pickle.gz

What would have made it fit is found by replaying the same requests through PyTorch's allocator with other settings.")]
pub(super) struct OomArgs {
    #[command(flatten)]
    traces: TraceArgs,

    #[command(flatten)]
    machine: Machine,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let args: OomArgs = super::parsed(matches)?;
    let mut report = Report { verb: "oom", parts: vec![] };
    let mut status = ExitCode::SUCCESS;
    for path in &args.traces.traces {
        match Source::open(path) {
            Ok(source) => {
                let postmortem = Postmortem::of(&source);
                let mut sections = postmortem.sections();
                sections.extend(remedies_sections(&postmortem, args.machine, || import::load(path)));
                report.parts.push(report::part(&postmortem.story, sections));
            }
            Err(error) => {
                status = ExitCode::FAILURE;
                eprintln!("gputrace: {:#}", anyhow::Error::from(error));
            }
        }
    }
    if !report.parts.is_empty() || args.show.json {
        args.show.write(&report, out)?;
    }
    Ok(status)
}

/// What would have made it fit, on each device whose PyTorch ran out. `load` reads the same trace as requests.
pub(super) fn remedies_sections(
    postmortem: &Postmortem,
    machine: Machine,
    load: impl FnOnce() -> Result<Trace, ImportError>,
) -> Vec<Section> {
    if postmortem.torch_devices().next().is_none() {
        return vec![];
    }
    let trace = load().map_err(|error| format!("{:#}", anyhow::Error::from(error)));
    let of_device = |device: i16| {
        let limit = machine.limit.map(|limit| (Bytes(limit), Bytes(limit)));
        let capacity = limit.or_else(|| postmortem.capacity(device))?;
        let stream = trace.as_ref().map_err(Clone::clone).and_then(|trace| {
            let stream = trace.devices.iter().find(|stream| i64::from(stream.device) == i64::from(device));
            stream.ok_or_else(|| "it has no requests of this device".to_owned())
        });
        let found = stream.clone().and_then(|stream| remedies(stream, capacity, machine.torch_version));
        Some(remedies_section(device, capacity, found, stream.ok()))
    };
    postmortem.torch_devices().filter_map(of_device).collect()
}
