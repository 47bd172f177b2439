//! x
use std::io::Write;
use std::process::ExitCode;
use clap::{ArgMatches, Args};
use super::Verb;
pub(super) const VERB: Verb = Verb::new::<ImportArgs>("import", run);
/// x
#[derive(Args)]
pub(super) struct ImportArgs {}
fn run(matches: &ArgMatches, _out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let _args: ImportArgs = super::parsed(matches)?;
    Ok(ExitCode::SUCCESS)
}
