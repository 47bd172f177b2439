//! Tasks as array jobs of Slurm, on a folder that its hosts share. <https://slurm.schedmd.com/job_array.html>
//!
//! An array's element runs every so many-th task, as `gputrace map --plan FILE --task FIRST STRIDE`, and leaves a file for each that
//! was run to its end, and one that says how often it was begun. Tasks without the first are handed in again: what waited in an
//! element that was lost has not been tried.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::plan::{Outcome, Outcomes, Plan, put};
use crate::show::complain;

/// Elements of an array, at most: below Slurm's own default of 1,001 (MaxArraySize, slurm.conf(5)).
const MOST_ELEMENTS: usize = 1000;
/// Elements for each that may run at once: starting one takes about a second, and the last to end should be short.
const FOR_EACH: usize = 4;

/// The tasks of an array.
#[derive(Deserialize, Serialize)]
struct Part {
    plan: Plan,
    /// Those of the plan.
    numbers: Vec<usize>,
}

pub(super) fn run(plan: &Plan, options: &[String]) -> anyhow::Result<Outcomes> {
    let mut outcomes = Outcomes::new();
    for round in 0.. {
        let mut by_host: BTreeMap<Option<&str>, Vec<usize>> = BTreeMap::new();
        for (idx, task) in plan.tasks.iter().enumerate() {
            if !outcomes.contains_key(&idx) && times_begun(plan, idx) < plan.tries {
                by_host.entry(task.host.as_deref()).or_default().push(idx);
            }
        }
        if by_host.is_empty() {
            break;
        }
        let waiting: Vec<usize> = by_host.values().flatten().copied().collect();
        let n_begun = || waiting.iter().map(|idx| times_begun(plan, *idx)).sum::<u32>();
        let n_before = n_begun();
        let mut children = vec![];
        for (at, (host, numbers)) in by_host.into_iter().enumerate() {
            let path = plan.work.join(format!("{round}.{at}.json"));
            let part = Part { plan: plan.clone(), numbers };
            put(&path, &plan.work, &serde_json::to_vec(&part)?)?;
            children.push(submitted(&part, &path, host, options)?);
        }
        // The status is that of the element that ended worst; what each left says more.
        let mut worst = None;
        for mut child in children {
            let status = child.wait().context("sbatch")?;
            worst = Some(status).filter(|status| !status.success()).or(worst);
        }
        for idx in &waiting {
            outcomes.extend(left(plan, *idx).map(|outcome| (*idx, outcome)));
        }
        if n_begun() == n_before {
            let status = worst.map_or_else(|| "no task was started".to_owned(), |status| status.to_string());
            complain!("sbatch: {status}; the output of its jobs is in {}", plan.work.display());
            break;
        }
    }
    Ok(outcomes)
}

/// Hands in an array for the tasks of a part, all of one host or of any, and waits in a process of its own.
fn submitted(
    part: &Part,
    path: &Path,
    host: Option<&str>,
    options: &[String],
) -> anyhow::Result<std::process::Child> {
    let plan = &part.plan;
    let most = plan.jobs.map_or(MOST_ELEMENTS, |jobs| jobs.saturating_mul(FOR_EACH).min(MOST_ELEMENTS));
    let n = part.numbers.len().min(most);
    let at_once = plan.jobs.map_or_else(String::new, |jobs| format!("%{jobs}"));
    let mut sbatch = Command::new("sbatch");
    sbatch.args(["--wait", "--parsable", "--requeue", "--job-name=gputrace"]);
    sbatch.arg(format!("--array=0-{}{at_once}", n - 1));
    sbatch.arg(format!("--output={}.%a.log", path.display()));
    sbatch.args(host.map(|host| format!("--nodelist={host}")));
    sbatch.args(options).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = match sbatch.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("this host has no sbatch: run this on a host with Slurm's commands")
        }
        Err(error) => return Err(error).context("cannot run sbatch"),
    };
    let script = format!(
        "#!/bin/sh\nexec {} map -o {} --plan {} --task \"$SLURM_ARRAY_TASK_ID\" {n}\n",
        quoted(&plan.program),
        quoted(&plan.output),
        quoted(path)
    );
    let mut input = child.stdin.take().context("no pipe to sbatch")?;
    input.write_all(script.as_bytes()).context("cannot write to sbatch")?;
    Ok(child)
}

fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', "'\\''"))
}

/// Where an element says what became of a task.
fn ended(plan: &Plan, idx: usize) -> PathBuf {
    plan.work.join(format!("{idx}.ended"))
}

fn left(plan: &Plan, idx: usize) -> Option<Outcome> {
    serde_json::from_slice(&std::fs::read(ended(plan, idx)).ok()?).ok()
}

/// Where an element notes that it begins a task: a byte for each time.
fn begun(plan: &Plan, idx: usize) -> PathBuf {
    plan.work.join(format!("{idx}.begun"))
}

fn times_begun(plan: &Plan, idx: usize) -> u32 {
    std::fs::metadata(begun(plan, idx)).map_or(0, |file| u32::try_from(file.len()).unwrap_or(u32::MAX))
}

/// An element of an array: every `stride`-th task from `first` on.
pub(super) fn task(path: &Path, first: usize, stride: usize) -> anyhow::Result<ExitCode> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let Part { plan, numbers } = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
    let mut status = ExitCode::SUCCESS;
    for idx in numbers.into_iter().skip(first).step_by(stride.max(1)) {
        // Where the element was run again, what it did before need not be done.
        while left(&plan, idx).is_none() {
            if times_begun(&plan, idx) >= plan.tries {
                status = ExitCode::FAILURE;
                break;
            }
            let path = begun(&plan, idx);
            let noted = OpenOptions::new().append(true).create(true).open(&path);
            noted
                .and_then(|mut file| file.write_all(b"."))
                .with_context(|| format!("cannot write {}", path.display()))?;
            if let Some(outcome) = plan.tasks[idx].run(&plan)? {
                put(&ended(&plan, idx), &plan.work, &serde_json::to_vec(&outcome)?)?;
            }
        }
    }
    Ok(status)
}
