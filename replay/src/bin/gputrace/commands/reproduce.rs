//! `gputrace reproduce`: the smallest program that fails in the same way.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use clap::{ArgMatches, Args};
use gputrace_replay::answers::reproduce::{self, Goal, Progress, Reproduction, cuda};
use gputrace_replay::import::Requests;
use gputrace_replay::ranks::jobs;
use gputrace_replay::ranks::reproduce as collectives;
use gputrace_replay::report::model::{Mood, Part, Report, Section};
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;
use gputrace_sim::bytes::iec;
use gputrace_sim::ops::{Op, OpStream};
use serde::Serialize;
use serde_json::Value;

use super::Verb;
use super::export::{check_place, write_whole};
use super::replay::version;
use crate::show::{self, FILES, Named, ShowArgs, complain};
use crate::working::Working;

pub(super) const VERB: Verb = Verb::new::<ReproduceArgs>("reproduce", run);

/// Write the smallest program that fails in the same way and needs only PyTorch
///
/// It makes the requests of the trace, with their sizes, streams and pools, but only those that the simulated allocator needs
/// to fail. It has no code, name or path of the recorded program, so you can attach it to an issue.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace reproduce -o repro.py train.gtr
  gputrace reproduce -o repro.py --seconds 10 snapshot.pickle.gz
  gputrace reproduce -o repro.py --exact --whole train.gtr
  gputrace reproduce -o repro.py job/          # the collectives of a job that hangs, for torchrun
  gputrace reproduce -o repro.py --rank 3 job/
  gputrace reproduce --cuda -o repro.cpp app.gtr   # a refusal outside PyTorch: nvcc -o repro repro.cpp && ./repro
  python3 repro.py                             # 0 reproduced, 1 not reproduced, 2 cannot be tried here

If nothing was refused, the program reaches the same peaks of reserved and allocated bytes (docs/REPRODUCE.md).")]
pub(super) struct ReproduceArgs {
    /// Trace or PyTorch snapshot (plain or .gz); if the NCCL calls of ranks differ, all traces of the job, or their folder
    #[arg(required = true, value_name = "TRACE|DIR", value_hint = FILES)]
    traces: Vec<Named>,

    /// Python file to write (C++ with --cuda)
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Overwrite existing files
    #[arg(short = 'F', long)]
    force: bool,

    /// Reproduce the memory of this rank, not the collectives of the job
    #[arg(long, value_name = "N")]
    rank: Option<u32>,

    /// Device to reproduce [default: the one that ran out, or had most requests]
    #[arg(long, value_name = "ORDINAL")]
    device: Option<u32>,

    /// Stop shrinking after this long; if that is not reached, the result is the same on every machine
    #[arg(long, value_name = "N", default_value_t = 60.0, value_parser = seconds)]
    seconds: f64,

    /// Keep every request up to the refusal
    #[arg(long)]
    whole: bool,

    /// Also check where tensors lie in their segments
    #[arg(long)]
    exact: bool,

    /// Write C++ on the CUDA runtime, for a refusal outside PyTorch's allocator
    #[arg(long, conflicts_with_all = ["exact", "torch_version"])]
    cuda: bool,

    /// Omit the roles of tensors (parameters, activations, ...)
    #[arg(long)]
    no_roles: bool,

    /// PyTorch release to imitate [default: as recorded, or the best match]
    #[arg(long, value_name = "X.Y", value_parser = version)]
    torch_version: Option<(u8, u8)>,

    #[command(flatten)]
    show: ShowArgs,
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds >= 0.0);
    seconds.ok_or_else(|| format!("`{text}` is not a number of seconds, such as 60"))
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: ReproduceArgs = super::parsed(matches)?;
    check_place(&args.output, args.force)?;
    let paths = show::paths(&args.traces)?;
    let whole = |path: &Path| path.canonicalize().ok();
    if whole(&args.output)
        .is_some_and(|output| paths.iter().any(|path| whole(path).as_ref() == Some(&output)))
    {
        bail!("{} is the file to reproduce; name another file with -o", args.output.display());
    }
    let path = match (&paths[..], args.rank) {
        ([path], None) => path.clone(),
        (_, Some(rank)) => of_rank(&paths, rank)?,
        _ => return job(&args, &paths, out),
    };
    let shown = path.display().to_string();
    let _working = Working::on(&path);
    let source = Source::open(&path)?;
    if args.cuda {
        return driver(&args, &shown, &source, out);
    }
    let trace = source.requests().map_err(|error| anyhow!("{error}"))?;
    trace.notes.iter().for_each(|note| complain!("{shown}: {note}"));
    let stream = chosen(&trace.devices, args.device).map_err(|why| anyhow!("{shown}: {why}"))?;
    let roles = if args.no_roles { vec![] } else { reproduce::purposes(&source, stream) };
    let mut found = reproduced(&args, stream, &roles).map_err(|why| anyhow!("{shown}: {why}"))?;
    if let Goal::Peak { .. } = found.goal
        && let Ok(other) = cuda::reproduce(&source, Some(stream.device), false)
    {
        let refused = iec(other.refused.bytes);
        found.notes.push(format!(
            "outside PyTorch's allocator, the driver refused {refused}: --cuda reproduces this"
        ));
    }
    let text = reproduce::python(&found, !args.no_roles, args.exact);
    let n_lines = text.lines().count();
    write_whole(&args.output, args.force, |file| file.write_all(text.as_bytes()))?;
    let section = reproduce::section(stream.device, &found, n_lines)
        .line(Mood::Command, format!("python3 {}", args.output.display()));
    let program = reproduce::json(stream.device, &found, n_lines);
    told(&args, (shown.clone(), section), (shown, program), out)?;
    Ok(ExitCode::SUCCESS)
}

/// Tells of the program that was written: for people with a title, and for programs with its first trace.
fn told(
    args: &ReproduceArgs,
    (title, section): (String, Section),
    (trace, program): (String, Value),
    out: &mut Screen,
) -> anyhow::Result<()> {
    #[derive(Serialize)]
    #[serde(tag = "schema", rename = "gputrace.reproduce/1")]
    struct Answer {
        trace: String,
        output: String,
        #[serde(flatten)]
        program: Value,
    }
    let report =
        Report { verb: "reproduce", parts: vec![Part { title, sections: vec![section], ..Part::default() }] };
    let answer = Answer { trace, output: args.output.display().to_string(), program };
    show::unless_closed(args.show.write_answer(&report, &answer, out))
}

/// A refusal of the driver.
fn driver(args: &ReproduceArgs, shown: &str, source: &Source, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let found = cuda::reproduce(source, args.device, args.whole).map_err(|why| anyhow!("{shown}: {why}"))?;
    let text = cuda::cuda(&found);
    let n_lines = text.lines().count();
    write_whole(&args.output, args.force, |file| file.write_all(text.as_bytes()))?;
    let command = format!("nvcc -o repro {}{} && ./repro", args.output.display(), found.libraries());
    let section = cuda::section(&found, n_lines).line(Mood::Command, command);
    let program = cuda::json(&found, n_lines);
    told(args, (shown.to_owned(), section), (shown.to_owned(), program), out)?;
    Ok(ExitCode::SUCCESS)
}

/// The trace of a rank.
fn of_rank(paths: &[PathBuf], rank: u32) -> anyhow::Result<PathBuf> {
    for path in paths {
        if Source::open(path)?.definitions().process().rank == Some(rank) {
            return Ok(path.clone());
        }
    }
    bail!("none of {} traces is of rank {rank}", paths.len())
}

/// The collectives of a job whose ranks' calls differ.
fn job(args: &ReproduceArgs, paths: &[PathBuf], out: &mut Screen) -> anyhow::Result<ExitCode> {
    if args.cuda || args.whole || args.exact || args.device.is_some() || args.torch_version.is_some() {
        bail!(
            "for several traces, `reproduce` uses the NCCL calls of their job, and --cuda, --device, --exact, --torch-version and --whole do not apply; --rank N reproduces the memory of one rank"
        );
    }
    let (participants, all_read) = super::ranks::read(paths);
    let (jobs, _) = jobs::jobs(&participants);
    if jobs.len() > 1 {
        bail!("the traces are of {} jobs; name the traces of one", jobs.len());
    }
    let mut why = "the traces show no job that uses NCCL".to_owned();
    for job in &jobs {
        match collectives::collectives(&participants, job) {
            Err(error) => why = error,
            Ok(found) => {
                write_whole(&args.output, args.force, |file| file.write_all(found.text.as_bytes()))?;
                let section = collectives::section(&found).line(
                    Mood::Command,
                    format!("torchrun --nproc-per-node {} {}", found.n_ranks, args.output.display()),
                );
                let title = format!("{} traces", paths.len());
                let trace = args.traces[0].display().to_string();
                told(args, (title, section), (trace, collectives::json_of(&found)), out)?;
                return Ok(show::exit_code(all_read));
            }
        }
    }
    bail!("{why}; --rank N reproduces the memory of one rank")
}

/// The device to reproduce: the one that is named, that ran out, or that was asked for most.
fn chosen(devices: &[OpStream], wanted: Option<u32>) -> anyhow::Result<&OpStream> {
    if let Some(wanted) = wanted {
        let found = devices.iter().find(|stream| stream.device == wanted);
        return found.ok_or_else(|| anyhow!("it has no requests of device {wanted}"));
    }
    let torch = || devices.iter().filter(|stream| stream.settings.is_torch());
    let ran_out = torch().find(|stream| stream.ops.iter().any(|op| matches!(op, Op::Oom(_))));
    match ran_out.or_else(|| torch().max_by_key(|stream| stream.n_requests())) {
        Some(stream) => Ok(stream),
        None => bail!("it has no requests of PyTorch's allocator"),
    }
}

fn reproduced(
    args: &ReproduceArgs,
    stream: &OpStream,
    roles: &[Option<&'static str>],
) -> Result<Reproduction, String> {
    let begun = Instant::now();
    let budget = Duration::try_from_secs_f64(args.seconds).unwrap_or(Duration::MAX);
    let mut said = Instant::now();
    let mut watch = |progress: Progress| {
        if said.elapsed() > Duration::from_secs(2) {
            said = Instant::now();
            let Progress { n_requests, n_tried } = progress;
            complain!("{n_requests} requests left after {n_tried} programs, {} s", begun.elapsed().as_secs());
        }
        begun.elapsed() < budget
    };
    let watcher: Option<&mut reproduce::Watcher<'_>> = if args.whole { None } else { Some(&mut watch) };
    reproduce::reproduce(stream, args.torch_version, roles, watcher)
}
