//! `gputrace oom`: why a program ran out of memory.

use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::answers::postmortem::{Postmortem, remedies_sections};
use gputrace_replay::report;
use gputrace_replay::report::sections::health;
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::replay::MachineArgs;
use crate::show::{self, ShowArgs, TraceArgs};

pub(super) const VERB: Verb = Verb::new::<OomArgs>("oom", run).of_replays();

/// Show why a program ran out of memory: the request, what was held, and what would have made it fit
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace oom train.gtr
  gputrace oom --limit 40GiB --json snapshot.pickle.gz

To find what would have made it fit, `oom` replays the same requests in PyTorch's allocator with other settings.

How sure (docs/VERDICTS.md): exact, to the byte; interval, depends on unrecorded addresses; bound, the best case; guess, the \
replay of the recorded setting differs from the run.")]
pub(super) struct OomArgs {
    #[command(flatten)]
    traces: TraceArgs,

    #[command(flatten)]
    machine: MachineArgs,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: OomArgs = super::parsed(matches)?;
    let machine = args.machine.machine();
    show::each("oom", &args.traces, &args.show, out, |source| {
        let postmortem = Postmortem::of(source);
        let mut sections: Vec<_> = health::of(&postmortem.story).into_iter().collect();
        sections.extend(postmortem.sections());
        sections.extend(remedies_sections(&postmortem, machine, source));
        let part = report::part(&postmortem.story, sections);
        Ok(if postmortem.is_uneventful() { part } else { super::report::below_verdict(part, source) })
    })
}
