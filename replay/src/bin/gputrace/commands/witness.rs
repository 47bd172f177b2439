//! `gputrace witness`: what `gputrace record` starts to say at the end what was recorded, where the program takes its own place.

use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_recorder::Job;
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::record::{closing, launch};

pub(super) const VERB: Verb = Verb::new::<WitnessArgs>(NAME, run);
const NAME: &str = "witness";

/// Wait for the end of a recorded program; started by gputrace record
#[derive(Args)]
#[command(hide = true)]
pub(super) struct WitnessArgs {
    /// Start of the job
    #[arg(long)]
    began: String,
    /// Process ID
    #[arg(long)]
    pid: u32,
    /// Name of the program
    #[arg(long)]
    program: String,
    /// Run without a parent
    #[arg(long)]
    detach: bool,
}

impl WitnessArgs {
    fn words(&self) -> [String; 4] {
        let WitnessArgs { began, pid, program, .. } = self;
        [NAME.to_owned(), format!("--began={began}"), format!("--pid={pid}"), format!("--program={program}")]
    }
}

/// Starts one for this process.
///
/// # Errors
/// It cannot be started.
pub(super) fn start(began: &str, program: &str) -> anyhow::Result<()> {
    let (began, program) = (began.to_owned(), program.to_owned());
    let words = WitnessArgs { began, pid: std::process::id(), program, detach: true }.words();
    launch::start_witness(&words)
}

fn run(matches: &ArgMatches, _out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: WitnessArgs = super::parsed(matches)?;
    if args.detach {
        launch::detach(&args.words())?;
        return Ok(ExitCode::SUCCESS);
    }
    launch::wait_for_standard_input()?;
    if let Some(job) = Job::find(&args.began) {
        closing::wait_and_say(&job, args.pid, Some(&args.program));
    }
    Ok(ExitCode::SUCCESS)
}
