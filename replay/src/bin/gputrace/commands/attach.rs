//! `gputrace attach`, `detach` and `ps`: a recording of a process that runs already, if its library sleeps in it.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{ArgMatches, Args, ValueEnum};
use gputrace_recorder::attach::{Answered, Page, Refusal, processes};
use gputrace_recorder::{late, variables};
use gputrace_schemas::printable::{Screen, printable};

use super::Verb;
use crate::show::{CANNOT_KNOW, complain};

pub(super) const VERB: Verb = Verb::new::<AttachArgs>("attach", attach);
pub(super) const DETACH: Verb = Verb::new::<DetachArgs>("detach", detach);
pub(super) const PS: Verb = Verb::new::<PsArgs>("ps", ps);

/// Name of the trace where nobody says otherwise: every attach makes a new one.
const DEFAULT: &str = "gputrace-%e.%h.%p.%n.gtr";
/// How long a recorder may take at least to name its trace.
const NAMING: Duration = Duration::from_secs(5);

/// Begins a recording of a process that runs already
///
/// If libgputrace.so sleeps in it (it was started with LD_PRELOAD=libgputrace.so and GPUTRACE=dormant), the recording begins with its
/// next call, and what it holds then is in the trace too, as of when it was given out. If not, the library is brought in: one of its
/// threads is stopped for less than a millisecond, no code is changed, and what it was given before is not in the trace (x86-64, glibc;
/// the same rights as for a debugger). `gputrace detach` ends the recording and leaves the process as it was; `gputrace ps` lists who can
/// be attached to, and why not.
#[derive(Args)]
#[command(after_help = "\
Examples:
  LD_PRELOAD=libgputrace.so GPUTRACE=dormant python train.py   # costs nothing until
  gputrace attach 4711                                         # ... somebody wants to know
  gputrace attach -o /tmp/grows.gtr --stacks all 4711")]
pub(super) struct AttachArgs {
    /// The process
    pid: u32,
    /// Where the trace goes, as for `record`; `gputrace-%e.%h.%p.%n.gtr` here by default
    #[arg(short, long, value_name = "PATTERN")]
    output: Option<String>,
    /// Which frames stacks have, as for `record`
    #[arg(long, value_enum)]
    stacks: Option<Stacks>,
    /// How long to wait for the process's next call, or for a thread of it that can be stopped, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u32,
}

/// Ends a recording that `attach` began
///
/// The trace is complete, the process runs on without being recorded, and can be attached to again.
#[derive(Args)]
#[command(after_help = "\
Example:
  gputrace detach 4711")]
pub(super) struct DetachArgs {
    /// The process
    pid: u32,
    /// How long to wait for the process's next call and for the trace, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u32,
}

/// Lists the processes of this machine that use a GPU, and whether they are or can be recorded
#[derive(Args)]
#[command(after_help = "\
Example:
  gputrace ps")]
pub(super) struct PsArgs {}

#[derive(Clone, Copy, ValueEnum)]
enum Stacks {
    None,
    Python,
    All,
}

fn attach(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: AttachArgs = super::parsed(matches)?;
    let pattern = std::path::absolute(args.output.as_deref().unwrap_or(DEFAULT))?;
    // A folder stays one to put traces into.
    let slash = args.output.as_deref().is_some_and(|it| it.ends_with('/')) || pattern.is_dir();
    let pattern =
        format!("{}{}", pattern.display(), if slash { format!("/{DEFAULT}") } else { String::new() });
    let name = |name: &std::ffi::CStr| name.to_string_lossy().into_owned();
    let mut options = vec![(name(variables::OUTPUT), pattern)];
    // The program that reads the answer is the one that writes the trace.
    options.push((name(variables::RECORDER), std::env::current_exe()?.display().to_string()));
    if let Some(stacks) = args.stacks {
        let word = ["none", "python", "all"][stacks as usize];
        options.push((name(variables::STACKS), word.to_owned()));
    }
    let pid = args.pid;
    // Without it only a library that is there can be asked.
    let library = super::record::library().unwrap_or_default();
    let patience = Duration::from_secs(args.timeout.into());
    let asked = late::find(pid, &library, patience).and_then(|page| {
        let answered = page.wake(&options, patience)?;
        Ok((page, answered))
    });
    let page = match asked {
        Ok((page, Answered::Yes)) => page,
        Ok((_, answered)) => return Ok(unanswered(pid, &answered, "the recording begins")),
        Err(refusal) => return Ok(refused(&refusal)),
    };
    let (known, unknown) = page.counts();
    let until = Instant::now() + NAMING.max(patience);
    let trace = loop {
        let trace = page.trace();
        if trace.is_some() || Instant::now() >= until {
            break trace;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let Some(trace) = trace else {
        complain!(
            "process {pid} records, but its recorder has not begun a trace: what it said is on the standard error of the process"
        );
        return Ok(ExitCode::from(CANNOT_KNOW));
    };
    writeln!(out, "recording process {pid} to {}", printable(&trace.display().to_string()))?;
    if page.is_late() {
        writeln!(out, "  what it was given before is not in it: the library has only just come")?;
        writeln!(
            out,
            "  gputrace detach {pid}   # ends it; gputrace top {} shows it meanwhile",
            short(&trace)
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    let lost = if unknown == 0 { String::new() } else { format!(", and {unknown} it had no room for") };
    writeln!(out, "  {known} allocations from before are in it{lost}")?;
    writeln!(out, "  gputrace detach {pid}   # ends it; gputrace top {} shows it meanwhile", short(&trace))?;
    Ok(ExitCode::SUCCESS)
}

fn detach(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: DetachArgs = super::parsed(matches)?;
    let (pid, patience) = (args.pid, Duration::from_secs(args.timeout.into()));
    let until = Instant::now() + patience;
    // Without it only a library that is there can be asked.
    let library = super::record::library().unwrap_or_default();
    let asked = Page::find(pid).and_then(|page| {
        let found = (page.trace(), page.ring(), page.recorder().filter(|it| lives(*it)));
        Ok((late::sleep(&page, pid, &library, patience)?, found))
    });
    let (trace, ring, recorder) = match asked {
        Ok((Answered::Yes, found)) => found,
        Ok((answered, _)) => return Ok(unanswered(pid, &answered, "the recording ends")),
        Err(refusal) => return Ok(refused(&refusal)),
    };
    let Some(recorder) = recorder else {
        let ring = ring.map(|it| printable(&it.display().to_string()).into_owned()).unwrap_or_default();
        complain!(
            "process {pid} is not recorded any more; its recorder is not to be seen here: if it was killed, `gputrace recover {ring}` makes a trace of what it left"
        );
        return Ok(ExitCode::from(CANNOT_KNOW));
    };
    while lives(recorder) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let trace = trace.unwrap_or_else(|| "its trace".into());
    let trace = printable(&trace.display().to_string()).into_owned();
    if lives(recorder) {
        complain!("process {pid} is not recorded any more; {trace} is still being written");
        return Ok(ExitCode::from(CANNOT_KNOW));
    }
    writeln!(
        out,
        "process {pid} is not recorded any more: {trace} is complete; next: gputrace report {trace}"
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Whether there is such a process here; a dead one that nobody has waited for is none.
fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']) && !rest.is_empty())
}

fn ps(_: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let seen = processes();
    if seen.is_empty() {
        writeln!(out, "no process that we may look at uses a GPU")?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "{:>8}  {:<15}  {:<10}  ", "PID", "NAME", "STATE")?;
    for process in seen {
        let (name, what) = (printable(&process.name), printable(&process.what));
        writeln!(out, "{:>8}  {name:<15}  {:<10}  {what}", process.pid, process.state)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn short(trace: &Path) -> String {
    let name = trace.file_name().unwrap_or_default().to_string_lossy().into_owned();
    printable(&name).into_owned()
}

fn unanswered(pid: u32, answered: &Answered, what: &str) -> ExitCode {
    match answered {
        Answered::Gone => complain!("process {pid} has ended"),
        Answered::Yes | Answered::NotYet => {
            complain!("process {pid} has made no call that we see since: {what} with its next");
        }
    }
    ExitCode::from(CANNOT_KNOW)
}

fn refused(refusal: &Refusal) -> ExitCode {
    complain!("{refusal}");
    ExitCode::from(CANNOT_KNOW)
}
