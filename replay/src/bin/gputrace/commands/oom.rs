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

/// Shows why a program ran out of memory: what was asked for, who held what, and what would have made it fit
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace oom train.gtr
  gputrace oom --limit 40GiB --json snapshot.pickle.gz

What would have made it fit is found by replaying the same requests through PyTorch's allocator with other settings.
How sure: exact, to the byte; interval, it hangs on addresses that no trace holds; bound, at best; guess, the replay of the recorded
setting is not the run (docs/VERDICTS.md).")]
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
        Ok(report::part(&postmortem.story, sections))
    })
}
