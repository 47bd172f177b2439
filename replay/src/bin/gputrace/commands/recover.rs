//! `gputrace recover`: a trace from a ring that was left behind.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_recorder::{Options, Overwrite};
use gputrace_schemas::printable::Screen;

use super::Verb;
use crate::show::{CANNOT_KNOW, complain, shown};

pub(super) const VERB: Verb = Verb::new::<RecoverArgs>("recover", run);

/// Makes a trace from a ring whose recorder is gone
///
/// Where no recorder could be started, or it was killed, what was recorded is still in the ring: a file that
/// libgputrace.so names on stderr, usually in /dev/shm. If the program still runs, recording continues from here.
///
/// Recording of a program in another container can only continue inside of that container. From outside, what it left
/// can be read once it has ended, which the ring shows if libgputrace.so could lock the file. Only the owner of a ring can
/// read it.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace recover -o train.gtr RING                     # the file that libgputrace.so named
  docker exec train gputrace recover -o train.gtr RING   # its program runs in a container")]
pub(super) struct RecoverArgs {
    /// The ring
    #[arg(required = true, value_name = "RING")]
    rings: Vec<PathBuf>,
    /// Where the trace goes, as for `record`
    #[arg(short, long, value_name = "PATTERN")]
    output: Option<String>,
    /// Overwrite a trace that exists
    #[arg(short = 'F', long, short_alias = 'f')]
    force: bool,
    /// Do not remove the ring afterwards
    #[arg(long)]
    keep: bool,
    /// The program has ended: do not look for it (where that cannot be seen from here)
    #[arg(long)]
    process_is_gone: bool,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: RecoverArgs = super::parsed(matches)?;
    let mut status = ExitCode::SUCCESS;
    for ring in &args.rings {
        let overwrite = if args.force { Overwrite::Replace } else { Overwrite::Refuse };
        let options = Options {
            output: args.output.clone(),
            overwrite,
            keep_ring: args.keep,
            process_is_gone: args.process_is_gone,
            ..Options::default()
        };
        match gputrace_recorder::record(ring, options) {
            Ok(made) => {
                let trace = shown(&made.trace);
                writeln!(out, "{trace}: {} events of process {}", made.n_events, made.pid)?;
                let losses = [
                    (made.n_lost, "events were lost while the program ran"),
                    (made.n_damaged, "records of the ring could not be read"),
                    (made.n_dropped, "events could not be written"),
                ];
                for (count, what) in losses.into_iter().filter(|(count, _)| *count > 0) {
                    writeln!(out, "{trace}: {count} {what}")?;
                }
                if let Some(error) = made.error {
                    complain!("{trace} is not whole: {error}");
                    status = ExitCode::from(CANNOT_KNOW);
                }
                writeln!(out, "next: gputrace report {trace}")?;
            }
            Err(error) => {
                complain!("{:#}", anyhow::Error::from(error));
                status = ExitCode::from(CANNOT_KNOW);
            }
        }
    }
    Ok(status)
}
