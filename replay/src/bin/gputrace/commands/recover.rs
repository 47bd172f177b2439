//! `gputrace recover`: traces from rings that were left behind.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_recorder::left::{Fate, Left, Log};
use gputrace_recorder::{Options, Overwrite};
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::parts::left;
use crate::show::{CANNOT_KNOW, complain, shown};

pub(super) const VERB: Verb = Verb::new::<RecoverArgs>("recover", run);

/// Make traces from rings whose recorders are gone
///
/// If the recorder was killed or could not start, events remain in the ring: a file that libgputrace.so names on stderr,
/// usually in /dev/shm. Without RING, `recover` makes traces of all your rings whose processes have ended (`gputrace ps` lists
/// them), even if one fails. With RING, if its program still runs, recording continues from here.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace recover                                       # all your rings
  gputrace recover -o /data/traces/                      # into that folder
  gputrace recover -o train.gtr RING                     # the file that libgputrace.so named
  docker exec train gputrace recover -o train.gtr RING   # a program in a container

If the program runs in another container, recording can only continue there. From outside, you can read its ring once it has \
ended. If libgputrace.so could not lock the ring, add --process-is-gone. Only the owner of a ring can read it.

A trace that is not whole gives status 2.")]
pub(super) struct RecoverArgs {
    /// Rings [default: all of yours whose processes have ended]
    #[arg(value_name = "RING")]
    rings: Vec<PathBuf>,
    /// Folder or name of the trace, as for `record`
    #[arg(short, long, value_name = "PATTERN")]
    output: Option<String>,
    /// Overwrite existing files
    #[arg(short = 'F', long, short_alias = 'f')]
    force: bool,
    /// Keep the ring afterwards
    #[arg(long)]
    keep: bool,
    /// Assume that the program has ended, if that cannot be seen from here
    #[arg(long, requires = "rings")]
    process_is_gone: bool,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: RecoverArgs = super::parsed(matches)?;
    let mut all_whole = true;
    if args.rings.is_empty() {
        all_whole = everything(&args, out)?;
    }
    for ring in &args.rings {
        let overwrite = if args.force { Overwrite::Replace } else { Overwrite::Refuse };
        all_whole &= recovered(ring, overwrite, &args, out)?;
    }
    Ok(if all_whole { ExitCode::SUCCESS } else { ExitCode::from(CANNOT_KNOW) })
}

/// Makes traces of all rings of processes that have ended, and shows what recorders could say nowhere else. Whether all went well.
fn everything(args: &RecoverArgs, out: &mut Screen) -> anyhow::Result<bool> {
    let left = Left::find();
    let mut all_well = true;
    // Several processes may have had the same name and number.
    let overwrite = if args.force { Overwrite::Replace } else { Overwrite::Number };
    for ring in &left.rings {
        let path = shown(&ring.path);
        match &ring.process {
            Fate::Ended => all_well &= recovered(&ring.path, overwrite, args, out)?,
            Fate::Runs => writeln!(out, "{path}: {}", left::what_to_do(ring))?,
            Fate::NothingRecorded if args.keep => writeln!(out, "{path}: nothing was recorded in it")?,
            Fate::NothingRecorded => match std::fs::remove_file(&ring.path) {
                Ok(()) => writeln!(out, "{path}: nothing was recorded in it; removed")?,
                Err(error) => {
                    all_well = false;
                    complain!("cannot remove {path}: {error}");
                }
            },
            Fate::Unknown(why) => {
                all_well = false;
                complain!("{why}");
            }
        }
    }
    for log in &left.logs {
        all_well &= shown_and_removed(log, args.keep, out)?;
    }
    if left.n_of_others > 0 {
        let n = left.n_of_others;
        writeln!(out, "rings of other users: {n}, left unchanged")?;
    } else if left.rings.is_empty() && left.logs.is_empty() {
        writeln!(out, "no ring of yours is left in /dev/shm or /tmp")?;
    }
    Ok(all_well)
}

/// Shows what a recorder could say nowhere else, and removes the file if nothing more can follow. Whether that went well.
fn shown_and_removed(log: &Log, keep: bool, out: &mut Screen) -> anyhow::Result<bool> {
    let path = shown(&log.path);
    let text = match log.text() {
        Ok(text) => text,
        Err(error) => {
            complain!("cannot read {path}: {error}");
            return Ok(false);
        }
    };
    writeln!(out, "{path}: messages of the recorder of process {}:", log.pid)?;
    for line in text.lines() {
        writeln!(out, "  {line}")?;
    }
    if keep || log.may_grow() {
        return Ok(true);
    }
    if let Err(error) = std::fs::remove_file(&log.path) {
        complain!("cannot remove {path}: {error}");
        return Ok(false);
    }
    Ok(true)
}

/// Makes a trace of one ring. Whether it is whole.
fn recovered(
    ring: &Path,
    overwrite: Overwrite,
    args: &RecoverArgs,
    out: &mut Screen,
) -> anyhow::Result<bool> {
    let options = Options {
        output: args.output.clone(),
        overwrite,
        keep_ring: args.keep,
        process_is_gone: args.process_is_gone,
        ..Options::default()
    };
    let made = match gputrace_recorder::record(ring, options) {
        Ok(made) => made,
        Err(error) => {
            complain!("{:#}", anyhow::Error::from(error));
            return Ok(false);
        }
    };
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
    if let Some(error) = &made.error {
        complain!("{trace} is incomplete: {error}");
    }
    writeln!(out, "next: gputrace report {trace}")?;
    Ok(made.error.is_none())
}
