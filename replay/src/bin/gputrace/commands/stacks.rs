//! `gputrace stacks`: where the threads of processes are, now.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{ArgMatches, Args};
use gputrace_recorder::thread_stacks::{End, How, Stacks, stacks};
use gputrace_schemas::event::Frame;
use gputrace_schemas::printable::{Screen, printable};

use super::Verb;
use super::parts::beside::{self, Progress};
use super::parts::live::find::{Place, Which};
use crate::show::{CANNOT_KNOW, complain};

pub(super) const VERB: Verb = Verb::new::<StacksArgs>("stacks", run).with_status_of_its_own();

/// Show the Python and native stacks of all threads of a process, or of every rank of a job
///
/// A process that you name by its ID need not be recorded. Waiting threads are not stopped, and running ones only for a few
/// tenths of a millisecond, which is shown. Threads that are already stopped, or traced by a debugger, are left alone. You
/// need the permissions of a debugger (the user of the process if kernel.yama.ptrace_scope is 0, otherwise root), and for
/// Python frames CPython 3.9 to 3.15, not free-threaded.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace stacks 4711            # one process
  gputrace stacks job/            # every process whose trace here is being written

Exit status: 0 if every stack was read, 2 otherwise.")]
pub(super) struct StacksArgs {
    /// Process ID, folder of traces that are being written, or traces [default: all your recordings]
    #[arg(value_name = "PID|DIR|TRACE")]
    which: Vec<PathBuf>,

    /// Show all native frames, even of the interpreter between Python frames
    #[arg(long)]
    all: bool,

    /// Run as the child that reads one process
    #[arg(long, hide = true)]
    in_child: bool,

    /// The trace of that process
    #[arg(long, hide = true, value_name = "TRACE")]
    of: Option<PathBuf>,
}

/// How long one process may take: the names of its functions alone may take 20 s.
const ONE_PROCESS: Duration = Duration::from_secs(40);

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: StacksArgs = super::parsed(matches)?;
    if let (true, [pid]) = (args.in_child, &args.which[..]) {
        let pid = pid.to_str().and_then(|pid| pid.parse().ok()).unwrap_or_default();
        let work = |out: &mut Screen, _: &Progress| one(pid, args.of.as_deref(), args.all, out);
        return beside::run(true, None, "", out, work);
    }
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
        anyhow::bail!("no process of these traces runs here; name a process by its PID");
    }
    targets.sort_by_key(|(pid, _)| *pid);
    targets.dedup_by_key(|(pid, _)| *pid);
    let mut all_read = true;
    for (pid, place) in targets {
        // Each process has a child of its own: the memory and files of one may never respond, and it holds up no other.
        let mut words: Vec<OsString> = vec![VERB.name.into(), "--in-child".into()];
        words.extend(args.all.then(|| "--all".into()));
        let trace = place.as_ref().map(|place| place.shown.as_path());
        words.extend(trace.into_iter().flat_map(|trace| ["--of".into(), trace.into()]));
        words.push(pid.to_string().into());
        let stuck = format!(
            "process {pid} cannot be read: its memory or files do not respond, as on a hanging file system (FUSE, NFS)"
        );
        out.flush()?;
        let ended = match beside::ended(&words, Some(ONE_PROCESS), &stuck) {
            Some(ended) => ended,
            None => one(pid, trace, args.all, out)?,
        };
        all_read &= ended == ExitCode::SUCCESS;
    }
    Ok(if all_read { ExitCode::SUCCESS } else { ExitCode::from(CANNOT_KNOW) })
}

fn one(pid: u32, trace: Option<&Path>, shows_all: bool, out: &mut Screen) -> anyhow::Result<ExitCode> {
    match stacks(pid) {
        Ok(stacks) => write(pid, trace, &stacks, shows_all, out).map(|()| ExitCode::SUCCESS),
        Err(why) => {
            complain!("{why}");
            Ok(ExitCode::from(CANNOT_KNOW))
        }
    }
}

fn write(
    pid: u32,
    trace: Option<&Path>,
    stacks: &Stacks,
    shows_all: bool,
    out: &mut Screen,
) -> anyhow::Result<()> {
    let trace = trace.map_or_else(String::new, |trace| format!("  {}", trace.display()));
    writeln!(out, "process {pid}{trace}")?;
    if let Some(why) = &stacks.no_python {
        writeln!(out, "  no Python frames: {why}")?;
    }
    for left_out in &stacks.left_out {
        writeln!(out, "  left out: {}", printable(left_out))?;
    }
    for thread in &stacks.threads {
        let state = match thread.state {
            'S' => "sleeps",
            'R' => "runs",
            'D' => "waits in the kernel",
            'T' | 't' => "is stopped",
            _ => "state not known",
        };
        let how = match &thread.how {
            How::Waiting => String::new(),
            How::Stopped(time) => format!(", stopped for {} µs", time.as_micros()),
            How::None(why) => format!(", no native frames: {why}"),
        };
        let torn = if thread.is_torn { ", changed during the read" } else { "" };
        writeln!(out, "  thread {} {}  {state}{how}{torn}", thread.tid, thread.name)?;
        let first_python = thread.frames.iter().position(|it| matches!(it, Frame::Python { .. }));
        for (at, frame) in thread.frames.iter().enumerate() {
            // Between Python frames the interpreter's own say nothing new.
            if !shows_all && first_python.is_some_and(|first| at > first) && is_of_interpreter(frame, stacks)
            {
                continue;
            }
            writeln!(out, "    {}", shown(frame, stacks))?;
        }
        if !thread.frames.is_empty() && !matches!(thread.how, How::None(_)) {
            match thread.end {
                End::Whole => {}
                End::NoTable => {
                    writeln!(out, "    ... outer native frames unknown: no unwind table for the last one")?
                }
                End::Unknown => writeln!(
                    out,
                    "    ... outer native frames unknown: they need the registers of a stopped thread"
                )?,
                End::TooLarge => {
                    writeln!(out, "    ... outer native frames not read: the stack is too large")?
                }
                End::Damaged => writeln!(
                    out,
                    "    ... outer native frames unknown: the stack does not match its unwind table"
                )?,
            }
        }
    }
    Ok(())
}

fn is_of_interpreter(frame: &Frame, stacks: &Stacks) -> bool {
    let Frame::Native { module: Some(id), .. } = frame else { return false };
    let path = stacks.modules.get(id.0 as usize).map_or("", |module| &module.path);
    let name = path.rsplit('/').next().unwrap_or_default();
    name == "python" || name.starts_with("python3") || name.starts_with("libpython3")
}

fn shown(frame: &Frame, stacks: &Stacks) -> String {
    match frame {
        Frame::Python { function, file, line } => format!("{function} ({file}:{line})"),
        Frame::Native { address, module, function, file, line, .. } => {
            let module = module.and_then(|id| stacks.modules.get(id.0 as usize));
            let module =
                module.and_then(|module| module.path.rsplit('/').next()).unwrap_or("code without a file");
            match (function.as_str(), file.as_str()) {
                ("", _) => format!("{address:#x} ({module})"),
                (function, "") => format!("{function} ({module})"),
                (function, file) => format!("{function} ({file}:{line})"),
            }
        }
    }
}
