//! `gputrace import`: what a snapshot holds and whether it is understood.

use std::io::Write;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_replay::answers::import::contents;
use gputrace_replay::import;
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::{self, FILES, Named, ShowArgs};

pub(super) const VERB: Verb = Verb::new::<ImportArgs>("import", run);

/// Reads PyTorch snapshots and says what they hold and how well they are understood
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace import snapshot.pickle
  gputrace import --json rank*.pickle.gz

--json writes one line per snapshot.")]
pub(super) struct ImportArgs {
    /// PyTorch snapshots (plain or .gz)
    #[arg(required = true, value_name = "SNAPSHOT", value_hint = FILES)]
    snapshots: Vec<Named>,

    #[command(flatten)]
    show: ShowArgs,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ImportArgs = super::parsed(matches)?;
    let mut json = vec![];
    let (report, all_read) = show::parts("import", &show::paths(&args.snapshots)?, |path| {
        let reply = contents(&path.display().to_string(), &import::load(path)?);
        json.push(reply.json);
        Ok(reply.part)
    });
    match args.show.json {
        true => json.iter().try_for_each(|json| writeln!(out.json(), "{json}"))?,
        false => args.show.write(&report, out)?,
    }
    Ok(show::exit_code(all_read))
}
