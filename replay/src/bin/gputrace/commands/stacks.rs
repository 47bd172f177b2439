//! `gputrace stacks`: where the Python threads of processes are, now.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{ArgMatches, Args};
use gputrace_recorder::python_stacks::{ThreadStack, stacks};
use gputrace_schemas::printable::Screen;

use super::Verb;
use super::parts::live::find::{Place, Which};
use crate::show::{CANNOT_KNOW, complain};

pub(super) const VERB: Verb = Verb::new::<StacksArgs>("stacks", run).with_status_of_its_own();

/// Shows where the Python threads of a process, or of every rank of a job, are now
///
/// Stacks are read from outside while the process runs: it is not stopped, and need not be recorded if it is named by its number. A
/// thread that changed while it was read is marked. Reading needs the rights of a debugger: the user of the process where
/// kernel.yama.ptrace_scope is 0, root else. CPython 3.9 to 3.15, not the builds without a global lock. Native frames are not shown.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace stacks 4711            # a process
  gputrace stacks job/            # every process whose trace in this folder is being written

Exit status: 0 if every stack was read, 2 otherwise.")]
pub(super) struct StacksArgs {
    /// A process by its number, a folder of traces that are being written, or traces [default: all that are being recorded]
    #[arg(value_name = "PID|DIR|TRACE")]
    which: Vec<PathBuf>,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: StacksArgs = super::parsed(matches)?;
    let which = Which::of(&args.which)?;
    let mut targets: Vec<(u32, Option<Place>)> = match &which {
        // Recorded or not.
        Which::Process(pid) => vec![(*pid, None)],
        Which::All | Which::Job(_) | Which::Folder(_) | Which::Traces(_) => {
            let places = which.find().into_iter().filter(|place| place.is_written);
            places.filter_map(|place| Some((place.process?, Some(place)))).collect()
        }
    };
    if targets.is_empty() {
        anyhow::bail!("no process is being recorded there whose number /proc shows; name one by its number");
    }
    targets.sort_by_key(|(pid, _)| *pid);
    targets.dedup_by_key(|(pid, _)| *pid);
    let mut all_read = true;
    for (pid, place) in targets {
        match stacks(pid) {
            Ok(threads) => write(pid, place.as_ref(), &threads, out)?,
            Err(why) => {
                all_read = false;
                complain!("{why}");
            }
        }
    }
    Ok(if all_read { ExitCode::SUCCESS } else { ExitCode::from(CANNOT_KNOW) })
}

fn write(pid: u32, place: Option<&Place>, threads: &[ThreadStack], out: &mut Screen) -> anyhow::Result<()> {
    let trace = place.map_or_else(String::new, |place| format!("  {}", place.shown.display()));
    writeln!(out, "process {pid}{trace}")?;
    for thread in threads {
        let state = match thread.state {
            'S' => "sleeps",
            'R' => "runs",
            'D' => "waits in the kernel",
            'T' | 't' => "is stopped",
            _ => "state not known",
        };
        let torn = if thread.is_torn { ", changed while it was read" } else { "" };
        let idle = if thread.lines.is_empty() { ", not in Python" } else { "" };
        writeln!(out, "  thread {} {}  {state}{torn}{idle}", thread.tid, thread.name)?;
        for line in &thread.lines {
            writeln!(out, "    {} ({}:{})", line.function, line.file, line.line)?;
        }
    }
    Ok(())
}
