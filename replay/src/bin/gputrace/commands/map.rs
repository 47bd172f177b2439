//! `gputrace map`: one verb over many traces, each where it lies, on an engine that the cluster already has.
//!
//! ```text
//!   traces x options = tasks ──┬ local: processes here
//!                              ├ ray, dask: `python -m gputrace.executors`, which hands tasks to workers
//!                              └ slurm: array jobs, each of which runs its tasks as `local` does
//!   files of tasks, map.json: the same bytes whoever ran them, and however often
//! ```

mod local;
mod plan;
mod python;
mod slurm;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{ArgMatches, Args, ValueEnum};
use gputrace_schemas::printable::Screen;

use self::plan::{Plan, Task};
use super::Verb;
use crate::objects;
use crate::show::{self, complain};

pub(super) const VERB: Verb = Verb::new::<MapArgs>("map", run);

/// Run a verb on many traces without moving them, with local processes, Ray, Dask or Slurm
///
/// Each trace is one task, or one per --with. The output of each task is a file in the folder -o, and `map.json` lists tasks,
/// files and exit statuses. Summaries from `reduce` are there under their own names. The files are the same with every
/// engine, and tasks of lost workers run again.
#[derive(Args)]
#[command(after_help = "\
Examples:
  gputrace map -o summaries/ reduce -- job/
  gputrace map --executor ray -o grid/ --with '--policy torch' --with '--policy torch:expandable_segments:True' replay --json -- job/
  gputrace map --executor slurm --sbatch=--partition=gpu -o summaries/ reduce -- node17:/local/traces node18:/local/traces
  gputrace ranks summaries/

Ray and Dask need the Python package: pip install 'gputrace[ray]' or 'gputrace[dask]'. Slurm needs -o on a disk \
that all its hosts share.")]
pub(super) struct MapArgs {
    /// Engine that runs the tasks
    #[arg(long, value_enum, value_name = "ENGINE", default_value = "local")]
    executor: Executor,

    /// Ray or Dask to use, as in ray.init(address=…) and Client(…) [default: from Ray's own variables, or a new one here]
    #[arg(long, value_name = "ADDRESS")]
    address: Option<String>,

    /// Python that has Ray or Dask, and this package
    #[arg(long, value_name = "FILE", default_value = "python3")]
    python: PathBuf,

    /// Option for sbatch, as --sbatch=--partition=gpu (repeatable)
    #[arg(long, value_name = "OPTION", allow_hyphen_values = true)]
    sbatch: Vec<String>,

    /// Output folder; files of the same tasks are replaced
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,

    /// More options for the verb; each --with makes one task per trace (repeatable)
    #[arg(long = "with", value_name = "OPTIONS", allow_hyphen_values = true)]
    grid: Vec<String>,

    /// Maximum concurrent tasks [default: one per processor; Slurm decides]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Option<u32>,

    /// Verb with its options, --, and traces, snapshots, summaries or folders of them; HOST:/PATH is read on that host
    #[arg(
        required_unless_present = "plan",
        value_name = "VERB",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    rest: Vec<OsString>,

    /// For array jobs: the list of tasks
    #[arg(long, hide = true, requires = "task")]
    plan: Option<PathBuf>,
    /// For array jobs: the first of the tasks to run, and how far the next is
    #[arg(long, hide = true, num_args = 2)]
    task: Vec<usize>,
}

/// An engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Executor {
    /// Processes on this host
    Local,
    /// Ray
    Ray,
    /// Dask
    Dask,
    /// Slurm array jobs
    Slurm,
}

fn run(matches: &ArgMatches, out: &mut Screen) -> anyhow::Result<ExitCode> {
    let mut args: MapArgs = super::parsed(matches)?;
    if let (Some(path), [first, stride]) = (&args.plan, &args.task[..]) {
        return slurm::task(path, *first, *stride);
    }
    let url = objects::is_written(&args.output)?.then(|| args.output.clone());
    if let Some(url) = &url {
        if args.executor == Executor::Slurm {
            bail!(
                "Slurm jobs write to a folder that all hosts share: name one with -o, then run gputrace upload -o {} FOLDER",
                url.display()
            );
        }
        args.output = plan::folder_in(&std::env::temp_dir(), "gputrace-map")?;
    }
    let plan = plan_of(&args)?;
    let n_before = plan.tasks.len();
    let ran = match args.executor {
        Executor::Local => local::run(&plan),
        Executor::Ray => python::run(&args.python, "ray", args.address.as_deref(), &plan),
        Executor::Dask => python::run(&args.python, "dask", args.address.as_deref(), &plan),
        Executor::Slurm => slurm::run(&plan, &args.sbatch),
    };
    // Slurm's jobs say there why they failed.
    let is_done = ran.as_ref().is_ok_and(|outcomes| outcomes.len() == plan.tasks.len());
    let listed = ran.and_then(|outcomes| plan.finish(&outcomes).map(|()| outcomes));
    if is_done || args.executor != Executor::Slurm {
        let _ = std::fs::remove_dir_all(&plan.work);
    }
    let outcomes = listed?;
    let mut statuses: BTreeMap<i32, usize> = BTreeMap::new();
    for (idx, task) in plan.tasks.iter().enumerate() {
        match outcomes.get(&idx) {
            Some(outcome) => {
                *statuses.entry(outcome.status).or_default() += 1;
                // What is below the first line is advice on how to type it.
                if let Some(error) = outcome.error.lines().next().filter(|_| outcome.status > 1) {
                    complain!("{}: {}", task.name, error.trim_start_matches("gputrace: "));
                }
            }
            None => complain!("{}: its worker was lost {} times", task.name, plan.tries),
        }
    }
    if let Some(url) = &url {
        sent(&args.output, url)?;
        args.output.clone_from(url);
    }
    let n_lost = n_before - outcomes.len();
    let told = statuses.iter().map(|(status, n)| format!("{n} with status {status}"));
    let lost = (n_lost > 0).then(|| format!("{n_lost} lost"));
    let told: Vec<String> = told.chain(lost).collect();
    writeln!(out, "{}: {} tasks: {}", show::shown(&args.output), n_before, told.join(", "))?;
    let worst = statuses.keys().next_back().copied().unwrap_or(0).max(if n_lost > 0 { 2 } else { 0 });
    Ok(ExitCode::from(u8::try_from(worst).unwrap_or(2)))
}

/// Writes the files of a folder as objects, and removes it.
fn sent(folder: &Path, url: &Path) -> anyhow::Result<()> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    // The list comes last: whoever finds it finds all.
    files.sort_by_key(|path| path.ends_with("map.json"));
    for file in files.iter().filter(|path| path.is_file()) {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        let to =
            format!("{}/{}", url.to_string_lossy().trim_end_matches('/'), gputrace_objects::encoded(&name));
        objects::put(file, Path::new(&to))?;
    }
    std::fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}

/// All tasks, in the order in which they are listed.
fn plan_of(args: &MapArgs) -> anyhow::Result<Plan> {
    // Engines take lists of text.
    let text = |word: &OsString| match word.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => bail!("{}: an engine cannot take a name that is not UTF-8", word.display()),
    };
    let rest = args.rest.iter().map(text).collect::<anyhow::Result<Vec<String>>>()?;
    text(&args.output.clone().into_os_string())?;
    let at = rest.iter().position(|word| word == "--").filter(|at| *at + 1 < rest.len());
    let Some(at) = at else { bail!("no traces: gputrace map -o DIR VERB [OPTIONS] -- TRACE…") };
    let (verb, named) = (&rest[..at], &rest[at + 1..]);
    let Some((verb, options)) = verb.split_first() else { bail!("no verb before the traces") };
    let is_known = super::VERBS.iter().any(|known| known.name == *verb);
    if !is_known || verb == VERB.name {
        bail!(
            "`{verb}` cannot be mapped over traces: name a verb that takes one trace, such as reduce, replay, tune or leaks"
        );
    }
    let mut grid = args.grid.iter().map(|more| words(more)).collect::<anyhow::Result<Vec<_>>>()?;
    if grid.is_empty() {
        grid.push(vec![]);
    }
    std::fs::create_dir_all(&args.output)
        .with_context(|| format!("cannot make the folder {}", args.output.display()))?;
    let mut plan = Plan {
        program: std::env::current_exe().context("cannot find this program's own path")?,
        output: std::path::absolute(&args.output)?,
        work: plan::folder_in(&std::path::absolute(&args.output)?, ".map")?,
        tries: 3,
        jobs: args.jobs.map(|jobs| jobs as usize),
        tasks: vec![],
    };
    let ending = if options.iter().any(|option| option == "--json") { "json" } else { "txt" };
    let mut taken: BTreeMap<String, usize> = BTreeMap::new();
    for (host, trace) in traces(named)? {
        let stem = Path::new(&trace).file_name().map_or_else(|| "root".into(), |name| name.to_string_lossy());
        let stem = stem.trim_end_matches(".gtr").to_owned();
        let stem = host.as_ref().map_or_else(|| stem.clone(), |host| format!("{host}.{stem}"));
        for (idx, more) in grid.iter().enumerate() {
            let part = if grid.len() > 1 { format!(".{idx}") } else { String::new() };
            let same = taken.entry(format!("{stem}{part}")).or_default();
            *same += 1;
            let again = if *same > 1 { format!(".again{}", *same - 1) } else { String::new() };
            let arguments = [std::slice::from_ref(verb), options, &more[..]].concat();
            let name = format!("{stem}{part}{again}.{verb}.{ending}");
            plan.tasks.push(Task { name, host: host.clone(), arguments, trace: trace.clone() });
        }
    }
    Ok(plan)
}

/// Options as a shell would take them apart, without its variables and patterns.
fn words(text: &str) -> anyhow::Result<Vec<String>> {
    let (mut words, mut word, mut quote) = (vec![], None::<String>, None);
    for c in text.chars() {
        match (quote, c) {
            (None, ' ' | '\t' | '\n') => words.extend(word.take()),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (Some(open), _) if open == c => quote = None,
            _ => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        bail!("--with {text}: unclosed quotation mark");
    }
    words.extend(word);
    Ok(words)
}

/// Traces with the host that each must be read on. Folders of this host are gone through here.
fn traces(named: &[String]) -> anyhow::Result<Vec<(Option<String>, String)>> {
    let mut all = vec![];
    for name in named {
        if objects::is_url(Path::new(name)) {
            let found = show::paths(&[PathBuf::from(name)])?;
            all.extend(found.iter().map(|url| (None, url.to_string_lossy().into_owned())));
            continue;
        }
        if let Some((host, path)) = name.split_once(":/").filter(|(host, _)| is_host(host)) {
            all.push((Some(host.to_owned()), format!("/{path}")));
            continue;
        }
        if name == "-" {
            bail!("cannot map over standard input: name files");
        }
        for path in show::paths(&[PathBuf::from(name)])? {
            let path = std::path::absolute(&path)?;
            let Some(path) = path.to_str() else { bail!("{}: not UTF-8", path.display()) };
            all.push((None, path.to_owned()));
        }
    }
    Ok(all)
}

/// A name of a host, and not the beginning of a path or of an address.
fn is_host(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_taken_apart_as_by_a_shell() {
        let taken = |text| words(text).map_err(|_| ());
        let texts = |all: &[&str]| Ok(all.iter().map(|&word| word.to_owned()).collect::<Vec<_>>());
        assert_eq!(
            taken("--policy torch  --limit '10 GiB'"),
            texts(&["--policy", "torch", "--limit", "10 GiB"])
        );
        assert_eq!(taken("\"\" a"), texts(&["", "a"]));
        assert_eq!(taken(" "), texts(&[]));
        assert_eq!(taken("'a"), Err(()));
    }

    #[test]
    fn a_host_stands_before_an_absolute_path() {
        let named = ["node-17.cluster:/local/traces".to_owned()];
        let found = traces(&named).expect("nothing is read");
        assert_eq!(found, [(Some("node-17.cluster".to_owned()), "/local/traces".to_owned())]);
        assert!(!is_host("a/b") && !is_host(""));
    }
}
