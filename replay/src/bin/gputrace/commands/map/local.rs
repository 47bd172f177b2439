//! Tasks as processes of this host.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::bail;

use super::plan::{Outcome, Outcomes, Plan};

pub(super) fn run(plan: &Plan) -> anyhow::Result<Outcomes> {
    let here = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_elsewhere = |host: &&String| host.as_str() != here.trim() && host.as_str() != "localhost";
    if let Some(host) = plan.tasks.iter().filter_map(|task| task.host.as_ref()).find(is_elsewhere) {
        bail!(
            "a trace of {host} cannot be read on {}: --executor ray, dask or slurm runs its task there",
            here.trim()
        );
    }
    let most = thread::available_parallelism().map_or(1, usize::from);
    let jobs = plan.jobs.unwrap_or(most).min(plan.tasks.len()).max(1);
    let (next, done) = (AtomicUsize::new(0), Mutex::new((Outcomes::new(), None)));
    let work = || {
        loop {
            let idx = next.fetch_add(1, Ordering::Relaxed);
            if idx >= plan.tasks.len() {
                return;
            }
            let outcome = tried(plan, idx);
            let Ok(mut done) = done.lock() else { return };
            match outcome {
                Ok(Some(outcome)) => drop(done.0.insert(idx, outcome)),
                Ok(None) => {}
                Err(error) => done.1 = Some(error),
            }
        }
    };
    thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
    match done.into_inner() {
        Ok((outcomes, None)) => Ok(outcomes),
        Ok((_, Some(error))) => Err(error),
        Err(_) => bail!("a task could not be followed"),
    }
}

/// Runs a task until its process ends by itself.
fn tried(plan: &Plan, idx: usize) -> anyhow::Result<Option<Outcome>> {
    for _ in 0..plan.tries {
        if let Some(outcome) = plan.tasks[idx].run(plan)? {
            return Ok(Some(outcome));
        }
    }
    Ok(None)
}
