//! Tasks as array jobs of Slurm, on a folder that its hosts share. <https://slurm.schedmd.com/job_array.html>
//!
//! An array's element runs every so many-th task, as `gputrace map --plan FILE --task FIRST STRIDE`, and leaves a file for each that
//! was run to its end. Tasks without one are handed in again.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};

use super::local;
use super::plan::{Outcome, Outcomes, Plan, put};
use crate::show::complain;

/// Elements of an array, at most: below Slurm's own default of 1,001 (MaxArraySize, slurm.conf(5)).
const MOST_ELEMENTS: usize = 1000;
/// Elements for each that may run at once: starting one takes about a second, and the last to end should be short.
const FOR_EACH: usize = 4;

pub(super) fn run(plan: &Plan, options: &[String]) -> anyhow::Result<Outcomes> {
    let mut outcomes = Outcomes::new();
    for attempt in 0..plan.tries {
        let mut by_host: BTreeMap<Option<&str>, Vec<usize>> = BTreeMap::new();
        for (idx, task) in plan.tasks.iter().enumerate().filter(|(idx, _)| !outcomes.contains_key(idx)) {
            by_host.entry(task.host.as_deref()).or_default().push(idx);
        }
        if by_host.is_empty() {
            break;
        }
        let mut waiting = vec![];
        for (at, (host, tasks)) in by_host.into_iter().enumerate() {
            let part =
                Plan { tasks: tasks.iter().map(|idx| plan.tasks[*idx].clone()).collect(), ..plan.clone() };
            let path = plan.work.join(format!("{attempt}.{at}.json"));
            put(&path, &plan.work, &serde_json::to_vec(&part)?)?;
            waiting.push((path.clone(), tasks, submitted(&part, &path, host, options)?));
        }
        for (path, tasks, mut child) in waiting {
            // The status is that of the element that ended worst; what each left says more.
            let status = child.wait().context("sbatch")?;
            let n_before = outcomes.len();
            for (of_part, idx) in tasks.into_iter().enumerate() {
                if let Some(outcome) = left(&path, of_part) {
                    outcomes.insert(idx, outcome);
                }
            }
            if outcomes.len() == n_before && !status.success() && attempt + 1 == plan.tries {
                complain!("sbatch: {status}; what its jobs said is in {}", plan.work.display());
                return Ok(outcomes);
            }
        }
    }
    Ok(outcomes)
}

/// Hands in an array for the tasks of a part, all of one host or of any, and waits in a process of its own.
fn submitted(
    part: &Plan,
    path: &Path,
    host: Option<&str>,
    options: &[String],
) -> anyhow::Result<std::process::Child> {
    let most = part.jobs.map_or(MOST_ELEMENTS, |jobs| jobs.saturating_mul(FOR_EACH).min(MOST_ELEMENTS));
    let n = part.tasks.len().min(most);
    let at_once = part.jobs.map_or_else(String::new, |jobs| format!("%{jobs}"));
    let mut sbatch = Command::new("sbatch");
    sbatch.args(["--wait", "--parsable", "--requeue", "--job-name=gputrace"]);
    sbatch.arg(format!("--array=0-{}{at_once}", n - 1));
    sbatch.arg(format!("--output={}.%a.log", path.display()));
    sbatch.args(host.map(|host| format!("--nodelist={host}")));
    sbatch.args(options).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = match sbatch.spawn() {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("there is no sbatch on this host: run this where Slurm's commands are")
        }
        Err(error) => return Err(error).context("cannot run sbatch"),
    };
    let script = format!(
        "#!/bin/sh\nexec {} map -o {} --plan {} --task \"$SLURM_ARRAY_TASK_ID\" {n}\n",
        quoted(&part.program),
        quoted(&part.output),
        quoted(path)
    );
    let mut input = child.stdin.take().context("no way to sbatch")?;
    input.write_all(script.as_bytes()).context("cannot tell sbatch what to do")?;
    Ok(child)
}

fn quoted(path: &Path) -> String {
    format!("'{}'", path.to_string_lossy().replace('\'', "'\\''"))
}

/// Where an element says what became of a task.
fn ended(path: &Path, task: usize) -> PathBuf {
    path.with_extension(format!("{task}.ended"))
}

fn left(path: &Path, task: usize) -> Option<Outcome> {
    serde_json::from_slice(&std::fs::read(ended(path, task)).ok()?).ok()
}

/// An element of an array: every `stride`-th task from `first` on.
pub(super) fn task(path: &Path, first: usize, stride: usize) -> anyhow::Result<ExitCode> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let plan: Plan = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
    let mut status = ExitCode::SUCCESS;
    for idx in (first..plan.tasks.len()).step_by(stride.max(1)) {
        // Where the element was run again, what it did before need not be done.
        if left(path, idx).is_some() {
            continue;
        }
        match local::tried(&plan, idx)? {
            Some(outcome) => put(&ended(path, idx), &plan.work, &serde_json::to_vec(&outcome)?)?,
            None => status = ExitCode::FAILURE,
        }
    }
    Ok(status)
}
