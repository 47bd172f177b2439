//! `gputrace attach`, `detach` and `ps`: a recording of a process that runs already, if its library sleeps in it.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{ArgMatches, Args, ValueEnum};
use gputrace_recorder::attach::{Answered, Page, Refusal, Seen, processes};
use gputrace_recorder::left::Left;
use gputrace_recorder::opened::{Access, Expected, Identity, Links, opened};
use gputrace_recorder::{late, variables};
use gputrace_schemas::printable::{Screen, printable};
use gputrace_schemas::reader::Trace;
use serde_json::{Value, json};

use super::Verb;
use super::parts::beside::{self, Progress};
use super::parts::left;
use crate::show::{CANNOT_KNOW, complain};

pub(super) const VERB: Verb = Verb::new::<AttachArgs>("attach", attach);
pub(super) const DETACH: Verb = Verb::new::<DetachArgs>("detach", detach);
pub(super) const PS: Verb = Verb::new::<PsArgs>("ps", ps);

/// Name of the trace where nobody says otherwise: every attach makes a new one.
const DEFAULT: &str = "gputrace-%e.%h.%p.%n.gtr";
/// How long a recorder may take at least to name its trace.
const NAMING: Duration = Duration::from_secs(5);
/// How long a process is asked, at most, to unmap the ring that one of its threads was still writing to.
const TIDYING: Duration = Duration::from_secs(2);
/// How long `ps` may take: it looks at processes for 5 s, asks the driver, which may have to wake its cards, and reads what is left in memory.
const LISTING: Duration = Duration::from_secs(60);
/// Numbers of processes that a line names, at most.
const NAMED: usize = 10;
/// What attaching and detaching may take beside the waits that the user bounds.
const ELSE: Duration = Duration::from_secs(10);

/// Record a process that is already running
///
/// If it was started with LD_PRELOAD=$(gputrace library) and GPUTRACE=dormant, recording begins with its next call, and
/// the trace includes the memory that it already holds, with the time of allocation. Otherwise the library is loaded into
/// it, which needs x86-64, glibc and the permissions of a debugger. One thread stops for a moment, usually less than a
/// millisecond, and no code changes. Of earlier memory, the trace then has only PyTorch's blocks. `gputrace ps` lists the
/// processes that you can attach to, and `gputrace detach` ends the recording.
#[derive(Args)]
#[command(after_help = "\
Examples:
  LD_PRELOAD=$(gputrace library) GPUTRACE=dormant python train.py   # not recorded yet
  gputrace attach 4711                                              # records from now on
  gputrace attach -o /tmp/grows.gtr --stacks all 4711
  gputrace attach -o 'traces/%h.%p.%n.gtr' 4711                     # %n counts up with each attach
  gputrace attach --snapshot 4711                                   # what is held now")]
pub(super) struct AttachArgs {
    /// Process ID
    pid: u32,
    /// Folder for the trace, or name with the placeholders of `record --output`: %e, %h, %p, %n, ...
    /// [default: gputrace-%e.%h.%p.%n.gtr]
    #[arg(short, long, value_name = "PATTERN")]
    output: Option<String>,
    /// Call stacks to record, as for `record`
    #[arg(long, value_enum)]
    stacks: Option<Stacks>,
    /// Seconds to wait for the next call, or for a thread that can be stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u32,
    /// Record only what is held now, detach, and show `report --end`
    #[arg(long)]
    snapshot: bool,
    /// Run as the child that does the work
    #[arg(long, hide = true)]
    in_child: bool,
}

/// End a recording that `attach` began
///
/// The trace is then complete. The process runs on, and you can attach to it again.
#[derive(Args)]
#[command(after_help = "\
Example:
  gputrace detach 4711")]
pub(super) struct DetachArgs {
    /// Process ID
    pid: u32,
    /// Seconds to wait for the next call and for the trace
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u32,
    /// Run as the child that does the work
    #[arg(long, hide = true)]
    in_child: bool,
}

/// List the processes that use a GPU here, and whether they are or can be recorded
///
/// If a process cannot be recorded, `ps` shows why, and what to change. It also lists what recordings left in memory, and
/// what to do about it.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace ps
  gputrace ps --json | jq '.processes[] | select(.can_attach) | .pid'")]
pub(super) struct PsArgs {
    /// Write JSON (docs/schemas/ps.v1.json)
    #[arg(long)]
    json: bool,
    /// Run as the child that does the work
    #[arg(long, hide = true)]
    in_child: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Stacks {
    None,
    Python,
    All,
}

fn attach(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: AttachArgs = super::parsed(matches)?;
    let (patience, stuck) = bounds(args.pid, args.timeout);
    beside::run(args.in_child, Some(patience), &stuck, out, |out, progress| begun(&args, out, progress))
}

/// How long the child may look at the process: to bring the library in has seven steps that may take the user's time each. And what to say
/// when it takes longer.
fn bounds(pid: u32, timeout: u32) -> (Duration, String) {
    let patience = Duration::from_secs(timeout.into()).saturating_mul(8) + ELSE;
    let stuck = format!(
        "process {pid} cannot be inspected: its memory or files do not respond, as on a hanging file system (FUSE, NFS)"
    );
    (patience, stuck)
}

fn begun(args: &AttachArgs, out: &mut Screen, progress: &Progress) -> anyhow::Result<ExitCode> {
    let asked = args.output.as_deref().unwrap_or_default();
    let is_folder = asked.is_empty() || asked.ends_with('/') || Path::new(asked).is_dir();
    let pattern = if is_folder { Path::new(asked).join(DEFAULT) } else { asked.into() };
    // The recorder runs elsewhere, and the name of this folder is not a pattern.
    let here = std::env::current_dir()?.display().to_string().replace('%', "%%");
    let pattern = std::path::absolute(Path::new(&here).join(pattern))?.display().to_string();
    gputrace_recorder::check_pattern(&pattern)?;
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
        Ok((_, answered)) => return Ok(unanswered(pid, &answered, "the recording starts")),
        Err(refusal) => return Ok(refused(&refusal)),
    };
    let (known, unknown) = page.counts();
    let Some((trace, file)) = named(&page, patience) else {
        // Nothing is half done: a process whose events nobody reads sleeps.
        let is_asleep = late::sleep(&page, pid, &library, patience);
        let now = if matches!(is_asleep, Ok(Answered::Yes)) {
            "it is not recorded"
        } else {
            "gputrace detach ends it"
        };
        complain!(
            "the recorder of process {pid} has not started a trace, and reported why on the process's standard error: {now}"
        );
        return Ok(ExitCode::from(CANNOT_KNOW));
    };
    if args.snapshot {
        // Its lock keeps others away, ourselves included.
        drop(page);
        return match end(pid, patience)? {
            Ok(_) => {
                progress.has_looked();
                if !is_here(&trace, file) {
                    let trace = printable(&trace.display().to_string()).into_owned();
                    complain!(
                        "process {pid} was recorded to {trace}, which is another file here: its trace was moved, or is in its container"
                    );
                    return Ok(ExitCode::from(CANNOT_KNOW));
                }
                super::report::of_the_end(&trace, out)
            }
            Err(unable) => Ok(unable),
        };
    }
    writeln!(out, "recording process {pid} to {}", printable(&trace.display().to_string()))?;
    if page.is_late() {
        writeln!(
            out,
            "  the library was loaded just now: of earlier allocations, it knows those that PyTorch's allocator lists (gputrace doctor)"
        )?;
        let (times, micros) = late::stood_still();
        if times != 0 {
            writeln!(out, "  one of its threads was stopped {times} times, for at most {micros} µs")?;
        }
    } else {
        let lost = if unknown == 0 { String::new() } else { format!(", but {unknown} did not fit") };
        writeln!(out, "  {known} earlier allocations are in it{lost}")?;
    }
    writeln!(out, "  gputrace detach {pid}   # ends it; gputrace top {} shows it meanwhile", short(&trace))?;
    Ok(ExitCode::SUCCESS)
}

fn detach(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: DetachArgs = super::parsed(matches)?;
    let (patience, stuck) = bounds(args.pid, args.timeout);
    beside::run(args.in_child, Some(patience), &stuck, out, |out, _| ended(&args, out))
}

fn ended(args: &DetachArgs, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let (pid, patience) = (args.pid, Duration::from_secs(args.timeout.into()));
    let trace = match end(pid, patience)? {
        Ok(trace) => printable(&trace.display().to_string()).into_owned(),
        Err(unable) => return Ok(unable),
    };
    writeln!(out, "process {pid} is no longer recorded: {trace} is complete; next: gputrace report {trace}")?;
    Ok(ExitCode::SUCCESS)
}

/// Whether a trace's name leads to its file: a process can give the name to any other, also to one that only our caller may read, or have a
/// file system of its own.
fn is_here(trace: &Path, file: Identity) -> bool {
    opened(trace, Links::Followed, Access::Read, &Expected::regular().that_is(file)).is_ok()
}

/// The trace, once its recorder has begun it; `None` if it never does.
fn named(page: &Page, patience: Duration) -> Option<(PathBuf, Identity)> {
    let until = Instant::now() + NAMING.max(patience);
    loop {
        let is_gone = !page.recorder().is_some_and(lives);
        let trace = page.trace_and_file();
        if trace.is_some() || is_gone || Instant::now() >= until {
            return trace;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Ends the recording of a process, and waits for its trace; how to exit where that could not be, which was said.
fn end(pid: u32, patience: Duration) -> anyhow::Result<Result<PathBuf, ExitCode>> {
    let until = Instant::now() + patience;
    // Without it only a library that is there can be asked.
    let library = super::record::library().unwrap_or_default();
    let asked = Page::find(pid).and_then(|page| {
        let found = (page.trace_and_file(), page.ring(), page.recorder().filter(|it| lives(*it)));
        let answered = late::sleep(&page, pid, &library, patience)?;
        if answered == Answered::Yes {
            page.tidy(patience.min(TIDYING));
        }
        Ok((answered, found))
    });
    let (trace, ring, recorder) = match asked {
        Ok((Answered::Yes, found)) => found,
        Ok((answered, _)) => return Ok(Err(unanswered(pid, &answered, "the recording ends"))),
        Err(refusal) => return Ok(Err(refused(&refusal))),
    };
    let left = |what: &str| {
        let ring = ring.map(|it| printable(&it.display().to_string()).into_owned()).unwrap_or_default();
        complain!(
            "process {pid} is no longer recorded; its recorder {what}: if it was killed, `gputrace recover {ring}` makes a trace of the rest"
        );
        Ok(Err(ExitCode::from(CANNOT_KNOW)))
    };
    let Some(recorder) = recorder else { return left("is not visible here") };
    while lives(recorder) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let (trace, file) = trace.map_or_else(|| ("its trace".into(), None), |(trace, file)| (trace, Some(file)));
    if lives(recorder) {
        let trace = printable(&trace.display().to_string()).into_owned();
        complain!("process {pid} is no longer recorded; {trace} is still being written");
        return Ok(Err(ExitCode::from(CANNOT_KNOW)));
    }
    // One that cannot be read from here, as that of another container, is not known to lack its end.
    let is_here = file.is_some_and(|file| is_here(&trace, file));
    if is_here && Trace::open(&trace).is_ok_and(|trace| !trace.is_complete()) {
        return left("ended before its trace did");
    }
    Ok(Ok(trace))
}

/// Whether there is such a process here; a dead one that nobody has waited for is none.
fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with(['Z', 'X']) && !rest.is_empty())
}

fn ps(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: PsArgs = super::parsed(matches)?;
    let stuck =
        "processes cannot be listed: the memory or files of one of them, or the driver, do not respond";
    beside::run(args.in_child, Some(LISTING), stuck, out, |out, _| listed(&args, out))
}

fn listed(args: &PsArgs, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let (listing, left) = (processes(), Left::find());
    if args.json {
        let processes: Vec<Value> = listing.processes.iter().map(as_json).collect();
        let answer = json!({
            "schema": "gputrace.ps/1",
            "processes": processes,
            "unseen": listing.n_unseen,
            "not_reached": listing.not_reached,
            "rings": left::rings_as_json(&left),
            "logs": left::logs_as_json(&left),
            "rings_of_others": left.n_of_others,
        });
        writeln!(out.json(), "{answer}")?;
        return Ok(ExitCode::SUCCESS);
    }
    if listing.processes.is_empty() {
        writeln!(out, "no visible process uses a GPU")?;
    } else {
        writeln!(out, "{:>8}  {:<15}  {:<10}  ", "PID", "NAME", "STATE")?;
    }
    for process in &listing.processes {
        let trace = process.trace.as_ref().map(|trace| format!("to {}", trace.display()));
        let what: Vec<&str> =
            trace.iter().chain(&process.why).map(String::as_str).chain([&*process.remedy]).collect();
        let (name, what) = (printable(&process.name), what.join(": "));
        writeln!(out, "{:>8}  {name:<15}  {:<10}  {}", process.pid, process.state, printable(&what))?;
    }
    if listing.n_unseen != 0 {
        let n = listing.n_unseen;
        writeln!(
            out,
            "{n} processes cannot be inspected from here: root, outside containers, can see whether they use a GPU"
        )?;
    }
    if !listing.not_reached.is_empty() {
        writeln!(out, "{}", not_reached(&listing.not_reached))?;
    }
    let left = left::lines(&left);
    if !left.is_empty() {
        writeln!(out, "\nLeft behind in memory:")?;
    }
    for line in left {
        writeln!(out, "  {}", printable(&line))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn not_reached(pids: &[u32]) -> String {
    let named: Vec<String> = pids.iter().take(NAMED).map(u32::to_string).collect();
    let more = pids
        .len()
        .checked_sub(NAMED)
        .filter(|n| *n != 0)
        .map_or_else(String::new, |n| format!(" and {n} more"));
    let named = named.join(", ");
    format!("not inspected: {named}{more}, because inspecting others took too long (5 s in all); try again")
}

fn as_json(process: &Seen) -> Value {
    json!({
        "pid": process.pid,
        "own_pid": process.own_pid,
        "name": process.name,
        "user": process.user,
        "state": process.state,
        "can_attach": process.can_attach,
        "why": process.why,
        "remedy": process.remedy,
        "trace": process.trace.as_ref().map(|trace| trace.display().to_string()),
        "used_bytes": process.used,
    })
}

fn short(trace: &Path) -> String {
    let name = trace.file_name().unwrap_or_default().to_string_lossy().into_owned();
    printable(&name).into_owned()
}

fn unanswered(pid: u32, answered: &Answered, what: &str) -> ExitCode {
    match answered {
        Answered::Gone => complain!("process {pid} has ended"),
        Answered::Yes | Answered::NotYet => {
            complain!("process {pid} has made no visible call since: {what} with its next one");
        }
    }
    ExitCode::from(CANNOT_KNOW)
}

fn refused(refusal: &Refusal) -> ExitCode {
    complain!("{refusal}");
    ExitCode::from(CANNOT_KNOW)
}
