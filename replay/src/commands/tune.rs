//! x
use std::io::Write;
use std::process::ExitCode;
use clap::{ArgMatches, Args};
use super::Verb;
pub(super) const VERB: Verb = Verb::new::<TuneArgs>("tune", run);
/// x
#[derive(Args)]
pub(super) struct TuneArgs {}
fn run(matches: &ArgMatches, _out: &mut dyn Write) -> anyhow::Result<ExitCode> {
    let _args: TuneArgs = super::parsed(matches)?;
    Ok(ExitCode::SUCCESS)
}
