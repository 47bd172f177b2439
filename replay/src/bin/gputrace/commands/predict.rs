//! `gputrace predict`: what a program would need at another batch, length or size.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{ArgMatches, Args};
use gputrace_replay::answers::Reply;
use gputrace_replay::answers::predict::{Answer, Asked, OfProcess, Recorded, Values, predict};
use gputrace_replay::answers::predict_ranks::{Predicted, joined};
use gputrace_replay::import;
use gputrace_replay::report::model::Report;
use gputrace_replay::trace::source::Source;
use gputrace_schemas::printable::Screen;
use gputrace_sim::cores::on_all_cores;

use self::job::Job;
use self::runs::{Runs, words};
use self::search::Search;
use super::Verb;
use super::export::check_place;
use super::html::write_with;
use super::replay::MachineArgs;
use crate::show::{self, ShowArgs, complain, shown};
use crate::working::Working;

mod job;
mod runs;
mod search;

pub(super) const VERB: Verb = Verb::new::<PredictArgs>("predict", run).of_replays();

const ONE_PROCESS: &str = "--html needs one trace per run: its page shows one process";

/// Most points of one range.
const MOST_POINTS: u64 = 64;

/// Predict the memory of a larger batch, sequence or image from runs of smaller ones
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace predict batch=4:small.gtr batch=8:large.gtr --at batch=32
  gputrace predict batch=4,seq=256:a.gtr batch=8,seq=256:b.gtr batch=4,seq=512:c.gtr --at batch=32,seq=2048
  gputrace predict batch=4:a.gtr batch=8:b.gtr --at batch=8..128 --limit 80GiB
  gputrace predict batch=4:a.gtr batch=8:b.gtr --fit batch --limit 80GiB
  gputrace predict batch=4:a.gtr batch=8:b.gtr --at batch=32 --html predicted.html
  gputrace predict batch=4:job4/ batch=8:job8/ --at batch=32
  gputrace predict batch=4 batch=8 --fit batch -- python train.py --batch {batch}")]
pub(super) struct PredictArgs {
    /// Values and traces of at least two runs of a program, and one more per further variable. TRACE is a trace or PyTorch
    /// snapshot (plain or .gz) of one process, or a folder with one per rank. Runs without one, such as batch=4, are recorded first
    #[arg(required = true, num_args = 2.., value_name = "NAME=N[,NAME=N]:TRACE", value_parser = OsStringValueParser::new().try_map(recorded))]
    runs: Vec<Run>,

    /// Values to predict (repeatable): `batch=8..64` doubles, `batch=8..64:8` adds 8, and three or more also draw a curve.
    /// Omitted variables are as in the largest run
    #[arg(long, value_name = "NAME=N[,NAME=N]", value_parser = points, required_unless_present = "fit")]
    at: Vec<Vec<Values>>,

    /// Find the largest value of this variable that fits --limit or --device-memory, with the recorded and advised allocator
    /// settings, or with each --policy
    #[arg(long, value_name = "NAME")]
    fit: Option<String>,

    /// Allocator to simulate (repeatable); see `gputrace replay --policy help` [default: as recorded]
    #[arg(long, value_name = "NAME[:OPTIONS]")]
    policy: Vec<String>,

    /// Also write a page: the largest run, as in `gputrace html`, with these tables
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Overwrite existing files
    #[arg(short = 'F', long, requires = "html")]
    force: bool,

    #[command(flatten)]
    machine: MachineArgs,

    #[command(flatten)]
    show: ShowArgs,

    /// Folder for traces and output of the runs of COMMAND
    #[arg(long, value_name = "DIR", default_value = "predict-runs")]
    traces: PathBuf,

    /// Maximum runs of COMMAND to prove the answer of --fit
    #[arg(long, value_name = "N", default_value_t = 8)]
    most_runs: usize,

    /// Program for runs without a trace, with {batch} for the value of batch. With --fit, it also runs larger values, until
    /// runs of the largest that fits, and of the next, prove the answer
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// A run as the command line names it: its values, and its trace where it has one.
pub(super) type Run = (Values, Option<PathBuf>);

/// The values before a trace's name, which may be any bytes, and the name.
fn after_values(argument: &OsStr) -> Option<(&str, PathBuf)> {
    let bytes = argument.as_bytes();
    let colon = bytes.iter().position(|byte| *byte == b':')?;
    let values = std::str::from_utf8(&bytes[..colon]).ok().filter(|values| values.contains('='))?;
    Some((values, PathBuf::from(OsStr::from_bytes(&bytes[colon + 1..]))))
}

fn recorded(argument: OsString) -> Result<Run, String> {
    let alone = || argument.to_str().filter(|text| text.contains('=') && !text.contains(':'));
    let after = after_values(&argument).map(|(values, path)| (values, Some(path)));
    let (values, path) = after.or_else(|| Some((alone()?, None))).ok_or_else(|| {
        let text = argument.to_string_lossy();
        format!("`{text}` does not give the values of the run; write batch=4:{text}")
    })?;
    let values = values.split(',').map(|pair| {
        let (name, value) = named(pair)?;
        Ok((name, whole(value)?))
    });
    Ok((values.collect::<Result<_, String>>()?, path))
}

fn named(pair: &str) -> Result<(String, &str), String> {
    let (name, value) =
        pair.split_once('=').ok_or_else(|| format!("`{pair}` has no value; write batch=4"))?;
    match name.is_empty() {
        true => Err(format!("`{pair}` has no name; write batch=4")),
        false => Ok((name.to_owned(), value)),
    }
}

fn whole(text: &str) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| (1..=1 << 40).contains(number));
    number.ok_or_else(|| format!("`{text}` is not a whole number from 1 on"))
}

/// Every point of ranges.
fn points(text: &str) -> Result<Vec<Values>, String> {
    let mut points: Vec<Values> = vec![vec![]];
    for pair in text.split(',') {
        let (name, values) = named(pair)?;
        let values = range(values)?;
        let with = |point: &Values| {
            let longer = |value: &u64| [&point[..], &[(name.clone(), *value)]].concat();
            values.iter().map(longer).collect::<Vec<_>>()
        };
        points = points.iter().flat_map(with).collect();
        if points.len() as u64 > MOST_POINTS {
            return Err(format!("`{text}` is more than {MOST_POINTS} points"));
        }
    }
    Ok(points)
}

fn range(text: &str) -> Result<Vec<u64>, String> {
    let Some((from, to)) = text.split_once("..") else { return Ok(vec![whole(text)?]) };
    let (to, step) = to.split_once(':').map_or((to, None), |(to, step)| (to, Some(step)));
    let (from, to) = (whole(from)?, whole(to)?);
    let step = step.map(whole).transpose()?;
    if from > to {
        return Err(format!("`{text}` ends before it begins"));
    }
    let next = |value: &u64| step.map_or(value * 2, |step| value + step);
    let mut values: Vec<u64> = std::iter::successors(Some(from), |value| Some(next(value)))
        .take_while(|value| *value <= to)
        .take(MOST_POINTS as usize + 1)
        .collect();
    if values.last() != Some(&to) {
        values.push(to);
    }
    Ok(values)
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let args: PredictArgs = super::parsed(matches)?;
    let mut asked = Asked {
        at: args.at.concat(),
        fit: args.fit,
        policies: args.policy,
        machine: args.machine.machine(),
        ..Asked::default()
    };
    if let Some(html) = &args.html {
        if args.runs.iter().filter_map(|(_, path)| path.as_ref()).any(|path| show::is_folder(path)) {
            bail!("{ONE_PROCESS}");
        }
        check_place(html, args.force)?;
    }
    let Made { maker, mut runs } = made(args.runs, args.command, args.traces)?;
    if let Some(maker) = maker.filter(|_| asked.fit.is_some()) {
        let mut search = Search { maker, asked: &mut asked, runs: &mut runs, most_runs: args.most_runs };
        search.check()?;
    }
    if args.html.is_some() && runs.iter().any(|(_, path)| show::is_folder(path)) {
        bail!("{ONE_PROCESS}");
    }
    let reply = reply(&runs, &asked)?;
    if let Some(html) = &args.html {
        let base = runs.iter().find(|(_, path)| reply.answer.process.base == path.display().to_string());
        let (_, base) = base.context("none of the runs is the one that was extrapolated")?;
        write_with(&reply.part.sections, base, html, args.force)?;
    }
    let report = Report { verb: "predict", parts: vec![reply.part] };
    args.show.write_answer(&report, &reply.answer, out)?;
    Ok(ExitCode::SUCCESS)
}

/// All runs with their traces, and what makes more.
struct Made {
    maker: Option<Runs>,
    runs: Vec<(Values, PathBuf)>,
}

/// Makes the runs that have no trace.
fn made(runs: Vec<Run>, command: Vec<OsString>, traces: PathBuf) -> anyhow::Result<Made> {
    let mut names: Vec<String> =
        runs.iter().flat_map(|(values, _)| values).map(|(name, _)| name.clone()).collect();
    names.sort();
    names.dedup();
    let maker = if command.is_empty() { None } else { Some(Runs::new(command, traces, &names)?) };
    let traced = runs.into_iter().map(|(values, path)| {
        let path = match (path, &maker) {
            (Some(path), _) => path,
            (None, None) => {
                bail!(
                    "{0} has no trace: write {0}:TRACE, or add a command that makes it, after --",
                    words(&values)
                )
            }
            (None, Some(maker)) => {
                let made = maker.make(&values)?;
                if !made.fits {
                    bail!("{} ran out of memory: start with smaller values", words(&values));
                }
                made.traces
            }
        };
        Ok((values, path))
    });
    let runs = traced.collect::<anyhow::Result<Vec<_>>>()?;
    Ok(Made { maker, runs })
}

fn reply(runs: &[(Values, PathBuf)], asked: &Asked) -> anyhow::Result<Reply<Answer>> {
    match runs.iter().filter(|(_, path)| show::is_folder(path)).count() {
        0 => of_process(runs, asked).map(Answer::of_process),
        n if n == runs.len() => of_job(runs, asked),
        _ => bail!("name one folder per run, or one trace per run: the same rank of all"),
    }
}

fn of_process(runs: &[(Values, PathBuf)], asked: &Asked) -> anyhow::Result<Reply<OfProcess>> {
    let read = |index: usize| runs.get(index).map(|(values, path)| read(values, path));
    let _working = runs.first().map(|(_, path)| Working::on(path));
    let runs = on_all_cores(runs.len(), read).into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    predict(&runs, asked).map_err(|why| anyhow!(why))
}

/// One rank after the other: what is read of one is let go before the next.
fn of_job(runs: &[(Values, PathBuf)], asked: &Asked) -> anyhow::Result<Reply<Answer>> {
    let job = Job::of(runs)?;
    let predicted = job.ranks.into_iter().map(|(rank, runs)| {
        let reply = of_process(&runs, asked).map_err(|error| format!("{error:#}"));
        Predicted { rank, reply }
    });
    joined(predicted.collect(), &job.missing).map_err(|why| anyhow!(why))
}

fn read(values: &Values, path: &Path) -> anyhow::Result<Recorded> {
    let trace = import::load(path)?;
    trace.notes.iter().for_each(|note| complain!("{}: {note}", path.display()));
    if trace.devices.is_empty() {
        bail!("{}: it holds no device memory", shown(path));
    }
    // A snapshot names no GPU, and reading it again takes as long as the first time.
    let source = (!import::is_pickle(path)).then(|| Source::open(path).ok()).flatten();
    let devices = source.map(|source| source.devices().to_vec()).unwrap_or_default();
    let is_used =
        |ordinal: i16| trace.devices.iter().any(|stream| i64::from(stream.device) == i64::from(ordinal));
    let used = devices.into_iter().filter(|device| is_used(device.ordinal));
    let gpus = used.map(|device| device.name).collect();
    Ok(Recorded { path: path.display().to_string(), values: values.clone(), trace, gpus })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_double_or_step_and_end_where_they_say() {
        assert_eq!(range("8..64").unwrap(), [8, 16, 32, 64]);
        assert_eq!(range("8..50").unwrap(), [8, 16, 32, 50]);
        assert_eq!(range("8..32:8").unwrap(), [8, 16, 24, 32]);
        assert_eq!(points("b=1..2,s=3..6").unwrap().len(), 4);
        for wrong in ["b=0", "b=64..8", "b", "=4", "b=1..1000:1", "b=x"] {
            assert!(points(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_run_has_values_before_its_file() {
        let (values, path) = recorded("batch=4,seq=256:/a/b:c.gtr".into()).unwrap();
        assert_eq!(values, [("batch".into(), 4), ("seq".into(), 256)]);
        assert_eq!(path.as_deref(), Some(Path::new("/a/b:c.gtr")));
        assert_eq!(recorded("batch=4".into()).unwrap(), (vec![("batch".into(), 4)], None));
        assert!(recorded("small.gtr".into()).is_err() && recorded("batch:small.gtr".into()).is_err());
    }
}
