//! `gputrace layers`: what each layer of a training step holds.

use std::process::ExitCode;

use anyhow::anyhow;
use clap::{ArgMatches, Args};
use gputrace_replay::answers::layers::layers;
use gputrace_replay::import::Requests;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::{self, FILES, Named, ShowArgs, TRACES, complain};

pub(super) const VERB: Verb = Verb::new::<LayersArgs>("layers", run);

/// Show the parameters, gradients, optimizer state and activations of each layer in a training step
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace layers train.gtr
  gputrace layers --json snapshot.pickle.gz

Layers are the calls that repeat in the forward pass, and bytes are as requested. Use their numbers in \
`gputrace whatif --checkpoint layers:A..B`.")]
pub(super) struct LayersArgs {
    #[arg(required = true, value_name = "TRACE|DIR", value_hint = FILES, help = TRACES)]
    traces: Vec<Named>,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: LayersArgs = super::parsed(matches)?;
    let (report, all_read) = show::parts("layers", &show::paths(&args.traces)?, |path| {
        let shown = path.display().to_string();
        let source = Source::open(path)?;
        let trace = source.requests().map_err(|error| anyhow!("{error}"))?;
        trace.notes.iter().for_each(|note| complain!("{shown}: {note}"));
        layers(&shown, &source, trace).map_err(|why| anyhow!("{shown}: {why}"))
    });
    if !report.parts.is_empty() || args.show.json {
        args.show.write(&report, out)?;
    }
    Ok(show::exit_code(all_read))
}
