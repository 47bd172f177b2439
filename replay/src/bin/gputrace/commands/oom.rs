//! `gputrace oom`: why a program ran out of memory.

use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::answers::postmortem::{Postmortem, remedies, remedies_section};
use gputrace_replay::import::{self, ImportError, Trace};
use gputrace_replay::report;
use gputrace_replay::report::model::{Mood, Report, Section};
use gputrace_replay::trace::source::Source;
use gputrace_schemas::event::Bytes;
use gputrace_schemas::printable::Screen;
use gputrace_sim::bytes::iec;
use gputrace_sim::ops::{Op, OpStream};

use super::Verb;
use super::replay::Machine;
use crate::show::complain;
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

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: OomArgs = super::parsed(matches)?;
    let mut report = Report { verb: "oom", parts: vec![] };
    let mut status = ExitCode::SUCCESS;
    for path in &args.traces.paths()? {
        match Source::open(path) {
            Ok(source) => {
                let postmortem = Postmortem::of(&source);
                let mut sections = postmortem.sections();
                sections.extend(remedies_sections(&postmortem, args.machine, || import::load(path)));
                report.parts.push(report::part(&postmortem.story, sections));
            }
            Err(error) => {
                status = ExitCode::FAILURE;
                complain!("{:#}", anyhow::Error::from(error));
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
        let stream = trace.as_ref().map_err(Clone::clone).and_then(|trace| {
            let stream = trace.devices.iter().find(|stream| i64::from(stream.device) == i64::from(device));
            stream.ok_or_else(|| "it has no requests of this device".to_owned())
        });
        let others = machine.limit.map(|_| others_then(stream.clone().ok(), machine)).unwrap_or_default();
        let left =
            |limit: u64| Bytes(others.iter().fold(limit, |left, (_, bytes)| left.saturating_sub(*bytes)));
        let limit = machine.limit.map(|limit| (left(limit), left(limit)));
        let capacity = limit.or_else(|| postmortem.capacity(device))?;
        let found = stream.clone().and_then(|stream| remedies(stream, capacity, machine.torch_version));
        let section = remedies_section(device, capacity, found, stream.ok());
        let named: Vec<String> =
            others.iter().map(|(name, bytes)| format!("{name} {}", iec(*bytes))).collect();
        Some(match named.is_empty() {
            true => section,
            false => section
                .line(Mood::Note, format!("others had their part of the limit then: {}", named.join(", "))),
        })
    };
    postmortem.torch_devices().filter_map(of_device).collect()
}

/// Who else held how much when memory ran out.
fn others_then(stream: Option<&OpStream>, machine: Machine) -> Vec<(String, u64)> {
    if let Some(bytes) = machine.other {
        return vec![("others".to_owned(), bytes)];
    }
    let Some((stream, others)) = stream.and_then(|stream| Some((stream, stream.others.as_ref()?))) else {
        return vec![];
    };
    let at = stream.ops.iter().rposition(|op| matches!(op, Op::Oom(_))).unwrap_or(stream.ops.len());
    let held = others.names.iter().cloned().zip(others.at(at));
    held.filter(|(_, bytes)| *bytes > 0).collect()
}
